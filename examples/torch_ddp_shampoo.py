"""PyTorch DDP with Distributed Shampoo run by JAX, then the same run goes on in JAX and Flax.

    python examples/torch_ddp_shampoo.py          # starts 2 processes by itself, about a minute
    torchrun --standalone --nproc-per-node 2 examples/torch_ddp_shampoo.py

A small convnet learns scikit-learn's digits for ``--steps`` steps, each process on its half of a
batch, blocks dealt to the processes. Then parameters and the optimizer's whole state move to JAX:
a Flax model computes the same logits from the same weights, and for ``--more`` steps both
optimizers take the gradients that torch computes and stay together.
"""

import os

# Processes on one machine share its cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.distributed as dist
from flax import linen
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from matrixfsdp_jax.torch_compat import (
    AdamPreconditionerConfig,
    DDPDistributedConfig,
    DistributedShampoo,
    to_jax,
)

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--processes", type=int, default=2)
parser.add_argument("--steps", type=int, default=50, help="steps in torch")
parser.add_argument("--more", type=int, default=20, help="further steps, in torch and in JAX")
parser.add_argument("--batch", type=int, default=96, help="images, over all processes")
parser.add_argument("--lr", type=float, default=0.01)


class ConvNet(nn.Module):
    """Images ``[B, 1, 8, 8]`` to logits ``[B, 10]``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(1, 12, 3, padding=1)
        self.conv_2 = nn.Conv2d(12, 24, 3, padding=1, stride=2)
        self.head = nn.Linear(24 * 4 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv_1(x))
        x = torch.relu(self.conv_2(x))
        return self.head(x.flatten(1))


class FlaxConvNet(linen.Module):
    """The same function in Flax: images ``[B, 8, 8, 1]``, kernels ``[h, w, in, out]``."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        same = ((1, 1), (1, 1))
        x = linen.relu(linen.Conv(12, (3, 3), padding=same, name="conv_1")(x))
        x = linen.relu(linen.Conv(24, (3, 3), strides=2, padding=same, name="conv_2")(x))
        # Channels first, as torch flattens them.
        return linen.Dense(10, name="head")(x.transpose(0, 3, 1, 2).reshape(len(x), -1))


def to_flax(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters in torch's names and shapes, as the Flax model reads them."""

    def kernel(weight: jax.Array) -> jax.Array:
        return weight.transpose(2, 3, 1, 0) if weight.ndim == 4 else weight.T

    return {
        name: {"kernel": kernel(own["weight"]), "bias": own["bias"]} for name, own in params.items()
    }


def batches(size: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless shuffled batches of the training images."""
    images, labels = digits()
    order = np.random.default_rng(seed)
    while True:
        index = order.permutation(len(labels) - 360)
        for k in range(0, len(index) - size + 1, size):
            own = index[k : k + size] + 360
            yield images[own], labels[own]


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """1797 images of handwritten digits; the first 360 are for testing."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = torch.tensor(data.images[order] / 16, dtype=torch.float32)[:, None]
    return images, torch.tensor(data.target[order])


def accuracy(model: nn.Module) -> float:
    """Share of the test images that are recognised."""
    images, labels = digits()
    with torch.no_grad():
        return float((model(images[:360]).argmax(1) == labels[:360]).float().mean())


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]
) -> float:
    """One step on this process's part of the batch; DDP averages the gradients."""
    images, labels = (x.chunk(dist.get_world_size())[dist.get_rank()] for x in batch)
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def recorded(model: nn.Module) -> dict[str, Any]:
    """The gradients of this step, in the tree that ``to_jax`` gives."""
    tree: dict[str, Any] = {}
    for name, p in model.named_parameters():
        module, kind = name.split(".")
        tree.setdefault(module, {})[kind] = jnp.array(p.grad.numpy())
    return tree


def distance(model: nn.Module, params: dict[str, Any]) -> float:
    """The largest difference of a parameter in torch and in JAX."""
    pairs = []
    for name, p in model.named_parameters():
        module, kind = name.split(".")
        pairs.append(np.abs(p.detach().numpy() - np.asarray(params[module][kind])).max())
    return float(max(pairs))


def show_blocks(optimizer: DistributedShampoo, console: Console) -> None:
    """Which process owns which block."""
    group, _ = next(optimizer.groups())
    table = Table("rank", "blocks", "bytes sent per step", title="who preconditions what")
    exchange = group.exchange
    for rank in range(exchange.num_ranks):
        owned = [b for b, r in zip(group.blocks, exchange.ranks, strict=True) if r == rank]
        shapes = [f"{b.param}/{b.name} {'x'.join(map(str, b.shape))}" for b in owned]
        table.add_row(str(rank), ", ".join(shapes), str(exchange.bytes_per_rank[rank]))
    console.print(table)


def main() -> None:
    """Train in torch, move, go on in both."""
    args = parser.parse_args()
    if "RANK" not in os.environ:  # not started by torchrun
        launch = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={args.processes}",
        ]
        os.execv(sys.executable, [sys.executable, *launch, __file__, *sys.argv[1:]])
    dist.init_process_group("gloo")
    console = Console(width=80, quiet=dist.get_rank() != 0)
    torch.manual_seed(0)
    model = ConvNet()
    parallel = DistributedDataParallel(model)
    optimizer = DistributedShampoo(
        model.parameters(),
        lr=args.lr,
        betas=(0.9, 0.95),
        epsilon=1e-4,
        precondition_frequency=5,
        max_preconditioner_dim=128,
        grafting_config=AdamPreconditionerConfig(beta2=0.95, epsilon=1e-8),
        distributed_config=DDPDistributedConfig(target_parameter_dimensionality=2),
    )
    show_blocks(optimizer, console)
    data = batches(args.batch, seed=0)
    for step in range(1, args.steps + 1):
        loss = train_step(parallel, optimizer, next(data))
        if step % 10 == 0 or step == args.steps:
            console.print(f"step {step}: loss {loss:.3f}, test accuracy {accuracy(model):.1%}")

    tx, params, state = to_jax(optimizer, model)  # a collective: every process calls it
    images, _ = digits()
    flax_logits = FlaxConvNet().apply(
        {"params": to_flax(params)}, images[:360, 0, :, :, None].numpy()
    )
    with torch.no_grad():
        apart = np.abs(model(images[:360]).numpy() - np.asarray(flax_logits)).max()
    console.print(f"moved to JAX after {args.steps} steps: logits in Flax {apart:.1e} apart")

    @jax.jit
    def jax_step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    farthest = 0.0
    for _ in range(args.more):
        loss = train_step(parallel, optimizer, next(data))
        params, state = jax_step(params, state, recorded(model))
        farthest = max(farthest, distance(model, params))
    console.print(
        f"{args.more} more steps on the same gradients: loss {loss:.3f}, test accuracy "
        f"{accuracy(model):.1%}; torch and JAX at most {farthest:.1e} apart"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
