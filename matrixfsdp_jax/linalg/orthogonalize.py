"""Orthogonalization of stacks of matrices by Newton-Schulz iteration.

Shape legend: ``m, n`` rows and columns of a matrix; ``...`` any batch dims.
"""

import functools
import math
from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from matrixfsdp_jax.linalg.coefficients import Row, newton_schulz_table

Batching = Literal["auto", "map", "batched"]

_ITERATION_DTYPES = ("bfloat16", "float16", "float32", "float64")


def orthogonalize(
    x: ArrayLike,
    *,
    steps: int = 5,
    coefficients: str | Sequence[Sequence[float]] = "keller",
    eps: float = 1e-8,
    dtype: DTypeLike | None = None,
    batching: Batching = "auto",
) -> jax.Array:
    """Return every matrix of ``x`` with its singular values driven towards 1.

    With ``X_0 = x / (|x|_F + eps)``, each step is ``X <- a X + b (X X^T) X + c (X X^T)^2 X`` with
    the row ``(a, b, c)`` of its table. Singular vectors stay, singular values go through the odd
    polynomials ``a s + b s^3 + c s^5``, so the result is near ``U V^T`` of ``x = U S V^T`` and not
    equal to it: the table says how near. Tall matrices are iterated transposed, which gives the
    same result from the smaller Gram matrix.

    The result does not depend on the scale of ``x``: every matrix is first multiplied by a power
    of two (exact) that brings its largest entry into ``[1, 2)``. A zero matrix gives exact zeros.
    A matrix with a NaN or an infinity gives NaN everywhere, and touches no other matrix.

    Args:
      x: ``[..., m, n]`` with ``m, n >= 1``, real floating of any width.
      steps: number of Newton-Schulz steps, an int in ``[1, 50]``.
      coefficients: name of a table, or rows ``(a, b, c)``; see `newton_schulz_table`.
      eps: added to the Frobenius norm, positive. The norm is that of the scaled matrix, so this is
        relative to the largest entry.
      dtype: what the iteration is stored in: bfloat16, float16, float32 or float64. None takes
        float64 for float64 ``x`` and float32 for all others.
      batching: ``"map"`` takes one matrix after the other, ``"batched"`` all in one product.
        ``"auto"`` is ``"map"`` where the program is lowered for CPU (faster there, and a matrix
        gets the same bits whatever the size of its batch) and ``"batched"`` on accelerators.
        ``"map"`` slices the batch dims, which therefore must not be sharded: call it on one device
        or inside ``shard_map``.

    Returns:
      ``[..., m, n]`` in the dtype of ``x``.

    Raises:
      TypeError: if ``x`` is not real floating, or ``steps`` is not an int.
      ValueError: if ``x`` has fewer than two dims or a matrix dim of size 0, or another argument is
        out of its range. The message has the value.

    Collectives:
      None.

    Numerics:
      The norm is taken in float32 (float64 for float64 ``x``). Products accumulate in float32 or
      wider and are rounded to ``dtype`` once per product; operands of float32 products are not
      rounded (``Precision.HIGHEST``). XLA may flush subnormal numbers to zero: a matrix whose
      largest entry is subnormal in float32 then counts as a zero matrix.

    Examples:
      >>> q = orthogonalize(jnp.diag(jnp.array([3e-20, 4e-20])))
      >>> bool(jnp.allclose(jnp.linalg.svd(q).S, 0.95, atol=0.27))
      True

    References:
      K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). Here the
      iteration runs in float32 unless asked, and ``eps`` is relative.
    """
    table = newton_schulz_table(coefficients, steps)
    x = jnp.asarray(x)
    _check_matrices(x)
    if not isinstance(eps, jax.Array) and not 0 < eps < math.inf:  # a traced eps has no value yet
        raise ValueError(f"eps must be positive and finite, got {eps!r}")
    if batching not in get_args(Batching):
        raise ValueError(f"batching must be one of {get_args(Batching)}, got {batching!r}")

    iteration_dtype = _iteration_dtype(x.dtype, dtype)
    return _orthogonalize(x, eps, table=table, dtype=iteration_dtype, batching=batching)


def _check_matrices(x: jax.Array) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x must be real floating, got dtype {x.dtype}")
    if x.ndim < 2 or 0 in x.shape[-2:]:
        raise ValueError(f"x must be [..., m, n] with m, n >= 1, got shape {x.shape}")


def _iteration_dtype(x_dtype: jnp.dtype, dtype: DTypeLike | None) -> jnp.dtype:
    if dtype is None:
        return _at_least_float32(x_dtype)
    dtype = jnp.dtype(dtype)
    if dtype.name not in _ITERATION_DTYPES:
        raise ValueError(f"dtype must be one of {_ITERATION_DTYPES} or None, got {dtype.name!r}")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"dtype {dtype.name!r} needs JAX's x64 mode: wrap in jax.enable_x64(True)")
    return dtype


def _at_least_float32(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


@functools.partial(jax.jit, static_argnames=("table", "dtype", "batching"))
def _orthogonalize(
    x: jax.Array,
    eps: ArrayLike,
    *,
    table: tuple[Row, ...],
    dtype: jnp.dtype,
    batching: Batching,
) -> jax.Array:
    """Choose how to go through the batch. Jitted, so that calls outside jit have the same bits."""

    def batched(x: jax.Array) -> jax.Array:
        return _orthogonalize_batched(x, eps, table, dtype)

    def mapped(x: jax.Array) -> jax.Array:
        return jax.lax.map(batched, x.reshape(-1, *x.shape[-2:])).reshape(x.shape)

    if x.ndim == 2 or batching == "batched":
        return batched(x)
    if batching == "map":
        return mapped(x)
    return jax.lax.platform_dependent(x, cpu=mapped, default=batched)


def _orthogonalize_batched(
    x: jax.Array, eps: ArrayLike, table: tuple[Row, ...], dtype: jnp.dtype
) -> jax.Array:
    """Orthogonalize ``[..., m, n]``, all matrices in one product."""
    tall = x.shape[-2] > x.shape[-1]
    wide = jnp.swapaxes(x, -1, -2) if tall else x
    rows = jnp.asarray(table, _at_least_float32(dtype))
    # A scan: one compiled step, so memory does not grow with the number of steps.
    wide = _normalize(wide, eps).astype(dtype)
    out, _ = jax.lax.scan(_newton_schulz_step, wide, rows)
    return (jnp.swapaxes(out, -1, -2) if tall else out).astype(x.dtype)


def _normalize(x: jax.Array, eps: ArrayLike) -> jax.Array:
    """Divide by the Frobenius norm, in float32 or wider, without overflow or underflow."""
    x = x.astype(_at_least_float32(x.dtype))
    x = x * _inverse_power_of_two(jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True))
    # A subnormal eps may be flushed to zero, and a zero matrix would then give NaN.
    eps = jnp.maximum(jnp.asarray(eps, x.dtype), jnp.finfo(x.dtype).tiny)
    return x / (jnp.sqrt(_sum_of_squares(x)) + eps)


def _sum_of_squares(x: jax.Array) -> jax.Array:
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


def _newton_schulz_step(x: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
    """One step on ``[..., m, n]``, ``m <= n``, in the form of a `jax.lax.scan` body."""
    a, b, c = row
    dtype, wide = x.dtype, row.dtype
    gram = _matmul(x, jnp.swapaxes(x, -1, -2), wide).astype(dtype)
    poly = (b * gram.astype(wide) + c * _matmul(gram, gram, wide)).astype(dtype)
    return (a * x.astype(wide) + _matmul(poly, x, wide)).astype(dtype), None


def _matmul(x: jax.Array, y: jax.Array, accumulator: jnp.dtype) -> jax.Array:
    # The default precision would round float32 operands on GPU and TPU; half operands are exact.
    precision = jax.lax.Precision.HIGHEST if x.dtype == accumulator else jax.lax.Precision.DEFAULT
    return jnp.matmul(x, y, precision=precision, preferred_element_type=accumulator)
