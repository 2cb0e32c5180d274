import json
import math
from collections import Counter
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.layout import advice_report, models
from matrixfsdp_jax.layout.advice import compare
from matrixfsdp_jax.layout.hardware import HARDWARE, Hardware
from matrixfsdp_jax.layout.rules import route
from matrixfsdp_jax.layout.spec import Leaf, LeafRoute

MESH = {"replica": 2, "fsdp": 4}
# Eight FLOPs, and a byte from near or a quarter of one from far, in a second.
SLOW = Hardware("slow", flops=8.0, memory=None, near=1.0, far=0.25, domain=4, efficiency=0.5)


@cache
def routed_model(name):
    found = models.model(name)
    return route({leaf.path: leaf for leaf in found.leaves}, found.rules, optimizer="muon")


def routed(shapes, dtype="float32", optimizer="muon", rules=None):
    leaves = {path: Leaf(path, shape, dtype) for path, shape in shapes.items()}
    return route(leaves, rules, optimizer=optimizer)


def by_name(advice):
    return {(o.storage, o.owner_axis, o.replicas): o for o in advice.options}


def storage(advice, name):
    return next(o for o in advice.options if o.storage == name)


# ---- published and calculated figures ----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "n", "slots", "elements", "lpt", "bound"),
    [
        ("llama3-8b", 8, 1.00, 1.00, 1.00, 1.00),
        ("llama3-8b", 64, 1.26, 1.27, 1.06, 1.00),
        ("llama3-8b", 256, 2.94, 2.92, 2.11, 2.11),
        ("llama3-8b", 512, 5.89, 5.85, 4.23, 4.23),
        ("llama3-70b", 8, 1.00, 1.00, 1.00, 1.00),
        ("llama3-70b", 64, 1.09, 1.09, 1.01, 1.00),
        ("llama3-70b", 256, 1.17, 1.16, 1.17, 1.00),
        ("llama3-70b", 512, 2.35, 2.32, 1.70, 1.70),
    ],
)
def test_balance_of_the_llamas(name, n, slots, elements, lpt, bound):
    option = storage(compare(routed_model(name), {"fsdp": n}), "owner")
    assert option.balance.plan == pytest.approx(slots, abs=0.006)
    assert option.balance.lpt == pytest.approx(lpt, abs=0.006)
    assert option.balance.bound == pytest.approx(bound, abs=0.006)
    assert option.padding_factor == pytest.approx(elements, abs=0.006)


@pytest.mark.parametrize(
    ("name", "n", "gigabytes"),
    [
        ("llama3-8b", 8, 3.05),
        ("llama3-8b", 64, 0.429),
        ("llama3-8b", 256, 0.109),
        ("llama3-70b", 8, 29.9),
        ("llama3-70b", 64, 4.21),
    ],
)
def test_bytes_of_the_all_to_alls(name, n, gigabytes):
    """Both ways, 2 (N-1)/N^2 of the matrices in bfloat16; on the wire are pads as well."""
    option = storage(compare(routed_model(name), {"fsdp": n}), "sharded")
    (sent,) = (t for t in option.transfers if t.phase == "optimizer")
    assert sent.kind == "all-to-all"
    assert sent.bytes / option.padding_factor / 1e9 == pytest.approx(gigabytes, rel=5e-3)


@pytest.mark.parametrize(("name", "petaflop"), [("llama3-8b", 0.666), ("llama3-70b", 13.22)])
def test_work_of_all_matrices(name, petaflop):
    advice = compare(routed_model(name), {"fsdp": 8})
    whole = storage(advice, "replicated").flops
    assert whole / 1e15 == pytest.approx(petaflop, rel=1e-3)
    assert storage(advice, "owner").flops == whole // 8


@pytest.mark.parametrize(("n", "gigabytes"), [(8, 3.49), (64, 0.436), (512, 0.055)])
def test_momentum_of_the_8b_model(n, gigabytes):
    matrices = [pair for pair in routed_model("llama3-8b") if pair[1].route == "matrix"]
    for option in compare(matrices, {"fsdp": n}).options[1:]:
        state = option.memory.state / option.padding_factor / 1e9
        assert state == pytest.approx(gigabytes, rel=0.01)


# ---- every byte by hand ------------------------------------------------------------------------

# Five matrices of one class, so two waves on four owners, one on eight.
FIVE = {f"blocks/{i}/w": (8, 16) for i in range(5)} | {"embed": (16, 4), "norm/scale": (3,)}
MATRICES, EMBEDDING, NORM = 5 * 128, 64, 3


def test_every_option_by_hand():
    """In elements of 4 bytes; N = 4 owners, R = 2 replicas."""
    advice = compare(routed(FIVE), MESH, hardware=SLOW)
    found = by_name(advice)
    assert len(found) == len(advice.options) == 5
    both, one = ("replica", "fsdp"), ("fsdp",)
    every = MATRICES + EMBEDDING + NORM
    norm = 2 * 7 / 8 * NORM  # all-reduced over all eight devices
    fsdp = (MATRICES + EMBEDDING) / 4  # FSDP's shard
    fsdp_backward = 2 * 3 * fsdp + fsdp + norm
    two = 2 * 128  # two waves
    own = two + EMBEDDING / 4  # an owner's part of everything
    # forward, backward, optimizer; parameters, gradients, state, working
    expected = {
        ("replicated", (), "each"): (
            (0, 2 * 7 / 8 * every, 0),
            (every, every, MATRICES + 2 * (EMBEDDING + NORM), 0),
        ),
        ("sharded", one, "each"): (
            (3 * fsdp, fsdp_backward, 2 * 3 / 4 * two),
            (fsdp + NORM, fsdp + NORM, two + 2 * (EMBEDDING / 4 + NORM), 2 * two),
        ),
        ("sharded", both, "each"): (
            (3 * fsdp, fsdp_backward, 2 * 3 / 4 * 128 + 128),
            (fsdp + NORM, fsdp + NORM, 128 + 2 * (EMBEDDING / 4 + NORM), 2 * 128),
        ),
        ("owner", one, "each"): (
            (3 * own, 3 * own + own + norm, 0),
            (own + NORM, own + NORM, two + 2 * (EMBEDDING / 4 + NORM), every),
        ),
        ("owner", one, "shared"): (
            (3 * own, 3 * own + own / 2 + norm, own / 2),
            (own + NORM, own / 2 + NORM, 128 + 2 * (EMBEDDING / 8 + NORM), every),
        ),
    }
    assert set(found) == set(expected)
    for name, (sent, held) in expected.items():
        option = found[name]
        phases = ("forward", "backward", "optimizer")
        # A ring of three elements over eight devices is no whole number of bytes.
        np.testing.assert_allclose([option.received(p) / 4 for p in phases], sent, atol=0.25)
        m = option.memory
        assert [x / 4 for x in (m.parameters, m.gradients, m.state, m.working)] == list(held)
        assert m.total == 4 * sum(held)


def test_work_and_estimates_by_hand():
    advice = compare(routed(FIVE), MESH, hardware=SLOW)
    found = by_name(advice)
    one = 5 * (4 * 8 * 8 * 16 + 2 * 8**3)
    waves = {
        ("replicated", (), "each"): 5,
        ("sharded", ("fsdp",), "each"): 2,
        ("sharded", ("replica", "fsdp"), "each"): 1,
        ("owner", ("fsdp",), "each"): 2,
        ("owner", ("fsdp",), "shared"): 1,
    }
    assert {name: option.flops / one for name, option in found.items()} == waves
    shared = found["owner", ("fsdp",), "shared"]
    assert shared.balance.plan == 8 / 5
    assert shared.balance.lpt == shared.balance.bound == 8 / 5
    assert advice.update_seconds(shared) == one / 4
    # Near within the four owners, far beyond.
    near = sum(t.bytes for t in shared.transfers if t.axes == ("fsdp",))
    far = sum(t.bytes for t in shared.transfers if "replica" in t.axes)
    assert near + far == shared.received()
    every = ("forward", "backward", "optimizer")
    assert advice.transfer_seconds(shared, *every) == pytest.approx(near + 4 * far)
    model = {k: advice.transfer_seconds(o, "forward", "backward") for k, o in found.items()}
    for name, option in found.items():
        extra = advice.transfer_seconds(option, "optimizer") + model[name] - min(model.values())
        assert advice.seconds(option) == pytest.approx(advice.update_seconds(option) + extra)


def test_frozen_leaves_are_gathered_but_have_no_gradient():
    given = routed(FIVE)
    base = (Leaf("base", (64, 64), "bfloat16"), LeafRoute("frozen", "LoRA"))
    without, added = (by_name(compare(leaves, MESH)) for leaves in (given, [*given, base]))
    for name, option in added.items():
        times = {"replicated": 0, "owner": 1, "sharded": 2}[option.storage]
        assert option.received() - without[name].received() == times * 3 * 64 * 64 * 2 // 4
        assert option.memory.frozen == 64 * 64 * 2 // (1 if option.storage == "replicated" else 4)
        assert option.memory.gradients == without[name].memory.gradients
        assert option.memory.state == without[name].memory.state


def test_two_blocks_are_gathered_at_a_time():
    """Numbered blocks, a layer of what is stacked, and single leaves each are a block."""
    stacked = {"layers/up": (6, 64, 32), "layers/down": (6, 32, 64)}
    numbered = {"h/0/up": (64, 32), "h/0/down": (32, 64), "h/1/up": (64, 8), "wte": (500, 8)}
    rules = mfsdp.default_rules(mfsdp.rules.stacked("layers/*"))
    for shapes, elements in ((stacked | {"head": (9, 9)}, 4096 + 81), (numbered, 4096 + 4000)):
        given = routed(shapes, rules=rules if shapes is not numbered else None)
        option = storage(compare(given, {"fsdp": 64}, gather_dtype="bfloat16"), "sharded")
        stacks = option.plan.classes
        moved = 2 * 4 * sum(c.num_waves * c.size for c in stacks)
        assert option.memory.working == max(2 * elements, moved)


# ---- against the library itself ----------------------------------------------------------------

TREE = {f"layers/{i}/w": (8, 32) for i in range(9)} | {"tall": (32, 8), "odd": (6, 10)}


def fsdp_leaf(mesh, shape):
    dims = [d for d in range(len(shape)) if shape[d] % 4 == 0]
    largest = max(dims, key=lambda d: shape[d], default=None)
    spec = P(*["fsdp" if d == largest else None for d in range(len(shape))])
    return jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, spec))


def sent(transfers):
    total = Counter()
    for t in transfers:
        total[t.kind, t.axes] += t.bytes
    return total


def found_in(audit):
    total = Counter()
    for c in audit.matrices:
        total[c.kind, c.axis] += c.wire_bytes * c.times
    return total


@pytest.mark.parametrize(("optimizer", "dealing"), [("muon", "slots"), ("soap", "lpt")])
def test_plan_takes_the_arguments_and_makes_the_same_plan(optimizer, dealing):
    mesh = jax.make_mesh((2, 4), ("replica", "fsdp"))
    params = {path: fsdp_leaf(mesh, shape) for path, shape in (TREE | FIVE).items()}
    given = routed(TREE | FIVE, optimizer=optimizer)
    how = {"optimizer": optimizer, "dealing": dealing}
    advice, plain = (compare(given, MESH, **how, spread=spread) for spread in (True, False))
    for option, without in zip(advice.options[1:], plain.options[1:], strict=True):
        layout = mfsdp.plan(params, mesh, optimizer=optimizer, **option.arguments)
        assert layout.plan == option.plan
        assert (option.plan == without.plan) == (optimizer == "muon")
        assert replace(without, plan=option.plan) == option  # no figure differs
    assert advice.options[0].arguments is None


@pytest.mark.parametrize("owners", [("fsdp",), ("replica", "fsdp")])
def test_the_compiled_update_of_sharded_storage_sends_these_bytes(owners):
    mesh = jax.make_mesh((2, 4), ("replica", "fsdp"))
    params = {path: fsdp_leaf(mesh, shape) for path, shape in TREE.items()}
    option = by_name(compare(routed(TREE), MESH))["sharded", owners, "each"]
    layout = mfsdp.plan(params, mesh, **option.arguments)
    tx = mfsdp.scale_by_muon(layout=layout)
    audit = mfsdp.audit(jax.jit(tx.update).lower(params, tx.init(params), params))
    assert found_in(audit) == sent(t for t in option.transfers if t.phase == "optimizer")


@pytest.mark.parametrize("replicas", ["each", "shared"])
def test_the_compiled_step_of_owner_storage_sends_these_bytes(replicas):
    mesh = jax.make_mesh((2, 4), ("replica", "fsdp"))
    params = {path: np.ones(shape, np.float32) for path, shape in (TREE | FIVE).items()}
    option = by_name(compare(routed(TREE | FIVE), MESH))["owner", ("fsdp",), replicas]
    layout = mfsdp.plan(params, mesh, **option.arguments)

    def loss(params, batch):
        return batch.mean() * sum((x**2).sum() for x in jax.tree.leaves(params))

    tx = mfsdp.muon(0.1, layout=layout, rest=optax.sgd(0.1))
    owned = layout.shard(params)
    step = mfsdp.train_step(loss, tx, layout)
    audit = mfsdp.audit(step.lower(owned, layout.init(tx, owned), np.ones((8, 1), np.float32)))
    expected = sent(option.transfers)
    norm = 2 * 7 * 4 * 3 / 8
    assert expected["all-reduce", ("replica", "fsdp")] == norm
    expected["all-reduce", ("replica", "fsdp")] += 2 * 7 * 4 / 8  # the loss travels with the norm
    assert found_in(audit) == expected


# ---- the choice --------------------------------------------------------------------------------


def test_the_fastest_that_fits_is_chosen():
    advice = compare(routed(FIVE), MESH, hardware=SLOW)
    assert advice.memory_budget is None
    order = sorted(advice.options, key=advice.seconds)
    assert advice.chosen is order[0]
    assert f"{order[0].name} adds an estimated" in advice.why
    assert order[1].name in advice.why
    budget = order[0].memory.total - 1
    smaller = compare(routed(FIVE), MESH, hardware=SLOW, memory_budget=budget)
    fitting = [o for o in order if o.memory.total <= budget]
    assert fitting[0] != order[0]
    assert smaller.chosen == fitting[0]
    assert "but needs 1 B more than there is" in smaller.why


def test_nothing_fits():
    advice = compare(routed(FIVE), MESH, memory_budget=1000)
    least = min(advice.options, key=lambda o: o.memory.total)
    assert advice.chosen is None
    why = f"no option fits into 1000 B per device: the smallest, {least.name}, needs"
    assert advice.why.startswith(why)
    assert f"needs {least.memory.total / 1024:.1f} KiB" in advice.why
    assert f"{(least.memory.total - 1000) / 1024:.1f} KiB too much" in advice.why
    assert "no option fits" in advice_report.render(advice)


def test_the_budget_is_the_memory_of_the_hardware():
    advice = compare(routed_model("llama3-8b"), {"fsdp": 8}, hardware="v5e")
    assert advice.memory_budget == 16 * 10**9
    assert not advice.fits(storage(advice, "owner"))
    assert advice.chosen is storage(advice, "sharded")


def test_of_equals_the_one_that_receives_less_then_the_simpler_one():
    """With bytes for nothing all but the replicated option cost the same, their FLOPs."""
    free = replace(SLOW, near=math.inf, far=math.inf)
    advice = compare(routed(FIVE), {"fsdp": 4}, hardware=free)
    assert advice.chosen is storage(advice, "owner")
    assert "about the same as sharded storage over fsdp" in advice.why
    assert "and receives" in advice.why
    alone = compare(routed(FIVE), {"fsdp": 1}, hardware=free)
    assert not any(o.received() for o in alone.options)
    assert alone.chosen is alone.options[0]
    assert "which is less simple" in alone.why


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        ({}, {}, "must have an axis"),
        ({"fsdp": 0}, {}, "sizes of at least 1"),
        ({"data": 4}, {}, r"owner_axis=\('fsdp',\) .* must name each axis of the mesh"),
        ({"fsdp": 4, "tp": 2}, {"replica_axis": ()}, "leave axes of tensor parallelism out"),
        ({"fsdp": 4}, {"owner_axis": ("fsdp", "fsdp")}, "once"),
        ({"fsdp": 4}, {"hardware": "abacus"}, "unknown hardware 'abacus'; known are h100, "),
        ({"fsdp": 4}, {"memory_budget": 0}, "memory_budget=0 must be at least 1 byte"),
        ({"fsdp": 4}, {"optimizer": "adam"}, "unknown optimizer 'adam'"),
        ({"fsdp": 4}, {"ns_steps": 0}, "ns_steps is 0"),
    ],
)
def test_bad_input(mesh, options, message):
    with pytest.raises(ValueError, match=message):
        compare(routed(FIVE), mesh, **options)


# ---- what holds for every tree and mesh --------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12),
    st.integers(1, 9),
    st.integers(1, 5),
    st.sampled_from(["muon", "soap"]),
    st.sampled_from(["slots", "lpt"]),
)
def test_bounds(shapes, n, r, optimizer, dealing):
    given_leaves = {f"l/{i}/w": shape for i, shape in enumerate(shapes)} | {"norm/scale": (8,)}
    leaves = routed(given_leaves, "bfloat16", optimizer)
    advice = compare(leaves, {"fsdp": n, "replica": r}, optimizer=optimizer, dealing=dealing)
    assert len(advice.options) == (5 if r > 1 else 3)
    whole = storage(advice, "replicated")
    for option in advice.options:
        even = option.balance
        assert even.bound <= even.lpt * (1 + 1e-9)
        assert even.bound <= even.plan * (1 + 1e-9)
        assert even.lpt <= 4 / 3 * max(even.plan, 1) + 1e-9  # Graham's bound, of any deal
        devices = option.plan.num_devices * (option.plan.replicas if option.plan.shared else 1)
        assert option.flops * devices >= whole.flops
        assert option.flops <= whole.flops
        assert all(t.bytes > 0 and len(t.axes) > 0 for t in option.transfers)
        assert advice.seconds(option) >= 0
        if option.storage == "owner" and option.replicas == "each":
            assert option.received("optimizer") == 0
    assert advice.chosen is not None


# ---- reports -----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("name", ["gpt2-small", "llama3-70b"])
def test_no_line_is_too_long_and_all_options_are_shown(name, width):
    advice = compare(routed_model(name), {"replica": 8, "fsdp": 64}, hardware="v5p")
    text = advice_report.render(advice, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for option in advice.options:
        figures = (option.balance.plan, option.balance.lpt, option.balance.bound)
        assert "/".join(f"{x:.2f}" if x < 10 else f"{x:.1f}" for x in figures) in text
    words = " ".join(text.split())
    assert advice.why in words
    assert "chosen" in words
    used = ", ".join(f"{k}={v!r}" for k, v in advice.chosen.arguments.items())
    assert f"use mfsdp.plan(params, mesh, {used}, optimizer='muon')" in words


def test_uneven_slots_are_spoken_of():
    def words(**options):
        advice = compare(routed_model("llama3-8b"), {"fsdp": 64}, hardware="v5e", **options)
        return " ".join(advice_report.render(advice).split())

    assert "from 1.26 to 1.06 x the mean FLOPs" in words()
    by_work = words(dealing="auto")
    assert "x the mean FLOPs" not in by_work
    assert "owner_axis=('fsdp',), dealing='lpt', optimizer='muon')" in by_work


def test_a_column_has_one_unit_in_which_nothing_vanishes():
    advice = compare(routed_model("llama3-8b"), {"fsdp": 8}, hardware="h100")
    rows = advice_report.render(advice).splitlines()
    units = rows[3].split()
    assert units == ["owners", "GiB", "GiB", "GiB", "TFLOP", "balance", "ms"]
    (replicated,) = (row.split() for row in rows if row.startswith(" replicated"))
    option = advice.options[0]
    gib = (option.received() / 2**30, option.memory.total / 2**30)
    assert replicated[1:5] == [f"{gib[0]:.1f}", "0", f"{gib[1]:.1f}", "666"]
    assert float(replicated[6]) == pytest.approx(1e3 * advice.seconds(option), rel=1e-2)


def test_json_is_exact():
    advice = compare(routed(FIVE), MESH, hardware="cpu")
    found = json.loads(json.dumps(advice_report.to_dict(advice)))
    assert found["mesh"] == MESH
    assert found["hardware"]["name"] == "cpu"
    assert found["memory_budget"] is None
    assert advice.options[found["chosen"]] is advice.chosen
    for each, option in zip(found["options"], advice.options, strict=True):
        assert sum(each["received"].values()) == option.received()
        assert sum(t["bytes"] for t in each["transfers"]) == option.received()
        assert each["memory"]["total"] == option.memory.total
        assert each["seconds"]["compared"] == advice.seconds(option)
        arguments = each["plan_arguments"]
        assert (arguments is None) == (option.storage == "replicated")


def test_the_built_in_hardware_is_plausible():
    for name, it in HARDWARE.items():
        assert it.name == name
        assert it.far <= it.near
        assert it.bandwidth(it.domain) == it.near
        assert it.bandwidth(it.domain + 1) == it.far
        assert 0 < it.efficiency < 1
