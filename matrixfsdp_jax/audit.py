"""What a compiled program sends between devices, where that comes from, and the memory it takes.

``audit`` reads the text of the program that XLA compiled (HLO), not the Python that made it: what
the compiler added, combined, promoted or removed is what is counted. It therefore holds for the
backend it was compiled for. The CPU backend, for one, sends bfloat16 as float32.

Cross-device copies that are no HLO collective (a Pallas kernel with its own DMA) cannot be seen.
"""

import io
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from matrixfsdp_jax.hlo import KINDS, Collective, HloProgram, Kind, MeshSizes, Shape


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


# ---- table -------------------------------------------------------------------------------------


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
    """Collectives that differ in nothing shown share a row; ``runs`` is instructions x times.

    Layers are shown as one: ``blocks/3/kernel`` and ``layer_3/kernel`` with ``*`` for the number.
    """
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True)
    table.add_column("kind", overflow="fold")
    table.add_column("runs", justify="right", no_wrap=True)
    table.add_column("operands", overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("axis", overflow="fold")
    table.add_column("origin", overflow="fold")
    rows: dict[tuple[str, ...], list[Collective]] = defaultdict(list)
    for c in collectives:
        times = "" if c.times == 1 else f" x {'?' if c.times is None else c.times}"
        axis = "?" if c.axis is None else ", ".join(c.axis)
        scope = re.sub(r"(?<=[/_.])\d+(?=[/_.]|$)", "*", c.scope)
        rows[c.kind, times, _arrays(c.shapes), axis, scope].append(c)
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
