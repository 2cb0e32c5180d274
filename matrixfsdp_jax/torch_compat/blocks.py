"""Which block of which parameter: the cutting of the reference, block by block in its order."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from matrixfsdp_jax.layout.blocks import Shape, merge_dims, pieces


@dataclass(frozen=True)
class Block:
    """One block of a parameter of a group.

    param: place of the parameter in its group. number: place of the block in its parameter, row
    major. start, shape: where it lies in the merged parameter.
    """

    param: int
    number: int
    start: Shape
    shape: Shape

    @property
    def index(self) -> tuple[slice, ...]:
        """What selects it from the merged parameter."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))

    @property
    def name(self) -> str:
        """The reference's name in a state dict."""
        return f"block_{self.number}"


@dataclass(frozen=True)
class Cut:
    """How a parameter of a shape is merged and cut; a parameter without elements has no blocks."""

    merged: Shape
    blocks: tuple[Block, ...]


def cut(param: int, shape: Shape, max_dim: float, target: float) -> Cut:
    """The blocks of one parameter, ``max_preconditioner_dim`` and target as in the reference.

    Examples:
      >>> [b.shape for b in cut(0, (10, 3), 4, 2).blocks]
      [(4, 3), (4, 3), (2, 3)]
    """
    merged = merge_dims(shape, max_dim, target)
    sides = [
        [
            (start + i * size, size)
            for size, count, start in pieces(d, max_dim)
            for i in range(count)
        ]
        for d in merged
    ]
    blocks = tuple(
        Block(param, number, tuple(start for start, _ in side), tuple(size for _, size in side))
        for number, side in enumerate(itertools.product(*sides))
    )
    return Cut(merged, blocks)


class Views:
    """Every block of the parameters of a group, as a view of its parameter.

    Raises: ValueError for strides under which the merged parameter is no view.
    """

    def __init__(self, params: Sequence[torch.Tensor], cuts: Sequence[Cut]) -> None:
        self._cuts = cuts
        self._take(params)

    def of(self, params: Sequence[torch.Tensor]) -> dict[Block, torch.Tensor]:
        """The views; taken anew where a parameter has other memory (``p.data`` was set)."""
        if [p.data_ptr() for p in params] != self._places:
            self._take(params)
        return self._views

    def _take(self, params: Sequence[torch.Tensor]) -> None:
        self._places = [p.data_ptr() for p in params]
        self._views: dict[Block, torch.Tensor] = {}
        for p, own in zip(params, self._cuts, strict=True):
            try:
                whole = p.detach().view(own.merged)
            except RuntimeError as error:
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} and strides {p.stride()} cannot be "
                    f"viewed as {own.merged}; make it contiguous before the optimizer is built, "
                    "for example by model.to(memory_format=torch.contiguous_format)"
                ) from error
            self._views |= {block: whole[block.index] for block in own.blocks}
