"""How Shampoo and SOAP cut a tensor into blocks: small dims are merged, then large ones split.

As in facebookresearch/optimizers ``distributed_shampoo``. Either limit may be ``math.inf``.
"""

import itertools
import math
from collections.abc import Iterator

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


def block_sizes(merged: Shape, max_dim: int | float) -> tuple[tuple[int, int, int], ...]:
    """Per dim ``(size, count, tail)``: ``count`` blocks of ``size``, then one of ``tail`` if > 0.

    Examples:
      >>> block_sizes((10, 3), 4), block_sizes((10, 3), math.inf)
      (((4, 2, 2), (3, 1, 0)), ((10, 1, 0), (3, 1, 0)))
    """
    sizes = [d if d <= max_dim else int(max_dim) for d in merged]
    return tuple((size, *divmod(d, max(1, size))) for d, size in zip(merged, sizes, strict=True))


def block_kinds(merged: Shape, max_dim: int | float) -> Iterator[tuple[Shape, int]]:
    """Every shape of a block of a merged tensor, and how many blocks have it.

    Examples:
      >>> dict(block_kinds((10, 3), 4))
      {(4, 3): 2, (2, 3): 1}
    """
    sides = [
        [(size, count), (tail, 1)] if tail else [(size, count)]
        for size, count, tail in block_sizes(merged, max_dim)
    ]
    for kind in itertools.product(*sides):
        yield tuple(size for size, _ in kind), math.prod(count for _, count in kind)
