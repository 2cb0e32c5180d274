"""Owners against one device, collectives, and the optimizer inside other programs."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.layout import rules
from tests.models import TINY_RULES, make_mesh, tiny_batches, tiny_loss, tiny_params
from tests.second_order.cases import FEW, FEW_RULES, METHODS, Run, draw_any, gradients, make
from tests.test_optimizers import assert_trees_close
from tests.test_step_collectives import assert_as_planned

# ---- devices -----------------------------------------------------------------------------------

DEVICE_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "shampoo": (
        "shampoo",
        {
            "betas": (0.9, 0.95),
            "grafting": mfsdp.AdamGrafting(),
            "precondition_frequency": 3,
            "weight_decay": 0.1,
        },
    ),
    "shampoo at once": (
        "shampoo",
        {"betas": (0.9, 0.95), "precondition_frequency": 3, "stagger": False},
    ),
    "soap": ("soap", {"precondition_frequency": 4, "start_preconditioning_step": 8}),
    "soap at once": ("soap", {"precondition_frequency": 8, "stagger": False}),
    "kl": (
        "shampoo",
        {
            "betas": (0.9, 0.9),
            "preconditioner": mfsdp.RootInverse(kl=True),
            "precondition_frequency": 2,
        },
    ),
    "schedule-free": (
        "shampoo",
        {
            "betas": (0.9, 0.9),
            "iterate_averaging": mfsdp.ScheduleFree(),
            "weight_decay": 0.1,
            "precondition_frequency": 2,
        },
    ),
}


def device_run(case: str, form: str, n: int = 8, explicit: bool = True) -> Run:
    method, options = DEVICE_CASES[case]
    options = {"epsilon": 1e-3, **options}
    return Run(form, make(method, **options), draw_any(FEW, 0), FEW_RULES, n, explicit=explicit)


CHECKED = (1, 2, 5, 10, 15, 20)


@cache
def on_one_device(case: str) -> dict[int, dict[str, np.ndarray]]:
    run = device_run(case, "single")
    return {t: run.step(grads) for t, grads in enumerate(gradients(20), 1)}


@pytest.mark.parametrize(
    ("case", "n", "explicit"),
    [
        ("shampoo", 1, True),
        ("shampoo", 3, False),
        ("shampoo", 8, True),
        ("shampoo at once", 8, False),
        ("soap", 3, True),
        ("soap", 8, False),
        ("soap at once", 3, True),
        ("kl", 8, True),
        ("schedule-free", 3, False),
    ],
)
def test_owners_equal_one_device_and_pads_stay_zero(case: str, n: int, explicit: bool) -> None:
    """Over 20 steps with many refreshes; the rounding of float32 is not amplified."""
    run = device_run(case, "owner", n, explicit)
    fresh = jax.tree.map(np.asarray, run.shampoo)
    for t, grads in enumerate(gradients(20), 1):
        run.advance(grads)
        if t in CHECKED:
            want = on_one_device(case)[t]
            assert_trees_close(run.canonical(run.params), want, atol=1e-5)
    moved = sum(np.abs(want[k] - x).max() > 0.05 for k, x in draw_any(FEW, 0).items())
    assert moved == len(FEW)
    pads = 0
    for c in run.layout.plan.classes:
        empty = np.ones((c.num_devices, c.num_waves), bool)
        empty[tuple(np.array(c.slots).T)] = False
        pads += empty.sum()
        assert not np.asarray(run.params.stacks[c.key])[empty].any()
        assert not np.asarray(run.updates.stacks[c.key])[empty].any()
        for field in mfsdp.ShampooState._fields[1:]:
            now, then = (jax.tree.leaves(getattr(s, field)[c.key]) for s in (run.shampoo, fresh))
            for a, b in zip(now, then, strict=True):  # zeros and identities
                np.testing.assert_array_equal(np.asarray(a)[empty], b[empty])
    assert pads == {1: 0, 3: 1 + 2 + 2, 8: 3 + 7 + 7}[n]


@pytest.mark.parametrize(("method", "explicit"), [("shampoo", False), ("soap", True)])
def test_no_collective_in_update_or_in_the_optimizer_part_of_a_step(
    method: str, explicit: bool
) -> None:
    params = tiny_params(1, width=8)
    layout = mfsdp.plan(
        params,
        make_mesh(8, explicit),
        rules=TINY_RULES(8),
        optimizer=method,
        rest_shard_min_size=64,
    )
    tx = METHODS[method](1e-2, layout=layout, epsilon=1e-4, precondition_frequency=2)
    owned = layout.shard(params)
    state = layout.init(tx, owned)
    alone = mfsdp.audit(jax.jit(tx.update), layout.trainable(owned), state, layout.trainable(owned))
    assert alone.count() == 0
    step = mfsdp.train_step(tiny_loss, tx, layout)
    found = mfsdp.audit(step, owned, state, mfsdp.shard_batch(layout, tiny_batches(1)[0]))
    assert found.within("mfsdp.optimizer").count() == 0
    # Loss and two norms, and two counters of failures per class.
    assert_as_planned(found, layout, scalars=3 + 2 * len(layout.plan.classes))


# ---- inside other programs ---------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_inside_the_users_shard_map_and_in_a_scan(method: str) -> None:
    """Six steps with refreshes: one after the other, in a scan, and in a scan in a shard_map."""
    options = {"epsilon": 1e-3, "precondition_frequency": 3, "start_preconditioning_step": 4}
    shapes = {"layers": (5, 4, 4), "bias": (8,)}
    run = Run("owner", make(method, **options), draw_any(shapes, 0), [rules.stacked("layers")])
    layout, tx = run.layout, run.tx
    start = (run.params, run.state)
    steps = gradients(6, shapes)
    want = run.run(steps)
    stacked = jax.tree.map(lambda *g: jnp.stack(g), *(layout.shard(g) for g in steps))

    def all_steps(params: Any, state: Any, grads: Any) -> Any:
        def body(carry: Any, g: Any) -> Any:
            return run._apply(*carry, layout.trainable(g))[:2], None

        return jax.lax.scan(body, (params, state), grads)[0]

    specs = (layout.specs, layout.state_specs(tx))
    more = jax.tree.map(
        lambda p: jax.P(None, *p), layout.specs, is_leaf=lambda x: isinstance(x, jax.P)
    )
    inside = jax.shard_map(all_steps, mesh=layout.mesh, in_specs=(*specs, more), out_specs=specs)
    for program in (all_steps, inside):
        params, state = jax.jit(program)(*start, stacked)
        assert_trees_close(layout.unshard(params), want, atol=1e-6)
        assert_trees_close(state, run.state, atol=1e-5)
