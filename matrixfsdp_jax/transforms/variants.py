"""Variants of Muon: what each adds before and after the orthogonalisation.

A variant is a ``MuonVariant``, given to ``mfsdp.muon(variant=...)``. Both of its parts are optax
transformations and know no mesh. All statistics are those of one matrix (or of its rows, columns
or entries), so no variant here needs a collective.

Shape legend: ``m <= n`` a stored matrix, ``W`` waves, ``...`` a device dim or nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from matrixfsdp_jax.layout.leaves import is_masked
from matrixfsdp_jax.linalg.batching import matrix_by_matrix
from matrixfsdp_jax.linalg.norms import sum_of_squares
from matrixfsdp_jax.transforms.checks import check_number, check_transformation
from matrixfsdp_jax.transforms.stacks import Local, Tables, wide

PyTree = Any
MakeAfter = Callable[[Tables, Local], optax.GradientTransformation]


def _nothing(row_outputs: Tables, local: Local) -> optax.GradientTransformation:
    del row_outputs, local
    return optax.identity()


@dataclass(frozen=True)
class MuonVariant:
    """What a variant adds to Muon: momentum, ``before``, orthogonalise, ``after``, scale, rate.

    Attributes:
      before: an elementwise, stateless transformation of the momentum.
      after: ``after(row_outputs, local)`` makes a transformation of stacks of orthogonalised
        matrices ``{class key: [..., W, m, n]}``. ``row_outputs`` holds per class a table
        ``[N, W]``: 1 where the output neurons are the rows of the stored matrix, 0 where they are
        its columns; ``local(key, table)`` is the part of it that belongs to the stacks at hand.
        State that belongs to matrices is a dict with the keys of the stacks, of arrays (or trees of
        arrays) that begin with ``[..., W]``; everything else in the state is shared. Zero matrices
        (pad slots) must stay exactly zero, and a device may have stacks of some classes only, or of
        none.
    """

    before: optax.GradientTransformation = field(default_factory=optax.identity)
    after: MakeAfter = _nothing

    def __post_init__(self) -> None:
        """Refuse what is no transformation, or no function that makes one."""
        check_transformation("before", self.before)
        if not callable(self.after):
            raise TypeError(
                f"after={self.after!r} must be a function (row_outputs, local) -> transformation"
            )


class SecondMomentState(NamedTuple):
    """State of ``normuon`` and ``adamuon``.

    nu: class key -> average of the squared orthogonalised momentum, float32 (float64 for float64):
      ``[..., W, n]`` for ``normuon``, one number per output neuron (zero-padded where these are
      the ``m`` rows); ``[..., W, m, n]`` for ``adamuon``.
    """

    nu: PyTree


def normuon(b2: float = 0.95, eps: float = 1e-10, *, keep_norm: bool = True) -> MuonVariant:
    """NorMuon: every output neuron is normalised by its own second moment.

    With ``O`` the orthogonalised momentum of a layer, one row per output neuron::

        v <- b2 v + (1 - b2) mean_over_inputs(O^2)
        O' = O / (sqrt(v) + eps)
        O  <- O' |O|_F / (|O'|_F + eps)          (sqrt(m) for |O|_F without keep_norm)

    Args:
      b2: decay of the second moment, in [0, 1).
      eps: added to its root and to the norm.
      keep_norm: give the matrix back the norm that it had, as the authors' code does. False sets
        it to ``sqrt(m)``, that of an orthogonal matrix; with ``scale="rms_0.2"`` this is the rule
        of the paper, an update of root mean square 0.2.

    Memory: one number per output neuron. Collectives: none.
    Reference: Li et al., "NorMuon: Making Muon more efficient and scalable", arXiv 2510.05491,
    2025, algorithm 1.
    """

    def statistic(o: jax.Array, rows: jax.Array) -> jax.Array:
        m, n = o.shape[-2:]
        by_row = jnp.pad(jnp.mean(o * o, axis=-1), [(0, 0)] * (o.ndim - 2) + [(0, n - m)])
        return jnp.where(rows[..., None], by_row, jnp.mean(o * o, axis=-2))

    return _second_moment(b2, eps, keep_norm, statistic, along_outputs)


def adamuon(b2: float = 0.95, eps: float = 1e-8) -> MuonVariant:
    """AdaMuon: the sign of the momentum is orthogonalised, every entry has a second moment.

    With ``M`` the momentum and ``O`` the orthogonalisation of ``sign(M)``::

        v <- b2 v + (1 - b2) O^2
        O' = O / (sqrt(v) + eps)
        O  <- O' sqrt(m) / (|O'|_F + eps)

    With ``scale="rms_0.2"`` this is the rule of the paper, an update of root mean square 0.2. A
    bias correction of ``v`` would cancel in the norm, so there is none.

    Args:
      b2: decay of the second moment, in [0, 1). The paper takes that of the momentum.
      eps: added to its root and to the norm.

    Memory: one number per entry. Collectives: none.
    Reference: Si et al., "AdaMuon: Adaptive Muon Optimizer", arXiv 2507.11005, 2025.
    """
    sign = optax.stateless(lambda updates, params: jax.tree.map(jnp.sign, updates))
    moment = _second_moment(b2, eps, False, lambda o, rows: o * o, lambda v, shape, rows: v)
    return MuonVariant(sign, moment.after)


def _second_moment(
    b2: float,
    eps: float,
    keep_norm: bool,
    statistic: Callable[[jax.Array, jax.Array], jax.Array],
    spread: Callable[[jax.Array, tuple[int, ...], jax.Array], jax.Array],
) -> MuonVariant:
    """Divide by the root of an averaged ``statistic``, then set the norm of each matrix.

    ``statistic(o, rows)`` is what is averaged, ``spread(nu, o.shape, rows)`` its value at every
    entry; ``rows`` is ``[..., W]``, whether the outputs are the rows of the stored matrix.
    """
    check_number("b2", b2, low=0.0, below=1.0)
    check_number("eps", eps, low=0.0, above_low=True)

    def normalized(o: jax.Array, nu: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        nu = b2 * nu + (1 - b2) * statistic(o, rows)
        out = o / (jnp.sqrt(spread(nu, o.shape, rows)) + eps)
        # A zero matrix keeps the norm 0 either way: 0 * sqrt(m) / eps.
        target = sum_of_squares(o) if keep_norm else jnp.asarray(o.shape[-2], o.dtype)
        return out * (jnp.sqrt(target) / (jnp.sqrt(sum_of_squares(out)) + eps)), nu

    def after(row_outputs: Tables, local: Local) -> optax.GradientTransformation:
        def zeros(stack: Any) -> jax.Array:
            o = jnp.zeros_like(stack, dtype=wide(stack.dtype))
            return statistic(o, o[..., 0, 0] > 0)

        def init(stacks: PyTree) -> SecondMomentState:
            return SecondMomentState(jax.tree.map(zeros, stacks))

        def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
            del params
            new, nu = dict(updates), dict(state.nu)
            for key, stack in updates.items():
                if is_masked(stack):
                    continue
                rows = local(key, row_outputs[key]) > 0
                o = stack.astype(nu[key].dtype)
                new[key], nu[key] = matrix_by_matrix(normalized, o, nu[key], rows)
            return new, SecondMomentState(nu)

        return optax.GradientTransformation(init, update)

    return MuonVariant(after=after)


def along_outputs(v: jax.Array, shape: tuple[int, ...], rows: jax.Array) -> jax.Array:
    """One number per output neuron ``[..., k]`` at every entry of matrices of ``shape``.

    ``k`` is the longer side, ``rows`` is ``[...]``, whether the neurons are the rows. The first
    numbers count, as many as there are neurons.
    """
    m, n = shape[-2:]
    by_row = jnp.broadcast_to(v[..., :m, None], shape)
    by_col = jnp.broadcast_to(v[..., None, :n], shape)
    return jnp.where(rows[..., None, None], by_row, by_col)
