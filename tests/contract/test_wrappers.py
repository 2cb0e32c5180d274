"""The contract of every optimizer inside optax's wrappers, this package's own, and flax holders."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import matrixfsdp_jax as mfsdp
from tests.contract.cases import (
    FEW,
    Case,
    assert_identical,
    counts,
    devices,
    each_form,
    each_optimizer,
    few_case,
    few_grads,
    own_case,
    wrapped,
)
from tests.contract.registry import Optimizer
from tests.test_optimizers import assert_trees_close, draw

HIDDEN = "8x8:float32"  # the class of "w" among FEW


def by_leaf(layout: Any, of_w: Any, of_others: Any) -> Any:
    """A tree of labels or of booleans: one for the matrix ``w``, another for all else."""
    if layout is None:
        return {name: of_w if name == "w" else of_others for name in FEW}
    tree = jax.tree.map(lambda _: of_others, layout.trainable(layout.abstract))
    return tree._replace(stacks=tree.stacks | {HIDDEN: of_w})


def with_nan(tree: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """``tree`` with one NaN in a matrix."""
    bad = {k: x.copy() for k, x in tree.items()}
    bad["tall"][3, 5] = np.nan
    return bad


# ---- optax -------------------------------------------------------------------------------------


@each_form
@each_optimizer
def test_chain_with_clipping_in_front(optimizer: Optimizer, form: str) -> None:
    """Equals clipped gradients going in and scaled updates coming out."""
    case = wrapped(
        optimizer,
        form,
        lambda tx, layout: optax.chain(
            mfsdp.clip_by_global_norm(0.5, layout=layout), tx, optax.scale(0.25)
        ),
    )
    clipped = []
    for grads in few_grads(2):
        norm = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in grads.values()))
        clipped.append({k: (g * (0.5 / norm)).astype(np.float32) for k, g in grads.items()})
    got, want = case.updates(few_grads(2)), few_case(optimizer, form).updates(clipped)
    want = jax.tree.map(lambda u: 0.25 * u, want)
    assert_trees_close(got, want, atol=optimizer.rounding)


@each_form
@each_optimizer
def test_partition(optimizer: Optimizer, form: str) -> None:
    case = wrapped(
        optimizer,
        form,
        lambda tx, layout: optax.partition(
            {"this": tx, "sgd": optax.sgd(0.1)}, by_leaf(layout, "sgd", "this")
        ),
    )
    got, want = case.updates(few_grads(2)), few_case(optimizer, form).updates(few_grads(2))
    for u, g in zip(want, few_grads(2), strict=True):
        u["w"] = np.float32(-0.1) * g["w"]
    assert_trees_close(got, want, atol=optimizer.rounding)


@each_form
@each_optimizer
def test_masked(optimizer: Optimizer, form: str) -> None:
    """Hidden leaves come as ``MaskedNode``: their updates pass through and they have no state."""
    case = wrapped(
        optimizer, form, lambda tx, layout: optax.masked(tx, by_leaf(layout, False, True))
    )
    _, state = case.start()
    shown = {name: x for name, x in draw(FEW, 0).items() if name != "w"}
    _, smaller = own_case(optimizer, shown, devices(form)).start()
    assert sorted(x.shape for x in jax.tree.leaves(state)) == sorted(
        x.shape for x in jax.tree.leaves(smaller)
    )
    got, want = case.updates(few_grads(2)), few_case(optimizer, form).updates(few_grads(2))
    for u, g in zip(want, few_grads(2), strict=True):
        u["w"] = g["w"]
    assert_trees_close(got, want, atol=optimizer.rounding)


@each_form
@each_optimizer
def test_everything_masked_out(optimizer: Optimizer, form: str) -> None:
    case = wrapped(
        optimizer, form, lambda tx, layout: optax.masked(tx, by_leaf(layout, False, False))
    )
    grads = few_grads(1)
    assert_trees_close(case.updates(grads), grads, atol=0.0)


@each_form
@each_optimizer
def test_multi_steps_is_one_step_of_the_mean(optimizer: Optimizer, form: str) -> None:
    case = wrapped(optimizer, form, lambda tx, layout: optax.MultiSteps(tx, 4))
    micro = few_grads(8)
    mean = [jax.tree.map(lambda *g: np.mean(g, axis=0), *part) for part in (micro[:4], micro[4:])]
    got, state = case.run(micro)
    want, _ = few_case(optimizer, form).run(mean)
    assert_trees_close(got, want, atol=10 * optimizer.rounding)
    assert {int(c) for c in counts(state.inner_opt_state)} == {2}


@each_form
@each_optimizer
def test_an_injected_learning_rate_changes_without_compiling(
    optimizer: Optimizer, form: str, compilations: list[str]
) -> None:
    def make(layout: Any) -> optax.GradientTransformation:
        injected = optax.inject_hyperparams(
            lambda learning_rate: optimizer.make(layout, learning_rate=learning_rate)
        )
        return injected(optimizer.learning_rate)

    case = Case(make, draw(FEW, 0), devices(form), planned_for=optimizer.planned_for)
    params, state = case.start()
    want = few_case(optimizer, form).updates(few_grads(3))
    compilations.clear()
    for factor, g, expected in zip((1.0, 0.5, 2.0), few_grads(3), want, strict=True):
        rate = state.hyperparams["learning_rate"]
        state.hyperparams["learning_rate"] = jnp.full_like(rate, factor * optimizer.learning_rate)
        _, state, updates = case.step(params, state, case.grads(g))
        got = case.canonical(updates)
        for name in ("w", "tall"):
            np.testing.assert_allclose(
                got[name], factor * expected[name], atol=2 * optimizer.rounding
            )
    assert compilations.count("jit(apply)") == 1


@each_form
@each_optimizer
@pytest.mark.parametrize("guard", ["optax", "mfsdp"])
def test_a_step_with_a_nan_leaves_no_trace(optimizer: Optimizer, form: str, guard: str) -> None:
    """Under ``optax.apply_if_finite`` and ``mfsdp.skip_nonfinite``."""

    def wrap(tx: Any, layout: Any) -> Any:
        if guard == "optax":
            return optax.apply_if_finite(tx, 3)
        return mfsdp.skip_nonfinite(tx, layout=layout)

    def inner(state: Any) -> Any:
        return state.inner_state if guard == "optax" else state.inner

    first, second = few_grads(2)
    case = wrapped(optimizer, form, wrap)
    params, state = case.start()
    params, state, _ = case.step(params, state, case.grads(first))
    after, left, updates = case.step(params, state, case.grads(with_nan(second)))
    assert not any(np.asarray(u).any() for u in jax.tree.leaves(updates))
    assert_identical(case.canonical(after), case.canonical(params))
    assert_identical(inner(left), inner(state))
    assert jax.tree.map(jax.typeof, left) == jax.tree.map(jax.typeof, state)
    after, _, _ = case.step(after, left, case.grads(second))
    want, _ = few_case(optimizer, form).run([first, second])
    assert_trees_close(case.canonical(after), want, atol=optimizer.rounding)


# ---- flax --------------------------------------------------------------------------------------


class Model(nnx.Module):
    def __init__(self, tree: dict[str, Any]) -> None:
        self.w = nnx.Param(jnp.asarray(tree["w"]))
        self.tall = nnx.Param(jnp.asarray(tree["tall"]))
        self.bias = nnx.Param(jnp.asarray(tree["bias"]))


@each_optimizer
def test_nnx_optimizer(optimizer: Optimizer) -> None:
    model = Model(draw(FEW, 0))
    holder = nnx.Optimizer(model, optimizer.make(), wrt=nnx.Param)

    @nnx.jit
    def step(model: Model, holder: nnx.Optimizer, grads: Any) -> None:
        holder.update(model, grads)

    for g in few_grads(2):
        step(model, holder, nnx.state(Model(g), nnx.Param))
    want, _ = few_case(optimizer, "single").run(few_grads(2))
    got = {name: np.asarray(getattr(model, name)[...]) for name in FEW}
    assert_trees_close(got, want, atol=optimizer.rounding)


@each_form
@each_optimizer
def test_linen_train_state(optimizer: Optimizer, form: str) -> None:
    case = few_case(optimizer, form)
    params, _ = case.start()
    state = TrainState.create(apply_fn=None, params=params, tx=case.tx)
    step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    for g in few_grads(2):
        state = step(state, case.grads(g))
    want, _ = case.run(few_grads(2))
    assert int(state.step) == 2
    assert_trees_close(case.canonical(state.params), want, atol=optimizer.rounding)
