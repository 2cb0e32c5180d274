"""Owner training against single-device training, and every option of the two steps."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.layout import rules
from tests.models import TINY_RULES, make_mesh, tiny_batches, tiny_loss, tiny_params

Curve = tuple[list[float], Any, Any]
COUNTS = (1, 2, 3, 4, 8)


# ---- models ------------------------------------------------------------------------------------


def deep_params(depth: int = 8, width: int = 12) -> dict[str, np.ndarray]:
    """``depth`` square matrices in one leaf: a count that 1, 2, 4 and 8 divide and 3 does not."""
    rng = np.random.default_rng(3)
    stack = 0.3 * rng.standard_normal((depth, width, width)).astype(np.float32)
    return {"layers": stack, "bias": np.zeros((depth, width), np.float32)}


def deep_loss(params: Any, batch: Any) -> jax.Array:
    def layer(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        weight, bias = layer
        return x + jnp.tanh(x @ weight + bias[None]), None

    x, _ = jax.lax.scan(layer, batch["x"], (params["layers"], params["bias"]))
    return jnp.mean((x - batch["y"]) ** 2)


def deep_batches(count: int) -> list[dict[str, np.ndarray]]:
    x = np.random.default_rng(4).standard_normal((count, 24, 12)).astype(np.float32)
    return [{"x": b, "y": np.roll(b, 1, axis=1)} for b in x]


class Problem(NamedTuple):
    params: Any
    loss: Any
    batches: Any
    given: Any


PROBLEMS = {
    # 3 square and 2 wide matrices: fewer than 8, and 3, 2 and 1 divide some of them.
    "tiny": Problem(tiny_params(1), tiny_loss, tiny_batches(20), TINY_RULES()),
    "deep": Problem(
        deep_params(), deep_loss, deep_batches(20), [rules.stacked("layers"), rules.rest("bias")]
    ),
}


def optimizer(layout: Any = None, given: Any = None) -> optax.GradientTransformation:
    """Clipping, momentum, decay and a schedule, all on."""
    return optax.chain(
        mfsdp.clip_by_global_norm(0.1, layout=layout),
        mfsdp.muon(
            optax.linear_schedule(0.02, 0.01, 20),
            layout=layout,
            rules=given,
            rest=optax.adamw(1e-3),
            weight_decay=0.1,
        ),
    )


def train_alone(problem: Problem, tx: optax.GradientTransformation, steps: int = 20) -> Curve:
    """Losses, parameters after one step, and metrics of one step; plain jit on one device."""

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(problem.loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        norms = optax.tree.norm(grads), optax.tree.norm(updates)
        return optax.apply_updates(params, updates), state, (loss, *norms)

    params = jax.tree.map(jnp.asarray, problem.params)
    state, metrics, first = tx.init(params), [], None
    for batch in problem.batches[:steps]:
        params, state, out = step(params, state, batch)
        first = params if first is None else first
        metrics.append([float(x) for x in out])
    return [m[0] for m in metrics], first, metrics[0]


@pytest.fixture(scope="module")
def alone() -> dict[str, Curve]:
    return {k: train_alone(p, optimizer(given=p.given)) for k, p in PROBLEMS.items()}


class Run:
    """A layout, an optimizer and a train step on a problem."""

    def __init__(
        self,
        problem: Problem,
        n: int = 8,
        explicit: bool = True,
        make: Any = optimizer,
        loss: Any = None,
        plan: Any = None,
        **options: Any,
    ) -> None:
        mesh = make_mesh(n, explicit)
        self.layout = mfsdp.plan(problem.params, mesh, rules=problem.given, **(plan or {}))
        self.tx = make(self.layout)
        self.owned = self.layout.shard(problem.params)
        self.state = self.layout.init(self.tx, self.owned)
        self.step = mfsdp.train_step(loss or problem.loss, self.tx, self.layout, **options)

    def __call__(self, batch: Any, **inputs: Any) -> dict[str, Any]:
        self.owned, self.state, metrics = self.step(self.owned, self.state, batch, **inputs)
        return metrics

    @property
    def params(self) -> Any:
        return jax.tree.map(np.asarray, self.layout.unshard(self.owned))


def assert_trees_close(got: Any, want: Any, atol: float) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (keys, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        np.testing.assert_allclose(
            np.asarray(a, np.float32),
            np.asarray(b, np.float32),
            rtol=0,
            atol=atol,
            err_msg=jax.tree_util.keystr(keys),
        )


# ---- the main promise --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "n", "explicit"),
    [(name, n, True) for name in PROBLEMS for n in COUNTS] + [("tiny", 8, False)],
)
def test_owner_training_equals_single_device_training(
    alone: dict[str, Curve], compilations: list[str], name: str, n: int, explicit: bool
) -> None:
    losses, first, (loss, grad_norm, update_norm) = alone[name]
    problem = PROBLEMS[name]
    run = Run(problem, n, explicit)
    metrics = run(problem.batches[0])
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], grad_norm, rtol=1e-5)
    np.testing.assert_allclose(metrics["update_norm"], update_norm, rtol=1e-5)
    assert_trees_close(run.params, first, atol=1e-5)

    compilations.clear()
    got = [loss] + [float(run(batch)["loss"]) for batch in problem.batches[1:]]
    assert compilations == []
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(got, losses, atol=1e-4)


def test_two_mesh_axes_own_together() -> None:
    problem, one = PROBLEMS["tiny"], Run(PROBLEMS["tiny"])
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
    layout = mfsdp.plan(problem.params, mesh, owner_axis=("data", "fsdp"), rules=problem.given)
    tx = optimizer(layout)
    owned = layout.shard(problem.params)
    state, step = layout.init(tx, owned), mfsdp.train_step(problem.loss, tx, layout)
    for batch in problem.batches[:3]:
        owned, state, metrics = step(owned, state, batch)
        assert_trees_close(metrics, one(batch), atol=1e-6)


@pytest.mark.parametrize("width", [32, 20])
def test_the_same_gradients_give_the_same_update_on_every_device_count(width: int) -> None:
    """Bit for bit where all dims are multiples of 32; three steps, so that momentum takes part."""
    params = tiny_params(1, width)
    grads = [
        jax.tree.map(
            lambda x, seed=seed: np.random.default_rng(seed).standard_normal(x.shape, np.float32),
            params,
        )
        for seed in range(3)
    ]
    results = []
    for n in COUNTS:
        layout = mfsdp.plan(params, make_mesh(n), rules=TINY_RULES(width))
        tx = mfsdp.muon(0.02, layout=layout, weight_decay=0.1, rest=optax.sgd(0.1, momentum=0.9))
        owned = layout.shard(params)
        state, update = layout.init(tx, owned), jax.jit(tx.update)
        for g in grads:
            updates, state = update(layout.shard(g), state, owned)
        results.append(jax.tree.map(np.asarray, layout.unshard(updates)))
    for n, result in zip(COUNTS[1:], results[1:], strict=True):
        if width % 32 == 0:
            jax.tree.map(np.testing.assert_array_equal, result, results[0])
        else:
            assert_trees_close(result, results[0], atol=1e-6)
        assert n  # named in the locals of a failure
    alone = mfsdp.muon(
        0.02, rules=TINY_RULES(width), weight_decay=0.1, rest=optax.sgd(0.1, momentum=0.9)
    )
    state, update = alone.init(params), jax.jit(alone.update)
    for g in grads:
        updates, state = update(g, state, params)
    assert_trees_close(results[-1], updates, atol=1e-6)


def test_pad_slots_stay_zero_for_fifty_steps() -> None:
    problem = PROBLEMS["tiny"]
    run = Run(problem)
    for i in range(50):
        run(problem.batches[i % 20])
    moments = [s for s in jax.tree.leaves(run.state, is_leaf=is_muon_state) if is_muon_state(s)]
    assert len(moments) == 1
    assert int(moments[0].count) == 50
    for c in run.layout.plan.classes:
        assert c.num_pads > 0
        pads = np.ones((c.num_devices, c.num_waves), bool)
        pads[tuple(zip(*c.slots, strict=True))] = False
        for stacks in (run.owned.stacks, moments[0].mu):
            stack = np.asarray(stacks[c.key])
            assert not stack[pads].any()
            assert all(matrix.any() for matrix in stack[~pads])


def is_muon_state(x: Any) -> bool:
    return isinstance(x, mfsdp.MuonState)


# ---- own loops ---------------------------------------------------------------------------------


@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "auto"])
def test_own_loop_under_plain_jit(
    alone: dict[str, Curve], compilations: list[str], explicit: bool
) -> None:
    """With ``optax.apply_updates`` and donation right after init."""
    problem = PROBLEMS["tiny"]
    layout = mfsdp.plan(problem.params, make_mesh(8, explicit), rules=problem.given)
    tx = optimizer(layout)
    value_and_grad = layout.value_and_grad(problem.loss)

    @jax.jit(donate_argnums=(0, 1))
    def step(owned: Any, state: Any, batch: Any) -> Any:
        loss, grads = value_and_grad(owned, batch)
        updates, state = tx.update(grads, state, owned)
        return optax.apply_updates(owned, updates), state, loss

    owned = layout.shard(problem.params)
    state = layout.init(tx, owned)
    owned, state, loss = step(owned, state, problem.batches[0])
    losses = [float(loss)]
    assert_trees_close(layout.unshard(owned), alone["tiny"][1], atol=1e-5)
    compilations.clear()
    for batch in problem.batches[1:]:
        owned, state, loss = step(owned, state, batch)
        losses.append(float(loss))
    assert compilations == []
    np.testing.assert_allclose(losses, alone["tiny"][0], atol=1e-4)


@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "auto"])
def test_own_loop_inside_the_users_shard_map(
    alone: dict[str, Curve], compilations: list[str], explicit: bool
) -> None:
    problem = PROBLEMS["tiny"]
    layout = mfsdp.plan(problem.params, make_mesh(8, explicit), rules=problem.given)
    tx = optimizer(layout)
    specs, state_specs = layout.specs, layout.state_specs(tx)
    data = jax.P("fsdp", None)

    @jax.jit(donate_argnums=(0, 1))
    @jax.shard_map(
        mesh=layout.mesh,
        in_specs=(specs, state_specs, data),
        out_specs=(specs, state_specs, jax.P()),
        check_vma=True,
    )
    def step(owned: Any, state: Any, batch: Any) -> Any:
        loss, grads = layout.value_and_grad(problem.loss)(owned, batch)
        updates, state = tx.update(grads, state, owned)
        return layout.apply_updates(owned, updates), state, loss

    owned = layout.shard(problem.params)
    state = layout.init(tx, owned)
    losses = []
    for batch in problem.batches:
        owned, state, loss = step(owned, state, mfsdp.shard_batch(layout, batch))
        losses.append(float(loss))
    np.testing.assert_allclose(losses, alone["tiny"][0], atol=1e-4)
    assert compilations.count("jit(step)") == 1


def test_donation_eats_owner_params_and_never_the_users_arrays() -> None:
    problem = PROBLEMS["deep"]
    params = jax.tree.map(jnp.asarray, problem.params)
    problem = problem._replace(params=params)
    for donate in (True, False):
        run = Run(problem, donate=donate)
        before = (run.owned, run.state)
        run(problem.batches[0])
        deleted = [x.is_deleted() for x in jax.tree.leaves(before)]
        assert all(deleted) if donate else not any(deleted)
        run(problem.batches[1])
    jax.tree.map(np.testing.assert_array_equal, params, PROBLEMS["deep"].params)


@pytest.mark.slow
def test_two_processes_feed_their_own_halves_of_the_batch() -> None:
    """Twelve examples per process on eight devices: the global batch divides, the halves do not."""
    program = Path(__file__).parent / "two_processes.py"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    run = Run(PROBLEMS["tiny"])
    want = [float(run(batch)["loss"]) for batch in PROBLEMS["tiny"].batches[:2]]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
        got = [float(x) for x in output.splitlines()[-1].split()]
        np.testing.assert_allclose(got, want, atol=1e-5)


# ---- a small problem for the options -----------------------------------------------------------


def small_params(dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    return {"w": rng.standard_normal((8, 8)).astype(dtype), "bias": np.zeros(8, dtype)}


def small_batch(seed: int = 6, size: int = 24) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((2, size, 8)).astype(np.float32)
    return {"x": x, "y": y, "weight": rng.integers(0, 3, size).astype(np.float32)}


def errors(params: Any, batch: Any) -> jax.Array:
    """Squared error of each example."""
    predicted = batch["x"] @ params["w"] + jnp.broadcast_to(params["bias"], batch["y"].shape)
    return jnp.mean((predicted - batch["y"]) ** 2, axis=-1)


def mean_loss(params: Any, batch: Any) -> jax.Array:
    return errors(params, batch).mean()


def weighted_loss(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    return jnp.sum(batch["weight"] * errors(params, batch)), jnp.sum(batch["weight"])


SMALL = Problem(small_params(), mean_loss, [small_batch(s) for s in range(3)], None)


def sgd(layout: Any) -> optax.GradientTransformation:
    """Shows the gradient itself in the parameters."""
    return optax.sgd(1.0)


def test_accumulation_is_the_mean_over_micro_batches() -> None:
    for loss in (mean_loss, weighted_loss):
        whole = Run(SMALL, 2, make=sgd, loss=loss)
        split = Run(SMALL, 2, make=sgd, loss=loss, accumulate=3)
        for batch in SMALL.batches:
            want, got = whole(batch), split(batch)
            assert_trees_close(got, want, atol=1e-5)
        assert_trees_close(split.params, whole.params, atol=1e-5)


def test_a_weighted_loss_is_the_mean_over_all_tokens() -> None:
    """Devices and micro-batches with few or no tokens count for what they have."""
    batch = small_batch()
    weight = np.ones((2, 3, 4), np.float32)  # [device, micro-batch, example]
    weight[:, 1] = 0  # an empty micro-batch on every device
    weight[0, 2] = 0  # and one on one device alone
    weight[1, 2, :3] = 0
    batch["weight"] = weight.reshape(24)
    want = np.average(np.asarray(errors(SMALL.params, batch)), weights=batch["weight"])
    grads = jax.grad(lambda p: jnp.divide(*weighted_loss(p, batch)))(SMALL.params)
    stepped = jax.tree.map(lambda p, g: p - g, SMALL.params, grads)
    for accumulate in (1, 3):
        run = Run(SMALL, 2, make=sgd, loss=weighted_loss, accumulate=accumulate)
        np.testing.assert_allclose(run(batch)["loss"], want, rtol=1e-5)
        assert_trees_close(run.params, stepped, atol=1e-5)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_batch_without_any_token_changes_nothing(accumulate: int) -> None:
    batch = small_batch() | {"weight": np.zeros(24, np.float32)}
    run = Run(SMALL, 2, make=sgd, loss=weighted_loss, accumulate=accumulate)
    assert float(run(batch)["loss"]) == 0.0
    jax.tree.map(np.testing.assert_array_equal, run.params, SMALL.params)


def test_newton_schulz_runs_once_per_step_whatever_the_micro_batches() -> None:
    def matmuls(accumulate: int) -> int:
        run = Run(SMALL, 2, accumulate=accumulate)
        traced = run.step._jitted.trace(
            *run.step._prepare(run.owned, run.state, small_batch(), None, None)
        )
        return count_matmuls(traced.jaxpr.jaxpr, False)

    assert matmuls(1) == matmuls(3) >= 15  # three products in each of five steps


def count_matmuls(jaxpr: Any, inside: bool) -> int:
    """Executions of matrix products under the scope of Newton-Schulz, loops multiplied out."""
    total = 0
    for eqn in jaxpr.eqns:
        here = inside or "newton_schulz" in str(eqn.source_info.name_stack)
        total += here and eqn.primitive.name == "dot_general"
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for sub in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(sub):
                total += times * count_matmuls(getattr(sub, "jaxpr", sub), here)
    return total


def is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")


def test_aux_is_averaged_over_devices_and_micro_batches() -> None:
    def loss(params: Any, batch: Any) -> Any:
        e = errors(params, batch)
        aux = {"largest": e.max(), "all": batch["x"].mean(0), "count": e.size, "three": 3.0}
        return e.mean(), aux

    for accumulate in (1, 3):
        run = Run(SMALL, 2, loss=loss, has_aux=True, accumulate=accumulate)
        batch = small_batch()
        parts = np.asarray(errors(SMALL.params, batch)).reshape(2 * accumulate, -1)
        aux = run(batch)["aux"]
        np.testing.assert_allclose(aux["largest"], parts.max(axis=1).mean(), rtol=1e-5)
        np.testing.assert_allclose(aux["all"], batch["x"].mean(0), atol=1e-6)
        assert float(aux["count"]) == 24 / (2 * accumulate)
        assert float(aux["three"]) == 3.0


def keyed_loss(params: Any, batch: Any, key: jax.Array, model_state: Any) -> Any:
    """Writes what each device and micro-batch draws into a table ``[devices, micro-batches]``."""
    drawn = jax.random.uniform(key)
    place = jax.lax.axis_index("fsdp"), model_state["count"]
    state = {"drawn": model_state["drawn"].at[place].set(drawn), "count": model_state["count"] + 1}
    kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return mean_loss(params, batch | {"x": batch["x"] * kept}), state


def test_keys_differ_by_device_and_micro_batch_and_repeat() -> None:
    reduction = {"drawn": "sum", "count": "max"}
    options = {"loss": keyed_loss, "accumulate": 3, "model_state_reduction": reduction}

    def draw(key: jax.Array) -> tuple[np.ndarray, Any, int]:
        run = Run(SMALL, 4, **options)
        state = {"drawn": np.zeros((4, 3), np.float32), "count": np.int32(0)}
        run.owned, _, state, _ = run.step(
            run.owned, run.state, small_batch(), key=key, model_state=state
        )
        return np.asarray(state["drawn"]), run.params, int(state["count"])

    first, params, count = draw(jax.random.key(1))
    again, same_params, _ = draw(jax.random.key(1))
    other, other_params, _ = draw(jax.random.key(2))
    assert count == 3
    assert len(set(first.ravel().tolist())) == 12
    np.testing.assert_array_equal(first, again)
    jax.tree.map(np.testing.assert_array_equal, params, same_params)
    assert not np.isin(first, other).any()
    assert np.abs(params["w"] - other_params["w"]).max() > 1e-6


def counting_loss(params: Any, batch: Any, model_state: Any) -> Any:
    new = {
        "mean": model_state["mean"] + batch["x"].mean(),
        "sum": model_state["sum"] + batch["x"].sum(),
        "max": {"of": jnp.maximum(model_state["max"]["of"], batch["x"].max())},
    }
    return mean_loss(params, batch), new


@pytest.mark.parametrize("accumulate", [1, 3])
def test_model_state_with_each_reduction(accumulate: int, compilations: list[str]) -> None:
    run = Run(
        SMALL,
        2,
        loss=counting_loss,
        accumulate=accumulate,
        model_state_reduction={"mean": "mean", "sum": "sum", "max": "max"},
    )
    start = {"mean": jnp.float32(1), "sum": jnp.float32(0), "max": {"of": jnp.float32(-9)}}
    x = small_batch()["x"]
    run.owned, run.state, state, metrics = run.step(
        run.owned, run.state, small_batch(), model_state=start
    )
    want = {"mean": 1 + accumulate * x.mean(), "sum": x.sum(), "max": {"of": x.max()}}
    assert_trees_close(state, want, atol=1e-4)
    assert "aux" not in metrics
    compilations.clear()
    run.step(run.owned, run.state, small_batch(7), model_state=state)
    assert compilations == []


def test_model_state_next_to_aux_is_donated_but_numpy_is_not_written() -> None:
    def loss(params: Any, batch: Any, model_state: Any) -> Any:
        value, new = counting_loss(params, batch, model_state)
        return value, (new, {"twice": 2 * value})

    run = Run(SMALL, 2, loss=loss, has_aux=True, model_state_reduction="max")
    given = {
        "mean": np.ones(64, np.float32),
        "sum": np.ones(64, np.float32),
        "max": {"of": np.ones(64, np.float32)},
    }
    copy = jax.tree.map(np.copy, given)
    run.owned, run.state, state, metrics = run.step(
        run.owned, run.state, small_batch(), model_state=given
    )
    jax.tree.map(np.testing.assert_array_equal, given, copy)
    np.testing.assert_allclose(metrics["aux"]["twice"], 2 * metrics["loss"], rtol=1e-6)
    run.step(run.owned, run.state, small_batch(), model_state=state)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))


def test_numpy_and_jax_batches_are_the_same() -> None:
    batch = small_batch()
    results = []
    for given in (batch, jax.tree.map(jnp.asarray, batch), None):
        run = Run(SMALL, 8)
        run(mfsdp.shard_batch(run.layout, batch) if given is None else given)
        results.append(run.params)
    for result in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, result, results[0])


@pytest.mark.parametrize("accumulate", [1, 3])
def test_bfloat16_parameters_stay_bfloat16(accumulate: int) -> None:
    seen = []

    def loss(params: Any, batch: Any) -> jax.Array:
        seen.append({x.dtype for x in jax.tree.leaves(params)})
        return mean_loss(params, batch).astype(jnp.bfloat16)

    problem = SMALL._replace(params=small_params(jnp.bfloat16))
    run = Run(problem, 2, loss=loss, accumulate=accumulate)
    metrics = run(small_batch())
    assert {x.dtype for x in jax.tree.leaves(run.owned)} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in metrics.values()} == {jnp.dtype(jnp.float32)}
    assert all(dtypes == {jnp.dtype(jnp.bfloat16)} for dtypes in seen)
    exact = Run(
        SMALL._replace(params=jax.tree.map(lambda x: x.astype(np.float32), problem.params)), 2
    )
    want = exact(small_batch())
    np.testing.assert_allclose(metrics["loss"], want["loss"], rtol=0.01)
    assert_trees_close(run.params, exact.params, atol=0.02)


def test_gather_dtype_is_that_of_the_model_alone() -> None:
    seen = []

    def loss(params: Any, batch: Any) -> jax.Array:
        seen.append({x.dtype for x in jax.tree.leaves(params)})
        return mean_loss(params, batch)

    run = Run(SMALL, 2, loss=loss, plan={"gather_dtype": jnp.bfloat16})
    got = run(small_batch())
    assert all(dtypes == {jnp.dtype(jnp.bfloat16)} for dtypes in seen)
    assert {x.dtype for x in jax.tree.leaves(run.owned)} == {jnp.dtype(jnp.float32)}
    exact = Run(SMALL, 2)
    np.testing.assert_allclose(got["loss"], exact(small_batch())["loss"], rtol=0.01)
    assert_trees_close(run.params, exact.params, atol=0.01)


def test_optax_clipping_means_the_same_in_the_step() -> None:
    def chained(clip: Any) -> Any:
        return lambda layout: optax.chain(clip(layout), optax.sgd(1.0))

    ours = Run(SMALL, make=chained(lambda layout: mfsdp.clip_by_global_norm(0.3, layout=layout)))
    theirs = Run(SMALL, make=chained(lambda layout: optax.clip_by_global_norm(0.3)))
    for batch in SMALL.batches:
        a, b = ours(batch), theirs(batch)
        assert float(a["grad_norm"]) > 0.3
        np.testing.assert_allclose(a["update_norm"], 0.3, rtol=1e-5)
        assert_trees_close(a, b, atol=1e-6)
    assert_trees_close(ours.params, theirs.params, atol=1e-6)


def test_the_loss_reaches_the_optimizer_as_value() -> None:
    def by_value(layout: Any) -> optax.GradientTransformationExtraArgs:
        def update(updates: Any, state: Any, params: Any = None, *, value: Any, **_: Any) -> Any:
            return updates, value

        return optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(()), update)

    run = Run(SMALL, make=by_value)
    metrics = run(small_batch())
    assert float(run.state) == float(metrics["loss"])


@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "auto"])
def test_a_non_finite_step_is_skipped_by_all_devices(explicit: bool) -> None:
    def around(layout: Any) -> optax.GradientTransformation:
        return optax.apply_if_finite(optimizer(layout), 3)

    def before(layout: Any) -> optax.GradientTransformation:
        return optax.chain(optax.apply_if_finite(optax.identity(), 3), optimizer(layout))

    bad = small_batch()
    bad["x"][0, 0] = np.nan  # one example of one device
    run, filtered = Run(SMALL, 8, explicit, around), Run(SMALL, 8, explicit, before)
    for each in (run, filtered):
        assert np.isnan(each(bad)["loss"])
    jax.tree.map(np.testing.assert_array_equal, run.params, SMALL.params)
    zero = jax.tree.map(lambda p: (1 - 0.02 * 0.1) * p, {"w": SMALL.params["w"]})
    assert_trees_close({"w": filtered.params["w"]}, zero, atol=1e-6)  # decay alone
    plain = Run(SMALL, 8, explicit)
    run(small_batch()), plain(small_batch())
    assert_trees_close(run.params, plain.params, atol=1e-6)


def test_frozen_leaves_train_nothing_and_reach_the_model() -> None:
    problem = SMALL._replace(given=[rules.frozen("w")])
    run = Run(problem, 8)
    metrics = run(small_batch())
    grads = jax.grad(mean_loss)(SMALL.params, small_batch())
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(grads["bias"]), rtol=1e-5)
    np.testing.assert_array_equal(run.params["w"], SMALL.params["w"])
    assert np.abs(run.params["bias"]).max() > 0
    assert run.layout.specs.stacks == {}


def test_steps_may_run_in_a_scan() -> None:
    one, many = Run(SMALL), Run(SMALL)
    want = [float(one(batch)["loss"]) for batch in SMALL.batches]

    @jax.jit
    def train(owned: Any, state: Any, batches: Any) -> Any:
        def body(carry: Any, batch: Any) -> Any:
            *carry, metrics = many.step(*carry, batch)
            return tuple(carry), metrics["loss"]

        return jax.lax.scan(body, (owned, state), batches)[1]

    batches = jax.tree.map(lambda *x: np.stack(x), *SMALL.batches)
    np.testing.assert_allclose(train(many.owned, many.state, batches), want, rtol=1e-5)


def test_a_step_lowers_from_shapes_alone() -> None:
    for explicit in (True, False):
        run = Run(SMALL, 8, explicit)
        abstract = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            run.state,
            run.layout.state_shardings(run.tx),
        )
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), small_batch())
        lowered = run.step.lower(run.layout.abstract, abstract, shapes)
        assert lowered.as_text() == run.step.lower(run.owned, run.state, small_batch()).as_text()


# ---- eval --------------------------------------------------------------------------------------


def test_eval_step_takes_scalars_pairs_and_trees_of_them() -> None:
    class Both(NamedTuple):
        first: Any
        second: Any

    def measure(params: Any, batch: Any, scale: Any, key: Any) -> Any:
        e = errors(params, batch)
        return {
            "mean": scale * e.mean(),
            "nested": {"weighted": weighted_loss(params, batch)},
            "half": e.mean().astype(jnp.bfloat16),
            "both": Both(e.mean(), 2 * e.mean()),
            "hits": ((e < 1).sum(), e.size),
            "key": jax.random.uniform(key),
        }

    batch, key = small_batch(), jax.random.key(3)
    layout = mfsdp.plan(SMALL.params, make_mesh(8))
    owned = layout.shard(SMALL.params)
    got = mfsdp.eval_step(measure, layout)(owned, batch, 10.0, key)
    e = np.asarray(errors(SMALL.params, batch))
    np.testing.assert_allclose(got["mean"], 10 * e.mean(), rtol=1e-5)
    want = np.average(e, weights=batch["weight"])
    np.testing.assert_allclose(got["nested"]["weighted"], want, rtol=1e-5)
    np.testing.assert_allclose(got["half"], e.mean(), rtol=0.01)
    np.testing.assert_allclose(got["both"], Both(e.mean(), 2 * e.mean()), rtol=1e-5)
    np.testing.assert_allclose(got["hits"], (e < 1).mean(), rtol=1e-6)
    np.testing.assert_allclose(got["key"], jax.random.uniform(key), rtol=1e-6)
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(jnp.float32)}
    alone = mfsdp.eval_step(mean_loss, layout)
    np.testing.assert_allclose(alone(owned, batch), e.mean(), rtol=1e-5)
    with pytest.raises(ValueError, match="do not divide over 8 devices"):
        alone(owned, small_batch(size=12))
    with pytest.raises(TypeError, match=r"layout\.shard\(params\)"):
        alone(SMALL.params, batch)


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [0, -1, True, 1.5])
def test_bad_accumulate(accumulate: Any) -> None:
    layout = mfsdp.plan(SMALL.params, make_mesh(2))
    with pytest.raises(ValueError, match=f"accumulate={accumulate}"):
        mfsdp.train_step(mean_loss, optax.sgd(1.0), layout, accumulate=accumulate)


@pytest.mark.parametrize("tolerated", [-1, True, 2.5, "3", None])
def test_tolerated_failures_must_be_a_count(tolerated: Any) -> None:
    layout = mfsdp.plan(SMALL.params, make_mesh(2))
    with pytest.raises(
        ValueError, match=f"tolerated_failures={tolerated!r} must be an integer >= 0"
    ):
        mfsdp.train_step(mean_loss, optax.sgd(1.0), layout, tolerated_failures=tolerated)


@pytest.mark.parametrize("reduction", ["min", {"a": "mean", "b": "first"}])
def test_unknown_reduction(reduction: Any) -> None:
    layout = mfsdp.plan(SMALL.params, make_mesh(2))
    with pytest.raises(ValueError, match=r"'(min|first)' is unknown.*'max', 'mean', 'sum'"):
        mfsdp.train_step(mean_loss, optax.sgd(1.0), layout, model_state_reduction=reduction)


def test_the_mean_of_an_integer_state_is_refused_by_name() -> None:
    run = Run(SMALL, 2, loss=keyed_loss, model_state_reduction="mean")
    state = {"drawn": np.zeros((2, 1), np.float32), "count": np.int32(0)}
    with pytest.raises(ValueError, match=r"\['count'\] is int32"):
        run.step(run.owned, run.state, small_batch(), key=jax.random.key(0), model_state=state)


@pytest.mark.parametrize(
    ("accumulate", "size", "message"),
    [
        (1, 12, "12 examples, which do not divide over 8 devices; give a multiple of 8"),
        (2, 24, r"over 8 devices x 2 micro-batches; give a multiple of 16"),
        (1, 0, "0 examples"),
    ],
)
def test_a_batch_that_does_not_divide(accumulate: int, size: int, message: str) -> None:
    run = Run(SMALL, 8, accumulate=accumulate)
    with pytest.raises(ValueError, match=message):
        run(small_batch(size=size))
    with pytest.raises(ValueError, match=message):
        run(jax.tree.map(jnp.asarray, small_batch(size=size)))


def test_a_batch_leaf_without_examples_is_named() -> None:
    run = Run(SMALL, 8)
    with pytest.raises(ValueError, match=r"\['step'\] of shape \(\) has no dim 0"):
        run(small_batch() | {"step": np.float32(1)})


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (errors, {}, r"must be a scalar .* got shape \(3,\)"),
        (lambda p, b: (1.0, 2.0, 3.0), {}, "a tuple of 3"),
        (lambda p, b: (mean_loss(p, b), {"aux": 1.0}), {}, "has_aux=True"),
        (mean_loss, {"has_aux": True}, r"returns \(loss, aux\)"),
        (lambda p, b: (mean_loss(p, b), 1, 2), {"has_aux": True}, r"returns \(loss, aux\)"),
    ],
)
def test_what_the_loss_may_not_return(loss: Any, options: dict[str, Any], message: str) -> None:
    run = Run(SMALL, 8, loss=loss, **options)
    with pytest.raises((ValueError, TypeError), match=message):
        run(small_batch())


def test_model_state_goes_with_its_reduction() -> None:
    run = Run(SMALL, 2, loss=counting_loss, model_state_reduction="max")
    with pytest.raises(ValueError, match="model_state missing, with model_state_reduction='max'"):
        run(small_batch())
    run = Run(SMALL, 2)
    with pytest.raises(ValueError, match="model_state with model_state_reduction=None"):
        run(small_batch(), model_state={"a": jnp.zeros(())})


def test_foreign_parameters_are_refused() -> None:
    run = Run(SMALL, 8)
    other = Run(SMALL, 4)
    with pytest.raises(ValueError, match="use the layout that sharded"):
        run.step(other.owned, run.state, small_batch())
    with pytest.raises(TypeError, match=r"layout\.shard\(params\)"):
        run.step(SMALL.params, run.state, small_batch())
    tiny = Run(PROBLEMS["tiny"], 8)
    with pytest.raises(ValueError, match="do not belong to this layout"):
        run.step(tiny.owned, run.state, small_batch())


def test_an_optimizer_of_another_layout_is_refused() -> None:
    run = Run(SMALL, 8)
    other = mfsdp.plan(SMALL.params, make_mesh(4))
    with pytest.raises(ValueError, match="use the layout that sharded"):
        mfsdp.train_step(mean_loss, mfsdp.muon(0.1, layout=other), run.layout)
    step = mfsdp.train_step(mean_loss, mfsdp.clip_by_global_norm(1.0, layout=other), run.layout)
    with pytest.raises(ValueError, match="use the layout that sharded"):
        step(run.owned, optax.EmptyState(), small_batch())


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64])
def test_a_loss_without_a_gradient_is_refused(dtype: Any) -> None:
    layout = mfsdp.plan({"w": np.ones((4, 8), np.float32)}, make_mesh(2))
    grad = layout.value_and_grad(lambda p, b: jnp.sum(p["w"]).astype(dtype))
    with pytest.raises(ValueError, match=f"the loss is {jnp.dtype(dtype).name} and has no gradi"):
        jax.eval_shape(grad, layout.abstract, np.ones((2, 1), np.float32))
