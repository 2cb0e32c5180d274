"""Which storage for which mesh: the options side by side, one of them chosen, and why.

Plain Python. Bytes, memory and FLOPs are exact (see `options`); seconds are estimates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from matrixfsdp_jax.layout.costs import Method
from matrixfsdp_jax.layout.hardware import Hardware
from matrixfsdp_jax.layout.hardware import hardware as hardware_of
from matrixfsdp_jax.layout.options import Option, Options, Phase, Routed
from matrixfsdp_jax.layout.report import _bytes
from matrixfsdp_jax.layout.sources import Axes

# Estimates that differ by less count as equal.
_TIE = 0.01


@dataclass(frozen=True)
class Advice:
    """The options, the simpler ones first, and the one chosen, or None if none fits.

    Attributes:
      options: see `compare`.
      chosen: the one to take.
      why: one sentence.
      mesh: the axes and their sizes.
      hardware: what the estimates are for.
      memory_budget: bytes per device, or None for no limit.
    """

    options: tuple[Option, ...]
    chosen: Option | None
    why: str
    mesh: tuple[tuple[str, int], ...]
    hardware: Hardware
    memory_budget: int | None

    def fits(self, option: Option) -> bool:
        """Whether an option keeps to the memory budget."""
        return self.memory_budget is None or option.memory.total <= self.memory_budget

    def update_seconds(self, option: Option) -> float:
        """Estimate of the update's arithmetic."""
        return option.flops / (self.hardware.flops * self.hardware.efficiency)

    def transfer_seconds(self, option: Option, *phases: Phase) -> float:
        """Estimate of the transfers in these phases of a step."""
        return sum(
            t.bytes / self.hardware.bandwidth(t.span) for t in option.transfers if t.phase in phases
        )

    def seconds(self, option: Option) -> float:
        """What a step takes beyond the model: the update, and transfers above the least needed.

        Those of the optimizer count in full, those of forward and backward pass as far as they
        take longer than those of the option that needs least there.
        """
        model = [self.transfer_seconds(o, "forward", "backward") for o in self.options]
        own = self.transfer_seconds(option, "forward", "backward", "optimizer")
        return self.update_seconds(option) + own - min(model)


def compare(
    routed: Routed,
    mesh: Mapping[str, int],
    *,
    owner_axis: str | Sequence[str] = "fsdp",
    replica_axis: str | Sequence[str] | None = None,
    optimizer: str | Method = "muon",
    ns_steps: int = 5,
    gather_dtype: str | None = None,
    reduce_dtype: str | None = None,
    dealing: Literal["slots", "lpt", "auto"] = "slots",
    spread: bool = False,
    memory_budget: int | None = None,
    hardware: str | Hardware = "h100",
) -> Advice:
    """Compare the ways to store parameters on a mesh, and choose one.

    With ``N`` owners and ``R`` replicas they are: replicated parameters, where every device
    updates everything; sharded storage, FSDP whose gradients and updates visit their owners, by
    each replica for itself or over all ``R N`` devices; owner storage, repeated by each replica
    or shared by them. FSDP shards a leaf on the largest dim that ``N`` divides, and gathers in the
    forward pass and again in the backward pass; owner storage holds all that it has gathered.

    Of the options that fit the memory the one with the least `Advice.seconds` is chosen. Transfers
    are rings, nothing overlaps, latency is not counted. Decompositions (Shampoo, SOAP) run far
    below the peak; their time is too low in all options alike. Of estimates within 1% of the best,
    the one that receives fewest bytes wins, then the simpler one.

    Args:
      routed: every leaf with its route, from ``rules.route``.
      mesh: axis -> size. Devices of the owner axes are taken for neighbours.
      owner_axis: the axes over which parameters and matrices are dealt out (``N``).
      replica_axis: the axes over which the batch is split as well (``R``). None: all others.
      optimizer: a name in `costs.METHODS`, or a `costs.Method`.
      ns_steps: Newton-Schulz steps.
      gather_dtype: in what all options gather parameters; None keeps their own.
      reduce_dtype: in what all options sum gradients; None is float32.
      dealing: how matrices are dealt, as in `planner.make_plan`.
      spread: whether plans also spread the refreshes of Shampoo and SOAP over steps, as
        ``mfsdp.plan`` does. It changes no figure, only who owns which matrix of a wave, and takes
        minutes for tens of thousands of matrices.
      memory_budget: bytes per device; None takes the hardware's memory. What a model needs for
        activations comes on top.
      hardware: a name in `hardware.HARDWARE`, or a record.

    Raises:
      ValueError: for a mesh, axes, hardware or budget that cannot be, and as `planner.make_plan`.
    """
    device = hardware_of(hardware)
    owners, others = _checked_axes(mesh, owner_axis, replica_axis)
    if memory_budget is not None and memory_budget < 1:
        raise ValueError(f"memory_budget={memory_budget} must be at least 1 byte per device")
    how = {
        "optimizer": optimizer,
        "ns_steps": ns_steps,
        "gather_dtype": gather_dtype,
        "reduce_dtype": reduce_dtype,
        "dealing": dealing,
    }
    options = tuple(Options(routed, mesh, owners, others, how, spread))
    budget = device.memory if memory_budget is None else memory_budget
    return _chosen(Advice(options, None, "", tuple(mesh.items()), device, budget))


def _checked_axes(
    mesh: Mapping[str, int],
    owner_axis: str | Sequence[str],
    replica_axis: str | Sequence[str] | None,
) -> tuple[Axes, Axes]:
    """The owner axes, and the replica axes of size above 1."""
    if not mesh or min(mesh.values()) < 1:
        raise ValueError(f"mesh={dict(mesh)} must have an axis, and sizes of at least 1")
    owners = (owner_axis,) if isinstance(owner_axis, str) else tuple(owner_axis)
    if replica_axis is None:
        replica_axis = [axis for axis in mesh if axis not in owners]
    others = (replica_axis,) if isinstance(replica_axis, str) else tuple(replica_axis)
    if not owners or sorted(owners + others) != sorted(mesh):
        raise ValueError(
            f"owner_axis={owners} and replica_axis={others} must name each axis of the mesh "
            f"{dict(mesh)} once; leave axes of tensor parallelism out of it"
        )
    return owners, tuple(a for a in others if mesh[a] > 1)


def _chosen(advice: Advice) -> Advice:
    """The advice with the choice and its reason."""
    fitting = [option for option in advice.options if advice.fits(option)]
    if not fitting:
        return replace(advice, why=_none_fits(advice))
    limit = min(map(advice.seconds, fitting)) * (1 + _TIE)
    equal = [option for option in fitting if advice.seconds(option) <= limit]
    best = min(equal, key=lambda option: option.received())  # the first, so the simpler one
    why = [f"{best.name} adds an estimated {_seconds_text(advice.seconds(best))} to a step"]
    others = sorted((o for o in fitting if o is not best), key=advice.seconds)
    if others:
        why.append(f", {_versus(advice, best, others[0])}")
    too_big = [o for o in advice.options if not advice.fits(o)]
    faster = [o for o in too_big if advice.seconds(o) < advice.seconds(best)]
    if faster:
        fastest = min(faster, key=advice.seconds)
        took, missing = _seconds_text(advice.seconds(fastest)), _missing(advice, fastest)
        why.append(f"; {fastest.name} would add {took} but needs {missing} more than there is")
    if advice.memory_budget is not None:
        used, given = _bytes(best.memory.total), _bytes(advice.memory_budget)
        why.append(f"; its {used} fit into {given} per device")
    return replace(advice, chosen=best, why="".join([*why, "."]))


def _versus(advice: Advice, best: Option, other: Option) -> str:
    """How the best option compares with the next one that fits."""
    took, ratio = advice.seconds(other), advice.seconds(other) / (advice.seconds(best) or 1.0)
    what = f"{other.name} ({_seconds_text(took)})"
    if ratio > 1 + _TIE:
        return f"{ratio:.2f} x faster than {what}"
    sent, less = other.received(), best.received()
    if less < sent:
        return f"about the same as {what}, and receives {_bytes(less)} instead of {_bytes(sent)}"
    return f"about the same as {what}, which is less simple"


def _none_fits(advice: Advice) -> str:
    smallest = min(advice.options, key=lambda option: option.memory.total)
    return (
        f"no option fits into {_bytes(advice.memory_budget or 0)} per device: the smallest, "
        f"{smallest.name}, needs {_bytes(smallest.memory.total)}, "
        f"{_missing(advice, smallest)} too much; use more owners, a narrower dtype, "
        "or an optimizer with less state."
    )


def _missing(advice: Advice, option: Option) -> str:
    return _bytes(option.memory.total - (advice.memory_budget or 0))


def _seconds_text(seconds: float) -> str:
    """``"12.3 ms"``, three significant digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds:.0f} s"
    return f"{seconds / 1e-6:.3g} us"
