"""Sharded storage on meshes of several axes: any sharding of any leaf equals one device."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import matrixfsdp_jax as mfsdp
from tests.owner.test_sharded import MAKERS, draw, run

SHAPES = {
    **{f"w{i}": (16, 64) for i in range(3)},
    "tall": (64, 16),
    "odd": (5, 7),
    "experts": (8, 16, 64),
    "bias": (16,),
}
RULES = [mfsdp.rules.stacked("experts")]
MESHES = {
    "2x4": {"replica": 2, "fsdp": 4},
    "4x2": {"fsdp": 4, "tensor": 2},
    "8": {"fsdp": 8},
    "2x2x2": {"replica": 2, "fsdp": 2, "tensor": 2},
    "expert": {"expert": 4, "fsdp": 2},
}
Dims = dict[str, tuple[Any, ...]]
# By sharding: the spec of every leaf; a leaf that is not named is replicated.
SHARDINGS: dict[str, Dims] = {
    "rows": {"w0": ("fsdp",), "w1": ("fsdp",), "tall": ("fsdp",), "experts": (None, "fsdp")},
    "columns": {
        "w0": (None, "fsdp"), "w1": (None, "fsdp"), "tall": (None, "fsdp"),
        "experts": (None, None, "fsdp"),
    },
    "replicated": {},
    "fsdp x tp": {
        "w0": ("fsdp", "tensor"), "w1": ("tensor", "fsdp"), "tall": ("fsdp", "tensor"),
        "w2": (("fsdp", "tensor"),), "experts": (None, "tensor", "fsdp"), "bias": ("fsdp",),
    },
    "experts": {
        "experts": ("expert", "fsdp"), "w0": ("fsdp",), "tall": (("expert", "fsdp"),),
        "w1": (("fsdp", "expert"),),
    },
    "experts whole": {"experts": (("expert", "fsdp"),), "w0": ("expert", "fsdp")},
}  # fmt: skip


def mesh_of(name: str, kind: AxisType = AxisType.Auto) -> Any:
    axes = MESHES[name]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def place(tree: dict[str, Any], mesh: Any, dims: Dims) -> dict[str, Any]:
    def one(name: str, x: Any) -> Any:
        spec = (*dims.get(name, ()), *[None] * x.ndim)[: x.ndim]
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    return {name: one(name, x) for name, x in tree.items()}


@functools.cache
def alone(name: str) -> Any:
    shapes = shapes_for(name)
    tx = MAKERS[name](rules=rules_for(name, shapes))
    return jax.device_get(run(tx, draw(0, shapes), [draw(s, shapes) for s in (1, 2, 3)]))


def shapes_for(name: str) -> Any:
    """Fewer classes for what compiles long."""
    few = ("w0", "tall", "experts") if name in ("shampoo", "soap") else SHAPES
    return {path: SHAPES[path] for path in few}


def rules_for(name: str, shapes: Any) -> Any:
    needed = name in ("muon", "normuon") and "experts" in shapes
    return mfsdp.default_rules(*RULES) if needed else None


def planned(name: str, params: Any, mesh: Any, **options: Any) -> Any:
    optimizer = name if name != "normuon" else "muon"
    rules = rules_for(name, params)
    return mfsdp.plan(params, mesh, optimizer=optimizer, storage="sharded", rules=rules, **options)


CASES: list[Any] = [
    ("muon", "2x4", "rows", AxisType.Auto, None),
    ("muon", "2x4", "rows", AxisType.Auto, "fsdp"),
    ("soap", "2x4", "columns", AxisType.Explicit, None),
    ("muon", "4x2", "fsdp x tp", AxisType.Auto, None),
    ("shampoo", "4x2", "fsdp x tp", AxisType.Explicit, None),
    ("muon", "2x2x2", "fsdp x tp", AxisType.Explicit, ("tensor", "fsdp")),
    ("normuon", "2x2x2", "fsdp x tp", AxisType.Auto, ("fsdp", "replica", "tensor")),
    ("muon", "expert", "experts", AxisType.Auto, None),
    ("muon", "expert", "experts whole", AxisType.Explicit, ("fsdp", "expert")),
    ("soap", "2x2x2", "replicated", AxisType.Auto, ("replica", "tensor")),
]


@pytest.mark.parametrize(("name", "mesh", "sharding", "kind", "owner_axis"), CASES)
def test_any_sharding_equals_one_device(
    name: str, mesh: str, sharding: str, kind: AxisType, owner_axis: Any
) -> None:
    on, dims, shapes = mesh_of(mesh, kind), SHARDINGS[sharding], shapes_for(name)
    params = place(draw(0, shapes), on, dims)
    tx = MAKERS[name](layout=planned(name, params, on, owner_axis=owner_axis))
    got = run(tx, params, [place(draw(seed, shapes), on, dims) for seed in (1, 2, 3)])
    for path, x in got.items():
        np.testing.assert_allclose(x, alone(name)[path], atol=1e-5, err_msg=path)
        assert x.sharding.is_equivalent_to(params[path].sharding, x.ndim), path


def kinds_of(mesh: str, dims: Dims, shapes: dict[str, Any], **options: Any) -> Any:
    """What one update sends, as ``[(kind, axes)]``, and the layout."""
    on = mesh_of(mesh)
    params = place(draw(0, shapes), on, dims)
    layout = planned("muon", params, on, **options)
    tx = mfsdp.scale_by_muon(layout=layout)
    audit = mfsdp.audit(jax.jit(tx.update).lower(params, tx.init(params), params).compile())
    return sorted((c.kind, c.axis) for c in audit.collectives), layout


WIDE_AND_TALL = {name: SHAPES[name] for name in ("w0", "w1", "tall")}
EXPERTS = {"experts": SHAPES["experts"]}


def test_one_all_to_all_each_way_over_both_axes() -> None:
    """FSDP x TP, with axes in any order on any dim: all share it."""
    found, _ = kinds_of("4x2", SHARDINGS["fsdp x tp"], WIDE_AND_TALL)
    assert found == [("all-to-all", ("fsdp", "tensor"))] * 2


def test_replicas_share_the_owners_work() -> None:
    """HSDP with one global owner: shards move within a replica, results between replicas."""
    found, layout = kinds_of("2x4", SHARDINGS["rows"], WIDE_AND_TALL)
    assert found == [("all-gather", ("replica",)), *[("all-to-all", ("fsdp",))] * 2]
    assert layout.num_devices == 8


def test_an_owner_in_each_replica() -> None:
    found, layout = kinds_of("2x4", SHARDINGS["rows"], WIDE_AND_TALL, owner_axis="fsdp")
    assert found == [("all-to-all", ("fsdp",))] * 2
    assert layout.num_devices == 4


def test_experts_stay_where_they_are() -> None:
    found, layout = kinds_of("expert", SHARDINGS["experts whole"], EXPERTS)
    assert found == []
    (c,) = layout.plan.classes
    assert [device for device, _ in c.slots] == list(range(8))
    found, _ = kinds_of("expert", SHARDINGS["experts"], EXPERTS)
    assert found == [("all-to-all", ("fsdp",))] * 2


AXES = ("replica", "fsdp", "tensor")


@st.composite
def sharding_of(draw: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Mesh axes, in any order, on any dims that they divide."""
    axes = draw(st.permutations(AXES))
    dims: list[tuple[str, ...]] = [() for _ in shape]
    for axis in axes[: draw(st.integers(0, 3))]:
        k = draw(st.integers(0, len(shape) - 1))
        if shape[k] % 2 ** (len(dims[k]) + 1) == 0:
            dims[k] = (*dims[k], axis)
    return tuple(d or None for d in dims)


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_any_tree_on_any_mesh_equals_one_device(data: st.DataObject) -> None:
    mesh = mesh_of("2x2x2", data.draw(st.sampled_from([AxisType.Auto, AxisType.Explicit])))
    side = st.sampled_from([4, 6, 8])
    names = [f"w{i}" for i in range(data.draw(st.integers(1, 4)))]
    shapes: dict[str, tuple[int, ...]] = {n: (data.draw(side), data.draw(side)) for n in names}
    if data.draw(st.booleans()):
        shapes["experts"] = (data.draw(side), data.draw(side), data.draw(side))
    dims = {name: data.draw(sharding_of(shape)) for name, shape in shapes.items()}
    rules = rules_for("muon", shapes)
    params, grads = (place(draw(seed, shapes), mesh, dims) for seed in (0, 1))
    layout = mfsdp.plan(
        params, mesh, storage="sharded", rules=rules, owner_axis=data.draw(st.permutations(AXES))
    )
    got = run(mfsdp.muon(0.1, layout=layout), params, [grads])
    want = run(mfsdp.muon(0.1, rules=rules), draw(0, shapes), [draw(1, shapes)])
    for path, x in got.items():
        np.testing.assert_allclose(x, want[path], atol=1e-5)


# ---- tensor parallel ---------------------------------------------------------------------------

SPLIT: Dims = {
    "w0": ("fsdp", "tensor"),  # long side cut: it stays
    "w1": ("tensor", "fsdp"),  # short side cut: gathered
    "tall": ("tensor", "fsdp"),  # stored transposed: it stays
    "w2": ("fsdp",),  # not cut
    "odd": (),  # no long side that divides: updated whole
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_matrices_that_stay_split_over_a_tensor_axis(kind: AxisType) -> None:
    shapes = {path: SHAPES[path] for path in (*SPLIT, "bias")}
    mesh = mesh_of("2x2x2", kind)
    params = place(draw(0, shapes), mesh, SPLIT)
    layout = planned("muon", params, mesh, owner_axis=("replica", "fsdp"), tensor_axis="tensor")
    tx = MAKERS["muon"](layout=layout)
    got = run(tx, params, [place(draw(seed, shapes), mesh, SPLIT) for seed in (1, 2, 3)])
    want = run(MAKERS["muon"](), draw(0, shapes), [draw(seed, shapes) for seed in (1, 2, 3)])
    for path, x in got.items():
        np.testing.assert_allclose(x, want[path], atol=1e-5, err_msg=path)
        assert x.sharding.is_equivalent_to(params[path].sharding, x.ndim), path
    stack = next(x for x in jax.tree.leaves(tx.init(params)) if x.shape[2:] == (16, 64))
    assert stack.sharding.shard_shape(stack.shape)[2:] == (16, 32)


def test_one_gram_matrix_is_summed_over_the_tensor_axis() -> None:
    dims = {"w0": ("fsdp", "tensor"), "w1": ("fsdp", "tensor"), "tall": ("tensor", "fsdp")}
    found, layout = kinds_of("4x2", dims, WIDE_AND_TALL, owner_axis="fsdp", tensor_axis="tensor")
    sums = [axes for kind, axes in found if kind == "all-reduce"]
    assert [f for f in found if f[0] != "all-reduce"] == [("all-to-all", ("fsdp",))] * 2
    assert set(sums) == {("tensor",)}
    assert len(layout.plan.classes) == 1


def test_what_does_not_go_with_a_tensor_axis() -> None:
    mesh = mesh_of("4x2")
    params = place({"w": np.ones((8, 8), np.float32)}, mesh, {"w": ("fsdp", "tensor")})
    with pytest.raises(ValueError, match="is for Muon with storage"):
        mfsdp.plan(params, mesh, tensor_axis="tensor")
    with pytest.raises(ValueError, match="is for Muon with storage"):
        planned("soap", params, mesh, tensor_axis="tensor")
    layout = planned("muon", params, mesh, tensor_axis="tensor")
    with pytest.raises(ValueError, match="exact=True takes whole matrices"):
        mfsdp.muon(0.1, layout=layout, exact=True)
    with pytest.raises(ValueError, match="looks at whole rows and columns"):
        mfsdp.muon(0.1, layout=layout, variant=mfsdp.variants.normuon())
