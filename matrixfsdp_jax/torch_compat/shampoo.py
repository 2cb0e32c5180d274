"""``DistributedShampoo``: the arguments of the reference, the arithmetic of ``mfsdp.shampoo``."""

import logging
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from matrixfsdp_jax.assembly import Core
from matrixfsdp_jax.layout.blocks import Shape
from matrixfsdp_jax.layout.leaves import states_of
from matrixfsdp_jax.owner.canonical import all_slots
from matrixfsdp_jax.torch_compat import crossing, ddp, records, state_layout
from matrixfsdp_jax.torch_compat.base import Group, JaxOptimizer, Pending
from matrixfsdp_jax.torch_compat.blocks import Views, cut
from matrixfsdp_jax.torch_compat.configs import (
    ConcurrencyConfig,
    DDPDistributedConfig,
    DefaultConcurrencyConfig,
    DefaultShampooConfig,
    DefaultShampooRuntimeConfig,
    DefaultSingleDeviceDistributedConfig,
    DistributedConfig,
    EigendecompositionConfig,
    GeneralizedPrimalAveragingConfig,
    IterateAveragingConfig,
    PreconditionerConfig,
    PseudoInverseConfig,
    ScheduleFreeConfig,
    ShampooRuntimeConfig,
    SignDescentPreconditionerConfig,
    SingleDeviceDistributedConfig,
    SpectralDescentPreconditionerConfig,
    WeightDecayType,
)
from matrixfsdp_jax.torch_compat.engine import Engine, Make, Stacks
from matrixfsdp_jax.transforms.averaging import AveragingState
from matrixfsdp_jax.transforms.kronecker import Eigendecomposed, RootInverse
from matrixfsdp_jax.transforms.preconditioners import SGDGrafting
from matrixfsdp_jax.transforms.refresh import Schedule
from matrixfsdp_jax.transforms.shampoo import ShampooOptions, ShampooState, precondition_stacks
from matrixfsdp_jax.transforms.stacks import Tables, decay_stacks

Options = dict[str, Any]
logger = logging.getLogger(__name__)

# May change from step to step without a compilation.
_DYNAMIC = ("lr", "weight_decay")
# Of other options, before a warning: each compiles.
_MANY_CHANGES = 5
# Decide which blocks there are: fixed once there is a state.
_FIXED = ("max_preconditioner_dim", "distributed_config")


class PreconditionerValueError(ValueError):
    """A factor of a block is not finite."""


class DistributedShampoo(JaxOptimizer):
    """Shampoo and its relatives for PyTorch, the arithmetic compiled by JAX.

    The arguments, their defaults and their meanings are those of facebookresearch/optimizers'
    ``DistributedShampoo`` (arXiv 2309.06497), and so are the config classes beside it and the
    layout of ``state_dict()``. Parameters on CPU or on one CUDA device per process; they and their
    gradients cross to JAX by DLPack without a copy, the update of a group is one compiled function,
    and parameters are updated in place.

    Args:
      params: parameters, or dicts of parameter groups with options of their own.
      lr: learning rate; rounded to float32, as there.
      betas: decay of the gradient average (0: none) and of the factors (1: a sum).
      beta3: weight of the average in the direction; -1 is ``betas[0]``.
      epsilon: damping of the factors.
      weight_decay: >= 0.
      weight_decay_type: ``WeightDecayType``.
      max_preconditioner_dim: limit of merging, and size of a block; ``math.inf`` for none.
      precondition_frequency: steps between two decompositions.
      start_preconditioning_step: the first step with a decomposition; -1 is the frequency.
      use_bias_correction: of the gradient average and the factors.
      iterate_averaging_config: ``ClassicMomentumConfig``, ``GeneralizedPrimalAveragingConfig`` or
        ``ScheduleFreeConfig``; for the last two see ``train()`` and ``eval()``.
      grafting_config: any preconditioner config.
      use_pin_memory: only False; the learning rate is an argument of the compiled function.
      shampoo_pt2_compile_config: only None; the step is compiled already.
      distributed_config: ``SingleDeviceDistributedConfig`` or ``DDPDistributedConfig``. With an int
        ``target_parameter_dimensionality`` (default 1) small dims are merged: a (6, 4) weight is
        one vector of 24 unless it is 2.
      preconditioner_config: what preconditions.
      shampoo_runtime_config: ``eager_nan_check=True`` refuses gradients that are not finite.
      concurrency_config: accepted as it is by default; there are no streams per group.
      reference_aliasing: True copies what the reference does where a direction is its stored
        gradient average itself (a direction without preconditioning, ``betas[0] > 0`` without bias
        correction): decay and learning rate are written into the average. False leaves it one.

    Collectives: with ``DDPDistributedConfig`` one all-gather per group and step.

    Numerics: factors and roots in ``factor_matrix_dtype``, averages and moments in float32 or
      wider; updates in the dtype of the parameter. ``param.grad`` is not written to (the reference
      adds L2 decay to it).

    Raises:
      ValueError: an option out of its range; parameters on several devices, complex, sparse, on
        meta; other parameters on other ranks.
      NotImplementedError: an option that this layer does not carry, with the reason.
      PreconditionerValueError: in ``step``, when a factor is not finite; ValueError when more
        decompositions of a block failed in a row than
        ``num_tolerated_failed_amortized_computations``. Parameters have not moved then.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 1.0),
        beta3: float = -1.0,
        epsilon: float = 1e-12,
        weight_decay: float = 0.0,
        weight_decay_type: WeightDecayType = WeightDecayType.DECOUPLED,
        max_preconditioner_dim: int | float = 1024,
        precondition_frequency: int = 1,
        start_preconditioning_step: int = -1,
        use_bias_correction: bool = True,
        iterate_averaging_config: IterateAveragingConfig | None = None,
        grafting_config: PreconditionerConfig | None = None,
        use_pin_memory: bool = False,
        shampoo_pt2_compile_config: None = None,
        distributed_config: DistributedConfig = DefaultSingleDeviceDistributedConfig,
        preconditioner_config: PreconditionerConfig = DefaultShampooConfig,
        shampoo_runtime_config: ShampooRuntimeConfig = DefaultShampooRuntimeConfig,
        concurrency_config: ConcurrencyConfig = DefaultConcurrencyConfig,
        *,
        reference_aliasing: bool = True,
    ) -> None:
        _refuse(use_pin_memory, shampoo_pt2_compile_config, concurrency_config)
        if not isinstance(shampoo_runtime_config, ShampooRuntimeConfig):
            raise TypeError(
                f"shampoo_runtime_config={shampoo_runtime_config!r} must be a ShampooRuntimeConfig"
            )
        self._check_finite = shampoo_runtime_config.eager_nan_check
        self._aliasing = reference_aliasing
        defaults = {
            "lr": lr,
            "betas": betas,
            "beta3": beta3,
            "epsilon": epsilon,
            "weight_decay": weight_decay,
            # A number of its own: a schedule writes to a learning rate that is a tensor.
            "peak_lr": float(lr) if isinstance(lr, torch.Tensor) else lr,
            "weight_decay_type": weight_decay_type,
            "max_preconditioner_dim": max_preconditioner_dim,
            "precondition_frequency": precondition_frequency,
            "start_preconditioning_step": start_preconditioning_step,
            "use_bias_correction": use_bias_correction,
            "iterate_averaging_config": iterate_averaging_config,
            "grafting_config": grafting_config,
            "use_pin_memory": use_pin_memory,
            "distributed_config": distributed_config,
            "preconditioner_config": preconditioner_config,
        }
        super().__init__(params, defaults)

    def train(self) -> None:
        """Under iterate averaging: the training iterate back into the parameters."""
        self._each(lambda group, options: group.set_train_mode(options, train=True))

    def eval(self) -> None:
        """Under iterate averaging: the average into the parameters; no ``step`` until ``train``."""
        self._each(lambda group, options: group.set_train_mode(options, train=False))

    def groups(self) -> Iterator[tuple["ShampooGroup", Options]]:
        """Every parameter group as this layer has it, with its options."""
        for group, options in zip(self._groups, self.param_groups, strict=True):
            assert isinstance(group, ShampooGroup)
            yield group, options

    def _check(self, options: Options) -> None:
        _complete(options)
        core_of(options)  # the records check the rest

    def _keep_live(self, options: Options, old: Options) -> None:
        # Which ranks share the work is this process's business, and not the file's.
        saved, live = options["distributed_config"], old["distributed_config"]
        name = "target_parameter_dimensionality"
        if getattr(saved, name, None) != getattr(live, name):
            raise ValueError(
                f"distributed_config is {saved} in the state dict and {live} here, with other "
                f"blocks; build the optimizer with the {name} it was saved with"
            )
        options["distributed_config"] = live

    def _agree(self, groups: list[Options], error: Exception | None) -> None:
        shared = [g for g in groups if isinstance(g["distributed_config"], DDPDistributedConfig)]
        if not shared or (error is not None and not ddp.ready()):
            return
        lines = []
        for number, options in enumerate(groups):
            lines += [
                f"{name}={value!r} in group {number}"
                for name, value in options.items()
                if name != "params"
            ]
            lines += [
                f"parameter {i} of group {number}, {tuple(p.shape)} {p.dtype}"
                for i, p in enumerate(options["params"])
            ]
        if error is not None:
            lines = [f"the error {error}"]
        # Functions show their address, which differs from process to process.
        lines = [re.sub(r" at 0x[0-9a-f]+", "", line) for line in lines]
        ddp.check_same(lines, shared[0]["params"][0].device)

    def _make_group(self, options: Options) -> Group:
        return ShampooGroup(options, self._aliasing, self._check_finite)


class ShampooGroup(Group):
    """One parameter group: its blocks, its engine and, for DDP, its exchange."""

    def __init__(self, options: Options, aliasing: bool, check_finite: bool) -> None:
        params = options["params"]
        self._aliasing, self._check_finite = aliasing, check_finite
        device = crossing.check_devices(params)
        crossing.bind(device)
        config = options["distributed_config"]
        limits = options["max_preconditioner_dim"], config.target_parameter_dimensionality
        self.max_dim = limits[0]
        self.cuts = [cut(i, tuple(p.shape), *limits) for i, p in enumerate(params)]
        self._views = Views(params, self.cuts)
        self.blocks = list(self._views.of(params))
        self.exchange = None
        if isinstance(config, DDPDistributedConfig):
            group = ddp.subgroup(config.num_trainers_per_group)
            self.exchange = ddp.Exchange(self.blocks, config, group, device)
        own = self.blocks if self.exchange is None else self.exchange.own
        self._options = dict(options)
        self.engine = Engine(own, params, [c.merged for c in self.cuts], self._make(options))
        self._step = torch.zeros((), dtype=torch.int64)
        self._train = torch.ones((), dtype=torch.bool)
        self._lr_sum = torch.zeros((), dtype=torch.float32)
        self._nonfinite = 0
        self._changes = 0

    # ---- the step ------------------------------------------------------------------------------

    def prepare(self, options: Options) -> None:
        """Refuse a step in eval mode, gradients that are not finite, options that are fixed."""
        if not self._train:
            raise RuntimeError("the optimizer is in eval mode: call optimizer.train() first")
        if self._check_finite:
            for i, p in enumerate(options["params"]):
                if p.grad is not None and not torch.isfinite(p.grad).all():
                    raise ValueError(f"the gradient of parameter {i} of its group is not finite")
        new = {k: v for k, v in options.items() if k not in ("params", *_DYNAMIC)}
        old = {k: v for k, v in self._options.items() if k not in ("params", *_DYNAMIC)}
        if new == old:
            return
        self._check_fixed(options)
        self._check_kinds(options, "now")
        _complete(options)
        self._changes += 1
        if self._changes == _MANY_CHANGES:
            logger.warning(
                "options other than lr and weight_decay have changed %d times, and each change "
                "compiles the step of the group again; a scheduler that cycles betas does so in "
                "every step (cycle_momentum=False leaves them)",
                self._changes,
            )
        self.engine.set_transform(self._make(options))
        self._options = dict(options)

    def compute(self, options: Options) -> Pending:
        """One step of the state, and the updates of the blocks of this rank."""
        params = options["params"]
        grads = [p.grad if p.numel() else None for p in params]
        numbers = {
            "learning_rate": float(np.float32(options["lr"])),
            "weight_decay": float(options["weight_decay"]),
        }
        extra = self._scales(options, grads)
        updates = self.engine.step(grads, params, **numbers, **extra)
        self._step += 1
        error = self._failure(options) if _due(options, int(self._step)) else None
        views = self._views.of(params).items()
        into = {block: x for block, x in views if grads[block.param] is not None}
        return Pending(updates, into, error)

    def apply(self, pending: Pending, error: Exception | None) -> None:
        """Move the parameters, under DDP by the updates of all ranks."""
        updates, into, _ = pending
        if self.exchange is not None:
            self.exchange.apply(updates, into, error)
        elif error is not None:
            raise error
        elif updates:
            torch._foreach_add_([into[b] for b in updates], list(updates.values()))

    def _check_kinds(self, options: Options, where: str) -> None:
        """Refuse options that keep another state than that of this group."""
        for name in ("preconditioner_config", "grafting_config", "iterate_averaging_config"):
            if type(options[name]) is not type(self._options[name]):
                raise ValueError(
                    f"{name} is {options[name]} {where} and was {self._options[name]} when the "
                    "optimizer was built, which keeps another state; build one with these options"
                )
        kinds = [own["weight_decay_type"] is WeightDecayType.L2 for own in (options, self._options)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"weight_decay_type is {options['weight_decay_type']} {where} and was "
                f"{self._options['weight_decay_type']}; build an optimizer with this one"
            )

    def _check_fixed(self, options: Options) -> None:
        for name in _FIXED:
            if options[name] != self._options[name]:
                raise ValueError(
                    f"{name} was {self._options[name]} when the state was made and is "
                    f"{options[name]} now; the blocks cannot change, build a new optimizer"
                )

    def _failure(self, options: Options) -> Exception | None:
        """What the reference raises after the refreshes of this step, if anything."""
        failed, nonfinite, block = self.engine.failures()
        if nonfinite > self._nonfinite:
            self._nonfinite = nonfinite
            return PreconditionerValueError(
                f"a factor of a block is not finite in step {int(self._step)}: a gradient was "
                "infinite or NaN, or too large to be squared. Parameters have not moved, factors "
                "have: go on from a saved state, and look at gradients with eager_nan_check=True"
            )
        config = options["preconditioner_config"]
        limit = getattr(config, "num_tolerated_failed_amortized_computations", math.inf)
        if failed > limit:
            assert block is not None  # it has failed
            return ValueError(
                f"decompositions of {block.name} of parameter {block.param} of its group failed in "
                f"{failed} refreshes in a row, more than "
                f"num_tolerated_failed_amortized_computations={limit}; use a larger epsilon, "
                "another amortized_computation_config, or factor_matrix_dtype=torch.float64"
            )
        return None

    def _scales(self, options: Options, grads: list[torch.Tensor | None]) -> dict[str, Any]:
        """What ``scale_fn`` gives, called in torch on the filtered gradient of every block."""
        if not self._scaled or not self.engine.blocks:
            return {}
        core = core_of(options)
        params = options["params"]
        given = [
            torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)
        ]
        filtered = self.engine.evaluate(partial(self._filtered, core), given, params)
        found: dict[str, Any] = {}
        for name, kind in self._scaled.items():
            found[name] = {}
            for members in self.engine.stacks.values():
                own = [filtered[b] for b in members]
                scales = torch.stack([torch.as_tensor(kind.scale_fn(x)).to(x) for x in own])
                found[name][members[0].shape] = crossing.to_jax(scales)
        return {"scales": found}

    def _filtered(self, core: Core, state: Any, grads: Any, params: Any) -> dict[str, jax.Array]:
        """The gradients that would be preconditioned in the next step."""
        dims, phases, kept = self._tables(self.engine.stacks)
        if core.weight_decay_type == "l2" and core.weight_decay:
            decayed = decay_stacks(core.weight_decay, kept, all_slots)
            grads, _ = decayed.update(grads, decayed.init(params), params)
        plain = replace(core.options, preconditioner=SGDGrafting(), grafting=None)
        (own,) = states_of(ShampooState, state)
        return precondition_stacks(dims, phases, all_slots, plain).update(grads, own)[0]

    @staticmethod
    def _tables(stacks: Stacks) -> tuple[dict[str, Shape], dict[str, list[np.ndarray]], Tables]:
        """Dims, phases (one for all) and where weights decay (everywhere), of every stack."""
        sizes = {key: len(members) for key, members in stacks.items()}
        dims = {key: members[0].shape for key, members in stacks.items()}
        phases = {key: [np.zeros((1, size, 1), np.int32)] for key, size in sizes.items()}
        return dims, phases, {key: np.ones((1, size)) for key, size in sizes.items()}

    def _make(self, options: Options) -> Make:
        core = core_of(options)
        kinds = {"preconditioner": core.options.preconditioner, "grafting": core.options.grafting}
        self._scaled = {n: k for n, k in kinds.items() if isinstance(k, records.TorchScaledSign)}

        def make(
            stacks: Stacks, scales: dict[str, Any] | None = None, **numbers: Any
        ) -> optax.GradientTransformation:
            kinds = {
                name: replace(getattr(core.options, name), scales=own)
                for name, own in (scales or {}).items()
            }
            # Whether or not weights decay now, so that they may from any step on.
            numbers.setdefault("weight_decay", 1.0)
            own = replace(core, options=replace(core.options, **kinds), **numbers)
            dims, phases, kept = self._tables(stacks)
            direction = precondition_stacks(dims, phases, all_slots, own.options)
            tx = own.on_stacks(direction, kept, all_slots)
            return _aliased(tx, own.options, dims) if self._aliasing else tx

        return make

    # ---- state ---------------------------------------------------------------------------------

    def marks(self) -> dict[str, torch.Tensor]:
        """The step, and what iterate averaging counts."""
        found = {"step": self._step}
        if _averages(self._options):
            (state,) = states_of(AveragingState, self.engine.state)
            self._lr_sum.fill_(float(state.lr_sum))
            found |= {"train_mode": self._train, "lr_sum": self._lr_sum}
        return found

    def names(self) -> dict[int, list[str]]:
        """The blocks that this rank owns."""
        found: dict[int, list[str]] = {}
        for block in self.engine.blocks:
            found.setdefault(block.param, []).append(block.name)
        return found

    def entries(self, options: Options) -> dict[int, dict[str, Any]]:
        """The blocks that this rank owns, under their names."""
        found: dict[int, dict[str, Any]] = {i: {} for i in range(len(options["params"]))}
        packed = getattr(options["preconditioner_config"], "use_symmetric_packing", True)
        for block, own in state_layout.blocks_state(self.engine, packed).items():
            found[block.param][block.name] = own
        return found

    def load(self, entries: dict[int, dict[str, Any]], options: Options) -> None:
        """Take over the blocks that this rank owns; the train or eval mode stays."""
        self._check_loaded(entries, options)
        shared = {name: _one_value(name, entries) for name in ("step", "lr_sum")}
        given = {b: entries[b.param].get(b.name, {}) for b in self.engine.blocks}
        step = int(shared["step"] or 0)
        state_layout.load_blocks(self.engine, given, step, float(shared["lr_sum"] or 0.0))
        needed = ("step", "lr_sum") if _averages(options) else ("step",)
        if missing := [name for name in needed if shared[name] is None]:
            raise ValueError(f"the state dict has no {' and no '.join(missing)} for a group")
        self._step.fill_(step)
        self._nonfinite = 0

    def _check_loaded(self, entries: dict[int, dict[str, Any]], options: Options) -> None:
        """Refuse options that keep another state, and blocks that there are not."""
        self._check_fixed(options)
        self._check_kinds(options, "in the state dict")
        for i, own in entries.items():
            names = [block.name for block in self.cuts[i].blocks]
            if more := own.keys() - {*names, "step", "train_mode", "lr_sum"}:
                raise ValueError(
                    f"the state dict has {sorted(more)} for parameter {i} of its group, which has "
                    f"the blocks {names} here; it was saved for another model"
                )

    def set_train_mode(self, options: Options, *, train: bool) -> None:
        """Move the parameters between the training iterate and the average, if there is one."""
        if not _averages(options) or bool(self._train) == train:
            return
        y = options["iterate_averaging_config"].train_interp_coeff
        factor = 1 - y if train else 1 - 1 / y

        def iterates(state: Any) -> dict[str, jax.Array]:
            return states_of(AveragingState, state)[0].z

        fast = self.engine.evaluate(iterates)
        into = self._views.of(options["params"])
        moves = {b: (z.to(into[b]) - into[b]) * factor for b, z in fast.items()}
        self.apply(Pending(moves, into), None)
        self._train.fill_(train)


# ---- options -----------------------------------------------------------------------------------


def _refuse(use_pin_memory: Any, compile_config: Any, concurrency: Any) -> None:
    if use_pin_memory:
        raise NotImplementedError(
            "use_pin_memory=True: the learning rate is an argument of the compiled function here, "
            "nothing is staged; leave it False"
        )
    if compile_config is not None:
        raise NotImplementedError(
            "shampoo_pt2_compile_config: the step of a group is one function compiled by XLA "
            "already; leave it None"
        )
    if not isinstance(concurrency, ConcurrencyConfig):
        raise TypeError(f"concurrency_config={concurrency!r} must be a ConcurrencyConfig")


def _complete(options: Options) -> None:
    """Check the options of a group and fill in those that follow from others."""
    lr, betas, epsilon = options["lr"], options["betas"], options["epsilon"]
    number = not isinstance(lr, str) and np.ndim(lr) == 0
    _in_range("lr", lr, number and float(lr) >= 0, ">= 0")
    _in_range("betas", betas, isinstance(betas, tuple | list) and len(betas) == 2, "two numbers")
    beta1, beta2 = betas
    _in_range("betas[0]", beta1, 0 <= beta1 < 1, "in [0, 1)")
    _in_range("betas[1]", beta2, 0 <= beta2 <= 1, "in [0, 1]")
    if options["beta3"] == -1:
        options["beta3"] = beta1
    _in_range("beta3", options["beta3"], 0 <= options["beta3"] < 1, "in [0, 1), or -1 for betas[0]")
    _in_range("weight_decay", options["weight_decay"], options["weight_decay"] >= 0, ">= 0")
    config = options["preconditioner_config"]
    if config is None:
        raise TypeError("preconditioner_config=None must be a configuration")
    solver = getattr(config, "amortized_computation_config", None)
    rule = getattr(solver, "rank_deficient_stability_config", None)
    if isinstance(solver, EigendecompositionConfig) and isinstance(rule, PseudoInverseConfig):
        _in_range("epsilon", epsilon, epsilon == 0, "0 with PseudoInverseConfig")
    else:
        _in_range("epsilon", epsilon, epsilon > 0, "> 0")
    if options["weight_decay_type"] in (WeightDecayType.CORRECTED, WeightDecayType.INDEPENDENT):
        peak = options["peak_lr"]
        _in_range("peak_lr", peak, peak > 0, f"> 0 with {options['weight_decay_type']}")
    limit = options["max_preconditioner_dim"]
    whole = isinstance(limit, int) and not isinstance(limit, bool)
    fits = limit == math.inf or (whole and limit >= 1)
    _in_range("max_preconditioner_dim", limit, fits, "an int >= 1 or math.inf")
    _complete_schedule(options)
    _check_distributed(options)


def _complete_schedule(options: Options) -> None:
    config = options["preconditioner_config"]
    if isinstance(config, SignDescentPreconditionerConfig | SpectralDescentPreconditionerConfig):
        if options["precondition_frequency"] != 1:
            logger.warning(
                "%s has nothing to decompose: precondition_frequency is set from %s to 1",
                type(config).__name__,
                options["precondition_frequency"],
            )
        options["precondition_frequency"] = 1
    frequency, start = options["precondition_frequency"], options["start_preconditioning_step"]
    _in_range("precondition_frequency", frequency, frequency >= 1, ">= 1")
    if start == -1:
        options["start_preconditioning_step"] = start = frequency
    needed = f">= precondition_frequency={frequency}, or -1 for it"
    _in_range("start_preconditioning_step", start, start >= frequency, needed)


def _check_distributed(options: Options) -> None:
    config = options["distributed_config"]
    if not isinstance(config, SingleDeviceDistributedConfig | DDPDistributedConfig):
        raise NotImplementedError(
            f"distributed_config={config!r}: this layer carries SingleDeviceDistributedConfig and "
            "DDPDistributedConfig; for sharded parameters use the JAX transforms on an owner "
            "layout (matrixfsdp_jax.plan)"
        )
    if isinstance(config, DDPDistributedConfig):
        dtype = config.communication_dtype
        floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        _in_range("communication_dtype", dtype, floating, "a floating torch.dtype")
        ddp.check_world(config.num_trainers_per_group)
    spectral = isinstance(options["preconditioner_config"], SpectralDescentPreconditionerConfig)
    if spectral and config.target_parameter_dimensionality != 2:
        logger.warning(
            "spectral descent needs matrices: target_parameter_dimensionality is set to 2"
        )
        # A copy: the reference changes the caller's object, and with it other optimizers.
        options["distributed_config"] = replace(config, target_parameter_dimensionality=2)


def _in_range(name: str, value: Any, good: bool, expected: str) -> None:
    if not good:
        raise ValueError(f"{name}={value!r} must be {expected}")


def core_of(options: Options) -> Core:
    """The options as this package's records; every block is one tensor of its own."""
    shampoo = ShampooOptions(
        tuple(options["betas"]),
        options["beta3"],
        options["epsilon"],
        math.inf,
        math.inf,
        options["use_bias_correction"],
        records.preconditioner(options["preconditioner_config"]),
        records.preconditioner(options["grafting_config"]),
        Schedule(
            options["precondition_frequency"], options["start_preconditioning_step"], False, "all"
        ),
    )
    return Core(
        shampoo,
        float(options["lr"]),
        float(options["weight_decay"]),
        records.weight_decay_type(options["weight_decay_type"]),
        float(options["peak_lr"]),
        records.averaging(options["iterate_averaging_config"]),
    )


def _due(options: Options, step: int) -> bool:
    start, frequency = options["start_preconditioning_step"], options["precondition_frequency"]
    return step == start or (step > start and step % frequency == 0)


def _averages(options: Options) -> bool:
    kinds = GeneralizedPrimalAveragingConfig | ScheduleFreeConfig
    return isinstance(options["iterate_averaging_config"], kinds)


def _one_value(name: str, entries: dict[int, dict[str, Any]]) -> Any:
    """What all parameters of a group say, None if nothing.

    Raises: ValueError if they disagree.
    """
    found = {float(own[name]) for own in entries.values() if name in own}
    if len(found) > 1:
        raise ValueError(
            f"the state dict has several values of {name} in one parameter group, {sorted(found)}; "
            "it counts updates of the group"
        )
    return found.pop() if found else None


def aliases(options: ShampooOptions, order: int) -> bool:
    """Whether a direction of blocks of an order may be the stored average, in the reference."""
    kinds = (options.preconditioner, options.grafting)
    stored = options.beta3 == options.betas[0] > 0 and not options.use_bias_correction
    return stored and any(_is_input(kind, order) for kind in kinds)


def _is_input(kind: Any, order: int) -> bool:
    """Whether the direction of a kind is what it is given."""
    if isinstance(kind, RootInverse | Eigendecomposed):
        return not kind.dims(order)
    return isinstance(kind, SGDGrafting)


def _aliased(
    tx: optax.GradientTransformation, options: ShampooOptions, dims: dict[str, Shape]
) -> optax.GradientTransformation:
    """Write the update into the stored average, where the reference's direction is that average."""
    if not any(aliases(options, len(shape)) for shape in dims.values()):
        return tx

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        new, state = tx.update(updates, state, params)

        def written(found: Any) -> Any:
            if not isinstance(found, ShampooState):
                return found
            graft, start = options.grafting, options.schedule.start
            filtered = {}
            for key, (average,) in found.filtered.items():
                order = len(dims[key])
                alias = jnp.asarray(_is_input(options.preconditioner, order))
                if graft is not None:
                    alias = jnp.where(found.count < start, _is_input(graft, order), alias)
                filtered[key] = (jnp.where(alias, new[key][:, :, None], average),)
            return found._replace(filtered=filtered)

        is_state = ShampooState
        return new, jax.tree.map(written, state, is_leaf=lambda x: isinstance(x, is_state))

    return optax.GradientTransformation(tx.init, update)
