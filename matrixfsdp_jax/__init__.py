"""Matrix optimizers for JAX on whole-matrix owners: the optimizer step moves no matrix.

See ``mfsdp.plan`` for the layout, ``mfsdp.muon`` for the optimizer, ``mfsdp.train_step`` for the
step, and ``mfsdp.audit`` for what the compiled program sends.
"""

from matrixfsdp_jax.attention import AttentionWeight, qk_clip
from matrixfsdp_jax.audit import Audit, Collective, audit
from matrixfsdp_jax.guards import SkipNonfiniteState, clip_by_global_norm, skip_nonfinite
from matrixfsdp_jax.interop import import_momentum
from matrixfsdp_jax.layout import rules
from matrixfsdp_jax.layout.costs import shampoo_method
from matrixfsdp_jax.layout.rules import default_rules
from matrixfsdp_jax.layout.spec import MatrixView, TensorView
from matrixfsdp_jax.linalg.eigenbasis import EighBasis, QRBasis
from matrixfsdp_jax.linalg.roots import (
    CoupledHigherOrderRoot,
    CoupledNewtonRoot,
    EighRoot,
    Perturbation,
    PseudoInverse,
)
from matrixfsdp_jax.optimizers import muon, scale_by_muon
from matrixfsdp_jax.owner.gradients import shard_batch
from matrixfsdp_jax.owner.lazy import LazyParams
from matrixfsdp_jax.owner.params import OwnerLayout, OwnerParams, plan
from matrixfsdp_jax.owner.update import global_norm
from matrixfsdp_jax.presets import muon_like
from matrixfsdp_jax.second_order import (
    averaged_params,
    scale_by_shampoo,
    scale_by_soap,
    shampoo,
    soap,
)
from matrixfsdp_jax.training import PreconditionerError, TrainStep, eval_step, train_step
from matrixfsdp_jax.transforms import variants
from matrixfsdp_jax.transforms.averaging import (
    ClassicMomentum,
    GeneralizedPrimalAveraging,
    ScheduleFree,
)
from matrixfsdp_jax.transforms.kronecker import Eigendecomposed, EigenvalueCorrected, RootInverse
from matrixfsdp_jax.transforms.muon import MuonState
from matrixfsdp_jax.transforms.preconditioners import (
    AdaGradGrafting,
    AdamGrafting,
    NewtonSchulzOrthogonalization,
    RMSpropGrafting,
    SGDGrafting,
    SignDescent,
    SpectralDescent,
    SVDOrthogonalization,
)
from matrixfsdp_jax.transforms.shampoo import ShampooState
from matrixfsdp_jax.transforms.variants import MuonVariant

__all__ = [
    "AdaGradGrafting",
    "AdamGrafting",
    "AttentionWeight",
    "Audit",
    "ClassicMomentum",
    "Collective",
    "CoupledHigherOrderRoot",
    "CoupledNewtonRoot",
    "Eigendecomposed",
    "EigenvalueCorrected",
    "EighBasis",
    "EighRoot",
    "GeneralizedPrimalAveraging",
    "LazyParams",
    "MatrixView",
    "MuonState",
    "MuonVariant",
    "NewtonSchulzOrthogonalization",
    "OwnerLayout",
    "OwnerParams",
    "Perturbation",
    "PreconditionerError",
    "PseudoInverse",
    "QRBasis",
    "RMSpropGrafting",
    "RootInverse",
    "SGDGrafting",
    "SVDOrthogonalization",
    "ScheduleFree",
    "ShampooState",
    "SignDescent",
    "SkipNonfiniteState",
    "SpectralDescent",
    "TensorView",
    "TrainStep",
    "audit",
    "averaged_params",
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
    "scale_by_shampoo",
    "scale_by_soap",
    "shampoo",
    "shampoo_method",
    "shard_batch",
    "skip_nonfinite",
    "soap",
    "train_step",
    "variants",
]

__version__ = "0.1.0"
