import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from matrixfsdp_jax.linalg.coefficients import newton_schulz_table
from matrixfsdp_jax.linalg.orthogonalize import orthogonalize
from tests import oracle

SHAPES = [(8, 16), (16, 8), (32, 32), (24, 100), (1, 9), (9, 1), (1, 1)]
BATCHINGS = ["map", "batched"]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def reference(x: jax.typing.ArrayLike, table=oracle.KELLER) -> np.ndarray:
    """The same schedule in float64, matrix by matrix."""
    flat = np.asarray(x, np.float64).reshape(-1, *x.shape[-2:])
    return np.stack([oracle.newton_schulz(m, table) for m in flat]).reshape(x.shape)


def assert_near(actual: jax.Array, expected: np.ndarray, atol: float) -> None:
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=0, atol=atol)


# --- coefficient tables


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_table_takes_first_rows_and_repeats_the_last(steps):
    rows = [(4.0, -6.0, 2.0), (3.0, -3.0, 1.0), (2, -1.5, 0.5)]
    expected = tuple((rows + [rows[-1]] * 4)[:steps])
    assert newton_schulz_table(rows, steps) == expected
    assert newton_schulz_table(np.array(rows), steps) == expected
    assert newton_schulz_table("keller", steps) == oracle.KELLER[:1] * steps


@pytest.mark.parametrize("steps", [0, -1, 51, 100])
def test_steps_out_of_range(steps):
    with pytest.raises(ValueError, match=rf"\[1, 50\], got {steps}"):
        orthogonalize(normal(2, 3), steps=steps)


@pytest.mark.parametrize("steps", [5.0, True, "5", None])
def test_steps_of_wrong_type(steps):
    with pytest.raises(TypeError, match=rf"steps must be a Python int.*{steps!r}"):
        orthogonalize(normal(2, 3), steps=steps)


@pytest.mark.parametrize(
    "rows", [[], (3.4, -4.7, 2.0), [(1.0, 2.0)], [(1.0, 2.0, math.nan)], [(1, 2, math.inf)], 3.0]
)
def test_bad_rows(rows):
    with pytest.raises(ValueError, match="three finite floats") as error:
        newton_schulz_table(rows)
    assert repr(rows) in str(error.value)
    assert "'keller'" in str(error.value)


def test_unknown_table():
    with pytest.raises(ValueError, match=r"'kelvin'.*'keller'"):
        orthogonalize(normal(2, 3), coefficients="kelvin")


# --- against the same schedule in float64


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_float32(shape, batching):
    x = normal(2, 3, *shape)
    out = orthogonalize(x, batching=batching)
    assert out.dtype == jnp.float32
    assert_near(out, reference(x), 1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_float64(shape):
    with jax.enable_x64(True):
        x = normal(2, *shape).astype(np.float64)
        for scale in (1e-300, 1.0, 1e300):
            out = orthogonalize(x * scale, eps=1e-30)
            assert out.dtype == jnp.float64
            assert_near(out, reference(x), 1e-13)


@pytest.mark.parametrize(
    ("x_dtype", "dtype", "atol"),
    [
        # One rounding of the result, at most 1.21 in size: half a unit in the last place.
        ("bfloat16", None, 2**-8),
        ("float16", None, 2**-11),
        ("float8_e4m3fn", None, 2**-4),
        # Rounding after every product, carried through five steps.
        ("float32", "float16", 5e-3),
        ("float32", "bfloat16", 4e-2),
        ("bfloat16", "bfloat16", 4e-2),
    ],
)
def test_narrow_dtypes(x_dtype, dtype, atol):
    for shape in [(32, 32), (16, 64), (64, 16)]:
        x = jnp.asarray(normal(3, *shape), x_dtype)
        out = orthogonalize(x, dtype=dtype)
        assert out.dtype == x.dtype
        assert_near(out, reference(x), atol)


def test_wider_iteration_than_input():
    x = normal(16, 32)
    with jax.enable_x64(True):
        out = orthogonalize(x, dtype="float64")
    assert out.dtype == jnp.float32
    assert_near(out, reference(x), 2e-7)


@pytest.mark.parametrize("steps", [1, 2, 5, 8])
def test_own_table(steps):
    rows = [(4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (2.0, -1.5, 0.5)]
    x = normal(2, 12, 20)
    expected = reference(x, newton_schulz_table(rows, steps))
    assert_near(orthogonalize(x, coefficients=rows, steps=steps), expected, 1e-5)


def test_converging_table_reaches_the_polar_factor():
    # Holds both sides against a third: classic quintic, 25 steps.
    x, rows = normal(12, 20), [(15 / 8, -10 / 8, 3 / 8)]
    expected = oracle.polar(x)
    np.testing.assert_allclose(oracle.newton_schulz(x, rows * 25), expected, atol=1e-12)
    assert_near(orthogonalize(x, coefficients=rows, steps=25), expected, 1e-5)


@pytest.mark.parametrize("batching", BATCHINGS)
def test_tall_is_the_transpose_of_wide(batching):
    x = normal(3, 16, 48)
    wide = orthogonalize(x, batching=batching)
    tall = orthogonalize(x.swapaxes(-1, -2), batching=batching)
    np.testing.assert_array_equal(tall, wide.swapaxes(-1, -2))


def test_rank_one():
    x = np.outer(normal(24), normal(40))
    out = orthogonalize(x)
    assert_near(out, reference(x), 1e-5)
    assert np.linalg.matrix_rank(out, tol=1e-4) == 1


# --- scale, zeros, non-finite values


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-10, 1e-8, 1.0, 1e10, 1e20, 1e30])
@pytest.mark.parametrize("shape", [(8, 16), (1, 1)])
def test_any_scale(shape, scale):
    x = normal(2, *shape) * np.float32(scale)
    assert_near(orthogonalize(x), reference(x), 1e-5)


@pytest.mark.parametrize("exponent", [-126, -100, 100, 126, 127])
def test_powers_of_two_change_no_bit(exponent):
    for shape in [(8, 16), (1, 5), (1, 1)]:
        x = np.sign(normal(2, *shape))
        scaled = np.ldexp(x, exponent).astype(np.float32)
        np.testing.assert_array_equal(orthogonalize(scaled), orthogonalize(x))


@pytest.mark.parametrize("scale", [1e-4, 1e3, 3e4])
def test_float16_range(scale):
    x = jnp.asarray(np.clip(normal(8, 16), -2, 2) * scale, jnp.float16)
    assert_near(orthogonalize(x), reference(x), 2**-11)
    assert_near(orthogonalize(x, dtype="float16"), reference(x), 5e-3)


def test_subnormal_is_finite():
    # Zero where XLA flushes subnormal numbers, orthogonal where it does not.
    out = np.asarray(orthogonalize(np.full((2, 3), 1e-40, np.float32)))
    assert not out.any() or np.allclose(out, reference(np.ones((2, 3))), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(8, 16), (1, 1), (64, 1)])
def test_zero_gives_exact_zero(shape, dtype):
    for eps in (1e-8, 1e-42):  # the second is subnormal in float32
        out = orthogonalize(jnp.zeros((2, *shape), dtype), dtype=dtype, eps=eps)
        np.testing.assert_array_equal(np.asarray(out, np.float32), 0)


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_stays_in_its_matrix(bad, batching):
    x = normal(4, 8, 16)
    expected = np.asarray(orthogonalize(x, batching=batching))
    x[2, 3, 5] = bad
    out = np.asarray(orthogonalize(x, batching=batching))
    assert np.isnan(out[2]).all()
    np.testing.assert_array_equal(np.delete(out, 2, 0), np.delete(expected, 2, 0))


def test_eps_is_relative_to_the_largest_entry():
    # The largest entry 4 is scaled to 1, the norm 5 to 5/4.
    x = np.array([[3.0, 0.0], [0.0, 4.0]])
    small = orthogonalize((x * 2.0**-80).astype(np.float32), eps=0.25, steps=1)
    expected = oracle.newton_schulz(x / 4, oracle.KELLER[:1], eps=0.25)
    assert_near(small, expected, 1e-6)


# --- how it compiles


@pytest.mark.parametrize("shape", [(32, 32), (64, 32), (96, 160)])
def test_same_bits_whatever_the_batch(shape):
    x = normal(72, *shape)
    f = jax.jit(orthogonalize)
    stack = np.asarray(f(x))
    np.testing.assert_array_equal(np.concatenate([f(part) for part in np.split(x, 8)]), stack)
    np.testing.assert_array_equal(f(x.reshape(8, 9, *shape)).reshape(x.shape), stack)
    np.testing.assert_array_equal(np.stack([f(matrix) for matrix in x]), stack)
    np.testing.assert_array_equal(orthogonalize(x), stack)


@pytest.mark.parametrize("shape", [(32, 32), (8, 8), (32, 31), (64, 32)])
def test_same_bits_whatever_the_caller_computes_around_it(shape):
    # A batch of one has no loop that would keep XLA from fusing the caller's arithmetic into it.
    def step(momentum, gradient):
        averaged = 0.95 * momentum + 0.05 * gradient
        return momentum - 0.02 * orthogonalize(0.95 * averaged + 0.05 * gradient)

    momentum, gradient = normal(3, *shape), normal(3, *shape, seed=1)
    f = jax.jit(step)
    alone = [f(m[None], g[None]) for m, g in zip(momentum, gradient, strict=True)]
    np.testing.assert_array_equal(np.concatenate(alone), f(momentum, gradient))


@pytest.mark.parametrize("batching", BATCHINGS)
def test_memory_does_not_grow_with_steps(batching):
    x = jax.ShapeDtypeStruct((4, 128, 384), jnp.bfloat16)

    def temp_bytes(steps: int) -> int:
        f = jax.jit(functools.partial(orthogonalize, steps=steps, batching=batching))
        return f.lower(x).compile().memory_analysis().temp_size_in_bytes

    assert 0 < temp_bytes(10) <= 1.05 * temp_bytes(5)


@pytest.mark.parametrize("batching", ["auto", *BATCHINGS])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_inside_shard_map(axis_type, batching):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(axis_type,))
    spec = P("fsdp", None, None, None)
    x = normal(8, 3, 32, 64)
    local = functools.partial(orthogonalize, batching=batching)
    f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True))
    sharded = jax.device_put(x, NamedSharding(mesh, spec))
    out = f(sharded)
    assert out.sharding.spec == spec
    if batching == "batched":
        assert_near(out, reference(x), 1e-5)
    else:
        np.testing.assert_array_equal(out, jax.jit(local)(x))
    hlo = f.lower(sharded).compile().as_text()
    assert not re.search(r"all-(gather|reduce|to-all)|collective|reduce-scatter", hlo)


@pytest.mark.parametrize(
    ("platform", "loops"),
    # One loop over matrices around one over steps; or the one over steps alone.
    [("cpu", 2), ("tpu", 1), ("cuda", 1)],
)
def test_auto_follows_the_platform_it_is_lowered_for(platform, loops):
    traced = jax.jit(orthogonalize).trace(normal(3, 8, 16))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("stablehlo.while") == loops


def test_auto_leaves_no_branch_in_the_program():
    compiled = jax.jit(orthogonalize).lower(normal(3, 8, 16)).compile()
    assert "conditional(" not in compiled.as_text()


@pytest.mark.parametrize(("dtype", "highest"), [("float32", 4), ("bfloat16", 1)])
def test_float32_products_do_not_round_their_operands(dtype, highest):
    f = functools.partial(orthogonalize, dtype=dtype, batching="batched")
    with jax.default_matmul_precision("bfloat16"):
        text = jax.jit(f).lower(normal(3, 8, 16)).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 4  # the norm, always in float32, and three of a step
    assert sum("HIGHEST" in line for line in products) == highest
    assert all(line.rstrip().endswith("f32>") for line in products)


def test_vmap_and_eval_shape():
    x = normal(4, 3, 8, 16)
    assert_near(jax.vmap(orthogonalize)(x), reference(x), 1e-5)
    out = jax.eval_shape(orthogonalize, jax.ShapeDtypeStruct((0, 16, 8), jnp.bfloat16))
    assert (out.shape, out.dtype) == ((0, 16, 8), jnp.bfloat16)


@pytest.mark.parametrize("batching", ["auto", *BATCHINGS])
def test_empty_batch(batching):
    assert orthogonalize(jnp.zeros((2, 0, 4, 6)), batching=batching).shape == (2, 0, 4, 6)


def test_strict_dtype_promotion_and_traced_eps():
    x = jnp.asarray(normal(3, 8, 16), jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        out = jax.jit(lambda x, eps: orthogonalize(x, eps=eps, dtype="float16"))(x, 1e-8)
    assert_near(out, reference(x), 2e-2)


# --- errors


@pytest.mark.parametrize("eps", [0, -1.0, math.nan, math.inf])
def test_bad_eps(eps):
    with pytest.raises(ValueError, match=f"eps must be positive and finite, got {eps}"):
        orthogonalize(normal(2, 3), eps=eps)


@pytest.mark.parametrize("shape", [(), (3,), (0, 3), (4, 3, 0)])
def test_bad_shape(shape):
    with pytest.raises(ValueError, match=re.escape(f"got shape {shape}")):
        orthogonalize(np.zeros(shape, np.float32))


@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_bad_input_dtype(dtype):
    with pytest.raises(TypeError, match=f"floating or complex, got dtype {dtype}"):
        orthogonalize(np.zeros((2, 3), dtype))


@pytest.mark.parametrize("dtype", ["int32", "float8_e4m3fn", "complex64"])
def test_bad_iteration_dtype(dtype):
    with pytest.raises(ValueError, match=f"got '{dtype}'"):
        orthogonalize(normal(2, 3), dtype=dtype)


def test_float64_iteration_without_x64():
    with pytest.raises(ValueError, match="'float64' needs JAX's x64 mode"):
        orthogonalize(normal(2, 3), dtype="float64")


def test_bad_batching():
    with pytest.raises(ValueError, match="'loop'"):
        orthogonalize(normal(2, 3), batching="loop")
