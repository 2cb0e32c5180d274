"""One optimizer step of SOAP and Shampoo on whole-matrix owners, over a whole period of refreshes.

The sides update the same matrices of a GPT on the same simulated devices, in turn in one process:
owner Muon; SOAP and Shampoo on owners, their decompositions staggered over the steps and all in one
step; and the same transforms on replicated parameters, where under ``jax.shard_map`` each device
updates every matrix of the user's own tree (``layout=None``). A round is one period of
``--frequency`` steps of every side, each step timed. Gradients are Gaussian, four sets in turn::

    python benchmarks/shampoo.py [--layers 12] [--width 256] [--devices 8] [--rounds 5]
        [--frequency 10] [--max-preconditioner-dim 256] [--basis qr] [--root newton]
        [--no-replicated] [--tiny]
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
parser.add_argument("--rounds", type=int, default=5, help="timed periods after one to warm up")
parser.add_argument("--frequency", type=int, default=10, help="steps of a period")
parser.add_argument("--max-preconditioner-dim", type=int, default=256, help="largest factor")
parser.add_argument("--basis", choices=("eigh", "qr"), default="eigh", help="how SOAP decomposes")
parser.add_argument("--root", choices=("eigh", "newton"), default="eigh", help="Shampoo's roots")
parser.add_argument("--no-replicated", action="store_true", help="leave the slow sides out")
parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
ARGS = parser.parse_args()
if ARGS.tiny:
    ARGS.layers, ARGS.width, ARGS.devices, ARGS.rounds = 1, 16, 2, 1
    ARGS.frequency, ARGS.max_preconditioner_dim = 2, 16
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# LAPACK's own threads would fight with those of the simulated devices: an eigendecomposition can
# then take a hundred times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={ARGS.devices}"
)

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import matrixfsdp_jax as mfsdp  # noqa: E402

CONSOLE = Console(width=80)
GRADIENT_SETS = 4
BASIS = {"eigh": mfsdp.EighBasis, "qr": mfsdp.QRBasis}[ARGS.basis]()
ROOT = {"eigh": mfsdp.EighRoot, "newton": mfsdp.CoupledNewtonRoot}[ARGS.root]()
SHAPES = dict.fromkeys("qkvo", (ARGS.width, ARGS.width))
SHAPES |= {"up": (ARGS.width, 4 * ARGS.width), "down": (4 * ARGS.width, ARGS.width)}

Tree = dict[str, np.ndarray]
Make = Callable[[mfsdp.OwnerLayout | None], optax.GradientTransformation]


def gpt_matrices(seed: int, scale: float = 1.0) -> Tree:
    """q, k, v, o ``[d, d]``, up ``[d, 4d]`` and down ``[4d, d]`` per layer, float32."""
    rng = np.random.default_rng(seed)
    return {
        f"block_{i}/{name}": np.float32(scale) * rng.standard_normal(shape, dtype=np.float32)
        for i in range(ARGS.layers)
        for name, shape in SHAPES.items()
    }


def second_order(name: str, stagger: bool = True) -> Make:
    """SOAP or Shampoo with the options of the command line."""
    own = {
        "soap": {"preconditioner": mfsdp.EigenvalueCorrected(basis=BASIS)},
        "shampoo": {"preconditioner": mfsdp.RootInverse(root=ROOT), "betas": (0.9, 0.95)},
    }

    def make(layout: mfsdp.OwnerLayout | None) -> optax.GradientTransformation:
        return getattr(mfsdp, name)(
            1e-3,
            layout=layout,
            max_preconditioner_dim=ARGS.max_preconditioner_dim,
            precondition_frequency=ARGS.frequency,
            stagger=stagger,
            **own[name],
        )

    return make


class Side:
    """An optimizer with its parameters, state and gradients on the devices."""

    def __init__(self, step: Any, params: Any, state: Any, grads: list[Any]) -> None:
        self.args, self.grads, self.count = (params, state), grads, 0
        self.times: list[list[float]] = []
        self.cpu: list[float] = []
        lowered = step.lower(params, state, grads[0])
        start = time.perf_counter()
        self.step = lowered.compile()
        self.compile_s = time.perf_counter() - start
        self.audit = mfsdp.audit(self.step)

    def period(self, timed: bool) -> None:
        """All steps of a period, each by itself."""
        times, cpu = [], time.process_time()
        for _ in range(ARGS.frequency):
            grads = self.grads[self.count % GRADIENT_SETS]
            start = time.perf_counter()
            self.args = jax.block_until_ready(self.step(*self.args, grads))
            times.append(1e3 * (time.perf_counter() - start))
            self.count += 1
        if timed:
            self.times.append(times)
            self.cpu.append(time.process_time() - cpu)

    @property
    def means(self) -> np.ndarray:
        """The mean step of every period."""
        return np.mean(self.times, axis=1)

    @property
    def longest(self) -> float:
        """The longest step of a period over the mean one, by the medians over periods."""
        steps = np.median(self.times, axis=0)
        return float(steps.max() / steps.mean())


def updated(tx: optax.GradientTransformation) -> Callable[..., Any]:
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def owner_side(layout: mfsdp.OwnerLayout, make: Make, params: Tree, grads: list[Tree]) -> Side:
    tx = make(layout)
    owned = layout.shard(params)
    state = layout.init(tx, owned)
    shardings = jax.tree.map(lambda x: x.sharding, (owned, state))
    step = jax.jit(updated(tx), donate_argnums=(0, 1), out_shardings=shardings)
    return Side(step, owned, state, [layout.shard(g) for g in grads])


def replicated_side(mesh: Any, make: Make, params: Tree, grads: list[Tree]) -> Side:
    tx = make(None)
    everywhere = NamedSharding(mesh, P())
    whole, own_grads = jax.device_put((params, grads), everywhere)
    state = jax.jit(tx.init, out_shardings=everywhere)(whole)
    mapped = jax.shard_map(updated(tx), mesh=mesh, in_specs=P(), out_specs=P())
    return Side(jax.jit(mapped, donate_argnums=(0, 1)), whole, state, own_grads)


def main() -> None:
    mesh = jax.make_mesh((ARGS.devices,), ("fsdp",), axis_types=(AxisType.Auto,))
    params = gpt_matrices(0, ARGS.width**-0.5)
    grads = [gpt_matrices(1 + k) for k in range(GRADIENT_SETS)]
    sides = {}
    layout = mfsdp.plan(params, mesh)
    sides["Muon"] = owner_side(layout, lambda own: mfsdp.muon(0.02, layout=own), params, grads)
    for name, title in (("soap", "SOAP"), ("shampoo", "Shampoo")):
        method = mfsdp.shampoo_method(name, ARGS.max_preconditioner_dim, 2, ARGS.frequency)
        layout = mfsdp.plan(params, mesh, optimizer=method)
        for stagger, how in ((True, "staggered"), (False, "all at once")):
            make = second_order(name, stagger)
            sides[f"{title}, {how}"] = owner_side(layout, make, params, grads)
        if not ARGS.no_replicated:
            side = replicated_side(mesh, second_order(name), params, grads)
            sides[f"{title}, replicated"] = side
    for turn in range(ARGS.rounds + 1):
        for side in sides.values():
            side.period(timed=turn > 0)
    report(sides, layout.to_dict()["refresh"], len(params))


def report(sides: dict[str, Side], refresh: dict[str, Any], count: int) -> None:
    CONSOLE.print(
        f"{count} matrices, width {ARGS.width}, {ARGS.devices} simulated devices on "
        f"{os.cpu_count()} cores ({platform.machine()}), JAX {jax.__version__}, "
        f"optax {optax.__version__}; blocks up to {ARGS.max_preconditioner_dim}, SOAP by "
        f"{type(BASIS).__name__}, Shampoo by {type(ROOT).__name__}, every {ARGS.frequency} steps; "
        f"{ARGS.rounds} periods in turn"
    )
    muon = sides["Muon"].means
    table = Table("", "ms", "quartiles", "x Muon", "longest", "compile s", "sent")
    for name, side in sides.items():
        low, median, high = np.percentile(side.means, [25, 50, 75])
        table.add_row(
            name,
            f"{median:.0f}",
            f"{low:.0f}-{high:.0f}",
            f"{np.median(side.means / muon):.2f}",
            f"{side.longest:.2f}",
            f"{side.compile_s:.1f}",
            str(side.audit.count(scalar=False)),
        )
    CONSOLE.print(table)
    CONSOLE.print(
        "ms: mean step of a period, median of the periods; longest: longest step over the mean; "
        "sent: matrix collectives"
    )
    owner, step = refresh["owner"], refresh["step"]
    CONSOLE.print(
        f"planned: busiest owner {owner['balance']:.2f} x the mean of a period "
        f"({owner['over_bound']:.2f} x the bound), busiest step of an owner "
        f"{step['balance']:.2f} x its mean ({step['over_bound']:.2f} x the bound)"
    )
    for title in ("SOAP", "Shampoo"):
        side = sides[f"{title}, staggered"]
        CONSOLE.print(f"{title} over owner Muon: {ratio(side, sides['Muon'], 'at most 3')}")
        if not ARGS.no_replicated:
            whole = ratio(sides[f"{title}, replicated"], side, "at least 4")
            CONSOLE.print(f"{title} replicated over on owners: {whole}")


def ratio(side: Side, other: Side, goal: str) -> str:
    """The median over periods, also of CPU time, to which other work on the machine adds little."""
    wall, cpu = np.median(side.means / other.means), np.median(np.divide(side.cpu, other.cpu))
    return f"{wall:.2f} x, in CPU time {cpu:.2f} x (goal: {goal})"


if __name__ == "__main__":
    main()
