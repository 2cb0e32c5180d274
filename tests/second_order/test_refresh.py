"""When which block is decomposed, and in which basis."""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.layout import rules
from matrixfsdp_jax.layout.phases import Phases, refresh_phases
from matrixfsdp_jax.linalg.eigenbasis import eigenbasis
from matrixfsdp_jax.transforms import kronecker
from matrixfsdp_jax.transforms.refresh import Schedule
from tests.models import make_mesh
from tests.oracle_second_order import SecondOrderOracle
from tests.second_order.cases import (
    Run,
    block_phases,
    draw_any,
    gradients,
    kronecker_states,
    make,
    pairs,
    shapes_of_blocks,
    staggered,
)
from tests.test_optimizers import assert_trees_close, draw

# ---- when blocks are decomposed ----------------------------------------------------------------

BLOCKS = {"layers": (3, 6, 4), "tall": (10, 4), "bias": (4,)}
BLOCK_RULES = [rules.stacked("layers")]


def decomposed(run: Run, steps: int) -> list[set[tuple[str, int]]]:
    """For each step the blocks ``(tensor, number)`` whose roots changed."""
    found = []
    before = roots_of_blocks(run)
    for grads in gradients(steps, BLOCKS):
        run.step(grads)
        after = roots_of_blocks(run)
        changed = {
            k for k, x in after.items() if any((a != b).any() for a, b in pairs(x, before[k]))
        }
        whole = {k for k, x in after.items() if all((a != b).any() for a, b in pairs(x, before[k]))}
        assert changed == whole, "all factors of a block are decomposed together"
        found.append(changed)
        before = after
    return found


def roots_of_blocks(run: Run) -> dict[tuple[str, int], list[np.ndarray]]:
    """The roots of every block, by tensor and number in row-major order."""
    state, found = run.shampoo.preconditioner, {}
    for name, dims, groups in tensor_states(run, state):
        kinds = list(Counter(shapes_of_blocks(dims, 4, 2)))
        taken = dict.fromkeys(kinds, 0)
        for number, shape in enumerate(shapes_of_blocks(dims, 4, 2)):
            group = groups[kinds.index(shape)]
            found[name, number] = [np.asarray(x)[taken[shape]] for x in group.roots]
            taken[shape] += 1
    return found


def tensor_states(run: Run, state: Any) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    """Name, dims and state of every tensor of ``BLOCKS``."""
    if run.layout is None:
        for leaf, dims in (("layers", (6, 4)), ("tall", (10, 4))):
            (own,) = state[leaf].values()
            for i in range(3 if leaf == "layers" else 1):
                name = f"layers[{i}]" if leaf == "layers" else leaf
                yield name, dims, jax.tree.map(lambda x, i=i: x[i], own)
        return
    for c in run.layout.plan.classes:
        for matrix, slot in zip(c.matrices, c.slots, strict=True):
            yield (
                matrix.name,
                c.shape,
                jax.tree.map(lambda x, s=slot: np.asarray(x)[s], state[c.key]),
            )


def phases_of_blocks(frequency: int) -> dict[str, list[int]]:
    oracle = SecondOrderOracle("shampoo", 0.1, limit=4, frequency=frequency)
    return block_phases(draw_any(BLOCKS, 0), BLOCK_RULES, oracle)


@pytest.mark.parametrize(
    ("n", "first", "start"), [(None, "all", None), (3, "all", 6), (8, "spread", 6)]
)
def test_each_block_is_decomposed_once_a_period_at_its_turn(
    n: int | None, first: str, start: int | None
) -> None:
    """And the turns are the same on any number of devices."""
    frequency = 4
    options = {
        "epsilon": 1e-3,
        "max_preconditioner_dim": 4,
        "precondition_frequency": frequency,
        "start_preconditioning_step": start,
        "first_refresh": first,
    }
    form = "single" if n is None else "owner"
    run = Run(form, make("shampoo", **options), draw_any(BLOCKS, 0), BLOCK_RULES, n or 1)
    phases, start = phases_of_blocks(frequency), start or frequency
    everything = {(name, i) for name, own in phases.items() for i in range(len(own))}
    assert len(everything) == 3 * 2 + 3
    # Nine blocks of two costs; each of the four steps has a fair share.
    assert {len([k for k in everything if phases[k[0]][k[1]] == f]) for f in range(4)} <= {2, 3}
    found = decomposed(run, start + 2 * frequency)
    due = staggered(phases, frequency, start, first)
    want = [{k for k in everything if due(t, *k)} for t in range(1, len(found) + 1)]
    assert found == want
    assert found[start - 1] == everything if first == "all" else len(found[start - 1]) <= 3
    for period in (found[start : start + frequency], found[start + frequency :]):
        assert Counter(itertools.chain(*period)) == dict.fromkeys(everything, 1)


def test_without_stagger_all_blocks_are_decomposed_in_multiples() -> None:
    options = {
        "epsilon": 1e-3,
        "max_preconditioner_dim": 4,
        "precondition_frequency": 3,
        "start_preconditioning_step": 5,
        "stagger": False,
    }
    run = Run("single", make("shampoo", **options), draw_any(BLOCKS, 0), BLOCK_RULES)
    found = decomposed(run, 12)
    assert [t for t, blocks in enumerate(found, 1) if blocks] == [5, 6, 9, 12]
    assert {len(found[t - 1]) for t in (5, 6, 9, 12)} == {9}


@pytest.mark.parametrize("frequency", [1, 3, 4])
@pytest.mark.parametrize("start", [1, 2, 4, 7])
@pytest.mark.parametrize(("stagger", "first"), [(False, "all"), (True, "all"), (True, "spread")])
def test_which_units_are_due(frequency: int, start: int, stagger: bool, first: str) -> None:
    """Two units in each phase but the last, which has three."""
    schedule = Schedule(frequency, start, stagger, first)
    phases = [f for f in range(schedule.num_phases) for _ in range(2)] + [schedule.num_phases - 1]
    offsets = jnp.array([sum(p < f for p in phases) for f in range(schedule.num_phases + 1)])
    for step in range(1, 16):
        low, high = map(int, schedule.due(jnp.asarray(step), offsets.__getitem__))
        turn = step % frequency
        whole = step == start and first == "all" if stagger else step == start or turn == 0
        own = [i for i, p in enumerate(phases) if whole or (stagger and p == turn)]
        assert list(range(low, high)) == (own if step >= start else [])


MATRIX_PHASES = (
    ({"8x8": 72}, 10),
    ({"8x8": 5}, 10),
    ({"8x8": 24, "32x8": 7, "3": 40}, 10),
    ({"8x8": 9}, 1),
)


@pytest.mark.parametrize(("counts", "frequency"), MATRIX_PHASES)
def test_phases_share_the_work(counts: dict[str, int], frequency: int) -> None:
    costs = {"8x8": ((1, 1024.0),), "32x8": ((2, 4608.0), (1, 700.0)), "3": ((1, 27.0),)}
    names = {key: [f"{key}/{i}" for i in range(n)] for key, n in counts.items()}
    phases = refresh_phases(names, costs, frequency)
    assert set(phases) == set(itertools.chain(*names.values()))
    work = phase_totals(phases, names, costs, frequency)
    longest = max(cost for key in counts for _, cost in costs[key])
    assert max(work) - min(work) <= longest
    assert sum(work) == sum(n * blocks * c for k, n in counts.items() for blocks, c in costs[k])
    shuffled = {key: own[::-1] for key, own in reversed(names.items())}
    assert refresh_phases(shuffled, costs, frequency) == phases, "the order of leaves is no matter"


def phase_totals(phases: Phases, names: Any, costs: Any, frequency: int) -> list[float]:
    work = [0.0] * frequency
    for key, own in names.items():
        for name in own:
            for group, (blocks, cost) in zip(phases[name], costs[key], strict=True):
                assert len(group) == blocks
                for phase in group:
                    work[phase] += cost
    return work


def test_neighbouring_layers_come_in_neighbouring_steps() -> None:
    phases = refresh_phases({"4x4": [f"h{i}" for i in range(12)]}, {"4x4": ((1, 1.0),)}, 5)
    assert [phases[f"h{i}"] for i in range(12)] == [((i % 5,),) for i in range(12)]


@pytest.mark.parametrize(("count", "n"), [(72, 8), (72, 3), (40, 4), (30, 8)])
def test_the_planner_spreads_the_turns_of_every_device(count: int, n: int) -> None:
    """No device decomposes much more than the mean in any step: 72 matrices over 8 devices."""
    frequency = 10
    tree = {f"w{i}": jax.ShapeDtypeStruct((8, 8), jnp.float32) for i in range(count)}
    plan = mfsdp.plan(tree, make_mesh(n), optimizer="shampoo").plan
    (c,) = plan.classes
    names = [m.name for m in c.matrices]
    assert sorted(names) == sorted(tree)
    phases = refresh_phases({c.key: names}, {c.key: ((1, 1024.0),)}, frequency)
    turns = Counter(
        (device, phases[name][0][0]) for name, (device, _) in zip(names, c.slots, strict=True)
    )
    mean = count / (n * frequency)
    assert max(turns.values()) <= max(1.5 * mean, 1)


# ---- the basis ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_signs_and_order_of_eigenvectors_do_not_matter(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another solver may order eigenvectors otherwise; only the space that each spans counts."""
    rng = np.random.default_rng(seed)

    def other(*args: Any) -> Any:
        values, vectors, ok = eigenbasis(*args)
        k = vectors.shape[-1]
        order = rng.permutation(k)
        signs = rng.choice([-1.0, 1.0], (1, k))
        return values[order], vectors[:, order] * signs.astype(vectors.dtype), ok

    shapes = {"cube": (2, 2, 4), "bias": (4,)}
    # One decomposition, in the first step, and then the moment moves in that basis.
    options = {"precondition_frequency": 100, "start_preconditioning_step": 1}
    options |= {"target_parameter_dimensionality": 3}
    runs = []
    with jax.enable_x64(True):
        for solver in (eigenbasis, other):
            monkeypatch.setattr(kronecker, "eigenbasis", solver)
            runs.append(Run("single", make("soap", **options), draw_any(shapes, 0, np.float64)))
            runs[-1].step(gradients(1, shapes, np.float64)[0])
        one, two = (kronecker_states(run.shampoo) for run in runs)
        assert any(
            np.abs(np.asarray(a) - np.asarray(b)).max() > 0.1
            for x, y in zip(one, two, strict=True)
            for a, b in pairs(x.vectors, y.vectors)
        )
        for grads in gradients(4, shapes, np.float64):
            got = [run.step(grads) for run in runs]
            assert_trees_close(got[1], got[0], atol=1e-10)


def test_the_second_moment_moves_between_refreshes() -> None:
    """Grows by hand in the identity basis: nothing is decomposed in these six steps."""
    g = draw({"w": (4, 6)}, 0)["w"]
    run = Run(
        "single", make("soap", precondition_frequency=10), {"w": np.zeros((4, 6), np.float32)}
    )
    want = np.zeros((4, 6))
    for i in range(6):
        run.step({"w": g * np.float32(i + 1)})
        want = 0.95 * want + 0.05 * (g.astype(np.float64) * (i + 1)) ** 2
        (state,) = kronecker_states(run.shampoo)
        np.testing.assert_allclose(state.moment[0, 0], want, rtol=1e-5)


@pytest.mark.parametrize("matrices", [1, 2])
@pytest.mark.parametrize("devices", [None, 1, 2])
def test_a_decomposition_is_in_no_step_that_needs_none(matrices: int, devices: int | None) -> None:
    """Not moved out of its loop, as XLA does with what is the same in each turn of it."""
    params = draw_any({f"w{i}": (8, 8) for i in range(matrices)}, 0)
    options = {"precondition_frequency": 10, "epsilon": 1e-3}
    if devices is None:
        tx = mfsdp.shampoo(0.1, **options)
        arguments = (params, tx.init(params), params)
    else:
        mesh = jax.make_mesh((devices,), ("fsdp",), devices=jax.devices()[:devices])
        layout = mfsdp.plan(params, mesh, optimizer="shampoo")
        tx = mfsdp.shampoo(0.1, layout=layout, **options)
        owned = layout.shard(params)
        arguments = (owned, layout.init(tx, owned), owned)
    text = jax.jit(tx.update).lower(*arguments).compile().as_text()
    computation, found = "", []
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")):
            computation = line.split()[0]
        if "syevd" in line and "custom-call" in line:
            found.append(computation)
    assert found
    assert "ENTRY" not in found
