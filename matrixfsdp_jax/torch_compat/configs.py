"""Configurations of ``DistributedShampoo``, under the names of facebookresearch/optimizers.

Names, fields, defaults and ranges are those of its ``distributed_shampoo`` package (version 1.0.0),
so that code that builds configurations for it runs here by changing the import. ``records.py``
turns them into the records of this package, and refuses what is not carried; fields that are
accepted without an effect say so here.

Configurations are mutable, compare by value, and can be copied and pickled as long as the
functions in them can: use named functions of a module, not lambdas.
"""

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch


@dataclass(init=False)
class _Config(ABC):
    """A configuration that cannot be made unless a subclass has an ``__init__``."""

    @abstractmethod
    def __init__(self, *args: object, **kwargs: object) -> None:
        """Made by ``dataclass`` in every class that is not abstract."""


def _require(ok: bool, name: str, value: Any, expected: str) -> None:
    if not ok:
        raise ValueError(f"{name}={value!r} must be {expected}")


def _check_orders(name: str, given: Mapping[int, Any]) -> None:
    for order in given:
        _require(order >= 0, f"an order in {name}", order, ">= 0 (the number of dims of a block)")


def _check_dims(name: str, order: int, dims: Iterable[int]) -> None:
    last = max(order - 1, 0)
    for dim in dims:
        _require(0 <= dim <= last, f"a dim in {name}[{order}]", dim, f"in [0, {last}]")


# ---- null spaces -------------------------------------------------------------------------------


@dataclass(init=False)
class RankDeficientStabilityConfig(_Config):
    """What to do about a factor without full rank; abstract."""


@dataclass(kw_only=True)
class PerturbationConfig(RankDeficientStabilityConfig):
    """Damp by the epsilon of the optimizer.

    Attributes:
      perturb_before_computation: add epsilon to the matrix before it is decomposed, else to its
        eigenvalues.
    """

    perturb_before_computation: bool = True


DefaultPerturbationConfig = PerturbationConfig()


@dataclass(kw_only=True)
class PseudoInverseConfig(RankDeficientStabilityConfig):
    """Leave the null space out; the epsilon of the optimizer must be 0.

    Attributes:
      rank_atol: eigenvalues up to this count as 0.
      rank_rtol: and those up to this times the largest; None is ``k`` rounding units.
    """

    rank_atol: float = 0.0
    rank_rtol: float | None = 0.0


# ---- matrix functions --------------------------------------------------------------------------


@dataclass(init=False)
class MatrixFunctionConfig(_Config):
    """How a function of a matrix is computed; abstract."""


@dataclass(init=False)
class EigendecompositionConfig(MatrixFunctionConfig):
    """How eigenvectors are computed; abstract.

    Attributes:
      rank_deficient_stability_config: what to do about a null space.
      tolerance: in ``[0, 1]``. The previous basis ``Q`` is good enough while the part of
        ``Q^T A Q`` off the diagonal is no larger than this times the whole (Frobenius norms).
    """

    rank_deficient_stability_config: RankDeficientStabilityConfig = field(
        default_factory=lambda: DefaultPerturbationConfig
    )
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        _require(0 <= self.tolerance <= 1, "tolerance", self.tolerance, "in [0, 1]")


@dataclass(kw_only=True)
class EighEigendecompositionConfig(EigendecompositionConfig):
    """By a full eigendecomposition.

    Attributes:
      rank_deficient_stability_config: what to do about a null space.
      tolerance: above 0 the previous basis stays while it is good enough.
      retry_double_precision: accepted, without an effect. The reference decomposes again in float64
        where torch raises; JAX does not raise. A decomposition of a finite matrix that comes out
        with an infinity or a NaN counts as failed here: the last root or basis stays, and
        ``num_tolerated_failed_amortized_computations`` says how often in a row.
      eigendecomposition_offload_device: only ``""``: decompose where the factors are.
    """

    retry_double_precision: bool = True
    eigendecomposition_offload_device: str = ""


DefaultEigendecompositionConfig = EighEigendecompositionConfig()


@dataclass(kw_only=True)
class QREigendecompositionConfig(EigendecompositionConfig):
    """By steps of the QR algorithm from the previous basis.

    Attributes:
      rank_deficient_stability_config: what to do about a null space.
      tolerance: stop when the basis is good enough; with 0 all iterations are made.
      max_iterations: the number of steps at most.
    """

    max_iterations: int = 1


@dataclass(init=False)
class RootInvConfig(MatrixFunctionConfig):
    """How an inverse root is computed; abstract."""


@dataclass(kw_only=True)
class EigenConfig(RootInvConfig, EighEigendecompositionConfig):
    """By eigendecomposition: any exponent. ``tolerance`` must be 0.

    The other fields are those of ``EighEigendecompositionConfig``.
    """

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        super().__post_init__()
        _require(self.tolerance == 0, "tolerance", self.tolerance, "0 for EigenConfig")


DefaultEigenConfig = EigenConfig()


@dataclass(kw_only=True)
class CoupledNewtonConfig(RootInvConfig):
    """By the coupled Newton iteration: ``1 / exponent`` must be an integer.

    As in the reference, the root of a dim where it is not fails in every inversion.

    Attributes:
      max_iterations: the number of iterations at most.
      tolerance: stop when the largest entry of ``|M - I|`` is no larger.
    """

    max_iterations: int = 100
    tolerance: float = 1e-6


@dataclass(kw_only=True)
class CoupledHigherOrderConfig(RootInvConfig):
    """By a coupled iteration of any order, for small fractions ``1 / exponent``.

    Attributes:
      rel_epsilon: damps by the larger of this times the largest absolute row sum ...
      abs_epsilon: ... and this, instead of the epsilon of the optimizer.
      max_iterations: the number of iterations at most.
      tolerance: stop when the largest entry of ``|M - I|`` is no larger.
      order: order of the iteration; 2 is Newton's.
      disable_tf32: only True: products are at the highest precision here.
    """

    rel_epsilon: float
    abs_epsilon: float
    max_iterations: int = 100
    tolerance: float = 1e-8
    order: int = 3
    disable_tf32: bool = True


def unit_scale_by_dims(d_in: int, d_out: int) -> float:
    """1: no scale."""
    return 1.0


@dataclass(init=False)
class OrthogonalizationConfig(MatrixFunctionConfig):
    """How a matrix is orthogonalised; abstract.

    Attributes:
      scale_by_dims_fn: called with ``(d_in, d_out)``, the columns and the rows of a matrix; the
        result is multiplied by what it returns.
    """

    scale_by_dims_fn: Callable[[int, int], float] = field(
        default_factory=lambda: unit_scale_by_dims
    )


@dataclass(kw_only=True)
class SVDOrthogonalizationConfig(OrthogonalizationConfig):
    """By a singular value decomposition.

    Attributes:
      scale_by_dims_fn: of columns and rows.
      scale_by_nuclear_norm: multiply by the sum of the singular values too.
    """

    scale_by_nuclear_norm: bool = False


@dataclass(kw_only=True)
class NewtonSchulzOrthogonalizationConfig(OrthogonalizationConfig):
    """By steps ``X <- a X + b (X X^T) X + c (X X^T)^2 X``.

    Attributes:
      scale_by_dims_fn: of columns and rows.
      num_iterations: the number of steps.
      coefficients: ``(a, b, c)``, the same in all steps.
    """

    num_iterations: int = 5
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)


DefaultNewtonSchulzOrthogonalizationConfig = NewtonSchulzOrthogonalizationConfig()


# ---- preconditioners ---------------------------------------------------------------------------


@dataclass(init=False)
class PreconditionerConfig(_Config):
    """A preconditioner, or a grafting; abstract."""


@dataclass
class SGDPreconditionerConfig(PreconditionerConfig):
    """The gradient itself."""


@dataclass(kw_only=True)
class AdaGradPreconditionerConfig(PreconditionerConfig):
    """The sum of squared gradients.

    Attributes:
      epsilon: > 0, added to the root; not the epsilon of the optimizer.
    """

    epsilon: float = 1e-10

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        _require(self.epsilon > 0, "epsilon", self.epsilon, "> 0")


@dataclass(kw_only=True)
class RMSpropPreconditionerConfig(AdaGradPreconditionerConfig):
    """An average of squared gradients, its bias not corrected.

    Attributes:
      epsilon: > 0, added to the root; not the epsilon of the optimizer.
      beta2: in ``(0, 1]``, the decay of the average; not that of the optimizer.
      drop_weighting_factor_on_gsquare: add new squares with weight 1 instead of ``1 - beta2``, and
        correct no bias.
    """

    beta2: float = 0.99
    drop_weighting_factor_on_gsquare: bool = False

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        super().__post_init__()
        _require(0 < self.beta2 <= 1, "beta2", self.beta2, "in (0, 1]")


@dataclass(kw_only=True)
class AdamPreconditionerConfig(RMSpropPreconditionerConfig):
    """An average of squared gradients, its bias corrected.

    The fields are those of ``RMSpropPreconditionerConfig``.
    """

    beta2: float = 0.999


@dataclass(init=False)
class BaseShampooPreconditionerConfig(PreconditionerConfig):
    """A preconditioner with one factor per dim; abstract.

    Attributes:
      amortized_computation_config: how roots or eigenvectors are computed.
      drop_weighting_factor_on_gsquare: add new statistics with weight 1 instead of ``1 - beta2``,
        and correct no bias.
      factor_matrix_dtype: float32 or float64; all other dtypes of a config must be the same here.
      num_tolerated_failed_amortized_computations: failures in a row that are tolerated, >= 0.
      use_symmetric_packing: pack symmetric matrices in checkpoints.
      use_trace_scaling: divide a factor by a power of its trace before it is decomposed.
      trace_scaling_exponent: that power, in ``(0, 1]``.
    """

    amortized_computation_config: MatrixFunctionConfig
    drop_weighting_factor_on_gsquare: bool = False
    factor_matrix_dtype: torch.dtype = torch.float32
    num_tolerated_failed_amortized_computations: int = 3
    use_symmetric_packing: bool = True
    use_trace_scaling: bool = False
    trace_scaling_exponent: float = 0.5

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        tolerated = self.num_tolerated_failed_amortized_computations
        _require(
            tolerated >= 0, "num_tolerated_failed_amortized_computations", tolerated, "an int >= 0"
        )
        if self.use_trace_scaling:
            exponent = self.trace_scaling_exponent
            _require(0 < exponent <= 1, "trace_scaling_exponent", exponent, "in (0, 1]")


@dataclass(init=False)
class ClassicShampooPreconditionerConfig(BaseShampooPreconditionerConfig):
    """Shampoo; abstract.

    Attributes:
      inverse_exponent_override: number of dims of a block -> a float >= 0 for all of them, or
        ``{dim: exponent}``. Dims left out have ``1 / (2 max(order, 1))``; a dim with 0 has no
        factor. It is the exponent itself: 0.5 is the inverse square root.
    """

    inverse_exponent_override: dict[int, dict[int, float] | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        super().__post_init__()
        _check_orders("inverse_exponent_override", self.inverse_exponent_override)
        for order, given in self.inverse_exponent_override.items():
            name = f"inverse_exponent_override[{order}]"
            if isinstance(given, dict):
                _check_dims("inverse_exponent_override", order, given)
            elif not isinstance(given, float):
                raise TypeError(
                    f"{name}={given!r} must be a float for all dims (1.0, not 1), or a dict of "
                    "exponents by dim"
                )
            for exponent in given.values() if isinstance(given, dict) else (given,):
                _require(exponent >= 0, f"an exponent in {name}", exponent, ">= 0")


@dataclass(kw_only=True)
class RootInvShampooPreconditionerConfig(ClassicShampooPreconditionerConfig):
    """Shampoo that keeps the inverse root of every factor.

    Attributes:
      inv_factor_matrix_dtype: of the roots; only ``factor_matrix_dtype`` here.
    """

    amortized_computation_config: RootInvConfig = field(default_factory=lambda: DefaultEigenConfig)
    inv_factor_matrix_dtype: torch.dtype = torch.float32


DefaultShampooConfig = RootInvShampooPreconditionerConfig()


@dataclass(kw_only=True)
class EigendecomposedShampooPreconditionerConfig(ClassicShampooPreconditionerConfig):
    """Shampoo that keeps eigenvectors and eigenvalues, and forms the root in every step.

    Attributes:
      factor_matrix_eigenvectors_dtype: only ``factor_matrix_dtype`` here.
      factor_matrix_eigenvalues_dtype: only ``factor_matrix_dtype`` here.
    """

    amortized_computation_config: EigendecompositionConfig = field(
        default_factory=lambda: DefaultEigendecompositionConfig
    )
    factor_matrix_eigenvectors_dtype: torch.dtype = torch.float32
    factor_matrix_eigenvalues_dtype: torch.dtype = torch.float32


@dataclass(kw_only=True)
class EigenvalueCorrectedShampooPreconditionerConfig(BaseShampooPreconditionerConfig):
    """SOAP: a second moment of the gradient in the eigenbasis of the factors.

    Attributes:
      ignored_basis_change_dims: number of dims of a block -> the dims that are not rotated.
      inverse_exponent_override: number of dims of a block -> exponent > 0 of the second moment;
        1/2 where it says nothing.
      factor_matrix_eigenvectors_dtype: only ``factor_matrix_dtype`` here.
      corrected_eigenvalues_dtype: of the second moment; only ``factor_matrix_dtype`` here.
    """

    amortized_computation_config: EigendecompositionConfig = field(
        default_factory=lambda: DefaultEigendecompositionConfig
    )
    ignored_basis_change_dims: dict[int, list[int]] = field(default_factory=dict)
    inverse_exponent_override: dict[int, float] = field(default_factory=dict)
    factor_matrix_eigenvectors_dtype: torch.dtype = torch.float32
    corrected_eigenvalues_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        super().__post_init__()
        solver = self.amortized_computation_config
        if not isinstance(solver, EigendecompositionConfig):
            raise TypeError(
                f"amortized_computation_config={solver!r} must be an EigendecompositionConfig, "
                "such as QREigendecompositionConfig()"
            )
        rule = solver.rank_deficient_stability_config
        _require(
            isinstance(rule, PerturbationConfig),
            "rank_deficient_stability_config",
            rule,
            f"a PerturbationConfig for {type(self).__name__}",
        )
        _check_orders("ignored_basis_change_dims", self.ignored_basis_change_dims)
        for order, dims in self.ignored_basis_change_dims.items():
            _check_dims("ignored_basis_change_dims", order, dims)
            unique = len(set(dims)) == len(dims)
            _require(unique, f"ignored_basis_change_dims[{order}]", dims, "dims without repetition")
        _check_orders("inverse_exponent_override", self.inverse_exponent_override)
        for order, given in self.inverse_exponent_override.items():
            _require(given > 0, f"inverse_exponent_override[{order}]", given, "> 0")


DefaultEigenvalueCorrectedShampooConfig = EigenvalueCorrectedShampooPreconditionerConfig()
DefaultSOAPConfig = EigenvalueCorrectedShampooPreconditionerConfig(
    amortized_computation_config=QREigendecompositionConfig()
)


@dataclass(kw_only=True)
class RootInvKLShampooPreconditionerConfig(RootInvShampooPreconditionerConfig):
    """KL-Shampoo that keeps inverse roots: each factor sees the gradient times the other roots."""


@dataclass(kw_only=True)
class EigendecomposedKLShampooPreconditionerConfig(EigendecomposedShampooPreconditionerConfig):
    """KL-Shampoo that keeps eigenvectors and eigenvalues."""


@dataclass(kw_only=True)
class SpectralDescentPreconditionerConfig(PreconditionerConfig):
    """The orthogonalised gradient; every block must be a matrix.

    Attributes:
      orthogonalization_config: how.
    """

    orthogonalization_config: OrthogonalizationConfig = field(
        default_factory=lambda: DefaultNewtonSchulzOrthogonalizationConfig
    )


DefaultSpectralDescentPreconditionerConfig = SpectralDescentPreconditionerConfig()


def unit_scale(grad: torch.Tensor) -> float:
    """1: no scale."""
    return 1.0


@dataclass(kw_only=True)
class SignDescentPreconditionerConfig(PreconditionerConfig):
    """The sign of the gradient.

    Attributes:
      scale_fn: called with the (filtered) gradient of a block; its sign is multiplied by what it
        returns. A plain number is taken too.
    """

    scale_fn: Callable[[torch.Tensor], float | torch.Tensor] = unit_scale


DefaultSignDescentPreconditionerConfig = SignDescentPreconditionerConfig()


# ---- averages of the parameters ----------------------------------------------------------------


@dataclass(init=False)
class IterateAveragingConfig(_Config):
    """Momentum, or an average of the parameters; abstract."""


@dataclass(kw_only=True)
class ClassicMomentumConfig(IterateAveragingConfig):
    """Momentum after the preconditioner. Unlike ``torch.optim.SGD`` it damps the first step too.

    Attributes:
      momentum: in ``(0, 1)``; for no momentum give no config.
      dampening: in ``[0, 1)``.
      use_nesterov: Nesterov's form.
    """

    momentum: float = 0.5
    dampening: float = 0.0
    use_nesterov: bool = False

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        momentum = "in (0, 1); for no momentum set iterate_averaging_config=None"
        _require(0 < self.momentum < 1, "momentum", self.momentum, momentum)
        _require(0 <= self.dampening < 1, "dampening", self.dampening, "in [0, 1)")


@dataclass(kw_only=True)
class GeneralizedPrimalAveragingConfig(IterateAveragingConfig):
    """Train at a mix of a fast iterate and its average; evaluate at the average.

    Attributes:
      eval_interp_coeff: in ``[0, 1)``, weight of the old average in the new one.
      train_interp_coeff: in ``(0, 1]``, weight of the average in the point of training.
    """

    eval_interp_coeff: float = 0.9
    train_interp_coeff: float = 0.8

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        x, y = self.eval_interp_coeff, self.train_interp_coeff
        _require(0 <= x < 1, "eval_interp_coeff", x, "in [0, 1)")
        _require(0 < y <= 1, "train_interp_coeff", y, "in (0, 1]")


@dataclass(kw_only=True)
class ScheduleFreeConfig(IterateAveragingConfig):
    """As above, with an average whose weights are powers of the learning rate.

    Attributes:
      train_interp_coeff: in ``(0, 1]``, weight of the average in the point of training.
      eval_coeff_lr_power: that power.
    """

    train_interp_coeff: float = 0.8
    eval_coeff_lr_power: int = 2

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        y = self.train_interp_coeff
        _require(0 < y <= 1, "train_interp_coeff", y, "in (0, 1]")


@enum.unique
class WeightDecayType(enum.Enum):
    """Where weight decay acts.

    ``L2`` adds it to the gradient. The others add a multiple of the parameters to the direction,
    which the learning rate then multiplies: ``DECOUPLED`` the decay itself, ``CORRECTED`` the decay
    times the learning rate over its peak, ``INDEPENDENT`` the decay over the peak.
    """

    L2 = "L2"
    DECOUPLED = "DECOUPLED"
    CORRECTED = "CORRECTED"
    INDEPENDENT = "INDEPENDENT"


# ---- distribution ------------------------------------------------------------------------------


@dataclass(init=False)
class CostModel(_Config):
    """What the work on a tensor costs; abstract."""

    @abstractmethod
    def cost(self, tensor: torch.Tensor) -> float:
        """The cost of a block."""


@dataclass
class PolynomialComputationalCostModel(CostModel):
    """The sum over dims of a polynomial in the size of the dim.

    Attributes:
      coefficients: from the constant term upwards.
      min_cost: the cost of a dim at least.
    """

    coefficients: tuple[float, ...]
    min_cost: float = 0

    def cost(self, tensor: torch.Tensor) -> float:
        """The cost of a block."""
        total = 0.0
        for size in tensor.shape:
            value = 0.0
            for coefficient in reversed(self.coefficients):
                value = value * size + coefficient
            total += max(self.min_cost, value)
        return total


@dataclass
class AlignedMemoryCostModel(CostModel):
    """The bytes of a tensor, rounded up.

    Attributes:
      alignment_bytes: to a multiple of this.
    """

    alignment_bytes: int = 64

    def cost(self, tensor: torch.Tensor) -> float:
        """The cost of a block."""
        size = tensor.numel() * tensor.element_size()
        return -(-size // self.alignment_bytes) * self.alignment_bytes


DefaultCostModel = AlignedMemoryCostModel()


@dataclass(kw_only=True)
class LoadBalancingConfig:
    """How blocks are dealt to ranks.

    Attributes:
      cost_model: what a block costs.
    """

    cost_model: CostModel = field(default_factory=lambda: DefaultCostModel)


@dataclass(init=False)
class DistributedConfig(_Config):
    """Who does the work; abstract.

    Attributes:
      target_parameter_dimensionality: an int >= 1, or ``math.inf``: neighbouring dims of a
        parameter are merged, up to ``max_preconditioner_dim``, while it has more dims than this.
    """

    target_parameter_dimensionality: int | float = 1

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        target = self.target_parameter_dimensionality
        whole = not isinstance(target, float) or target == math.inf
        _require(
            whole and target >= 1,
            "target_parameter_dimensionality",
            target,
            "an int >= 1 or math.inf",
        )


@dataclass(kw_only=True)
class SingleDeviceDistributedConfig(DistributedConfig):
    """One process does all of it."""


DefaultSingleDeviceDistributedConfig = SingleDeviceDistributedConfig()


@dataclass(kw_only=True)
class DDPDistributedConfig(DistributedConfig):
    """Every block has an owner among ranks that hold the same parameters.

    Attributes:
      target_parameter_dimensionality: as for one device.
      communication_dtype: what updates (or parameters) are sent in.
      num_trainers_per_group: ranks that share the work; -1 for all.
      communicate_params: send parameters instead of updates.
      load_balancing_config: how blocks are dealt to ranks.
    """

    communication_dtype: torch.dtype = torch.float32
    num_trainers_per_group: int = -1
    communicate_params: bool = False
    load_balancing_config: LoadBalancingConfig = field(default_factory=LoadBalancingConfig)


class _Refused:
    """A name of the reference that cannot be made here."""

    _reason: ClassVar[str] = (
        "parameters are whole on every rank here; for sharded training use the JAX transforms on "
        "an owner layout, see matrixfsdp_jax.plan"
    )

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"{type(self).__name__} is not carried: {self._reason}")


class FSDPParameterMetadata(_Refused):
    """Not carried: place of a flat shard."""


@enum.unique
class FSDPParamAssignmentStrategy(enum.Enum):
    """How sharded parameters are dealt to ranks, for ``FullyShardDistributedConfig``."""

    DEFAULT = enum.auto()
    REPLICATE = enum.auto()
    ROUND_ROBIN = enum.auto()


class FSDPDistributedConfig(_Refused, DistributedConfig):
    """Not carried: flat shards."""


class HSDPDistributedConfig(FSDPDistributedConfig, DDPDistributedConfig):
    """Not carried: flat shards with replicas."""


class FullyShardDistributedConfig(_Refused, DistributedConfig):
    """Not carried: parameters that are sharded one by one."""


class HybridShardDistributedConfig(FullyShardDistributedConfig, DDPDistributedConfig):
    """Not carried: parameters that are sharded one by one, with replicas."""


# ---- running -----------------------------------------------------------------------------------


class ShampooPT2CompileConfig(_Refused):
    """Not carried: options of ``torch.compile``."""

    _reason = (
        "the step of a group is one compiled XLA function already; leave "
        "shampoo_pt2_compile_config=None"
    )


@dataclass(kw_only=True)
class ShampooRuntimeConfig:
    """What is not in a checkpoint.

    Attributes:
      eager_nan_check: refuse gradients that are not finite in every step.
    """

    eager_nan_check: bool = False


DefaultShampooRuntimeConfig = ShampooRuntimeConfig()


@dataclass(kw_only=True)
class ConcurrencyConfig:
    """How parameter groups run beside each other.

    Attributes:
      enable_cuda_stream_for_param_groups: accepted, without an effect: XLA has its own streams.
    """

    enable_cuda_stream_for_param_groups: bool = True


DefaultConcurrencyConfig = ConcurrencyConfig()
