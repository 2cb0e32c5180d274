"""What a leaf is by its path: biases, scales, norms, embeddings and output heads."""

import re

_BIAS_WORDS = {"bias", "biases"}
_SCALE_WORDS = {"scale", "scales", "gamma", "beta", "gain"}
_NORM_WORD = re.compile(r"(\w*norm|ln|bn|gn)s?")
_EMBEDDING_WORDS = {
    *("emb", "embs", "embed", "embeds", "embedder", "embedding", "embeddings"),
    *("posemb", "posembed", "wte", "wpe", "codebook"),
}
_HEAD_WORDS = {"unembed", "unembedding", "logits", "classifier", "readout"}
_LAYER_WORDS = {"kernel", "weight", "w", "dense", "linear", "layer", "proj", "projection"}


def kind_by_name(path: str) -> str | None:
    """What a leaf is by its path, if that is nothing for a matrix method.

    Whole words decide, never parts of words; numbers are left out, so that ``LayerNorm_0``,
    ``ln_1`` and ``norms/0`` read alike. A wrapper far above the leaf says nothing about it.
    """
    names = [part for part in re.split(r"[/.]", path) if _words(part)]
    parts = [_words(name) for name in names]
    if not parts:
        return None
    last = parts[-1]
    # "layer/b" is haiku's bias; "lora_b", a state-space model's "B" and a lone "b" are matrices.
    if _BIAS_WORDS & set(last) or (len(names) > 1 and re.fullmatch(r"b_?\d*", names[-1])):
        return "a bias"
    if last[-1] in _SCALE_WORDS:
        return "a scale"
    # No norm calls its parameter "kernel": that is a dense layer with "norm" in its name.
    owner = parts[-2:] if last[-1] != "kernel" else [last]
    if any(_NORM_WORD.fullmatch(word) for part in owner for word in part):
        return "a norm"
    if any(_EMBEDDING_WORDS & set(part) for part in parts[-3:]):
        return "an embedding"
    near = range(max(0, len(parts) - 3), len(parts))
    if any(_is_head(parts[i], parts[i - 1] if i else []) for i in near) or _is_output(parts):
        return "an output head"
    return None


def _is_head(part: list[str], parent: list[str]) -> bool:
    """``lm_head`` and ``value_head_proj``, but not ``multi_head``, ``heads``, ``attn/head_0``."""
    if _HEAD_WORDS & set(part) or part == ["score"]:
        return True
    while len(part) > 1 and part[-1] in _LAYER_WORDS:
        part = part[:-1]
    before = part[-2:-1] or parent[-1:]
    return part[-1] == "head" and not {"multi", "per", "attn", "attention"} & set(before)


def _is_output(parts: list[list[str]]) -> bool:
    """``output/weight`` at the top of the model; deeper down, ``output`` is any layer's."""
    top = parts[1:] if parts[0] in (["params"], ["model"]) else parts
    if len(top) != 2:
        return False
    return top[0][0] == "output" and set(top[0][1:]) <= _LAYER_WORDS


def _words(name: str) -> list[str]:
    """``"RMSNorm_0"`` -> ``["rms", "norm"]``."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return [word.lower() for word in re.split(r"[\W\d_]+", spaced) if word]
