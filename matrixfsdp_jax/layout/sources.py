"""How the leaves of the user's own tree lie on a mesh, and what that means for their matrices.

Plain Python. A *source* is the sharding of a leaf as seen by its matrices: an axis of a matrix may
be cut over mesh axes (FSDP rows or columns, tensor parallel, both), and a batch dim may be spread
over them (experts), so that whole matrices lie on different devices.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from matrixfsdp_jax.layout.spec import LeafPlan, Matrix, MatrixView, Plan, ShapeClass

Axes = tuple[str, ...]
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Source:
    """The sharding of the matrices of a leaf.

    Attributes:
      cut: for each axis of a matrix, as the user holds it, the mesh axes that cut it.
      spread: for each batch dim the mesh axes over which it is spread.
    """

    cut: tuple[Axes, ...]
    spread: tuple[Axes, ...] = ()

    @property
    def cut_axes(self) -> Axes:
        """All mesh axes that cut a matrix."""
        return tuple(itertools.chain.from_iterable(self.cut))

    @property
    def spread_axes(self) -> Axes:
        """All mesh axes over which whole matrices are spread."""
        return tuple(itertools.chain.from_iterable(self.spread))

    def stored_cut(self, matrix: Matrix) -> tuple[Axes, ...]:
        """``cut`` for the stored form of a matrix."""
        return self.cut[::-1] if matrix.transposed else self.cut


def source(lp: LeafPlan, dims: Sequence[Axes]) -> Source | None:
    """The source of a matrix leaf whose dims are sharded over the mesh axes ``dims``.

    None where no shard of the leaf is made of shards of its matrices: a leaf that is sharded on a
    side that the view splits, or on an inner dim of a flattened side. Such a leaf is moved whole.
    """
    view = lp.route.view
    assert view is not None  # a leaf with matrices has one
    sides = (
        (view.row_dims, view.col_dims)
        if isinstance(view, MatrixView)
        else tuple((d,) for d in view.dims)
    )
    cut = []
    for axis, side in enumerate(sides):
        first, *inner = [dims[d] for d in side] or [()]
        if any(inner) or (first and view.splits and view.split_axis == axis):
            return None
        cut.append(first)
    return Source(tuple(cut), tuple(dims[d] for d in view.batch_dims))


def whole(lp: LeafPlan) -> Source:
    """The source of a leaf that every device has whole."""
    view = lp.route.view
    assert view is not None
    return Source(((),) * len(view.item_shape(lp.leaf.shape)), ((),) * len(view.batch_dims))


def without(dims: Sequence[Axes], axes: Axes) -> list[Axes]:
    """The sharding of the dims of a leaf, without some mesh axes."""
    return [tuple(a for a in own if a not in axes) for own in dims]


def spec_entry(axes: Axes) -> str | Axes | None:
    """Mesh axes as one entry of a ``PartitionSpec``."""
    return (axes[0] if len(axes) == 1 else axes) if axes else None


def batch_shape(lp: LeafPlan) -> tuple[int, ...]:
    """The sizes of the batch dims of a matrix leaf."""
    assert lp.route.view is not None
    return tuple(lp.leaf.shape[d] for d in lp.route.view.batch_dims)


def batch_place(
    lp: LeafPlan, spread: Sequence[Axes], sizes: Sizes, batch: int
) -> tuple[dict[str, int], int]:
    """Where matrix number ``batch`` of a leaf lies: coordinates on its mesh axes, local number."""
    coordinates: dict[str, int] = {}
    local = 0
    for size, axes, index in zip(
        batch_shape(lp), spread, unravel(batch, batch_shape(lp)), strict=True
    ):
        parts = [sizes[a] for a in axes]
        part = size // math.prod(parts)
        coordinates |= zip(axes, unravel(index // part, parts), strict=True)
        local = local * part + index % part
    return coordinates, local


def unravel(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major coordinates of a flat index."""
    out = []
    for size in reversed(shape):
        index, k = divmod(index, size)
        out.append(k)
    return tuple(reversed(out))


def ravel(coordinates: Mapping[str, int], axes: Axes, sizes: Sizes) -> int:
    """The flat index of coordinates on mesh axes, the first axis slowest."""
    index = 0
    for axis in axes:
        index = index * sizes[axis] + coordinates[axis]
    return index


def settle(plan: Plan, sources: Sequence[Source | None], owner_axis: Axes, sizes: Sizes) -> Plan:
    """The plan with every matrix of a spread leaf owned where it lies already.

    In every class these are dealt first, each to the device with the fewest matrices among those
    that lie at its coordinates; then the others, to the devices with the fewest.

    Args:
      plan: over ``N`` devices, the product of the sizes of ``owner_axis``.
      sources: of each leaf; None for one that is no matrix or is moved whole.
      owner_axis: the mesh axes over which matrices are dealt out.
      sizes: of the mesh axes.
    """
    coordinates = [
        dict(zip(owner_axis, unravel(d, [sizes[a] for a in owner_axis]), strict=True))
        for d in range(plan.num_devices)
    ]

    def home(matrix: Matrix) -> dict[str, int]:
        own = sources[matrix.leaf]
        if own is None:  # moved whole
            return {}
        return batch_place(plan.leaves[matrix.leaf], own.spread, sizes, matrix.batch)[0]

    def settled(c: ShapeClass) -> ShapeClass:
        homes = [home(matrix) for matrix in c.matrices]
        if not any(homes):
            return c
        count = [0] * plan.num_devices
        slots: dict[int, tuple[int, int]] = {}
        for k in sorted(range(len(homes)), key=lambda k: not homes[k]):
            near = [
                d
                for d, own in enumerate(coordinates)
                if all(own[axis] == place for axis, place in homes[k].items())
            ]
            device = min(near, key=count.__getitem__)
            slots[k] = (device, count[device])
            count[device] += 1
        return replace(
            c, num_waves=max(count), slots=tuple(slots[k] for k in range(len(c.matrices)))
        )

    return replace(plan, classes=tuple(settled(c) for c in plan.classes))
