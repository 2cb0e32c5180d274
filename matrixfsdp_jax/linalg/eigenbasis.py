"""Eigenvalues and eigenvectors of one symmetric matrix, starting from an earlier basis.

Shape legend: ``k`` rows and columns of a matrix.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from matrixfsdp_jax.linalg.norms import scale_to_one, sum_of_squares
from matrixfsdp_jax.linalg.roots import (
    DEFAULT_RULE,
    RankDeficiency,
    check_number,
    check_rule,
    check_square,
    damp,
    matmul,
)


@dataclass(frozen=True)
class EighBasis:
    """By eigendecomposition.

    Attributes:
      rank_deficiency: `Perturbation(before=True)` decomposes ``A + epsilon I``, others ``A``.
      tolerance: in ``[0, 1]``. Above 0 the previous basis ``Q`` stays, with the diagonal of
        ``B = Q^T A Q`` for eigenvalues, in its old order, while the part of ``B`` off the diagonal
        is no larger than this times ``B`` (Frobenius norms).
    """

    rank_deficiency: RankDeficiency = DEFAULT_RULE
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        check_rule(self.rank_deficiency)
        _check_tolerance(self.tolerance)


@dataclass(frozen=True)
class QRBasis:
    """By steps of the QR algorithm from the previous basis: cheaper, and exact only in the limit.

    The limit is that of many steps in one call. Every call ends with eigenvalues that ascend, as
    in Distributed Shampoo, but a step multiplies the entry ``(i, j)`` of ``B`` below the diagonal
    by about ``l_i / l_j``, which is above 1 in that order. One step per call therefore need not
    converge, and can even leave an exact basis; a tolerance above 0 keeps a basis that meets it.

    Attributes:
      max_iterations: at least 1.
      tolerance: in ``[0, 1]``; stop when the part of ``B = Q^T A Q`` off the diagonal is no larger
        than this times ``B`` (Frobenius norms). With 0 only an exactly diagonal ``B`` stops.
      rank_deficiency: as in `EighBasis`.
    """

    max_iterations: int = 1
    tolerance: float = 0.0
    rank_deficiency: RankDeficiency = DEFAULT_RULE

    def __post_init__(self) -> None:
        check_number("max_iterations", self.max_iterations, low=1, kind=int)
        _check_tolerance(self.tolerance)
        check_rule(self.rank_deficiency)


BasisSolver = EighBasis | QRBasis


def _check_tolerance(tolerance: Any) -> None:
    check_number("tolerance", tolerance)
    if tolerance > 1:
        raise ValueError(f"tolerance must be in [0, 1], got {tolerance!r}")


@functools.partial(jax.jit, static_argnames=("epsilon", "solver"))
def eigenbasis(
    a: ArrayLike, previous: ArrayLike, epsilon: float, solver: BasisSolver
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return eigenvalues and eigenvectors of ``A``, damped as the solver says, and if all is well.

    Args:
      a: ``[k, k]`` symmetric, float32 or float64, ``k >= 1``.
      previous: ``[k, k]`` orthonormal columns in the dtype of ``a``; the identity at first.
      epsilon: static, ``>= 0``; exactly 0 with `PseudoInverse`.
      solver: static; `EighBasis` or `QRBasis`.

    Returns:
      ``(eigenvalues, eigenvectors, ok)``: ``[k]`` ascending (equal ones of `QRBasis` in the order
      of their old columns; not sorted where `EighBasis` keeps the previous basis), ``[k, k]`` with
      the eigenvectors in columns, both in the dtype of ``a``, and a scalar bool. Where ``ok`` is
      False, because something is not finite, neither is to be used.

    Raises:
      TypeError: if a matrix is not float32 or float64, the dtypes differ, or the solver is unknown.
      ValueError: if a shape is not ``[k, k]``, epsilon is negative or not finite, or not 0 with
        `PseudoInverse`.

    Collectives:
      None. One matrix on one device: call it inside ``shard_map``, and not under ``vmap``.

    Numerics:
      In the dtype of ``a`` throughout, products at ``Precision.HIGHEST``. The test of the part off
      the diagonal does not depend on the scale of ``a``. Every QR step multiplies rounding errors
      into the basis: its columns stay orthonormal to about a rounding unit per step.

    Examples:
      >>> a = jnp.array([[2.0, 1.0], [1.0, 2.0]])
      >>> values, vectors, ok = eigenbasis(a, jnp.eye(2), 0.0, QRBasis(max_iterations=20))
      >>> bool(ok) and bool(jnp.allclose(values, jnp.array([1.0, 3.0])))
      True

    References:
      G. H. Golub and C. F. Van Loan, "Matrix Computations" (2013), section 8.3: the unshifted QR
      iteration. Tests and order as in the public Distributed Shampoo, except that the norm off the
      diagonal is taken of these entries, where a difference of squares loses half the digits.
    """
    a, previous = jnp.asarray(a), jnp.asarray(previous)
    check_square(a)
    if previous.dtype != a.dtype:
        raise TypeError(f"previous must be {a.dtype} as the matrix, got dtype {previous.dtype}")
    if previous.shape != a.shape:
        raise ValueError(f"previous must be {a.shape} as the matrix, got shape {previous.shape}")
    match solver:
        case EighBasis(rule, tolerance):
            values, vectors = _by_eigh(damp(a, epsilon, rule), previous, tolerance)
        case QRBasis():
            values, vectors = _by_qr(damp(a, epsilon, solver.rank_deficiency), previous, solver)
        case _:
            raise TypeError(f"solver must be one of {BasisSolver}, got {solver!r}")
    parts = (a, values, vectors)
    return values, vectors, jnp.stack([jnp.all(jnp.isfinite(part)) for part in parts]).all()


def _by_eigh(a: jax.Array, previous: jax.Array, tolerance: float) -> tuple[jax.Array, jax.Array]:
    if not tolerance:
        return _eigh(a)
    a, previous = _joined(a, previous)
    b = _rotated(a, previous)
    return jax.lax.cond(
        _off_diagonal(b, tolerance), lambda: _eigh(a), lambda: (jnp.diagonal(b), previous)
    )


def _eigh(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    values, vectors = jnp.linalg.eigh(a)
    return values, vectors


def _by_qr(a: jax.Array, previous: jax.Array, solver: QRBasis) -> tuple[jax.Array, jax.Array]:
    a, previous = _joined(a, previous)

    def proceed(carry: tuple) -> jax.Array:
        b, _, count = carry
        return (count < solver.max_iterations) & _off_diagonal(b, solver.tolerance)

    def body(carry: tuple) -> tuple:
        b, vectors, count = carry
        q, r = jnp.linalg.qr(b)
        return matmul(r, q), matmul(vectors, q), count + 1

    b, vectors, _ = jax.lax.while_loop(proceed, body, (_rotated(a, previous), previous, 0))
    values = jnp.diagonal(b)
    order = jnp.argsort(values, stable=True)
    return values[order], vectors[:, order]


def _rotated(a: jax.Array, basis: jax.Array) -> jax.Array:
    return matmul(matmul(basis.T, a), basis)


def _off_diagonal(b: jax.Array, tolerance: float) -> jax.Array:
    """Whether ``|offdiag(B)| > tolerance |B|``; False for zero, or with a NaN."""
    b = scale_to_one(b)
    off = jnp.where(jnp.eye(len(b), dtype=bool), 0, b)
    return (jnp.sqrt(sum_of_squares(off)) > tolerance * jnp.sqrt(sum_of_squares(b)))[0, 0]


def _joined(a: jax.Array, previous: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both, with NaN where either is not finite.

    A NaN in either then shows in the result. Besides, inside ``shard_map`` both vary over the
    same axes after it, as the branches of a conditional and the carry of a loop must.
    """
    finite = jnp.isfinite(a) & jnp.isfinite(previous)
    return jnp.where(finite, a, jnp.nan), jnp.where(finite, previous, jnp.nan)
