"""Records of options refuse at construction what they cannot use."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import matrixfsdp_jax as mfsdp

ROOT, BASIS, SOAP = mfsdp.RootInverse, mfsdp.Eigendecomposed, mfsdp.EigenvalueCorrected
NEWTON_SCHULZ, SVD = mfsdp.NewtonSchulzOrthogonalization, mfsdp.SVDOrthogonalization
FREE, PRIMAL = mfsdp.ScheduleFree, mfsdp.GeneralizedPrimalAveraging

BAD_VALUES: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (mfsdp.AdamGrafting, {"beta2": 0.0}, "beta2=0.0"),
    (mfsdp.AdamGrafting, {"beta2": math.nan}, "beta2=nan"),
    (mfsdp.RMSpropGrafting, {"epsilon": 0.0}, "epsilon=0.0"),
    (mfsdp.AdaGradGrafting, {"beta2": 0.9}, "beta2=0.9 must be 1"),
    (mfsdp.ClassicMomentum, {"momentum": 1.0}, "momentum=1.0"),
    (mfsdp.ClassicMomentum, {"dampening": -0.1}, "dampening=-0.1"),
    (FREE, {"train_interp_coeff": 0.0}, r"train_interp_coeff=0.0 must be in \(0, 1\]"),
    (FREE, {"eval_coeff_lr_power": math.nan}, "eval_coeff_lr_power=nan must be a finite number$"),
    (PRIMAL, {"eval_interp_coeff": 1.0}, "eval_interp_coeff=1.0"),
    (ROOT, {"inverse_exponent_override": {1: -0.5}}, r"inverse_exponent_override\[1\]=-0.5"),
    (ROOT, {"inverse_exponent_override": {2: math.nan}}, r"inverse_exponent_override\[2\]=nan"),
    (ROOT, {"inverse_exponent_override": {2: {2: 0.5}}}, r"\[2\]={2: 0.5} .* out of \[0, 1\]"),
    (BASIS, {"inverse_exponent_override": {2: {0: -1.0}}}, r"inverse_exponent_override\[2\]=-1.0"),
    (SOAP, {"inverse_exponent_override": {1: 0.0}}, r"\[1\]=0.0: SOAP takes one exponent > 0"),
    (SOAP, {"inverse_exponent_override": {2: {0: 0.5}}}, "SOAP takes one exponent"),
    (SOAP, {"ignored_basis_change_dims": {2: (2,)}}, r"ignored_basis_change_dims\[2\]=\(2,\)"),
    (SOAP, {"ignored_basis_change_dims": {2: (-1,)}}, r"dims\[2\]=\(-1,\)"),
    (SOAP, {"ignored_basis_change_dims": {2: (1, 1)}}, r"\(1, 1\) must name each dim once"),
    (ROOT, {"trace_scaling_exponent": 0.0}, "trace_scaling_exponent=0.0"),
    (BASIS, {"trace_scaling_exponent": math.inf}, "trace_scaling_exponent=inf"),
    (NEWTON_SCHULZ, {"steps": 0}, r"steps must be in \[1, "),
    (NEWTON_SCHULZ, {"coefficients": "nobody"}, "nobody"),
    (mfsdp.SignDescent, {"scale": math.nan}, "scale=nan must be a finite number$"),
]
BAD_TYPES: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (mfsdp.AdamGrafting, {"beta2": "0.9"}, "beta2='0.9' must be a Python number"),
    (mfsdp.AdamGrafting, {"beta2": jnp.float32(0.9)}, "beta2=.* must be a Python number"),
    (mfsdp.AdamGrafting, {"drop_weighting_factor_on_gsquare": "no"}, "gsquare='no'"),
    (mfsdp.ClassicMomentum, {"use_nesterov": "no"}, "use_nesterov='no'"),
    (mfsdp.ClassicMomentum, {"momentum": jnp.float32(0.9)}, "momentum=.* a Python number"),
    (PRIMAL, {"train_interp_coeff": "x"}, "train_interp_coeff='x'"),
    (FREE, {"train_interp_coeff": True}, "train_interp_coeff=True"),
    (FREE, {"eval_coeff_lr_power": "x"}, "eval_coeff_lr_power='x'"),
    (ROOT, {"inverse_exponent_override": 0.5}, "0.5 must be a mapping from orders"),
    (ROOT, {"inverse_exponent_override": {"2": 0.5}}, "{'2': 0.5} must be a mapping from orders"),
    (ROOT, {"inverse_exponent_override": {2: [0.5, 0.5]}}, r"\[2\]=\[0.5, 0.5\]"),
    (SOAP, {"ignored_basis_change_dims": {2: 1}}, r"ignored_basis_change_dims\[2\]=1"),
    (SOAP, {"ignored_basis_change_dims": {2: "01"}}, "must be a tuple of dims"),
    (SOAP, {"ignored_basis_change_dims": [0]}, r"\[0\] must be a mapping from orders"),
    (ROOT, {"drop_weighting_factor_on_gsquare": 1}, "drop_weighting_factor_on_gsquare=1"),
    (ROOT, {"kl": "no"}, "kl='no'"),
    (ROOT, {"trace_scaling_exponent": "x"}, "trace_scaling_exponent='x'"),
    (ROOT, {"root": mfsdp.EighRoot}, r"root=<class .* must be mfsdp\.EighRoot\(\)"),
    (ROOT, {"root": mfsdp.QRBasis()}, r"root=QRBasis.* must be mfsdp\.EighRoot\(\)"),
    (BASIS, {"basis": mfsdp.EighRoot()}, r"basis=EighRoot.* mfsdp\.EighBasis\(\) or mfsdp\.QRBas"),
    (SOAP, {"basis": "qr"}, "basis='qr'"),
    (mfsdp.SpectralDescent, {"orthogonalization": SVD}, "orthogonalization=<class"),
    (NEWTON_SCHULZ, {"steps": 2.0}, "steps"),
    (NEWTON_SCHULZ, {"scale": 0.2}, "scale=0.2 must be a function"),
    (SVD, {"scale": 0.2}, "scale=0.2 must be a function"),
    (SVD, {"scale_by_nuclear_norm": "no"}, "scale_by_nuclear_norm='no'"),
    (mfsdp.SignDescent, {"scale": "x"}, "scale='x'"),
]


@pytest.mark.parametrize(("record", "options", "message"), BAD_VALUES)
def test_records_refuse_bad_values(
    record: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        record(**options)


@pytest.mark.parametrize(("record", "options", "message"), BAD_TYPES)
def test_records_refuse_other_types(
    record: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        record(**options)


def test_records_take_all_that_they_can_use() -> None:
    """A scalar counts as one dim, and 0 leaves a dim without a factor."""
    root = ROOT(inverse_exponent_override={0: {0: 0.5}, 2: {1: 0}, 3: 0.25})
    assert [root.dims(order) for order in (1, 2, 3)] == [(0,), (0,), (0, 1, 2)]
    soap = SOAP(inverse_exponent_override={2: 1}, ignored_basis_change_dims={0: (0,), 2: [1, 0]})
    assert soap.dims(2) == ()
    assert mfsdp.SignDescent(-1.0).scale == -1.0
    assert FREE(eval_coeff_lr_power=0).eval_coeff_lr_power == 0
