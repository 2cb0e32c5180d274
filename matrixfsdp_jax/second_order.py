"""Shampoo and SOAP: arguments and their documentation; ``assembly.py`` builds them."""

from typing import Any

import jax.numpy as jnp
import optax

from matrixfsdp_jax.assembly import (
    Averaging,
    Core,
    FirstStep,
    WeightDecayType,
    direction,
    eigenvalue_corrected,
    make_options,
)
from matrixfsdp_jax.layout.leaves import flatten, states_of
from matrixfsdp_jax.owner.params import OwnerLayout, OwnerParams
from matrixfsdp_jax.transforms.averaging import (
    AveragingState,
    GeneralizedPrimalAveraging,
    ScheduleFree,
)
from matrixfsdp_jax.transforms.checks import check_kind
from matrixfsdp_jax.transforms.kronecker import EigenvalueCorrected, RootInverse
from matrixfsdp_jax.transforms.refresh import FirstRefresh

PyTree = Any
ScalarOrSchedule = Any


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
        ``mfsdp.rules.tensor("*")`` preconditions everything, but refuses leaves that are empty or
        of integers: name these before it, in ``mfsdp.rules.frozen`` or ``rest``.
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
      precondition_frequency: steps between two decompositions of a factor; at most 100 000 under
        ``stagger``.
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
      grafting: ``mfsdp.SGDGrafting()``, ``AdaGradGrafting()``, ``RMSpropGrafting()`` or
        ``AdamGrafting()``: the norm of its direction, block by block. Any preconditioner without
        factors will do.
      iterate_averaging: ``mfsdp.ClassicMomentum()``, ``GeneralizedPrimalAveraging()`` or
        ``ScheduleFree()``; see ``mfsdp.averaged_params`` for evaluation. Under the last two weight
        decay shrinks the fast iterate alone, so what is evaluated is then no mean of it.
      rest: optimizer of every other trainable leaf. Default ``optax.adamw(3e-4)``.

    Returns:
      An optax transformation. A decomposition that fails keeps the last good root and counts in
      ``ShampooState.failures``; a factor that is not finite counts in ``nonfinite``, but only at a
      refresh of its block; ``mfsdp.train_step`` raises on them. ``mfsdp.skip_nonfinite`` is what
      keeps bad gradients out. ``update`` takes the extra argument ``present``, a tree
      (or prefix) of bools in the user's structure: a preconditioned leaf where it is false has no
      gradient in this step, which is not a zero one: it keeps value and state.

    Collectives: none, beyond those of ``rest``.
    Numerics: factors, roots and averages in float32 or wider (``factor_dtype`` of the
    preconditioner); products at highest precision; updates in the gradients' dtype.

    Raises:
      ValueError: for an option out of its range, or a layout planned for another kind of method.
      TypeError: for an option of another type. ``optax.inject_hyperparams`` makes arrays of numbers
        that must be static here; the message has the ``static_args`` that it needs.

    Examples:
      >>> params = {"kernel": jnp.ones((8, 16)), "bias": jnp.zeros(16)}
      >>> tx = mfsdp.shampoo(1e-2, grafting=mfsdp.AdamGrafting(), precondition_frequency=10)
      >>> state = tx.init(params)

    References:
      Gupta, Koren, Singer, "Shampoo", arXiv 1802.09568, 2018. Shi et al., "A Distributed
      Data-Parallel PyTorch Implementation of the Distributed Shampoo Optimizer", arXiv 2309.06497,
      2023. Defazio et al., "The Road Less Scheduled", arXiv 2405.15682, 2024.
    """
    options = make_options(
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
    core = Core(
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
        code; the first decomposition is then in step 1. It is the first update of the optimizer,
        not the first gradient of a leaf: one that is not ``present`` in it starts in the identity
        basis.
      use_bias_correction: as there.
      preconditioner: ``mfsdp.EigenvalueCorrected(...)``, for ``QRBasis``, adaptive refresh by
        ``tolerance``, dims without a basis, other exponents.
      grafting: as there.
      iterate_averaging: as there.
      rest: as there.

    Collectives: none, beyond those of ``rest``.
    Numerics: as ``mfsdp.shampoo``.

    Raises:
      ValueError: as there.
      TypeError: as there.

    Examples:
      >>> tx = mfsdp.soap(3e-3, weight_decay=0.01)

    References:
      Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", arXiv 2409.11321, 2024,
      and its code; facebookresearch/optimizers (eigenvalue-corrected Shampoo).
    """
    options = make_options(
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
        eigenvalue_corrected(preconditioner),
        grafting,
        first_step,
    )
    core = Core(
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

    See ``shampoo`` for the arguments, and for ``present``. Leaves that are not preconditioned pass
    unchanged, frozen ones get a zero update.
    """
    options = make_options(
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
    return direction(options, layout, rules)


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
    options = make_options(
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
        eigenvalue_corrected(preconditioner),
        grafting,
        first_step,
    )
    return direction(options, layout, rules)


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
      leaves that are not averaged as they are. Leaves are matched by path. ``X`` is no mean of past
      ``Z`` where weight decay (other than ``"l2"``) has shrunk ``Z`` alone.

    Raises:
      TypeError: if ``iterate_averaging`` is neither record.
      ValueError: if the state holds no average, or not that of these parameters.
    """
    check_kind("iterate_averaging", iterate_averaging, GeneralizedPrimalAveraging, ScheduleFree)
    found = states_of(AveragingState, state)
    if len(found) != 1:
        raise ValueError(f"the state holds {len(found)} iterate averages, expected one")
    averages = dict(zip(*flatten(found[0].z)[:2], strict=True))
    owned = isinstance(params, OwnerParams)
    paths, values, treedef = flatten(params.stacks if owned else params)
    shapes = {path: jnp.shape(y) for path, y in zip(paths, values, strict=True)}
    expected = {path: z.shape for path, z in averages.items()}
    common = expected.keys() & shapes.keys()
    if averages and (not common or any(shapes[path] != expected[path] for path in common)):
        kind = "owner params" if owned else f"a {type(params).__name__}"
        raise ValueError(
            f"the state averages {expected}, but params are {kind} with {shapes}; give those that "
            "the state belongs to, canonical or owner params as it is"
        )
    factor = 1 - 1 / iterate_averaging.train_interp_coeff

    def averaged(path: str, y: Any) -> Any:
        if path not in averages:
            return y
        z = averages[path]
        return (y.astype(z.dtype) + factor * (z - y.astype(z.dtype))).astype(y.dtype)

    new = treedef.unflatten(map(averaged, paths, values))
    return params._replace(stacks=new) if owned else new
