"""Memory of factors and balance of decompositions, as ``report`` and ``to_dict`` say them."""

import functools
import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from matrixfsdp_jax import assembly
from matrixfsdp_jax.layout.costs import Method, costs, shampoo_method
from matrixfsdp_jax.layout.planner import make_plan
from matrixfsdp_jax.layout.refresh_report import refresh
from matrixfsdp_jax.layout.report import render, to_dict
from matrixfsdp_jax.layout.spec import Leaf, LeafRoute, MatrixView, TensorView
from matrixfsdp_jax.transforms.kronecker import EigenvalueCorrected
from matrixfsdp_jax.transforms.refresh import Schedule
from matrixfsdp_jax.transforms.shampoo import ShampooOptions

MATRIX = LeafRoute("matrix", "a matrix", MatrixView())
GOOD = 1 - 1e-12


def matrix(path, *shape, dtype="float32"):
    return Leaf(path, shape, dtype), MATRIX


def tensor(path, *shape):
    view = TensorView(dims=tuple(range(len(shape))))
    return Leaf(path, shape, "float32"), LeafRoute("matrix", "a tensor", view)


def gpt(layers=12, d=256):
    shapes = dict.fromkeys("qkvo", (d, d)) | {"up": (d, 4 * d), "down": (4 * d, d)}
    return [matrix(f"block_{i}/{k}", *s) for i in range(layers) for k, s in shapes.items()]


def plan_of(routed, num_devices, max_dim=256, frequency=10, name="soap"):
    record = shampoo_method(name, max_dim, 2, frequency)
    return make_plan(routed, num_devices, optimizer=record)


TENSORS = [
    tensor("conv", 3, 3, 8, 16),
    tensor("depthwise", 3, 3, 1, 16),
    tensor("patches", 2, 5, 8),
    tensor("scalar"),
    *[tensor(f"vector_{i}", 16) for i in range(5)],
    *[matrix(f"dense_{i}", 20, 12) for i in range(5)],
    matrix("half", 20, 12, dtype="bfloat16"),
    (Leaf("bias", (8,), "float32"), LeafRoute("rest", "rank 1")),
]
CASES = {
    "gpt, 8 devices": (gpt(), 8, 256, 10),
    "gpt, 5 devices": (gpt(), 5, 256, 10),
    "gpt, 16 devices": (gpt(), 16, 128, 10),
    "gpt, 1 device": (gpt(), 1, 256, 10),
    "gpt, every step": (gpt(), 8, 256, 1),
    "3 matrices, 8 devices": (gpt()[:3], 8, 256, 10),
    "tensors": (TENSORS, 3, 8, 4),
    "tensors, no limit": (TENSORS, 4, math.inf, 3),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


# ---- the goals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["shampoo", "soap"])
def test_a_gpt_on_8_devices_is_balanced(name):
    found = refresh(plan_of(gpt(), 8, name=name))
    assert found.owner.mean == 36 * 256**3
    assert found.owner.over_bound <= 1.2
    assert found.step.balance <= 1.5


# ---- work --------------------------------------------------------------------------------------


def work_of_the_tables(plan, max_dim, frequency):
    """``[N, F]`` from the tables by which the optimizer goes."""
    options = ShampooOptions(
        betas=(0.9, 0.9),
        beta3=0.9,
        epsilon=1e-8,
        max_preconditioner_dim=max_dim,
        target_parameter_dimensionality=2,
        use_bias_correction=True,
        preconditioner=EigenvalueCorrected(),
        grafting=None,
        schedule=Schedule(frequency, 1, stagger=True, first="all"),
    )
    work = np.zeros((plan.num_devices, frequency))
    tables = assembly.phase_tables(plan, options)
    for c in plan.classes:
        for group, table in zip(options.blocking(c.shape).groups, tables[c.key], strict=True):
            cost = sum(k**3 for k in group.shape)
            for device, phase in itertools.product(range(plan.num_devices), range(frequency)):
                work[device, phase] += cost * np.sum(table[device] == phase)
    return work


@cases
def test_work_and_balance_are_those_of_the_optimizers_tables(case):
    routed, num_devices, max_dim, frequency = case
    plan = plan_of(routed, num_devices, max_dim, frequency)
    work = work_of_the_tables(plan, max_dim, frequency)
    found = refresh(plan)
    np.testing.assert_array_equal(found.work, work)
    mean = work.sum() / num_devices
    assert found.frequency == frequency
    assert found.owner.balance == pytest.approx(work.sum(axis=1).max() / mean)
    assert found.step.balance == pytest.approx(work.max() * frequency / mean)
    assert found.lockstep_balance == pytest.approx(work.max(axis=0).sum() / mean)
    assert found.owner.over_bound >= GOOD
    assert found.step.over_bound >= GOOD
    assert sum(each.matrices * each.work for each in found.classes) == work.sum()


@pytest.mark.parametrize("num_devices", [1, 8])
def test_one_device_or_one_step(num_devices):
    found = refresh(plan_of(gpt(), num_devices, frequency=1))
    assert [[sum(own)] for own in found.work] == [list(own) for own in found.work]
    assert found.step.largest == found.owner.largest
    assert found.step.balance == found.owner.balance == found.lockstep_balance == 1
    if num_devices == 1:
        assert found.owner.reason == "the mean"
        assert found.owner.over_bound == 1


# ---- bounds ------------------------------------------------------------------------------------


def own_plan(classes, num_devices, frequency):
    """``classes``: ``(matrices, blocks of each, cost of a block)``."""
    units = {(4, n): ((blocks, cost),) for n, (_, blocks, cost) in enumerate(classes, 1)}
    record = Method(
        "own",
        lambda dims, _: 1,
        lambda dims: 1,
        rest_copies=1,
        oriented=False,
        refresh_units=units.__getitem__,
        refresh_frequency=frequency,
    )
    routed = [
        matrix(f"{n}/{i}", 4, n) for n, (count, *_) in enumerate(classes, 1) for i in range(count)
    ]
    return make_plan(routed, num_devices, optimizer=record)


@functools.cache
def least_largest(sizes, bins):
    """The least that the fullest of ``bins`` can hold."""
    deals = itertools.product(range(bins), repeat=len(sizes))
    return min(max(np.bincount(deal, sizes, bins)) for deal in deals) if sizes else 0.0


def best_of_all(classes, num_devices, frequency):
    """The least largest work of a device, and of a device in a step, of all plans by trial."""
    members = [n for n, (count, *_) in enumerate(classes) for _ in range(count)]
    waves = [-(-count // num_devices) for count, *_ in classes]
    owner = step = math.inf
    for deal in itertools.product(range(num_devices), repeat=len(members)):
        owned = [[n for n, d in zip(members, deal, strict=True) if d == e] for e in set(deal)]
        if any(own.count(n) > w for own in owned for n, w in enumerate(waves)):
            continue
        blocks = [sorted(b for n in own for b in classes[n][1] * (classes[n][2],)) for own in owned]
        owner = min(owner, max(map(sum, blocks)))
        step = min(step, max(least_largest(tuple(b), frequency) for b in blocks))
    return owner, step


BOUNDS = [
    # classes, N, least largest work of a device, and why
    ([(4, 1, 3.0), (8, 1, 1.0)], 4, 5.0, "the mean"),
    ([(2, 1, 1.0), (1, 1, 8.0)], 4, 8.0, "the costliest of the matrices"),
    ([(3, 1, 5.0), (1, 1, 4.0)], 3, 9.0, "2 of the 4 costliest matrices meet on one device"),
    (
        [(2, 1, 9.0), (3, 1, 5.0)],
        2,
        19.0,
        "the costliest of the matrices, beside what full waves give to each",
    ),
    (
        [(4, 1, 3.0), (4, 1, 2.0), (1, 1, 2.0)],
        4,
        7.0,
        "the costliest of the matrices, beside what full waves give to each",
    ),
]


@pytest.mark.parametrize(("classes", "num_devices", "least", "why"), BOUNDS)
def test_bounds_that_are_met(classes, num_devices, least, why):
    found = refresh(own_plan(classes, num_devices, 3)).owner
    assert (found.bound, found.reason) == (least, why)
    assert (found.largest, found.over_bound) == (least, 1)
    assert found.balance == least / found.mean


CLASS = st.tuples(st.integers(1, 3), st.integers(1, 2), st.sampled_from([1.0, 2.0, 3.0, 7.0]))


@settings(deadline=None, max_examples=60)
@given(st.lists(CLASS, min_size=1, max_size=2), st.integers(1, 3), st.integers(1, 3))
def test_no_plan_beats_a_bound(classes, num_devices, frequency):
    found = refresh(own_plan(classes, num_devices, frequency))
    owner, step = best_of_all(classes, num_devices, frequency)
    assert found.owner.bound * GOOD <= owner <= found.owner.largest
    assert found.step.bound * GOOD <= step <= found.step.largest


@pytest.mark.parametrize(
    ("classes", "num_devices", "frequency", "bound", "why"),
    [
        ([(1, 4, 2.0)], 1, 4, 2.0, "the mean"),
        ([(1, 5, 2.0)], 1, 4, 4.0, "2 of the 5 costliest blocks meet in one step of a device"),
        ([(1, 1, 2.0), (1, 1, 9.0)], 1, 4, 9.0, "the costliest of the blocks"),
        ([(1, 9, 1.0)], 2, 3, 3.0, "the least of the busiest owner, in equal steps"),
    ],
)
def test_bounds_of_a_step(classes, num_devices, frequency, bound, why):
    found = refresh(own_plan(classes, num_devices, frequency)).step
    assert (found.bound, found.reason) == (bound, why)
    assert (found.largest, found.over_bound) == (bound, 1)


# ---- memory ------------------------------------------------------------------------------------


def blocks_of(dims, max_dim):
    """The blocks of a merged tensor, one after the other."""
    sides = [[min(max_dim, d - start) for start in range(0, d, min(max_dim, d))] for d in dims]
    return itertools.product(*sides)


MERGED = {
    8: {(3, 3, 1, 16): (3, 3, 16), (): (1,)},
    math.inf: {(3, 3, 8, 16): (3, 384), (3, 3, 1, 16): (3, 48), (2, 5, 8): (2, 40), (): (1,)},
}


@cases
def test_bytes_of_factors_and_roots(case):
    routed, num_devices, max_dim, frequency = case
    plan = plan_of(routed, num_devices, max_dim, frequency)
    merged = MERGED.get(max_dim, {})
    real, padded, per_class = [0] * num_devices, 0, {}
    for c in plan.classes:
        each = sum(
            2 * 4 * k**2 for b in blocks_of(merged.get(c.shape, c.shape), max_dim) for k in b
        )
        per_class[c.key] = each
        padded += each * c.num_waves
        for device, _ in c.slots:
            real[device] += each
    found = refresh(plan)
    cost = costs(plan).factors
    assert {c.key: c.factor_bytes for c in found.classes} == per_class
    assert (cost.real, cost.padded) == (tuple(real), padded)


def test_float64_factors_take_twice_as_much():
    wide, narrow = (
        costs(plan_of([matrix("w", 8, 8, dtype=dtype)], 1)) for dtype in ("float64", "bfloat16")
    )
    assert (wide.factors.real, narrow.factors.real) == ((2048,), (1024,))
    assert wide.state.padded - wide.factors.padded == 2 * 64 * 8


# ---- what is shown -----------------------------------------------------------------------------


@cases
def test_dict_has_every_number(case):
    routed, num_devices, max_dim, frequency = case
    plan = plan_of(routed, num_devices, max_dim, frequency)
    data, found = to_dict(plan), refresh(plan)
    assert json.loads(json.dumps(data)) == data
    own = data["refresh"]
    assert own["frequency"] == frequency
    assert np.shape(own["work"]) == (num_devices, frequency)
    for name, peak in (("owner", found.owner), ("step", found.step)):
        assert own[name]["balance"] == own[name]["largest"] / own[name]["mean"] == peak.balance
        assert own[name]["over_bound"] == own[name]["largest"] / own[name]["bound"]
        assert own[name]["bound_reason"] == peak.reason
    assert own["lockstep_balance"] == found.lockstep_balance
    assert [d["factors"] for d in data["devices"]] == list(costs(plan).factors.real)
    waves = {c["key"]: c["num_waves"] for c in data["classes"]}
    assert {c["key"]: c["waves"] for c in own["classes"]} == waves
    total = sum(c["waves"] * c["factor_bytes"] for c in own["classes"])
    assert data["costs"]["every_device"]["factors"] == total


def test_text_of_a_gpt():
    plan = plan_of(gpt(), 8)
    found, text = refresh(plan), render(plan)
    assert max(map(len, text.splitlines())) <= 80
    rows = " ".join(text.split())
    for words in (
        "factors and their roots (or eigenvectors): 22.0 MiB of state per device",
        "decomposed once in 10 steps: busiest owner has 1.00 x the mean k^3, 1.00 x the least "
        "possible with these waves (the mean)",
        f"busiest step of an owner: {found.step.balance:.2f} x the mean step, "
        f"{found.step.over_bound:.2f} x the least possible "
        "(2 of the 81 costliest blocks meet in one step of a device)",
        f"if each step waits for its busiest owner: {found.lockstep_balance:.2f} x the mean",
        "256x256:float32 1 33.6 M 33% 1.0 MiB 6.0 MiB",
        "1024x256:float32 4 134.2 M 33% 4.0 MiB 8.0 MiB",
    ):
        assert words in rows


@pytest.mark.parametrize("width", [60, 80, 120])
@cases
def test_text_fits_and_is_whole(case, width):
    plan = plan_of(*case)
    text, found = render(plan, width=width), refresh(plan)
    assert max(map(len, text.splitlines())) <= width
    rows = " ".join(text.split())
    assert f"{found.owner.over_bound:.2f} x the least possible with these waves" in rows
    assert ("busiest step" in rows) == (found.frequency > 1)
    assert ("waits for" in rows) == (found.frequency > 1 and plan.num_devices > 1)
    assert ("decomposed every step" in rows) == (found.frequency == 1)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_methods_that_decompose_nothing(optimizer):
    plan = make_plan(gpt(1, 8), 2, optimizer=optimizer)
    assert refresh(plan) is None
    assert to_dict(plan)["refresh"] is None
    assert costs(plan).factors.padded == 0
    text = render(plan)
    assert "decompos" not in text.lower()
    assert "factors and" not in text


def test_nothing_to_decompose():
    plan = plan_of([(Leaf("bias", (8,), "float32"), LeafRoute("rest", "rank 1"))], 2)
    assert refresh(plan) is None
    assert "Decompositions" not in render(plan)
