"""Guards around an optimizer: steps with a gradient that is not finite are skipped as a whole."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import matrixfsdp_jax as mfsdp
from tests.models import make_mesh
from tests.test_optimizers import FORMS, Trainer, assert_trees_close, draw, muon, ramp

# On 8 devices the bias is sharded and the scale replicated.
SHAPES = {"w": (8, 8), "tall": (16, 8), "layer": (8, 8), "bias": (16,), "scale": (3,)}
BAD = [float("nan"), float("inf"), float("-inf")]

each_form = pytest.mark.parametrize("form", FORMS)


def full(**options: Any) -> Any:
    """Muon with everything that a skipped step must not touch: state, schedules and decay."""
    options = {
        "learning_rate": ramp(0.02, 0.01),
        "weight_decay": ramp(0.3, 0.1),
        "variant": mfsdp.variants.normuon(),
        "rest": optax.adamw(ramp(0.1, 0.1), weight_decay=0.1),
        **options,
    }
    return muon(**options)


def guarded(make: Any) -> Any:
    return lambda **where: mfsdp.skip_nonfinite(make(**where), layout=where.get("layout"))


def spoiled(seed: int, name: str, value: float, dtype: Any = np.float32) -> dict[str, Any]:
    """Gradients with one bad entry, which lies on one device (on all, where replicated)."""
    grads = draw(SHAPES, seed, dtype)
    grads[name][-1] = value
    return grads


def assert_same(got: Any, want: Any) -> None:
    """Bit for bit, types included."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def assert_no_update(updates: Any) -> None:
    assert not any(np.asarray(u).any() for u in jax.tree.leaves(updates))


def counts(state: mfsdp.SkipNonfiniteState) -> tuple[int, int]:
    return int(state.skipped), int(state.consecutive)


def copied(tree: Any) -> Any:
    return jax.tree.map(np.array, tree)


@each_form
def test_a_skipped_step_leaves_no_trace(form: str, compilations: list[str]) -> None:
    params = draw(SHAPES, 0)
    trainer = Trainer(form, guarded(full()), params)
    inner, types = copied(trainer.state.inner), jax.tree.map(jax.typeof, trainer.state)
    skipped = 0
    for name in ("tall", "layer", "bias", "scale"):
        for value in BAD:
            assert_same(trainer.step(spoiled(1, name, value)), params)
            skipped += 1
            assert_no_update(trainer.updates)
            assert_same(copied(trainer.state.inner), inner)
            assert counts(trainer.state) == (skipped, skipped)
    plain = Trainer(form, full(), params)
    for seed in (2, 3):
        got, want = trainer.step(draw(SHAPES, seed)), plain.step(draw(SHAPES, seed))
        assert_trees_close(got, want, atol=1e-6)
        assert_trees_close(trainer.state.inner, plain.state, atol=1e-6)
        assert counts(trainer.state) == (skipped, 0)
    before = copied(trainer.state.inner)
    assert_same(trainer.step(spoiled(4, "w", np.nan)), got)
    assert_same(copied(trainer.state.inner), before)
    assert counts(trainer.state) == (skipped + 1, 1)
    assert jax.tree.map(jax.typeof, trainer.state) == types
    assert compilations.count("jit(_apply)") == 2  # the guarded step once, the plain one once


@each_form
def test_large_gradients_are_finite(form: str) -> None:
    """Whose squares and sums are not."""
    grads = {k: 3e38 * np.sign(x) for k, x in draw(SHAPES, 1).items()}
    trainer = Trainer(form, guarded(muon(rest=optax.sgd(1e-37))), draw(SHAPES, 0))
    got = trainer.step({k: x.astype(np.float32) for k, x in grads.items()})
    assert counts(trainer.state) == (0, 0)
    for name, x in draw(SHAPES, 0).items():
        assert (got[name] != x).any(), name


@pytest.mark.parametrize("where", ["explicit", "auto", "inside shard_map"])
def test_one_device_decides_for_all(where: str) -> None:
    params = draw(SHAPES, 0)
    layout = mfsdp.plan(params, make_mesh(8, where != "auto"))
    plain = full()(layout=layout)
    tx = mfsdp.skip_nonfinite(plain, layout=layout)
    owned = layout.shard(params)
    state = layout.init(tx, owned)
    update = tx.update
    if where == "inside shard_map":
        specs, state_specs = layout.specs, layout.state_specs(tx)
        update = jax.shard_map(
            update,
            mesh=layout.mesh,
            in_specs=(specs, state_specs, specs),
            out_specs=(specs, state_specs),
        )
    update = jax.jit(update)
    bad = layout.shard(spoiled(1, "tall", np.nan))
    holders = {
        s.device
        for x in jax.tree.leaves(bad)
        for s in x.addressable_shards
        if not np.isfinite(s.data).all()
    }
    assert len(holders) == 1
    inner = copied(state.inner)
    updates, state = update(bad, state, owned)
    assert_no_update(updates)
    assert_same(copied(state.inner), inner)
    assert counts(state) == (1, 1)
    grads = layout.shard(draw(SHAPES, 2))
    updates, state = update(grads, state, owned)
    want, _ = jax.jit(plain.update)(grads, layout.init(plain, owned), owned)
    assert_trees_close(updates, want, atol=1e-6)
    assert counts(state) == (1, 0)
    for tree, shardings in ((updates, layout.shardings), (state, layout.state_shardings(tx))):
        same = jax.tree.map(lambda x, s: s.is_equivalent_to(x.sharding, x.ndim), tree, shardings)
        assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("variant", [None, mfsdp.variants.normuon()], ids=["muon", "normuon"])
def test_init_and_steps_in_a_scan_inside_shard_map(variant: Any) -> None:
    params = draw(SHAPES, 0)
    layout = mfsdp.plan(params, make_mesh(8))
    make = full(variant=variant)
    tx = guarded(make)(layout=layout)
    steps = [spoiled(1, "bias", np.inf), draw(SHAPES, 2), spoiled(3, "w", np.nan), draw(SHAPES, 4)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *map(layout.shard, steps))
    specs = layout.specs
    step_specs = jax.tree.map(
        lambda s: jax.P(None, *s), specs, is_leaf=lambda x: isinstance(x, jax.P)
    )

    @jax.jit
    @jax.shard_map(mesh=layout.mesh, in_specs=(specs, step_specs), out_specs=(specs, jax.P()))
    def train(owned: Any, steps: Any) -> Any:
        def body(carry: tuple[Any, Any], grads: Any) -> tuple[tuple[Any, Any], None]:
            owned, state = carry
            updates, state = tx.update(grads, state, owned)
            return (layout.apply_updates(owned, updates), state), None

        (owned, state), _ = jax.lax.scan(body, (owned, tx.init(owned)), steps)
        return owned, state.skipped

    owned, skipped = train(layout.shard(params), stacked)
    assert int(skipped) == 2
    plain = Trainer("single", make, params)
    plain.step(steps[1])
    assert_trees_close(layout.unshard(owned), plain.step(steps[3]), atol=1e-5)


# ---- with other wrappers -----------------------------------------------------------------------


def clipped(make: Any) -> Any:
    def build(**where: Any) -> Any:
        clip = mfsdp.clip_by_global_norm(0.5, layout=where["layout"])
        return optax.chain(clip, make(**where))

    return build


def injected(**where: Any) -> Any:
    """Rates that are arrays of the state."""
    make = optax.inject_hyperparams(mfsdp.muon, static_args=("ns_steps", "rest", "scale"))
    return make(0.02, weight_decay=0.1, rest=optax.sgd(0.1), **where)


WRAPPED: dict[str, tuple[Any, Any]] = {
    "clipping inside": (guarded(clipped(full())), clipped(full())),
    "clipping before": (clipped(guarded(full())), clipped(full())),
    "injected rates": (guarded(injected), injected),
}


@pytest.mark.parametrize("case", WRAPPED)
@each_form
def test_chained_and_injected(form: str, case: str) -> None:
    make, plain = WRAPPED[case]
    params = draw(SHAPES, 0)
    trainer, want = Trainer(form, make, params), Trainer(form, plain, params)
    fresh = copied(trainer.state)
    for name, value in (("tall", np.inf), ("bias", np.nan)):
        assert_same(trainer.step(spoiled(1, name, value)), params)
    guard = trainer.state[1] if case == "clipping before" else trainer.state
    before = fresh[1] if case == "clipping before" else fresh
    assert counts(guard) == (2, 2)
    assert_same(copied(guard.inner), before.inner)
    for seed in (2, 3):
        grads = draw(SHAPES, seed)
        assert_trees_close(trainer.step(grads), want.step(grads), atol=1e-6)


@each_form
def test_around_multi_steps_a_micro_step_is_dropped(form: str) -> None:
    params = draw(SHAPES, 0)

    def make(**where: Any) -> Any:
        return optax.MultiSteps(full()(**where), 2)

    trainer, plain = Trainer(form, guarded(make), params), Trainer(form, make, params)
    for seed, name in ((1, None), (2, "tall"), (3, None), (4, "scale"), (5, None), (6, None)):
        grads = draw(SHAPES, seed) if name is None else spoiled(seed, name, np.nan)
        got = trainer.step(grads)
        if name is None:
            want = plain.step(grads)
        assert_trees_close(got, want, atol=1e-6)
    assert (got["w"] != params["w"]).any()
    assert counts(trainer.state) == (2, 0)
    assert int(trainer.state.inner.gradient_step) == 2


@each_form
def test_inside_multi_steps_the_outer_step_is_dropped(form: str) -> None:
    """And those after it: optax clears its accumulator by a product, which keeps a NaN."""
    params = draw(SHAPES, 0)
    trainer = Trainer(form, lambda **w: optax.MultiSteps(guarded(full())(**w), 2), params)
    halves = [draw(SHAPES, 1), draw(SHAPES, 2)]
    for grads in halves:
        got = trainer.step(grads)
    mean = jax.tree.map(lambda *g: np.mean(g, axis=0), *halves)
    assert_trees_close(got, Trainer(form, full(), params).step(mean), atol=1e-6)
    inner = copied(trainer.state.inner_opt_state.inner)
    for grads in (draw(SHAPES, 3), spoiled(4, "bias", -np.inf)):
        assert_same(trainer.step(grads), got)
    assert counts(trainer.state.inner_opt_state) == (1, 1)
    assert_same(copied(trainer.state.inner_opt_state.inner), inner)


@pytest.mark.parametrize("guard", ["skip", "clip"])
@pytest.mark.parametrize("hidden", ["rest", "a class"])
def test_guards_inside_a_mask_of_owner_params(hidden: str, guard: str) -> None:
    """They look at what is shown; what is hidden passes unchanged, as ever in ``optax.masked``."""
    params, grads = draw(SHAPES, 0), draw(SHAPES, 1)
    wrap = guarded if guard == "skip" else clipped

    def make(layout: Any) -> Any:
        def mask(tree: Any) -> Any:
            shown = jax.tree.map(lambda _: True, layout.trainable(layout.abstract))
            if hidden == "rest":
                return shown._replace(rest=dict.fromkeys(shown.rest, False))
            return shown._replace(stacks=shown.stacks | {"8x8:float32": False})

        return optax.masked(wrap(muon())(layout=layout), mask)

    got = Trainer("owner", make, params).step(grads)
    want = Trainer("single", muon(), params).step(grads)
    names = ("w", "tall", "layer") if hidden == "rest" else ("tall",)
    for name in names:
        np.testing.assert_allclose(got[name], want[name], atol=1e-6, err_msg=name)
    passed = "bias" if hidden == "rest" else "w"
    np.testing.assert_allclose(got[passed], params[passed] + grads[passed], atol=1e-6)


@each_form
def test_extra_arguments_reach_the_wrapped_optimizer(form: str) -> None:
    """On any step that is made; ``value`` scales the update here."""

    def update(updates: Any, state: Any, params: Any = None, *, value: Any, **_: Any) -> Any:
        return jax.tree.map(lambda u: u * value, updates), state

    scaled = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    trainer = Trainer(form, guarded(lambda **where: scaled), draw(SHAPES, 0))
    grads, bad = draw(SHAPES, 1), spoiled(1, "bias", np.nan)
    if trainer.layout is not None:
        grads, bad = map(trainer.layout.shard, (grads, bad))
    apply = jax.jit(trainer.tx.update)
    updates, state = apply(grads, trainer.state, None, value=jnp.float32(3), other=jnp.ones(2))
    assert_same(updates, jax.tree.map(lambda g: np.float32(3) * np.asarray(g), grads))
    updates, state = apply(bad, state, None, value=jnp.float32(3), other=jnp.ones(2))
    assert_no_update(updates)
    assert counts(state) == (1, 1)


# ---- in a training step ------------------------------------------------------------------------


def squares(params: Any, batch: Any) -> jax.Array:
    """A mean over examples in which every leaf takes part."""
    total = sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(params))
    return jnp.mean(batch) * total


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_batch_of_nan_changes_nothing_in_a_train_step(
    dtype: Any, compilations: list[str]
) -> None:
    """Donated: every buffer that goes in is used up, and what comes out is equal to it."""
    params = draw(SHAPES, 0, dtype)
    layout = mfsdp.plan(params, make_mesh(8))
    tx = guarded(full())(layout=layout)
    step = mfsdp.train_step(squares, tx, layout)
    owned = layout.shard(params)
    state = layout.init(tx, owned)
    good, bad = np.ones(8, np.float32), np.ones(8, np.float32)
    bad[5] = np.nan
    inner = copied(state.inner)
    for skipped in (1, 2):
        before = owned, state
        owned, state, metrics = step(owned, state, bad)
        assert all(x.is_deleted() for x in jax.tree.leaves(before))
        assert np.isnan(metrics["loss"])
        assert float(metrics["update_norm"]) == 0
        assert counts(state) == (skipped, skipped)
        assert_same(copied(layout.unshard(owned)), params)
        assert_same(copied(state.inner), inner)
    owned, state, metrics = step(owned, state, good)
    assert counts(state) == (2, 0)
    plain = Trainer("owner", full(), params)
    want = plain.step({k: 2 * x for k, x in params.items()})
    assert_trees_close(layout.unshard(owned), want, atol=1e-6 if dtype == jnp.float32 else 0.02)
    assert {x.dtype for x in jax.tree.leaves(owned)} == {jnp.dtype(dtype)}
    assert compilations.count("jit(step)") == 1


@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "auto"])
def test_the_guard_adds_one_scalar_all_reduce(explicit: bool) -> None:
    params = draw(SHAPES, 0)
    layout = mfsdp.plan(params, make_mesh(8, explicit))
    owned = layout.shard(params)

    def audits(make: Any) -> tuple[mfsdp.Audit, mfsdp.Audit]:
        tx = make(layout=layout)
        state = layout.init(tx, owned)
        batch = mfsdp.shard_batch(layout, np.ones(8, np.float32))
        step = mfsdp.audit(mfsdp.train_step(squares, tx, layout), owned, state, batch)
        return mfsdp.audit(jax.jit(tx.update), owned, state, owned), step

    for make in (full(), clipped(full())):
        (plain, step), (update, guarded_step) = audits(make), audits(guarded(make))
        update.assert_no_matrix_collectives()
        assert update.count("all-reduce", scalar=True) == update.count() == plain.count() + 1
        for kind in ("all-gather", "reduce-scatter"):
            assert guarded_step.wire_bytes(kind) == step.wire_bytes(kind)
        # The norm of a clip inside the guard is no longer that of the metrics, and so one more.
        scalars = 1 + plain.count()
        assert guarded_step.bytes("all-reduce") == step.bytes("all-reduce") + 4 * scalars


# ---- types and edges ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@each_form
def test_half_precision(form: str, dtype: Any) -> None:
    params = draw(SHAPES, 0, dtype)
    trainer = Trainer(form, guarded(full()), params)
    for value in BAD:
        assert_same(trainer.step(spoiled(1, "tall", value, dtype)), params)
        assert {u.dtype for u in jax.tree.leaves(trainer.updates)} == {jnp.dtype(dtype)}
    largest = {k: np.full_like(x, jnp.finfo(dtype).max) for k, x in params.items()}
    assert (trainer.step(largest)["w"] != params["w"]).any()
    assert counts(trainer.state) == (3, 0)


@pytest.mark.parametrize("tree", [{}, [], {"a": None}, {"a": optax.MaskedNode()}], ids=str)
def test_a_tree_without_leaves_is_finite(tree: Any) -> None:
    tx = mfsdp.skip_nonfinite(optax.adamw(0.1))
    state = tx.init(tree)
    for update in (tx.update, jax.jit(tx.update)):
        updates, state = update(tree, state, tree)
        assert jax.tree.structure(updates) == jax.tree.structure(tree)
        assert counts(state) == (0, 0)
    assert int(optax.tree.get(state.inner, "count")) == 2


@pytest.mark.parametrize("shapes", [{"w": (8, 8)}, {"bias": (16,)}], ids=["no rest", "no matrix"])
def test_owner_params_of_one_kind(shapes: dict[str, tuple[int, ...]]) -> None:
    params, bad = draw(shapes, 0), draw(shapes, 1)
    next(iter(bad.values()))[0] = np.inf
    trainer = Trainer("owner", guarded(full()), params)
    assert_same(trainer.step(bad), params)
    got, want = (
        trainer.step(draw(shapes, 2)),
        Trainer("owner", full(), params).step(draw(shapes, 2)),
    )
    assert_trees_close(got, want, atol=1e-6)


@each_form
def test_integer_and_frozen_leaves_take_no_part(form: str) -> None:
    params = draw(SHAPES, 0) | {"index": np.arange(6, dtype=np.int32)}
    grads = draw(SHAPES, 1) | {"index": np.zeros(6, np.int32)}
    given = [mfsdp.rules.frozen("layer")]
    trainer = Trainer(form, guarded(full()), params, given)
    got = trainer.step(grads)
    assert counts(trainer.state) == (0, 0)
    for name in ("index", "layer"):
        assert_same(got[name], params[name])
    assert_trees_close(got, Trainer(form, full(), params, given).step(grads), atol=1e-6)
    grads["bias"][3] = np.nan
    assert_same(trainer.step(grads), got)


@each_form
def test_init_has_a_shape_without_devices(form: str) -> None:
    trainer = Trainer(form, guarded(full()), draw(SHAPES, 0))
    template = trainer.params
    if trainer.layout is not None:
        template = trainer.layout.trainable(trainer.layout.abstract)
    abstract = jax.eval_shape(trainer.tx.init, template)
    assert jax.tree.structure(abstract) == jax.tree.structure(trainer.state)
    for want, x in zip(jax.tree.leaves(abstract), jax.tree.leaves(trainer.state), strict=True):
        assert (want.shape, want.dtype) == (x.shape, x.dtype)
    assert abstract.skipped.dtype == abstract.consecutive.dtype == jnp.int32


def test_what_is_not_owner_params_is_refused() -> None:
    params = draw(SHAPES, 0)
    layout = mfsdp.plan(params, make_mesh(8))
    tx = mfsdp.skip_nonfinite(optax.sgd(0.1), layout=layout)
    state = tx.init(params)
    with pytest.raises(TypeError, match=r"layout\.shard\(params\)"):
        tx.update(params, state, params)
