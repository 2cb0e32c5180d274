"""A byte-level GPT in Flax nnx: pre-norm blocks, rotary positions, fused QKV, no biases.

Shape legend: ``B`` windows, ``T`` bytes of context, ``D`` width, ``H`` heads, ``K = D / H``.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import matrixfsdp_jax as mfsdp

NUM_BYTES = 256
zeros = nnx.initializers.zeros_init()


class Attention(nnx.Module):
    """Causal self-attention; queries, keys and values come from one fused kernel ``[D, 3D]``."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.heads = heads
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, kernel_init=zeros, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        parts = jnp.split(self.qkv(x), 3, axis=-1)
        q, k, v = (p.reshape(*p.shape[:-1], self.heads, -1) for p in parts)
        mixed = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.out(mixed.reshape(x.shape))


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.attn_norm = nnx.RMSNorm(width, rngs=rngs)
        self.attn = Attention(width, heads, rngs)
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, kernel_init=zeros, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.attn_norm(x))
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class GPT(nnx.Module):
    """Bytes ``int[B, T]`` to logits ``float32[B, T, 256]`` of the byte that follows each."""

    def __init__(self, layers: int, width: int, heads: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(NUM_BYTES, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, NUM_BYTES, use_bias=False, kernel_init=zeros, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions (Su et al., RoFormer, 2021) for ``x[B, T, H, K]``, K even."""
    length, half = x.shape[1], x.shape[-1] // 2
    rates = 10_000.0 ** (-jnp.arange(half) / half)
    angles = jnp.outer(jnp.arange(length), rates)[None, :, None, :]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def matrix_rules(width: int) -> mfsdp.rules.Rules:
    """Fused QKV is three matrices, each with its own orthogonal update."""
    return mfsdp.default_rules(mfsdp.rules.fused("blocks/*/qkv/kernel", (width, width, width)))


def loss_fn(graphdef: Any, params: Any, windows: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats per byte of ``windows int[B, T + 1]``, in float32."""
    logits = nnx.merge(graphdef, params)(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


@partial(jax.jit, static_argnums=(0, 3))
def generate(
    graphdef: Any, params: Any, prompt: jax.Array, num: int, key: jax.Array, temperature: float
) -> jax.Array:
    """``num`` bytes that follow ``prompt int[T]``, each drawn from a window of the last T bytes."""
    model = nnx.merge(graphdef, params)

    def draw(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model(window[None])[0, -1]
        byte = jax.random.categorical(key, logits / temperature).astype(window.dtype)
        return jnp.append(window[1:], byte), byte

    return jax.lax.scan(draw, prompt, jax.random.split(key, num))[1]
