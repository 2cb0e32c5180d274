"""Stacks of tensors cut into equal blocks, and back.

Shape legend: ``...`` leading dims of a stack (devices, waves), ``B`` blocks of one shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp

from matrixfsdp_jax.layout.blocks import BlockGroup, block_groups, merge_dims, pieces


@dataclass(frozen=True)
class Blocking:
    """How a tensor of ``dims`` is merged and cut into blocks.

    Small dims are merged up to ``max_dim``, as long as the order stays above ``target``; every
    merged dim is then cut into pieces of ``max_dim`` and a shorter last one. Blocks of one shape
    form a group, so nothing is padded.
    """

    dims: tuple[int, ...]
    max_dim: float
    target: float

    @cached_property
    def merged(self) -> tuple[int, ...]:
        """The dims after merging."""
        return merge_dims(self.dims, self.max_dim, self.target)

    @cached_property
    def groups(self) -> tuple[BlockGroup, ...]:
        """The groups, in row-major order of the kinds of pieces."""
        return block_groups(self.merged, self.max_dim)

    def split(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """``[..., *dims]`` to one ``[..., B, *shape]`` per group, blocks in row-major order."""
        lead = x.shape[: x.ndim - len(self.dims)]
        x = x.reshape(*lead, *self.merged)
        return tuple(self._take(x, lead, group) for group in self.groups)

    def join(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The inverse of ``split``."""
        group = self.groups[0]
        lead = parts[0].shape[: parts[0].ndim - 1 - len(group.shape)]
        whole = [self._whole(x, lead, g) for x, g in zip(parts, self.groups, strict=True)]
        for dim in reversed(range(len(self.merged))):
            kinds = len(pieces(self.merged[dim], self.max_dim))
            axis = len(lead) + dim
            whole = [
                jnp.concatenate(whole[i : i + kinds], axis) if kinds > 1 else whole[i]
                for i in range(0, len(whole), kinds)
            ]
        return whole[0].reshape(*lead, *self.dims)

    def _take(self, x: jax.Array, lead: tuple[int, ...], group: BlockGroup) -> jax.Array:
        for dim, (size, count, start) in enumerate(
            zip(group.shape, group.counts, group.starts, strict=True)
        ):
            x = jax.lax.slice_in_dim(x, start, start + size * count, axis=len(lead) + dim)
        x = x.reshape(*lead, *_interleaved(group.counts, group.shape))
        order = len(group.shape)
        first = len(lead)
        counts = [first + 2 * d for d in range(order)]
        sizes = [first + 2 * d + 1 for d in range(order)]
        x = x.transpose(*range(first), *counts, *sizes)
        return x.reshape(*lead, group.num_blocks, *group.shape)

    def _whole(self, x: jax.Array, lead: tuple[int, ...], group: BlockGroup) -> jax.Array:
        order = len(group.shape)
        first = len(lead)
        x = x.reshape(*lead, *group.counts, *group.shape)
        mixed = [axis for d in range(order) for axis in (first + d, first + order + d)]
        x = x.transpose(*range(first), *mixed)
        sizes = [c * s for c, s in zip(group.counts, group.shape, strict=True)]
        return x.reshape(*lead, *sizes)


def _interleaved(a: tuple[int, ...], b: tuple[int, ...]) -> list[int]:
    return [x for pair in zip(a, b, strict=True) for x in pair]
