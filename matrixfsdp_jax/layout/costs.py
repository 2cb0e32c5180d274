"""What a plan costs: FLOPs, memory and bytes moved, as exact integers, before anything runs.

Shape legend: ``N`` devices on the owner axis, ``W`` waves, ``K`` Newton-Schulz steps,
``m <= n`` a stored matrix, ``dims`` the stored shape of a matrix or tensor.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf, prod
from typing import Literal

from matrixfsdp_jax.layout import balance
from matrixfsdp_jax.layout.blocks import block_groups, merge_dims
from matrixfsdp_jax.layout.phases import Units
from matrixfsdp_jax.layout.spec import LeafPlan, Plan, ShapeClass, TensorView, View, dtype_bytes

# Tables and reports have an entry per step of a period.
MAX_FREQUENCY = 100_000
CollectiveKind = Literal["all-gather", "reduce-scatter", "all-reduce"]
Dims = tuple[int, ...]


@dataclass(frozen=True)
class Method:
    """What rules and planner must know of an optimizer.

    Attributes:
      name: how reports and errors call it.
      matrix_flops: ``(dims, ns_steps)`` -> FLOPs that one update of one matrix takes.
      matrix_state: ``dims`` -> elements of state that one matrix keeps; they are float32, or
        wider where the matrix is.
      rest_copies: state arrays of a rest leaf, each of the leaf's shape and dtype.
      orders: the orders that it takes: 2 is matrices, any other is tensors.
      oriented: whether tall matrices are stored transposed, so that ``m <= n`` always.
      refresh_units: ``dims`` -> the blocks of one matrix that are decomposed now and then, as
        ``(blocks, cost of one)`` per shape of a block, the cost being the sum of ``k^3``.
      refresh_frequency: steps between two decompositions of a block.
      factor_state: ``dims`` -> elements, among those of ``matrix_state``, of factors and of what is
        kept of their decompositions.
    """

    name: str
    matrix_flops: Callable[[Dims, int], int] = field(repr=False)
    matrix_state: Callable[[Dims], int] = field(repr=False)
    rest_copies: int
    orders: tuple[int, ...] = (2,)
    oriented: bool = True
    refresh_units: Callable[[Dims], Units] = field(default=lambda dims: (), repr=False)
    refresh_frequency: int = 1
    factor_state: Callable[[Dims], int] = field(default=lambda dims: 0, repr=False)

    def refusal(self, view: View, shape: Dims) -> str | None:
        """Why it cannot take a leaf of ``shape`` read by ``view`` and what to do, or None."""
        order = len(view.item_shape(shape))
        if isinstance(view, TensorView) and self.orders == (2,):
            return (
                f"reads tensors of order {order}, but {self.name} takes only matrices; read the "
                "leaf as matrices (rules.matrix, conv, stacked, ...), route it to rest, or plan "
                'for optimizer="shampoo" or "soap"'
            )
        if order not in self.orders:
            return (
                f"reads tensors of order {order}, but {self.name} takes orders "
                f"{', '.join(map(str, self.orders))}; make some dims batch dims, say "
                "rules.tensor(..., batch_dims=(0,)), or flatten some with rules.matrix"
            )
        return None


def newton_schulz_flops(dims: Dims, steps: int) -> int:
    """FLOPs of ``K`` quintic Newton-Schulz steps on one ``[m, n]`` matrix: K (4 m^2 n + 2 m^3).

    One step is ``A = X X^T`` (2 m^2 n), ``A A`` (2 m^3) and ``(b A + c A A) X`` (2 m^2 n); a
    multiply and an add count as two, and no use is made of the symmetry of ``A``.
    """
    m, n = dims
    return steps * (4 * m * m * n + 2 * m * m * m)


def check_dim(name: str, value: int | float) -> None:
    """Refuse what is neither an int >= 1 nor infinite.

    Raises: ValueError, naming argument and value.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value != inf and not (whole and value >= 1):
        raise ValueError(f"{name}={value!r} must be an int >= 1 or math.inf")


def check_frequency(value: int, limit: int = MAX_FREQUENCY) -> None:
    """Refuse a ``precondition_frequency`` that is no int from 1 to ``limit``.

    Raises: ValueError, naming argument and value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        raise ValueError(
            f"precondition_frequency={value!r} must be an int >= 1 and <= {limit}: tables have an "
            "entry for every step of a period"
        )


# Products with the root and arrays of moments.
_SHAMPOO_COSTS = {"shampoo": (1, 1), "soap": (3, 2)}


@lru_cache(maxsize=None, typed=True)  # the same options, the same record: plans compare equal
def shampoo_method(
    name: Literal["shampoo", "soap"],
    max_preconditioner_dim: int | float,
    target: int | float,
    precondition_frequency: int,
    /,
) -> Method:
    """The record of Shampoo or SOAP with these options.

    A tensor is merged and cut into blocks (see `blocks`). A block of ``s`` elements has for each
    dim ``k`` a factor and its root (for SOAP its eigenvectors), ``k^2`` elements each. An update
    takes ``2 s k`` FLOPs for the factor and ``2 s k`` for every product with the root: one for
    Shampoo; three for SOAP, which rotates gradient and average and rotates back. An
    eigendecomposition is counted as ``25 k^3``, spread over ``precondition_frequency`` steps. The
    averaged gradient has ``s`` elements, and so has SOAP's second moment.

    Args:
      name: whose record.
      max_preconditioner_dim: largest side of a block; ``math.inf`` for no limit.
      target: the order down to which small dims are merged; ``math.inf`` merges none.
      precondition_frequency: steps between eigendecompositions.

    Raises:
      ValueError: for an unknown name, or a number that is out of range or no int.
    """
    if name not in _SHAMPOO_COSTS:
        raise ValueError(f"name={name!r} must be one of {', '.join(_SHAMPOO_COSTS)}")
    check_dim("max_preconditioner_dim", max_preconditioner_dim)
    check_dim("target", target)
    check_frequency(precondition_frequency)
    products, moments = _SHAMPOO_COSTS[name]

    def blocks(dims: Dims) -> Iterator[tuple[Dims, int]]:
        merged = merge_dims(dims, max_preconditioner_dim, target)
        for group in block_groups(merged, max_preconditioner_dim):
            yield group.shape, group.num_blocks

    def flops(dims: Dims, _: int) -> int:
        multiplied = sum(count * prod(block) * sum(block) for block, count in blocks(dims))
        eigen = sum(25 * count * sum(k**3 for k in block) for block, count in blocks(dims))
        return 2 * (1 + products) * multiplied + eigen // precondition_frequency

    def factors(dims: Dims) -> int:
        return 2 * sum(count * sum(k**2 for k in block) for block, count in blocks(dims))

    def state(dims: Dims) -> int:
        return moments * prod(dims) + factors(dims)

    def units(dims: Dims) -> Units:
        return tuple((count, float(sum(k**3 for k in block))) for block, count in blocks(dims))

    return Method(
        name,
        flops,
        state,
        rest_copies=2,
        orders=(0, 1, 2, 3, 4),
        oriented=False,
        refresh_units=units,
        refresh_frequency=precondition_frequency,
        factor_state=factors,
    )


# One record per optimizer; elementwise FLOPs are counted from the formulas, 16 per element for
# AdamW (two averages, their corrections, square root, division, decay) and 4 for SGD with momentum.
# Rest leaves go to AdamW unless the user says otherwise.
METHODS: dict[str, Method] = {
    record.name: record
    for record in (
        Method("muon", newton_schulz_flops, prod, rest_copies=2),
        Method("normuon", newton_schulz_flops, lambda dims: prod(dims) + max(dims), rest_copies=2),
        Method("adamuon", newton_schulz_flops, lambda dims: 2 * prod(dims), rest_copies=2),
        shampoo_method("shampoo", 1024, 2, 10),
        shampoo_method("soap", 1024, 2, 10),
        Method(
            "adamw", lambda dims, _: 16 * prod(dims), lambda dims: 2 * prod(dims), rest_copies=2
        ),
        Method("sgd", lambda dims, _: 4 * prod(dims), prod, rest_copies=1),
    )
}


def method(optimizer: str | Method) -> Method:
    """The record of an optimizer, which may be given itself.

    Raises:
      TypeError: if it is neither a name nor a `Method`.
      ValueError: if there is none of that name; it lists the known ones.
    """
    if isinstance(optimizer, Method):
        return optimizer
    known = ", ".join(sorted(METHODS))
    if not isinstance(optimizer, str):
        raise TypeError(
            f"optimizer={optimizer!r} must be a name ({known}) or a layout.costs.Method, such as "
            'mfsdp.shampoo_method("soap", 1024, 2, 10)'
        )
    if optimizer not in METHODS:
        raise ValueError(f"unknown optimizer {optimizer!r}: the planner knows {known}")
    return METHODS[optimizer]


@dataclass(frozen=True)
class PerDevice:
    """A cost on each device: ``real`` leaves pad slots out, ``padded`` is what every device pays.

    All devices hold whole stacks, so the padded figure is the same on all of them. FLOPs under
    ``dealing="lpt"`` are those of the waves in a device's composition; ``padded`` is the most.
    """

    real: tuple[int, ...]
    padded: int

    @property
    def balance(self) -> float:
        """The largest real cost over the mean; 1 is perfect."""
        return self._over_mean(max(self.real))

    @property
    def padded_balance(self) -> float:
        """What a device pays, at most, over the mean of what is useful; 1 is perfect."""
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
      factors: the part of it that factors and their roots (or eigenvectors) take.
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
    factors: PerDevice
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

    flops = spread(lambda cls: matrix_flops(plan, cls))
    if plan.dealing == "lpt":
        flops = replace(flops, padded=_branch_flops(plan))
    rest = [p for p in plan.leaves if p.route.route == "rest" and p.trainable]
    rest_bytes = sum(_stored_bytes(p, plan.num_devices) for p in rest)
    parameters = spread(_matrix_bytes, rest_bytes)
    return Costs(
        matrices=spread(lambda cls: 1),
        elements=spread(lambda cls: cls.size),
        flops=flops,
        parameters=parameters,
        gradients=parameters,
        state=spread(
            lambda cls: _state_bytes(cls, record.matrix_state(cls.shape)),
            record.rest_copies * rest_bytes,
        ),
        factors=spread(lambda cls: factor_bytes(record, cls)),
        frozen=sum(_stored_bytes(p, plan.num_devices) for p in plan.leaves if not p.trainable),
        gathered=sum(
            p.leaf.size * dtype_bytes(plan.wire_dtypes(p.leaf.dtype)[0]) for p in plan.leaves
        ),
        collectives=tuple(_collectives(plan)) if plan.num_devices > 1 else (),
    )


def matrix_flops(plan: Plan, cls: ShapeClass) -> int:
    """FLOPs of the update of one matrix of a class."""
    return method(plan.optimizer).matrix_flops(cls.shape, plan.ns_steps)


def compositions(plan: Plan) -> balance.Compositions:
    """On which waves of each class (in the plan's order) a device works.

    Under ``dealing="slots"`` these are all waves. Where replicas share the waves, those that one
    replica has.
    """
    parts = plan.replicas if plan.shared else 1
    waves = [cls.num_waves // parts for cls in plan.classes]
    used = [[cls.num_waves] * plan.num_devices for cls in plan.classes]
    if plan.dealing == "lpt":
        used = [[0] * plan.num_devices for _ in plan.classes]
        for own, cls in zip(used, plan.classes, strict=True):
            for device, wave in cls.slots:
                own[device] = max(own[device], wave + 1)

    def part(device: int, replica: int) -> tuple[int, ...]:
        """Of the waves up to the last one with a matrix, those of a replica."""
        return tuple(
            min(max(own[device] - replica * whole, 0), whole)
            for own, whole in zip(used, waves, strict=True)
        )

    needed = [[part(d, r) for r in range(parts)] for d in range(plan.num_devices)]
    return balance.compositions(needed, [matrix_flops(plan, cls) for cls in plan.classes])


def _branch_flops(plan: Plan) -> int:
    """FLOPs of the costliest composition; of replicas that share the waves, for all of them."""
    each = [matrix_flops(plan, cls) for cls in plan.classes]
    parts = plan.replicas if plan.shared else 1
    return parts * max(balance.load(waves, each) for waves in compositions(plan).waves)


def factor_bytes(record: Method, cls: ShapeClass) -> int:
    """Bytes of factors and their roots (or eigenvectors) of one matrix of a class."""
    return _state_bytes(cls, record.factor_state(cls.shape))


def _state_bytes(cls: ShapeClass, elements: int) -> int:
    return elements * max(4, dtype_bytes(cls.dtype))


def _matrix_bytes(cls: ShapeClass) -> int:
    return cls.size * dtype_bytes(cls.dtype)


def _stored_bytes(plan: LeafPlan, num_devices: int) -> int:
    """Bytes of a rest or frozen leaf on each device."""
    parts = 1 if plan.shard_dim is None else num_devices
    return plan.leaf.size // parts * dtype_bytes(plan.leaf.dtype)


def _collectives(plan: Plan) -> Iterator[Collective]:
    others = plan.num_devices - 1
    # (source, collectives, elements that a device holds, dtype, whether a gradient comes back)
    moved = [(c.key, c.num_waves, c.size, c.dtype, True) for c in plan.classes]
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
