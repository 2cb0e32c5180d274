"""HSDP with owner storage: an owner in each replica, or one global owner."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import matrixfsdp_jax as mfsdp
from tests import test_training as training
from tests.test_training import PROBLEMS, Curve, assert_trees_close, optimizer, train_alone

SIZES = {"2x4": (2, 4), "4x2": (4, 2)}
STEPS = 4


def mesh_of(name: str, kind: AxisType = AxisType.Auto) -> Any:
    return jax.make_mesh(SIZES[name], ("replica", "fsdp"), axis_types=(kind,) * 2)


def make_soap(layout: Any = None, given: Any = None) -> optax.GradientTransformation:
    return mfsdp.soap(
        0.01, layout=layout, rules=given, precondition_frequency=2, start_preconditioning_step=12,
        grafting=mfsdp.AdamGrafting(), weight_decay=0.1, rest=optax.adam(1e-3),
    )  # fmt: skip


MAKERS: dict[str, Any] = {"muon": optimizer, "soap": make_soap}


class Run(training.Run):
    """As in the tests of the train step, on a mesh of replicas."""

    def __init__(
        self, mesh: Any, replicas: str, name: str = "muon", problem: str = "tiny", **options: Any
    ) -> None:
        chosen = PROBLEMS[problem]
        self.layout = mfsdp.plan(
            chosen.params,
            mesh,
            rules=chosen.given,
            optimizer=name,
            replica_axis="replica",
            replicas=replicas,
        )
        self.tx = MAKERS[name](self.layout)
        self.owned = self.layout.shard(chosen.params)
        self.state = self.layout.init(self.tx, self.owned)
        self.step = mfsdp.train_step(chosen.loss, self.tx, self.layout, **options)


@pytest.fixture(scope="module")
def alone() -> dict[Any, Curve]:
    cases = [("tiny", "muon"), ("deep", "muon"), ("tiny", "soap")]
    return {
        (p, name): train_alone(PROBLEMS[p], MAKERS[name](given=PROBLEMS[p].given), STEPS)
        for p, name in cases
    }


CASES = [
    ("2x4", "each", AxisType.Auto, "tiny", "muon"),
    ("2x4", "shared", AxisType.Auto, "tiny", "muon"),
    ("4x2", "shared", AxisType.Explicit, "deep", "muon"),
    ("4x2", "each", AxisType.Explicit, "tiny", "soap"),
    ("2x4", "shared", AxisType.Explicit, "tiny", "soap"),
]


@pytest.mark.parametrize(("mesh", "replicas", "kind", "problem", "name"), CASES)
def test_training_equals_single_device_training(
    alone: dict[Any, Curve], mesh: str, replicas: str, kind: AxisType, problem: str, name: str
) -> None:
    run = Run(mesh_of(mesh, kind), replicas, name, problem)
    assert run.layout.sharing == (replicas == "shared")
    losses, _, (_, grad_norm, update_norm) = alone[problem, name]
    for k, batch in enumerate(PROBLEMS[problem].batches[:STEPS]):
        metrics = run(batch)
        np.testing.assert_allclose(metrics["loss"], losses[k], atol=2e-5)
        if k == 0:
            np.testing.assert_allclose(metrics["grad_norm"], grad_norm, rtol=1e-5)
            np.testing.assert_allclose(metrics["update_norm"], update_norm, rtol=1e-5)
    evaluate = mfsdp.eval_step(PROBLEMS[problem].loss, run.layout)
    held_out = PROBLEMS[problem].batches[-1]
    want = PROBLEMS[problem].loss(run.params, held_out)
    np.testing.assert_allclose(evaluate(run.owned, held_out), want, atol=2e-5)


def test_accumulation_and_skipped_steps_where_replicas_share() -> None:
    run = Run(mesh_of("2x4"), "shared")
    whole = Run(mesh_of("2x4"), "shared", accumulate=3)
    batch = PROBLEMS["tiny"].batches[0]
    run(batch), whole(batch)
    assert_trees_close(run.params, whole.params, 1e-5)
    layout = run.layout
    tx = mfsdp.skip_nonfinite(optimizer(layout), layout=layout)
    grads = jax.device_put(layout.trainable(run.owned), layout.update_shardings)
    key = next(iter(grads.stacks))
    grads.stacks[key] = grads.stacks[key].at[0, 0, 0, 0].set(np.nan)
    updates, state = jax.jit(tx.update)(grads, layout.init(tx, run.owned), run.owned)
    assert state.skipped == 1
    assert_trees_close(layout.apply_updates(run.owned, updates), run.owned, 0)


@pytest.mark.parametrize("replicas", ["each", "shared"])
def test_in_your_own_shard_map(replicas: str) -> None:
    """Local gradients, update and new parameters, as ``train_step`` makes them on global arrays."""
    run = Run(mesh_of("2x4"), replicas, donate=False)
    layout, batch = run.layout, PROBLEMS["tiny"].batches[0]
    state_specs = layout.state_specs(run.tx)

    def step(owned: Any, state: Any, batch: Any) -> Any:
        _, grads = layout.value_and_grad(PROBLEMS["tiny"].loss)(owned, batch)
        updates, state = run.tx.update(grads, state, layout.trainable(owned))
        return layout.apply_updates(owned, updates), state

    mapped = jax.shard_map(
        step,
        mesh=layout.mesh,
        in_specs=(layout.specs, state_specs, P(("replica", "fsdp"))),
        out_specs=(layout.specs, state_specs),
    )
    owned, _ = jax.jit(mapped)(run.owned, run.state, mfsdp.shard_batch(layout, batch))
    run(batch)
    assert_trees_close(jax.device_get(owned), jax.device_get(run.owned), 1e-6)


def kinds(audit: Any) -> list[tuple[Any, ...]]:
    return sorted({(c.kind, c.axis) for c in audit.matrices})


@pytest.mark.parametrize("replicas", ["each", "shared"])
def test_what_a_step_sends(replicas: str) -> None:
    run = Run(mesh_of("2x4"), replicas)
    batch = PROBLEMS["tiny"].batches[0]
    audit = mfsdp.audit(run.step.lower(run.owned, run.state, batch))
    found = set(kinds(audit))
    assert ("all-gather", ("fsdp",)) in found
    assert ("reduce-scatter", ("fsdp",)) in found
    assert (("all-reduce", ("replica",)) in found) == (replicas == "each")
    assert (("reduce-scatter", ("replica",)) in found) == (replicas == "shared")
    assert (("all-gather", ("replica",)) in found) == (replicas == "shared")
    grads = jax.device_put(run.layout.trainable(run.owned), run.layout.update_shardings)
    update = mfsdp.audit(run.tx.update, grads, run.state, grads)
    update.assert_no_matrix_collectives()


def test_state_is_split_over_all_devices_where_replicas_share() -> None:
    each, shared = (Run(mesh_of("2x4"), replicas) for replicas in ("each", "shared"))

    def waves(run: Run) -> dict[str, int]:
        stacks = [
            (keys, x) for keys, x in jax.tree_util.tree_leaves_with_path(run.state) if x.ndim == 4
        ]
        assert stacks
        return {str(keys): x.sharding.shard_shape(x.shape)[1] for keys, x in stacks}

    for keys, number in waves(shared).items():
        assert number == -(-waves(each)[keys] // 2)


def test_auto_shares_unless_that_makes_many_pads() -> None:
    mesh = mesh_of("2x4")
    full = {f"w{i}": np.zeros((8, 8), np.float32) for i in range(8)}
    assert mfsdp.plan(full, mesh, replica_axis="replica").sharing
    few = {f"w{i}": np.zeros((8, 8), np.float32) for i in range(4)}
    assert not mfsdp.plan(few, mesh, replica_axis="replica").sharing


def test_axes_that_the_layout_does_not_use_are_left_to_the_model() -> None:
    """A tensor axis inside the loss: the partitioner cuts the products, gradients stay right."""
    problem = PROBLEMS["tiny"]
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    layout = mfsdp.plan(problem.params, mesh, rules=problem.given, replica_axis=())

    def loss(params: Any, batch: Any) -> Any:
        kernel = params["block_0"]["up"]["kernel"]
        inside = jax.sharding.get_abstract_mesh()
        cut = jax.lax.with_sharding_constraint(kernel, NamedSharding(inside, P(None, "tensor")))
        params = {**params, "block_0": {**params["block_0"], "up": {"kernel": cut}}}
        return problem.loss(params, batch)

    tx = optimizer(layout)
    owned = layout.shard(problem.params)
    step = mfsdp.train_step(loss, tx, layout)
    owned, _, metrics = step(owned, layout.init(tx, owned), problem.batches[0])
    losses, first, _ = train_alone(problem, optimizer(given=problem.given), 1)
    np.testing.assert_allclose(metrics["loss"], losses[0], atol=1e-5)
    assert_trees_close(jax.tree.map(np.asarray, layout.unshard(owned)), first, 1e-5)


def test_axes_must_be_said() -> None:
    mesh, params = mesh_of("2x4"), PROBLEMS["tiny"].params
    with pytest.raises(ValueError, match=r"Say what they are: replica_axis=\('replica',\)"):
        mfsdp.plan(params, mesh)
    with pytest.raises(ValueError, match="each once"):
        mfsdp.plan(params, mesh, replica_axis="fsdp")
    with pytest.raises(ValueError, match="replicas='some' must be"):
        mfsdp.plan(params, mesh, replica_axis="replica", replicas="some")
    with pytest.raises(ValueError, match="is for owner storage"):
        mfsdp.plan(params, mesh, replica_axis="replica", owner_axis="fsdp", storage="sharded")
