"""``Muon`` with ``torch.optim.Muon``'s arguments, computed by this package's transforms."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import torch

from matrixfsdp_jax.owner.canonical import all_slots
from matrixfsdp_jax.torch_compat import crossing, state_layout
from matrixfsdp_jax.torch_compat.base import Group, JaxOptimizer, Pending
from matrixfsdp_jax.torch_compat.blocks import Block, Views, cut
from matrixfsdp_jax.torch_compat.engine import Engine, Make, Stacks
from matrixfsdp_jax.transforms.muon import orthogonalize_stacks, scale_by_momentum
from matrixfsdp_jax.transforms.stacks import decay_stacks, scale_stacks

Options = dict[str, Any]

# Of a matrix [out, in]: the learning rate is multiplied by it.
_ADJUST: dict[str | None, Callable[[int, int], float]] = {
    None: lambda rows, cols: math.sqrt(max(1.0, rows / cols)),
    "original": lambda rows, cols: math.sqrt(max(1.0, rows / cols)),
    "match_rms_adamw": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
}
_DYNAMIC = ("lr", "weight_decay", "momentum")


class Muon(JaxOptimizer):
    """Muon on matrices, as ``torch.optim.Muon``: equal matrices share one compiled iteration.

    Arguments, defaults and state dict are those of ``torch.optim.Muon`` (a ``momentum_buffer`` per
    parameter), so that either loads the other's state. Every process updates all of its parameters.

    Args:
      params: parameters ``[out, in]``, or dicts of parameter groups.
      lr: learning rate.
      weight_decay: decoupled, times ``lr``.
      momentum: decay of the average, in [0, 1).
      nesterov: whether the gradient is mixed in once more.
      ns_coefficients: one row ``(a, b, c)`` for every step.
      eps: guards the division by the norm; relative to the largest entry of a matrix here.
      ns_steps: Newton-Schulz steps, 1 to 50.
      adjust_lr_fn: None or ``"original"``: times ``sqrt(max(1, out / in))``;
        ``"match_rms_adamw"``: times ``0.2 sqrt(max(out, in))``.

    Numerics: momentum in float32 or wider, Newton-Schulz in bfloat16, as there.

    Raises:
      ValueError: a parameter that is no matrix, or an option out of its range.

    References: Jordan et al., "Muon", 2024; ``torch.optim.Muon``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults)

    def _check(self, options: Options) -> None:
        for p in options["params"]:
            if p.ndim != 2:
                raise ValueError(
                    f"Muon takes matrices, got a parameter of shape {tuple(p.shape)}; give others "
                    "to another optimizer, such as torch.optim.AdamW"
                )
        for name in ("lr", "weight_decay"):
            if not float(options[name]) >= 0:
                raise ValueError(f"{name}={options[name]!r} must be >= 0")
        if options["adjust_lr_fn"] not in _ADJUST:
            raise ValueError(
                f"adjust_lr_fn={options['adjust_lr_fn']!r} must be one of {list(_ADJUST)}"
            )
        _transform(options, {})  # its parts check the rest

    def _agree(self, groups: list[Options], error: Exception | None) -> None:
        """Nothing is shared between processes."""

    def _make_group(self, options: Options) -> Group:
        return MuonGroup(options)


class MuonGroup(Group):
    """The matrices of one parameter group; each is one block."""

    def __init__(self, options: Options) -> None:
        params = options["params"]
        crossing.bind(crossing.check_devices(params))
        cuts = [cut(i, tuple(p.shape), math.inf, math.inf) for i, p in enumerate(params)]
        self._views = Views(params, cuts)
        self._options = dict(options)
        merged = [c.merged for c in cuts]
        self.engine = Engine(list(self._views.of(params)), params, merged, _make(options))

    def prepare(self, options: Options) -> None:
        """Take over changed options."""
        new = {k: v for k, v in options.items() if k not in ("params", *_DYNAMIC)}
        if new != {k: v for k, v in self._options.items() if k in new}:
            self.engine.set_transform(_make(options))
            self._options = dict(options)

    def compute(self, options: Options) -> Pending:
        """One step of the momentum, and the updates."""
        params = options["params"]
        grads = [p.grad if p.numel() else None for p in params]
        numbers = {name: float(options[name]) for name in _DYNAMIC}
        into = self._views.of(params)
        return Pending(self.engine.step(grads, params, **numbers), into)

    def apply(self, pending: Pending, error: Exception | None) -> None:
        """Add the updates."""
        if pending.updates:
            targets = [pending.into[b] for b in pending.updates]
            torch._foreach_add_(targets, list(pending.updates.values()))

    def marks(self) -> dict[str, torch.Tensor]:
        """None: ``torch.optim.Muon`` counts nothing."""
        return {}

    def names(self) -> dict[int, list[str]]:
        """One entry for every parameter."""
        return {block.param: ["momentum_buffer"] for block in self.engine.blocks}

    def entries(self, options: Options) -> dict[int, dict[str, Any]]:
        """The momentum of every parameter."""
        return {b.param: own for b, own in state_layout.blocks_state(self.engine, False).items()}

    def load(self, entries: dict[int, dict[str, Any]], options: Options) -> None:
        """The inverse; a parameter that was never stepped has no entry, and a zero momentum."""

        def one(block: Block) -> dict[str, Any]:
            return entries[block.param] or {"momentum_buffer": torch.zeros(block.shape)}

        given = {block: one(block) for block in self.engine.blocks}
        state_layout.load_blocks(self.engine, given, 0, 0.0)


def _make(options: Options) -> Make:
    static = dict(options)

    def make(stacks: Stacks, **numbers: Any) -> optax.GradientTransformation:
        return _transform({**static, **numbers}, stacks)

    return make


def _transform(options: Options, stacks: Stacks) -> optax.GradientTransformation:
    adjust = _ADJUST[options["adjust_lr_fn"]]
    factors = {
        key: np.full((1, len(members)), adjust(*members[0].shape))
        for key, members in stacks.items()
    }
    decays = {key: 1 / factor for key, factor in factors.items()}
    return optax.chain(
        scale_by_momentum(options["momentum"], nesterov=options["nesterov"]),
        orthogonalize_stacks(
            ns_steps=options["ns_steps"],
            ns_coefficients=[tuple(options["ns_coefficients"])],
            eps=options["eps"],
            ns_dtype=jnp.bfloat16,
        ),
        decay_stacks(options["weight_decay"], decays, all_slots),
        scale_stacks(factors, all_slots),
        optax.scale_by_learning_rate(options["lr"]),
    )
