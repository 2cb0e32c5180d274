"""Decompositions that fail, and gradients that are not finite."""

import copy
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.layout import rules
from tests.models import make_mesh
from tests.second_order.cases import METHODS, Run, draw_any, gradients, make, of_tensor
from tests.test_optimizers import FORMS, draw

FAILURE_SHAPES = {"layers": (3, 4, 4), "vector": (4,), "bias": (4,)}


def failure_run(form: str, **options: Any) -> Run:
    given = [rules.stacked("layers"), rules.tensor("vector")]
    options = {"betas": (0.9, 0.9), "epsilon": 1e-3, **options}
    return Run(form, make("shampoo", **options), draw_any(FAILURE_SHAPES, 0), given, n=2)


TENSORS = ("layers[0]", "layers[1]", "layers[2]", "vector")


def spoil(run: Run, name: str, value: float) -> None:
    """Set the first factor of a tensor to a multiple of the identity."""

    def change(state: mfsdp.ShampooState) -> mfsdp.ShampooState:
        def factors(x: Any) -> Any:
            first = x.factors[0]
            bad = np.array(first)
            bad[index_of(run, name)] = np.diag(np.full(first.shape[-1], value))
            return x._replace(factors=(jax.device_put(bad, first.sharding), *x.factors[1:]))

        key = class_or_leaf(run, name)
        own = state.preconditioner[key]
        new = jax.tree.map(factors, own, is_leaf=lambda x: hasattr(x, "factors"))
        return state._replace(preconditioner=state.preconditioner | {key: new})

    run.with_shampoo(change)


def class_or_leaf(run: Run, name: str) -> str:
    if run.layout is None:
        return name.partition("[")[0]
    return next(c.key for c in run.layout.plan.classes if name in [m.name for m in c.matrices])


def index_of(run: Run, name: str) -> Any:
    if run.layout is None:
        rest = name.partition("[")[2]
        return int(rest[:-1]) if rest else 0
    for c in run.layout.plan.classes:
        for matrix, slot in zip(c.matrices, c.slots, strict=True):
            if matrix.name == name:
                return slot
    raise KeyError(name)


def count_of(run: Run, field: str) -> dict[str, int]:
    state = getattr(run.shampoo, field)
    return {n: int(np.sum(jax.tree.leaves(of_tensor(run, state, n)))) for n in TENSORS}


FAULTS = {
    "infinite factor": (math.inf, {}, 1),
    # Minus the identity has no root: the iteration ends in NaN, from a factor that is finite.
    "failed root": (
        -10.0,
        {"preconditioner": mfsdp.RootInverse(root=mfsdp.CoupledHigherOrderRoot(abs_epsilon=1e-3))},
        0,
    ),
}


@pytest.mark.parametrize(
    ("form", "fault"),
    [("single", "infinite factor"), ("owner", "infinite factor"), ("owner", "failed root")],
)
def test_a_failed_decomposition_keeps_the_last_root_and_counts(form: str, fault: str) -> None:
    value, options, nonfinite = FAULTS[fault]
    run = failure_run(form, **options)
    clean = copy.copy(run)  # from the same start, with the same compiled step
    steps = gradients(5, FAILURE_SHAPES)
    for each in (run, clean):
        each.run(steps[:2])
    assert set(count_of(run, "failures").values()) == {0}
    before = of_tensor(run, run.shampoo.preconditioner, "layers[1]")
    for times in (1, 2):
        spoil(run, "layers[1]", value)
        got, want = run.step(steps[1 + times]), clean.step(steps[1 + times])
        after = of_tensor(run, run.shampoo.preconditioner, "layers[1]")
        # The first factor has failed and the second, which was good, has a new root.
        (old,), (new,) = before, after
        np.testing.assert_array_equal(new.roots[0], old.roots[0])
        assert (new.roots[1] != old.roots[1]).any()
        assert count_of(run, "failures") == {**dict.fromkeys(TENSORS, 0), "layers[1]": times}
        assert count_of(run, "nonfinite") == {
            **dict.fromkeys(TENSORS, 0),
            "layers[1]": times * nonfinite,
        }
        # The others do not notice, and the block itself goes on.
        others = [0, 2]
        np.testing.assert_array_equal(got["layers"][others], want["layers"][others])
        np.testing.assert_array_equal(got["vector"], want["vector"])
        assert np.isfinite(got["layers"]).all()
        for name in ("layers[0]", "layers[2]", "vector"):
            mine, clear = (of_tensor(r, r.shampoo.preconditioner, name) for r in (run, clean))
            jax.tree.map(np.testing.assert_array_equal, mine, clear)
    spoil(run, "layers[1]", 1.0)
    run.step(steps[4])
    assert set(count_of(run, "failures").values()) == {0}, "failures in a row start again"
    assert count_of(run, "nonfinite")["layers[1]"] == 2 * nonfinite


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", FORMS)
def test_a_nan_in_one_leaf_touches_no_other(form: str, method: str) -> None:
    """Nor another matrix of its class; a leaf here, so that its class has others."""
    shapes = {"a": (4, 4), "b": (4, 4), "c": (4, 4), "bias": (4,)}
    options = {"epsilon": 1e-3, "precondition_frequency": 2}
    run = Run(form, make(method, **options), draw_any(shapes, 0), n=2)
    clean = copy.copy(run)
    first, second, third = gradients(3, shapes)
    bad = {**second, "b": second["b"].copy()}
    bad["b"][1, 2] = np.nan
    for mine, clear in ((first, first), (bad, second), (third, third)):
        got, want = run.step(mine), clean.step(clear)
    for name in ("a", "c", "bias"):
        np.testing.assert_array_equal(got[name], want[name])
    assert np.isnan(got["b"]).all()
    for name in ("a", "c"):
        for field in mfsdp.ShampooState._fields[1:]:
            parts = [of_tensor(r, getattr(r.shampoo, field), name) for r in (run, clean)]
            jax.tree.map(np.testing.assert_array_equal, *parts)
    assert sum(np.sum(x) for x in jax.tree.leaves(run.shampoo.nonfinite)) > 0


def test_train_step_raises_on_a_factor_that_is_not_finite() -> None:
    params = {"w": np.eye(4, dtype=np.float32), "bias": np.zeros(4, np.float32)}
    layout = mfsdp.plan(params, make_mesh(2), optimizer="shampoo")
    tx = mfsdp.shampoo(1e-2, layout=layout, epsilon=1e-3)

    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((batch @ params["w"] + jnp.expand_dims(params["bias"], 0)) ** 2)

    step = mfsdp.train_step(loss, tx, layout)
    owned = layout.shard(params)
    state = layout.init(tx, owned)
    batch = draw({"x": (4, 4)}, 0)["x"]
    owned, state, metrics = step(owned, state, batch)
    assert {k: int(x) for k, x in metrics["preconditioner"].items()} == {
        "failures": 0,
        "nonfinite": 0,
    }
    batch[0, 0] = np.inf
    message = r"1 refreshes of blocks met a factor .* \(in w\), so .* hold NaN: .*skip_non"
    with pytest.raises(mfsdp.PreconditionerError, match=message) as error:
        step(owned, state, batch)
    assert error.value.counters == {"failures": 1, "nonfinite": 1}
    assert error.value.matrices == {"failures": [], "nonfinite": ["w"]}
    assert isinstance(error.value.outputs[0], mfsdp.OwnerParams)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_error_of_a_train_step_names_the_matrices(fault: str) -> None:
    value, options, nonfinite = FAULTS[fault]
    run = failure_run("owner", **options)

    def loss(params: Any, batch: Any) -> jax.Array:
        return sum(jnp.sum(x) for x in jax.tree.leaves((params, batch))) * 0.0

    step = mfsdp.train_step(loss, run.tx, run.layout, tolerated_failures=1)
    batch = np.zeros((2, 1), np.float32)
    for times in (1, 2):
        for name in ("vector", "layers[2]"):
            spoil(run, name, value)
        if times == 1 and not nonfinite:  # tolerated
            run.params, run.state, _ = step(run.params, run.state, batch)
            continue
        with pytest.raises(mfsdp.PreconditionerError) as error:
            step(run.params, run.state, batch)
        run.params, run.state, _ = error.value.outputs
    both, message = ["layers[2]", "vector"], str(error.value)
    assert error.value.matrices == {"failures": both, "nonfinite": both if nonfinite else []}
    assert "2 refreshes of a block failed in a row (in layers[2], vector), more than" in message
    assert ("may hold NaN" in message) == bool(nonfinite)
