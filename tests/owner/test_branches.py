"""Updates that branch on what a device owns, against the same update on one device."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.assembly import make_options, precondition
from matrixfsdp_jax.audit import audit
from matrixfsdp_jax.layout.balance import load
from matrixfsdp_jax.layout.costs import compositions, costs, matrix_flops
from matrixfsdp_jax.layout.planner import make_plan, share_waves
from matrixfsdp_jax.layout.spec import Plan
from matrixfsdp_jax.owner import collectives
from matrixfsdp_jax.owner.branches import by_composition
from matrixfsdp_jax.owner.present import on_present_stacks, present_tables
from matrixfsdp_jax.owner.routed import row_outputs, slot_tables
from matrixfsdp_jax.transforms.muon import orthogonalize_stacks, scale_by_momentum
from matrixfsdp_jax.transforms.qk_clip import HeadTables, clip_stacks
from matrixfsdp_jax.transforms.stacks import decay_stacks, scale_stacks
from matrixfsdp_jax.transforms.variants import normuon
from tests.models import make_mesh

# On 4 devices: three have a large one each, the fourth all of the middle ones; the small ones are
# dealt to the lightest. So no class is on every device.
SHAPES = {
    **{f"large{i}": (64, 32) for i in range(3)},
    **{f"middle{i}": (16, 32) for i in range(4)},
    **{f"small{i}": (8, 8) for i in range(3)},
}
STEPS = 4


def draw(seed: int, dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.standard_normal(s), dtype) for k, s in SHAPES.items()}


def layout_on(
    n: int, dealing: Any, explicit: bool = True, method: Any = "muon"
) -> mfsdp.OwnerLayout:
    layout = mfsdp.plan(draw(0), make_mesh(n, explicit), optimizer=method)
    routed = [(lp.leaf, lp.route) for lp in layout.plan.leaves]
    return replace(layout, plan=make_plan(routed, n, optimizer=method, dealing=dealing))


def muon(plan: Plan, variant: mfsdp.MuonVariant) -> Callable[..., Any]:
    factors = slot_tables(plan.classes, lambda m: 1.0 + m.rows + len(m.name))

    def make(local: Any, momentum: Any = 0.9) -> optax.GradientTransformation:
        tx = optax.chain(
            scale_by_momentum(momentum),
            orthogonalize_stacks(ns_algorithm="standard"),
            variant.after(row_outputs(plan), local),
            decay_stacks(0.1, factors, local),
            scale_stacks(factors, local),
        )
        return on_present_stacks(tx, local)

    return make


def second_order(plan: Plan, preconditioner: Any) -> Callable[..., Any]:
    options = make_options(
        *((0.9, 0.95), None, 1e-8, 1024, 2, 2, 3, True, "all", True, preconditioner, None)
    )
    return lambda local: on_present_stacks(precondition(plan, local, options), local)


METHODS: dict[str, tuple[Any, Callable[[Plan], Any]]] = {
    "muon": ("muon", lambda plan: muon(plan, mfsdp.MuonVariant())),
    "normuon": ("normuon", lambda plan: muon(plan, normuon())),
    "soap": (
        mfsdp.shampoo_method("soap", 1024, 2, 2),
        lambda plan: second_order(plan, mfsdp.EigenvalueCorrected()),
    ),
}


class Lifted:
    """A stack transform under ``shard_map`` with ``check_vma=True``, on branches."""

    def __init__(self, layout: mfsdp.OwnerLayout, make: Callable[..., Any]) -> None:
        self.layout = layout

        def local(key: str, table: Any) -> jax.Array:
            return collectives.local_slots(table, layout.owner_axis)

        tx = optax.with_extra_args_support(by_composition(make, layout.plan)(local))
        stacks = layout.specs.stacks
        self.stacks = {
            c.key: jax.ShapeDtypeStruct(c.stack_shape, c.dtype) for c in layout.plan.classes
        }
        whole = make(lambda key, table: jnp.asarray(table))
        specs = layout.tree_specs(jax.eval_shape(whole.init, self.stacks))
        self.init = jax.jit(self._mapped(tx.init, (stacks,), specs))
        self.update = jax.jit(
            self._mapped(
                lambda g, s, p, extra: tx.update(g, s, p, **extra),
                (stacks, specs, stacks, jax.P()),
                (stacks, specs),
            )
        )

    def _mapped(self, fn: Any, in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(fn, mesh=self.layout.mesh, in_specs=in_specs, out_specs=out_specs)

    def own(self, seed: int, dtype: Any = np.float32) -> Any:
        return self.layout.shard(draw(seed, dtype)).stacks

    def leaves(self, stacks: Any) -> dict[str, np.ndarray]:
        owned = self.layout.shard(draw(0))._replace(stacks=stacks)
        return {k: np.asarray(x) for k, x in self.layout.unshard(owned).items()}

    def run(self, **extra: Any) -> tuple[dict[str, np.ndarray], Any, Any]:
        state = self.init(self.own(0))
        for step in range(1, 1 + STEPS):
            stacks, state = self.update(self.own(step), state, self.own(0), extra)
        return self.leaves(stacks), stacks, state


def lifted(name: str, n: int, dealing: str = "lpt", explicit: bool = True) -> Lifted:
    method, make = METHODS[name]
    layout = layout_on(n, dealing, explicit, method)
    return Lifted(layout, make(layout.plan))


@cache
def one_device(name: str) -> dict[str, np.ndarray]:
    return lifted(name, 1).run()[0]


@pytest.mark.parametrize(("name", "explicit"), [("muon", False), ("normuon", True), ("soap", True)])
def test_branches_do_as_one_device_does(name: str, explicit: bool) -> None:
    """Four steps with momentum, moments, refreshes; no pad is ever touched, nothing is sent."""
    owners = lifted(name, 4, explicit=explicit)
    plan = owners.layout.plan
    found = compositions(plan)
    assert len(found.waves) > 1
    assert all(min(waves) == 0 for waves in found.waves)
    assert max(max(waves) for waves in found.waves) > 1
    got, stacks, state = owners.run()
    # Eigenvectors of a batch of another size differ in the last bits, with or without branches.
    atol = 1e-4 if name == "soap" else 1e-5
    for leaf, want in one_device(name).items():
        np.testing.assert_allclose(got[leaf], want, rtol=1e-5, atol=atol, err_msg=leaf)
    for leaf, want in lifted(name, 4, "slots", explicit).run()[0].items():
        np.testing.assert_allclose(got[leaf], want, rtol=1e-5, atol=2e-6, err_msg=leaf)
    for c in plan.classes:
        stack = np.asarray(stacks[c.key]).copy()
        stack[tuple(np.array(c.slots).T)] = 0
        assert not stack.any(), f"pads of {c.key}"
    counts = [x for x in jax.tree.leaves(state) if x.shape == ()]
    assert counts
    assert all(int(x) == STEPS and x.sharding.is_fully_replicated for x in counts)
    report = audit(owners.update, owners.own(1), state, owners.own(0), {})
    assert report.count() == 0


def dot_flops(jaxpr: Any) -> int:
    """FLOPs of all products in a jaxpr."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            sides = [eqn.invars[0].aval.shape[d] for d in contracted]
            total += 2 * math.prod([*eqn.outvars[0].aval.shape, *sides])
        inner = [dot_flops(j) for j in jaxprs_in_params(eqn.params)] or [0]
        # One of the branches of a conditional runs: here that of a platform.
        once = max(inner) if eqn.primitive.name == "cond" else sum(inner)
        total += eqn.params.get("length", 1) * once
    return total


def switches(jaxpr: Any) -> list[Any]:
    """The outermost conditionals of a jaxpr."""
    found = []
    for eqn in jaxpr.eqns:
        inner = jaxprs_in_params(eqn.params)
        is_switch = eqn.primitive.name == "cond"
        found += [eqn] if is_switch else [each for j in inner for each in switches(j)]
    return found


def test_every_branch_has_the_products_of_its_composition_only() -> None:
    owners = lifted("muon", 4)
    plan, given = owners.layout.plan, owners.own(1)
    jaxpr = jax.make_jaxpr(owners.update)(given, owners.init(given), given, {})
    (switch,) = switches(jaxpr.jaxpr)
    each = [matrix_flops(plan, c) for c in plan.classes]
    norms = [2 * c.size for c in plan.classes]
    found = compositions(plan).waves
    assert [dot_flops(branch.jaxpr) for branch in switch.params["branches"]] == [
        load(waves, each) + load(waves, norms) for waves in found
    ]
    assert max(load(waves, each) for waves in found) == costs(plan).flops.padded


def test_absent_gradients_and_arguments_reach_every_branch() -> None:
    owners = lifted("muon", 4)
    flags = {name: not name.endswith("1") for name in SHAPES}
    got, _, _ = owners.run(present=present_tables(owners.layout, flags))
    for leaf, want in one_device("muon").items():
        if flags[leaf]:
            np.testing.assert_allclose(got[leaf], want, rtol=1e-5, atol=1e-5)
        else:
            assert not got[leaf].any()


def test_dtype_and_masked_classes_come_out_as_on_whole_stacks() -> None:
    """bfloat16 in, float32 out; a class hidden by ``optax.masked`` stays hidden."""
    layout = layout_on(4, "lpt")
    hidden = next(c.key for c in layout.plan.classes if c.shape == (8, 8))
    factors = slot_tables(layout.plan.classes, lambda m: 2.0)
    mask = {c.key: c.key != hidden for c in layout.plan.classes}

    def make(local: Any) -> optax.GradientTransformation:
        return optax.chain(scale_by_momentum(0.0, nesterov=False), scale_stacks(factors, local))

    def local(key: str, table: Any) -> jax.Array:
        return collectives.local_slots(table, layout.owner_axis)

    tx = optax.masked(by_composition(make, layout.plan)(local), mask)
    stacks = layout.shard(draw(0)).stacks
    half = {key: x.astype(jnp.bfloat16) for key, x in stacks.items()}

    def run(stacks: Any) -> Any:
        new, state = tx.update(stacks, tx.init(stacks))
        assert isinstance(state.inner_state[0].mu[hidden], optax.MaskedNode)
        return new

    specs = layout.specs.stacks
    new = jax.jit(jax.shard_map(run, mesh=layout.mesh, in_specs=(specs,), out_specs=specs))(half)
    for key, x in half.items():
        factor = 1 if key == hidden else 2
        assert new[key].dtype == (jnp.bfloat16 if key == hidden else jnp.float32)
        np.testing.assert_array_equal(
            np.asarray(new[key], np.float32), factor * np.asarray(x, np.float32)
        )


def test_clipping_passes_over_classes_that_a_device_has_not() -> None:
    layout = layout_on(4, "lpt")
    c = next(c for c in layout.plan.classes if c.shape == (8, 8))
    index = np.zeros((*c.stack_shape[:2], 8), np.int32)
    index[tuple(np.array(c.slots).T)] = 1
    rows = np.ones(c.stack_shape[:2])
    tables = HeadTables({c.key: index}, {c.key: np.ones(index.shape)}, {c.key: rows})
    owners = Lifted(layout, lambda local: clip_stacks(tables, local))
    updates, params = owners.own(1), owners.own(0)
    state = owners.init(params)
    new, _ = owners.update(updates, state, params, {"gammas": jnp.array([1.0, 0.25])})
    got, given, old = (owners.leaves(x) for x in (new, updates, params))
    for leaf in SHAPES:
        want = 0.25 * (old[leaf] + given[leaf]) - old[leaf] if "small" in leaf else given[leaf]
        np.testing.assert_allclose(got[leaf], want, rtol=1e-6)


def test_no_branches_where_all_devices_need_all_waves() -> None:
    def make(local: Any) -> optax.GradientTransformation:
        return optax.identity()

    assert by_composition(make, layout_on(4, "slots").plan) is make
    assert by_composition(make, layout_on(1, "lpt").plan) is make
    assert by_composition(make, layout_on(4, "lpt").plan) is not make


def test_replicas_branch_on_their_own_part_of_the_waves() -> None:
    """Two replicas that share the waves of an owner have compositions of their own."""
    plan, shared = share_waves(layout_on(2, "lpt").plan, 2, "shared")
    assert shared
    found = compositions(plan)
    for waves, c in zip(zip(*found.waves, strict=True), plan.classes, strict=True):
        assert max(waves) <= c.num_waves // 2
    for k, c in enumerate(plan.classes):
        for device, wave in c.slots:
            replica, own = divmod(wave, c.num_waves // 2)
            assert own < found.waves[found.of[device][replica]][k]
