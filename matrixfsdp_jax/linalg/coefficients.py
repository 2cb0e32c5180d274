"""Coefficient tables of the Newton-Schulz iteration.

A row ``(a, b, c)`` is one step of the odd quintic ``X <- a X + b (X X^T) X + c (X X^T)^2 X``,
which maps every singular value ``s`` of ``X`` to ``a s + b s^3 + c s^5``.
"""

import math
from collections.abc import Sequence

Row = tuple[float, float, float]

MAX_STEPS = 50

TABLES: dict[str, tuple[Row, ...]] = {
    # K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). One row
    # for every step: the steepest slope at 0 that keeps [0, 1] bounded. Five steps bring singular
    # values in [0.003, 1] to [0.68, 1.21], not to 1.
    "keller": ((3.4445, -4.7750, 2.0315),),
}


def newton_schulz_table(
    coefficients: str | Sequence[Sequence[float]] = "keller", steps: int = 5
) -> tuple[Row, ...]:
    """Return the coefficients of each Newton-Schulz step, exactly ``steps`` rows.

    Fewer steps than the table has rows take its first rows, as a table is made to be run from its
    start; more steps repeat its last row.

    Args:
      coefficients: the name of a table (a key of ``TABLES``), or rows ``(a, b, c)`` of finite
        floats.
      steps: number of steps, an int in ``[1, 50]``.

    Returns:
      ``steps`` rows of three Python floats.

    Raises:
      TypeError: if ``steps`` is not an int.
      ValueError: if ``steps`` is out of range, the name is unknown, or a row is not three finite
        floats.

    Examples:
      >>> newton_schulz_table("keller", steps=2)
      ((3.4445, -4.775, 2.0315), (3.4445, -4.775, 2.0315))
      >>> newton_schulz_table([(2, -1.5, 0.5), (1.5, -0.5, 0)], steps=1)
      ((2.0, -1.5, 0.5),)
    """
    if not isinstance(steps, int) or isinstance(steps, bool):
        raise TypeError(
            f"steps must be a Python int (it fixes the compiled program), got {steps!r} "
            f"of type {type(steps).__name__}"
        )
    if not 1 <= steps <= MAX_STEPS:
        raise ValueError(f"steps must be in [1, {MAX_STEPS}], got {steps}")
    rows = _named(coefficients) if isinstance(coefficients, str) else _checked(coefficients)
    return rows[:steps] + rows[-1:] * (steps - len(rows))


def _named(name: str) -> tuple[Row, ...]:
    if name not in TABLES:
        raise ValueError(
            f"unknown coefficients {name!r}; known names: {', '.join(map(repr, TABLES))}; "
            "or give rows (a, b, c)"
        )
    return TABLES[name]


def _checked(coefficients: Sequence[Sequence[float]]) -> tuple[Row, ...]:
    try:
        rows = tuple((float(a), float(b), float(c)) for a, b, c in coefficients)
    except (TypeError, ValueError):
        rows = ()
    if not rows or not all(math.isfinite(value) for row in rows for value in row):
        raise ValueError(
            "coefficients must be at least one row of three finite floats, such as "
            f"[(3.4445, -4.775, 2.0315)], got {coefficients!r}; "
            f"known names: {', '.join(map(repr, TABLES))}"
        )
    return rows
