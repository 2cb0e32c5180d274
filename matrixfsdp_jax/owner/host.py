"""Moves between canonical and owner form that pass through host memory, a piece at a time.

No device ever holds more than its own part, and the host holds one shape class (in) or one leaf
(out). Index work only, so both ways are exact.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from matrixfsdp_jax.layout.packing import build_leaf, take_matrix
from matrixfsdp_jax.layout.planner import largest_divisible_dim
from matrixfsdp_jax.layout.spec import Leaf, LeafPlan, ShapeClass

if TYPE_CHECKING:
    from matrixfsdp_jax.owner.params import OwnerLayout, OwnerParams


def check_leaf(leaf: Leaf, value: Any) -> None:
    """Refuse what holds no values, or whose shape or dtype is not the planned one."""
    if isinstance(value, jax.ShapeDtypeStruct | jax.core.Tracer):
        raise TypeError(
            f"leaf {leaf.path!r} has no values here, it is a {type(value).__name__}; layout.shard "
            "runs outside jit, on arrays or on functions that return them"
        )
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        value = np.asarray(value)
        shape, dtype = value.shape, value.dtype
    if (tuple(shape), str(dtype)) != (leaf.shape, leaf.dtype):
        raise ValueError(
            f"leaf {leaf.path!r} is {dtype}{list(shape)}, but the layout was planned for "
            f"{leaf.dtype}{list(leaf.shape)}; plan again, or convert the leaf"
        )


class _HostLeaves:
    """Canonical leaves as numpy, fetched when first needed and dropped when told."""

    def __init__(self, leaves: tuple[LeafPlan, ...], values: list[Any]) -> None:
        self._leaves = leaves
        self._values = values
        self._fetched: dict[int, np.ndarray] = {}

    def __getitem__(self, index: int) -> np.ndarray:
        if index not in self._fetched:
            value = self._values[index]
            if callable(value):
                value = value()
                check_leaf(self._leaves[index].leaf, value)
            self._fetched[index] = host_value(value)
        return self._fetched[index]

    def drop(self, index: int) -> None:
        self._fetched.pop(index, None)


def host_value(x: Any) -> np.ndarray:
    """A numpy array of a leaf; a global array that spans processes is gathered to every host."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)


def to_owned(
    layout: "OwnerLayout", values: list[Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Owner arrays ``(stacks, rest, frozen)`` from the checked canonical leaves."""
    plan = layout.plan
    leaves = _HostLeaves(plan.leaves, values)
    last_use = {m.leaf: c.key for c in plan.classes for m in c.matrices}
    stacks = {}
    for c in plan.classes:
        stacks[c.key] = _stack(layout, c, leaves)
        for index in {m.leaf for m in c.matrices}:
            if last_use[index] == c.key:
                leaves.drop(index)
    rest: dict[str, Any] = {}
    frozen: dict[str, Any] = {}
    for index, lp in enumerate(plan.leaves):
        if lp.route.route != "matrix":
            part, shardings = (
                (rest, layout.shardings.rest) if lp.trainable else (frozen, layout.shardings.frozen)
            )
            part[lp.leaf.path] = _distribute(leaves[index], shardings[lp.leaf.path])
            leaves.drop(index)
    return stacks, rest, frozen


def to_stacks(
    layout: "OwnerLayout", values: Mapping[str, Any], dtypes: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Owner stacks of one array per matrix leaf (by path), each class in a dtype of its own."""
    leaves = _HostLeaves(layout.plan.leaves, [values.get(p.leaf.path) for p in layout.plan.leaves])
    return {c.key: _stack(layout, c, leaves, dtypes[c.key]) for c in layout.plan.classes}


def _stack(
    layout: "OwnerLayout", c: ShapeClass, leaves: _HostLeaves, dtype: Any = None
) -> jax.Array:
    plan = layout.plan
    dtype = jax.numpy.dtype(c.dtype if dtype is None else dtype)
    owned: list[list[tuple[int, Any]]] = [[] for _ in range(c.num_devices)]
    for matrix, (device, wave) in zip(c.matrices, c.slots, strict=True):
        owned[device].append((wave, matrix))

    def rows(index: Any) -> np.ndarray:
        devices = range(c.num_devices)[index[0]]
        part = np.zeros((len(devices), *c.stack_shape[1:]), dtype)
        for row, device in enumerate(devices):
            for wave, matrix in owned[device]:
                view = plan.leaves[matrix.leaf].route.view
                assert view is not None  # a leaf with matrices has a view
                part[row, wave] = take_matrix(leaves[matrix.leaf], view, matrix)
        return part

    return jax.make_array_from_callback(c.stack_shape, layout.shardings.stacks[c.key], rows)


def to_canonical(layout: "OwnerLayout", owned: "OwnerParams") -> list[jax.Array]:
    """The canonical leaves in plan order, as global arrays."""
    # A mesh that the caller has set (jax.set_mesh) would refuse to slice one device's part.
    with jax.set_mesh(Mesh(np.empty((), object), ())):
        rows = {key: _device_rows(stack) for key, stack in owned.stacks.items()}
        out = []
        for lp, slots in zip(layout.plan.leaves, layout.leaf_slots, strict=True):
            if lp.route.route == "matrix":
                assert lp.route.view is not None
                stored = [np.asarray(rows[key][d][w]) for key, d, w, _ in slots]
                matrices = [matrix for *_, matrix in slots]
                value = build_leaf(stored, matrices, lp.route.view, lp.leaf.shape, np)
            else:
                value = host_value((owned.rest if lp.trainable else owned.frozen)[lp.leaf.path])
            out.append(_distribute(value, canonical_sharding(layout, lp)))
    return out


def canonical_sharding(layout: "OwnerLayout", lp: LeafPlan) -> NamedSharding:
    """How an unsharded leaf lies on the mesh: split on its largest dim that divides."""
    entries: list[Any] = [None] * len(lp.leaf.shape)
    dim = largest_divisible_dim(lp.leaf.shape, layout.num_devices)
    if dim is not None:
        entries[dim] = layout.axis_entry
    return NamedSharding(layout.mesh, P(*entries))


def _device_rows(stack: Any) -> Any:
    """``rows[d]`` is the ``[W, *dims]`` part of device ``d``; no copy where that device has it."""
    if not isinstance(stack, jax.Array) or not stack.is_fully_addressable:
        return host_value(stack)
    rows = {s.index[0].start or 0: s.data[0] for s in stack.addressable_shards}
    return rows if len(rows) == len(stack) else host_value(stack)


def _distribute(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A global array from a host array, in memory of its own.

    The copy matters: a CPU device takes an aligned numpy buffer as it is, and a donated step
    would then write into the caller's array.
    """
    return jax.make_array_from_callback(
        value.shape, sharding, lambda index: np.array(value[index], copy=True)
    )
