"""Traces of the reference, replayed through ``matrixfsdp_jax.torch_compat.DistributedShampoo``.

``format`` in ``tests/goldens/index.json`` says what the traces hold.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from matrixfsdp_jax import torch_compat
from tests.test_goldens import ENTRIES, FOLDER

CALLABLES = {
    "one": lambda *_: 1.0,
    "muon_scale": lambda d_in, d_out: max(1.0, d_out / d_in) ** 0.5,
    "l1": lambda grad: grad.abs().sum(),
}


def decode(value: Any) -> Any:
    """An option of the index as what the constructor takes."""
    match value:
        case {"type": name}:
            fields = {k: decode(v) for k, v in value.items() if k != "type"}
            return getattr(torch_compat, name)(**fields)
        case dict():
            return {int(k): decode(v) for k, v in value.items()}
        case list():
            return [decode(v) for v in value]
        case "inf":
            return math.inf
        case str() if value.startswith("torch."):
            return getattr(torch, value.removeprefix("torch."))
        case str() if value.startswith("callable:"):
            return CALLABLES[value.removeprefix("callable:")]
        case str() if value.startswith("wd:"):
            return torch_compat.WeightDecayType(value.removeprefix("wd:"))
    return value


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    decoded = {name: decode(value) for name, value in given.items()}
    return decoded | ({"betas": tuple(decoded["betas"])} if "betas" in decoded else {})


class Replay:
    """Parameters and optimizer of one trace.

    Args:
      name: of the entry of the index.
      config_override: arguments of the constructor that replace those of the entry, as the
        constructor takes them or as in the index.

    Attributes:
      entry, trace: the entry of the index, and its arrays.
      params, optimizer: at the start of the trace, until ``step`` is called.
      steps: how many steps the trace has.
    """

    def __init__(self, name: str, config_override: Mapping[str, Any] | None = None) -> None:
        self.entry = ENTRIES[name]
        with np.load(FOLDER / self.entry["file"]) as trace:
            self.trace = dict(trace)
        self.steps = len(self.trace["lr"])
        self.params = [
            torch.nn.Parameter(self._tensor(self.trace[f"p{i}_init"], shape))
            for i, shape in enumerate(self.entry["shapes"])
        ]
        options = {**self.entry["overrides"], **(config_override or {})}
        groups = self.entry.get("groups") or options.pop("groups", None)
        self.optimizer = torch_compat.DistributedShampoo(
            [self._group(g) for g in groups] if groups else self.params,
            **_options(options),
        )
        self._follows = not groups
        self._lr = [g["lr"] for g in self.optimizer.param_groups]

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        own = _options({k: v for k, v in group.items() if k != "params"})
        return {"params": [self.params[i] for i in group["params"]], **own}

    def _tensor(self, values: np.ndarray, shape: Any) -> torch.Tensor:
        return torch.tensor(values).to(getattr(torch, self.entry["dtype"])).reshape(tuple(shape))

    def grads(self, t: int) -> list[torch.Tensor | None]:
        """What the trace gives as gradients before step ``t``, counted from 0."""
        there = self.trace["gmask"][t]
        return [
            self._tensor(self.trace[f"g{i}"][t], p.shape) if there[i] else None
            for i, p in enumerate(self.params)
        ]

    def step(self, t: int) -> None:
        """Step ``t``, counted from 0, with the gradients and the learning rate of the trace."""
        for p, grad in zip(self.params, self.grads(t), strict=True):
            p.grad = grad
        lr = self.trace["lr"]
        for group, own in zip(self.optimizer.param_groups, self._lr, strict=True):
            group["lr"] = float(lr[t]) if self._follows else own * float(lr[t] / lr[0])
        self.optimizer.step()

    def distance(self, t: int, against: str = "p") -> float:
        """The worst parameter after step ``t``, by the rule of ``suggested_tol``.

        Args:
          t: step, counted from 0.
          against: the arrays to compare with: "p", or "ddp_p" for a run on several ranks.
        """
        worst = 0.0
        for i, p in enumerate(self.params):
            if not p.numel():
                continue
            expected = self.trace[f"{against}{i}"].astype(np.float64)
            move = np.abs(expected - self.trace[f"p{i}_init"]).max()
            found = p.detach().double().numpy()
            if not np.isfinite(found).all():
                return math.inf
            off = np.abs(found - expected[t]).max()
            worst = max(worst, off / move if move else float(off > 0))
        return worst
