"""Plain float64 NumPy versions of what the package computes, written without it.

Nothing here is fast, batched, scaled or guarded more than the formula says.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Array = np.ndarray
Tree = dict[str, Array]
Schedule = float | Callable[[int], float]

KELLER = ((3.4445, -4.7750, 2.0315),) * 5

SCALES: dict[str, Callable[[int, int], float]] = {
    "sqrt_max_1_out_in": lambda fan_in, fan_out: math.sqrt(max(1, fan_out / fan_in)),
    "rms_0.2": lambda fan_in, fan_out: 0.2 * math.sqrt(max(fan_in, fan_out)),
    "sqrt_out_in": lambda fan_in, fan_out: math.sqrt(fan_out / fan_in),
    "none": lambda fan_in, fan_out: 1.0,
}


def newton_schulz(x: Array, table: Sequence[Sequence[float]] = KELLER, eps: float = 0.0) -> Array:
    """The iteration on one matrix, as it stands (no transposing, no scaling)."""
    x = np.asarray(x, np.float64)
    if not x.any():
        return x
    x = x / (np.sqrt(np.sum(x * x)) + eps)
    for a, b, c in table:
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x


def polar(x: Array, rank: int | None = None) -> Array:
    """``U V^T`` of the singular value decomposition ``U S V^T``, of its first ``rank`` values."""
    u, _, vt = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    return u[:, :rank] @ vt[:rank]


def at(value: Schedule, count: int) -> float:
    """A number, or a schedule at a step count (the first step has count 0)."""
    return value(count) if callable(value) else value


@dataclass
class MuonOracle:
    """Whole Muon steps on a dict of 2-D matrices; holds momentum and step count.

    ``m <- b m + (1-b) g``; ``u = (1-b) g + b m`` (Nesterov) or ``m``; then
    ``p <- p - lr (scale NS(u) + decay p)``. ``bias_correction`` is that of optax: with t = 1, 2, ..
    the gradient is divided by ``1 - b^t`` and the momentum by ``1 - b^(t+1)`` (Nesterov), or the
    momentum by ``1 - b^t``. ``out_side="cols"`` reads a matrix as ``[in, out]``.

    ``momentum_rule="sum"`` has 1 for ``1-b``. ``cautious`` decays only entries in which
    ``update * p >= 0``. A ``variant`` divides ``O = NS(u)`` by ``sqrt(v) + variant_eps``, with
    ``v <- b2 v + (1-b2) s``, and sets the norm of the result: ``"normuon"`` has for ``s`` the mean
    of ``O^2`` over the inputs of each output neuron and keeps the norm of ``O``, or with
    ``keep_norm=False`` takes ``sqrt(min(m, n))``; ``"adamuon"`` has ``O = NS(sign(u))``,
    ``s = O^2`` and the norm ``sqrt(min(m, n))``.
    """

    lr: Schedule
    momentum: Schedule = 0.95
    nesterov: bool = True
    weight_decay: Schedule = 0.0
    scale: str | Callable[[int, int], float] = "sqrt_max_1_out_in"
    table: Sequence[Sequence[float]] = KELLER
    eps: float = 0.0
    bias_correction: bool = False
    out_side: Literal["rows", "cols"] = "cols"
    momentum_rule: Literal["ema", "sum"] = "ema"
    cautious: bool = False
    variant: Literal["normuon", "adamuon"] | None = None
    b2: float = 0.95
    variant_eps: float = 1e-10
    keep_norm: bool = True
    count: int = 0
    mu: Tree = field(default_factory=dict)
    nu: Tree = field(default_factory=dict)

    def step(self, params: Tree, grads: Tree) -> Tree:
        """New parameters; the state moves on."""
        lr, decay = at(self.lr, self.count), at(self.weight_decay, self.count)
        new = {}
        for name, p in params.items():
            p, g = np.asarray(p, np.float64), np.asarray(grads[name], np.float64)
            direction = self._direction(name, g)
            if self.variant == "adamuon":
                direction = np.sign(direction)
            update = newton_schulz(direction, self.table, self.eps)
            if self.variant is not None:
                update = self._vary(name, update)
            update = self._factor(p.shape) * update
            decayed = np.where(update * p >= 0, p, 0.0) if self.cautious else p
            new[name] = p - lr * (update + decay * decayed)
        self.count += 1
        return new

    def _direction(self, name: str, g: Array) -> Array:
        b, t = at(self.momentum, self.count), self.count + 1
        weight = 1 if self.momentum_rule == "sum" else 1 - b
        m = self.mu[name] = b * self.mu.get(name, 0.0) + weight * g
        if not self.bias_correction:
            return weight * g + b * m if self.nesterov else m
        if not self.nesterov:
            return m / (1 - b**t)
        return (1 - b) * g / (1 - b**t) + b * m / (1 - b ** (t + 1))

    def _vary(self, name: str, o: Array) -> Array:
        statistic = o * o
        if self.variant == "normuon":
            inputs = 1 if self.out_side == "rows" else 0
            statistic = statistic.mean(axis=inputs, keepdims=True)
        v = self.nu[name] = self.b2 * self.nu.get(name, 0.0) + (1 - self.b2) * statistic
        out = o / (np.sqrt(v) + self.variant_eps)
        kept = self.variant == "normuon" and self.keep_norm
        norm = np.linalg.norm(o) if kept else math.sqrt(min(o.shape))
        return out * norm / (np.linalg.norm(out) + self.variant_eps)

    def _factor(self, shape: tuple[int, int]) -> float:
        fan_in, fan_out = shape if self.out_side == "cols" else shape[::-1]
        scale = SCALES[self.scale] if isinstance(self.scale, str) else self.scale
        return scale(fan_in, fan_out)


@dataclass
class AdamWOracle:
    """AdamW steps (Loshchilov and Hutter 2019, decay multiplied by lr) on a dict of arrays."""

    lr: Schedule
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    count: int = 0
    mu: Tree = field(default_factory=dict)
    nu: Tree = field(default_factory=dict)

    def step(self, params: Tree, grads: Tree) -> Tree:
        """New parameters; the state moves on."""
        lr, t = at(self.lr, self.count), self.count + 1
        new = {}
        for name, p in params.items():
            p, g = np.asarray(p, np.float64), np.asarray(grads[name], np.float64)
            m = self.mu[name] = self.b1 * self.mu.get(name, 0.0) + (1 - self.b1) * g
            v = self.nu[name] = self.b2 * self.nu.get(name, 0.0) + (1 - self.b2) * g * g
            update = (m / (1 - self.b1**t)) / (np.sqrt(v / (1 - self.b2**t)) + self.eps)
            new[name] = p - lr * (update + self.weight_decay * p)
        self.count = t
        return new
