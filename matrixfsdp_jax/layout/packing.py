"""A leaf to its matrices and back, for numpy and jax arrays alike (``xp`` is either module).

Pure index work: reshape, transpose, slice, concatenate. Nothing is computed, so the round trip
is bit for bit the identity.
"""

from collections.abc import Sequence
from typing import Any

from matrixfsdp_jax.layout.spec import Matrix, MatrixView


def take_matrix(array: Any, view: MatrixView, matrix: Matrix) -> Any:
    """The stored ``[m, n]`` form (``m <= n``) of one matrix of a leaf."""
    batch, rows, cols = view.matrix_shape(array.shape)
    whole = array.transpose(view.permutation).reshape(batch, rows, cols)[matrix.batch]
    if view.split_side == "rows":
        block = whole[matrix.start : matrix.start + matrix.rows, :]
    else:
        block = whole[:, matrix.start : matrix.start + matrix.cols]
    return block.T if matrix.transposed else block


def build_leaf(
    stored: Sequence[Any],
    matrices: Sequence[Matrix],
    view: MatrixView,
    shape: tuple[int, ...],
    xp: Any,
) -> Any:
    """The leaf of ``shape`` from the stored form of all its matrices (``matrices`` in order)."""
    batch = view.matrix_shape(shape)[0]
    axis = 0 if view.split_side == "rows" else 1
    blocks = [s.T if m.transposed else s for s, m in zip(stored, matrices, strict=True)]
    per_batch = len(blocks) // batch
    wholes = [
        xp.concatenate(blocks[b * per_batch : (b + 1) * per_batch], axis=axis)
        if per_batch > 1
        else blocks[b]
        for b in range(batch)
    ]
    stacked = xp.stack(wholes) if batch > 1 else wholes[0]
    order = view.permutation
    permuted = stacked.reshape([shape[d] for d in order])
    return permuted.transpose([order.index(d) for d in range(len(order))])
