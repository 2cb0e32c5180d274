"""Assembles Shampoo and SOAP from transforms, routes and a layout, for both forms of parameters."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal, get_args

import jax
import numpy as np
import optax

from matrixfsdp_jax.layout.phases import refresh_phases
from matrixfsdp_jax.layout.spec import Plan
from matrixfsdp_jax.owner.canonical import on_canonical
from matrixfsdp_jax.owner.params import OwnerLayout
from matrixfsdp_jax.owner.present import (
    on_present_leaves,
    on_present_stacks,
    present_tables,
)
from matrixfsdp_jax.owner.routed import (
    Routes,
    check_layout,
    decay_tables,
    mask_of,
    route_owned,
    route_planned,
    route_tree,
)
from matrixfsdp_jax.owner.sharded import on_sharded
from matrixfsdp_jax.owner.update import Local, on_owners
from matrixfsdp_jax.transforms.averaging import (
    ClassicMomentum,
    GeneralizedPrimalAveraging,
    ScheduleFree,
    averaged_step,
    classic_momentum,
)
from matrixfsdp_jax.transforms.checks import (
    check_flags,
    check_kind,
    check_number,
    check_static,
    check_transformation,
)
from matrixfsdp_jax.transforms.kronecker import EigenvalueCorrected
from matrixfsdp_jax.transforms.refresh import FirstRefresh, Schedule
from matrixfsdp_jax.transforms.shampoo import ShampooOptions, precondition_stacks
from matrixfsdp_jax.transforms.stacks import Tables, decay, decay_stacks, per_slot

PyTree = Any
ScalarOrSchedule = Any
FirstStep = Literal["update", "skip"]
WeightDecayType = Literal["decoupled", "l2", "corrected", "independent"]
Averaging = ClassicMomentum | GeneralizedPrimalAveraging | ScheduleFree


def make_options(
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
    """The arguments of ``mfsdp.shampoo`` and ``mfsdp.soap``, checked, with defaults filled in."""
    check_flags(stagger=stagger, use_bias_correction=use_bias_correction)
    check_static(
        beta3=beta3,
        epsilon=epsilon,
        max_preconditioner_dim=max_preconditioner_dim,
        target_parameter_dimensionality=target_parameter_dimensionality,
        precondition_frequency=precondition_frequency,
        start_preconditioning_step=start_preconditioning_step,
    )
    if getattr(grafting, "refreshes", False):
        raise TypeError(
            f"grafting={grafting!r} has factors, which are never decomposed in a grafting (as in "
            "the reference), so its norm would be that of SGD or Adam; give mfsdp.SGDGrafting(), "
            "AdaGradGrafting(), RMSpropGrafting() or AdamGrafting()"
        )
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


def eigenvalue_corrected(preconditioner: Any) -> EigenvalueCorrected:
    """SOAP's preconditioner, by default a plain one. TypeError for another kind."""
    if preconditioner is None:
        return EigenvalueCorrected()
    if not isinstance(preconditioner, EigenvalueCorrected):
        raise TypeError(
            f"preconditioner={preconditioner!r} must be a mfsdp.EigenvalueCorrected; other kinds "
            "belong to mfsdp.shampoo"
        )
    return preconditioner


def direction(
    options: ShampooOptions, layout: OwnerLayout | None, rules: Any
) -> optax.GradientTransformationExtraArgs:
    """The preconditioned direction alone, for owner params of a layout or the user's own tree."""
    rest = optax.identity()
    if layout is None:

        def on_tree(routes: Routes, tree: PyTree) -> optax.GradientTransformation:
            return on_present_leaves(_precondition_tree(routes, options), tree)

        return route_tree(on_tree, rest, rules, "shampoo")
    check_layout(layout, rules, oriented=False)
    if layout.storage == "sharded":
        return route_planned(lambda _: _precondition_sharded(layout, options), rest, layout)

    def stacks(local: Local) -> optax.GradientTransformation:
        return on_present_stacks(precondition(layout.plan, local, options), local)

    return _on_owners(stacks, rest, layout)


@dataclass(frozen=True)
class Core:
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
        if self.averaging is not None:
            check_kind("iterate_averaging", self.averaging, *get_args(Averaging))
        check_static(peak_learning_rate=self.peak_learning_rate)
        if self.peak_learning_rate is not None:
            check_number("peak_learning_rate", self.peak_learning_rate, low=0.0)
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
                packed = _precondition_tree(routes, self.options)
                return on_present_leaves(self.on_tree(packed, mask_of(tree, mask)), tree)

            return route_tree(on_tree, rest, rules, "shampoo")
        check_layout(layout, rules, oriented=False)
        if layout.storage == "sharded":

            def on_planned(tree: PyTree) -> optax.GradientTransformation:
                packed = _precondition_sharded(layout, self.options)
                return self.on_tree(packed, mask_of(tree, mask))

            return route_planned(on_planned, rest, layout)
        kept = decay_tables(layout, mask, lambda matrix: 1.0)

        def stacks(local: Local, **numbers: Any) -> optax.GradientTransformation:
            direction = precondition(layout.plan, local, self.options)
            own = replace(self, **numbers).on_stacks(direction, kept, local)
            return on_present_stacks(own, local)

        numbers = {"learning_rate": self.learning_rate, "weight_decay": self.weight_decay}
        return _on_owners(stacks, rest, layout, **numbers)

    def on_stacks(
        self, precondition: optax.GradientTransformation, kept: Tables, local: Local
    ) -> optax.GradientTransformation:
        """For stacks; ``kept``: 1 in the slots that are decayed, else 0."""

        def shrunk(z: PyTree, factor: Any) -> PyTree:
            return jax.tree.map(lambda x, d: x - factor * d, z, per_slot(z, kept, local))

        return self._chain(
            precondition,
            lambda amount: decay_stacks(amount, kept, local),
            shrunk,
        )

    def on_tree(
        self, precondition: optax.GradientTransformation, mask: PyTree
    ) -> optax.GradientTransformation:
        """For a tree of preconditioned leaves; ``mask``: which are decayed."""

        def shrunk(z: PyTree, factor: Any) -> PyTree:
            def part(keep: bool, z: PyTree) -> PyTree:
                return jax.tree.map(lambda x: x - factor * x, z) if keep else z

            return jax.tree.map(part, mask, z)

        return self._chain(precondition, lambda amount: decay(amount, mask), shrunk)

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


def _on_owners(
    stacks: Callable[..., optax.GradientTransformation],
    rest: optax.GradientTransformation,
    layout: OwnerLayout,
    **numbers: Any,
) -> optax.GradientTransformationExtraArgs:
    """``stacks(local, **numbers)`` by the owners, ``present`` as tables; ``rest`` as it is."""
    tx = on_owners(stacks, layout, **numbers)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        if extra.get("present") is not None:
            extra["present"] = present_tables(layout, extra["present"])
        return tx.update(updates, state, params, **extra)

    return route_owned(optax.GradientTransformationExtraArgs(tx.init, update), rest, layout)


def precondition(plan: Plan, local: Local, options: ShampooOptions) -> optax.GradientTransformation:
    """``precondition_stacks`` for the classes of a plan."""
    shapes = {c.key: c.shape for c in plan.classes}
    return precondition_stacks(shapes, phase_tables(plan, options), local, options)


def phase_tables(plan: Plan, options: ShampooOptions) -> dict[str, list[np.ndarray]]:
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


def _precondition_sharded(
    layout: OwnerLayout, options: ShampooOptions
) -> optax.GradientTransformationExtraArgs:
    return on_sharded(lambda local: precondition(layout.plan, local, options), layout)


def _at(value: ScalarOrSchedule, count: jax.Array) -> Any:
    return value(count) if callable(value) else value
