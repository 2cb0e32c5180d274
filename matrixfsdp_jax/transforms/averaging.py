"""Iterate averaging after a preconditioned direction: momentum, primal averaging, schedule-free.

Elementwise on any tree. The order of operations is that of the reference implementation of
Distributed Shampoo (facebookresearch/optimizers).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from matrixfsdp_jax.transforms.checks import check_flags, check_number
from matrixfsdp_jax.transforms.stacks import wide

PyTree = Any
ScalarOrSchedule = Any


@dataclass(frozen=True)
class ClassicMomentum:
    """``M <- momentum M + (1 - dampening) P``; the step is ``M``.

    With ``use_nesterov`` the step is ``(1 - dampening) P + momentum M``. Unlike ``torch.optim.SGD``
    the first ``P`` is damped too.
    """

    momentum: float = 0.5
    dampening: float = 0.0
    use_nesterov: bool = False

    def __post_init__(self) -> None:
        check_number("momentum", self.momentum, low=0.0, below=1.0, above_low=True, static=True)
        check_number("dampening", self.dampening, low=0.0, below=1.0, static=True)
        check_flags(use_nesterov=self.use_nesterov)


@dataclass(frozen=True)
class GeneralizedPrimalAveraging:
    """Train at ``Y``, a mix of the fast iterate ``Z`` and its average ``X``; evaluate at ``X``.

    Weight decay that is not ``"l2"`` shrinks ``Z`` alone, as in the reference. ``X`` is worked out
    from ``Y`` and ``Z``, so with it ``X`` is no mean of past ``Z``.
    """

    eval_interp_coeff: float = 0.9
    train_interp_coeff: float = 0.8

    def __post_init__(self) -> None:
        check_number("eval_interp_coeff", self.eval_interp_coeff, low=0.0, below=1.0, static=True)
        _check_train_coefficient(self.train_interp_coeff)


@dataclass(frozen=True)
class ScheduleFree:
    """As above, with a running average of ``Z`` weighted by powers of the learning rate.

    Weight decay acts as above.
    """

    train_interp_coeff: float = 0.8
    eval_coeff_lr_power: float = 2.0

    def __post_init__(self) -> None:
        _check_train_coefficient(self.train_interp_coeff)
        check_number("eval_coeff_lr_power", self.eval_coeff_lr_power, static=True)


def _check_train_coefficient(value: float) -> None:
    check_number("train_interp_coeff", value, static=True)
    if not 0 < value <= 1:
        raise ValueError(f"train_interp_coeff={value} must be in (0, 1]")


class MomentumBuffer(NamedTuple):
    """buffer: the momentum, in the structure of the updates."""

    buffer: PyTree


def classic_momentum(options: ClassicMomentum) -> optax.GradientTransformation:
    """``ClassicMomentum`` of a direction."""
    b, w = options.momentum, 1 - options.dampening

    def init(params: PyTree) -> MomentumBuffer:
        return MomentumBuffer(
            jax.tree.map(lambda p: jnp.zeros_like(p, dtype=wide(p.dtype)), params)
        )

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        del params
        buffer = jax.tree.map(lambda u, m: b * m + w * u.astype(m.dtype), updates, state.buffer)
        if not options.use_nesterov:
            return buffer, MomentumBuffer(buffer)
        new = jax.tree.map(lambda u, m: w * u.astype(m.dtype) + b * m, updates, buffer)
        return new, MomentumBuffer(buffer)

    return optax.GradientTransformation(init, update)


class AveragingState(NamedTuple):
    """State of ``averaged_step``.

    count: number of updates made, int32.
    lr_sum: sum of the powers of the learning rate, float32 (``ScheduleFree``).
    z: the fast iterate, in the structure of the parameters.
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, as optax states do
    lr_sum: jax.Array
    z: PyTree


def averaged_step(
    options: GeneralizedPrimalAveraging | ScheduleFree,
    learning_rate: ScalarOrSchedule,
    shrink: Callable[[PyTree, Any, jax.Array], PyTree],
) -> optax.GradientTransformation:
    """From a direction to the update of the training iterate, learning rate included.

    Args:
      options: which average.
      learning_rate: a number or a schedule.
      shrink: ``shrink(z, learning_rate, count)`` is ``z`` after weight decay.
    """
    y = options.train_interp_coeff

    def init(params: PyTree) -> AveragingState:
        z = jax.tree.map(lambda p: jnp.array(p, dtype=wide(p.dtype)), params)
        return AveragingState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32), z)

    def update(updates: PyTree, state: AveragingState, params: PyTree = None) -> tuple[PyTree, Any]:
        if params is None:
            raise ValueError("averaging needs the parameters: tx.update(grads, state, params)")
        lr = learning_rate(state.count) if callable(learning_rate) else learning_rate
        lr_sum = state.lr_sum
        if isinstance(options, ScheduleFree):
            power = jnp.asarray(lr, jnp.float32) ** options.eval_coeff_lr_power
            lr_sum = lr_sum + power
            x: Any = 1 - power / jnp.where(lr_sum == 0, 1.0, lr_sum)
        else:
            x = options.eval_interp_coeff
        z = shrink(state.z, lr, state.count)
        behind = jax.tree.map(lambda z, p: z - p.astype(z.dtype), z, params)
        steps = jax.tree.map(lambda u, z: -lr * u.astype(z.dtype), updates, z)
        z = jax.tree.map(jnp.add, z, steps)
        new = jax.tree.map(lambda s, d: (1 - x * y) * s + (1 - x) * d, steps, behind)
        return new, AveragingState(optax.safe_increment(state.count), lr_sum, z)

    return optax.GradientTransformation(init, update)
