"""Collectives in the text of a compiled program (HLO), as the CPU, GPU and TPU compilers print it.

The text has one computation after the other, each a list of ``name = type opcode(operands),
attributes``. It is walked from the entry through every call, so that a loop's body is known to run
as often as the loop, and a collective that is split into start and done counts once.
"""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, get_args

import numpy as np

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
        if not self._entry:
            raise ValueError(f"no ENTRY computation in the text of the program: {text[:80]!r}")
        self.num_devices = math.prod(map(int, counts))
        self._sources = _sources(header)

    def collectives(self, meshes: Iterable[MeshSizes] = ()) -> Iterator[Collective]:
        """The collectives in program order, without those over a single device.

        Args:
          meshes: ``(axis name, size)`` pairs of each mesh to look for axes in, the first first.
        """
        meshes = tuple(meshes)
        for name in self._roots():
            start = _Frame(times=1 if name == self._entry else None)
            for frame, computation, instruction in self._walk(name, start):
                found = _collective(frame, computation, instruction, meshes, self.num_devices)
                if found.group_size > 1:
                    yield found

    def _roots(self) -> list[str]:
        """The entry, and what no known attribute calls: a proof of absence must miss nothing."""
        instructions = (i for c in self._computations.values() for i in c.instructions.values())
        called = {name for instruction in instructions for name in self._callees(instruction)}
        others = (n for n in self._computations if n not in called and n != self._entry)
        return [self._entry, *others]

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


# ---- origins -----------------------------------------------------------------------------------

# Parts of an op_name that say how JAX runs the code, and the primitives that become collectives.
_WRAPPER = re.compile(r"\b(?:transpose|jvp|vmap|checkpoint|remat)\(([^()]*)\)")
_STRUCTURE = re.compile(
    r"shard_map|while|body|cond|closed_call|core_call|eval_jaxpr|pjit|checkpoint|remat"
    r"|rematted_computation|custom_[jv][vj]p_call"
)
_PRIMITIVE = (
    r"(?:all_gather\w*|all_to_all|pmax|pmin|ppermute|psum\w*|ragged_all_to_all|reduce_scatter)"
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
