"""The Newton-Schulz iteration on normalized matrices, in two forms and with two kinds of products.

Shape legend: ``[..., m, n]`` with ``m <= n``; ``x`` the matrices, ``gram`` their ``X X^H`` and
every polynomial of it ``[..., m, m]``. All arrays are stored in the dtype of the iteration; sums
and products accumulate in ``wide``, float32 or wider, and are rounded once when they are stored.
"""

import functools
import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from matrixfsdp_jax.linalg.coefficients import Schedule
from matrixfsdp_jax.linalg.norms import Reduce, unsplit


@dataclass(frozen=True)
class Form:
    """How the iteration is carried out.

    Attributes:
      segments: steps between two restarts of the Gram form; empty for the standard form.
      edges: rows where the blocks of a symmetric product end, from 0 to ``m``; ``(0, m)`` is one
        general product.
      dtype: what arrays are stored in.
      wide: what is accumulated in.
      sum_over: sums the Gram matrices of parts of the columns of ``X``, in ``wide``.
    """

    segments: tuple[int, ...]
    edges: tuple[int, ...]
    dtype: jnp.dtype
    wide: jnp.dtype
    sum_over: Reduce = unsplit


def iterate(x: jax.Array, schedule: Schedule, form: Form) -> jax.Array:
    """Return ``x`` after all steps of ``schedule``, in ``form.dtype``.

    Args:
      x: ``[..., m, n]`` with ``m <= n`` and Frobenius norms at most 1, in ``form.wide``.
      schedule: at least one row, and the start that it needs.
      form: how the products are taken.

    Numerics:
      Memory does not grow with the number of steps: they run in a `jax.lax.scan`.
    """
    x = x.astype(form.dtype)
    gram = None
    if schedule.start != "frobenius":
        x, gram = _start(x, _gram(x, form), schedule.start, form)
    rows = jnp.asarray(schedule.rows, form.wide)
    run = _gram_form if form.segments else _standard_form
    return run(x, gram, rows, schedule.cubic, form)


def _start(x: jax.Array, gram: jax.Array, start: str, form: Form) -> tuple[jax.Array, jax.Array]:
    """Scale ``x`` as the schedule asks, and its wide ``gram`` with it. Zero stays zero."""
    size = jnp.abs(gram)
    tiny = jnp.finfo(size.dtype).tiny
    if start == "aol":
        scale = jax.lax.rsqrt(jnp.maximum(jnp.sum(size, -1, keepdims=True), tiny))
    else:
        norm = jnp.sqrt(jnp.sum(size * size, (-2, -1), keepdims=True))
        scale = jax.lax.rsqrt(jnp.maximum(norm, tiny))
    scale = scale.astype(form.wide)
    scaled = gram * (scale * jnp.swapaxes(scale, -1, -2))  # in this order exactly Hermitian
    return (x.astype(form.wide) * scale).astype(form.dtype), scaled.astype(form.dtype)


def _standard_form(
    x: jax.Array, gram: jax.Array | None, rows: jax.Array, cubic: bool, form: Form
) -> jax.Array:
    """``X <- a X + (b A + c A^2) X`` with ``A = X X^H`` anew in every step."""

    def step(x: jax.Array, row: jax.Array, gram: jax.Array | None = None) -> jax.Array:
        if gram is None:
            gram = _gram(x, form).astype(form.dtype)
        return _add_product(row[0], x, _polynomial(gram, row, cubic, form), x, form)

    if gram is not None:  # The start has already formed it.
        x, rows = step(x, rows[0], gram), rows[1:]
    return jax.lax.scan(lambda x, row: (step(x, row), None), x, rows)[0]


def _gram_form(
    x: jax.Array, gram: jax.Array | None, rows: jax.Array, cubic: bool, form: Form
) -> jax.Array:
    """The same steps on ``A`` alone, collected in ``Q``; ``X <- Q X`` at every restart and the end.

    A restart forms ``A`` from ``X`` again, which makes it positive semidefinite as it should be.
    """
    segment = functools.partial(_segment, cubic=cubic, form=form)
    first, later = form.segments[0], max(form.segments[1:], default=form.segments[0])
    if gram is not None or first != later:
        x, rows = segment(x, gram, rows[:first]), rows[first:]
    equal = len(rows) // later * later
    if equal:
        parts = rows[:equal].reshape(-1, later, 3)
        x, _ = jax.lax.scan(lambda x, rows: (segment(x, None, rows), None), x, parts)
    return segment(x, None, rows[equal:]) if equal < len(rows) else x


def _segment(
    x: jax.Array, gram: jax.Array | None, rows: jax.Array, *, cubic: bool, form: Form
) -> jax.Array:
    """Apply the steps of ``rows`` to ``x`` without a restart."""
    if gram is None:
        gram = _gram(x, form).astype(form.dtype)
    poly = _polynomial(gram, rows[0], cubic, form)
    identity = jnp.broadcast_to(jnp.eye(gram.shape[-1], dtype=form.wide), gram.shape)
    product = (rows[0, 0] * identity + poly.astype(form.wide)).astype(form.dtype)

    def step(
        carry: tuple[jax.Array, jax.Array, jax.Array], rows: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], None]:
        gram, poly, product = carry
        before, row = rows
        for _ in range(2):  # A <- (a I + P) A (a I + P)
            gram = _add_hermitian(before[0], gram, poly, form)
        poly = _polynomial(gram, row, cubic, form)
        return (gram, poly, _add_hermitian(row[0], product, poly, form)), None

    carry, _ = jax.lax.scan(step, (gram, poly, product), (rows[:-1], rows[1:]))
    return _matmul(carry[2], x, form).astype(form.dtype)


def _polynomial(gram: jax.Array, row: jax.Array, cubic: bool, form: Form) -> jax.Array:
    """``b A + c A^2``."""
    poly = row[1] * gram.astype(form.wide)
    if not cubic:
        poly += row[2] * _hermitian(gram, gram, form)
    return poly.astype(form.dtype)


def _add_product(a: jax.Array, x: jax.Array, p: jax.Array, y: jax.Array, form: Form) -> jax.Array:
    """``a X + P Y``."""
    return (a * x.astype(form.wide) + _matmul(p, y, form)).astype(form.dtype)


def _add_hermitian(a: jax.Array, x: jax.Array, p: jax.Array, form: Form) -> jax.Array:
    """``a X + X P`` for two polynomials of one Hermitian matrix, whose product is Hermitian."""
    return (a * x.astype(form.wide) + _hermitian(x, p, form)).astype(form.dtype)


def _hermitian(x: jax.Array, y: jax.Array, form: Form) -> jax.Array:
    """``X Y`` where that is known to be Hermitian, from its blocks on and below the diagonal.

    Not ``X Y^H``, which is the same without rounding: with it the skew part of the rounding errors
    grows from step to step (1.45 times the largest singular value in float16). Blocks on the
    diagonal are mirrored too: a matrix that is Hermitian in part alone loses a digit.
    """
    bounds = list(itertools.pairwise(form.edges))
    if len(bounds) == 1:
        return _matmul(x, y, form)
    lower = [_matmul(x[..., start:stop, :], y[..., :, :stop], form) for start, stop in bounds]
    rows = []
    for i, (start, stop) in enumerate(bounds):
        above = [_adjoint(below[..., :, start:stop]) for below in lower[i + 1 :]]
        square = _mirror(lower[i][..., :, start:])
        rows.append(jnp.concatenate([lower[i][..., :, :start], square, *above], axis=-1))
    return jnp.concatenate(rows, axis=-2)


def _gram(x: jax.Array, form: Form) -> jax.Array:
    """``X X^H`` of the whole matrices, in ``form.wide``.

    A sum over devices may add in another order above the diagonal than below. General products do
    not mind; those from blocks lose up to two digits unless it is mirrored again.
    """
    gram = form.sum_over(_hermitian(x, _adjoint(x), form))
    return gram if form.sum_over is unsplit or len(form.edges) == 2 else _mirror(gram)


def _mirror(x: jax.Array) -> jax.Array:
    """``[..., m, m]`` with what is above the diagonal from below it."""
    return jnp.where(_lower(x.shape), x, _adjoint(x))


def _lower(shape: tuple[int, ...]) -> jax.Array:
    """True on and below the diagonal of ``[..., m, m]``."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - k) for k in (2, 1))
    return row >= column


def _adjoint(x: jax.Array) -> jax.Array:
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _matmul(x: jax.Array, y: jax.Array, form: Form) -> jax.Array:
    # The default precision would round float32 operands on GPU and TPU; half operands are exact.
    exact = form.dtype == form.wide
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
    return jnp.matmul(x, y, precision=precision, preferred_element_type=form.wide)
