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
from matrixfsdp_jax.owner.canonical import all_slots
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

    A process without blocks has the counts of the group all the same.

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
        (self._device,) = crossing.to_jax(params[0]).devices()
        init = jax.jit(lambda p: self._make(self.stacks).init(self._pack(p)))
        self.set_state(init(self._arrays(params)))

    def set_state(self, state: PyTree) -> None:
        """Go on with another state; not to be written to from now on."""
        # As a step returns it, on a device for good: a state that is not would compile it anew.
        self.state = jax.device_put(state, self._device)
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
        have = np.array([grads[i] is not None for i in self.used])
        old = self._arrays(params)
        # Any finite array stands for a missing gradient: its block is left alone.
        given = tuple(
            x if g is None else crossing.to_jax(g)
            for g, x in zip((grads[i] for i in self.used), old, strict=True)
        )
        sizes = {key: np.int32(len(members)) for key, members in self.stacks.items()}
        new, self.state = self._step(
            self.state, given, old, None if have.all() else have, sizes, dict(numbers)
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
        stacks = function(self.state, *(self._pack(self._arrays(own)) for own in tensors))
        crossing.wait(stacks)
        return dict(self.unstacked(stacks))

    def unstacked(self, stacks: dict[str, jax.Array]) -> list[tuple[Block, torch.Tensor]]:
        """Every block with its part of the stacks, in the order of the blocks."""
        parts: dict[Block, torch.Tensor] = {}
        for key, members in self.stacks.items():
            parts |= zip(members, crossing.to_torch(stacks[key])[0].unbind(0), strict=False)
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
            key: self._stack([whole[block.param][block.index] for block in members])
            for key, members in self.stacks.items()
        }

    @staticmethod
    def _stack(blocks: Sequence[jax.Array]) -> jax.Array:
        """``[1, W, ...]``; a block alone has an empty place beside it, see ``_update``."""
        return jnp.stack([*blocks, *[jnp.zeros_like(blocks[0])] * (len(blocks) == 1)])[None]

    def _update(
        self, state: PyTree, grads: Any, params: Any, present: Any, sizes: Any, numbers: Any
    ) -> tuple[dict[str, jax.Array], PyTree]:
        """One block after the other.

        A block is then computed alike whatever stands beside it, to the last bit, and so by any
        number of ranks. ``sizes``, the number of blocks of every stack, comes at run time, and no
        stack is of one block: a loop of known length would be unrolled, a slice of everything
        dropped, and what is left fused (and so rounded) in another way.
        """
        grads, params = self._pack(grads), self._pack(params)
        if present is not None:
            place = {param: i for i, param in enumerate(self.used)}
            present = {
                key: self._stack([present[place[block.param]] for block in members])
                for key, members in self.stacks.items()
            }
        scales = numbers.pop("scales", {})
        # Counts and sums that all blocks share.
        _, shared = self._make({}, **numbers).update({}, self._part(state, None), {})
        new, parts = {}, []
        for key, members in self.stacks.items():
            shape = members[0].shape
            own = {
                "grads": grads[key],
                "params": params[key],
                "present": None if present is None else present[key],
                "scales": {n: self._stack(list(given[shape])) for n, given in scales.items()},
            }

            def one(state: PyTree, own: Any, key: str = key, shape: Shape = shape) -> Any:
                given = {name: {shape: x[0]} for name, x in own["scales"].items()}
                more = {**numbers, "scales": given} if given else numbers
                make = self._make({key: self.stacks[key][:1]}, **more)
                tx = on_present_stacks(make, all_slots)
                present = None if own["present"] is None else {key: own["present"]}
                update, state = tx.update(
                    {key: own["grads"]}, state, {key: own["params"]}, present=present
                )
                return update[key].astype(own["grads"].dtype), state

            new[key], part = self._each(one, self._part(state, key), own, sizes[key])
            parts.append(part)
        return new, self._whole(state, shared, parts)

    def _each(
        self, one: Callable[[PyTree, Any], Any], state: PyTree, own: Any, size: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        """``one`` of every block of a stack."""
        leaves, treedef = jax.tree.flatten(state)
        by_block = jax.tree.leaves(
            jax.tree.map(
                lambda node: jax.tree.map(lambda _: self._by_block(node), node),
                state,
                is_leaf=self._by_block,
            )
        )

        def at(x: jax.Array, w: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, w, 1, axis=1)

        def body(w: jax.Array, carry: Any) -> Any:
            block = [at(x, w) if mine else x for x, mine in zip(leaves, by_block, strict=True)]
            update, new = one(
                jax.tree.unflatten(treedef, block), jax.tree.map(lambda x: at(x, w), own)
            )
            changed = zip(jax.tree.leaves(new), by_block, strict=True)
            written = [update, *(x for x, mine in changed if mine)]
            return [
                jax.lax.dynamic_update_slice_in_dim(x, y, w, axis=1)
                for x, y in zip(carry, written, strict=True)
            ]

        # Arrays that are only written to: of those that are read too, XLA would copy all blocks
        # for each one.
        old = [x for x, mine in zip(leaves, by_block, strict=True) if mine]
        carry = [jnp.zeros_like(x) for x in [own["grads"], *old]]
        out, *kept = jax.lax.fori_loop(0, size, body, carry)
        filled = iter(kept)
        new = [next(filled) if mine else x for x, mine in zip(leaves, by_block, strict=True)]
        return out, jax.tree.unflatten(treedef, new)

    def _by_block(self, node: Any) -> bool:
        """Whether a part of the state has an entry for every stack, or for one."""
        return isinstance(node, dict) and set(node) <= set(self.stacks)

    def _part(self, state: PyTree, key: str | None) -> PyTree:
        """The state of one stack; of none, what all share."""

        def part(node: Any) -> Any:
            if not self._by_block(node):
                return node
            return {} if key is None else {key: node[key]}

        return jax.tree.map(part, state, is_leaf=self._by_block)

    def _whole(self, state: PyTree, shared: PyTree, parts: list[PyTree]) -> PyTree:
        """The inverse of ``_part``, in the structure of ``state``."""

        def joined(node: Any, common: Any, *own: Any) -> Any:
            if not self._by_block(node):
                return common
            return {key: part[key] for part in own for key in part}

        return jax.tree.map(joined, state, shared, *parts, is_leaf=self._by_block)
