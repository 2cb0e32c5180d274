"""Muon and its options, on one device and on owner params, against a float64 oracle."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.layout import rules
from tests.models import make_mesh
from tests.oracle import AdamWOracle, MuonOracle

FORMS = ("single", "owner")
RULES = [rules.stacked("layers"), rules.fused("qkv", (16, 8))]
SHAPES = {
    "tall": (16, 8),
    "wide": (8, 16),
    "square": (8, 8),
    "layers": (3, 8, 16),
    "qkv": (8, 24),
    "bias": (16,),
}
FEW = {"w": (8, 8), "tall": (16, 8), "bias": (16,)}


def draw(shapes: dict[str, tuple[int, ...]], seed: int, dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {k: rng.standard_normal(s).astype(dtype) for k, s in shapes.items()}


def matrices(tree: dict[str, Any]) -> dict[str, np.ndarray]:
    """Every matrix of a tree of ``SHAPES``, as float64, as the rules read it."""
    tree = {k: np.asarray(x, np.float64) for k, x in tree.items()}
    out = {k: tree[k] for k in ("tall", "wide", "square")}
    out |= {f"layers/{i}": m for i, m in enumerate(tree["layers"])}
    return out | {"qkv/0": tree["qkv"][:, :16], "qkv/1": tree["qkv"][:, 16:]}


class Trainer:
    """Canonical gradients in, canonical parameters out, for either form of the parameters."""

    def __init__(
        self, form: str, make: Any, params: dict[str, Any], given: Any = None, n: int = 8
    ) -> None:
        self.layout = mfsdp.plan(params, make_mesh(n), rules=given) if form == "owner" else None
        if self.layout is None:
            self.tx = make(layout=None, rules=given)
            self.params = jax.tree.map(jnp.asarray, params)
            self.state = self.tx.init(self.params)
        else:
            self.tx = make(layout=self.layout)
            self.params = self.layout.shard(params)
            self.state = self.layout.init(self.tx, self.params)
        self._step = jax.jit(self._apply)

    def _apply(self, params: Any, state: Any, grads: Any) -> tuple[Any, Any, Any]:
        if self.layout is None:
            updates, state = self.tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, updates
        trainable = self.layout.trainable(params)
        updates, state = self.tx.update(grads, state, trainable)
        return self.layout.apply_updates(params, updates), state, updates

    def step(self, grads: dict[str, Any]) -> dict[str, np.ndarray]:
        grads = grads if self.layout is None else self.layout.trainable(self.layout.shard(grads))
        self.params, self.state, self.updates = self._step(self.params, self.state, grads)
        params = self.params if self.layout is None else self.layout.unshard(self.params)
        return jax.tree.map(np.asarray, params)


def muon(**options: Any) -> Any:
    """A factory for ``Trainer``."""
    options = {"learning_rate": 0.02, "rest": optax.sgd(0.1), **options}
    return lambda **where: mfsdp.muon(**options, **where)


def assert_trees_close(got: Any, want: Any, atol: float) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (keys, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(keys))


# ---- the formula -------------------------------------------------------------------------------


def ramp(first: float, slope: float) -> Any:
    """A schedule that works on traced and on Python counts."""
    return lambda count: first + slope * count


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "plain momentum": {"nesterov": False},
    "bias correction": {"bias_correction": True},
    "bias correction, plain": {"bias_correction": True, "nesterov": False},
    "no momentum": {"momentum": 0.0},
    "decay": {"weight_decay": 0.3},
    "schedules": {
        "learning_rate": ramp(0.03, -0.002),
        "momentum": ramp(0.8, 0.015),
        "weight_decay": ramp(0.5, -0.03),
    },
    "rms scale": {"scale": "rms_0.2", "weight_decay": 0.1},
    "spectral scale": {"scale": "sqrt_out_in"},
    "no scale": {"scale": "none"},
    "own scale": {"scale": lambda fan_in, fan_out: 2 * fan_out / fan_in},
    "steps and rows": {"ns_steps": 3, "ns_coefficients": [(2.0, -1.5, 0.5), (1.5, -0.5, 0.0)]},
}
OWNER_CASES = ("default", "bias correction, plain", "schedules", "own scale")


@pytest.mark.parametrize(
    ("form", "case"),
    [("single", c) for c in OPTIONS] + [("owner", c) for c in OWNER_CASES],
)
def test_ten_steps_follow_the_oracle(form: str, case: str) -> None:
    options = OPTIONS[case]
    own = {k: v for k, v in options.items() if k not in ("ns_steps", "ns_coefficients")}
    if "ns_coefficients" in options:
        own["table"] = [*options["ns_coefficients"], options["ns_coefficients"][-1]]
    oracle = MuonOracle(**{"lr": own.pop("learning_rate", 0.02), **own})
    params = draw(SHAPES, 0)
    trainer = Trainer(form, muon(**options), params, RULES)
    want = matrices(params)
    for seed in range(1, 11):
        grads = draw(SHAPES, seed)
        got = trainer.step(grads)
        want = oracle.step(want, matrices(grads))
        assert_trees_close(matrices(got), want, atol=1e-5)
    # The bias belongs to the rest: ten steps of plain gradient descent.
    total = sum(draw(SHAPES, seed)["bias"] for seed in range(1, 11))
    np.testing.assert_allclose(got["bias"], params["bias"] - 0.1 * total, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_float64_leaves_are_updated_in_float64(form: str) -> None:
    with jax.enable_x64(True):
        params = draw(SHAPES, 0, np.float64)
        trainer = Trainer(form, muon(weight_decay=0.1), params, RULES)
        oracle, want = MuonOracle(0.02, weight_decay=0.1), matrices(params)
        for seed in (1, 2, 3):
            grads = draw(SHAPES, seed, np.float64)
            got = trainer.step(grads)
            want = oracle.step(want, matrices(grads))
        # eps is relative to the largest entry here and 0 in the oracle: 1e-8 of the norm.
        assert_trees_close(matrices(got), want, atol=1e-8)
        assert all(x.dtype == np.float64 for x in got.values())


def test_a_torch_layout_gets_the_update_of_its_transpose() -> None:
    kernel = draw({"w": (8, 24)}, 0)["w"]
    grad = draw({"w": (8, 24)}, 1)["w"]
    flax = Trainer("single", muon(), {"w": kernel}).step({"w": grad})["w"]
    read = [rules.matrix("w", rows=(0,), cols=(1,), out="rows")]
    torch = Trainer("single", muon(), {"w": kernel.T.copy()}, read).step({"w": grad.T.copy()})["w"]
    np.testing.assert_allclose(torch.T, flax, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_scale_by_muon_is_the_direction_alone(form: str) -> None:
    params, grads = draw(SHAPES, 0), draw(SHAPES, 1)
    whole = Trainer(form, muon(learning_rate=1.0), params, RULES).step(grads)
    bare = Trainer(form, lambda **where: mfsdp.scale_by_muon(**where), params, RULES).step(grads)
    got, want = matrices(bare), matrices(whole)
    start = matrices(params)
    for name in want:
        np.testing.assert_allclose(got[name] - start[name], start[name] - want[name], atol=1e-5)
    np.testing.assert_array_equal(bare["bias"], params["bias"] + grads["bias"])


@pytest.mark.parametrize("form", FORMS)
def test_zero_gradients_change_nothing_but_decay(form: str) -> None:
    shapes = {"a": (8, 16), "b": (1, 1), "c": (64, 1), "bias": (4,)}
    params = {k: np.ones(s, np.float32) for k, s in shapes.items()}
    zeros = {k: np.zeros(s, np.float32) for k, s in shapes.items()}
    trainer = Trainer(form, muon(weight_decay=0.1, rest=optax.adam(1.0)), params)
    for count in (1, 2, 3):
        got = trainer.step(zeros)
        for name in ("a", "b", "c"):
            np.testing.assert_allclose(got[name], (1 - 0.02 * 0.1) ** count, rtol=1e-6)
        np.testing.assert_array_equal(got["bias"], 1.0)
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(trainer.state))

    still = Trainer(form, muon(rest=optax.sgd(1.0)), params)
    still.step(zeros)
    assert all(not np.asarray(u).any() for u in jax.tree.leaves(still.updates))


@pytest.mark.parametrize("form", FORMS)
def test_the_update_does_not_depend_on_the_scale_of_the_gradient(form: str) -> None:
    """Every scale is a matrix of its own in one tree, so that none may touch another."""
    g = draw({"g": (8, 16)}, 0)["g"]
    scales = [1e-30, 1e-20, 1e-10, 1e-8, 1.0, 1e10, 1e20, 1e30]
    grads = {f"s{i}": (s * g.astype(np.float64)).astype(np.float32) for i, s in enumerate(scales)}
    params = {k: np.zeros_like(g) for k in grads}
    trainer = Trainer(form, muon(learning_rate=1.0), params)
    for _ in range(2):
        before = trainer.params if form == "single" else trainer.layout.unshard(trainer.params)
        got = trainer.step(grads)
        steps = {k: got[k] - np.asarray(before[k]) for k in got}
        for k in steps:
            np.testing.assert_allclose(steps[k], steps["s4"], atol=1e-5, err_msg=k)
        singular = np.linalg.svd(steps["s4"] / np.sqrt(2), compute_uv=False)
        assert singular.min() > 0.6
        assert singular.max() < 1.3


@pytest.mark.parametrize(
    ("form", "dtype"),
    [("single", jnp.bfloat16), ("owner", jnp.bfloat16), ("single", jnp.float16)],
)
def test_half_precision_parameters(form: str, dtype: Any) -> None:
    """Updates in the parameters' dtype, momentum in float32, close to the float32 update."""
    params = draw(SHAPES, 0, dtype)
    large = {k: (1e4 * x.astype(np.float32)).astype(dtype) for k, x in draw(SHAPES, 1).items()}
    trainer = Trainer(form, muon(rest=optax.sgd(0.0)), params, RULES)
    got = trainer.step(large)
    assert {x.dtype for x in jax.tree.leaves(trainer.updates)} == {jnp.dtype(dtype)}
    moments = [x for x in jax.tree.leaves(trainer.state) if x.ndim >= 2]
    assert {x.dtype for x in moments} == {jnp.dtype(jnp.float32)}
    exact = MuonOracle(0.02).step(matrices(params), matrices(large))
    assert_trees_close(matrices(got), exact, atol=0.02)


def test_momentum_dtype_is_that_of_the_state() -> None:
    trainer = Trainer("single", muon(momentum_dtype=jnp.bfloat16), draw(FEW, 0))
    trainer.step(draw(FEW, 1))
    moments = [x for x in jax.tree.leaves(trainer.state) if x.ndim >= 2]
    assert {x.dtype for x in moments} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(trainer.updates)} == {jnp.dtype(jnp.float32)}


# ---- groups: rest, decay, frozen ---------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_decay_is_exactly_rate_times_decay_and_of_matrices_only(form: str) -> None:
    params = {"w": np.ones((4, 4), np.float32), "bias": np.ones(4, np.float32)}
    zeros = jax.tree.map(np.zeros_like, params)
    rate = ramp(0.02, -0.005)
    trainer = Trainer(form, muon(learning_rate=rate, weight_decay=0.1), params)
    expected = np.float32(1)
    for count in range(3):
        expected -= np.float32(rate(count) * 0.1) * expected
        got = trainer.step(zeros)
        np.testing.assert_allclose(got["w"], expected, rtol=1e-6)
        np.testing.assert_array_equal(got["bias"], 1.0)


@pytest.mark.parametrize("form", FORMS)
def test_matrices_and_rest_follow_their_own_schedules(form: str) -> None:
    shapes = {"w": (8, 8), "bias": (8,)}
    rest_rate = ramp(3e-4, -3e-5)
    rest = optax.adamw(rest_rate, weight_decay=0.01)
    params = draw(shapes, 0)
    trainer = Trainer(form, muon(learning_rate=0.02, rest=rest), params)
    matrix, other = MuonOracle(0.02), AdamWOracle(rest_rate, weight_decay=0.01)
    w, bias = {"w": params["w"]}, {"bias": params["bias"]}
    for seed in range(1, 11):
        grads = draw(shapes, seed)
        got = trainer.step(grads)
        w = matrix.step(w, {"w": grads["w"]})
        bias = other.step(bias, {"bias": grads["bias"]})
    assert_trees_close(got, w | bias, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_clipping_before_muon_moves_only_the_rest(form: str) -> None:
    shapes = {"a": (8, 16), "b": (16, 8), "bias": (6,)}
    params, grads = draw(shapes, 0), draw(shapes, 1)

    def clipped(**where: Any) -> Any:
        clip = mfsdp.clip_by_global_norm(0.5, layout=where["layout"])
        return optax.chain(clip, muon()(**where))

    free = Trainer(form, muon(), params).step(grads)
    got = Trainer(form, clipped, params).step(grads)
    assert_trees_close({k: got[k] for k in "ab"}, {k: free[k] for k in "ab"}, atol=1e-6)
    norm = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in grads.values()))
    want = params["bias"] - 0.1 * grads["bias"] * 0.5 / norm
    np.testing.assert_allclose(got["bias"], want, atol=1e-6)


def test_a_small_norm_is_not_scaled_up() -> None:
    shapes = {"a": (8, 16), "bias": (6,)}
    params, grads = draw(shapes, 0), draw(shapes, 1)
    layout = mfsdp.plan(params, make_mesh(8))
    owned = layout.trainable(layout.shard(grads))
    tx = mfsdp.clip_by_global_norm(1e3, layout=layout)
    updates, _ = jax.jit(tx.update)(owned, tx.init(owned))
    jax.tree.map(np.testing.assert_array_equal, updates, owned)


MASKS: dict[str, tuple[Any, set[str]]] = {
    "tree": ({"a": {"u": True, "v": False}, "b": {"u": True, "bias": True}}, {"a/u", "b/u"}),
    "prefix": ({"a": True, "b": False}, {"a/u", "a/v"}),
    "callable tree": (
        lambda p: jax.tree_util.tree_map_with_path(lambda k, _: k[-1].key == "u", p),
        {"a/u", "b/u"},
    ),
    "callable prefix": (lambda p: {k: k == "b" for k in p}, {"b/u"}),
    "callable by shape": (
        lambda p: {i: {j: len(x.shape) == 2 for j, x in part.items()} for i, part in p.items()},
        {"a/u", "a/v", "b/u"},
    ),
    "all off": (False, set()),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", FORMS)
def test_weight_decay_mask_in_canonical_names(form: str, mask: str) -> None:
    given, decayed = MASKS[mask]
    params = {
        "a": {"u": np.ones((4, 8), np.float32), "v": np.ones((4, 8), np.float32)},
        "b": {"u": np.ones((8, 4), np.float32), "bias": np.ones(8, np.float32)},
    }
    trainer = Trainer(form, muon(weight_decay=0.5, weight_decay_mask=given), params)
    got = trainer.step(jax.tree.map(np.zeros_like, params))
    flat = {f"{i}/{j}": x for i, part in got.items() for j, x in part.items()}
    for path, x in flat.items():
        np.testing.assert_allclose(x, 0.99 if path in decayed else 1.0, rtol=1e-6, err_msg=path)


def test_a_decay_mask_of_another_tree_is_refused() -> None:
    params = draw({"a": (4, 8), "b": (4, 8)}, 0)
    layout = mfsdp.plan(params, make_mesh(2))
    with pytest.raises(ValueError, match="weight_decay_mask is not a prefix"):
        mfsdp.muon(0.1, layout=layout, weight_decay=0.1, weight_decay_mask={"a": True, "c": False})


@pytest.mark.parametrize("form", FORMS)
def test_frozen_and_integer_leaves_stay_and_have_no_state(form: str) -> None:
    shapes = {"base/w": (9, 7), "lora": (16, 4), "bias": (4,)}
    params = draw(shapes, 0)
    params["index"] = np.arange(6, dtype=np.int32).reshape(2, 3)
    grads = draw(shapes, 1)
    grads["index"] = np.zeros((2, 3), np.int32)
    given = [rules.frozen("base*")]
    trainer = Trainer(form, muon(weight_decay=0.1, rest=optax.adamw(0.1)), params, given)
    for _ in range(2):
        got = trainer.step(grads)
    np.testing.assert_array_equal(got["base/w"], params["base/w"])
    np.testing.assert_array_equal(got["index"], params["index"])
    assert got["index"].dtype == np.int32
    assert np.abs(got["lora"] - params["lora"]).max() > 0
    sizes = {x.size for x in jax.tree.leaves(trainer.state)}
    assert not sizes & {9 * 7, 6}


@pytest.mark.parametrize("form", FORMS)
def test_none_leaves_stay_none(form: str) -> None:
    params = {"w": np.ones((4, 8), np.float32), "bias": None, "scale": np.ones(8, np.float32)}
    got = Trainer(form, muon(), params).step(params)
    assert got["bias"] is None
    assert np.abs(got["w"] - 1).max() > 0


# ---- inside optax's wrappers -------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_multi_steps_equals_the_mean_gradient(form: str) -> None:
    """And the orthogonalisation runs once per outer step: the momentum counts three."""
    shapes = {"w": (8, 8), "tall": (16, 8), "bias": (8,)}
    params = draw(shapes, 0)
    micro = [draw(shapes, seed) for seed in range(1, 13)]
    split = Trainer(form, lambda **w: optax.MultiSteps(muon(weight_decay=0.1)(**w), 4), params)
    whole = Trainer(form, muon(weight_decay=0.1), params)
    for outer in range(3):
        part = micro[4 * outer : 4 * outer + 4]
        for grads in part:
            got = split.step(grads)
        want = whole.step(jax.tree.map(lambda *g: np.mean(g, axis=0), *part))
    assert_trees_close(got, want, atol=1e-5)
    assert {int(s.count) for s in muon_states(split.state)} == {3}


def muon_states(state: Any) -> list[mfsdp.MuonState]:
    is_muon = lambda x: isinstance(x, mfsdp.MuonState)  # noqa: E731
    return [x for x in jax.tree.leaves(state, is_leaf=is_muon) if is_muon(x)]


@pytest.mark.parametrize("form", FORMS)
def test_multi_steps_keeps_half_precision_types_in_a_scan(form: str) -> None:
    shapes = {"w": (8, 8), "bias": (8,)}
    params, grads = draw(shapes, 0, jnp.bfloat16), draw(shapes, 1, jnp.bfloat16)
    trainer = Trainer(form, lambda **w: optax.MultiSteps(muon()(**w), 2), params)
    owned = grads if trainer.layout is None else trainer.layout.shard(grads)

    @jax.jit
    def four(params: Any, state: Any, grads: Any) -> Any:
        def body(carry: Any, _: None) -> Any:
            return trainer._apply(*carry, grads)[:2], None

        return jax.lax.scan(body, (params, state), None, length=4)[0]

    params, _ = four(trainer.params, trainer.state, owned)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("form", FORMS)
def test_injected_rates_compile_once(form: str, compilations: list[str]) -> None:
    def make(**where: Any) -> Any:
        injected = optax.inject_hyperparams(mfsdp.muon, static_args=("ns_steps", "rest", "scale"))
        return injected(1e-3, weight_decay=0.1, rest=optax.sgd(0.1), **where)

    params = draw(SHAPES, 0)
    trainer = Trainer(form, make, params, RULES)
    oracle, want = MuonOracle(0.0, weight_decay=0.1), matrices(params)
    for seed, rate in enumerate((1e-3, 2e-3, 4e-3), start=1):
        rates = trainer.state.hyperparams
        rates["learning_rate"] = jnp.full_like(rates["learning_rate"], rate)
        oracle.lr = rate
        got, want = (
            trainer.step(draw(SHAPES, seed)),
            oracle.step(want, matrices(draw(SHAPES, seed))),
        )
        assert_trees_close(matrices(got), want, atol=1e-5)
    assert compilations.count("jit(_apply)") == 1


def test_injection_without_static_steps_says_what_to_write() -> None:
    tx = optax.inject_hyperparams(mfsdp.muon)(1e-3)
    with pytest.raises(TypeError, match=r'static_args=\("ns_steps",\)'):
        tx.init(draw({"w": (4, 4)}, 0))


@pytest.mark.parametrize("form", FORMS)
def test_a_skipped_step_leaves_no_trace(form: str) -> None:
    params = draw(FEW, 0)
    trainer = Trainer(form, lambda **w: optax.apply_if_finite(muon()(**w), 5), params)
    fresh = jax.tree.map(np.asarray, trainer.state.inner_state)
    bad = draw(FEW, 1)
    bad["tall"][2, 0] = np.inf
    got = trainer.step(bad)
    jax.tree.map(np.testing.assert_array_equal, got, params)
    jax.tree.map(np.testing.assert_array_equal, trainer.state.inner_state, fresh)
    assert int(trainer.state.total_notfinite) == 1
    got = trainer.step(draw(FEW, 2))
    want = Trainer(form, muon(), params).step(draw(FEW, 2))
    assert_trees_close(got, want, atol=1e-6)


def test_masked_on_the_users_tree() -> None:
    """Hidden leaves reach muon as ``MaskedNode``; set_to_zero freezes what is hidden."""
    params, grads = draw(SHAPES, 0), draw(SHAPES, 1)
    shown = {k: k not in ("square", "layers") for k in SHAPES}
    hidden = {k: not v for k, v in shown.items()}

    def make(**where: Any) -> Any:
        inner = optax.masked(muon()(**where), shown)
        return optax.chain(inner, optax.masked(optax.set_to_zero(), hidden))

    trainer = Trainer("single", make, params, RULES)
    got = trainer.step(grads)
    want = Trainer("single", muon(), params, RULES).step(grads)
    for name in SHAPES:
        np.testing.assert_allclose(
            got[name], want[name] if shown[name] else params[name], atol=1e-6
        )
    assert not {x.size for x in jax.tree.leaves(trainer.state)} & {8 * 8, 3 * 8 * 16}


def test_partition_on_the_users_tree() -> None:
    params, grads = draw(SHAPES, 0), draw(SHAPES, 1)
    labels = {k: "sgd" if k in ("square", "bias") else "muon" for k in SHAPES}

    def make(**where: Any) -> Any:
        return optax.partition({"muon": muon()(**where), "sgd": optax.sgd(0.1)}, labels)

    got = Trainer("single", make, params, RULES).step(grads)
    want = Trainer("single", muon(), params, RULES).step(grads)
    want["square"] = params["square"] - np.float32(0.1) * grads["square"]
    assert_trees_close(got, want, atol=1e-6)


@pytest.mark.parametrize("hide", ["rest", "a class"])
def test_masked_on_owner_params(hide: str) -> None:
    """A mask of owner params hides a field, or a whole shape class."""
    params, grads = draw(SHAPES, 0), draw(SHAPES, 1)

    def make(layout: Any) -> Any:
        def mask(tree: Any) -> Any:
            mask = jax.tree.map(lambda _: True, layout.trainable(layout.abstract))
            if hide == "rest":
                return mask._replace(rest=dict.fromkeys(mask.rest, False))
            return mask._replace(stacks=mask.stacks | {"8x8:float32": False})

        return optax.masked(muon()(layout=layout), mask)

    got = Trainer("owner", make, params, RULES).step(grads)
    want = Trainer("owner", muon(), params, RULES).step(grads)
    hidden = "bias" if hide == "rest" else "square"
    np.testing.assert_allclose(got.pop(hidden), params[hidden] + grads[hidden], atol=1e-6)
    del want[hidden]
    if hide == "a class":
        got["qkv"], want["qkv"] = got["qkv"][:, :16], want["qkv"][:, :16]
    assert_trees_close(got, want, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_unknown_extra_arguments_pass(form: str) -> None:
    params, grads = draw(FEW, 0), draw(FEW, 1)
    trainer = Trainer(form, muon(), params)
    want = trainer.step(grads)
    again = Trainer(form, muon(), params)
    g = grads if again.layout is None else again.layout.trainable(again.layout.shard(grads))
    p = again.params if again.layout is None else again.layout.trainable(again.params)
    updates, _ = jax.jit(again.tx.update)(g, again.state, p, value=1.0, unknown=jnp.ones(2))
    moved = optax.apply_updates(p, updates)
    moved = moved if again.layout is None else again.layout.unshard(moved)
    assert_trees_close(moved, want, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_state_keeps_its_types_and_shardings(form: str) -> None:
    trainer = Trainer(form, muon(rest=optax.adamw(1e-3)), draw(FEW, 0))
    before = jax.tree.map(jax.typeof, trainer.state)
    trainer.step(draw(FEW, 1))
    assert jax.tree.map(jax.typeof, trainer.state) == before
    if trainer.layout is None:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), trainer.params)
    else:
        shapes = trainer.layout.trainable(trainer.layout.abstract)
    abstract = jax.eval_shape(trainer.tx.init, shapes)
    assert jax.tree.structure(abstract) == jax.tree.structure(trainer.state)


def test_one_compiled_body_whatever_the_number_of_leaves() -> None:
    def num_equations(count: int) -> int:
        params = {f"w{i}": jax.ShapeDtypeStruct((8, 8), jnp.float32) for i in range(count)}
        tx = mfsdp.muon(0.1)
        state = jax.eval_shape(tx.init, params)
        text = str(jax.make_jaxpr(tx.update)(params, state, params))
        return text.count("dot_general")

    assert num_equations(2) == num_equations(12) > 0


# ---- inside the user's own shard_map -----------------------------------------------------------


def test_multi_steps_inside_shard_map() -> None:
    shapes = {"w": (8, 8), "tall": (16, 8), "bias": (16,)}
    params = draw(shapes, 0)
    layout = mfsdp.plan(params, make_mesh(8))
    tx = optax.MultiSteps(muon()(layout=layout), 2)
    owned = layout.shard(params)
    state = layout.init(tx, owned)
    specs, state_specs = layout.specs, layout.state_specs(tx)

    @jax.jit
    @jax.shard_map(
        mesh=layout.mesh, in_specs=(specs, state_specs, specs), out_specs=(specs, state_specs)
    )
    def step(owned: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, owned)
        return layout.apply_updates(owned, updates), state

    grads = [draw(shapes, seed) for seed in (1, 2)]
    for g in grads:
        owned, state = step(owned, state, layout.shard(g))
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *grads)
    want = Trainer("single", muon(), params).step(mean)
    assert_trees_close(layout.unshard(owned), want, atol=1e-5)


def test_apply_if_finite_inside_shard_map_is_refused_by_jax_and_works_outside() -> None:
    """Its decision would be each device's own; JAX says so instead of letting owners diverge."""
    params = draw({"w": (8, 8), "bias": (16,)}, 0)
    layout = mfsdp.plan(params, make_mesh(8))
    tx = optax.apply_if_finite(muon()(layout=layout), 3)
    owned = layout.shard(params)
    state = layout.init(tx, owned)
    specs, state_specs = layout.specs, layout.state_specs(tx)
    step = jax.shard_map(
        tx.update,
        mesh=layout.mesh,
        in_specs=(specs, state_specs, specs),
        out_specs=(specs, state_specs),
    )
    with pytest.raises((ValueError, TypeError), match=r"varying|replicat"):
        jax.jit(step)(owned, state, owned)


@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "auto"])
def test_clip_is_the_global_one_inside_shard_map_and_in_jit(explicit: bool) -> None:
    """Device d holds gradients times d + 1; optax's own clip would scale by each local norm."""
    layout = mfsdp.plan(
        {f"w{i}": np.ones((8, 8), np.float32) for i in range(8)} | {"bias": np.ones(3, np.float32)},
        make_mesh(8, explicit),
    )
    grads = {f"w{i}": np.full((8, 8), i + 1, np.float32) for i in range(8)}
    grads["bias"] = np.full(3, 2, np.float32)
    owned = layout.shard(grads)
    assert layout.specs.rest["bias"] == P(None)  # replicated: counts once in the norm
    tx = mfsdp.clip_by_global_norm(1.0, layout=layout)
    want = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())[0]

    def clip(g: Any) -> Any:
        return tx.update(g, tx.init(g))[0]

    inside = jax.shard_map(clip, mesh=layout.mesh, in_specs=(layout.specs,), out_specs=layout.specs)
    for fn in (jax.jit(clip), jax.jit(inside)):
        assert_trees_close(layout.unshard(fn(owned)), want, atol=1e-7)
    norm = np.sqrt(sum(np.sum(g**2) for g in grads.values()))
    np.testing.assert_allclose(mfsdp.global_norm(owned, layout), norm, rtol=1e-6)


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ns_steps": 0}, r"steps must be in \[1, 50\], got 0"),
        ({"ns_steps": -1}, "got -1"),
        ({"ns_steps": 100}, "got 100"),
        ({"eps": 0.0}, "eps=0.0 must be a finite number > 0"),
        ({"eps": -1.0}, "eps=-1.0"),
        ({"momentum": -0.1}, "momentum=-0.1"),
        ({"momentum": 1.0}, "momentum=1.0 .* < 1"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"learning_rate": -0.1}, "learning_rate=-0.1"),
        ({"learning_rate": float("inf")}, "learning_rate=inf"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"weight_decay": float("nan")}, "weight_decay=nan"),
        ({"scale": "spectral"}, "unknown scale 'spectral'"),
        ({"ns_coefficients": "nope"}, "unknown coefficients 'nope'"),
        ({"ns_coefficients": []}, "at least one row"),
        ({"bias_correction": True, "momentum": ramp(0.9, 0.0)}, "constant momentum"),
        ({"ns_dtype": "int8"}, "int8"),
        ({"ns_dtype": "bf16"}, "bf16"),
        ({"momentum_dtype": "int8"}, "int8"),
        ({"momentum_dtype": "bf16"}, "bf16"),
        ({"momentum_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"momentum_dtype": "float64"}, "x64"),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_bad_options_are_refused_at_construction(
    form: str, options: dict[str, Any], message: str
) -> None:
    layout = mfsdp.plan(draw({"w": (4, 8)}, 0), make_mesh(2)) if form == "owner" else None
    options = {"learning_rate": 0.1, "layout": layout, **options}
    with pytest.raises(ValueError, match=message):
        mfsdp.muon(options.pop("learning_rate"), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": None}, "learning_rate=None must be a number or a schedule"),
        ({"learning_rate": True}, "learning_rate=True"),
        ({"learning_rate": 1j}, "learning_rate=1j"),
        ({"momentum": "0.9"}, "momentum='0.9'"),
        ({"weight_decay": [0.1]}, r"weight_decay=\[0.1\]"),
        ({"eps": lambda count: 1e-8}, "eps=.* must be a number, got function"),
        ({"nesterov": "no"}, "nesterov='no' must be True or False"),
        ({"exact": "yes"}, "exact='yes'"),
        ({"cautious_weight_decay": 1}, "cautious_weight_decay=1"),
        ({"rest": 1e-3}, "rest=0.001 must be an optax transformation"),
        ({"rest": optax.adam}, "rest=<function adam"),
    ],
)
def test_arguments_of_another_type_are_named(options: dict[str, Any], message: str) -> None:
    options = {"learning_rate": 0.1, **options}
    with pytest.raises(TypeError, match=message):
        mfsdp.muon(options.pop("learning_rate"), **options)


@pytest.mark.parametrize("mask", ["x", lambda p: None, {"w": "no"}], ids=["text", "none", "leaf"])
@pytest.mark.parametrize("form", FORMS)
def test_a_decay_mask_without_bools_is_refused(form: str, mask: Any) -> None:
    params = draw({"w": (4, 8)}, 0)
    with pytest.raises(TypeError, match="weight_decay_mask holds"):
        Trainer(form, muon(weight_decay=0.1, weight_decay_mask=mask), params)


def test_owner_params_need_their_layout() -> None:
    layout = mfsdp.plan(draw({"w": (4, 8)}, 0), make_mesh(2))
    with pytest.raises(TypeError, match="give layout="):
        mfsdp.muon(0.1).init(layout.shard(draw({"w": (4, 8)}, 0)))


def test_numpy_scalars_are_checked_like_numbers() -> None:
    with pytest.raises(ValueError, match="momentum"):
        mfsdp.muon(0.1, momentum=np.float32(1.5))
    with pytest.raises(ValueError, match="learning_rate"):
        mfsdp.muon(np.float64("nan"))


def test_rules_with_a_layout_are_refused() -> None:
    layout = mfsdp.plan(draw(SHAPES, 0), make_mesh(2), rules=RULES)
    for make in (lambda **k: mfsdp.muon(0.1, **k), mfsdp.scale_by_muon):
        with pytest.raises(ValueError, match=r"rules=.*mfsdp\.plan"):
            make(layout=layout, rules=RULES)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_clip_norms_are_refused(max_norm: float) -> None:
    with pytest.raises(ValueError, match="max_norm"):
        mfsdp.clip_by_global_norm(max_norm)


def test_what_is_not_owner_params_is_refused() -> None:
    params = draw(SHAPES, 0)
    layout = mfsdp.plan(params, make_mesh(8), rules=RULES)
    tx = mfsdp.muon(0.1, layout=layout)
    with pytest.raises(TypeError, match=r"layout\.shard\(params\)"):
        tx.init(params)
    with pytest.raises(TypeError, match="got dict"):
        tx.update(params, tx.init(layout.trainable(layout.shard(params))), params)
    for wrong in (
        mfsdp.plan(params, make_mesh(4), rules=RULES),
        mfsdp.plan({"w": params["tall"]}, make_mesh(8)),
    ):
        tree = params if len(wrong.plan.leaves) > 1 else {"w": params["tall"]}
        foreign = wrong.trainable(wrong.shard(tree))
        with pytest.raises(ValueError, match="use the layout that sharded"):
            tx.init(foreign)


def test_a_leaf_without_a_rule_is_named() -> None:
    with pytest.raises(ValueError, match="experts"):
        mfsdp.muon(0.1).init({"experts": np.ones((2, 4, 8), np.float32)})


def test_decay_without_parameters_says_what_is_missing() -> None:
    params = draw({"w": (4, 8)}, 0)
    layout = mfsdp.plan(params, make_mesh(2))
    tx = mfsdp.muon(0.1, layout=layout, weight_decay=0.1)
    owned = layout.trainable(layout.shard(params))
    with pytest.raises(ValueError, match=r"tx\.update\(grads, state, params\)"):
        jax.eval_shape(lambda owned: tx.update(owned, tx.init(owned)), owned)


def test_map_params_finds_what_mirrors_the_parameters() -> None:
    params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}}
    tx = mfsdp.muon(0.1)
    state = tx.init(params)
    mapped = optax.tree.map_params(tx, lambda x: x + 7, state)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
    moved = [
        bool((a != b).any()) for a, b in zip(*map(jax.tree.leaves, (mapped, state)), strict=True)
    ]
    # Muon's momentum of the kernel, Adam's two moments of the bias; the counts stay.
    assert sum(moved) == 3
    assert all(a.ndim > 0 for a, m in zip(jax.tree.leaves(mapped), moved, strict=True) if m)
