"""Leaves without a gradient in a step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.layout import rules
from tests.models import make_mesh
from tests.second_order.cases import Run, draw_any, gradients, make, of_tensor, oracle_of
from tests.test_optimizers import FORMS, assert_trees_close, ramp


def nested(seed: int) -> dict[str, Any]:
    x = draw_any({"u": (4, 4), "v": (4, 4), "b": (6, 4), "bias": (4,)}, seed)
    return {"a": {"u": x["u"], "v": x["v"]}, "b": x["b"], "bias": x["bias"]}


def flat(tree: dict[str, Any]) -> dict[str, np.ndarray]:
    return {"u": tree["a"]["u"], "v": tree["a"]["v"], "b": tree["b"]}


PRESENCE: list[tuple[Any, str]] = [
    ({"a": {"u": True, "v": True}, "b": True, "bias": True}, ""),
    ({"a": {"u": True, "v": np.False_}, "b": True, "bias": True}, "v"),
    ({"a": False, "b": True, "bias": True}, "uv"),
    (False, "uvb"),
    (True, ""),
]


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_gradient_is_not_a_zero_one(form: str) -> None:
    """The leaf keeps value and state; the step still counts, for its bias corrections too."""
    options = {
        "betas": (0.9, 0.9),
        "epsilon": 1e-3,
        "weight_decay": 0.1,
        "iterate_averaging": mfsdp.ClassicMomentum(),
        "grafting": mfsdp.AdamGrafting(),
    }
    run = Run(form, make("shampoo", **options), nested(0), n=2)
    oracle, want = oracle_of("shampoo", **options), flat(nested(0))
    got = run.canonical(run.params)
    for t, (present, missing) in enumerate(PRESENCE, 1):
        before, grads = flat(got), nested(t)
        spread = {"a": {"u": False, "v": False}, "b": False, "bias": False}
        # A prefix that is one bool compiles the step anew; the rest have one structure.
        whole = jax.tree.map(lambda p, s: jax.tree.map(lambda _: p, s), present, spread)
        bare = isinstance(present, bool)
        got = run.step(grads, present if bare and form == "single" else whole)
        want = oracle.step(want, {k: g for k, g in flat(grads).items() if k not in missing})
        assert_trees_close(flat(got), want, atol=1e-5)
        for name in missing:
            np.testing.assert_array_equal(flat(got)[name], before[name])
    assert int(run.shampoo.count) == len(PRESENCE)


def test_presence_of_another_tree_is_refused() -> None:
    params = draw_any({"a": (4, 4), "b": (4, 4)}, 0)
    for form in FORMS:
        run = Run(form, make("shampoo"), params, n=2)
        grads = params if run.layout is None else run.layout.trainable(run.layout.shard(params))
        with pytest.raises(ValueError, match="present is no prefix of the parameter tree"):
            jax.eval_shape(
                lambda g, s, tx=run.tx: tx.update(g, s, g, present={"a": True, "c": False}),
                grads,
                run.state,
            )


@pytest.mark.parametrize(
    "flag", [1, 0.5, "no", np.ones(2, bool), jnp.ones((1,), bool), np.int32(1)]
)
@pytest.mark.parametrize("form", FORMS)
def test_presence_must_be_said_by_bools(form: str, flag: Any) -> None:
    params = draw_any({"a": (4, 4), "b": (4, 4)}, 0)
    layout = None if form == "single" else mfsdp.plan(params, make_mesh(2), optimizer="soap")
    tx = mfsdp.scale_by_soap(layout=layout)
    grads = params if layout is None else layout.trainable(layout.shard(params))
    with pytest.raises(TypeError, match=r"present holds .*; give True, False or an array of one"):
        tx.update(grads, jax.eval_shape(tx.init, grads), present={"a": flag, "b": True})


@pytest.mark.parametrize("scale", [mfsdp.scale_by_shampoo, mfsdp.scale_by_soap])
@pytest.mark.parametrize("form", FORMS)
def test_a_direction_alone_honours_presence(form: str, scale: Callable[..., Any]) -> None:
    """A missing leaf has a zero direction and keeps its state; others do not notice."""
    shapes = {"a": (4, 4), "b": (4, 4), "bias": (4,)}
    run, clean = (
        Run(form, lambda **where: scale(epsilon=1e-3, **where), draw_any(shapes, 0), n=2)
        for _ in range(2)
    )
    first, second = gradients(2, shapes)
    for each in (run, clean):
        each.step(first)
    before = of_tensor(run, run.shampoo.preconditioner, "a")
    run.step(second, {"a": np.False_, "b": np.True_, "bias": np.True_})
    clean.step(second)
    got, want = (flat_updates(each) for each in (run, clean))
    assert not got["a"].any()
    assert want["a"].any()
    for name in ("b", "bias"):
        np.testing.assert_array_equal(got[name], want[name])
    after = of_tensor(run, run.shampoo.preconditioner, "a")
    jax.tree.map(np.testing.assert_array_equal, after, before)


def flat_updates(run: Run) -> dict[str, np.ndarray]:
    """The last updates by leaf."""
    if run.layout is None:
        return jax.tree.map(np.asarray, run.updates)
    (c,) = run.layout.plan.classes
    stack = np.asarray(run.updates.stacks[c.key])
    own = {m.name: stack[slot] for m, slot in zip(c.matrices, c.slots, strict=True)}
    return own | {name: np.asarray(x) for name, x in run.updates.rest.items()}


@pytest.mark.parametrize("shape", [(4, 4), (3,)])
def test_a_tree_that_is_one_array_counts_the_steps_in_which_it_is_missing(shape: Any) -> None:
    """Its structure is that of a count, which is no parameter."""
    options = {"weight_decay": ramp(0.1, 0.0), "iterate_averaging": mfsdp.ScheduleFree()}
    tx = mfsdp.shampoo(0.1, epsilon=1e-3, rules=[rules.tensor("*")], **options)
    tree, bare = {"a": jnp.ones(shape)}, jnp.ones(shape)
    got, want = tx.init(bare), tx.init(tree)
    for present in (True, False, True):
        update, got = tx.update(bare, got, bare, present=present)
        wanted, want = tx.update(tree, want, tree, present=present)
        np.testing.assert_array_equal(update, wanted["a"])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
