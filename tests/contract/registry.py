"""Every optimizer that must pass the contract: to add one, append one line to ``OPTIMIZERS``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import optax

import matrixfsdp_jax as mfsdp


@dataclass(frozen=True, eq=False)
class Optimizer:
    """A public function with options that make it fit for the test problems.

    Attributes:
      id: how tests name it.
      function: the public function of the package.
      options: its options here. Those that change the state belong in a record of their own.
      preset: positional arguments before the learning rate.
      learning_rate: lowers the loss of the test problem twentyfold in 50 steps.
      direction_only: the function has no learning rate, so one is chained behind it.
      decays: whether it decays weights as it stands; ``weight_decay=0.0`` then switches it off.
      rounding: how close two compilations of the same step come, absolute, for updates near 1.
      planned_for: the ``optimizer=`` of the layouts on which it runs.
      mirrors: whether its state has arrays in the shapes of the matrices.
    """

    id: str
    function: Callable[..., optax.GradientTransformation]
    options: Mapping[str, Any] = field(default_factory=dict)
    preset: tuple[Any, ...] = ()
    learning_rate: float = 0.2
    direction_only: bool = False
    decays: bool = False
    rounding: float = 1e-6
    planned_for: str = "muon"
    mirrors: bool = True

    def make(
        self, layout: Any = None, rules: Any = None, **overrides: Any
    ) -> optax.GradientTransformation:
        """The full optimizer; ``rules`` are for the user's own tree (a layout has its own)."""
        options = {"layout": layout, **self.options, **overrides}
        rate = options.pop("learning_rate", self.learning_rate)
        if layout is None:
            options["rules"] = rules
        if self.direction_only:
            direction = self.function(*self.preset, **options)
            return optax.chain(direction, optax.scale_by_learning_rate(rate))
        options.setdefault("rest", optax.adam(0.05))
        return self.function(*self.preset, rate, **options)


# Damped, or with a first decomposition at full rank: rounding must not decide an update.
SHAMPOO = {
    "epsilon": 1e-2,
    "betas": (0.9, 0.95),
    "precondition_frequency": 2,
}
SOAP = {"epsilon": 1e-3, "precondition_frequency": 2, "start_preconditioning_step": 4}
BLOCKED: dict[str, Any] = {"mirrors": False, "rounding": 1e-4}

OPTIMIZERS = [
    Optimizer("muon", mfsdp.muon),
    Optimizer("normuon", mfsdp.muon, {"variant": mfsdp.variants.normuon()}),
    # Divides by the root of a running square: a small entry keeps its relative rounding error.
    Optimizer("adamuon", mfsdp.muon, {"variant": mfsdp.variants.adamuon()}, rounding=1e-5),
    Optimizer("muon_sum", mfsdp.muon, {"momentum_rule": "sum"}),
    Optimizer(
        "muon_cautious",
        mfsdp.muon,
        {"weight_decay": 0.1, "cautious_weight_decay": True},
        decays=True,
    ),
    Optimizer("scale_by_muon", mfsdp.scale_by_muon, direction_only=True),
    # On the CPU the default dtype is float32, in which the contract can be held tightly.
    Optimizer("moonshot", mfsdp.muon_like, {"ns_dtype": None}, ("moonshot",), decays=True),
    Optimizer(
        "shampoo", mfsdp.shampoo, SHAMPOO, learning_rate=0.1, planned_for="shampoo", **BLOCKED
    ),
    Optimizer("soap", mfsdp.soap, SOAP, learning_rate=0.05, planned_for="soap", **BLOCKED),
]

# Public functions that return a transformation, but are no optimizers.
EXEMPT = {
    "clip_by_global_norm": "changes gradients; every optimizer is tested behind it",
    # What shampoo and soap, which are here, put before decay, averaging and rate.
    "scale_by_shampoo": "tests/second_order holds it to the oracles",
    "scale_by_soap": "tests/second_order holds it to the oracles",
    "qk_clip": "changes updates of attention weights alone; has tests of its own",
    "skip_nonfinite": "wraps an optimizer; every optimizer is tested inside it",
}
