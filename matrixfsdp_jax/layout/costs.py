"""What a plan costs: FLOPs, memory and bytes moved, as exact integers, before anything runs.

Shape legend: ``N`` devices on the owner axis, ``W`` waves, ``K`` Newton-Schulz steps,
``m <= n`` a stored matrix.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from matrixfsdp_jax.layout.spec import LeafPlan, Plan, ShapeClass, dtype_bytes

CollectiveKind = Literal["all-gather", "reduce-scatter", "all-reduce"]


@dataclass(frozen=True)
class Method:
    """What the planner must know of an optimizer.

    Attributes:
      matrix_flops: ``(m, n, ns_steps)`` -> FLOPs that one update of one matrix takes.
      matrix_state: ``(m, n)`` -> elements of state that one matrix keeps; they are float32, or
        wider where the matrix is.
      rest_copies: state arrays of a rest leaf, each of the leaf's shape and dtype.
    """

    matrix_flops: Callable[[int, int, int], int]
    matrix_state: Callable[[int, int], int]
    rest_copies: int


def newton_schulz_flops(m: int, n: int, steps: int) -> int:
    """FLOPs of ``K`` quintic Newton-Schulz steps on one ``[m, n]`` matrix: K (4 m^2 n + 2 m^3).

    One step is ``A = X X^T`` (2 m^2 n), ``A A`` (2 m^3) and ``(b A + c A A) X`` (2 m^2 n); a
    multiply and an add count as two, and no use is made of the symmetry of ``A``.
    """
    return steps * (4 * m * m * n + 2 * m * m * m)


# One record per optimizer; elementwise FLOPs are counted from the formulas, 16 per element for
# AdamW (two averages, their corrections, square root, division, decay) and 4 for SGD with momentum.
METHODS: dict[str, Method] = {
    # Rest leaves go to AdamW unless the user says otherwise.
    "muon": Method(newton_schulz_flops, lambda m, n: m * n, rest_copies=2),
    "normuon": Method(newton_schulz_flops, lambda m, n: m * n + n, rest_copies=2),
    "adamuon": Method(newton_schulz_flops, lambda m, n: 2 * m * n, rest_copies=2),
    "adamw": Method(lambda m, n, _: 16 * m * n, lambda m, n: 2 * m * n, rest_copies=2),
    "sgd": Method(lambda m, n, _: 4 * m * n, lambda m, n: m * n, rest_copies=1),
}


def method(optimizer: str) -> Method:
    """The record of an optimizer.

    Raises:
      ValueError: if there is none of that name; it lists the known ones.
    """
    if optimizer not in METHODS:
        raise ValueError(
            f"unknown optimizer {optimizer!r}: the planner knows {', '.join(sorted(METHODS))}"
        )
    return METHODS[optimizer]


@dataclass(frozen=True)
class PerDevice:
    """A cost on each device: ``real`` leaves pad slots out, ``padded`` is what every device pays.

    All devices run one program over whole stacks, so the padded figure is the same on all of them.
    """

    real: tuple[int, ...]
    padded: int

    @property
    def balance(self) -> float:
        """The largest real cost over the mean; 1 is perfect."""
        return self._over_mean(max(self.real))

    @property
    def padded_balance(self) -> float:
        """What every device pays over the mean of what is useful; 1 is perfect."""
        return self._over_mean(self.padded)

    def _over_mean(self, value: int) -> float:
        total = sum(self.real)
        return value * len(self.real) / total if total else 1.0


@dataclass(frozen=True)
class Collective:
    """``count`` equal collectives of a step; one device receives ``bytes`` in each of them.

    ``source`` is the key of a class (one collective per wave), the path of a sharded leaf, or
    ``"replicated rest"``.
    """

    source: str
    kind: CollectiveKind
    count: int
    bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes that one device receives in a step."""
        return self.count * self.bytes


@dataclass(frozen=True)
class Costs:
    """Costs of one training step under a plan; memory and traffic in bytes per device.

    Attributes:
      matrices: matrices that a device owns; padded, its slots.
      elements: elements of them.
      flops: FLOPs of the matrix updates.
      parameters: trainable parameters: stacks, shards of rest leaves, replicated rest leaves.
      gradients: their gradients, in the parameters' dtypes.
      state: optimizer state (see `Method`).
      frozen: leaves that are not trained.
      gathered: all leaves whole, as a gather of everything at once holds them while the model
        runs; comes on top of `memory`.
      collectives: of one forward and one backward pass; none on a single device. Where the
        backward pass recomputes the forward one, its all-gathers come once more.
    """

    matrices: PerDevice
    elements: PerDevice
    flops: PerDevice
    parameters: PerDevice
    gradients: PerDevice
    state: PerDevice
    frozen: int
    gathered: int
    collectives: tuple[Collective, ...]

    @property
    def padding_factor(self) -> float:
        """Elements of the stacks over elements of the matrices; 1 where nothing is padded."""
        return self.elements.padded_balance

    @property
    def memory(self) -> PerDevice:
        """Parameters, gradients, optimizer state and frozen leaves together."""
        parts = (self.parameters, self.gradients, self.state)
        real = tuple(sum(p) + self.frozen for p in zip(*(p.real for p in parts), strict=True))
        return PerDevice(real, sum(p.padded for p in parts) + self.frozen)

    def received(self, kind: CollectiveKind) -> int:
        """Bytes that one device receives in all collectives of a kind in a step."""
        return sum(c.total_bytes for c in self.collectives if c.kind == kind)


def costs(plan: Plan) -> Costs:
    """Return what a training step under ``plan`` costs each device, and the bytes it receives."""
    record = method(plan.optimizer)
    slots = [cls.num_waves for cls in plan.classes]
    owned = [[0] * len(slots) for _ in range(plan.num_devices)]
    for k, cls in enumerate(plan.classes):
        for device, _ in cls.slots:
            owned[device][k] += 1

    def spread(per_matrix: Callable[[ShapeClass], int], rest: int = 0) -> PerDevice:
        each = [per_matrix(cls) for cls in plan.classes]

        def total(counts: Sequence[int]) -> int:
            return rest + sum(count * cost for count, cost in zip(counts, each, strict=True))

        return PerDevice(tuple(map(total, owned)), total(slots))

    rest = [p for p in plan.leaves if p.route.route == "rest" and p.trainable]
    rest_bytes = sum(_stored_bytes(p, plan.num_devices) for p in rest)
    parameters = spread(_matrix_bytes, rest_bytes)
    return Costs(
        matrices=spread(lambda cls: 1),
        elements=spread(lambda cls: cls.m * cls.n),
        flops=spread(lambda cls: record.matrix_flops(cls.m, cls.n, plan.ns_steps)),
        parameters=parameters,
        gradients=parameters,
        state=spread(
            lambda cls: record.matrix_state(cls.m, cls.n) * max(4, dtype_bytes(cls.dtype)),
            record.rest_copies * rest_bytes,
        ),
        frozen=sum(_stored_bytes(p, plan.num_devices) for p in plan.leaves if not p.trainable),
        gathered=sum(
            p.leaf.size * dtype_bytes(plan.wire_dtypes(p.leaf.dtype)[0]) for p in plan.leaves
        ),
        collectives=tuple(_collectives(plan)) if plan.num_devices > 1 else (),
    )


def _matrix_bytes(cls: ShapeClass) -> int:
    return cls.m * cls.n * dtype_bytes(cls.dtype)


def _stored_bytes(plan: LeafPlan, num_devices: int) -> int:
    """Bytes of a rest or frozen leaf on each device."""
    parts = 1 if plan.shard_dim is None else num_devices
    return plan.leaf.size // parts * dtype_bytes(plan.leaf.dtype)


def _collectives(plan: Plan) -> Iterator[Collective]:
    others = plan.num_devices - 1
    # (source, collectives, elements that a device holds, dtype, whether a gradient comes back)
    moved = [(c.key, c.num_waves, c.m * c.n, c.dtype, True) for c in plan.classes]
    moved += [
        (p.leaf.path, 1, p.leaf.size // plan.num_devices, p.leaf.dtype, p.trainable)
        for p in plan.leaves
        if p.shard_dim is not None
    ]
    for source, count, size, dtype, trainable in moved:
        received = others * size
        gather, reduce = (received * dtype_bytes(wire) for wire in plan.wire_dtypes(dtype))
        yield Collective(source, "all-gather", count, gather)
        if trainable:
            yield Collective(source, "reduce-scatter", count, reduce)
    replicated = sum(
        p.leaf.size * dtype_bytes(plan.wire_dtypes(p.leaf.dtype)[1])
        for p in plan.leaves
        if p.route.route == "rest" and p.trainable and p.shard_dim is None
    )
    if replicated:
        # A ring moves 2 (N-1)/N of the buffer, rounded up to whole bytes.
        received = -(-2 * others * replicated // plan.num_devices)
        yield Collective("replicated rest", "all-reduce", 1, received)
