"""Leaves read as tensors: which methods take them, classes, costs, report."""

import json
import math

import jax
import pytest

from matrixfsdp_jax.layout import rules as R
from matrixfsdp_jax.layout.costs import METHODS, Method, costs, method, shampoo_method
from matrixfsdp_jax.layout.picture import plot
from matrixfsdp_jax.layout.planner import make_plan
from matrixfsdp_jax.layout.report import render, to_dict
from matrixfsdp_jax.layout.rules import route
from matrixfsdp_jax.layout.spec import Leaf, LeafRoute, ShapeClass, TensorView

TENSOR_METHODS = ("shampoo", "soap")
MATRIX_METHODS = tuple(name for name in METHODS if name not in TENSOR_METHODS)


def sds(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def plan_of(tree, rules=None, num_devices=2, optimizer="shampoo"):
    return make_plan(route(tree, rules, optimizer=optimizer), num_devices, optimizer=optimizer)


MODEL = {
    "conv": sds(3, 3, 4, 8),
    "depthwise_conv": sds(3, 3, 1, 8),
    "patches": sds(2, 5, 8),
    "scalar": sds(),
    "vectors": sds(3, 8),
    "bias": sds(8),
    "tall": sds(8, 4),
    "wide": sds(4, 8),
    "embedding": sds(16, 8),
}
RULES = [R.tensor("scalar"), R.tensor("vectors", batch_dims=(0,)), R.tensor("bias")]


# ---- routing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", TENSOR_METHODS)
def test_defaults_are_those_of_muon_but_for_orders_that_muon_refuses(optimizer):
    got = {leaf.path: r for leaf, r in route(MODEL, optimizer=optimizer)}
    orders_3_and_4 = {"conv", "patches"}
    others = {k: v for k, v in MODEL.items() if k not in orders_3_and_4}
    want = {leaf.path: r for leaf, r in route(others)}
    assert {k: v for k, v in got.items() if k not in orders_3_and_4} == want
    for path in orders_3_and_4:
        rank = len(MODEL[path].shape)
        view = TensorView(dims=tuple(range(rank)))
        assert got[path] == LeafRoute("matrix", f"rank {rank}: a tensor as it is", view)
    given = R.default_rules(R.tensor("conv"))
    assert {leaf.path: r for leaf, r in route(MODEL, given, optimizer=optimizer)}[
        "conv"
    ].reason == "rule tensor('conv')"


@pytest.mark.parametrize(
    ("shape", "batch_dims", "view"),
    [
        ((), (), TensorView()),
        ((5,), (), TensorView(dims=(0,))),
        ((5,), (0,), TensorView(batch_dims=(0,))),
        ((3, 4, 5, 6, 7), (0,), TensorView(batch_dims=(0,), dims=(1, 2, 3, 4))),
        ((3, 4, 5), (-2, 0), TensorView(batch_dims=(1, 0), dims=(2,))),
    ],
)
def test_tensor_rule_keeps_the_dims_beside_the_batch(shape, batch_dims, view):
    rule = R.tensor("w", batch_dims=batch_dims)
    ((_, decision),) = route({"w": sds(*shape)}, [rule], optimizer="soap")
    assert (decision.route, decision.view) == ("matrix", view)
    assert decision.reason == f"rule {rule.name}"
    assert eval(rule.name, vars(R)).name == rule.name


def test_a_view_may_be_given_and_dims_may_be_reordered():
    view = TensorView(dims=(3, 2, 0, 1))
    for rules in (lambda leaf: view, {"w": view}):
        plan = make_plan(
            route({"w": sds(3, 3, 4, 8)}, rules, optimizer="soap"), 1, optimizer="soap"
        )
        assert [c.shape for c in plan.classes] == [(8, 4, 3, 3)]


def test_matrix_rules_hold_under_methods_of_tensors():
    plan = plan_of(
        {"conv": sds(3, 3, 4, 8), "stack": sds(5, 8, 4)}, [R.conv("conv"), R.stacked("stack")]
    )
    assert {c.key: len(c.matrices) for c in plan.classes} == {"36x8:float32": 1, "8x4:float32": 5}


@pytest.mark.parametrize("optimizer", MATRIX_METHODS)
@pytest.mark.parametrize("shape", [(), (8,), (4, 8), (3, 3, 4, 8)])
def test_methods_of_matrices_refuse_tensors(optimizer, shape):
    message = r"takes only matrices; read the leaf as matrices .*optimizer=\"shampoo\""
    with pytest.raises(ValueError, match=rf"'w' .* tensor\('w'\) .*order {len(shape)}.*{message}"):
        route({"w": sds(*shape)}, [R.tensor("w")], optimizer=optimizer)
    decision = LeafRoute("matrix", "", TensorView(dims=tuple(range(len(shape)))))
    with pytest.raises(ValueError, match=rf"'w' .*{optimizer} {message}"):
        make_plan([(Leaf("w", shape, "float32"), decision)], 2, optimizer=optimizer)


@pytest.mark.parametrize(
    ("shape", "rules", "words"),
    [
        ((2, 3, 4, 5, 6), [R.tensor("w")], r"order 5, .*orders 0, 1, 2, 3, 4; make .*batch_dims"),
        ((4, 4), [R.tensor("w", (2,))], r"each of the dims \(0, 1\) once"),
        ((4, 4), [R.tensor("w", (0, 0))], r"each of the dims \(0, 1\) once"),
        ((4, 4), lambda leaf: TensorView(dims=[0, 1]), "must be tuples"),
        ((4, 4), lambda leaf: TensorView(dims=(0,)), r"dims \(0,\); together they must"),
        ((0, 4), [R.tensor("w")], "no element"),
        (
            (2, 3, 4, 5, 6),
            None,
            r"no rule says.*tensor\('w', batch_dims=\(0,\)\)  # 2 tensors of 3",
        ),
        (
            (2, 3, 4, 5, 6),
            lambda leaf: "matrix",
            r"without a view.*TensorView\(batch_dims=\(0,",
        ),
    ],
)
def test_what_shampoo_cannot_take(shape, rules, words):
    with pytest.raises(ValueError, match=rf"(?s)'w'.*{words}"):
        route({"w": sds(*shape)}, rules, optimizer="shampoo")


def test_integers_are_no_tensors():
    with pytest.raises(ValueError, match="int32 has no gradient"):
        route({"w": sds(4, dtype="int32")}, [R.tensor("w")], optimizer="shampoo")


def test_batch_dims_of_a_wrong_type():
    with pytest.raises(TypeError, match="batch_dims must be a sequence"):
        R.tensor("w", 0)


# ---- classes -----------------------------------------------------------------------------------


def test_classes_keys_and_names():
    plan = plan_of(MODEL, RULES)
    assert {c.key: (c.stack_shape, [m.name for m in c.matrices]) for c in plan.classes} == {
        "scalar:float32": ((2, 1), ["scalar"]),
        "8:float32": ((2, 2, 8), ["bias", "vectors[0]", "vectors[1]", "vectors[2]"]),
        "2x5x8:float32": ((2, 1, 2, 5, 8), ["patches"]),
        "3x3x4x8:float32": ((2, 1, 3, 3, 4, 8), ["conv"]),
        "4x8:float32": ((2, 1, 4, 8), ["wide"]),
        "8x4:float32": ((2, 1, 8, 4), ["tall"]),
    }
    assert not any(m.transposed for c in plan.classes for m in c.matrices)
    (conv,) = (m for c in plan.classes for m in c.matrices if m.name == "conv")
    assert (conv.dims, conv.stored_shape, conv.fan_in, conv.fan_out) == ((3, 3, 4, 8),) * 2 + (
        36,
        8,
    )
    muon = plan_of({"tall": sds(8, 4), "wide": sds(4, 8)}, optimizer="muon")
    assert [(c.key, [m.transposed for m in c.matrices]) for c in muon.classes] == [
        ("4x8:float32", [True, False])
    ]


def test_sides_are_those_of_matrices_alone():
    matrix, vector = (ShapeClass(shape, "float32", 1, 1, (), ()) for shape in ((4, 8), (4,)))
    assert (matrix.m, matrix.n, matrix.size, vector.size) == (4, 8, 32, 4)
    with pytest.raises(ValueError, match="unpack"):
        _ = vector.n


# ---- methods and costs -------------------------------------------------------------------------


def test_own_method():
    own = Method(
        "own", lambda dims, _: 7, lambda dims: 3, rest_copies=1, orders=(1, 2), oriented=True
    )
    plan = plan_of({"a": sds(8, 4), "b": sds(6)}, [R.tensor("b")], optimizer=own)
    assert {c.key for c in plan.classes} == {"4x8:float32", "6:float32"}
    cost = costs(plan)
    assert (sum(cost.flops.real), sum(cost.state.real)) == (14, 24)
    assert render(plan).startswith("own on 2 devices: 2 matrices")
    assert json.loads(json.dumps(to_dict(plan)))["optimizer"] == "own"
    assert hash(plan) == hash(
        plan_of({"a": sds(8, 4), "b": sds(6)}, [R.tensor("b")], optimizer=own)
    )
    assert "0x" not in repr(plan), "an address would differ from process to process"
    assert method(own) is own
    with pytest.raises(ValueError, match="order 3, but own takes orders 1, 2"):
        plan_of({"a": sds(2, 3, 4)}, [R.tensor("a")], optimizer=own)


def test_records_of_equal_options_are_equal():
    assert shampoo_method("soap", 1024, 2, 10) == METHODS["soap"]
    assert shampoo_method("soap", 512, 2, 10) != METHODS["soap"]


def by_block(dims, max_dim):
    """Blocks of a merged tensor, one after the other."""
    blocks = [()]
    for d in dims:
        sides = [min(max_dim, d - start) for start in range(0, d, max_dim)]
        blocks = [(*block, side) for block in blocks for side in sides]
    return blocks


@pytest.mark.parametrize("name", TENSOR_METHODS)
@pytest.mark.parametrize(
    ("dims", "merged"),
    [
        ((), (1,)),
        ((10,), (10,)),
        ((10, 6), (10, 6)),
        ((3, 1, 10, 6), (3, 10, 6)),
        ((2, 2, 9), (4, 9)),
    ],
)
def test_costs_of_shampoo_and_soap_block_by_block(name, dims, merged):
    record = shampoo_method(name, 4, 2, 10)
    products = {"shampoo": 1, "soap": 3}[name]
    flops = eigen = state = 0
    for block in by_block(merged, 4):
        for k in block:
            flops += 2 * math.prod(block) * k * (1 + products)
            eigen += 25 * k**3
            state += 2 * k * k
    size = math.prod(dims)
    assert record.matrix_flops(dims, 5) == flops + eigen // 10
    assert record.matrix_state(dims) == state + size * {"shampoo": 1, "soap": 2}[name]


def test_default_costs_by_hand():
    dims = (3, 3, 4, 8)  # merged into 3 x 96
    state = 2 * (3**2 + 96**2)
    assert METHODS["shampoo"].matrix_state(dims) == 288 + state
    assert METHODS["soap"].matrix_state(dims) == 2 * 288 + state
    eigen = 25 * (3**3 + 96**3) // 10
    assert METHODS["shampoo"].matrix_flops(dims, 5) == 4 * 288 * 99 + eigen
    assert METHODS["soap"].matrix_flops(dims, 5) == 8 * 288 * 99 + eigen
    unlimited = shampoo_method("shampoo", math.inf, math.inf, 1)
    assert unlimited.matrix_state(()) == 1  # no factor at all
    assert unlimited.matrix_state((2000,)) == 2000 + 2 * 2000**2


def test_memory_and_traffic_of_tensors():
    cost = costs(plan_of({"s": sds(), "v": sds(3, 8)}, [R.tensor("s"), R.tensor("v", (0,))]))
    assert sum(cost.elements.real) == 1 + 3 * 8
    assert cost.parameters.padded == 4 * (1 + 2 * 8)
    assert {c.source: c.bytes for c in cost.collectives} == {"scalar:float32": 4, "8:float32": 32}


# ---- report ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_devices", [1, 8])
def test_report_lists_tensors(num_devices, tmp_path):
    plan = plan_of(MODEL, RULES, num_devices, optimizer="soap")
    text = render(plan, width=100)
    assert f"soap on {num_devices} device" in text
    assert "Newton-Schulz" not in text
    rows = " ".join(text.split())
    for row in (
        "conv 1 f32[3,3,4,8] tensor 3x3x4x8: rank 4: a tensor as it is",
        "scalar 1 f32[] tensor scalar: rule tensor('scalar')",
        "vectors 1 f32[3,8] tensor 8: rule tensor('vectors', batch_dims=(0,))",
        "tall 1 f32[8,4] matrix 8x4: rank 2",
        "depthwise_conv 1 f32[3,3,1,8] rest",
        f"3x3x4x8:float32 1 1 {num_devices - 1} {num_devices}x1x3x3x4x8",
        f"scalar:float32 1 1 {num_devices - 1} {num_devices}x1",
    ):
        assert row in rows
    data = to_dict(plan)
    assert json.loads(json.dumps(data)) == data
    shapes = {each["key"]: each["shape"] for each in data["classes"]}
    assert shapes == {c.key: list(c.shape) for c in plan.classes}
    dims = {m["name"]: m["dims"] for each in data["classes"] for m in each["matrices"]}
    assert (dims["scalar"], dims["tall"], dims["conv"]) == ([], [8, 4], [3, 3, 4, 8])
    pytest.importorskip("matplotlib")
    plot(plan, tmp_path / "tensors.png")
