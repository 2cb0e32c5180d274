"""Every lax collective of the package, and what its transpose is.

All functions run inside ``jax.shard_map`` over ``axis`` (a mesh axis name or a tuple of them)
and pass ``check_vma=True``. The three gathers carry their own reverse rule: parameters travel
forward in ``gather_dtype``, gradients travel back in ``reduce_dtype``, and each gradient arrives
reduced at its owner. Forward-mode differentiation through them is not defined.

Shape legend: ``N`` devices on the axis, ``W`` waves, ``dims`` the stored shape of a
matrix or tensor.
"""

from collections.abc import Sequence
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


def local_slots(table: jax.typing.ArrayLike, axis: Axis) -> jax.Array:
    """The row of this device, ``[1, W]`` out of a constant table ``[N, W]``."""
    table = jnp.asarray(table)
    return lax.dynamic_slice_in_dim(table, device_index(axis), 1, axis=0)


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
    """``[N, W, *dims]`` on every device, from each one's ``[W, *dims]``: one all-gather."""
    return lax.all_gather(own, axis)


def gather_waves(
    stack: jax.Array, axis: Axis, *, gather_dtype: Any, reduce_dtype: Any
) -> list[list[jax.Array]]:
    """Whole matrices of a class on every device, from the local owner stack ``[1, W, *dims]``.

    Returns ``waves[w][d]``, the matrix of slot ``(d, w)`` in ``gather_dtype``.

    Collectives: forward one all-gather per wave (``N prod(dims)`` elements of ``gather_dtype``);
    backward one reduce-scatter per wave (as many of ``reduce_dtype``).
    Numerics: gradients are summed over devices in ``reduce_dtype``, then cast to the stack's dtype.
    """
    dtype = stack.dtype

    def forward(stack: jax.Array) -> tuple[list[list[jax.Array]], None]:
        waves = []
        for wave in stack[0]:
            whole = lax.all_gather(wave.astype(gather_dtype), axis)
            waves.append(list(whole))
        return waves, None

    def backward(_: None, cotangents: list[list[jax.Array]]) -> tuple[jax.Array]:
        owned = [
            lax.psum_scatter(jnp.stack([ct.astype(reduce_dtype) for ct in wave]), axis)
            for wave in cotangents
        ]
        return (jnp.stack(owned)[None].astype(dtype),)

    return _with_backward(forward, backward)(stack)


def gather_dim(
    x: jax.Array, dim: int, axis: Axis, *, gather_dtype: Any, reduce_dtype: Any
) -> jax.Array:
    """A whole leaf on every device, from its local part of dim ``dim``.

    Collectives: forward one all-gather in ``gather_dtype``, backward one reduce-scatter in
    ``reduce_dtype``.
    """
    dtype = x.dtype

    def forward(x: jax.Array) -> tuple[jax.Array, None]:
        return lax.all_gather(x.astype(gather_dtype), axis, axis=dim, tiled=True), None

    def backward(_: None, ct: jax.Array) -> tuple[jax.Array]:
        part = lax.psum_scatter(ct.astype(reduce_dtype), axis, scatter_dimension=dim, tiled=True)
        return (part.astype(dtype),)

    return _with_backward(forward, backward)(x)


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

    def forward(xs: list[jax.Array]) -> tuple[list[jax.Array], None]:
        return [varying(x, axis).astype(t) for x, t in zip(xs, gather_dtypes, strict=True)], None

    def backward(_: None, cts: list[jax.Array]) -> tuple[list[jax.Array]]:
        sums = lax.psum([ct.astype(t) for ct, t in zip(cts, reduce_dtypes, strict=True)], axis)
        return ([s.astype(t) for s, t in zip(sums, dtypes, strict=True)],)

    return _with_backward(forward, backward)(list(xs)) if xs else []


def _with_backward(forward: Any, backward: Any) -> Any:
    """A function of one argument with a hand-written reverse rule."""

    @jax.custom_vjp
    def fn(x: Any) -> Any:
        return forward(x)[0]

    fn.defvjp(forward, backward)
    return fn
