"""What stands around an optimizer and looks at all gradients at once: clipping and skipping."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from matrixfsdp_jax.owner.params import OwnerLayout
from matrixfsdp_jax.owner.routed import check_owned
from matrixfsdp_jax.owner.update import all_finite, global_norm
from matrixfsdp_jax.transforms.checks import check_number, check_transformation

PyTree = Any


def clip_by_global_norm(
    max_norm: float, *, layout: OwnerLayout | None = None
) -> optax.GradientTransformation:
    """Scale all updates down so that their norm over all devices is at most ``max_norm``.

    With a layout it is right on global owner params and inside ``shard_map``, where
    ``optax.clip_by_global_norm`` would silently take each device's own norm. With ``layout=None``
    it is that function.

    Collectives: one all-reduce of a scalar.
    Raises: ValueError if ``max_norm`` is not a positive number.
    """
    check_number("max_norm", max_norm, low=0.0, above_low=True)
    if layout is None:
        return optax.clip_by_global_norm(max_norm)

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        del params
        check_owned(layout, updates)
        norm = global_norm(updates, layout)
        factor = max_norm / jnp.maximum(norm, max_norm)
        return jax.tree.map(lambda u: (u * factor).astype(u.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


class SkipNonfiniteState(NamedTuple):
    """State of ``skip_nonfinite``.

    skipped: number of updates skipped so far, int32.
    consecutive: number of those since the last update that was made, int32.
    inner: state of the wrapped transformation.
    """

    skipped: jax.Array
    consecutive: jax.Array
    inner: PyTree


def skip_nonfinite(
    tx: optax.GradientTransformation, *, layout: OwnerLayout | None = None
) -> optax.GradientTransformationExtraArgs:
    """Make no update where a gradient holds an infinity or a NaN, on any device.

    The decision is one for all devices. A skipped update is zero for every leaf (weight decay
    included) and leaves the state of ``tx`` as it is: momentum, second moments and the counts of
    schedules. Unlike ``optax.apply_if_finite`` it never lets a non-finite update through, and it
    works inside ``shard_map``.

    Args:
      tx: the transformation to guard; put clipping and ``optax.MultiSteps`` inside (an accumulator
        of optax outside keeps a NaN for ever).
      layout: an ``OwnerLayout`` for owner params. None: any tree, on one device.

    Returns:
      A transformation with ``SkipNonfiniteState``; its ``skipped`` counts, so read it now and then.

    Collectives: one all-reduce of a scalar, beyond those of ``tx``.
    """
    check_transformation("tx", tx)
    tx = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> SkipNonfiniteState:
        return SkipNonfiniteState(
            jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), tx.init(params)
        )

    def update(
        updates: PyTree, state: SkipNonfiniteState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, SkipNonfiniteState]:
        if layout is None:
            finite = jnp.all(
                jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(updates)])
            )
        else:
            check_owned(layout, updates)
            finite = all_finite(updates, layout)

        def make() -> tuple[PyTree, PyTree]:
            return tx.update(updates, state.inner, params, **extra)

        def skip() -> tuple[PyTree, PyTree]:
            shapes = jax.eval_shape(make)[0]
            zeros = jax.tree.map(lambda s, u: jnp.zeros_like(u, dtype=s.dtype), shapes, updates)
            return zeros, state.inner

        new, inner = jax.lax.cond(finite, make, skip)
        skipped = jnp.where(finite, state.skipped, optax.safe_increment(state.skipped))
        consecutive = jnp.where(finite, 0, optax.safe_increment(state.consecutive))
        return new, SkipNonfiniteState(skipped, consecutive, inner)

    return optax.GradientTransformationExtraArgs(init, update)
