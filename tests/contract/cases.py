"""An optimizer of the registry on a tree, in one form of the parameters, with one compiled step."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.layout import rules
from tests.contract.registry import OPTIMIZERS, Optimizer
from tests.models import make_mesh
from tests.test_optimizers import draw

each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.id)
each_form = pytest.mark.parametrize("form", ["single", "owner"])

# Of everything a tree may hold: matrices, a stack of them, fused ones, a vector, and what no
# optimizer moves: a frozen leaf, integers, a leaf without elements, None.
MATRICES = {"tall": (16, 8), "wide": (8, 16), "layers": (3, 8, 16), "qkv": (8, 24)}
SHAPES = {**MATRICES, "bias": (16,), "base": (9, 7), "empty": (0, 4)}
RULES = [rules.stacked("layers"), rules.fused("qkv", (16, 8)), rules.frozen("base")]

FEW = {"w": (8, 8), "tall": (16, 8), "bias": (16,)}


def whole_tree(seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Any]:
    """Parameters or gradients on the canonical tree."""
    tree: dict[str, Any] = draw(shapes, seed)
    index = np.arange(6, dtype=np.int32).reshape(2, 3)
    return tree | {"index": index if seed == 0 else np.zeros_like(index), "none": None}


class Case:
    """A transformation on a canonical tree: on one device, or on the owners of ``n`` devices."""

    def __init__(
        self,
        make: Callable[[Any], optax.GradientTransformation],
        tree: Any,
        n: int | None = None,
        *,
        explicit: bool = True,
        given: Any = None,
        planned_for: str = "muon",
    ) -> None:
        self.tree = tree
        self.layout = None
        if n is not None:
            mesh = make_mesh(n, explicit)
            self.layout = mfsdp.plan(tree, mesh, rules=given, optimizer=planned_for)
        self.tx = make(self.layout)
        self.step = jax.jit(self.apply)

    def apply(self, params: Any, state: Any, grads: Any) -> tuple[Any, Any, Any]:
        """New parameters, new state, updates."""
        updates, state = self.update(grads, state, params)
        if self.layout is None:
            return optax.apply_updates(params, updates), state, updates
        return self.layout.apply_updates(params, updates), state, updates

    def update(self, grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        tx = optax.with_extra_args_support(self.tx)
        return tx.update(grads, state, self.seen(params), **extra)

    def seen(self, params: Any) -> Any:
        """The part of the parameters that the optimizer sees."""
        return params if self.layout is None else self.layout.trainable(params)

    def start(self) -> tuple[Any, Any]:
        """Parameters and state, new buffers each time."""
        params = self.hold(self.tree)
        if self.layout is None:
            return params, self.tx.init(params)
        return params, self.layout.init(self.tx, params)

    def hold(self, tree: Any) -> Any:
        """A canonical tree in this form."""
        return jax.tree.map(jnp.array, tree) if self.layout is None else self.layout.shard(tree)

    def grads(self, tree: Any) -> Any:
        return self.seen(self.hold(tree))

    def canonical(self, params: Any) -> Any:
        """Parameters, or updates, of this form as a canonical numpy tree."""
        if self.layout is not None:
            frozen = params.frozen or self.hold(self.tree).frozen
            params = self.layout.unshard(params._replace(frozen=frozen))
        return jax.tree.map(np.asarray, params)

    def run(self, grads: Iterable[Any]) -> tuple[Any, Any]:
        """Canonical parameters and state after a step with each of the canonical gradients."""
        params, state = self.start()
        for g in grads:
            params, state, _ = self.step(params, state, self.grads(g))
        return self.canonical(params), state

    def updates(self, grads: Sequence[Any], state: Any = None) -> list[Any]:
        """The canonical updates of each of the gradients, all at the first parameters."""
        params, fresh = self.start()
        state = fresh if state is None else state
        found = []
        for g in grads:
            _, state, updates = self.step(params, state, self.grads(g))
            found.append(self.canonical(updates))
        return found


def devices(form: str) -> int | None:
    return None if form == "single" else 8


def own_case(
    optimizer: Optimizer,
    tree: Any,
    n: int | None = None,
    *,
    explicit: bool = True,
    **overrides: Any,
) -> Case:
    """The optimizer, with other options, on any tree."""
    make = partial(optimizer.make, **overrides)
    return Case(make, tree, n, explicit=explicit, planned_for=optimizer.planned_for)


@cache
def whole_case(optimizer: Optimizer, n: int | None, explicit: bool = True) -> Case:
    """The optimizer on the whole tree; shared, because it keeps its compiled step."""
    return Case(
        lambda layout: optimizer.make(layout, rules=RULES),
        whole_tree(0),
        n,
        explicit=explicit,
        given=RULES,
        planned_for=optimizer.planned_for,
    )


@cache
def few_case(optimizer: Optimizer, form: str) -> Case:
    """The optimizer on few leaves; shared as well."""
    return own_case(optimizer, draw(FEW, 0), devices(form))


@cache
def undecayed_case(optimizer: Optimizer, form: str) -> Case:
    """``few_case`` without weight decay."""
    if not optimizer.decays:
        return few_case(optimizer, form)
    return own_case(optimizer, draw(FEW, 0), devices(form), weight_decay=0.0)


def wrapped(optimizer: Optimizer, form: str, wrap: Callable[[Any, Any], Any]) -> Case:
    """``wrap(tx, layout)`` on the tree of ``few_case``."""
    return Case(
        lambda layout: wrap(optimizer.make(layout), layout),
        draw(FEW, 0),
        devices(form),
        planned_for=optimizer.planned_for,
    )


def few_grads(count: int) -> list[dict[str, np.ndarray]]:
    return [draw(FEW, seed) for seed in range(1, count + 1)]


def counts(state: Any) -> list[jax.Array]:
    """Every ``count`` in a state."""
    items = jax.tree_util.tree_leaves_with_path(state)
    return [x for keys, x in items if getattr(keys[-1], "name", "") == "count"]


def assert_identical(got: Any, want: Any) -> None:
    """Bit for bit, dtypes included."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (keys, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        assert a.dtype == b.dtype
        message = jax.tree_util.keystr(keys)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=message)
