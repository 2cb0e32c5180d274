"""Configurations of ``DistributedShampoo``: names, defaults, refusals, and their records."""

import copy
import dataclasses
import math
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.torch_compat import configs as c
from matrixfsdp_jax.torch_compat import records
from matrixfsdp_jax.transforms.preconditioners import Context
from tests import test_goldens
from tests.test_goldens import ENTRIES, counters, roots, x64

F32, F64 = torch.float32, torch.float64


def muon_scale(d_in: int, d_out: int) -> float:
    return max(1.0, d_out / d_in) ** 0.5


def l1(grad: Any) -> Any:
    return grad.abs().sum()


# ---- names and defaults ------------------------------------------------------------------------

PERTURB = c.PerturbationConfig()
EIGH = c.EighEigendecompositionConfig()
# Fields in order; "*" comes before those that are given by keyword only.
TABLE: dict[str, dict[str, Any]] = {
    "PerturbationConfig": {"*": (), "perturb_before_computation": True},
    "PseudoInverseConfig": {"*": (), "rank_atol": 0.0, "rank_rtol": 0.0},
    "EighEigendecompositionConfig": {
        "rank_deficient_stability_config": PERTURB, "tolerance": 0.0,
        "*": (), "retry_double_precision": True, "eigendecomposition_offload_device": "",
    },
    "EigenConfig": {
        "rank_deficient_stability_config": PERTURB, "tolerance": 0.0,
        "*": (), "retry_double_precision": True, "eigendecomposition_offload_device": "",
    },
    "QREigendecompositionConfig": {
        "rank_deficient_stability_config": PERTURB, "tolerance": 0.0, "*": (), "max_iterations": 1,
    },
    "CoupledNewtonConfig": {"*": (), "max_iterations": 100, "tolerance": 1e-6},
    "CoupledHigherOrderConfig": {
        "*": (), "rel_epsilon": ..., "abs_epsilon": ..., "max_iterations": 100, "tolerance": 1e-8,
        "order": 3, "disable_tf32": True,
    },
    "SVDOrthogonalizationConfig": {
        "scale_by_dims_fn": c.unit_scale_by_dims, "*": (), "scale_by_nuclear_norm": False,
    },
    "NewtonSchulzOrthogonalizationConfig": {
        "scale_by_dims_fn": c.unit_scale_by_dims, "*": (),
        "num_iterations": 5, "coefficients": (3.4445, -4.7750, 2.0315),
    },
    "SGDPreconditionerConfig": {},
    "AdaGradPreconditionerConfig": {"*": (), "epsilon": 1e-10},
    "RMSpropPreconditionerConfig": {
        "*": (), "epsilon": 1e-10, "beta2": 0.99, "drop_weighting_factor_on_gsquare": False,
    },
    "AdamPreconditionerConfig": {
        "*": (), "epsilon": 1e-10, "beta2": 0.999, "drop_weighting_factor_on_gsquare": False,
    },
    "SpectralDescentPreconditionerConfig": {
        "*": (), "orthogonalization_config": c.NewtonSchulzOrthogonalizationConfig(),
    },
    "SignDescentPreconditionerConfig": {"*": (), "scale_fn": c.unit_scale},
    "ClassicMomentumConfig": {
        "*": (), "momentum": 0.5, "dampening": 0.0, "use_nesterov": False,
    },
    "GeneralizedPrimalAveragingConfig": {
        "*": (), "eval_interp_coeff": 0.9, "train_interp_coeff": 0.8,
    },
    "ScheduleFreeConfig": {"*": (), "train_interp_coeff": 0.8, "eval_coeff_lr_power": 2},
    "AlignedMemoryCostModel": {"alignment_bytes": 64},
    "PolynomialComputationalCostModel": {"coefficients": ..., "min_cost": 0},
    "LoadBalancingConfig": {"*": (), "cost_model": c.AlignedMemoryCostModel(64)},
    "SingleDeviceDistributedConfig": {"target_parameter_dimensionality": 1},
    "DDPDistributedConfig": {
        "target_parameter_dimensionality": 1, "*": (), "communication_dtype": F32,
        "num_trainers_per_group": -1, "communicate_params": False,
        "load_balancing_config": c.LoadBalancingConfig(),
    },
    "ShampooRuntimeConfig": {"*": (), "eager_nan_check": False},
    "ConcurrencyConfig": {"*": (), "enable_cuda_stream_for_param_groups": True},
}  # fmt: skip


def kronecker(solver: Any, own: dict[str, Any], classic: bool = True) -> dict[str, Any]:
    """The row of a preconditioner with factors; its solver is given by keyword only."""
    common = {
        "drop_weighting_factor_on_gsquare": False,
        "factor_matrix_dtype": F32,
        "num_tolerated_failed_amortized_computations": 3,
        "use_symmetric_packing": True,
        "use_trace_scaling": False,
        "trace_scaling_exponent": 0.5,
    } | ({"inverse_exponent_override": {}} if classic else {})
    return {"!": ("amortized_computation_config", solver), **common, "*": (), **own}


VECTORS = {"factor_matrix_eigenvectors_dtype": F32}
ROOT_INVERSE = kronecker(c.EigenConfig(), {"inv_factor_matrix_dtype": F32})
EIGENDECOMPOSED = kronecker(EIGH, {**VECTORS, "factor_matrix_eigenvalues_dtype": F32})
TABLE |= {
    "RootInvShampooPreconditionerConfig": ROOT_INVERSE,
    "RootInvKLShampooPreconditionerConfig": ROOT_INVERSE,
    "EigendecomposedShampooPreconditionerConfig": EIGENDECOMPOSED,
    "EigendecomposedKLShampooPreconditionerConfig": EIGENDECOMPOSED,
    "EigenvalueCorrectedShampooPreconditionerConfig": kronecker(
        EIGH,
        {
            "ignored_basis_change_dims": {},
            "inverse_exponent_override": {},
            **VECTORS,
            "corrected_eigenvalues_dtype": F32,
        },
        classic=False,
    ),
}
NEEDED: dict[str, dict[str, Any]] = {
    "CoupledHigherOrderConfig": {"rel_epsilon": 0.0, "abs_epsilon": 1e-6},
    "PolynomialComputationalCostModel": {"coefficients": (0.0, 1.0)},
}


@pytest.mark.parametrize("name", TABLE)
def test_fields_and_defaults(name: str) -> None:
    want, by_keyword, only = {}, [], False
    for field, default in TABLE[name].items():
        if field == "*":
            only = True
            continue
        if field == "!":
            field, default = default
        want[field] = default
        if only or TABLE[name].get("!", (None,))[0] == field:
            by_keyword.append(field)
    cls = getattr(c, name)
    found = dataclasses.fields(cls)
    assert [f.name for f in found] == list(want)
    assert [f.name for f in found if f.kw_only] == by_keyword
    made = cls(**NEEDED.get(name, {}))
    for field, default in want.items():
        if default is not ...:
            value = getattr(made, field)
            assert value == default
            assert type(value) is type(default)
    if NEEDED.get(name):
        with pytest.raises(TypeError, match="missing"):
            cls()


def test_defaults_by_name() -> None:
    assert c.DefaultPerturbationConfig == PERTURB
    assert c.DefaultEigendecompositionConfig == EIGH
    assert c.DefaultEigenConfig == c.EigenConfig() != EIGH
    assert c.DefaultNewtonSchulzOrthogonalizationConfig == c.NewtonSchulzOrthogonalizationConfig()
    assert c.DefaultShampooConfig == c.RootInvShampooPreconditionerConfig()
    soap = c.EigenvalueCorrectedShampooPreconditionerConfig
    assert c.DefaultEigenvalueCorrectedShampooConfig == soap()
    assert c.DefaultSOAPConfig == soap(amortized_computation_config=c.QREigendecompositionConfig())
    assert c.DefaultSpectralDescentPreconditionerConfig == c.SpectralDescentPreconditionerConfig()
    assert c.DefaultSignDescentPreconditionerConfig == c.SignDescentPreconditionerConfig()
    assert c.DefaultSingleDeviceDistributedConfig == c.SingleDeviceDistributedConfig()
    assert c.DefaultCostModel == c.AlignedMemoryCostModel()
    assert c.DefaultShampooRuntimeConfig == c.ShampooRuntimeConfig()
    assert c.DefaultConcurrencyConfig == c.ConcurrencyConfig()
    # The reference shares its default objects, and so does code that changes one of them.
    assert c.RootInvShampooPreconditionerConfig().amortized_computation_config is (
        c.DefaultEigenConfig
    )


ABSTRACT = {
    c.RankDeficientStabilityConfig: {"PerturbationConfig", "PseudoInverseConfig"},
    c.MatrixFunctionConfig: {
        "EigenConfig", "EighEigendecompositionConfig", "QREigendecompositionConfig",
        "CoupledNewtonConfig", "CoupledHigherOrderConfig",
        "SVDOrthogonalizationConfig", "NewtonSchulzOrthogonalizationConfig",
    },
    c.EigendecompositionConfig: {
        "EigenConfig", "EighEigendecompositionConfig", "QREigendecompositionConfig",
    },
    c.RootInvConfig: {"EigenConfig", "CoupledNewtonConfig", "CoupledHigherOrderConfig"},
    c.OrthogonalizationConfig: {
        "SVDOrthogonalizationConfig", "NewtonSchulzOrthogonalizationConfig",
    },
    c.PreconditionerConfig: {x for x in TABLE if x.endswith("PreconditionerConfig")},
    c.BaseShampooPreconditionerConfig: {x for x in TABLE if "ShampooP" in x},
    c.ClassicShampooPreconditionerConfig: {
        x for x in TABLE if "ShampooP" in x and "Corrected" not in x
    },
    c.IterateAveragingConfig: {
        "ClassicMomentumConfig", "GeneralizedPrimalAveragingConfig", "ScheduleFreeConfig",
    },
    c.DistributedConfig: {
        "SingleDeviceDistributedConfig", "DDPDistributedConfig", "FSDPDistributedConfig",
        "HSDPDistributedConfig", "FullyShardDistributedConfig", "HybridShardDistributedConfig",
    },
    c.CostModel: {"AlignedMemoryCostModel", "PolynomialComputationalCostModel"},
}  # fmt: skip
REFUSED = {
    "FSDPDistributedConfig": "matrixfsdp_jax.plan",
    "HSDPDistributedConfig": "matrixfsdp_jax.plan",
    "FullyShardDistributedConfig": "matrixfsdp_jax.plan",
    "HybridShardDistributedConfig": "matrixfsdp_jax.plan",
    "FSDPParameterMetadata": "matrixfsdp_jax.plan",
    "ShampooPT2CompileConfig": "compiled XLA function already",
}


@pytest.mark.parametrize("base", ABSTRACT, ids=lambda base: base.__name__)
def test_who_is_what(base: type) -> None:
    with pytest.raises(TypeError, match="abstract"):
        base()
    public = [getattr(c, name) for name in [*TABLE, *REFUSED]]
    assert {x.__name__ for x in public if issubclass(x, base)} == ABSTRACT[base]


def test_kinds_of_kinds() -> None:
    assert issubclass(c.EigenConfig, c.EighEigendecompositionConfig)
    assert issubclass(c.AdamPreconditionerConfig, c.RMSpropPreconditionerConfig)
    assert issubclass(c.RMSpropPreconditionerConfig, c.AdaGradPreconditionerConfig)
    for kind in ("RootInv{}Shampoo", "Eigendecomposed{}Shampoo"):
        kl, plain = (getattr(c, kind.format(x) + "PreconditionerConfig") for x in ("KL", ""))
        assert issubclass(kl, plain)
    assert issubclass(c.HSDPDistributedConfig, c.FSDPDistributedConfig)
    assert issubclass(c.HSDPDistributedConfig, c.DDPDistributedConfig)
    assert issubclass(c.HybridShardDistributedConfig, c.FullyShardDistributedConfig)
    assert issubclass(c.HybridShardDistributedConfig, c.DDPDistributedConfig)


def test_enums() -> None:
    names = ["L2", "DECOUPLED", "CORRECTED", "INDEPENDENT"]
    assert [(x.name, x.value) for x in c.WeightDecayType] == [(x, x) for x in names]
    assert c.WeightDecayType("DECOUPLED") is c.WeightDecayType.DECOUPLED
    assert [records.weight_decay_type(x) for x in c.WeightDecayType] == [x.lower() for x in names]
    assert [x.name for x in c.FSDPParamAssignmentStrategy] == [
        "DEFAULT",
        "REPLICATE",
        "ROUND_ROBIN",
    ]
    with pytest.raises(TypeError, match=r"weight_decay_type='decoupled' must be one of"):
        records.weight_decay_type("decoupled")


@pytest.mark.parametrize("name", REFUSED)
def test_not_carried_at_all(name: str) -> None:
    for arguments in ({}, {"param_to_metadata": {}}):
        with pytest.raises(NotImplementedError, match=f"{name} is not carried.*{REFUSED[name]}"):
            getattr(c, name)(**arguments)


def test_costs() -> None:
    tensor = torch.zeros(2, 5)
    assert c.PolynomialComputationalCostModel((1.0, 2.0, 3.0)).cost(tensor) == 17 + 86
    assert c.PolynomialComputationalCostModel((1.0, 2.0, 3.0), min_cost=50).cost(tensor) == 50 + 86
    assert c.AlignedMemoryCostModel().cost(tensor) == 64
    assert c.AlignedMemoryCostModel().cost(tensor.double()) == 128
    assert c.AlignedMemoryCostModel(alignment_bytes=1).cost(tensor) == 40
    for model in (c.AlignedMemoryCostModel(), c.PolynomialComputationalCostModel((1.0,))):
        assert model.cost(torch.zeros(0)) == (
            0 if isinstance(model, c.AlignedMemoryCostModel) else 1
        )


# ---- ranges ------------------------------------------------------------------------------------

SHAMPOO = c.RootInvShampooPreconditionerConfig
SOAP = c.EigenvalueCorrectedShampooPreconditionerConfig
NAN = math.nan
OUT_OF_RANGE: list[tuple[Any, dict[str, Any], str]] = [
    (c.AdaGradPreconditionerConfig, {"epsilon": 0.0}, "epsilon=0.0 must be > 0"),
    (c.AdamPreconditionerConfig, {"epsilon": NAN}, "epsilon=nan must be > 0"),
    (c.RMSpropPreconditionerConfig, {"beta2": 0.0}, r"beta2=0.0 must be in \(0, 1\]"),
    (c.AdamPreconditionerConfig, {"beta2": 1.1}, r"beta2=1.1 must be in \(0, 1\]"),
    (c.EighEigendecompositionConfig, {"tolerance": -0.1}, r"tolerance=-0.1 must be in \[0, 1\]"),
    (c.QREigendecompositionConfig, {"tolerance": 1.1}, r"tolerance=1.1 must be in \[0, 1\]"),
    (c.EigenConfig, {"tolerance": 0.1}, "tolerance=0.1 must be 0 for EigenConfig"),
    (c.EigenConfig, {"tolerance": 2.0}, r"tolerance=2.0 must be in \[0, 1\]"),
    (SHAMPOO, {"num_tolerated_failed_amortized_computations": -1}, "=-1 must be an int >= 0"),
    (SOAP, {"num_tolerated_failed_amortized_computations": -1}, "=-1 must be an int >= 0"),
    (SHAMPOO, {"use_trace_scaling": True, "trace_scaling_exponent": 0.0}, r"=0.0 must be in \(0"),
    (SHAMPOO, {"use_trace_scaling": True, "trace_scaling_exponent": 1.5}, r"=1.5 must be in \(0"),
    (SHAMPOO, {"inverse_exponent_override": {-1: 0.5}}, "order in inverse_.*=-1 must be >= 0"),
    (SHAMPOO, {"inverse_exponent_override": {2: -0.5}}, r"\[2\]=-0.5 must be >= 0"),
    (SHAMPOO, {"inverse_exponent_override": {2: {1: -1.0}}}, r"\[2\]=-1.0 must be >= 0"),
    (SHAMPOO, {"inverse_exponent_override": {2: {2: 0.5}}}, r"dim .*\[2\]=2 must be in \[0, 1\]"),
    (SHAMPOO, {"inverse_exponent_override": {0: {1: 0.5}}}, r"dim .*\[0\]=1 must be in \[0, 0\]"),
    (SOAP, {"inverse_exponent_override": {-2: 0.5}}, "order in inverse_.*=-2 must be >= 0"),
    (SOAP, {"inverse_exponent_override": {2: 0.0}}, r"override\[2\]=0.0 must be > 0"),
    (SOAP, {"ignored_basis_change_dims": {-1: [0]}}, "order in ignored_.*=-1 must be >= 0"),
    (SOAP, {"ignored_basis_change_dims": {2: [0, 2]}}, r"dim .*\[2\]=2 must be in \[0, 1\]"),
    (SOAP, {"ignored_basis_change_dims": {2: [1, 1]}}, r"\[1, 1\] must be dims without repetition"),
    (
        SOAP,
        {"amortized_computation_config": c.EigenConfig(c.PseudoInverseConfig())},
        "rank_deficient_stability_config=PseudoInverse.* must be a PerturbationConfig",
    ),
    (c.ClassicMomentumConfig, {"momentum": 0.0}, "momentum=0.0 .*iterate_averaging_config=None"),
    (c.ClassicMomentumConfig, {"momentum": 1.0}, r"momentum=1.0 must be in \(0, 1\)"),
    (c.ClassicMomentumConfig, {"dampening": 1.0}, r"dampening=1.0 must be in \[0, 1\)"),
    (c.GeneralizedPrimalAveragingConfig, {"eval_interp_coeff": 1.0}, r"1.0 must be in \[0, 1\)"),
    (c.GeneralizedPrimalAveragingConfig, {"train_interp_coeff": 0.0}, r"0.0 must be in \(0, 1\]"),
    (c.ScheduleFreeConfig, {"train_interp_coeff": 1.1}, r"1.1 must be in \(0, 1\]"),
    (
        c.SingleDeviceDistributedConfig,
        {"target_parameter_dimensionality": 2.0},
        "=2.0 must be an int >= 1 or math.inf",
    ),
    (
        c.DDPDistributedConfig,
        {"target_parameter_dimensionality": 0},
        "=0 must be an int >= 1 or math.inf",
    ),
]


@pytest.mark.parametrize(("cls", "arguments", "message"), OUT_OF_RANGE)
def test_out_of_range(cls: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls(**arguments)


def test_wrong_types() -> None:
    with pytest.raises(TypeError, match=r"\[2\]=1 must be a float for all dims \(1.0, not 1\)"):
        SHAMPOO(inverse_exponent_override={2: 1})
    with pytest.raises(TypeError, match="must be an EigendecompositionConfig"):
        SOAP(amortized_computation_config=c.CoupledNewtonConfig())


def test_the_ends_of_the_ranges() -> None:
    c.RMSpropPreconditionerConfig(beta2=1.0)
    c.QREigendecompositionConfig(tolerance=1.0)
    c.ClassicMomentumConfig(dampening=0.0)
    c.GeneralizedPrimalAveragingConfig(eval_interp_coeff=0.0, train_interp_coeff=1.0)
    c.SingleDeviceDistributedConfig(target_parameter_dimensionality=math.inf)
    # An exponent of the trace that is not used is not checked.
    SHAMPOO(trace_scaling_exponent=2.0, num_tolerated_failed_amortized_computations=0)
    SHAMPOO(inverse_exponent_override={0: {0: 0.0}, 2: {1: 1}})


# ---- values ------------------------------------------------------------------------------------

FULL = [
    SHAMPOO(
        amortized_computation_config=c.CoupledHigherOrderConfig(rel_epsilon=0.0, abs_epsilon=1e-6),
        inverse_exponent_override={2: 0.5, 3: {0: 0.0}},
        factor_matrix_dtype=F64,
        inv_factor_matrix_dtype=F64,
    ),
    SOAP(
        amortized_computation_config=c.QREigendecompositionConfig(tolerance=0.1),
        ignored_basis_change_dims={2: [1]},
    ),
    c.SpectralDescentPreconditionerConfig(
        orthogonalization_config=c.SVDOrthogonalizationConfig(scale_by_dims_fn=muon_scale)
    ),
    c.SignDescentPreconditionerConfig(scale_fn=l1),
    c.SignDescentPreconditionerConfig(),
    c.ScheduleFreeConfig(train_interp_coeff=0.5),
    c.DDPDistributedConfig(
        communication_dtype=torch.bfloat16,
        load_balancing_config=c.LoadBalancingConfig(
            cost_model=c.PolynomialComputationalCostModel((0.0, 1.0))
        ),
    ),
    c.WeightDecayType.CORRECTED,
]


@pytest.mark.parametrize("config", FULL, ids=lambda config: type(config).__name__)
@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_equal(config: Any, again: Callable[[Any], Any]) -> None:
    new = again(config)
    assert new == config
    assert type(new) is type(config)
    if dataclasses.is_dataclass(config):
        assert new is not config
        changed = FULL[0] if config is FULL[1] else FULL[1]
        assert new != changed


def test_a_change_makes_a_difference_and_stays_in_its_object() -> None:
    new = copy.deepcopy(FULL[0])
    new.amortized_computation_config.order = 4
    new.inverse_exponent_override[3][0] = 0.25
    assert new != FULL[0]
    assert FULL[0].amortized_computation_config.order == 3
    assert FULL[0].inverse_exponent_override[3] == {0: 0.0}


# ---- records -----------------------------------------------------------------------------------

RULE = mfsdp.Perturbation(False)
AFTER = c.PerturbationConfig(perturb_before_computation=False)
COMMON_FIELDS = {
    "drop_weighting_factor_on_gsquare": True,
    "factor_matrix_dtype": F64,
    "use_trace_scaling": True,
    "trace_scaling_exponent": 0.25,
}
COMMON = {
    "factor_dtype": "float64",
    "drop_weighting_factor_on_gsquare": True,
    "trace_scaling_exponent": 0.25,
}
EXPONENTS = {1: 0.25, 2: {0: 0.0, 1: 0.5}}
SOLVERS = [
    (c.EigenConfig(AFTER, retry_double_precision=False), mfsdp.EighRoot(RULE)),
    (
        c.EigenConfig(c.PseudoInverseConfig(rank_atol=0.1, rank_rtol=None)),
        mfsdp.EighRoot(mfsdp.PseudoInverse(0.1, None)),
    ),
    (
        c.CoupledNewtonConfig(max_iterations=7, tolerance=1e-3),
        mfsdp.CoupledNewtonRoot(max_iterations=7, tolerance=1e-3),
    ),
    (
        c.CoupledHigherOrderConfig(
            rel_epsilon=0.1, abs_epsilon=0.2, max_iterations=8, tolerance=1e-4, order=4
        ),
        mfsdp.CoupledHigherOrderRoot(0.1, 0.2, 8, 1e-4, 4),
    ),
]
BASES = [
    (c.EighEigendecompositionConfig(AFTER, 0.1), mfsdp.EighBasis(RULE, 0.1)),
    (c.QREigendecompositionConfig(AFTER, 0.2, max_iterations=3), mfsdp.QRBasis(3, 0.2, RULE)),
    (c.EigenConfig(AFTER), mfsdp.EighBasis(RULE)),
]


@pytest.mark.parametrize("kl", [False, True])
@pytest.mark.parametrize(("config", "root"), SOLVERS)
def test_root_inverse(config: Any, root: Any, kl: bool) -> None:
    cls = c.RootInvKLShampooPreconditionerConfig if kl else SHAMPOO
    given = cls(
        amortized_computation_config=config,
        inverse_exponent_override=EXPONENTS,
        inv_factor_matrix_dtype=F64,
        **COMMON_FIELDS,
    )
    want = mfsdp.RootInverse(inverse_exponent_override=EXPONENTS, root=root, kl=kl, **COMMON)
    assert records.preconditioner(given) == want


@pytest.mark.parametrize("kl", [False, True])
@pytest.mark.parametrize(("config", "basis"), BASES)
def test_eigendecomposed(config: Any, basis: Any, kl: bool) -> None:
    kind = "KL" if kl else ""
    cls = getattr(c, f"Eigendecomposed{kind}ShampooPreconditionerConfig")
    given = cls(
        amortized_computation_config=config,
        inverse_exponent_override=EXPONENTS,
        factor_matrix_eigenvectors_dtype=F64,
        factor_matrix_eigenvalues_dtype=F64,
        **COMMON_FIELDS,
    )
    want = mfsdp.Eigendecomposed(inverse_exponent_override=EXPONENTS, basis=basis, kl=kl, **COMMON)
    assert records.preconditioner(given) == want


@pytest.mark.parametrize(("config", "basis"), BASES)
def test_eigenvalue_corrected(config: Any, basis: Any) -> None:
    given = SOAP(
        amortized_computation_config=config,
        inverse_exponent_override={2: 0.25},
        ignored_basis_change_dims={2: [1], 3: [0, 2]},
        factor_matrix_eigenvectors_dtype=F64,
        corrected_eigenvalues_dtype=F64,
        **COMMON_FIELDS,
    )
    ignored = {2: (1,), 3: (0, 2)}
    exponents = {2: 0.25}
    assert records.preconditioner(given) == mfsdp.EigenvalueCorrected(
        inverse_exponent_override=exponents,
        ignored_basis_change_dims=ignored,
        basis=basis,
        **COMMON,
    )


@pytest.mark.parametrize(
    ("config", "record"),
    [
        (None, None),
        (c.SGDPreconditionerConfig(), mfsdp.SGDGrafting()),
        (c.AdaGradPreconditionerConfig(epsilon=0.1), mfsdp.AdaGradGrafting(epsilon=0.1)),
        (
            c.RMSpropPreconditionerConfig(beta2=0.5, epsilon=0.1),
            mfsdp.RMSpropGrafting(beta2=0.5, epsilon=0.1),
        ),
        (
            c.AdamPreconditionerConfig(
                beta2=1.0, epsilon=0.1, drop_weighting_factor_on_gsquare=True
            ),
            mfsdp.AdamGrafting(1.0, 0.1, True),
        ),
        (c.SignDescentPreconditionerConfig(), mfsdp.SignDescent(1.0)),
        (c.SignDescentPreconditionerConfig(scale_fn=0.5), mfsdp.SignDescent(0.5)),
        (c.SignDescentPreconditionerConfig(scale_fn=l1), records.TorchScaledSign(l1)),
    ],
)
def test_preconditioners_without_factors(config: Any, record: Any) -> None:
    assert records.preconditioner(config) == record


def test_spectral_descent() -> None:
    """Scales are functions of (d_in, d_out) = (columns, rows), called by place."""
    given = c.SpectralDescentPreconditionerConfig(
        orthogonalization_config=c.NewtonSchulzOrthogonalizationConfig(
            num_iterations=3,
            coefficients=(2.0, -1.5, 0.5),
            scale_by_dims_fn=lambda i, o: i - 10 * o,
        )
    )
    own = records.preconditioner(given).orthogonalization
    assert isinstance(own, mfsdp.NewtonSchulzOrthogonalization)
    assert (own.steps, own.coefficients) == (3, ((2.0, -1.5, 0.5),))
    assert own.scale(6, 4) == 4 - 60
    assert isinstance(own.scale(6, 4), float)
    svd = c.SVDOrthogonalizationConfig(muon_scale, scale_by_nuclear_norm=True)
    record = records.preconditioner(
        c.SpectralDescentPreconditionerConfig(orthogonalization_config=svd)
    )
    assert isinstance(record, mfsdp.SpectralDescent)
    assert isinstance(record.orthogonalization, mfsdp.SVDOrthogonalization)
    assert record.orthogonalization.scale_by_nuclear_norm
    m = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    u, s, vh = np.linalg.svd(m.astype(np.float64), full_matrices=False)
    want = math.sqrt(6 / 4) * s.sum() * u @ vh
    got = record.orthogonalization(jnp.asarray(m))
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_a_record_is_a_copy() -> None:
    given = SHAMPOO(inverse_exponent_override={2: {0: 1}})
    record = records.preconditioner(given)
    given.inverse_exponent_override[2][0] = 0.5
    assert record.exponent(2, 0) == 1.0
    assert isinstance(record.exponent(2, 0), float)


def test_averages() -> None:
    momentum = c.ClassicMomentumConfig(momentum=0.25, dampening=0.5, use_nesterov=True)
    assert records.averaging(momentum) == mfsdp.ClassicMomentum(0.25, 0.5, True)
    primal = c.GeneralizedPrimalAveragingConfig(eval_interp_coeff=0.25, train_interp_coeff=0.5)
    assert records.averaging(primal) == mfsdp.GeneralizedPrimalAveraging(0.25, 0.5)
    free = c.ScheduleFreeConfig(train_interp_coeff=0.5, eval_coeff_lr_power=3)
    assert records.averaging(free) == mfsdp.ScheduleFree(0.5, 3.0)
    assert records.averaging(None) is None
    with pytest.raises(TypeError, match=r"iterate_averaging_config must be .*got SGDPre"):
        records.averaging(c.SGDPreconditionerConfig())


# ---- refusals ----------------------------------------------------------------------------------


def shampoo(solver: Any) -> Any:
    return SHAMPOO(amortized_computation_config=solver)


def soap(solver: Any) -> Any:
    return SOAP(amortized_computation_config=solver)


def spectral(**options: Any) -> Any:
    own = c.NewtonSchulzOrthogonalizationConfig(**options)
    return c.SpectralDescentPreconditionerConfig(orthogonalization_config=own)


def higher(**options: Any) -> Any:
    own = {"rel_epsilon": 0.0, "abs_epsilon": 1e-6} | options
    return shampoo(c.CoupledHigherOrderConfig(**own))


@dataclasses.dataclass(kw_only=True)
class OwnShampoo(c.RootInvShampooPreconditionerConfig):
    """A kind that somebody made."""


NOT_CARRIED = [
    (SHAMPOO(factor_matrix_dtype=F64), "inv_factor_matrix_dtype=torch.float32 .*float64; set both"),
    (SHAMPOO(inv_factor_matrix_dtype=torch.bfloat16), "inv_factor_matrix_dtype=torch.bfloat16"),
    (
        SHAMPOO(factor_matrix_dtype=torch.bfloat16),
        "factor_matrix_dtype=torch.bfloat16 .*float32 or",
    ),
    (SOAP(factor_matrix_eigenvectors_dtype=F64), "factor_matrix_eigenvectors_dtype=torch.float64"),
    (
        SOAP(corrected_eigenvalues_dtype=torch.bfloat16),
        "corrected_eigenvalues_dtype=torch.bfloat16",
    ),
    (
        c.EigendecomposedShampooPreconditionerConfig(factor_matrix_eigenvalues_dtype=F64),
        "factor_matrix_eigenvalues_dtype=torch.float64",
    ),
    (
        shampoo(c.EigenConfig(eigendecomposition_offload_device="cpu")),
        "EigenConfig.eigendecomposition_offload_device='cpu' .*leave it at \"\"",
    ),
    (
        soap(c.EighEigendecompositionConfig(eigendecomposition_offload_device="cuda")),
        "eigendecomposition_offload_device='cuda'",
    ),
    (higher(disable_tf32=False), "disable_tf32=False .*highest precision"),
    (higher(order=1), "CoupledHigherOrderConfig.*order must be .*2, got 1"),
    (shampoo(c.CoupledNewtonConfig(max_iterations=0)), "CoupledNewtonConfig.*max_iterations must"),
    (soap(c.QREigendecompositionConfig(max_iterations=0)), "QREigen.*max_iterations must be"),
    (spectral(num_iterations=0), "num_iterations=0 .*1 to 50"),
    (spectral(num_iterations=51), "num_iterations=51 .*1 to 50"),
    (c.RMSpropPreconditionerConfig(beta2=1.0), "RMSprop.*beta2=1.0 .*weight 0.*AdaGrad"),
    (c.AdamPreconditionerConfig(beta2=1.0), "Adam.*beta2=1.0"),
    (c.AdaGradPreconditionerConfig(epsilon=math.inf), "epsilon=inf"),
]


@pytest.mark.parametrize(("config", "message"), NOT_CARRIED)
def test_not_carried(config: Any, message: str) -> None:
    with pytest.raises(NotImplementedError, match=f"(?s){message}") as error:
        records.preconditioner(config)
    assert "not carried here" in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (shampoo(EIGH), "inverse roots are kept, got Eigh"),
        (
            c.EigendecomposedShampooPreconditionerConfig(
                amortized_computation_config=c.CoupledNewtonConfig()
            ),
            "eigenvectors are kept, got CoupledNewton",
        ),
        (OwnShampoo(), "preconditioner_config must be .*got OwnShampoo"),
        (mfsdp.SGDGrafting(), "preconditioner_config must be .*got SGDGrafting"),
        (shampoo(c.EigenConfig("perturb")), "rank_deficient_stability_config must .*'perturb'"),
        (
            c.SpectralDescentPreconditionerConfig(orthogonalization_config=EIGH),
            "orthogonalization_config must be .*got Eigh",
        ),
        (c.SignDescentPreconditionerConfig(scale_fn="l1"), "scale_fn='l1' must be a function"),
        (c.SignDescentPreconditionerConfig(scale_fn=True), "scale_fn=True must be a function"),
    ],
)
def test_no_configuration(config: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        records.preconditioner(config)


# ---- records of this layer ---------------------------------------------------------------------


def test_scaled_signs() -> None:
    rng = np.random.default_rng(1)
    m = rng.standard_normal((1, 3, 1, 4, 2)).astype(np.float32)
    scales = np.array([0.5, 2.0, -3.0])
    record = records.preconditioner(c.SignDescentPreconditionerConfig(scale_fn=l1))
    ctx = Context(2, jnp.int32(1), 1.0, 1e-6, True)

    @jax.jit
    def direction(m: jax.Array, scales: dict[tuple[int, ...], jax.Array]) -> jax.Array:
        own = dataclasses.replace(record, scales=scales)
        state = own.finish(own.accumulate(own.init(m, 2), m, ctx), m, ctx)
        return own.direction(state, m, ctx)

    with jax.enable_x64(True):
        got = direction(jnp.asarray(m), {(4, 2): jnp.asarray(scales)})
    assert got.dtype == jnp.float32  # of the gradient
    np.testing.assert_array_equal(got, np.sign(m) * scales.reshape(1, 3, 1, 1, 1))
    assert not record.refreshes
    with pytest.raises(ValueError, match=r"no scale for blocks of shape \(4, 2\), only for \[\]"):
        record.direction((), m, ctx)
    with pytest.raises(ValueError, match=r"scales\[\(4, 2\)\] must be \[W\] .*got shape \(2,\)"):
        direction(m, {(4, 2): jnp.ones(2)})


def newton(exponents: Any) -> Any:
    return records.preconditioner(
        SHAMPOO(
            amortized_computation_config=c.CoupledNewtonConfig(),
            inverse_exponent_override=exponents,
        )
    )


@pytest.mark.parametrize("exponents", [{}, {2: 0.25, 1: {0: 1.0}}, {2: {0: 0.0, 1: 0.5}}])
def test_newton_with_whole_roots_is_as_it_was(exponents: Any) -> None:
    assert type(newton(exponents)) is mfsdp.RootInverse


@pytest.mark.parametrize("exponents", [{1: 0.5, 2: 0.3}, {1: 0.5, 3: {0: 0.5, 2: 2.0}}])
def test_one_root_that_is_not_whole_is_enough(exponents: Any) -> None:
    assert type(newton(exponents)) is records.NewtonRootInverse


def test_newton_fails_only_where_its_root_is_not_whole() -> None:
    record = newton({2: {0: 0.3, 1: 0.5}})
    assert isinstance(record, records.NewtonRootInverse)
    ctx = Context(2, jnp.int32(1), 1.0, 1e-3, True)
    g = np.random.default_rng(2).standard_normal((1, 1, 1, 4, 4)).astype(np.float32)
    state = record.accumulate(record.init(jnp.zeros_like(g), 2), jnp.asarray(g), ctx)
    unit = jax.tree.map(lambda x: x[0, 0, 0], state)
    new, ok, finite = jax.jit(lambda unit: record.refresh(unit, ctx))(unit)
    assert not ok
    assert finite
    np.testing.assert_array_equal(new.roots[0], np.eye(4))
    g = g[0, 0, 0].astype(np.float64)
    values, vectors = np.linalg.eigh(g.T @ g + 1e-3 * np.eye(4))
    np.testing.assert_allclose(new.roots[1], vectors / np.sqrt(values) @ vectors.T, rtol=2e-3)
    # Blocks of another order have roots that are whole.
    one = Context(1, jnp.int32(1), 1.0, 1e-3, True)
    vector = jnp.asarray([[[[3.0, 4.0]]]])
    unit = record.accumulate(record.init(jnp.zeros_like(vector), 1), vector, one)
    new, ok, _ = record.refresh(jax.tree.map(lambda x: x[0, 0, 0], unit), one)
    assert ok
    assert np.abs(np.asarray(new.roots[0]) - np.eye(2)).max() > 0.1


# ---- the reference's runs ----------------------------------------------------------------------

CALLABLES = {"one": lambda *dims: 1.0, "muon_scale": muon_scale, "l1": l1}


def decode(x: Any) -> Any:
    """A value of the index as it is given to the reference."""
    if isinstance(x, dict):
        if "type" in x:
            return getattr(c, x["type"])(**{k: decode(v) for k, v in x.items() if k != "type"})
        return {int(k): decode(v) for k, v in x.items()}
    if isinstance(x, list):
        return [decode(v) for v in x]
    if isinstance(x, str):
        if x == "inf":
            return math.inf
        if x.startswith("torch."):
            return getattr(torch, x[6:])
        if x.startswith("callable:"):
            return CALLABLES[x[9:]]
        if x.startswith("wd:"):
            return c.WeightDecayType(x[3:])
    return x


def assert_same(got: Any, want: Any) -> None:
    """The same records; functions of dims by what they return."""
    match want:
        case mfsdp.SpectralDescent(own):
            scale = own.scale
            assert_scaled_alike(got.orthogonalization.scale, scale)
            got = dataclasses.replace(got.orthogonalization, scale=scale)
            if isinstance(own, mfsdp.NewtonSchulzOrthogonalization):
                coefficients = tuple(map(tuple, own.coefficients))
                own = dataclasses.replace(own, coefficients=coefficients)
            assert got == own
        case mfsdp.SignDescent(scale) if callable(scale):
            assert isinstance(got, records.TorchScaledSign)
            grad = np.array([1.0, -2.0])
            assert float(got.scale_fn(torch.tensor(grad))) == float(scale(grad)) == 3
        case mfsdp.EigenvalueCorrected():
            ignored = {k: tuple(dims) for k, dims in want.ignored_basis_change_dims.items()}
            assert got == dataclasses.replace(want, ignored_basis_change_dims=ignored)
        case mfsdp.RootInverse() if isinstance(got, records.NewtonRootInverse):
            assert dataclasses.asdict(got) == dataclasses.asdict(want)
        case _:
            assert got == want


def assert_scaled_alike(got: Any, want: Any) -> None:
    for rows, cols in ((6, 4), (4, 6)):
        assert got(rows, cols) == want(rows, cols)


@pytest.mark.parametrize("name", ENTRIES)
def test_configurations_of_the_reference(name: str) -> None:
    """All of a case: as given, and as resolved, to the records that the goldens run with."""
    entry = ENTRIES[name]
    given = {k: decode(v) for k, v in entry["overrides"].items() if k != "groups"}
    for key in ("preconditioner_config", "grafting_config"):
        records.preconditioner(given.get(key))
    for group in entry["resolved_groups"]:
        for key in ("preconditioner_config", "grafting_config"):
            want = test_goldens.preconditioner(group[key])
            assert_same(records.preconditioner(decode(group[key])), want)
        averaged = group["iterate_averaging_config"]
        assert records.averaging(decode(averaged)) == test_goldens.averaging(averaged)
        decay = c.WeightDecayType(group["weight_decay_type"])
        assert records.weight_decay_type(decay) == group["weight_decay_type"].lower()
        target = group["distributed_config"]["target_parameter_dimensionality"]
        own = decode(group["distributed_config"])
        assert own.target_parameter_dimensionality == test_goldens.number(target)
    if "ddp" in entry:
        sent = decode(entry["ddp"]["config"])
        assert isinstance(sent, c.DDPDistributedConfig)
        for group in entry["ddp"]["groups"]:
            assert_costs(group["assignment"], sent.communication_dtype)


def assert_costs(assignment: list[list[Any]], dtype: Any) -> None:
    assert assignment
    for _, _, shape, aligned, _ in assignment:
        block = torch.zeros(shape, dtype=dtype)
        assert c.AlignedMemoryCostModel().cost(block) == aligned


def test_failures_that_the_reference_tolerates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Identities for roots, step by step, and a counter that rises in each."""
    monkeypatch.setattr(
        test_goldens, "preconditioner", lambda config: records.preconditioner(decode(config))
    )
    with x64("tolerated_failures"):
        replay = test_goldens.Replay("tolerated_failures")
        assert replay.run() <= replay.entry["suggested_tol"]
        assert replay.steps == replay.entry["expected_error"]["step"] - 1 == 3
        assert counters(replay, "failures") == {"p0": 3}
        assert counters(replay, "nonfinite") == {"p0": 0}
        for root in roots(replay.shampoo_state().preconditioner["p0"]):
            np.testing.assert_array_equal(root[0, 0], np.eye(root.shape[-1]))
        test_goldens.assert_final_state(replay)
