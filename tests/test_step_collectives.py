"""What the compiled programs send: nothing in the update, and what the plan says in the step."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.layout.costs import costs
from tests.models import TINY_RULES, make_mesh, tiny_batches, tiny_loss, tiny_params

BATCH = tiny_batches(1)[0]


class Setup:
    """A two-layer model in which one rest leaf per layer is too small to be sharded."""

    def __init__(self, n: int, explicit: bool = True, clip: bool = True) -> None:
        params = tiny_params(2)
        self.layout = mfsdp.plan(
            params, make_mesh(n, explicit), rules=TINY_RULES(), rest_shard_min_size=64
        )
        parts = [mfsdp.muon(0.1, layout=self.layout, weight_decay=0.1, rest=optax.adamw(0.1))]
        if clip:
            parts.insert(0, mfsdp.clip_by_global_norm(1.0, layout=self.layout))
        self.tx = optax.chain(*parts)
        self.owned = self.layout.shard(params)
        self.state = self.layout.init(self.tx, self.owned)
        self.batch = mfsdp.shard_batch(self.layout, BATCH)

    def step(self, **options: Any) -> mfsdp.Audit:
        step = mfsdp.train_step(tiny_loss, self.tx, self.layout, **options)
        return mfsdp.audit(step, self.owned, self.state, self.batch)


def assert_as_planned(
    found: mfsdp.Audit, layout: mfsdp.OwnerLayout, scalars: int, micro_batches: int = 1
) -> None:
    """Counts and bytes of every origin are those of the report, and there are no others.

    Args:
      found: the audit.
      layout: whose plan predicts.
      scalars: all-reduced scalars.
      micro_batches: gradients reduced per step. XLA moves the gathers out of their loop.
    """
    planned = costs(layout.plan)
    times = {"all-gather": 1, "reduce-scatter": micro_batches}
    for c in planned.collectives:
        if c.kind != "all-reduce":
            part = found.within(re.compile(rf"mfsdp\.gather\)*/{re.escape(c.source)}/"))
            assert part.count(c.kind) == c.count, (c, str(part))
            assert part.wire_bytes(c.kind) == c.total_bytes * times[c.kind], (c, str(part))
    for kind in ("all-gather", "reduce-scatter"):
        assert found.wire_bytes(kind) == planned.received(kind) * times[kind]
    # Compilers combine all-reduces: the replicated rest and the scalars, counted in elements.
    replicated = sum(
        lp.leaf.size
        for lp in layout.plan.leaves
        if lp.route.route == "rest" and lp.trainable and lp.shard_dim is None
    )
    assert replicated > 0
    assert found.bytes("all-reduce") == 4 * (micro_batches * replicated + scalars)
    assert {c.kind for c in found.collectives} == {"all-gather", "reduce-scatter", "all-reduce"}
    assert {c.axis for c in found.collectives} == {("fsdp",)}


@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "auto"])
@pytest.mark.parametrize("n", [2, 8])
def test_the_update_moves_no_matrix(n: int, explicit: bool) -> None:
    for clip in (False, True):
        s = Setup(n, explicit, clip)
        found = mfsdp.audit(jax.jit(s.tx.update), s.owned, s.state, s.owned)
        found.assert_no_matrix_collectives()
        assert found.count("all-reduce", scalar=True) == found.count() == clip


@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "auto"])
def test_skipping_and_accumulating_wrappers_move_no_matrix(explicit: bool) -> None:
    s = Setup(8, explicit, clip=False)
    wrappers = {optax.apply_if_finite(s.tx, 3): 1, optax.MultiSteps(s.tx, 2): 0}
    for tx, scalars in wrappers.items():
        state = s.layout.init(tx, s.owned)
        found = mfsdp.audit(jax.jit(tx.update), s.owned, state, s.owned)
        found.assert_no_matrix_collectives()
        assert found.count() == scalars


@pytest.mark.parametrize(("n", "explicit"), [(8, True), (8, False), (2, True), (3, True)])
def test_the_step_sends_what_the_plan_says(n: int, explicit: bool) -> None:
    """Three scalars: the loss, the gradient norm (that of the clipping too), the update norm."""
    s = Setup(n, explicit)
    found = s.step()
    assert_as_planned(found, s.layout, scalars=3)
    found.assert_no_matrix_collectives("mfsdp.metrics")


def test_micro_batches_repeat_the_reductions_and_not_the_gathers() -> None:
    """Two scalars more: the loss is reduced once per micro-batch."""
    s = Setup(8)
    assert_as_planned(s.step(accumulate=3), s.layout, scalars=3 + 2, micro_batches=3)


def test_a_recomputed_forward_gathers_once_more() -> None:
    """The user wraps gather and loss in ``jax.checkpoint`` in an own loop.

    Counted before XLA: its CPU compiler drops the barriers that keep the second pass apart.
    """
    s = Setup(2)
    layout, tx = s.layout, s.tx

    def count(wrap: Any) -> tuple[int, Any, Any]:
        @jax.shard_map(
            mesh=layout.mesh,
            in_specs=(layout.specs, layout.state_specs(tx), jax.P("fsdp", None)),
            out_specs=(layout.specs, layout.state_specs(tx), jax.P()),
        )
        def step(owned: Any, state: Any, batch: Any) -> Any:
            def loss_fn(owned: Any) -> jax.Array:
                return jax.lax.pmean(tiny_loss(layout.gather(owned), batch), "fsdp")

            loss, grads = jax.value_and_grad(wrap(loss_fn))(owned)
            updates, state = tx.update(grads, state, owned)
            return layout.apply_updates(owned, updates), state, loss

        lowered = jax.jit(step).lower(s.owned, s.state, s.batch)
        owned, _, loss = lowered.compile()(s.owned, s.state, s.batch)
        return lowered.as_text().count("stablehlo.all_gather"), owned, loss

    gathers = sum(c.count for c in costs(layout.plan).collectives if c.kind == "all-gather")
    once, owned, loss = count(lambda fn: fn)
    twice, again, loss_again = count(jax.checkpoint)
    assert (once, twice) == (gathers, 2 * gathers)
    step = mfsdp.train_step(tiny_loss, tx, layout, donate=False)
    want, _, metrics = step(s.owned, s.state, s.batch)
    for got, value in ((owned, loss), (again, loss_again)):
        assert abs(float(value) - float(metrics["loss"])) < 1e-6
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert float(jnp.abs(a - b).max()) < 1e-6


def test_frozen_leaves_are_gathered_and_send_no_gradient() -> None:
    params = tiny_params(1)
    layout = mfsdp.plan(
        params,
        make_mesh(8),
        rules=[*TINY_RULES(), mfsdp.rules.frozen("embed/*")],
        rest_shard_min_size=64,
    )
    tx = mfsdp.muon(0.1, layout=layout)
    owned = layout.shard(params)
    step = mfsdp.train_step(tiny_loss, tx, layout)
    found = mfsdp.audit(step, owned, layout.init(tx, owned), BATCH)
    assert_as_planned(found, layout, scalars=3)
    embedding = found.within("embed/embedding")
    assert embedding.count("all-gather") == embedding.count() == 1


def test_evaluation_gathers_once_and_reduces_nothing_back() -> None:
    s = Setup(8)
    evaluate = jax.jit(lambda owned, batch: mfsdp.eval_step(tiny_loss, s.layout)(owned, batch))
    found = mfsdp.audit(evaluate, s.owned, s.batch)
    assert found.wire_bytes("all-gather") == costs(s.layout.plan).received("all-gather")
    assert found.count("reduce-scatter") == 0
    assert found.bytes("all-reduce") == 4


def test_a_planted_collective_is_found() -> None:
    """An update that mixes the owners' matrices fails the assertion that all others pass."""
    s = Setup(8, clip=False)

    def planted(updates: Any, state: Any, params: Any) -> Any:
        updates, state = s.tx.update(updates, state, params)
        mixed = {k: u - jnp.mean(u, axis=0, keepdims=True) for k, u in updates.stacks.items()}
        return updates._replace(stacks=mixed), state

    found = mfsdp.audit(jax.jit(planted), s.owned, s.state, s.owned)
    with pytest.raises(AssertionError, match="expected no matrix collectives"):
        found.assert_no_matrix_collectives()
    tx = optax.GradientTransformation(s.tx.init, planted)
    step = mfsdp.train_step(tiny_loss, tx, s.layout)
    found = mfsdp.audit(step, s.owned, s.state, s.batch)
    with pytest.raises(AssertionError, match="expected no matrix collectives"):
        found.assert_no_matrix_collectives("mfsdp.optimizer")
