"""Checks of arguments: an error names argument and value before any device work."""

from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


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


def check_dtype(name: str, dtype: Any, allowed: tuple[str, ...]) -> Any:
    """The dtype, which must be one of ``allowed``; those of 64 bits need JAX's x64 mode.

    Raises: ValueError, naming argument and value.
    """
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in allowed:
        raise ValueError(f"{name}={dtype!r} must be one of {allowed}, or None")
    if jax.dtypes.canonicalize_dtype(found) != found:
        raise ValueError(f"{name}={found.name!r} needs JAX's x64 mode: jax.enable_x64(True)")
    return found
