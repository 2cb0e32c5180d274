"""What is evaluated under iterate averaging."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import matrixfsdp_jax as mfsdp
from tests.second_order.cases import Run, draw_any, gradients, make
from tests.test_optimizers import FORMS, assert_trees_close, draw

FREE = mfsdp.ScheduleFree(0.75)
SHAPES = {"w": (4, 6), "v": (4, 4), "bias": (6,)}


@pytest.mark.parametrize("averaging", [mfsdp.ScheduleFree(), mfsdp.GeneralizedPrimalAveraging()])
def test_averaging_without_parameters_says_what_is_missing(averaging: Any) -> None:
    params = draw({"w": (4, 4)}, 0)
    tx = mfsdp.shampoo(1e-2, iterate_averaging=averaging)
    with pytest.raises(ValueError, match=r"tx\.update\(grads, state, params\)"):
        jax.eval_shape(lambda g: tx.update(g, tx.init(g)), params)
    with pytest.raises(ValueError, match="holds 0 iterate averages"):
        mfsdp.averaged_params(mfsdp.shampoo(1e-2).init(params), params, averaging)


def averaged_run(form: str) -> Run:
    options = {"epsilon": 1e-3, "iterate_averaging": FREE}
    run = Run(form, make("shampoo", **options), draw_any(SHAPES, 0), n=2)
    run.run(gradients(2, SHAPES))
    return run


@pytest.mark.parametrize(
    "given", [None, mfsdp.ScheduleFree, mfsdp.ClassicMomentum(), 0.8, mfsdp.AdamGrafting()]
)
def test_averages_of_another_record_are_refused(given: Any) -> None:
    params = draw({"w": (4, 4)}, 0)
    state = mfsdp.shampoo(1e-2, iterate_averaging=FREE).init(params)
    with pytest.raises(TypeError, match=r"iterate_averaging=.* must be mfsdp\.GeneralizedPrimal"):
        mfsdp.averaged_params(state, params, given)


def test_averages_of_other_parameters_are_refused() -> None:
    """Canonical ones with the state of owners, the reverse, other names and other shapes."""
    single, owner = (averaged_run(form) for form in ("single", "owner"))
    wide = {**single.params, "w": jnp.zeros((4, 7))}
    for state, params in (
        (owner.state, single.params),
        (single.state, owner.params),
        (single.state, {"other": jnp.zeros((4, 6))}),
        (single.state, wide),
    ):
        with pytest.raises(ValueError, match=r"the state averages .* but params are .* with"):
            mfsdp.averaged_params(state, params, FREE)


@pytest.mark.parametrize("form", FORMS)
def test_leaves_without_an_average_stay_as_they_are(form: str) -> None:
    run = averaged_run(form)
    params = run.params if form == "owner" else {**run.params, "more": jnp.ones(3)}
    got = mfsdp.averaged_params(run.state, params, FREE)
    assert jax.tree.structure(got) == jax.tree.structure(params)
    got, now = run.canonical(got), run.canonical(params)
    for name, x in now.items():
        assert (got[name] != x).any() == (name in ("w", "v"))


def test_without_a_matrix_there_is_nothing_to_average() -> None:
    params = {"bias": jnp.ones(3)}
    state = mfsdp.shampoo(1e-2, iterate_averaging=FREE).init(params)
    np.testing.assert_array_equal(mfsdp.averaged_params(state, params, FREE)["bias"], 1.0)


def test_boxes_of_flax_do_not_matter() -> None:
    """Of ``nnx.Optimizer`` and of linen's metadata, against the same state without boxes."""
    model = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
    tx = mfsdp.shampoo(0.1, epsilon=1e-3, iterate_averaging=FREE, rest=optax.sgd(0.1))
    plain = jax.tree.map(jnp.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    state = tx.init(plain)
    for seed in (1, 2):
        grads = draw({"kernel": (6, 4), "bias": (4,)}, seed)
        boxed = nnx.state(model, nnx.Param)
        nnx.replace_by_pure_dict(boxed, jax.tree.map(jnp.asarray, grads))
        optimizer.update(model, boxed)
        updates, state = tx.update(grads, state, plain)
        plain = optax.apply_updates(plain, updates)
    want = mfsdp.averaged_params(state, plain, FREE)
    assert np.abs(want["kernel"] - plain["kernel"]).max() > 1e-3
    now = nnx.state(model, nnx.Param)
    got = mfsdp.averaged_params(optimizer.opt_state, now, FREE)
    assert jax.tree.structure(got) == jax.tree.structure(now)
    assert_trees_close(nnx.to_pure_dict(got), want, atol=1e-6)
    names = {"kernel": ("in", "out"), "bias": ("out",)}
    linen_boxes = {name: linen.Partitioned(x, names[name]) for name, x in plain.items()}
    got = mfsdp.averaged_params(state, linen_boxes, FREE)
    assert_trees_close(linen.unbox(got), want, atol=1e-6)
