"""Training steps of Llama-like models, compiled for TPU machines that are not there.

The compiler of libtpu needs a topology and no chip. For every case this compiles the whole step
and reads from the program what a chip receives in forward, backward and optimizer, and the memory
that it takes. Nothing runs, so there are no times of a step here. Where the compiler dropped the
origin of some collectives, the optimizer is compiled alone as well: what it receives is the
optimizer's, and what is left without an origin is forward or backward. Usage::

    pip install 'matrixfsdp-jax[tpu-aot]'   # the libtpu that this JAX was built with
    python benchmarks/aot_scale.py [--topology v5p:8x8x8] [--model llama3-8b]
        [--storage sharded ...] [--layers 4 8] [--json FILE] [--quick]

Activations of a layer are made again in the backward pass (``jax.checkpoint``); one sequence of
2048 tokens per chip; parameters bfloat16, momenta float32. With two numbers of layers every figure
is continued on the straight line through both to the whole model; the line is exact as long as
each class keeps its number of waves, or both cuts fill theirs (the table says which cuts).
"""

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

STORAGES = ("owner-each", "owner-shared", "sharded", "fsdp-adamw", "fsdp-muon")
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--topology", help="as libtpu names it; default: every case of the table")
parser.add_argument("--model", help="llama3-8b, llama3-70b or tiny")
parser.add_argument("--storage", nargs="+", choices=STORAGES, help="only these")
parser.add_argument("--owners", type=int, help="chips of a replica group, for owner storage")
parser.add_argument("--layers", type=int, nargs="+", help="one cut, or two to extrapolate from")
parser.add_argument("--json", type=Path, help="write all figures here, after every case")
parser.add_argument("--quick", action="store_true", help="two tiny layers on v5e:2x4")
ARGS = parser.parse_args()
if importlib.util.find_spec("libtpu") is None:
    print("libtpu, the TPU compiler, is not installed: pip install '.[tpu-aot]'", file=sys.stderr)
    sys.exit(2)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else libtpu asks the cloud what machine this is

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from rich import box  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import matrixfsdp_jax as mfsdp  # noqa: E402
from matrixfsdp_jax.owner.replicas import as_updates  # noqa: E402

PyTree = Any
Lowered = tuple[jax.stages.Lowered, Callable[[], jax.stages.Lowered]]
HBM_GB = {"v5e": 16, "v5p": 95, "v6e": 32}
HEAD = 128
AXES = ("rows", "columns")
PHASES = ("forward", "backward", "optimizer", "metrics", "no origin")


@dataclass(frozen=True)
class Model:
    layers: int
    width: int
    hidden: int
    kv: int
    vocab: int
    tokens: int  # per chip


MODELS = {
    "llama3-8b": Model(32, 4096, 14336, 1024, 128256, 2048),
    "llama3-70b": Model(80, 8192, 28672, 1024, 128256, 2048),
    "tiny": Model(2, 256, 512, 128, 512, 128),
}


@dataclass(frozen=True)
class Case:
    """One row: ``owners`` chips of a replica group (0: all), ``cuts`` the layers compiled."""

    topology: str
    model: str
    storage: str
    owners: int = 0
    cuts: tuple[int, ...] = ()


CASES = (
    Case("v5e:2x4", "llama3-8b", "owner-each", 0, (8, 16)),
    Case("v5e:2x4", "llama3-8b", "sharded", 0, (8, 16)),
    Case("v5e:2x4", "llama3-8b", "fsdp-adamw", 0, (2, 4)),
    Case("v5e:2x4", "llama3-8b", "fsdp-muon", 0, (1, 2)),
    *(
        Case("v5p:8x8x8", "llama3-8b", storage, owners, (32,))
        for owners in (64, 8)
        for storage in ("owner-each", "owner-shared")
    ),
    Case("v5p:8x8x8", "llama3-8b", "sharded", 0, (4, 8)),
    Case("v5p:8x8x8", "llama3-8b", "fsdp-adamw", 0, (2, 4)),
    Case("v5p:8x8x8", "llama3-8b", "fsdp-muon", 0, (1, 2)),
    Case("v5p:8x8x8", "llama3-70b", "sharded", 0, (2, 4)),
    Case("v5p:8x8x8", "llama3-70b", "fsdp-adamw", 0, (2, 4)),
    *(
        Case(topology, "llama3-8b", storage, 0, (2, 4))
        for topology in ("v5e:16x16", "v6e:16x16")
        for storage in ("sharded", "fsdp-adamw")
    ),
)


# ---- the model ---------------------------------------------------------------------------------


def parameters(m: Model, layers: int) -> PyTree:
    """The shapes of all parameters, bfloat16."""
    d, f = m.width, m.hidden
    block = {"wq": (d, d), "wk": (d, m.kv), "wv": (d, m.kv), "wo": (d, d)}
    block |= {"w_gate": (d, f), "w_up": (d, f), "w_down": (f, d)}
    shapes = {
        "embedding": (m.vocab, d),
        "blocks": {str(i): {**block, "norm_1": (d,), "norm_2": (d,)} for i in range(layers)},
        "norm": (d,),
        "lm_head": (d, m.vocab),
    }
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.bfloat16), shapes, is_leaf=lambda s: type(s) is tuple
    )


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale[None, None]


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal softmax attention with grouped keys, ``[batch, tokens, heads * HEAD]``."""
    b, t, _ = q.shape
    k, v = (x.reshape(b, t, -1, HEAD) for x in (k, v))
    return jax.nn.dot_product_attention(q.reshape(b, t, -1, HEAD), k, v, is_causal=True).reshape(
        b, t, -1
    )


def decoder_block(w: PyTree, x: jax.Array) -> jax.Array:
    h = rms_norm(x, w["norm_1"])
    x = x + attention(h @ w["wq"], h @ w["wk"], h @ w["wv"]) @ w["wo"]
    h = rms_norm(x, w["norm_2"])
    return x + (jax.nn.silu(h @ w["w_gate"]) * (h @ w["w_up"])) @ w["w_down"]


def make_loss(fetch: Callable[..., Any] = lambda w: w) -> Callable[..., jax.Array]:
    """The mean loss; ``fetch`` makes the parameters of a layer whole, again in the backward."""

    def block(w: PyTree, x: jax.Array) -> jax.Array:
        return decoder_block(fetch(w), x)

    def loss(params: PyTree, batch: jax.Array) -> jax.Array:
        x = fetch(params["embedding"])[batch[:, :-1]]
        for i in range(len(params["blocks"])):
            x = jax.checkpoint(block)(params["blocks"][str(i)], x)
        logits = rms_norm(x, fetch(params["norm"])) @ fetch(params["lm_head"])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), batch[:, 1:]
        ).mean()

    return loss


# ---- the steps ---------------------------------------------------------------------------------


def lower_owner(m: Model, layers: int, devices: Any, owners: int, replicas: str) -> Lowered:
    """``mfsdp.train_step`` on owner params; HSDP where ``owners`` are fewer than the chips."""
    if owners == len(devices):
        mesh = jax.make_mesh((owners,), ("fsdp",), (AxisType.Auto,), devices=devices)
        layout = mfsdp.plan(parameters(m, layers), mesh, owner_axis="fsdp")
    else:
        sizes = (len(devices) // owners, owners)
        mesh = jax.make_mesh(sizes, ("replica", "fsdp"), (AxisType.Auto,) * 2, devices=devices)
        axes: dict[str, Any] = {"owner_axis": "fsdp", "replica_axis": "replica"}
        layout = mfsdp.plan(parameters(m, layers), mesh, replicas=replicas, **axes)
    tx = mfsdp.muon(0.02, layout=layout, rest=optax.adamw(3e-4, mu_dtype=jnp.float32))
    shapes = jax.eval_shape(tx.init, layout.trainable(layout.abstract))
    state = with_shardings(shapes, layout.state_shardings(tx))
    batch = jax.ShapeDtypeStruct((len(devices), m.tokens + 1), jnp.int32)
    step = mfsdp.train_step(make_loss(), tx, layout)

    def update(owned: PyTree, state: PyTree, grads: PyTree) -> Any:
        params = as_updates(layout, layout.trainable(owned))
        updates, state = tx.update(grads, state, params)
        return layout.apply_updates(owned, updates), state

    grads = with_shardings(layout.trainable(layout.abstract), layout.update_shardings)
    shardings = (layout.shardings, layout.state_shardings(tx))
    alone = jax.jit(update, donate_argnums=(0, 1), out_shardings=shardings)
    return (
        step.lower(layout.abstract, state, batch),
        lambda: alone.lower(layout.abstract, state, grads),
    )


def with_shardings(shapes: PyTree, shardings: PyTree) -> PyTree:
    return jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def lower_fsdp(m: Model, layers: int, devices: Any, optimizer: str) -> Lowered:
    """ZeRO-3 by sharding annotations in one ``jit``, with any of three optimizers.

    Above 64 chips matrices are cut in rows and in 8 columns. Rows alone would leave shards of 8
    rows, less than a tile of bfloat16, and XLA then sends every gather as an all-reduce of the
    whole, twice the bytes.
    """
    sizes = (len(devices) // 8, 8) if len(devices) > 64 else (len(devices), 1)
    mesh = jax.make_mesh(sizes, AXES, (AxisType.Auto,) * 2, devices=devices)

    def sharding(shape: tuple[int, ...]) -> NamedSharding:
        """Matrices by rows and columns, vectors replicated, stacks by owner."""
        specs = {2: P(*AXES), 4: P(AXES, None, None, None)}
        return NamedSharding(mesh, specs.get(len(shape), P(*[None] * len(shape))))

    def placed(shapes: PyTree) -> PyTree:
        return with_shardings(shapes, jax.tree.map(lambda s: sharding(s.shape), shapes))

    @jax.custom_vjp
    def fetch(w: PyTree) -> PyTree:
        return jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))

    def fetch_back(_: None, g: PyTree) -> tuple[PyTree]:
        return (jax.lax.with_sharding_constraint(g, jax.tree.map(lambda x: sharding(x.shape), g)),)

    fetch.defvjp(lambda w: (fetch(w), None), fetch_back)
    params = placed(parameters(m, layers))
    tx = fsdp_optimizer(optimizer, params, mesh)
    state = placed(jax.eval_shape(tx.init, params))
    rows = NamedSharding(mesh, P(AXES, None))
    batch = jax.ShapeDtypeStruct((len(devices), m.tokens + 1), jnp.int32, sharding=rows)

    def step(params: PyTree, state: PyTree, batch: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(make_loss(fetch))(params, batch)
        with jax.named_scope("mfsdp.optimizer"):
            return *update(params, state, grads), loss

    def update(params: PyTree, state: PyTree, grads: PyTree) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*shardings, None))
    alone = jax.jit(update, donate_argnums=(0, 1), out_shardings=shardings)
    return jitted.lower(params, state, batch), lambda: alone.lower(params, state, params)


def fsdp_optimizer(name: str, params: PyTree, mesh: Any) -> optax.GradientTransformation:
    adamw = optax.adamw(3e-4, mu_dtype=jnp.float32)
    if name == "sharded":
        layout = mfsdp.plan(params, mesh, storage="sharded")
        return mfsdp.muon(0.02, layout=layout, rest=adamw)
    if name == "fsdp-adamw":
        return adamw
    of_blocks = optax.contrib.MuonDimensionNumbers(0, 1)
    numbers = jax.tree_util.tree_map_with_path(
        lambda keys, x: of_blocks if keys[0].key == "blocks" and x.ndim == 2 else None, params
    )
    return optax.contrib.muon(0.02, muon_weight_dimension_numbers=numbers, mu_dtype=jnp.float32)


def lower(case: Case, layers: int, devices: Any) -> Lowered:
    """The lowered step, and how to lower its optimizer alone."""
    m = MODELS[case.model]
    if case.storage.startswith("owner"):
        owners = case.owners or len(devices)
        return lower_owner(m, layers, devices, owners, case.storage.removeprefix("owner-"))
    return lower_fsdp(m, layers, devices, case.storage)


# ---- the figures -------------------------------------------------------------------------------


def phase(origin: str) -> str:
    """Which part of the step a collective belongs to, by the origin of its instruction."""
    if not origin:
        return "no origin"
    if "mfsdp.metrics" in origin:
        return "metrics"
    if "mfsdp.optimizer" in origin:
        return "optimizer"
    return "backward" if "transpose(" in origin else "forward"


def received(audit: mfsdp.Audit, only: str | None = None) -> dict[str, float]:
    """Collectives and received bytes by phase, or all of them as those of ``only``."""
    figures: dict[str, float] = {}
    for name in PHASES if only is None else (only,):
        own = [c for c in audit.collectives if only or phase(c.origin) == name]
        figures[f"{name} collectives"] = len(own)
        figures[f"{name} GB"] = replace(audit, collectives=tuple(own)).wire_bytes() / 1e9
    return figures


def settled(step: dict[str, float], alone: dict[str, float]) -> dict[str, float]:
    """The optimizer as compiled alone; what no origin places is forward or backward."""
    figures = dict(alone)
    for unit in ("GB", "collectives"):
        lost = step[f"no origin {unit}"] + step[f"optimizer {unit}"] - alone[f"optimizer {unit}"]
        figures[f"no origin {unit}"] = lost
    return figures


def measure(case: Case, layers: int, devices: Any) -> dict[str, Any]:
    """The figures of one compiled step; bytes are those that a chip receives."""
    start = time.perf_counter()
    lowered, alone = lower(case, layers, devices)
    traced = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        used = re.search(r"Used ([\d.]+)([GM]) of", str(error))
        if used is None:
            raise
        gigabytes = float(used[1]) * {"G": 2**30, "M": 2**20}[used[2]] / 1e9
        return {"layers": layers, "hbm_gb": gigabytes, "refused": True}
    compile_s = time.perf_counter() - traced
    audit = mfsdp.audit(compiled)
    figures: dict[str, Any] = {"layers": layers, "refused": False}
    figures |= {"compile_s": compile_s, "trace_s": traced - start}
    figures |= received(audit)
    if figures["no origin collectives"]:
        figures |= settled(figures, received(mfsdp.audit(alone()), "optimizer"))
    memory = (audit.argument_bytes, audit.temp_bytes, audit.output_bytes, audit.alias_bytes)
    argument, temp, output, alias = ((x or 0) / 1e9 for x in memory)
    figures |= {"argument_gb": argument, "temp_gb": temp, "output_gb": output, "alias_gb": alias}
    return figures | {"hbm_gb": argument + temp + output - alias}


def whole_model(cuts: list[dict[str, Any]], layers: int) -> dict[str, Any]:
    """The figures of one cut, or of two continued linearly to ``layers``; never the seconds."""
    last = cuts[-1]
    if len(cuts) == 1 or last["layers"] == layers:
        return last
    first = cuts[0]
    share = (layers - first["layers"]) / (last["layers"] - first["layers"])
    result = {
        key: first[key] + share * (last[key] - first[key])
        for key in last
        if key in first and not key.endswith("_s") and key != "refused"
    }
    refused = first["refused"] or last["refused"]
    # Where the head and not the layers decides, temporaries do not grow with them: no line.
    known = not refused and last["temp_gb"] > first["temp_gb"]
    return result | {"refused": refused} | ({} if known or refused else {"hbm_gb": None})


def run(case: Case) -> dict[str, Any]:
    topology = topologies.get_topology_desc(platform="tpu", topology_name=case.topology)
    devices = topology.devices
    cuts = [measure(case, layers, devices) for layers in case.cuts]
    whole = whole_model(cuts, MODELS[case.model].layers)
    budget = HBM_GB[case.topology.split(":")[0]]
    # The compiler refuses what does not fit; a cut that it took may still be too much when whole.
    hbm = whole["hbm_gb"]
    fits = None if hbm is None else not whole["refused"] and hbm <= budget
    result = asdict(case) | {"chips": len(devices), "budget_gb": budget, "fits": fits}
    return result | {
        "cuts": cuts,
        "whole": whole,
        "targets": targets(case, cuts, whole, fits),
    }


def targets(
    case: Case, cuts: list[dict[str, Any]], whole: dict[str, Any], fits: bool | None
) -> dict[str, bool]:
    """What this library promises of a case, and whether the program keeps it."""
    found: dict[str, bool] = {}
    if case.storage not in STORAGES[:3]:
        return found
    machine, owner = case.topology == "v5p:8x8x8", case.storage.startswith("owner")
    if machine and (case.model, owner) in (("llama3-8b", True), ("llama3-70b", False)):
        found["fits"] = fits is True
    if case.storage == "owner-each" and "optimizer GB" in whole:
        found["the optimizer sends nothing"] = whole["optimizer GB"] == 0
    if case.storage == "sharded" and "optimizer GB" in whole:
        share, most = optimizer_share(whole), bound(case)
        found[f"{share:.2%} of the bytes are the optimizer's, at most {most:.2%}"] = share <= most
    seconds = [c["compile_s"] for c in cuts if "compile_s" in c]
    if seconds:
        found["every compilation within 180 s"] = max(seconds) < 180
    return found


def optimizer_share(whole: dict[str, Any]) -> float:
    """Part of what a chip receives that it receives in the optimizer."""
    return float(whole["optimizer GB"] / sum(whole[f"{name} GB"] for name in PHASES))


def bound(case: Case) -> float:
    """``2 / (3 N)``, two exchanges of a shard to three gathers of the whole, and 1%."""
    return 2 / (3 * chips(case.topology)) + 0.01


def chips(topology: str) -> int:
    return math.prod(map(int, topology.split(":")[1].split("x")))


# ---- output ------------------------------------------------------------------------------------


def versions() -> str:
    return f"JAX {jax.__version__}, libtpu {importlib.metadata.version('libtpu')}"


def name(row: dict[str, Any]) -> str:
    groups = row["owners"] or row["chips"]
    return row["storage"] + (f" {row['chips'] // groups}x{groups}" if row["owners"] else "")


def cells(row: dict[str, Any]) -> list[str]:
    """Received bytes with the number of collectives; memory; seconds."""
    whole, cuts = row["whole"], row["cuts"]
    moved = [
        f"{whole[f'{p} GB']:.3g}\n({whole[f'{p} collectives']:.0f})" if f"{p} GB" in whole else "-"
        for p in (*PHASES[:2], "no origin", "optimizer")
    ]
    layers = ", ".join(str(c["layers"]) for c in cuts)
    seconds = ", ".join(f"{c['compile_s']:.0f}" if "compile_s" in c else "-" for c in cuts)
    fits = {True: "yes", False: "no", None: "?"}[row["fits"]]
    hbm = "?" if whole["hbm_gb"] is None else f"{whole['hbm_gb']:.3g}"
    return [name(row), layers, *moved, hbm, fits, seconds]


def report(rows: list[dict[str, Any]]) -> None:
    console = Console(width=80, highlight=False)
    console.print(
        f"{versions()}. GB that a chip receives in one step (collectives); compile s here."
    )
    for topology, model in dict.fromkeys((r["topology"], r["model"]) for r in rows):
        own = [r for r in rows if (r["topology"], r["model"]) == (topology, model)]
        layers, budget = MODELS[model].layers, own[0]["budget_gb"]
        title = f"{model}, {layers} layers, on {topology} ({own[0]['chips']} chips of {budget} GB)"
        heads = (
            "",
            "layers",
            "forward",
            "backward",
            "no origin",
            "optimizer",
            "HBM GB",
            "fits",
            "s",
        )
        table = Table(*heads, title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
        for row in own:
            table.add_row(*cells(row))
        console.print(table)
        for row in own:
            for target, met in row["targets"].items():
                console.print(f"{'met' if met else 'MISSED'}: {name(row)}: {target}")


def chosen() -> list[Case]:
    """The cases that the options leave; options that no case meets make new ones."""
    if ARGS.quick:
        return [
            Case("v5e:2x4", "tiny", storage, 4 if storage == "owner-shared" else 0, (2,))
            for storage in ARGS.storage or STORAGES
        ]
    cases = [
        case
        for case in CASES
        if case.topology == (ARGS.topology or case.topology)
        and case.model == (ARGS.model or case.model)
        and case.storage in (ARGS.storage or STORAGES)
        and case.owners == (ARGS.owners or case.owners)
    ]
    if not cases:
        if not (ARGS.topology and ARGS.model and ARGS.storage and ARGS.layers):
            parser.error("no such case; a new one takes --topology, --model, --storage, --layers")
        cases = [
            Case(ARGS.topology, ARGS.model, storage, ARGS.owners or 0) for storage in ARGS.storage
        ]
    return [replace(case, cuts=tuple(ARGS.layers or case.cuts)) for case in cases]


def main() -> None:
    if ARGS.model not in (None, *MODELS):
        parser.error(f"--model {ARGS.model}: give one of {', '.join(MODELS)}")
    if ARGS.layers and not (len(ARGS.layers) <= 2 and sorted(set(ARGS.layers)) == ARGS.layers):
        parser.error(f"--layers {ARGS.layers}: give one number, or two that grow")
    rows = []
    for case in chosen():
        rows.append(run(case))
        if ARGS.json:
            ARGS.json.write_text(json.dumps({"versions": versions(), "rows": rows}, indent=1))
    report(rows)


if __name__ == "__main__":
    main()
