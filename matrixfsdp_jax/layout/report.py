"""A plan to look at: a table for people, a dict for programs.

Shape legend: ``N`` devices on the owner axis, ``W`` waves.
"""

import io
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, get_args

from rich import box
from rich.console import Console
from rich.table import Table

from matrixfsdp_jax.layout import balance, refresh_report
from matrixfsdp_jax.layout.costs import (
    Collective,
    CollectiveKind,
    Costs,
    compositions,
    costs,
    matrix_flops,
    method,
    newton_schulz_flops,
)
from matrixfsdp_jax.layout.refresh_report import Refresh
from matrixfsdp_jax.layout.spec import LeafPlan, Plan, ShapeClass, TensorView

_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)


def render(plan: Plan, *, width: int | None = 80, every_leaf: bool = False) -> str:
    """Return the plan as a table for people: classes, devices, bytes moved, leaves.

    Rows that differ only in a number are folded into one: ``blocks/{0..11}/attn/kernel`` stands
    for exactly the twelve leaves with a number from 0 to 11 in that place, all of one shape,
    dtype, route and reason.

    Args:
      plan: the plan.
      width: columns of text; None takes the terminal's.
      every_leaf: give each leaf its own row, with the slots (device/wave) of its matrices.

    Examples:
      >>> from matrixfsdp_jax.layout.planner import make_plan
      >>> from matrixfsdp_jax.layout.spec import Leaf, LeafRoute
      >>> leaf = Leaf("norm/scale", (8,), "float32")
      >>> "norm/scale" in render(make_plan([(leaf, LeafRoute("rest", "rank 1"))], 4))
      True
    """
    out = io.StringIO()
    console = Console(
        file=out, width=width, color_system=None, markup=False, highlight=False, emoji=False
    )
    cost = costs(plan)
    found = refresh_report.refresh(plan)
    console.print(_summary(plan, cost, found))
    tables = [_class_table(plan), _device_table(cost), _refresh_table(found), _traffic_table(cost)]
    for table in [*tables, _leaf_table(plan, every_leaf)]:
        if table.row_count:
            console.print()
            console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _summary(plan: Plan, cost: Costs, found: Refresh | None) -> str:
    matrices = sum(cost.matrices.real)
    gather = f"in {plan.gather_dtype}" if plan.gather_dtype else "in each leaf's own dtype"
    traffic = [f"{kind} {_bytes(b)}" for kind in _KINDS if (b := cost.received(kind))]
    lines = [
        f"{title(plan)}: {matrices} matrices in {len(plan.classes)} classes, "
        f"{len(plan.leaves)} leaves",
        f"gather {gather}, reduce in {plan.reduce_dtype or 'float32 or wider'}",
        f"memory per device: {_bytes(cost.memory.padded)}, plus {_bytes(cost.gathered)} "
        "while all parameters are gathered",
        f"received per device and step: {', '.join(traffic) or 'nothing'}",
    ]
    if plan.classes:
        is_muon = method(plan.optimizer).matrix_flops is newton_schulz_flops
        steps = f" ({plan.ns_steps} Newton-Schulz steps)" if is_muon else ""
        lines += [
            f"update per device: {_flops(cost.flops.padded, 'FLOP')}{steps}, "
            f"{cost.flops.padded_balance:.2f} x the mean of useful work; "
            f"busiest owner {cost.flops.balance:.2f} x",
            _dealing_line(plan),
            f"padding: stacks hold {cost.padding_factor:.2f} x the elements of the matrices",
        ]
    if found is not None:
        lines += [
            f"factors and their roots (or eigenvectors): {_bytes(cost.factors.padded)} of state "
            "per device",
            *refresh_report.lines(found),
        ]
    return "\n".join(lines)


def _dealing_line(plan: Plan) -> str:
    found = _dealing(plan)
    branches = len(found["compositions"])
    how = "equal slots" if plan.dealing == "slots" else f"LPT over all classes, {branches} branches"
    return (
        f"dealt by {how}: {found['plan']:.2f} x the mean FLOPs on the busiest device; equal slots "
        f"{found['slots']:.2f} x, LPT {found['lpt']:.2f} x, bound {found['lower_bound']:.2f} x"
    )


def _dealing(plan: Plan) -> dict[str, Any]:
    """FLOPs of the busiest device over the mean, as dealt and as it could be (see `balance`)."""
    each = [matrix_flops(plan, cls) for cls in plan.classes]
    flops = [one for one, cls in zip(each, plan.classes, strict=True) for _ in cls.matrices]
    mean = sum(flops) / plan.num_devices
    loads = [0] * plan.num_devices
    for device, one in zip(balance.lpt(flops, plan.num_devices), flops, strict=True):
        loads[device] += one
    slots = [-(-len(cls.matrices) // plan.num_devices) for cls in plan.classes]
    return {
        "dealing": plan.dealing,
        "compositions": [list(waves) for waves in compositions(plan).waves],
        "plan": costs(plan).flops.padded_balance,
        "slots": balance.load(slots, each) / mean if mean else 1.0,
        "lpt": max(loads) / mean if mean else 1.0,
        "lower_bound": balance.lower_bound(flops, plan.num_devices),
    }


def title(plan: Plan) -> str:
    """``"muon on 8 devices"``."""
    return (
        f"{method(plan.optimizer).name} on {plan.num_devices} device{'s' * (plan.num_devices > 1)}"
    )


def _table(title: str, *columns: str, numbers_from: int) -> Table:
    """A table whose columns from ``numbers_from`` on are right-aligned; nothing is ever cut."""
    table = Table(
        title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for k, column in enumerate(columns):
        justify = "right" if k >= numbers_from else "left"
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table


def _class_table(plan: Plan) -> Table:
    table = _table(
        "Classes", "class", "matrices", "waves", "pads", "on all devices", numbers_from=1
    )
    for cls in plan.classes:
        stack = "x".join(map(str, cls.stack_shape))
        table.add_row(cls.key, *map(str, (len(cls.matrices), cls.num_waves, cls.num_pads)), stack)
    return table


def _device_table(cost: Costs) -> Table:
    columns = ("device", "matrices", "parameters", "gradients", "state", "frozen", "FLOPs")
    table = _table(
        "Devices (without pads; the last row is what each pays)", *columns, numbers_from=1
    )
    parts = (cost.parameters, cost.gradients, cost.state)

    def row(label: str, matrices: int, parts: Iterable[int], flops: int) -> None:
        sizes = [_bytes(p) for p in (*parts, cost.frozen)]
        table.add_row(label, str(matrices), *sizes, _flops(flops))

    alike: dict[tuple[int, ...], list[str]] = defaultdict(list)
    reals = [p.real for p in (cost.matrices, *parts, cost.flops)]
    for device, values in enumerate(zip(*reals, strict=True)):
        alike[values].append(str(device))
    for values, devices in alike.items():
        row(_ranges(devices), values[0], values[1:-1], values[-1])
    row("each", cost.matrices.padded, [p.padded for p in parts], cost.flops.padded)
    return table


def _refresh_table(found: Refresh | None) -> Table:
    columns = ("class", "blocks", "k^3", "of all k^3", "factors", "factors per device")
    table = _table(
        "Decompositions (of one matrix; the last: of all slots)", *columns, numbers_from=1
    )
    classes = () if found is None else found.classes
    whole = sum(each.matrices * each.work for each in classes)
    for each in classes:
        table.add_row(
            each.key,
            str(each.blocks),
            _flops(round(each.work)),
            f"{each.matrices * each.work / whole:.0%}",
            _bytes(each.factor_bytes),
            _bytes(each.waves * each.factor_bytes),
        )
    return table


def _traffic_table(cost: Costs) -> Table:
    title = "Received by a device in each collective of a step"
    table = _table(title, "what", "times", *_KINDS, numbers_from=1)
    by_source: dict[str, dict[str, Collective]] = defaultdict(dict)
    for collective in cost.collectives:
        by_source[collective.source][collective.kind] = collective
    rows = []
    for source, found in by_source.items():
        count = next(iter(found.values())).count
        each = tuple(_bytes(found[kind].bytes) if kind in found else "" for kind in _KINDS)
        rows.append(((count, each), source))
    for (count, each), sources in _by_key(rows).items():
        for source, leaves in _fold(sources):
            table.add_row(source, str(count * leaves), *each)
    return table


def _leaf_table(plan: Plan, every_leaf: bool) -> Table:
    where = _slots_of_leaves(plan)
    table = _table("Leaves", "leaf", "#", "shape", "route: why", numbers_from=4)
    rows = []
    for index, each in enumerate(plan.leaves):
        shape = f"{_short_dtype(each.leaf.dtype)}[{','.join(map(str, each.leaf.shape))}]"
        route = _route(each, [s["class"] for s in where[index]])
        slots = " ".join(f"{s['device']}/{s['wave']}" for s in where[index])
        place = f" at {slots}" if every_leaf and slots else ""
        rows.append(((shape, f"{route}{place}: {each.route.reason}"), each.leaf.path))
    shown = [(path, 1, cells) for cells, path in rows]
    if not every_leaf:
        shown = [(p, k, cells) for cells, paths in _by_key(rows).items() for p, k in _fold(paths)]
    for pattern, count, cells in shown:
        table.add_row(pattern, str(count), *cells)
    return table


def _route(each: LeafPlan, classes: Sequence[str]) -> str:
    if each.route.route == "matrix":
        shapes = dict.fromkeys(key.split(":")[0] for key in classes)
        kind = "tensor" if isinstance(each.route.view, TensorView) else "matrix"
        return f"{kind} {', '.join(shapes)}"
    placed = "replicated" if each.shard_dim is None else f"dim {each.shard_dim} sharded"
    return f"{each.route.route}, {placed}"


def _short_dtype(dtype: str) -> str:
    """``"bfloat16"`` -> ``"bf16"``, as jaxprs write it."""
    return re.sub(r"^(b?f|u?i|c)[a-z]+", r"\1", dtype)


def _by_key(rows: Iterable[tuple[Any, str]]) -> dict[Any, list[str]]:
    grouped: dict[Any, list[str]] = defaultdict(list)
    for key, path in rows:
        grouped[key].append(path)
    return grouped


def _fold(paths: Iterable[str]) -> list[tuple[str, int]]:
    """Paths that differ only in numbers as one pattern, with the number of paths it stands for.

    Number places are folded one after the other, and only where all else is equal, so a pattern
    with several braces stands for every combination of their numbers.
    """
    rows = {tuple(re.split(r"(\d+)", path)): 1 for path in paths}
    for place in range(1, max(map(len, rows), default=0), 2):
        alike: dict[Any, list[tuple[str, ...]]] = defaultdict(list)
        for row in rows:
            alike[row[:place], row[place + 1 :]].append(row)
        folded = {}
        for group in alike.values():
            row, count = group[0], sum(rows[r] for r in group)
            if len(group) > 1:
                numbers = _ranges([r[place] for r in group])
                row = (*row[:place], f"{{{numbers}}}", *row[place + 1 :])
            folded[row] = count
        rows = folded
    return [("".join(row), count) for row, count in rows.items()]


def _ranges(numbers: Iterable[str]) -> str:
    """``["0", "1", "2", "5"]`` -> ``"0..2,5"``."""
    runs: list[list[str]] = []
    for number in sorted(numbers, key=lambda x: (int(x), x)):
        if runs and str(int(runs[-1][-1]) + 1) == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(run[0] if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)


def _bytes(count: int) -> str:
    value, units = float(count), iter(("KiB", "MiB", "GiB", "TiB"))
    unit = "B"
    while value >= 1024 and unit != "TiB":
        value, unit = value / 1024, next(units)
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def _flops(count: int, unit: str = "") -> str:
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if count >= 10**power:
            return f"{count / 10**power:.1f} {prefix}{unit}"
    return f"{count} {unit}".rstrip()


def to_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan and its costs as JSON-ready data, every number exact and unfolded."""
    cost = costs(plan)
    per_device = {
        name: getattr(cost, name)
        for name in (
            *("matrices", "elements", "flops"),
            *("parameters", "gradients", "state", "factors", "memory"),
        )
    }
    where = _slots_of_leaves(plan)
    found = refresh_report.refresh(plan)
    return {
        "num_devices": plan.num_devices,
        "optimizer": method(plan.optimizer).name,
        "ns_steps": plan.ns_steps,
        "gather_dtype": plan.gather_dtype,
        "reduce_dtype": plan.reduce_dtype,
        "classes": [_class_dict(cls) for cls in plan.classes],
        "devices": [
            {"device": d, **{name: cost.real[d] for name, cost in per_device.items()}}
            for d in range(plan.num_devices)
        ],
        "leaves": [
            {
                "path": each.leaf.path,
                "shape": list(each.leaf.shape),
                "dtype": each.leaf.dtype,
                "route": each.route.route,
                "reason": each.route.reason,
                "trainable": each.trainable,
                "shard_dim": each.shard_dim,
                "matrices": slots,
            }
            for each, slots in zip(plan.leaves, where, strict=True)
        ],
        "costs": {
            "every_device": {name: cost.padded for name, cost in per_device.items()},
            "frozen": cost.frozen,
            "gathered": cost.gathered,
            "padding_factor": cost.padding_factor,
            "flop_balance": cost.flops.balance,
            "padded_flop_balance": cost.flops.padded_balance,
            "collectives": [{**asdict(c), "total_bytes": c.total_bytes} for c in cost.collectives],
        },
        "dealing": _dealing(plan) if plan.classes else None,
        "refresh": None if found is None else refresh_report.to_dict(found),
    }


def _class_dict(cls: ShapeClass) -> dict[str, Any]:
    return {
        "key": cls.key,
        "shape": list(cls.shape),
        "dtype": cls.dtype,
        "num_waves": cls.num_waves,
        "num_pads": cls.num_pads,
        "matrices": [
            {**asdict(matrix), "dims": list(matrix.dims), "device": device, "wave": wave}
            for matrix, (device, wave) in zip(cls.matrices, cls.slots, strict=True)
        ],
    }


def _slots_of_leaves(plan: Plan) -> list[list[dict[str, Any]]]:
    """For each leaf the class and slot of its matrices, by batch index and block."""
    found: list[list[tuple[int, int, dict[str, Any]]]] = [[] for _ in plan.leaves]
    for cls in plan.classes:
        for matrix, (device, wave) in zip(cls.matrices, cls.slots, strict=True):
            slot = {"name": matrix.name, "class": cls.key, "device": device, "wave": wave}
            found[matrix.leaf].append((matrix.batch, matrix.start, slot))
    return [[slot for *_, slot in sorted(each, key=lambda s: s[:2])] for each in found]
