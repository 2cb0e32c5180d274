import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from matrixfsdp_jax.linalg.eigenbasis import EighBasis, QRBasis, eigenbasis
from matrixfsdp_jax.linalg.roots import Perturbation, PseudoInverse
from tests.linalg.test_roots import spd, with_spectrum
from tests.models import make_mesh

AFTER = Perturbation(before=False)
SOLVERS = [EighBasis(), EighBasis(tolerance=0.3), QRBasis(50, tolerance=1e-3)]


def orthogonal(k: int, seed: int = 0) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((k, k)))[0]


def near(a: np.ndarray, angle: float) -> np.ndarray:
    """The eigenvectors of ``a``, the first two turned by an angle, in shuffled order."""
    q = np.linalg.eigh(a)[1]
    c, s = math.cos(angle), math.sin(angle)
    q[:, :2] = q[:, :2] @ np.array([[c, -s], [s, c]])
    return q[:, np.random.default_rng(3).permutation(len(a))]


def off_ratio(a: np.ndarray, q: np.ndarray) -> float:
    b = q.T @ a @ q
    return float(np.linalg.norm(b - np.diag(np.diag(b))) / np.linalg.norm(b))


def qr_oracle(a: np.ndarray, q: np.ndarray, iterations: int, tolerance: float = 0.0):
    """QR steps as they stand: eigenvalues, eigenvectors, and how many steps it took."""
    b, steps = q.T @ a @ q, 0
    while steps < iterations:
        off = b - np.diag(np.diag(b))
        if np.linalg.norm(off) <= tolerance * np.linalg.norm(b):
            break
        new, r = np.linalg.qr(b)
        b, q, steps = r @ new, q @ new, steps + 1
    order = sorted(range(len(b)), key=lambda i: b[i, i])
    return np.diag(b)[order], q[:, order], steps


def assert_orthonormal(q, atol: float) -> None:
    q = np.asarray(q, np.float64)
    np.testing.assert_allclose(q.T @ q, np.eye(len(q)), rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_eigh(dtype, scale):
    eps = np.finfo(dtype).eps
    with jax.enable_x64(dtype == "float64"):
        for condition in (1.0, 30.0, 1e6):
            a = (scale * spd(6, condition)).astype(dtype)
            # A previous basis has no part in it.
            values, q, ok = eigenbasis(a, np.full((6, 6), math.nan, dtype), 0.0, EighBasis())
            assert ok
            assert values.dtype == q.dtype == dtype
            expected = np.linalg.eigvalsh(a.astype(np.float64))
            np.testing.assert_allclose(values, expected, rtol=0, atol=50 * eps * scale)
            assert_orthonormal(q, 50 * eps)
            rebuilt = (np.asarray(q, np.float64) * np.asarray(values)) @ np.asarray(q).T
            np.testing.assert_allclose(rebuilt, a, rtol=0, atol=50 * eps * scale)


@pytest.mark.parametrize("iterations", [1, 2, 7])
@pytest.mark.parametrize("rule", [Perturbation(), AFTER])
def test_qr_steps_are_those_of_the_formulas(iterations, rule):
    """From the identity and from any basis, with the columns sorted as the eigenvalues are."""
    epsilon, solver = 0.125, QRBasis(iterations, rank_deficiency=rule)
    with jax.enable_x64(True):
        for condition, previous in ((4.0, np.eye(6)), (4.0, orthogonal(6)), (1e6, orthogonal(6))):
            a = spd(6, condition, seed=1)
            damped = a + epsilon * np.eye(6) * rule.before
            values, q, ok = eigenbasis(a, previous, epsilon, solver)
            expected, basis, steps = qr_oracle(damped, previous, iterations)
            assert (bool(ok), steps) == (True, iterations)
            np.testing.assert_allclose(values, expected, rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(q, basis, rtol=0, atol=1e-10)
            assert (np.diff(values) >= 0).all()
            # Columns went with their eigenvalues.
            rayleigh = np.diag(np.asarray(q).T @ damped @ np.asarray(q))
            np.testing.assert_allclose(rayleigh, values, rtol=0, atol=1e-13)


@pytest.mark.parametrize("tolerance", [0.2, 1e-2, 1e-6, 1.0])
@pytest.mark.parametrize("iterations", [2, 500])
def test_qr_stops_at_the_tolerance(iterations, tolerance):
    a, previous = spd(5, 20.0, seed=2), orthogonal(5, seed=1)
    with jax.enable_x64(True):
        values, q, ok = eigenbasis(a, previous, 0.0, QRBasis(iterations, tolerance))
        expected, basis, steps = qr_oracle(a, previous, iterations, tolerance)
        assert ok
        assert steps < 500
        assert (steps == 0) == (tolerance == 1.0)
        np.testing.assert_allclose(values, expected, rtol=1e-9)
        np.testing.assert_allclose(q, basis, rtol=0, atol=1e-9)
        assert steps == 2 or off_ratio(a, np.asarray(q)) <= tolerance


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_qr_converges_over_repeated_calls(dtype):
    """With a tolerance: a call that has not met it yet goes on, later ones keep the basis."""
    tolerance = 1e-4
    with jax.enable_x64(dtype == "float64"):
        a = with_spectrum([5.0, 3.0, 2.0, 1.0, 0.5, 0.2]).astype(dtype)
        q, solver = np.eye(6, dtype=dtype), QRBasis(40, tolerance)
        for call in range(4):
            values, new, ok = eigenbasis(a, q, 0.0, solver)
            assert ok
            if call > 1:
                np.testing.assert_array_equal(new, q)
            q = new
        assert off_ratio(a, np.asarray(q)) < 1.1 * tolerance
        # Of second order in the part off the diagonal.
        np.testing.assert_allclose(values, np.linalg.eigvalsh(a), rtol=1e-5)
        assert_orthonormal(q, 100 * np.finfo(dtype).eps)


def test_one_step_per_call_need_not_converge():
    """A weakness of the reference that is kept: see `QRBasis`.

    A step makes entries off the diagonal smaller where eigenvalues descend. Where they were sorted
    to ascend it makes them larger, even if the basis was exact up to rounding.
    """
    a = with_spectrum([5.0, 3.0, 2.0, 1.0, 0.5, 0.2])
    with jax.enable_x64(True):
        q = expected = np.eye(6)
        for _ in range(12):
            _, q, ok = eigenbasis(a, q, 0.0, QRBasis())
            _, expected, _ = qr_oracle(a, expected, 1)
            assert ok
            np.testing.assert_allclose(q, expected, rtol=0, atol=1e-9)
        assert off_ratio(a, np.asarray(q)) > 0.3
        q = np.linalg.eigh(a)[1]
        for _ in range(40):
            _, q, _ = eigenbasis(a, q, 0.0, QRBasis())
        assert off_ratio(a, np.asarray(q)) > 0.1
    # Columns stay orthonormal all the same.
    for _ in range(300):
        _, q, ok = eigenbasis(a.astype(np.float32), q.astype(np.float32), 0.0, QRBasis())
    assert ok
    assert_orthonormal(q, 300 * np.finfo(np.float32).eps)


@pytest.mark.parametrize("solver", [QRBasis(), QRBasis(5, tolerance=0.1)])
def test_sort_is_stable(solver):
    """A diagonal matrix takes no step; equal eigenvalues keep the order of their columns."""
    values, q, ok = eigenbasis(
        np.diag(np.float32([2, 1, 2, 1, 0, 1])), np.eye(6, dtype=np.float32), 0.0, solver
    )
    assert ok
    np.testing.assert_array_equal(values, [0, 1, 1, 1, 2, 2])
    np.testing.assert_array_equal(q, np.eye(6)[:, [4, 1, 3, 5, 0, 2]])


def test_basis_of_a_diagonal_matrix():
    a, eye = np.diag(np.float32([3, 1, 2])), np.eye(3, dtype=np.float32)
    values, q, ok = eigenbasis(a, eye, 0.5, EighBasis())
    assert ok
    np.testing.assert_allclose(values, [1.5, 2.5, 3.5], rtol=1e-6)
    np.testing.assert_allclose(np.abs(q), eye[:, [1, 2, 0]], atol=1e-6)
    # Here the test sees a diagonal matrix: the identity stays, and its order.
    values, q, ok = eigenbasis(a, eye, 0.5, EighBasis(tolerance=1e-9))
    assert ok
    np.testing.assert_array_equal(values, np.float32([3.5, 1.5, 2.5]))
    np.testing.assert_array_equal(q, eye)


@pytest.mark.parametrize("solver", [*SOLVERS, QRBasis()])
def test_zero_and_one_by_one(solver):
    zero, eye = np.zeros((3, 3), np.float32), np.eye(3, dtype=np.float32)
    values, q, ok = eigenbasis(zero, eye, 0.0, solver)
    assert ok
    np.testing.assert_array_equal(values, [0, 0, 0])
    np.testing.assert_array_equal(q, eye)
    values, q, ok = eigenbasis(np.float32([[2.0]]), np.float32([[-1.0]]), 0.25, solver)
    assert ok
    np.testing.assert_array_equal(values, [2.25])
    np.testing.assert_array_equal(np.abs(q), [[1.0]])


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("make", [EighBasis, QRBasis])
def test_tolerance_is_relative(make, scale):
    """The previous basis stays up to the tolerance and not above it, whatever the scale."""
    a = spd(5, 20.0, seed=4)
    previous = near(a, 0.3)
    ratio = off_ratio(a, previous)
    assert 1e-3 < ratio < 0.1
    a, previous = (scale * a).astype(np.float32), previous.astype(np.float32)
    kept = np.diag(previous.T.astype(np.float64) @ a @ previous) / scale
    order = np.argsort(kept)
    for factor, skips in ((1.01, True), (0.99, False)):
        values, q, ok = eigenbasis(a, previous, 0.0, make(tolerance=factor * ratio))
        assert ok
        if skips and make is EighBasis:  # not even sorted
            assert (order != np.arange(5)).any()
            np.testing.assert_allclose(np.asarray(values) / scale, kept, rtol=1e-5)
            np.testing.assert_array_equal(q, previous)
        elif skips:
            np.testing.assert_allclose(np.asarray(values) / scale, kept[order], rtol=1e-5)
            np.testing.assert_array_equal(q, previous[:, order])
        else:
            assert off_ratio(a.astype(np.float64) / scale, np.asarray(q)) < 0.9 * ratio


def test_small_tolerance_is_not_lost_to_rounding():
    """A difference of squares would give 0 or NaN for a part off the diagonal of 1e-5."""
    a = with_spectrum([4.0, 3.0, 2.0, 1.0], np.eye(4)).astype(np.float32)
    a[0, 1] = a[1, 0] = 1e-5
    eye = np.eye(4, dtype=np.float32)
    ratio = math.sqrt(2e-10 / 30)
    for factor, skips in ((1.01, True), (0.99, False)):
        _, q, ok = eigenbasis(a, eye, 0.0, EighBasis(tolerance=factor * ratio))
        assert ok
        assert np.array_equal(q, eye) == skips


def test_where_epsilon_goes():
    a, eye = with_spectrum([2.0, 1.0, 0.0]), np.eye(3)
    with jax.enable_x64(True):
        for make in (EighBasis, functools.partial(QRBasis, 100)):
            for rule, epsilon, first in (
                (Perturbation(), 0.25, 0.25),
                (AFTER, 0.25, 0.0),
                (PseudoInverse(), 0.0, 0.0),
            ):
                values, _, ok = eigenbasis(a, eye, epsilon, make(rank_deficiency=rule))
                assert ok
                np.testing.assert_allclose(values, [first, first + 1, first + 2], atol=1e-12)


@pytest.mark.parametrize("solver", SOLVERS)
def test_non_finite_is_not_ok_and_touches_nothing_else(solver):
    a = np.stack([spd(20, 5.0, seed=s) for s in range(4)]).astype(np.float32)
    previous = np.stack([orthogonal(20, seed=s) for s in range(4)]).astype(np.float32)
    one = jax.jit(lambda p: jax.lax.map(lambda x: eigenbasis(*x, 0.0, solver), p))
    good = one((a, previous))
    a[1, 3, 5] = a[1, 5, 3] = math.nan
    a[2, 3, 5] = a[2, 5, 3] = math.inf
    previous[3, 0, 0] = math.nan
    values, q, ok = one((a, previous))
    unused = solver == EighBasis()
    np.testing.assert_array_equal(ok, [True, False, False, unused])
    np.testing.assert_array_equal(values[0], good[0][0])
    np.testing.assert_array_equal(q[0], good[1][0])


@pytest.mark.parametrize("solver", SOLVERS)
def test_jit_or_not(solver, compilations):
    """Equal options are one program; another jit around it changes no bit, and none no value."""
    a, previous = spd(5, 20.0, seed=5).astype(np.float32), orthogonal(5).astype(np.float32)
    out = eigenbasis(a, previous, 1e-3, solver)
    known = len(compilations)
    eigenbasis(a + 1, previous, 1e-3, type(solver)(**vars(solver)))
    assert len(compilations) == known
    outer = jax.jit(lambda a: eigenbasis(a, previous, 1e-3, solver))
    for inner, wrapped in zip(out, outer(a), strict=True):
        np.testing.assert_array_equal(wrapped, inner)
    with jax.disable_jit():
        bare = eigenbasis(a, previous, 1e-3, solver)
    for inner, unjitted in zip(out, bare, strict=True):
        np.testing.assert_allclose(unjitted, inner, rtol=0, atol=1e-5)


@pytest.mark.parametrize("solver", SOLVERS)
def test_x64_mode_does_not_widen_float32(solver):
    a, previous = spd(5, 20.0, seed=5).astype(np.float32), orthogonal(5).astype(np.float32)
    narrow = eigenbasis(a, previous, 1e-3, solver)
    with jax.enable_x64(True):
        out = eigenbasis(a, previous, 1e-3, solver)
    assert [x.dtype for x in out] == [jnp.float32, jnp.float32, jnp.bool_]
    for x, y in zip(out, narrow, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("shared", ["nothing", "previous", "matrix"])
def test_in_shard_map(solver, shared):
    """Each device has other matrices, so other numbers of steps, or one of the two is the same."""
    a = np.stack([spd(5, c, seed=6) for c in (1.5, 200.0)]).astype(np.float32)
    previous = np.stack([near(a[0], 0.02), orthogonal(5)]).astype(np.float32)
    if shared == "previous":
        previous = previous[0]
    if shared == "matrix":
        a = a[0]
    specs = tuple(jax.P() if x.ndim == 2 else jax.P("fsdp") for x in (a, previous))

    def one(a, previous):
        a, previous = (x if x.ndim == 2 else x[0] for x in (a, previous))
        return jax.tree.map(lambda x: x[None], eigenbasis(a, previous, 1e-3, solver))

    # Plain eigh of a matrix that is the same everywhere is the same everywhere.
    varies = not (solver == EighBasis() and shared == "matrix")
    out = jax.P("fsdp") if varies else jax.P()
    run = jax.shard_map(one, mesh=make_mesh(2, explicit=False), in_specs=specs, out_specs=out)
    results = jax.jit(run)(a, previous)
    for i in range(2 if varies else 1):
        alone = eigenbasis(*(x if x.ndim == 2 else x[i] for x in (a, previous)), 1e-3, solver)
        assert alone[2]
        for sharded, single in zip(results, alone, strict=True):
            np.testing.assert_array_equal(sharded[i], single)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EighBasis(tolerance=1.5), r"\[0, 1\], got 1.5"),
        (lambda: EighBasis(tolerance=-0.1), "tolerance .* got -0.1"),
        (lambda: EighBasis(rank_deficiency=0.1), "rank_deficiency .* got 0.1"),
        (lambda: QRBasis(0), "max_iterations .* got 0"),
        (lambda: QRBasis(tolerance=math.nan), "tolerance .* got nan"),
        (lambda: QRBasis(rank_deficiency=None), "rank_deficiency .* got None"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("a", "previous", "epsilon", "solver", "error", "message"),
    [
        ((2, 3), (2, 3), 0.0, QRBasis(), ValueError, r"got shape \(2, 3\)"),
        ((2, 2), (3, 3), 0.0, QRBasis(), ValueError, r"previous .* got shape \(3, 3\)"),
        ((2, 2), (2, 2), -1.0, EighBasis(), ValueError, "epsilon .* got -1.0"),
        (
            (2, 2),
            (2, 2),
            1e-12,
            QRBasis(rank_deficiency=PseudoInverse()),
            ValueError,
            "exactly 0 with PseudoInverse, got 1e-12",
        ),
        ((2, 2), (2, 2), 0.0, "qr", TypeError, "got 'qr'"),
    ],
)
def test_bad_arguments(a, previous, epsilon, solver, error, message):
    with pytest.raises(error, match=message):
        eigenbasis(np.ones(a, np.float32), np.ones(previous, np.float32), epsilon, solver)


def test_bad_dtypes():
    a = np.eye(2, dtype=np.float32)
    with pytest.raises(TypeError, match="got dtype bfloat16"):
        eigenbasis(jnp.asarray(a, jnp.bfloat16), a, 0.0, QRBasis())
    with pytest.raises(TypeError, match=r"previous must be float32 .* got dtype float16"):
        eigenbasis(a, a.astype(np.float16), 0.0, QRBasis())
