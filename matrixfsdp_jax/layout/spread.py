"""Deals the matrices of each wave so that a device has about the same refresh work in every step.

Plain Python. Shape legend: ``N`` devices, ``F`` phases (the steps of a period).
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from random import Random

Slot = tuple[int, int]
Work = Sequence[float]

# Descents at most, each from the best deal so far with some matrices at random in other places, and
# swaps of one descent. Large meshes need fewer: with many matrices per cell the first is good.
_MAX_DESCENTS = 2000
_SWAPS_PER_DEVICE = 20
# A busiest step this near to the mean is left as it is.
_EVEN_ENOUGH = 1.1


def spread_waves(
    classes: Sequence[tuple[Sequence[Slot], Sequence[Work]]], num_devices: int
) -> list[tuple[Slot, ...]]:
    """The slots of every class, with the devices of each wave in another order.

    Which matrices share a wave stays as it is, and so does the number of matrices that a device has
    of each class. First each matrix goes to the device of its wave whose busiest step it lengthens
    least; then matrices of one wave change places as long as that takes work off a busiest step.

    Args:
      classes: the slots ``(device, wave)`` of a class, and for each of its matrices the work in
        each phase. The class that is dealt first comes first.
      num_devices: ``N``.
    """
    deal = _Deal(classes, num_devices)
    for wave in deal.waves:
        deal.place(wave)
    deal.descend()
    random = Random(0)  # a plan is always the same
    for _ in range(_MAX_DESCENTS // num_devices**2):
        if deal.unevenness()[0] <= _EVEN_ENOUGH:
            break
        before, slots = deal.unevenness(), list(deal.devices)
        deal.disturb(random)
        deal.descend()
        if deal.unevenness() > before:
            deal.set(slots)
    return deal.slots()


class _Deal:
    """Who has which matrix, and the work of every device in every phase."""

    def __init__(
        self, classes: Sequence[tuple[Sequence[Slot], Sequence[Work]]], num_devices: int
    ) -> None:
        self._sizes = [len(slots) for slots, _ in classes]
        self._items = [slot for slots, _ in classes for slot in slots]
        self.devices = [device for device, _ in self._items]
        self._work = [work for _, works in classes for work in works]
        self._load = [[0.0] * len(self._work[0]) for _ in range(num_devices)]
        first = itertools.accumulate(self._sizes, initial=0)
        self.waves: list[list[int]] = []
        for start, (slots, _) in zip(first, classes, strict=False):
            members = range(start, start + len(slots))
            for _, wave in itertools.groupby(members, lambda i: self._items[i][1]):
                self.waves.append(list(wave))
        self._wave_of = {i: wave for wave in self.waves for i in wave}

    def place(self, wave: list[int]) -> None:
        """Give each matrix of a wave to the free device whose busiest step it lengthens least."""
        free = [self.devices[i] for i in wave]
        for i in wave:
            device = min(free, key=partial(self._after, self._work[i]))
            free.remove(device)
            self.devices[i] = device
            self._add(device, self._work[i], 1)

    def descend(self) -> None:
        """Swap as long as it takes work off a busiest step."""
        for _ in range(_SWAPS_PER_DEVICE * len(self._load)):
            if not any(self._relieve(device, phase) for device, phase in self._busiest()):
                break

    def disturb(self, random: Random) -> None:
        """Swap some matrices of a wave."""
        for _ in range(3):
            i, j = random.choices(random.choice(self.waves), k=2)
            self._swap(i, j)

    def unevenness(self) -> tuple[float, float]:
        """The busiest step over the mean, and the sum of squared loads."""
        loads = [x for own in self._load for x in own]
        return max(loads) * len(loads) / (sum(loads) or 1.0), sum(x * x for x in loads)

    def set(self, devices: list[int]) -> None:
        """Give every matrix to the device named for it."""
        self.devices = devices
        self._load = [[0.0] * len(own) for own in self._load]
        for device, work in zip(devices, self._work, strict=True):
            self._add(device, work, 1)

    def _busiest(self) -> Iterator[tuple[int, int]]:
        """Devices and phases above the mean, the busiest first."""
        cells = [(-x, d, p) for d, own in enumerate(self._load) for p, x in enumerate(own)]
        mean = -sum(x for x, _, _ in cells) / max(1, len(cells))
        for x, device, phase in sorted(cells):
            if -x > mean:
                yield device, phase

    def _relieve(self, device: int, phase: int) -> bool:
        """Swap a matrix that works in this step with the one of its wave that helps most."""
        swaps = [
            (self._gain(i, j), i, j)
            for i, owner in enumerate(self.devices)
            if owner == device and self._work[i][phase]
            for j in self._wave_of[i]
        ]
        gain, i, j = max(swaps, default=(0.0, 0, 0))
        if gain <= 1e-9 * self._load[device][phase] ** 2:
            return False
        self._swap(i, j)
        return True

    def _swap(self, i: int, j: int) -> None:
        a, b = self.devices[i], self.devices[j]
        for where, item, sign in ((a, i, -1), (b, j, -1), (a, j, 1), (b, i, 1)):
            self._add(where, self._work[item], sign)
        self.devices[i], self.devices[j] = b, a

    def slots(self) -> list[tuple[Slot, ...]]:
        """The slots, class by class."""
        new = iter([(d, wave) for d, (_, wave) in zip(self.devices, self._items, strict=True)])
        return [tuple(itertools.islice(new, size)) for size in self._sizes]

    def _add(self, device: int, work: Work, sign: int) -> None:
        self._load[device] = [a + sign * b for a, b in zip(self._load[device], work, strict=True)]

    def _after(self, work: Work, device: int) -> tuple[float, float, int]:
        own = self._load[device]
        busiest = max((a + b for a, b in zip(own, work, strict=True) if b), default=0.0)
        return busiest, sum(own), device

    def _gain(self, i: int, j: int) -> float:
        """How much the sum of squared loads falls when two matrices change places."""
        a, b = self._load[self.devices[i]], self._load[self.devices[j]]
        if a is b:
            return 0.0
        pairs = zip(a, b, self._work[i], self._work[j], strict=True)
        return sum(x * x + y * y - (x - u + v) ** 2 - (y + u - v) ** 2 for x, y, u, v in pairs)
