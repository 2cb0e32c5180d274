"""A picture of who owns what: devices across, waves down, one coloured cell per matrix."""

import colorsys
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matrixfsdp_jax.layout.report import title
from matrixfsdp_jax.layout.spec import Matrix, Plan, ShapeClass

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Color = tuple[float, float, float]
_POINTS = 72  # per inch
_LABEL_SIZES = (8.0, 7.0, 6.0, 5.0)  # points; below that a label is no longer legible
_PAD_STYLE: dict[str, Any] = {
    "facecolor": "0.97",
    "edgecolor": "0.6",
    "hatch": "////",
    "linewidth": 0.8,
}


def plot(plan: Plan, path: str | Path) -> None:
    """Draw who owns what: devices across, waves down, one panel per class.

    Each matrix is a cell in the colour of its parameter kind (its path without numbers) with its
    short name; a name that does not fit shrinks to its numbers, then goes. Pad slots are hatched.

    Args:
      plan: the plan.
      path: file to write; its ending gives the format (``.png``, ``.svg``, ``.pdf``).

    Raises:
      ImportError: if matplotlib is missing; install ``matrixfsdp-jax[plot]``.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install 'matrixfsdp-jax[plot]'") from error
    names = _Names(plan)
    waves = [cls.num_waves for cls in plan.classes]
    width = min(20.0, max(7.0, 1.1 * plan.num_devices))
    total = max(1, sum(waves))
    row = min(0.32, max(0.1, 14 / total), 60 / total)  # inches; a picture has 2^16 pixels at most
    legend_columns = max(1, int(width / (0.7 + 0.085 * max(map(len, names.colors), default=0))))
    legend_rows = -(-(len(names.colors) + 1) // legend_columns)
    height = 1.0 + row * sum(waves) + 0.6 * len(waves) + 0.22 * legend_rows
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(f"{title(plan)}: who owns which matrix", fontsize=11)
    if plan.classes:
        panels = figure.subplots(len(waves), squeeze=False, sharex=True, height_ratios=waves)
        for axes, cls in zip(panels[:, 0], plan.classes, strict=True):
            _panel(axes, cls, names, cell=(0.9 * width / plan.num_devices, row))
        panels[-1, 0].set_xlabel("device")
        _legend(figure, names.colors, legend_columns, any(cls.num_pads for cls in plan.classes))
    else:
        figure.text(0.5, 0.4, "no leaf is updated by a matrix method", ha="center")
    figure.savefig(path, dpi=150)


class _Names:
    """The kind of each matrix (its leaf's path without numbers), its numbers, and the colours."""

    def __init__(self, plan: Plan) -> None:
        self._paths = [each.leaf.path for each in plan.leaves]
        matrices = sorted((m for cls in plan.classes for m in cls.matrices), key=lambda m: m.leaf)
        self._head, self._tail = _shared_ends([self._split(m)[0] for m in matrices])
        kinds = list(dict.fromkeys(self.of(m)[0] for m in matrices))
        self.colors = {kind: _color(k, len(kinds)) for k, kind in enumerate(kinds)}

    def of(self, matrix: Matrix) -> tuple[str, str]:
        """The kind of a matrix and its numbers: ``("attn/q", "3")``, ``("attn/qkv:1", "3")``."""
        kind, numbers = self._split(matrix)
        batch, colon, block = matrix.name.removeprefix(self._paths[matrix.leaf]).partition(":")
        return "/".join(kind[self._head : len(kind) - self._tail]) + colon + block, numbers + batch

    def _split(self, matrix: Matrix) -> tuple[list[str], str]:
        path = self._paths[matrix.leaf]
        if not any(part.isdigit() for part in path.split("/")):
            # linen numbers its modules within their names: Block_3
            path = re.sub(r"_(\d+)(?=/)", r"/\1", path, count=1)
        parts = path.split("/")
        kind = [part for part in parts if not part.isdigit()]
        return kind, ".".join(part for part in parts if part.isdigit())


def _shared_ends(kinds: Sequence[Sequence[str]]) -> tuple[int, int]:
    """How many parts all kinds share at their beginning and end; each kind keeps one at least."""
    spare = min(map(len, kinds), default=1) - 1
    head = 0
    while head < spare and len({kind[head] for kind in kinds}) == 1:
        head += 1
    tail = 0
    while head + tail < spare and len({kind[-1 - tail] for kind in kinds}) == 1:
        tail += 1
    return head, tail


def _color(k: int, count: int) -> _Color:
    """Even hues, strong and pale in turn, all light enough for black text."""
    return colorsys.hls_to_rgb(k / max(1, count), 0.7 if k % 2 else 0.8, 0.65)


def _panel(axes: "Axes", cls: ShapeClass, names: _Names, cell: tuple[float, float]) -> None:
    """One class; ``cell`` is the size of a slot in inches."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    def boxes(slots: Iterable[tuple[int, int]], **style: Any) -> None:
        axes.add_collection(PatchCollection([Rectangle(slot, 1, 1) for slot in slots], **style))

    by_kind: dict[str, list[tuple[int, int]]] = defaultdict(list)
    labels = []
    for matrix, slot in zip(cls.matrices, cls.slots, strict=True):
        kind, numbers = names.of(matrix)
        by_kind[kind].append(slot)
        labels.append((kind, numbers))
    for kind, slots in by_kind.items():
        boxes(slots, facecolor=names.colors[kind], edgecolor="white", linewidth=0.8)
    every = itertools.product(range(cls.num_devices), range(cls.num_waves))
    boxes(sorted(set(every) - set(cls.slots)), **_PAD_STYLE)
    size, texts = _fit(labels, cell)
    for (device, wave), text in zip(cls.slots, texts, strict=True):
        if text:
            axes.text(device + 0.5, wave + 0.5, text, ha="center", va="center", fontsize=size)
    axes.set(xlim=(0, cls.num_devices), ylim=(cls.num_waves, 0), ylabel="wave")
    _number(axes.xaxis, cls.num_devices, cell[0])
    _number(axes.yaxis, cls.num_waves, cell[1])
    axes.set_title(
        f"{cls.key}: {len(cls.matrices)} matrices, {cls.num_pads} pads", loc="left", fontsize=9
    )


def _fit(labels: Sequence[tuple[str, str]], cell: tuple[float, float]) -> tuple[float, list[str]]:
    """Font size in points and the texts that fit a cell: kind and numbers, else numbers, else none.

    All cells of a panel are labelled alike.
    """
    width, height = (_POINTS * side for side in cell)
    whole = [f"{kind} {numbers}".strip() for kind, numbers in labels]
    for texts in (whole, [numbers for _, numbers in labels]):
        longest = max(map(len, texts))
        for size in _LABEL_SIZES:
            # A character of the default font is about 0.6 of its size wide.
            if 0.62 * size * longest <= 0.95 * width and 1.2 * size <= height:
                return size, texts
    return _LABEL_SIZES[-1], [""] * len(labels)


def _number(axis: Any, count: int, inches: float) -> None:
    """Number the slots of an axis in their middle, as many as have room."""
    step = 1 << (math.ceil(0.25 / inches) - 1).bit_length()
    axis.set_ticks([k + 0.5 for k in range(0, count, step)], labels=range(0, count, step))
    axis.set_tick_params(length=0, labelsize=8)


def _legend(figure: "Figure", colors: dict[str, _Color], columns: int, pads: bool) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=color, label=kind) for kind, color in colors.items()]
    if pads:
        handles.append(Patch(**_PAD_STYLE, label="pad (zero for ever)"))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, fontsize=8, frameon=False
    )
