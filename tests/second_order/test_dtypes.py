"""Parameters in bfloat16, factors in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import matrixfsdp_jax as mfsdp
from tests.second_order.cases import (
    METHODS,
    Run,
    draw_any,
    gradients,
    kronecker_states,
    make,
    oracle_of,
)
from tests.test_optimizers import FORMS


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_parameters_have_float32_factors(form: str, method: str) -> None:
    """And the update of the same numbers in float32, rounded."""
    shapes = {"w": (4, 4), "bias": (4,)}
    params = draw_any(shapes, 0, jnp.bfloat16)
    steps = gradients(6, shapes, jnp.bfloat16)
    options = {"epsilon": 1e-3, "precondition_frequency": 3}
    run = Run(form, make(method, **options), params, n=2)
    exact = Run(form, make(method, **options), jax.tree.map(np.float32, params), n=2)
    kept = {x.dtype for x in jax.tree.leaves(run.shampoo) if x.ndim}
    assert kept == {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}
    for grads in steps:
        before = jax.tree.map(jax.typeof, run.state)
        run.step(grads)
        exact.step(jax.tree.map(np.float32, grads))
        assert jax.tree.map(jax.typeof, run.state) == before
        for u, v in zip(*(jax.tree.leaves(r.updates) for r in (run, exact)), strict=True):
            assert u.dtype == jnp.bfloat16
            np.testing.assert_allclose(np.float32(u), np.float32(v), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_factors_in_float64_for_float32_parameters(method: str) -> None:
    """Closer to the oracle than float32 factors would come: the direction is rounded once."""
    kind = mfsdp.EigenvalueCorrected if method == "soap" else mfsdp.RootInverse
    shapes = {"w": (6, 4)}
    options = {
        "betas": (0.0, 0.9),
        "epsilon": 1e-10,
        "precondition_frequency": 1,
        "learning_rate": 1.0,
    }
    options |= {"start_preconditioning_step": 3, "use_bias_correction": False}
    with jax.enable_x64(True):
        params = {"w": np.zeros((6, 4), np.float32)}
        run = Run(
            "single", make(method, preconditioner=kind(factor_dtype="float64"), **options), params
        )
        (state,) = kronecker_states(run.shampoo)
        assert {x.dtype for x in jax.tree.leaves(state)} == {np.dtype(np.float64)}
        oracle = oracle_of(method, **options)
        for grads in gradients(4, shapes):
            run.step(grads)
            step = oracle.step({"w": np.zeros((6, 4))}, grads)["w"]
            got = np.asarray(run.updates["w"])
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, step, rtol=0, atol=2e-6 * np.abs(step).max())
