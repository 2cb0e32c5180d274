"""The ways to store parameters on a mesh, each with its bytes, memory and FLOPs per device.

Plain Python; all figures are exact integers that come from plans.

Shape legend: ``N`` devices on the owner axes, ``R`` replicas of them, ``W`` waves.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from matrixfsdp_jax.layout import balance
from matrixfsdp_jax.layout.costs import Costs, costs, matrix_flops, method
from matrixfsdp_jax.layout.planner import make_plan, share_waves
from matrixfsdp_jax.layout.sources import Axes, Source, settle, source
from matrixfsdp_jax.layout.spec import Leaf, LeafPlan, LeafRoute, Plan, dtype_bytes

Phase = Literal["forward", "backward", "optimizer"]
Storage = Literal["owner", "sharded", "replicated"]
Replicas = Literal["each", "shared"]
Routed = Sequence[tuple[Leaf, LeafRoute]]


@dataclass(frozen=True)
class Transfer:
    """What one device receives in a phase of a step, in collectives of a kind over some axes.

    ``span`` is the number of neighbouring devices within which such a collective stays.
    """

    phase: Phase
    kind: str
    axes: Axes
    span: int
    bytes: int


@dataclass(frozen=True)
class Memory:
    """Bytes on a device. ``working`` is what comes and goes, on top of all that stays."""

    parameters: int
    gradients: int
    state: int
    frozen: int
    working: int

    @property
    def total(self) -> int:
        """All of them; activations are not counted."""
        return self.parameters + self.gradients + self.state + self.frozen + self.working


@dataclass(frozen=True)
class Balance:
    """Update FLOPs of the busiest device over the mean: as planned, by LPT, at the very least."""

    plan: float
    lpt: float
    bound: float


@dataclass(frozen=True)
class Option:
    """One way to store parameters and to deal out their updates.

    Attributes:
      storage: as in ``mfsdp.plan``; ``"replicated"`` is an optimizer without a layout.
      owner_axis: mesh axes over which matrices are dealt out; none for ``"replicated"``.
      replica_axis: the other axes over which the batch is split.
      replicas: whether these replicas repeat the owners' work (``"each"``) or share it.
      plan: who owns what.
      transfers: all that a device receives in a step.
      memory: bytes on a device.
      flops: FLOPs of the updates on the busiest device, with pads.
      balance: how even they are, over all devices that share the work.
      padding_factor: elements of the owner stacks over those of the matrices.
    """

    storage: Storage
    owner_axis: Axes
    replica_axis: Axes
    replicas: Replicas
    plan: Plan = field(repr=False)
    transfers: tuple[Transfer, ...] = field(repr=False)
    memory: Memory
    flops: int
    balance: Balance
    padding_factor: float

    @property
    def name(self) -> str:
        """``"owner storage over fsdp, shared by the replicas over replica"``."""
        if self.storage == "replicated":
            return "replicated parameters"
        how = ""
        if self.replica_axis:
            who = "shared by the" if self.replicas == "shared" else "repeated by the"
            how = f", {who} replicas over {' and '.join(self.replica_axis)}"
        return f"{self.storage} storage over {' and '.join(self.owner_axis)}{how}"

    @property
    def arguments(self) -> dict[str, Any] | None:
        """Keyword arguments of ``mfsdp.plan``; None where the optimizer takes no layout."""
        if self.storage == "replicated":
            return None
        found: dict[str, Any] = {"storage": self.storage, "owner_axis": self.owner_axis}
        if self.storage == "owner" and self.replica_axis:
            found |= {"replica_axis": self.replica_axis, "replicas": self.replicas}
        if self.plan.dealing == "lpt":
            found["dealing"] = "lpt"
        return found

    def received(self, *phases: Phase) -> int:
        """Bytes that a device receives in these phases of a step (in all, if none is named)."""
        return sum(t.bytes for t in self.transfers if not phases or t.phase in phases)


@dataclass(frozen=True)
class Options:
    """The options for a mesh.

    Attributes:
      routed: every leaf with its route.
      mesh: axis -> size.
      owners: the axes over which parameters are dealt out, ``N`` devices.
      others: the axes of the replicas, ``R`` of them, each of size above 1.
      how: options of `planner.make_plan`.
      spread: whether plans spread staggered refreshes, which changes no figure.
    """

    routed: Routed
    mesh: Mapping[str, int]
    owners: Axes
    others: Axes
    how: Mapping[str, Any]
    spread: bool = False

    def __iter__(self) -> Iterator[Option]:
        """The simpler ones first."""
        yield self._replicated()
        yield self._sharded(self.owners)
        if self.others:
            yield self._sharded(self.others + self.owners)
        yield self._owner("each")
        if self.others:
            yield self._owner("shared")

    @cached_property
    def n(self) -> int:
        """``N``."""
        return math.prod(self.mesh[a] for a in self.owners)

    @cached_property
    def r(self) -> int:
        """``R``."""
        return math.prod(self.mesh[a] for a in self.others)

    def _plan(self, routed: Routed, num_devices: int) -> Plan:
        optimizer = self.how["optimizer"]
        record = method(optimizer)
        if not self.spread:
            record = replace(record, refresh_units=lambda dims: ())
        plan = make_plan(routed, num_devices, **{**self.how, "optimizer": record})
        return replace(plan, optimizer=optimizer)

    # ---- replicated parameters -----------------------------------------------------------------

    def _replicated(self) -> Option:
        """All gradients are summed over all devices; every device updates everything."""
        plan = self._plan(self.routed, 1)
        cost = costs(plan)
        transfers = [self._all_reduced(sum(_summed(plan)))]
        memory = _memory(cost, cost.state.padded, working=0)
        return _option("replicated", (), (), "each", plan, transfers, memory)

    # ---- owner storage -------------------------------------------------------------------------

    def _owner(self, replicas: Replicas) -> Option:
        """Whole matrices live at their owners; everything is gathered at once for the model."""
        plan = self._plan(self.routed, self.n)
        model = costs(plan)  # what is gathered: not the waves of pads that sharing adds
        if self.others:
            plan, _ = share_waves(plan, self.r, replicas)
        parts = self.r if replicas == "shared" else 1
        cut, kept = (costs(part) for part in _cut_once_more(plan, parts))
        memory = replace(
            _memory(costs(plan), cut.state.padded // parts + kept.state.padded, model.gathered),
            gradients=cut.gradients.padded // parts + kept.gradients.padded,
        )
        new = _ring(cut.parameters.padded, parts)
        transfers = [
            *self._of_model(plan, model, parts),
            self._transfer("optimizer", "all-gather", self.others, new),
        ]
        return _option("owner", self.owners, self.others, replicas, plan, transfers, memory)

    # ---- sharded storage -----------------------------------------------------------------------

    def _sharded(self, axes: Axes) -> Option:
        """FSDP, which gathers again in the backward pass; gradients visit their owners."""
        count = math.prod(self.mesh[a] for a in axes)
        pairs = zip(self.routed, self._fsdp.leaves, strict=True)
        sources = [self._source(leaf, route, own.shard_dim) for (leaf, route), own in pairs]
        plan = settle(self._plan(self.routed, count), sources, axes, self.mesh)
        cost, stacks = costs(self._fsdp), costs(replace(plan, leaves=()))
        kinds = [route.route for _, route in self.routed]
        kept = zip(self._fsdp.leaves, kinds, strict=True)
        rest = costs(replace(self._fsdp, leaves=tuple(p for p, k in kept if k == "rest")))
        # Two blocks while the model runs; later, at the owners, gradients and updates.
        working = max(_two_blocks(self.routed, plan), 2 * stacks.parameters.padded)
        memory = _memory(cost, stacks.state.padded + rest.state.padded, working)
        transfers = list(self._of_model(self._fsdp, cost, 1))
        again = [replace(t, phase="backward") for t in transfers if t.phase == "forward"]
        transfers += [*again, *self._moved(plan, axes, sources)]
        others = tuple(a for a in self.others if a not in axes)
        return _option("sharded", axes, others, "each", plan, transfers, memory)

    @cached_property
    def _fsdp(self) -> Plan:
        """All leaves as FSDP shards them: on the largest dim that ``N`` divides."""
        rest = LeafRoute("rest", "sharded by FSDP")
        routed = [(leaf, rest if r.route == "matrix" else r) for leaf, r in self.routed]
        return self._plan(routed, self.n)

    def _source(self, leaf: Leaf, route: LeafRoute, shard_dim: int | None) -> Source | None:
        """How the matrices of a leaf lie; None for a leaf that is no matrix or is moved whole."""
        if route.route != "matrix":
            return None
        dims = [self.owners if d == shard_dim else () for d in range(len(leaf.shape))]
        return source(LeafPlan(leaf, route, trainable=True), dims)

    def _moved(
        self, plan: Plan, axes: Axes, sources: Sequence[Source | None]
    ) -> Iterator[Transfer]:
        """Gradients to their owners and updates back, pads included, in the leaves' own dtypes.

        Shards are exchanged over the axes that cut a matrix; updates are gathered over the owner
        axes on which a leaf is replicated. A leaf whose shards are no shards of matrices is
        gathered whole first.
        """
        exchanged = 0
        gathered: dict[Axes, int] = defaultdict(int)
        for c in plan.classes:
            own = c.num_waves * c.size * dtype_bytes(c.dtype)
            for is_cut, is_spread in {_lies(sources[m.leaf]) for m in c.matrices}:
                exchanged += 2 * _ring(own, self.n) if is_cut else 0
                placed = self.owners if is_cut or is_spread else ()
                over = tuple(a for a in axes if a not in placed)
                gathered[over] += (math.prod(self.mesh[a] for a in over) - 1) * own
        for index in {m.leaf for c in plan.classes for m in c.matrices}:
            if sources[index] is None:
                leaf = plan.leaves[index].leaf
                gathered[self.owners] += _ring(leaf.size * dtype_bytes(leaf.dtype), self.n)
        yield self._transfer("optimizer", "all-to-all", self.owners, exchanged)
        for over, received in gathered.items():
            yield self._transfer("optimizer", "all-gather", over, received)

    # ---- transfers -----------------------------------------------------------------------------

    def _of_model(self, plan: Plan, cost: Costs, parts: int) -> Iterator[Transfer]:
        """Forward and backward pass over owners and replicas; each keeps one of ``parts``."""
        gathered, scattered = cost.received("all-gather"), cost.received("reduce-scatter")
        yield self._transfer("forward", "all-gather", self.owners, gathered)
        yield self._transfer("backward", "reduce-scatter", self.owners, scattered)
        cut, kept = (_summed(part) for part in _cut_once_more(plan, parts))
        yield self._transfer("backward", "reduce-scatter", self.others, _ring(cut[0], parts))
        yield self._transfer("backward", "all-reduce", self.others, _ring(2 * kept[0], self.r))
        yield self._all_reduced(kept[1])

    def _all_reduced(self, size: int) -> Transfer:
        axes = self.others + self.owners
        return self._transfer("backward", "all-reduce", axes, _ring(2 * size, self.n * self.r))

    def _transfer(self, phase: Phase, kind: str, axes: Axes, received: int) -> Transfer:
        """Owners are neighbours, replicas are not."""
        span = self.n if set(axes) <= set(self.owners) else self.n * self.r
        return Transfer(phase, kind, axes, span, received)


def _option(
    storage: Storage,
    axes: Axes,
    others: Axes,
    replicas: Replicas,
    plan: Plan,
    transfers: Sequence[Transfer],
    memory: Memory,
) -> Option:
    parts = plan.replicas if plan.shared else 1
    cost = costs(plan)
    each = [(matrix_flops(plan, c), len(c.matrices)) for c in plan.classes]
    flops = [one for one, count in each for _ in range(count)]
    devices = plan.num_devices * parts
    loads = [0] * devices
    for device, one in zip(balance.lpt(flops, devices), flops, strict=True):
        loads[device] += one
    lpt = max(loads) * devices / sum(loads) if flops else 1.0
    even = Balance(cost.flops.padded_balance, lpt, balance.lower_bound(flops, devices))
    sent = tuple(t for t in transfers if t.bytes)
    busiest = cost.flops.padded // parts
    factor = cost.padding_factor
    return Option(storage, axes, others, replicas, plan, sent, memory, busiest, even, factor)


def _memory(cost: Costs, state: int, working: int) -> Memory:
    return Memory(cost.parameters.padded, cost.gradients.padded, state, cost.frozen, working)


def _ring(size: int, devices: int) -> int:
    """Bytes that a device receives when ``size`` bytes are gathered, scattered or exchanged."""
    return -(-(devices - 1) * size // devices)


def _lies(own: Source | None) -> tuple[bool, bool]:
    """Whether the matrices of a leaf are cut, and whether they are spread over devices."""
    return (False, False) if own is None else (bool(own.cut_axes), bool(own.spread_axes))


def _cut_once_more(plan: Plan, parts: int) -> tuple[Plan, Plan]:
    """What each of ``parts`` replicas has a part of, and what it updates whole: trainable leaves.

    A rest leaf is cut where its sharded dim divides into that many parts more.
    """
    nothing = replace(plan, classes=(), leaves=())
    if parts == 1:
        return nothing, plan

    def is_cut(p: LeafPlan) -> bool:
        return p.shard_dim is not None and not (
            p.leaf.shape[p.shard_dim] % (plan.num_devices * parts)
        )

    rest = [p for p in plan.leaves if p.route.route == "rest" and p.trainable]
    cut = replace(plan, leaves=tuple(p for p in rest if is_cut(p)))
    return cut, replace(nothing, leaves=tuple(p for p in rest if not is_cut(p)))


def _summed(plan: Plan) -> tuple[int, int]:
    """Bytes of gradients on a device as they are summed: of stacks and shards, of whole leaves."""
    shards = whole = 0
    for c in plan.classes:
        shards += c.num_waves * c.size * dtype_bytes(plan.wire_dtypes(c.dtype)[1])
    for p in (p for p in plan.leaves if p.route.route == "rest" and p.trainable):
        size = p.leaf.size * dtype_bytes(plan.wire_dtypes(p.leaf.dtype)[1])
        if p.shard_dim is None:
            whole += size
        else:
            shards += size // plan.num_devices
    return shards, whole


def _two_blocks(routed: Routed, plan: Plan) -> int:
    """Bytes of the two largest blocks as they are gathered.

    A block is all that shares a path up to its first number (``blocks/3``), one layer of all
    stacked leaves of a module without numbers, or any other leaf.
    """
    blocks: dict[str, int] = defaultdict(int)
    for leaf, route in routed:
        size = leaf.size * dtype_bytes(plan.wire_dtypes(leaf.dtype)[0])
        numbered = re.match(r".*?\d+(?=/|$)", leaf.path)
        batch = route.view.batch_dims if route.view else ()
        if numbered:
            blocks[numbered[0]] += size
        elif batch:
            blocks[leaf.path.split("/")[0]] += size // leaf.shape[batch[0]]
        else:
            blocks[leaf.path] += size
    return sum(sorted(blocks.values())[-2:])
