"""The ready optimizers: they only assemble transforms, routes and a layout."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import optax

from matrixfsdp_jax.layout.spec import Matrix, Plan
from matrixfsdp_jax.owner.canonical import on_canonical
from matrixfsdp_jax.owner.params import OwnerLayout
from matrixfsdp_jax.owner.routed import (
    Routes,
    check_layout,
    decay_tables,
    mask_of,
    route_owned,
    route_planned,
    route_tree,
    row_outputs,
    slot_tables,
)
from matrixfsdp_jax.owner.sharded import on_sharded, split_reductions
from matrixfsdp_jax.owner.update import on_owners
from matrixfsdp_jax.transforms.checks import (
    check_flags,
    check_number,
    check_static,
    check_transformation,
)
from matrixfsdp_jax.transforms.muon import MomentumRule, orthogonalize_stacks, scale_by_momentum
from matrixfsdp_jax.transforms.scaling import scale_fn
from matrixfsdp_jax.transforms.stacks import decay, decay_stacks, scale_stacks
from matrixfsdp_jax.transforms.variants import MuonVariant

PyTree = Any
ScalarOrSchedule = Any

_PLAIN = MuonVariant()


def muon(
    learning_rate: ScalarOrSchedule,
    *,
    layout: OwnerLayout | None = None,
    rules: Any = None,
    momentum: ScalarOrSchedule = 0.95,
    nesterov: bool = True,
    momentum_rule: MomentumRule = "ema",
    bias_correction: bool = False,
    momentum_dtype: Any = None,
    ns_steps: int = 5,
    ns_coefficients: Any = "keller",
    ns_dtype: Any = None,
    ns_algorithm: str = "auto",
    exact: bool = False,
    eps: float = 1e-8,
    scale: str | Callable[[int, int], float] = "sqrt_max_1_out_in",
    variant: MuonVariant | None = None,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: Any = None,
    cautious_weight_decay: bool = False,
    rest: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Muon: every matrix moves along its orthogonalised momentum, everything else by ``rest``.

    For a matrix ``W`` with gradient ``G`` at step ``t``::

        M <- b M + (1 - b) G
        O  = NewtonSchulz(b M + (1 - b) G)          (M itself without Nesterov)
        W <- W - lr_t (scale(fan_in, fan_out) O + weight_decay_t W)

    Args:
      learning_rate: rate of the matrices, a number or a schedule.
      layout: an ``OwnerLayout`` (from ``mfsdp.plan``): parameters, gradients and updates are then
        owner params. None: the user's own tree, on one device.
      rules: routing for ``layout=None`` (with a layout, give them to ``mfsdp.plan``).
      momentum: ``b`` in [0, 1), a number or a schedule.
      nesterov: mix the gradient in once more.
      momentum_rule: ``"ema"`` as above, or ``"sum"``: ``M <- b M + G`` and ``G + b M``, as in
        Moonlight and dion. The direction is the same up to rounding, the state is not.
      bias_correction: that of ``optax.contrib.muon``; off, as in Jordan's Muon and in torch.
      momentum_dtype: None is float32 (float64 for float64).
      ns_steps: Newton-Schulz steps.
      ns_coefficients: name of a coefficient table (``"keller"``, ``"you"``, ``"polar_express"``,
        ``"cans_schatten"``, ``"aol"``, ``"cubic"``, ``"keller_polished"``), or its rows
        ``(a, b, c)``. Fewer steps than rows take the first rows, more repeat the last.
      ns_dtype: dtype of the iteration; None is float32 on CPU, float16 on GPU, bfloat16 on TPU
        (float64 for float64).
      ns_algorithm: form of the iteration, ``"auto"``, ``"standard"``, ``"gram"``,
        ``"standard_symmetric"`` or ``"gram_symmetric"``; all give the same up to rounding.
      exact: the polar factor by SVD instead of the iteration; slow.
      eps: added to a matrix's norm after it was scaled to a largest entry in [1, 2); > 0.
      scale: factor on the orthogonal update, by formula: ``"sqrt_max_1_out_in"``
        (``sqrt(max(1, fan_out / fan_in))``), ``"rms_0.2"`` (``0.2 sqrt(max(fan_out, fan_in))``),
        ``"sqrt_out_in"``, ``"none"``, or a function of ``(fan_in, fan_out)``. The fans come from
        the route of each leaf.
      variant: ``mfsdp.variants.normuon()``, ``mfsdp.variants.adamuon()`` or a ``MuonVariant`` of
        your own; it changes ``O``.
      weight_decay: decoupled, multiplied by the learning rate; of the matrices only. A number or
        a schedule.
      weight_decay_mask: which matrices decay: a tree (or prefix) of booleans in the user's own
        structure, or a function from the tree to it.
      cautious_weight_decay: decay only entries whose update has the sign of the parameter (arXiv
        2510.12402).
      rest: optimizer of every other trainable leaf, with its own rates. Default
        ``optax.adamw(3e-4)``.

    Returns:
      An optax transformation. With ``layout=None`` its state mirrors the user's tree; with a
      layout use ``layout.init``, ``layout.state_shardings``.

    Collectives: none, beyond those of ``rest``.
    Numerics: momentum and update in float32 (float64 for float64), updates in the gradients'
    dtype. Pad slots stay exactly zero.

    Raises:
      ValueError: for an option out of its range.
      TypeError: for an option of another type; if a layout is given and the tree is not owner
        params of it.

    Examples:
      >>> import jax.numpy as jnp, optax, matrixfsdp_jax as mfsdp
      >>> params = {"dense": {"kernel": jnp.eye(4, 8), "bias": jnp.zeros(8)}}
      >>> tx = mfsdp.muon(0.02, rest=optax.adam(1e-3))
      >>> state = tx.init(params)
      >>> updates, state = tx.update(params, state, params)
      >>> updates["dense"]["kernel"].shape
      (4, 8)

    References:
      Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
      Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982, 2025 (``"rms_0.2"``).
    """
    check_number("learning_rate", learning_rate, low=0.0, schedule=True)
    check_number("weight_decay", weight_decay, low=0.0, schedule=True)
    check_flags(cautious_weight_decay=cautious_weight_decay)
    core = _MuonCore(
        momentum,
        nesterov,
        momentum_rule,
        bias_correction,
        momentum_dtype,
        ns_steps,
        ns_coefficients,
        ns_dtype,
        ns_algorithm,
        exact,
        eps,
        scale_fn(scale),
        _PLAIN if variant is None else variant,
    )
    rest = optax.adamw(3e-4) if rest is None else rest
    check_transformation("rest", rest)

    def on_tree(
        direction: optax.GradientTransformation, tree: PyTree
    ) -> optax.GradientTransformation:
        # A function sees the whole tree here; optax would hide the rest from it.
        mask = mask_of(tree, weight_decay_mask)
        return optax.chain(
            direction,
            decay(weight_decay, mask, cautious=cautious_weight_decay),
            optax.scale_by_learning_rate(learning_rate),
        )

    if layout is None:
        return route_tree(lambda routes, tree: on_tree(core.on_tree(routes), tree), rest, rules)
    check_layout(layout, rules, oriented=True)
    if layout.storage == "sharded":
        sharded = core.on_sharded(layout)
        return route_planned(lambda tree: on_tree(sharded, tree), rest, layout)
    decays = decay_tables(layout, weight_decay_mask, core.factor)

    def matrix(
        local: Any, learning_rate: Any, weight_decay: Any, **numbers: Any
    ) -> optax.GradientTransformation:
        return optax.chain(
            *replace(core, **numbers).direction(layout.plan, local),
            decay_stacks(weight_decay, decays, local, cautious=cautious_weight_decay),
            core.scaling(layout.plan, local),
            optax.scale_by_learning_rate(learning_rate),
        )

    numbers = {
        "learning_rate": learning_rate,
        "weight_decay": weight_decay,
        "momentum": momentum,
        "eps": eps,
    }
    return route_owned(on_owners(matrix, layout, **numbers), rest, layout)


def scale_by_muon(
    *,
    layout: OwnerLayout | None = None,
    rules: Any = None,
    momentum: ScalarOrSchedule = 0.95,
    nesterov: bool = True,
    momentum_rule: MomentumRule = "ema",
    bias_correction: bool = False,
    momentum_dtype: Any = None,
    ns_steps: int = 5,
    ns_coefficients: Any = "keller",
    ns_dtype: Any = None,
    ns_algorithm: str = "auto",
    exact: bool = False,
    eps: float = 1e-8,
    scale: str | Callable[[int, int], float] = "sqrt_max_1_out_in",
    variant: MuonVariant | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The direction of ``muon`` without rate and decay; leaves that are no matrix pass unchanged.

    See ``muon`` for the arguments. Frozen leaves get a zero update.
    """
    core = _MuonCore(
        momentum,
        nesterov,
        momentum_rule,
        bias_correction,
        momentum_dtype,
        ns_steps,
        ns_coefficients,
        ns_dtype,
        ns_algorithm,
        exact,
        eps,
        scale_fn(scale),
        _PLAIN if variant is None else variant,
    )
    if layout is None:
        return route_tree(lambda routes, _: core.on_tree(routes), optax.identity(), rules)
    check_layout(layout, rules, oriented=True)
    if layout.storage == "sharded":
        sharded = core.on_sharded(layout)
        return route_planned(lambda _: sharded, optax.identity(), layout)
    tx = on_owners(core.on_stacks(layout.plan), layout, momentum=momentum, eps=eps)
    return route_owned(tx, optax.identity(), layout)


@dataclass(frozen=True)
class _MuonCore:
    """Momentum, orthogonalisation and variant, for both forms of the parameters."""

    momentum: ScalarOrSchedule
    nesterov: bool
    momentum_rule: MomentumRule
    bias_correction: bool
    momentum_dtype: Any
    ns_steps: int
    ns_coefficients: Any
    ns_dtype: Any
    ns_algorithm: str
    exact: bool
    eps: float
    scale: Callable[[int, int], float]
    variant: MuonVariant

    def __post_init__(self) -> None:
        """Bad options raise here, at construction, and not in the step."""
        check_static(ns_steps=self.ns_steps)
        if not isinstance(self.variant, MuonVariant):
            raise TypeError(
                f"variant={self.variant!r} must be a mfsdp.MuonVariant, such as "
                "mfsdp.variants.normuon() or mfsdp.variants.adamuon()"
            )
        self._momentum()
        self._orthogonalize()

    def _momentum(self) -> optax.GradientTransformation:
        return scale_by_momentum(
            self.momentum,
            nesterov=self.nesterov,
            momentum_rule=self.momentum_rule,
            bias_correction=self.bias_correction,
            momentum_dtype=self.momentum_dtype,
        )

    def _orthogonalize(self, split: Any = None) -> optax.GradientTransformation:
        return orthogonalize_stacks(
            split=split,
            ns_steps=self.ns_steps,
            ns_coefficients=self.ns_coefficients,
            eps=self.eps,
            ns_dtype=self.ns_dtype,
            ns_algorithm=self.ns_algorithm,
            exact=self.exact,
        )

    def factor(self, matrix: Matrix) -> float:
        return self.scale(matrix.fan_in, matrix.fan_out)

    def direction(
        self, plan: Plan, local: Any, split: Any = None
    ) -> tuple[optax.GradientTransformation, ...]:
        """Momentum and orthogonalisation of stacks, not scaled; to be chained."""
        return self._momentum(), self.variant.before, *self._after_momentum(plan, local, split)

    def on_stacks(
        self, plan: Plan, split: Any = None
    ) -> Callable[..., optax.GradientTransformation]:
        """The scaled direction of the stacks of a plan, made of ``local`` and numbers."""

        def matrix(local: Any, **numbers: Any) -> optax.GradientTransformation:
            own = replace(self, **numbers)
            return optax.chain(*own.direction(plan, local, split), own.scaling(plan, local))

        return matrix

    def on_sharded(self, layout: OwnerLayout) -> optax.GradientTransformation:
        """The scaled direction of a tree of matrix leaves that keep their sharding."""
        split = split_reductions(layout)
        if split and self.variant is not _PLAIN:
            raise ValueError(
                f"variant={self.variant!r} looks at whole rows and columns, and with "
                f"tensor_axis={layout.tensor_axis} devices hold parts of them; plan without "
                "tensor_axis, with that axis in owner_axis"
            )
        self._orthogonalize(split)
        make = self.on_stacks(layout.plan, split)
        return on_sharded(make, layout, momentum=self.momentum, eps=self.eps)

    def scaling(self, plan: Plan, local: Any) -> optax.GradientTransformation:
        return scale_stacks(slot_tables(plan.classes, self.factor), local)

    def on_tree(self, routes: Routes) -> optax.GradientTransformation:
        packed = on_canonical(
            lambda plan, local: optax.chain(
                *self._after_momentum(plan, local), self.scaling(plan, local)
            ),
            routes,
        )
        return optax.chain(self._momentum(), self.variant.before, packed)

    def _after_momentum(
        self, plan: Plan, local: Any, split: Any = None
    ) -> tuple[optax.GradientTransformation, ...]:
        return self._orthogonalize(split), self.variant.after(row_outputs(plan), local)
