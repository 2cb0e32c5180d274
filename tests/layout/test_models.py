import json

import pytest

from matrixfsdp_jax.layout.models import MODELS, model, read_shapes
from matrixfsdp_jax.layout.rules import default_rules, route, stacked
from matrixfsdp_jax.layout.spec import Leaf

# (parameters, matrices). Parameters as published with the weights: GPT-2's without the buffers of
# its masks, DeepSeek-V3's without the multi-token prediction module.
PUBLISHED = {
    "gpt2-small": (124_439_808, 12 * 6),
    "gpt2-xl": (1_557_611_200, 48 * 6),
    "llama3-8b": (8_030_261_248, 32 * 7),
    "llama3-70b": (70_553_706_496, 80 * 7),
    "mixtral-8x7b": (46_702_792_704, 32 * (4 + 1 + 3 * 8)),
    "deepseek-v3-like": (671_026_419_200, 61 * 5 + 3 * 3 + 58 * (1 + 3 + 3 * 256)),
}


def routes(name):
    found = model(name)
    return route({leaf.path: leaf for leaf in found.leaves}, found.rules, optimizer="muon")


def count(leaf, view):
    return view.matrix_shape(leaf.shape)[0]


@pytest.mark.parametrize("name", MODELS)
def test_totals_are_the_published_ones(name):
    num_params, num_matrices = PUBLISHED[name]
    assert model(name).num_params == num_params
    matrices = [(leaf, r.view) for leaf, r in routes(name) if r.route == "matrix"]
    assert sum(count(*pair) for pair in matrices) == num_matrices


@pytest.mark.parametrize("name", MODELS)
def test_ends_norms_and_biases_go_to_rest(name):
    for leaf, decision in routes(name):
        words = ("embedding", "lm_head", "scale", "bias")
        expected = "rest" if any(word in leaf.path for word in words) else "matrix"
        assert decision.route == expected, leaf.path


def test_elements_of_matrices_of_the_llamas():
    for name, elements in (("llama3-8b", 6.98e9), ("llama3-70b", 68.5e9)):
        found = sum(leaf.size for leaf, r in routes(name) if r.route == "matrix")
        assert found == pytest.approx(elements, rel=1e-3)


def test_latent_attention_and_experts():
    shapes = {leaf.path: leaf.shape for leaf in model("deepseek-v3-like").leaves}
    assert shapes["blocks/0/mlp/down/kernel"] == (18432, 7168)
    assert shapes["blocks/3/experts/up/kernel"] == (256, 7168, 2048)
    assert shapes["blocks/60/attn/kv_b/kernel"] == (512, 128 * 256)


def test_dtype_of_a_model():
    assert {leaf.dtype for leaf in model("gpt2-small", "float32").leaves} == {"float32"}
    with pytest.raises(ValueError, match="'float31' is unknown; give one like"):
        model("gpt2-small", "float31")
    with pytest.raises(ValueError, match="unknown model 'gpt5'; known are gpt2-small, "):
        model("gpt5")


def test_shapes_from_a_file(tmp_path):
    file = tmp_path / "mine.json"
    text = {"b/0/up": [2, 8, 4], "b/0/norm/scale": {"shape": [8], "dtype": "float32"}, "t": []}
    file.write_text(json.dumps(text))
    rules = default_rules(stacked("b/*/up"))
    found = read_shapes(file, "float16", rules)
    assert found.name == "mine"
    assert found.rules is rules
    assert found.leaves == (
        Leaf("b/0/up", (2, 8, 4), "float16"),
        Leaf("b/0/norm/scale", (8,), "float32"),
        Leaf("t", (), "float16"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON file"),
        ("[]", r'must hold an object \{"path": \[dims\], ...\} .*, got \[\]'),
        ("{}", "a leaf at least, got {}"),
        ('{"w": 3}', r"leaf 'w' must be a list of dims such as .* got 3"),
        ('{"w": [3, -1]}', r"got \[3, -1\]"),
        ('{"w": [true, 4]}', r"got \[true, 4\]"),
        ('{"w": [2.0, 4]}', r"got \[2.0, 4\]"),
        ('{"w": {"shape": "8x4"}}', 'got "8x4"'),
        ('{"w": {"dims": [8, 4]}}', r"must have 'shape' and may have 'dtype', got \['dims'\]"),
        ('{"w": {"shape": [8], "dtype": "fp8"}}', "leaf 'w': dtype 'fp8' is unknown"),
        ('{"w": {"shape": [8], "dtype": 4}}', "dtype 4 is unknown"),
    ],
)
def test_what_a_file_must_not_hold(tmp_path, text, message):
    file = tmp_path / "shapes.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_shapes(file)
