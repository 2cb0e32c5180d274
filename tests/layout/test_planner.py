import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from matrixfsdp_jax.layout.costs import Collective, costs, newton_schulz_flops
from matrixfsdp_jax.layout.planner import make_plan
from matrixfsdp_jax.layout.spec import Leaf, LeafRoute, MatrixView, Plan

SPLIT_QKV = MatrixView(splits=(32, 8, 8))


def matrix(path, shape, dtype="float32", view=None):
    if view is None:
        batch = len(shape) - 2
        view = MatrixView((batch,), (batch + 1,), tuple(range(batch)))
    return Leaf(path, shape, dtype), LeafRoute("matrix", "a matrix", view)


def rest(path, shape, dtype="float32", route="rest"):
    return Leaf(path, shape, dtype), LeafRoute(route, "not a matrix")


def layers(count, *shapes):
    return [
        matrix(f"blocks/{i}/w{k}", shape) for i in range(count) for k, shape in enumerate(shapes)
    ]


def by_wave(plan: Plan, key: str) -> list[list[str]]:
    """Names of a class in forward order, wave by wave."""
    (cls,) = (c for c in plan.classes if c.key == key)
    waves: list[list[str]] = [[] for _ in range(cls.num_waves)]
    for each, (_, wave) in zip(cls.matrices, cls.slots, strict=True):
        waves[wave].append(each.name)
    return waves


# ---- properties --------------------------------------------------------------------------------

SHAPES = [(4, 8), (8, 4), (8, 8), (3, 4, 8), (2, 3, 8, 4)]
REST_SHAPES = [(), (6,), (8, 12), (0, 4)]
DTYPES = ["float32", "bfloat16"]


@st.composite
def models(draw):
    trees = []
    for i in range(draw(st.integers(1, 12))):
        path = f"{draw(st.sampled_from(['a', 'b']))}/{i}/w"
        if draw(st.booleans()):
            shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))
            trees.append(matrix(path, shape, dtype))
        else:
            route = draw(st.sampled_from(["rest", "frozen"]))
            trees.append(rest(path, draw(st.sampled_from(REST_SHAPES)), route=route))
    return trees


@settings(deadline=None)
@given(models(), st.integers(1, 9))
def test_every_matrix_has_one_slot_of_its_own_in_forward_order(routed, num_devices):
    plan = make_plan(routed, num_devices)
    covered = Counter()
    for cls in plan.classes:
        assert cls.num_waves == -(-len(cls.matrices) // num_devices)
        assert len(set(cls.slots)) == len(cls.slots) == len(cls.matrices)
        for k, (device, wave) in enumerate(cls.slots):
            assert 0 <= device < num_devices
            assert wave == k // num_devices
        for each in cls.matrices:
            leaf = plan.leaves[each.leaf].leaf
            assert cls.shape == (cls.m, cls.n) == tuple(sorted((each.rows, each.cols)))
            assert each.transposed == (each.rows > each.cols)
            assert cls.dtype == leaf.dtype
            covered[each.leaf, each.batch] += 1
    expected = {
        (index, batch)
        for index, (leaf, route) in enumerate(routed)
        if route.route == "matrix"
        for batch in range(leaf.size // 32 if 4 in leaf.shape[-2:] else leaf.size // 64)
    }
    assert covered == Counter(expected)


@settings(deadline=None)
@given(models(), st.integers(1, 9))
def test_no_device_owns_two_more_of_a_cost_than_another(routed, num_devices):
    plan = make_plan(routed, num_devices)
    for cost in {newton_schulz_flops(c.shape, 5) for c in plan.classes}:
        counts = [0] * num_devices
        for cls in plan.classes:
            if newton_schulz_flops(cls.shape, 5) == cost:
                own = [0] * num_devices
                for device, _ in cls.slots:
                    own[device] += 1
                assert max(own) - min(own) <= 1
                counts = [a + b for a, b in zip(counts, own, strict=True)]
        if cost == max(newton_schulz_flops(c.shape, 5) for c in plan.classes):
            assert max(counts) - min(counts) <= 1


@settings(deadline=None)
@given(models(), st.integers(1, 9), st.randoms(use_true_random=False))
def test_slots_do_not_depend_on_the_sequence_of_leaves(routed, num_devices, random):
    def owners(plan):
        return {
            m.name: (c.key, slot)
            for c in plan.classes
            for m, slot in zip(c.matrices, c.slots, strict=True)
        }

    plan = make_plan(routed, num_devices)
    assert make_plan(routed, num_devices) == plan
    assert hash(make_plan(routed, num_devices)) == hash(plan)
    shuffled = list(routed)
    random.shuffle(shuffled)
    assert owners(make_plan(shuffled, num_devices)) == owners(plan)


SCRIPT = """
from matrixfsdp_jax.layout.planner import make_plan
from matrixfsdp_jax.layout.spec import Leaf, LeafRoute, MatrixView

views = {2: MatrixView(), 3: MatrixView((1,), (2,), (0,))}
shapes = {"a/w": (8, 8), "b/w": (8, 4), "c/w": (4, 4), "x/q": (3, 8, 8), "x/k": (3, 8, 8)}
routed = [
    (Leaf(path, shape, "float32"), LeafRoute("matrix", "", views[len(shape)]))
    for path, shape in shapes.items()
]
print(make_plan(routed, 4))
"""


def test_same_plan_under_every_hash_seed():
    printed = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1
    assert "x/q[2]" in printed.pop()


# ---- names, orientation, forward order ---------------------------------------------------------


def test_matrices_of_split_and_batched_leaves():
    view = MatrixView((2,), (3,), (0, 1), splits=(32, 8, 8))
    plan = make_plan([matrix("qkv", (2, 3, 16, 48), view=view)], 4)
    found = {m.name: m for cls in plan.classes for m in cls.matrices}
    assert len(found) == 18
    q, v = found["qkv[1,2]:0"], found["qkv[0,1]:2"]
    assert (q.batch, q.start, q.rows, q.cols, q.fan_in, q.fan_out) == (5, 0, 16, 32, 16, 32)
    assert (v.batch, v.start, v.rows, v.cols, v.fan_in, v.fan_out) == (1, 40, 16, 8, 16, 8)
    assert not q.transposed
    assert v.transposed
    assert [c.key for c in plan.classes] == ["8x16:float32", "16x32:float32"]


@pytest.mark.parametrize(
    ("out_side", "split_side", "fans"),
    [
        ("cols", "cols", [(12, 2), (12, 6)]),
        ("cols", "rows", [(4, 8), (8, 8)]),
        ("rows", "cols", [(2, 12), (6, 12)]),
        ("rows", "rows", [(8, 4), (8, 8)]),
    ],
)
def test_fans_follow_the_output_side_of_each_block(out_side, split_side, fans):
    splits = (2, 6) if split_side == "cols" else (4, 8)
    view = MatrixView(out_side=out_side, splits=splits, split_side=split_side)
    plan = make_plan([matrix("w", (12, 8), view=view)], 1)
    found = sorted((m.start, m.fan_in, m.fan_out) for c in plan.classes for m in c.matrices)
    assert [fan for _, *fan in found] == [list(f) for f in fans]


def test_tall_and_wide_share_a_class_and_dtypes_do_not():
    routed = [matrix("a", (4, 8)), matrix("b", (8, 4)), matrix("c", (4, 8), "bfloat16")]
    plan = make_plan(routed, 2)
    assert [(c.key, c.stack_shape) for c in plan.classes] == [
        ("4x8:bfloat16", (2, 1, 4, 8)),
        ("4x8:float32", (2, 1, 4, 8)),
    ]
    assert [m.transposed for m in plan.classes[1].matrices] == [False, True]


def test_neighbouring_layers_share_a_wave():
    plan = make_plan(layers(12, (8, 8)), 4)
    assert by_wave(plan, "8x8:float32")[2] == [f"blocks/{i}/w0" for i in (8, 9, 10, 11)]


def test_scanned_leaves_run_layer_by_layer():
    routed = [
        rest("embed", (5, 8)),
        matrix("blocks/attn/q", (3, 8, 8)),
        matrix("blocks/attn/k", (3, 8, 8)),
        matrix("blocks/mlp/0/kernel", (3, 8, 8)),
        rest("blocks/norm", (3, 8)),
        rest("blocks/dropout/count", (), "uint32"),
    ]
    assert by_wave(make_plan(routed, 3), "8x8:float32") == [
        [f"blocks/attn/k[{i}]", f"blocks/attn/q[{i}]", f"blocks/mlp/0/kernel[{i}]"]
        for i in range(3)
    ]


def test_two_scans_do_not_mix():
    routed = [matrix(f"{part}/{name}", (2, 8, 8)) for part in ("dec", "enc") for name in "qk"]
    assert by_wave(make_plan(routed, 4), "8x8:float32") == [
        ["dec/k[0]", "dec/q[0]", "dec/k[1]", "dec/q[1]"],
        ["enc/k[0]", "enc/q[0]", "enc/k[1]", "enc/q[1]"],
    ]


@pytest.mark.parametrize("others", [[], [matrix("blocks/0/attn", (4, 4)), rest("norm", (7,))]])
def test_experts_of_two_layers_do_not_mix(others):
    routed = [
        matrix(f"blocks/{i}/experts/{name}", (2, 8, 8)) for i in (0, 1) for name in ("up", "gate")
    ]
    prefix = "blocks/{}/experts/{}"
    assert by_wave(make_plan(routed + others, 4), "8x8:float32") == [
        [prefix.format(i, w) for w in ("gate[0]", "up[0]", "gate[1]", "up[1]")] for i in (0, 1)
    ]


def test_experts_inside_a_scan_run_layer_by_layer_then_expert_by_expert():
    routed = [
        matrix("blocks/moe/up", (2, 3, 8, 8)),
        matrix("blocks/moe/gate", (2, 3, 8, 8)),
        matrix("blocks/attn/q", (2, 8, 8)),
        rest("blocks/norm", (2, 9)),
    ]
    waves = by_wave(make_plan(routed, 7), "8x8:float32")
    for layer, wave in enumerate(waves):
        assert wave[0] == f"blocks/attn/q[{layer}]"
        experts = [f"blocks/moe/{n}[{layer},{e}]" for e in range(3) for n in ("gate", "up")]
        assert wave[1:] == experts


def test_order_by_list_and_by_key():
    routed = [matrix(name, (8, 8)) for name in ("a", "b", "c10", "c9")]
    listed = make_plan(routed, 2, order=["c9", "b", "a", "c10"])
    assert by_wave(listed, "8x8:float32") == [["c9", "b"], ["a", "c10"]]
    keyed = make_plan(routed, 2, order=lambda path: path[0] != "c")
    assert by_wave(keyed, "8x8:float32") == [["c9", "c10"], ["a", "b"]]


def test_wrong_order_names_what_is_wrong():
    routed = [matrix("a", (8, 8)), matrix("b", (8, 8)), rest("norm", (8,))]
    with pytest.raises(ValueError, match=r"missing: b; not a matrix leaf: norm; .* once: a$"):
        make_plan(routed, 2, order=["a", "a", "norm"])


# ---- slots -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "num_devices", "waves", "pads"),
    [
        (6, 8, 1, 2),
        (9, 8, 2, 7),
        (2, 8, 1, 6),
        (3, 8, 1, 5),
        (8, 8, 1, 0),
        (16, 8, 2, 0),
        (5, 1, 5, 0),
    ],
)
def test_counts_that_divide_and_that_do_not(count, num_devices, waves, pads):
    (cls,) = make_plan(layers(count, (72, 64)), num_devices).classes
    assert (cls.num_waves, cls.num_pads) == (waves, pads)
    assert cls.stack_shape == (num_devices, waves, 64, 72)


def test_rows_that_devices_do_not_divide_are_no_concern():
    (cls,) = make_plan(layers(2, (72, 8)), 16).classes
    assert cls.slots == ((0, 0), (1, 0))


def test_fewer_layers_than_devices_spread_over_all():
    cost = costs(make_plan(layers(2, *[(8, 8)] * 4), 8))
    assert cost.matrices.real == (1,) * 8


def test_repeating_layer_types_are_balanced_by_cost():
    cost = costs(make_plan(layers(8, (64, 64), (64, 64), (64, 256), (256, 64)), 4))
    assert cost.flops.balance < 1.2
    assert max(cost.memory.real) < 1.2 * sum(cost.memory.real) / 4


def test_partial_waves_go_to_the_least_loaded():
    routed = [*layers(1, (16, 16)), *[matrix(f"small/{i}", (8, 8)) for i in range(2)]]
    small, large = make_plan(routed, 4).classes
    assert large.slots == ((0, 0),)
    assert small.slots == ((1, 0), (2, 0))


def test_no_matrix_and_empty_leaves():
    plan = make_plan([rest("norm", (8,)), rest("empty", (0, 4)), rest("ids", (8,), "int32")], 8)
    assert plan.classes == ()
    assert [p.shard_dim for p in plan.leaves] == [0, None, 0]
    assert [p.trainable for p in plan.leaves] == [True, True, False]
    cost = costs(plan)
    assert cost.padding_factor == cost.flops.balance == cost.flops.padded_balance == 1.0
    assert (cost.flops.padded, cost.parameters.padded, cost.frozen) == (0, 4, 4)


# ---- rest and frozen leaves --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "num_devices", "min_size", "dim"),
    [
        ((8, 12), 4, 0, 1),
        ((8, 8), 4, 0, 0),
        ((8, 13), 4, 0, 0),
        ((7, 13), 4, 0, None),
        ((8, 12), 1, 0, None),
        ((8, 12), 4, 96, 1),
        ((8, 12), 4, 97, None),
        ((), 4, 0, None),
    ],
)
@pytest.mark.parametrize("route", ["rest", "frozen"])
def test_shard_dim(shape, num_devices, min_size, dim, route):
    plan = make_plan([rest("x", shape, route=route)], num_devices, rest_shard_min_size=min_size)
    assert plan.leaves[0].shard_dim == dim
    assert plan.leaves[0].trainable == (route == "rest")


def test_huge_embedding_keeps_ordinary_sharding():
    cost = costs(make_plan([rest("embed", (50304, 64)), *layers(8, (64, 64))], 4))
    assert max(cost.memory.real) < 1.2 * sum(cost.memory.real) / 4
    assert cost.parameters.padded == (50304 * 64 // 4 + 2 * 64 * 64) * 4


# ---- costs by hand -----------------------------------------------------------------------------


def small_plan(**options):
    routed = [
        *layers(3, (4, 8)),  # two waves on two devices, one pad
        rest("embed", (6, 5), "bfloat16"),  # sharded on dim 0
        rest("scale", (5,)),  # replicated
        rest("base", (2, 3), route="frozen"),  # sharded on dim 0
        rest("count", (), "int32"),
    ]
    return make_plan(routed, 2, **options)


def test_memory_and_flops_by_hand():
    cost = costs(small_plan(ns_steps=3))
    flops = 3 * (4 * 4 * 4 * 8 + 2 * 4 * 4 * 4)
    assert newton_schulz_flops((4, 8), 3) == flops == 1920
    assert (cost.flops.real, cost.flops.padded) == ((2 * flops, flops), 2 * flops)
    assert cost.matrices.real == (2, 1)
    assert cost.padding_factor == 4 / 3
    assert cost.flops.balance == cost.flops.padded_balance == 4 / 3
    stack, embed, scale = 4 * 8 * 4, 15 * 2, 5 * 4
    rest_bytes = embed + scale
    assert cost.parameters.real == (2 * stack + rest_bytes, stack + rest_bytes)
    assert cost.parameters.padded == cost.gradients.padded == 2 * stack + rest_bytes
    assert cost.state.real == (2 * stack + 2 * rest_bytes, stack + 2 * rest_bytes)
    assert cost.frozen == 3 * 4 + 4
    assert cost.memory.real[1] == 3 * stack + 4 * rest_bytes + cost.frozen
    assert cost.memory.padded == 6 * stack + 4 * rest_bytes + cost.frozen
    assert cost.gathered == 3 * stack + 30 * 2 + 20 + 6 * 4 + 4


def test_collectives_by_hand():
    cost = costs(small_plan(gather_dtype="bfloat16"))
    assert cost.collectives == (
        Collective("4x8:float32", "all-gather", 2, 32 * 2),
        Collective("4x8:float32", "reduce-scatter", 2, 32 * 4),
        Collective("embed", "all-gather", 1, 15 * 2),
        Collective("embed", "reduce-scatter", 1, 15 * 4),
        Collective("base", "all-gather", 1, 3 * 2),
        Collective("replicated rest", "all-reduce", 1, 5 * 4),
    )
    assert cost.received("all-gather") == 2 * 64 + 30 + 6
    assert costs(small_plan()).received("all-gather") == 2 * 128 + 30 + 12
    assert costs(small_plan(reduce_dtype="bfloat16")).received("reduce-scatter") == 2 * 64 + 30


def test_all_reduce_bytes_are_rounded_up():
    cost = costs(make_plan([rest("scale", (5,))], 3))
    assert cost.received("all-reduce") == 27  # 2 * 2/3 * 20 = 26.67


def test_integers_are_gathered_in_their_own_dtype():
    cost = costs(make_plan([rest("ids", (8,), "int32")], 2, gather_dtype="bfloat16"))
    assert cost.collectives == (Collective("ids", "all-gather", 1, 4 * 4),)


def test_one_device_receives_nothing():
    assert costs(make_plan(layers(3, (8, 8)), 1)).collectives == ()


@pytest.mark.parametrize(
    ("optimizer", "flops", "matrix_state", "rest_state"),
    [("muon", 5 * 6 * 512, 64, 20), ("adamw", 16 * 64, 128, 20), ("sgd", 4 * 64, 64, 10)],
)
def test_each_optimizer(optimizer, flops, matrix_state, rest_state):
    routed = [matrix("w", (8, 8), "bfloat16"), rest("b", (10,), "bfloat16")]
    cost = costs(make_plan(routed, 1, optimizer=optimizer))
    assert cost.flops.real == (flops,)
    # Matrix state is float32; rest state has the leaf's dtype.
    assert cost.state.real == (4 * matrix_state + 2 * rest_state,)


@pytest.mark.parametrize(("num_devices", "balance"), [(8, 1.00), (64, 1.26), (256, 2.94)])
def test_padding_of_an_8b_llama(num_devices, balance):
    d, kv, ffn = 4096, 1024, 14336
    routed = layers(32, (d, d), (d, kv), (d, kv), (d, d), (d, ffn), (d, ffn), (ffn, d))
    cost = costs(make_plan(routed, num_devices))
    assert round(cost.flops.padded_balance, 2) == balance


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_devices": 0}, "num_devices is 0; it must be at least 1"),
        ({"ns_steps": 0}, "ns_steps is 0; it must be at least 1"),
        ({"rest_shard_min_size": -1}, "rest_shard_min_size is -1; it must be at least 0"),
        ({"gather_dtype": "int8"}, "gather_dtype is 'int8'; it must be one of bfloat16"),
        ({"reduce_dtype": "half"}, "reduce_dtype is 'half'; it must be one of bfloat16"),
        (
            {"optimizer": "lion"},
            "unknown optimizer 'lion': the planner knows adamuon, adamw, muon, normuon, sgd, "
            "shampoo, soap",
        ),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        make_plan([], **{"num_devices": 2, **options})


def test_no_leaf():
    with pytest.raises(ValueError, match="has no leaf"):
        make_plan([], 2)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ((Leaf("w", (4, 4), "float32"), LeafRoute("matrix", "")), "'w' .* has no view"),
        (matrix("w", (4, 4, 4), view=MatrixView()), "do not name each of its 3 dims once"),
        (matrix("w", (4, 4), "int32"), "no gradient or no element; route it to 'rest'"),
        (matrix("w", (0, 4)), "no gradient or no element; route it to 'rest'"),
        (matrix("w", (16, 47), view=SPLIT_QKV), r"do not add up to its 47 cols"),
        (matrix("w", (4, 4), view=MatrixView(splits=(5, -1))), "give positive sizes"),
    ],
)
def test_matrix_leaves_that_cannot_be_read(pair, message):
    with pytest.raises(ValueError, match=message):
        make_plan([pair], 2)
