"""Matrix leaves to one optimizer, the rest to another: on owner params and on any tree."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from matrixfsdp_jax.layout.costs import Method, method
from matrixfsdp_jax.layout.leaves import flatten, spread, states_of
from matrixfsdp_jax.layout.rules import route
from matrixfsdp_jax.layout.spec import Leaf, LeafRoute, Matrix, Plan, ShapeClass, is_inexact
from matrixfsdp_jax.owner.canonical import is_placeholder
from matrixfsdp_jax.owner.collectives import manual_over
from matrixfsdp_jax.owner.params import OwnerLayout, OwnerParams
from matrixfsdp_jax.owner.replicas import as_updates

PyTree = Any
Routes = dict[str, tuple[Leaf, LeafRoute]]


class RouteState(NamedTuple):
    """State of an optimizer on owner params: one part for the stacks, one for the rest."""

    matrix: Any
    rest: Any


def slot_tables(
    classes: tuple[ShapeClass, ...], value: Callable[[Matrix], float]
) -> dict[str, np.ndarray]:
    """One number per slot, float64 ``[N, W]`` per class; 0 in pad slots."""
    tables = {}
    for c in classes:
        table = np.zeros((c.num_devices, c.num_waves))
        for matrix, slot in zip(c.matrices, c.slots, strict=True):
            table[slot] = value(matrix)
        tables[c.key] = table
    return tables


def row_outputs(plan: Plan) -> dict[str, np.ndarray]:
    """Per class a table ``[N, W]``: 1 where a matrix is stored with its outputs as rows."""

    def value(matrix: Matrix) -> float:
        view = plan.leaves[matrix.leaf].route.view
        assert view is not None  # matrix leaves have a view
        return float((view.out_side == "rows") != matrix.transposed)

    return slot_tables(plan.classes, value)


def route_owned(
    matrix: optax.GradientTransformation,
    rest: optax.GradientTransformation,
    layout: OwnerLayout,
) -> optax.GradientTransformationExtraArgs:
    """One optimizer for the stacks, one for the rest, on owner params."""
    matrix, rest = _keep_dtypes(matrix), optax.with_extra_args_support(rest)

    def init(owned: OwnerParams) -> RouteState:
        check_owned(layout, owned)
        return RouteState(matrix.init(owned.stacks), rest.init(owned.rest))

    def update(
        updates: OwnerParams, state: RouteState, params: Any = None, **extra: Any
    ) -> tuple[OwnerParams, RouteState]:
        check_owned(layout, updates)
        stacks, rest_params = (None, None)
        if params is not None:
            params = as_updates(layout, params)
            check_owned(layout, params)
            stacks, rest_params = params.stacks, params.rest
        new_stacks, m_state = matrix.update(updates.stacks, state.matrix, stacks, **extra)
        new_rest, r_state = rest.update(updates.rest, state.rest, rest_params, **extra)
        return updates._replace(stacks=new_stacks, rest=new_rest), RouteState(m_state, r_state)

    return optax.GradientTransformationExtraArgs(init, update)


def check_owned(layout: OwnerLayout, owned: Any) -> None:
    """Refuse what an optimizer built with ``layout`` cannot update, and name what to use.

    More lenient than ``OwnerLayout.check_owned``: gradients have no frozen leaves, and optax may
    have masked stacks out.
    """
    if not isinstance(owned, OwnerParams):
        raise TypeError(
            f"this optimizer was built with layout={layout!r} and updates owner params "
            f"(layout.shard(params)), but got {type(owned).__name__}. Train with "
            "mfsdp.train_step, or hold the owner params in a flax TrainState; nnx.Optimizer "
            "holds a model's own tree, for which use the optimizer without a layout"
        )
    planned = layout.specs
    if set(owned.stacks) != set(planned.stacks) or set(owned.rest) != set(planned.rest):
        raise ValueError(
            f"owner params with stacks {sorted(owned.stacks)} and {len(owned.rest)} rest leaves "
            f"are not those of {layout!r}, with {sorted(planned.stacks)} and "
            f"{len(planned.rest)}; use the layout that sharded them"
        )
    local = manual_over(layout.owner_axis + layout.sharing_axis)
    for c in layout.plan.classes:
        shape = getattr(owned.stacks[c.key], "shape", None)  # None where optax masked it out
        sharding = layout.update_shardings.stacks[c.key]
        expected = sharding.shard_shape(c.stack_shape) if local else c.stack_shape
        if shape not in (None, expected):
            raise ValueError(
                f"stack {c.key!r} has shape {shape}, but this optimizer was built with {layout!r} "
                f"and expects {expected}; use the layout that sharded it"
            )


def route_tree(
    make_matrix: Callable[[Routes, PyTree], optax.GradientTransformation],
    rest: optax.GradientTransformation,
    rules: Any,
    optimizer: str | Method = "muon",
) -> optax.GradientTransformationExtraArgs:
    """One optimizer for matrix leaves, one for the rest, none for frozen ones, on any tree."""

    def build(tree: PyTree) -> optax.GradientTransformationExtraArgs:
        if isinstance(tree, OwnerParams):
            raise TypeError(
                "got owner params, but the optimizer was built without their layout; give layout="
            )
        masked = bool(states_of(optax.MaskedNode, tree))
        routed = (
            []
            if is_placeholder(tree)
            else route(tree, rules, optimizer=optimizer, allow_unused=masked)
        )
        labels = [r.route if is_inexact(leaf.dtype) else "frozen" for leaf, r in routed]
        routes = {leaf.path: (leaf, r) for leaf, r in routed}
        return _partition(tree, labels, make_matrix(routes, tree), rest)

    return _built_for(build)


def route_planned(
    make_matrix: Callable[[PyTree], optax.GradientTransformation],
    rest: optax.GradientTransformation,
    layout: OwnerLayout,
) -> optax.GradientTransformationExtraArgs:
    """``route_tree`` by the routes of a layout with sharded storage."""
    routes = {lp.leaf.path: lp for lp in layout.plan.leaves}

    def build(tree: PyTree) -> optax.GradientTransformationExtraArgs:
        if isinstance(tree, OwnerParams):
            raise TypeError(
                f"got owner params, but {layout!r} keeps parameters in the user's own tree; plan "
                'with storage="owner" for owner params'
            )
        paths = [] if is_placeholder(tree) else flatten(tree)[0]
        unknown = sorted(set(paths) - set(routes))
        if unknown:
            raise ValueError(f"{layout!r} has no leaf {unknown[:5]}; plan again with this tree")
        labels = [routes[p].route.route if routes[p].trainable else "frozen" for p in paths]
        return _partition(tree, labels, make_matrix(tree), rest)

    return _built_for(build)


def _partition(
    tree: PyTree,
    labels: Sequence[str],
    matrix: optax.GradientTransformation,
    rest: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    parts = {"matrix": _keep_dtypes(matrix), "rest": rest, "frozen": optax.set_to_zero()}
    return optax.partition(parts, jax.tree.unflatten(jax.tree.structure(tree), labels))


def _built_for(
    build: Callable[[PyTree], optax.GradientTransformationExtraArgs],
) -> optax.GradientTransformationExtraArgs:
    """A transform that is built for the tree at hand."""

    def init(params: PyTree) -> PyTree:
        return build(params).init(params)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        # Shapes alone: one gradient array may well stand at two paths, one parameter may not.
        shapes = jax.tree.map(lambda u: jax.ShapeDtypeStruct(u.shape, u.dtype), updates)
        return build(shapes).update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def _keep_dtypes(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """``tx`` with its updates cast to the dtype of the gradients."""
    tx = optax.with_extra_args_support(tx)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        new, state = tx.update(updates, state, params, **extra)
        return jax.tree.map(lambda u, g: u.astype(g.dtype), new, updates), state

    return optax.GradientTransformationExtraArgs(tx.init, update)


def mask_of(tree: PyTree, mask: Any) -> PyTree:
    """A weight-decay mask as a tree (or prefix) of bools; None means all.

    Raises:
      TypeError: if it holds anything else.
      ValueError: if it is no prefix of the tree.
    """
    mask = True if mask is None else mask(tree) if callable(mask) else mask
    for value in jax.tree.leaves(mask, is_leaf=lambda x: x is None):
        if not isinstance(value, (bool, np.bool)):
            raise TypeError(
                f"weight_decay_mask holds {value!r}; give True or False for each leaf, in the "
                "structure of the parameters (or a prefix of it), or a function of them"
            )
    if is_placeholder(tree):
        return mask
    try:
        return spread(mask, tree)
    except ValueError as error:
        raise ValueError(
            "weight_decay_mask is not a prefix of the parameter tree "
            f"({error}); give booleans in the structure of the parameters, or a function of them"
        ) from error


def canonical_shapes(layout: OwnerLayout) -> PyTree:
    """The user's own tree that was planned, of shapes and dtypes."""
    shapes = [jax.ShapeDtypeStruct(lp.leaf.shape, lp.leaf.dtype) for lp in layout.plan.leaves]
    return jax.tree.unflatten(layout.treedef, shapes)


def decay_tables(
    layout: OwnerLayout, mask: Any, factor: Callable[[Matrix], float]
) -> dict[str, np.ndarray]:
    """The weight-decay mask, given in canonical names, as 0 or 1 over the factor of each slot."""
    keep = jax.tree.leaves(mask_of(canonical_shapes(layout), mask))
    return slot_tables(layout.plan.classes, lambda m: keep[m.leaf] / factor(m))


def check_layout(layout: Any, rules: Any, *, oriented: bool) -> None:
    """Refuse a ``layout=`` that an optimizer cannot take, and rules beside it.

    ``oriented``: whether the optimizer takes matrices with ``m <= n``, or tensors as they are.

    Raises:
      TypeError: for what is no ``OwnerLayout``.
      ValueError: for a layout that was planned for a method of the other kind.
    """
    if not isinstance(layout, OwnerLayout):
        raise TypeError(
            f"layout={layout!r} must be an OwnerLayout, from mfsdp.plan(params, mesh, ...), or None"
        )
    refuse_rules(rules)
    record = method(layout.plan.optimizer)
    if record.oriented != oriented:
        stores = (
            "stores tall matrices transposed" if record.oriented else "stores tensors as they are"
        )
        names = '"muon"' if oriented else '"shampoo" or "soap"'
        raise ValueError(
            f"the layout was planned for {record.name} and {stores}; plan it with optimizer={names}"
        )


def refuse_rules(rules: Any) -> None:
    """Rules beside a layout would be ignored, so they are refused."""
    if rules is not None:
        raise ValueError(
            "rules= is for layout=None; a layout already has its routes, so give the rules to "
            "mfsdp.plan(params, mesh, rules=...)"
        )
