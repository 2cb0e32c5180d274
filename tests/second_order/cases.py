"""Shapes, runs and oracles that the tests of Shampoo and SOAP share."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.layout import rules
from matrixfsdp_jax.layout.phases import refresh_phases
from tests.models import make_mesh
from tests.oracle_second_order import Due, Graft, SecondOrderOracle, block_slices, merged_dims
from tests.test_optimizers import Trainer, draw

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


def pairs(a: list[np.ndarray], b: list[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    return zip(a, b, strict=True)


def kronecker_states(state: mfsdp.ShampooState) -> list[Any]:
    """The states of all groups of blocks that have factors."""

    def has_factors(x: Any) -> bool:
        return hasattr(x, "factors")

    found = jax.tree.leaves(state.preconditioner, is_leaf=has_factors)
    return [x for x in found if has_factors(x)]


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
