"""Routing: which leaf is a matrix, how it is read, and what every wrong decision is told."""

import dataclasses
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from matrixfsdp_jax.layout import rules as R
from matrixfsdp_jax.layout.rules import Rule, Rules, default_rules, route
from matrixfsdp_jax.layout.spec import Leaf, LeafRoute, MatrixView


def sds(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def decide(path, shape, *rules, dtype="float32"):
    return default_rules(*rules)(Leaf(path, shape, dtype))


def routes(tree, rules=None, **kwargs):
    return {leaf.path: decision.route for leaf, decision in route(tree, rules, **kwargs)}


def views(tree, rules=None):
    return {leaf.path: decision.view for leaf, decision in route(tree, rules)}


def read(x, view):
    """A leaf as its matrices ``[batch, rows, cols]``."""
    return x.transpose(view.permutation).reshape(view.matrix_shape(x.shape))


# ---- defaults: what is told by dtype, shape and name ----


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((4, 4), "int32", "int32: no gradient"),
        ((4, 4), "bool", "bool: no gradient"),
        ((2, 3, 4), "uint8", "uint8: no gradient"),
        ((0, 4), "float32", "zero-size"),
        ((2, 0, 4), "float32", "zero-size"),
        ((), "float32", "rank 0"),
        ((8,), "bfloat16", "rank 1"),
    ],
)
def test_default_by_dtype_and_shape_is_rest(shape, dtype, reason):
    assert decide("w", shape, dtype=dtype) == LeafRoute("rest", reason)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        # norms, scales and biases, plain and scan-stacked [L, d]; attention biases [heads, dim]
        ("blocks/LayerNorm_0/scale", "a scale"),
        ("blocks/norm1/weight", "a norm"),
        ("blocks/ln_1/weight", "a norm"),
        ("blocks/bn/mean", "a norm"),
        ("blocks/attn_norm", "a norm"),
        ("norms/0", "a norm"),
        ("model.layers.input_layernorm.weight", "a norm"),
        ("blocks/ls1/gamma", "a scale"),
        ("blocks/mlp/bias", "a bias"),
        ("attn/query/bias", "a bias"),
        ("blocks/mlp/b", "a bias"),
        ("blocks/b1", "a bias"),
        ("attn/relative_position_bias_table", "a bias"),
        # embeddings
        ("Embed_0/embedding", "an embedding"),
        ("embed/embedding", "an embedding"),
        ("tok_emb", "an embedding"),
        ("wte", "an embedding"),
        ("transformer.wpe.weight", "an embedding"),
        ("pos_embedding", "an embedding"),
        ("PosEmbed_0/kernel", "an embedding"),
        ("patch_embed/proj/kernel", "an embedding"),
        ("token_embedder/embedding", "an embedding"),
        # output heads
        ("lm_head/kernel", "an output head"),
        ("LMHead_0/Dense_0/kernel", "an output head"),
        ("head/kernel", "an output head"),
        ("AttentionNet_0/head/kernel", "an output head"),
        ("head/layers/0/kernel", "an output head"),
        ("output_head/kernel", "an output head"),
        ("value_head_kernel", "an output head"),
        ("unembed/kernel", "an output head"),
        ("decoder/logits_dense/kernel", "an output head"),
        ("classifier/kernel", "an output head"),
        ("score/kernel", "an output head"),
        ("params/output/kernel", "an output head"),
        ("output_proj/weight", "an output head"),
    ],
)
def test_default_by_name_is_rest(path, kind):
    assert decide(path, (12, 64)) == LeafRoute("rest", f"named like {kind}")


@pytest.mark.parametrize(
    "path",
    [
        "w",
        "Dense_0/kernel",
        "overhead/kernel",
        "header_proj/kernel",
        "heads/kernel",
        "head_dim_proj/kernel",
        "attn/head_0/kernel",
        "multi_head/kernel",
        "MultiHead_0/query/kernel",
        "DenseGeneral_0/kernel",
        "scoreboard/kernel",
        "attention/output/kernel",
        "bert/layer/0/output/dense/kernel",
        "normalizer/kernel",
        "norm1/linear/kernel",
        "PreNorm_0/Attention_0/to_q/kernel",
        "norm_mlp/kernel",
        "embedded_sum/kernel",
        "Embedder_0/blocks/0/attn/kernel",
        "Classifier_0/encoder/blocks/0/mlp/kernel",
        "lora/lora_b",
        "ssm/B",
        "biased_proj/kernel",
        "upscale/kernel",
    ],
)
def test_default_does_not_take_parts_of_words_for_names(path):
    assert decide(path, (12, 64)) == LeafRoute("matrix", "rank 2", MatrixView())


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("Conv_0/kernel", (3, 3, 1, 32)),
        ("depthwise/kernel", (4, 1, 32)),
        ("conv1d_w", (5, 1, 8)),
    ],
)
def test_default_depthwise_is_rest(path, shape):
    decision = decide(path, shape)
    assert decision.route == "rest"
    assert "depthwise" in decision.reason


def test_default_single_channel_without_conv_in_its_name_is_not_guessed():
    with pytest.raises(ValueError, match=r"'mixer/kernel' \(shape \(4, 1, 32\)"):
        decide("mixer/kernel", (4, 1, 32))


# ---- rules: how a leaf is read ----

READINGS = [
    # rule, shape, expected matrices by plain numpy
    (R.matrix("w"), (3, 4), lambda x: x[None]),
    (R.matrix("w", rows=(1,), cols=(0,)), (3, 4), lambda x: x.T[None]),
    (R.matrix("w", rows=(1,)), (3, 4), lambda x: x.T[None]),
    (R.matrix("w", cols=(0,)), (3, 4), lambda x: x.T[None]),
    (R.matrix("w", batch=(1,)), (3, 2, 4), lambda x: np.moveaxis(x, 1, 0)),
    (R.matrix("w", rows=(-2,), cols=(-1,), batch=(0,)), (2, 3, 4), lambda x: x),
    (
        R.matrix("w", rows=(1, 2, 3), cols=(4,), batch=(0,)),
        (2, 3, 3, 4, 5),
        lambda x: x.reshape(2, 36, 5),
    ),
    (R.stacked("w"), (2, 3, 4), lambda x: x),
    (R.stacked("w"), (2, 5, 3, 4), lambda x: x.reshape(10, 3, 4)),
    (R.conv("w"), (3, 3, 4, 8), lambda x: x.reshape(1, 36, 8)),
    (R.conv("w"), (5, 4, 8), lambda x: x.reshape(1, 20, 8)),
    (R.attention_in("w"), (8, 2, 4), lambda x: x.reshape(1, 8, 8)),
    (R.attention_in("w", batch=1), (3, 8, 2, 4), lambda x: x.reshape(3, 8, 8)),
    (R.attention_out("w"), (2, 4, 6), lambda x: x.reshape(1, 8, 6)),
    (R.attention_out("w", batch=2), (3, 5, 2, 4, 6), lambda x: x.reshape(15, 8, 6)),
    (R.fused("w", (4, 2, 2)), (3, 8), lambda x: x[None]),
    (R.fused("w", (4, 2, 2), split_side="rows", out="rows"), (8, 3), lambda x: x[None]),
    (R.fused("w", (6, 2), batch=(0,)), (5, 3, 8), lambda x: x),
]


@pytest.mark.parametrize(
    ("rule", "shape", "expected"), READINGS, ids=lambda v: v.name if isinstance(v, Rule) else None
)
def test_rule_reads_the_leaf_as_numpy_would(rule, shape, expected):
    x = np.arange(np.prod(shape)).reshape(shape).astype(np.float32)
    ((leaf, decision),) = route({"w": x}, [rule])
    assert leaf == Leaf("w", shape, "float32")
    assert decision.route == "matrix"
    assert rule.name in decision.reason
    np.testing.assert_array_equal(read(x, decision.view), expected(x))


def test_fused_blocks_equal_separate_leaves():
    q, k, v = (np.full((3, n), n, np.float32) for n in (4, 2, 1))
    params = {"qkv": np.concatenate([q, k, v], axis=1)}
    view = views(params, [R.fused("qkv", (4, 2, 1))])["qkv"]
    assert (view.splits, view.split_side, view.out_side) == ((4, 2, 1), "cols", "cols")
    blocks = np.split(read(params["qkv"], view)[0], np.cumsum(view.splits)[:-1], axis=1)
    for block, separate in zip(blocks, (q, k, v), strict=True):
        np.testing.assert_array_equal(block, separate)


def test_out_side_is_kept():
    want = MatrixView((0,), (1,), (), "rows", (2, 6), "rows")
    options = {"out": "rows", "split_side": "rows"}
    assert decide("w", (8, 4), R.matrix("w", split=(2, 6), **options)).view == want
    assert decide("w", (8, 4), R.fused("w", (2, 6), **options)).view == want


def test_conv_rule_sends_depthwise_to_rest():
    decision = decide("c/kernel", (3, 3, 1, 8), R.conv("c/*"))
    assert decision == LeafRoute(
        "rest", "rule conv('c/*'): depthwise, one input channel per filter"
    )


def test_rest_and_frozen_rules_take_any_leaf():
    tree = {"base": {"w": sds(4, 4), "i": sds(3, 3, dtype="int32")}, "conv": sds(3, 3, 2, 4)}
    got = route(tree, [R.frozen("base/*"), R.rest("conv")])
    assert [(d.route, d.reason) for _, d in got] == [
        ("frozen", "rule frozen('base/*')"),
        ("frozen", "rule frozen('base/*')"),
        ("rest", "rule rest('conv')"),
    ]


def test_first_matching_rule_wins_and_comes_before_the_defaults():
    tree = {"a": {"head": sds(4, 8)}, "b": {"head": sds(4, 8)}, "w": sds(4, 8)}
    got = routes(tree, [R.frozen("a/*"), R.matrix("*/head")])
    assert got == {"a/head": "frozen", "b/head": "matrix", "w": "matrix"}


def test_pattern_is_a_case_sensitive_glob_over_the_whole_path():
    leaf = Leaf("blocks/0/mlp/kernel", (4, 4), "float32")
    assert R.rest("blocks/*/kernel").matches(leaf)  # "*" crosses "/"
    assert R.rest("blocks/?/mlp/[jk]ernel").matches(leaf)
    assert not R.rest("Blocks/*").matches(leaf)
    assert not R.rest("blocks/0").matches(leaf)
    assert not R.rest("kernel").matches(leaf)


def test_predicate_rule():
    def is_wide(leaf):
        return leaf.shape[-1] > 16

    rule = R.rest(is_wide)
    assert rule.name == "rest(is_wide)"
    assert routes({"a": sds(4, 32), "b": {"w": sds(4, 8)}}, [rule]) == {
        "a": "rest",
        "b/w": "matrix",
    }


def test_own_rule_may_compute_its_decision():
    def by_width(leaf):
        return LeafRoute("rest", "wide") if leaf.shape[1] > 8 else LeafRoute("frozen", "narrow")

    got = route({"a": sds(2, 16), "c": sds(2, 4)}, [Rule("*", by_width)])
    assert [d.reason for _, d in got] == ["wide", "narrow"]


def test_rules_are_frozen_hashable_data():
    rules = default_rules(R.rest("a"), R.frozen("b"))
    assert rules == default_rules(R.rest("a"), R.frozen("b"))
    assert hash(rules) == hash(default_rules(R.rest("a"), R.frozen("b")))
    with pytest.raises(dataclasses.FrozenInstanceError):
        rules.rules = ()


# ---- what may be given as rules ----


def test_no_rules_empty_rules_and_defaults_are_one():
    tree = {"w": sds(8, 16), "b": sds(16)}
    want = route(tree)
    assert routes(tree) == {"w": "matrix", "b": "rest"}
    for rules in (
        None,
        (),
        [],
        Rules(),
        default_rules(),
        lambda leaf: None,
        {"w": "default"} | {"b": "default"},
    ):
        assert route(tree, rules) == want


def test_single_rule_and_sequence_are_one():
    tree = {"w": sds(2, 8, 16)}
    assert route(tree, R.stacked("w")) == route(tree, (R.stacked("w"),))


def test_function_of_the_leaf():
    view = MatrixView((1,), (0,))
    answers = {
        "a": "rest",
        "c": "frozen",
        "d": "matrix",
        "e": view,
        "f": LeafRoute("rest", "mine"),
        "g": None,
        "h": "default",
    }
    got = route({key: sds(4, 4) for key in answers}, lambda leaf: answers[leaf.path])
    assert [d.route for _, d in got] == [
        *("rest", "frozen", "matrix", "matrix", "rest", "matrix", "matrix")
    ]
    assert got[3][1].view == view
    assert got[4][1] == answers["f"]
    assert "function <lambda>" in got[0][1].reason


def test_given_tree():
    tree = {"a": [sds(4, 4), sds(2, 4, 4)], "c": sds(4, 4), "d": sds(4, 4), "e": sds(4, 4)}
    stack = MatrixView((1,), (2,), (0,))
    asked = {
        "a": ["matrix", stack],
        "c": "frozen",
        "d": LeafRoute("rest", "mine"),
        "e": "default",
    }
    got = {leaf.path: d for leaf, d in route(tree, asked)}
    assert [d.route for d in got.values()] == ["matrix", "matrix", "frozen", "rest", "matrix"]
    assert got["a/1"].view == stack
    assert got["d"].reason == "mine"


def test_none_for_all_is_the_defaults_but_none_at_a_leaf_skips_it():
    tree = {"w": sds(8, 16), "v": sds(8, 16)}
    assert routes(tree, None) == {"v": "matrix", "w": "matrix"}
    got = {leaf.path: d for leaf, d in route(tree, {"w": None, "v": "default"})}
    assert got["v"].route == "matrix"
    assert got["w"] == LeafRoute("rest", "given tree: None skips the leaf")


def test_given_tree_may_hold_none_where_the_leaf_is_absent():
    tree = {"w": sds(8, 16), "bias": None, "m": optax.MaskedNode()}
    want = {"w": "matrix"}
    assert routes(tree, {"w": "matrix", "bias": None, "m": None}) == want
    assert routes(tree, {"w": "matrix", "bias": "default", "m": optax.MaskedNode()}) == want


def test_given_tree_of_an_nnx_state_and_of_a_callable_module():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    want = {"bias": "rest", "kernel": "frozen"}
    pick = lambda x: "frozen" if x.ndim == 2 else "rest"  # noqa: E731
    assert routes(state, jax.tree.map(pick, state)) == want
    # The module has a __call__, and is still a tree of decisions, not a function of a leaf.
    assert routes(model, jax.tree.map(pick, model)) == want


def test_bare_array_is_a_tree():
    assert [d.route for _, d in route(jnp.ones((4, 8)), "frozen")] == ["frozen"]
    assert [d.route for _, d in route(jnp.ones((4, 8)))] == ["matrix"]


# ---- trees ----


def test_leaves_come_in_the_trees_own_order():
    tree = {"z": [sds(2), sds(3)], "a": {"y": sds(4), "x": sds(5)}}
    assert [leaf.shape for leaf, _ in route(tree)] == [x.shape for x in jax.tree.leaves(tree)]
    assert [leaf.path for leaf, _ in route(tree)] == ["a/x", "a/y", "z/0", "z/1"]


class Net(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(32, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(8, 8, use_bias=False, rngs=rngs) for _ in range(2)])
        self.lm_head = nnx.Linear(8, 16, rngs=rngs)


@pytest.mark.parametrize(
    "as_tree", [lambda m: m, nnx.state, nnx.to_pure_dict], ids=["module", "state", "pure dict"]
)
def test_nnx_model_keeps_embedding_and_head_off_the_matrix_route(as_tree):
    model = Net(nnx.Rngs(0))
    tree = as_tree(nnx.state(model)) if as_tree is nnx.to_pure_dict else as_tree(model)
    assert routes(tree) == {
        "embed/embedding": "rest",
        "norm/scale": "rest",
        "norm/bias": "rest",
        "blocks/0/kernel": "matrix",
        "blocks/1/kernel": "matrix",
        "lm_head/kernel": "rest",
        "lm_head/bias": "rest",
    }


ATTENTION = [
    *(R.attention_in(f"*{part}/kernel") for part in ("query", "key", "value")),
    R.attention_out("*out/kernel"),
]


def test_nnx_attention():
    shapes = nnx.eval_shape(lambda: nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0)))
    tree = nnx.state(shapes, nnx.Param)
    got = {leaf.path: (leaf, d) for leaf, d in route(tree, ATTENTION)}
    for part in ("query", "key", "value"):
        leaf, decision = got[f"{part}/kernel"]
        assert decision.view.matrix_shape(leaf.shape) == (1, 8, 8)
        assert decision.view.row_dims == (0,)
        assert got[f"{part}/bias"][1] == LeafRoute("rest", "named like a bias")  # [heads, head_dim]
    assert got["out/kernel"][1].view == MatrixView((0, 1), (2,))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        init = nn.initializers.lecun_normal()
        embed = nn.Embed(32, 8)
        x = nn.LayerNorm()(embed(tokens))
        x = nn.MultiHeadDotProductAttention(2)(x, x)
        x = nn.Dense(8, kernel_init=nn.with_partitioning(init, (None, "fsdp")))(x)
        x = nn.Dense(8, kernel_init=nn.with_logical_partitioning(init, ("embed", "mlp")))(x)
        return embed.attend(x)


def linen_params():
    tokens = jnp.zeros((1, 3), jnp.int32)
    return jax.eval_shape(lambda: LinenNet().init(jax.random.key(0), tokens))["params"]


def test_linen_params_boxed_and_plain_route_alike():
    boxed = linen_params()
    assert isinstance(boxed["Dense_0"]["kernel"], nn.Partitioned)
    got = routes(boxed, ATTENTION)
    assert got == routes(nn.unbox(boxed), ATTENTION)
    # attend() ties by use: one leaf, on the elementwise route.
    assert got["Embed_0/embedding"] == "rest"
    assert {path for path, r in got.items() if r == "matrix"} == {
        "Dense_0/kernel",
        "Dense_1/kernel",
        *(f"MultiHeadDotProductAttention_0/{p}/kernel" for p in ("query", "key", "value", "out")),
    }


def test_boxed_params_take_a_plain_given_tree():
    boxed = linen_params()
    asked = jax.tree.map(lambda x: "rest", nn.unbox(boxed))
    asked["Dense_0"]["kernel"] = "matrix"
    got = routes(boxed, asked)
    assert [path for path, r in got.items() if r == "matrix"] == ["Dense_0/kernel"]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(8)(nn.LayerNorm()(x)), None


def test_scan_stacked_linen_layers():
    scan = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    init = lambda: scan().init(jax.random.key(0), jnp.zeros((2, 8)), None)  # noqa: E731
    params = jax.eval_shape(init)["params"]
    got = {leaf.path: (leaf, d) for leaf, d in route(params, [R.stacked("*/kernel")])}
    leaf, decision = got["Dense_0/kernel"]
    assert decision.view.matrix_shape(leaf.shape) == (3, 8, 8)
    assert got["Dense_0/bias"][0].shape == (3, 8)
    assert got["Dense_0/bias"][1].route == "rest"
    assert got["LayerNorm_0/scale"][1].route == "rest"


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weight: object
    bias: object = None


def test_dataclass_tree_with_none_bias():
    tree = {"up": Layer(sds(4, 8)), "down": Layer(sds(8, 4), sds(4))}
    want = {"up/weight": "matrix", "down/weight": "matrix", "down/bias": "rest"}
    assert routes(tree) == want
    asked = {"up": Layer("matrix"), "down": Layer("frozen", None)}
    assert routes(tree, asked) == want | {"down/weight": "frozen"}


def test_none_and_masked_nodes_are_no_leaves():
    tree = {"w": sds(4, 4), "n": None, "m": optax.MaskedNode(), "l": [None, sds(4, 4)]}
    assert routes(tree) == {"w": "matrix", "l/1": "matrix"}


def test_nnx_module_with_one_vector_and_all_masked_tree():
    class Vector(nnx.Module):
        def __init__(self):
            self.p = nnx.Param(jnp.ones((1,)))

    state = nnx.state(Vector())
    assert routes(state) == {"p": "rest"}
    masked = jax.tree.map(lambda x: optax.MaskedNode(), state)
    assert route(masked, [R.stacked("blocks/*")], allow_unused=True) == []


def test_masked_trees_may_leave_rules_and_routes_unused():
    tree = {"w": sds(4, 4), "blocks": optax.MaskedNode()}
    assert routes(tree, [R.stacked("blocks/*")], allow_unused=True) == {"w": "matrix"}
    asked = {"w": "frozen", "blocks": {"k": "matrix"}}
    assert routes(tree, asked, allow_unused=True) == {"w": "frozen"}


def test_python_scalars_are_leaves():
    assert routes({"temperature": 1.0, "steps": 3}) == {"temperature": "rest", "steps": "rest"}


# ---- a leaf of rank above 2 without a rule ----


def pasteable(message):
    """The rules that an error offers, with the reading that it promises for each."""
    lines = re.findall(r"^  (\w+\(.*\))  # (.*)$", message, re.MULTILINE)
    return [(eval(text, vars(R)), promise) for text, promise in lines]


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((3, 4, 5), ["conv", "stacked", "attention_in", "attention_out", "rest"]),
        ((2, 3, 4, 5), ["conv", "matrix", "stacked", "attention_in", "attention_out", "rest"]),
        ((2, 3, 3, 4, 5), ["conv", "matrix", "stacked", "attention_in", "attention_out", "rest"]),
        ((3, 1, 5), ["stacked", "attention_in", "attention_out", "rest"]),
    ],
)
@pytest.mark.parametrize("key", ["kernel", "odd[0]*'"])
def test_unruled_leaf_offers_rules_that_work_when_pasted(shape, names, key):
    tree = {"block": {key: sds(*shape)}}
    with pytest.raises(R.NoRuleError) as error:
        route(tree)
    message = str(error.value)
    assert f"leaf {'block/' + key!r} (shape {shape}, float32)" in message
    offers = pasteable(message)
    assert [rule.name.split("(")[0] for rule, _ in offers] == names
    for rule, promise in offers:
        ((leaf, decision),) = route(tree, [rule])
        if decision.route == "matrix":
            batch, rows, cols = decision.view.matrix_shape(leaf.shape)
            assert promise in (
                f"{batch} matrix of {rows} x {cols}",
                f"{batch} matrices of {rows} x {cols}",
            )
        else:
            assert promise == "not a matrix"


def test_all_unruled_leaves_are_named_at_once():
    tree = {"a": sds(2, 3, 4), "c": sds(5, 2, 3, 4), "w": sds(3, 4)}
    with pytest.raises(ValueError, match="Without a rule, too") as error:
        route(tree, [R.rest("w")])
    assert [leaf.path for leaf in error.value.leaves] == ["a", "c"]
    assert "leaf 'c' (shape (5, 2, 3, 4), float32)" in str(error.value)


# ---- errors: each names the leaf and what to do ----

CASES = [
    # tree, rules, error, the leaf or path named, the remedy
    (
        {"a/w": (4, 4)},
        [R.matrix("a/w", rows=(0,), cols=(0,))],
        "'a/w'",
        r"each of the dims \(0, 1\)",
    ),
    ({"w": (4, 4)}, [R.matrix("w", rows=(0,), cols=(2,))], "'w'", r"each of the dims \(0, 1\)"),
    ({"w": (4, 4)}, [R.matrix("w", rows=(0, 1), cols=())], "'w'", "at least one dim each"),
    ({"w": (2, 4, 4)}, [R.matrix("w")], "'w'", r"rows= and cols= .* rest\('w'\)"),
    ({"w": (4,)}, [R.matrix("w")], "'w'", "rows= and cols="),
    ({"w": (2, 4, 4)}, [R.matrix("w", rows=(1,))], "'w'", "rows= and cols="),
    ({"w": (4, 4)}, [R.stacked("w")], "'w'", r"rank 3 or more.*narrow its pattern"),
    ({"w": (4, 4)}, [R.conv("w")], "'w'", r"rank 3 or more.*rest\('w'\)"),
    ({"w": (4, 4)}, [R.attention_in("w")], "'w'", "leaves of rank 3; narrow"),
    ({"w": (4, 4, 4)}, [R.attention_out("w", batch=1)], "'w'", "leaves of rank 4; narrow"),
    ({"w": (64, 80)}, [R.fused("w", (32, 8, 8))], "'w'", r"sum 48.*add up to the 80 cols"),
    ({"w": (80, 64)}, [R.fused("w", (80, 0), split_side="rows")], "'w'", "positive sizes"),
    ({"w": (4, 4)}, [R.matrix("w", out="up")], "'w'", "use 'rows' or 'cols'"),
    ({"w": (4, 4)}, [R.fused("w", (4,), split_side="up")], "'w'", "use 'rows' or 'cols'"),
    ({"w": (0, 4)}, [R.matrix("w")], "'w'", r"no element; route it to rest.*rest\('w'\)"),
    ({"w": (4, 4)}, [Rule("w", LeafRoute("muon", ""))], "'w'", "'muon'; use one of 'matrix'"),
    ({"w": (4, 4)}, [Rule("w", LeafRoute("matrix", ""))], "'w'", r"give one, say\n  MatrixView\("),
    ({"w": (4, 4)}, [Rule("w", LeafRoute("rest", "", MatrixView()))], "'w'", "leave the view out"),
    ({"w": (4, 4)}, lambda leaf: "muon", "'w'", "'muon'; use one of 'matrix'"),
    ({"w": (4, 4, 4)}, lambda leaf: "matrix", "'w'", r"without a view; give one, say\n  Matrix"),
    ({"w": (4,)}, lambda leaf: "matrix", "'w'", "route it to rest"),
    ({"w": (4, 4)}, lambda leaf: MatrixView(batch_dims=(2,)), "'w'", "each of the dims"),
    ({"w": (4, 4)}, lambda leaf: MatrixView([0], [1]), "'w'", "must be tuples"),
    ({"w": (4, 4)}, {"w": "Rest"}, "'w'", "'Rest'; use one of 'matrix'"),
    ({"a": {"w": (4, 4)}}, {"a": {"v": "rest"}}, "'a/w'", "no leaf 'a/v'; give one of 'matrix'"),
    ({"w": (4, 4)}, {}, "no route for 'w'", "at each leaf's path"),
    ({"w": (4, 4)}, {"w": "rest", "u": "rest"}, "a route for no leaf 'u'", "or use path rules"),
    ({"w": (4, 4), "n": None}, {"w": "rest", "n": "rest"}, "no leaf 'n'", "or use path rules"),
    ({"w": (4, 4)}, "matrix", "no route for 'w'", "at each leaf's path"),
    ({}, None, "no leaf to route", "give the model's parameters"),
    ({"n": None, "m": optax.MaskedNode()}, None, "no leaf to route", "give the model's parameters"),
    ({"blocks/w": (4, 4)}, [R.stacked("blok/w")], r"stacked\('blok/w'\)", "nearest.*'blocks/w'"),
    ({"w": (4, 4)}, [R.rest("w"), R.rest("W")], r"rule rest\('W'\) matches no", "Correct or drop"),
    ({"w": (4, 4)}, [R.rest(lambda leaf: False)], r"rest\(<lambda>\)", "Correct or drop the rule"),
]


@pytest.mark.parametrize(("shapes", "rules", "named", "remedy"), CASES)
def test_wrong_decision_names_the_leaf_and_the_remedy(shapes, rules, named, remedy):
    tree = jax.tree.map(lambda s: sds(*s), shapes, is_leaf=_is_shape)
    with pytest.raises(ValueError, match=f"(?s){named}.*{remedy}"):
        route(tree, rules)


def _is_shape(x):
    return isinstance(x, tuple) and len(x) > 0


@pytest.mark.parametrize(
    "rules", [[R.matrix("idx")], lambda leaf: "matrix", {"w": "matrix", "idx": "matrix"}]
)
def test_integer_leaf_is_rest_by_default_and_refused_as_a_matrix(rules):
    tree = {"w": sds(4, 4), "idx": sds(4, 4, dtype="int32")}
    assert routes(tree) == {"w": "matrix", "idx": "rest"}
    with pytest.raises(ValueError, match=r"leaf 'idx'.*int32 has no gradient; route it to rest"):
        route(tree, rules)


@pytest.mark.parametrize("value", [True, 3, ("matrix",), np.ones(3)], ids=str)
def test_decision_of_a_wrong_type(value):
    with pytest.raises(TypeError, match=r"leaf 'w' .*expected a LeafRoute, a MatrixView, a T"):
        route({"w": sds(4, 4)}, lambda leaf: value)
    with pytest.raises(TypeError, match=r"leaf 'w' .*rule Rule\('w'\) decided"):
        route({"w": sds(4, 4)}, [Rule("w", lambda leaf: value)])


def test_leaf_that_is_no_array():
    with pytest.raises(TypeError, match=r"leaf 'f' is a str.*give arrays"):
        route({"f": "relu"})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: R.rest(3), "path pattern such as .* got 3"),
        (lambda: R.matrix("w", rows=0), r"rows must be a sequence of integers .* got 0"),
        (lambda: R.matrix("w", batch=1), r"batch must be a sequence of integers .* got 1"),
        (lambda: R.fused("w", 3), r"split must be a sequence of integers .* got 3"),
        (lambda: R.fused("w", (1.5, 2)), "split must be a sequence of integers"),
        (lambda: default_rules("blocks/*"), r"must be Rule objects .* got 'blocks/\*'"),
        (lambda: route({"w": sds(2, 2)}, [R.rest("w"), "rest"]), "must be Rule objects"),
    ],
)
def test_builders_refuse_wrong_types(build, message):
    with pytest.raises(TypeError, match=message):
        build()


@pytest.mark.parametrize("batch", [-1, (0,), 1.0])
def test_attention_batch_is_a_count(batch):
    with pytest.raises(ValueError, match="number of leading dims, 0 or more"):
        R.attention_in("w", batch=batch)


# ---- tied weights ----


@pytest.mark.parametrize("make", [np.ones, jnp.ones], ids=["numpy", "jax"])
def test_one_array_at_two_paths_is_refused(make):
    w = make((4, 8))
    tree = {"embed": w, "lm_head": {"kernel": w}, "other": make((4, 8))}
    with pytest.raises(ValueError, match=r"'embed' and 'lm_head/kernel'.*x @ embedding\.T.*attend"):
        route(tree)
    assert routes(tree | {"lm_head": {"kernel": w.copy()}})["lm_head/kernel"] == "rest"


def test_one_shape_or_scalar_at_two_paths_is_fine():
    shape = sds(4, 8)
    assert routes({"a": shape, "c": shape, "s": 1.0, "t": 1.0})["c"] == "matrix"


def test_nnx_param_referenced_twice():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(8, 8, rngs=rngs)
            self.out = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
            self.out.kernel = self.embed.embedding

    model = Tied(nnx.Rngs(0))
    with pytest.raises(ValueError, match="'embed/embedding' and 'out/kernel'"):
        route(model)
    assert routes(nnx.state(model)) == {"embed/embedding": "rest"}  # the state lists it once


# ---- properties ----

paths = st.lists(
    st.sampled_from(["kernel", "norm", "head", "Conv_0", "b", "0", "w", "embed", "x y", "é"]),
    min_size=1,
    max_size=5,
).map("/".join)
shapes = st.lists(st.integers(0, 3), max_size=5).map(tuple)
dtypes = st.sampled_from(["float32", "bfloat16", "int8", "bool", "complex64", "key<fry>"])


@given(paths, shapes, dtypes)
def test_defaults_decide_safely_or_name_the_leaf(path, shape, dtype):
    leaf = Leaf(path, shape, dtype)
    no_gradient = dtype in ("int8", "bool", "key<fry>")
    try:
        route_name = Rules()(leaf).route
    except R.NoRuleError:
        route_name = "undecided"
    if no_gradient or 0 in shape or len(shape) < 2:
        assert route_name == "rest"
    else:
        assert route_name in ("rest", "matrix" if len(shape) == 2 else "undecided")
