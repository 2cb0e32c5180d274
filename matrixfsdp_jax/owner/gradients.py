"""The mean loss over all devices and its gradient, reduced to the owners.

The gradient is that of the global mean: each device differentiates the all-reduced loss, so the
reverse of the gathers (a sum over devices) delivers the mean gradient and not ``N`` times it.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from matrixfsdp_jax.owner import collectives

if TYPE_CHECKING:
    from matrixfsdp_jax.owner.params import OwnerLayout, OwnerParams

PyTree = Any


class LocalResult(NamedTuple):
    """What one (micro-)batch gives: mean loss, its weight, local aux, gradients on owners."""

    loss: jax.Array
    weight: jax.Array
    aux: PyTree
    gradients: Any


def local_value_and_grad(
    layout: "OwnerLayout",
    loss_fn: Callable[[PyTree], Any],
    owned: "OwnerParams",
    has_aux: bool,
    lazy: bool,
) -> LocalResult:
    """Loss and gradients inside ``shard_map``; ``loss_fn`` takes the gathered params alone.

    With ``lazy`` it takes them ungathered, as ``LazyParams``.

    ``weight`` is that of this batch (its token count, or 1 where the loss is a plain mean).
    ``aux`` is this device's own.
    """

    def objective(parts: "OwnerParams") -> tuple[jax.Array, tuple[jax.Array, PyTree]]:
        params = layout.lazy(owned, parts)
        out = loss_fn(params if lazy else params.gather())
        loss, aux = split_aux(out, has_aux)
        mean, count = global_mean(loss, layout.data_axis)
        dtype = jnp.result_type(loss[0] if isinstance(loss, tuple) else loss)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"the loss is {dtype} and has no gradient; return a real float")
        return mean, (count, aux)

    grad_fn = jax.value_and_grad(objective, has_aux=True)
    (loss, (count, aux)), grads = grad_fn(layout.parts(owned))
    return LocalResult(loss, count, aux, grads)


def global_mean(value: Any, axis: collectives.Axis) -> tuple[jax.Array, jax.Array]:
    """``(mean, weight)`` over the devices of a scalar, or of a pair ``(sum, count)``.

    Float32 (float64 for float64 values). A global count of zero gives a mean of zero.

    Collectives: one all-reduce of a scalar, or of two for a pair.
    """
    if isinstance(value, tuple):
        if len(value) != 2:
            raise ValueError(
                f"a loss is a scalar or a pair (sum, count), got a tuple of {len(value)}; "
                "pass has_aux=True if it returns auxiliary values"
            )
        total = _scalar(value[0])
        count = jax.lax.stop_gradient(_scalar(value[1]).astype(total.dtype))
        total, count = collectives.sum_over((total, count), axis)
        return total / jnp.where(count == 0, 1, count), count
    mean = collectives.mean_over(_scalar(value), axis)
    return mean, jnp.ones((), mean.dtype)


def _scalar(value: Any) -> jax.Array:
    leaves = jax.tree.leaves(value)
    if len(leaves) != 1 or leaves[0] is not value or jnp.shape(value) != ():
        shape = jax.tree.map(jnp.shape, value)
        raise ValueError(
            f"the loss must be a scalar (or a pair of scalars: sum, count), got shape {shape}; "
            "average it over the local batch, or pass has_aux=True if it returns auxiliary values"
        )
    value = jnp.asarray(value)
    return value.astype(jnp.promote_types(jnp.float32, value.dtype))


def split_aux(out: Any, has_aux: bool) -> tuple[Any, PyTree]:
    """``(loss, aux)`` of what a loss function returned; aux is None without ``has_aux``."""
    if not has_aux:
        return out, None
    if not isinstance(out, tuple) or len(out) != 2:
        raise ValueError(
            f"with has_aux=True the loss function returns (loss, aux), got {type(out).__name__}"
        )
    return out


def local_key(key: jax.Array | None, axis: collectives.Axis) -> jax.Array | None:
    """``key`` folded with the device index, so that devices drop out different units."""
    return None if key is None else jax.random.fold_in(key, collectives.device_index(axis))


def value_and_grad(
    layout: "OwnerLayout", loss_fn: Callable[..., Any], has_aux: bool = False, lazy: bool = False
) -> Callable[..., Any]:
    """See ``OwnerLayout.value_and_grad``."""
    axis = layout.data_axis

    def local(owned: "OwnerParams", batch: PyTree, key: jax.Array | None) -> Any:
        keys = () if key is None else (local_key(key, axis),)
        result = local_value_and_grad(
            layout, lambda p: loss_fn(p, batch, *keys), owned, has_aux, lazy
        )
        aux = collectives.mean_over(result.aux, axis) if has_aux else None
        return ((result.loss, aux) if has_aux else result.loss), result.gradients

    def fn(owned: "OwnerParams", batch: PyTree, key: jax.Array | None = None) -> Any:
        if collectives.manual_over(axis):
            if not collectives.varying_axes(collectives.device_index(axis)):
                raise ValueError(
                    "layout.value_and_grad needs jax.shard_map(..., check_vma=True), the default; "
                    "without it JAX makes the gradient of a mean over N devices N times too large"
                )
            return local(owned, batch, key)
        mapped = layout.mapped(
            local,
            (layout.specs, batch_specs(layout, batch), P()),
            (P(), layout.update_specs),
        )
        return mapped(owned, shard_batch(layout, batch), key)

    return fn


def batch_specs(layout: "OwnerLayout", batch: PyTree, parts: int = 1) -> PyTree:
    """``PartitionSpec`` of every leaf of a global batch: split on dim 0 over the data axes.

    Raises:
      ValueError: if a leaf does not divide into ``N * parts`` equal parts.
    """
    devices = math.prod(layout.mesh.shape[a] for a in layout.data_axis)
    entry = layout.data_axis if len(layout.data_axis) > 1 else layout.data_axis[0]
    processes = len({d.process_index for d in layout.mesh.devices.flat})

    def spec(keys: Any, leaf: Any) -> P:
        shape = jnp.shape(leaf)
        pieces = devices * parts
        if isinstance(leaf, np.ndarray):  # this process's own examples
            pieces //= processes
        if not shape or shape[0] % pieces or shape[0] == 0:
            size = shape[0] if shape else "no dim 0"
            what = f"{devices} devices" + (f" x {parts} micro-batches" * (parts > 1))
            raise ValueError(
                f"batch leaf {jax.tree_util.keystr(keys) or 'batch'} of shape {shape} has {size} "
                f"examples, which do not divide over {what}; give a multiple of {pieces} "
                "(drop or pad the last incomplete batch)"
            )
        return P(entry, *[None] * (len(shape) - 1))

    return jax.tree_util.tree_map_with_path(spec, batch)


def shard_batch(layout: "OwnerLayout", batch: PyTree) -> PyTree:
    """Put a batch on the devices, split on dim 0 over the data axes (owners and replicas).

    Args:
      layout: from ``mfsdp.plan``.
      batch: a tree of arrays. Numpy leaves are this process's own examples (with one process, the
        whole global batch); jax arrays are global, and are moved if they lie otherwise.

    Returns:
      Global arrays with sharding ``P(data_axis, None, ...)``; also for traced values, since an
      Explicit mesh refuses a batch whose type is sharded otherwise.

    Raises:
      ValueError: if a leaf has no dim 0 that divides over the devices.
    """

    def put(x: Any, spec: P) -> Any:
        sharding = NamedSharding(layout.mesh, spec)
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        if isinstance(x, jax.Array):
            return jax.device_put(x, sharding)
        return jax.make_array_from_process_local_data(sharding, np.asarray(x))

    return jax.tree.map(put, batch, batch_specs(layout, batch))


def replicate(layout: "OwnerLayout", tree: PyTree) -> PyTree:
    """Put a tree whole on every device, where a step leaves it: a second call compiles nothing."""
    sharding = NamedSharding(layout.mesh, P())

    def put(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.device_put(x, sharding)

    return jax.tree.map(put, tree)
