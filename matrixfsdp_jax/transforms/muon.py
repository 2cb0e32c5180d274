"""Muon as two pure transforms: momentum, and the orthogonalisation of stacks of matrices.

Neither knows a mesh. Momentum is elementwise and works on any tree; the orthogonalisation works
on ``{class key: [..., W, m, n]}``.

Reference: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
"""

from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from matrixfsdp_jax.linalg.orthogonalize import orthogonalize

PyTree = Any
ScalarOrSchedule = Any
Tables = Mapping[str, np.ndarray]
Local = Callable[[np.ndarray], jax.Array]
MomentumRule = Literal["ema", "sum"]


class MuonState(NamedTuple):
    """State of ``scale_by_momentum``.

    count: number of updates made, int32.
    mu: momentum (average or decaying sum of the gradients), in the structure of the updates.
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, as optax states do
    mu: PyTree


def scale_by_momentum(
    momentum: ScalarOrSchedule = 0.95,
    *,
    nesterov: bool = True,
    momentum_rule: MomentumRule = "ema",
    bias_correction: bool = False,
    momentum_dtype: Any = None,
) -> optax.GradientTransformation:
    """Muon's momentum: ``m <- b m + w g``, output ``b m + w g`` (Nesterov) or ``m``.

    Args:
      momentum: ``b`` in [0, 1), or a schedule of the number of updates already made.
      nesterov: whether the gradient is mixed in once more.
      momentum_rule: ``"ema"``: ``w = 1 - b``, an average (Keller Jordan, torch, optax);
        ``"sum"``: ``w = 1``, a decaying sum (Moonlight, dion). From a zero state and with a
        constant ``b`` the outputs differ by the factor ``1 - b`` alone, which an orthogonalisation
        removes; the states are not interchangeable.
      bias_correction: divide as ``optax.contrib.muon`` does: at update ``t`` (from 1) the
        averaged part by ``1 - b**(t+1)`` under Nesterov (``1 - b**t`` without) and the gradient
        part by ``1 - b**t``. Only of an average, and not with a schedule.
      momentum_dtype: dtype of the state; None keeps float32 (float64 for float64 gradients).

    Numerics: computed and returned in float32 (float64 for float64 gradients).
    """
    check_number("momentum", momentum, low=0.0, below=1.0, schedule=True)
    check_flags(nesterov=nesterov, bias_correction=bias_correction)
    if momentum_rule not in get_args(MomentumRule):
        raise ValueError(f"momentum_rule={momentum_rule!r} must be one of {get_args(MomentumRule)}")
    if bias_correction and (callable(momentum) or momentum_rule == "sum"):
        raise ValueError(
            "bias_correction=True corrects an average with a constant momentum; it needs a number "
            f'and momentum_rule="ema", got momentum={momentum!r} and '
            f"momentum_rule={momentum_rule!r}"
        )
    momentum_dtype = _checked_dtype(momentum_dtype)

    def init(params: PyTree) -> MuonState:
        def zeros(p: Any) -> jax.Array:
            return jnp.zeros_like(p, dtype=momentum_dtype or wide(p.dtype))

        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(zeros, params))

    def update(updates: PyTree, state: MuonState, params: PyTree = None) -> tuple[PyTree, Any]:
        del params
        beta = momentum(state.count) if callable(momentum) else momentum
        weight = 1 if momentum_rule == "sum" else 1 - beta
        count = optax.safe_increment(state.count)

        def average(g: jax.Array, m: jax.Array) -> jax.Array:
            dtype = wide(g.dtype)
            return beta * m.astype(dtype) + weight * g.astype(dtype)

        averaged = jax.tree.map(average, updates, state.mu)
        corrections = _bias_corrections(beta, count, nesterov) if bias_correction else (1.0, 1.0)

        def direction(g: jax.Array, m: jax.Array) -> jax.Array:
            m = m / corrections[0]
            return beta * m + weight * g.astype(m.dtype) / corrections[1] if nesterov else m

        mu = jax.tree.map(lambda new, old: new.astype(old.dtype), averaged, state.mu)
        return jax.tree.map(direction, updates, averaged), MuonState(count, mu)

    return optax.GradientTransformation(init, update)


def _checked_dtype(dtype: Any) -> Any:
    """A dtype that can hold a momentum: 8 bits underflow, 64 bits need JAX's x64 mode."""
    if dtype is None:
        return None
    allowed = ("bfloat16", "float16", "float32", "float64")
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in allowed:
        raise ValueError(f"momentum_dtype={dtype!r} must be one of {allowed}, or None")
    if jax.dtypes.canonicalize_dtype(found) != found:
        raise ValueError("momentum_dtype='float64' needs JAX's x64 mode: jax.enable_x64(True)")
    return found


def orthogonalize_stacks(
    *,
    ns_steps: int = 5,
    ns_coefficients: Any = "keller",
    eps: float = 1e-8,
    ns_dtype: Any = None,
    ns_algorithm: Any = "auto",
    exact: bool = False,
) -> optax.GradientTransformation:
    """Replace every matrix by its Newton-Schulz orthogonalisation.

    Args:
      ns_steps: number of Newton-Schulz steps.
      ns_coefficients: name of a coefficient table, or its rows.
      eps: added to the norm of a matrix whose largest entry was scaled into [1, 2).
      ns_dtype: dtype of the iteration; see ``linalg.orthogonalize``.
      ns_algorithm: form of the iteration; see ``linalg.orthogonalize``.
      exact: the polar factor by SVD instead.

    Stateless. A zero matrix (a pad slot) stays exactly zero.
    """
    check_number("eps", eps, low=0.0, above_low=True)
    check_flags(exact=exact)
    one_by_one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    options = {
        "steps": ns_steps,
        "coefficients": ns_coefficients,
        "eps": eps,
        "dtype": ns_dtype,
        "algorithm": ns_algorithm,
        "exact": exact,
    }
    jax.eval_shape(partial(orthogonalize, **options), one_by_one)  # bad options raise here

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        del params

        def one(key: str, stack: jax.Array) -> jax.Array:
            if isinstance(stack, optax.MaskedNode):
                return stack
            with jax.named_scope(f"newton_schulz/{key}"):
                return orthogonalize(stack, **options)

        return {key: one(key, stack) for key, stack in updates.items()}, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def scale_stacks(factors: Tables, local: Local) -> optax.GradientTransformation:
    """Multiply every matrix by its own factor.

    Args:
      factors: class key -> float table ``[N, W]``, one factor per slot.
      local: the part of such a table that belongs to the stacks at hand.
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
        if isinstance(stack, optax.MaskedNode):
            return stack
        dtype = wide(stack.dtype)
        factor = local(tables[key]).astype(dtype)
        return stack.astype(dtype) * jnp.expand_dims(factor, range(factor.ndim, stack.ndim))

    return {key: times(key, stack) for key, stack in stacks.items()}


def wide(dtype: Any) -> Any:
    """The dtype in which optimizer arithmetic on ``dtype`` is done: at least float32."""
    return jnp.promote_types(jnp.float32, dtype)


def _bias_corrections(beta: Any, count: jax.Array, nesterov: bool) -> tuple[Any, Any]:
    """Divisors of the averaged and of the gradient part (``optax.contrib.muon``'s convention)."""
    averaged = 1 - beta ** (count + 1 if nesterov else count)
    return averaged, 1 - beta**count


def check_number(
    name: str,
    value: Any,
    *,
    low: float,
    below: float | None = None,
    above_low: bool = False,
    schedule: bool = False,
) -> None:
    """Refuse what is no number in its range; jax arrays (and schedules, if allowed) pass.

    Raises:
      TypeError: for another type.
      ValueError: for a Python or numpy number outside its range. Both name argument and value.
    """
    if isinstance(value, jax.Array) or (schedule and callable(value)):
        return
    if isinstance(value, (bool, np.bool)) or not isinstance(value, Real):
        kind = "a number or a schedule" if schedule else "a number"
        raise TypeError(f"{name}={value!r} must be {kind}, got {type(value).__name__}")
    x = float(value)
    in_range = (x > low if above_low else x >= low) and (below is None or x < below)
    if not (np.isfinite(x) and in_range):
        bounds = f"> {low}" if above_low else f">= {low}"
        bounds += "" if below is None else f" and < {below}"
        raise ValueError(f"{name}={value} must be a finite number {bounds}")


def check_flags(**flags: Any) -> None:
    """Refuse what is no bool.

    Raises: TypeError, naming argument and value.
    """
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool)):
            raise TypeError(f"{name}={value!r} must be True or False")


def check_transformation(name: str, tx: Any) -> None:
    """Refuse what is no optax transformation.

    Raises: TypeError, naming the argument.
    """
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise TypeError(f"{name}={tx!r} must be an optax transformation, such as optax.adamw(3e-4)")
