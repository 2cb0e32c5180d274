"""Shampoo and SOAP: they only assemble transforms, routes and a layout."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal, get_args

import jax
import numpy as np
import optax

from matrixfsdp_jax.layout.costs import method
from matrixfsdp_jax.layout.phases import refresh_phases
from matrixfsdp_jax.layout.spec import Plan
from matrixfsdp_jax.owner.canonical import on_canonical
from matrixfsdp_jax.owner.params import OwnerLayout, OwnerParams
from matrixfsdp_jax.owner.present import (
    on_present_leaves,
    on_present_stacks,
    present_tables,
)
from matrixfsdp_jax.owner.routed import (
    Routes,
    decay_tables,
    mask_of,
    refuse_rules,
    route_owned,
    route_tree,
)
from matrixfsdp_jax.owner.update import Local, on_owners
from matrixfsdp_jax.transforms.averaging import (
    AveragingState,
    ClassicMomentum,
    GeneralizedPrimalAveraging,
    ScheduleFree,
    averaged_step,
    classic_momentum,
)
from matrixfsdp_jax.transforms.checks import check_flags, check_number, check_transformation
from matrixfsdp_jax.transforms.kronecker import EigenvalueCorrected, RootInverse
from matrixfsdp_jax.transforms.refresh import FirstRefresh, Schedule
from matrixfsdp_jax.transforms.shampoo import ShampooOptions, precondition_stacks
from matrixfsdp_jax.transforms.stacks import decay, decay_stacks, per_slot

PyTree = Any
ScalarOrSchedule = Any
FirstStep = Literal["update", "skip"]
WeightDecayType = Literal["decoupled", "l2", "corrected", "independent"]
Averaging = ClassicMomentum | GeneralizedPrimalAveraging | ScheduleFree


def shampoo(
    learning_rate: ScalarOrSchedule,
    *,
    layout: OwnerLayout | None = None,
    rules: Any = None,
    betas: tuple[float, float] = (0.9, 1.0),
    beta3: float | None = None,
    epsilon: float = 1e-12,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_type: WeightDecayType = "decoupled",
    weight_decay_mask: Any = None,
    peak_learning_rate: float | None = None,
    max_preconditioner_dim: float = 1024,
    target_parameter_dimensionality: float = 2,
    precondition_frequency: int = 1,
    start_preconditioning_step: int | None = None,
    stagger: bool = True,
    first_refresh: FirstRefresh = "all",
    use_bias_correction: bool = True,
    preconditioner: Any = None,
    grafting: Any = None,
    iterate_averaging: Averaging | None = None,
    rest: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Shampoo: every tensor is preconditioned by inverse roots of one factor per dim.

    For a block ``G`` of order ``r`` (a leaf, small dims merged, cut at ``max_preconditioner_dim``)
    in step ``t``::

        L_d <- beta2 L_d + (1 - beta2) G_(d) G_(d)^T        (a sum for beta2 = 1)
        M   <- beta1 M + (1 - beta1) G
        P    = M x_1 (L_1 / c)^(-1/2r) ... x_r (L_r / c)^(-1/2r)
        W   <- W - lr_t (P |graft(M)| / |P| + weight_decay_t W)

    The order of operations, the bias corrections ``c`` and all options are those of
    facebookresearch/optimizers' ``DistributedShampoo``; options that are config classes there are
    records here (``mfsdp.EighRoot``, ``mfsdp.AdamGrafting``, ...).

    Args:
      learning_rate: a number or a schedule.
      layout: an ``OwnerLayout`` from ``mfsdp.plan(..., optimizer="shampoo")``; None for the user's
        own tree, on one device.
      rules: routing for ``layout=None``. By default matrices and leaves of order 3 and 4 are
        preconditioned; embeddings, heads and 1-D leaves go to ``rest``.
        ``mfsdp.rules.tensor("*")`` preconditions everything.
      betas: decay of the gradient average (0: none) and of the factors (1: a sum).
      beta3: weight of the average in the direction; None is ``betas[0]``.
      epsilon: damping of the factors, > 0 (exactly 0 with ``PseudoInverse``).
      weight_decay: a number or a schedule.
      weight_decay_type: ``"decoupled"``; ``"l2"``: added to the gradient; ``"corrected"``: times
        ``lr / peak_learning_rate``; ``"independent"``: over ``peak_learning_rate``.
      weight_decay_mask: as in ``mfsdp.muon``.
      peak_learning_rate: for the last two; None is ``learning_rate``, if that is a number.
      max_preconditioner_dim: largest size of a factor; ``math.inf`` for no blocks.
      target_parameter_dimensionality: small dims are merged while the order is above it. The
        reference's default 1 makes one long vector of a small matrix; here it is 2.
      precondition_frequency: steps between two decompositions of a factor.
      start_preconditioning_step: the first step with a decomposition; None is
        ``precondition_frequency``. Before it the direction is that of ``grafting`` (without one:
        Shampoo's with identities for roots).
      stagger: decompose about ``1 / precondition_frequency`` of the blocks in each step. False is
        the reference's schedule: all of them in every ``precondition_frequency``-th step.
      first_refresh: under ``stagger``, decompose ``"all"`` blocks at the first step, or
        ``"spread"`` them from the identity.
      use_bias_correction: of the gradient average and the factors.
      preconditioner: ``mfsdp.RootInverse()`` (default), ``Eigendecomposed()``,
        ``EigenvalueCorrected()`` (SOAP), ``SpectralDescent()``, ``SignDescent()``, or a grafting
        record.
      grafting: ``mfsdp.SGDGrafting()``, ``AdaGradGrafting()``, ``RMSpropGrafting()``,
        ``AdamGrafting()`` or any preconditioner: the norm of its direction, block by block.
      iterate_averaging: ``mfsdp.ClassicMomentum()``, ``GeneralizedPrimalAveraging()`` or
        ``ScheduleFree()``; see ``mfsdp.averaged_params`` for evaluation.
      rest: optimizer of every other trainable leaf. Default ``optax.adamw(3e-4)``.

    Returns:
      An optax transformation. A decomposition that fails keeps the last good root and counts in
      ``ShampooState.failures``; a factor that is not finite counts in ``nonfinite``;
      ``mfsdp.train_step`` raises on them. ``update`` takes the extra argument ``present``, a tree
      (or prefix) of bools in the user's structure: a preconditioned leaf where it is false has no
      gradient in this step, which is not a zero one: it keeps value and state.

    Collectives: none, beyond those of ``rest``.
    Numerics: factors, roots and averages in float32 or wider (``factor_dtype`` of the
    preconditioner); products at highest precision; updates in the gradients' dtype.

    Raises:
      ValueError: for an option out of its range.

    Examples:
      >>> params = {"kernel": jnp.ones((8, 16)), "bias": jnp.zeros(16)}
      >>> tx = mfsdp.shampoo(1e-2, grafting=mfsdp.AdamGrafting(), precondition_frequency=10)
      >>> state = tx.init(params)

    References:
      Gupta, Koren, Singer, "Shampoo", arXiv 1802.09568, 2018. Shi et al., "A Distributed
      Data-Parallel PyTorch Implementation of the Distributed Shampoo Optimizer", arXiv 2309.06497,
      2023. Defazio et al., "The Road Less Scheduled", arXiv 2405.15682, 2024.
    """
    options = _options(
        betas,
        beta3,
        epsilon,
        max_preconditioner_dim,
        target_parameter_dimensionality,
        precondition_frequency,
        start_preconditioning_step,
        stagger,
        first_refresh,
        use_bias_correction,
        RootInverse() if preconditioner is None else preconditioner,
        grafting,
    )
    core = _Core(
        options,
        learning_rate,
        weight_decay,
        weight_decay_type,
        peak_learning_rate,
        iterate_averaging,
    )
    return core.optimizer(layout, rules, weight_decay_mask, rest)


def soap(
    learning_rate: ScalarOrSchedule,
    *,
    layout: OwnerLayout | None = None,
    rules: Any = None,
    betas: tuple[float, float] = (0.95, 0.95),
    beta3: float | None = None,
    epsilon: float = 1e-8,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_type: WeightDecayType = "decoupled",
    weight_decay_mask: Any = None,
    peak_learning_rate: float | None = None,
    max_preconditioner_dim: float = 1024,
    target_parameter_dimensionality: float = 2,
    precondition_frequency: int = 10,
    start_preconditioning_step: int | None = None,
    stagger: bool = True,
    first_refresh: FirstRefresh = "all",
    first_step: FirstStep = "update",
    use_bias_correction: bool = True,
    preconditioner: EigenvalueCorrected | None = None,
    grafting: Any = None,
    iterate_averaging: Averaging | None = None,
    rest: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """SOAP: Adam in the eigenbasis of Shampoo's factors.

    For a block ``G`` with factors ``L_d`` as in ``mfsdp.shampoo`` and their eigenvectors ``Q_d``,
    decomposed anew every ``precondition_frequency`` steps::

        G'  = G rotated by all Q_d^T;   V <- beta2 V + (1 - beta2) G'^2
        M   <- beta1 M + (1 - beta1) G; M' = M rotated likewise
        P'  = M' / ((V / c)^(1/2) + epsilon);  P = P' rotated back

    The second moment moves in every step. It is not rotated when the basis changes, as in both
    implementations below.

    Args:
      learning_rate: a number or a schedule.
      layout: an ``OwnerLayout`` from ``mfsdp.plan(..., optimizer="soap")``, or None.
      rules: as in ``mfsdp.shampoo``, and so are all arguments that are not named here.
      betas: decay of the gradient average, and of factors and second moment.
      beta3: as there.
      epsilon: added to the root of the second moment (and to the factors, which changes no
        eigenvector).
      weight_decay: as there.
      weight_decay_type: as there.
      weight_decay_mask: as there.
      peak_learning_rate: as there.
      max_preconditioner_dim: as there.
      target_parameter_dimensionality: as there.
      precondition_frequency: steps between two decompositions of a factor.
      start_preconditioning_step: the first step with a decomposition; None is
        ``precondition_frequency``. Before it the basis is the identity, and the update Adam's.
      stagger: as there.
      first_refresh: as there.
      first_step: ``"update"``: the first step updates, as in facebookresearch/optimizers.
        ``"skip"``: it only builds factors and basis, its direction is zero (weight decay acts), and
        all moments (with their bias corrections) begin with the second gradient, as in the paper's
        code; the first decomposition is then in step 1.
      use_bias_correction: as there.
      preconditioner: ``mfsdp.EigenvalueCorrected(...)``, for ``QRBasis``, adaptive refresh by
        ``tolerance``, dims without a basis, other exponents.
      grafting: as there.
      iterate_averaging: as there.
      rest: as there.

    Collectives: none, beyond those of ``rest``.
    Numerics: as ``mfsdp.shampoo``.

    Raises:
      ValueError: for an option out of its range.

    Examples:
      >>> tx = mfsdp.soap(3e-3, weight_decay=0.01)

    References:
      Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", arXiv 2409.11321, 2024,
      and its code; facebookresearch/optimizers (eigenvalue-corrected Shampoo).
    """
    options = _options(
        betas,
        beta3,
        epsilon,
        max_preconditioner_dim,
        target_parameter_dimensionality,
        precondition_frequency,
        start_preconditioning_step,
        stagger,
        first_refresh,
        use_bias_correction,
        _eigenvalue_corrected(preconditioner),
        grafting,
        first_step,
    )
    core = _Core(
        options,
        learning_rate,
        weight_decay,
        weight_decay_type,
        peak_learning_rate,
        iterate_averaging,
    )
    return core.optimizer(layout, rules, weight_decay_mask, rest)


def scale_by_shampoo(
    *,
    layout: OwnerLayout | None = None,
    rules: Any = None,
    betas: tuple[float, float] = (0.9, 1.0),
    beta3: float | None = None,
    epsilon: float = 1e-12,
    max_preconditioner_dim: float = 1024,
    target_parameter_dimensionality: float = 2,
    precondition_frequency: int = 1,
    start_preconditioning_step: int | None = None,
    stagger: bool = True,
    first_refresh: FirstRefresh = "all",
    use_bias_correction: bool = True,
    preconditioner: Any = None,
    grafting: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """The direction of ``shampoo`` without decay, averaging and rate.

    See ``shampoo`` for the arguments. Leaves that are not preconditioned pass unchanged, frozen
    ones get a zero update.
    """
    options = _options(
        betas,
        beta3,
        epsilon,
        max_preconditioner_dim,
        target_parameter_dimensionality,
        precondition_frequency,
        start_preconditioning_step,
        stagger,
        first_refresh,
        use_bias_correction,
        RootInverse() if preconditioner is None else preconditioner,
        grafting,
    )
    return _direction(options, layout, rules)


def scale_by_soap(
    *,
    layout: OwnerLayout | None = None,
    rules: Any = None,
    betas: tuple[float, float] = (0.95, 0.95),
    beta3: float | None = None,
    epsilon: float = 1e-8,
    max_preconditioner_dim: float = 1024,
    target_parameter_dimensionality: float = 2,
    precondition_frequency: int = 10,
    start_preconditioning_step: int | None = None,
    stagger: bool = True,
    first_refresh: FirstRefresh = "all",
    first_step: FirstStep = "update",
    use_bias_correction: bool = True,
    preconditioner: EigenvalueCorrected | None = None,
    grafting: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """The direction of ``soap`` without decay, averaging and rate; see there for the arguments."""
    options = _options(
        betas,
        beta3,
        epsilon,
        max_preconditioner_dim,
        target_parameter_dimensionality,
        precondition_frequency,
        start_preconditioning_step,
        stagger,
        first_refresh,
        use_bias_correction,
        _eigenvalue_corrected(preconditioner),
        grafting,
        first_step,
    )
    return _direction(options, layout, rules)


def averaged_params(
    state: PyTree, params: PyTree, iterate_averaging: GeneralizedPrimalAveraging | ScheduleFree
) -> PyTree:
    """The parameters to evaluate with under iterate averaging; training goes on with ``params``.

    Args:
      state: of ``mfsdp.shampoo`` or ``mfsdp.soap`` with ``iterate_averaging``, in any optax state.
      params: the training parameters, canonical or owner params, as the state is.
      iterate_averaging: what the optimizer was given.

    Returns:
      ``X = Y + (1 - 1 / train_interp_coeff) (Z - Y)`` in the structure and dtypes of ``params``;
      leaves that are not averaged as they are.
    """

    def is_state(x: Any) -> bool:
        return isinstance(x, AveragingState)

    found = [s for s in jax.tree.leaves(state, is_leaf=is_state) if is_state(s)]
    if len(found) != 1:
        raise ValueError(f"the state holds {len(found)} iterate averages, expected one")
    z = found[0].z
    factor = 1 - 1 / iterate_averaging.train_interp_coeff

    def averaged(z: Any, y: Any) -> Any:
        if isinstance(z, optax.MaskedNode):
            return y
        return (y.astype(z.dtype) + factor * (z - y.astype(z.dtype))).astype(y.dtype)

    def is_masked(x: Any) -> bool:
        return isinstance(x, optax.MaskedNode)

    if isinstance(params, OwnerParams):
        return params._replace(stacks=jax.tree.map(averaged, z, params.stacks, is_leaf=is_masked))
    return jax.tree.map(averaged, z, params, is_leaf=is_masked)


def _options(
    betas: tuple[float, float],
    beta3: float | None,
    epsilon: float,
    max_preconditioner_dim: float,
    target_parameter_dimensionality: float,
    precondition_frequency: int,
    start_preconditioning_step: int | None,
    stagger: bool,
    first_refresh: FirstRefresh,
    use_bias_correction: bool,
    preconditioner: Any,
    grafting: Any,
    first_step: FirstStep = "update",
) -> ShampooOptions:
    check_flags(stagger=stagger, use_bias_correction=use_bias_correction)
    if first_step not in get_args(FirstStep):
        raise ValueError(f"first_step={first_step!r} must be one of {get_args(FirstStep)}")
    skip = first_step == "skip"
    start = start_preconditioning_step
    if start is None:
        start = 1 if skip else precondition_frequency
    if skip and (start != 1 or first_refresh != "all"):
        raise ValueError(
            'first_step="skip" builds the basis in step 1, so it needs '
            'start_preconditioning_step=1 (or None) and first_refresh="all"'
        )
    return ShampooOptions(
        betas,
        betas[0] if beta3 is None and isinstance(betas, tuple | list) else beta3,
        epsilon,
        max_preconditioner_dim,
        target_parameter_dimensionality,
        use_bias_correction,
        preconditioner,
        grafting,
        Schedule(precondition_frequency, start, stagger, first_refresh),
        skip,
    )


def _eigenvalue_corrected(preconditioner: Any) -> EigenvalueCorrected:
    if preconditioner is None:
        return EigenvalueCorrected()
    if not isinstance(preconditioner, EigenvalueCorrected):
        raise TypeError(
            f"preconditioner={preconditioner!r} must be a mfsdp.EigenvalueCorrected; other kinds "
            "belong to mfsdp.shampoo"
        )
    return preconditioner


def _direction(
    options: ShampooOptions, layout: OwnerLayout | None, rules: Any
) -> optax.GradientTransformationExtraArgs:
    if layout is None:
        return route_tree(
            lambda routes, _: _precondition_tree(routes, options),
            optax.identity(),
            rules,
            "shampoo",
        )
    refuse_rules(rules)
    _refuse_transposed(layout.plan)
    tx = on_owners(lambda local: precondition(layout.plan, local, options), layout)
    return route_owned(tx, optax.identity(), layout)


@dataclass(frozen=True)
class _Core:
    """All but the routes, for both forms of the parameters."""

    options: ShampooOptions
    learning_rate: ScalarOrSchedule
    weight_decay: ScalarOrSchedule
    weight_decay_type: WeightDecayType
    peak_learning_rate: float | None
    averaging: Averaging | None

    def __post_init__(self) -> None:
        """Bad options raise here, at construction, and not in the step."""
        check_number("learning_rate", self.learning_rate, low=0.0, schedule=True)
        check_number("weight_decay", self.weight_decay, low=0.0, schedule=True)
        if self.weight_decay_type not in get_args(WeightDecayType):
            raise ValueError(
                f"weight_decay_type={self.weight_decay_type!r} must be one of "
                f"{get_args(WeightDecayType)}"
            )
        if not isinstance(self.averaging, Averaging | None):
            raise TypeError(
                f"iterate_averaging={self.averaging!r} must be mfsdp.ClassicMomentum(), "
                "GeneralizedPrimalAveraging(), ScheduleFree() or None"
            )
        peaked = self.weight_decay_type in ("corrected", "independent")
        if peaked and self.peak_learning_rate is None:
            if not isinstance(self.learning_rate, Real):
                raise ValueError(
                    f"weight_decay_type={self.weight_decay_type!r} with a learning rate that is "
                    "no number needs peak_learning_rate"
                )
            object.__setattr__(self, "peak_learning_rate", float(self.learning_rate))
        if peaked and not self.peak_learning_rate:
            raise ValueError(
                f"peak_learning_rate={self.peak_learning_rate} (by default the learning_rate) "
                f"must be above 0 for weight_decay_type={self.weight_decay_type!r}"
            )

    def optimizer(
        self, layout: OwnerLayout | None, rules: Any, mask: Any, rest: Any
    ) -> optax.GradientTransformationExtraArgs:
        """For owner params of a layout, or for the user's own tree."""
        rest = optax.adamw(3e-4) if rest is None else rest
        check_transformation("rest", rest)
        if layout is None:

            def on_tree(routes: Routes, tree: PyTree) -> optax.GradientTransformation:
                # A function sees the whole tree here; optax would hide the rest from it.
                own = self.on_tree(routes, mask_of(tree, mask))
                return on_present_leaves(own, tree)

            return route_tree(on_tree, rest, rules, "shampoo")
        refuse_rules(rules)
        _refuse_transposed(layout.plan)
        kept = decay_tables(layout, mask, lambda matrix: 1.0)

        def stacks(local: Local, **numbers: Any) -> optax.GradientTransformation:
            own = replace(self, **numbers).on_stacks(layout.plan, kept, local)
            return on_present_stacks(own, local)

        numbers = {"learning_rate": self.learning_rate, "weight_decay": self.weight_decay}
        tx = on_owners(stacks, layout, **numbers)

        def update(
            updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
        ) -> tuple[PyTree, PyTree]:
            if extra.get("present") is not None:
                extra["present"] = present_tables(layout, extra["present"])
            return tx.update(updates, state, params, **extra)

        return route_owned(optax.GradientTransformationExtraArgs(tx.init, update), rest, layout)

    def on_stacks(
        self, plan: Plan, kept: dict[str, np.ndarray], local: Local
    ) -> optax.GradientTransformation:
        def shrunk(z: PyTree, factor: Any) -> PyTree:
            return jax.tree.map(lambda x, d: x - factor * d, z, per_slot(z, kept, local))

        return self._chain(
            precondition(plan, local, self.options),
            lambda amount: decay_stacks(amount, kept, local),
            shrunk,
        )

    def on_tree(self, routes: Routes, mask: PyTree) -> optax.GradientTransformation:
        def shrunk(z: PyTree, factor: Any) -> PyTree:
            def part(keep: bool, z: PyTree) -> PyTree:
                return jax.tree.map(lambda x: x - factor * x, z) if keep else z

            return jax.tree.map(part, mask, z)

        packed = _precondition_tree(routes, self.options)
        return self._chain(packed, lambda amount: decay(amount, mask), shrunk)

    def _chain(
        self,
        precondition: optax.GradientTransformation,
        decayed: Callable[[ScalarOrSchedule], optax.GradientTransformation],
        shrunk: Callable[[PyTree, Any], PyTree],
    ) -> optax.GradientTransformation:
        """The parts of a step in their order; ``decayed`` adds decay, ``shrunk`` applies it."""
        coupled = self.weight_decay_type == "l2"
        amount = self._decay()
        none = isinstance(self.weight_decay, Real) and self.weight_decay == 0
        steps = [precondition]
        if coupled and not none:
            steps = [decayed(amount), precondition]
        if isinstance(self.averaging, GeneralizedPrimalAveraging | ScheduleFree):

            def shrink(z: PyTree, lr: Any, count: jax.Array) -> PyTree:
                return z if coupled or none else shrunk(z, lr * _at(amount, count))

            return optax.chain(*steps, averaged_step(self.averaging, self.learning_rate, shrink))
        if not coupled and not none:
            steps.append(decayed(amount))
        if self.averaging is not None:
            steps.append(classic_momentum(self.averaging))
        return optax.chain(*steps, optax.scale_by_learning_rate(self.learning_rate))

    def _decay(self) -> ScalarOrSchedule:
        """The weight decay before it is multiplied by the learning rate."""
        decay, rate, peak = self.weight_decay, self.learning_rate, self.peak_learning_rate
        if self.weight_decay_type in ("decoupled", "l2"):
            return decay
        if self.weight_decay_type == "independent":
            return lambda count: _at(decay, count) / peak
        return lambda count: _at(decay, count) * _at(rate, count) / peak


def precondition(plan: Plan, local: Local, options: ShampooOptions) -> optax.GradientTransformation:
    """``precondition_stacks`` for the classes of a plan."""
    shapes = {c.key: c.shape for c in plan.classes}
    return precondition_stacks(shapes, _phase_tables(plan, options), local, options)


def _phase_tables(plan: Plan, options: ShampooOptions) -> dict[str, list[np.ndarray]]:
    """Per class and group of blocks the phase of every block ``[N, W, B]``, ``F`` in pads."""
    num_phases = options.schedule.num_phases
    units = {c.key: options.units(c.shape) for c in plan.classes}
    names = {c.key: [matrix.name for matrix in c.matrices] for c in plan.classes}
    phases = refresh_phases(names, units, num_phases)
    tables = {}
    for c in plan.classes:
        lead = (c.num_devices, c.num_waves)
        tables[c.key] = [np.full((*lead, blocks), num_phases) for blocks, _ in units[c.key]]
        for matrix, slot in zip(c.matrices, c.slots, strict=True):
            for table, own in zip(tables[c.key], phases[matrix.name], strict=True):
                table[slot] = own
    return tables


def _precondition_tree(
    routes: Routes, options: ShampooOptions
) -> optax.GradientTransformationExtraArgs:
    return on_canonical(lambda plan, local: precondition(plan, local, options), routes, "shampoo")


def _refuse_transposed(plan: Plan) -> None:
    if any(matrix.transposed for c in plan.classes for matrix in c.matrices):
        raise ValueError(
            f"the layout was planned for {method(plan.optimizer).name} and stores tall matrices "
            'transposed; plan it with optimizer="shampoo" or "soap"'
        )


def _at(value: ScalarOrSchedule, count: jax.Array) -> Any:
    return value(count) if callable(value) else value
