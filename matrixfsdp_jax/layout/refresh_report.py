"""How evenly the decompositions of Shampoo and SOAP fall on devices and steps, and how they could.

Work is counted as the sum of ``k^3`` over the factors that are decomposed. Plain Python.

Shape legend: ``N`` devices on the owner axis, ``F`` steps of a period.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from matrixfsdp_jax.layout.costs import factor_bytes, method
from matrixfsdp_jax.layout.phases import phase_work, refresh_phases
from matrixfsdp_jax.layout.spec import Plan


@dataclass(frozen=True)
class Peak:
    """The largest of several amounts of work, against their mean and the least it could be.

    Attributes:
      largest: the largest amount.
      mean: the mean of all.
      bound: what the largest has at least, however the work is dealt out.
      reason: why, in a few words.
    """

    largest: float
    mean: float
    bound: float
    reason: str

    @property
    def balance(self) -> float:
        """The largest over the mean; 1 is perfect."""
        return self.largest / self.mean

    @property
    def over_bound(self) -> float:
        """The largest over the bound; 1 is the best that there is."""
        return self.largest / self.bound


@dataclass(frozen=True)
class ClassRefresh:
    """The decompositions of a class.

    Attributes:
      key: of the class.
      matrices: how many it has.
      waves: its slots on every device.
      blocks: of one matrix.
      work: of one matrix, ``k^3`` summed.
      factor_bytes: of one matrix, its factors and their roots (or eigenvectors).
    """

    key: str
    matrices: int
    waves: int
    blocks: int
    work: float
    factor_bytes: int


@dataclass(frozen=True)
class Refresh:
    """All decompositions of one period of ``frequency`` steps, every block once.

    Attributes:
      frequency: ``F``.
      classes: those that have any, in the plan's order.
      work: ``[N][F]``, of each device in each step of a period; step ``t`` is phase ``t % F``.
      matrix_bound, block_bound: ``(bound, reason)`` for a device over a period, and for a device in
        one step; see `refresh`.
    """

    frequency: int
    classes: tuple[ClassRefresh, ...]
    work: tuple[tuple[float, ...], ...]
    matrix_bound: tuple[float, str]
    block_bound: tuple[float, str]

    @cached_property
    def owner(self) -> Peak:
        """The device that has most to do in a period."""
        sums = [sum(own) for own in self.work]
        return Peak(max(sums), sum(sums) / len(sums), *self.matrix_bound)

    @cached_property
    def step(self) -> Peak:
        """The step in which one device has most to do."""
        return Peak(max(map(max, self.work)), self.owner.mean / self.frequency, *self.block_bound)

    @property
    def lockstep_balance(self) -> float:
        """The time of a period if each step takes as long as its busiest device, over the mean."""
        return sum(map(max, zip(*self.work, strict=True))) / self.owner.mean


def refresh(plan: Plan) -> Refresh | None:
    """Return the decompositions of a plan, or None where its method has none.

    No plan with these waves has a lower ``owner.bound``:

    - The busiest device has no less than the mean.
    - Of the ``j N + 1`` costliest matrices some device owns ``j + 1``, so it has no less than the
      ``j + 1`` cheapest of them; for ``j = 0`` that is the costliest of all. A class of ``c``
      matrices alone so puts ``ceil(c / N)`` on one device.
    - A class has no more than ``W = ceil(c / N)`` slots on a device, so every device owns at least
      ``c - (N - 1) W`` of its matrices (all ``W`` where ``N`` divides ``c``), and the same holds of
      the other matrices on top of these.

    The bound of a step counts in the same way blocks in ``N F`` pairs of a device and a step, and
    is no less than that of a device over ``F``.
    """
    record = method(plan.optimizer)
    frequency, num_devices = record.refresh_frequency, plan.num_devices
    units = {c.key: record.refresh_units(c.shape) for c in plan.classes}
    phases = refresh_phases(
        {c.key: [matrix.name for matrix in c.matrices] for c in plan.classes}, units, frequency
    )
    work = [[0.0] * frequency for _ in range(num_devices)]
    classes: list[ClassRefresh] = []
    every_device = 0.0
    matrices: list[float] = []
    others: list[float] = []
    blocks: list[float] = []
    for c in plan.classes:
        cost = sum(count * each for count, each in units[c.key])
        if not cost:
            continue
        count = len(c.matrices)
        num_blocks = sum(n for n, _ in units[c.key])
        per_matrix = (num_blocks, cost, factor_bytes(record, c))
        classes.append(ClassRefresh(c.key, count, c.num_waves, *per_matrix))
        fixed = max(0, count - (num_devices - 1) * c.num_waves)
        every_device += fixed * cost
        matrices += [cost] * count
        others += [cost] * (count - num_devices * fixed)
        blocks += [each for n, each in units[c.key] for _ in range(n * count)]
        for matrix, (device, _) in zip(c.matrices, c.slots, strict=True):
            own = phase_work(phases[matrix.name], units[c.key], frequency)
            work[device] = [a + b for a, b in zip(work[device], own, strict=True)]
    if not classes:
        return None

    least, why = _fullest(others, num_devices, "matrices", "on one device")
    mean = (sum(matrices) / num_devices, "the mean")
    matrix_bound = max(
        mean,
        _fullest(matrices, num_devices, "matrices", "on one device"),
        (every_device + least, f"{why}, beside what full waves give to each"),
        key=lambda bound: bound[0],
    )
    spread = (
        "the mean" if matrix_bound is mean else "the least of the busiest owner, in equal steps"
    )
    block_bound = max(
        (matrix_bound[0] / frequency, spread),
        _fullest(blocks, num_devices * frequency, "blocks", "in one step of a device"),
        key=lambda bound: bound[0],
    )
    return Refresh(frequency, tuple(classes), tuple(map(tuple, work)), matrix_bound, block_bound)


def _fullest(costs: Sequence[float], bins: int, what: str, where: str) -> tuple[float, str]:
    """What the fullest of ``bins`` holds at least: ``j + 1`` of the ``j bins + 1`` costliest."""
    largest = sorted(costs, reverse=True)
    sums = [0.0, *accumulate(largest)]
    found = [(sums[top] - sums[top - j - 1], j) for j, top in enumerate(range(1, len(sums), bins))]
    least, j = max(found, key=lambda pair: (pair[0], -pair[1]), default=(0.0, 0))
    if j == 0:
        return least, f"the costliest of the {what}"
    return least, f"{j + 1} of the {j * bins + 1} costliest {what} meet {where}"


def lines(found: Refresh) -> list[str]:
    """The balance in plain words, one line (to be wrapped) for each figure."""
    owner, step = found.owner, found.step
    every = "every step" if found.frequency == 1 else f"once in {found.frequency} steps"
    text = [
        f"decomposed {every}: busiest owner has {owner.balance:.2f} x the mean k^3, "
        f"{owner.over_bound:.2f} x the least possible with these waves ({owner.reason})"
    ]
    if found.frequency > 1:
        text.append(
            f"busiest step of an owner: {step.balance:.2f} x the mean step, "
            f"{step.over_bound:.2f} x the least possible ({step.reason})"
        )
        if len(found.work) > 1:
            text.append(
                f"if each step waits for its busiest owner: {found.lockstep_balance:.2f} x the mean"
            )
    return text


def to_dict(found: Refresh) -> dict[str, Any]:
    """The same as JSON-ready data, every number exact."""

    def peak(p: Peak) -> dict[str, Any]:
        return {
            "largest": p.largest,
            "mean": p.mean,
            "balance": p.balance,
            "bound": p.bound,
            "bound_reason": p.reason,
            "over_bound": p.over_bound,
        }

    return {
        "frequency": found.frequency,
        "classes": [asdict(each) for each in found.classes],
        "work": [list(own) for own in found.work],
        "owner": peak(found.owner),
        "step": peak(found.step),
        "lockstep_balance": found.lockstep_balance,
    }
