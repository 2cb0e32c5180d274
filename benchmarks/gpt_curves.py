"""Held-out loss against steps and against time: Muon, Shampoo, SOAP and AdamW on the example's GPT.

All runs start from one seed and see the same batches. They take their steps in turn in one
process, so that other work on the machine slows all of them alike; time is that of the training
steps, without compilation and evaluation. Of every optimizer the rate with the lowest final loss is
drawn. Usage::

    python benchmarks/gpt_curves.py [--shampoo 0.002 0.004] [--muon 0.04] [--out runs/gpt_curves]
"""

import argparse
import json
import math
import platform
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from gpt.config import KRONECKER, LEARNING_RATE, PRECONDITION_EVERY, Config, Optimizer
from train_gpt import SIMULATED, simulate_cpu_devices

FORMATTER = argparse.RawDescriptionHelpFormatter
parser = argparse.ArgumentParser(description=__doc__, formatter_class=FORMATTER)
for name, rate in LEARNING_RATE.items():
    parser.add_argument(
        f"--{name}", type=float, nargs="+", default=[rate], metavar="RATE", help=f"[{rate:g}]"
    )
parser.add_argument("--steps", type=int, default=Config.steps)
parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
parser.add_argument("--layers", type=int, default=Config.layers)
parser.add_argument("--width", type=int, default=Config.width)
parser.add_argument("--precondition-every", type=int, default=PRECONDITION_EVERY)
parser.add_argument("--devices", type=int, help=f"[all; on CPU {SIMULATED} simulated ones]")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", type=Path, default=Path("runs/gpt_curves"), help=".json and .png")
ARGS = parser.parse_args()
simulate_cpu_devices(ARGS.devices or SIMULATED)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from gpt import data, training  # noqa: E402
from gpt.plots import COLORS  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from rich import box  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402


class Run:
    """One optimizer at one rate."""

    def __init__(self, config: Config, setup: training.Setup) -> None:
        self.config, self.setup = config, setup
        self.owned, self.state = setup.owned, setup.state
        self.seconds: list[float] = []  # of each step
        self.held_out = {0: setup.evaluate(self.owned)}

    def step(self) -> None:
        windows = next(self.setup.batches)
        start = time.perf_counter()
        self.owned, self.state, metrics = self.setup.step(self.owned, self.state, windows)
        jax.block_until_ready(metrics)
        self.seconds.append(time.perf_counter() - start)
        if len(self.seconds) % ARGS.every == 0 or len(self.seconds) == ARGS.steps:
            self.held_out[len(self.seconds)] = self.setup.evaluate(self.owned)

    @property
    def final(self) -> float:
        """The last held-out loss; infinite for a run that diverged."""
        last = list(self.held_out.values())[-1]
        return last if math.isfinite(last) else math.inf

    def curve(self) -> dict[str, list[float]]:
        """Steps, seconds of training until then, held-out losses."""
        # The first step compiles: it counts as an ordinary one.
        seconds = [float(np.median(self.seconds[1:])), *self.seconds[1:]]
        until = np.concatenate([[0.0], np.cumsum(seconds)])
        steps = list(self.held_out)
        return {
            "steps": steps,
            "seconds": until[steps].round(3).tolist(),
            "held_out_loss": list(self.held_out.values()),
        }


def train() -> list[Run]:
    devices = training.pick_devices(ARGS.devices)
    corpus = data.load_corpus()
    runs = []
    for optimizer in Optimizer:
        for rate in getattr(ARGS, optimizer):
            factored = optimizer in KRONECKER
            config = Config(
                optimizer,
                rate,
                steps=ARGS.steps,
                layers=ARGS.layers,
                width=ARGS.width,
                seed=ARGS.seed,
                precondition_every=ARGS.precondition_every if factored else None,
            )
            runs.append(Run(config, training.build(config, corpus, devices)))
    for step in range(1, ARGS.steps + 1):
        for run in runs:
            run.step()
        if step % ARGS.every == 0:
            losses = ", ".join(f"{list(run.held_out.values())[-1]:.3f}" for run in runs)
            print(f"step {step}: {losses}", flush=True)
    return runs


def plot(path: Path, runs: list[Run]) -> None:
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for run in runs:
        curve = {key: values[1:] for key, values in run.curve().items()}
        color, label = COLORS[run.config.optimizer], f"{run.config.label}: {run.final:.3f}"
        by_step.plot(curve["steps"], curve["held_out_loss"], color=color, label=label)
        by_time.plot(curve["seconds"], curve["held_out_loss"], color=color)
    by_step.set(xlabel="step", ylabel="held-out loss, nats per byte")
    by_time.set(xlabel=f"seconds of training, {machine()}")
    by_step.legend(frameon=False)
    for axes in (by_step, by_time):
        axes.grid(color="0.92")
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def machine() -> str:
    kind, count = jax.devices()[0].device_kind, jax.device_count()
    return f"{count} simulated CPU devices" if kind == "cpu" else f"{count} x {kind}"


def main() -> None:
    runs = train()
    console = Console(width=80, highlight=False)
    table = Table("", "held out", "ms per step, median", "compile s", box=box.SIMPLE_HEAD)
    results: dict[str, Any] = {
        "machine": f"{machine()}, {platform.machine()}",
        "jax": jax.__version__,
    }
    for run in runs:
        median = float(np.median(run.seconds[1:]))
        table.add_row(
            run.config.label,
            f"{run.final:.3f}",
            f"{1e3 * median:.0f}",
            f"{run.seconds[0] - median:.1f}",
        )
        results[run.config.label] = {"config": run.config.to_dict(), **run.curve()}
    console.print(table)
    best = [
        min((r for r in runs if r.config.optimizer is optimizer), key=lambda run: run.final)
        for optimizer in Optimizer
    ]
    plot(ARGS.out.with_suffix(".png"), best)
    ARGS.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"wrote {ARGS.out}.png and .json")


if __name__ == "__main__":
    main()
