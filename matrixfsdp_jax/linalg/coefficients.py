"""Coefficient schedules of the Newton-Schulz iteration.

A row ``(a, b, c)`` is one step of the odd quintic ``X <- a X + b (X X^T) X + c (X X^T)^2 X``,
which maps every singular value ``s`` of ``X`` to ``a s + b s^3 + c s^5``.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

Row = tuple[float, float, float]
Start = Literal["frobenius", "aol", "schatten4"]

MAX_STEPS = 50

POLAR_EXPRESS_LOWER = 1e-3
POLAR_EXPRESS_CUSHION = 0.02407327424182761
SAFETY = 1.01


@dataclass(frozen=True)
class Schedule:
    """Rows of a Newton-Schulz iteration, and how a matrix is scaled before the first of them.

    Attributes:
      rows: one ``(a, b, c)`` per step.
      start: what follows the division by the Frobenius norm. ``"frobenius"``: nothing.
        ``"aol"``: row ``i`` is divided by ``sqrt(sum_j |X X^T|_ij)``, which bounds the spectral
        norm by 1 (Gershgorin) and is far tighter, but turns the singular vectors a little.
        ``"schatten4"``: the matrix is divided by ``sqrt(|X X^T|_F)``, the 4-norm of its singular
        values.
      source: where the rows come from.

    Raises:
      ValueError: if there is no row, a row is not three finite floats, or ``start`` is unknown.
    """

    rows: tuple[Row, ...]
    start: Start = "frobenius"
    source: str = "user"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", _checked(self.rows))
        if self.start not in get_args(Start):
            raise ValueError(f"start must be one of {get_args(Start)}, got {self.start!r}")

    def take(self, steps: int) -> "Schedule":
        """The schedule of exactly ``steps`` rows: the first ones, or the last one repeated."""
        rows = self.rows[:steps] + self.rows[-1:] * (steps - len(self.rows))
        return Schedule(rows, self.start, self.source)

    @property
    def cubic(self) -> bool:
        """Whether no step has a quintic term, so that ``(X X^T)^2`` is never formed."""
        return all(c == 0 for _, _, c in self.rows)


@functools.cache
def polar_express_rows(
    steps: int,
    lower: float = POLAR_EXPRESS_LOWER,
    cushion: float = POLAR_EXPRESS_CUSHION,
    safety: float = SAFETY,
) -> tuple[Row, ...]:
    """Return the rows of Polar Express: each step the best odd quintic for what the last one left.

    With all singular values in ``[l, u]``, ``u = 1`` at first, step ``k`` takes the minimax
    approximation of 1 on ``[max(l, cushion u), u]``, rescaled so that the images of ``l`` and ``u``
    lie evenly about 1; these are the next ``l`` and ``u``. Once the interval is a point the
    polynomial is ``15/8 s - 10/8 s^3 + 3/8 s^5``, and stays so.

    Args:
      steps: number of rows, at least 1. Row ``k`` does not depend on it.
      lower: smallest singular value that the schedule is made for, in (0, 1).
      cushion: holds the first intervals away from 0, in [0, 1): without it the first steps have
        steeper slopes and overshoot when rounded to half precision. 0 gives the bare recurrence.
      safety: the argument of every row but the converged one is divided by it, at least 1, so
        that singular values up to ``safety`` stay in the interval in spite of rounding.

    References:
      Amsel, Persson, Musco, Gower, "The Polar Express: Optimal Matrix Sign Methods and Their
      Application to the Muon Algorithm", arXiv 2505.16932 (2025), with the same ``safety``.
      Solved here by Remez exchange in float64.
    """
    rows: list[Row] = []
    low, high = lower, 1.0
    while len(rows) < steps and high - low > 1e-7:
        a, b, c = _minimax_quintic(max(low, cushion * high), high)
        middle = sum(a * s + b * s**3 + c * s**5 for s in (low, high)) / 2
        a, b, c = a / middle, b / middle, c / middle
        rows.append((a / safety, b / safety**3, c / safety**5))
        low = a * low + b * low**3 + c * low**5
        high = 2 - low
    return (*rows, *[(15 / 8, -10 / 8, 3 / 8)] * (steps - len(rows)))


def _minimax_quintic(low: float, high: float) -> Row:
    """``(a, b, c)`` of the odd quintic nearest to 1 on ``[low, high]`` in the maximum norm.

    Its error has equal size and alternating sign at ``low``, two inner points and ``high``.
    """
    inner = (low + (high - low) / 4, low + 3 * (high - low) / 4)
    for _ in range(100):
        points = (low, *inner, high)
        a, b, c, _ = _solve([[s, s**3, s**5, (-1) ** i, 1] for i, s in enumerate(points)])
        # The inner extrema: the roots in s^2 of the derivative a + 3 b s^2 + 5 c s^4.
        root = math.sqrt(max(9 * b * b - 20 * a * c, 0.0))
        new = (math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c)))
        moved = max(abs(x - y) for x, y in zip(new, inner, strict=True))
        inner = new
        if moved < 1e-9:  # convergence is quadratic
            break
    return a, b, c


def _solve(system: list[list[float]]) -> list[float]:
    """The solution of a small linear system ``[matrix | right side]`` by exact elimination.

    Exact, so that every host of a run computes the same bits, whatever its LAPACK.
    """
    rows = [[Fraction(x) for x in row] for row in system]
    for i in range(len(rows)):
        swap = max(range(i, len(rows)), key=lambda j: abs(rows[j][i]))
        rows[i], rows[swap] = rows[swap], rows[i]
        rows[i] = [x / rows[i][i] for x in rows[i]]
        for j, row in enumerate(rows):
            if j != i:
                rows[j] = [x - row[i] * y for x, y in zip(row, rows[i], strict=True)]
    return [float(row[-1]) for row in rows]


def _checked(coefficients: Sequence[Sequence[float]]) -> tuple[Row, ...]:
    try:
        rows = tuple((float(a), float(b), float(c)) for a, b, c in coefficients)
    except (TypeError, ValueError):
        rows = ()
    if not rows or not all(math.isfinite(value) for row in rows for value in row):
        raise ValueError(
            "coefficients must be at least one row of three finite floats, such as "
            f"[(3.4445, -4.775, 2.0315)], got {coefficients!r}; {_known()}"
        )
    return rows


def _known() -> str:
    return f"known names: {', '.join(map(repr, SCHEDULES))}"


_KELLER: Row = (3.4445, -4.7750, 2.0315)

SCHEDULES: dict[str, Schedule] = {
    # The steepest slope at 0 that keeps [0, 1] bounded. Does not converge to 1.
    "keller": Schedule(
        (_KELLER,),
        source='K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024)',
    ),
    "you": Schedule(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        source="Jiacheng You's five rows for Muon, as published by F. Cesista (2025)",
    ),
    # Seven rows and the converged one.
    "polar_express": Schedule(
        polar_express_rows(8),
        source="Amsel et al., The Polar Express, arXiv 2505.16932 (2025); safety factor 1.01",
    ),
    "cubic": Schedule(
        ((1.5, -0.5, 0.0),), source="the classic Newton-Schulz iteration: 3/2 s - 1/2 s^3"
    ),
    # Eight steep steps bring everything above 3e-5 near 1, two flat ones bring it to 1.
    "keller_polished": Schedule(
        (_KELLER,) * 8 + ((2.0, -1.5, 0.5),) * 2,
        source="DeepSeek-V4's ten steps: eight of Keller Jordan's, then 2 s - 3/2 s^3 + 1/2 s^5",
    ),
    # Maps 1 to below -1 unless the start bounds the singular values as it expects.
    "aol": Schedule(
        (
            (4.0098, -7.0585, 2.4635),
            (3.4585, -5.5479, 2.5959),
            (2.7573, -3.2939, 1.4254),
            (2.7215, -3.0494, 1.3169),
        ),
        start="aol",
        source="Boissin et al., Turbo-Muon, arXiv 2512.04632 (2025); safe behind its start alone",
    ),
    # Without the safety factor its singular values reach 7 in bfloat16, as the start leaves the
    # largest close to 1; 1.02 holds in every dtype and form that was tried.
    "cans_schatten": Schedule(
        polar_express_rows(5, cushion=0.0, safety=1.02),
        start="schatten4",
        source="Grishina, Smirnov, Rakhuba, CANS, arXiv 2506.10935 (2025); safety factor 1.02",
    ),
}


def newton_schulz_schedule(
    coefficients: str | Schedule | Sequence[Sequence[float]] = "keller", steps: int = 5
) -> Schedule:
    """Return the schedule of exactly ``steps`` Newton-Schulz steps.

    Fewer steps than the schedule has rows take its first rows, as a schedule is made to be run
    from its start; more steps repeat its last row.

    Args:
      coefficients: the name of a schedule (a key of ``SCHEDULES``), a `Schedule`, or rows
        ``(a, b, c)`` of finite floats, which start from the Frobenius norm.
      steps: number of steps, an int in ``[1, 50]``.

    Raises:
      TypeError: if ``steps`` is not an int.
      ValueError: if ``steps`` is out of range, the name is unknown, or a row is not three finite
        floats.

    Examples:
      >>> newton_schulz_schedule("aol", steps=1)  # doctest: +ELLIPSIS
      Schedule(rows=((4.0098, -7.0585, 2.4635),), start='aol', source=...)
    """
    if not isinstance(steps, int) or isinstance(steps, bool):
        raise TypeError(
            f"steps must be a Python int (it fixes the compiled program), got {steps!r} "
            f"of type {type(steps).__name__}"
        )
    if not 1 <= steps <= MAX_STEPS:
        raise ValueError(f"steps must be in [1, {MAX_STEPS}], got {steps}")
    if isinstance(coefficients, str):
        coefficients = _named(coefficients)
    elif not isinstance(coefficients, Schedule):
        coefficients = Schedule(_checked(coefficients))
    return coefficients.take(steps)


def newton_schulz_table(
    coefficients: str | Schedule | Sequence[Sequence[float]] = "keller", steps: int = 5
) -> tuple[Row, ...]:
    """Return the rows of `newton_schulz_schedule`, exactly ``steps`` of three Python floats.

    Examples:
      >>> newton_schulz_table("keller", steps=2)
      ((3.4445, -4.775, 2.0315), (3.4445, -4.775, 2.0315))
      >>> newton_schulz_table([(2, -1.5, 0.5), (1.5, -0.5, 0)], steps=1)
      ((2.0, -1.5, 0.5),)
    """
    return newton_schulz_schedule(coefficients, steps).rows


def _named(name: str) -> Schedule:
    if name not in SCHEDULES:
        raise ValueError(f"unknown coefficients {name!r}; {_known()}; or give rows (a, b, c)")
    return SCHEDULES[name]
