"""QK-clip: shrink query and key weights of heads whose attention logits grow too large.

Reference: Kimi Team, "Kimi K2: Open Agentic Intelligence", arXiv 2507.20534, 2025 (MuonClip).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from matrixfsdp_jax.layout.leaves import is_masked
from matrixfsdp_jax.transforms.stacks import Local, Tables, wide
from matrixfsdp_jax.transforms.variants import along_outputs

PyTree = Any


@dataclass(frozen=True)
class AttentionWeight:
    """Where the heads of an attention layer lie in one query or key parameter.

    The output side of the parameter is ``num_heads`` equal pieces, one after the other.

    Attributes:
      path: path of the leaf in the user's tree, ``"block_0/query/kernel"``.
      num_heads: heads of this parameter (fewer for the keys of grouped-query attention).
      parts: how one head is made up, as ``(size, exponent)`` one after the other: the piece is
        multiplied by ``gamma ** exponent``. None: the whole head, 0.5. In multi-head latent
        attention 0.5 for the parts without rotary embedding, 1.0 for the rotary queries, 0.0 for
        values in the same parameter; the shared rotary key is not listed.
      block: which block of a fused leaf (0 where nothing is fused).
      splits: sizes of the blocks of a fused leaf that is no matrix (the bias of a fused query, key
        and value); those of a matrix come from its rule.
    """

    path: str
    num_heads: int
    parts: tuple[tuple[int, float], ...] | None = None
    block: int = 0
    splits: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse counts and parts that mean nothing."""
        if isinstance(self.num_heads, bool) or not isinstance(self.num_heads, int):
            raise TypeError(f"num_heads={self.num_heads!r} of {self.path!r} must be an int")
        for size, exponent in self.parts or ():
            if not (isinstance(size, int) and size > 0 and 0 <= exponent < float("inf")):
                raise ValueError(
                    f"parts={self.parts} of {self.path!r} must be (size >= 1, exponent >= 0) pairs"
                )

    def heads_and_exponents(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Head and exponent of each of the ``size`` outputs."""
        if self.num_heads < 1 or size % self.num_heads:
            raise ValueError(
                f"{self.path!r} has {size} outputs, which are not {self.num_heads} equal heads; "
                "give the num_heads of this parameter"
            )
        head_dim = size // self.num_heads
        parts = ((head_dim, 0.5),) if self.parts is None else self.parts
        if sum(n for n, _ in parts) != head_dim:
            raise ValueError(
                f"parts={parts} of {self.path!r} are {sum(n for n, _ in parts)} wide in all, but "
                f"a head has {head_dim} outputs; let the sizes add up to that"
            )
        exponents = np.repeat([float(e) for _, e in parts], [n for n, _ in parts])
        return np.repeat(np.arange(self.num_heads), head_dim), np.tile(exponents, self.num_heads)


@dataclass(frozen=True)
class HeadTables:
    """Per class and slot, for each output: which gamma (0: none) and which exponent.

    Tables ``[N, W, k]``, ``k`` the longer side; of the outputs' own side, the first entries count.
    """

    gamma: Tables
    exponent: Tables
    row_outputs: Tables


def head_gammas(
    max_logits: Mapping[str, jax.Array], groups: Mapping[str, int], max_logit: float
) -> jax.Array:
    """``min(1, max_logit / S)`` of every group of heads, flat, after a leading 1.

    ``max_logits[name]`` is ``[heads]`` or ``[layers, heads]``; the largest of a group counts.
    Values that are not finite do not count.
    """
    gammas = [jnp.ones(1, jnp.float32)]
    for name, count in groups.items():
        s = jnp.asarray(max_logits[name], jnp.float32)
        s = jnp.where(jnp.isfinite(s), s, 0.0)
        s = jnp.max(s.reshape(-1, count, s.shape[-1] // count), axis=-1).reshape(-1)
        gamma = jnp.where(s > max_logit, max_logit / jnp.maximum(s, max_logit), 1.0)
        gammas.append(jnp.maximum(gamma, jnp.finfo(jnp.float32).tiny))  # no head becomes zero
    return jnp.concatenate(gammas)


def rescaled(update: jax.Array, param: jax.Array, factor: jax.Array) -> jax.Array:
    """The update after which ``param`` is ``factor`` times what it would have been."""
    dtype = wide(update.dtype)
    u, p = update.astype(dtype), param.astype(dtype)
    new = factor.astype(dtype) * (p + u) - p
    return jnp.where(factor == 1, u, new).astype(update.dtype)


def clip_stacks(tables: HeadTables, local: Local) -> optax.GradientTransformationExtraArgs:
    """QK-clip of stacks, by the extra argument ``gammas`` (from ``head_gammas``)."""

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, *, gammas: jax.Array, **_: Any
    ) -> tuple[PyTree, PyTree]:
        new = dict(updates)
        for key, stack in updates.items():
            if is_masked(stack) or key not in tables.gamma:
                continue
            exponent = local(key, tables.exponent[key]).astype(jnp.float32)
            factor = gammas[local(key, tables.gamma[key])] ** exponent
            rows = local(key, tables.row_outputs[key]) > 0
            new[key] = rescaled(stack, params[key], along_outputs(factor, stack.shape, rows))
        return new, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
