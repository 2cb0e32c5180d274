"""A small CNN on scikit-learn's digits: Shampoo with Adam grafting against AdamW.

    python examples/digits_cnn.py          # about two minutes; leaves runs/digits/
    python examples/digits_cnn.py --help

Each optimizer trains at every rate of a small grid; the rate with the lowest validation loss is
trained from further seeds, and only then the test images count. Without an accelerator it runs on
simulated CPU devices.
"""

import os

os.environ["XLA_FLAGS"] = (
    f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}"
)
# Simulated devices share the cores: more threads of BLAS would wait for one another.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import optax
import typer
from flax import linen as nn
from matplotlib.figure import Figure
from rich.console import Console
from sklearn.datasets import load_digits

import matrixfsdp_jax as mfsdp

TARGET = 0.98
RATES = [0.002, 0.004, 0.008, 0.016]
FREQUENCY, MAX_DIM = 10, 256
COLORS = {"Shampoo": "#15803d", "AdamW": "#1d4ed8"}
Batch = dict[str, Any]  # {"image": [B, 8, 8, 1], "label": [B]}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class CNN(nn.Module):
    """Images ``[B, 8, 8, 1]`` to logits ``[B, 10]``; its convolutions are tensors of order 4."""

    channels: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(self.channels, (3, 3), name="conv_1")(x))
        x = nn.relu(nn.Conv(2 * self.channels, (3, 3), strides=2, name="conv_2")(x))
        x = nn.relu(nn.Conv(2 * self.channels, (3, 3), name="conv_3")(x))
        x = nn.relu(nn.Dense(4 * self.channels, name="dense")(x.reshape(len(x), -1)))
        return nn.Dense(10, name="head")(x)


class Run(NamedTuple):
    """Training loss of every step; step and measurements of every evaluation."""

    losses: list[float]
    steps: list[int]
    validation: list[dict[str, float]]
    test: list[dict[str, float]]

    def steps_to_target(self) -> int | None:
        pairs = zip(self.steps, self.test, strict=True)
        return next((step for step, m in pairs if m["accuracy"] >= TARGET), None)


def load() -> dict[str, Batch]:
    """1797 images of handwritten digits, pixels in [0, 1], always split in the same way.

    The sizes of the last two parts divide by 2, 3, 4, 6 and 8, as a batch must by the devices.
    """
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    image = (data.images[order, :, :, None] / 16).astype(np.float32)
    label = data.target[order].astype(np.int32)
    parts = {"train": slice(648, None), "validation": slice(360, 648), "test": slice(360)}
    return {name: {"image": image[part], "label": label[part]} for name, part in parts.items()}


def batches(data: Batch, size: int, seed: int) -> Iterator[Batch]:
    """Endless shuffled batches."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(data["label"]))
        for k in range(0, len(order) - size + 1, size):
            yield {name: x[order[k : k + size]] for name, x in data.items()}


def make_optimizer(
    name: str, rate: float, steps: int, layout: mfsdp.OwnerLayout
) -> optax.GradientTransformation:
    """Shampoo for convolutions and the dense matrix and AdamW for the rest; or AdamW for all."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps)
    if name == "AdamW":
        return optax.adamw(schedule, b2=0.95, weight_decay=1e-4)
    return mfsdp.shampoo(
        schedule,
        layout=layout,
        betas=(0.9, 0.95),
        epsilon=1e-8,
        grafting=mfsdp.AdamGrafting(beta2=0.95, epsilon=1e-8),
        precondition_frequency=FREQUENCY,
        max_preconditioner_dim=MAX_DIM,
        weight_decay=1e-4,
        rest=optax.adamw(schedule, b2=0.95, weight_decay=1e-4),
    )


class Trainer:
    """One model on one mesh; both optimizers use the same layout."""

    def __init__(self, digits: dict[str, Batch], devices: int, channels: int, batch: int) -> None:
        self.model, self.digits, self.batch = CNN(channels), digits, batch
        chosen = jax.devices()[:devices]
        mesh = jax.make_mesh((len(chosen),), ("fsdp",), devices=chosen)
        # As optimizer="shampoo", but told of the largest factor; see make_optimizer.
        method = mfsdp.shampoo_method("shampoo", MAX_DIM, 2, FREQUENCY)
        # Kernels of one input channel look depthwise and would go to rest. This one is not.
        rules = [mfsdp.rules.tensor("conv_1/kernel")]
        shapes = jax.eval_shape(self.init, 0)
        self.layout = mfsdp.plan(shapes, mesh, optimizer=method, rules=rules)
        self.evaluate = mfsdp.eval_step(self.measure, self.layout)

    def init(self, seed: int) -> Any:
        return self.model.init(jax.random.key(seed), self.digits["train"]["image"][:1])["params"]

    def loss_fn(self, params: Any, batch: Batch) -> jax.Array:
        return self.measure(params, batch)["loss"]

    def measure(self, params: Any, batch: Batch) -> dict[str, jax.Array]:
        logits, label = self.model.apply({"params": params}, batch["image"]), batch["label"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        return {"loss": losses.mean(), "accuracy": (logits.argmax(-1) == label).mean()}

    def runner(self, name: str, rate: float, steps: int, every: int) -> Callable[[int], Run]:
        """A function from the seed to a finished run; all its runs share one compiled step."""
        tx = make_optimizer(name, rate, steps, self.layout)
        step = mfsdp.train_step(self.loss_fn, tx, self.layout)

        def run(seed: int) -> Run:
            owned = self.layout.shard(self.init(seed))
            state = self.layout.init(tx, owned)
            result = Run([], [], [], [])
            data = batches(self.digits["train"], self.batch, seed)
            for k, batch in zip(range(1, steps + 1), data, strict=False):
                owned, state, metrics = step(owned, state, batch)
                result.losses.append(float(metrics["loss"]))
                if k % every == 0 or k == steps:
                    result.steps.append(k)
                    for part, history in (("validation", result.validation), ("test", result.test)):
                        measured = self.evaluate(owned, self.digits[part])
                        history.append({key: float(x) for key, x in measured.items()})
            return result

        return run


def best_runs(
    trainer: Trainer, name: str, rates: list[float], steps: int, every: int, seeds: range
) -> tuple[dict[float, float], float, list[Run]]:
    """Validation loss of each rate, the rate with the lowest, and its runs from all seeds."""
    starts = {rate: trainer.runner(name, rate, steps, every) for rate in rates}
    firsts = {rate: start(seeds[0]) for rate, start in starts.items()}
    losses = {rate: run.validation[-1]["loss"] for rate, run in firsts.items()}
    best = min(rates, key=losses.__getitem__)
    return losses, best, [firsts[best], *map(starts[best], seeds[1:])]


def plot(path: Path, finished: dict[str, list[Run]]) -> None:
    """Mean test accuracy of both optimizers, and every seed as a thin line."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.axhline(100 * TARGET, color="0.6", linestyle=":", linewidth=1)
    for (label, runs), color in zip(finished.items(), COLORS.values(), strict=True):
        accuracy = 100 * np.array([[m["accuracy"] for m in run.test] for run in runs])
        text = f"{label}: {accuracy[:, -1].mean():.1f}% at the end"
        axes.plot(runs[0].steps, accuracy.T, color=color, linewidth=0.6, alpha=0.4)
        axes.plot(runs[0].steps, accuracy.mean(0), color=color, linewidth=2, label=text)
    top = accuracy.max()
    axes.set(xlabel="step", ylabel="test accuracy, %", ylim=(max(0.0, top - 15.0), top + 1.0))
    axes.set_title(f"CNN on digits, mean of {len(runs)} seeds", loc="left", fontsize=10)
    axes.legend(frameon=False, loc="lower right")
    axes.grid(color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


@app.command()
def main(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of a run.")] = 150,
    rates: Annotated[
        list[float], typer.Option("--rate", help="Peak rates to try; give it once for each.")
    ] = RATES,
    seeds: Annotated[int, typer.Option(min=1, help="Runs at the best rate.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Images per step, over all devices.")] = 96,
    devices: Annotated[int, typer.Option(min=1, help="Devices to use, at most.")] = 4,
    tiny: Annotated[bool, typer.Option("--tiny", help="A few steps of a narrow model.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/digits"),
) -> None:
    """Train a small CNN on scikit-learn's digits with Shampoo and with AdamW."""
    if tiny:
        steps, rates, seeds = 12, rates[-1:], 1
    every = 2 if tiny else 5
    console = Console(highlight=False)
    trainer = Trainer(load(), devices, 4 if tiny else 16, batch)
    console.print(trainer.layout.report(width=console.width), markup=False)
    finished: dict[str, list[Run]] = {}
    results: dict[str, Any] = {}
    for name in COLORS:
        tried, rate, runs = best_runs(trainer, name, rates, steps, every, range(seed, seed + seeds))
        accuracy = [run.test[-1]["accuracy"] for run in runs]
        reached = [run.steps_to_target() for run in runs]
        finished[f"{name}, rate {rate:g}"] = runs
        results[name] = {
            "rate": rate,
            "validation_loss": {f"{rate:g}": loss for rate, loss in tried.items()},
            "test_accuracy": accuracy,
            "steps_to_98": reached,
            "loss": [run.losses for run in runs],
        }
        for tried_rate, loss in tried.items():
            console.print(f"{name}, rate {tried_rate:g}: validation loss {loss:.4f}")
        console.print(f"{name}, rate {rate:g}: test accuracy {np.mean(accuracy):.2%}")
        console.print(f"{name}, steps to 98% from each seed: {reached}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(out / "accuracy.png", finished)
    console.print(f"wrote {out}{os.sep}")


if __name__ == "__main__":
    app()
