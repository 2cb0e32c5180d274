"""In which step of a period each block is decomposed again: staggered refreshes.

The phase of a block follows from the matrices alone, and not from the devices, so that an update is
the same on any number of them; the planner then deals each wave so that the phases of a device
differ. Plain Python.

Shape legend: ``F`` steps of a period, ``B`` blocks of one shape of a matrix.
"""

from collections.abc import Iterable, Mapping, Sequence

from matrixfsdp_jax.layout.leaves import natural_key

# Blocks of a matrix that are decomposed: ``(B, cost of one)`` for each shape of a block.
Units = tuple[tuple[int, float], ...]
Phases = dict[str, tuple[tuple[int, ...], ...]]


def refresh_phases(
    names: Mapping[str, Iterable[str]], units: Mapping[str, Units], frequency: int
) -> Phases:
    """The phases in ``[0, F)`` of every block of every matrix, with about equal work in each.

    Blocks are dealt out longest first, each to the phase with the least work so far; equal ones by
    class and name, so neighbouring layers of one kind come in neighbouring steps.

    Args:
      names: class key -> names of its matrices.
      units: class key -> the blocks of one of its matrices.
      frequency: ``F``.

    Returns:
      matrix name -> per shape of a block the phases of its ``B`` blocks.
    """
    items = [
        (-cost, key, natural_key(name), group, name, blocks)
        for key, members in names.items()
        for name in members
        for group, (blocks, cost) in enumerate(units[key])
    ]
    work = [0.0] * frequency
    found: dict[str, dict[int, tuple[int, ...]]] = {}
    for cost, _, _, group, name, blocks in sorted(items):
        phases = []
        for _ in range(blocks):
            phase = min(range(frequency), key=work.__getitem__)
            work[phase] -= cost
            phases.append(phase)
        found.setdefault(name, {})[group] = tuple(phases)
    return {name: tuple(own[g] for g in sorted(own)) for name, own in found.items()}


def phase_work(phases: Sequence[Sequence[int]], units: Units, frequency: int) -> list[float]:
    """The work of one matrix in each phase."""
    work = [0.0] * frequency
    for own, (_, cost) in zip(phases, units, strict=True):
        for phase in own:
            work[phase] += cost
    return work
