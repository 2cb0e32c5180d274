"""Newton-Schulz: every form of the iteration against plain matrix products of the same FLOPs.

Three parts, each in one process with its sides in turn:

1. forms: float32 on CPU, standard, Gram and symmetric forms against a ``jnp.matmul`` floor of the
   standard form's FLOPs.
2. compile: 64 leaves of (64, 128) on 8 simulated devices, ``mfsdp.muon`` against
   ``optax.contrib.muon``.
3. gpu: half precision, all forms against a bfloat16 product of equal FLOPs and, where torch has
   CUDA, ``torch.optim.Muon``'s iteration under ``torch.compile``. TFLOP/s on useful FLOPs: those of
   the standard form, whatever a form really takes.

Usage::

    python benchmarks/newton_schulz.py [--part forms compile gpu] [--rounds 15] [--tiny]
"""

import argparse
import functools
import os
import platform
import time
from collections.abc import Callable
from typing import Any

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--part", nargs="+", choices=("forms", "compile", "gpu"), default=None)
parser.add_argument("--rounds", type=int, default=15, help="timed rounds after one to warm up")
parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
ARGS = parser.parse_args()
PARTS = ARGS.part or ["forms", "compile", "gpu"]
if PARTS != ["gpu"]:
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    )

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import matrixfsdp_jax as mfsdp  # noqa: E402
from matrixfsdp_jax.linalg.algorithms import (  # noqa: E402
    ALGORITHMS,
    choose_algorithm,
    newton_schulz_flops,
)
from matrixfsdp_jax.linalg.orthogonalize import orthogonalize  # noqa: E402

CONSOLE = Console(width=80)
STEPS = 5
FORM_SHAPES = [(256, 256, 4), (256, 1024, 2), (512, 2048, 1), (1024, 4096, 1)]  # m, n, matrices
GPU_SHAPES = [(1024, 4096, 64), (4096, 4096, 32), (4096, 14336, 96)]
TINY_SHAPES = [(32, 32, 2), (32, 64, 2)]

Times = dict[str, list[float]]


def in_turn(sides: dict[str, Callable[[], Any]], rounds: int) -> Times:
    """Milliseconds of every side in every round, after one round to warm up."""
    times: Times = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            if turn:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def matrices(m: int, n: int, count: int, dtype: Any) -> jax.Array:
    """Random, as constant data lets a processor clock higher; of spectral norm about 1."""
    x = jax.random.normal(jax.random.key(0), (count, m, n), jnp.float32)
    return (x / (m**0.5 + n**0.5)).astype(dtype)


def products(x: jax.Array) -> jax.Array:
    """The products of the standard form and nothing else, on ``[..., m, n]``."""

    def body(_: int, x: jax.Array) -> jax.Array:
        gram = jnp.matmul(x, jnp.swapaxes(x, -1, -2))
        return jnp.matmul(jnp.matmul(gram, gram), x)

    return jax.lax.fori_loop(0, STEPS, body, x)


def jax_side(fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> Callable[[], Any]:
    compiled = jax.jit(fn).lower(x).compile()
    return lambda: jax.block_until_ready(compiled(x))


def report(title: str, times: Times, floor: str, flops: int) -> None:
    table = Table("", "ms", "quartiles", "GFLOP/s", "rate/floor", "time/std", title=title)
    for name, values in times.items():
        low, median, high = np.percentile(values, [25, 50, 75])
        table.add_row(
            name,
            f"{median:.1f}",
            f"{low:.1f}-{high:.1f}",
            f"{flops / median / 1e6:.0f}",
            f"{np.median(np.divide(times[floor], values)):.2f}",
            f"{np.median(np.divide(values, times['standard'])):.2f}",
        )
    CONSOLE.print(table)


def forms_part() -> None:
    """Float32 on one CPU device, matrix by matrix."""
    for m, n, count in TINY_SHAPES if ARGS.tiny else FORM_SHAPES:
        x = jax.device_put(matrices(m, n, count, jnp.float32), jax.devices("cpu")[0])
        sides = {"matmul floor": jax_side(lambda x: jax.lax.map(products, x), x)}
        for algorithm in ALGORITHMS:
            sides[algorithm] = jax_side(
                functools.partial(orthogonalize, algorithm=algorithm, dtype="float32"), x
            )
        auto = choose_algorithm(m, n, STEPS, dtype="float32", platform="cpu")
        report(
            f"{count} x ({m}, {n}) float32, CPU; auto takes {auto}",
            in_turn(sides, ARGS.rounds),
            "matmul floor",
            count * newton_schulz_flops(m, n, STEPS),
        )


def compile_part() -> None:
    """Seconds to compile one optimizer step on 8 simulated devices, in turn."""
    leaves, shape = (8, (8, 16)) if ARGS.tiny else (64, (64, 128))
    params = {f"layer_{i}/w": np.ones(shape, np.float32) for i in range(leaves)}
    cpus = jax.devices("cpu")[:8]
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,), devices=cpus)
    layout = mfsdp.plan(params, mesh)
    ours = mfsdp.muon(0.02, layout=layout)
    owned = layout.shard(params)
    rows = jax.device_put(params, NamedSharding(mesh, P("fsdp", None)))
    peer = optax.contrib.muon(0.02)
    cases = {
        "mfsdp.muon": (ours, owned, layout.init(ours, owned)),
        "optax.contrib.muon": (peer, rows, jax.jit(peer.init)(rows)),
    }

    def compile_side(tx: Any, params: Any, state: Any) -> Callable[[], Any]:
        def step(grads: Any, state: Any, params: Any) -> Any:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        # A new function each time, so that no cache answers.
        return lambda: jax.jit(lambda *a: step(*a)).lower(params, state, params).compile()

    times = in_turn({k: compile_side(*case) for k, case in cases.items()}, 3)
    table = Table("", "trace and compile, s", title=f"{leaves} leaves of {shape}, 8 devices")
    for name, values in times.items():
        table.add_row(name, f"{np.median(values) / 1e3:.2f}")
    CONSOLE.print(table)
    own, other = times.values()
    CONSOLE.print(f"ratio: {np.median(np.divide(own, other)):.2f} (median of the rounds)")


def gpu_part() -> None:
    """Half precision on the GPU; the same code in float16 on CPU with ``--tiny``."""
    gpu = jax.default_backend() == "gpu"
    if not gpu:
        CONSOLE.print("gpu: JAX sees no GPU here, so this part measures nothing.")
        if not ARGS.tiny:
            return
        CONSOLE.print("--tiny: its code runs on CPU all the same; the figures mean nothing.")
    for m, n, count in TINY_SHAPES if ARGS.tiny else GPU_SHAPES:
        flops = count * newton_schulz_flops(m, n, STEPS)
        x = matrices(m, n, count, jnp.bfloat16)
        sides = {"bf16 matmul floor": jax_side(products, x)}
        for dtype in ("float16", "bfloat16"):
            for algorithm in ALGORITHMS:
                name = algorithm if dtype == "float16" else f"{algorithm} bf16"
                run = functools.partial(
                    orthogonalize, algorithm=algorithm, dtype=dtype, batching="batched"
                )
                sides[name] = jax_side(run, x)
        torch_side = torch_newton_schulz(m, n, count)
        if torch_side is None:
            CONSOLE.print("torch with CUDA is not there: no torch.optim.Muon side.")
        else:
            sides["torch compiled bf16"] = torch_side
        times = in_turn(sides, ARGS.rounds)
        report(f"{count} x ({m}, {n})", times, "bf16 matmul floor", flops)


def torch_newton_schulz(m: int, n: int, count: int) -> Callable[[], Any] | None:
    """``torch.optim.Muon``'s own iteration on ``count`` matrices, compiled; None without CUDA."""
    try:
        import torch
        from torch.optim._muon import _zeropower_via_newtonschulz as newton_schulz
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    compiled = torch.compile(newton_schulz)
    xs = [torch.randn(m, n, device="cuda", dtype=torch.bfloat16) for _ in range(count)]

    def run() -> None:
        for x in xs:
            compiled(x, (3.4445, -4.7750, 2.0315), STEPS, 1e-7)
        torch.cuda.synchronize()

    return run


def main() -> None:
    devices = jax.devices()
    CONSOLE.print(
        f"{len(devices)} x {devices[0].device_kind}, {os.cpu_count()} cores "
        f"({platform.machine()}), JAX {jax.__version__}, {STEPS} steps, {ARGS.rounds} rounds"
    )
    run = {"forms": forms_part, "compile": compile_part, "gpu": gpu_part}
    for part in PARTS:
        run[part]()


if __name__ == "__main__":
    main()
