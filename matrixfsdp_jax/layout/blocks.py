"""How Shampoo and SOAP cut a tensor into blocks: small dims are merged, then large ones split.

As in facebookresearch/optimizers ``distributed_shampoo``. Either limit may be ``math.inf``.
"""

import itertools
import math
from dataclasses import dataclass

Shape = tuple[int, ...]


def merge_dims(shape: Shape, max_dim: int | float, target: int | float) -> Shape:
    """The shape after neighbouring dims were merged, from the last to the first.

    Dims of size 1 are dropped. A dim joins the one after it while the tensor still has more than
    ``target`` dims and the product is at most ``max_dim``. What has one element becomes
    ``(1,)``, what has none ``(0,)``; ``target=math.inf`` changes nothing, not even ones.

    Examples:
      >>> merge_dims((3, 3, 4, 8), 1024, 2), merge_dims((3, 3, 4, 8), 1024, 1)
      ((3, 96), (288,))
      >>> merge_dims((), 1024, 2), merge_dims((5, 1, 7), math.inf, math.inf)
      ((1,), (5, 1, 7))
    """
    if 0 in shape:
        return (0,)
    if target == math.inf:
        return shape
    *left, last = [d for d in shape if d != 1] or [1]
    merged = [last]
    while left:
        d = left.pop()
        if len(left) + 1 + len(merged) > target and d * merged[0] <= max_dim:
            merged[0] *= d
        else:
            merged.insert(0, d)
    return tuple(merged)


def pieces(dim: int, max_dim: int | float) -> list[tuple[int, int, int]]:
    """How one merged dim is cut: ``(size, count, start)`` of the full pieces, then of the tail.

    Examples:
      >>> pieces(10, 4), pieces(8, 4), pieces(10, math.inf)
      ([(4, 2, 0), (2, 1, 8)], [(4, 2, 0)], [(10, 1, 0)])
    """
    size = dim if dim <= max_dim else int(max_dim)
    count, tail = divmod(dim, max(1, size))
    full = [(size, count, 0)] if count else []
    return full + ([(tail, 1, size * count)] if tail else [])


@dataclass(frozen=True)
class BlockGroup:
    """All blocks of one shape: ``counts`` of them along the merged dims, from ``starts`` on."""

    shape: Shape
    counts: Shape
    starts: Shape

    @property
    def num_blocks(self) -> int:
        """``B``."""
        return math.prod(self.counts)


def block_groups(merged: Shape, max_dim: int | float) -> tuple[BlockGroup, ...]:
    """The blocks of a merged tensor, in row-major order of the pieces.

    Examples:
      >>> [(group.shape, group.num_blocks) for group in block_groups((10, 3), 4)]
      [((4, 3), 2), ((2, 3), 1)]
    """
    return tuple(
        BlockGroup(*(tuple(piece[i] for piece in kind) for i in range(3)))
        for kind in itertools.product(*(pieces(dim, max_dim) for dim in merged))
    )
