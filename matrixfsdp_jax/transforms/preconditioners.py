"""Preconditioners of Shampoo and SOAP: graftings and kinds without factors.

A preconditioner is a frozen record of options. Its state and all its arguments are arrays of one
group of blocks, ``[..., B, *shape]``; a *unit* is one block. Its methods, in the order of a step:

1. ``init(zeros, order)``: the state, from zeros of the group's shape;
2. ``accumulate(state, g, ctx)``: statistics of the raw gradient;
3. ``refresh(unit, ctx)`` of one unit, where it is due and if ``refreshes``: roots or eigenbases, as
   ``(unit, ok, finite)``: a decomposition that is not ok leaves what was there;
4. ``finish(state, g, ctx)``: statistics that need the refreshed basis;
5. ``direction(state, m, ctx)``: the preconditioned (filtered) gradient.

``transforms/kronecker.py`` has the kinds with one factor per dim.

Shape legend: ``...`` devices and waves, ``B`` blocks, ``k`` a preconditioned dim of a block.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from matrixfsdp_jax.linalg.coefficients import newton_schulz_schedule
from matrixfsdp_jax.linalg.orthogonalize import orthogonalize
from matrixfsdp_jax.transforms.checks import (
    check_callable,
    check_flags,
    check_kind,
    check_number,
)

PyTree = Any


class Context(NamedTuple):
    """What all preconditioners of a step share.

    order: number of dims of a block. step: number of this update, from 1, int32. beta2: decay of
    the statistics, 1 for a sum.
    """

    order: int
    step: jax.Array
    beta2: float
    epsilon: float
    bias_correction: bool


def weight(beta2: float, drop: bool) -> float:
    """Weight of the new square in a statistic."""
    return 1.0 if beta2 == 1 or drop else 1 - beta2


def correction(step: jax.Array, beta2: float, corrected: bool, dtype: Any) -> jax.Array | float:
    """``1 - beta2 ** step`` where a bias is corrected, else 1."""
    if not corrected or beta2 == 1:
        return 1.0
    return 1 - jnp.asarray(beta2, dtype) ** step.astype(dtype)


# ---- elementwise: graftings, also preconditioners of their own ---------------------------------


class _Elementwise:
    """Nothing to refresh, and no state unless a subclass adds it."""

    refreshes = False

    def init(self, zeros: jax.Array, order: int) -> PyTree:
        return ()

    def accumulate(self, state: PyTree, g: jax.Array, ctx: Context) -> PyTree:
        return state

    def finish(self, state: PyTree, g: jax.Array, ctx: Context) -> PyTree:
        return state


@dataclass(frozen=True)
class SGDGrafting(_Elementwise):
    """The gradient itself."""

    def direction(self, state: PyTree, m: jax.Array, ctx: Context) -> jax.Array:
        return m


class SquaresState(NamedTuple):
    """nu: sum or average of the squared gradients, ``[..., B, *shape]``."""

    nu: jax.Array


@dataclass(frozen=True)
class _Squares(_Elementwise):
    """``g / (sqrt(v / c) + epsilon)``; its own ``beta2`` and ``epsilon``, not the optimizer's."""

    beta2: float = 1.0
    epsilon: float = 1e-10
    drop_weighting_factor_on_gsquare: bool = False
    _corrected = False

    def __post_init__(self) -> None:
        check_number("beta2", self.beta2, static=True)
        if not 0 < self.beta2 <= 1:
            raise ValueError(f"beta2={self.beta2} must be in (0, 1]")
        check_number("epsilon", self.epsilon, low=0.0, above_low=True, static=True)
        check_flags(drop_weighting_factor_on_gsquare=self.drop_weighting_factor_on_gsquare)

    def init(self, zeros: jax.Array, order: int) -> SquaresState:
        return SquaresState(zeros)

    def accumulate(self, state: SquaresState, g: jax.Array, ctx: Context) -> SquaresState:
        g = g.astype(state.nu.dtype)
        w = weight(self.beta2, self.drop_weighting_factor_on_gsquare)
        return SquaresState(self.beta2 * state.nu + w * g * g)

    def direction(self, state: SquaresState, m: jax.Array, ctx: Context) -> jax.Array:
        corrected = self._corrected and not self.drop_weighting_factor_on_gsquare
        c = correction(ctx.step, self.beta2, corrected, state.nu.dtype)
        return m / (jnp.sqrt(state.nu / c) + self.epsilon)


@dataclass(frozen=True)
class AdaGradGrafting(_Squares):
    """AdaGrad: the sum of squared gradients."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta2 != 1:
            raise ValueError(f"AdaGrad sums, beta2={self.beta2} must be 1; see RMSpropGrafting")


@dataclass(frozen=True)
class RMSpropGrafting(_Squares):
    """RMSprop: an average of squared gradients, its bias not corrected."""

    beta2: float = 0.99


@dataclass(frozen=True)
class AdamGrafting(_Squares):
    """Adam: an average of squared gradients, its bias corrected."""

    beta2: float = 0.999
    _corrected = True


# ---- without statistics ------------------------------------------------------------------------


def _one(rows: int, cols: int) -> float:
    return 1.0


@dataclass(frozen=True)
class NewtonSchulzOrthogonalization:
    """Orthogonalisation by Newton-Schulz steps, times ``scale(rows, cols)``."""

    steps: int = 5
    coefficients: Any = "keller"
    scale: Callable[[int, int], float] = _one

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        newton_schulz_schedule(self.coefficients, self.steps)
        check_callable("scale", self.scale)

    def __call__(self, m: jax.Array) -> jax.Array:
        rows, cols = m.shape[-2:]
        # In the dtype of the averages on every device, as the reference.
        out = orthogonalize(
            m, steps=self.steps, coefficients=self.coefficients, eps=1e-30, dtype=m.dtype
        )
        return self.scale(rows, cols) * out


@dataclass(frozen=True)
class SVDOrthogonalization:
    """The polar factor, times the sum of the singular values if asked, times ``scale``."""

    scale_by_nuclear_norm: bool = False
    scale: Callable[[int, int], float] = _one

    def __post_init__(self) -> None:
        """Refuse what is no flag and no function."""
        check_flags(scale_by_nuclear_norm=self.scale_by_nuclear_norm)
        check_callable("scale", self.scale)

    def __call__(self, m: jax.Array) -> jax.Array:
        rows, cols = m.shape[-2:]
        out = orthogonalize(m, exact=True)
        if self.scale_by_nuclear_norm:
            # <M, U V^T> is the sum of the singular values of M.
            out = out * jnp.sum(m * out, axis=(-2, -1), keepdims=True)
        return self.scale(rows, cols) * out


@dataclass(frozen=True)
class SpectralDescent(_Elementwise):
    """The orthogonalised gradient; every block must be a matrix."""

    orthogonalization: NewtonSchulzOrthogonalization | SVDOrthogonalization = field(
        default_factory=NewtonSchulzOrthogonalization
    )

    def __post_init__(self) -> None:
        """Refuse another kind of record."""
        check_kind(
            "orthogonalization",
            self.orthogonalization,
            NewtonSchulzOrthogonalization,
            SVDOrthogonalization,
        )

    def direction(self, state: PyTree, m: jax.Array, ctx: Context) -> jax.Array:
        if ctx.order != 2:
            raise ValueError(
                f"SpectralDescent needs blocks of order 2, got one of order {ctx.order}; set "
                "target_parameter_dimensionality=2 and route other leaves to rest"
            )
        return self.orthogonalization(m)


@dataclass(frozen=True)
class SignDescent(_Elementwise):
    """The sign of the gradient, times ``scale`` (a number, or a function of the block)."""

    scale: float | Callable[[jax.Array], jax.Array] = 1.0

    def __post_init__(self) -> None:
        """Refuse what is neither a number nor a function."""
        if not callable(self.scale):
            check_number("scale", self.scale, static=True)

    def direction(self, state: PyTree, m: jax.Array, ctx: Context) -> jax.Array:
        if not callable(self.scale):
            return jnp.sign(m) * self.scale
        lead = m.shape[: m.ndim - ctx.order]
        factors = jax.vmap(self.scale)(m.reshape(math.prod(lead), *m.shape[len(lead) :]))
        return jnp.sign(m) * factors.reshape(*lead, *[1] * ctx.order)
