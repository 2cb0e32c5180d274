"""Matrices whose columns are split over devices, against `orthogonalize` of the whole ones."""

import collections
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.linalg.coefficients import SCHEDULES
from matrixfsdp_jax.linalg.orthogonalize import orthogonalize
from matrixfsdp_jax.linalg.split import exchange_wire_bytes, gram_wire_bytes, orthogonalize_split
from matrixfsdp_jax.owner.collectives import max_over, sum_over
from tests import oracle

PARTS = 4
STACK = (2, 3, 12, 64)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def graded(m: int, n: int) -> np.ndarray:
    """Singular values from 1 to 1e-4."""
    left, right = (np.linalg.qr(normal(k, m, seed=s))[0] for s, k in enumerate((m, n)))
    return ((left * np.geomspace(1, 1e-4, m)) @ right.T).astype(np.float32)


def mesh(axis_type: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((PARTS,), ("tp",), axis_types=(axis_type,), devices=jax.devices()[:PARTS])


def program(ndim: int, devices: jax.sharding.Mesh | None = None, **options) -> Callable:
    """``orthogonalize_split`` of global arrays with split columns, under jit."""
    local = functools.partial(
        orthogonalize_split,
        sum_over=lambda a: sum_over(a, ("tp",)),
        max_over=lambda a: max_over(a, ("tp",)),
        **options,
    )
    spec = P(*[None] * (ndim - 1), "tp")
    devices = devices or mesh()
    return jax.jit(
        jax.shard_map(local, mesh=devices, in_specs=spec, out_specs=spec, check_vma=True),
        in_shardings=NamedSharding(devices, spec),
    )


def split(x: jax.typing.ArrayLike, **options) -> np.ndarray:
    out = program(np.ndim(x), **options)(x)
    assert out.dtype == jnp.asarray(x).dtype
    return np.asarray(out)


def reference(x: np.ndarray, table=oracle.KELLER) -> np.ndarray:
    flat = np.asarray(x, np.float64).reshape(-1, *x.shape[-2:])
    return np.stack([oracle.newton_schulz(m, table) for m in flat]).reshape(x.shape)


def assert_near(actual: np.ndarray, expected: np.ndarray, atol: float) -> None:
    actual, expected = (np.asarray(a, np.float64) for a in (actual, expected))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


# --- the same result


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("shape", "atol"),
    # In order: wide with m < n_local, with m > n_local, one row; and with eigenvalues of the Gram
    # matrix near zero, where the Gram form is less exact: square, tall.
    [(STACK, 1e-5), ((40, 64), 1e-5), ((1, 8), 1e-5), ((24, 24), 1e-4), ((2, 48, 16), 1e-4)],
)
def test_float32(shape, atol, axis_type):
    x = normal(*shape)
    devices = mesh(axis_type)
    spec = P(*[None] * (x.ndim - 1), "tp")
    out = program(x.ndim, devices)(jax.device_put(x, NamedSharding(devices, spec)))
    assert out.sharding.spec == spec
    assert_near(out, reference(x), atol)
    assert_near(out, orthogonalize(x), atol)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_schedules(name):
    x = normal(3, 12, 96)
    steps = 10 if name == "keller_polished" else 4  # ten restart once in float32
    whole = orthogonalize(x, coefficients=name, steps=steps)
    assert_near(split(x, coefficients=name, steps=steps), whole, 1e-5)


@pytest.mark.parametrize("algorithm", ["standard", "standard_symmetric", "gram_symmetric"])
def test_algorithms(algorithm):
    x = normal(3, 12, 64)
    assert_near(split(x, algorithm=algorithm), reference(x), 1e-5)


@pytest.mark.parametrize(("algorithm", "atol"), [("standard", 1e-5), ("gram", 3e-4)])
def test_small_singular_values(algorithm, atol):
    x = graded(24, 48)
    assert_near(split(x, algorithm=algorithm), reference(x), atol)


def test_sum_that_is_not_quite_symmetric():
    # As of a ring that adds the two halves in different orders. Not mirrored it would cost 1e-3.
    x, noise = graded(64, 64), np.triu(normal(64, 64))

    def skew_sum(a: jax.Array) -> jax.Array:
        return a * (1 + 6e-8 * noise) if a.shape[-1] > 1 else a

    f = functools.partial(orthogonalize_split, x, sum_over=skew_sum, max_over=lambda a: a)
    for algorithm in ("gram", "gram_symmetric"):
        assert_near(f(algorithm=algorithm), reference(x), 3e-4)


def test_aol_of_a_tall_matrix_divides_its_rows():
    # As `orthogonalize` does with the transpose of a matrix that has zero columns to its right.
    x = normal(32, 12)
    padded = np.pad(x, ((0, 0), (0, 24)))
    out = split(x, coefficients="aol", steps=4)
    assert_near(out, orthogonalize(padded, coefficients="aol", steps=4)[:, :12], 1e-4)
    assert np.abs(out - orthogonalize(x, coefficients="aol", steps=4)).max() > 1e-3


@pytest.mark.parametrize(("dtype", "atol"), [("float16", 5e-3), ("bfloat16", 4e-2)])
def test_half_iteration(dtype, atol):
    x = normal(3, 16, 64)
    assert_near(split(x, dtype=dtype), reference(x), atol)
    half = jnp.asarray(x, dtype)
    assert_near(split(half, dtype=dtype), reference(np.asarray(half, np.float32)), atol)


def test_double_and_complex():
    with jax.enable_x64(True):
        x = normal(2, 12, 32).astype(np.float64)
        assert_near(split(x, eps=1e-30), reference(x), 1e-12)
    z = (normal(2, 8, 16) + 1j * normal(2, 8, 16, seed=1)).astype(np.complex64)
    np.testing.assert_allclose(split(z), orthogonalize(z), rtol=0, atol=1e-5)


# --- scale, zeros, non-finite values


def test_any_scale():
    # One program for all scales, and a device whose entries are far smaller than the others'.
    f, x = program(3), normal(2, 8, 48)
    x[..., -12:] *= 2.0**-12
    for scale in (1e-30, 1e-20, 1.0, 1e20, 1e30):
        scaled = x * np.float32(scale)
        assert_near(f(scaled), reference(scaled), 1e-5)
    for exponent in (-80, 100):
        np.testing.assert_array_equal(f(np.ldexp(x, exponent)), f(x))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["keller", "aol", "cans_schatten"])
def test_zero_gives_exact_zero(name, dtype):
    x = normal(3, 8, 16)
    x[1] = 0  # a pad slot among others
    x[2, :, 4:] = 0  # and devices that have nothing of a matrix
    out = split(x, coefficients=name, dtype=dtype)
    assert not out[1].any()
    assert not out[2, :, 4:].any()
    assert np.isfinite(out).all()
    assert out[2, :, :4].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_non_finite_stays_in_its_matrix_on_all_devices(dtype):
    f, x = program(3, dtype=dtype), normal(4, 8, 16)
    expected = np.asarray(f(x))
    for bad in (math.nan, math.inf, -math.inf):
        x[2, 3, 5] = bad  # of the second device
        out = np.asarray(f(x))
        assert np.isnan(out[2]).all()
        np.testing.assert_array_equal(np.delete(out, 2, 0), np.delete(expected, 2, 0))


def test_nan_that_the_maximum_passes_over():
    x = normal(2, 8, 16)
    x[1, 3, 5] = math.nan
    options = {"sum_over": lambda a: a, "max_over": lambda a: jnp.nan_to_num(a, nan=1.0)}
    out = np.asarray(orthogonalize_split(x, **options))
    assert np.isnan(out[1]).all()
    assert_near(out[0], reference(x[0]), 1e-5)


# --- what it moves


@pytest.mark.parametrize(
    ("options", "sums"),
    [
        ({}, 1),
        ({"steps": 10}, 2),
        ({"dtype": "float16"}, 2),
        ({"dtype": "bfloat16"}, 3),
        ({"coefficients": "aol", "steps": 4}, 1),
        ({"algorithm": "standard"}, 5),
    ],
)
def test_one_sum_per_segment_in_float32(options, sums):
    x = jax.ShapeDtypeStruct(STACK, jnp.bfloat16)
    options = {"dtype": "float32"} | options
    report = mfsdp.audit(program(len(STACK), **options), x)
    m, batch = STACK[-2], STACK[:-2]
    number, gram = ((("float32", (*batch, k, k)),) for k in (1, m))
    times = collections.Counter()
    for c in report.collectives:
        assert (c.kind, c.axis) == ("all-reduce", ("tp",))
        times[c.shapes] += c.times
    assert times == {number: 2, gram: sums}
    sent = gram_wire_bytes(
        m,
        PARTS,
        options.get("steps", 5),
        options["dtype"],
        options.get("algorithm", "gram"),
    )
    assert sum(c.wire_bytes * c.times for c in report.collectives if c.shapes == gram) == (
        math.prod(batch) * sent
    )


def test_wire_bytes():
    # By hand: 2 * 3/4 of 4 * 12 * 12 bytes per sum.
    assert gram_wire_bytes(12, 4) == 864
    assert gram_wire_bytes(12, 4, 10, "bfloat16") == 5 * 864
    assert gram_wire_bytes(12, 4, 5, "float64") == 2 * 864
    assert gram_wire_bytes(12, 4, 5, algorithm="standard") == 5 * 864
    assert gram_wire_bytes(12, 1) == exchange_wire_bytes(12, 48, 1) == 0
    # Equal at n = T m for elements as wide as those of the sum.
    assert exchange_wire_bytes(12, 4 * 12, 4) == 864
    assert exchange_wire_bytes(12, 64, 4, itemsize=2) == 2 * 3 * 2 * 12 * 64 // 16


# --- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "auto"}, "algorithm must be one of .*'auto'"),
        ({"eps": 0.0}, "eps must be positive and finite, got 0.0"),
        ({"dtype": "int32"}, "got 'int32'"),
        ({"steps": 0}, "got 0"),
        ({"coefficients": "kelvin"}, "'kelvin'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        orthogonalize_split(normal(2, 3), sum_over=lambda a: a, max_over=lambda a: a, **options)


def test_bad_arrays():
    alone = {"sum_over": lambda a: a, "max_over": lambda a: a}
    with pytest.raises(ValueError, match=r"got shape \(3,\)"):
        orthogonalize_split(normal(3), **alone)
    with pytest.raises(TypeError, match="got dtype int32"):
        orthogonalize_split(np.zeros((2, 3), np.int32), **alone)
