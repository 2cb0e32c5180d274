"""Loss curves as pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from gpt.config import Config

Records = Sequence[dict[str, Any]]

COLORS = {"muon": "#c2410c", "shampoo": "#15803d", "soap": "#7e22ce", "adamw": "#1d4ed8"}


def held_out_curve(records: Records) -> tuple[list[int], list[float]]:
    """Steps and held-out losses (nats per byte), after the start."""
    evaluated = [r for r in records if "held_out_loss" in r and r["step"] > 0]
    return [r["step"] for r in evaluated], [r["held_out_loss"] for r in evaluated]


def first_step_below(records: Records, loss: float) -> float | None:
    """The step at which the held-out curve, drawn with straight lines, first comes to ``loss``."""
    steps, losses = held_out_curve(records)
    for k, value in enumerate(losses):
        if value <= loss:
            if k == 0:
                return float(steps[0])
            share = (losses[k - 1] - loss) / (losses[k - 1] - value)
            return steps[k - 1] + share * (steps[k] - steps[k - 1])
    return None


def plot_run(path: Path, records: Records, title: str) -> None:
    """Training loss (every step, and its running mean) and held-out loss of one run."""
    trained = [r for r in records if "loss" in r]
    steps = np.array([r["step"] for r in trained])
    losses = np.array([r["loss"] for r in trained])
    figure, axes = _figure(title)
    axes.plot(steps, losses, color="0.75", linewidth=0.8, label="training, each step")
    span = len(losses) // 30
    if span > 1:
        smooth = np.convolve(losses, np.ones(span) / span, mode="valid")
        middle = steps[: len(smooth)] + (span - 1) / 2
        axes.plot(middle, smooth, color="0.4", label=f"training, mean of {span} steps")
    held_steps, held = held_out_curve(records)
    axes.plot(held_steps, held, "o-", color=COLORS["muon"], markersize=4, label="held out")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def plot_comparison(path: Path, runs: Mapping[Config, Records], title: str) -> None:
    """The held-out curves of several runs in one picture, with the loss each ends at."""
    figure, axes = _figure(title)
    for config, records in runs.items():
        steps, losses = held_out_curve(records)
        text = f"{config.label}: {losses[-1]:.3f} at step {steps[-1]}"
        axes.plot(steps, losses, "o-", color=COLORS[config.optimizer], markersize=4, label=text)
    axes.set_ylabel("held-out loss, nats per byte")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def _figure(title: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
