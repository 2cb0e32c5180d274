"""Inverse roots ``A^-exponent`` of one symmetric positive semi-definite matrix.

Shape legend: ``k`` rows and columns of a matrix; ``...`` any batch dims.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from matrixfsdp_jax.linalg.norms import sum_of_squares

matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def check_number(
    name: str, value: Any, low: int = 0, kind: type = float, above_low: bool = False
) -> None:
    """Refuse what is no finite float (or int, the only kind if so asked) from ``low`` on."""
    number = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not number or not low <= value < math.inf or (above_low and value == low):
        bound = f"{'>' if above_low else '>='} {low}"
        raise ValueError(f"{name} must be a finite {kind.__name__} {bound}, got {value!r}")


@dataclass(frozen=True)
class Perturbation:
    """Damp by epsilon: an eigenvalue ``l`` of a positive semi-definite matrix becomes ``l + eps``.

    Attributes:
      before: add ``epsilon I`` before the decomposition. Only where the smallest eigenvalue still
        comes out below epsilon are all of them moved up, until the smallest is epsilon. False
        moves the smallest up to 0 if it is negative, and then adds epsilon to the eigenvalues.
    """

    before: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.before, bool):
            raise ValueError(f"before must be a bool, got {self.before!r}")


@dataclass(frozen=True)
class PseudoInverse:
    """Leave the null space out, with epsilon exactly 0: its powers are 0 and not infinite.

    Attributes:
      rank_atol: eigenvalues up to this count as 0.
      rank_rtol: and those up to this times the largest; None is ``k`` rounding units. With both 0
        only eigenvalues that are not positive count as 0.
    """

    rank_atol: float = 0.0
    rank_rtol: float | None = 0.0

    def __post_init__(self) -> None:
        check_number("rank_atol", self.rank_atol)
        if self.rank_rtol is not None:
            check_number("rank_rtol, if not None,", self.rank_rtol)


RankDeficiency = Perturbation | PseudoInverse
DEFAULT_RULE = Perturbation()


def check_rule(rule: Any, epsilon: Any = 0.0) -> None:
    """Refuse what is no rule for rank deficiency, and an epsilon that does not go with it."""
    if not isinstance(rule, RankDeficiency):
        raise ValueError(f"rank_deficiency must be one of {RankDeficiency}, got {rule!r}")
    check_number("epsilon", epsilon)
    if isinstance(rule, PseudoInverse) and epsilon != 0:
        raise ValueError(f"epsilon must be exactly 0 with PseudoInverse, got {epsilon!r}")


@dataclass(frozen=True)
class EighRoot:
    """By eigendecomposition: any exponent, and the most accurate."""

    rank_deficiency: RankDeficiency = DEFAULT_RULE

    def __post_init__(self) -> None:
        check_rule(self.rank_deficiency)


@dataclass(frozen=True)
class CoupledNewtonRoot:
    """By the coupled Newton iteration, products only; ``1 / exponent`` must be an integer.

    Attributes:
      max_iterations: at least 1. A root that it stopped counts as good all the same.
      tolerance: stop when ``max |M - I|`` is no larger; ``M`` tends to ``I`` as ``X`` to the root.
    """

    max_iterations: int = 100
    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        check_number("max_iterations", self.max_iterations, low=1, kind=int)
        check_number("tolerance", self.tolerance)


@dataclass(frozen=True)
class CoupledHigherOrderRoot:
    """By a coupled iteration of any order, products only, for small fractions ``1 / exponent``.

    Attributes:
      rel_epsilon, abs_epsilon: it damps by ``max(rel_epsilon |A|_inf, abs_epsilon)``, where
        ``|A|_inf`` is the largest absolute row sum, and not by the optimizer's epsilon.
      max_iterations: at least 1, the first being a Newton step.
      tolerance: stop when ``max |M - I|`` is no larger.
      order: at least 2; 2 is Newton's iteration.
    """

    rel_epsilon: float = 0.0
    abs_epsilon: float = 0.0
    max_iterations: int = 100
    tolerance: float = 1e-8
    order: int = 3

    def __post_init__(self) -> None:
        check_number("rel_epsilon", self.rel_epsilon)
        check_number("abs_epsilon", self.abs_epsilon)
        check_number("max_iterations", self.max_iterations, low=1, kind=int)
        check_number("tolerance", self.tolerance)
        check_number("order", self.order, low=2, kind=int)


RootSolver = EighRoot | CoupledNewtonRoot | CoupledHigherOrderRoot
DEFAULT_ROOT = EighRoot()


@functools.partial(jax.jit, static_argnames=("exponent", "epsilon", "solver"))
def inverse_root(
    a: ArrayLike, exponent: float, epsilon: float, solver: RootSolver = DEFAULT_ROOT
) -> tuple[jax.Array, jax.Array]:
    """Return ``(A + epsilon I)^-exponent`` and whether the solver found it.

    How it is damped, and what becomes of a null space, is the solver's: see `Perturbation`,
    `PseudoInverse` and `CoupledHigherOrderRoot`.

    Args:
      a: ``[k, k]`` symmetric, float32 or float64, ``k >= 1``.
      exponent: static, positive. The coupled solvers take the float ``1 / exponent`` exactly as a
        fraction ``p / q``: 1/2, 1/6, 0.2 and 0.4 give small ones, 0.3 does not.
      epsilon: static, ``>= 0``; exactly 0 with `PseudoInverse`.
      solver: static; `EighRoot`, `CoupledNewtonRoot` or `CoupledHigherOrderRoot`.

    Returns:
      ``(root, ok)``: ``[k, k]`` in the dtype of ``a``, and a scalar bool. Where ``ok`` is False the
      root is not to be used: ``a`` or the root is not finite, or the higher order iteration ended
      with an error ``max |A X^p - I|`` above 0.1.

    Raises:
      TypeError: if ``a`` is not float32 or float64, or the solver is unknown.
      ValueError: if ``a`` is not ``[k, k]``, a number is out of its range, epsilon is not 0 with
        `PseudoInverse`, or ``1 / exponent`` is no integer with `CoupledNewtonRoot`.

    Collectives:
      None. One matrix on one device: call it inside ``shard_map``, and not under ``vmap``.

    Numerics:
      In the dtype of ``a`` throughout, products at ``Precision.HIGHEST``. Eigenvalues below ``k``
      rounding units of the largest are noise, and so are their powers unless epsilon is larger.

    Examples:
      >>> root, ok = inverse_root(jnp.diag(jnp.array([4.0, 16.0])), 0.5, 0.0)
      >>> bool(ok) and bool(jnp.allclose(root, jnp.diag(jnp.array([0.5, 0.25]))))
      True

    References:
      N. J. Higham, "Functions of Matrices" (2008), chapter 7; S. Lakic, "On the computation of the
      matrix k-th root" (1998). Damping, starts and stops are those of the public Distributed
      Shampoo; here the norm that Newton starts from is safe from overflow and underflow.
    """
    a = jnp.asarray(a)
    check_square(a)
    check_number("exponent", exponent, above_low=True)
    check_number("epsilon", epsilon)
    match solver:
        case EighRoot(rule):
            values, vectors = jnp.linalg.eigh(damp(a, epsilon, rule))
            powers = eigenvalue_powers(values, exponent, epsilon, rule)
            root = matmul(vectors * powers[None], vectors.T)
        case CoupledNewtonRoot():
            root = _coupled_newton(damp(a, epsilon, DEFAULT_RULE), 1 / exponent, solver)
        case CoupledHigherOrderRoot():
            root = _coupled_higher_order(a, Fraction(1 / exponent), solver)
        case _:
            raise TypeError(f"solver must be one of {RootSolver}, got {solver!r}")
    # Exactly symmetric, so that one triangle of it is all of it.
    root = (root + root.T) / 2
    return root, jnp.all(jnp.isfinite(a)) & jnp.all(jnp.isfinite(root))


def eigenvalue_powers(
    eigenvalues: jax.Array, exponent: float, epsilon: float, rank_deficiency: RankDeficiency
) -> jax.Array:
    """Return ``eigenvalues^-exponent``, ``[..., k]`` in any order, damped or cut as the rule says.

    With ``Perturbation(before=True)`` the eigenvalues are those of ``A + epsilon I``: epsilon is
    added again only where the smallest is below it.

    Raises:
      ValueError: if a number is out of its range, or epsilon is not 0 with `PseudoInverse`.
    """
    check_number("exponent", exponent, above_low=True)
    check_rule(rank_deficiency, epsilon)
    smallest = jnp.min(eigenvalues, axis=-1, keepdims=True)
    match rank_deficiency:
        case PseudoInverse(atol, rtol):
            if rtol is None:
                rtol = eigenvalues.shape[-1] * float(jnp.finfo(eigenvalues.dtype).eps)
            largest = jnp.max(eigenvalues, axis=-1, keepdims=True)
            null = eigenvalues <= jnp.maximum(rtol * jnp.maximum(largest, 0), atol)
            return jnp.where(null, 0, jnp.where(null, 1, eigenvalues) ** -exponent)
        case Perturbation(before=True):
            clamped = (eigenvalues - smallest) + epsilon
            return jnp.where(smallest < epsilon, clamped, eigenvalues) ** -exponent
        case Perturbation():
            return ((eigenvalues - jnp.minimum(smallest, 0)) + epsilon) ** -exponent


def check_square(a: jax.Array) -> None:
    """Refuse what is not ``[k, k]`` of float32 or float64 with ``k >= 1``."""
    if a.dtype not in (jnp.float32, jnp.float64):
        raise TypeError(f"the matrix must be float32 or float64, got dtype {a.dtype}")
    if a.ndim != 2 or a.shape[0] != a.shape[1] or a.size == 0:
        raise ValueError(f"the matrix must be [k, k] with k >= 1, got shape {a.shape}")


def damp(a: jax.Array, epsilon: float, rule: RankDeficiency) -> jax.Array:
    """Return ``A + epsilon I`` if the rule perturbs before the decomposition, else ``A``."""
    check_rule(rule, epsilon)
    before = isinstance(rule, Perturbation) and rule.before
    return a + epsilon * _identity(a) if before else a


class _Coupled(NamedTuple):
    """``X`` tends to the root as ``M = A X^p`` to ``I``; ``error`` is ``max |M - I|``."""

    x: jax.Array
    m: jax.Array
    error: jax.Array
    steps: jax.Array | int


def _identity(a: jax.Array) -> jax.Array:
    return jnp.eye(len(a), dtype=a.dtype)


def _coupled_newton(a: jax.Array, root: float, solver: CoupledNewtonRoot) -> jax.Array:
    if not root.is_integer():
        raise ValueError(f"CoupledNewtonRoot needs an integer 1 / exponent, got {root!r}")
    top = jnp.max(jnp.abs(a))
    top = jnp.where(top > 0, top, 1)  # the squares of large or small entries leave the range
    norm = top * jnp.sqrt(sum_of_squares(a / top)[0, 0])
    p = int(root)
    step = functools.partial(_step, p=p, coefficients=_taylor(p, 2))
    return _until_close(step, _start(a, (p + 1) / (2 * norm), p), solver).x


def _coupled_higher_order(
    a: jax.Array, root: Fraction, solver: CoupledHigherOrderRoot
) -> jax.Array:
    p, q = root.numerator, root.denominator
    row_sum = jnp.max(jnp.sum(jnp.abs(a), axis=-1))
    a += jnp.maximum(solver.rel_epsilon * row_sum, solver.abs_epsilon) * _identity(a)
    coefficients = _taylor(p, solver.order)

    def step(old: _Coupled) -> _Coupled:
        new = _step(old, p, coefficients)
        stop = (new.error > 1.2 * old.error) | ((new.error == old.error) & (old.error < 1e-3))
        return new._replace(error=jnp.where(stop, 0, new.error))

    # One step of Newton first: the higher orders converge from there.
    start = _step(_start(a, 1 / jnp.trace(a), p), p, _taylor(p, 2))
    x = _until_close(step, start, solver).x
    error = jnp.max(jnp.abs(matmul(a, _power(x, p)) - _identity(a)))
    return jnp.where((error <= 0.1) & jnp.isfinite(row_sum), _power(x, q), jnp.nan)


def _start(a: jax.Array, z: jax.Array, p: int) -> _Coupled:
    m = z * a
    return _Coupled(z ** (1 / p) * _identity(a), m, jnp.max(jnp.abs(m - _identity(a))), 0)


def _step(old: _Coupled, p: int, coefficients: Sequence[float]) -> _Coupled:
    """``X F`` and ``F^p M``, with ``F`` near ``M^(-1/p)`` a polynomial in ``I - M``, by Horner."""
    identity = _identity(old.m)
    factor = coefficients[-1] * (identity - old.m) + coefficients[-2] * identity
    for b in coefficients[-3::-1]:
        factor = matmul(factor, identity - old.m) + b * identity
    m = matmul(_power(factor, p), old.m)
    return _Coupled(matmul(old.x, factor), m, jnp.max(jnp.abs(m - identity)), old.steps + 1)


def _until_close(
    step: Callable[[_Coupled], _Coupled],
    start: _Coupled,
    solver: CoupledNewtonRoot | CoupledHigherOrderRoot,
) -> _Coupled:
    def proceed(now: _Coupled) -> jax.Array:
        return (now.error > solver.tolerance) & (now.steps < solver.max_iterations)

    return jax.lax.while_loop(proceed, step, start)


def _power(x: jax.Array, n: int) -> jax.Array:
    """``X^n`` for ``n >= 1``, by repeated squares."""
    if n == 1:
        return x
    half = _power(matmul(x, x), n // 2)
    return matmul(half, x) if n % 2 else half


def _taylor(p: int, order: int) -> list[float]:
    """The first coefficients of ``(1 - t)^(-1/p)`` in powers of ``t``; two give Newton's step."""
    terms = [Fraction(1)]
    for i in range(1, order):
        terms.append(terms[-1] * Fraction(1 + (i - 1) * p, i * p))
    return [float(term) for term in terms]
