"""A scan over groups of layers that gathers the next group while one is computed.

The reverse rule is written out, because that of ``jax.lax.scan`` would keep what is gathered early
for the backward pass. Here only the carry of each group is kept.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

PyTree = Any


def scan(
    run: Callable[..., tuple[Any, Any]],
    gather: Callable[[PyTree], PyTree],
    carry: PyTree,
    stacks: PyTree,
    scanned: PyTree,
    varying: Callable[[PyTree], PyTree],
) -> tuple[PyTree, PyTree]:
    """``carry, y = run(carry, gather(stack), x)`` for every stack and x, one behind the other.

    Args:
      run: one group; what it closes over gets its gradient.
      gather: linear; its collectives run one group ahead, in the backward pass one behind.
      carry: the first carry, varying over the devices.
      stacks: arrays ``[Q, ...]``.
      scanned: arrays ``[Q, ...]``, of any dtype.
      varying: marks arrays as varying over the devices.
    """
    first = jax.tree.map(lambda x: x[0], (stacks, scanned))
    run, closed_over = jax.closure_convert(run, carry, gather(first[0]), first[1])

    @jax.custom_vjp
    def loop(carry: Any, stacks: Any, scanned: Any, consts: Any) -> Any:
        return _forward(run, gather, carry, stacks, scanned, consts)[0]

    def fwd(carry: Any, stacks: Any, scanned: Any, consts: Any) -> Any:
        out, carries = _forward(run, gather, carry, stacks, scanned, consts)
        return out, (carries, stacks, scanned, consts)

    def bwd(kept: Any, cotangents: Any) -> Any:
        return _backward(run, gather, kept, cotangents)

    loop.defvjp(fwd, bwd)
    # varying before the loop: the sum over the devices of their gradients is taken once, after it
    return loop(carry, stacks, scanned, varying(closed_over))


def _forward(
    run: Any, gather: Any, carry: Any, stacks: Any, scanned: Any, consts: Any
) -> tuple[Any, Any]:
    """The result, and the carry before every group."""

    def body(state: Any, inputs: Any) -> Any:
        carry, whole = state
        stack, x = inputs
        ahead = gather(stack)
        after, y = run(carry, whole, x, *consts)
        return (after, ahead), (carry, y)

    start, last = _at(stacks, 0), _at(scanned, -1)
    (carry, whole), (carries, ys) = lax.scan(
        body, (carry, gather(start)), (_cut(stacks, 1, None), _cut(scanned, 0, -1))
    )
    after, y = run(carry, whole, last, *consts)
    return (after, _append(ys, y)), _append(carries, carry)


def _backward(run: Any, gather: Any, kept: Any, cotangents: Any) -> tuple[Any, ...]:
    carries, stacks, scanned, consts = kept
    d_after, d_ys = (_Split(tree).floating for tree in cotangents)

    def group(carry: Any, whole: Any, x: Any, d_after: Any, d_y: Any) -> Any:
        carry, x = _Split(carry), _Split(x)

        def floating(c: Any, whole: Any, x_: Any, consts: Any) -> Any:
            after, y = run(carry.joined(c), whole, x.joined(x_), *consts)
            return _Split(after).floating, _Split(y).floating

        _, back = jax.vjp(floating, carry.floating, whole, x.floating, consts)
        return back((d_after, d_y))

    def scattered(stack: Any, d_whole: Any) -> Any:
        return jax.vjp(gather, stack)[1](d_whole)[0]

    def body(state: Any, inputs: Any) -> Any:
        d_after, whole, d_consts = state
        (stack, before), carry, x, d_y = inputs
        ahead = gather(before)
        d_carry, d_whole, d_x, d_own = group(carry, whole, x, d_after, d_y)
        d_consts = jax.tree.map(jnp.add, d_consts, d_own)
        return (d_carry, ahead, d_consts), (scattered(stack, d_whole), d_x)

    later = (_cut(stacks, 1, None), _cut(stacks, 0, -1))
    inputs = (later, *(_cut(tree, 1, None) for tree in (carries, scanned, d_ys)))
    state = (d_after, gather(_at(stacks, -1)), jax.tree.map(jnp.zeros_like, consts))
    (d_after, whole, d_consts), (d_stacks, d_xs) = lax.scan(body, state, inputs, reverse=True)
    d_carry, d_whole, d_x, d_own = group(
        _at(carries, 0), whole, _at(scanned, 0), d_after, _at(d_ys, 0)
    )
    d_consts = jax.tree.map(jnp.add, d_consts, d_own)
    d_stacks = _prepend(scattered(_at(stacks, 0), d_whole), d_stacks)
    # the cotangent of an integer or a key is None
    d_carry = _Split(carries).joined(d_carry, none=True)
    d_scanned = _Split(scanned).joined(_prepend(d_x, d_xs), none=True)
    return d_carry, d_stacks, d_scanned, d_consts


class _Split:
    """A tree as the list of its floating leaves, and the others."""

    def __init__(self, tree: PyTree) -> None:
        self.leaves, self.treedef = jax.tree.flatten(tree)
        self.floats = [jnp.issubdtype(x.dtype, jnp.inexact) for x in self.leaves]
        self.floating = [x for x, own in zip(self.leaves, self.floats, strict=True) if own]

    def joined(self, floating: list[Any], *, none: bool = False) -> PyTree:
        """The tree with other floating leaves (``none``: and None for what is not)."""
        new = iter(floating)
        leaves = [
            next(new) if own else None if none else x
            for x, own in zip(self.leaves, self.floats, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, leaves)


def _at(tree: PyTree, k: int) -> PyTree:
    return jax.tree.map(lambda x: x[k], tree)


def _cut(tree: PyTree, start: int, stop: int | None) -> PyTree:
    return jax.tree.map(lambda x: x[start:stop], tree)


def _append(xs: PyTree, x: PyTree) -> PyTree:
    return jax.tree.map(lambda many, one: jnp.concatenate([many, one[None]]), xs, x)


def _prepend(x: PyTree, xs: PyTree) -> PyTree:
    return jax.tree.map(lambda one, many: jnp.concatenate([one[None], many]), x, xs)
