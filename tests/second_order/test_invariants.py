"""What must hold whatever the numbers."""

import math
from typing import Any

import jax
import numpy as np
import optax
import pytest

import matrixfsdp_jax as mfsdp
from tests.second_order.cases import METHODS, Run, draw_any, gradients, make
from tests.test_optimizers import assert_trees_close, draw

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "shampoo": ("shampoo", {}),
    "grafted": ("shampoo", {"grafting": mfsdp.AdamGrafting()}),
    "kl, trace scaling": (
        "shampoo",
        {"preconditioner": mfsdp.RootInverse(kl=True, trace_scaling_exponent=0.5)},
    ),
    "pseudo-inverse": (
        "shampoo",
        {
            "epsilon": 0.0,
            "preconditioner": mfsdp.RootInverse(root=mfsdp.EighRoot(mfsdp.PseudoInverse())),
        },
    ),
    "newton": ("shampoo", {"preconditioner": mfsdp.RootInverse(root=mfsdp.CoupledNewtonRoot())}),
    "eigendecomposed": ("shampoo", {"preconditioner": mfsdp.Eigendecomposed()}),
    "soap": ("soap", {"precondition_frequency": 1}),
    "soap by QR": (
        "soap",
        {
            "precondition_frequency": 1,
            "preconditioner": mfsdp.EigenvalueCorrected(basis=mfsdp.QRBasis()),
        },
    ),
    "spectral": ("shampoo", {"preconditioner": mfsdp.SpectralDescent()}),
    "sign": ("shampoo", {"preconditioner": mfsdp.SignDescent()}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_zero_gradients_give_exactly_zero_updates(kind: str) -> None:
    method, options = KINDS[kind]
    params = draw({"w": (4, 6), "v": (4, 4)}, 0)
    zeros = jax.tree.map(np.zeros_like, params)
    run = Run("single", make(method, **options), params)
    for _ in range(2):
        run.step(zeros)
        assert not any(np.asarray(u).any() for u in jax.tree.leaves(run.updates))
        assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(run.state))
    run.step(draw({"w": (4, 6), "v": (4, 4)}, 1))
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves((run.updates, run.state)))
    assert all(np.asarray(u).any() for u in jax.tree.leaves(run.updates))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(run.shampoo.failures))


@pytest.mark.parametrize("method", METHODS)
def test_defaults_work_on_one_device(method: str) -> None:
    params = {"kernel": np.ones((4, 6), np.float32), "bias": np.zeros(6, np.float32)}
    tx = METHODS[method](1e-3)
    state = tx.init(params)
    grads = draw({"kernel": (4, 6), "bias": (6,)}, 1)
    updates, state = jax.jit(tx.update)(grads, state, params)
    moved = optax.apply_updates(params, updates)
    for name, x in moved.items():
        assert np.isfinite(x).all()
        assert (x != params[name]).all()
        assert np.sum((np.asarray(x) - params[name]) * grads[name]) < 0, "downhill"


@pytest.mark.parametrize("method", METHODS)
def test_one_block_is_one_block_however_large_the_limit(method: str) -> None:
    shapes = {"w": (6, 4)}
    results = []
    for limit in (6, math.inf):
        options = {"epsilon": 1e-3, "max_preconditioner_dim": limit, "precondition_frequency": 1}
        run = Run("single", make(method, **options), draw(shapes, 0))
        results.append(run.run(gradients(3, shapes))["w"])
    np.testing.assert_array_equal(results[1], results[0])
    options = {"epsilon": 1e-3, "max_preconditioner_dim": 4, "precondition_frequency": 1}
    cut = Run("single", make(method, **options), draw(shapes, 0)).run(gradients(3, shapes))["w"]
    assert np.abs(cut - results[0]).max() > 1e-3


def test_a_merged_tensor_has_the_update_of_its_reshape() -> None:
    """(3, 4, 5) with at most 12 becomes 12 x 5; with order 3 as the target it stays."""
    x, g = (draw({"w": (3, 4, 5)}, seed)["w"] for seed in (0, 1))
    options = {"epsilon": 1e-3, "max_preconditioner_dim": 12}

    def step(x: np.ndarray, g: np.ndarray, **more: Any) -> np.ndarray:
        return Run("single", make("shampoo", **options, **more), {"w": x}).step({"w": g})["w"]

    merged = step(x, g)
    np.testing.assert_array_equal(merged.reshape(12, 5), step(x.reshape(12, 5), g.reshape(12, 5)))
    apart = step(x, g, target_parameter_dimensionality=3)
    assert np.abs(apart - merged).max() > 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_compiled_equals_eager(method: str) -> None:
    options = {"precondition_frequency": 2, "stagger": False, "grafting": mfsdp.AdamGrafting()}
    shapes = {"w": (4, 4)}
    with jax.enable_x64(True):
        run = Run("single", make(method, **options), draw_any(shapes, 0, np.float64))
        params, state = run.params, run.state
        for grads in gradients(2, shapes, np.float64):
            run.step(grads)
            with jax.disable_jit():
                params, state, _ = run._apply(params, state, grads)
            assert_trees_close((params, state), (run.params, run.state), atol=1e-9)
