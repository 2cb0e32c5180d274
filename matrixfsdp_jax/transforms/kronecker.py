"""Preconditioners with one factor per dim: Shampoo and SOAP.

Each is a record of options with the methods that ``transforms/preconditioners.py`` describes.

Shape legend: ``...`` devices and waves, ``B`` blocks, ``k`` a preconditioned dim of a block.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp

from matrixfsdp_jax.linalg.eigenbasis import BasisSolver, EighBasis, eigenbasis
from matrixfsdp_jax.linalg.roots import (
    EighRoot,
    RootSolver,
    eigenvalue_powers,
    inverse_root,
    matmul,
)
from matrixfsdp_jax.transforms.checks import check_dtype, check_flags, check_kind, check_number
from matrixfsdp_jax.transforms.preconditioners import Context, correction, weight
from matrixfsdp_jax.transforms.stacks import wide

PyTree = Any
Exponents = Mapping[int, float | Mapping[int, float]]


@dataclass(frozen=True)
class _Kronecker:
    """What all kinds with one factor per dim share; see the kinds."""

    factor_dtype: Any = None
    inverse_exponent_override: Exponents = field(default_factory=dict)
    drop_weighting_factor_on_gsquare: bool = False
    trace_scaling_exponent: float | None = None

    refreshes = True

    def __post_init__(self) -> None:
        """Refuse what is out of range or of another kind."""
        check_flags(drop_weighting_factor_on_gsquare=self.drop_weighting_factor_on_gsquare)
        if self.trace_scaling_exponent is not None:
            check_number(
                "trace_scaling_exponent",
                self.trace_scaling_exponent,
                low=0.0,
                above_low=True,
                static=True,
            )
        name = "inverse_exponent_override"
        for order, given in _by_order(name, self.inverse_exponent_override):
            if isinstance(given, Mapping):
                _check_dims(f"{name}[{order}]", given, order)
            for x in given.values() if isinstance(given, Mapping) else (given,):
                check_number(f"{name}[{order}]", x, low=0.0, static=True)

    def check(self) -> None:
        """Refuse a dtype that cannot be decomposed here.

        Raises: ValueError, naming the dtype.
        """
        if self.factor_dtype is not None:
            check_dtype("factor_dtype", self.factor_dtype, ("float32", "float64"))

    def dims(self, order: int) -> tuple[int, ...]:
        """The dims of a block of ``order`` that have a factor."""
        return tuple(d for d in range(order) if self.exponent(order, d) != 0)

    def exponent(self, order: int, dim: int) -> float:
        """The inverse exponent of a dim."""
        default = 1 / (2 * max(order, 1))
        given = self.inverse_exponent_override.get(order, default)
        return given.get(dim, default) if isinstance(given, Mapping) else given

    @property
    def rank_deficiency(self) -> Any:
        """The rule for null spaces of the solver."""
        solver = getattr(self, "root", None) or getattr(self, "basis", None)
        return getattr(solver, "rank_deficiency", None)

    def finish(self, state: PyTree, g: jax.Array, ctx: Context) -> PyTree:
        return state

    def _dtype(self, dtype: Any) -> Any:
        return wide(dtype) if self.factor_dtype is None else jnp.dtype(self.factor_dtype)

    def _per_dim(
        self, zeros: jax.Array, order: int, base: Callable[[int, Any], jax.Array]
    ) -> tuple[jax.Array, ...]:
        """``base(k, dtype)`` for every block and each preconditioned dim of size ``k``.

        Added to zeros of the blocks: inside ``shard_map`` it then varies over devices as they do.
        """
        first = zeros.ndim - order
        dtype = self._dtype(zeros.dtype)
        lead = zeros.reshape(*zeros.shape[:first], -1)[..., 0].astype(dtype)
        out = []
        for dim in self.dims(order):
            one = base(zeros.shape[first + dim], dtype)
            shape = (*lead.shape, *one.shape)
            spread = jnp.expand_dims(lead, range(first, first + one.ndim))
            out.append(jnp.broadcast_to(spread, shape) + jnp.broadcast_to(one, shape))
        return tuple(out)

    def _zeros(self, zeros: jax.Array, order: int) -> tuple[jax.Array, ...]:
        return self._per_dim(zeros, order, lambda k, dtype: jnp.zeros((k, k), dtype))

    def _identities(self, zeros: jax.Array, order: int) -> tuple[jax.Array, ...]:
        return self._per_dim(zeros, order, lambda k, dtype: jnp.eye(k, dtype=dtype))

    def _accumulated(
        self, factors: tuple[jax.Array, ...], gs: list[jax.Array], ctx: Context
    ) -> tuple[jax.Array, ...]:
        """``gs``: what is contracted, for each dim that has a factor."""
        w = weight(ctx.beta2, self.drop_weighting_factor_on_gsquare)
        new = []
        for factor, g, dim in zip(factors, gs, self.dims(ctx.order), strict=True):
            old = factor if ctx.beta2 == 1 else ctx.beta2 * factor
            new.append(old + w * contract(g.astype(factor.dtype), ctx.order, dim))
        return tuple(new)

    def _correction(self, ctx: Context, dtype: Any) -> jax.Array | float:
        corrected = ctx.bias_correction and not self.drop_weighting_factor_on_gsquare
        return correction(ctx.step, ctx.beta2, corrected, dtype)

    def _normalized(self, factor: jax.Array, ctx: Context) -> jax.Array:
        """The factor of one unit as it is decomposed."""
        a = factor / self._correction(ctx, factor.dtype)
        if self.trace_scaling_exponent is not None:
            a = a * jnp.maximum(jnp.trace(a), ctx.epsilon) ** -self.trace_scaling_exponent
        return a

    def _refreshed(
        self,
        factors: tuple[jax.Array, ...],
        kept: Iterable[Any],
        decompose: Callable[[jax.Array, Any, int], tuple[Any, jax.Array]],
        ctx: Context,
    ) -> tuple[list[Any], jax.Array, jax.Array]:
        """What is kept of every factor of one unit, anew where its decomposition is ok.

        ``decompose(a, old, dim)`` is ``(new, ok)``, both new and old a tuple of arrays. Returns the
        new tuples, whether all were ok, and whether all factors were finite.
        """
        news, oks, finites = [], [], []
        for factor, old, dim in zip(factors, kept, self.dims(ctx.order), strict=True):
            a = self._normalized(factor, ctx)
            new, ok = decompose(a, old, dim)
            news.append(jax.tree.map(partial(jnp.where, ok), new, old))
            oks.append(ok)
            finites.append(jnp.all(jnp.isfinite(a)))
        return news, jnp.all(jnp.stack(oks)), jnp.all(jnp.stack(finites))


@dataclass(frozen=True)
class _Roots(_Kronecker, ABC):
    """Kinds that multiply by a root of every factor.

    ``kl``: the KL update: for the statistic of a dim the gradient is first multiplied by the
    current roots of all other dims.
    """

    kl: bool = False

    def __post_init__(self) -> None:
        """As above."""
        super().__post_init__()
        check_flags(kl=self.kl)

    def accumulate(self, state: Any, g: jax.Array, ctx: Context) -> Any:
        dims = self.dims(ctx.order)
        gs = [g for _ in dims]
        if self.kl:
            roots = self._current_roots(state, ctx)
            gs = [
                multiply(g, [r for r, d in zip(roots, dims, strict=True) if d != dim],
                         [d for d in dims if d != dim], ctx.order)
                for dim in dims
            ]  # fmt: skip
        return state._replace(factors=self._accumulated(state.factors, gs, ctx))

    def direction(self, state: Any, m: jax.Array, ctx: Context) -> jax.Array:
        return multiply(m, self._current_roots(state, ctx), self.dims(ctx.order), ctx.order)

    @abstractmethod
    def _current_roots(self, state: Any, ctx: Context) -> tuple[jax.Array, ...]:
        """The root of every factor, ``[..., B, k, k]``."""


class RootInverseState(NamedTuple):
    """factors, roots: one ``[..., B, k, k]`` per preconditioned dim."""

    factors: tuple[jax.Array, ...]
    roots: tuple[jax.Array, ...]


@dataclass(frozen=True)
class RootInverse(_Roots):
    """Shampoo: the inverse root of every factor is kept."""

    root: RootSolver = field(default_factory=EighRoot)

    def __post_init__(self) -> None:
        """As above."""
        super().__post_init__()
        check_kind("root", self.root, *get_args(RootSolver))

    def init(self, zeros: jax.Array, order: int) -> RootInverseState:
        return RootInverseState(self._zeros(zeros, order), self._identities(zeros, order))

    def refresh(self, unit: RootInverseState, ctx: Context) -> tuple[Any, jax.Array, jax.Array]:
        def decompose(a: jax.Array, _: Any, dim: int) -> tuple[Any, jax.Array]:
            root, ok = inverse_root(a, self.exponent(ctx.order, dim), ctx.epsilon, self.root)
            return (root,), ok

        news, ok, finite = self._refreshed(unit.factors, zip(unit.roots), decompose, ctx)
        return unit._replace(roots=tuple(root for (root,) in news)), ok, finite

    def _current_roots(self, state: RootInverseState, ctx: Context) -> tuple[jax.Array, ...]:
        return state.roots


class EigendecomposedState(NamedTuple):
    """factors, vectors: one ``[..., B, k, k]`` per preconditioned dim; values: ``[..., B, k]``."""

    factors: tuple[jax.Array, ...]
    vectors: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


@dataclass(frozen=True)
class Eigendecomposed(_Roots):
    """Shampoo: eigenvectors and eigenvalues are kept, and the root is formed in every step."""

    basis: BasisSolver = field(default_factory=EighBasis)

    def __post_init__(self) -> None:
        """As above."""
        super().__post_init__()
        check_kind("basis", self.basis, *get_args(BasisSolver))

    def init(self, zeros: jax.Array, order: int) -> EigendecomposedState:
        """No statistics, identities for eigenvectors, ones for eigenvalues."""
        values = self._per_dim(zeros, order, lambda k, dtype: jnp.ones(k, dtype))
        return EigendecomposedState(
            self._zeros(zeros, order), self._identities(zeros, order), values
        )

    def refresh(self, unit: EigendecomposedState, ctx: Context) -> tuple[Any, jax.Array, jax.Array]:
        def decompose(a: jax.Array, old: Any, _: int) -> tuple[Any, jax.Array]:
            values, vectors, ok = eigenbasis(a, old[0], ctx.epsilon, self.basis)
            return (vectors, values), ok

        kept = zip(unit.vectors, unit.values, strict=True)
        news, ok, finite = self._refreshed(unit.factors, kept, decompose, ctx)
        vectors, values = zip(*news, strict=True)
        return unit._replace(vectors=vectors, values=values), ok, finite

    def _current_roots(self, state: EigendecomposedState, ctx: Context) -> tuple[jax.Array, ...]:
        roots = []
        dims = self.dims(ctx.order)
        for q, values, dim in zip(state.vectors, state.values, dims, strict=True):
            powers = eigenvalue_powers(
                values, self.exponent(ctx.order, dim), ctx.epsilon, self.basis.rank_deficiency
            )
            roots.append(matmul(q * powers[..., None, :], jnp.swapaxes(q, -1, -2)))
        return tuple(roots)


class EigenvalueCorrectedState(NamedTuple):
    """factors, vectors: one ``[..., B, k, k]`` a dim; moment: ``[..., B, *shape]``."""

    factors: tuple[jax.Array, ...]
    vectors: tuple[jax.Array, ...]
    moment: jax.Array


@dataclass(frozen=True)
class EigenvalueCorrected(_Kronecker):
    """SOAP: a second moment of the gradient in the eigenbasis of the factors.

    ``ignored_basis_change_dims``: order of a block -> dims that keep the identity basis.
    ``inverse_exponent_override``: order -> exponent of the second moment, 1/2 by default.
    """

    basis: BasisSolver = field(default_factory=EighBasis)
    ignored_basis_change_dims: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """As above."""
        super().__post_init__()
        check_kind("basis", self.basis, *get_args(BasisSolver))
        for order in self.inverse_exponent_override:
            self.exponent(order)
        name = "ignored_basis_change_dims"
        for order, dims in _by_order(name, self.ignored_basis_change_dims):
            if not isinstance(dims, tuple | list):
                raise TypeError(f"{name}[{order}]={dims!r} must be a tuple of dims")
            _check_dims(f"{name}[{order}]", dims, order)

    def dims(self, order: int) -> tuple[int, ...]:
        ignored = self.ignored_basis_change_dims.get(order, ())
        return tuple(d for d in range(order) if d not in ignored)

    def exponent(self, order: int, dim: int = 0) -> float:
        given = self.inverse_exponent_override.get(order, 0.5)
        if isinstance(given, Mapping) or given <= 0:
            raise ValueError(
                f"inverse_exponent_override[{order}]={given!r}: SOAP takes one exponent > 0 per "
                "order; leave dims out of the basis with ignored_basis_change_dims"
            )
        return given

    def init(self, zeros: jax.Array, order: int) -> EigenvalueCorrectedState:
        return EigenvalueCorrectedState(
            self._zeros(zeros, order),
            self._identities(zeros, order),
            zeros.astype(self._dtype(zeros.dtype)),
        )

    def accumulate(self, state: EigenvalueCorrectedState, g: jax.Array, ctx: Context) -> Any:
        gs = [g for _ in state.factors]
        return state._replace(factors=self._accumulated(state.factors, gs, ctx))

    def refresh(
        self, unit: EigenvalueCorrectedState, ctx: Context
    ) -> tuple[Any, jax.Array, jax.Array]:
        def decompose(a: jax.Array, old: Any, _: int) -> tuple[Any, jax.Array]:
            _, vectors, ok = eigenbasis(a, old[0], ctx.epsilon, self.basis)
            return (vectors,), ok

        news, ok, finite = self._refreshed(unit.factors, zip(unit.vectors), decompose, ctx)
        return unit._replace(vectors=tuple(q for (q,) in news)), ok, finite

    def finish(self, state: EigenvalueCorrectedState, g: jax.Array, ctx: Context) -> Any:
        rotated = self._rotated(state, g, ctx)
        w = weight(ctx.beta2, self.drop_weighting_factor_on_gsquare)
        old = state.moment if ctx.beta2 == 1 else ctx.beta2 * state.moment
        return state._replace(moment=old + w * rotated * rotated)

    def direction(self, state: EigenvalueCorrectedState, m: jax.Array, ctx: Context) -> jax.Array:
        moment = state.moment / self._correction(ctx, state.moment.dtype)
        root = moment ** self.exponent(ctx.order) + ctx.epsilon
        back = tuple(jnp.swapaxes(q, -1, -2) for q in state.vectors)
        scaled = self._rotated(state, m, ctx) / root
        return multiply(scaled, back, self.dims(ctx.order), ctx.order).astype(m.dtype)

    def _rotated(self, state: EigenvalueCorrectedState, x: jax.Array, ctx: Context) -> jax.Array:
        x = x.astype(state.moment.dtype)
        return multiply(x, state.vectors, self.dims(ctx.order), ctx.order)


# ---- options by order --------------------------------------------------------------------------


def _by_order(name: str, given: Any) -> Iterable[tuple[int, Any]]:
    """The items of a mapping from the order of a block.

    Raises: TypeError for another thing or key.
    """
    if not isinstance(given, Mapping) or not all(_is_whole(order) for order in given):
        raise TypeError(
            f"{name}={given!r} must be a mapping from orders of blocks, which are ints >= 0"
        )
    return given.items()


def _check_dims(name: str, dims: Any, order: int) -> None:
    """Refuse what are no different dims of a block of ``order`` (a scalar counts as one dim).

    Raises: ValueError.
    """
    allowed = range(max(order, 1))
    if not all(_is_whole(dim) and dim in allowed for dim in dims) or len(set(dims)) < len(dims):
        raise ValueError(f"{name}={dims!r} must name each dim once, out of {list(allowed)}")


def _is_whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


# ---- products ----------------------------------------------------------------------------------


def contract(g: jax.Array, order: int, dim: int) -> jax.Array:
    """``[..., k, k]``: the product of ``g`` with itself over all its dims but ``dim``."""
    first = g.ndim - order
    rows = jnp.moveaxis(g, first + dim, first)
    rows = rows.reshape(*rows.shape[: first + 1], -1)
    return matmul(rows, jnp.swapaxes(rows, -1, -2))


def multiply(x: jax.Array, factors: Any, dims: Any, order: int) -> jax.Array:
    """``x`` times ``factors[i]`` along ``dims[i]``, in the dtype of the factors, cast back.

    Contracts the first index of each ``[..., k, k]``.
    """
    dtype = x.dtype
    for factor, dim in zip(factors, dims, strict=True):
        first = x.ndim - order
        y = jnp.moveaxis(x.astype(factor.dtype), first + dim, -1)
        flat = y.reshape(*y.shape[:first], -1, y.shape[-1])
        y = matmul(flat, factor).reshape(y.shape)
        x = jnp.moveaxis(y, -1, first + dim)
    return x.astype(dtype)
