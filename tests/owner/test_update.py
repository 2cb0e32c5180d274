"""Transforms lifted onto the owners: the same numbers on every number of devices, nothing sent."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.owner import collectives
from matrixfsdp_jax.owner.update import on_owners
from tests import oracle
from tests.models import make_mesh

RULES = [
    mfsdp.rules.fused("qkv", (64, 32, 32)),
    mfsdp.rules.stacked("scan"),
    mfsdp.rules.frozen("frozen"),
]
SHAPES = {
    "qkv": (32, 128),
    "scan": (3, 64, 32),
    "square": (32, 32),
    "odd": (7, 5),
    "sharded": (48,),
    "replicated": (5,),
}


def canonical(seed: int) -> dict[str, np.ndarray]:
    """8 matrices: 3 and 4 of dims that are multiples of 32, and a single odd one."""
    rng = np.random.default_rng(seed)
    tree = {k: rng.standard_normal(s).astype(np.float32) for k, s in SHAPES.items()}
    return tree | {"frozen": np.ones((4, 4), np.float32), "integers": np.arange(8, dtype=np.int32)}


def layout_on(mesh: Mesh, axes: tuple[str, ...] = ("fsdp",)) -> mfsdp.OwnerLayout:
    return mfsdp.plan(canonical(0), mesh, owner_axis=axes, rules=RULES)


def trainable(layout: mfsdp.OwnerLayout, seed: int) -> mfsdp.OwnerParams:
    return layout.trainable(layout.shard(canonical(seed)))


def unshard(layout: mfsdp.OwnerLayout, updates: mfsdp.OwnerParams) -> dict[str, np.ndarray]:
    frozen = layout.shard(canonical(0)).frozen
    return {k: np.asarray(v) for k, v in layout.unshard(updates._replace(frozen=frozen)).items()}


def in_shard_map(layout: mfsdp.OwnerLayout, tx: Any) -> Any:
    """``tx.update`` inside ``shard_map`` with ``check_vma=True``."""
    specs, state_specs = layout.trainable(layout.specs), layout.state_specs(tx)
    return jax.shard_map(
        lambda g, s, p: tx.update(g, s, p),
        mesh=layout.mesh,
        in_specs=(specs, state_specs, specs),
        out_specs=(specs, state_specs),
        check_vma=True,
    )


# ---- the same update on every number of devices ------------------------------------------------


def two_updates(layout: mfsdp.OwnerLayout, inside: bool) -> tuple[Any, Any]:
    tx = mfsdp.scale_by_muon(layout=layout)
    params = trainable(layout, 0)
    state = layout.init(tx, params._replace(frozen=layout.shard(canonical(0)).frozen))
    update = jax.jit(in_shard_map(layout, tx) if inside else tx.update)
    for seed in (1, 2):
        updates, state = update(trainable(layout, seed), state, params)
    return updates, state


@cache
def one_device() -> dict[str, np.ndarray]:
    layout = layout_on(make_mesh(1))
    return unshard(layout, two_updates(layout, inside=False)[0])


def assert_like_one_device(got: dict[str, np.ndarray]) -> None:
    """Bit-equal for dims that are multiples of 32, else to 1e-6."""
    for name, want in one_device().items():
        if name == "odd":
            np.testing.assert_allclose(got[name], want, atol=1e-6)
        else:
            np.testing.assert_array_equal(got[name], want, name)


@pytest.mark.parametrize(
    ("n", "explicit", "inside"),
    [(2, True, False), (3, False, False), (3, True, True), (4, False, True), (8, True, False)],
)
def test_update_does_not_depend_on_the_number_of_devices(
    n: int, explicit: bool, inside: bool
) -> None:
    layout = layout_on(make_mesh(n, explicit))
    updates, state = two_updates(layout, inside)
    assert_like_one_device(unshard(layout, updates))
    for tree in (updates.stacks, state.matrix[0].mu):
        for c in layout.plan.classes:
            stack = np.asarray(tree[c.key]).copy()
            for slot in c.slots:
                stack[slot] = 0
            assert not stack.any(), f"pads of {c.key}"


def test_update_over_two_mesh_axes() -> None:
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    layout = layout_on(mesh, ("b", "a"))
    assert_like_one_device(unshard(layout, two_updates(layout, inside=True)[0]))


def test_one_device_is_the_oracle_matrix_by_matrix() -> None:
    def matrices(tree: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        q, k, v = np.split(tree["qkv"], (64, 96), axis=1)
        stack = {f"scan{i}": x for i, x in enumerate(tree["scan"])}
        return {"q": q, "k": k, "v": v, "square": tree["square"], "odd": tree["odd"], **stack}

    muon = oracle.MuonOracle(lr=1.0)
    zero = {k: np.zeros_like(v) for k, v in matrices(canonical(1)).items()}
    for seed in (1, 2):
        want = muon.step(zero, matrices(canonical(seed)))
    got = matrices(one_device())
    for name, step in want.items():
        np.testing.assert_allclose(-got[name], step, atol=2e-5, err_msg=name)
    for name in ("sharded", "replicated"):
        np.testing.assert_array_equal(one_device()[name], canonical(2)[name])


# ---- what the lift hands to a transform --------------------------------------------------------


def spy(layout: mfsdp.OwnerLayout) -> optax.GradientTransformationExtraArgs:
    """``u * table + offset * params + value * (u != 0)``, with state of every kind.

    The table holds a number of its own for every slot.
    """
    tables = {
        c.key: 1
        + np.arange(c.num_devices * c.num_waves, dtype=np.float32).reshape(c.stack_shape[:2])
        for c in layout.plan.classes
    }

    def make(local: Any, offset: Any) -> optax.GradientTransformationExtraArgs:
        def init(stacks: Any) -> Any:
            rows = {key: jnp.zeros_like(s[:, :, 0, 0]) for key, s in stacks.items()}
            return {"count": jnp.zeros((), jnp.int32), "sum": rows, "last": stacks}

        def update(updates: Any, state: Any, params: Any = None, *, value: Any = 0.0) -> Any:
            new, rows = {}, {}
            for c in layout.plan.classes:
                u, factor = updates[c.key], local(c.key, tables[c.key])
                assert u.shape == (1, *c.stack_shape[1:])
                assert factor.shape == u.shape[:2]
                assert collectives.varying_axes(u) == set(layout.owner_axis)
                new[c.key] = u * factor[..., None, None] + value * (u != 0)
                if params is not None:
                    new[c.key] += offset * params[c.key]
                rows[c.key] = state["sum"][c.key] + jnp.sum(u, (2, 3))
            return new, {"count": state["count"] + 1, "sum": rows, "last": updates}

        return optax.GradientTransformationExtraArgs(init, update)

    return on_owners(make, layout, offset=jnp.float32(0.5))


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_each_owner_sees_its_own_rows(explicit: bool, inside: bool) -> None:
    layout = layout_on(make_mesh(3, explicit))
    tx = spy(layout)
    stacks, params = trainable(layout, 1).stacks, trainable(layout, 0).stacks

    def run(stacks: Any, params: Any, value: Any) -> Any:
        state = tx.init(params)
        with_params, state = tx.update(stacks, state, params, value=value)
        without, state = tx.update(stacks, state)
        return with_params, without, state

    fn = run
    if inside:
        specs = layout.specs.stacks
        state_specs = layout.tree_specs(jax.eval_shape(tx.init, params))
        fn = jax.shard_map(
            run,
            mesh=layout.mesh,
            in_specs=(specs, specs, P()),
            out_specs=(specs, specs, state_specs),
        )
    with_params, without, state = jax.jit(fn)(stacks, params, 2.0)
    assert state["count"] == 2
    for c in layout.plan.classes:
        u, p = np.asarray(stacks[c.key]), np.asarray(params[c.key])
        table = 1 + np.arange(c.num_devices * c.num_waves, dtype=np.float32)
        scaled = u * table.reshape(*c.stack_shape[:2], 1, 1)
        np.testing.assert_allclose(without[c.key], scaled, rtol=1e-6)
        want = scaled + 2 * (u != 0) + p / 2
        np.testing.assert_allclose(with_params[c.key], want, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(state["last"][c.key], u)
        np.testing.assert_allclose(state["sum"][c.key], 2 * u.sum((2, 3)), rtol=1e-5, atol=1e-5)
        for x in (state["sum"][c.key], state["last"][c.key], without[c.key]):
            assert all(s.data.shape[0] == 1 for s in x.addressable_shards)


def test_no_matrix_at_all() -> None:
    tree = {"bias": np.arange(8, dtype=np.float32), "scale": np.ones(3, np.float32)}
    layout = mfsdp.plan(tree, make_mesh(4))
    owned = layout.shard(tree)
    tx = mfsdp.muon(0.1, layout=layout, rest=optax.sgd(1.0))
    updates, _ = jax.jit(tx.update)(owned, layout.init(tx, owned), owned)
    new = layout.unshard(layout.apply_updates(owned, updates))
    assert all(not np.asarray(x).any() for x in new.values())


def test_apply_updates_leaves_frozen_leaves_alone() -> None:
    layout = layout_on(make_mesh(4))
    owned = layout.shard(canonical(0))
    new = layout.unshard(layout.apply_updates(owned, trainable(layout, 1)))
    for name, before in canonical(0).items():
        kept = name in ("frozen", "integers")
        want = before if kept else before + canonical(1)[name]
        np.testing.assert_array_equal(new[name], want, name)
        assert new[name].dtype == before.dtype


# ---- nothing is sent ---------------------------------------------------------------------------


@pytest.mark.parametrize("explicit", [True, False])
def test_update_sends_nothing(explicit: bool) -> None:
    layout = layout_on(make_mesh(8, explicit))
    tx = mfsdp.muon(0.1, layout=layout, weight_decay=0.1)
    params = trainable(layout, 0)
    state = layout.init(tx, params._replace(frozen=layout.shard(canonical(0)).frozen))
    assert mfsdp.audit(jax.jit(tx.update), params, state, params).collectives == ()


def test_the_audit_of_an_update_can_fail() -> None:
    layout = layout_on(make_mesh(8))

    def leaky(local: Any) -> optax.GradientTransformation:
        return optax.stateless(
            lambda updates, _: {
                k: u - collectives.mean_over(u, ("fsdp",)) for k, u in updates.items()
            }
        )

    tx = on_owners(leaky, layout)
    stacks = trainable(layout, 0).stacks
    report = mfsdp.audit(jax.jit(tx.update), stacks, tx.init(stacks))
    assert len(report.matrices) >= 1
    with pytest.raises(AssertionError, match="all-reduce"):
        report.assert_no_matrix_collectives()


# ---- the norm over all devices -----------------------------------------------------------------


def trained_norm(tree: dict[str, np.ndarray]) -> float:
    """Every trainable leaf once, in float64."""
    parts = [tree[k].astype(np.float64) for k in SHAPES]
    return float(np.sqrt(sum(np.sum(x * x) for x in parts)))


@pytest.mark.parametrize(("n", "explicit"), [(1, True), (3, False), (8, True)])
def test_global_norm_counts_every_trainable_element_once(n: int, explicit: bool) -> None:
    layout = layout_on(make_mesh(n, explicit))
    norm = partial(mfsdp.global_norm, layout=layout)
    owned = layout.shard(canonical(0))
    mapped = jax.shard_map(norm, mesh=layout.mesh, in_specs=(layout.specs,), out_specs=P())
    want = trained_norm(canonical(0))
    np.testing.assert_allclose(jax.jit(norm)(owned), want, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(mapped)(owned), want, rtol=1e-6)
    report = mfsdp.audit(jax.jit(norm), owned)
    assert not report.matrices
    assert len(report.scalars) == (n > 1)


def test_global_norm_of_half_precision_does_not_overflow() -> None:
    tree = {"w": np.full((8, 8), 3e4, np.float16), "b": np.full(5, 3e4, np.float16)}
    layout = mfsdp.plan(tree, make_mesh(4))
    norm = jax.jit(partial(mfsdp.global_norm, layout=layout))(layout.shard(tree))
    assert norm.dtype == jnp.float32
    np.testing.assert_allclose(norm, 3e4 * np.sqrt(69), rtol=1e-3)
