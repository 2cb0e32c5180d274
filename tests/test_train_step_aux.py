"""The aux of a training step: how it is combined, and how it reaches the optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import matrixfsdp_jax as mfsdp
from tests.test_training import SMALL, Run, errors, mean_loss, small_batch

N = 8
REDUCE = {"mean": np.mean, "sum": np.sum, "max": np.max}


def measures(e: Any, x: Any, xp: Any) -> dict[str, Any]:
    """A nested tree of a scalar, a vector and a matrix, of one part of the batch."""
    return {
        "largest": e.max(),
        "by dim": {"first": xp.abs(x).max(axis=0), "second": x.sum(axis=0) - 3},
        "outer": x.T @ x,
    }


def aux_loss(params: Any, batch: Any) -> Any:
    e = errors(params, batch)
    return e.mean(), measures(e, batch["x"], jnp)


def wanted(batch: Any, parts: int, reduction: Any) -> Any:
    """NumPy's value over the parts of the batch, float64; every part with the same weight."""
    whole = jax.tree.map(lambda x: x.astype(np.float64), batch)
    e = np.mean((whole["x"] @ SMALL.params["w"].astype(np.float64) - whole["y"]) ** 2, axis=-1)
    each = [
        measures(*own, np)
        for own in zip(np.split(e, parts), np.split(whole["x"], parts), strict=True)
    ]
    stacked = jax.tree.map(lambda *x: np.stack(x), *each)
    return jax.tree.map(
        lambda name, part: jax.tree.map(lambda x: REDUCE[name](x, axis=0), part), reduction, stacked
    )


REDUCTIONS = {
    "mean": "mean",
    "sum": "sum",
    "max": "max",
    "tree": {"largest": "max", "by dim": {"first": "max", "second": "sum"}, "outer": "mean"},
    "prefix": {"largest": "sum", "by dim": "max", "outer": "max"},
}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_aux_over_all_devices_and_micro_batches(name: str, accumulate: int) -> None:
    reduction, batch = REDUCTIONS[name], small_batch(size=48)
    run = Run(SMALL, N, loss=aux_loss, has_aux=True, aux_reduction=reduction, accumulate=accumulate)
    aux = run(batch)["aux"]
    want = wanted(batch, N * accumulate, reduction)
    assert jax.tree.structure(aux) == jax.tree.structure(want)
    for (keys, a), b in zip(
        jax.tree_util.tree_leaves_with_path(aux), jax.tree.leaves(want), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=jax.tree_util.keystr(keys))


def test_the_default_is_the_mean() -> None:
    batch = small_batch()
    default = Run(SMALL, N, loss=aux_loss, has_aux=True)(batch)
    named = Run(SMALL, N, loss=aux_loss, has_aux=True, aux_reduction="mean")(batch)
    jax.tree.map(np.testing.assert_array_equal, default, named)
    np.testing.assert_allclose(default["aux"]["outer"], batch["x"].T @ batch["x"] / N, atol=1e-5)


def test_aux_next_to_a_model_state_has_its_own_reduction() -> None:
    def loss(params: Any, batch: Any, model_state: Any) -> Any:
        value, aux = aux_loss(params, batch)
        return value, (model_state + batch["x"].sum(), aux)

    batch = small_batch()
    run = Run(SMALL, N, loss=loss, has_aux=True, aux_reduction="max", model_state_reduction="sum")
    *_, state, metrics = run.step(run.owned, run.state, batch, model_state=jnp.float32(0))
    np.testing.assert_allclose(state, batch["x"].sum(), rtol=1e-4)
    want = wanted(batch, N, "max")
    np.testing.assert_allclose(metrics["aux"]["largest"], want["largest"], rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bfloat16])
@pytest.mark.parametrize("name", ["sum", "max"])
def test_aux_keeps_its_dtype(name: str, dtype: Any) -> None:
    """Small whole numbers, which both hold exactly."""

    def loss(params: Any, batch: Any) -> Any:
        return mean_loss(params, batch), (batch["weight"].sum() - 5).astype(dtype)

    batch = small_batch(size=48)
    run = Run(SMALL, N, loss=loss, has_aux=True, aux_reduction=name, accumulate=3)
    aux = run(batch)["aux"]
    assert aux.dtype == dtype
    assert float(aux) == REDUCE[name](batch["weight"].reshape(3 * N, -1).sum(axis=1) - 5)


# ---- extra arguments ---------------------------------------------------------------------------


def recording(layout: Any) -> optax.GradientTransformationExtraArgs:
    """Keeps what it was given: the largest error, the loss, and the names."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        assert sorted(extra) == ["also", "seen", "value"]
        return updates, {"seen": extra["seen"], "also": extra["also"], "value": extra["value"]}

    zeros = {"seen": jnp.zeros(()), "also": jnp.zeros(8), "value": jnp.zeros(())}
    return optax.GradientTransformationExtraArgs(lambda params: zeros, update)


@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "auto"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_extra_arguments_reach_the_optimizer(accumulate: int, explicit: bool) -> None:
    batch = small_batch(size=48)
    run = Run(
        SMALL,
        N,
        explicit,
        loss=aux_loss,
        make=recording,
        has_aux=True,
        aux_reduction="max",
        accumulate=accumulate,
        extra_args=lambda aux: {"seen": aux["largest"], "also": 2 * aux["by dim"]["first"]},
    )
    metrics = run(batch)
    want = wanted(batch, N * accumulate, "max")
    np.testing.assert_allclose(run.state["seen"], want["largest"], rtol=1e-5)
    np.testing.assert_allclose(run.state["also"], 2 * want["by dim"]["first"], rtol=1e-5)
    np.testing.assert_array_equal(run.state["value"], metrics["loss"])


def test_optimizers_without_extra_arguments_take_no_notice() -> None:
    options = {"loss": aux_loss, "has_aux": True}
    plain = Run(SMALL, N, make=lambda layout: optax.sgd(0.1), **options)
    extra = Run(
        SMALL,
        N,
        make=lambda layout: optax.sgd(0.1),
        extra_args=lambda aux: {"largest": aux["largest"]},
        **options,
    )
    jax.tree.map(np.testing.assert_array_equal, plain(small_batch()), extra(small_batch()))
    jax.tree.map(np.testing.assert_array_equal, plain.params, extra.params)


# ---- what it costs -----------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", ["max", "sum"])
def test_the_aux_costs_one_small_all_reduce(name: str, accumulate: int) -> None:
    """Whatever the micro-batches, and beside it the step sends what it sent."""

    def with_aux(shape: tuple[int, ...]) -> Any:
        def loss(params: Any, batch: Any) -> Any:
            e = errors(params, batch)
            return e.mean(), jnp.broadcast_to(e.max(), shape)

        return loss

    def audit(**options: Any) -> mfsdp.Audit:
        run = Run(SMALL, N, accumulate=accumulate, **options)
        return mfsdp.audit(run.step, run.owned, run.state, small_batch(size=48))

    options = {
        "has_aux": True,
        "aux_reduction": name,
        "make": lambda layout: optax.chain(
            mfsdp.muon(0.1, layout=layout, rest=optax.sgd(0.1)), optax.identity()
        ),
        "extra_args": lambda aux: {"seen": aux},
    }
    without = audit(make=options["make"])
    for shape in ((), (5,)):
        found = audit(loss=with_aux(shape), **options)
        size = int(np.prod(shape))
        assert found.bytes("all-reduce") == without.bytes("all-reduce") + 4 * size
        for kind in ("all-gather", "reduce-scatter", "all-to-all", "collective-permute"):
            assert found.bytes(kind) == without.bytes(kind)
        if name == "max":  # no other all-reduce of the step is a maximum, so it stands alone
            assert found.count("all-reduce") == without.count("all-reduce") + 1
            assert len(found.scalars) == len(without.scalars) + (size == 1)
        found.assert_no_matrix_collectives("mfsdp.optimizer")


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reduction", ["min", "Mean", {"largest": "max", "by dim": "median"}, 3, np.mean]
)
def test_unknown_reductions_raise_at_construction(reduction: Any) -> None:
    layout = mfsdp.plan(SMALL.params, jax.make_mesh((N,), ("fsdp",)))
    with pytest.raises(ValueError, match=r"aux_reduction .* is unknown.*'max', 'mean', 'sum'"):
        mfsdp.train_step(aux_loss, optax.sgd(1.0), layout, has_aux=True, aux_reduction=reduction)


@pytest.mark.parametrize("reduction", [None, {"largest": None}])
def test_no_reduction_raises_at_construction(reduction: Any) -> None:
    """None is an empty tree to jax, and would pass for no reduction to check."""
    layout = mfsdp.plan(SMALL.params, jax.make_mesh((N,), ("fsdp",)))
    with pytest.raises(ValueError, match="aux_reduction"):
        mfsdp.train_step(aux_loss, optax.sgd(1.0), layout, has_aux=True, aux_reduction=reduction)


def test_a_tree_of_another_structure_is_refused() -> None:
    run = Run(
        SMALL, N, loss=aux_loss, has_aux=True, aux_reduction={"largest": "max", "other": "sum"}
    )
    with pytest.raises(ValueError, match="other"):
        run(small_batch())


def test_extra_arguments_need_an_aux() -> None:
    layout = mfsdp.plan(SMALL.params, jax.make_mesh((N,), ("fsdp",)))
    for options in ({"extra_args": lambda aux: {"a": aux}}, {"aux_reduction": "max"}):
        with pytest.raises(ValueError, match=r"extra_args .* needs has_aux=True"):
            mfsdp.train_step(mean_loss, optax.sgd(1.0), layout, **options)
