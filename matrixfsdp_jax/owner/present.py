"""Leaves without a gradient in a step: no update, and their state stays as it is.

A missing gradient is not a zero one, which would decay averages and parameters. Which leaves have
one is said by the extra argument ``present`` of ``update``: a tree (or prefix) of bools, which may
be traced.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from matrixfsdp_jax.layout import leaves as tree_leaves
from matrixfsdp_jax.owner.params import OwnerLayout
from matrixfsdp_jax.owner.routed import canonical_shapes
from matrixfsdp_jax.owner.update import Local

PyTree = Any
Test = Callable[[Any], bool]
Choice = Callable[[Any, Any], Any]


def present_tables(layout: OwnerLayout, present: PyTree) -> dict[str, jax.Array]:
    """Class key -> ``[N, W]``, whether the leaf of a slot has a gradient; pads have none."""
    flags = jax.tree.leaves(_spread(present, canonical_shapes(layout)))
    tables = {}
    for c in layout.plan.classes:
        own = jnp.stack([jnp.asarray(flags[matrix.leaf], bool) for matrix in c.matrices])
        table = jnp.zeros((c.num_devices, c.num_waves), bool)
        tables[c.key] = table.at[tuple(np.array(c.slots).T)].set(own)
    return tables


def on_present_stacks(
    tx: optax.GradientTransformation, local: Local
) -> optax.GradientTransformationExtraArgs:
    """A stack transform that leaves slots alone where ``present`` (a dict of tables) is false."""

    def choose(present: Any, updates: PyTree) -> tuple[Test, Choice]:
        flags = {key: local(key, table) for key, table in present.items()}

        def per_class(x: Any) -> bool:
            return isinstance(x, dict) and set(x) == set(updates)

        return per_class, lambda new, old: {k: _where(flags[k], new[k], old[k]) for k in new}

    return _on_present(tx, choose)


def on_present_leaves(
    tx: optax.GradientTransformation, whole: PyTree
) -> optax.GradientTransformationExtraArgs:
    """The same on the user's own tree; ``whole`` is the tree for which ``present`` is given."""

    def choose(present: Any, updates: PyTree) -> tuple[Test, Choice]:
        paths, flags, _ = tree_leaves.flatten(_spread(present, whole))
        flag = {path: jnp.asarray(f, bool) for path, f in zip(paths, flags, strict=True)}
        own, leaves, treedef = tree_leaves.flatten(updates)

        def is_like(x: Any) -> bool:
            # Shapes and dtypes, because a tree that is one array has the structure of a count.
            return jax.tree.structure(x) == treedef and all(
                jnp.shape(a) == jnp.shape(b) and jnp.issubdtype(a.dtype, jnp.inexact)
                for a, b in zip(jax.tree.leaves(x), leaves, strict=True)
            )

        def by_leaf(x: Any) -> bool:
            return is_like(x) or (isinstance(x, dict) and set(x) == set(own))

        def chosen(new: Any, old: Any) -> Any:
            if is_like(new):
                pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), own, strict=True)
                return treedef.unflatten([_where(flag[p], a, b) for a, b, p in pairs])
            return {path: _where(flag[path], new[path], old[path]) for path in new}

        return by_leaf, chosen

    return _on_present(tx, choose)


def _on_present(
    tx: optax.GradientTransformation, choose: Callable[[Any, PyTree], tuple[Test, Choice]]
) -> optax.GradientTransformationExtraArgs:
    """``choose(present, updates)``: what of a tree is by parameter, and its new or old values."""
    tx = optax.with_extra_args_support(tx)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, *, present: Any = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        if present is None:
            return tx.update(updates, state, params, **extra)
        by_parameter, chosen = choose(present, updates)
        new, new_state = tx.update(updates, state, params, **extra)

        def kept(new: Any, old: Any) -> Any:
            return chosen(new, old) if by_parameter(new) else new

        still = chosen(new, jax.tree.map(jnp.zeros_like, new))
        return still, jax.tree.map(kept, new_state, state, is_leaf=by_parameter)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _spread(present: PyTree, tree: PyTree) -> PyTree:
    """``present`` with a flag at every leaf of ``tree``."""
    for flag in jax.tree.leaves(present):
        array = isinstance(flag, jax.Array | np.ndarray | np.bool) and flag.shape == ()
        if not isinstance(flag, bool) and not (array and flag.dtype == bool):
            raise TypeError(
                f"present holds {flag!r}; give True, False or an array of one bool for each leaf, "
                "in the structure of the parameters (or a prefix of it)"
            )
    try:
        return tree_leaves.spread(present, tree)
    except ValueError as error:
        raise ValueError(
            "present is no prefix of the parameter tree: give a bool for each leaf, in the "
            f"structure of the parameters ({error})"
        ) from error


def _where(flag: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """``flag`` has the leading dims of every leaf."""

    def pick(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(jnp.expand_dims(flag, range(flag.ndim, new.ndim)), new, old)

    return jax.tree.map(pick, new, old)
