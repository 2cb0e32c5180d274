"""Variants of Muon, its two momentum rules, its exact form and cautious decay."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.layout import rules
from matrixfsdp_jax.linalg.algorithms import ALGORITHMS
from matrixfsdp_jax.linalg.orthogonalize import orthogonalize
from matrixfsdp_jax.transforms.muon import decay
from matrixfsdp_jax.transforms.variants import SecondMomentState
from tests.models import make_mesh
from tests.oracle import MuonOracle, newton_schulz, polar
from tests.test_optimizers import (
    FEW,
    FORMS,
    RULES,
    SHAPES,
    Trainer,
    assert_trees_close,
    draw,
    matrices,
    muon,
    muon_states,
    ramp,
)

MakeVariant = Callable[[], mfsdp.MuonVariant]
VARIANTS: dict[str, MakeVariant] = {
    "normuon": mfsdp.variants.normuon,
    "normuon, fixed norm": lambda: mfsdp.variants.normuon(keep_norm=False),
    "adamuon": mfsdp.variants.adamuon,
}
ORACLES: dict[str, dict[str, Any]] = {
    "normuon": {"variant": "normuon"},
    "normuon, fixed norm": {"variant": "normuon", "keep_norm": False},
    "adamuon": {"variant": "adamuon", "variant_eps": 1e-8},
}
FIXED_NORM = ("normuon, fixed norm", "adamuon")

each_form = pytest.mark.parametrize("form", FORMS)
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def direction(form: str, grads: dict[str, Any], **options: Any) -> dict[str, np.ndarray]:
    """The first ``scale_by_muon`` update of a tree of ``SHAPES``, matrix by matrix."""
    zeros = jax.tree.map(np.zeros_like, grads)
    trainer = Trainer(form, lambda **where: mfsdp.scale_by_muon(**options, **where), zeros, RULES)
    return matrices(trainer.step(grads))


def second_moments(state: Any) -> SecondMomentState:
    found = [
        x
        for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, SecondMomentState))
        if isinstance(x, SecondMomentState)
    ]
    assert len(found) == 1
    return found[0]


def rms(x: np.ndarray, axis: int | None = None) -> np.ndarray:
    return np.sqrt(np.mean(x * x, axis=axis))


# ---- the formulas ------------------------------------------------------------------------------


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "normuon": ({"variant": mfsdp.variants.normuon()}, ORACLES["normuon"]),
    "normuon, fixed norm": (
        {"variant": mfsdp.variants.normuon(0.8, keep_norm=False), "scale": "rms_0.2"},
        {**ORACLES["normuon, fixed norm"], "b2": 0.8, "scale": "rms_0.2"},
    ),
    "normuon, large eps": (
        {"variant": mfsdp.variants.normuon(eps=0.01)},
        {**ORACLES["normuon"], "variant_eps": 0.01},
    ),
    "adamuon": ({"variant": mfsdp.variants.adamuon()}, ORACLES["adamuon"]),
    "adamuon, plain momentum": (
        {"variant": mfsdp.variants.adamuon(0.5), "nesterov": False, "scale": "rms_0.2"},
        {**ORACLES["adamuon"], "b2": 0.5, "nesterov": False, "scale": "rms_0.2"},
    ),
    "cautious decay": (
        {"weight_decay": 0.3, "cautious_weight_decay": True},
        {"weight_decay": 0.3, "cautious": True},
    ),
    # With a constant momentum the two rules give the same parameters; with a schedule they do not.
    "sum": (
        {"momentum": ramp(0.5, 0.05), "momentum_rule": "sum"},
        {"momentum": ramp(0.5, 0.05), "momentum_rule": "sum"},
    ),
    "sum, plain momentum": (
        {"momentum": ramp(0.5, 0.05), "momentum_rule": "sum", "nesterov": False},
        {"momentum": ramp(0.5, 0.05), "momentum_rule": "sum", "nesterov": False},
    ),
    "all at once": (
        {
            "learning_rate": ramp(0.03, -0.002),
            "weight_decay": ramp(0.5, -0.03),
            "cautious_weight_decay": True,
            "momentum_rule": "sum",
            "scale": "sqrt_out_in",
            "variant": mfsdp.variants.normuon(),
        },
        {
            "lr": ramp(0.03, -0.002),
            "weight_decay": ramp(0.5, -0.03),
            "cautious": True,
            "momentum_rule": "sum",
            "scale": "sqrt_out_in",
            **ORACLES["normuon"],
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
@each_form
def test_ten_steps_follow_the_oracle(form: str, case: str) -> None:
    options, own = CASES[case]
    oracle = MuonOracle(**{"lr": 0.02, **own})
    params = draw(SHAPES, 0)
    trainer = Trainer(form, muon(**options), params, RULES)
    want = matrices(params)
    for seed in range(1, 11):
        grads = draw(SHAPES, seed)
        got = trainer.step(grads)
        want = oracle.step(want, matrices(grads))
        assert_trees_close(matrices(got), want, atol=1e-5)


@each_variant
@each_form
def test_a_torch_layout_gets_the_update_of_its_transpose(form: str, variant: str) -> None:
    shapes = {k: SHAPES[k] for k in ("tall", "wide", "square")}
    turn = lambda tree: {k: x.T.copy() for k, x in tree.items()}  # noqa: E731
    params = draw(shapes, 0)
    make = muon(variant=VARIANTS[variant](), weight_decay=0.1, cautious_weight_decay=True)
    flax = Trainer(form, make, params)
    torch = Trainer(form, make, turn(params), [rules.matrix("*", out="rows")])
    oracle = MuonOracle(
        0.02, weight_decay=0.1, cautious=True, out_side="rows", **ORACLES[variant]
    )
    want = turn(params)
    for seed in (1, 2, 3):
        grads = draw(shapes, seed)
        ours, theirs = flax.step(grads), torch.step(turn(grads))
        want = oracle.step(want, turn(grads))
    assert_trees_close(turn(theirs), ours, atol=1e-6)
    assert_trees_close(theirs, want, atol=1e-5)


@pytest.mark.parametrize("keep_norm", [True, False], ids=["kept norm", "fixed norm"])
@each_form
def test_normuon_first_moves_every_output_neuron_equally_far(form: str, keep_norm: bool) -> None:
    grads = draw(SHAPES, 1)
    variant = mfsdp.variants.normuon(keep_norm=keep_norm)
    got = direction(form, grads, variant=variant, scale="none")
    plain = {k: newton_schulz(g) for k, g in matrices(grads).items()}
    for name, update in got.items():
        neurons = rms(update, axis=0)  # [in, out]
        np.testing.assert_allclose(neurons, neurons.mean(), rtol=1e-5, err_msg=name)
        norm = np.linalg.norm(plain[name]) if keep_norm else np.sqrt(min(update.shape))
        np.testing.assert_allclose(np.linalg.norm(update), norm, rtol=1e-5, err_msg=name)
        np.testing.assert_array_equal(np.sign(update), np.sign(plain[name]), err_msg=name)
    assert np.ptp(rms(got["square"], axis=1)) > 1e-2  # not so the inputs
    assert np.ptp(rms(plain["square"], axis=0)) > 1e-2  # and not so without the variant


@pytest.mark.parametrize("variant", FIXED_NORM)
@each_form
def test_updates_of_a_fixed_norm_have_root_mean_square_0_2(form: str, variant: str) -> None:
    options = {"scale": "rms_0.2", "variant": VARIANTS[variant]()}
    params = draw(SHAPES, 0)
    trainer = Trainer(form, muon(learning_rate=1.0, **options), params, RULES)
    before = matrices(params)
    for seed in (1, 2, 3):
        after = matrices(trainer.step(draw(SHAPES, seed)))
        for name, x in after.items():
            np.testing.assert_allclose(rms(x - before[name]), 0.2, rtol=1e-5, err_msg=name)
        before = after


@each_form
def test_adamuon_does_not_depend_on_the_scale_of_the_gradient(form: str) -> None:
    """Every scale is a matrix of its own in one tree, so that none may touch another."""
    first, second = (draw({"g": (8, 16)}, seed)["g"].astype(np.float64) for seed in (0, 1))
    scales = {"1": 1.0, **{f"1e{k}": 10.0**k for k in (-30, -20, -7, 10, 20, 30)}}
    params = {k: np.zeros((8, 16), np.float32) for k in scales}
    make = muon(learning_rate=1.0, variant=mfsdp.variants.adamuon())
    trainer = Trainer(form, make, params)
    for g in (first, second):
        got = trainer.step({k: (s * g).astype(np.float32) for k, s in scales.items()})
        for name, x in got.items():
            np.testing.assert_array_equal(x, got["1"], err_msg=name)
    assert np.abs(got["1"]).max() > 0.1


# ---- the number of devices ---------------------------------------------------------------------


ALIGNED = {"a": (32, 64), "b": (64, 32), "layers": (3, 32, 64), "square": (32, 32), "bias": (5,)}
UNALIGNED = {"a": (7, 12), "b": (12, 7), "layers": (3, 7, 12), "square": (9, 9), "bias": (5,)}


def three_steps(shapes: dict[str, tuple[int, ...]], variant: str, n: int) -> Trainer:
    make = muon(variant=VARIANTS[variant](), weight_decay=0.1, cautious_weight_decay=True)
    trainer = Trainer("owner", make, draw(shapes, 0), [rules.stacked("layers")], n=n)
    for seed in (1, 2, 3):
        trainer.last = trainer.step(draw(shapes, seed))
    return trainer


def assert_pads_are_zero(trainer: Trainer) -> None:
    """Those of the parameters, of the updates and of the variant's state."""
    for c in trainer.layout.plan.classes:
        pads = np.ones((c.num_devices, c.num_waves), bool)
        pads[tuple(zip(*c.slots, strict=True))] = False
        nu = second_moments(trainer.state).nu
        for stacks in (trainer.params.stacks, trainer.updates.stacks, nu):
            stack = np.asarray(stacks[c.key])
            assert not stack[pads].any(), c.key
            assert all(x.any() for x in stack[~pads]), c.key


@pytest.mark.parametrize("shapes", [ALIGNED, UNALIGNED], ids=["aligned", "unaligned"])
@each_variant
def test_parameters_do_not_depend_on_the_number_of_devices(
    variant: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    """Bit for bit where all dims are multiples of 32, and pads stay exactly zero."""
    alone = three_steps(shapes, variant, 1).last
    for n in (2, 3, 8):
        trainer = three_steps(shapes, variant, n)
        assert any(c.num_pads for c in trainer.layout.plan.classes)
        assert_pads_are_zero(trainer)
        if shapes is ALIGNED:
            for name, x in alone.items():
                np.testing.assert_array_equal(trainer.last[name], x, err_msg=f"{name}, {n} devices")
        else:
            assert_trees_close(trainer.last, alone, atol=1e-6)


# ---- zeros and dtypes --------------------------------------------------------------------------


@each_variant
@each_form
def test_a_zero_gradient_gives_a_zero_update_and_a_finite_state(form: str, variant: str) -> None:
    """Next to a matrix of its own class that does move."""
    shapes = {"still": (8, 16), "moving": (8, 16), "dot": (1, 1), "column": (64, 1)}
    params = draw(shapes, 0)
    grads = draw(shapes, 1)
    zeros = {k: np.zeros_like(g) for k, g in grads.items()}
    trainer = Trainer(form, muon(variant=VARIANTS[variant]()), params)
    for given in (zeros, zeros | {"moving": grads["moving"]}):
        got = trainer.step(given)
        for name in ("still", "dot", "column"):
            np.testing.assert_array_equal(got[name], params[name], err_msg=name)
        assert np.array_equal(got["moving"], params["moving"]) == (given is zeros)
        assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(trainer.state))


@each_variant
@each_form
def test_bfloat16_parameters_have_float32_state(form: str, variant: str) -> None:
    params, grads = (draw(SHAPES, seed, jnp.bfloat16) for seed in (0, 1))
    make = muon(variant=VARIANTS[variant](), rest=optax.sgd(0.0))
    trainer = Trainer(form, make, params, RULES)
    got = trainer.step(grads)
    assert {x.dtype for x in jax.tree.leaves(trainer.updates)} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(trainer.state) if x.ndim} == {jnp.dtype(jnp.float32)}
    exact = MuonOracle(0.02, **ORACLES[variant]).step(matrices(params), matrices(grads))
    assert_trees_close(matrices(got), exact, atol=0.02)


@each_variant
@each_form
def test_float64_parameters_are_updated_in_float64(form: str, variant: str) -> None:
    with jax.enable_x64(True):
        params = draw(SHAPES, 0, np.float64)
        trainer = Trainer(form, muon(variant=VARIANTS[variant](), eps=1e-30), params, RULES)
        oracle, want = MuonOracle(0.02, **ORACLES[variant]), matrices(params)
        for seed in (1, 2, 3):
            grads = draw(SHAPES, seed, np.float64)
            got = trainer.step(grads)
            want = oracle.step(want, matrices(grads))
        # The package adds eps to the norm as well, the oracle does not.
        assert_trees_close(matrices(got), want, atol=1e-9)
        arrays = [x for x in jax.tree.leaves((trainer.state, got)) if x.ndim]
        assert {x.dtype for x in arrays} == {np.dtype(np.float64)}


# ---- the state ---------------------------------------------------------------------------------


@each_variant
@each_form
def test_state_keeps_its_types_and_jit_changes_nothing(form: str, variant: str) -> None:
    make = muon(variant=VARIANTS[variant](), weight_decay=0.1, cautious_weight_decay=True)
    trainer = Trainer(form, make, draw(FEW, 0))
    params, state = trainer.params, trainer.state
    before = jax.tree.map(jax.typeof, state)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    grads = jax.tree.map(lambda p: p * p, params)
    for _ in range(2):
        params, state, _ = trainer._apply(params, state, grads)
        trainer.params, trainer.state, _ = trainer._step(trainer.params, trainer.state, grads)
        for other in (state, trainer.state):
            assert jax.tree.map(jax.typeof, other) == before
    same = jax.tree.map(
        lambda s, x: s.is_equivalent_to(x.sharding, x.ndim), shardings, trainer.state
    )
    assert all(jax.tree.leaves(same))
    assert_trees_close((params, state), (trainer.params, trainer.state), atol=1e-6)
    template = trainer.params
    if trainer.layout is not None:
        template = trainer.layout.trainable(trainer.layout.abstract)
    abstract = jax.eval_shape(trainer.tx.init, template)
    assert jax.tree.structure(abstract) == jax.tree.structure(trainer.state)
    sizes = [(x.shape, x.dtype) for x in jax.tree.leaves(abstract)]
    assert sizes == [(x.shape, x.dtype) for x in jax.tree.leaves(trainer.state)]


@pytest.mark.parametrize("variant", ["normuon", "adamuon"])
@each_form
def test_injected_rates_compile_once(form: str, variant: str, compilations: list[str]) -> None:
    def make(**where: Any) -> Any:
        injected = optax.inject_hyperparams(mfsdp.muon, static_args=("ns_steps", "rest", "scale"))
        return injected(
            1e-3,
            weight_decay=0.1,
            cautious_weight_decay=True,
            variant=VARIANTS[variant](),
            rest=optax.sgd(0.1),
            **where,
        )

    params = draw(SHAPES, 0)
    trainer = Trainer(form, make, params, RULES)
    oracle = MuonOracle(0.0, weight_decay=0.1, cautious=True, **ORACLES[variant])
    want = matrices(params)
    for seed, rate in enumerate((1e-3, 2e-3, 4e-3), start=1):
        rates = trainer.state.hyperparams
        rates["learning_rate"] = jnp.full_like(rates["learning_rate"], rate)
        oracle.lr = rate
        got = trainer.step(draw(SHAPES, seed))
        want = oracle.step(want, matrices(draw(SHAPES, seed)))
        assert_trees_close(matrices(got), want, atol=1e-5)
    assert compilations.count("jit(_apply)") == 1


@each_variant
def test_map_params_finds_the_momentum_and_leaves_the_second_moment(variant: str) -> None:
    """A second moment of neurons has no parameter's shape, so none of them is one."""
    params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}}
    tx = mfsdp.muon(0.1, variant=VARIANTS[variant]())
    state = tx.init(params)
    mapped = optax.tree.map_params(tx, lambda x: x + 7, state)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
    pairs = zip(*map(jax.tree.leaves, (mapped, state)), strict=True)
    moved = [a.shape for a, b in pairs if (a != b).any()]
    assert sorted(moved) == [(4, 8), (8,), (8,)]  # the momentum, Adam's two moments of the bias


@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "auto"])
@each_variant
def test_owners_hold_their_own_state_and_send_nothing(variant: str, explicit: bool) -> None:
    params = draw(SHAPES, 0)
    layout = mfsdp.plan(params, make_mesh(8, explicit), rules=RULES)
    make = muon(variant=VARIANTS[variant](), weight_decay=0.1, cautious_weight_decay=True)
    tx = make(layout=layout)
    owned = layout.shard(params)
    state = layout.init(tx, owned)
    nu = second_moments(state).nu
    assert set(nu) == set(owned.stacks)
    for key, x in nu.items():
        assert x.sharding.spec == P("fsdp", *[None] * (x.ndim - 1))
        waves, m, n = owned.stacks[key].shape[1:]
        shape = (m, n) if variant == "adamuon" else (n,)
        assert {s.data.shape for s in x.addressable_shards} == {(1, waves, *shape)}
    found = mfsdp.audit(jax.jit(tx.update), owned, state, owned)
    found.assert_no_matrix_collectives()
    assert found.count() == 0


@pytest.mark.parametrize("variant", ["none", *VARIANTS])
def test_init_and_steps_in_a_scan_inside_shard_map(variant: str) -> None:
    """The state of ``tx.init`` on local stacks has the types that a step gives it."""
    params, grads = draw(FEW, 0), draw(FEW, 1)
    make = muon(variant=VARIANTS[variant]() if variant in VARIANTS else None)
    layout = mfsdp.plan(params, make_mesh(8))
    tx = make(layout=layout)

    @jax.jit
    @jax.shard_map(
        mesh=layout.mesh, in_specs=(layout.specs, layout.specs), out_specs=layout.specs
    )
    def train(owned: Any, grads: Any) -> Any:
        def body(carry: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], None]:
            owned, state = carry
            updates, state = tx.update(grads, state, owned)
            return (layout.apply_updates(owned, updates), state), None

        return jax.lax.scan(body, (owned, tx.init(owned)), None, length=2)[0][0]

    got = layout.unshard(train(layout.shard(params), layout.shard(grads)))
    single = Trainer("single", make, params)
    single.step(grads)
    assert_trees_close(got, single.step(grads), atol=1e-5)


# ---- the rule of the momentum ------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "plain"])
@each_form
def test_average_and_sum_differ_in_the_state_alone(form: str, nesterov: bool) -> None:
    params = draw(SHAPES, 0)
    average, total = (
        Trainer(form, muon(momentum=0.9, momentum_rule=rule, nesterov=nesterov), params, RULES)
        for rule in ("ema", "sum")
    )
    for seed in range(1, 5):
        got, want = (t.step(draw(SHAPES, seed)) for t in (total, average))
        assert_trees_close(got, want, atol=1e-5)
    (a,), (b,) = (jax.tree.leaves([s.mu for s in muon_states(t.state)]) for t in (average, total)) \
        if form == "none" else ([None], [None])
