"""Checks and scaling of stacks of matrices before they are decomposed or iterated.

Shape legend: ``m, n`` rows and columns of a matrix; ``...`` any batch dims.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

# Combines one array of every device that holds a part of the same matrices (`orthogonalize_split`).
Reduce = Callable[[jax.Array], jax.Array]


def unsplit(x: jax.Array) -> jax.Array:
    """The `Reduce` of matrices that lie whole on one device."""
    return x


def check_matrices(x: jax.Array) -> None:
    """Refuse what is not ``[..., m, n]`` of floating or complex numbers.

    Raises:
      TypeError: for another dtype.
      ValueError: for fewer than two dims, or a matrix dim of size 0.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TypeError(f"x must be real floating or complex, got dtype {x.dtype}")
    if x.ndim < 2 or 0 in x.shape[-2:]:
        raise ValueError(f"x must be [..., m, n] with m, n >= 1, got shape {x.shape}")


def normalize(
    x: jax.Array, eps: ArrayLike, sum_over: Reduce = unsplit, max_over: Reduce = unsplit
) -> jax.Array:
    """Divide by the Frobenius norm, in float32 or wider, without overflow or underflow.

    Of matrices whose parts lie on several devices, ``max_over`` and ``sum_over`` combine one number
    per matrix each.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):  # the norm is that of the two parts together
        return _as_real(lambda parts: normalize(parts, eps, sum_over, max_over), x)
    x = scale_to_one(x, max_over)
    # A subnormal eps may be flushed to zero, and a zero matrix would then give NaN.
    eps = jnp.maximum(jnp.asarray(eps, x.dtype), jnp.finfo(x.dtype).tiny)
    return x / (jnp.sqrt(sum_over(sum_of_squares(x))) + eps)


def scale_to_one(x: jax.Array, max_over: Reduce = unsplit) -> jax.Array:
    """Multiply matrices by the power of two that brings their largest entry into ``[1, 2)``.

    Exact; in float32 or wider. Of complex entries the larger part counts. Zero stays zero.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _as_real(lambda parts: scale_to_one(parts, max_over), x)
    x = x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    largest = max_over(jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True))
    return x * _inverse_power_of_two(largest)


def _as_real(fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Apply ``fn`` to complex ``[..., m, n]`` as real ``[..., m, 2 n]``."""
    parts = fn(jnp.concatenate([x.real, x.imag], axis=-1))
    return jax.lax.complex(*jnp.split(parts, 2, axis=-1))


def sum_of_squares(x: jax.Array) -> jax.Array:
    """``[..., 1, 1]`` of ``[..., m, n]``.

    A dot product and not a reduction, because XLA fuses a reduction with the caller's arithmetic
    and then sums in another order: on CPU a matrix alone on its device would get other bits.
    """
    dims, batch = (x.ndim - 2, x.ndim - 1), tuple(range(x.ndim - 2))
    total = jax.lax.dot_general(
        x, x, ((dims, dims), (batch, batch)), precision=jax.lax.Precision.HIGHEST
    )
    return total[..., None, None]


def _inverse_power_of_two(x: jax.Array) -> jax.Array:
    """``2^-k`` for ``2^k <= x < 2^(k+1)``, with ``k`` held where both powers are normal numbers.

    In the bit pattern of a power of two the exponent field is linear in ``k``, so that of the
    inverse is twice that of 1 less that of ``2^k``. Bits, because XLA merges two divisions
    ``x / 2^k / norm`` into one by ``2^k norm``, which under- or overflows, and because ``frexp``
    treats subnormal numbers differently from one JAX version to the next.
    """
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")

    def bits(value: ArrayLike) -> jax.Array:
        return jax.lax.bitcast_convert_type(jnp.asarray(value, x.dtype), unsigned)

    tiny = jnp.finfo(x.dtype).tiny
    exponent = jnp.clip(bits(x) & bits(jnp.inf), bits(tiny), bits(1 / tiny))
    return jax.lax.bitcast_convert_type(2 * bits(1) - exponent, x.dtype)
