"""Tiny models in plain jax: parameter trees, losses and batches that several tests share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

from matrixfsdp_jax.layout import rules

VOCABULARY = 64
SEQUENCE = 8


def tiny_params(
    num_layers: int = 3, width: int = 32, seed: int = 0, bias: bool = True
) -> dict[str, Any]:
    """A float32 numpy tree: 5 matrices per block (qkv counts for 3), the rest is elementwise.

    With ``width=32`` all dims are multiples of 32, where updates are bit-equal on every N.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape: int, std: float) -> np.ndarray:
        return (std * rng.standard_normal(shape)).astype(np.float32)

    params: dict[str, Any] = {"embed": {"embedding": normal(VOCABULARY, width, std=0.1)}}
    for i in range(num_layers):
        qkv = {"kernel": normal(width, 3 * width, std=width**-0.5)}
        if bias:
            qkv["bias"] = np.zeros(3 * width, np.float32)
        params[f"block_{i}"] = {
            "qkv": qkv,
            "up": {"kernel": normal(width, 4 * width, std=width**-0.5)},
            "down": {"kernel": normal(4 * width, width, std=(4 * width) ** -0.5)},
            "norm": {"scale": np.ones(width, np.float32)},
        }
    params["lm_head"] = {"kernel": normal(width, VOCABULARY, std=0.1)}
    return params


def tiny_logits(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Logits ``[batch, sequence, vocabulary]`` of a gated residual network, token by token."""
    x = jnp.asarray(params["embed"]["embedding"])[tokens]
    for i in range(sum(name.startswith("block_") for name in params)):
        block = params[f"block_{i}"]
        h = x * jnp.broadcast_to(block["norm"]["scale"], x.shape) @ block["qkv"]["kernel"]
        if "bias" in block["qkv"]:
            h = h + jnp.broadcast_to(block["qkv"]["bias"], h.shape)
        q, k, v = jnp.split(h, 3, axis=-1)
        x = x + 0.1 * q * jnp.tanh(k) + v
        x = x + jax.nn.gelu(x @ block["up"]["kernel"]) @ block["down"]["kernel"]
    return x @ params["lm_head"]["kernel"]


def tiny_loss(params: dict[str, Any], batch: dict[str, Any]) -> jax.Array:
    """Mean cross-entropy of the next token, a float32 scalar."""
    logits = tiny_logits(params, batch["x"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def tiny_batches(count: int, size: int = 24, seed: int = 1) -> list[dict[str, np.ndarray]]:
    """Batches ``{"x", "y"}`` of int32 ``[size, sequence]``; 24 divides by 1, 2, 3, 4 and 8."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCABULARY, (count, size, SEQUENCE), dtype=np.int32)
    return [{"x": x, "y": (7 * x + 3) % VOCABULARY} for x in tokens]


def TINY_RULES(width: int = 32) -> list[Any]:
    """The fused qkv kernel is read as three square matrices."""
    return [rules.fused("*qkv/kernel", (width, width, width))]


def make_mesh(n: int, explicit: bool = True) -> Mesh:
    """The first ``n`` devices on one axis, ``"fsdp"``."""
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh((n,), ("fsdp",), devices=jax.devices()[:n], axis_types=(kind,))
