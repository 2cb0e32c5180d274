"""The contract of every optimizer: types, state, trees, devices. Wrappers: ``test_wrappers.py``."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import matrixfsdp_jax as mfsdp
from tests.contract.cases import (
    FEW,
    MATRICES,
    assert_identical,
    counts,
    devices,
    each_form,
    each_optimizer,
    few_case,
    few_grads,
    own_case,
    undecayed_case,
    whole_case,
    whole_tree,
)
from tests.contract.registry import EXEMPT, OPTIMIZERS, Optimizer
from tests.test_optimizers import assert_trees_close, draw, ramp

GRADS = [whole_tree(seed) for seed in range(1, 6)]


# ---- the registry ------------------------------------------------------------------------------


def makes_a_transformation(function: Any) -> bool:
    """Whether a public object is a function that returns a transformation, or does not say what."""
    if inspect.isclass(function) or not callable(function):
        return False
    returned = inspect.signature(function).return_annotation
    return returned is inspect.Signature.empty or "GradientTransformation" in str(returned)


def test_no_public_optimizer_is_forgotten() -> None:
    public = {n for n in mfsdp.__all__ if makes_a_transformation(getattr(mfsdp, n))}
    assert {"muon", "scale_by_muon", *EXEMPT} <= public
    tested = {o.function.__name__ for o in OPTIMIZERS}
    assert not tested & set(EXEMPT)
    assert public == tested | set(EXEMPT), "add it to OPTIMIZERS, or to EXEMPT with a reason"
    assert len({o.id for o in OPTIMIZERS}) == len(OPTIMIZERS)


# ---- it optimizes ------------------------------------------------------------------------------


def quadratic(params: Any, target: Any) -> tuple[dict[str, float], Any]:
    """Per leaf ``mean(c (p - t)^2) / 2``, and ``c (p - t)``; ``c`` is 1 to 9 over the last dim."""
    losses, grads = {}, {k: x if x is None else np.zeros_like(x) for k, x in params.items()}
    for name in (*MATRICES, "bias"):
        off = params[name].astype(np.float64) - target[name]
        weighted = off * np.broadcast_to(np.linspace(1, 3, off.shape[-1]) ** 2, off.shape)
        losses[name] = float(np.mean(weighted * off)) / 2
        grads[name] = weighted.astype(np.float32)
    return losses, grads


@each_form
@each_optimizer
def test_the_loss_falls(optimizer: Optimizer, form: str) -> None:
    case = whole_case(optimizer, devices(form))
    move = whole_tree(99)
    target = {k: x if x is None else case.tree[k] + 0.5 * x for k, x in move.items()}
    first, _ = quadratic(case.tree, target)
    params, state = case.start()
    for _ in range(50):
        _, grads = quadratic(case.canonical(params), target)
        params, state, _ = case.step(params, state, case.grads(grads))
    last, _ = quadratic(case.canonical(params), target)
    assert sum(last.values()) < sum(first.values()) / 20
    assert all(last[name] < first[name] / 5 for name in MATRICES)


@each_form
@each_optimizer
def test_a_schedule_of_the_learning_rate(optimizer: Optimizer, form: str) -> None:
    """At fixed parameters the updates of the matrices are proportional to the rate."""
    rate = ramp(0.3, -0.1)
    plain = few_case(optimizer, form).updates(few_grads(3))
    scheduled = own_case(optimizer, draw(FEW, 0), devices(form), learning_rate=rate)
    for count, (want, got) in enumerate(zip(plain, scheduled.updates(few_grads(3)), strict=True)):
        for name in ("w", "tall"):
            expected = want[name] * (rate(count) / optimizer.learning_rate)
            np.testing.assert_allclose(got[name], expected, atol=optimizer.rounding)


@each_form
@each_optimizer
def test_zero_gradients_give_zero_updates(optimizer: Optimizer, form: str) -> None:
    case = undecayed_case(optimizer, form)
    params, state = case.start()
    zeros = case.grads(jax.tree.map(np.zeros_like, case.tree))
    for _ in range(2):
        params, state, updates = case.step(params, state, zeros)
        assert not any(np.asarray(u).any() for u in jax.tree.leaves(updates))
        assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(state))
    _, state, updates = case.step(params, state, case.grads(few_grads(1)[0]))
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves((state, updates)))
    assert all(np.asarray(u).any() for u in jax.tree.leaves(updates))


# ---- dtypes and types --------------------------------------------------------------------------


@each_form
@each_optimizer
def test_half_precision_leaves_keep_their_dtype(optimizer: Optimizer, form: str) -> None:
    """And their update is the float32 one, rounded."""
    few, own = draw({"w": (8, 16), "bias": (16,)}, 0), {}
    g = np.asarray(draw({"w": (8, 16)}, 1)["w"].astype(jnp.bfloat16), np.float32)
    w = np.asarray(few["w"].astype(jnp.bfloat16), np.float32)
    dtypes = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
    own = {f"w_{k}": w.astype(d) for k, d in dtypes.items()}
    own |= {f"bias_{k}": few["bias"].astype(d) for k, d in dtypes.items()}
    grads = {k: (g if k[0] == "w" else few["bias"]).astype(x.dtype) for k, x in own.items()}
    case = own_case(optimizer, own, devices(form))
    params, state = case.start()
    before = jax.tree.map(jax.typeof, (params, state, case.seen(params)))
    new, state, updates = case.step(params, state, case.grads(grads))
    assert jax.tree.map(jax.typeof, (new, state, updates)) == before
    updates = case.canonical(updates)
    for name, ulp in (("w_bf16", 2**-7), ("w_f16", 2**-9)):
        np.testing.assert_allclose(
            updates[name].astype(np.float32), updates["w_f32"], rtol=ulp, atol=1e-6
        )


@each_form
@each_optimizer
def test_float64_leaves_are_updated_in_float64(optimizer: Optimizer, form: str) -> None:
    """Beside float32 ones, which stay so."""
    with jax.enable_x64(True):
        tree, grads = draw(FEW, 0), draw(FEW, 1)
        tree["tall"], grads["tall"] = (t["tall"].astype(np.float64) for t in (tree, grads))
        case = own_case(optimizer, tree, devices(form))
        params, state = case.start()
        before = jax.tree.map(jax.typeof, (params, state, case.seen(params)))
        new, state, updates = case.step(params, state, case.grads(grads))
        assert jax.tree.map(jax.typeof, (new, state, updates)) == before
        wide = case.canonical(updates)["tall"]
    assert wide.dtype == np.float64
    assert (wide != wide.astype(np.float32)).mean() > 0.5
    assert any(x.dtype == np.float64 for x in jax.tree.leaves(state))


@each_optimizer
@pytest.mark.parametrize(("n", "explicit"), [(None, True), (8, True), (8, False)])
def test_steps_compile_once_and_keep_all_types(
    optimizer: Optimizer, n: int | None, explicit: bool, compilations: list[str]
) -> None:
    """Structure, shape, dtype, weak type and sharding, of parameters and state."""
    case = own_case(optimizer, draw(FEW, 0), n, explicit=explicit)
    grads = [case.grads(g) for g in few_grads(3)]
    params, state = case.start()
    first = (params, state)
    for g in grads:
        params, state, _ = case.step(params, state, g)
    assert compilations.count("jit(apply)") == 1
    assert jax.tree.map(jax.typeof, (params, state)) == jax.tree.map(jax.typeof, first)
    for a, b in zip(jax.tree.leaves((params, state)), jax.tree.leaves(first), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


@each_form
@each_optimizer
def test_counts_are_int32_and_count_updates(optimizer: Optimizer, form: str) -> None:
    _, state = whole_case(optimizer, devices(form)).run(GRADS[:3])
    found = counts(state)
    assert {(x.dtype, x.shape, int(x)) for x in found} == {(np.dtype(np.int32), (), 3)}


def kinds(tree: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)


@each_form
@each_optimizer
def test_state_from_shapes_and_inside_jit_is_the_same(optimizer: Optimizer, form: str) -> None:
    case = whole_case(optimizer, devices(form))
    params, state = case.start()
    seen = case.seen(params)
    assert kinds(jax.eval_shape(case.tx.init, jax.tree.map(jax.typeof, seen))) == kinds(state)
    assert_identical(jax.jit(case.tx.init)(seen), state)
    assert_identical(case.tx.init(seen), state)


@each_optimizer
@pytest.mark.parametrize(("n", "explicit"), [(None, True), (8, True), (8, False)])
def test_state_from_bare_shapes(optimizer: Optimizer, n: int | None, explicit: bool) -> None:
    """Shapes and dtypes alone, without shardings."""
    case = whole_case(optimizer, n, explicit)
    params, state = case.start()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.seen(params))
    assert kinds(jax.eval_shape(case.tx.init, shapes)) == kinds(state)


@each_optimizer
def test_map_params_finds_what_mirrors_the_parameters(optimizer: Optimizer) -> None:
    case = whole_case(optimizer, None)
    _, state = case.run(GRADS[:1])
    assert_identical(optax.tree.map_params(case.tx, lambda x: x, state), state)
    mapped = optax.tree.map_params(case.tx, lambda x: x + 7, state)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
    pairs = zip(jax.tree.leaves(mapped), jax.tree.leaves(state), strict=True)
    moved = [a.shape for a, b in pairs if (a != b).any()]
    params = [x.shape for x in jax.tree.leaves(case.tree)]
    assert set(moved) <= set(params)
    if optimizer.mirrors:
        assert {x.shape for x in (case.tree[name] for name in MATRICES)} <= set(moved)
    assert all((a == b).all() for a, b in zip(counts(mapped), counts(state), strict=True))


# ---- programs ----------------------------------------------------------------------------------


@each_optimizer
def test_compiled_equals_eager(optimizer: Optimizer) -> None:
    case = whole_case(optimizer, None)
    params, state = case.start()
    for g in GRADS[:2]:
        want = case.step(params, state, case.grads(g))
        with jax.disable_jit():
            got = case.apply(params, state, case.grads(g))
        assert_trees_close(got, want, atol=optimizer.rounding)
        assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, want)
        params, state, _ = want


@each_optimizer
def test_compiled_equals_eager_on_owners(optimizer: Optimizer) -> None:
    case = own_case(optimizer, {"tall": draw(FEW, 0)["tall"]}, 2)
    params, state = case.start()
    grads = case.grads({"tall": draw(FEW, 1)["tall"]})
    want = case.step(params, state, grads)
    assert_trees_close(case.apply(params, state, grads), want, atol=optimizer.rounding)


@each_form
@each_optimizer
def test_parameters_and_state_may_be_donated(optimizer: Optimizer, form: str) -> None:
    """From the first step on: nothing in a new state shares a buffer with anything."""
    case = few_case(optimizer, form)
    want, _ = case.run(few_grads(3))
    donated = jax.jit(case.apply, donate_argnums=(0, 1))
    params, state = case.start()
    for g in few_grads(3):
        used = jax.tree.leaves(state)
        params, state, _ = donated(params, state, case.grads(g))
        assert any(x.is_deleted() for x in used)
    assert_trees_close(case.canonical(params), want, atol=optimizer.rounding)


@each_form
@each_optimizer
def test_a_scan_carries_parameters_and_state(optimizer: Optimizer, form: str) -> None:
    case = few_case(optimizer, form)

    @jax.jit
    def three(params: Any, state: Any, grads: Any) -> Any:
        def body(carry: Any, _: None) -> Any:
            return case.apply(*carry, grads)[:2], None

        return jax.lax.scan(body, (params, state), None, length=3)[0]

    params, state = three(*case.start(), case.grads(few_grads(1)[0]))
    want_params, want_state = case.run(few_grads(1) * 3)
    assert_trees_close(case.canonical(params), want_params, atol=optimizer.rounding)
    assert_trees_close(state, want_state, atol=optimizer.rounding)


@each_form
@each_optimizer
def test_unknown_extra_arguments_pass(optimizer: Optimizer, form: str) -> None:
    case = few_case(optimizer, form)
    params, state = case.start()
    grads = case.grads(few_grads(1)[0])
    _, want_state, want = case.step(params, state, grads)
    got, state = jax.jit(case.update)(grads, state, params, value=1.0, unknown=jnp.ones(2))
    assert_trees_close(got, want, atol=optimizer.rounding)
    assert_trees_close(state, want_state, atol=optimizer.rounding)


@each_form
@each_optimizer
def test_without_parameters_it_works_or_says_what_is_missing(
    optimizer: Optimizer, form: str
) -> None:
    case = undecayed_case(optimizer, form)
    params, state = case.start()
    grads = case.grads(few_grads(1)[0])
    try:
        got, _ = jax.jit(case.tx.update)(grads, state)
    except ValueError as error:
        assert "tx.update(grads, state, params)" in str(error)  # noqa: PT017
    else:
        assert_trees_close(got, case.step(params, state, grads)[2], atol=optimizer.rounding)


# ---- devices -----------------------------------------------------------------------------------


@each_optimizer
@pytest.mark.parametrize(
    ("n", "explicit"), [(1, True), (2, False), (3, True), (8, True), (8, False)]
)
def test_owners_equal_one_device(optimizer: Optimizer, n: int, explicit: bool) -> None:
    want, _ = whole_case(optimizer, None).run(GRADS)
    case = whole_case(optimizer, n, explicit)
    got, _ = case.run(GRADS)
    assert_trees_close(got, want, atol=1e-5)


@each_optimizer
def test_inside_shard_map_it_equals_outside(optimizer: Optimizer) -> None:
    case = whole_case(optimizer, 8)
    layout = case.layout
    specs, state_specs = layout.specs, layout.state_specs(case.tx)
    inside = jax.shard_map(
        case.apply,
        mesh=layout.mesh,
        in_specs=(specs, state_specs, layout.trainable(specs)),
        out_specs=(specs, state_specs, layout.trainable(specs)),
    )
    args = (*case.start(), case.grads(GRADS[0]))
    assert_trees_close(jax.jit(inside)(*args), case.step(*args), atol=optimizer.rounding)


@each_optimizer
@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "auto"])
def test_the_update_moves_no_matrix(optimizer: Optimizer, explicit: bool) -> None:
    case = own_case(optimizer, draw(FEW, 0), 8, explicit=explicit)
    params, state = case.start()
    grads = case.grads(few_grads(1)[0])
    found = mfsdp.audit(jax.jit(case.tx.update), grads, state, case.seen(params))
    assert found.matrices == ()


# ---- trees -------------------------------------------------------------------------------------


@each_form
@each_optimizer
def test_what_has_no_gradient_or_is_frozen_stays(optimizer: Optimizer, form: str) -> None:
    """None, integers, a leaf without elements, a frozen leaf: unchanged, and without state."""
    case = whole_case(optimizer, devices(form))
    got, state = case.run(GRADS[:3])
    for name in ("base", "index", "empty"):
        np.testing.assert_array_equal(got[name], case.tree[name])
        assert got[name].dtype == case.tree[name].dtype
    assert got["none"] is None
    assert not {x.size for x in jax.tree.leaves(state)} & {9 * 7, 2 * 3}
    for name in (*MATRICES, "bias"):
        assert np.abs(got[name] - case.tree[name]).max() > 0


KINDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "one matrix": lambda few: {"tall": few["tall"]},
    "no matrix": lambda few: {"bias": few["bias"]},
    "bare array": lambda few: few["tall"],
}


@each_form
@each_optimizer
@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_of_any_kind(optimizer: Optimizer, form: str, kind: str) -> None:
    """Every leaf moves as it does among others."""
    tree = KINDS[kind]
    want, _ = few_case(optimizer, "single").run(few_grads(2))
    got, _ = own_case(optimizer, tree(draw(FEW, 0)), devices(form)).run(map(tree, few_grads(2)))
    assert_trees_close(got, tree(want), atol=1e-5)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "bias"],
    meta_fields=["activation"],
)
@dataclass
class Linear:
    """A module as equinox makes them: the pytree is the model."""

    weight: Any
    bias: Any
    activation: str = "tanh"


@each_form
@each_optimizer
def test_a_dataclass_module(optimizer: Optimizer, form: str) -> None:
    def module(tree: Any) -> list[Linear]:
        return [Linear(tree["tall"], None), Linear(tree["w"], tree["bias"], "relu")]

    want, _ = few_case(optimizer, "single").run(few_grads(2))
    got, _ = own_case(optimizer, module(draw(FEW, 0)), devices(form)).run(
        [module(g) for g in few_grads(2)]
    )
    assert [layer.activation for layer in got] == ["tanh", "relu"]
    assert got[0].bias is None
    assert_trees_close(got, module(want), atol=1e-5)
