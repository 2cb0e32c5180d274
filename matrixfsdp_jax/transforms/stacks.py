"""What transforms of owner stacks share: numbers per slot, scaling and weight decay.

A stack transform works on ``{class key: [..., W, *dims]}``. What differs from matrix to matrix
comes as tables ``[N, W, ...]`` of a class, one entry per slot; ``local(class key, table)`` is the
part that belongs to the stacks at hand.
"""

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from matrixfsdp_jax.layout.leaves import is_masked

PyTree = Any
ScalarOrSchedule = Any
Tables = Mapping[str, np.ndarray]
Local = Callable[[str, Any], jax.Array]


def scale_stacks(factors: Tables, local: Local) -> optax.GradientTransformation:
    """Multiply every matrix by its own factor.

    Args:
      factors: class key -> float table ``[N, W]``, one factor per slot.
      local: the part of the table of a class that belongs to the stacks at hand.
    """

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        del params
        return per_slot(updates, factors, local), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def decay(
    weight_decay: ScalarOrSchedule, mask: Any = None, *, cautious: bool = False
) -> optax.GradientTransformation:
    """``optax.add_decayed_weights``; with ``cautious`` only where it does not oppose the update.

    Args:
      weight_decay: a number, or a schedule of the number of updates already made.
      mask: as in optax.
      cautious: decay only entries whose update has the sign of the parameter, or is zero.

    Reference: Chen et al., "Cautious Weight Decay", arXiv 2510.12402, 2025.
    """
    if isinstance(weight_decay, Real) and weight_decay == 0:
        return optax.identity()
    plain = optax.add_decayed_weights(weight_decay, mask)

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        if params is None:
            raise ValueError("weight decay needs the parameters: tx.update(grads, state, params)")
        params = jax.tree.map(lambda p: p.astype(wide(p.dtype)), params)
        if cautious:
            # Signs, because a product may underflow.
            params = jax.tree.map(
                lambda u, p: jnp.where(jnp.sign(u) * jnp.sign(p) >= 0, p, jnp.zeros_like(p)),
                updates,
                params,
            )
        return plain.update(updates, state, params)

    return optax.GradientTransformation(plain.init, update)


def decay_stacks(
    weight_decay: ScalarOrSchedule, factors: Tables, local: Local, *, cautious: bool = False
) -> optax.GradientTransformation:
    """Add ``weight_decay * factor * params`` to the updates.

    Stands before ``scale_stacks``, with factors divided by its own. The sum then has one product;
    of two, the compiler may fuse either with the addition, and the last bit would depend on the
    number of devices.

    Args:
      weight_decay: a number, or a schedule of the number of updates already made.
      factors: class key -> float table ``[N, W]``, 0 where a matrix is not decayed.
      local: as in ``scale_stacks``.
      cautious: as in ``decay``.
    """
    plain = decay(weight_decay, cautious=cautious)

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        scaled = params if params is None else per_slot(params, factors, local)
        return plain.update(updates, state, scaled)

    return optax.GradientTransformation(plain.init, update)


def per_slot(stacks: dict[str, Any], tables: Tables, local: Local) -> dict[str, Any]:
    """Every matrix times the number of its slot, in float32 or wider."""

    def times(key: str, stack: Any) -> Any:
        if is_masked(stack):
            return stack
        dtype = wide(stack.dtype)
        factor = local(key, tables[key]).astype(dtype)
        return stack.astype(dtype) * jnp.expand_dims(factor, range(factor.ndim, stack.ndim))

    return {key: times(key, stack) for key, stack in stacks.items()}


def wide(dtype: Any) -> Any:
    """The dtype in which optimizer arithmetic on ``dtype`` is done: at least float32."""
    return jnp.promote_types(jnp.float32, dtype)
