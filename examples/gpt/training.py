"""One run: plan, audit, train, evaluate, sample, and leave the files behind."""

import json
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

import matrixfsdp_jax as mfsdp
from gpt import model, plots
from gpt.config import KRONECKER, Config, Optimizer
from gpt.data import Corpus, even_batches, random_batches

MAX_GRAD_NORM = 1.0
EVAL_BATCHES = 8
SAMPLE_BYTES = 300
METRICS = ("loss", "grad_norm", "update_norm")
TEMPERATURE = 0.7


class Diverged(ArithmeticError):
    """The loss is no longer a finite number."""


class Setup(NamedTuple):
    """What is built once for a run."""

    graphdef: Any
    layout: mfsdp.OwnerLayout
    tx: optax.GradientTransformation
    step: mfsdp.TrainStep
    evaluate: Callable[[mfsdp.OwnerParams], float]
    owned: mfsdp.OwnerParams
    state: Any
    batches: Iterator[np.ndarray]


def pick_devices(num: int | None) -> list[jax.Device]:
    """The first ``num`` devices, or all of them.

    Raises:
      ValueError: if there are fewer.
    """
    devices = jax.devices()
    if num is not None and num > len(devices):
        kind = devices[0].device_kind
        raise ValueError(
            f"--devices {num}, but there are {len(devices)} ({kind}); give fewer, "
            "or simulate them on the CPU: JAX_PLATFORMS=cpu, and no device count in XLA_FLAGS"
        )
    return devices[:num]


def train(
    config: Config,
    corpus: Corpus,
    directory: Path,
    console: Console,
    devices: list[jax.Device],
    *,
    brief: bool = False,
) -> list[dict[str, Any]]:
    """Train one model and write ``config.json``, ``metrics.jsonl``, pictures and a sample.

    Args:
      config: what to train.
      corpus: the text.
      directory: folder for the files; made if missing.
      console: where tables, progress and sample are shown.
      devices: over which the matrices are dealt out.
      brief: leave out the tables of layout and collectives, and the sample.

    Returns:
      The lines of ``metrics.jsonl``. Losses are in nats per byte.

    Raises:
      Diverged: if the loss stops being finite.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    setup = build(config, corpus, devices)
    setup.layout.plot(directory / "layout.png")
    if not brief:
        console.print(Text(setup.layout.report(width=console.width)))
    show_audit(config, setup, console, brief)
    owned, records = run_steps(config, setup, directory / "metrics.jsonl", console)
    plots.plot_run(directory / "loss.png", records, f"Byte-level GPT, {config.label}")
    prompt = even_batches(corpus.held_out, 1, 1, config.context)[0][0, :-1]
    sample = draw_sample(config, setup, owned, prompt)
    (directory / "sample.txt").write_text(printable(prompt) + sample)
    if not brief:
        console.print(Text.assemble("\n", (printable(prompt), "dim"), (sample, "bold"), "\n"))
    return records


def build(config: Config, corpus: Corpus, devices: list[jax.Device]) -> Setup:
    """Model, layout, optimizer, parameters on their owners, and the compiled steps."""
    mesh = jax.make_mesh((len(devices),), ("fsdp",), devices=devices)
    gpt = model.GPT(config.layers, config.width, config.heads, nnx.Rngs(config.seed))
    graphdef, params = nnx.split(gpt, nnx.Param)
    layout = mfsdp.plan(
        params,
        mesh,
        optimizer=planned_for(config),
        rules=model.matrix_rules(config.width),
        gather_dtype=config.compute_dtype.value,
    )
    tx = make_optimizer(config, layout)
    owned = layout.shard(params)
    loss_fn = partial(model.loss_fn, graphdef)
    evaluate = mfsdp.eval_step(loss_fn, layout)
    held_out = even_batches(corpus.held_out, EVAL_BATCHES, config.batch, config.context)
    return Setup(
        graphdef,
        layout,
        tx,
        mfsdp.train_step(loss_fn, tx, layout, accumulate=config.accumulate),
        lambda owned: float(np.mean([evaluate(owned, windows) for windows in held_out])),
        owned,
        layout.init(tx, owned),
        random_batches(corpus.train, config.batch, config.context, config.seed),
    )


def planned_for(config: Config) -> Any:
    """What the planner must know; for Shampoo and SOAP also which factors there are, and when."""
    name = config.optimizer.value
    if config.optimizer not in KRONECKER:
        return name
    factors = config.factors
    return mfsdp.shampoo_method(
        name, factors["max_preconditioner_dim"], 2, factors["precondition_frequency"]
    )


def show_audit(config: Config, setup: Setup, console: Console, brief: bool) -> None:
    """What the compiled step sends as a table, and what the optimizer alone does as a line.

    The optimizer is compiled by itself for this: in the whole step the compiler may combine its
    scalars with other collectives.
    """
    if not brief:
        windows = np.zeros((config.batch, config.context + 1), np.int32)
        console.print(Text(str(mfsdp.audit(setup.step, setup.owned, setup.state, windows))))
    trainable = setup.layout.trainable(setup.owned)
    update = mfsdp.audit(jax.jit(setup.tx.update), trainable, setup.state, trainable)
    console.print(
        f"optimizer step: {len(update.matrices)} matrix collectives, {len(update.scalars)} scalar"
    )


def make_optimizer(config: Config, layout: mfsdp.OwnerLayout) -> optax.GradientTransformation:
    """AdamW for everything, or another for the matrices and AdamW for the rest.

    Only matrices decay.
    """
    clip = mfsdp.clip_by_global_norm(MAX_GRAD_NORM, layout=layout)
    rate = schedule(config.matrix_rate, config.steps)
    if config.optimizer is Optimizer.adamw:
        adamw = optax.adamw(rate, b2=0.95, weight_decay=config.weight_decay, mask=matrices)
        return optax.chain(clip, adamw)
    rest = optax.adamw(schedule(config.rest_rate, config.steps), b2=0.95, weight_decay=0.0)
    common = {"layout": layout, "rest": rest, "weight_decay": config.weight_decay}
    if config.optimizer is Optimizer.muon:
        return optax.chain(clip, mfsdp.muon(rate, **common))
    common |= config.factors
    if config.optimizer is Optimizer.soap:
        return optax.chain(clip, mfsdp.soap(rate, **common))
    grafting = mfsdp.AdamGrafting(beta2=0.95, epsilon=1e-8)
    shampoo = mfsdp.shampoo(rate, betas=(0.9, 0.95), epsilon=1e-10, grafting=grafting, **common)
    return optax.chain(clip, shampoo)


def matrices(owned: mfsdp.OwnerParams) -> mfsdp.OwnerParams:
    """Which owner params are matrices, as a mask for optax."""
    return mfsdp.OwnerParams(
        dict.fromkeys(owned.stacks, True), dict.fromkeys(owned.rest, False), {}
    )


def schedule(peak: float, steps: int) -> optax.Schedule:
    """Linear rise over the first tenth of the steps, then a straight line down to zero."""
    warmup = max(1, steps // 10)

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        falling = (steps - count) / max(1, steps - warmup)
        return peak * jnp.minimum((count + 1) / warmup, falling)

    return rate


def run_steps(
    config: Config, setup: Setup, metrics_file: Path, console: Console
) -> tuple[mfsdp.OwnerParams, list[dict[str, Any]]]:
    """All training steps; each gives one line of ``metrics_file`` as soon as it is done."""
    owned, state = setup.owned, setup.state
    records = [{"step": 0, "held_out_loss": setup.evaluate(owned)}]
    with metrics_file.open("w") as file, progress_bar(console) as progress:
        file.write(json.dumps(records[0]) + "\n")
        task = progress.add_task(config.optimizer.value, total=config.steps, status="")
        for step, windows in zip(range(1, config.steps + 1), setup.batches, strict=False):
            start = time.perf_counter()
            owned, state, metrics = setup.step(owned, state, windows)
            record = {"step": step} | {key: float(metrics[key]) for key in METRICS}
            record["tokens_per_s"] = config.tokens_per_step / (time.perf_counter() - start)
            if not math.isfinite(record["loss"]):
                raise Diverged(f"the loss is {record['loss']} at step {step}; lower --lr")
            if step % config.eval_every == 0 or step == config.steps:
                record["held_out_loss"] = setup.evaluate(owned)
                progress.console.print(eval_line(record), highlight=False)
            records.append(record)
            file.write(json.dumps(record) + "\n")
            file.flush()
            speed = np.median([r["tokens_per_s"] for r in records[1:][-20:]])
            status = f"loss {record['loss']:.3f}  {speed:,.0f} tokens/s"
            progress.update(task, advance=1, status=status)
    return owned, records


def eval_line(record: dict[str, Any]) -> str:
    held_out = record["held_out_loss"]
    return (
        f"step {record['step']:5d}  loss {record['loss']:.3f}  "
        f"held out {held_out:.3f} nats per byte ({held_out / math.log(2):.3f} bits)"
    )


def progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TextColumn("ETA"),
        TimeRemainingColumn(compact=True),
        console=console,
        expand=True,
    )


def draw_sample(config: Config, setup: Setup, owned: mfsdp.OwnerParams, prompt: np.ndarray) -> str:
    """Text that the trained model writes after ``prompt``, on one device."""
    params = jax.device_get(setup.layout.unshard(owned))
    key = jax.random.key(config.seed)
    sampled = model.generate(setup.graphdef, params, prompt, SAMPLE_BYTES, key, TEMPERATURE)
    return printable(np.asarray(sampled))


def printable(text: np.ndarray) -> str:
    """Bytes as text that a terminal shows as it is: what is not printable becomes a dot."""
    decoded = text.astype(np.uint8).tobytes().decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in decoded)
