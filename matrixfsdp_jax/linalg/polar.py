"""The polar factor of stacks of matrices to working precision, for tests and small matrices."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from matrixfsdp_jax.linalg.norms import check_matrices, scale_to_one


@jax.jit
def polar(x: ArrayLike) -> jax.Array:
    """Return the polar factor ``U V^H`` of every matrix ``U S V^H`` of ``x``, by SVD.

    It is what `orthogonalize` approaches: the nearest matrix with orthonormal rows (columns, if
    tall), and independent of the scale of ``x``. Where a matrix has rank ``r`` below
    ``min(m, n)``, singular values up to ``max(m, n)`` times the rounding unit times the largest
    count as zero and stay zero: the result is the partial isometry of rank ``r`` between row and
    column space, which is unique, where an orthogonal factor would not be. A zero matrix gives
    exact zeros; one with a NaN or an infinity gives NaN everywhere and touches no other matrix.

    Args:
      x: ``[..., m, n]`` with ``m, n >= 1``, real floating of any width or complex.

    Returns:
      ``[..., m, n]`` in the dtype of ``x``.

    Raises:
      TypeError: if ``x`` is neither real floating nor complex.
      ValueError: if ``x`` has fewer than two dims or a matrix dim of size 0.

    Collectives:
      None. XLA does not partition the decomposition: sharded batch dims are handled inside
      ``shard_map`` only.

    Numerics:
      Decomposed in float32 (float64 or complex in the dtype of ``x``); orthonormal to about
      ``max(m, n)`` rounding units. Not meant to be differentiated.

    Examples:
      >>> bool(jnp.allclose(polar(jnp.array([[0.0, 3e-20], [-1e-30, 0.0]])), jnp.eye(2, k=1)))
      True
    """
    x = jnp.asarray(x)
    check_matrices(x)
    u, s, vh = jnp.linalg.svd(scale_to_one(x), full_matrices=False)
    kept = s > max(x.shape[-2:]) * jnp.finfo(s.dtype).eps * s[..., :1]
    # NaN in the singular values is not kept, and has to stay visible.
    mask = jnp.where(jnp.isnan(s), s, kept.astype(s.dtype)).astype(u.dtype)
    factor = jnp.matmul(u * mask[..., None, :], vh, precision=jax.lax.Precision.HIGHEST)
    return factor.astype(x.dtype)
