"""Blocks dealt to the ranks of a process group, and the one all-gather of a step.

The deal and the buffers are those of the reference: blocks by falling cost, each to the rank with
the least so far; in the buffer a rank's blocks lie in their own order, each from a multiple of 64
bytes on, and all ranks send as many bytes as the fullest.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from matrixfsdp_jax.torch_compat.blocks import Block
from matrixfsdp_jax.torch_compat.configs import DDPDistributedConfig

_ALIGNMENT = 64  # bytes
# The second name is deprecated where there is the first.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def deal(costs: Sequence[float], num_ranks: int) -> list[int]:
    """The rank of every block: the costliest first, to the least loaded, ties to the first.

    Examples:
      >>> deal([64, 320, 64, 320], 2)
      [0, 0, 1, 1]
    """
    load = [0.0] * num_ranks
    ranks = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        rank = min(range(num_ranks), key=load.__getitem__)
        ranks[i] = rank
        load[rank] += costs[i]
    return ranks


class Exchange:
    """The blocks of this rank, and how all ranks come to have the updates of all blocks.

    Args:
      blocks: all blocks of a parameter group, in order.
      config: the reference's options.
      group: the process group whose ranks share the work.

    Collectives: one all-gather of a tensor per call of ``apply``.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        config: DDPDistributedConfig,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.config, self.group, self._blocks = config, group, tuple(blocks)
        self.num_ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        dtype = config.communication_dtype
        meta = [torch.empty(b.shape, device="meta", dtype=dtype) for b in blocks]
        model = config.load_balancing_config.cost_model
        self.ranks = deal([model.cost(x) for x in meta], self.num_ranks)
        # Aligned whatever the cost model is.
        self.sizes = [-(-x.numel() * x.element_size() // _ALIGNMENT) * _ALIGNMENT for x in meta]
        self.bytes_per_rank = [
            sum(size for size, owner in zip(self.sizes, self.ranks, strict=True) if owner == rank)
            for rank in range(self.num_ranks)
        ]
        # One unit more, in which a rank says that it could not update its blocks.
        length = max(self.bytes_per_rank, default=0) + _ALIGNMENT
        self._all = torch.zeros(self.num_ranks * length, dtype=torch.int8, device=device)
        self._own = self._all[self.rank * length : (self.rank + 1) * length].clone()
        self._gathered = self._views(self._all, range(self.num_ranks), length)
        self._sent = self._views(self._own, [self.rank], length)
        self._failed = self._all.view(self.num_ranks, length)[:, -1]

    @property
    def own(self) -> list[Block]:
        """The blocks of this rank."""
        return [b for b, rank in zip(self._blocks, self.ranks, strict=True) if rank == self.rank]

    def _views(
        self, buffer: torch.Tensor, ranks: Sequence[int], length: int
    ) -> dict[Block, torch.Tensor]:
        """Every block of ``ranks`` as a view of the buffer."""
        ends = {rank: i * length for i, rank in enumerate(ranks)}
        dtype = self.config.communication_dtype
        views = {}
        for block, rank, size in zip(self._blocks, self.ranks, self.sizes, strict=True):
            if rank in ends:
                start = ends[rank]
                ends[rank] = start + size
                flat = buffer[start : start + size].view(dtype)
                views[block] = flat[: torch.Size(block.shape).numel()].view(block.shape)
        return views

    def apply(
        self,
        updates: Mapping[Block, torch.Tensor],
        targets: Mapping[Block, torch.Tensor],
        error: Exception | None = None,
    ) -> None:
        """Add the updates of all ranks to ``targets``, the blocks that have a gradient.

        Every rank adds what was sent, in the communication dtype, its own updates too; with
        ``communicate_params`` the owner adds and every rank takes the sent parameter.

        Raises: ``error`` if there is one, and then ValueError on all other ranks; no target has
          moved on any.
        """
        whole = self.config.communicate_params
        if updates:
            sent = list(updates.values())
            if whole:
                sent = list(torch._foreach_add([targets[b] for b in updates], sent))
            torch._foreach_copy_([self._sent[b] for b in updates], sent)
        self._own[-1] = error is not None
        _all_gather(self._all, self._own, group=self.group)
        if error is not None:
            raise error
        if failed := self._failed.nonzero().flatten().tolist():
            raise ValueError(
                f"rank {failed[0]} of the process group could not precondition its blocks in this "
                "step, see the error there; parameters have not moved on any rank"
            )
        if targets:
            received = [self._gathered[b] for b in targets]
            into = list(targets.values())
            (torch._foreach_copy_ if whole else torch._foreach_add_)(into, received)


def ready() -> bool:
    """Whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def check_world(size: int) -> None:
    """Refuse a world that cannot be cut into groups of ``size`` ranks (-1: one group).

    Raises: RuntimeError without an initialised process group; ValueError if ``size`` does not
      divide the world.
    """
    if not ready():
        raise RuntimeError(
            "DDPDistributedConfig needs torch.distributed: call torch.distributed."
            "init_process_group(...) first and start the program with torchrun, or use "
            "SingleDeviceDistributedConfig()"
        )
    world = dist.get_world_size()
    if size != -1 and (size < 1 or world % size):
        raise ValueError(
            f"num_trainers_per_group={size} must divide the world size {world}, or be -1 for all"
        )


def subgroup(size: int) -> dist.ProcessGroup | None:
    """The group of this rank among groups of ``size`` consecutive ranks; None is the world.

    It waits for silent ranks as long as the world does.
    """
    if size in (-1, dist.get_world_size()):
        return None
    first = dist.get_rank() // size * size
    ranks = list(range(first, first + size))
    # Named by its ranks: groups made by all ranks at once may take each other's names.
    return dist.new_group(ranks, timeout=_patience(), use_local_synchronization=True)


def _patience() -> timedelta | None:
    """The timeout of the world, None if it cannot be known: then a new group has torch's own."""
    world = dist.group.WORLD
    assert world is not None  # it is initialised
    backend = world._get_backend(world._device_types[0])
    return getattr(getattr(backend, "options", None), "_timeout", None)


def check_same(what: Any, device: torch.device) -> None:
    """Refuse, on all ranks at once, what is not the same on all of them.

    Args:
      what: a list of lines that describe parameters and options.
      device: of the parameters.

    Collectives: one ``all_gather_object``.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.all_gather_object(everyone, what)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            i = next(
                (i for i, (a, b) in enumerate(zip(everyone[0], other, strict=False)) if a != b),
                min(len(everyone[0]), len(other)),
            )
            a, b = ([*lines, "nothing more"][min(i, len(lines))] for lines in (everyone[0], other))
            raise ValueError(
                f"the ranks do not have the same parameters and options: rank 0 has {a}, rank "
                f"{rank} has {b}; build the same model and optimizer on every rank"
            )
