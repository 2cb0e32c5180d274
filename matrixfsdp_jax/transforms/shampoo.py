"""Shampoo and SOAP as transforms of owner stacks ``{class key: [1, W, *dims]}``.

Reference: Shi et al., "A Distributed Data-Parallel PyTorch Implementation of the Distributed
Shampoo Optimizer for Training Neural Networks At-Scale", arXiv 2309.06497, 2023, and its code
(facebookresearch/optimizers), whose order of operations this follows; Gupta, Koren, Singer,
"Shampoo", arXiv 1802.09568, 2018; Vyas et al., "SOAP", arXiv 2409.11321, 2024.

Shape legend: ``W`` waves, ``B`` blocks of one shape per tensor.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from matrixfsdp_jax.layout.costs import check_dim
from matrixfsdp_jax.layout.leaves import is_masked
from matrixfsdp_jax.layout.phases import Units
from matrixfsdp_jax.linalg.roots import PseudoInverse
from matrixfsdp_jax.transforms.blocking import Blocking
from matrixfsdp_jax.transforms.checks import check_number
from matrixfsdp_jax.transforms.preconditioners import Context
from matrixfsdp_jax.transforms.refresh import Schedule, refresh_units
from matrixfsdp_jax.transforms.stacks import Local, wide

PyTree = Any
# Added to the norm of the preconditioned direction under grafting, as in the reference.
_GRAFT_EPSILON = 1e-16


class ShampooState(NamedTuple):
    """State of ``precondition_stacks``.

    count: number of updates made, int32.
    filtered: class key -> per group of blocks the average of the gradients ``[1, W, B, *shape]``
      (nothing if ``beta1 = 0``).
    preconditioner, grafting: class key -> per group the state of the preconditioner.
    failures: class key -> per group ``[1, W, B]`` int32, refreshes that failed in a row.
    nonfinite: the same, refreshes that met a factor with an infinity or a NaN.
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, as optax states do
    filtered: PyTree
    preconditioner: PyTree
    grafting: PyTree
    failures: PyTree
    nonfinite: PyTree


@dataclass(frozen=True)
class ShampooOptions:
    """The options of ``precondition_stacks``, named as in the reference; see ``mfsdp.shampoo``."""

    betas: tuple[float, float]
    beta3: float
    epsilon: float
    max_preconditioner_dim: float
    target_parameter_dimensionality: float
    use_bias_correction: bool
    preconditioner: Any
    grafting: Any
    schedule: Schedule
    skip_first: bool = False

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
            raise TypeError(f"betas={self.betas!r} must be a pair of numbers")
        for name in ("preconditioner", "grafting"):
            record = getattr(self, name)
            if isinstance(record, type) or not hasattr(record, "direction"):
                if name == "grafting" and record is None:
                    continue
                raise TypeError(
                    f"{name}={record!r} must be a record such as mfsdp.AdamGrafting() or "
                    "mfsdp.RootInverse()"
                )
            if record.refreshes:
                record.check()
        beta1, beta2 = self.betas
        check_number("betas[0]", beta1, low=0.0, below=1.0, static=True)
        check_number("betas[1]", beta2, low=0.0, static=True)
        check_number("beta3", self.beta3, low=0.0, below=1.0, static=True)
        if not 0 < beta2 <= 1 and not (beta2 == 0 and not self.preconditioner.refreshes):
            raise ValueError(f"betas[1]={beta2} must be in (0, 1]; 1 sums")
        for name in ("max_preconditioner_dim", "target_parameter_dimensionality"):
            check_dim(name, getattr(self, name))
        rule = self.preconditioner.rank_deficiency if self.preconditioner.refreshes else None
        if isinstance(rule, PseudoInverse):
            if self.epsilon != 0:
                raise ValueError(f"epsilon={self.epsilon} must be 0 with PseudoInverse")
        else:
            check_number("epsilon", self.epsilon, low=0.0, above_low=True, static=True)

    def blocking(self, dims: tuple[int, ...]) -> Blocking:
        """How a tensor of ``dims`` is cut."""
        return Blocking(dims, self.max_preconditioner_dim, self.target_parameter_dimensionality)

    def units(self, dims: tuple[int, ...]) -> Units:
        """``(B, sum of k^3 over the preconditioned dims)`` of each group."""
        costs = []
        for group in self.blocking(dims).groups:
            order = len(group.shape)
            used = self.preconditioner.dims(order) if self.preconditioner.refreshes else ()
            costs.append((group.num_blocks, float(sum(group.shape[d] ** 3 for d in used))))
        return tuple(costs)

    def filter(self, old: Any, g: jax.Array, step: jax.Array) -> tuple[Any, jax.Array]:
        """The new average, and the filtered gradient that is preconditioned."""
        beta1 = self.betas[0]
        if beta1 == 0:
            return old, g
        average = old + (1 - beta1) * (g - old)
        used = average if self.beta3 == beta1 else old + (1 - self.beta3) * (g - old)
        if self.use_bias_correction:
            power = jnp.asarray(beta1, g.dtype) ** (step - 1).astype(g.dtype)
            used = used / (1 - self.beta3 * power)
        return average, used


def precondition_stacks(
    dims: Mapping[str, tuple[int, ...]],
    phases: Mapping[str, Sequence[np.ndarray]],
    local: Local,
    options: ShampooOptions,
) -> optax.GradientTransformation:
    """The direction of Shampoo or SOAP, before decay, momentum and learning rate.

    Args:
      dims: class key -> dims of a tensor of the class.
      phases: class key -> per group of blocks the phase ``[N, W, B]`` in which each is decomposed;
        in slots without a tensor the number of phases.
      local: the part of such a table that belongs to the stacks at hand.
      options: the options.

    Collectives: none. A zero slot (a pad) gives exactly zero and is never decomposed.
    """
    blockings = {key: options.blocking(shape) for key, shape in dims.items()}

    def init(stacks: PyTree) -> ShampooState:
        parts = {key: _init_class(blockings[key], x, options) for key, x in stacks.items()}
        return ShampooState(jnp.zeros((), jnp.int32), *_transposed(parts))

    def update(
        updates: PyTree, state: ShampooState, params: PyTree = None
    ) -> tuple[PyTree, ShampooState]:
        del params
        step = optax.safe_increment(state.count)
        new, parts = dict(updates), {}
        for key, stack in updates.items():
            old = _ClassState(*(field[key] for field in state[1:]))
            if is_masked(stack):
                parts[key] = old
                continue
            with jax.named_scope(f"shampoo/{key}"):
                new[key], parts[key] = _update_class(
                    blockings[key], stack, old, phases[key], step, partial(local, key), options
                )
        return new, ShampooState(step, *_transposed(parts))

    return optax.GradientTransformation(init, update)


class _ClassState(NamedTuple):
    """The part of a ``ShampooState`` of one class: one entry per group of blocks in each field."""

    filtered: Any
    preconditioner: Any
    grafting: Any
    failures: Any
    nonfinite: Any


def _transposed(parts: Mapping[str, _ClassState]) -> list[dict[str, Any]]:
    """Classes of fields to fields of classes."""
    return [{key: part[i] for key, part in parts.items()} for i in range(len(_ClassState._fields))]


def _init_class(blocking: Blocking, stack: Any, options: ShampooOptions) -> _ClassState:
    if is_masked(stack):
        return _ClassState((), (), (), (), ())
    groups = []
    for zeros in blocking.split(jnp.zeros_like(stack, dtype=wide(stack.dtype))):
        order = len(blocking.merged)
        counts = zeros.reshape(*zeros.shape[: zeros.ndim - order], -1)[..., 0].astype(jnp.int32)
        graft = options.grafting
        groups.append(
            _ClassState(
                zeros if options.betas[0] else (),
                options.preconditioner.init(zeros, order),
                () if graft is None else graft.init(zeros, order),
                counts,
                counts,
            )
        )
    return _by_field(groups)


def _by_field(groups: list[Any]) -> _ClassState:
    return _ClassState(*(tuple(group[i] for group in groups) for i in range(5)))


def _update_class(
    blocking: Blocking,
    stack: jax.Array,
    state: _ClassState,
    phases: Sequence[np.ndarray],
    step: jax.Array,
    local: Callable[[np.ndarray], jax.Array],
    options: ShampooOptions,
) -> tuple[jax.Array, _ClassState]:
    parts, groups = [], []
    gradients = blocking.split(stack.astype(wide(stack.dtype)))
    _, beta2 = options.betas
    for i, (group, g) in enumerate(zip(blocking.groups, gradients, strict=True)):
        order = len(group.shape)
        ctx = Context(order, step, beta2, options.epsilon, options.use_bias_correction)
        own = _ClassState(*(field[i] for field in state))
        out, own = _update_group(g, own, local(phases[i]), ctx, options)
        parts.append(out)
        groups.append(own)
    return blocking.join(parts), _by_field(groups)


def _update_group(
    g: jax.Array,
    state: Any,
    phases: jax.Array,
    ctx: Context,
    options: ShampooOptions,
) -> tuple[jax.Array, Any]:
    method, graft = options.preconditioner, options.grafting
    first = ctx.step == 1
    own = method.accumulate(state.preconditioner, g, ctx)
    failures, nonfinite = state.failures, state.nonfinite
    if method.refreshes and method.dims(ctx.order):
        own, failures, nonfinite = refresh_units(
            lambda unit: method.refresh(unit, ctx),
            own,
            failures,
            nonfinite,
            phases,
            options.schedule,
            ctx.step,
        )
    if options.skip_first:  # moments begin with the second gradient
        ctx = ctx._replace(step=jnp.maximum(ctx.step - 1, 1))
    moments = method.finish(own, g, ctx)
    grafting = state.grafting
    if graft is not None:  # never refreshed: a graft with factors keeps its first roots or basis
        grafting = graft.finish(graft.accumulate(grafting, g, ctx), g, ctx)
    average, used = options.filter(state.filtered, g, ctx.step)
    direction = method.direction(moments, used, ctx)
    if graft is not None:
        plain = graft.direction(grafting, used, ctx)
        norm = _block_norm(direction, ctx.order)
        grafted = direction * (_block_norm(plain, ctx.order) / (norm + _GRAFT_EPSILON))
        direction = jnp.where(ctx.step < options.schedule.start, plain, grafted)
    new = _ClassState(average, moments, grafting, failures, nonfinite)
    if options.skip_first:
        kept = _ClassState(state.filtered, own, state.grafting, failures, nonfinite)
        new = jax.tree.map(lambda a, b: jnp.where(first, a, b), kept, new)
        direction = jnp.where(first, jnp.zeros_like(direction), direction)
    return direction, new


def _block_norm(x: jax.Array, order: int) -> jax.Array:
    axes = tuple(range(x.ndim - order, x.ndim))
    return jnp.sqrt(jnp.sum(x * x, axis=axes, keepdims=True))
