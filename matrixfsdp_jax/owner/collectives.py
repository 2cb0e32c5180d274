"""Every lax collective of the package, and what its transpose is.

All functions run inside ``jax.shard_map`` over ``axis`` (a mesh axis name or a tuple of them)
and pass ``check_vma=True``. The three gathers carry their own reverse rule: parameters travel
forward in ``gather_dtype``, gradients travel back in ``reduce_dtype``, and each gradient arrives
reduced at its owner. Forward-mode differentiation through them is not defined.

Shape legend: ``N`` devices on the axis, ``W`` waves, ``dims`` the stored shape of a
matrix or tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Axis = tuple[str, ...]


def manual_over(axis: Axis) -> bool:
    """Whether the code being traced runs inside a ``shard_map`` over all of ``axis``."""
    return set(axis) <= set(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The mesh axes over which ``x`` may differ from device to device."""
    aval = jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)  # its name since JAX 0.10
    return frozenset(aval.vma if kind is None else kind.varying)


def varying(x: jax.Array, axis: Axis) -> jax.Array:
    """``x`` marked as device-varying over ``axis`` (no data moves)."""
    missing = tuple(a for a in axis if a not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def device_index(axis: Axis) -> jax.Array:
    """Index of this device on the owner axis, in the order of ``PartitionSpec(axis)``."""
    return lax.axis_index(axis)


def local_slots(table: jax.typing.ArrayLike, axis: Axis, sharing: Axis = ()) -> jax.Array:
    """The row of this device, ``[1, W]`` out of a constant table ``[N, W]``.

    ``sharing``: axes whose devices share the waves: each has a part of them, in order.
    """
    table = jnp.asarray(table)
    return part_of(lax.dynamic_slice_in_dim(table, device_index(axis), 1, axis=0), 1, sharing)


def part_of(x: jax.Array, dim: int, axis: Axis) -> jax.Array:
    """A device's part of dim ``dim`` of an array that all devices on ``axis`` have whole."""
    if not axis:
        return x
    size = x.shape[dim] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, device_index(axis) * size, size, dim)


def whole_of(part: jax.Array, dim: int, axis: Axis) -> jax.Array:
    """The inverse of ``part_of``, the same on all devices: one all-gather."""
    return lax.all_gather(part, axis, axis=dim, tiled=True, to="invarying") if axis else part


def sum_over(x: Any, axis: Axis) -> Any:
    """Sum of a tree over the devices: one all-reduce."""
    return lax.psum(jax.tree.map(lambda v: varying(v, axis), x), axis)


def mean_over(x: Any, axis: Axis) -> Any:
    """Mean of a tree over the devices: one all-reduce."""
    return lax.pmean(jax.tree.map(lambda v: varying(v, axis), x), axis)


def max_over(x: Any, axis: Axis) -> Any:
    """Largest value of a tree over the devices: one all-reduce."""
    return lax.pmax(jax.tree.map(lambda v: varying(v, axis), x), axis)


def exchange(x: jax.Array, axis: Axis) -> jax.Array:
    """``[N, ...]`` with one part for every device to one part from every device: one all-to-all."""
    return lax.all_to_all(varying(x, axis), axis, 0, 0, tiled=True)


def gather_slots(own: jax.Array, axis: Axis) -> jax.Array:
    """``[N, W, *dims]``, the same everywhere, of each device's ``[W, *dims]``: one all-gather."""
    return lax.all_gather(own, axis, to="invarying")


@dataclass(frozen=True)
class Wire:
    """How a leaf travels to the model and its gradient back.

    Attributes:
      axis: the axes over which it is gathered, and its gradient reduce-scattered.
      gather_dtype: in what it travels forward.
      reduce_dtype: in what its gradient is summed.
      replicas: the axes over which the leaf is replicated and the batch is split: the gradient is
        summed over them too.
      sharing: whether each of the replicas keeps a part of the gradient only. Then the gradient is
        that of the ``part`` which is given beside the leaf.
    """

    axis: Axis
    gather_dtype: Any
    reduce_dtype: Any
    replicas: Axis = ()
    sharing: bool = False

    def to_model(self, x: jax.Array) -> jax.Array:
        """``x`` as the model takes it: no replica's gradient is that of another."""
        return varying(x, self.axis + self.replicas)

    def reduced(self, gradient: jax.Array, dim: int) -> jax.Array:
        """The sum over the replicas of a gradient, or this replica's part of it on ``dim``."""
        if self.sharing:
            return lax.psum_scatter(gradient, self.replicas, scatter_dimension=dim, tiled=True)
        return lax.psum(gradient, self.replicas) if self.replicas else gradient


def enter(stack: jax.Array, wire: Wire, part: jax.Array) -> jax.Array:
    """A local owner stack ``[1, W, *dims]`` for ``gather_waves``, whose gradient goes to ``part``.

    ``part`` is the stack itself, or where replicas share the work this replica's waves of it.

    Collectives: none forward; backward over the replicas one all-reduce of the stack, or one
    reduce-scatter where they share it.
    Numerics: the gradient is collected in the wider of the stack's dtype and ``reduce_dtype`` until
    all replicas are summed in ``reduce_dtype``.
    """
    dtype = stack.dtype
    if not wire.replicas:
        return part

    def forward(stack: jax.Array) -> jax.Array:
        return wire.to_model(stack).astype(jnp.promote_types(dtype, wire.reduce_dtype))

    def backward(ct: jax.Array) -> jax.Array:
        return wire.reduced(ct.astype(wire.reduce_dtype), 1).astype(dtype)

    return _with_backward(forward, backward, stack, part)


def gather_waves(stack: jax.Array, wire: Wire, *, split: bool = True) -> list[Any]:
    """Whole matrices of a class on every device, from waves ``[1, W, *dims]`` of an entered stack.

    Returns ``waves[w][d]``, the matrix of slot ``(d, w)`` in ``gather_dtype``; without ``split``
    each wave is one array ``[N, *dims]``.

    Collectives: forward one all-gather per wave (``N prod(dims)`` elements of ``gather_dtype``);
    backward one reduce-scatter per wave (as many of ``reduce_dtype``).
    Numerics: gradients are summed over devices in ``reduce_dtype``, then cast to the stack's dtype.
    """

    def forward(stack: jax.Array) -> list[Any]:
        wholes = (
            wire.to_model(lax.all_gather(wave.astype(wire.gather_dtype), wire.axis))
            for wave in stack[0]
        )
        return [list(whole) if split else whole for whole in wholes]

    def backward(cotangents: list[Any]) -> jax.Array:
        owned = [
            lax.psum_scatter(
                jnp.stack([ct.astype(wire.reduce_dtype) for ct in wave])
                if split
                else wave.astype(wire.reduce_dtype),
                wire.axis,
            )
            for wave in cotangents
        ]
        return jnp.stack(owned)[None].astype(stack.dtype)

    return _with_backward(forward, backward, stack, stack)


def gather_dim(x: jax.Array, dim: int, wire: Wire, part: jax.Array) -> jax.Array:
    """A whole leaf on every device, from its local part of dim ``dim``.

    Differentiable in ``part``, which is ``x`` itself, or this replica's part of it on ``dim``.

    Collectives: forward one all-gather in ``gather_dtype``, backward one reduce-scatter in
    ``reduce_dtype``, and over replicas one all-reduce of the part, or one reduce-scatter where they
    share it.
    """

    def forward(x: jax.Array) -> jax.Array:
        whole = lax.all_gather(x.astype(wire.gather_dtype), wire.axis, axis=dim, tiled=True)
        return wire.to_model(whole)

    def backward(ct: jax.Array) -> jax.Array:
        ct = ct.astype(wire.reduce_dtype)
        owned = lax.psum_scatter(ct, wire.axis, scatter_dimension=dim, tiled=True)
        return wire.reduced(owned, dim).astype(x.dtype)

    return _with_backward(forward, backward, x, part)


def share(
    xs: Sequence[jax.Array],
    axis: Axis,
    *,
    gather_dtypes: Sequence[Any],
    reduce_dtypes: Sequence[Any],
) -> list[jax.Array]:
    """Replicated leaves, cast for the model.

    Collectives: none forward; backward all their gradients are summed in their ``reduce_dtypes`` by
    one ``psum`` of the whole list.
    """
    dtypes = [x.dtype for x in xs]

    def forward(xs: list[jax.Array]) -> list[jax.Array]:
        return [varying(x, axis).astype(t) for x, t in zip(xs, gather_dtypes, strict=True)]

    def backward(cts: list[jax.Array]) -> list[jax.Array]:
        sums = lax.psum([ct.astype(t) for ct, t in zip(cts, reduce_dtypes, strict=True)], axis)
        return [s.astype(t) for s, t in zip(sums, dtypes, strict=True)]

    xs = list(xs)
    return _with_backward(forward, backward, xs, xs) if xs else []


def _with_backward(forward: Any, backward: Any, x: Any, part: Any) -> Any:
    """``forward(x)``; in reverse mode ``part``, and not ``x``, gets the gradient ``backward``."""

    @jax.custom_vjp
    def fn(x: Any, part: Any) -> Any:
        del part
        return forward(x)

    def fwd(x: Any, part: Any) -> tuple[Any, None]:
        return fn(x, part), None

    def bwd(_: None, cotangents: Any) -> tuple[None, Any]:
        return None, backward(cotangents)

    fn.defvjp(fwd, bwd)
    return fn(jax.lax.stop_gradient(x), part)
