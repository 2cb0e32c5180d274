"""Muon as two pure transforms: momentum, and the orthogonalisation of stacks of matrices.

Neither knows a mesh. Momentum is elementwise and works on any tree; the orthogonalisation works
on ``{class key: [..., W, m, n]}``.

Reference: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from matrixfsdp_jax.layout.leaves import is_masked
from matrixfsdp_jax.linalg.algorithms import MIN_SYMMETRIC_ROWS
from matrixfsdp_jax.linalg.norms import Reduce
from matrixfsdp_jax.linalg.orthogonalize import orthogonalize
from matrixfsdp_jax.linalg.split import orthogonalize_split
from matrixfsdp_jax.transforms.checks import check_dtype, check_flags, check_number
from matrixfsdp_jax.transforms.stacks import wide

PyTree = Any
ScalarOrSchedule = Any
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
    if momentum_dtype is not None:
        # Eight bits would underflow.
        allowed = ("bfloat16", "float16", "float32", "float64")
        momentum_dtype = check_dtype("momentum_dtype", momentum_dtype, allowed)

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


def orthogonalize_stacks(
    *,
    ns_steps: int = 5,
    ns_coefficients: Any = "keller",
    eps: float = 1e-8,
    ns_dtype: Any = None,
    ns_algorithm: Any = "auto",
    exact: bool = False,
    split: Mapping[str, tuple[Reduce, Reduce]] | None = None,
) -> optax.GradientTransformation:
    """Replace every matrix by its Newton-Schulz orthogonalisation.

    Args:
      ns_steps: number of Newton-Schulz steps.
      ns_coefficients: name of a coefficient table, or its rows.
      eps: added to the norm of a matrix whose largest entry was scaled into [1, 2).
      ns_dtype: dtype of the iteration; see ``linalg.orthogonalize``.
      ns_algorithm: form of the iteration; see ``linalg.orthogonalize``.
      exact: the polar factor by SVD instead.
      split: class key -> ``(sum_over, max_over)`` of the devices that hold the columns of its
        matrices in parts; see ``linalg.orthogonalize_split``. ``ns_algorithm="auto"`` is then the
        Gram form.

    Stateless. A zero matrix (a pad slot) stays exactly zero.
    """
    check_number("eps", eps, low=0.0, above_low=True)
    check_flags(exact=exact)
    split = {} if split is None else split
    if split and exact:
        raise ValueError(
            "exact=True takes whole matrices, and here their columns are split over devices; plan "
            "without tensor_axis, with that axis in owner_axis"
        )
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
            if is_masked(stack):
                return stack
            with jax.named_scope(f"newton_schulz/{key}"):
                if key not in split:
                    return orthogonalize(stack, **options)
                return _split(stack, *split[key], **options)

        return {key: one(key, stack) for key, stack in updates.items()}, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _split(
    stack: jax.Array,
    sum_over: Reduce,
    max_over: Reduce,
    *,
    algorithm: Any,
    exact: bool,
    **options: Any,
) -> jax.Array:
    del exact
    if algorithm == "auto":
        symmetric = stack.shape[-2] >= MIN_SYMMETRIC_ROWS
        algorithm = "gram_symmetric" if symmetric else "gram"
    return orthogonalize_split(
        stack, sum_over=sum_over, max_over=max_over, algorithm=algorithm, **options
    )


def _bias_corrections(beta: Any, count: jax.Array, nesterov: bool) -> tuple[Any, Any]:
    """Divisors of the averaged and of the gradient part (``optax.contrib.muon``'s convention)."""
    averaged = 1 - beta ** (count + 1 if nesterov else count)
    return averaged, 1 - beta**count
