import math

import numpy as np
import pytest

from matrixfsdp_jax.linalg.orthogonalize import orthogonalize
from matrixfsdp_jax.transforms.scaling import scale_fn
from tests import oracle


@pytest.mark.parametrize(
    ("name", "wider", "narrower"),  # factors of a layer 64 -> 256 and of a layer 256 -> 64
    [
        ("sqrt_max_1_out_in", 2.0, 1.0),
        ("rms_0.2", 3.2, 3.2),
        ("sqrt_out_in", 2.0, 0.5),
        ("none", 1.0, 1.0),
    ],
)
def test_formulas(name, wider, narrower):
    scale = scale_fn(name)
    assert scale(64, 256) == pytest.approx(wider, rel=1e-15)
    assert scale(256, 64) == pytest.approx(narrower, rel=1e-15)


@pytest.mark.parametrize("name", oracle.SCALES)
@pytest.mark.parametrize("fans", [(1, 1), (7, 7), (3, 1000), (1000, 3)])
def test_formulas_against_the_oracle(name, fans):
    assert scale_fn(name)(*fans) == pytest.approx(oracle.SCALES[name](*fans), rel=1e-15)


@pytest.mark.parametrize("shape", [(64, 256), (256, 64)])
def test_rms_rule_is_applied_alone(shape):
    # Five steps leave singular values in [0.68, 1.21]: their mean square puts 0.2 at about 0.17.
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    update = scale_fn("rms_0.2")(*shape) * np.asarray(orthogonalize(x))
    assert math.sqrt(np.mean(update**2)) == pytest.approx(0.2, abs=0.035)


def test_own_function():
    assert scale_fn(lambda fan_in, fan_out: fan_out - fan_in)(3, 10) == 7.0


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, math.inf])
def test_own_function_with_a_bad_result(factor):
    scale = scale_fn(lambda fan_in, fan_out: factor)
    with pytest.raises(ValueError, match=rf"scale\(3, 10\) returned {factor}"):
        scale(3, 10)


def test_unknown_name():
    with pytest.raises(ValueError, match="'spectral'") as error:
        scale_fn("spectral")
    for name in oracle.SCALES:
        assert repr(name) in str(error.value)
    assert "sqrt(max(1, out/in))" in str(error.value)


def test_neither_name_nor_function():
    with pytest.raises(TypeError, match=r"got 0\.2"):
        scale_fn(0.2)
