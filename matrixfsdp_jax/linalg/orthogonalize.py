"""Orthogonalization of stacks of matrices by Newton-Schulz iteration.

Shape legend: ``m, n`` rows and columns of a matrix; ``...`` any batch dims.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from matrixfsdp_jax.linalg.algorithms import (
    ALGORITHMS,
    Algorithm,
    Platform,
    block_edges,
    choose_algorithm,
    segment_lengths,
)
from matrixfsdp_jax.linalg.coefficients import Schedule, newton_schulz_schedule
from matrixfsdp_jax.linalg.newton_schulz import Form, iterate
from matrixfsdp_jax.linalg.norms import Reduce, check_matrices, normalize, unsplit
from matrixfsdp_jax.linalg.polar import polar

Batching = Literal["auto", "map", "batched"]

_REAL_DTYPES = ("bfloat16", "float16", "float32", "float64")
_COMPLEX_DTYPES = ("complex64", "complex128")

# What `dtype=None` iterates float32 and narrower in: float16 has three bits more than bfloat16, and
# TPUs multiply only bfloat16 at full rate.
_DEFAULT_DTYPE: dict[Platform, str] = {"cpu": "float32", "gpu": "float16", "tpu": "bfloat16"}


def orthogonalize(
    x: ArrayLike,
    *,
    steps: int = 5,
    coefficients: str | Schedule | Sequence[Sequence[float]] = "keller",
    eps: float = 1e-8,
    dtype: DTypeLike | None = None,
    algorithm: Literal["auto"] | Algorithm = "auto",
    batching: Batching = "auto",
    exact: bool = False,
) -> jax.Array:
    """Return every matrix of ``x`` with its singular values driven towards 1.

    With ``X_0 = x / (|x|_F + eps)``, each step is ``X <- a X + b (X X^H) X + c (X X^H)^2 X`` with
    the row ``(a, b, c)`` of its schedule. Singular vectors stay, singular values go through the odd
    polynomials ``a s + b s^3 + c s^5``, so the result is near ``U V^H`` of ``x = U S V^H`` and not
    equal to it: the schedule says how near (`polar` gives ``U V^H`` itself). Tall matrices are
    iterated transposed, which gives the same result from the smaller Gram matrix.

    The result does not depend on the scale of ``x``: every matrix is first multiplied by a power
    of two (exact) that brings its largest entry into ``[1, 2)``. A zero matrix gives exact zeros.
    A matrix with a NaN or an infinity gives NaN everywhere, and touches no other matrix.

    Args:
      x: ``[..., m, n]`` with ``m, n >= 1``, real floating of any width or complex.
      steps: number of Newton-Schulz steps, an int in ``[1, 50]``.
      coefficients: name of a schedule, a `Schedule`, or rows ``(a, b, c)``; see
        `newton_schulz_schedule`.
      eps: added to the Frobenius norm, positive. The norm is that of the scaled matrix, so this is
        relative to the largest entry.
      dtype: what the iteration is stored in: bfloat16, float16, float32 or float64 for real ``x``,
        complex64 or complex128 for complex ``x``. None takes float64 for float64 ``x`` and the
        dtype of complex ``x``; for all others it goes by the platform that the program is lowered
        for: float16 on GPU, bfloat16 on TPU, float32 on CPU and elsewhere.
      algorithm: ``"standard"`` works on the whole matrix in every step. ``"gram"`` works on the
        ``[m, m]`` Gram matrix and touches the whole matrix only at restarts and at the end.
        ``"standard_symmetric"`` and ``"gram_symmetric"`` compute only the blocks on and below the
        diagonal of their symmetric products. ``"auto"`` goes by shape, dtype and platform; see
        `choose_algorithm`. All give the same result up to rounding.
      batching: ``"map"`` takes one matrix after the other, ``"batched"`` all in one product.
        ``"auto"`` is ``"map"`` where the program is lowered for CPU (faster there, and a matrix
        gets the same bits whatever the size of its batch) and ``"batched"`` on accelerators.
        ``"map"`` slices the batch dims, which therefore must not be sharded: call it on one device
        or inside ``shard_map``.
      exact: return ``U V^H`` itself to working precision, by SVD (`polar`), for tests and small
        matrices. The options of the iteration are checked and then have no part in it.

    Returns:
      ``[..., m, n]`` in the dtype of ``x``.

    Raises:
      TypeError: if ``x`` is neither real floating nor complex, or ``steps`` is not an int.
      ValueError: if ``x`` has fewer than two dims or a matrix dim of size 0, or another argument is
        out of its range. The message has the value.

    Collectives:
      None.

    Numerics:
      The norm is taken in float32 (float64 for float64 and complex128 ``x``). Products accumulate
      in float32 or wider and are rounded to ``dtype`` once per product; operands of float32
      products are not rounded (``Precision.HIGHEST``). The Gram form restarts often enough that
      its rounding errors do not grow (`segment_lengths`). XLA may flush subnormal numbers to zero:
      a matrix whose largest entry is subnormal in float32 then counts as a zero matrix.

    Examples:
      >>> q = orthogonalize(jnp.diag(jnp.array([3e-20, 4e-20])))
      >>> bool(jnp.allclose(jnp.linalg.svd(q).S, 0.95, atol=0.27))
      True

    References:
      K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). Here the
      iteration runs in float32 on CPU, and ``eps`` is relative.
      The Gram form is that of the public Gram Newton-Schulz code, which restarts once, after
      step 2, in float16. Here restarts go by dtype and number of steps.
    """
    schedule = newton_schulz_schedule(coefficients, steps)
    x = jnp.asarray(x)
    check_matrices(x)
    check_eps(eps)
    if batching not in get_args(Batching):
        raise ValueError(f"batching must be one of {get_args(Batching)}, got {batching!r}")
    if algorithm not in ("auto", *ALGORITHMS):
        raise ValueError(f"algorithm must be one of {('auto', *ALGORITHMS)}, got {algorithm!r}")
    if exact:
        return polar(x)

    def select(chosen: jnp.dtype, platform: Platform) -> Algorithm:
        if algorithm != "auto":
            return algorithm
        return choose_algorithm(
            x.shape[-2],
            x.shape[-1],
            steps,
            dtype=chosen.name,
            platform=platform,
            cubic=schedule.cubic,
        )

    def run(platform: Platform) -> _Run:
        chosen = iteration_dtype(x.dtype, dtype, platform)
        form = make_form(min(x.shape[-2:]), steps, chosen, select(chosen, platform), platform)
        mapped = batching == "map" or (batching == "auto" and platform == "cpu")
        return _Run(schedule, form, mapped and x.ndim > 2)

    return _orthogonalize(x, eps, cpu=run("cpu"), gpu=run("gpu"), tpu=run("tpu"))


@dataclass(frozen=True)
class _Run:
    """All that is fixed when the program is traced, for one platform."""

    schedule: Schedule
    form: Form
    mapped: bool

    def __call__(self, x: jax.Array, eps: ArrayLike) -> jax.Array:
        one = functools.partial(_matrices, schedule=self.schedule, form=self.form)
        if not self.mapped:
            return one(x, eps)
        return jax.lax.map(lambda x: one(x, eps), x.reshape(-1, *x.shape[-2:])).reshape(x.shape)


def check_eps(eps: float) -> None:
    """Refuse a number that is not positive and finite; a traced one has no value yet."""
    if not isinstance(eps, jax.Array) and not 0 < eps < math.inf:
        raise ValueError(f"eps must be positive and finite, got {eps!r}")


def iteration_dtype(x_dtype: jnp.dtype, dtype: DTypeLike | None, platform: Platform) -> jnp.dtype:
    """The dtype that matrices of ``x_dtype`` are iterated in; ValueError where it does not fit."""
    complex_ = jnp.issubdtype(x_dtype, jnp.complexfloating)
    if dtype is None:
        wide = complex_ or x_dtype == jnp.float64
        return jnp.dtype(x_dtype if wide else _DEFAULT_DTYPE[platform])
    allowed = _COMPLEX_DTYPES if complex_ else _REAL_DTYPES
    given = dtype
    try:
        dtype = jnp.dtype(dtype)
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in allowed:
        raise ValueError(
            f"dtype must be one of {allowed} or None for {x_dtype} matrices, got {given!r}"
        )
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"dtype {dtype.name!r} needs JAX's x64 mode: wrap in jax.enable_x64(True)")
    return dtype


def make_form(
    m: int,
    steps: int,
    dtype: jnp.dtype,
    algorithm: Algorithm,
    platform: Platform,
    sum_over: Reduce = unsplit,
) -> Form:
    """The form of ``algorithm`` for Gram matrices ``[m, m]``."""
    return Form(
        segments=segment_lengths(steps, dtype.name) if algorithm.startswith("gram") else (),
        edges=block_edges(m, platform) if algorithm.endswith("symmetric") else (0, m),
        dtype=dtype,
        wide=jnp.dtype(jnp.float32) if dtype.itemsize < 4 else dtype,
        sum_over=sum_over,
    )


@functools.partial(jax.jit, static_argnames=("cpu", "gpu", "tpu"))
def _orthogonalize(x: jax.Array, eps: ArrayLike, *, cpu: _Run, gpu: _Run, tpu: _Run) -> jax.Array:
    """`by_platform`, jitted, so that calls outside jit have the same bits."""
    return by_platform(x, eps, cpu=cpu, gpu=gpu, tpu=tpu)


def by_platform(
    x: jax.Array,
    eps: ArrayLike,
    *,
    cpu: Callable[..., jax.Array],
    gpu: Callable[..., jax.Array],
    tpu: Callable[..., jax.Array],
) -> jax.Array:
    """One of three functions of ``x`` and ``eps``, by the platform that is lowered for."""
    if cpu == gpu == tpu:
        return cpu(x, eps)
    runs = {"cpu": cpu, "cuda": gpu, "rocm": gpu, "tpu": tpu}
    return jax.lax.platform_dependent(x, jnp.asarray(eps), default=gpu, **runs)


def _matrices(x: jax.Array, eps: ArrayLike, schedule: Schedule, form: Form) -> jax.Array:
    """Orthogonalize ``[..., m, n]``, all matrices in one product."""
    tall = x.shape[-2] > x.shape[-1]
    wide = jnp.swapaxes(x, -1, -2) if tall else x
    out = iterate(normalize(wide, eps).astype(form.wide), schedule, form)
    return (jnp.swapaxes(out, -1, -2) if tall else out).astype(x.dtype)
