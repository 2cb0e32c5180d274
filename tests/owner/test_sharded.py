"""Sharded storage: parameters keep their sharding, matrices visit their owners for the update."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.layout.sources import source
from matrixfsdp_jax.layout.spec import Leaf, LeafPlan, LeafRoute, MatrixView, TensorView

SHAPES = {
    "wide": (16, 64),
    "tall": (64, 16),
    "other": (16, 64),
    "odd": (5, 7),
    "conv": (3, 3, 8, 16),
    "experts": (8, 8, 16),
    "qkv": (16, 48),
    "bias": (16,),
}
# Fewer classes compile faster.
FEW = {name: SHAPES[name] for name in ("wide", "tall", "odd", "bias")}
ROWS = {"wide": 0, "tall": 0, "other": 0, "conv": 3, "experts": 1, "qkv": 0, "bias": 0}
COLUMNS = {"wide": 1, "tall": 1, "other": 1, "conv": 2, "experts": 2, "qkv": 1, "bias": 0}
MIXED = {"wide": 0, "tall": 1, "conv": 3, "experts": 0}
SOURCES: dict[str, dict[str, int]] = {
    "rows": ROWS, "columns": COLUMNS, "replicated": {}, "mixed": MIXED
}  # fmt: skip
RULES = [
    mfsdp.rules.conv("conv"),
    mfsdp.rules.stacked("experts"),
    mfsdp.rules.fused("qkv", (16, 16, 16)),
]
# Damped, so that rounding does not decide an update.
MAKERS: dict[str, Any] = {
    "muon": functools.partial(mfsdp.muon, 0.1, weight_decay=0.1, rest=optax.adam(0.1)),
    "normuon": functools.partial(
        mfsdp.muon, 0.1, variant=mfsdp.variants.normuon(), rest=optax.adam(0.1)
    ),
    "shampoo": functools.partial(
        mfsdp.shampoo, 0.1, epsilon=1e-2, precondition_frequency=2, weight_decay=0.1,
        iterate_averaging=mfsdp.ClassicMomentum(), rest=optax.adam(0.1),
    ),
    "soap": functools.partial(
        mfsdp.soap, 0.1, precondition_frequency=2, start_preconditioning_step=12,
        grafting=mfsdp.AdamGrafting(), rest=optax.adam(0.1),
    ),
}  # fmt: skip


def draw(seed: int, shapes: dict[str, Any] = SHAPES) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def mesh_of(devices: int = 8, kind: AxisType = AxisType.Auto) -> Any:
    chosen = jax.devices()[:devices]
    return jax.make_mesh((devices,), ("fsdp",), devices=chosen, axis_types=(kind,))


def place(tree: dict[str, Any], mesh: Any, dims: dict[str, int]) -> dict[str, Any]:
    def one(name: str, x: Any) -> Any:
        spec = P(*["fsdp" if d == dims.get(name) else None for d in range(x.ndim)])
        return jax.device_put(x, NamedSharding(mesh, spec))

    return {name: one(name, x) for name, x in tree.items()}


def shapes_of(name: str) -> dict[str, Any]:
    return FEW if name in ("shampoo", "soap") else SHAPES


def run(tx: Any, params: Any, grads: list[Any]) -> Any:
    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for g in grads:
        params, state = step(params, state, g)
    return params


@functools.cache
def alone(name: str) -> Any:
    """Five steps on one device."""
    tx = MAKERS[name](rules=rules_of(name))
    shapes = shapes_of(name)
    return jax.device_get(run(tx, draw(0, shapes), [draw(seed, shapes) for seed in range(1, 6)]))


def rules_of(name: str) -> Any:
    return RULES if name in ("muon", "normuon") else None


def planned(name: str, params: Any, mesh: Any) -> Any:
    optimizer = name if name != "normuon" else "muon"
    return mfsdp.plan(params, mesh, optimizer=optimizer, storage="sharded", rules=rules_of(name))


CASES = [
    *(("muon", source, AxisType.Auto) for source in SOURCES),
    ("normuon", "mixed", AxisType.Auto),
    ("shampoo", "rows", AxisType.Auto),
    ("soap", "columns", AxisType.Auto),
    ("muon", "mixed", AxisType.Explicit),
    ("soap", "rows", AxisType.Explicit),
]


@pytest.mark.parametrize(("name", "source", "kind"), CASES)
def test_every_source_equals_one_device(name: str, source: str, kind: AxisType) -> None:
    mesh, shapes = mesh_of(8, kind), shapes_of(name)
    params = place(draw(0, shapes), mesh, SOURCES[source])
    tx = MAKERS[name](layout=planned(name, params, mesh))
    grads = [place(draw(seed, shapes), mesh, SOURCES[source]) for seed in range(1, 6)]
    got = run(tx, params, grads)
    for path, x in got.items():
        np.testing.assert_allclose(x, alone(name)[path], atol=1e-5, err_msg=path)
        assert x.sharding.is_equivalent_to(params[path].sharding, x.ndim), path


@pytest.mark.parametrize("devices", [1, 3])
def test_counts_that_do_not_divide(devices: int) -> None:
    mesh = mesh_of(devices)
    shapes = {f"w{i}": (6, 9) for i in range(5)} | {"tall": (9, 6), "odd": (5, 7)}
    dims = {"w0": 0, "w1": 0, "w2": 1, "tall": 0}
    params = place(draw(0, shapes), mesh, dims)
    layout = mfsdp.plan(params, mesh, storage="sharded")
    grads = [place(draw(seed, shapes), mesh, dims) for seed in (1, 2, 3)]
    got = run(mfsdp.muon(0.1, layout=layout), params, grads)
    want = run(mfsdp.muon(0.1), draw(0, shapes), [draw(seed, shapes) for seed in (1, 2, 3)])
    for path, x in got.items():
        np.testing.assert_allclose(x, want[path], atol=1e-5)


def collectives(source: str, name: str = "muon") -> Any:
    mesh = mesh_of()
    params = place(draw(0, shapes_of(name)), mesh, SOURCES[source])
    layout = planned(name, params, mesh)
    tx = MAKERS[name](layout=layout)
    state = tx.init(params)
    compiled = jax.jit(tx.update).lower(params, state, params).compile()
    return layout, mfsdp.audit(compiled)


@pytest.mark.parametrize("name", ["muon", "soap"])
def test_two_all_to_alls_for_each_class(name: str) -> None:
    """Wide and tall, row- and column-sharded matrices of a class share them."""
    layout, audit = collectives("rows", name)
    kinds = [c.kind for c in audit.collectives]
    sharded = [c for c in layout.plan.classes if [m.name for m in c.matrices] != ["odd"]]
    assert kinds.count("all-to-all") == 2 * len(sharded)
    assert kinds.count("all-gather") == 1, "the replicated one comes back by an all-gather"
    assert set(kinds) == {"all-to-all", "all-gather"}


def test_replicated_leaves_need_no_transfer_in() -> None:
    layout, audit = collectives("replicated")
    kinds = [c.kind for c in audit.collectives]
    assert kinds == ["all-gather"] * len(layout.plan.classes)


def test_the_state_lies_with_the_owners() -> None:
    mesh = mesh_of()
    params = place(draw(0), mesh, ROWS)
    state = MAKERS["muon"](layout=planned("muon", params, mesh)).init(params)
    stacks = [x for x in jax.tree.leaves(state) if x.ndim == 4]
    assert stacks
    for x in stacks:
        assert x.sharding.spec[0] == "fsdp"
        assert x.sharding.shard_shape(x.shape)[0] == 1


def test_in_a_train_state_and_in_a_chain() -> None:
    mesh = mesh_of()
    model = linen.Dense(16)
    x = np.ones((4, 32), np.float32)
    params = model.init(jax.random.key(0), x)["params"]
    params = place(params, mesh, {"kernel": 0})
    layout = mfsdp.plan(params, mesh, storage="sharded")
    tx = optax.chain(optax.clip_by_global_norm(1.0), mfsdp.muon(0.02, layout=layout))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @jax.jit
    def step(state: Any) -> Any:
        grads = jax.grad(lambda p: jnp.mean(model.apply({"params": p}, x) ** 2))(state.params)
        return state.apply_gradients(grads=grads)

    for _ in range(3):
        state = step(state)
    assert step._cache_size() <= 2
    assert float(jnp.mean(model.apply({"params": state.params}, x) ** 2)) < float(
        jnp.mean(model.apply({"params": params}, x) ** 2)
    )


def test_in_an_nnx_optimizer() -> None:
    mesh = mesh_of()
    model = nnx.Linear(32, 16, rngs=nnx.Rngs(0))
    model.kernel[...] = jax.device_put(model.kernel[...], NamedSharding(mesh, P("fsdp", None)))
    layout = mfsdp.plan(nnx.state(model, nnx.Param), mesh, storage="sharded")
    optimizer = nnx.Optimizer(model, mfsdp.muon(0.02, layout=layout), wrt=nnx.Param)
    x = np.ones((4, 32), np.float32)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(3)]
    assert losses[2] < losses[0]
    assert model.kernel[...].sharding.spec[0] == "fsdp"


# ---- what a shard is of a matrix ---------------------------------------------------------------


def leaf_plan(shape: tuple[int, ...], view: Any) -> LeafPlan:
    return LeafPlan(Leaf("w", shape, "float32"), LeafRoute("matrix", "", view), True)


@pytest.mark.parametrize(
    ("shape", "view", "cuts"),
    [
        ((4, 6), MatrixView(), (0, 1)),
        ((2, 4, 6), MatrixView((1,), (2,), (0,)), ("spread", 0, 1)),
        ((3, 3, 8, 16), MatrixView((0, 1, 2), (3,)), (0, None, None, 1)),
        ((4, 6), MatrixView(splits=(2, 4)), (0, None)),
        ((4, 6), MatrixView(splits=(2, 2), split_side="rows"), (None, 1)),
        ((2, 4, 6), TensorView(dims=(0, 1, 2)), (0, 1, 2)),
        ((2, 4, 6), TensorView(batch_dims=(0,), dims=(1, 2)), ("spread", 0, 1)),
    ],
)
def test_which_axis_of_a_matrix_is_cut(shape: Any, view: Any, cuts: Any) -> None:
    """``cuts``: by dim the axis of a matrix that is cut with it; None where the leaf goes whole."""
    lp = leaf_plan(shape, view)
    for dim, cut in enumerate(cuts):
        found = source(lp, [("a",) if d == dim else () for d in range(len(shape))])
        if cut is None:
            assert found is None
        elif cut == "spread":
            assert found.spread_axes == ("a",)
            assert found.cut_axes == ()
        else:
            assert found.cut[cut] == found.cut_axes == ("a",)
    both = source(lp, [("a",) if d in (0, len(shape) - 1) else () for d in range(len(shape))])
    assert (both is None) == (None in (cuts[0], cuts[-1]))


@settings(max_examples=5, deadline=None)
@given(st.data())
def test_any_tree_equals_one_device(data: st.DataObject) -> None:
    devices = data.draw(st.sampled_from([2, 4]))
    mesh = mesh_of(devices)
    sides = st.sampled_from([4, 8])
    shapes = {
        f"w{i}": (data.draw(sides), data.draw(sides)) for i in range(data.draw(st.integers(1, 5)))
    }
    dims = {name: data.draw(st.sampled_from([0, 1, 2])) for name in shapes}  # 2: replicated
    params = place(draw(0, shapes), mesh, dims)
    layout = mfsdp.plan(params, mesh, storage="sharded")
    grads = place(draw(1, shapes), mesh, dims)
    got = run(mfsdp.muon(0.1, layout=layout), params, [grads])
    want = run(mfsdp.muon(0.1), draw(0, shapes), [draw(1, shapes)])
    for path, x in got.items():
        np.testing.assert_allclose(x, want[path], atol=1e-5)


# ---- errors ------------------------------------------------------------------------------------


def test_what_owner_storage_has_is_refused() -> None:
    mesh = mesh_of()
    params = place(draw(0), mesh, ROWS)
    layout = planned("muon", params, mesh)
    for call in (
        lambda: layout.shard(params),
        lambda: layout.gather(params),
        lambda: layout.init(MAKERS["muon"](layout=layout), params),
    ):
        with pytest.raises(ValueError, match="user's own tree"):
            call()
    with pytest.raises(ValueError, match="storage='other' must be one of"):
        mfsdp.plan(params, mesh, storage="other")


def test_another_tree_is_refused() -> None:
    mesh = mesh_of()
    params = place(draw(0), mesh, ROWS)
    tx = MAKERS["muon"](layout=planned("muon", params, mesh))
    with pytest.raises(ValueError, match=r"has no leaf \['new'\]"):
        tx.init({**params, "new": jnp.ones((4, 4))})
    with pytest.raises(ValueError, match=r"'wide' of shape \(16, 32\)"):
        tx.init({**params, "wide": jnp.ones((16, 32))})


def test_shardings_that_are_not_taken() -> None:
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    x = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P("fsdp", "tensor")))
    with pytest.raises(ValueError, match=r"'w' is sharded as .*owner_axis=\('fsdp', 'tensor'\)"):
        mfsdp.plan({"w": x}, mesh, storage="sharded", owner_axis="fsdp")
    other = mesh_of(4)
    y = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(other, P("fsdp", None)))
    with pytest.raises(ValueError, match="mesh of the parameters"):
        mfsdp.plan({"w": y}, mesh_of(8), storage="sharded")


def test_present_is_refused() -> None:
    mesh = mesh_of()
    params = place(draw(0), mesh, ROWS)
    tx = mfsdp.shampoo(0.1, layout=planned("shampoo", params, mesh))
    with pytest.raises(NotImplementedError, match="present"):
        tx.update(params, tx.init(params), params, present=True)
