"""Every optimizer that must pass the contract: to add one, append one line to ``OPTIMIZERS``."""

import inspect
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
      options: its options here. Those that hold state belong in a record of their own.
      learning_rate: lowers the loss of the test problem.
      direction_only: the function has no learning rate, so one is chained behind it.
    """

    id: str
    function: Callable[..., optax.GradientTransformation]
    options: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float = 0.2
    direction_only: bool = False

    def make(
        self, layout: Any = None, rules: Any = None, **overrides: Any
    ) -> optax.GradientTransformation:
        """The full optimizer; ``rules`` are for the user's own tree (a layout has its own)."""
        options = {"layout": layout, **self.options, **overrides}
        rate = options.pop("learning_rate", self.learning_rate)
        if layout is None:
            options["rules"] = rules
        if self.takes("rest"):
            options.setdefault("rest", optax.adam(0.05))
        if self.direction_only:
            return optax.chain(self.function(**options), optax.scale_by_learning_rate(rate))
        return self.function(rate, **options)

    def takes(self, option: str) -> bool:
        """Whether the function has this option."""
        return option in inspect.signature(self.function).parameters

    def without_decay(self) -> dict[str, Any]:
        """Overrides that switch weight decay off."""
        return {"weight_decay": 0.0} if self.takes("weight_decay") else {}


OPTIMIZERS = [
    Optimizer("muon", mfsdp.muon),
    Optimizer("normuon", mfsdp.muon, {"variant": mfsdp.variants.normuon()}),
    Optimizer("adamuon", mfsdp.muon, {"variant": mfsdp.variants.adamuon()}),
    Optimizer("muon_sum", mfsdp.muon, {"momentum_rule": "sum"}),
    Optimizer("muon_cautious", mfsdp.muon, {"weight_decay": 0.1, "cautious_weight_decay": True}),
    Optimizer("scale_by_muon", mfsdp.scale_by_muon, direction_only=True),
]

# Public functions that take a layout and return a transformation, but are no optimizers.
EXEMPT = {
    "clip_by_global_norm": "changes gradients; every optimizer is tested behind it",
    "skip_nonfinite": "wraps an optimizer; every optimizer is tested inside it",
}
