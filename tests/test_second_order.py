"""Shampoo and SOAP on one device and on owner params, against float64 oracles."""

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.layout import rules
from matrixfsdp_jax.layout.phases import Phases, refresh_phases
from matrixfsdp_jax.linalg.eigenbasis import eigenbasis
from matrixfsdp_jax.owner.params import OwnerLayout
from matrixfsdp_jax.transforms import kronecker
from matrixfsdp_jax.transforms.refresh import Schedule
from tests.models import TINY_RULES, make_mesh, tiny_batches, tiny_loss, tiny_params
from tests.oracle_second_order import (
    Due,
    Graft,
    SecondOrderOracle,
    block_slices,
    merged_dims,
)
from tests.test_optimizers import FORMS, Trainer, assert_trees_close, draw, ramp
from tests.test_step_collectives import assert_as_planned

# Every kind of leaf: a stack of matrices and two fused ones (all 6 x 4), a convolution as it is, a
# matrix that does not divide into blocks of 6, a vector, a scalar, and one leaf of the rest.
SHAPES = {
    "layers": (3, 6, 4),
    "qkv": (6, 8),
    "conv": (2, 3, 2, 4),
    "uneven": (7, 4),
    "vector": (4,),
    "scalar": (),
    "bias": (8,),
}
RULES = [
    rules.stacked("layers"),
    rules.fused("qkv", (4, 4)),
    rules.tensor("vector"),
    rules.tensor("scalar"),
]
SMALL = {"layers": (2, 6, 4), "uneven": (7,), "bias": (8,)}
SMALL_RULES = [rules.stacked("layers"), rules.tensor("uneven")]
# Three classes in which neither 3 nor 8 devices have equal shares.
FEW = {"layers": (5, 6, 4), "conv": (2, 2, 4), "vector": (6,), "bias": (8,)}
FEW_RULES = [rules.stacked("layers"), rules.tensor("vector")]

METHODS: dict[str, Callable[..., Any]] = {"shampoo": mfsdp.shampoo, "soap": mfsdp.soap}


def tensors(tree: dict[str, Any]) -> dict[str, np.ndarray]:
    """Every tensor of a tree, under its name in a plan, as float64."""
    out = {}
    for name, x in tree.items():
        x = np.asarray(x, np.float64)
        if name == "layers":
            out |= {f"layers[{i}]": m for i, m in enumerate(x)}
        elif name == "qkv":
            out |= {"qkv:0": x[:, :4], "qkv:1": x[:, 4:]}
        elif name != "bias":
            out[name] = x
    return out


class Run(Trainer):
    """A ``Trainer`` whose layout is planned for Shampoo or SOAP."""

    def __init__(
        self,
        form: str,
        make: Callable[..., Any],
        params: dict[str, Any],
        given: Any = None,
        n: int = 8,
        *,
        explicit: bool = True,
        optimizer: Any = "shampoo",
    ) -> None:
        super().__init__("single", optax_identity, params, given)
        if form == "owner":
            mesh = make_mesh(n, explicit)
            self.layout = mfsdp.plan(params, mesh, rules=given, optimizer=optimizer)
            self.tx = make(layout=self.layout)
            self.params = self.layout.shard(params)
            self.state = self.layout.init(self.tx, self.params)
        else:
            self.tx = make(layout=None, rules=given)
            self.state = jax.jit(self.tx.init)(self.params)

        self._step = jax.jit(self._apply)

    def _apply(self, params: Any, state: Any, grads: Any, present: Any = None) -> Any:
        seen = params if self.layout is None else self.layout.trainable(params)
        updates, state = self.tx.update(grads, state, seen, present=present)
        moved = optax.apply_updates if self.layout is None else self.layout.apply_updates
        return moved(params, updates), state, updates

    def step(self, grads: Any, present: Any = None) -> Any:
        self.advance(grads, present)
        return self.canonical(self.params)

    def advance(self, grads: Any, present: Any = None) -> None:
        if self.layout is not None:
            grads = self.layout.trainable(self.layout.shard(grads))
        self.params, self.state, self.updates = self._step(self.params, self.state, grads, present)

    def canonical(self, params: Any) -> Any:
        params = params if self.layout is None else self.layout.unshard(params)
        return jax.tree.map(np.asarray, params)

    def run(self, steps: Iterator[dict[str, Any]] | list[dict[str, Any]]) -> dict[str, np.ndarray]:
        """The parameters after a step with each of the gradients."""
        for grads in steps:
            got = self.step(grads)
        return got

    @property
    def shampoo(self) -> mfsdp.ShampooState:
        def is_shampoo(x: Any) -> bool:
            return isinstance(x, mfsdp.ShampooState)

        (found,) = filter(is_shampoo, jax.tree.leaves(self.state, is_leaf=is_shampoo))
        return found

    def with_shampoo(self, change: Callable[[mfsdp.ShampooState], mfsdp.ShampooState]) -> None:
        """Replace the Shampoo part of the state."""

        def is_shampoo(x: Any) -> bool:
            return isinstance(x, mfsdp.ShampooState)

        self.state = jax.tree.map(
            lambda x: change(x) if is_shampoo(x) else x, self.state, is_leaf=is_shampoo
        )


def optax_identity(**where: Any) -> optax.GradientTransformation:
    return optax.identity()


def make(method: str, **options: Any) -> Callable[..., Any]:
    """A factory for ``Run``."""
    options = {"learning_rate": 0.02, "rest": optax.sgd(0.1), **options}
    return lambda **where: METHODS[method](**options, **where)


def gradients(count: int, shapes: dict[str, Any] = FEW, dtype: Any = np.float32) -> list[Any]:
    return [draw_any(shapes, seed, dtype) for seed in range(1, count + 1)]


def draw_any(shapes: dict[str, Any], seed: int, dtype: Any = np.float32) -> dict[str, Any]:
    """``draw``, with arrays for scalars."""
    return {k: np.asarray(x, dtype) for k, x in draw(shapes, seed, np.float64).items()}


# ---- the formula -------------------------------------------------------------------------------


def oracle_of(method: str, **options: Any) -> SecondOrderOracle:
    """The oracle with the options of the public function."""
    own = {"shampoo": ((0.9, 1.0), 1e-12, 1), "soap": ((0.95, 0.95), 1e-8, 10)}[method]
    graft = options.get("grafting")
    if isinstance(graft, mfsdp.SGDGrafting):
        graft = "sgd"
    elif graft is not None:
        graft = Graft(graft.beta2, graft.epsilon, isinstance(graft, mfsdp.AdamGrafting))
    averaging = options.get("iterate_averaging")
    free, momentum = None, None
    if isinstance(averaging, mfsdp.ScheduleFree):
        free = (averaging.train_interp_coeff, averaging.eval_coeff_lr_power)
    elif averaging is not None:
        momentum = averaging.momentum
    skip = options.get("first_step") == "skip"
    return SecondOrderOracle(
        method,  # type: ignore[arg-type]
        options.get("learning_rate", 0.02),
        betas=options.get("betas", own[0]),
        beta3=options.get("beta3"),
        epsilon=options.get("epsilon", own[1]),
        decay=options.get("weight_decay", 0.0),
        decay_type=options.get("weight_decay_type", "decoupled"),
        peak_lr=options.get("peak_learning_rate", options.get("learning_rate", 0.02)),
        limit=options.get("max_preconditioner_dim", 1024),
        target=options.get("target_parameter_dimensionality", 2),
        frequency=options.get("precondition_frequency", own[2]),
        start=1 if skip else options.get("start_preconditioning_step"),
        bias_correction=options.get("use_bias_correction", True),
        graft=graft,
        kl=getattr(options.get("preconditioner"), "kl", False),
        momentum=momentum,
        schedule_free=free,
        skip_first=skip,
    )


def shapes_of_blocks(dims: tuple[int, ...], limit: float, target: float) -> list[tuple[int, ...]]:
    merged = merged_dims(dims, limit, target)
    zeros = np.zeros(merged)
    return [zeros[cut].shape for cut in block_slices(merged, limit)]


def block_phases(tree: dict[str, Any], given: Any, oracle: SecondOrderOracle) -> dict[str, Any]:
    """Tensor -> the phase of each of its blocks in row-major order."""
    plan = mfsdp.plan(tree, make_mesh(1), rules=given, optimizer="shampoo").plan
    blocks = {c.key: shapes_of_blocks(c.shape, oracle.limit, oracle.target) for c in plan.classes}
    units = {
        key: tuple((n, float(sum(k**3 for k in shape))) for shape, n in Counter(own).items())
        for key, own in blocks.items()
    }
    names = {c.key: [m.name for m in c.matrices] for c in plan.classes}
    phases = refresh_phases(names, units, oracle.frequency)
    return {m: in_blocks(phases[m], blocks[key]) for key, own in names.items() for m in own}


def in_blocks(phases: Any, shapes: list[tuple[int, ...]]) -> list[int]:
    """Phases by shape of the block to phases in row-major order of the blocks."""
    queues = {shape: iter(own) for shape, own in zip(Counter(shapes), phases, strict=True)}
    return [next(queues[shape]) for shape in shapes]


def staggered(phases: dict[str, Any], frequency: int, start: int, first: str = "all") -> Due:
    """A block is decomposed in the step of its phase, and at first perhaps with all others."""

    def due(step: int, name: str, block: int) -> bool:
        everything = step == start and first == "all"
        return everything or (step >= start and step % frequency == phases[name][block])

    return due


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "adam graft": (
        "shampoo",
        {
            "betas": (0.9, 0.95),
            "grafting": mfsdp.AdamGrafting(0.9, 1e-6),
            "precondition_frequency": 3,
        },
    ),
    "sum": ("shampoo", {"betas": (0.0, 1.0), "precondition_frequency": 2, "stagger": False}),
    "late start, sgd graft": (
        "shampoo",
        {
            "betas": (0.5, 0.9),
            "grafting": mfsdp.SGDGrafting(),
            "start_preconditioning_step": 5,
            "precondition_frequency": 3,
            "stagger": False,
            "use_bias_correction": False,
        },
    ),
    "beta3, rmsprop graft": (
        "shampoo",
        {"betas": (0.9, 0.95), "beta3": 0.5, "grafting": mfsdp.RMSpropGrafting(0.9, 1e-6)},
    ),
    "unmerged, adagrad graft": (
        "shampoo",
        {
            "target_parameter_dimensionality": math.inf,
            "grafting": mfsdp.AdaGradGrafting(),
            "precondition_frequency": 4,
            "first_refresh": "spread",
        },
    ),
    "kl": (
        "shampoo",
        {"betas": (0.9, 0.9), "preconditioner": mfsdp.RootInverse(kl=True)},
    ),
    "eigendecomposed": (
        "shampoo",
        {
            "betas": (0.9, 0.9),
            "preconditioner": mfsdp.Eigendecomposed(),
            "precondition_frequency": 3,
        },
    ),
    "soap": ("soap", {"precondition_frequency": 4, "start_preconditioning_step": 6}),
    "soap, sum and graft": (
        "soap",
        {
            "betas": (0.9, 1.0),
            "beta3": 0.8,
            "grafting": mfsdp.AdamGrafting(0.9, 1e-6),
            "precondition_frequency": 6,
            "stagger": False,
        },
    ),
}
WHOLE = ("adam graft", "unmerged, adagrad graft", "soap")


@pytest.mark.parametrize(
    ("form", "case"), [("single", c) for c in CASES] + [("owner", c) for c in WHOLE]
)
def test_ten_steps_follow_the_oracle(form: str, case: str) -> None:
    method, options = CASES[case]
    options = {"epsilon": 1e-3, "max_preconditioner_dim": 6, **options}
    oracle = oracle_of(method, **options)
    with jax.enable_x64(True):
        shapes, given = (SHAPES, RULES) if case in WHOLE else (SMALL, SMALL_RULES)
        params = draw_any(shapes, 0, np.float64)
        run = Run(form, make(method, **options), params, given)
        if options.get("stagger", True):
            start = oracle.start or oracle.frequency
            phases = block_phases(params, given, oracle)
            oracle.due = staggered(
                phases, oracle.frequency, start, options.get("first_refresh", "all")
            )
        want = tensors(params)
        for grads in gradients(10, shapes, np.float64):
            got = run.step(grads)
            want = oracle.step(want, tensors(grads))
            assert_trees_close(tensors(got), want, atol=1e-9)
    # The bias belongs to the rest: ten steps of plain gradient descent.
    total = sum(grads["bias"] for grads in gradients(10, shapes, np.float64))
    np.testing.assert_allclose(got["bias"], params["bias"] - 0.1 * total, atol=1e-12)
    assert jax.tree.map(np.shape, got) == jax.tree.map(np.shape, params)


# Square ones, whose factors have full rank from the first gradient on.
SQUARE = {"w": (4, 4), "cube": (2, 2, 4), "bias": (4,)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("grafting", [None, mfsdp.AdamGrafting(0.9, 1e-6)], ids=["plain", "graft"])
def test_a_skipped_first_step_only_builds_the_basis(form: str, grafting: Any) -> None:
    """Zero update in step 1, and all moments begin with the second gradient."""
    options = {
        "first_step": "skip",
        "precondition_frequency": 3,
        "stagger": False,
        "grafting": grafting,
        "target_parameter_dimensionality": 3,
    }
    with jax.enable_x64(True):
        params = draw_any(SQUARE, 0, np.float64)
        run = Run(form, make("soap", **options), params, n=2)
        oracle, want = oracle_of("soap", **options), tensors(params)
        for step, grads in enumerate(gradients(8, SQUARE, np.float64)):
            got = run.step(grads)
            want = oracle.step(want, tensors(grads))
            assert_trees_close(tensors(got), want, atol=1e-9)
            if step == 0:
                state = run.shampoo
                for name in ("w", "cube"):
                    np.testing.assert_array_equal(got[name], params[name])
                moments = (state.filtered, state.grafting)
                assert not any(np.asarray(x).any() for x in jax.tree.leaves(moments))
                vectors = [np.asarray(x) for s in kronecker_states(state) for x in s.vectors]
                assert all(np.abs(x - np.eye(x.shape[-1])).max() > 0.01 for x in vectors)


def test_in_a_skipped_first_step_only_weight_decay_acts() -> None:
    params = draw_any(SQUARE, 0)
    run = Run("single", make("soap", first_step="skip", weight_decay=0.5), params)
    got = run.step(gradients(1, SQUARE)[0])
    for name in ("w", "cube"):
        np.testing.assert_allclose(got[name], params[name] * (1 - 0.02 * 0.5), rtol=1e-6)


def kronecker_states(state: mfsdp.ShampooState) -> list[Any]:
    """The states of all groups of blocks that have factors."""

    def has_factors(x: Any) -> bool:
        return hasattr(x, "factors")

    found = jax.tree.leaves(state.preconditioner, is_leaf=has_factors)
    return [x for x in found if has_factors(x)]


# ---- weight decay and averaging ----------------------------------------------------------------

DECAYS: dict[str, dict[str, Any]] = {
    "decoupled": {},
    "l2": {"weight_decay_type": "l2"},
    "corrected": {"weight_decay_type": "corrected", "peak_learning_rate": 0.05},
    "independent": {"weight_decay_type": "independent", "peak_learning_rate": 0.05},
    "decoupled, momentum": {"iterate_averaging": mfsdp.ClassicMomentum(0.8)},
    "corrected, schedule-free": {
        "weight_decay_type": "corrected",
        "peak_learning_rate": 0.05,
        "iterate_averaging": mfsdp.ScheduleFree(0.75, 1.0),
    },
}
DECAY_SHAPES = {"w": (4, 4), "v": (4, 4), "tall": (6, 4), "bias": (4,)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", DECAYS)
def test_weight_decay_follows_schedules_and_mask(form: str, kind: str) -> None:
    options = {
        "learning_rate": ramp(0.05, -0.004),
        "weight_decay": ramp(0.5, -0.05),
        "betas": (0.9, 0.95),
        "epsilon": 1e-3,
        **DECAYS[kind],
    }
    mask = {"w": True, "v": False, "tall": True, "bias": True}
    with jax.enable_x64(True):
        params = draw_any(DECAY_SHAPES, 0, np.float64)
        run = Run(form, make("shampoo", weight_decay_mask=mask, **options), params, n=2)
        oracle, want = oracle_of("shampoo", **options), tensors(params)
        oracle.decayed = lambda name: name != "v"
        for grads in gradients(6, DECAY_SHAPES, np.float64):
            got = run.step(grads)
            want = oracle.step(want, tensors(grads))
            # The sum of learning rates is float32, as in the reference.
            assert_trees_close(tensors(got), want, atol=1e-7 if "free" in kind else 1e-9)
        if "free" not in kind:
            return
        averaged = mfsdp.averaged_params(run.state, run.params, options["iterate_averaging"])
        averaged = averaged if run.layout is None else run.layout.unshard(averaged)
        assert_trees_close(tensors(averaged), oracle.evaluation(want), atol=1e-7)
        np.testing.assert_array_equal(averaged["bias"], got["bias"])


def test_a_constant_learning_rate_is_its_own_peak() -> None:
    params, zeros = {"w": np.ones((4, 4), np.float32)}, {"w": np.zeros((4, 4), np.float32)}
    for kind, shrink in (("corrected", 0.1 * 0.5), ("independent", 0.5)):
        run = Run(
            "single",
            make("shampoo", learning_rate=0.1, weight_decay=0.5, weight_decay_type=kind),
            params,
        )
        np.testing.assert_allclose(run.step(zeros)["w"], 1 - shrink, rtol=1e-6)


# ---- devices -----------------------------------------------------------------------------------

DEVICE_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "shampoo": (
        "shampoo",
        {
            "betas": (0.9, 0.95),
            "grafting": mfsdp.AdamGrafting(),
            "precondition_frequency": 3,
            "weight_decay": 0.1,
        },
    ),
    "shampoo at once": (
        "shampoo",
        {"betas": (0.9, 0.95), "precondition_frequency": 3, "stagger": False},
    ),
    "soap": ("soap", {"precondition_frequency": 4, "start_preconditioning_step": 8}),
    "soap at once": ("soap", {"precondition_frequency": 8, "stagger": False}),
    "kl": (
        "shampoo",
        {
            "betas": (0.9, 0.9),
            "preconditioner": mfsdp.RootInverse(kl=True),
            "precondition_frequency": 2,
        },
    ),
    "schedule-free": (
        "shampoo",
        {
            "betas": (0.9, 0.9),
            "iterate_averaging": mfsdp.ScheduleFree(),
            "weight_decay": 0.1,
            "precondition_frequency": 2,
        },
    ),
}


def device_run(case: str, form: str, n: int = 8, explicit: bool = True) -> Run:
    method, options = DEVICE_CASES[case]
    options = {"epsilon": 1e-3, **options}
    return Run(form, make(method, **options), draw_any(FEW, 0), FEW_RULES, n, explicit=explicit)


CHECKED = (1, 2, 5, 10, 15, 20)


@cache
def on_one_device(case: str) -> dict[int, dict[str, np.ndarray]]:
    run = device_run(case, "single")
    return {t: run.step(grads) for t, grads in enumerate(gradients(20), 1)}


@pytest.mark.parametrize(
    ("case", "n", "explicit"),
    [
        ("shampoo", 1, True),
        ("shampoo", 3, False),
        ("shampoo", 8, True),
        ("shampoo at once", 8, False),
        ("soap", 3, True),
        ("soap", 8, False),
        ("soap at once", 3, True),
        ("kl", 8, True),
        ("schedule-free", 3, False),
    ],
)
def test_owners_equal_one_device_and_pads_stay_zero(case: str, n: int, explicit: bool) -> None:
    """Over 20 steps with many refreshes; the rounding of float32 is not amplified."""
    run = device_run(case, "owner", n, explicit)
    fresh = jax.tree.map(np.asarray, run.shampoo)
    for t, grads in enumerate(gradients(20), 1):
        run.advance(grads)
        if t in CHECKED:
            want = on_one_device(case)[t]
            assert_trees_close(run.canonical(run.params), want, atol=1e-5)
    moved = sum(np.abs(want[k] - x).max() > 0.05 for k, x in draw_any(FEW, 0).items())
    assert moved == len(FEW)
    pads = 0
    for c in run.layout.plan.classes:
        empty = np.ones((c.num_devices, c.num_waves), bool)
        empty[tuple(np.array(c.slots).T)] = False
        pads += empty.sum()
        assert not np.asarray(run.params.stacks[c.key])[empty].any()
        assert not np.asarray(run.updates.stacks[c.key])[empty].any()
        for field in mfsdp.ShampooState._fields[1:]:
            now, then = (jax.tree.leaves(getattr(s, field)[c.key]) for s in (run.shampoo, fresh))
            for a, b in zip(now, then, strict=True):  # zeros and identities
                np.testing.assert_array_equal(np.asarray(a)[empty], b[empty])
    assert pads == {1: 0, 3: 1 + 2 + 2, 8: 3 + 7 + 7}[n]


@pytest.mark.parametrize(("method", "explicit"), [("shampoo", False), ("soap", True)])
def test_no_collective_in_update_or_in_the_optimizer_part_of_a_step(
    method: str, explicit: bool
) -> None:
    params = tiny_params(1, width=8)
    layout = mfsdp.plan(
        params,
        make_mesh(8, explicit),
        rules=TINY_RULES(8),
        optimizer=method,
        rest_shard_min_size=64,
    )
    tx = METHODS[method](1e-2, layout=layout, epsilon=1e-4, precondition_frequency=2)
    owned = layout.shard(params)
    state = layout.init(tx, owned)
    alone = mfsdp.audit(jax.jit(tx.update), layout.trainable(owned), state, layout.trainable(owned))
    assert alone.count() == 0
    step = mfsdp.train_step(tiny_loss, tx, layout)
    found = mfsdp.audit(step, owned, state, mfsdp.shard_batch(layout, tiny_batches(1)[0]))
    assert found.within("mfsdp.optimizer").count() == 0
    # Loss and two norms, and two counters of failures per class.
    assert_as_planned(found, layout, scalars=3 + 2 * len(layout.plan.classes))


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


def pairs(a: list[np.ndarray], b: list[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    return zip(a, b, strict=True)


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
        low, high = map(int, schedule.due(jnp.asarray(step), offsets))
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


# ---- failures ----------------------------------------------------------------------------------

FAILURE_SHAPES = {"layers": (3, 4, 4), "vector": (4,), "bias": (4,)}


def failure_run(form: str, **options: Any) -> Run:
    given = [rules.stacked("layers"), rules.tensor("vector")]
    options = {"betas": (0.9, 0.9), "epsilon": 1e-3, **options}
    return Run(form, make("shampoo", **options), draw_any(FAILURE_SHAPES, 0), given, n=2)


def of_tensor(run: Run, tree: Any, name: str) -> Any:
    """The part of a per-class (or per-leaf) state that belongs to one tensor, as numpy."""
    if run.layout is None:
        leaf, _, rest = name.partition("[")
        index = int(rest[:-1]) if rest else 0
        (own,) = tree[leaf].values()
        return jax.tree.map(lambda x: np.asarray(x)[index], own)
    for c in run.layout.plan.classes:
        for matrix, slot in zip(c.matrices, c.slots, strict=True):
            if matrix.name == name:
                return jax.tree.map(lambda x, s=slot: np.asarray(x)[s], tree[c.key])
    raise KeyError(name)


TENSORS = ("layers[0]", "layers[1]", "layers[2]", "vector")


def spoil(run: Run, name: str, value: float) -> None:
    """Set the first factor of a tensor to a multiple of the identity."""

    def change(state: mfsdp.ShampooState) -> mfsdp.ShampooState:
        def factors(x: Any) -> Any:
            first = x.factors[0]
            bad = np.array(first)
            bad[index_of(run, name)] = np.diag(np.full(first.shape[-1], value))
            return x._replace(factors=(jax.device_put(bad, first.sharding), *x.factors[1:]))

        key = class_or_leaf(run, name)
        own = state.preconditioner[key]
        new = jax.tree.map(factors, own, is_leaf=lambda x: hasattr(x, "factors"))
        return state._replace(preconditioner=state.preconditioner | {key: new})

    run.with_shampoo(change)


def class_or_leaf(run: Run, name: str) -> str:
    if run.layout is None:
        return name.partition("[")[0]
    return next(c.key for c in run.layout.plan.classes if name in [m.name for m in c.matrices])


def index_of(run: Run, name: str) -> Any:
    if run.layout is None:
        rest = name.partition("[")[2]
        return int(rest[:-1]) if rest else 0
    for c in run.layout.plan.classes:
        for matrix, slot in zip(c.matrices, c.slots, strict=True):
            if matrix.name == name:
                return slot
    raise KeyError(name)


def count_of(run: Run, field: str) -> dict[str, int]:
    state = getattr(run.shampoo, field)
    return {n: int(np.sum(jax.tree.leaves(of_tensor(run, state, n)))) for n in TENSORS}


FAULTS = {
    "infinite factor": (math.inf, {}, 1),
    # Minus the identity has no root: the iteration ends in NaN, from a factor that is finite.
    "failed root": (
        -10.0,
        {"preconditioner": mfsdp.RootInverse(root=mfsdp.CoupledHigherOrderRoot(abs_epsilon=1e-3))},
        0,
    ),
}


@pytest.mark.parametrize(
    ("form", "fault"),
    [("single", "infinite factor"), ("owner", "infinite factor"), ("owner", "failed root")],
)
def test_a_failed_decomposition_keeps_the_last_root_and_counts(form: str, fault: str) -> None:
    value, options, nonfinite = FAULTS[fault]
    run = failure_run(form, **options)
    clean = copy.copy(run)  # from the same start, with the same compiled step
    steps = gradients(5, FAILURE_SHAPES)
    for each in (run, clean):
        each.run(steps[:2])
    assert set(count_of(run, "failures").values()) == {0}
    before = of_tensor(run, run.shampoo.preconditioner, "layers[1]")
    for times in (1, 2):
        spoil(run, "layers[1]", value)
        got, want = run.step(steps[1 + times]), clean.step(steps[1 + times])
        after = of_tensor(run, run.shampoo.preconditioner, "layers[1]")
        # The first factor has failed and the second, which was good, has a new root.
        (old,), (new,) = before, after
        np.testing.assert_array_equal(new.roots[0], old.roots[0])
        assert (new.roots[1] != old.roots[1]).any()
        assert count_of(run, "failures") == {**dict.fromkeys(TENSORS, 0), "layers[1]": times}
        assert count_of(run, "nonfinite") == {
            **dict.fromkeys(TENSORS, 0),
            "layers[1]": times * nonfinite,
        }
        # The others do not notice, and the block itself goes on.
        others = [0, 2]
        np.testing.assert_array_equal(got["layers"][others], want["layers"][others])
        np.testing.assert_array_equal(got["vector"], want["vector"])
        assert np.isfinite(got["layers"]).all()
        for name in ("layers[0]", "layers[2]", "vector"):
            mine, clear = (of_tensor(r, r.shampoo.preconditioner, name) for r in (run, clean))
            jax.tree.map(np.testing.assert_array_equal, mine, clear)
    spoil(run, "layers[1]", 1.0)
    run.step(steps[4])
    assert set(count_of(run, "failures").values()) == {0}, "failures in a row start again"
    assert count_of(run, "nonfinite")["layers[1]"] == 2 * nonfinite


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", FORMS)
def test_a_nan_in_one_leaf_touches_no_other(form: str, method: str) -> None:
    """Nor another matrix of its class; a leaf here, so that its class has others."""
    shapes = {"a": (4, 4), "b": (4, 4), "c": (4, 4), "bias": (4,)}
    options = {"epsilon": 1e-3, "precondition_frequency": 2}
    run = Run(form, make(method, **options), draw_any(shapes, 0), n=2)
    clean = copy.copy(run)
    first, second, third = gradients(3, shapes)
    bad = {**second, "b": second["b"].copy()}
    bad["b"][1, 2] = np.nan
    for mine, clear in ((first, first), (bad, second), (third, third)):
        got, want = run.step(mine), clean.step(clear)
    for name in ("a", "c", "bias"):
        np.testing.assert_array_equal(got[name], want[name])
    assert np.isnan(got["b"]).all()
    for name in ("a", "c"):
        for field in mfsdp.ShampooState._fields[1:]:
            parts = [of_tensor(r, getattr(r.shampoo, field), name) for r in (run, clean)]
            jax.tree.map(np.testing.assert_array_equal, *parts)
    assert sum(np.sum(x) for x in jax.tree.leaves(run.shampoo.nonfinite)) > 0


def test_train_step_raises_on_a_factor_that_is_not_finite() -> None:
    params = {"w": np.eye(4, dtype=np.float32), "bias": np.zeros(4, np.float32)}
    layout = mfsdp.plan(params, make_mesh(2), optimizer="shampoo")
    tx = mfsdp.shampoo(1e-2, layout=layout, epsilon=1e-3)

    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((batch @ params["w"] + jnp.expand_dims(params["bias"], 0)) ** 2)

    step = mfsdp.train_step(loss, tx, layout)
    owned = layout.shard(params)
    state = layout.init(tx, owned)
    batch = draw({"x": (4, 4)}, 0)["x"]
    owned, state, metrics = step(owned, state, batch)
    assert {k: int(x) for k, x in metrics["preconditioner"].items()} == {
        "failures": 0,
        "nonfinite": 0,
    }
    batch[0, 0] = np.inf
    with pytest.raises(mfsdp.PreconditionerError, match="1 factors were not finite") as error:
        step(owned, state, batch)
    assert error.value.counters == {"failures": 1, "nonfinite": 1}
    assert isinstance(error.value.outputs[0], mfsdp.OwnerParams)


# ---- missing gradients -------------------------------------------------------------------------


def nested(seed: int) -> dict[str, Any]:
    x = draw_any({"u": (4, 4), "v": (4, 4), "b": (6, 4), "bias": (4,)}, seed)
    return {"a": {"u": x["u"], "v": x["v"]}, "b": x["b"], "bias": x["bias"]}


def flat(tree: dict[str, Any]) -> dict[str, np.ndarray]:
    return {"u": tree["a"]["u"], "v": tree["a"]["v"], "b": tree["b"]}


PRESENCE: list[tuple[Any, str]] = [
    ({"a": {"u": True, "v": True}, "b": True, "bias": True}, ""),
    ({"a": {"u": True, "v": np.False_}, "b": True, "bias": True}, "v"),
    ({"a": False, "b": True, "bias": True}, "uv"),
    (False, "uvb"),
    (True, ""),
]


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_gradient_is_not_a_zero_one(form: str) -> None:
    """The leaf keeps value and state; the step still counts, for its bias corrections too."""
    options = {
        "betas": (0.9, 0.9),
        "epsilon": 1e-3,
        "weight_decay": 0.1,
        "iterate_averaging": mfsdp.ClassicMomentum(),
        "grafting": mfsdp.AdamGrafting(),
    }
    run = Run(form, make("shampoo", **options), nested(0), n=2)
    oracle, want = oracle_of("shampoo", **options), flat(nested(0))
    got = run.canonical(run.params)
    for t, (present, missing) in enumerate(PRESENCE, 1):
        before, grads = flat(got), nested(t)
        spread = {"a": {"u": False, "v": False}, "b": False, "bias": False}
        # A prefix that is one bool compiles the step anew; the rest have one structure.
        whole = jax.tree.map(lambda p, s: jax.tree.map(lambda _: p, s), present, spread)
        bare = isinstance(present, bool)
        got = run.step(grads, present if bare and form == "single" else whole)
        want = oracle.step(want, {k: g for k, g in flat(grads).items() if k not in missing})
        assert_trees_close(flat(got), want, atol=1e-5)
        for name in missing:
            np.testing.assert_array_equal(flat(got)[name], before[name])
    assert int(run.shampoo.count) == len(PRESENCE)


def test_presence_of_another_tree_is_refused() -> None:
    params = draw_any({"a": (4, 4), "b": (4, 4)}, 0)
    for form in FORMS:
        run = Run(form, make("shampoo"), params, n=2)
        grads = params if run.layout is None else run.layout.trainable(run.layout.shard(params))
        with pytest.raises(ValueError, match="present is no prefix of the parameter tree"):
            jax.eval_shape(
                lambda g, s, tx=run.tx: tx.update(g, s, g, present={"a": True, "c": False}),
                grads,
                run.state,
            )


# ---- dtypes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_parameters_have_float32_factors(form: str, method: str) -> None:
    """And the update of the same numbers in float32, rounded."""
    shapes = {"w": (4, 4), "bias": (4,)}
    params = draw_any(shapes, 0, jnp.bfloat16)
    steps = gradients(6, shapes, jnp.bfloat16)
    options = {"epsilon": 1e-3, "precondition_frequency": 3}
    run = Run(form, make(method, **options), params, n=2)
    exact = Run(form, make(method, **options), jax.tree.map(np.float32, params), n=2)
    kept = {x.dtype for x in jax.tree.leaves(run.shampoo) if x.ndim}
    assert kept == {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}
    for grads in steps:
        before = jax.tree.map(jax.typeof, run.state)
        run.step(grads)
        exact.step(jax.tree.map(np.float32, grads))
        assert jax.tree.map(jax.typeof, run.state) == before
        for u, v in zip(*(jax.tree.leaves(r.updates) for r in (run, exact)), strict=True):
            assert u.dtype == jnp.bfloat16
            np.testing.assert_allclose(np.float32(u), np.float32(v), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_factors_in_float64_for_float32_parameters(method: str) -> None:
    """Closer to the oracle than float32 factors would come: the direction is rounded once."""
    kind = mfsdp.EigenvalueCorrected if method == "soap" else mfsdp.RootInverse
    shapes = {"w": (6, 4)}
    options = {
        "betas": (0.0, 0.9),
        "epsilon": 1e-10,
        "precondition_frequency": 1,
        "learning_rate": 1.0,
    }
    options |= {"start_preconditioning_step": 3, "use_bias_correction": False}
    with jax.enable_x64(True):
        params = {"w": np.zeros((6, 4), np.float32)}
        run = Run(
            "single", make(method, preconditioner=kind(factor_dtype="float64"), **options), params
        )
        (state,) = kronecker_states(run.shampoo)
        assert {x.dtype for x in jax.tree.leaves(state)} == {np.dtype(np.float64)}
        oracle = oracle_of(method, **options)
        for grads in gradients(4, shapes):
            run.step(grads)
            step = oracle.step({"w": np.zeros((6, 4))}, grads)["w"]
            got = np.asarray(run.updates["w"])
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, step, rtol=0, atol=2e-6 * np.abs(step).max())


# ---- what must hold whatever the numbers -------------------------------------------------------

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "shampoo": ("shampoo", {}),
    "grafted": ("shampoo", {"grafting": mfsdp.AdamGrafting()}),
    "kl, trace scaling": (
        "shampoo",
        {"preconditioner": mfsdp.RootInverse(kl=True, trace_scaling_exponent=0.5)},
    ),
    "pseudo-inverse": (
        "shampoo",
        {
            "epsilon": 0.0,
            "preconditioner": mfsdp.RootInverse(root=mfsdp.EighRoot(mfsdp.PseudoInverse())),
        },
    ),
    "newton": ("shampoo", {"preconditioner": mfsdp.RootInverse(root=mfsdp.CoupledNewtonRoot())}),
    "eigendecomposed": ("shampoo", {"preconditioner": mfsdp.Eigendecomposed()}),
    "soap": ("soap", {"precondition_frequency": 1}),
    "soap by QR": (
        "soap",
        {
            "precondition_frequency": 1,
            "preconditioner": mfsdp.EigenvalueCorrected(basis=mfsdp.QRBasis()),
        },
    ),
    "spectral": ("shampoo", {"preconditioner": mfsdp.SpectralDescent()}),
    "sign": ("shampoo", {"preconditioner": mfsdp.SignDescent()}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_zero_gradients_give_exactly_zero_updates(kind: str) -> None:
    method, options = KINDS[kind]
    params = draw({"w": (4, 6), "v": (4, 4)}, 0)
    zeros = jax.tree.map(np.zeros_like, params)
    run = Run("single", make(method, **options), params)
    for _ in range(2):
        run.step(zeros)
        assert not any(np.asarray(u).any() for u in jax.tree.leaves(run.updates))
        assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(run.state))
    run.step(draw({"w": (4, 6), "v": (4, 4)}, 1))
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves((run.updates, run.state)))
    assert all(np.asarray(u).any() for u in jax.tree.leaves(run.updates))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(run.shampoo.failures))


@pytest.mark.parametrize("method", METHODS)
def test_defaults_work_on_one_device(method: str) -> None:
    params = {"kernel": np.ones((4, 6), np.float32), "bias": np.zeros(6, np.float32)}
    tx = METHODS[method](1e-3)
    state = tx.init(params)
    grads = draw({"kernel": (4, 6), "bias": (6,)}, 1)
    updates, state = jax.jit(tx.update)(grads, state, params)
    moved = optax.apply_updates(params, updates)
    for name, x in moved.items():
        assert np.isfinite(x).all()
        assert (x != params[name]).all()
        assert np.sum((np.asarray(x) - params[name]) * grads[name]) < 0, "downhill"


@pytest.mark.parametrize("method", METHODS)
def test_one_block_is_one_block_however_large_the_limit(method: str) -> None:
    shapes = {"w": (6, 4)}
    results = []
    for limit in (6, math.inf):
        options = {"epsilon": 1e-3, "max_preconditioner_dim": limit, "precondition_frequency": 1}
        run = Run("single", make(method, **options), draw(shapes, 0))
        results.append(run.run(gradients(3, shapes))["w"])
    np.testing.assert_array_equal(results[1], results[0])
    options = {"epsilon": 1e-3, "max_preconditioner_dim": 4, "precondition_frequency": 1}
    cut = Run("single", make(method, **options), draw(shapes, 0)).run(gradients(3, shapes))["w"]
    assert np.abs(cut - results[0]).max() > 1e-3


def test_a_merged_tensor_has_the_update_of_its_reshape() -> None:
    """(3, 4, 5) with at most 12 becomes 12 x 5; with order 3 as the target it stays."""
    x, g = (draw({"w": (3, 4, 5)}, seed)["w"] for seed in (0, 1))
    options = {"epsilon": 1e-3, "max_preconditioner_dim": 12}

    def step(x: np.ndarray, g: np.ndarray, **more: Any) -> np.ndarray:
        return Run("single", make("shampoo", **options, **more), {"w": x}).step({"w": g})["w"]

    merged = step(x, g)
    np.testing.assert_array_equal(merged.reshape(12, 5), step(x.reshape(12, 5), g.reshape(12, 5)))
    apart = step(x, g, target_parameter_dimensionality=3)
    assert np.abs(apart - merged).max() > 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_compiled_equals_eager(method: str) -> None:
    options = {"precondition_frequency": 2, "stagger": False, "grafting": mfsdp.AdamGrafting()}
    shapes = {"w": (4, 4)}
    with jax.enable_x64(True):
        run = Run("single", make(method, **options), draw_any(shapes, 0, np.float64))
        params, state = run.params, run.state
        for grads in gradients(2, shapes, np.float64):
            run.step(grads)
            with jax.disable_jit():
                params, state, _ = run._apply(params, state, grads)
            assert_trees_close((params, state), (run.params, run.state), atol=1e-9)


# ---- inside other programs ---------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_inside_the_users_shard_map_and_in_a_scan(method: str) -> None:
    """Six steps with refreshes: one after the other, in a scan, and in a scan in a shard_map."""
    options = {"epsilon": 1e-3, "precondition_frequency": 3, "start_preconditioning_step": 4}
    shapes = {"layers": (5, 4, 4), "bias": (8,)}
    run = Run("owner", make(method, **options), draw_any(shapes, 0), [rules.stacked("layers")])
    layout, tx = run.layout, run.tx
    start = (run.params, run.state)
    steps = gradients(6, shapes)
    want = run.run(steps)
    stacked = jax.tree.map(lambda *g: jnp.stack(g), *(layout.shard(g) for g in steps))

    def all_steps(params: Any, state: Any, grads: Any) -> Any:
        def body(carry: Any, g: Any) -> Any:
            return run._apply(*carry, layout.trainable(g))[:2], None

        return jax.lax.scan(body, (params, state), grads)[0]

    specs = (layout.specs, layout.state_specs(tx))
    more = jax.tree.map(
        lambda p: jax.P(None, *p), layout.specs, is_leaf=lambda x: isinstance(x, jax.P)
    )
    inside = jax.shard_map(all_steps, mesh=layout.mesh, in_specs=(*specs, more), out_specs=specs)
    for program in (all_steps, inside):
        params, state = jax.jit(program)(*start, stacked)
        assert_trees_close(layout.unshard(params), want, atol=1e-6)
        assert_trees_close(state, run.state, atol=1e-5)


# ---- errors ------------------------------------------------------------------------------------

QR_PINV = mfsdp.QRBasis(rank_deficiency=mfsdp.PseudoInverse())
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("shampoo", {"learning_rate": -0.1}, "learning_rate=-0.1"),
    ("shampoo", {"learning_rate": math.nan}, "learning_rate=nan"),
    ("shampoo", {"betas": (1.0, 0.9)}, r"betas\[0\]=1.0"),
    ("shampoo", {"betas": (-0.1, 0.9)}, r"betas\[0\]=-0.1"),
    ("shampoo", {"betas": (0.9, 0.0)}, r"betas\[1\]=0.0 must be in \(0, 1\]"),
    ("soap", {"betas": (0.9, 1.5)}, r"betas\[1\]=1.5"),
    ("soap", {"betas": (0.9, math.nan)}, r"betas\[1\]=nan"),
    ("shampoo", {"beta3": 1.0}, "beta3=1.0"),
    ("shampoo", {"epsilon": 0.0}, "epsilon=0.0"),
    ("soap", {"epsilon": -1e-8}, "epsilon=-1e-08"),
    ("shampoo", {"epsilon": math.inf}, "epsilon=inf"),
    ("shampoo", {"weight_decay": -0.1}, "weight_decay=-0.1"),
    ("shampoo", {"weight_decay_type": "adamw"}, "weight_decay_type='adamw' must be one of"),
    (
        "shampoo",
        {"weight_decay_type": "corrected", "learning_rate": ramp(0.1, 0.0)},
        "needs peak_learning_rate",
    ),
    ("shampoo", {"max_preconditioner_dim": 0}, "max_preconditioner_dim=0 must be an int >= 1"),
    ("shampoo", {"max_preconditioner_dim": 2.5}, "max_preconditioner_dim=2.5"),
    ("soap", {"target_parameter_dimensionality": 0}, "target_parameter_dimensionality=0"),
    ("shampoo", {"precondition_frequency": 0}, "precondition_frequency=0 must be an int >= 1"),
    ("soap", {"precondition_frequency": 2.0}, "precondition_frequency=2.0"),
    ("soap", {"precondition_frequency": True}, "precondition_frequency=True"),
    ("shampoo", {"start_preconditioning_step": 0}, "start_preconditioning_step=0"),
    ("shampoo", {"first_refresh": "never"}, "first_refresh='never' must be one of"),
    ("soap", {"first_step": "zero"}, "first_step='zero' must be one of"),
    (
        "soap",
        {"first_step": "skip", "start_preconditioning_step": 3},
        "start_preconditioning_step=1",
    ),
    ("soap", {"first_step": "skip", "first_refresh": "spread"}, 'first_refresh="all"'),
    (
        "shampoo",
        {"preconditioner": mfsdp.RootInverse(root=mfsdp.EighRoot(mfsdp.PseudoInverse()))},
        "epsilon=1e-12 must be 0 with PseudoInverse",
    ),
    ("shampoo", {"preconditioner": mfsdp.Eigendecomposed(basis=QR_PINV)}, "must be 0 with Pseudo"),
]
BAD_TYPES: list[tuple[str, dict[str, Any], str]] = [
    ("shampoo", {"stagger": "no"}, "stagger='no' must be True or False"),
    ("soap", {"use_bias_correction": 1}, "use_bias_correction=1"),
    ("shampoo", {"rest": 1e-3}, "rest=0.001 must be an optax transformation"),
    ("shampoo", {"iterate_averaging": 0.9}, r"iterate_averaging=0.9 must be mfsdp\.Classic"),
    ("soap", {"preconditioner": mfsdp.RootInverse()}, r"must be a mfsdp\.EigenvalueCorrected"),
    ("shampoo", {"epsilon": "small"}, "epsilon='small'"),
    ("shampoo", {"learning_rate": None}, "learning_rate=None"),
]


@pytest.mark.parametrize(("method", "options", "message"), BAD)
def test_bad_options_are_refused_at_construction(
    method: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(method, **options)(layout=None)


@pytest.mark.parametrize(("method", "options", "message"), BAD_TYPES)
def test_options_of_another_type_are_named(
    method: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        make(method, **options)(layout=None)


UNNAMED: list[tuple[dict[str, Any], str]] = [
    ({"betas": 0.9}, "betas=0.9"),
    ({"betas": (0.9, 0.9, 0.9)}, "betas="),
    ({"betas": (0.9, "1")}, r"betas\[1\]='1'"),
    ({"preconditioner": "soap"}, "preconditioner='soap'"),
    ({"grafting": "adam"}, "grafting='adam'"),
    ({"grafting": mfsdp.AdamGrafting}, "grafting=<class"),
    ({"max_preconditioner_dim": True}, "max_preconditioner_dim=True"),
    ({"peak_learning_rate": 0.0, "weight_decay_type": "corrected"}, "peak_learning_rate=0.0"),
    ({"learning_rate": 0.0, "weight_decay_type": "independent"}, "learning_rate"),
    ({"preconditioner": mfsdp.RootInverse(factor_dtype="float64")}, "float64.*x64"),
]


@pytest.mark.parametrize(("options", "message"), UNNAMED)
def test_other_bad_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make("shampoo", **options)(layout=None)


def other_preconditioners() -> list[tuple[Callable[[], Any], str]]:
    return [
        (lambda: mfsdp.AdamGrafting(beta2=0.0), "beta2=0.0"),
        (lambda: mfsdp.RMSpropGrafting(epsilon=0.0), "epsilon=0.0"),
        (lambda: mfsdp.AdaGradGrafting(beta2=0.9), "beta2=0.9 must be 1"),
        (lambda: mfsdp.ClassicMomentum(1.0), "momentum=1.0"),
        (lambda: mfsdp.ClassicMomentum(dampening=-0.1), "dampening=-0.1"),
        (lambda: mfsdp.ScheduleFree(0.0), r"train_interp_coeff=0.0 must be in \(0, 1\]"),
        (lambda: mfsdp.GeneralizedPrimalAveraging(eval_interp_coeff=1.0), "eval_interp_coeff=1.0"),
    ]


@pytest.mark.parametrize(("build", "message"), other_preconditioners())
def test_records_refuse_bad_values(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("preconditioner", "message"),
    [
        (mfsdp.SpectralDescent(), "SpectralDescent needs blocks of order 2, got one of order 1"),
        (
            mfsdp.EigenvalueCorrected(inverse_exponent_override={1: 0.0}),
            r"inverse_exponent_override\[1\]=0.0",
        ),
        (mfsdp.RootInverse(inverse_exponent_override={1: -0.5}), "-0.5"),
        (mfsdp.RootInverse(factor_dtype="bfloat16"), "bfloat16"),
    ],
)
def test_what_a_preconditioner_cannot_take_raises_before_any_step(
    preconditioner: Any, message: str
) -> None:
    params = {"v": jax.ShapeDtypeStruct((4,), jnp.float32)}

    def build_and_trace(g: Any) -> Any:
        tx = mfsdp.shampoo(1e-2, rules=[rules.tensor("v")], preconditioner=preconditioner)
        return tx.update(g, tx.init(g), g)

    with pytest.raises((ValueError, TypeError), match=message):
        jax.eval_shape(build_and_trace, params)


@pytest.mark.parametrize("method", METHODS)
def test_a_layout_for_another_method_says_what_to_plan(method: str) -> None:
    layout = mfsdp.plan(draw({"w": (16, 8)}, 0), make_mesh(2))
    scale = {"shampoo": mfsdp.scale_by_shampoo, "soap": mfsdp.scale_by_soap}[method]
    for build in (lambda: METHODS[method](1e-3, layout=layout), lambda: scale(layout=layout)):
        with pytest.raises(
            ValueError, match=r"planned for muon .*optimizer=\"shampoo\" or \"soap\""
        ):
            build()


def test_rules_with_a_layout_are_refused() -> None:
    layout: OwnerLayout = mfsdp.plan(draw({"w": (4, 8)}, 0), make_mesh(2), optimizer="soap")
    with pytest.raises(ValueError, match=r"rules=.*mfsdp\.plan"):
        mfsdp.soap(1e-3, layout=layout, rules=RULES)


@pytest.mark.parametrize("averaging", [mfsdp.ScheduleFree(), mfsdp.GeneralizedPrimalAveraging()])
def test_averaging_without_parameters_says_what_is_missing(averaging: Any) -> None:
    params = draw({"w": (4, 4)}, 0)
    tx = mfsdp.shampoo(1e-2, iterate_averaging=averaging)
    with pytest.raises(ValueError, match=r"tx\.update\(grads, state, params\)"):
        jax.eval_shape(lambda g: tx.update(g, tx.init(g)), params)
    with pytest.raises(ValueError, match="holds 0 iterate averages"):
        mfsdp.averaged_params(mfsdp.shampoo(1e-2).init(params), params, averaging)
