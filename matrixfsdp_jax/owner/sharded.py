"""Sharded storage: parameters keep the user's sharding, matrices visit their owners for the update.

A *source* says how a matrix leaf is sharded: on one of its dims over the owner axis (FSDP rows or
columns), or not at all. Local shards are packed flat in the order of the slots and sent by one
all-to-all; wide and tall, row- and column-sharded matrices of a class share it. The updates return
the same way. A replicated leaf needs no transfer on the way in, and an all-gather on the way out.

Shape legend: ``N`` devices on the owner axis, ``W`` waves, ``dims`` the stored shape of a class,
``F = prod(dims) / N`` elements of a matrix in one shard.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from matrixfsdp_jax.layout import leaves as tree_leaves
from matrixfsdp_jax.layout.packing import build_leaf, take_matrix
from matrixfsdp_jax.layout.spec import LeafPlan, Matrix, MatrixView, ShapeClass
from matrixfsdp_jax.owner import collectives
from matrixfsdp_jax.owner.params import OwnerLayout
from matrixfsdp_jax.owner.update import MakeStackTransform, on_owners

PyTree = Any
_WHOLE = -1  # in tables: the matrix is on every device


def on_sharded(
    make: MakeStackTransform, layout: OwnerLayout, **hyperparams: Any
) -> optax.GradientTransformationExtraArgs:
    """A stack transform on a tree of matrix leaves that keep the user's sharding.

    The state is that of the stacks, ``{class key: [N, W, *dims]}``, sharded over the owners.

    Collectives: per class one all-to-all each way for sharded leaves; for replicated ones one
    all-gather on the way out.
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


class _Moves:
    """From leaves to owner stacks and back."""

    def __init__(self, layout: OwnerLayout) -> None:
        self._layout = layout
        self._axis = layout.owner_axis
        leaves = [lp for lp in layout.plan.leaves if lp.route.route == "matrix"]
        self._leaves = {lp.leaf.path: lp for lp in leaves}
        pairs = zip(layout.plan.leaves, layout.source_dims, strict=True)
        self._split = {lp.leaf.path: split_axis(lp, dim) for lp, dim in pairs}
        # How a leaf enters and leaves the moves: as it is, or whole where no shard is a block.
        self._specs = {
            path: P() if self._split[path] is None else layout.sources[path]
            for path in self._leaves
        }

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
        own = self._layout.specs.stacks
        with jax.named_scope("mfsdp.to_owners"):
            return jax.shard_map(
                lambda xs: {
                    c.key: self._pull(c, dict(zip(paths, xs, strict=True)))
                    for c in self._layout.plan.classes
                },
                mesh=self._layout.mesh,
                in_specs=(specs,),
                out_specs=own,
            )(values)

    def push(self, stacks: dict[str, jax.Array], like: PyTree) -> PyTree:
        """The tree of the stacks, in the structure and sharding of ``like``."""
        paths, values, treedef = tree_leaves.flatten(like)
        specs = [self._specs[path] for path in paths]
        with jax.named_scope("mfsdp.from_owners"):
            new = jax.shard_map(
                lambda s: self._push(s, paths),
                mesh=self._layout.mesh,
                in_specs=(self._layout.specs.stacks,),
                out_specs=specs,
                check_vma=not any(spec == P() for spec in specs),
            )(stacks)
        sources = [self._layout.sources[path] for path in paths]
        new = [
            self._placed(x.astype(v.dtype), spec)
            for x, v, spec in zip(new, values, sources, strict=True)
        ]
        return jax.tree.unflatten(treedef, new)

    def _placed(self, x: jax.Array, spec: P) -> jax.Array:
        return jax.device_put(x, NamedSharding(self._layout.mesh, spec))

    # ---- inside shard_map ----------------------------------------------------------------------

    def _axes(self, c: ShapeClass) -> np.ndarray:
        """``[N, W]``: the stored axis on which the matrix of a slot is sharded."""
        table = np.full((c.num_devices, c.num_waves), _WHOLE)
        for matrix, slot in zip(c.matrices, c.slots, strict=True):
            table[slot] = self._stored_axis(matrix)
        return table

    def _stored_axis(self, matrix: Matrix) -> int:
        path = self._layout.plan.leaves[matrix.leaf].leaf.path
        axis = self._split[path]
        if axis is None:
            return _WHOLE
        return len(matrix.dims) - 1 - axis if matrix.transposed else axis

    def _pull(self, c: ShapeClass, local: Mapping[str, jax.Array]) -> jax.Array:
        """``[1, W, *dims]``, this device's own matrices."""
        axes = self._axes(c)
        shards: dict[tuple[int, int], jax.Array] = {}
        whole: dict[tuple[int, int], jax.Array] = {}
        for matrix, slot in zip(c.matrices, c.slots, strict=True):
            lp = self._layout.plan.leaves[matrix.leaf]
            if lp.leaf.path not in local:
                continue
            assert lp.route.view is not None
            x = take_matrix(local[lp.leaf.path], lp.route.view, matrix).astype(c.dtype)
            if axes[slot] == _WHOLE:
                whole[slot] = x
            else:
                shards[slot] = x.reshape(-1)
        own = jnp.zeros((c.num_waves, *c.shape), c.dtype)
        if shards:
            sent = _table(c, shards, (c.size // c.num_devices,))
            got = collectives.exchange(sent, self._axis)
            own = self._select(c, axes, lambda axis: _assembled(c, got, axis))
        if whole:
            mine = collectives.local_slots(_table(c, whole, c.shape), self._axis)[0]
            is_whole = collectives.local_slots(axes == _WHOLE, self._axis)[0]
            own = jnp.where(_expand(is_whole, own.ndim), mine, own)
        return collectives.varying(own, self._axis)[None]

    def _push(self, stacks: dict[str, jax.Array], paths: list[str]) -> list[jax.Array]:
        pieces: dict[str, list[tuple[Matrix, jax.Array]]] = {path: [] for path in paths}
        for c in self._layout.plan.classes:
            for matrix, x in self._pushed(c, stacks[c.key][0]):
                path = self._layout.plan.leaves[matrix.leaf].leaf.path
                if path in pieces:
                    pieces[path].append((matrix, x))
        return [self._leaf(self._leaves[path], pieces[path]) for path in paths]

    def _pushed(self, c: ShapeClass, own: jax.Array) -> list[tuple[Matrix, jax.Array]]:
        """Every matrix of a class with this device's part of it, in stored orientation."""
        axes = self._axes(c)
        got = everything = None
        if (axes != _WHOLE).any():
            sent = self._select(c, axes, lambda axis: _cut(c, own, axis), leading=1)
            got = collectives.exchange(sent, self._axis)
        found = []
        for matrix, (device, wave) in zip(c.matrices, c.slots, strict=True):
            axis = int(axes[device, wave])
            if axis == _WHOLE:
                if everything is None:
                    everything = collectives.gather_slots(own, self._axis)
                found.append((matrix, everything[device, wave]))
            else:
                assert got is not None
                found.append((matrix, got[device, wave].reshape(_shard_shape(c, axis))))
        return found

    def _leaf(self, lp: LeafPlan, pieces: list[tuple[Matrix, jax.Array]]) -> jax.Array:
        pieces.sort(key=lambda piece: (piece[0].batch, piece[0].start))
        matrices, stored = zip(*pieces, strict=True)
        assert lp.route.view is not None
        sharding = NamedSharding(self._layout.mesh, self._specs[lp.leaf.path])
        shape = sharding.shard_shape(lp.leaf.shape)
        return build_leaf(stored, matrices, lp.route.view, shape, jnp)

    def _select(self, c: ShapeClass, axes: np.ndarray, make: Any, leading: int = 0) -> jax.Array:
        """``make(axis)`` of every slot's own axis; ``leading`` dims stand before the waves."""
        kinds = sorted(set(axes[axes != _WHOLE].tolist()))
        out = make(kinds[0])
        mine = collectives.local_slots(axes, self._axis)[0]
        for axis in kinds[1:]:
            other = make(axis)
            chosen = jnp.expand_dims(mine == axis, range(leading))
            out = jnp.where(_expand(chosen, out.ndim), other, out)
        return out


def split_axis(lp: LeafPlan, dim: int | None) -> int | None:
    """The axis of a matrix of a leaf that is cut where the leaf is sharded on ``dim``.

    None where no shard of the leaf is a shard of each of its matrices: a leaf that is replicated,
    or sharded on a batch dim, on a side that the view splits, or on an inner dim of a flattened
    side. Such a leaf is moved whole.
    """
    view = lp.route.view
    if dim is None or view is None:
        return None
    if not isinstance(view, MatrixView):
        return view.dims.index(dim) if dim in view.dims else None
    for axis, dims in enumerate((view.row_dims, view.col_dims)):
        if dims[:1] == (dim,) and not (view.splits and view.split_axis == axis):
            return axis
    return None


def _table(
    c: ShapeClass, values: Mapping[tuple[int, int], jax.Array], shape: tuple[int, ...]
) -> jax.Array:
    """``[N, W, *shape]`` of the slots' values, zero in the others."""
    zeros = jnp.zeros(shape, c.dtype)
    slots = [(d, w) for d in range(c.num_devices) for w in range(c.num_waves)]
    stacked = jnp.stack([values.get(slot, zeros) for slot in slots])
    return stacked.reshape(c.num_devices, c.num_waves, *shape)


def _shard_shape(c: ShapeClass, axis: int) -> tuple[int, ...]:
    dims = list(c.shape)
    dims[axis] //= c.num_devices
    return tuple(dims)


def _assembled(c: ShapeClass, got: jax.Array, axis: int) -> jax.Array:
    """``[W, *dims]`` from the shards ``[N, W, F]`` of matrices that were cut on ``axis``."""
    x = got.reshape(c.num_devices, c.num_waves, *_shard_shape(c, axis))
    return jnp.moveaxis(x, 0, 1 + axis).reshape(c.num_waves, *c.shape)


def _cut(c: ShapeClass, own: jax.Array, axis: int) -> jax.Array:
    """The inverse of ``_assembled``."""
    dims = list(c.shape)
    dims[axis : axis + 1] = [c.num_devices, dims[axis] // c.num_devices]
    x = jnp.moveaxis(own.reshape(c.num_waves, *dims), 1 + axis, 0)
    return x.reshape(c.num_devices, c.num_waves, math.prod(c.shape) // c.num_devices)


def _expand(flags: jax.Array, ndim: int) -> jax.Array:
    return jnp.expand_dims(flags, range(flags.ndim, ndim))
