import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from matrixfsdp_jax.linalg import roots
from matrixfsdp_jax.linalg.roots import (
    CoupledHigherOrderRoot,
    CoupledNewtonRoot,
    EighRoot,
    Perturbation,
    PseudoInverse,
    eigenvalue_powers,
    inverse_root,
)
from tests.models import make_mesh

EXPONENTS = [1 / 2, 1 / 4, 1 / 6, 1 / 3, 0.2, 0.4, 1.0]
NEWTON = CoupledNewtonRoot(tolerance=1e-12)
HIGHER = CoupledHigherOrderRoot(tolerance=1e-12)
SOLVERS = [EighRoot(), NEWTON, HIGHER]
AFTER = Perturbation(before=False)


def spd(k: int, condition: float, seed: int = 0) -> np.ndarray:
    """Symmetric float64 with eigenvalues from 1 down to 1 / condition, in random directions."""
    q = np.linalg.qr(np.random.default_rng(seed).standard_normal((k, k)))[0]
    return with_spectrum(np.geomspace(1, 1 / condition, k), q)


def with_spectrum(values, q: np.ndarray | None = None) -> np.ndarray:
    if q is None:
        q = np.linalg.qr(np.random.default_rng(7).standard_normal((len(values),) * 2))[0]
    a = (q * np.asarray(values, np.float64)) @ q.T
    return (a + a.T) / 2


def exact_root(a: np.ndarray, exponent: float, ridge: float = 0.0) -> np.ndarray:
    values, q = np.linalg.eigh(np.asarray(a, np.float64) + ridge * np.eye(len(a)))
    return (q * values**-exponent) @ q.T


def power_table(values, exponent: float, epsilon: float, rule) -> np.ndarray:
    """The two rules, eigenvalue by eigenvalue."""
    values = [float(v) for v in values]
    if isinstance(rule, PseudoInverse):
        eps = np.finfo(np.float64).eps
        rtol = len(values) * eps if rule.rank_rtol is None else rule.rank_rtol
        cut = max(rtol * max(values), rule.rank_atol)
        return np.array([0.0 if v <= cut else v**-exponent for v in values])
    low = min(values)
    if not rule.before:
        values = [v - min(low, 0.0) + epsilon for v in values]
    elif low < epsilon:
        values = [v - low + epsilon for v in values]
    return np.array([v**-exponent for v in values])


def newton_oracle(a: np.ndarray, p: int, iterations: int, tolerance: float):
    """The coupled Newton iteration as it stands: root, and how many steps it took."""
    identity = np.eye(len(a))
    z = (p + 1) / (2 * np.linalg.norm(a))
    x, m, steps = z ** (1 / p) * identity, z * a, 0
    while np.abs(m - identity).max() > tolerance and steps < iterations:
        factor = (1 + 1 / p) * identity - m / p
        x, m, steps = x @ factor, np.linalg.matrix_power(factor, p) @ m, steps + 1
    return x, steps


def higher_order_oracle(a: np.ndarray, exponent: float, solver: CoupledHigherOrderRoot):
    """The coupled iteration of any order: root (None if refused), and how many steps it took."""
    p, q = Fraction(1 / exponent).as_integer_ratio()
    identity = np.eye(len(a))
    a = a + max(solver.rel_epsilon * np.abs(a).sum(1).max(), solver.abs_epsilon) * identity
    # Binomial series of (1 - t)^(-1/p).
    b = [1.0]
    for i in range(1, solver.order):
        b.append(b[-1] * (1 / p + i - 1) / i)
    z = 1 / np.trace(a)
    x, m = z ** (1 / p) * identity, z * a
    error, steps, stop = math.inf, 0, False
    while steps == 0 or (error > solver.tolerance and steps < solver.max_iterations and not stop):
        t = identity - m
        terms = b[:2] if steps == 0 else b
        factor = sum(c * np.linalg.matrix_power(t, i) for i, c in enumerate(terms))
        x, m = x @ factor, np.linalg.matrix_power(factor, p) @ m
        new = np.abs(m - identity).max()
        stop = steps > 0 and bool(new > 1.2 * error or (new == error and error < 1e-3))
        error, steps = new, steps + 1
    good = np.abs(a @ np.linalg.matrix_power(x, p) - identity).max() <= 0.1
    return (np.linalg.matrix_power(x, q) if good else None), steps


def relative(root, expected: np.ndarray) -> float:
    return float(np.abs(np.asarray(root, np.float64) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_eigh_root(exponent, dtype):
    with jax.enable_x64(dtype == "float64"):
        for condition in (1.0, 30.0, 1e3 if dtype == "float32" else 1e8):
            a = spd(6, condition).astype(dtype)
            epsilon = 0.0 if dtype == "float32" else 1e-3
            root, ok = inverse_root(a, exponent, epsilon)
            assert ok
            assert root.dtype == dtype
            bound = 20 * condition * np.finfo(dtype).eps
            assert relative(root, exact_root(a, exponent, epsilon)) < bound


@pytest.mark.parametrize(
    ("exponent", "order"), [*zip(EXPONENTS, [2, 3, 4, 5, 2, 3, 4], strict=True)]
)
def test_all_solvers_agree_and_invert(exponent, order):
    epsilon = 1e-3
    with jax.enable_x64(True):
        for condition in (3.0, 1e4):
            a = spd(6, condition, seed=1)
            damped = a + epsilon * np.eye(6)
            expected = exact_root(a, exponent, epsilon)
            higher = CoupledHigherOrderRoot(0.0, epsilon, tolerance=1e-12, order=order)
            for solver in (EighRoot(), NEWTON, higher):
                if solver == NEWTON and not (1 / exponent).is_integer():
                    continue
                root, ok = inverse_root(a, exponent, epsilon, solver)
                assert ok
                assert relative(root, expected) < 1e-10
                p, q = Fraction(1 / exponent).as_integer_ratio()
                power = functools.partial(np.linalg.matrix_power, np.asarray(root))
                # root = D^(-q/p), so root^p D^q = I.
                identity = power(p) @ np.linalg.matrix_power(damped, q)
                np.testing.assert_allclose(identity, np.eye(6), atol=1e-9)


@pytest.mark.parametrize("exponent", [1.0, 0.25, 0.4])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_float32_at_any_scale(exponent, scale):
    """The coupled iterations at their default tolerances, which float32 does not always reach."""
    a = spd(6, 30.0, seed=2)
    expected = exact_root(a, exponent) * scale**-exponent
    for solver in (EighRoot(), CoupledNewtonRoot(), CoupledHigherOrderRoot()):
        if isinstance(solver, CoupledNewtonRoot) and exponent == 0.4:
            continue
        root, ok = inverse_root((scale * a).astype(np.float32), exponent, 0.0, solver)
        assert ok
        assert root.dtype == jnp.float32
        assert relative(root, expected) < 2e-4


@pytest.mark.parametrize("rule", [Perturbation(), AFTER])
def test_rank_deficient_is_damped(rule):
    """Rank 2 of 5, and an indefinite matrix, whose smallest eigenvalue becomes epsilon."""
    with jax.enable_x64(True):
        root, ok = inverse_root(with_spectrum([2, 1, 0, 0, 0]), 0.5, 1e-4, EighRoot(rule))
        assert ok
        expected = with_spectrum(np.array([2.0001, 1.0001, 1e-4, 1e-4, 1e-4]) ** -0.5)
        assert relative(root, expected) < 1e-10
        root, ok = inverse_root(with_spectrum([3, 1, 0, -0.5]), 0.5, 0.25, EighRoot(rule))
        assert ok
        expected = with_spectrum(np.array([3.75, 1.75, 0.75, 0.25]) ** -0.5)
        assert relative(root, expected) < 1e-12


@pytest.mark.parametrize(
    "rule", [PseudoInverse(rank_rtol=1e-9), PseudoInverse(1e-9), PseudoInverse(rank_rtol=None)]
)
def test_rank_deficient_pseudo_inverse(rule):
    with jax.enable_x64(True):
        a = with_spectrum([4, 1, 0, 0])
        root, ok = inverse_root(a, 0.5, 0.0, EighRoot(rule))
        assert ok
        np.testing.assert_allclose(root, with_spectrum([0.5, 1, 0, 0]), rtol=0, atol=1e-12)
        np.testing.assert_allclose(root @ root @ a @ root @ root, root @ root, atol=1e-12)


@pytest.mark.parametrize(
    ("rule", "epsilon"),
    [
        (Perturbation(), 0.5),
        (Perturbation(), 1e-6),
        (AFTER, 0.5),
        (PseudoInverse(), 0.0),
        (PseudoInverse(rank_atol=0.5), 0.0),
        (PseudoInverse(rank_rtol=0.3), 0.0),
        (PseudoInverse(rank_atol=0.9, rank_rtol=0.3), 0.0),
        (PseudoInverse(rank_rtol=None), 0.0),
    ],
)
@pytest.mark.parametrize("exponent", [0.5, 1.0, 0.2])
def test_eigenvalue_powers(rule, epsilon, exponent):
    """Unsorted too; with the smallest at, above and below epsilon and 0; a batch is row by row."""
    rows = [[0.5, 3.0, 2.0], [0.7, 0.6, 4.0], [-0.25, 1.0, 0.5], [0.0, 3e-16, 1.0], [-3, -2, -1]]
    if isinstance(rule, Perturbation):
        rows.append([0.0, 0.0, 0.0])
    with jax.enable_x64(True):
        out = eigenvalue_powers(jnp.asarray(rows), exponent, epsilon, rule)
        expected = [power_table(row, exponent, epsilon, rule) for row in rows]
        np.testing.assert_allclose(out, expected, rtol=1e-14)
        alone = eigenvalue_powers(jnp.asarray(rows[2]), exponent, epsilon, rule)
        np.testing.assert_allclose(alone, expected[2], rtol=1e-14)


def test_perturbed_eigenvalues_are_not_damped_twice():
    """Those above epsilon stay; the other rule adds epsilon to all."""
    values = jnp.array([0.25, 1.0])
    np.testing.assert_allclose(eigenvalue_powers(values, 0.5, 0.25, Perturbation()), [2.0, 1.0])
    np.testing.assert_allclose(eigenvalue_powers(values, 1.0, 0.25, AFTER), [2.0, 0.8], rtol=1e-6)


def test_zero_matrix():
    zero = np.zeros((3, 3), np.float32)
    for solver in (EighRoot(), EighRoot(AFTER), CoupledNewtonRoot()):
        root, ok = inverse_root(zero, 0.5, 1e-4, solver)
        assert ok
        np.testing.assert_allclose(root, 100 * np.eye(3), rtol=1e-5, atol=1e-3)
        assert not inverse_root(zero, 0.5, 0.0, solver)[1]
    root, ok = inverse_root(zero, 0.5, 0.0, CoupledHigherOrderRoot(abs_epsilon=1e-4))
    assert ok
    np.testing.assert_allclose(root, 100 * np.eye(3), rtol=1e-5, atol=1e-3)
    # A relative ridge of zero is none, and epsilon has no part in this solver.
    assert not inverse_root(zero, 0.5, 1e-4, CoupledHigherOrderRoot(rel_epsilon=0.1))[1]
    root, ok = inverse_root(zero, 0.5, 0.0, EighRoot(PseudoInverse(rank_rtol=None)))
    assert ok
    np.testing.assert_array_equal(root, zero)


@pytest.mark.parametrize("solver", [*SOLVERS, EighRoot(PseudoInverse())])
def test_one_by_one_and_diagonal(solver):
    with jax.enable_x64(True):
        root, ok = inverse_root(np.array([[0.0625]]), 0.25, 0.0, solver)
        assert ok
        np.testing.assert_allclose(root, [[2.0]], rtol=1e-12)
        values = np.array([9.0, 1.0, 16.0, 1.0, 4.0])
        root, ok = inverse_root(np.diag(values), 0.5, 0.0, solver)
        assert ok
        np.testing.assert_allclose(root, np.diag(values**-0.5), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("order", "iterations"), [(2, 1), (3, 2), (4, 4), (5, 100), (3, 100)])
def test_coupled_iterates_step_by_step(monkeypatch, order, iterations):
    """The same iterates and number of steps as the formulas, stopped early or by the tolerance."""
    a, steps = spd(5, 40.0, seed=3), []
    step = roots._step
    monkeypatch.setattr(roots, "_step", lambda *args, **kw: steps.append(1) or step(*args, **kw))
    with jax.enable_x64(True), jax.disable_jit():
        expected, count = newton_oracle(a + 0.01 * np.eye(5), 3, iterations, 1e-6)
        root, ok = inverse_root(a, 1 / 3, 0.01, CoupledNewtonRoot(iterations))
        assert ok, "a root that max_iterations stopped is not a failure"
        assert (relative(root, expected) < 1e-12, len(steps)) == (True, count)
        steps.clear()
        solver = CoupledHigherOrderRoot(0.02, 0.001, iterations, order=order)
        expected, count = higher_order_oracle(a, 0.4, solver)
        root, ok = inverse_root(a, 0.4, 0.5, solver)
        assert (bool(ok), len(steps)) == (expected is not None, count)
        assert not ok or relative(root, expected) < 1e-12


def test_ridge_is_the_larger_one():
    with jax.enable_x64(True):
        a = spd(4, 10.0)
        row_sum = np.abs(a).sum(1).max()
        for rel, absolute, ridge in ((0.1, 1e-3, 0.1 * row_sum), (1e-5, 0.2, 0.2)):
            solver = CoupledHigherOrderRoot(rel, absolute, tolerance=1e-12)
            root, ok = inverse_root(a, 0.5, 0.3, solver)
            assert ok
            assert relative(root, exact_root(a, 0.5, ridge)) < 1e-11


def test_higher_order_refuses_what_did_not_converge(monkeypatch):
    """Singular, indefinite, stopped too early, or a root of a huge fraction: never a wrong root."""
    count = []
    step = roots._step
    monkeypatch.setattr(roots, "_step", lambda *args, **kw: count.append(1) or step(*args, **kw))
    with jax.enable_x64(True):
        cases = [
            (with_spectrum([1, 0.5, 0]), 0.5, HIGHER),
            (with_spectrum([3, 1, -0.5]), 0.5, HIGHER),
            (spd(5, 1e3), 0.5, CoupledHigherOrderRoot(max_iterations=2)),
            (spd(5, 10.0), 0.375, CoupledHigherOrderRoot(abs_epsilon=0.01)),
        ]
        for a, exponent, solver in cases:
            assert not inverse_root(a, exponent, 0.0, solver)[1]
        # A growing error stops the iteration long before max_iterations.
        expected, steps = higher_order_oracle(cases[1][0], 0.5, HIGHER)
        assert (expected, steps < 20) == (None, True)
        count.clear()
        with jax.disable_jit():
            inverse_root(cases[1][0], 0.5, 0.0, HIGHER)
        assert len(count) == steps
        # So does one that no longer falls, at a tolerance that rounding never reaches.
        count.clear()
        with jax.disable_jit():
            root, ok = inverse_root(spd(5, 10.0), 0.5, 0.0, CoupledHigherOrderRoot(tolerance=0.0))
        assert ok
        assert len(count) < 25
        assert relative(root, exact_root(spd(5, 10.0), 0.5)) < 1e-13


@pytest.mark.parametrize("solver", [*SOLVERS, EighRoot(PseudoInverse())])
def test_non_finite_is_not_ok_and_touches_nothing_else(solver):
    """Also where LAPACK would give finite eigenvectors of a matrix with an infinity."""
    a = np.stack([spd(40, 5.0, seed=s) for s in range(4)]).astype(np.float32)
    good = a.copy()
    a[1, 3, 5] = a[1, 5, 3] = math.nan
    a[2, 3, 5] = a[2, 5, 3] = math.inf
    a[3, 0, 0] = -math.inf
    one = functools.partial(inverse_root, exponent=0.5, epsilon=0.0, solver=solver)
    both = jax.jit(lambda x: jax.lax.map(one, x))
    root, ok = both(a)
    np.testing.assert_array_equal(ok, [True, False, False, False])
    np.testing.assert_array_equal(root[0], both(good)[0][0])


@pytest.mark.parametrize("solver", SOLVERS)
def test_jit_or_not(solver, compilations):
    """Equal options are one program; another jit around it changes no bit, and none no value."""
    a = spd(5, 20.0, seed=4).astype(np.float32)
    root, ok = inverse_root(a, 0.25, 0.0, solver)
    known = len(compilations)
    again, _ = inverse_root(2 * a, 0.25, 0.0, type(solver)(**vars(solver)))
    assert len(compilations) == known
    outer = jax.jit(lambda a: inverse_root(a, 0.25, 0.0, solver))
    np.testing.assert_array_equal(outer(a)[0], root)
    np.testing.assert_allclose(again * 2**0.25, root, rtol=0, atol=1e-5)
    with jax.disable_jit():
        bare, bare_ok = inverse_root(a, 0.25, 0.0, solver)
    assert ok
    assert bare_ok
    np.testing.assert_allclose(bare, root, rtol=0, atol=1e-5)


@pytest.mark.parametrize("solver", SOLVERS)
def test_x64_mode_does_not_widen_float32(solver):
    a = spd(5, 20.0, seed=5).astype(np.float32)
    narrow, _ = inverse_root(a, 0.25, 1e-6, solver)
    with jax.enable_x64(True):
        root, _ = inverse_root(a, 0.25, 1e-6, solver)
    assert root.dtype == jnp.float32
    np.testing.assert_array_equal(root, narrow)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_in_shard_map(solver, dtype):
    """Each device has other matrices, so other numbers of iterations; one of them has a NaN."""
    with jax.enable_x64(dtype == "float64"):
        a = np.stack([spd(5, c, seed=6) for c in (1.5, 200.0, 30.0, 4.0)]).astype(dtype)
        a[2, 1, 1] = math.nan
        one = functools.partial(inverse_root, exponent=0.5, epsilon=1e-3, solver=solver)
        spec = jax.P("fsdp")
        every = functools.partial(jax.lax.map, one)
        mesh = make_mesh(2, explicit=False)
        sharded = jax.shard_map(every, mesh=mesh, in_specs=spec, out_specs=(spec, spec))
        root, ok = jax.jit(sharded)(a)
        np.testing.assert_array_equal(ok, [True, True, False, True])
        alone, _ = jax.jit(every)(a)
        for i in (0, 1, 3):
            np.testing.assert_array_equal(root[i], alone[i])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Perturbation(1e-3), "before .* got 0.001"),
        (lambda: PseudoInverse(-1.0), "rank_atol .* got -1.0"),
        (lambda: PseudoInverse(rank_rtol=math.nan), "rank_rtol.* got nan"),
        (lambda: EighRoot("pinv"), "rank_deficiency .* got 'pinv'"),
        (lambda: CoupledNewtonRoot(0), "max_iterations .* got 0"),
        (lambda: CoupledNewtonRoot(2.0), "max_iterations .* got 2.0"),
        (lambda: CoupledNewtonRoot(tolerance=-1e-6), "tolerance .* got -1e-06"),
        (lambda: CoupledHigherOrderRoot(rel_epsilon=-0.5), "rel_epsilon .* got -0.5"),
        (lambda: CoupledHigherOrderRoot(abs_epsilon=math.inf), "abs_epsilon .* got inf"),
        (lambda: CoupledHigherOrderRoot(max_iterations=True), "max_iterations .* got True"),
        (lambda: CoupledHigherOrderRoot(tolerance="1"), "tolerance .* got '1'"),
        (lambda: CoupledHigherOrderRoot(order=1), "order .* got 1"),
        (lambda: inverse_root(np.eye(2), 0.0, 0.0), "exponent .* > 0, got 0.0"),
        (lambda: inverse_root(np.eye(2), -0.5, 0.0), "exponent .* got -0.5"),
        (lambda: inverse_root(np.eye(2), 0.5, -1e-8), "epsilon .* got -1e-08"),
        (lambda: inverse_root(np.eye(2), 0.5, math.nan, NEWTON), "epsilon .* got nan"),
        (lambda: inverse_root(np.eye(2), 0.5, math.inf, HIGHER), "epsilon .* got inf"),
        (
            lambda: inverse_root(np.eye(2), 0.5, 1e-12, EighRoot(PseudoInverse())),
            "epsilon must be exactly 0 with PseudoInverse, got 1e-12",
        ),
        (lambda: eigenvalue_powers(jnp.ones(2), 0.5, 0.1, PseudoInverse()), "exactly 0 .* got 0.1"),
        (lambda: eigenvalue_powers(jnp.ones(2), 0.5, 0.1, None), "rank_deficiency .* got None"),
        (lambda: inverse_root(np.eye(2), 0.4, 0.0, NEWTON), "integer 1 / exponent, got 2.5"),
        (lambda: inverse_root(np.zeros((2, 3), np.float32), 0.5, 0.0), r"got shape \(2, 3\)"),
        (lambda: inverse_root(np.zeros((2, 3, 3), np.float32), 0.5, 0.0), r"got shape \(2, 3, 3\)"),
        (lambda: inverse_root(np.zeros((0, 0), np.float32), 0.5, 0.0), r"got shape \(0, 0\)"),
    ],
)
def test_bad_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("dtype", ["bfloat16", "int32", "complex64"])
def test_bad_dtype(dtype):
    with pytest.raises(TypeError, match=f"got dtype {dtype}"):
        inverse_root(jnp.ones((2, 2), dtype), 0.5, 0.0)


def test_unknown_solver():
    with pytest.raises(TypeError, match="got 'eigh'"):
        inverse_root(np.eye(2, dtype=np.float32), 0.5, 0.0, "eigh")
