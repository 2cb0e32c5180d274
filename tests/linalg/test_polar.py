import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from matrixfsdp_jax.linalg.orthogonalize import orthogonalize
from matrixfsdp_jax.linalg.polar import polar
from tests import oracle


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(8, 16), (16, 8), (24, 24), (1, 9), (9, 1), (1, 1)])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_polar_factor(shape, scale):
    x = normal(2, 3, *shape) * np.float32(scale)
    expected = np.stack([oracle.polar(m) for m in x.reshape(-1, *shape)]).reshape(x.shape)
    out = polar(x)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-5)
    short = np.asarray(out) if shape[0] <= shape[1] else np.swapaxes(out, -1, -2)
    gram = short @ np.swapaxes(short, -1, -2)
    np.testing.assert_allclose(gram, np.broadcast_to(np.eye(min(shape)), gram.shape), atol=5e-6)


def test_float64_and_complex():
    with jax.enable_x64(True):
        x = normal(6, 10).astype(np.float64)
        np.testing.assert_allclose(polar(x), oracle.polar(x), rtol=0, atol=1e-13)
        z = x + 1j * normal(6, 10, seed=1)
        out = polar(z)
        assert out.dtype == jnp.complex128
        # The factor of z is the unitary part that makes U^H z Hermitian and positive.
        hermitian = np.conj(out.T) @ z
        np.testing.assert_allclose(hermitian, np.conj(hermitian.T), atol=1e-12)
        np.testing.assert_allclose(out @ np.conj(out.T), np.eye(6), atol=1e-12)
        assert np.linalg.eigvalsh(hermitian).min() > -1e-12


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_input(dtype):
    x = jnp.asarray(normal(6, 10), dtype)
    out = polar(x)
    assert out.dtype == x.dtype
    expected = oracle.polar(np.asarray(x, np.float64))
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=0, atol=4e-3)


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_rank_deficient_gives_the_partial_isometry(scale):
    left, right = normal(12, 3), normal(3, 20)
    out = np.asarray(polar(left @ right * np.float32(scale)), np.float64)
    u, s, vt = np.linalg.svd(left.astype(np.float64) @ right, full_matrices=False)
    np.testing.assert_allclose(out, u[:, :3] @ vt[:3], rtol=0, atol=1e-5)
    assert s[2] > 1e-3


def test_zero_and_non_finite_stay_in_their_matrix():
    x = normal(4, 5, 8)
    x[1] = 0
    x[2, 0, 0], x[3, 1, 1] = math.nan, math.inf
    out = np.asarray(polar(x))
    np.testing.assert_array_equal(out[1], 0)
    assert np.isnan(out[2:]).all()
    np.testing.assert_allclose(out[0], oracle.polar(x[0]), rtol=0, atol=1e-5)


def test_what_orthogonalize_approaches():
    x = normal(3, 12, 20)
    many = orthogonalize(x, coefficients="polar_express", steps=12)
    np.testing.assert_allclose(many, polar(x), rtol=0, atol=1e-5)
    five = functools.partial(orthogonalize, x)
    assert np.abs(five() - polar(x)).max() > 1e-2


@pytest.mark.parametrize("shape", [(), (3,), (0, 3)])
def test_bad_shape(shape):
    with pytest.raises(ValueError, match=re.escape(f"got shape {shape}")):
        polar(np.zeros(shape, np.float32))


def test_bad_dtype():
    with pytest.raises(TypeError, match="got dtype int32"):
        polar(np.zeros((2, 3), np.int32))
