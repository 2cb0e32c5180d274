"""Orthogonalization of matrices whose columns are split over devices.

No device ever holds a whole matrix: the Newton-Schulz iteration needs the columns of ``X`` only
through ``X X^H``, which is a sum over columns.

Shape legend: ``m, n`` rows and columns of a matrix; ``T`` devices, each with ``n_local = n / T``
columns; ``K`` steps, ``S`` segments of the Gram form; ``...`` any batch dims.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from matrixfsdp_jax.linalg.algorithms import ALGORITHMS, Algorithm, Platform, segment_lengths
from matrixfsdp_jax.linalg.coefficients import Schedule, newton_schulz_schedule
from matrixfsdp_jax.linalg.newton_schulz import Form, iterate
from matrixfsdp_jax.linalg.norms import Reduce, check_matrices, normalize
from matrixfsdp_jax.linalg.orthogonalize import (
    by_platform,
    check_eps,
    iteration_dtype,
    make_form,
)


def orthogonalize_split(
    x: ArrayLike,
    *,
    sum_over: Reduce,
    max_over: Reduce,
    steps: int = 5,
    coefficients: str | Schedule | Sequence[Sequence[float]] = "keller",
    eps: float = 1e-8,
    dtype: DTypeLike | None = None,
    algorithm: Algorithm = "gram",
) -> jax.Array:
    """Return this device's columns of ``orthogonalize(whole)``, from its columns of ``whole``.

    Every device scales by the largest entry and the Frobenius norm of the whole matrix, forms the
    Gram matrix of its own columns, and sums it with those of the others. From there all devices
    compute the same polynomial ``Q`` of the sum, and each multiplies its own columns by it. The
    ``2 m^2 n`` of a product with the whole matrix are shared; the ``2 m^3`` of products of Gram
    matrices are done by every device.

    Meant for ``m <= n``. For ``m > n`` it takes the larger of the two Gram matrices, which costs
    more and has the same result, except with ``start="aol"``: that divides rows, where
    `orthogonalize` divides the columns of a tall matrix. Rows that are split instead of columns are
    columns of the transpose.

    Args:
      x: this device's ``[..., m, n_local]``, real floating of any width or complex, with
        ``m, n_local >= 1`` and the same shape on every device. Zero columns change nothing, so that
        ``n`` that do not divide can be padded.
      sum_over: the sum of one array over the devices, the same bits on each (``lax.psum``).
      max_over: the largest, likewise (``lax.pmax``).
      steps: see `orthogonalize`.
      coefficients: see `orthogonalize`. All starts work.
      eps: see `orthogonalize`.
      dtype: see `orthogonalize`; None goes by the platform as there.
      algorithm: ``"gram"`` or ``"gram_symmetric"`` (for ``m`` of 2048 and more), with few sums; the
        standard forms sum in every step.

    Returns:
      ``[..., m, n_local]`` in the dtype of ``x``.

    Raises:
      TypeError, ValueError: as `orthogonalize`.

    Collectives:
      One ``max_over`` and one ``sum_over`` of ``[..., 1, 1]``, then ``S`` ``sum_over`` of
      ``[..., m, m]``: one for float32 and up to 5 steps; for 5 steps 2 for float16 and 3 for
      bfloat16, as each restart forms the Gram matrix again (`segment_lengths`). ``K`` of them in
      the standard forms. A start takes none of its own. See `gram_wire_bytes`.

    Numerics:
      What goes through ``sum_over`` is float32 or wider whatever the dtype, and the norm is the
      root of a sum of squares of its own rather than of the trace of a Gram matrix, which a half
      dtype would have rounded. The result differs from that of `orthogonalize` by the order of the
      sums over columns, which in float32 is 1e-5 where condition numbers are 10. The Gram form
      itself, here and there, turns directions of small singular values by its rounding errors: by
      up to 1e-4 ("keller") or 1e-3 ("polar_express") at condition numbers from 1e3, and likewise
      for ``m > n`` with its zero eigenvalues. The standard forms keep 1e-5.

      All matrices go through each product together, so that bits may depend on the size of the
      batch. Scale, zero matrices and non-finite entries are treated as in `orthogonalize`: a NaN or
      an infinity on one device gives NaN everywhere in this matrix on all devices, also where
      ``max_over`` passes over a NaN.

    References:
      The Gram form is that of `orthogonalize`.
    """
    schedule = newton_schulz_schedule(coefficients, steps)
    x = jnp.asarray(x)
    check_matrices(x)
    check_eps(eps)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {ALGORITHMS}, got {algorithm!r}")

    def run(platform: Platform) -> _Run:
        chosen = iteration_dtype(x.dtype, dtype, platform)
        form = make_form(x.shape[-2], steps, chosen, algorithm, platform, sum_over)
        return _Run(schedule, form, max_over)

    return by_platform(x, eps, cpu=run("cpu"), gpu=run("gpu"), tpu=run("tpu"))


@dataclass(frozen=True)
class _Run:
    """All that is fixed when the program is traced, for one platform."""

    schedule: Schedule
    form: Form
    max_over: Reduce

    def __call__(self, x: jax.Array, eps: ArrayLike) -> jax.Array:
        normalized = normalize(x, eps, self.form.sum_over, self.max_over)
        return iterate(normalized.astype(self.form.wide), self.schedule, self.form).astype(x.dtype)


def gram_wire_bytes(
    m: int, parts: int, steps: int = 5, dtype: str = "float32", algorithm: Algorithm = "gram"
) -> int:
    """Return the bytes that a device sends for the Gram matrices of one ``[m, n]`` matrix.

    A ring all-reduce sends ``2 (T - 1) / T`` of what it reduces, here ``S`` times (``K`` times in
    the standard forms) ``m^2`` elements of ``b`` bytes, 4 for float32 and narrower::

        S 2 (T - 1) / T b m^2

    whatever ``n``. The two numbers per matrix for its scale are not counted. Against
    `exchange_wire_bytes` of elements of ``e`` bytes that is ``S b T m / (e n)`` times as much: in
    float32 with elements of 4 bytes less only for ``n > T m``.

    Args:
      m: rows, the side that is not split.
      parts: ``T``.
      steps: ``K``.
      dtype: name of the dtype of the iteration; it fixes the restarts.
      algorithm: form of the iteration.

    Examples:
      >>> gram_wire_bytes(4096, 8), gram_wire_bytes(4096, 8, dtype="bfloat16")
      (117440512, 352321536)
      >>> exchange_wire_bytes(4096, 14336, 8, itemsize=2)
      25690112
    """
    sums = len(segment_lengths(steps, dtype)) if algorithm.startswith("gram") else steps
    itemsize = max(4, jnp.dtype(dtype).itemsize)
    return -(-sums * 2 * (parts - 1) * itemsize * m * m // parts)


def exchange_wire_bytes(m: int, n: int, parts: int, itemsize: int = 4) -> int:
    """Return the bytes that a device sends per matrix where whole ones go to an owner and back.

    Of ``T`` matrices that are dealt out, each device sends its ``1 / T`` of all but its own, by one
    all-to-all each way; per matrix, with elements of ``e`` bytes::

        2 (T - 1) / T^2 e m n

    Args:
      m: rows.
      n: columns, the side that is split.
      parts: ``T``.
      itemsize: bytes of an element on the wire.
    """
    return -(-2 * (parts - 1) * itemsize * m * n // parts**2)
