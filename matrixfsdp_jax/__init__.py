"""Matrix optimizers for JAX on whole-matrix owners: the optimizer step moves no matrix.

See ``mfsdp.plan`` for the layout, ``mfsdp.muon`` for the optimizer, ``mfsdp.train_step`` for the
step, and ``mfsdp.audit`` for what the compiled program sends.
"""

from matrixfsdp_jax.attention import AttentionWeight, qk_clip
from matrixfsdp_jax.audit import Audit, Collective, audit
from matrixfsdp_jax.guards import SkipNonfiniteState, clip_by_global_norm, skip_nonfinite
from matrixfsdp_jax.interop import import_momentum
from matrixfsdp_jax.layout import rules
from matrixfsdp_jax.layout.rules import default_rules
from matrixfsdp_jax.layout.spec import MatrixView, TensorView
from matrixfsdp_jax.optimizers import muon, scale_by_muon
from matrixfsdp_jax.owner.gradients import shard_batch
from matrixfsdp_jax.owner.params import OwnerLayout, OwnerParams, plan
from matrixfsdp_jax.owner.update import global_norm
from matrixfsdp_jax.presets import muon_like
from matrixfsdp_jax.training import TrainStep, eval_step, train_step
from matrixfsdp_jax.transforms import variants
from matrixfsdp_jax.transforms.muon import MuonState
from matrixfsdp_jax.transforms.variants import MuonVariant

__all__ = [
    "AttentionWeight",
    "Audit",
    "Collective",
    "MatrixView",
    "MuonState",
    "MuonVariant",
    "OwnerLayout",
    "OwnerParams",
    "SkipNonfiniteState",
    "TensorView",
    "TrainStep",
    "audit",
    "clip_by_global_norm",
    "default_rules",
    "eval_step",
    "global_norm",
    "import_momentum",
    "muon",
    "muon_like",
    "plan",
    "qk_clip",
    "rules",
    "scale_by_muon",
    "shard_batch",
    "skip_nonfinite",
    "train_step",
    "variants",
]

__version__ = "0.1.0"
