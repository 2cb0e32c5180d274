"""What one training run is made of; no jax here, so that flags are checked before it starts."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Optimizer(StrEnum):
    muon = "muon"
    shampoo = "shampoo"
    soap = "soap"
    adamw = "adamw"


class ComputeDtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


NAMES = {"muon": "Muon", "shampoo": "Shampoo", "soap": "SOAP", "adamw": "AdamW"}
KRONECKER = (Optimizer.shampoo, Optimizer.soap)
# The best of the small grid in examples/README.md. All but AdamW update the matrices with it, and
# the rest by AdamW with the rate below.
LEARNING_RATE = {
    Optimizer.muon: 0.04,
    Optimizer.shampoo: 0.004,
    Optimizer.soap: 0.016,
    Optimizer.adamw: 0.002,
}
REST_LEARNING_RATE = 0.004
GRID = {
    Optimizer.muon: (0.01, 0.02, 0.04, 0.08),
    Optimizer.shampoo: (0.001, 0.002, 0.004, 0.008),
    Optimizer.soap: (0.004, 0.008, 0.016, 0.032),
    Optimizer.adamw: (0.001, 0.002, 0.004, 0.008),
}
PRECONDITION_EVERY = 2
MAX_FACTOR_DIM = 256


@dataclass(frozen=True)
class Config:
    """Sizes are in bytes of text (``context``) and windows (``batch``, over all devices)."""

    optimizer: Optimizer = Optimizer.muon
    lr: float | None = None
    rest_lr: float | None = None
    weight_decay: float = 0.01
    precondition_every: int | None = None
    max_factor_dim: int | None = None
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
                f"--rest-lr {self.rest_lr} goes with --optimizer muon, shampoo or soap; AdamW has "
                "one rate, --lr"
            )
        if self.optimizer not in KRONECKER:
            for name in ("precondition_every", "max_factor_dim"):
                if (given := getattr(self, name)) is not None:
                    raise ValueError(
                        f"--{name.replace('_', '-')} {given} goes with --optimizer shampoo or "
                        f"soap; {NAMES[self.optimizer]} has no factors"
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
        """Peak learning rate of AdamW for what is no matrix, where another optimizer has those."""
        return REST_LEARNING_RATE if self.rest_lr is None else self.rest_lr

    @property
    def factors(self) -> dict[str, int]:
        """Options of Shampoo and SOAP: the largest block, and the steps between decompositions."""
        return {
            "max_preconditioner_dim": self.max_factor_dim or MAX_FACTOR_DIM,
            "precondition_frequency": self.precondition_every or PRECONDITION_EVERY,
        }

    @property
    def tokens_per_step(self) -> int:
        """Bytes that one optimizer step sees."""
        return self.batch * self.context

    @property
    def label(self) -> str:
        """``"Muon, lr 0.02"``."""
        return f"{NAMES[self.optimizer]}, lr {self.matrix_rate:g}"

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
        used = {"lr": self.matrix_rate}
        if self.optimizer is not Optimizer.adamw:
            used["rest_lr"] = self.rest_rate
        if self.optimizer in KRONECKER:
            used["precondition_every"] = self.factors["precondition_frequency"]
            used["max_factor_dim"] = self.factors["max_preconditioner_dim"]
        return asdict(self) | used
