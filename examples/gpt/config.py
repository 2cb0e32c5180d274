"""What one training run is made of; no jax here, so that flags are checked before it starts."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Optimizer(StrEnum):
    muon = "muon"
    adamw = "adamw"


class ComputeDtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


# The best of the small grid in examples/README.md. For Muon: matrices, and AdamW for the rest.
LEARNING_RATE = {Optimizer.muon: 0.04, Optimizer.adamw: 0.002}
REST_LEARNING_RATE = 0.004
GRID = {
    Optimizer.muon: (0.01, 0.02, 0.04, 0.08),
    Optimizer.adamw: (0.001, 0.002, 0.004, 0.008),
}


@dataclass(frozen=True)
class Config:
    """Sizes are in bytes of text (``context``) and windows (``batch``, over all devices)."""

    optimizer: Optimizer = Optimizer.muon
    lr: float | None = None
    rest_lr: float | None = None
    weight_decay: float = 0.01
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    batch: int = 16
    accumulate: int = 1
    steps: int = 200
    eval_every: int = 25
    seed: int = 0
    compute_dtype: ComputeDtype = ComputeDtype.float32

    def __post_init__(self) -> None:
        if self.optimizer is Optimizer.adamw and self.rest_lr is not None:
            raise ValueError(
                f"--rest-lr {self.rest_lr} goes with --optimizer muon; AdamW has one rate, --lr"
            )
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(
                f"--width {self.width} does not give --heads {self.heads} an even number of "
                "channels each (rotary positions turn pairs); make it a multiple of "
                f"{2 * self.heads}"
            )

    @property
    def matrix_rate(self) -> float:
        """Peak learning rate of the matrices (of everything, for AdamW)."""
        return LEARNING_RATE[self.optimizer] if self.lr is None else self.lr

    @property
    def rest_rate(self) -> float:
        """Peak learning rate of AdamW for what is no matrix, in a Muon run."""
        return REST_LEARNING_RATE if self.rest_lr is None else self.rest_lr

    @property
    def tokens_per_step(self) -> int:
        """Bytes that one optimizer step sees."""
        return self.batch * self.context

    @property
    def label(self) -> str:
        """``"Muon, lr 0.02"``."""
        name = {"muon": "Muon", "adamw": "AdamW"}[self.optimizer]
        return f"{name}, lr {self.matrix_rate:g}"

    def check_batch(self, num_devices: int) -> None:
        """Refuse a batch that devices and micro-batches cannot share.

        Raises:
          ValueError: if ``batch`` is no multiple of ``num_devices * accumulate``.
        """
        parts = num_devices * self.accumulate
        if self.batch % parts:
            raise ValueError(
                f"--batch {self.batch} does not divide over {num_devices} devices x "
                f"--accumulate {self.accumulate}; give a multiple of {parts}, or another --devices"
            )

    def to_dict(self) -> dict[str, Any]:
        """Every setting, with the rates that are used."""
        rest = {"rest_lr": self.rest_rate if self.optimizer is Optimizer.muon else None}
        return {**asdict(self), "lr": self.matrix_rate, **rest}
