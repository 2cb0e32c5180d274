"""Parameter shapes of known models, and of any model from a file, for plans without a model.

Paths and kernels are those of flax: ``blocks/0/attn/q/kernel`` of shape ``[in, out]``. Experts of a
layer are one leaf ``[experts, in, out]``. Sizes are those of the published configurations.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matrixfsdp_jax.layout.rules import Rules, default_rules, stacked
from matrixfsdp_jax.layout.spec import Leaf

_Shapes = Iterator[tuple[str, tuple[int, ...]]]
_EXPERTS = "blocks/*/experts/*/kernel"
_DTYPE = re.compile(
    r"bool|bfloat16|float(16|32|64|8_\w+|4_\w+)|u?int(2|4|8|16|32|64)|complex(64|128)"
)


@dataclass(frozen=True)
class Model:
    """Leaves of a model, and the rules that say how they are read."""

    name: str
    leaves: tuple[Leaf, ...]
    rules: Rules

    @property
    def num_params(self) -> int:
        """Elements of all leaves."""
        return sum(leaf.size for leaf in self.leaves)


def model(name: str, dtype: str = "bfloat16") -> Model:
    """The shapes of a known model, all leaves of one dtype.

    Args:
      name: one of `MODELS`.
      dtype: of every parameter.

    Raises:
      ValueError: for an unknown model or dtype; it lists the known models.

    Examples:
      >>> model("gpt2-small").num_params
      124439808
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; known are {', '.join(MODELS)}")
    _check_dtype(dtype, "dtype")
    leaves = tuple(Leaf(path, shape, dtype) for path, shape in MODELS[name]())
    has_experts = any("/experts/" in leaf.path for leaf in leaves)
    return Model(name, leaves, default_rules(*([stacked(_EXPERTS)] if has_experts else [])))


def read_shapes(file: str | Path, dtype: str = "bfloat16", rules: Rules | None = None) -> Model:
    """The model that a JSON file describes: ``{path: [dims]}``.

    Args:
      file: an object from the ``"/"``-joined path of every leaf to its dims, or to
        ``{"shape": [dims], "dtype": "float32"}``.
      dtype: of the leaves that name none.
      rules: how leaves are read; default `rules.default_rules`.

    Raises:
      OSError: if the file cannot be read.
      ValueError: if it is no such object; the message names the entry and what is expected.
    """
    _check_dtype(dtype, "dtype")
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or no UTF-8
        raise ValueError(f"{file} is no JSON file: {error}") from error
    if not isinstance(found, dict) or not found:
        raise ValueError(
            f'{file} must hold an object {{"path": [dims], ...}} with a leaf at least, '
            f"got {_short(found)}"
        )
    leaves = tuple(_leaf(path, value, dtype, file) for path, value in found.items())
    return Model(Path(file).stem, leaves, default_rules() if rules is None else rules)


def _leaf(path: str, value: Any, dtype: str, file: str | Path) -> Leaf:
    where = f"{file}: leaf {path!r}"
    if isinstance(value, Mapping):
        unknown = sorted(set(value) - {"shape", "dtype"})
        if unknown or "shape" not in value:
            raise ValueError(f"{where} must have 'shape' and may have 'dtype', got {sorted(value)}")
        value, dtype = value["shape"], value.get("dtype", dtype)
        _check_dtype(dtype, f"{where}: dtype")
    if not isinstance(value, list) or not all(map(_is_size, value)):
        raise ValueError(
            f"{where} must be a list of dims such as [768, 3072] or "
            f'{{"shape": [768, 3072], "dtype": "float32"}}, got {_short(value)}'
        )
    return Leaf(path, tuple(value), dtype)


def _is_size(d: Any) -> bool:
    return isinstance(d, int) and not isinstance(d, bool) and d >= 0


def _check_dtype(dtype: Any, what: str) -> None:
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
        raise ValueError(f"{what} {dtype!r} is unknown; give one like 'bfloat16' or 'float32'")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _gpt2(layers: int, d: int) -> _Shapes:
    """GPT-2 (1.5B is "xl"): vocabulary 50257, context 1024, output head tied to the embedding.

    Query, key and value are three kernels here, one of three times the width there.
    """
    yield "wte/embedding", (50257, d)
    yield "wpe/embedding", (1024, d)
    norms = [f"blocks/{i}/ln_{k}" for i in range(layers) for k in (1, 2)]
    for norm in (*norms, "ln_f"):
        yield f"{norm}/scale", (d,)
        yield f"{norm}/bias", (d,)
    dense = [(f"attn/{name}", d, d) for name in ("q", "k", "v", "o")]
    dense += [("mlp/up", d, 4 * d), ("mlp/down", 4 * d, d)]
    for i in range(layers):
        for name, rows, cols in dense:
            yield f"blocks/{i}/{name}/kernel", (rows, cols)
            yield f"blocks/{i}/{name}/bias", (cols,)


def _ends(vocabulary: int, d: int) -> _Shapes:
    yield "embed/embedding", (vocabulary, d)
    yield "norm/scale", (d,)
    yield "lm_head/kernel", (d, vocabulary)


def _norms(i: int, d: int) -> _Shapes:
    yield f"blocks/{i}/attn_norm/scale", (d,)
    yield f"blocks/{i}/mlp_norm/scale", (d,)


def _grouped_attention(i: int, d: int, kv: int) -> _Shapes:
    for name, shape in {"q": (d, d), "k": (d, kv), "v": (d, kv), "o": (d, d)}.items():
        yield f"blocks/{i}/attn/{name}/kernel", shape


def _gated(module: str, d: int, hidden: int, experts: tuple[int, ...] = ()) -> _Shapes:
    for name, shape in {"gate": (d, hidden), "up": (d, hidden), "down": (hidden, d)}.items():
        yield f"{module}/{name}/kernel", (*experts, *shape)


def _llama3(layers: int, d: int, hidden: int) -> _Shapes:
    """Llama 3: vocabulary 128256, 8 key/value heads of 128."""
    yield from _ends(128256, d)
    for i in range(layers):
        yield from _norms(i, d)
        yield from _grouped_attention(i, d, 8 * 128)
        yield from _gated(f"blocks/{i}/mlp", d, hidden)


def _mixtral() -> _Shapes:
    """Mixtral 8x7B: vocabulary 32000, 32 layers of 8 experts."""
    d = 4096
    yield from _ends(32000, d)
    for i in range(32):
        yield from _norms(i, d)
        yield from _grouped_attention(i, d, 8 * 128)
        yield f"blocks/{i}/router/kernel", (d, 8)
        yield from _gated(f"blocks/{i}/experts", d, 14336, (8,))


def _deepseek_v3() -> _Shapes:
    """DeepSeek-V3 without its multi-token prediction module.

    All from the public config: hidden size 7168, 61 layers of which the first 3 are dense (18432),
    256 routed experts and one shared one of 2048, 128 heads; latent attention of ranks 1536
    (queries) and 512 (keys and values), head dims 128 + 64 (rotary) and 128 (values); vocabulary
    129280. Not from it: the names of leaves, and that the experts of a layer are one leaf.
    """
    d, heads = 7168, 128
    yield from _ends(129280, d)
    for i in range(61):
        yield from _norms(i, d)
        attention = {
            "q_a": (d, 1536),
            "q_b": (1536, heads * (128 + 64)),
            "kv_a": (d, 512 + 64),
            "kv_b": (512, heads * (128 + 128)),
            "o": (heads * 128, d),
        }
        for name, shape in attention.items():
            yield f"blocks/{i}/attn/{name}/kernel", shape
        yield f"blocks/{i}/attn/q_norm/scale", (1536,)
        yield f"blocks/{i}/attn/kv_norm/scale", (512,)
        if i < 3:
            yield from _gated(f"blocks/{i}/mlp", d, 18432)
            continue
        yield f"blocks/{i}/router/kernel", (d, 256)
        yield f"blocks/{i}/router/bias", (256,)
        yield from _gated(f"blocks/{i}/experts", d, 2048, (256,))
        yield from _gated(f"blocks/{i}/shared_expert", d, 2048)


MODELS: dict[str, Callable[[], _Shapes]] = {
    "gpt2-small": lambda: _gpt2(12, 768),
    "gpt2-xl": lambda: _gpt2(48, 1600),
    "llama3-8b": lambda: _llama3(32, 4096, 14336),
    "llama3-70b": lambda: _llama3(80, 8192, 28672),
    "mixtral-8x7b": _mixtral,
    "deepseek-v3-like": _deepseek_v3,
}
