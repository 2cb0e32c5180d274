"""The single place that lifts a transform onto devices.

A *stack transform* is an optax transformation over ``{class key: [N, W, *dims]}``, written with no
mesh in mind. It is given as ``make(local)``: ``local(key, table)`` is the part of
a constant ``[N, W, ...]`` table of a class (one entry per slot) that belongs to the stacks at hand.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from matrixfsdp_jax.owner import collectives, replicas
from matrixfsdp_jax.owner.branches import by_composition
from matrixfsdp_jax.owner.params import OwnerLayout, OwnerParams

PyTree = Any
Local = Callable[[str, Any], jax.Array]
MakeStackTransform = Callable[..., optax.GradientTransformation]


def on_owners(
    make: MakeStackTransform, layout: OwnerLayout, **hyperparams: Any
) -> optax.GradientTransformationExtraArgs:
    """A stack transform run by the owners, each on its own matrices.

    Works on global stacks (it then runs under ``jax.shard_map``, so nothing is left to the
    partitioner) and on local ones inside a ``shard_map`` over the owner axis (never nested).
    Extra arguments are replicated. ``make(local, **hyperparams)`` may be given arrays: those of
    ``optax.inject_hyperparams`` are traced, and a ``shard_map`` over Explicit axes closes over
    none, so they enter it as arguments.

    Collectives: none but those of the transform itself.
    """
    make = by_composition(make, layout.plan)
    axis, manual_axis = layout.owner_axis, layout.owner_axis + layout.sharing_axis
    arrays = {k: v for k, v in hyperparams.items() if isinstance(v, jax.Array)}
    fixed = {k: v for k, v in hyperparams.items() if k not in arrays}

    def build(arrays: dict[str, jax.Array]) -> optax.GradientTransformationExtraArgs:
        def local(key: str, table: Any) -> jax.Array:
            del key
            return collectives.local_slots(table, axis, layout.sharing_axis)

        return optax.with_extra_args_support(make(local, **fixed, **arrays))

    def lift(fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        if collectives.manual_over(manual_axis):
            return fn
        return jax.shard_map(fn, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs)

    def placed(stacks: PyTree) -> PyTree:
        # Explicit meshes take only what is sharded: not bare shapes (jax.eval_shape), nor the zeros
        # of a skipped step (optax.apply_if_finite).
        if collectives.manual_over(manual_axis):
            return stacks
        return jax.device_put(stacks, layout.update_shardings.stacks)

    def init(stacks: PyTree) -> PyTree:
        stacks = placed(stacks)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), stacks)
        specs = layout.tree_specs(jax.eval_shape(build(arrays).init, shapes))
        lifted = lift(lambda s, a: build(a).init(s), (layout.update_specs.stacks, P()), specs)
        return lifted(stacks, arrays)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        specs, state_specs = layout.update_specs.stacks, layout.tree_specs(state)
        updates = placed(updates)

        def run(
            updates: PyTree, state: PyTree, params: PyTree, extra: PyTree, arrays: PyTree
        ) -> Any:
            return build(arrays).update(updates, state, params, **extra)

        lifted = lift(
            run,
            (specs, state_specs, None if params is None else specs, P(), P()),
            (specs, state_specs),
        )
        return lifted(updates, state, params, extra, arrays)

    return optax.GradientTransformationExtraArgs(init, update)


def global_norm(tree: OwnerParams, layout: OwnerLayout) -> jax.Array:
    """Euclidean norm of owner params, gradients or updates over all devices.

    Replicated leaves count once and frozen leaves not at all. Float32 (float64 for float64).
    Works on global arrays and inside ``shard_map``.

    Collectives: one all-reduce of a scalar.
    """
    return jnp.sqrt(_total(_sum_squares, tree, layout))


def all_finite(tree: OwnerParams, layout: OwnerLayout) -> jax.Array:
    """Whether no trainable entry on any device is infinite or NaN; the same bool on all of them.

    Works on global arrays and inside ``shard_map``.

    Collectives: one all-reduce of a scalar.
    """
    return _total(_has_nonfinite, tree, layout) == 0


def _total(
    measure: Callable[[jax.Array], jax.Array], tree: OwnerParams, layout: OwnerLayout
) -> jax.Array:
    """The sum of ``measure`` of every leaf over all devices, replicated leaves counted once."""
    axis = layout.owner_axis + layout.sharing_axis
    tree = replicas.as_updates(layout, layout.trainable(tree))
    specs = replicas.like_masked(tree, layout.update_specs)

    def repeats(spec: P) -> int:
        """The number of devices that have the same part of a leaf; 0 if all have."""
        cut = {a for entry in spec for a in (entry if isinstance(entry, tuple) else (entry,)) if a}
        return math.prod(layout.mesh.shape[a] for a in axis if a not in cut) if cut else 0

    def total(tree: OwnerParams) -> jax.Array:
        flat_specs = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
        pairs = [(x, repeats(s)) for x, s in zip(jax.tree.leaves(tree), flat_specs, strict=True)]
        zero = jnp.zeros((), jnp.float32)
        split = sum((measure(x) / times for x, times in pairs if times), zero)
        whole = sum((measure(x) for x, times in pairs if not times), zero)
        return collectives.sum_over(split, axis) + whole

    if collectives.manual_over(axis):
        return total(tree)
    tree = jax.device_put(tree, replicas.like_masked(tree, layout.update_shardings))
    return jax.shard_map(total, mesh=layout.mesh, in_specs=(specs,), out_specs=P())(tree)


def _sum_squares(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.promote_types(jnp.float32, x.dtype))
    return jnp.sum(jnp.real(x * jnp.conj(x)))


def _has_nonfinite(x: jax.Array) -> jax.Array:
    return jnp.any(~jnp.isfinite(x)).astype(jnp.float32)
