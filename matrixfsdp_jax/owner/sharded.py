"""Sharded storage: parameters keep the user's sharding, matrices visit their owners for the update.

Any ``NamedSharding`` over the owner axes is taken: rows, columns, both at once (FSDP x tensor
parallel), replicated over some axes (HSDP) or all, whole matrices spread over an axis (experts).
With ``C`` the owner axes that cut a matrix, its shards are packed flat in the order of the slots
and sent by one all-to-all over ``C``; wide and tall, row- and column-sharded matrices of a class
share it. The updates return the same way, and over the owner axes on which the leaf is replicated
by an all-gather. Matrices that are spread over an axis are owned where they lie.

Shape legend: ``N`` devices on the owner axes, ``W`` waves, ``dims`` the stored shape of a class,
``C`` also the number of devices on those axes, ``F = prod(dims) / C`` elements of a shard.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from matrixfsdp_jax.layout import leaves as tree_leaves
from matrixfsdp_jax.layout.packing import build_leaf, take_matrix
from matrixfsdp_jax.layout.sources import (
    Axes,
    Source,
    batch_place,
    ravel,
    source,
    spec_entry,
    unravel,
    whole,
    without,
)
from matrixfsdp_jax.layout.spec import Matrix, ShapeClass
from matrixfsdp_jax.owner import collectives
from matrixfsdp_jax.owner.params import OwnerLayout
from matrixfsdp_jax.owner.update import MakeStackTransform, on_owners

PyTree = Any
Cut = tuple[Axes, ...]


def on_sharded(
    make: MakeStackTransform, layout: OwnerLayout, **hyperparams: Any
) -> optax.GradientTransformationExtraArgs:
    """A stack transform on a tree of matrix leaves that keep the user's sharding.

    The state is that of the stacks, ``{class key: [N, W, *dims]}``, sharded over the owners.

    Collectives: per class and set of cutting axes one all-to-all each way; for leaves that are
    replicated over owner axes one all-gather over them on the way out.
    """
    inner = on_owners(make, layout, **hyperparams)
    moves = _Moves(layout)

    def init(params: PyTree) -> PyTree:
        moves.check(params)
        shardings = layout.shardings.stacks
        return inner.init(
            {
                c.key: jnp.zeros(c.stack_shape, c.dtype, device=shardings[c.key])
                for c in layout.plan.classes
            }
        )

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        del params  # decay and averaging are elementwise, on the user's own tree
        if extra.pop("present", None) is not None:
            raise NotImplementedError(
                'present= does not go with storage="sharded" yet; leave it out, or plan with '
                'storage="owner"'
            )
        moves.check(updates)
        stacks, state = inner.update(moves.pull(updates), state, None, **extra)
        return moves.push(stacks, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def split_reductions(layout: OwnerLayout) -> dict[str, tuple[Any, Any]]:
    """Class key -> sum and maximum over ``tensor_axis``, of classes whose matrices it splits."""
    axis = layout.tensor_axis
    return {
        c.key: (partial(collectives.sum_over, axis=axis), partial(collectives.max_over, axis=axis))
        for c in layout.plan.classes
        if layout.tensor_axis_of(c)
    }


@dataclass(frozen=True)
class _Piece:
    """One matrix of a class on its way.

    ``cut``: the owner axes that cut each axis of its stored form. ``spread``: those over which the
    matrices of its leaf are spread; a device has the one that is its ``local`` matrix ``batch``.
    ``kept``: it moves in the parts in which the tensor axis cuts its long side.
    """

    path: str
    matrix: Matrix
    slot: tuple[int, int]
    cut: Cut
    spread: Axes
    batch: int
    kept: bool = False

    @property
    def row(self) -> tuple[str, int, int]:
        """What it is on a device that has a shard of it."""
        return self.path, self.batch, self.matrix.start

    @property
    def local(self) -> Matrix:
        """The matrix by its number on such a device."""
        m = self.matrix
        return Matrix(
            m.name, m.leaf, self.batch, m.start, m.dims, m.transposed, m.fan_in, m.fan_out
        )


class _Moves:
    """From leaves to owner stacks and back."""

    def __init__(self, layout: OwnerLayout) -> None:
        self._layout = layout
        self._axis = layout.owner_axis
        self._sizes = dict(layout.mesh.shape)
        self._leaves = {lp.leaf.path: lp for lp in layout.plan.leaves if lp.route.route == "matrix"}
        # How a leaf enters and leaves the moves: as it is, or whole where no shard is a block.
        self._sources: dict[str, Source] = {}
        self._specs: dict[str, P] = {}
        self._kept = self._leaves_that_stay_split()
        for lp, dims in zip(layout.plan.leaves, layout.source_axes, strict=True):
            path = lp.leaf.path
            if path in self._leaves:
                entry = dims if path in self._kept else without(dims, layout.tensor_axis)
                own = source(lp, without(dims, layout.tensor_axis))
                self._sources[path] = whole(lp) if own is None else own
                self._specs[path] = P() if own is None else P(*map(spec_entry, entry))

    def check(self, tree: PyTree) -> None:
        """Refuse another tree than the planned one."""
        paths, values, _ = tree_leaves.flatten(tree)
        for path, value in zip(paths, values, strict=True):
            if path not in self._leaves or self._leaves[path].leaf.shape != jnp.shape(value):
                raise ValueError(
                    f"leaf {path!r} of shape {jnp.shape(value)} is no matrix of {self._layout!r}; "
                    "plan again with this tree"
                )

    def pull(self, tree: PyTree) -> dict[str, jax.Array]:
        """The owner stacks of a tree of matrix leaves; places of absent leaves are zero."""
        paths, values, _ = tree_leaves.flatten(tree)
        specs = [self._specs[path] for path in paths]
        values = [self._placed(x, spec) for x, spec in zip(values, specs, strict=True)]

        def pull(values: list[jax.Array]) -> dict[str, jax.Array]:
            local = dict(zip(paths, values, strict=True))
            return {c.key: self._pull(c, local) for c in self._layout.plan.classes}

        with jax.named_scope("mfsdp.to_owners"):
            return jax.shard_map(
                pull,
                mesh=self._layout.mesh,
                in_specs=(specs,),
                out_specs=self._layout.specs.stacks,
            )(values)

    def push(self, stacks: dict[str, jax.Array], like: PyTree) -> PyTree:
        """The tree of the stacks, in the structure and sharding of ``like``."""
        paths, values, treedef = tree_leaves.flatten(like)
        specs = [self._specs[path] for path in paths]
        with jax.named_scope("mfsdp.from_owners"):
            new = jax.shard_map(
                lambda stacks: self._push(stacks, paths),
                mesh=self._layout.mesh,
                in_specs=(self._layout.specs.stacks,),
                out_specs=specs,
            )(stacks)
        sources = [self._layout.sources[path] for path in paths]
        new = [
            self._placed(x.astype(v.dtype), spec)
            for x, v, spec in zip(new, values, sources, strict=True)
        ]
        return jax.tree.unflatten(treedef, new)

    def _placed(self, x: jax.Array, spec: P) -> jax.Array:
        return jax.device_put(x, NamedSharding(self._layout.mesh, spec))

    # ---- what goes where -----------------------------------------------------------------------

    def _leaves_that_stay_split(self) -> set[str]:
        """Leaves all of whose matrices the tensor axis cuts as their owners hold them.

        The long side, and no other axis cuts it into coarser parts.
        """
        layout, axis = self._layout, self._layout.tensor_axis
        stays = dict.fromkeys(self._leaves, bool(axis))
        for c in layout.plan.classes:
            for matrix in c.matrices:
                own = layout.matrix_sources[matrix.leaf]
                cut = ((),) if own is None else own.stored_cut(matrix)
                kept = cut[-1][:1] == axis and layout.tensor_axis_of(c) == axis
                stays[layout.plan.leaves[matrix.leaf].leaf.path] &= kept
        return {path for path, kept in stays.items() if kept}

    def _dims(self, c: ShapeClass, kept: bool) -> tuple[int, ...]:
        """The shape of a stored matrix on the devices of its owner."""
        parts = self._count(self._layout.tensor_axis_of(c)) if kept else 1
        return (*c.shape[:-1], c.shape[-1] // parts) if parts > 1 else c.shape

    @cached_property
    def _pieces(self) -> list[list[_Piece]]:
        """The pieces of every class."""
        found = []
        for c in self._layout.plan.classes:
            own = []
            for matrix, slot in zip(c.matrices, c.slots, strict=True):
                lp = self._layout.plan.leaves[matrix.leaf]
                lies = self._sources[lp.leaf.path]
                _, batch = batch_place(lp, lies.spread, self._sizes, matrix.batch)
                cut, spread = lies.stored_cut(matrix), lies.spread_axes
                kept = lp.leaf.path in self._kept
                own.append(_Piece(lp.leaf.path, matrix, slot, cut, spread, batch, kept))
            found.append(own)
        return found

    def _ordered(self, axes: Axes) -> Axes:
        return tuple(a for a in self._axis if a in axes)

    def _exchanged(self, piece: _Piece) -> Axes:
        """``C``: the axes over which the shards of a matrix are exchanged."""
        return self._ordered(sum(piece.cut, ()))

    def _replicas(self, piece: _Piece) -> Axes:
        """The owner axes on which every device has what its neighbours have."""
        used = (*self._exchanged(piece), *piece.spread)
        return tuple(a for a in self._axis if a not in used)

    def _count(self, axes: Axes) -> int:
        return math.prod(self._sizes[a] for a in axes)

    def _place(self, device: int, axes: Axes) -> int:
        """The place of a device on some of the owner axes."""
        place = unravel(device, [self._sizes[a] for a in self._axis])
        return ravel(dict(zip(self._axis, place, strict=True)), axes, self._sizes)

    # ---- inside shard_map ----------------------------------------------------------------------

    def _pull(self, c: ShapeClass, local: Mapping[str, jax.Array]) -> jax.Array:
        """``[1, W, *dims]``, this device's own matrices."""
        tensor = self._layout.tensor_axis_of(c)
        own = jnp.zeros((c.num_waves, *self._dims(c, True)), c.dtype)
        for (axes, kept), pieces in self._by_exchange(c, local).items():
            dims = self._dims(c, kept)
            got = self._sent(c, axes, pieces, local)
            if axes:
                got = collectives.exchange(got, axes)
            for cut, here in self._by_cut(c, pieces).items():
                x = self._assembled(c.num_waves, dims, got, axes, cut)
                x = x if kept else collectives.part_of(x, x.ndim - 1, tensor)
                own = jnp.where(_expand(here, own.ndim), x, own)
        return collectives.varying(own, self._axis)[None]

    def _by_exchange(self, c: ShapeClass, paths: Any) -> dict[tuple[Axes, bool], list[_Piece]]:
        """The pieces of a class in these leaves, by the axes of their exchange and ``kept``."""
        found = defaultdict(list)
        for piece in self._pieces[self._layout.plan.classes.index(c)]:
            if piece.path in paths:
                found[self._exchanged(piece), piece.kept].append(piece)
        return found

    def _by_cut(self, c: ShapeClass, pieces: list[_Piece]) -> dict[Cut, jax.Array]:
        """For each way in which matrices are cut, in which waves ``[W]`` this device has one."""
        tables = {piece.cut: np.zeros((c.num_devices, c.num_waves), bool) for piece in pieces}
        for piece in pieces:
            tables[piece.cut][piece.slot] = True
        return {cut: collectives.local_slots(t, self._axis)[0] for cut, t in tables.items()}

    def _sent(
        self, c: ShapeClass, axes: Axes, pieces: list[_Piece], local: Mapping[str, jax.Array]
    ) -> jax.Array:
        """``[C, W, F]``: for every device on ``axes`` the shards of its matrices, zero in pads."""
        rows: dict[Any, jax.Array] = {}
        for piece in pieces:
            if piece.row not in rows:
                view = self._leaves[piece.path].route.view
                assert view is not None
                x = take_matrix(local[piece.path], view, piece.local)
                rows[piece.row] = x.astype(c.dtype).reshape(-1)
        number = {row: k for k, row in enumerate(rows)}
        others = tuple(a for a in self._axis if a not in axes)
        table = np.full((self._count(others), self._count(axes), c.num_waves), len(rows))
        for piece in pieces:
            device, wave = piece.slot
            place = self._place(device, others), self._place(device, axes), wave
            table[place] = number[piece.row]
        size = math.prod(self._dims(c, pieces[0].kept)) // self._count(axes)
        values = [*rows.values(), jnp.zeros(size, c.dtype)]
        if len(table) == 1:
            flat = jnp.stack([values[k] for k in table.ravel()])
            return flat.reshape(*table.shape[1:], -1)
        own = collectives.local_slots(table, others)[0]
        return jnp.stack(values)[own]

    def _push(self, stacks: dict[str, jax.Array], paths: list[str]) -> list[jax.Array]:
        found: dict[str, list[tuple[Matrix, jax.Array]]] = {path: [] for path in paths}
        for c in self._layout.plan.classes:
            tensor = self._layout.tensor_axis_of(c)
            for (axes, kept), pieces in self._by_exchange(c, found).items():
                own = stacks[c.key][0]
                own = own if kept else collectives.whole_of(own, own.ndim - 1, tensor)
                for path, matrix, x in self._returned(c, axes, pieces, own):
                    found[path].append((matrix, x))
        return [self._leaf(path, found[path]) for path in paths]

    def _returned(
        self, c: ShapeClass, axes: Axes, pieces: list[_Piece], own: jax.Array
    ) -> list[tuple[str, Matrix, jax.Array]]:
        """Every matrix of these pieces that this device has a shard of, with that shard."""
        sent = None
        for cut, here in self._by_cut(c, pieces).items():
            part = self._cut(own, axes, cut)
            sent = part if sent is None else jnp.where(_expand(here[None], 3), part, sent)
        assert sent is not None
        got = collectives.exchange(sent, axes) if axes else sent
        by_replicas = defaultdict(list)
        for piece in pieces:
            by_replicas[self._replicas(piece)].append(piece)
        found = []
        for replicas, some in by_replicas.items():
            every = collectives.gather_slots(got, replicas) if replicas else got[None]
            flat = every.reshape(-1, got.shape[-1])
            for piece, index in self._indices(c, axes, replicas, some):
                x = flat[index].reshape(self._shard_shape(own.shape[1:], piece.cut))
                found.append((piece.path, piece.local, x))
        return found

    def _indices(
        self, c: ShapeClass, axes: Axes, replicas: Axes, pieces: list[_Piece]
    ) -> list[tuple[_Piece, Any]]:
        """Where in ``[replicas * C * W]`` a device finds its shard of each of its matrices."""
        spread = self._ordered(pieces[0].spread)
        places: dict[Any, dict[int, int]] = defaultdict(dict)
        first: dict[Any, _Piece] = {}
        for piece in pieces:
            device, wave = piece.slot
            index = self._place(device, replicas) * self._count(axes) + self._place(device, axes)
            places[piece.row][self._place(device, spread)] = index * c.num_waves + wave
            first.setdefault(piece.row, piece)
        if not spread:
            return [(first[row], own[0]) for row, own in places.items()]
        rows = list(places)
        table = np.array([[places[row][k] for row in rows] for k in range(self._count(spread))])
        own = collectives.local_slots(table, spread)[0]
        return [(first[row], own[k]) for k, row in enumerate(rows)]

    def _leaf(self, path: str, pieces: list[tuple[Matrix, jax.Array]]) -> jax.Array:
        pieces.sort(key=lambda piece: (piece[0].batch, piece[0].start))
        matrices, stored = zip(*pieces, strict=True)
        lp = self._leaves[path]
        assert lp.route.view is not None
        sharding = NamedSharding(self._layout.mesh, self._specs[path])
        shape = sharding.shard_shape(lp.leaf.shape)
        return build_leaf(stored, matrices, lp.route.view, shape, jnp)

    def _shard_shape(self, dims: tuple[int, ...], cut: Cut) -> tuple[int, ...]:
        return tuple(d // self._count(axes) for d, axes in zip(dims, cut, strict=True))

    def _assembled(
        self, waves: int, dims: tuple[int, ...], got: jax.Array, axes: Axes, cut: Cut
    ) -> jax.Array:
        """``[W, *dims]`` from the shards ``[C, W, F]`` of matrices that are cut in this way."""
        x = got.reshape(*(self._sizes[a] for a in axes), waves, *self._shard_shape(dims, cut))
        return x.transpose(self._order(axes, cut)).reshape(waves, *dims)

    def _cut(self, own: jax.Array, axes: Axes, cut: Cut) -> jax.Array:
        """The inverse of ``_assembled``."""
        waves, *dims = own.shape
        shape = [waves]
        for size, over in zip(self._shard_shape(tuple(dims), cut), cut, strict=True):
            shape += [*(self._sizes[a] for a in over), size]
        order = np.argsort(self._order(axes, cut))
        return own.reshape(shape).transpose(order).reshape(self._count(axes), waves, -1)

    def _order(self, axes: Axes, cut: Cut) -> list[int]:
        """From ``[*axes, W, *shard dims]`` to ``W`` and each dim behind the axes that cut it."""
        order = [len(axes)]
        for k, over in enumerate(cut):
            order += [*(axes.index(a) for a in over), len(axes) + 1 + k]
        return order


def _expand(flags: jax.Array, ndim: int) -> jax.Array:
    return jnp.expand_dims(flags, range(flags.ndim, ndim))
