"""One optimizer step in PyTorch, one process: this layer, AdamW, and a plain torch Shampoo.

The three update the parameters of a GPT from the same Gaussian gradients, in turn in one process. A
round is one period of ``--frequency`` steps of each side, each step timed. The plain Shampoo is the
same configuration (root inverses by ``eigh``, Adam grafting, blocks) written with torch alone, and
its parameters are compared with this layer's at the end. What the crossing between torch and JAX
takes is timed inside the layer's steps::

    python benchmarks/torch_compat.py [--layers 4] [--width 512] [--rounds 5] [--frequency 10]
        [--max-preconditioner-dim 512] [--tiny]
"""

import argparse
import os
import platform
import time
from collections.abc import Callable
from typing import Any

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--rounds", type=int, default=5, help="timed periods after one to warm up")
parser.add_argument("--frequency", type=int, default=10, help="steps of a period")
parser.add_argument("--max-preconditioner-dim", type=int, default=512, help="largest factor")
parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
ARGS = parser.parse_args()
if ARGS.tiny:
    ARGS.layers, ARGS.width, ARGS.rounds, ARGS.frequency = 1, 16, 2, 2
    ARGS.max_preconditioner_dim = 16
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from matrixfsdp_jax.torch_compat import (  # noqa: E402
    AdamPreconditionerConfig,
    DistributedShampoo,
    SingleDeviceDistributedConfig,
    crossing,
)

CONSOLE = Console(width=80)
# Damped so that rounding does not decide the roots of factors without full rank.
LR, BETA1, BETA2, EPSILON, GRAFT_BETA2, GRAFT_EPSILON = 1e-3, 0.9, 0.99, 1e-2, 0.99, 1e-8


def parameters(seed: int) -> list[torch.Tensor]:
    """Attention, MLP and norms of every layer, in torch's ``[out, in]``."""
    d = ARGS.width
    shapes = [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d), (d,), (d,)] * ARGS.layers
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


class PlainShampoo(torch.optim.Optimizer):
    """Root-inverse Shampoo with Adam grafting, block by block, in plain torch."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        super().__init__(params, {"lr": LR})
        self.steps = 0
        limit = ARGS.max_preconditioner_dim
        self.blocks: list[dict[str, Any]] = []
        for p in self.param_groups[0]["params"]:
            pieces = [p.detach()]
            for dim in range(p.ndim):
                pieces = [part for piece in pieces for part in piece.split(limit, dim)]
            for piece in pieces:
                block = {"p": p, "view": piece, "m": torch.zeros_like(piece)}
                block["v"] = torch.zeros_like(piece)
                block["factors"] = [torch.zeros(k, k) for k in piece.shape]
                block["roots"] = [torch.eye(k) for k in piece.shape]
                block["index"] = piece.storage_offset()
                self.blocks.append(block)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update."""
        self.steps += 1
        c1, c2 = 1 - BETA1**self.steps, 1 - BETA2**self.steps
        for block in self.blocks:
            self._update(block, c1, c2)

    def _update(self, block: dict[str, Any], c1: float, c2: float) -> None:
        view = block["view"]
        g = block["p"].grad.as_strided(view.shape, view.stride(), block["index"])
        for dim, factor in enumerate(block["factors"]):
            rows = g.movedim(dim, 0).flatten(1) if g.ndim > 1 else g[:, None]
            factor.mul_(BETA2).addmm_(rows, rows.T, alpha=1 - BETA2)
        if self.steps % ARGS.frequency == 0:
            block["roots"] = [self._root(f / c2, view.ndim) for f in block["factors"]]
        block["v"].mul_(GRAFT_BETA2).addcmul_(g, g, value=1 - GRAFT_BETA2)
        m = block["m"].lerp_(g, 1 - BETA1) / c1
        corrected = block["v"] / (1 - GRAFT_BETA2**self.steps)
        graft = m / (corrected.sqrt_().add_(GRAFT_EPSILON))
        direction = graft
        if self.steps >= ARGS.frequency:
            direction = m
            for root in block["roots"]:
                direction = torch.tensordot(direction, root, dims=([0], [0]))
            direction = direction * (graft.norm() / (direction.norm() + 1e-16))
        view.sub_(direction, alpha=LR)

    @staticmethod
    def _root(a: torch.Tensor, order: int) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(a + EPSILON * torch.eye(len(a)))
        low = values.min()
        if low < EPSILON:
            values = values - low + EPSILON
        return (vectors * values ** (-1 / (2 * order))) @ vectors.T


class Timers:
    """Seconds spent in the functions that cross between torch and JAX."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in ("to_jax", "to_torch"):
            setattr(crossing, name, self._timed(getattr(crossing, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            self.seconds += time.perf_counter() - start
            return result

        return timed


class Side:
    """An optimizer with its parameters."""

    def __init__(self, make: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> None:
        self.params = [torch.nn.Parameter(p) for p in parameters(0)]
        self.optimizer = make(self.params)
        self.times: list[list[float]] = []
        self.crossing: list[float] = []

    def period(self, grads: list[list[torch.Tensor]], timers: Timers) -> None:
        """All steps of a period, each by itself."""
        times, before = [], timers.seconds
        for own in grads:
            for p, g in zip(self.params, own, strict=True):
                p.grad = g
            start = time.perf_counter()
            self.optimizer.step()
            times.append(1e3 * (time.perf_counter() - start))
        self.times.append(times)
        self.crossing.append(1e3 * (timers.seconds - before) / len(grads))


def shampoo(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    """What ``PlainShampoo`` does, by this package."""
    return DistributedShampoo(
        params,
        lr=LR,
        betas=(BETA1, BETA2),
        epsilon=EPSILON,
        max_preconditioner_dim=ARGS.max_preconditioner_dim,
        precondition_frequency=ARGS.frequency,
        grafting_config=AdamPreconditionerConfig(beta2=GRAFT_BETA2, epsilon=GRAFT_EPSILON),
        distributed_config=SingleDeviceDistributedConfig(target_parameter_dimensionality=2),
    )


def main() -> None:
    """Time all sides in turn, and print."""
    timers = Timers()
    sides = {
        "AdamW (foreach)": Side(lambda p: torch.optim.AdamW(p, lr=LR)),
        "plain torch Shampoo": Side(PlainShampoo),
        "this layer": Side(shampoo),
    }
    for round_ in range(ARGS.rounds + 1):
        grads = [parameters(1 + round_ * ARGS.frequency + i) for i in range(ARGS.frequency)]
        for side in sides.values():
            side.period(grads, timers)
    for side in sides.values():
        del side.times[0], side.crossing[0]
    report(sides)


def report(sides: dict[str, Side]) -> None:
    """The table, and the figures that have a goal."""
    ours, plain = sides["this layer"], sides["plain torch Shampoo"]
    both = zip(ours.params, plain.params, parameters(0), strict=True)
    with torch.no_grad():
        moved = [(float((a - b).abs().max()), float((b - c).abs().max())) for a, b, c in both]
    CONSOLE.print(
        f"{ARGS.layers} layers of width {ARGS.width}, {len(ours.params)} parameters, blocks up to "
        f"{ARGS.max_preconditioner_dim}, decompositions every {ARGS.frequency} steps; "
        f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}, JAX "
        f"{jax.__version__}; {ARGS.rounds} periods in turn"
    )
    table = Table("", "ms", "quartiles", "x AdamW", "longest", "crossing ms")
    base = np.median(np.mean(sides["AdamW (foreach)"].times, axis=1))
    for name, side in sides.items():
        means = np.mean(side.times, axis=1)
        low, middle, high = np.quantile(means, (0.25, 0.5, 0.75))
        longest = np.median(np.max(side.times, axis=1) / means)
        table.add_row(
            name,
            f"{middle:.1f}",
            f"{low:.1f}-{high:.1f}",
            f"{middle / base:.2f}",
            f"{longest:.2f}",
            f"{np.median(side.crossing):.2f}",
        )
    CONSOLE.print(table)
    CONSOLE.print("ms: mean step of a period, median of the periods; longest: over the mean")
    ratio = np.median(np.mean(ours.times, axis=1) / np.mean(plain.times, axis=1))
    share = np.median(np.array(ours.crossing) / np.mean(ours.times, axis=1))
    CONSOLE.print(f"this layer over plain torch Shampoo: {ratio:.2f} x")
    CONSOLE.print(f"crossing: {100 * share:.1f}% of the step (goal: under 5%)")
    apart = max(a / b for a, b in moved)
    CONSOLE.print(f"parameters of both apart by {apart:.1e} of the farthest way that one went")


main()
