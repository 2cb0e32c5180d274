"""Deals the matrices of all classes at once, so that devices differ in what they own, not in work.

Equal slots per class cost every device ``ceil(count / N)`` matrices of each class. Here a device
may have more of one class and fewer of another; its *composition* says how many waves of each
class it works on. Plain Python.

Shape legend: ``N`` devices, ``C`` classes, ``W`` waves.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Distinct compositions of a plan: each is a branch of the compiled update.
MAX_COMPOSITIONS = 8
# By how much the busiest device may get slower where that saves waves.
_SLACK = 1.02

Slot = tuple[int, int]
Counts = list[list[int]]


def lower_bound(costs: Sequence[int], num_devices: int) -> float:
    """The least that the busiest device can have over the mean: ``max(largest, mean) / mean``."""
    total = sum(costs)
    return max(1.0, max(costs) * num_devices / total) if total else 1.0


def lpt(costs: Sequence[int], num_devices: int) -> list[int]:
    """The device of each item: costliest first, each to the device with the least work so far.

    Ties go to the first of the items and the lowest device. The busiest device has at most
    ``4/3 - 1/(3N)`` of the least possible.

    Reference: Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 17, 1969.
    """
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    heap = [(0, d) for d in range(num_devices)]
    devices = [0] * len(costs)
    for i in order:
        load, devices[i] = heap[0]
        heapq.heapreplace(heap, (load + costs[i], devices[i]))
    return devices


@dataclass(frozen=True)
class Item:
    """A class as far as dealing goes: matrices, the cost of one, and the elements of one."""

    count: int
    cost: int
    size: int


def deal(items: Sequence[Item], num_devices: int) -> Counts:
    """How many matrices of each class ``[C][N]`` each device owns.

    By LPT over all classes; ties go to the device with the fewest elements, then to the first.
    Every stack has as many waves as its fullest device. A class that has more than
    ``ceil(count / N)`` is therefore dealt evenly again, cheapest class first, if that leaves the
    busiest device within 2% of LPT and takes fewer elements of stacks.

    Args:
      items: the classes, costliest matrix first.
      num_devices: ``N``.
    """
    counts = _deal(items, num_devices, frozenset())
    limit = _SLACK * busiest(counts, items)
    even: frozenset[int] = frozenset()
    for k in reversed(range(len(items))):
        if max(counts[k]) > -(-items[k].count // num_devices):
            trial = _deal(items, num_devices, even | {k})
            if busiest(trial, items) <= limit and _padded(trial, items) < _padded(counts, items):
                even, counts = even | {k}, trial
    return counts


def busiest(counts: Counts, items: Sequence[Item]) -> int:
    """The work of the busiest device."""
    costs = [item.cost for item in items]
    return max((load(own, costs) for own in zip(*counts, strict=True)), default=0)


def load(waves: Sequence[int], costs: Sequence[int]) -> int:
    """The work on some waves of each class."""
    return sum(count * cost for count, cost in zip(waves, costs, strict=True))


def slots(counts: Sequence[int]) -> tuple[Slot, ...]:
    """The slots of a class in forward order; device ``d`` owns ``counts[d]``, its first waves.

    Devices that have a matrix in a wave take consecutive ones.
    """
    return tuple(
        (device, wave)
        for wave in range(max(counts, default=0))
        for device, count in enumerate(counts)
        if count > wave
    )


@dataclass(frozen=True)
class Compositions:
    """On how many waves of each class which device works.

    Attributes:
      waves: the distinct compositions, each the waves of every class.
      of: the number of its composition, ``[N][R]``, for each device and each replica that shares
        the waves (R = 1 where none does).
    """

    waves: tuple[tuple[int, ...], ...]
    of: tuple[tuple[int, ...], ...]


def compositions(
    needed: Sequence[Sequence[tuple[int, ...]]], costs: Sequence[int], most: int = MAX_COMPOSITIONS
) -> Compositions:
    """The compositions of devices that need these waves, at most ``most`` of them.

    Where there are more, two are joined to the larger number of waves of each class, those first
    whose join has the least work: pads are then worked on, but light devices carry them.

    Args:
      needed: ``[N][R]``, waves of each class.
      costs: of one matrix of each class.
      most: at least 1.
    """
    found = sorted({row for rows in needed for row in rows})
    joined = {row: row for row in found}
    alive = set(found)
    heap = [_join(a, b, costs) for a, b in itertools.combinations(found, 2)]
    heapq.heapify(heap)
    while len(alive) > most:
        _, both, a, b = heapq.heappop(heap)
        if a in alive and b in alive:
            joined |= {row: both for row, into in joined.items() if into in (a, b)}
            alive -= {a, b}
            for other in alive - {both}:
                heapq.heappush(heap, _join(both, other, costs))
            alive.add(both)
    waves = sorted(alive)
    number = {row: waves.index(joined[row]) for row in found}
    return Compositions(tuple(waves), tuple(tuple(number[row] for row in rows) for rows in needed))


def _join(
    a: tuple[int, ...], b: tuple[int, ...], costs: Sequence[int]
) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    both = tuple(map(max, a, b))
    return load(both, costs), both, a, b


def _deal(items: Sequence[Item], num_devices: int, even: frozenset[int]) -> Counts:
    """Counts by LPT, but for the classes in ``even`` at most one more on a device than another."""
    loads = [(0, 0)] * num_devices
    counts = []
    for k, item in enumerate(items):
        own = [0] * num_devices
        for device in _evenly(loads, item) if k in even else _lightest(loads, item):
            own[device] += 1
        counts.append(own)
        loads = [
            (cost + n * item.cost, size + n * item.size)
            for (cost, size), n in zip(loads, own, strict=True)
        ]
    return counts


def _lightest(loads: Sequence[tuple[int, int]], item: Item) -> Iterator[int]:
    heap = [(*each, device) for device, each in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(item.count):
        cost, size, device = heap[0]
        heapq.heapreplace(heap, (cost + item.cost, size + item.size, device))
        yield device


def _evenly(loads: Sequence[tuple[int, int]], item: Item) -> Iterator[int]:
    order = sorted(range(len(loads)), key=lambda device: (loads[device], device))
    return itertools.islice(itertools.cycle(order), item.count)


def _padded(counts: Counts, items: Sequence[Item]) -> int:
    """Elements of the stacks on a device."""
    return sum(max(own) * item.size for own, item in zip(counts, items, strict=True))
