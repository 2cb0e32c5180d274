"""Tensors to arrays and back by DLPack: without a copy, on CPU and on one GPU per process.

JAX copies a CPU tensor that does not begin at a multiple of 64 bytes, as views of a gradient bucket
may; one that is not contiguous is copied here. An array stays valid only while nobody writes to its
tensor, so a caller waits for the compiled step before it changes parameters in place.
"""

import os
from collections.abc import Sequence
from typing import Any

# JAX takes three quarters of a GPU's memory at its first use, unless told before; torch needs it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import torch
from jax._src import xla_bridge  # nothing public tells whether JAX has started


def bind(device: torch.device) -> None:
    """Let JAX see the GPU of this process only, if it has not started yet.

    Otherwise every rank would hold memory on every GPU of its machine.
    """
    if device.type != "cuda" or xla_bridge.backends_are_initialized():
        return
    if getattr(jax.config, "jax_cuda_visible_devices", "all") == "all":
        jax.config.update("jax_cuda_visible_devices", str(device.index or 0))


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """The array on the memory of ``tensor``; call it under ``jax.enable_x64`` for 64-bit dtypes."""
    return jax.dlpack.from_dlpack(tensor.detach().resolve_neg().contiguous())


def to_torch(array: jax.Array) -> torch.Tensor:
    """The tensor on the memory of ``array``; not to be written to."""
    return torch.from_dlpack(array)


def wait(arrays: Any) -> None:
    """Until every array is computed, and so every input of its computation read."""
    jax.block_until_ready(arrays)


def owned(array: jax.Array) -> torch.Tensor:
    """A tensor of its own with the values of ``array``."""
    return to_torch(array).clone()


def check_devices(params: Sequence[torch.Tensor]) -> torch.device:
    """The one device of all ``params``.

    Raises: ValueError if there are several, or one that JAX cannot share memory with.
    """
    devices = {p.device for p in params}
    if len(devices) > 1:
        raise ValueError(
            f"the parameters of a group are on several devices, {sorted(map(str, devices))}; move "
            "the model to one (model.to(device)), or give each device a group of its own process"
        )
    (device,) = devices
    if device.type == "meta":
        raise ValueError(
            "a parameter is on the meta device and has no values yet; materialise the model first, "
            "for example by model.to_empty(device='cpu') and loading its weights"
        )
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"parameters on {device} cannot be shared with JAX; use cpu or cuda")
    return device
