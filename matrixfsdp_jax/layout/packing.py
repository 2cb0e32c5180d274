"""A leaf to its matrices and back, for numpy and jax arrays alike (``xp`` is either module).

Pure index work: reshape, transpose, slice, concatenate. Nothing is computed, so the round trip
is bit for bit the identity.
"""

from collections.abc import Sequence
from typing import Any

from matrixfsdp_jax.layout.spec import Matrix, View


def take_matrix(array: Any, view: View, matrix: Matrix) -> Any:
    """The stored form of one matrix (or tensor) of a leaf."""
    items = array.transpose(view.permutation).reshape(-1, *view.item_shape(array.shape))
    block = items[matrix.batch, ...]  # with the dots also a scalar stays an array
    if view.splits:
        axis = view.split_axis
        end = matrix.start + matrix.dims[axis]
        block = block[(slice(None),) * axis + (slice(matrix.start, end),)]
    return block.T if matrix.transposed else block


def build_leaf(
    stored: Sequence[Any],
    matrices: Sequence[Matrix],
    view: View,
    shape: tuple[int, ...],
    xp: Any,
) -> Any:
    """The leaf of ``shape`` from the stored form of all its matrices (``matrices`` in order)."""
    blocks = [s.T if m.transposed else s for s, m in zip(stored, matrices, strict=True)]
    per_item = max(1, len(view.splits))
    items = [
        xp.concatenate(blocks[k : k + per_item], axis=view.split_axis)
        if per_item > 1
        else blocks[k]
        for k in range(0, len(blocks), per_item)
    ]
    stacked = xp.stack(items) if len(items) > 1 else items[0]
    order = view.permutation
    permuted = stacked.reshape([shape[d] for d in order])
    return permuted.transpose([order.index(d) for d in range(len(order))])
