"""From configurations of the reference to records of this package.

Every field of a configuration is carried, is one that the optimizer itself reads
(``use_symmetric_packing``, ``num_tolerated_failed_amortized_computations``), has no effect here and
says so in ``configs.py``, or is refused by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn, cast

import jax
import jax.numpy as jnp
import torch

from matrixfsdp_jax.assembly import WeightDecayType
from matrixfsdp_jax.linalg.coefficients import MAX_STEPS
from matrixfsdp_jax.linalg.eigenbasis import EighBasis, QRBasis
from matrixfsdp_jax.linalg.roots import (
    CoupledHigherOrderRoot,
    CoupledNewtonRoot,
    EighRoot,
    Perturbation,
    PseudoInverse,
)
from matrixfsdp_jax.torch_compat import configs
from matrixfsdp_jax.transforms.averaging import (
    ClassicMomentum,
    GeneralizedPrimalAveraging,
    ScheduleFree,
)
from matrixfsdp_jax.transforms.kronecker import Eigendecomposed, EigenvalueCorrected, RootInverse
from matrixfsdp_jax.transforms.preconditioners import (
    AdaGradGrafting,
    AdamGrafting,
    Context,
    NewtonSchulzOrthogonalization,
    RMSpropGrafting,
    SGDGrafting,
    SignDescent,
    SpectralDescent,
    SVDOrthogonalization,
    _Elementwise,
)

PyTree = Any
Averaging = ClassicMomentum | GeneralizedPrimalAveraging | ScheduleFree


# ---- records of this layer ---------------------------------------------------------------------


@dataclass(frozen=True)
class NewtonRootInverse(RootInverse):
    """``RootInverse`` by the coupled Newton iteration, where ``1 / exponent`` is not always whole.

    For such a dim the reference's solver raises in every inversion, which is tolerated and counted.
    Here such a dim keeps its root (the identity), and every refresh of its block counts as failed.
    """

    def _refreshed(
        self,
        factors: tuple[jax.Array, ...],
        kept: Any,
        decompose: Callable[[jax.Array, Any, int], tuple[Any, jax.Array]],
        ctx: Context,
    ) -> tuple[list[Any], jax.Array, jax.Array]:
        def tolerant(a: jax.Array, old: Any, dim: int) -> tuple[Any, jax.Array]:
            if _whole_root(self.exponent(ctx.order, dim)):
                return decompose(a, old, dim)
            return old, jnp.zeros((), bool)

        return super()._refreshed(factors, kept, tolerant, ctx)


def _whole_root(exponent: float) -> bool:
    return (1 / exponent).is_integer()


@dataclass(frozen=True)
class TorchScaledSign(_Elementwise):
    """The sign of the gradient, times a scale of every block that is given from outside.

    Attributes:
      scale_fn: the function of the configuration, of a torch tensor. It is not called here: a
        compiled step cannot.
      scales: shape of a block -> the scales ``[W]`` of the blocks ``[1, W, 1, *shape]``. The caller
        fills them in before a step, by ``dataclasses.replace``.
    """

    scale_fn: Callable[[torch.Tensor], Any]
    scales: Mapping[tuple[int, ...], jax.Array] = field(default_factory=dict)

    def direction(self, state: PyTree, m: jax.Array, ctx: Context) -> jax.Array:
        """``[1, W, 1, *shape]``, as ``m``."""
        lead, shape = m.shape[: m.ndim - ctx.order], m.shape[m.ndim - ctx.order :]
        if shape not in self.scales:
            raise ValueError(
                f"no scale for blocks of shape {shape}, only for {sorted(self.scales)}; evaluate "
                "scale_fn and fill in `scales` with dataclasses.replace"
            )
        scale = self.scales[shape]
        if (1, *scale.shape, 1) != lead:
            raise ValueError(
                f"scales[{shape}] must be [W] for blocks [1, W, 1, *{shape}], got shape "
                f"{scale.shape} for {m.shape}"
            )
        return jnp.sign(m) * scale.astype(m.dtype).reshape(*lead, *[1] * ctx.order)


@dataclass(frozen=True)
class _ByDims:
    """``scale_by_dims_fn``, a function of columns and rows, as one of rows and columns."""

    scale_by_dims_fn: Callable[[int, int], Any]

    def __call__(self, rows: int, cols: int) -> float:
        # By place, as in the reference: the names of its arguments are the user's.
        return float(self.scale_by_dims_fn(cols, rows))


# ---- refusals ----------------------------------------------------------------------------------


def _refuse(config: Any, name: str, reason: str) -> NoReturn:
    value = getattr(config, name)
    raise NotImplementedError(
        f"{type(config).__name__}.{name}={value!r} is not carried here: {reason}"
    )


def _record(config: Any, record: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A record; what only this package finds out of range is refused under the config's name."""
    try:
        return record(*args, **kwargs)
    except ValueError as error:
        raise NotImplementedError(
            f"a field of {config!r} has a value that is not carried here: {error}"
        ) from error


def _unknown(what: str, config: Any) -> NoReturn:
    raise TypeError(f"{what} must be a configuration of the list in configs.py, got {config!r}")


# ---- matrix functions --------------------------------------------------------------------------


def _rank_deficiency(config: configs.EigendecompositionConfig) -> Perturbation | PseudoInverse:
    rule = config.rank_deficient_stability_config
    match rule:
        case configs.PerturbationConfig():
            return _record(rule, Perturbation, rule.perturb_before_computation)
        case configs.PseudoInverseConfig():
            return _record(rule, PseudoInverse, rule.rank_atol, rule.rank_rtol)
    _unknown("rank_deficient_stability_config", rule)


def _check_eigh(config: configs.EighEigendecompositionConfig) -> None:
    if config.eigendecomposition_offload_device != "":
        _refuse(
            config,
            "eigendecomposition_offload_device",
            'factors are decomposed on the device that holds them; leave it at ""',
        )


def _root(config: Any) -> EighRoot | CoupledNewtonRoot | CoupledHigherOrderRoot:
    """The solver of a configuration that keeps inverse roots."""
    match config:
        case configs.EigenConfig():
            _check_eigh(config)
            return EighRoot(_rank_deficiency(config))
        case configs.CoupledNewtonConfig():
            return _record(config, CoupledNewtonRoot, config.max_iterations, config.tolerance)
        case configs.CoupledHigherOrderConfig():
            if not config.disable_tf32:
                reason = "products are always at the highest precision; leave it at True"
                _refuse(config, "disable_tf32", reason)
            return _record(
                config,
                CoupledHigherOrderRoot,
                rel_epsilon=config.rel_epsilon,
                abs_epsilon=config.abs_epsilon,
                max_iterations=config.max_iterations,
                tolerance=config.tolerance,
                order=config.order,
            )
    raise TypeError(
        "amortized_computation_config must be an EigenConfig, a CoupledNewtonConfig or a "
        f"CoupledHigherOrderConfig where inverse roots are kept, got {config!r}"
    )


def _basis(config: Any) -> EighBasis | QRBasis:
    """The solver of a configuration that keeps eigenvectors."""
    match config:
        case configs.EighEigendecompositionConfig():  # EigenConfig is one too
            _check_eigh(config)
            return EighBasis(_rank_deficiency(config), config.tolerance)
        case configs.QREigendecompositionConfig():
            rule = _rank_deficiency(config)
            return _record(config, QRBasis, config.max_iterations, config.tolerance, rule)
    raise TypeError(
        "amortized_computation_config must be an EighEigendecompositionConfig or a "
        f"QREigendecompositionConfig where eigenvectors are kept, got {config!r}"
    )


def _orthogonalization(config: Any) -> NewtonSchulzOrthogonalization | SVDOrthogonalization:
    match config:
        case configs.SVDOrthogonalizationConfig():
            return SVDOrthogonalization(
                config.scale_by_nuclear_norm, _ByDims(config.scale_by_dims_fn)
            )
        case configs.NewtonSchulzOrthogonalizationConfig():
            steps = config.num_iterations
            if not 1 <= steps <= MAX_STEPS:
                _refuse(config, "num_iterations", f"1 to {MAX_STEPS} steps are made")
            a, b, c = config.coefficients
            scale = _ByDims(config.scale_by_dims_fn)
            return NewtonSchulzOrthogonalization(steps, ((a, b, c),), scale)
    _unknown("orthogonalization_config", config)


# ---- preconditioners ---------------------------------------------------------------------------


def preconditioner(config: configs.PreconditionerConfig | None) -> Any:
    """The record of a preconditioner or grafting; None for None.

    Raises:
      NotImplementedError: for a value of a field that is not carried. Names field, value, reason.
      TypeError: for what is no configuration, or a solver of another kind of preconditioner.
    """
    match config:
        case None:
            return None
        case configs.SGDPreconditionerConfig():
            return SGDGrafting()
        case configs.RMSpropPreconditionerConfig():  # AdamPreconditionerConfig is one too
            return _average_of_squares(config)
        case configs.AdaGradPreconditionerConfig():
            return _record(config, AdaGradGrafting, epsilon=config.epsilon)
        case configs.SpectralDescentPreconditionerConfig():
            return SpectralDescent(_orthogonalization(config.orthogonalization_config))
        case configs.SignDescentPreconditionerConfig():
            return _sign(config.scale_fn)
        case configs.BaseShampooPreconditionerConfig():
            return _kronecker(config)
    _unknown("preconditioner_config", config)


def _average_of_squares(config: configs.RMSpropPreconditionerConfig) -> Any:
    if config.beta2 == 1 and not config.drop_weighting_factor_on_gsquare:
        reason = (
            "the reference then gives every new square the weight 0; for a sum take "
            "AdaGradPreconditionerConfig, or set drop_weighting_factor_on_gsquare=True"
        )
        _refuse(config, "beta2", reason)
    adam = isinstance(config, configs.AdamPreconditionerConfig)
    return _record(
        config,
        AdamGrafting if adam else RMSpropGrafting,
        config.beta2,
        config.epsilon,
        config.drop_weighting_factor_on_gsquare,
    )


def _sign(scale: Any) -> SignDescent | TorchScaledSign:
    if scale is configs.unit_scale:
        return SignDescent(1.0)
    if callable(scale):
        return TorchScaledSign(scale)
    if isinstance(scale, int | float) and not isinstance(scale, bool):
        return SignDescent(float(scale))
    raise TypeError(f"scale_fn={scale!r} must be a function of a tensor, or a number")


# By exact type, as in the reference: fields of a subclass would be lost.
_KRONECKER = (
    configs.RootInvShampooPreconditionerConfig,
    configs.RootInvKLShampooPreconditionerConfig,
    configs.EigendecomposedShampooPreconditionerConfig,
    configs.EigendecomposedKLShampooPreconditionerConfig,
    configs.EigenvalueCorrectedShampooPreconditionerConfig,
)


def _kronecker(config: configs.BaseShampooPreconditionerConfig) -> Any:
    """The record of a kind with one factor per dim."""
    if type(config) not in _KRONECKER:
        _unknown("preconditioner_config", config)
    solver = config.amortized_computation_config
    record: Callable[..., Any]
    more: dict[str, Any]
    match config:
        case configs.EigenvalueCorrectedShampooPreconditionerConfig():
            record = EigenvalueCorrected
            exponents = _exponents(config.inverse_exponent_override)
            ignored = config.ignored_basis_change_dims
            more = {
                "basis": _basis(solver),
                "ignored_basis_change_dims": {k: tuple(dims) for k, dims in ignored.items()},
            }
        case configs.RootInvShampooPreconditionerConfig():
            root = _root(solver)
            exponents = _exponents(config.inverse_exponent_override)
            fails = isinstance(root, CoupledNewtonRoot) and not _whole_roots(exponents)
            record = NewtonRootInverse if fails else RootInverse
            kl = isinstance(config, configs.RootInvKLShampooPreconditionerConfig)
            more = {"root": root, "kl": kl}
        case configs.EigendecomposedShampooPreconditionerConfig():
            record = Eigendecomposed
            exponents = _exponents(config.inverse_exponent_override)
            kl = isinstance(config, configs.EigendecomposedKLShampooPreconditionerConfig)
            more = {"basis": _basis(solver), "kl": kl}
    return record(
        factor_dtype=_factor_dtype(config),
        inverse_exponent_override=exponents,
        drop_weighting_factor_on_gsquare=config.drop_weighting_factor_on_gsquare,
        trace_scaling_exponent=config.trace_scaling_exponent if config.use_trace_scaling else None,
        **more,
    )


def _factor_dtype(config: configs.BaseShampooPreconditionerConfig) -> str:
    dtype = config.factor_matrix_dtype
    if dtype not in (torch.float32, torch.float64):
        reason = "factors are decomposed in torch.float32 or torch.float64; set one of these"
        _refuse(config, "factor_matrix_dtype", reason)
    for own in fields(config):
        if own.name.endswith("_dtype") and getattr(config, own.name) != dtype:
            reason = f"all of the state has factor_matrix_dtype={dtype}; set both to the same"
            _refuse(config, own.name, reason)
    return str(dtype).removeprefix("torch.")


def _exponents(given: Mapping[int, Any]) -> dict[int, Any]:
    """A copy, all numbers floats."""
    return {
        order: {dim: float(x) for dim, x in own.items()} if isinstance(own, dict) else float(own)
        for order, own in given.items()
    }


def _whole_roots(given: Mapping[int, Any]) -> bool:
    exponents = [
        x for own in given.values() for x in (own.values() if isinstance(own, dict) else (own,))
    ]
    return all(_whole_root(x) for x in exponents if x != 0)


# ---- the rest of the optimizer -----------------------------------------------------------------


def averaging(config: configs.IterateAveragingConfig | None) -> Averaging | None:
    """The record of momentum or averaging; None for None.

    Raises:
      NotImplementedError: for a value of a field that is not carried.
      TypeError: for what is no configuration of this.
    """
    match config:
        case None:
            return None
        case configs.ClassicMomentumConfig():
            momentum, dampening = config.momentum, config.dampening
            return _record(config, ClassicMomentum, momentum, dampening, config.use_nesterov)
        case configs.GeneralizedPrimalAveragingConfig():
            x, y = config.eval_interp_coeff, config.train_interp_coeff
            return _record(config, GeneralizedPrimalAveraging, x, y)
        case configs.ScheduleFreeConfig():
            y, power = config.train_interp_coeff, config.eval_coeff_lr_power
            return _record(config, ScheduleFree, y, float(power))
    _unknown("iterate_averaging_config", config)


def weight_decay_type(value: configs.WeightDecayType) -> WeightDecayType:
    """``"l2"``, ``"decoupled"``, ``"corrected"`` or ``"independent"``.

    Raises:
      TypeError: for what is no ``WeightDecayType``.
    """
    if not isinstance(value, configs.WeightDecayType):
        raise TypeError(
            f"weight_decay_type={value!r} must be one of {list(configs.WeightDecayType)}"
        )
    return cast(WeightDecayType, value.value.lower())
