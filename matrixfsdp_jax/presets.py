"""Muon as the systems define it that people come from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import optax

from matrixfsdp_jax.optimizers import muon

ScalarOrSchedule = Any


@dataclass(frozen=True)
class _System:
    """Options of ``muon`` under which it is another system's, and that system's default rate."""

    options: dict[str, Any]
    learning_rate: float | None
    rest: Callable[[ScalarOrSchedule], optax.GradientTransformation]
    source: str


def _adam(**options: Any) -> Callable[[ScalarOrSchedule], optax.GradientTransformation]:
    return lambda learning_rate: optax.adamw(learning_rate, **options)


_SYSTEMS: dict[str, _System] = {
    "optax": _System(
        {"bias_correction": True, "eps": 1e-8, "ns_dtype": jnp.float32},
        None,
        _adam(b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0, nesterov=True),
        "optax.contrib.muon of optax 0.2.8",
    ),
    "torch": _System(
        {"weight_decay": 0.1, "eps": 1e-7, "ns_dtype": jnp.bfloat16},
        1e-3,
        # torch.optim.Muon takes matrices alone; these are the defaults of torch.optim.AdamW.
        lambda learning_rate: optax.adamw(1e-3, b1=0.9, b2=0.999, eps=1e-8, weight_decay=1e-2),
        "torch.optim.Muon of torch 2.13",
    ),
    "keller": _System(
        {"eps": 1e-7, "ns_dtype": jnp.bfloat16},
        0.02,
        lambda learning_rate: optax.adamw(3e-4, b1=0.9, b2=0.95, eps=1e-10, weight_decay=0.0),
        "MuonWithAuxAdam of github.com/KellerJordan/Muon",
    ),
    "moonshot": _System(
        {
            "momentum_rule": "sum",
            "scale": "rms_0.2",
            "weight_decay": 0.1,
            "eps": 1e-7,
            "ns_dtype": jnp.bfloat16,
        },
        1e-3,
        _adam(b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1),
        "Moonlight (arXiv 2502.16982), github.com/MoonshotAI/Moonlight",
    ),
}


def muon_like(
    system: str, learning_rate: ScalarOrSchedule | None = None, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """``mfsdp.muon`` with the conventions and defaults of another system.

    | system | momentum | scale | decay | iteration | rest |
    |---|---|---|---|---|---|
    | ``"optax"`` | 0.95, Nesterov, bias-corrected average | ``sqrt_max_1_out_in`` | 0 | float32 | \
Nesterov Adam at the same rate |
    | ``"torch"`` | 0.95, Nesterov, average | ``sqrt_max_1_out_in`` | 0.1 | bfloat16 | AdamW(1e-3) |
    | ``"keller"`` | 0.95, Nesterov, average | ``sqrt_max_1_out_in`` | 0 | bfloat16 | Adam(3e-4) |
    | ``"moonshot"`` | 0.95, Nesterov, decaying sum | ``rms_0.2`` | 0.1 | bfloat16 | AdamW at the \
same rate |

    All take five steps of ``"keller"`` coefficients. Two things are ours in every preset: which
    leaf is a matrix and where its outputs are comes from the rules (optax takes every 2-D leaf,
    embeddings too; torch takes what it is given, as ``[out, in]``), and ``eps`` is relative to the
    largest entry of a matrix, so that small gradients are not flattened.

    Args:
      system: ``"optax"``, ``"torch"``, ``"keller"`` or ``"moonshot"``.
      learning_rate: a number or a schedule; None takes the system's default (torch and moonshot
        1e-3, keller 0.02; optax has none).
      **options: those of ``mfsdp.muon`` (``layout``, ``rules``, ...), in place of the preset's.
        ``optax.inject_hyperparams`` takes no such function; give it
        ``lambda learning_rate: mfsdp.muon_like(system, learning_rate)``.

    Raises:
      ValueError: for an unknown system, or no learning rate where the system has no default.

    Examples:
      >>> tx = mfsdp.muon_like("moonshot", 2e-4, weight_decay=0.05)

    References: ``optax.contrib.muon``; ``torch.optim.Muon``; Jordan et al., "Muon", 2024, and its
    code; Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982, 2025, and its code.
    """
    if system not in _SYSTEMS:
        known = ", ".join(f"{name!r} ({s.source})" for name, s in _SYSTEMS.items())
        raise ValueError(f"unknown system {system!r}; known: {known}")
    preset = _SYSTEMS[system]
    if learning_rate is None:
        learning_rate = preset.learning_rate
    if learning_rate is None:
        raise ValueError(f"{preset.source} has no default learning rate; give learning_rate")
    if options.get("rest") is None:
        options["rest"] = preset.rest(learning_rate)
    return muon(learning_rate, **{**preset.options, **options})
