"""One optimizer step: Muon with owner and with sharded storage against optax.contrib.muon.

All sides update the same matrices of a GPT on the same simulated devices, in turn in one
process. The floor is the same number of FLOPs in plain ``jnp.matmul`` of the same shapes, each
device working on the matrices it owns. Usage::

    python benchmarks/optimizer_step.py [--layers 12] [--width 256] [--devices 8] [--rounds 15]
"""

import argparse
import os
import platform
import time
from collections.abc import Callable
from typing import Any

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--layers", type=int, default=12, help="6 matrices each")
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--devices", type=int, default=8, help="simulated CPU devices")
parser.add_argument("--rounds", type=int, default=15, help="timed rounds after one to warm up")
ARGS = parser.parse_args()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={ARGS.devices}"
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
from matrixfsdp_jax.layout.costs import newton_schulz_flops  # noqa: E402

Side = tuple[Callable[..., Any], tuple[Any, ...]]


def gpt_matrices(layers: int, width: int) -> dict[str, np.ndarray]:
    """q, k, v, o ``[d, d]``, up ``[d, 4d]`` and down ``[4d, d]`` per layer, float32."""
    rng = np.random.default_rng(0)
    shapes = dict.fromkeys("qkvo", (width, width))
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    return {
        f"block_{i}/{name}": rng.standard_normal(shape, dtype=np.float32) * width**-0.5
        for i in range(layers)
        for name, shape in shapes.items()
    }


def optimizer_side(tx: optax.GradientTransformation, params: Any, grads: Any, state: Any) -> Side:
    """A jitted, donated step ``(params, state, grads) -> (params, state)`` and its arguments."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings), (params, state, grads)


def owner_side(mesh: Any, params: Any, grads: Any) -> tuple[Side, mfsdp.OwnerLayout]:
    layout = mfsdp.plan(params, mesh)
    tx = mfsdp.muon(0.02, layout=layout)
    owned = layout.shard(params)
    return optimizer_side(tx, owned, layout.shard(grads), layout.init(tx, owned)), layout


def sharded_side(mesh: Any, params: Any, grads: Any, spec: P) -> Side:
    params, grads = jax.device_put((params, grads), NamedSharding(mesh, spec))
    tx = mfsdp.muon(0.02, layout=mfsdp.plan(params, mesh, storage="sharded"))

    def on_mesh(x: jax.Array) -> jax.Array:
        """Counts are made on one device."""
        on_it = isinstance(x.sharding, NamedSharding)
        return x if on_it else jax.device_put(x, NamedSharding(mesh, P()))

    return optimizer_side(tx, params, grads, jax.tree.map(on_mesh, tx.init(params)))


def optax_side(mesh: Any, params: Any, grads: Any, spec: P) -> Side:
    sharding = NamedSharding(mesh, spec)
    params, grads = jax.device_put((params, grads), sharding)
    tx = optax.contrib.muon(0.02)
    shapes = jax.eval_shape(tx.init, params)
    like = jax.tree.map(lambda s: sharding if s.ndim == 2 and s.shape[0] > 5 else None, shapes)
    state = jax.jit(tx.init, out_shardings=like)(params)
    return optimizer_side(tx, params, grads, state)


def floor_sides(mesh: Any, layout: mfsdp.OwnerLayout, steps: int = 5) -> dict[str, Side]:
    """The products of Newton-Schulz alone, matrix by matrix and as a batch; take the faster."""

    def products(x: jax.Array) -> jax.Array:
        def body(_: int, x: jax.Array) -> jax.Array:
            gram = jnp.matmul(x, jnp.swapaxes(x, -1, -2))
            return jnp.matmul(jnp.matmul(gram, gram), x)

        return jax.lax.fori_loop(0, steps, body, x)

    def by_matrix(x: jax.Array) -> jax.Array:
        return jax.lax.map(products, x.reshape(-1, *x.shape[-2:])).reshape(x.shape)

    rng = np.random.default_rng(1)
    stacks = {
        # Scaled to a spectral norm near 1, so that nothing overflows or becomes denormal.
        c.key: jax.device_put(
            rng.standard_normal(c.stack_shape, dtype=np.float32) / (c.m**0.5 + c.n**0.5),
            layout.shardings.stacks[c.key],
        )
        for c in layout.plan.classes
    }
    sides: dict[str, Side] = {}
    for name, fn in (("one by one", by_matrix), ("batched", products)):

        def run(stacks: Any, fn: Any = fn) -> Any:
            return jax.tree.map(fn, stacks)

        specs = layout.specs.stacks
        mapped = jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=specs)
        sides[f"matmul {name}"] = jax.jit(mapped), (stacks,)
    return sides


def measure(sides: dict[str, Side], rounds: int) -> dict[str, dict[str, Any]]:
    """Compile every side, then time them in turn: medians and quartiles in milliseconds."""
    compiled, arguments, results = {}, {}, {}
    for name, (fn, args) in sides.items():
        lowered = fn.lower(*args)
        start = time.perf_counter()
        compiled[name] = lowered.compile()
        results[name] = {
            "compile_s": time.perf_counter() - start,
            "audit": mfsdp.audit(compiled[name]),
            "times": [],
        }
        arguments[name] = args
    for turn in range(rounds + 1):
        for name, fn in compiled.items():
            args = arguments[name]
            start = time.perf_counter()
            out = jax.block_until_ready(fn(*args))
            if turn:
                results[name]["times"].append(1e3 * (time.perf_counter() - start))
            if len(args) == 3:  # an optimizer: feed the new parameters and state back in
                arguments[name] = (*out, args[2])
    return results


def main() -> None:
    mesh = jax.make_mesh((ARGS.devices,), ("fsdp",), axis_types=(AxisType.Auto,))
    params = gpt_matrices(ARGS.layers, ARGS.width)
    rng = np.random.default_rng(2)
    grads = {k: rng.standard_normal(v.shape, dtype=np.float32) for k, v in params.items()}
    owner, layout = owner_side(mesh, params, grads)
    rows, whole = P("fsdp", None), P(None, None)
    sides = {
        "owner muon": owner,
        "optax, FSDP rows": optax_side(mesh, params, grads, rows),
        "sharded, FSDP rows": sharded_side(mesh, params, grads, rows),
        "optax, replicated": optax_side(mesh, params, grads, whole),
        "sharded, replicated": sharded_side(mesh, params, grads, whole),
        **floor_sides(mesh, layout),
    }
    results = measure(sides, ARGS.rounds)
    flops = sum(len(c.matrices) * newton_schulz_flops(c.shape, 5) for c in layout.plan.classes)
    report(results, flops, len(params))


def report(results: dict[str, dict[str, Any]], flops: float, count: int) -> None:
    console = Console(width=80)
    console.print(
        f"{count} matrices, width {ARGS.width}, {ARGS.devices} simulated devices on "
        f"{os.cpu_count()} cores ({platform.machine()}), JAX {jax.__version__}, "
        f"optax {optax.__version__}, {ARGS.rounds} rounds in turn"
    )
    table = Table("", "ms", "quartiles", "GFLOP/s", "compile s", "collectives", "temp MB")
    for name, r in results.items():
        low, median, high = np.percentile(r["times"], [25, 50, 75])
        table.add_row(
            name,
            f"{median:.0f}",
            f"{low:.0f}-{high:.0f}",
            f"{flops / median / 1e6:.0f}",
            f"{r['compile_s']:.1f}",
            str(r["audit"].count()),
            f"{(r['audit'].temp_bytes or 0) / 1e6:.1f}",
        )
    console.print(table)
    own, fsdp, *_ = results.values()
    floor = min(np.median(r["times"]) for name, r in results.items() if "matmul" in name)
    for name, other in (
        ("owner muon", "optax, FSDP rows"),
        ("sharded, FSDP rows", "optax, FSDP rows"),
        ("sharded, replicated", "optax, replicated"),
    ):
        speed = np.median(np.divide(results[other]["times"], results[name]["times"]))
        console.print(f"{name}: {speed:.1f}x faster than {other} (median of the rounds' ratios)")
    console.print(f"compile time: {own['compile_s'] / fsdp['compile_s']:.2f} of it")
    console.print(f"rate: {floor / np.median(own['times']):.2f} of the faster matmul floor")


if __name__ == "__main__":
    main()
