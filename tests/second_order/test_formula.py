"""Ten steps and more against float64 oracles: directions, weight decay, averaging."""

import math
from typing import Any

import jax
import numpy as np
import pytest

import matrixfsdp_jax as mfsdp
from tests.second_order.cases import (
    RULES,
    SHAPES,
    SMALL,
    SMALL_RULES,
    Run,
    block_phases,
    draw_any,
    gradients,
    kronecker_states,
    make,
    oracle_of,
    staggered,
    tensors,
)
from tests.test_optimizers import FORMS, assert_trees_close, ramp

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "adam graft": (
        "shampoo",
        {
            "betas": (0.9, 0.95),
            "grafting": mfsdp.AdamGrafting(0.9, 1e-6),
            "precondition_frequency": 3,
        },
    ),
    "sum": ("shampoo", {"betas": (0.0, 1.0), "precondition_frequency": 2, "stagger": False}),
    "late start, sgd graft": (
        "shampoo",
        {
            "betas": (0.5, 0.9),
            "grafting": mfsdp.SGDGrafting(),
            "start_preconditioning_step": 5,
            "precondition_frequency": 3,
            "stagger": False,
            "use_bias_correction": False,
        },
    ),
    "beta3, rmsprop graft": (
        "shampoo",
        {"betas": (0.9, 0.95), "beta3": 0.5, "grafting": mfsdp.RMSpropGrafting(0.9, 1e-6)},
    ),
    "unmerged, adagrad graft": (
        "shampoo",
        {
            "target_parameter_dimensionality": math.inf,
            "grafting": mfsdp.AdaGradGrafting(),
            "precondition_frequency": 4,
            "first_refresh": "spread",
        },
    ),
    "kl": (
        "shampoo",
        {"betas": (0.9, 0.9), "preconditioner": mfsdp.RootInverse(kl=True)},
    ),
    "eigendecomposed": (
        "shampoo",
        {
            "betas": (0.9, 0.9),
            "preconditioner": mfsdp.Eigendecomposed(),
            "precondition_frequency": 3,
        },
    ),
    "soap": ("soap", {"precondition_frequency": 4, "start_preconditioning_step": 6}),
    "soap, sum and graft": (
        "soap",
        {
            "betas": (0.9, 1.0),
            "beta3": 0.8,
            "grafting": mfsdp.AdamGrafting(0.9, 1e-6),
            "precondition_frequency": 6,
            "stagger": False,
        },
    ),
}
WHOLE = ("adam graft", "unmerged, adagrad graft", "soap")


@pytest.mark.parametrize(
    ("form", "case"), [("single", c) for c in CASES] + [("owner", c) for c in WHOLE]
)
def test_ten_steps_follow_the_oracle(form: str, case: str) -> None:
    method, options = CASES[case]
    options = {"epsilon": 1e-3, "max_preconditioner_dim": 6, **options}
    oracle = oracle_of(method, **options)
    with jax.enable_x64(True):
        shapes, given = (SHAPES, RULES) if case in WHOLE else (SMALL, SMALL_RULES)
        params = draw_any(shapes, 0, np.float64)
        run = Run(form, make(method, **options), params, given)
        if options.get("stagger", True):
            start = oracle.start or oracle.frequency
            phases = block_phases(params, given, oracle)
            oracle.due = staggered(
                phases, oracle.frequency, start, options.get("first_refresh", "all")
            )
        want = tensors(params)
        for grads in gradients(10, shapes, np.float64):
            got = run.step(grads)
            want = oracle.step(want, tensors(grads))
            assert_trees_close(tensors(got), want, atol=1e-9)
    # The bias belongs to the rest: ten steps of plain gradient descent.
    total = sum(grads["bias"] for grads in gradients(10, shapes, np.float64))
    np.testing.assert_allclose(got["bias"], params["bias"] - 0.1 * total, atol=1e-12)
    assert jax.tree.map(np.shape, got) == jax.tree.map(np.shape, params)


# Square ones, whose factors have full rank from the first gradient on.
SQUARE = {"w": (4, 4), "cube": (2, 2, 4), "bias": (4,)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("grafting", [None, mfsdp.AdamGrafting(0.9, 1e-6)], ids=["plain", "graft"])
def test_a_skipped_first_step_only_builds_the_basis(form: str, grafting: Any) -> None:
    """Zero update in step 1, and all moments begin with the second gradient."""
    options = {
        "first_step": "skip",
        "precondition_frequency": 3,
        "stagger": False,
        "grafting": grafting,
        "target_parameter_dimensionality": 3,
    }
    with jax.enable_x64(True):
        params = draw_any(SQUARE, 0, np.float64)
        run = Run(form, make("soap", **options), params, n=2)
        oracle, want = oracle_of("soap", **options), tensors(params)
        for step, grads in enumerate(gradients(8, SQUARE, np.float64)):
            got = run.step(grads)
            want = oracle.step(want, tensors(grads))
            assert_trees_close(tensors(got), want, atol=1e-9)
            if step == 0:
                state = run.shampoo
                for name in ("w", "cube"):
                    np.testing.assert_array_equal(got[name], params[name])
                moments = (state.filtered, state.grafting)
                assert not any(np.asarray(x).any() for x in jax.tree.leaves(moments))
                vectors = [np.asarray(x) for s in kronecker_states(state) for x in s.vectors]
                assert all(np.abs(x - np.eye(x.shape[-1])).max() > 0.01 for x in vectors)


def test_in_a_skipped_first_step_only_weight_decay_acts() -> None:
    params = draw_any(SQUARE, 0)
    run = Run("single", make("soap", first_step="skip", weight_decay=0.5), params)
    got = run.step(gradients(1, SQUARE)[0])
    for name in ("w", "cube"):
        np.testing.assert_allclose(got[name], params[name] * (1 - 0.02 * 0.5), rtol=1e-6)


# ---- weight decay and averaging ----------------------------------------------------------------

DECAYS: dict[str, dict[str, Any]] = {
    "decoupled": {},
    "l2": {"weight_decay_type": "l2"},
    "corrected": {"weight_decay_type": "corrected", "peak_learning_rate": 0.05},
    "independent": {"weight_decay_type": "independent", "peak_learning_rate": 0.05},
    "decoupled, momentum": {"iterate_averaging": mfsdp.ClassicMomentum(0.8)},
    "corrected, schedule-free": {
        "weight_decay_type": "corrected",
        "peak_learning_rate": 0.05,
        "iterate_averaging": mfsdp.ScheduleFree(0.75, 1.0),
    },
}
DECAY_SHAPES = {"w": (4, 4), "v": (4, 4), "tall": (6, 4), "bias": (4,)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", DECAYS)
def test_weight_decay_follows_schedules_and_mask(form: str, kind: str) -> None:
    options = {
        "learning_rate": ramp(0.05, -0.004),
        "weight_decay": ramp(0.5, -0.05),
        "betas": (0.9, 0.95),
        "epsilon": 1e-3,
        **DECAYS[kind],
    }
    mask = {"w": True, "v": False, "tall": True, "bias": True}
    with jax.enable_x64(True):
        params = draw_any(DECAY_SHAPES, 0, np.float64)
        run = Run(form, make("shampoo", weight_decay_mask=mask, **options), params, n=2)
        oracle, want = oracle_of("shampoo", **options), tensors(params)
        oracle.decayed = lambda name: name != "v"
        for grads in gradients(6, DECAY_SHAPES, np.float64):
            got = run.step(grads)
            want = oracle.step(want, tensors(grads))
            # The sum of learning rates is float32, as in the reference.
            assert_trees_close(tensors(got), want, atol=1e-7 if "free" in kind else 1e-9)
        if "free" not in kind:
            return
        averaged = mfsdp.averaged_params(run.state, run.params, options["iterate_averaging"])
        averaged = averaged if run.layout is None else run.layout.unshard(averaged)
        assert_trees_close(tensors(averaged), oracle.evaluation(want), atol=1e-7)
        np.testing.assert_array_equal(averaged["bias"], got["bias"])


def test_a_constant_learning_rate_is_its_own_peak() -> None:
    params, zeros = {"w": np.ones((4, 4), np.float32)}, {"w": np.zeros((4, 4), np.float32)}
    for kind, shrink in (("corrected", 0.1 * 0.5), ("independent", 0.5)):
        run = Run(
            "single",
            make("shampoo", learning_rate=0.1, weight_decay=0.5, weight_decay_type=kind),
            params,
        )
        np.testing.assert_allclose(run.step(zeros)["w"], 1 - shrink, rtol=1e-6)
