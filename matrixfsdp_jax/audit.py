"""What a compiled program sends between devices, where that comes from, and the memory it takes.

``audit`` reads the text of the program that XLA compiled (HLO), not the Python that made it: what
the compiler added, combined, promoted or removed is what is counted. It therefore holds for the
backend it was compiled for. The CPU backend, for one, sends bfloat16 as float32.

Cross-device copies that are no HLO collective (a Pallas kernel with its own DMA) cannot be seen.
"""

import io
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

Kind = Literal[
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
]
Shape = tuple[str, tuple[int, ...]]
MeshSizes = tuple[tuple[str, int], ...]
Groups = frozenset[frozenset[int]]

KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program; all bytes are per device and execution.

    Attributes:
      kind: the HLO name, ``"all-gather"``. A ``send`` to listed peers is a ``collective-permute``,
        the all-reduce inside a TPU ``all-reduce-scatter`` fusion is a ``reduce-scatter``.
      shapes: ``(dtype, dims)`` of each operand as one device holds it, ``("float32", (32, 64))``;
        several where the compiler combined collectives.
      bytes: the full side: output of an all-gather, else the operands.
      wire_bytes: what a device receives if the collective runs as a ring: with N devices
        ``(N-1)/N`` of ``bytes``, twice that for an all-reduce, all of it for a permute or a
        broadcast; rounded down. An upper bound for a ragged all-to-all.
      group_size: N, the devices that exchange data with one another.
      axis: names of the mesh axes it runs over, in mesh order; None if no known mesh explains it.
      origin: ``op_name`` of the instruction, or of the one that encloses it; ``""`` if there is
        none. Where the compiler combined collectives it is that of one of them, or all of them as
        ``outer/(first:second)``.
      source: ``"file.py:12"``, or None.
      times: executions in one run of the program, from the trip counts of the loops around it;
        None if one is unknown. A branch of a conditional counts as taken.
    """

    kind: Kind
    shapes: tuple[Shape, ...]
    bytes: int
    wire_bytes: int
    group_size: int
    axis: tuple[str, ...] | None
    origin: str
    source: str | None
    times: int | None

    @property
    def is_scalar(self) -> bool:
        """Whether every array on its full side has a single element.

        An all-reduce of ``[]``, ``[1]`` or of several such is scalar; an all-reduce of ``[8]`` is
        not. What gathers or scatters is not either, since its full side has an element per device.
        """
        whole = self.kind in ("all-reduce", "collective-broadcast", "collective-permute")
        return whole and all(math.prod(dims) <= 1 for _, dims in self.shapes)

    @property
    def scope(self) -> str:
        """The origin in short: named scopes without ``jit(...)`` and the like.

        Starts with ``"backward: "`` where reverse mode transposed it, with ``"recomputed: "`` where
        a checkpointed forward pass is run again.
        """
        return _scope(self.origin)


@dataclass(frozen=True)
class Audit:
    """The collectives of a compiled program, and its memory in bytes per device.

    ``print`` it for a table; notebooks show it as one.

    Attributes:
      collectives: in program order; those over a single device (no-ops) are left out.
      argument_bytes, output_bytes, temp_bytes, alias_bytes, generated_code_bytes: XLA's memory
        analysis; None where the backend has none. Outputs that reuse donated arguments are in
        ``alias_bytes``, and in both ``argument_bytes`` and ``output_bytes``.
      flops: XLA's estimate per device, or None; loop bodies count once on some backends.
    """

    collectives: tuple[Collective, ...]
    argument_bytes: int | None = None
    output_bytes: int | None = None
    temp_bytes: int | None = None
    alias_bytes: int | None = None
    generated_code_bytes: int | None = None
    flops: float | None = None

    @property
    def matrices(self) -> tuple[Collective, ...]:
        """Collectives that move more than single scalars (``Collective.is_scalar``)."""
        return tuple(c for c in self.collectives if not c.is_scalar)

    @property
    def scalars(self) -> tuple[Collective, ...]:
        """Collectives that move nothing but single scalars."""
        return tuple(c for c in self.collectives if c.is_scalar)

    def count(
        self,
        kind: Kind | None = None,
        origin: str | re.Pattern[str] | None = None,
        scalar: bool | None = None,
    ) -> int:
        """Number of collective instructions; one in a loop counts once.

        Args:
          kind: of this kind only.
          origin: as in ``within``.
          scalar: True for scalar ones only, False for the others only.
        """
        chosen = self._select(kind, origin)
        return sum(scalar is None or c.is_scalar == scalar for c in chosen)

    def bytes(self, kind: Kind | None = None, origin: str | re.Pattern[str] | None = None) -> int:
        """Full-side bytes of one run of the program, that is, ``sum(c.bytes * c.times)``.

        What stands in a loop of unknown length counts once; ``str(audit)`` says so.
        """
        return sum(c.bytes * _runs(c) for c in self._select(kind, origin))

    def wire_bytes(
        self, kind: Kind | None = None, origin: str | re.Pattern[str] | None = None
    ) -> int:
        """Bytes that a device receives in one run of the program, as ``bytes`` counts them."""
        return sum(c.wire_bytes * _runs(c) for c in self._select(kind, origin))

    def within(self, origin: str | re.Pattern[str]) -> "Audit":
        """The audit of the collectives whose ``origin`` contains a text or matches a pattern.

        A ``str`` is searched for as it is, a compiled ``re.Pattern`` as a regular expression.
        Memory and FLOPs stay those of the whole program.
        """
        return replace(self, collectives=tuple(self._select(None, origin)))

    def by_origin(self) -> dict[str, "Audit"]:
        """One audit per ``Collective.scope``, in program order."""
        groups: dict[str, list[Collective]] = defaultdict(list)
        for c in self.collectives:
            groups[c.scope].append(c)
        return {scope: replace(self, collectives=tuple(cs)) for scope, cs in groups.items()}

    def assert_no_matrix_collectives(self, origin: str | re.Pattern[str] | None = None) -> None:
        """Raise if the program, or the part of it with this origin, moves more than scalars.

        The sure proof audits the update alone. An origin selects by metadata, which the compiler
        drops from some collectives and may keep from only one of those that it combines.

        Raises:
          AssertionError: with the table of the collectives that were found.
        """
        found = replace(self, collectives=tuple(self._select(None, origin))).matrices
        if found:
            where = "the program" if origin is None else f"the part with origin {origin!r}"
            table = replace(self, collectives=found)
            raise AssertionError(f"expected no matrix collectives in {where}, found:\n{table}")

    def _select(
        self, kind: Kind | None, origin: str | re.Pattern[str] | None
    ) -> Iterator[Collective]:
        if kind is not None and kind not in KINDS:
            raise ValueError(f"kind={kind!r} is no collective; use one of {', '.join(KINDS)}")
        for c in self.collectives:
            if isinstance(origin, re.Pattern):
                matches = origin.search(c.origin) is not None
            else:
                matches = origin is None or origin in c.origin
            if matches and kind in (None, c.kind):
                yield c

    def __str__(self) -> str:
        out = io.StringIO()
        console = Console(
            file=out, width=80, color_system=None, markup=False, highlight=False, emoji=False
        )
        self._print(console)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def _repr_html_(self) -> str:
        console = Console(
            file=io.StringIO(), record=True, width=110, markup=False, highlight=False, emoji=False
        )
        self._print(console)
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")

    def _print(self, console: Console) -> None:
        console.print(_summary(self), soft_wrap=False)
        if self.collectives:
            console.print(_table(self.collectives))


def audit(program: Any, *args: Any, mesh: jax.sharding.Mesh | None = None, **kwargs: Any) -> Audit:
    """List the collectives and the memory of a program as XLA compiled it; nothing runs.

    Args:
      program: a ``jax.stages.Compiled``, ``Lowered`` or ``Traced``, anything callable that has
        ``lower`` (a jitted function, a train step), or a plain function (which is jitted).
      *args: arguments of a function, arrays or ``jax.ShapeDtypeStruct`` with shardings.
      mesh: gives the collectives their axis names. Default: the meshes of the ``NamedSharding``s
        of the program's inputs and outputs.
      **kwargs: keyword arguments of a function.

    Raises:
      TypeError: if ``program`` is none of these, or a compiled or lowered one comes with arguments.
      ValueError: if ``mesh`` has another number of devices than the program, or the text of the
        program names device groups in an unknown form.

    Examples:
      >>> import jax.numpy as jnp
      >>> report = audit(lambda x: x @ x, jnp.ones((4, 4)))
      >>> report.assert_no_matrix_collectives()
      >>> report.count()
      0
    """
    compiled = _compile(program, args, kwargs)
    text = compiled.as_text()
    if text is None:
        raise ValueError("the backend does not give the text of its compiled programs")
    hlo = HloProgram(text)
    memory, costs = compiled.memory_analysis(), compiled.cost_analysis()

    def num_bytes(part: str) -> int | None:
        return getattr(memory, f"{part}_size_in_bytes", None)

    return Audit(
        collectives=tuple(hlo.collectives(_meshes(compiled, mesh, hlo.num_devices))),
        argument_bytes=num_bytes("argument"),
        output_bytes=num_bytes("output"),
        temp_bytes=num_bytes("temp"),
        alias_bytes=num_bytes("alias"),
        generated_code_bytes=num_bytes("generated_code"),
        flops=costs.get("flops") if isinstance(costs, dict) else None,
    )


def _compile(program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> jax.stages.Compiled:
    if isinstance(program, jax.stages.Compiled | jax.stages.Lowered | jax.stages.Traced):
        if args or kwargs:
            raise TypeError(
                f"a jax.stages.{type(program).__name__} has its arguments already, but "
                f"{len(args) + len(kwargs)} more were given; call audit(program) without them"
            )
        lowered = program.lower() if isinstance(program, jax.stages.Traced) else program
        return lowered.compile() if isinstance(lowered, jax.stages.Lowered) else lowered
    if not callable(program):
        raise TypeError(
            f"cannot audit a {type(program).__name__}; give a function with its arguments, or a "
            "lowered or compiled one without"
        )
    lower: Callable[..., Any] = getattr(program, "lower", None) or jax.jit(program).lower
    return lower(*args, **kwargs).compile()


def _meshes(
    compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh | None, num_devices: int
) -> list[MeshSizes]:
    """The given mesh, else those of the program's inputs and outputs."""
    if mesh is None:
        shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
        meshes = [s.mesh for s in shardings if isinstance(s, jax.NamedSharding)]
    elif mesh.size == num_devices:
        meshes = [mesh]
    else:
        raise ValueError(
            f"mesh has {mesh.size} devices but the program was compiled for {num_devices}; "
            "give the mesh that the program runs on"
        )
    return list(dict.fromkeys(tuple((str(a), n) for a, n in m.shape.items()) for m in meshes))


# ---- text of a compiled program ----------------------------------------------------------------

_ASSIGNMENT = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_PARENTHESIS = re.compile(r"[()]")
_CALLEES = re.compile(
    r"\b(?:calls|to_apply|body|condition|(?:true|false)_computation|branch_computations"
    r"|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class _Instruction:
    """``name = type opcode(operands), attributes``."""

    name: str
    type: str
    opcode: str
    operand_text: str
    attributes: str

    @property
    def operands(self) -> list[str]:
        """Names of the operands, which some printers precede by their type."""
        text = re.sub(r"/\*.*?\*/", "", self.operand_text)
        if "%" in text:
            return re.findall(r"%([\w.\-]+)", text)
        return [part.split()[-1] for part in text.split(",") if part.strip()]

    @property
    def kind(self) -> Kind | None:
        """The collective that this instruction is or starts."""
        if self.opcode == "send" and "source_target_pairs=" in self.attributes:
            return "collective-permute"
        name = self.opcode.removesuffix("-start")
        return next((kind for kind in KINDS if kind == name), None)

    def attribute(self, pattern: str) -> str | None:
        """First group of a pattern in the attributes."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else None


@dataclass
class _Computation:
    """Instructions by name, in program order."""

    name: str
    instructions: dict[str, _Instruction] = field(default_factory=dict)
    root: str = ""

    def value(self, name: str) -> _Instruction:
        """The instruction that makes a value, seen through copies of it."""
        found = self.instructions[name]
        while found.opcode in ("copy", "bitcast", "convert"):
            found = self.instructions[found.operands[0]]
        return found

    def constant(self, name: str) -> int | None:
        """An integer constant, else None."""
        found = self.value(name)
        text = found.operand_text if found.opcode == "constant" else ""
        return int(text) if re.fullmatch(r"-?\d+", text) else None

    def carry_item(self, name: str) -> int | None:
        """Which item of a loop's carry a value is, else None."""
        found = self.value(name)
        if found.opcode != "get-tuple-element":
            return None
        whole = self.value(found.operands[0])
        return int(found.attribute(r"index=(\d+)") or 0) if whole.opcode == "parameter" else None


@dataclass(frozen=True)
class _Frame:
    """How a computation is reached: how often, from what, and the async chains seen in it."""

    times: int | None = 1
    origin: str = ""
    source: str | None = None
    chains: set[str] = field(default_factory=set)


class HloProgram:
    """The text of a compiled program, parsed.

    Attributes:
      num_devices: devices that run it.
    """

    def __init__(self, text: str) -> None:
        self._computations: dict[str, _Computation] = {}
        self._entry = ""
        header: list[str] = []
        current: _Computation | None = None
        for line in text.splitlines():
            if line.endswith("{") and (start := re.match(r"(ENTRY )?%?([\w.\-]+)", line)):
                current = self._computations[start[2]] = _Computation(start[2])
                self._entry = start[2] if start[1] else self._entry
            elif current is None:
                header.append(line)
            elif match := _ASSIGNMENT.match(line):
                current.instructions[match[2]] = _instruction(match[2], line, match.end())
                current.root = match[2] if match[1] else current.root
        counts = re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", "".join(header[:1]))
        self.num_devices = math.prod(map(int, counts))
        self._sources = _sources(header)

    def collectives(self, meshes: Iterable[MeshSizes] = ()) -> Iterator[Collective]:
        """The collectives in program order, without those over a single device.

        Args:
          meshes: ``(axis name, size)`` pairs of each mesh to look for axes in, the first first.
        """
        meshes = tuple(meshes)
        for frame, computation, instruction in self._walk(self._entry, _Frame()):
            found = _collective(frame, computation, instruction, meshes, self.num_devices)
            if found.group_size > 1:
                yield found

    def _walk(
        self, name: str, caller: _Frame
    ) -> Iterator[tuple[_Frame, _Computation, _Instruction]]:
        """The collective instructions of a computation and all that it calls, once per call."""
        computation = self._computations[name]
        for instruction in computation.instructions.values():
            frame = self._frame(caller, instruction)
            if instruction.kind is not None:
                if not _continues_chain(instruction, caller.chains):
                    yield frame, computation, instruction
            elif not instruction.opcode.endswith(("-done", "-update")):
                if instruction.opcode == "while":
                    trips = self._trip_count(computation, instruction)
                    frame = replace(frame, times=_product(frame.times, trips))
                for callee in self._callees(instruction):
                    yield from self._walk(callee, frame)

    def _frame(self, caller: _Frame, instruction: _Instruction) -> _Frame:
        """What holds for an instruction and for what it calls; names fall back on the caller's."""
        chains = caller.chains if instruction.opcode == "fusion" else set()
        name = _OP_NAME.search(instruction.attributes)
        if name is None:
            return replace(caller, chains=chains)
        file = instruction.attribute(r'source_file="([^"]*)"')
        line = instruction.attribute(r"source_line=(\d+)")
        table = self._sources.get(instruction.attribute(r"stack_frame_id=(\d+)") or "")
        origin = re.sub(r"\\(.)", r"\1", name[1])
        return _Frame(caller.times, origin, f"{file}:{line}" if file else table, chains)

    def _callees(self, instruction: _Instruction) -> Iterator[str]:
        for names in _CALLEES.findall(instruction.attributes):
            yield from (n for n in re.findall(r"[\w.\-]+", names) if n in self._computations)

    def _trip_count(self, caller: _Computation, loop: _Instruction) -> int | None:
        """How often a loop's body runs: as XLA notes it, else from ``counter < constant``.

        Backends that drop the note (TPU) still print such a loop as a compare of one item of the
        carry with a constant, a constant first value, and an add of a constant to that item.
        """
        known = loop.attribute(r"known_trip_count\W+n\W+(\d+)")
        if known is not None:
            return int(known)
        body, condition = (
            self._computations[loop.attribute(rf"\b{role}=%?([\w.\-]+)") or ""]
            for role in ("body", "condition")
        )
        test = condition.value(condition.root)
        carry, update = caller.value(loop.operands[0]), body.value(body.root)
        if (test.opcode, carry.opcode, update.opcode) != ("compare", "tuple", "tuple"):
            return None
        item = condition.carry_item(test.operands[0])
        stop = condition.constant(test.operands[1])
        if "direction=LT" not in test.attributes or item is None or stop is None:
            return None
        first, step = caller.constant(carry.operands[item]), _increment(body, update, item)
        return None if first is None or step is None else max(0, -((first - stop) // step))


def _product(times: int | None, trips: int | None) -> int | None:
    return None if times is None or trips is None else times * trips


def _instruction(name: str, line: str, start: int) -> _Instruction:
    """Parse ``line`` from ``start``, just after ``name = ``."""
    type_end = _closing(line, start) if line[start] == "(" else line.index(" ", start)
    opening = line.index("(", type_end)
    closing = _closing(line, opening)
    opcode = line[type_end:opening].strip()
    return _Instruction(
        name, line[start:type_end], opcode, line[opening + 1 : closing - 1], line[closing:]
    )


def _closing(line: str, opening: int) -> int:
    """Index just after the parenthesis that closes the one at ``opening``."""
    depth = 0
    for match in _PARENTHESIS.finditer(line, opening):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    return len(line)


def _increment(body: _Computation, update: _Instruction, item: int) -> int | None:
    """The positive constant that a loop body adds to an item of its carry, else None."""
    add = body.value(update.operands[item])
    if add.opcode != "add" or body.carry_item(add.operands[0]) != item:
        return None
    step = body.constant(add.operands[1])
    return step if step is not None and step > 0 else None


def _continues_chain(instruction: _Instruction, chains: set[str]) -> bool:
    """Whether this is a later part of an asynchronous collective that was seen before.

    TPU programs fuse an asynchronous collective into the work that it overlaps with and repeat its
    text in each part: the start, every fusion on the way, the end. A ``chain_id`` names it.
    """
    chain = instruction.attribute(r'chain_id="(\d+)"')
    if chain is None or "async_collective_fusion_config" not in instruction.attributes:
        return False
    seen = chain in chains
    chains.add(chain)
    return seen


def _sources(header: list[str]) -> dict[str, str]:
    """``"file:line"`` of each stack frame, from the tables at the top of the text."""
    tables: dict[str, dict[str, str]] = defaultdict(dict)
    section = ""
    for line in header:
        if row := re.match(r"(\d+) (.*)", line):
            tables[section][row[1]] = row[2]
        else:
            section = line
    sources = {}
    for frame, text in tables["StackFrames"].items():
        location = tables["FileLocations"].get(_number(text, "file_location_id"), "")
        file = tables["FileNames"].get(_number(location, "file_name_id"))
        if file is not None:
            sources[frame] = f"{file[1:-1]}:{_number(location, 'line')}"
    return sources


def _number(row: str, key: str) -> str:
    found = re.search(rf"\b{key}=(\d+)", row)
    return found[1] if found else ""


# ---- shapes and bytes --------------------------------------------------------------------------

_SHAPE = re.compile(r"\b([a-z]\w*)\[([^\]]*)\]")


def _collective(
    frame: _Frame,
    computation: _Computation,
    instruction: _Instruction,
    meshes: tuple[MeshSizes, ...],
    num_devices: int,
) -> Collective:
    kind = instruction.kind
    assert kind is not None
    if kind == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"
    names = instruction.operands
    if kind == "ragged-all-to-all" or instruction.opcode == "send":
        names = names[:1]  # the others are the output buffer, offsets and sizes; or a token
    shapes = tuple(s for n in names for s in _shapes(computation.instructions[n].type))
    groups = _groups(instruction.attributes, num_devices)
    size = max(map(len, groups), default=1)
    full = sum(map(_num_bytes, shapes)) * (size if kind == "all-gather" else 1)
    return Collective(
        kind=kind,
        shapes=shapes,
        bytes=full,
        wire_bytes=_received(kind, full, size),
        group_size=size,
        axis=_axis(groups, kind == "collective-permute", meshes),
        origin=frame.origin,
        source=frame.source,
        times=frame.times,
    )


def _shapes(text: str) -> Iterator[Shape]:
    for dtype, dims in _SHAPE.findall(text):
        sizes = (d.strip().removeprefix("<=") for d in dims.split(","))
        yield _dtype(dtype), tuple(int(d) for d in sizes if d)


def _dtype(hlo: str) -> str:
    """Name of an HLO type in numpy's and JAX's words: ``bf16`` is ``bfloat16``."""
    if hlo == "pred":
        return "bool"
    if small := re.fullmatch(r"f([468])(e\w+)", hlo):
        return f"float{small[1]}_{small[2]}"
    words = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}
    letters = hlo.rstrip("0123456789")
    return words.get(letters, letters) + hlo.removeprefix(letters)


def _num_bytes(shape: Shape) -> int:
    dtype, dims = shape
    bits = re.search(r"\d+", dtype)
    return -(-math.prod(dims) * (int(bits[0]) if bits else 8) // 8)


def _received(kind: Kind, full: int, size: int) -> int:
    if kind in ("collective-permute", "collective-broadcast"):
        return full
    passes = 2 if kind == "all-reduce" else 1
    return full * passes * (size - 1) // size


# ---- groups of devices and mesh axes -----------------------------------------------------------

_LIST = re.compile(r"replica_groups=\{((?:\{[\d,\s]*\},?\s*)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))\))? \{([^}]*)\}"
)
_MESH_AXIS = re.compile(r"'?([^\s',=:]+)'?(?:=(\d+)|:\((\d+)\)(\d+))?")
_PAIRS = re.compile(r'source_target_pairs="?\{([\d,{}\s]*)\}')


def _groups(attributes: str, num_devices: int) -> Groups:
    """The sets of devices (positions in the program's device order) that exchange data.

    Three printed forms: ``{{0,1},{2,3}}`` (empty means all), ``[2,2]<=[2,2]T(1,0)`` (an iota,
    reshaped, transposed, reshaped to groups), ``mesh['a'=2,'b'=2] {'b'}``. A permute has pairs.
    """
    if pairs := _PAIRS.search(attributes):
        return _connected(frozenset(_ints(p)) for p in re.findall(r"\{([^}]*)\}", pairs[1]))
    if listed := _LIST.search(attributes):
        groups = frozenset(frozenset(_ints(g)) for g in re.findall(r"\{([^}]*)\}", listed[1]))
        return groups or frozenset([frozenset(range(num_devices))])
    if iota := _IOTA.search(attributes):
        devices = _iota(iota[2], iota[3]).reshape(_ints(iota[1]))
        return frozenset(map(frozenset, devices.tolist()))
    if mesh := _MESH.search(attributes):
        axes, reshape, permutation, ids, chosen = mesh.groups(default="")
        sizes = tuple((name, int(n)) for name, n, _, _ in _MESH_AXIS.findall(axes))
        parts = tuple(
            (name, int(b or 1), int(n or 0)) for name, _, b, n in _MESH_AXIS.findall(chosen)
        )
        order = _iota(reshape, permutation).ravel().tolist() if reshape else _ints(ids)
        return _mesh_groups(sizes, parts, tuple(order))
    raise ValueError(f"no device groups of a known form in the compiled program: {attributes!r}")


def _ints(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _iota(shape: str, permutation: str | None) -> np.ndarray:
    sizes = _ints(shape)
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    return devices.transpose(_ints(permutation)) if permutation else devices


def _connected(pairs: Iterable[frozenset[int]]) -> Groups:
    """Devices that a permute's pairs connect, directly or not."""
    groups: list[frozenset[int]] = []
    for pair in pairs:
        touched = [g for g in groups if g & pair]
        groups = [g for g in groups if not g & pair] + [pair.union(*touched)]
    return frozenset(groups)


@lru_cache(maxsize=256)
def _mesh_groups(
    sizes: MeshSizes, parts: tuple[tuple[str, int, int], ...], order: tuple[int, ...] = ()
) -> Groups:
    """Devices that differ only in their place on some axes of a mesh.

    Args:
      sizes: name and size of each axis of the mesh.
      parts: ``(axis, before, size)``: of an axis, seen as ``[before, size, rest]``, the middle.
        ``(axis, 1, 0)`` stands for all of it.
      order: the devices of the mesh, row-major; default ``0, 1, 2, ...``.
    """
    names, lengths = zip(*sizes, strict=True)
    place = np.indices(lengths).reshape(len(lengths), -1)
    group = place.copy()
    for name, before, size in parts:
        axis = names.index(name)
        size = size or lengths[axis]
        stride = lengths[axis] // (before * size)
        group[axis] -= place[axis] // stride % size * stride
    members: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for k, key in enumerate(map(tuple, group.T.tolist())):
        members[key].add(order[k] if order else k)
    return frozenset(map(frozenset, members.values()))


def _axis(
    groups: Groups, is_permute: bool, meshes: tuple[MeshSizes, ...]
) -> tuple[str, ...] | None:
    """The fewest axes of a mesh whose devices these groups are.

    A permute need not reach every device of an axis; it has to stay within.
    """
    for mesh in meshes:
        names = [name for name, size in mesh if size > 1]
        for count in range(1, len(names) + 1):
            for axes in itertools.combinations(names, count):
                whole = _mesh_groups(mesh, tuple((name, 1, 0) for name in axes))
                within = is_permute and all(any(g <= w for w in whole) for g in groups)
                if within or groups == whole:
                    return axes
    return None


# ---- table -------------------------------------------------------------------------------------

# Parts of an op_name that say how JAX runs the code, and the primitives that become collectives.
_WRAPPER = re.compile(r"\b(?:transpose|jvp|vmap|checkpoint|remat)\(([^()]*)\)")
_STRUCTURE = re.compile(
    r"shard_map|while|body|cond|closed_call|core_call|eval_jaxpr|pjit|checkpoint|remat"
    r"|rematted_computation|custom_[jv][vj]p_call"
)
_PRIMITIVE = (
    r"(?:all_gather\w*|all_to_all|p(?:max|min|permute)|psum\w*|r\w+_all_to_all|reduce_scatter)"
)
_COMBINED = re.compile(r"(.*/|)\(([^()]*)\)")


def _scope(origin: str) -> str:
    text = re.sub(r"\bp?jit\([^()]*\)", "", origin)
    while (unwrapped := _WRAPPER.sub(r"\1", text)) != text:
        text = unwrapped
    if combined := _COMBINED.fullmatch(text):  # XLA joins origins: outer/(a/psum:b/psum)
        ends = re.sub(rf"\b({_PRIMITIVE}):", "\\1\n", combined[2])
        paths = [combined[1] + inner for inner in ends.split("\n")]
    else:
        paths = [text]
    names = dict.fromkeys(filter(None, map(_named_scopes, paths)))
    name = " + ".join(names) or origin.split("/")[-1] or "(no origin)"
    if "rematted_computation" in origin:
        return f"recomputed: {name}"
    return f"backward: {name}" if "transpose(" in origin else name


def _named_scopes(path: str) -> str:
    """A path without what JAX adds; the primitive stays only if nothing else does."""
    parts = [p for p in path.split("/") if p and not _STRUCTURE.fullmatch(p)]
    if len(parts) > 1 and re.fullmatch(_PRIMITIVE, parts[-1]):
        parts.pop()
    return "/".join(parts)


def _runs(collective: Collective) -> int:
    return 1 if collective.times is None else collective.times


def _summary(audit: Audit) -> str:
    matrices = _plural(len(audit.matrices), "matrix collective")
    if audit.matrices:
        matrices += f" ({_kinds(audit.matrices)})"
    scalars = _kinds(audit.scalars, "scalar ") or "0 scalar collectives"
    parts = (("arguments", audit.argument_bytes), ("temp", audit.temp_bytes))
    memory = ", ".join(f"{name} {_size(size)}" for name, size in parts if size is not None)
    summary = f"{matrices}, {scalars}" + (f"; {memory}" if memory else "")
    unknown = sum(c.times is None for c in audit.collectives)
    if unknown:
        summary += f"\n{unknown} of them in loops of unknown length, counted once"
    return summary


def _kinds(collectives: Iterable[Collective], prefix: str = "") -> str:
    counts = Counter(c.kind for c in collectives)
    return ", ".join(_plural(n, prefix + kind) for kind, n in counts.items())


def _plural(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _table(collectives: Iterable[Collective]) -> Table:
    """Collectives that differ in nothing shown share a row; ``runs`` is instructions x times."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("kind", overflow="fold")
    table.add_column("runs", justify="right", no_wrap=True)
    table.add_column("operands", overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("axis", overflow="fold")
    table.add_column("origin", overflow="fold")
    rows: dict[tuple[str, ...], list[Collective]] = defaultdict(list)
    for c in collectives:
        times = "" if c.times == 1 else f" x {'?' if c.times is None else c.times}"
        axis = "?" if c.axis is None else ",".join(c.axis)
        rows[c.kind, times, _arrays(c.shapes), axis, c.scope].append(c)
    for (kind, times, arrays, axis, scope), equal in rows.items():
        size = _size(sum(c.bytes * _runs(c) for c in equal))
        table.add_row(kind, f"{len(equal)}{times}", arrays, size, axis, scope)
    return table


def _arrays(shapes: tuple[Shape, ...]) -> str:
    """``32x64:bf16, 2 of 64:f32, f32``; at most three different ones are named."""
    labels = Counter("x".join(map(str, dims)) + ":" * bool(dims) + dtype for dtype, dims in shapes)
    named = [f"{n} of {label}" if n > 1 else label for label, n in labels.items()]
    more = [f"{len(named) - 3} more"] if len(named) > 3 else []
    return ", ".join(named[:3] + more).replace("float", "f")
