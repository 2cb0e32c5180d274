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
from matrixfsdp_jax.transforms.stacks import decay
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
each_variant = pytest.mark.parametrize("variant", ["normuon", "adamuon"])


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
    oracle = MuonOracle(0.02, weight_decay=0.1, cautious=True, out_side="rows", **ORACLES[variant])
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


def three_steps(
    shapes: dict[str, tuple[int, ...]], variant: str, n: int
) -> tuple[dict[str, np.ndarray], Trainer]:
    make = muon(variant=VARIANTS[variant](), weight_decay=0.1, cautious_weight_decay=True)
    trainer = Trainer("owner", make, draw(shapes, 0), [rules.stacked("layers")], n=n)
    for seed in (1, 2, 3):
        params = trainer.step(draw(shapes, seed))
    return params, trainer


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
    alone, _ = three_steps(shapes, variant, 1)
    for n in (2, 3, 8):
        got, trainer = three_steps(shapes, variant, n)
        assert any(c.num_pads for c in trainer.layout.plan.classes)
        assert_pads_are_zero(trainer)
        if shapes is ALIGNED:
            for name, x in alone.items():
                np.testing.assert_array_equal(got[name], x, err_msg=f"{name}, {n} devices")
        else:
            assert_trees_close(got, alone, atol=1e-6)


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
def test_state_keeps_its_types_and_shardings(form: str, variant: str) -> None:
    trainer = Trainer(form, muon(variant=VARIANTS[variant]()), draw(FEW, 0))
    before = jax.tree.map(jax.typeof, trainer.state)
    shardings = jax.tree.map(lambda x: x.sharding, trainer.state)
    for seed in (1, 2):
        trainer.step(draw(FEW, seed))
        assert jax.tree.map(jax.typeof, trainer.state) == before
    same = jax.tree.map(
        lambda s, x: s.is_equivalent_to(x.sharding, x.ndim), shardings, trainer.state
    )
    assert all(jax.tree.leaves(same))
    template = trainer.params
    if trainer.layout is not None:
        template = trainer.layout.trainable(trainer.layout.abstract)
    abstract = jax.eval_shape(trainer.tx.init, template)
    assert jax.tree.structure(abstract) == jax.tree.structure(trainer.state)
    sizes = [(x.shape, x.dtype) for x in jax.tree.leaves(abstract)]
    assert sizes == [(x.shape, x.dtype) for x in jax.tree.leaves(trainer.state)]


@pytest.mark.parametrize(
    ("form", "variant"), [("single", "normuon"), ("single", "adamuon"), ("owner", "normuon")]
)
def test_jit_changes_nothing(form: str, variant: str) -> None:
    make = muon(variant=VARIANTS[variant](), weight_decay=0.1, cautious_weight_decay=True)
    trainer = Trainer(form, make, draw({"w": (8, 16)}, 0), n=2)
    grads = jax.tree.map(lambda p: p * p, trainer.params)
    arguments = (trainer.params, trainer.state, grads)
    got, want = trainer._apply(*arguments), trainer._step(*arguments)
    assert_trees_close(got, want, atol=1e-6)


@each_variant
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


@pytest.mark.parametrize("variant", ["none", "normuon", "adamuon"])
def test_init_and_steps_in_a_scan_inside_shard_map(variant: str) -> None:
    """The state of ``tx.init`` on local stacks has the types that a step gives it."""
    params, grads = draw(FEW, 0), draw(FEW, 1)
    make = muon(variant=VARIANTS[variant]() if variant in VARIANTS else None)
    layout = mfsdp.plan(params, make_mesh(8))
    tx = make(layout=layout)

    @jax.jit
    @jax.shard_map(mesh=layout.mesh, in_specs=(layout.specs, layout.specs), out_specs=layout.specs)
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
    means, sums = (jax.tree.leaves(muon_states(t.state)) for t in (average, total))
    assert len(means) >= 3
    for mean, summed in zip(means, sums, strict=True):
        factor = 0.1 if mean.ndim else 1  # the count is the same
        np.testing.assert_allclose(mean, factor * summed, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum_rule": "sum", "bias_correction": True}, r"bias_correction=True .*'sum'"),
        ({"momentum": ramp(0.9, 0.0), "bias_correction": True}, "bias_correction=True .* momentum"),
        ({"momentum_rule": "mean"}, r"momentum_rule='mean' must be one of \('ema', 'sum'\)"),
        ({"ns_algorithm": "fast"}, "algorithm must be one of .*'gram_symmetric'.*'fast'"),
        ({"ns_algorithm": "fast", "exact": True}, "algorithm must be one of .*'fast'"),
    ],
)
@pytest.mark.parametrize("make", [lambda **k: mfsdp.muon(0.1, **k), mfsdp.scale_by_muon])
@each_form
def test_bad_rules_and_algorithms_are_refused_at_construction(
    form: str, make: Any, options: dict[str, Any], message: str
) -> None:
    layout = mfsdp.plan(draw({"w": (4, 8)}, 0), make_mesh(2)) if form == "owner" else None
    with pytest.raises(ValueError, match=message):
        make(layout=layout, **options)


# ---- the orthogonalisation ---------------------------------------------------------------------


@each_form
def test_exact_is_the_polar_factor(form: str) -> None:
    """Also of matrices without full rank: small integers, so that their rank is exact."""
    rng = np.random.default_rng(3)
    left, right = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((12, 3), (3, 12)))
    grads = draw(SHAPES, 1)
    grads["rank 3"] = left @ right
    grads["rank 1"] = np.outer(left[:, 0], right[0, :6]).astype(np.float32)
    grads["zero"] = np.zeros((12, 12), np.float32)
    ranks = {"rank 3": 3, "rank 1": 1, "zero": 0}
    zeros = jax.tree.map(np.zeros_like, grads)

    def make(**where: Any) -> Any:
        return mfsdp.scale_by_muon(scale="none", exact=True, nesterov=False, **where)

    got = Trainer(form, make, zeros, RULES).step(grads)
    full = {k: polar(g) for k, g in matrices(grads).items()}
    assert_trees_close(matrices(got), full, atol=1e-5)
    for name, rank in ranks.items():
        want = polar(grads[name], rank)
        np.testing.assert_allclose(got[name], want, atol=1e-5, err_msg=name)
        linalg = orthogonalize(grads[name], exact=True)
        np.testing.assert_allclose(linalg, want, atol=1e-5, err_msg=name)
    np.testing.assert_array_equal(got["zero"], 0)
    both = orthogonalize(np.stack([grads["rank 3"], grads["zero"]]), exact=True)
    want = np.stack([polar(grads["rank 3"], 3), grads["zero"]])
    np.testing.assert_allclose(both, want, atol=1e-5)


@each_form
def test_variants_of_the_polar_factor(form: str) -> None:
    """``exact`` replaces the iteration in front of a variant too: the sign of a sign's factor."""
    grads = draw(SHAPES, 1)
    got = direction(form, grads, exact=True, scale="none", variant=mfsdp.variants.adamuon())
    for name, g in matrices(grads).items():
        factor = polar(np.sign(g))
        want = np.sign(factor) * np.sqrt(min(g.shape) / g.size)  # the first v is 0.05 O^2
        clear = np.abs(factor) > 1e-4
        np.testing.assert_allclose(got[name][clear], want[clear], rtol=1e-3, err_msg=name)


@each_form
def test_every_algorithm_gives_the_same_update(form: str) -> None:
    """Blocks of a few rows are no use of the symmetric forms, and lose digits on some compilers."""
    grads = draw({"wide": (32, 48), "tall": (64, 32), "square": (32, 32)}, 1)
    want = {k: newton_schulz(np.asarray(g, np.float64)) for k, g in grads.items()}
    zeros = jax.tree.map(np.zeros_like, grads)
    for algorithm in ALGORITHMS:
        options = {"ns_algorithm": algorithm, "scale": "none"}
        trainer = Trainer(form, lambda **w: mfsdp.scale_by_muon(**options, **w), zeros)  # noqa: B023
        assert_trees_close(trainer.step(grads), want, atol=1e-4)


# ---- variants as an argument -------------------------------------------------------------------


@pytest.mark.parametrize("given", ["normuon", mfsdp.variants.normuon, True, 0.95])
@each_form
def test_what_is_no_variant_is_refused(form: str, given: Any) -> None:
    layout = mfsdp.plan(draw({"w": (4, 8)}, 0), make_mesh(2)) if form == "owner" else None
    for make in (lambda **k: mfsdp.muon(0.1, **k), mfsdp.scale_by_muon):
        with pytest.raises(TypeError, match=r"mfsdp\.variants\.normuon\(\)"):
            make(layout=layout, variant=given)


@pytest.mark.parametrize(
    "options",
    [{"b2": x} for x in (1.0, -0.1, 2, float("nan"), np.float32(1.5))]
    + [{"eps": x} for x in (0.0, -1e-8, float("inf"), float("nan"))],
)
@pytest.mark.parametrize("make", [mfsdp.variants.normuon, mfsdp.variants.adamuon])
def test_numbers_out_of_range_are_refused(make: Any, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=rf"{name}=.* must be a finite number >"):
        make(**options)


class StepSizes(NamedTuple):
    """State of ``damped``: a shared count, and per class two arrays in a tree of its own."""

    count: Any
    own: dict[str, dict[str, Any]]


def damped() -> mfsdp.MuonVariant:
    """A user's variant: divide by one plus the average size of steps, add half the last step."""

    def after(row_outputs: Any, local: Any) -> optax.GradientTransformation:
        def init(stacks: Any) -> StepSizes:
            own = {
                k: {"size": jnp.zeros_like(s[..., 0, 0]), "last": s * 0} for k, s in stacks.items()
            }
            return StepSizes(jnp.zeros((), jnp.int32), own)

        def update(stacks: Any, state: StepSizes, params: Any = None) -> Any:
            new, own = {}, {}
            for k, o in stacks.items():
                rows = local(k, row_outputs[k])
                size = 0.5 * state.own[k]["size"] + (1 + rows) * jnp.abs(o).sum((-2, -1))
                new[k] = o / (1 + size)[..., None, None] + 0.5 * state.own[k]["last"]
                own[k] = {"size": size, "last": o}
            return new, StepSizes(state.count + 1, own)

        return optax.GradientTransformation(init, update)

    before = optax.stateless(lambda updates, _: jax.tree.map(lambda u: u * jnp.abs(u), updates))
    return mfsdp.MuonVariant(before, after)


def test_a_variant_of_the_users_own() -> None:
    """The same on one device and on owners, and matrix by matrix what its formula says."""
    params = draw(SHAPES, 0)
    make = muon(variant=damped(), momentum=0.0, scale="none")
    single, owner = (Trainer(form, make, params, RULES) for form in FORMS)
    want = matrices(params)
    size, last = dict.fromkeys(want, 0.0), dict.fromkeys(want, 0.0)
    for seed in (1, 2, 3):
        grads = draw(SHAPES, seed)
        got, alone = (t.step(grads) for t in (owner, single))
        assert_trees_close(got, alone, atol=1e-6)
        for name, g in matrices(grads).items():
            o = newton_schulz(g * np.abs(g))
            # Outputs are the columns here; a tall matrix is stored transposed, with rows of them.
            rows = g.shape[0] > g.shape[1]
            size[name] = 0.5 * size[name] + (1 + rows) * np.abs(o).sum()
            want[name] = want[name] - 0.02 * (o / (1 + size[name]) + 0.5 * last[name])
            last[name] = o
        assert_trees_close(matrices(got), want, atol=1e-6)
    found = mfsdp.audit(owner.tx.update, owner.params, owner.state, owner.params)
    assert found.count() == 0


# ---- cautious decay ----------------------------------------------------------------------------


SIGNS = np.array([[1, 1, 1], [-1, -1, -1], [0, 0, 0]], np.float32)  # of the update, by row


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_cautious_decay_goes_by_signs(size: float) -> None:
    """Whose product under- or overflows; a zero update decays."""
    updates, params = np.float32(size) * SIGNS, np.float32(size) * SIGNS.T
    tx = decay(0.5, cautious=True)
    state = tx.init(params)
    got, _ = jax.jit(tx.update)(updates, state, params)
    agree = np.array([[1, 0, 1], [0, 1, 1], [1, 1, 1]], np.float32)
    np.testing.assert_array_equal(got, updates + np.float32(0.5) * params * agree)


@each_form
def test_cautious_decay_of_tiny_parameters_and_steps(form: str) -> None:
    """In units of 1e-30 these are ordinary steps; in float32 no product of two is above zero."""
    tiny = 1e-30
    params, grads = draw(SHAPES, 0), draw(SHAPES, 1)
    oracle = MuonOracle(1.0, weight_decay=0.5, scale="none", cautious=True)
    want = oracle.step(matrices(params), matrices(grads))
    make = muon(
        learning_rate=1.0,
        weight_decay=0.5,
        scale=lambda fan_in, fan_out: tiny,
        cautious_weight_decay=True,
    )
    small = {k: x * np.float32(tiny) for k, x in params.items()}
    got = Trainer(form, make, small, RULES).step(grads)
    assert_trees_close({k: x / tiny for k, x in matrices(got).items()}, want, atol=1e-5)


@each_form
def test_cautious_decay_respects_the_mask(form: str) -> None:
    params = {k: np.ones((8, 8), np.float32) for k in ("on", "off")}
    grads = {k: draw(FEW, 1)["w"] for k in params}
    options = {"weight_decay": 0.5, "weight_decay_mask": {"on": True, "off": False}}
    got = Trainer(form, muon(cautious_weight_decay=True, **options), params).step(grads)
    moved = got["off"] - 1  # by the update alone: down where this is positive
    np.testing.assert_allclose(got["on"], got["off"] - 0.01 * (moved <= 0), atol=1e-6)
    assert 0 < np.count_nonzero(moved > 0) < 64
