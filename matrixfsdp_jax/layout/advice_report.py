"""Advice to read: a table of the options for people, a dict for programs."""

import io
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from matrixfsdp_jax.layout.advice import Advice
from matrixfsdp_jax.layout.costs import method
from matrixfsdp_jax.layout.options import Option
from matrixfsdp_jax.layout.report import _bytes, _table

# From here on equal slots are said to be uneven.
_UNEVEN = 1.05
_Units = Sequence[tuple[float, str]]

_BINARY: _Units = [(1024**k, f"{prefix}iB") for k, prefix in enumerate("KMGT", start=1)]
_DECIMAL: _Units = [(10 ** (3 * k), f"{prefix}FLOP") for k, prefix in enumerate("MGTP", start=2)]
_TIMES: _Units = [(1e-6, "us"), (1e-3, "ms"), (1.0, "s")]


def render(advice: Advice, *, width: int | None = 80) -> str:
    """Return the options as a table, the choice, why, and the call that makes it.

    Args:
      advice: from `advice.compare`.
      width: columns of text; None takes the terminal's.
    """
    out = io.StringIO()
    console = Console(
        file=out, width=width, color_system=None, markup=False, highlight=False, emoji=False
    )
    console.print(_options_table(advice))
    lines = out.getvalue().splitlines()
    for text in (*_legend(advice), "", *_choice(advice)):
        lines += textwrap.wrap(
            text, console.width, subsequent_indent="  ", break_on_hyphens=False
        ) or [""]
    return "\n".join(line.rstrip() for line in lines)


def _options_table(advice: Advice) -> Table:
    """Per device; each column in one unit."""
    options = advice.options
    columns: dict[str, tuple[list[float], _Units]] = {
        "model": ([o.received("forward", "backward") for o in options], _BINARY),
        "optim.": ([o.received("optimizer") for o in options], _BINARY),
        "memory": ([o.memory.total for o in options], _BINARY),
        "update": ([o.flops for o in options], _DECIMAL),
        "time": ([advice.seconds(o) for o in options], _TIMES),
    }
    names, cells = [], []
    for name, (values, units) in columns.items():
        unit, numbers = _scaled(values, units)
        names.append(f"{name}\n{unit}")
        cells.append(numbers)
    # The balance stands before the time.
    names.insert(4, "balance")
    cells.insert(4, [_balance(option) for option in options])
    table = _table(
        "Per device and step: bytes received, memory, FLOPs of the update, time",
        *("storage,\nowners", *names, ""),
        numbers_from=1,
    )
    for k, option in enumerate(options):
        note = "chosen" if option is advice.chosen else "" if advice.fits(option) else "too big"
        table.add_row(_where(option), *(column[k] for column in cells), note)
    return table


def _scaled(values: Sequence[float], units: _Units) -> tuple[str, list[str]]:
    """The largest unit in which all values but zeros are at least 1, and the values in it."""
    least = min((value for value in values if value), default=0)
    size, unit = next((u for u in reversed(units) if u[0] <= least), units[0])
    return unit, [_number(value / size) for value in values]


def _number(value: float) -> str:
    """Three significant digits, or all before the point; ``"0"`` for nothing."""
    if value == 0:
        return "0"
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f}"


def _balance(option: Option) -> str:
    found = (option.balance.plan, option.balance.lpt, option.balance.bound)
    return "/".join(_number(x) for x in found)


def _where(option: Option) -> str:
    """Storage, and below it the owners: ``"fsdp"``, ``"fsdp each"``, ``"replica fsdp"``."""
    how = f" {option.replicas}" if option.replica_axis else ""
    return f"{option.storage}\n{' '.join(option.owner_axis)}{how}".rstrip()


def _legend(advice: Advice) -> list[str]:
    it = advice.hardware
    limit = "no memory limit"
    if advice.memory_budget is not None:
        limit = f"memory limit {_bytes(advice.memory_budget)} per device, activations not counted"
    mesh = ", ".join(f"{axis}={size}" for axis, size in advice.mesh)
    how = ""
    if any(option.replica_axis for option in advice.options):
        how = "; each: repeated by every replica, shared: by all replicas together"
    return [
        f"owners: mesh axes over which matrices are dealt out{how}",
        "model: in forward and backward pass; optim.: in the optimizer",
        "balance: FLOPs of the busiest device over the mean, as planned / LPT / at least",
        f"time: an estimate for {it.name} ({it.flops / 1e12:.3g} TFLOP/s at {it.efficiency:.0%}, "
        f"{it.near / 1e9:.3g} GB/s within {it.domain} devices, {it.far / 1e9:.3g} beyond): the "
        "update, the optimizer's bytes, and those of the model above the least; no overlap",
        f"mesh {mesh}; {limit}",
    ]


def _choice(advice: Advice) -> list[str]:
    if advice.chosen is None:
        return [advice.why]
    arguments = advice.chosen.arguments
    name = method(advice.chosen.plan.optimizer).name
    if arguments is None:
        use = f"use mfsdp.{name}(...) without a layout, on replicated parameters"
    else:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        use = f"use mfsdp.plan(params, mesh, {given}, optimizer={name!r})"
    return [f"chosen: {advice.why}", use, *_dealing_hint(advice.chosen)]


def _dealing_hint(option: Option) -> list[str]:
    """That the matrices could be dealt by work, where this may help."""
    found = option.balance
    if option.plan.shared or option.plan.dealing == "lpt" or found.plan < _UNEVEN * found.lpt:
        return []
    return [
        "matrices dealt by work (dealing='lpt') could take the busiest device from "
        f"{found.plan:.2f} to {found.lpt:.2f} x the mean FLOPs"
    ]


def to_dict(advice: Advice) -> dict[str, Any]:
    """Return the advice as JSON-ready data, every number exact."""
    chosen = [k for k, option in enumerate(advice.options) if option is advice.chosen]
    return {
        "mesh": dict(advice.mesh),
        "hardware": asdict(advice.hardware),
        "memory_budget": advice.memory_budget,
        "chosen": chosen[0] if chosen else None,
        "why": advice.why,
        "options": [_option_dict(advice, option) for option in advice.options],
    }


def _option_dict(advice: Advice, option: Option) -> dict[str, Any]:
    arguments = option.arguments
    return {
        "storage": option.storage,
        "owner_axis": list(option.owner_axis),
        "replica_axis": list(option.replica_axis),
        "replicas": option.replicas,
        "dealing": option.plan.dealing,
        "plan_arguments": arguments and {k: _listed(v) for k, v in arguments.items()},
        "transfers": [{**asdict(t), "axes": list(t.axes)} for t in option.transfers],
        "received": {
            "forward": option.received("forward"),
            "backward": option.received("backward"),
            "optimizer": option.received("optimizer"),
        },
        "memory": {**asdict(option.memory), "total": option.memory.total},
        "fits": advice.fits(option),
        "flops": option.flops,
        "balance": asdict(option.balance),
        "padding_factor": option.padding_factor,
        "seconds": {
            "update": advice.update_seconds(option),
            "model": advice.transfer_seconds(option, "forward", "backward"),
            "optimizer": advice.transfer_seconds(option, "optimizer"),
            "compared": advice.seconds(option),
        },
    }


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
