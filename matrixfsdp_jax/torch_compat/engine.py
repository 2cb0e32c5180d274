"""The step of one parameter group: stacks of equal blocks, state in JAX, one compiled function.

Shape legend: ``W`` blocks of one shape and dtype in a group.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from matrixfsdp_jax.layout.blocks import Shape
from matrixfsdp_jax.layout.leaves import states_of
from matrixfsdp_jax.owner.present import on_present_stacks
from matrixfsdp_jax.torch_compat import crossing
from matrixfsdp_jax.torch_compat.blocks import Block
from matrixfsdp_jax.transforms.shampoo import ShampooState

PyTree = Any
Numbers = Mapping[str, float]
Make = Callable[..., optax.GradientTransformation]
Evaluate = Callable[..., dict[str, jax.Array]]
Updates = dict[Block, torch.Tensor]
Stacks = dict[str, list[Block]]


class Engine:
    """State and compiled step of the blocks that this process owns.

    Args:
      blocks: the blocks, in the order of their parameters.
      params: all parameters of the group.
      merged: the merged dims of every parameter.
      make: ``make(stacks, **numbers)`` is the transform of ``{key: [1, W, *shape]}``, where
        ``stacks`` has the blocks of every key; may be set anew, which compiles anew.

    Numerics: of the transform; updates in the dtype of the parameter.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        params: Sequence[torch.Tensor],
        merged: Sequence[Shape],
        make: Make,
    ) -> None:
        self.blocks = tuple(blocks)
        self.used = sorted({block.param for block in blocks})
        self.stacks: Stacks = {}
        for block in blocks:
            dtype = str(params[block.param].dtype).removeprefix("torch.")
            key = f"{dtype}:{'x'.join(map(str, block.shape)) or 'scalar'}"
            self.stacks.setdefault(key, []).append(block)
        self._merged = merged
        self.set_transform(make)
        self.state: PyTree = None
        if blocks:
            arrays = self._arrays(params)
            self.state = jax.jit(lambda p: self._make(self.stacks).init(self._pack(p)))(arrays)
            crossing.wait(self.state)

    def set_transform(self, make: Make) -> None:
        """Go on with another transform of the same state."""
        self._make = make
        self._step = jax.jit(self._update, donate_argnums=0)

    def step(
        self,
        grads: Sequence[torch.Tensor | None],
        params: Sequence[torch.Tensor],
        **numbers: Any,
    ) -> Updates:
        """The update of every block, to be added to it; blocks without a gradient have none.

        Args:
          grads: of every parameter of the group; None where there is none in this step.
          params: every parameter of the group.
          numbers: what may change from step to step.
        """
        if not self.blocks:
            return {}
        have = np.array([grads[i] is not None for i in self.used])
        old = self._arrays(params)
        # Any finite array stands for a missing gradient: its block is left alone.
        given = tuple(
            x if g is None else crossing.to_jax(g)
            for g, x in zip((grads[i] for i in self.used), old, strict=True)
        )
        new, self.state = self._step(
            self.state, given, old, None if have.all() else have, dict(numbers)
        )
        crossing.wait((new, self.state))
        there = {i for i, has in zip(self.used, have, strict=True) if has}
        return {block: x for block, x in self.unstacked(new) if block.param in there}

    def evaluate(self, function: Evaluate, *tensors: Sequence[torch.Tensor]) -> Updates:
        """Stacks computed by ``function(state, *stacks of tensors)``, by block.

        Args:
          function: compiled or not; its result is ``{key: [1, W, *shape]}``.
          tensors: one for every parameter, each.
        """
        if not self.blocks:
            return {}
        stacks = function(self.state, *(self._pack(self._arrays(own)) for own in tensors))
        crossing.wait(stacks)
        return dict(self.unstacked(stacks))

    def unstacked(self, stacks: dict[str, jax.Array]) -> list[tuple[Block, torch.Tensor]]:
        """Every block with its part of the stacks, in the order of the blocks."""
        parts: dict[Block, torch.Tensor] = {}
        for key, members in self.stacks.items():
            parts |= zip(members, crossing.to_torch(stacks[key])[0].unbind(0), strict=True)
        return [(block, parts[block]) for block in self.blocks]

    def failures(self) -> tuple[int, int, Block | None]:
        """Refreshes that failed in a row, not-finite factors met so far; a block of the worst."""
        worst, nonfinite, where = 0, 0, None
        for state in states_of(ShampooState, self.state):
            for key, members in self.stacks.items():
                failed = np.asarray(state.failures[key][0]).reshape(-1)
                nonfinite += int(np.asarray(state.nonfinite[key][0]).sum())
                if failed.max(initial=0) > worst:
                    worst, where = int(failed.max()), members[int(failed.argmax())]
        return worst, nonfinite, where

    def _arrays(self, tensors: Sequence[torch.Tensor]) -> tuple[jax.Array, ...]:
        return tuple(crossing.to_jax(tensors[i]) for i in self.used)

    def _pack(self, arrays: Sequence[jax.Array]) -> dict[str, jax.Array]:
        whole = {i: x.reshape(self._merged[i]) for i, x in zip(self.used, arrays, strict=True)}
        return {
            key: jnp.stack([whole[block.param][block.index] for block in members])[None]
            for key, members in self.stacks.items()
        }

    def _update(
        self, state: PyTree, grads: Any, params: Any, present: Any, numbers: Numbers
    ) -> tuple[dict[str, jax.Array], PyTree]:
        tx = on_present_stacks(self._make(self.stacks, **numbers), jnp.asarray)
        if present is not None:
            place = {param: i for i, param in enumerate(self.used)}
            present = {
                key: present[np.array([[place[block.param] for block in members]])]
                for key, members in self.stacks.items()
            }
        stacks = self._pack(grads)
        new, state = tx.update(stacks, state, self._pack(params), present=present)
        return {key: x.astype(stacks[key].dtype) for key, x in new.items()}, state
