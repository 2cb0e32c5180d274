"""Deals the matrices of a model out to devices: shapes in, layout out, always the same.

Shape legend: ``N`` devices on the owner axis, ``W`` waves.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Literal, get_args

from matrixfsdp_jax.layout import balance
from matrixfsdp_jax.layout.costs import Method, method
from matrixfsdp_jax.layout.leaves import natural_key
from matrixfsdp_jax.layout.phases import phase_work, refresh_phases
from matrixfsdp_jax.layout.spec import (
    Dealing,
    Leaf,
    LeafPlan,
    LeafRoute,
    Matrix,
    Plan,
    ShapeClass,
    View,
    is_inexact,
)
from matrixfsdp_jax.layout.spread import spread_waves

Order = Sequence[str] | Callable[[str], Any]

# "auto" takes "lpt" where it takes more than this part off what the busiest device pays.
_WORTH_BRANCHES = 0.05

CAST_DTYPES = ("bfloat16", "float16", "float32", "float64")


def make_plan(
    routed: Sequence[tuple[Leaf, LeafRoute]],
    num_devices: int,
    *,
    optimizer: str | Method = "muon",
    ns_steps: int = 5,
    order: Order | None = None,
    gather_dtype: str | None = None,
    reduce_dtype: str | None = None,
    rest_shard_min_size: int = 0,
    dealing: Literal["slots", "lpt", "auto"] = "slots",
) -> Plan:
    """Return the layout of routed leaves over ``num_devices`` devices.

    Matrices (and tensors) of one stored shape and dtype form a class. Tall matrices are stored
    transposed where the optimizer is ``oriented``. In forward order, matrix k of a class
    goes to device ``k % N`` in wave ``k // N``, so that neighbouring layers share a wave. A last
    wave that is not full goes to the devices with the least work so far, the costliest classes
    first; in every class a device thus owns at most one matrix more than another. For an optimizer
    whose refreshes are staggered, the matrices of a wave are dealt so that each device has about
    the same work in every step.

    That is ``dealing="slots"``: all devices run one program on equal slots, and pay the pads where
    N does not divide the counts. ``"lpt"`` deals all classes together, the costliest matrices
    first, each to the device with the least work (see `balance.deal`), and the update branches on
    what a device owns. Owners in a wave still take consecutive matrices, and refreshes are
    spread as above, since that leaves to each device its number of matrices of a class. Stacks
    have as many waves as their fullest device owns, so memory and bytes gathered can grow.

    The forward order is that of the leaves' paths, numbers compared as numbers, then of batch
    index, then of split block. Leaves that are stacked together (all leaves under
    ``blocks/`` have the same leading dim, say of a scan over layers) run layer by layer: ``q[0]``,
    ``k[0]``, ``q[1]``, ``k[1]``.

    Args:
      routed: every leaf of the tree with its route; the plan keeps their sequence.
      num_devices: N, at least 1.
      optimizer: what a matrix costs, which state it has and which orders are taken: a name in
        `costs.METHODS`, or a `costs.Method`.
      ns_steps: Newton-Schulz steps K, at least 1.
      order: the forward order of the matrix leaves: all their paths, or a sort key on paths
        (equal keys fall back on the default order).
      gather_dtype: floating dtype in which parameters are gathered; None keeps each leaf's own.
      reduce_dtype: floating dtype in which gradients are summed over devices; None is float32
        (float64 for float64 leaves).
      rest_shard_min_size: rest and frozen leaves with fewer elements are replicated. The others
        are sharded on their largest dim that N divides, where there is one.
      dealing: ``"slots"``, ``"lpt"``, or ``"auto"``: ``"lpt"`` where the busiest device then pays
        over 5% fewer FLOPs, else ``"slots"``. The plan names the one taken.

    Raises:
      ValueError: if an argument is out of its range, there is no leaf, ``order`` does not name
        every matrix leaf exactly once, a matrix leaf cannot be read as its view says, or the
        optimizer does not take its order.
    """
    _check_options(num_devices, ns_steps, gather_dtype, reduce_dtype, rest_shard_min_size)
    if dealing not in ("auto", *get_args(Dealing)):
        raise ValueError(f"dealing={dealing!r} must be 'auto' or one of {get_args(Dealing)}")
    record = method(optimizer)
    if not routed:
        raise ValueError("the tree has no leaf, so there is nothing to lay out; give parameters")
    for leaf, route in routed:
        if route.route == "matrix":
            _check_matrix_leaf(leaf, route, record)

    members: dict[tuple[tuple[int, ...], str], list[Matrix]] = defaultdict(list)
    for matrix in _forward(routed, order, record.oriented):
        members[matrix.stored_shape, routed[matrix.leaf][0].dtype].append(matrix)
    flops = {shape: record.matrix_flops(shape, ns_steps) for shape, _ in members}

    costliest = sorted(members, key=lambda c: (-flops[c[0]], c))
    items = [balance.Item(len(members[c]), flops[c[0]], prod(c[0])) for c in costliest]
    slots, dealt = _dealt(items, num_devices, dealing)
    classes = []
    for (shape, dtype), own in zip(costliest, slots, strict=True):
        waves = 1 + max(wave for _, wave in own)
        matrices = tuple(members[shape, dtype])
        classes.append(ShapeClass(shape, dtype, num_devices, waves, matrices, own))
    classes = _spread(classes, record, num_devices)

    return Plan(
        num_devices=num_devices,
        optimizer=optimizer,
        ns_steps=ns_steps,
        leaves=tuple(_leaf_plan(*pair, num_devices, rest_shard_min_size) for pair in routed),
        classes=tuple(sorted(classes, key=lambda c: (c.shape, c.dtype))),
        gather_dtype=gather_dtype,
        reduce_dtype=reduce_dtype,
        dealing=dealt,
    )


# Replicas share the owners' work if at most this part of the slots, by elements, would be pads.
_MOST_PADS = 0.25


def share_waves(plan: Plan, replicas: int, how: str = "auto") -> tuple[Plan, bool]:
    """The plan with waves that ``replicas`` can share, and whether they do.

    Each replica has an equal number of waves of every class, which pads them to a multiple of
    ``replicas``.

    Args:
      plan: of one replica.
      replicas: R, the number of replicas.
      how: ``"each"`` to share nothing, ``"shared"``, or ``"auto"`` to share unless more than a
        quarter of the elements would be pads.
    """
    classes = tuple(
        replace(c, num_waves=-(-c.num_waves // replicas) * replicas) for c in plan.classes
    )
    slots = sum(c.num_devices * c.num_waves * c.size for c in classes)
    used = sum(len(c.matrices) * c.size for c in classes)
    if how == "each" or (how == "auto" and slots - used > _MOST_PADS * slots):
        return replace(plan, replicas=replicas), False
    return replace(plan, classes=classes, replicas=replicas, shared=True), True


def _check_options(
    num_devices: int,
    ns_steps: int,
    gather_dtype: str | None,
    reduce_dtype: str | None,
    rest_shard_min_size: int,
) -> None:
    lowest = {
        "num_devices": (num_devices, 1),
        "ns_steps": (ns_steps, 1),
        "rest_shard_min_size": (rest_shard_min_size, 0),
    }
    for name, (value, least) in lowest.items():
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    for name, dtype in (
        ("gather_dtype", gather_dtype or "float32"),
        ("reduce_dtype", reduce_dtype or "float32"),
    ):
        if dtype not in CAST_DTYPES:
            raise ValueError(f"{name} is {dtype!r}; it must be one of {', '.join(CAST_DTYPES)}")


def _check_matrix_leaf(leaf: Leaf, route: LeafRoute, record: Method) -> None:
    what = f"leaf {leaf.path!r} ({leaf.dtype}{list(leaf.shape)}) is routed to 'matrix' but"
    view = route.view
    if view is None:
        raise ValueError(f"{what} its route has no view; give a MatrixView or route it to 'rest'")
    if sorted(view.permutation) != list(range(len(leaf.shape))):
        raise ValueError(
            f"{what} the dims of its view {view.permutation} do not name each of "
            f"its {len(leaf.shape)} dims once; correct the view"
        )
    if not is_inexact(leaf.dtype) or leaf.size == 0:
        raise ValueError(f"{what} has no gradient or no element; route it to 'rest'")
    refusal = record.refusal(view, leaf.shape)
    if refusal:
        raise ValueError(f"{what} {refusal}")
    item = view.item_shape(leaf.shape)
    if view.splits and (min(view.splits) < 1 or sum(view.splits) != item[view.split_axis]):
        side = f"{item[view.split_axis]} {('rows', 'cols')[view.split_axis]}"
        raise ValueError(
            f"{what} its splits {view.splits} do not add up to its {side}; "
            "give positive sizes whose sum is that"
        )


def largest_divisible_dim(shape: tuple[int, ...], num_devices: int) -> int | None:
    """The dim over which an array is sharded: the largest that ``num_devices`` divides.

    The first among equals; None, so replicated, where there is none, the array is empty, or there
    is but one device.
    """
    if num_devices == 1 or 0 in shape:
        return None
    divisible = [dim for dim, size in enumerate(shape) if size % num_devices == 0]
    return max(divisible, key=lambda dim: shape[dim], default=None)


def _leaf_plan(leaf: Leaf, route: LeafRoute, num_devices: int, min_size: int) -> LeafPlan:
    shard_dim = None
    if route.route != "matrix" and leaf.size >= min_size:
        shard_dim = largest_divisible_dim(leaf.shape, num_devices)
    trainable = route.route != "frozen" and is_inexact(leaf.dtype)
    return LeafPlan(leaf, route, trainable, shard_dim)


Slots = tuple[tuple[int, int], ...]


def _dealt(
    items: Sequence[balance.Item], num_devices: int, dealing: str
) -> tuple[list[Slots], Dealing]:
    """The slots of every class, and how they were dealt."""
    if items and dealing != "slots":
        counts = balance.deal(items, num_devices)
        needed = [[row] for row in zip(*counts, strict=True)]
        costs = [item.cost for item in items]
        branches = balance.compositions(needed, costs).waves
        busiest = max(balance.load(waves, costs) for waves in branches)
        every = sum(-(-item.count // num_devices) * item.cost for item in items)
        if dealing == "lpt" or busiest < (1 - _WORTH_BRANCHES) * every:
            return [balance.slots(own) for own in counts], "lpt"
    loads = [0] * num_devices
    slots = []
    for item in items:
        own = _deal(item.count, loads)
        for device, _ in own:
            loads[device] += item.cost
        slots.append(own)
    return slots, "slots"


def _deal(count: int, loads: Sequence[int]) -> Slots:
    """The slots ``(device, wave)`` of ``count`` matrices of a class, in forward order."""
    num_devices = len(loads)
    waves, left = divmod(count, num_devices)
    full = [(device, wave) for wave in range(waves) for device in range(num_devices)]
    lightest = sorted(range(num_devices), key=lambda device: (loads[device], device))
    return tuple(full + [(device, waves) for device in lightest[:left]])


def _spread(classes: Sequence[ShapeClass], record: Method, num_devices: int) -> list[ShapeClass]:
    """The classes with each wave dealt so that refreshes of a device fall in different steps."""
    frequency = record.refresh_frequency
    units = {c.key: record.refresh_units(c.shape) for c in classes}
    if frequency == 1 or num_devices == 1 or not any(units.values()):
        return list(classes)
    names = {c.key: [matrix.name for matrix in c.matrices] for c in classes}
    phases = refresh_phases(names, units, frequency)
    work = [
        [phase_work(phases.get(matrix.name, ()), units[c.key], frequency) for matrix in c.matrices]
        for c in classes
    ]
    slots = spread_waves([(c.slots, w) for c, w in zip(classes, work, strict=True)], num_devices)
    return [replace(c, slots=own) for c, own in zip(classes, slots, strict=True)]


def _forward(
    routed: Sequence[tuple[Leaf, LeafRoute]], order: Order | None, oriented: bool
) -> list[Matrix]:
    """All matrices in forward order.

    The sort key of a matrix is ``(rank of its leaf, block)``, and before it, for each batch dim,
    the rank of the first leaf that is stacked together with its leaf, and its batch index.
    """
    ranks = _ranks([leaf.path for leaf, route in routed if route.route == "matrix"], order)
    stacks = _Stacks([leaf for leaf, _ in routed])
    first_rank: dict[tuple[str, ...], int] = {}
    for path in sorted(ranks, key=ranks.__getitem__):
        parts = _parts(path)
        for depth in range(len(parts) + 1):
            first_rank.setdefault(parts[:depth], ranks[path])

    keyed = []
    for index, (leaf, route) in enumerate(routed):
        if route.route != "matrix" or route.view is None:
            continue
        groups = [first_rank[module] for module in stacks.of(leaf, route.view.batch_dims)]
        for batch, block, matrix in _matrices(index, leaf, route.view, oriented):
            stacked = itertools.chain.from_iterable(zip(groups, batch, strict=True))
            keyed.append(((*stacked, ranks[leaf.path], block), matrix))
    return [matrix for _, matrix in sorted(keyed, key=lambda pair: pair[0])]


def _ranks(paths: Sequence[str], order: Order | None) -> dict[str, int]:
    """The place of each matrix leaf in forward order."""
    if order is None:
        ordered: Sequence[str] = sorted(paths, key=natural_key)
    elif callable(order):
        key = order
        ordered = sorted(sorted(paths, key=natural_key), key=key)
    else:
        ordered = order
        wrong = {
            "missing": sorted(set(paths) - set(order), key=natural_key),
            "not a matrix leaf": sorted(set(order) - set(paths), key=natural_key),
            "given more than once": [path for path, k in Counter(order).items() if k > 1],
        }
        if any(wrong.values()):
            found = "; ".join(f"{what}: {', '.join(w)}" for what, w in wrong.items() if w)
            raise ValueError(f"order must name every matrix leaf exactly once. {found}")
    return {path: rank for rank, path in enumerate(ordered)}


class _Stacks:
    """Which leaves are stacked together: those of a module all of whose leaves share leading dims.

    A list is no such module: ``blocks/0/experts`` and ``blocks/1/experts`` are two stacks, even
    where a model has nothing but experts.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._lead: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._children: dict[tuple[str, ...], set[str]] = defaultdict(set)
        for leaf in leaves:
            parts = _parts(leaf.path)
            # A scalar, such as the count of a random stream, is in no stack and hinders none.
            for depth in range(len(parts) if leaf.shape else 0):
                prefix = parts[:depth]
                lead = self._lead.setdefault(prefix, leaf.shape)
                pairs = zip(lead, leaf.shape, strict=False)
                shared = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
                self._lead[prefix] = tuple(size for size, _ in shared)
                self._children[prefix].add(parts[depth])

    def of(self, leaf: Leaf, batch_dims: tuple[int, ...]) -> Iterator[tuple[str, ...]]:
        """For each batch dim of a leaf, the path of the module over which it is stacked.

        It is the outermost one below the top level of the tree, else the leaf itself.
        """
        parts = _parts(leaf.path)
        leading = batch_dims == tuple(range(len(batch_dims)))
        depth = min(1, len(parts) - 1) if leading else len(parts)
        for dim in batch_dims:
            while depth < len(parts) and not self._is_stacked(parts[:depth], dim):
                depth += 1
            yield parts[:depth]

    def _is_stacked(self, module: tuple[str, ...], dim: int) -> bool:
        children = self._children[module]
        is_list = all(child.isdigit() for child in children)
        return len(children) > 1 and not is_list and len(self._lead[module]) > dim


def _parts(path: str) -> tuple[str, ...]:
    return tuple(path.split("/"))


def _matrices(
    index: int, leaf: Leaf, view: View, oriented: bool
) -> Iterator[tuple[tuple[int, ...], int, Matrix]]:
    """Every matrix of a leaf with its indices over the batch dims and its block."""
    item, axis = view.item_shape(leaf.shape), view.split_axis
    blocks = [(*item[:axis], size, *item[axis + 1 :]) for size in view.splits] or [item]
    starts = [0, *itertools.accumulate(view.splits)]
    batches = itertools.product(*(range(leaf.shape[d]) for d in view.batch_dims))
    for flat, batch in enumerate(batches):
        for block, dims in enumerate(blocks):
            transposed = oriented and len(dims) == 2 and dims[0] > dims[1]
            name = leaf.path
            if batch:
                name += f"[{','.join(map(str, batch))}]"
            if view.splits:
                name += f":{block}"
            matrix = Matrix(name, index, flat, starts[block], dims, transposed, *view.fans(dims))
            yield batch, block, matrix
