"""The forms of the iteration against the same schedule in float64, their costs and their limits."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from matrixfsdp_jax.linalg.algorithms import (
    ALGORITHMS,
    block_edges,
    choose_algorithm,
    newton_schulz_flops,
    segment_lengths,
)
from matrixfsdp_jax.linalg.coefficients import SCHEDULES, newton_schulz_schedule
from matrixfsdp_jax.linalg.newton_schulz import Form, iterate
from matrixfsdp_jax.linalg.norms import normalize
from matrixfsdp_jax.linalg.orthogonalize import orthogonalize
from tests import oracle

ATOL = {"float32": 2e-5, "float16": 1e-2, "bfloat16": 6e-2}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def with_condition(m: int, n: int, condition: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    u = np.linalg.qr(rng.standard_normal((m, m)))[0]
    v = np.linalg.qr(rng.standard_normal((n, m)))[0]
    return ((u * np.geomspace(1, 1 / condition, m)) @ v.T).astype(np.float32)


def spike(m: int, n: int, rows: int, noise: float) -> np.ndarray:
    """A few heavy rows over weak dense noise: most of the Gram matrix is rounding error."""
    x = noise * normal(m, n)
    x[:rows] += normal(rows, n, seed=1)
    return x


def reference(x: jax.typing.ArrayLike, name: str = "keller", steps: int = 5) -> np.ndarray:
    """The same schedule in float64 or complex128, matrix by matrix."""
    rows, start = newton_schulz_schedule(name, steps).rows, SCHEDULES[name].start
    x = np.asarray(x)
    wide = np.complex128 if np.iscomplexobj(x) else np.float64
    return np.stack(
        [one(m, rows, start) for m in x.reshape(-1, *x.shape[-2:]).astype(wide)]
    ).reshape(x.shape)


def one(x: np.ndarray, rows, start: str) -> np.ndarray:
    if x.shape[0] > x.shape[1]:
        return one(x.T, rows, start).T
    gram = x @ x.conj().T
    if start == "aol":
        x = x / np.sqrt(np.abs(gram).sum(1, keepdims=True))
    elif start == "schatten4":
        x = x / np.sqrt(np.linalg.norm(gram))
    else:
        x = x / np.linalg.norm(x)
    for a, b, c in rows:
        gram = x @ x.conj().T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def largest(x: np.ndarray) -> np.ndarray:
    return np.linalg.norm(np.asarray(x, np.float64), 2, axis=(-2, -1))


# --- against the same schedule in float64


def test_reference_is_the_oracle():
    x = normal(6, 9)
    np.testing.assert_allclose(reference(x), oracle.newton_schulz(x), atol=1e-14)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", ATOL)
@pytest.mark.parametrize("shape", [(40, 96), (33, 33), (96, 20), (1, 9), (3, 4)])
def test_dtypes(algorithm, dtype, shape):
    x = normal(2, *shape)
    out = orthogonalize(x, algorithm=algorithm, dtype=dtype)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, reference(x), rtol=0, atol=ATOL[dtype])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("steps", [1, 2, 7, 13])
def test_float64_and_any_number_of_steps(algorithm, steps):
    with jax.enable_x64(True):
        x = normal(2, 12, 30).astype(np.float64)
        out = orthogonalize(x, algorithm=algorithm, steps=steps, eps=1e-30)
        np.testing.assert_allclose(out, reference(x, steps=steps), rtol=0, atol=1e-11)


@pytest.mark.parametrize("algorithm", ["standard", "gram_symmetric"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule(algorithm, name):
    for x in (normal(2, 24, 40), normal(2, 40, 24)):
        for dtype in ("float32", "bfloat16"):
            out = orthogonalize(x, algorithm=algorithm, coefficients=name, dtype=dtype)
            np.testing.assert_allclose(out, reference(x, name), rtol=0, atol=2 * ATOL[dtype])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (1, 5)])
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_complex(algorithm, shape, scale):
    x = ((normal(2, *shape) + 1j * normal(2, *shape, seed=1)) * scale).astype(np.complex64)
    out = orthogonalize(x, algorithm=algorithm)
    assert out.dtype == jnp.complex64
    np.testing.assert_allclose(out, reference(x), rtol=0, atol=2e-5)
    with jax.enable_x64(True):
        out = orthogonalize(x.astype(np.complex128), algorithm=algorithm, eps=1e-30)
        assert out.dtype == jnp.complex128
        np.testing.assert_allclose(out, reference(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", ["keller", "aol", "cans_schatten"])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_any_scale_zero_and_zero_rows(algorithm, name, scale):
    x = normal(3, 8, 16) * np.float32(scale)
    x[1] = 0
    x[2, 3] = 0
    f = functools.partial(orthogonalize, algorithm=algorithm, coefficients=name)
    out = np.asarray(f(x))
    np.testing.assert_array_equal(out[1], 0)
    np.testing.assert_array_equal(out[2, 3], 0)
    # The Gram form amplifies float32 rounding of weak directions; how much depends on the kernels.
    atol = 1e-3 if algorithm.startswith("gram") else 1e-4
    np.testing.assert_allclose(out[0], reference(x[0], name), rtol=0, atol=atol)
    for dtype in ("float16", "bfloat16"):
        assert np.isfinite(f(x, dtype=dtype)).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_float16_input_of_3e4(algorithm):
    x = jnp.asarray(np.clip(normal(8, 16), -2, 2) * 3e4, jnp.float16)
    out = orthogonalize(x, algorithm=algorithm, dtype="float16")
    np.testing.assert_allclose(np.asarray(out, np.float64), reference(x), rtol=0, atol=1e-2)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rank_deficient(algorithm):
    x = normal(48, 3) @ normal(3, 64)
    out = orthogonalize(x, algorithm=algorithm)
    np.testing.assert_allclose(out, reference(x), rtol=0, atol=2e-3)
    assert np.linalg.matrix_rank(out, tol=1e-2) == 3


@pytest.mark.parametrize("batching", ["map", "batched"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_stays_in_its_matrix(algorithm, bad, batching):
    x = normal(4, 8, 16)
    f = functools.partial(orthogonalize, algorithm=algorithm, batching=batching)
    expected = np.asarray(f(x))
    x[2, 3, 5] = bad
    out = np.asarray(f(x))
    assert np.isnan(out[2]).all()
    np.testing.assert_array_equal(np.delete(out, 2, 0), np.delete(expected, 2, 0))


# --- restarts


SPIKES = np.stack([spike(96, 192, r, z) for r in (1, 4, 16) for z in (1e-1, 1e-3, 1e-4)])
LOW_RANK = (normal(96, 8) @ normal(8, 192, seed=1))[None]
CONDITIONS = np.stack([with_condition(96, 192, c) for c in (1e1, 1e2, 1e3, 1e5)])


@pytest.mark.parametrize("algorithm", ["gram", "gram_symmetric"])
@pytest.mark.parametrize("dtype", ATOL)
@pytest.mark.parametrize(
    ("name", "steps"), [("keller", 5), ("you", 5), ("polar_express", 5), ("keller_polished", 10)]
)
def test_restarts_hold_the_largest_singular_value(name, steps, dtype, algorithm):
    x = np.concatenate([SPIKES, CONDITIONS, LOW_RANK])
    out = orthogonalize(x, algorithm=algorithm, dtype=dtype, coefficients=name, steps=steps)
    ratio = largest(out) / largest(reference(x, name, steps))
    # polar_express has the steepest first step.
    half = 1.08 if name == "polar_express" else 1.02
    assert ratio.max() < (1.001 if dtype == "float32" else half)


@pytest.mark.parametrize(
    ("dtype", "segments", "blow_up"),
    [
        ("bfloat16", (5,), 50),
        ("bfloat16", (2, 3), 1.1),
        ("float16", (5,), 1.3),
        ("float32", (5,), 0),
    ],
)
def test_without_restarts_half_precision_blows_up(dtype, segments, blow_up):
    form = Form(segments, (0, 96), jnp.dtype(dtype), jnp.dtype("float32"))
    x = np.concatenate([SPIKES, CONDITIONS, LOW_RANK])
    schedule = newton_schulz_schedule("keller")
    out = jax.jit(lambda x: iterate(normalize(x, 1e-8), schedule, form))(x)
    ratio = largest(out) / largest(reference(x))
    if blow_up is not None:
        assert ratio.max() > blow_up
    else:  # exact products need none
        assert ratio.max() < 1.001


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 10, 50])
def test_segments_add_up(dtype, steps):
    lengths = segment_lengths(steps, dtype)
    assert sum(lengths) == steps
    assert min(lengths) >= 1
    assert len(set(lengths[1:-1])) <= 1


@pytest.mark.parametrize(("dtype", "highest"), [("float32", True), ("bfloat16", False)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_operands_are_cast_or_highest(algorithm, dtype, highest):
    # A float32 array at the default precision would be rounded in the product and not in the sum.
    f = functools.partial(orthogonalize, dtype=dtype, algorithm=algorithm, batching="batched")
    with jax.default_matmul_precision("bfloat16"):
        text = jax.jit(f).lower(normal(3, 8, 16)).as_text()
    # The norm, a product over both dims, is in float32 whatever the iteration.
    products = [
        line
        for line in text.splitlines()
        if "dot_general" in line and "contracting_dims = [1, 2]" not in line
    ]
    assert len(products) >= 3
    assert all(("HIGHEST" in line) is highest for line in products)
    narrow = "bf16" if dtype == "bfloat16" else "f32"
    for line in products:
        assert re.search(rf"x{narrow}>, tensor<\S*x{narrow}>\) -> tensor<\S*xf32>", line), line


# --- costs


def counted(m, n, steps, algorithm, *, name="keller", dtype="float32") -> float:
    """FLOPs of the program with all loops taken apart, as XLA counts the body of a loop once.

    Float32 throughout, but with the restarts of ``dtype``: casts would count as well.
    """
    schedule = newton_schulz_schedule(name, steps)
    single = jnp.dtype("float32")
    form = Form(
        segment_lengths(steps, dtype) if algorithm.startswith("gram") else (),
        block_edges(m, "cpu") if algorithm.endswith("symmetric") else (0, m),
        single,
        single,
    )

    def unrolled(f, carry, rows):
        for i in range(len(jax.tree.leaves(rows)[0])):
            carry, _ = f(carry, jax.tree.map(lambda r, i=i: r[i], rows))
        return carry, None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "scan", unrolled)
        compiled = jax.jit(lambda x: iterate(x, schedule, form)).lower(
            jax.ShapeDtypeStruct((m, n), jnp.float32)
        )
        return compiled.compile().cost_analysis()["flops"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("m", "n", "steps"), [(512, 1024, 5), (800, 800, 3), (700, 2100, 7)])
def test_flops_are_those_that_xla_counts(algorithm, m, n, steps):
    expected = newton_schulz_flops(m, n, steps, algorithm)
    assert counted(m, n, steps, algorithm) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_flops_of_a_cubic_schedule_and_of_restarts(algorithm):
    expected = newton_schulz_flops(800, 1600, 5, algorithm, cubic=True)
    assert counted(800, 1600, 5, algorithm, name="cubic") == pytest.approx(expected, rel=0.02)
    if algorithm.startswith("gram"):
        expected = newton_schulz_flops(800, 1600, 5, algorithm, dtype="bfloat16")
        assert counted(800, 1600, 5, algorithm, dtype="bfloat16") == pytest.approx(expected, 0.02)


def test_flops_by_hand():
    m, n = 100, 400  # in units of m^3, a = 4
    assert newton_schulz_flops(m, n, 5) == 90 * m**3
    assert newton_schulz_flops(n, m, 5, "gram", dtype="float16") == 60 * m**3
    assert newton_schulz_flops(m, n, 5, "gram", dtype="bfloat16") == 70 * m**3
    assert newton_schulz_flops(m, n, 5, "gram") == 50 * m**3
    # Two blocks compute three quarters of a symmetric product.
    assert newton_schulz_flops(m, n, 5, "standard_symmetric") == 5 * (8 * 1.75 + 1.5) * m**3
    assert newton_schulz_flops(m, n, 5, "gram_symmetric") == (8 * 1.75 + 34 * 0.75) * m**3


def test_block_edges():
    assert block_edges(1, "cpu") == (0, 1)
    assert block_edges(2, "tpu") == (0, 1, 2)
    assert block_edges(33, "gpu") == (0, 17, 33)
    assert block_edges(1024, "cpu") == (0, 512, 1024)
    assert block_edges(4096, "gpu") == (0, 1024, 2048, 3072, 4096)
    assert len(block_edges(16384, "tpu")) == 9
    assert block_edges(9, "cpu") == (0, 5, 9)


@pytest.mark.parametrize(
    ("platform", "m", "n", "expected"),
    [
        ("cpu", 32, 128, "standard"),
        ("cpu", 256, 256, "standard"),
        ("cpu", 256, 384, "standard"),
        ("cpu", 256, 1024, "gram"),
        ("cpu", 1024, 1024, "standard"),
        ("cpu", 4096, 1024, "gram"),
        ("cpu", 2048, 2048, "standard_symmetric"),
        ("cpu", 4096, 2048, "gram_symmetric"),
        ("gpu", 64, 1024, "standard"),
        ("gpu", 1024, 4096, "gram"),
        ("gpu", 4096, 14336, "gram_symmetric"),
        ("tpu", 4096, 4096, "standard_symmetric"),
    ],
)
def test_auto_rule(platform, m, n, expected):
    dtype = {"cpu": "float32", "gpu": "float16", "tpu": "bfloat16"}[platform]
    assert choose_algorithm(m, n, 5, dtype=dtype, platform=platform) == expected


# --- how it compiles


@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS])
def test_same_bits_whatever_the_batch(algorithm):
    x = normal(16, 64, 160)
    f = jax.jit(functools.partial(orthogonalize, algorithm=algorithm))
    stack = np.asarray(f(x))
    np.testing.assert_array_equal(np.concatenate([f(part) for part in np.split(x, 8)]), stack)
    np.testing.assert_array_equal(np.stack([f(matrix) for matrix in x]), stack)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("batching", ["map", "batched"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_memory_does_not_grow_with_steps(algorithm, batching, dtype):
    x = jax.ShapeDtypeStruct((4, 128, 384), jnp.bfloat16)

    def temp_bytes(steps: int) -> int:
        f = functools.partial(
            orthogonalize, steps=steps, batching=batching, algorithm=algorithm, dtype=dtype
        )
        return jax.jit(f).lower(x).compile().memory_analysis().temp_size_in_bytes

    # A few buffers more or less for the last segment; one [m, m] per step would be eight times.
    assert 0 < temp_bytes(40) <= 1.05 * temp_bytes(5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(("name", "dtype"), [("keller", "bfloat16"), ("aol", "float32")])
def test_inside_shard_map(axis_type, algorithm, name, dtype):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(axis_type,))
    spec = P("fsdp", None, None, None)
    x = normal(8, 2, 24, 48)
    local = functools.partial(orthogonalize, algorithm=algorithm, coefficients=name, dtype=dtype)
    f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True))
    sharded = jax.device_put(x, NamedSharding(mesh, spec))
    np.testing.assert_allclose(f(sharded), reference(x, name), rtol=0, atol=ATOL[dtype])
    hlo = f.lower(sharded).compile().as_text()
    assert not re.search(r"all-(gather|reduce|to-all)|collective|reduce-scatter", hlo)


@pytest.mark.parametrize(
    ("platform", "dtype", "products"),
    [("cpu", "f32", 7), ("cuda", "f16", 3), ("rocm", "f16", 3), ("tpu", "bf16", 3)],
)
def test_default_dtype_and_algorithm_follow_the_platform(platform, dtype, products):
    # The Gram form on CPU, where 64 rows are enough for it, and the standard one elsewhere.
    lowered = jax.jit(orthogonalize).trace(normal(3, 64, 256))
    text = lowered.lower(lowering_platforms=(platform,)).as_text()
    found = re.findall(r"dot_general .*\[2\] x \[1\].*x(\w+)>, tensor<.*x(\w+)>\) ->", text)
    found += re.findall(r"dot_general .*\[1\] x \[0\].*x(\w+)>, tensor<.*x(\w+)>\) ->", text)
    assert found == [(dtype, dtype)] * products


@pytest.mark.parametrize("x_dtype", ["float64", "complex64", "complex128"])
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_wide_input_is_never_narrowed(x_dtype, platform):
    with jax.enable_x64(True):
        x = jax.ShapeDtypeStruct((2, 8, 16), x_dtype)
        text = jax.jit(orthogonalize).trace(x).lower(lowering_platforms=(platform,)).as_text()
    assert not re.search(r"x(bf16|f16)>", text)


def test_bad_algorithm():
    with pytest.raises(ValueError, match=r"'gram_symmetric'.*got 'gramm'"):
        orthogonalize(normal(2, 3), algorithm="gramm")  # type: ignore[arg-type]


def test_complex_iteration_dtype_for_complex_matrices():
    with pytest.raises(ValueError, match=r"'complex64'.*for complex64 matrices, got 'float16'"):
        orthogonalize(normal(2, 3).astype(np.complex64), dtype="float16")
