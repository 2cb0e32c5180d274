"""A function of one matrix on stacks of them."""

from collections.abc import Callable
from typing import Any

import jax


def matrix_by_matrix(fn: Callable[..., Any], *stacks: jax.Array) -> Any:
    """``fn`` of every matrix: one after the other on CPU, all at once on accelerators.

    On CPU a reduction over a batch sums in an order that depends on the size of the batch; one by
    one, a matrix gets the same bits wherever it lies.

    Args:
      fn: takes and returns arrays (or tuples of them) with any leading dims, and acts on each
        index of these alone.
      *stacks: arrays with the same leading dims, those of the first but for its last two.
    """
    lead = stacks[0].shape[:-2]

    def batched(*flat: jax.Array) -> Any:
        return fn(*flat)

    def mapped(*flat: jax.Array) -> Any:
        return jax.lax.map(lambda one: fn(*one), flat)

    flat = [x.reshape(-1, *x.shape[len(lead) :]) for x in stacks]
    out = jax.lax.platform_dependent(*flat, cpu=mapped, default=batched)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), out)
