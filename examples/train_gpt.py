"""Train a byte-level GPT on the Python standard library: Muon, Shampoo or SOAP on whole-matrix
owners, or AdamW.

    python examples/train_gpt.py train --optimizer muon --steps 200
    python examples/train_gpt.py demo     # Muon and AdamW from one seed, both curves in one picture
    python examples/train_gpt.py grid     # the learning rates that the demo uses

Without an accelerator it runs on simulated CPU devices.
"""

import itertools
import math
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from gpt.config import (
    GRID,
    MAX_FACTOR_DIM,
    NAMES,
    PRECONDITION_EVERY,
    REST_LEARNING_RATE,
    ComputeDtype,
    Config,
    Optimizer,
)
from rich import box
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    help="A byte-level GPT on the sources of the Python standard library.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
SIMULATED = 8
COUNT_FLAG = "--xla_force_host_platform_device_count"
Records = list[dict[str, Any]]
DEFAULT = Config()
COMPARED = [Optimizer.muon, Optimizer.adamw]
ALL = list(Optimizer)

Devices = Annotated[
    int | None,
    typer.Option(min=1, help="Devices to use.", show_default="all; on CPU 8 simulated ones"),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of parameters, batches and sample.")]
Steps = Annotated[int, typer.Option(min=1, help="Optimizer steps.")]
Out = Annotated[Path, typer.Option(help="Folder that holds the run's folder.")]
Optimizers = Annotated[
    list[Optimizer],
    typer.Option(
        "--optimizer", metavar="<name>", help="muon, shampoo, soap or adamw; give it once for each."
    ),
]
Name = Annotated[
    str | None,
    typer.Option(help="Name of the run's folder.", show_default="the first that is free"),
]


@app.command()
def train(
    optimizer: Annotated[
        Optimizer,
        typer.Option(
            metavar="<name>", help="What updates the matrices: muon, shampoo, soap or adamw."
        ),
    ] = DEFAULT.optimizer,
    steps: Steps = DEFAULT.steps,
    lr: Annotated[
        float | None,
        typer.Option(min=0.0, help="Peak learning rate.", show_default="best of the grid"),
    ] = None,
    rest_lr: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="That of AdamW for what is no matrix, where another has the matrices.",
            show_default=str(REST_LEARNING_RATE),
        ),
    ] = None,
    weight_decay: Annotated[
        float, typer.Option(min=0.0, help="Of the matrices; times the learning rate.")
    ] = DEFAULT.weight_decay,
    precondition_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Steps between decompositions of a factor; for shampoo and soap.",
            show_default=str(PRECONDITION_EVERY),
        ),
    ] = None,
    max_factor_dim: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Largest factor; for shampoo and soap, which cut larger matrices.",
            show_default=str(MAX_FACTOR_DIM),
        ),
    ] = None,
    layers: Annotated[int, typer.Option(min=1)] = DEFAULT.layers,
    width: Annotated[int, typer.Option(min=2)] = DEFAULT.width,
    heads: Annotated[int, typer.Option(min=1)] = DEFAULT.heads,
    context: Annotated[int, typer.Option(min=1, help="Bytes that the model sees.")] = (
        DEFAULT.context
    ),
    batch: Annotated[int, typer.Option(min=1, help="Windows per step, over all devices.")] = (
        DEFAULT.batch
    ),
    accumulate: Annotated[
        int, typer.Option(min=1, help="Micro-batches that a device makes of its part.")
    ] = DEFAULT.accumulate,
    compute_dtype: Annotated[
        ComputeDtype, typer.Option(help="Dtype in which parameters are gathered and used.")
    ] = DEFAULT.compute_dtype,
    eval_every: Annotated[int, typer.Option(min=1, help="Steps between evaluations.")] = (
        DEFAULT.eval_every
    ),
    devices: Devices = None,
    seed: Seed = DEFAULT.seed,
    name: Name = None,
    out: Out = Path("runs"),
) -> None:
    """Train one model; leaves metrics, pictures and a sample in OUT/NAME."""
    with flag_errors():
        config = Config(
            optimizer=optimizer,
            lr=lr,
            rest_lr=rest_lr,
            weight_decay=weight_decay,
            precondition_every=precondition_every,
            max_factor_dim=max_factor_dim,
            layers=layers,
            width=width,
            heads=heads,
            context=context,
            batch=batch,
            accumulate=accumulate,
            steps=steps,
            eval_every=eval_every,
            seed=seed,
            compute_dtype=compute_dtype,
        )
        folder = run_folder(out, name, optimizer.value)
    runs = train_all({folder: config}, devices)
    if not runs[folder]:
        raise typer.Exit(1)


@app.command()
def demo(
    optimizers: Optimizers = COMPARED,
    steps: Steps = DEFAULT.steps,
    devices: Devices = None,
    seed: Seed = DEFAULT.seed,
    name: Name = None,
    out: Out = Path("runs"),
) -> None:
    """Train optimizers from one seed, each at its best rate, and compare them."""
    with flag_errors():
        folder = run_folder(out, name, "demo")
        configs = {
            folder / optimizer: Config(optimizer=optimizer, steps=steps, seed=seed)
            for optimizer in optimizers
        }
    runs = train_all(configs, devices)
    if not all(runs.values()):
        raise typer.Exit(1)
    compare(folder, {config: runs[path] for path, config in configs.items()})


@app.command()
def grid(
    optimizers: Optimizers = ALL,
    steps: Steps = DEFAULT.steps,
    devices: Devices = None,
    seed: Seed = DEFAULT.seed,
    name: Name = None,
    out: Out = Path("runs"),
) -> None:
    """Train at each learning rate of the small grid and print the held-out losses."""
    with flag_errors():
        folder = run_folder(out, name, "grid")
        configs = {
            folder / f"{optimizer}-{lr:g}": Config(optimizer, lr, steps=steps, seed=seed)
            for optimizer in optimizers
            for lr in GRID[optimizer]
        }
    runs = train_all(configs, devices)
    table = Table("optimizer", "learning rate", "held-out nats per byte", box=box.SIMPLE_HEAD)
    for path, config in configs.items():
        loss = f"{runs[path][-1]['held_out_loss']:.3f}" if runs[path] else "diverged"
        table.add_row(config.optimizer.value, f"{config.matrix_rate:g}", loss)
    Console().print(table)


@contextmanager
def flag_errors() -> Iterator[None]:
    """Show what is wrong with the flags as an error of the command line, not as a traceback."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def run_folder(out: Path, name: str | None, kind: str) -> Path:
    """``out/name``, or the first of ``out/kind``, ``out/kind-2``, ... that is free.

    Raises:
      ValueError: if a named folder holds something already.
    """
    if name is None:
        names = itertools.chain([kind], (f"{kind}-{k}" for k in itertools.count(2)))
        return next(out / each for each in names if not (out / each).exists())
    folder = out / name
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty; give another --name, or delete it")
    return folder


def train_all(configs: dict[Path, Config], num_devices: int | None) -> dict[Path, Records]:
    """Train one config after the other; the records of a run that diverges are empty."""
    simulate_cpu_devices(num_devices or SIMULATED)
    from gpt import data, training  # jax starts here, after its flags

    with flag_errors():
        devices = training.pick_devices(num_devices)
        for config in configs.values():
            config.check_batch(len(devices))
        corpus = data.load_corpus()
    console = Console(highlight=False)
    console.print(
        f"{len(devices)} x {devices[0].device_kind}; {len(corpus.train):,} bytes to train on, "
        f"{len(corpus.held_out):,} held out"
    )
    runs: dict[Path, Records] = {}
    for folder, config in configs.items():
        console.rule(config.label)
        try:
            runs[folder] = training.train(
                config, corpus, folder, console, devices, brief=bool(runs)
            )
        except training.Diverged as error:
            console.print(str(error), style="red")
            runs[folder] = []
        console.print(f"wrote {folder}{os.sep}")
    return runs


def simulate_cpu_devices(num: int) -> None:
    """Let the CPU stand for ``num`` devices, unless the user said so; accelerators take no notice.

    Must come before the first import of numpy and jax. Simulated devices share the cores, so each
    gets one thread of BLAS: with more, eigendecompositions of several devices at once wait for one
    another and take a hundred times as long.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    flags = os.environ.get("XLA_FLAGS", "")
    if COUNT_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {COUNT_FLAG}={num}".strip()


def compare(folder: Path, runs: dict[Config, Records]) -> None:
    """The held-out losses of the demo's runs as a table and a picture."""
    from gpt import plots

    console = Console(highlight=False)
    table = Table("", "held-out nats per byte", "bits per byte", "tokens/s", box=box.SIMPLE_HEAD)
    for config, records in runs.items():
        loss = records[-1]["held_out_loss"]
        speed = statistics.median(r["tokens_per_s"] for r in records[1:])
        table.add_row(config.label, f"{loss:.3f}", f"{loss / math.log(2):.3f}", f"{speed:,.0f}")
    console.print(table)
    final = {config.optimizer: records[-1]["held_out_loss"] for config, records in runs.items()}
    for config, records in runs.items():
        if Optimizer.adamw not in final or config.optimizer is Optimizer.adamw:
            continue
        step = plots.first_step_below(records, final[Optimizer.adamw])
        if step is not None:
            console.print(
                f"{NAMES[config.optimizer]} reaches AdamW's final loss at step {step:.0f} of "
                f"{config.steps}."
            )
    picture = folder / "compare.png"
    plots.plot_comparison(picture, runs, "Byte-level GPT on the Python standard library")
    console.print(f"wrote {picture}")


if __name__ == "__main__":
    app()
