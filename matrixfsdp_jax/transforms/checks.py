"""Checks of arguments: an error names argument and value before any device work."""

import math
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def check_number(
    name: str,
    value: Any,
    *,
    low: float = -math.inf,
    below: float | None = None,
    above_low: bool = False,
    schedule: bool = False,
    static: bool = False,
) -> None:
    """Refuse what is no number in its range; schedules, if allowed, pass.

    jax arrays of one number pass too, whatever it is, unless ``static``.

    Raises:
      TypeError: for another type or shape.
      ValueError: for a Python or numpy number outside its range. Both name argument and value.
    """
    array = isinstance(value, jax.Array) and not static
    if (array and value.ndim == 0) or (schedule and callable(value)):
        return
    if isinstance(value, (bool, np.bool)) or not isinstance(value, Real):
        kind = "a number or a schedule" if schedule else "a Python number" if static else "a number"
        shape = f" of shape {value.shape}" if hasattr(value, "shape") else ""
        raise TypeError(f"{name}={value!r} must be {kind}, got {type(value).__name__}{shape}")
    x = float(value)
    in_range = (x > low if above_low else x >= low) and (below is None or x < below)
    if not (np.isfinite(x) and in_range):
        bounds = "" if low == -math.inf else f" > {low}" if above_low else f" >= {low}"
        bounds += "" if below is None else f" and < {below}"
        raise ValueError(f"{name}={value} must be a finite number{bounds}")


def check_static(**values: Any) -> None:
    """Refuse arrays, of which ``optax.inject_hyperparams`` makes one for every number.

    Raises: TypeError, naming them and, as ``static_args``, all that are given here.
    """
    arrays = [name for name, value in values.items() if isinstance(value, jax.Array)]
    if arrays:
        names = ", ".join(f'"{name}"' for name in values) + "," * (len(values) == 1)
        raise TypeError(
            f"{', '.join(arrays)} must be Python numbers, but came as arrays; add "
            f"static_args=({names}) to optax.inject_hyperparams, and there also the name of any "
            "function you give that is no schedule (weight_decay_mask, scale)"
        )


def check_kind(name: str, value: Any, *kinds: type) -> None:
    """Refuse what is no record of one of the kinds.

    Raises: TypeError, naming argument, value and kinds.
    """
    if not isinstance(value, kinds):
        expected = " or ".join(f"mfsdp.{kind.__name__}()" for kind in kinds)
        raise TypeError(f"{name}={value!r} must be {expected}")


def check_callable(name: str, value: Any) -> None:
    """Refuse what cannot be called.

    Raises: TypeError, naming argument and value.
    """
    if not callable(value):
        raise TypeError(f"{name}={value!r} must be a function")


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
