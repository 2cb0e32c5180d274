"""QK-clip against a float64 oracle, on one device and on owner params, and in training."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.layout import rules
from tests.models import make_mesh

TAU = 10.0
FORMS = ("single", "auto", "explicit")
W = mfsdp.AttentionWeight
each_form = pytest.mark.parametrize("form", FORMS)


# ---- the rule, by hand -------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    """One query or key parameter as ``[layers, heads, head_dim, inputs]``, a view of its leaf."""

    path: str
    view: Callable[[np.ndarray], np.ndarray]
    exponents: Any = 0.5  # of each of the head_dim outputs


def clip(tree: dict[str, Any], layers: dict[str, list[Heads]], logits: Any) -> dict[str, Any]:
    """The weights after the clip, float64.

    ``gamma = min(1, tau / S)``; the queries that share a key share the largest ``S``.
    """
    new = {k: np.array(x, np.float64) for k, x in tree.items()}
    for name, weights in layers.items():
        views = [w.view(new[w.path]) for w in weights]
        num_keys = min(v.shape[1] for v in views)
        s = np.atleast_2d(np.asarray(logits[name], np.float64))
        s = s.reshape(len(s), num_keys, -1).max(axis=2)
        gamma = np.array([TAU / x if np.isfinite(x) and x > TAU else 1.0 for x in s.flat])
        gamma = gamma.reshape(s.shape)
        for w, v in zip(weights, views, strict=True):
            assert np.shares_memory(v, new[w.path])
            exponents = np.broadcast_to(w.exponents, v.shape[2])
            for layer in range(v.shape[0]):
                for head in range(v.shape[1]):
                    own = gamma[layer, head // (v.shape[1] // num_keys)]
                    v[layer, head] *= own ** exponents[:, None]
    return new


def cols(heads: int, start: int = 0, stop: int | None = None) -> Any:
    """A kernel ``[inputs, heads * head_dim]``, or some of its columns."""
    return lambda x: x[:, start:stop].T.reshape(1, heads, -1, x.shape[0])


def rows(heads: int) -> Any:
    """A torch weight ``[heads * head_dim, inputs]``."""
    return lambda x: x.reshape(1, heads, -1, x.shape[1])


def layers_of_cols(heads: int, start: int = 0, stop: int | None = None) -> Any:
    """Stacked kernels ``[layers, inputs, heads * head_dim]``."""
    return lambda x: x[:, :, start:stop].swapaxes(1, 2).reshape(len(x), heads, -1, x.shape[1])


def dense_general(x: np.ndarray) -> np.ndarray:
    """A kernel ``[inputs, heads, head_dim]``."""
    return x.transpose(1, 2, 0)[None]


def bias(heads: int, layers: int = 1) -> Any:
    """``[heads * head_dim]``, ``[heads, head_dim]``, or one per layer."""
    return lambda x: x.reshape(layers, heads, -1, 1)


@dataclass(frozen=True)
class Case:
    """Parameter shapes, what the package is told, and what the oracle is told."""

    shapes: dict[str, tuple[int, ...]]
    layers: dict[str, list[Any]]
    oracle: dict[str, list[Heads]]
    logits: dict[str, tuple[int, ...]]
    rules: list[Any] = field(default_factory=list)


CASES = {
    "tall, wide and square": Case(
        {"q0": (16, 8), "k0": (16, 8), "q1": (8, 16), "k1": (8, 16), "q2": (8, 8), "k2": (8, 8)},
        {f"a{i}": [W(f"q{i}", 4), W(f"k{i}", 4)] for i in range(3)},
        {f"a{i}": [Heads(f"{x}{i}", cols(4)) for x in "qk"] for i in range(3)},
        {f"a{i}": (4,) for i in range(3)},
    ),
    "heads as a dim": Case(
        {"q": (8, 4, 4), "k": (8, 4, 4), "layers": (3, 16, 2, 4)},
        {"a": [W("q", 4), W("k", 4)], "b": [W("layers", 2)]},
        {
            "a": [Heads("q", dense_general), Heads("k", dense_general)],
            "b": [Heads("layers", lambda x: x.transpose(0, 2, 3, 1))],
        },
        {"a": (4,), "b": (3, 2)},
        [rules.attention_in("[qk]"), rules.attention_in("layers", batch=1)],
    ),
    "fused": Case(
        {"qkv": (8, 36)},
        {"a": [W("qkv", 4, block=0), W("qkv", 4, block=1)]},
        {"a": [Heads("qkv", cols(4, 0, 16)), Heads("qkv", cols(4, 16, 32))]},
        {"a": (4,)},
        [rules.fused("qkv", (16, 16, 4))],
    ),
    "fused, grouped and stacked": Case(
        {"qkv": (3, 8, 32)},
        {"a": [W("qkv", 4, block=0), W("qkv", 2, block=1)]},
        {"a": [Heads("qkv", layers_of_cols(4, 0, 16)), Heads("qkv", layers_of_cols(2, 16, 24))]},
        {"a": (3, 4)},
        [rules.fused("qkv", (16, 8, 8), batch=(0,))],
    ),
    "stacked": Case(
        {"q": (3, 8, 16), "k": (3, 8, 16), "qb": (3, 16), "kb": (3, 4, 4)},
        {"a": [W("q", 4), W("k", 4), W("qb", 4), W("kb", 4)]},
        {
            "a": [
                Heads("q", layers_of_cols(4)),
                Heads("k", layers_of_cols(4)),
                Heads("qb", bias(4, 3)),
                Heads("kb", bias(4, 3)),
            ]
        },
        {"a": (3, 4)},
        [rules.rest("?b"), rules.stacked("[qk]")],
    ),
    "biases": Case(
        {"q": (8, 16), "k": (8, 16), "qb": (16,), "kb": (4, 4)},
        {"a": [W("q", 4), W("k", 4), W("qb", 4), W("kb", 4)]},
        {
            "a": [
                Heads("q", cols(4)),
                Heads("k", cols(4)),
                Heads("qb", bias(4)),
                Heads("kb", bias(4)),
            ]
        },
        {"a": (4,)},
        [rules.rest("?b")],
    ),
    "biases alone": Case(
        {"q": (8, 16), "qb": (16,)},
        {"a": [W("qb", 4)]},
        {"a": [Heads("qb", bias(4))]},
        {"a": (4,)},
    ),
    "torch": Case(
        {"q": (16, 8), "k": (8, 16), "s": (8, 8)},
        {"a": [W("q", 4), W("k", 4)], "b": [W("s", 2)]},
        {"a": [Heads("q", rows(4)), Heads("k", rows(4))], "b": [Heads("s", rows(2))]},
        {"a": (4,), "b": (2,)},
        [rules.matrix("*", out="rows")],
    ),
    "grouped queries": Case(
        {"q": (16, 24), "k": (16, 8), "qb": (24,), "multi": (8, 16), "one": (8, 4)},
        {"a": [W("q", 6), W("k", 2), W("qb", 6)], "b": [W("multi", 4), W("one", 1)]},
        {
            "a": [Heads("q", cols(6)), Heads("k", cols(2)), Heads("qb", bias(6))],
            "b": [Heads("multi", cols(4)), Heads("one", cols(1))],
        },
        {"a": (6,), "b": (4,)},
    ),
    "latent": Case(
        {"q": (8, 24), "kv": (8, 28), "rope": (8, 2), "qb": (24,)},
        {
            "a": [
                W("q", 4, ((4, 0.5), (2, 1.0))),
                W("kv", 4, ((4, 0.5), (3, 0.0))),
                W("qb", 4, ((4, 0.5), (2, 1.0))),
            ]
        },
        {
            "a": [
                Heads("q", cols(4), [0.5] * 4 + [1.0] * 2),
                Heads("kv", cols(4), [0.5] * 4 + [0.0] * 3),
                Heads("qb", bias(4), [0.5] * 4 + [1.0] * 2),
            ]
        },
        {"a": (4,)},
    ),
}


# ---- both forms of the parameters --------------------------------------------------------------


def draw(shapes: dict[str, tuple[int, ...]], seed: int, dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {k: rng.standard_normal(s).astype(dtype) for k, s in shapes.items()}


def draw_logits(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """About half above the threshold, and in every layer at least one on either side."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, shape in shapes.items():
        s = TAU * np.exp(rng.uniform(-1, 2, shape)).astype(np.float32)
        s.flat[0], s.flat[-1] = 3 * TAU, 0.5 * TAU
        out[name] = s
    return out


class Clipper:
    """Canonical updates in, canonical updates out, for either form of the parameters."""

    def __init__(self, form: str, params: dict[str, Any], layers: Any, given: Any = None) -> None:
        self.layout = None
        if form == "single":
            self.tx = mfsdp.qk_clip(layers, TAU, rules=given)
        else:
            self.layout = mfsdp.plan(params, make_mesh(8, form == "explicit"), rules=given)
            self.tx = mfsdp.qk_clip(layers, TAU, layout=self.layout)
        self.params = self.own(params)
        self.state = self.tx.init(self.params)
        self.jitted = jax.jit(self._update)

    def own(self, tree: Any) -> Any:
        return tree if self.layout is None else self.layout.trainable(self.layout.shard(tree))

    def _update(self, updates: Any, params: Any, logits: Any) -> Any:
        return self.tx.update(updates, self.state, params, max_logits=logits)[0]

    def raw(self, updates: Any, logits: Any) -> Any:
        return self.jitted(self.own(updates), self.params, logits)

    def __call__(self, updates: Any, logits: Any) -> dict[str, np.ndarray]:
        new = self.raw(updates, logits)
        new = new if self.layout is None else self.layout.unshard(new)
        return {k: np.asarray(x) for k, x in new.items()}


def clipper(form: str, case: Case, dtype: Any = np.float32) -> Clipper:
    return Clipper(form, draw(case.shapes, 0, dtype), case.layers, case.rules)


@pytest.mark.parametrize("name", CASES)
@each_form
def test_weights_follow_the_oracle_and_the_others_get_their_update(
    form: str, name: str, compilations: list[str]
) -> None:
    """Entries that the rule leaves alone get the bits of the incoming update."""
    case = CASES[name]
    params, updates = draw(case.shapes, 0), draw(case.shapes, 1)
    run = clipper(form, case)
    moved = {k: params[k].astype(np.float64) + updates[k] for k in params}
    for seed in (2, 3):
        logits = draw_logits(case.logits, seed)
        got = run(updates, logits)
        if seed == 2:
            compilations.clear()
        want = clip(moved, case.oracle, logits)
        changed = 0
        for path, u in updates.items():
            new = params[path].astype(np.float64) + got[path]
            np.testing.assert_allclose(new, want[path], rtol=0, atol=2e-6, err_msg=path)
            same = want[path] == moved[path]
            np.testing.assert_array_equal(got[path][same], u[same], err_msg=path)
            changed += np.count_nonzero(~same)
        assert changed > 0
    assert "jit(_update)" not in compilations  # other logits are no other program


def test_the_values_of_a_fused_kernel_keep_their_bits() -> None:
    case = CASES["fused"]
    updates = draw(case.shapes, 1)
    for form in FORMS:
        got = clipper(form, case)(updates, {"a": np.full(4, 9 * TAU, np.float32)})
        np.testing.assert_array_equal(got["qkv"][:, 32:], updates["qkv"][:, 32:])
        assert (got["qkv"][:, :32] != updates["qkv"][:, :32]).all()


@pytest.mark.parametrize(
    "values",
    [
        [np.inf, -np.inf, np.nan, 1e-3],
        [0.0, -0.0, -5.0, -1e30],
        [TAU, TAU / 2, np.nextafter(np.float32(TAU), np.float32(0)), 0.0],
    ],
    ids=["not finite", "not positive", "not above"],
)
@each_form
def test_what_clips_nothing(form: str, values: list[float]) -> None:
    case = CASES["biases"]
    updates = draw(case.shapes, 1)
    got = clipper(form, case)(updates, {"a": np.array(values, np.float32)})
    for path, u in updates.items():
        np.testing.assert_array_equal(got[path], u, err_msg=path)


def attention_logits(
    tree: dict[str, Any], x: np.ndarray, heads: int, keys: int, with_bias: bool
) -> np.ndarray:
    """Scaled logits ``[batch, heads, sequence, sequence]`` in float64."""
    q, k = (x @ np.asarray(tree[n], np.float64) for n in "qk")
    if with_bias:
        q, k = q + tree["qb"], k + np.asarray(tree["kb"], np.float64).reshape(-1)
    q = q.reshape(*q.shape[:2], heads, -1)
    k = np.repeat(k.reshape(*k.shape[:2], keys, -1), heads // keys, axis=2)
    return np.einsum("bshd,bthd->bhst", q, k) / np.sqrt(q.shape[-1])


@pytest.mark.parametrize(
    ("heads", "keys", "with_bias"),
    [(4, 4, False), (4, 2, False), (4, 4, True)],
    ids=["multi-head", "grouped", "with biases"],
)
@each_form
def test_logits_of_the_new_weights_are_at_most_the_threshold(
    form: str, heads: int, keys: int, with_bias: bool
) -> None:
    """Where ``S`` is that of the updated weights, and exactly the threshold where it was above."""
    dim = 4
    shapes: dict[str, Any] = {"q": (8, heads * dim), "k": (8, keys * dim)}
    weights = [W("q", heads), W("k", keys)]
    if with_bias:
        shapes |= {"qb": (heads * dim,), "kb": (keys, dim)}
        weights += [W("qb", heads), W("kb", keys)]
    params = {k: x if k in "qk" else np.float32(0.3) * x for k, x in draw(shapes, 0).items()}
    given = [rules.rest("?b")] if with_bias else None
    run = Clipper(form, params, {"a": weights}, given)
    rng = np.random.default_rng(5)
    size = np.repeat([0.2, 0.5, 1.0, 2.0], heads // 4 * dim).astype(np.float32)
    params["q"] *= size[None]
    run.params = run.own(params)

    def largest(tree: dict[str, Any]) -> np.ndarray:
        logits = np.abs(attention_logits(tree, x, heads, keys, with_bias))
        return logits.max(axis=(0, 2, 3))

    above = below = 0
    for seed in range(8):
        x = 0.6 * rng.standard_normal((3, 6, 8))
        updates = {k: np.float32(0.3) * u for k, u in draw(shapes, 10 + seed).items()}
        moved = {k: params[k].astype(np.float64) + updates[k] for k in params}
        s = largest(moved)
        got = run(updates, {"a": s.astype(np.float32)})
        after = largest({k: params[k].astype(np.float64) + got[k] for k in params})
        gamma = np.minimum(1, TAU / s.reshape(keys, -1).max(axis=1))
        np.testing.assert_allclose(after, s * np.repeat(gamma, heads // keys), rtol=1e-5)
        assert after.max() <= TAU * (1 + 1e-5)
        above += np.count_nonzero(s > TAU)
        below += np.count_nonzero(s <= TAU)
    assert above > 4
    assert below > 4


@each_form
def test_half_precision_parameters(form: str) -> None:
    case = CASES["biases"]
    params, updates = (draw(case.shapes, seed, jnp.bfloat16) for seed in (0, 1))
    logits = draw_logits(case.logits, 2)
    got = clipper(form, case, jnp.bfloat16)(updates, logits)
    wide = {k: x.astype(np.float64) for k, x in params.items()}
    moved = {k: wide[k] + updates[k].astype(np.float64) for k in wide}
    want = clip(moved, case.oracle, logits)
    for path in params:
        assert got[path].dtype == jnp.bfloat16
        same = want[path] == moved[path]
        np.testing.assert_array_equal(got[path][same], updates[path][same])
        exact = want[path] - wide[path]
        np.testing.assert_allclose(got[path].astype(np.float64), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "auto"])
def test_owners_send_nothing_and_pads_stay_zero(explicit: bool) -> None:
    for name in ("tall, wide and square", "fused, grouped and stacked", "biases"):
        case = CASES[name]
        run = clipper("explicit" if explicit else "auto", case)
        updates = run.own(draw(case.shapes, 1))
        logits = {k: np.full(s, 9 * TAU, np.float32) for k, s in case.logits.items()}
        found = mfsdp.audit(run.jitted, updates, run.params, logits)
        found.assert_no_matrix_collectives()
        assert found.count() == 0
        new = run.jitted(updates, run.params, logits)
        for c in run.layout.plan.classes:
            assert c.num_pads > 0
            pads = np.ones((c.num_devices, c.num_waves), bool)
            pads[tuple(zip(*c.slots, strict=True))] = False
            assert not np.asarray(new.stacks[c.key])[pads].any()
            assert new.stacks[c.key].sharding.spec == run.layout.specs.stacks[c.key]


def test_inside_the_users_shard_map() -> None:
    """Replicated biases are clipped there; of a sharded one no device sees the heads."""
    case = CASES["biases"]
    params, updates = draw(case.shapes, 0), draw(case.shapes, 1)
    logits = draw_logits(case.logits, 2)
    want = clip({k: params[k] + updates[k] for k in params}, case.oracle, logits)
    for smallest in (64, 0):
        layout = mfsdp.plan(params, make_mesh(8), rules=case.rules, rest_shard_min_size=smallest)
        tx = mfsdp.qk_clip(case.layers, TAU, layout=layout)

        def update(updates: Any, params: Any, logits: Any, tx: Any = tx) -> Any:
            return tx.update(updates, optax.EmptyState(), params, max_logits=logits)[0]

        inside = jax.jit(
            jax.shard_map(
                update,
                mesh=layout.mesh,
                in_specs=(layout.specs, layout.specs, jax.P()),
                out_specs=layout.specs,
            )
        )
        args = layout.shard(updates), layout.shard(params), logits
        if smallest == 0:
            with pytest.raises(ValueError, match=r"\['qb'\] whole.*rest_shard_min_size"):
                inside(*args)
            continue
        got = layout.unshard(inside(*args))
        for path in params:
            np.testing.assert_allclose(params[path] + got[path], want[path], atol=2e-6)


@each_form
def test_the_maxima_pass_through_a_chain_with_muon(form: str) -> None:
    """The weights are those of Muon alone, times the factors."""
    case = CASES["fused, grouped and stacked"]
    params, grads = draw(case.shapes, 0), draw(case.shapes, 1)
    logits = draw_logits(case.logits, 2)
    layout, where = None, {"rules": case.rules}
    if form != "single":
        layout = mfsdp.plan(params, make_mesh(8, form == "explicit"), rules=case.rules)
        where = {"layout": layout}

    def one_step(*transforms: Any) -> dict[str, Any]:
        tx = optax.chain(*transforms)
        own, g = (t if layout is None else layout.shard(t) for t in (params, grads))
        update = jax.jit(lambda g, p: tx.update(g, tx.init(p), p, max_logits=logits)[0])
        new = update(g, own)
        new = new if layout is None else layout.unshard(new)
        return {k: params[k] + np.asarray(new[k]) for k in params}

    muon = mfsdp.muon(0.5, weight_decay=0.1, **where)
    alone = one_step(muon)
    got = one_step(muon, mfsdp.qk_clip(case.layers, TAU, **where))
    want = clip(alone, case.oracle, logits)
    assert max(np.abs(want[k] - alone[k]).max() for k in want) > 0.1
    for path in want:
        np.testing.assert_allclose(got[path], want[path], atol=2e-6, err_msg=path)


# ---- errors ------------------------------------------------------------------------------------


SMALL = {"q": (8, 16), "k": (8, 16), "fused": (8, 24), "stack": (3, 8, 16), "bias": (16,)}
SMALL_RULES = [rules.fused("fused", (8, 8, 8)), rules.stacked("stack"), rules.frozen("k")]

BAD_LAYERS: dict[str, tuple[dict[str, list[Any]], str]] = {
    "unknown path": ({"a": [W("q/kernel", 4)]}, r"'a' names 'q/kernel', which is no leaf.*'q'"),
    "frozen": ({"a": [W("k", 4)]}, "'k' of layer 'a' is frozen"),
    "block of a plain leaf": ({"a": [W("q", 4, block=1)]}, "'q' has 1 blocks, so block=1"),
    "block of a fused leaf": ({"a": [W("fused", 4, block=3)]}, "'fused' has 3 blocks, so block=3"),
    "negative block": ({"a": [W("fused", 4, block=-1)]}, "'fused' has 3 blocks, so block=-1"),
    "heads": ({"a": [W("q", 5)]}, "'q' has 16 outputs, which are not 5 equal heads"),
    "heads of a block": ({"a": [W("fused", 3)]}, "'fused' has 8 outputs, .* not 3 equal heads"),
    "heads of a bias": ({"a": [W("bias", 3)]}, "'bias' has 16 outputs, .* not 3 equal heads"),
    "no heads": ({"a": [W("q", 0)]}, r"'a' do not fit together.*\[0\] heads"),
    "parts": (
        {"a": [W("q", 4, ((3, 0.5), (2, 1.0)))]},
        r"\(\(3, 0.5\), \(2, 1.0\)\) of 'q' are 5 wide in all, but a head has 4",
    ),
    "twice in a layer": ({"a": [W("q", 4), W("q", 4)]}, "block 0 of 'q' is listed twice"),
    "twice in two layers": ({"a": [W("q", 4)], "b": [W("q", 2)]}, "block 0 of 'q' is listed twice"),
    "groups": ({"a": [W("q", 4), W("fused", 8), W("bias", 16), W("stack", 4)]}, "'a' do not fit"),
    "group sizes": ({"a": [W("q", 4), W("fused", 8, block=1), W("bias", 2)]}, None),
    "no multiple": ({"a": [W("bias", 4), W("fused", 6)]}, r"'a' do not fit together.*\[4, 6\]"),
    "empty layer": ({"b": []}, "'b' lists no parameter"),
}


@pytest.mark.parametrize("name", BAD_LAYERS)
@each_form
def test_layers_that_do_not_fit_the_parameters(form: str, name: str) -> None:
    layers, message = BAD_LAYERS[name]
    params = draw(SMALL, 0)
    logits = {k: np.ones(max(w.num_heads for w in v) if v else 1) for k, v in layers.items()}

    def run() -> None:
        tx = Clipper(form, params, layers, SMALL_RULES)
        jax.eval_shape(tx._update, tx.params, tx.params, logits)

    if message is None:
        run()  # the neighbour of the errors: every number of heads is a multiple of the smallest
        return
    with pytest.raises(ValueError, match=message):
        run()


@pytest.mark.parametrize(
    ("shape", "layers"),
    [
        ((8, 16), {"a": [W("x", 4)]}),  # a kernel: its outputs are not its flat entries
        ((3, 16), {"a": [W("x", 4)]}),  # biases of three layers, of which nothing tells
        ((12,), {"a": [W("stack", 4), W("x", 4)]}),  # one bias for the kernels of three layers
    ],
    ids=["kernel", "layers alone", "no layers"],
)
@each_form
def test_rest_leaves_whose_heads_are_unknown_are_refused(
    form: str, shape: tuple[int, ...], layers: dict[str, list[Any]]
) -> None:
    """They are read as ``[outputs]`` or ``[heads, head_dim]`` for each layer, and nothing else."""
    params = draw({"stack": (3, 8, 16), "x": shape}, 0)
    logits = {"a": np.ones((3 if len(layers["a"]) == 2 else 1, 4))}

    def run() -> None:
        tx = Clipper(form, params, layers, [rules.stacked("stack"), rules.rest("x")])
        jax.eval_shape(tx._update, tx.params, tx.params, logits)

    with pytest.raises(ValueError, match="'x'"):
        run()


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        ({"b": np.ones(4)}, r"dict over \['a'\], got \['b'\]"),
        ({"a": np.ones(4), "b": np.ones(4)}, r"dict over \['a'\], got \['a', 'b'\]"),
        ({}, r"dict over \['a'\], got \[\]"),
        (np.ones(4), r"dict over \['a'\], got .*ndarray"),
        ({"a": np.ones(3)}, r"\['a'\] has shape \(3,\), expected \(4,\) or \(1, 4\)"),
        ({"a": np.ones((4, 1))}, r"\['a'\] has shape \(4, 1\), expected \(4,\) or \(1, 4\)"),
        ({"a": np.float32(3)}, r"\['a'\] has shape \(\), expected \(4,\)"),
    ],
)
@each_form
def test_maxima_that_do_not_fit_the_layers(form: str, logits: Any, message: str) -> None:
    tx = Clipper(form, draw(SMALL, 0), {"a": [W("q", 4)]}, SMALL_RULES)
    with pytest.raises(ValueError, match=message):
        tx._update(tx.params, tx.params, logits)


@each_form
def test_stacked_layers_have_maxima_of_every_layer(form: str) -> None:
    tx = Clipper(form, draw(SMALL, 0), {"a": [W("stack", 4)]}, SMALL_RULES)
    with pytest.raises(ValueError, match=r"\['a'\] has shape \(4,\), expected \(3, 4\)"):
        tx._update(tx.params, tx.params, {"a": np.ones(4)})


@each_form
def test_missing_arguments_say_what_to_give(form: str) -> None:
    tx = Clipper(form, draw(SMALL, 0), {"block_0": [W("q", 4)]}, SMALL_RULES)
    with pytest.raises(TypeError, match=r"max_logits.*\['block_0'\].*aux_reduction"):
        tx.tx.update(tx.params, tx.state, tx.params)
    with pytest.raises(ValueError, match=r"tx\.update\(grads, state, params"):
        tx.tx.update(tx.params, tx.state, max_logits={"block_0": np.ones(4)})


@pytest.mark.parametrize("max_logit", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_thresholds_are_refused(max_logit: float) -> None:
    with pytest.raises(ValueError, match="max_logit="):
        mfsdp.qk_clip({"a": [W("q", 4)]}, max_logit)


def test_rules_and_foreign_trees_with_a_layout_are_refused() -> None:
    params = draw(SMALL, 0)
    layout = mfsdp.plan(params, make_mesh(8), rules=SMALL_RULES)
    layers = {"a": [W("q", 4)]}
    with pytest.raises(ValueError, match=r"rules=.*mfsdp\.plan"):
        mfsdp.qk_clip(layers, layout=layout, rules=SMALL_RULES)
    tx = mfsdp.qk_clip(layers, layout=layout)
    with pytest.raises(TypeError, match=r"layout\.shard\(params\)"):
        tx.update(params, tx.init(params), params, max_logits={"a": np.ones(4)})


# ---- training ----------------------------------------------------------------------------------


WIDTH, HEADS, KEYS = 16, 4, 2


def attention_params() -> dict[str, np.ndarray]:
    shapes = {"query": (WIDTH, WIDTH), "key": (WIDTH, 8), "value": (WIDTH, 8)}
    shapes |= {"out": (WIDTH, WIDTH), "head_bias": (WIDTH,)}
    return {k: np.float32(0.3) * x for k, x in draw(shapes, 0).items()}


def attention_loss(params: Any, batch: Any) -> Any:
    """Grouped-query attention that is paid for large logits; the largest of every head is aux."""
    x = batch["x"]
    q = (x @ params["query"]).reshape(*x.shape[:2], KEYS, HEADS // KEYS, -1)
    k, v = ((x @ params[n]).reshape(*x.shape[:2], KEYS, -1) for n in ("key", "value"))
    logits = jnp.einsum("bskgd,btkd->bkgst", q, k) / np.sqrt(q.shape[-1])
    mixed = jnp.einsum("bkgst,btkd->bskgd", jax.nn.softmax(logits), v).reshape(x.shape)
    y = mixed @ params["out"] + jnp.broadcast_to(params["head_bias"], x.shape)
    largest = jnp.abs(logits).max(axis=(0, 3, 4)).reshape(HEADS)
    aux = {"max_logits": {"attention": largest}, "mean": jnp.abs(logits).mean()}
    return jnp.mean((y - batch["y"]) ** 2) - aux["mean"], aux


def attention_batches(count: int) -> list[dict[str, np.ndarray]]:
    """Tokens of one length, to be passed on as they are."""
    x = np.random.default_rng(1).standard_normal((count, 16, 6, WIDTH)).astype(np.float32)
    x *= 4 / np.linalg.norm(x, axis=-1, keepdims=True)
    return [{"x": b, "y": b} for b in x]


ATTENTION = {"attention": [W("query", HEADS), W("key", KEYS)]}


def attention_optimizer(max_logit: float, layout: Any = None) -> Any:
    """MuonClip, with so large a rate that the logits grow from step to step."""
    muon = mfsdp.muon(0.1, layout=layout, rest=optax.sgd(0.1))
    return optax.chain(muon, mfsdp.qk_clip(ATTENTION, max_logit, layout=layout))


def train_on_owners(max_logit: float, steps: int) -> tuple[list[np.ndarray], Any]:
    """The largest logits seen in every step, and the last parameters; on 8 devices."""
    layout = mfsdp.plan(attention_params(), make_mesh(8))
    tx = attention_optimizer(max_logit, layout)
    step = mfsdp.train_step(
        attention_loss,
        tx,
        layout,
        has_aux=True,
        aux_reduction={"max_logits": "max", "mean": "mean"},
        extra_args=lambda aux: {"max_logits": aux["max_logits"]},
    )
    owned = layout.shard(attention_params())
    state, seen = layout.init(tx, owned), []
    for batch in attention_batches(steps):
        owned, state, metrics = step(owned, state, batch)
        seen.append(np.asarray(metrics["aux"]["max_logits"]["attention"]))
    return seen, layout.unshard(owned)


def train_alone(max_logit: float, steps: int) -> tuple[list[np.ndarray], Any]:
    tx = attention_optimizer(max_logit)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        grads, aux = jax.grad(attention_loss, has_aux=True)(params, batch)
        updates, state = tx.update(grads, state, params, max_logits=aux["max_logits"])
        return optax.apply_updates(params, updates), state, aux["max_logits"]["attention"]

    params = attention_params()
    state, seen = tx.init(params), []
    for batch in attention_batches(steps):
        params, state, largest = step(params, state, batch)
        seen.append(np.asarray(largest))
    return seen, params


def test_training_keeps_logits_near_the_threshold() -> None:
    """The maxima of one batch bound those of the next up to one step and the change of batch."""
    steps, margin = 20, 1.75
    clipped, params = train_on_owners(TAU, steps)
    free, _ = train_on_owners(1e6, steps)
    alone, want = train_alone(TAU, steps)
    np.testing.assert_array_equal(clipped[0], free[0])
    assert TAU < max(s.max() for s in clipped) < margin * TAU
    assert min(s.max() for s in free[-5:]) > margin * TAU
    np.testing.assert_allclose(clipped, alone, rtol=1e-3)
    for path in want:
        np.testing.assert_allclose(params[path], want[path], atol=1e-3, err_msg=path)
