"""Every row of every schedule is pinned here, with its source in words."""

import numpy as np
import pytest

from matrixfsdp_jax.linalg.coefficients import (
    SCHEDULES,
    Schedule,
    newton_schulz_schedule,
    newton_schulz_table,
    polar_express_rows,
)

PUBLISHED = {
    # Keller Jordan's Muon, one row for all steps.
    "keller": [(3.4445, -4.7750, 2.0315)],
    # Jiacheng You's five rows, as Dion and the Gram Newton-Schulz code have them.
    "you": [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
    # The textbook iteration.
    "cubic": [(1.5, -0.5, 0.0)],
    # DeepSeek-V4: eight of Keller's, two flat ones.
    "keller_polished": [(3.4445, -4.7750, 2.0315)] * 8 + [(2.0, -1.5, 0.5)] * 2,
    # Turbo-Muon's four rows.
    "aol": [
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ],
}
# The Polar Express paper's list for lower bound 1e-3, before its safety factor.
POLAR_EXPRESS = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
]
# The CANS paper's list of five, printed to four digits.
CANS = [
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
]


def values(rows, s):
    for a, b, c in rows:
        s = a * s + b * s**3 + c * s**5
    return s


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_rows(name):
    assert list(SCHEDULES[name].rows) == PUBLISHED[name]


def test_every_schedule_is_pinned_and_has_a_source():
    assert set(SCHEDULES) == {*PUBLISHED, "polar_express", "cans_schatten"}
    assert all(len(s.source) > 20 for s in SCHEDULES.values())
    starts = {name: s.start for name, s in SCHEDULES.items() if s.start != "frobenius"}
    assert starts == {"aol": "aol", "cans_schatten": "schatten4"}


def test_polar_express_is_the_published_list():
    np.testing.assert_allclose(polar_express_rows(7, safety=1.0), POLAR_EXPRESS, rtol=1e-9)
    assert polar_express_rows(9)[7:] == ((1.875, -1.25, 0.375),) * 2
    assert SCHEDULES["polar_express"].rows == polar_express_rows(8)
    assert newton_schulz_table("polar_express", 12) == polar_express_rows(12)


def test_without_cushion_it_is_the_cans_list():
    np.testing.assert_allclose(polar_express_rows(5, cushion=0, safety=1), CANS, atol=1e-4)


@pytest.mark.parametrize(("name", "factor"), [("polar_express", 1.01), ("cans_schatten", 1.02)])
def test_safety_factor_divides_the_argument(name, factor):
    rows = newton_schulz_table(name, 5)
    bare = polar_express_rows(5, safety=1.0, cushion=0.02407327424182761 if factor < 1.02 else 0.0)
    s = np.linspace(0, factor, 50)
    for row, raw in zip(rows, bare, strict=True):
        np.testing.assert_allclose(values([row], s), values([raw], s / factor), rtol=1e-12)


@pytest.mark.parametrize("lower", [0.3, 1e-2, 1e-3, 1e-5])
def test_recurrence_reaches_one_from_any_lower_bound(lower):
    s = np.geomspace(lower, 1, 500)
    rows = polar_express_rows(15, lower=lower, cushion=0.0, safety=1.0)
    np.testing.assert_allclose(values(rows, s), 1, atol=1e-12)


def test_each_step_is_minimax():
    # Equal and alternating errors at four points is what makes it the best odd quintic.
    low = 1e-3
    for row in polar_express_rows(4, lower=low, cushion=0.0, safety=1.0):
        error = values([row], np.linspace(low, 2 - low if low > 1e-3 else 1.0, 200_001)) - 1
        largest = np.abs(error).max()
        peaks = np.sign(error[np.abs(error) > (1 - 1e-6) * largest])
        assert np.count_nonzero(np.diff(peaks)) == 3
        low = 1 - largest


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 3, 5, 12])
def test_first_rows_and_last_repeated(name, steps):
    rows = SCHEDULES[name].rows
    schedule = newton_schulz_schedule(name, steps)
    assert schedule.rows == (rows + rows[-1:] * 12)[:steps]
    assert (schedule.start, schedule.source) == (SCHEDULES[name].start, SCHEDULES[name].source)


def test_cubic_flag():
    assert [n for n, s in SCHEDULES.items() if s.cubic] == ["cubic"]
    assert not Schedule(((1.5, -0.5, 0), (2, -1.5, 0.5))).cubic


def test_own_schedule():
    own = Schedule([[2, -1.5, 0.5]], start="aol")  # type: ignore[arg-type]
    assert newton_schulz_schedule(own, 2) == Schedule(((2.0, -1.5, 0.5),) * 2, start="aol")
    with pytest.raises(ValueError, match=r"start must be one of .*'schatten4'.*, got 'l2'"):
        Schedule(((2, -1.5, 0.5),), start="l2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one row"):
        Schedule(())


def test_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match=r"'kelvin'; known names: .*'polar_express'"):
        newton_schulz_schedule("kelvin")
