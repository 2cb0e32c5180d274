"""Factors on the orthogonal update, from the fan-in and fan-out of a matrix.

An orthogonal ``m x n`` update has root mean square ``1 / sqrt(max(m, n))`` and spectral norm 1,
whatever the shape; the factor decides which of the two is carried from one shape to another.
"""

import math
from collections.abc import Callable

ScaleFn = Callable[[int, int], float]


def _sqrt_max_1_out_in(fan_in: int, fan_out: int) -> float:
    return math.sqrt(max(1.0, fan_out / fan_in))


def _rms_0_2(fan_in: int, fan_out: int) -> float:
    return 0.2 * math.sqrt(max(fan_out, fan_in))


def _sqrt_out_in(fan_in: int, fan_out: int) -> float:
    return math.sqrt(fan_out / fan_in)


def _none(fan_in: int, fan_out: int) -> float:
    return 1.0


# Named by formula: "spectral" means three different things in the literature.
_SCALES: dict[str, tuple[str, ScaleFn]] = {
    "sqrt_max_1_out_in": ("sqrt(max(1, out/in))", _sqrt_max_1_out_in),
    "rms_0.2": ("0.2 sqrt(max(out, in))", _rms_0_2),
    "sqrt_out_in": ("sqrt(out/in)", _sqrt_out_in),
    "none": ("1", _none),
}


def scale_fn(scale: str | ScaleFn) -> ScaleFn:
    """Return the function ``(fan_in, fan_out) -> factor`` that a name stands for.

    ``fan_in`` and ``fan_out`` are those of the layer, not rows and columns: a flax kernel
    ``[in, out]`` and a torch weight ``[out, in]`` of the same layer get the same factor. Exactly
    one factor is applied; the rules do not multiply.

    | name | factor | carries over |
    |---|---|---|
    | ``"sqrt_max_1_out_in"`` | ``sqrt(max(1, out/in))`` | Keller Jordan's rule |
    | ``"rms_0.2"`` | ``0.2 sqrt(max(out, in))`` | root mean square 0.2 at full rank, as of AdamW |
    | ``"sqrt_out_in"`` | ``sqrt(out/in)`` | spectral condition (muP) |
    | ``"none"`` | ``1`` | spectral norm |

    Args:
      scale: a name of the table, or an own ``(fan_in, fan_out) -> factor`` with a finite and
        positive result.

    Returns:
      The function. An own one is wrapped, so that each result is checked when it is called.

    Raises:
      ValueError: if the name is unknown; and, on call, if the result of an own function is not
        finite and positive.
      TypeError: if ``scale`` is neither a name nor callable.

    Examples:
      >>> scale_fn("sqrt_max_1_out_in")(64, 256), scale_fn("sqrt_max_1_out_in")(256, 64)
      (2.0, 1.0)
      >>> scale_fn(lambda fan_in, fan_out: fan_out / fan_in)(64, 256)
      4.0

    References:
      ``sqrt_max_1_out_in``: K. Jordan et al., "Muon" (2024); ``torch.optim.Muon`` ("original"),
      ``optax.contrib.muon``. ``rms_0.2``: J. Liu et al., "Muon is Scalable for LLM Training"
      (arXiv 2502.16982), eq. 4; ``torch.optim.Muon`` ("match_rms_adamw"). ``sqrt_out_in``:
      G. Yang et al., "A Spectral Condition for Feature Learning" (arXiv 2310.17813); T. Pethick
      et al., "Training Deep Learning Models with Norm-Constrained LMOs" (arXiv 2502.07529).
    """
    if callable(scale):
        return _checked(scale)
    known = ", ".join(f"{name!r} = {formula}" for name, (formula, _) in _SCALES.items())
    if not isinstance(scale, str):
        raise TypeError(
            f"scale must be a name or a function of (fan_in, fan_out), got {scale!r}; "
            f"known names: {known}"
        )
    if scale not in _SCALES:
        raise ValueError(f"unknown scale {scale!r}; known names: {known}; or give a function")
    return _SCALES[scale][1]


def _checked(scale: ScaleFn) -> ScaleFn:
    def checked(fan_in: int, fan_out: int) -> float:
        factor = scale(fan_in, fan_out)
        try:
            number = float(factor)
        except (TypeError, ValueError):
            number = math.nan
        if not 0 < number < math.inf:
            raise ValueError(
                f"scale({fan_in}, {fan_out}) returned {factor!r}; it must be finite and positive"
            )
        return number

    return checked
