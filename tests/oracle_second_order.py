"""Plain float64 NumPy versions of Shampoo and SOAP, written without the package.

Shampoo: Gupta, Koren, Singer, arXiv 1802.09568; with blocks, averages and grafting: Shi et al.,
arXiv 2309.06497. SOAP: Vyas et al., arXiv 2409.11321. One tensor after the other, one block after
the other, as the formulas stand.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from tests.oracle import Array, Schedule, Tree, at

Due = Callable[[int, str, int], bool]


def merged_dims(shape: tuple[int, ...], limit: float, target: float) -> tuple[int, ...]:
    """Neighbouring dims joined from the last on, while there are more than ``target``."""
    if target == math.inf:
        return shape
    dims = [d for d in shape if d != 1] or [1]
    last = len(dims) - 1
    while last > 0 and len(dims) > target:
        if dims[last - 1] * dims[last] <= limit:
            dims[last - 1 : last + 1] = [dims[last - 1] * dims[last]]
        last -= 1
    return tuple(dims)


def block_slices(merged: tuple[int, ...], limit: float) -> list[tuple[slice, ...]]:
    """Pieces of at most ``limit`` along each dim, in row-major order."""
    step = [d if d <= limit else int(limit) for d in merged]
    cuts = [[slice(i, i + s) for i in range(0, d, s)] for d, s in zip(merged, step, strict=True)]
    return list(itertools.product(*cuts))


def along(x: Array, matrix: Array, dim: int) -> Array:
    """``x`` with ``matrix`` applied to one dim: ``sum_j matrix[i, j] x[.., j, ..]``."""
    return np.moveaxis(np.tensordot(matrix, x, axes=(1, dim)), 0, dim)


def gram(g: Array, dim: int) -> Array:
    """The product of the gradient with itself over all dims but one."""
    others = [d for d in range(g.ndim) if d != dim]
    return np.tensordot(g, g, axes=(others, others))


def inverse_power(a: Array, exponent: float, epsilon: float) -> Array:
    """``(A + epsilon I)^-exponent``, its eigenvalues at least epsilon."""
    values, q = np.linalg.eigh(a + epsilon * np.eye(len(a)))
    if values.min() < epsilon:
        values = values - values.min() + epsilon
    return (q * values**-exponent) @ q.T


@dataclass
class Graft:
    """The squares of a diagonal method; ``corrected``: Adam's correction of its bias."""

    beta2: float
    epsilon: float
    corrected: bool = False


@dataclass
class Block:
    """State of a block."""

    factors: list[Array]
    roots: list[Array]  # for SOAP the eigenvectors, in columns
    mean: Array
    moment: Array
    squares: Array
    momentum: Array


@dataclass
class SecondOrderOracle:
    """Whole steps on a dict of tensors of any order; those without a gradient stay as they are.

    ``due(step, name, block)`` says where a block is decomposed; by default in step ``start`` and
    then in the multiples of ``frequency``. ``graft`` is None, ``"sgd"`` or a ``Graft``.
    ``schedule_free`` is ``(train coefficient, power)``, ``momentum`` that of a sum of directions.
    ``skip_first`` (SOAP): the first gradient builds factors and basis, its direction is zero.
    """

    kind: Literal["shampoo", "soap"]
    lr: Schedule
    betas: tuple[float, float] = (0.9, 1.0)
    beta3: float | None = None
    epsilon: float = 1e-12
    decay: Schedule = 0.0
    decay_type: Literal["decoupled", "l2", "corrected", "independent"] = "decoupled"
    peak_lr: float | None = None
    decayed: Callable[[str], bool] = lambda name: True
    limit: float = 1024
    target: float = 2
    frequency: int = 1
    start: int | None = None
    due: Due | None = None
    bias_correction: bool = True
    graft: Graft | Literal["sgd"] | None = None
    kl: bool = False
    momentum: float | None = None
    schedule_free: tuple[float, float] | None = None
    skip_first: bool = False
    count: int = 0
    blocks: dict[tuple[str, int], Block] = field(default_factory=dict)
    fast: Tree = field(default_factory=dict)
    weights: float = 0.0

    def step(self, params: Tree, grads: Tree) -> Tree:
        """New parameters; the state moves on."""
        lr, decay = at(self.lr, self.count), at(self.decay, self.count)
        self.count += 1
        if self.decay_type in ("corrected", "independent"):
            decay = decay / self.peak_lr * (lr if self.decay_type == "corrected" else 1.0)
        power = lr ** self.schedule_free[1] if self.schedule_free else 0.0
        self.weights += power
        new = {}
        for name, p in params.items():
            p = np.asarray(p, np.float64)
            if name not in grads:
                new[name] = p
                continue
            g = np.asarray(grads[name], np.float64)
            own = decay if self.decayed(name) else 0.0
            if self.decay_type == "l2":
                g, own = g + own * p, 0.0
            direction = self._direction(name, g)
            if self.schedule_free:
                new[name] = self._averaged(name, p, direction, lr, own, power)
                continue
            direction = direction + own * p
            if self.momentum is not None:
                direction = self._with_momentum(name, direction)
            new[name] = p - lr * direction
        return new

    def evaluation(self, params: Tree) -> Tree:
        """The average ``X`` under ``schedule_free``, from ``Y = y X + (1 - y) Z``."""
        y = self.schedule_free[0]
        return {name: (p - (1 - y) * self.fast[name]) / y for name, p in params.items()}

    def _averaged(
        self, name: str, p: Array, direction: Array, lr: float, decay: float, power: float
    ) -> Array:
        """Schedule-free (Defazio et al., arXiv 2405.15682): ``Z`` steps, ``X`` averages."""
        y = self.schedule_free[0]
        # Decay shrinks Z under a fixed Y, so the average that Y stands for moves with it.
        z = (1 - lr * decay) * self.fast.get(name, p)
        x = (p - (1 - y) * z) / y
        z = self.fast[name] = z - lr * direction
        weight = power / self.weights
        x = (1 - weight) * x + weight * z
        return y * x + (1 - y) * z

    def _with_momentum(self, name: str, direction: Array) -> Array:
        state = self.blocks[name, 0]
        state.momentum = self.momentum * state.momentum + direction
        return state.momentum

    def _direction(self, name: str, g: Array) -> Array:
        merged = merged_dims(g.shape, self.limit, self.target)
        parts, out = g.reshape(merged), np.zeros(merged)
        for index, cut in enumerate(block_slices(merged, self.limit)):
            block = parts[cut]
            state = self.blocks.setdefault((name, index), _fresh(block))
            out[cut] = self._block(state, block, self._is_due(name, index))
        return out.reshape(g.shape)

    def _is_due(self, name: str, index: int) -> bool:
        if self.due is not None:
            return self.due(self.count, name, index)
        start = self.frequency if self.start is None else self.start
        return self.count == start or (self.count > start and self.count % self.frequency == 0)

    def _block(self, state: Block, g: Array, due: bool) -> Array:
        t, (beta1, beta2) = self.count, self.betas
        new = 1.0 if beta2 == 1 else 1 - beta2
        for dim in range(g.ndim):
            seen = g
            if self.kl:
                for other in set(range(g.ndim)) - {dim}:
                    seen = along(seen, state.roots[other], other)
            state.factors[dim] = beta2 * state.factors[dim] + new * gram(seen, dim)
        if due:
            c = self._correction(t)
            state.roots = [self._decomposed(a / c, g.ndim) for a in state.factors]
        if self.skip_first:
            t -= 1
            if t == 0:
                return np.zeros_like(g)
        if self.kind == "soap":
            state.moment = beta2 * state.moment + new * self._rotated(state, g) ** 2
        if isinstance(self.graft, Graft):
            own = self.graft.beta2
            state.squares = own * state.squares + (1.0 if own == 1 else 1 - own) * g * g
        used = self._filtered(state, g, t, beta1)
        direction = (
            self._soap(state, used, t) if self.kind == "soap" else self._shampoo(state, used)
        )
        return self._grafted(state, direction, used, t)

    def _correction(self, t: int) -> float:
        beta2 = self.betas[1]
        return 1 - beta2**t if self.bias_correction and beta2 < 1 else 1.0

    def _decomposed(self, a: Array, order: int) -> Array:
        if self.kind == "soap":
            return np.linalg.eigh(a + self.epsilon * np.eye(len(a)))[1]
        return inverse_power(a, 1 / (2 * order), self.epsilon)

    def _filtered(self, state: Block, g: Array, t: int, beta1: float) -> Array:
        if beta1 == 0:
            return g
        beta3 = beta1 if self.beta3 is None else self.beta3
        used = beta3 * state.mean + (1 - beta3) * g
        state.mean = beta1 * state.mean + (1 - beta1) * g
        return used / (1 - beta3 * beta1 ** (t - 1)) if self.bias_correction else used

    def _rotated(self, state: Block, x: Array) -> Array:
        for dim, q in enumerate(state.roots):
            x = along(x, q.T, dim)
        return x

    def _shampoo(self, state: Block, used: Array) -> Array:
        for dim, root in enumerate(state.roots):
            used = along(used, root, dim)
        return used

    def _soap(self, state: Block, used: Array, t: int) -> Array:
        moment = state.moment / self._correction(t)
        scaled = self._rotated(state, used) / (np.sqrt(moment) + self.epsilon)
        for dim, q in enumerate(state.roots):
            scaled = along(scaled, q, dim)
        return scaled

    def _grafted(self, state: Block, direction: Array, used: Array, t: int) -> Array:
        if self.graft is None:
            return direction
        plain = used
        if isinstance(self.graft, Graft):
            c = 1 - self.graft.beta2**t if self.graft.corrected else 1.0
            plain = used / (np.sqrt(state.squares / c) + self.graft.epsilon)
        if self.count < (self.frequency if self.start is None else self.start):
            return plain
        return direction * np.linalg.norm(plain) / (np.linalg.norm(direction) + 1e-16)


def _fresh(block: Array) -> Block:
    zeros: Any = np.zeros(block.shape)
    factors = [np.zeros((k, k)) for k in block.shape]
    identities = [np.eye(k) for k in block.shape]
    return Block(factors, identities, zeros, zeros.copy(), zeros.copy(), 0.0)
