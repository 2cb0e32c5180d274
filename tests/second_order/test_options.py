"""Bad options are refused by name before any device work."""

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.layout import rules
from matrixfsdp_jax.transforms.refresh import Schedule
from matrixfsdp_jax.transforms.shampoo import ShampooOptions
from tests.models import make_mesh
from tests.second_order.cases import make
from tests.test_optimizers import FORMS, assert_trees_close, draw, ramp

QR_PINV = mfsdp.QRBasis(rank_deficiency=mfsdp.PseudoInverse())
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("shampoo", {"learning_rate": -0.1}, "learning_rate=-0.1"),
    ("shampoo", {"learning_rate": math.nan}, "learning_rate=nan"),
    ("shampoo", {"betas": (1.0, 0.9)}, r"betas\[0\]=1.0"),
    ("shampoo", {"betas": (-0.1, 0.9)}, r"betas\[0\]=-0.1"),
    ("shampoo", {"betas": (0.9, 0.0)}, r"betas\[1\]=0.0 must be in \(0, 1\]"),
    ("soap", {"betas": (0.9, 1.5)}, r"betas\[1\]=1.5"),
    ("soap", {"betas": (0.9, math.nan)}, r"betas\[1\]=nan"),
    ("shampoo", {"beta3": 1.0}, "beta3=1.0"),
    ("shampoo", {"epsilon": 0.0}, "epsilon=0.0"),
    ("soap", {"epsilon": -1e-8}, "epsilon=-1e-08"),
    ("shampoo", {"epsilon": math.inf}, "epsilon=inf"),
    ("shampoo", {"weight_decay": -0.1}, "weight_decay=-0.1"),
    ("shampoo", {"weight_decay_type": "adamw"}, "weight_decay_type='adamw' must be one of"),
    (
        "shampoo",
        {"weight_decay_type": "corrected", "learning_rate": ramp(0.1, 0.0)},
        "needs peak_learning_rate",
    ),
    ("shampoo", {"max_preconditioner_dim": 0}, "max_preconditioner_dim=0 must be an int >= 1"),
    ("shampoo", {"max_preconditioner_dim": 2.5}, "max_preconditioner_dim=2.5"),
    ("soap", {"target_parameter_dimensionality": 0}, "target_parameter_dimensionality=0"),
    ("shampoo", {"precondition_frequency": 0}, "precondition_frequency=0 must be an int >= 1"),
    ("soap", {"precondition_frequency": 100_001}, "precondition_frequency=100001.* <= 100000"),
    ("soap", {"precondition_frequency": 2**31, "stagger": False}, "precondition_frequency=2147"),
    ("soap", {"start_preconditioning_step": 2**31}, "start_preconditioning_step=2147483648"),
    ("shampoo", {"peak_learning_rate": -1.0}, "peak_learning_rate=-1.0"),
    ("soap", {"precondition_frequency": 2.0}, "precondition_frequency=2.0"),
    ("soap", {"precondition_frequency": True}, "precondition_frequency=True"),
    ("shampoo", {"start_preconditioning_step": 0}, "start_preconditioning_step=0"),
    ("shampoo", {"first_refresh": "never"}, "first_refresh='never' must be one of"),
    ("soap", {"first_step": "zero"}, "first_step='zero' must be one of"),
    (
        "soap",
        {"first_step": "skip", "start_preconditioning_step": 3},
        "start_preconditioning_step=1",
    ),
    ("soap", {"first_step": "skip", "first_refresh": "spread"}, 'first_refresh="all"'),
    (
        "shampoo",
        {"preconditioner": mfsdp.RootInverse(root=mfsdp.EighRoot(mfsdp.PseudoInverse()))},
        "epsilon=1e-12 must be 0 with PseudoInverse",
    ),
    ("shampoo", {"preconditioner": mfsdp.Eigendecomposed(basis=QR_PINV)}, "must be 0 with Pseudo"),
]
BAD_TYPES: list[tuple[str, dict[str, Any], str]] = [
    ("shampoo", {"stagger": "no"}, "stagger='no' must be True or False"),
    ("soap", {"use_bias_correction": 1}, "use_bias_correction=1"),
    ("shampoo", {"rest": 1e-3}, "rest=0.001 must be an optax transformation"),
    ("shampoo", {"iterate_averaging": 0.9}, r"iterate_averaging=0.9 must be mfsdp\.Classic"),
    ("soap", {"preconditioner": mfsdp.RootInverse()}, r"must be a mfsdp\.EigenvalueCorrected"),
    ("shampoo", {"epsilon": "small"}, "epsilon='small'"),
    ("shampoo", {"learning_rate": None}, "learning_rate=None"),
    ("shampoo", {"learning_rate": jnp.ones(4)}, r"a number or a schedule.*of shape \(4,\)"),
    ("soap", {"weight_decay": jnp.ones((1, 1))}, r"weight_decay=.*of shape \(1, 1\)"),
    ("soap", {"betas": (jnp.float32(0.9), 0.9)}, r"betas\[0\]=.* must be a Python number"),
    ("shampoo", {"betas": (0.9, jnp.float32(0.9))}, r"betas\[1\]=.* must be a Python number"),
    ("shampoo", {"peak_learning_rate": "x"}, "peak_learning_rate='x'"),
    *[
        (method, {"grafting": kind()}, f"grafting={kind.__name__}.*never decomposed.*SGDGraft")
        for method in ("shampoo", "soap")
        for kind in (mfsdp.RootInverse, mfsdp.Eigendecomposed, mfsdp.EigenvalueCorrected)
    ],
]


@pytest.mark.parametrize(("method", "options", "message"), BAD)
def test_bad_options_are_refused_at_construction(
    method: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(method, **options)(layout=None)


@pytest.mark.parametrize(("method", "options", "message"), BAD_TYPES)
def test_options_of_another_type_are_named(
    method: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        make(method, **options)(layout=None)


UNNAMED: list[tuple[dict[str, Any], str]] = [
    ({"betas": 0.9}, "betas=0.9"),
    ({"betas": (0.9, 0.9, 0.9)}, "betas="),
    ({"betas": (0.9, "1")}, r"betas\[1\]='1'"),
    ({"preconditioner": "soap"}, "preconditioner='soap'"),
    ({"grafting": "adam"}, "grafting='adam'"),
    ({"grafting": mfsdp.AdamGrafting}, "grafting=<class"),
    ({"max_preconditioner_dim": True}, "max_preconditioner_dim=True"),
    ({"peak_learning_rate": 0.0, "weight_decay_type": "corrected"}, "peak_learning_rate=0.0"),
    ({"learning_rate": 0.0, "weight_decay_type": "independent"}, "learning_rate"),
    ({"preconditioner": mfsdp.RootInverse(factor_dtype="float64")}, "float64.*x64"),
]


@pytest.mark.parametrize(("options", "message"), UNNAMED)
def test_other_bad_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make("shampoo", **options)(layout=None)


@pytest.mark.parametrize(
    ("preconditioner", "message"),
    [
        (mfsdp.SpectralDescent(), "SpectralDescent needs blocks of order 2, got one of order 1"),
        (mfsdp.RootInverse(factor_dtype="bfloat16"), "bfloat16"),
    ],
)
def test_what_a_preconditioner_cannot_take_raises_before_any_step(
    preconditioner: Any, message: str
) -> None:
    params = {"v": jax.ShapeDtypeStruct((4,), jnp.float32)}

    def build_and_trace(g: Any) -> Any:
        tx = mfsdp.shampoo(1e-2, rules=[rules.tensor("v")], preconditioner=preconditioner)
        return tx.update(g, tx.init(g), g)

    with pytest.raises((ValueError, TypeError), match=message):
        jax.eval_shape(build_and_trace, params)


@pytest.mark.parametrize("scale", [mfsdp.scale_by_shampoo, mfsdp.scale_by_soap])
def test_a_graft_with_factors_is_refused_without_a_rate_too(scale: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"grafting=RootInverse.*norm would be that of SGD"):
        scale(grafting=mfsdp.RootInverse())


def test_the_options_of_the_transform_take_a_graft_with_factors() -> None:
    """As the reference does, whose configurations they carry."""
    schedule = Schedule(1, 1, False, "all")
    record = mfsdp.RootInverse()
    options = ShampooOptions((0.9, 0.9), 0.9, 1e-3, 4, 2, True, record, record, schedule)
    assert options.grafting is record


INJECTED: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (mfsdp.shampoo, {"learning_rate": 0.1, "weight_decay": 0.5}),
    (mfsdp.soap, {"learning_rate": 0.1, "start_preconditioning_step": 1, "beta3": 0.5}),
    (mfsdp.scale_by_shampoo, {"precondition_frequency": 2}),
    (mfsdp.scale_by_soap, {}),
]


@pytest.mark.parametrize(("make_tx", "options"), INJECTED)
@pytest.mark.parametrize("form", FORMS)
def test_injection_works_with_the_static_arguments_that_the_error_names(
    form: str, make_tx: Callable[..., Any], options: dict[str, Any]
) -> None:
    params = draw({"w": (4, 4)}, 0)
    layout = None if form == "single" else mfsdp.plan(params, make_mesh(2), optimizer="soap")
    held = params if layout is None else layout.trainable(layout.shard(params))
    options = {"epsilon": 1e-3, "layout": layout, **options}
    with pytest.raises(TypeError, match=r"static_args=\(.*\) to optax") as error:
        optax.inject_hyperparams(make_tx)(**options).init(held)
    static = re.findall(r'"(\w+)"', str(error.value))
    results = []
    for tx in (
        optax.inject_hyperparams(make_tx, static_args=tuple(static))(**options),
        make_tx(**options),
    ):
        state = tx.init(held)
        for _ in range(2):
            updates, state = jax.jit(tx.update)(held, state, held)
        results.append(updates)
    assert_trees_close(*results, atol=1e-6)


def test_an_injected_peak_is_refused_by_name() -> None:
    static = ("epsilon", "max_preconditioner_dim", "target_parameter_dimensionality")
    tx = optax.inject_hyperparams(mfsdp.shampoo, static_args=(*static, "precondition_frequency"))
    options = {"weight_decay_type": "corrected", "peak_learning_rate": 0.1}
    with pytest.raises(TypeError, match=r'static_args=\("peak_learning_rate",\)'):
        tx(learning_rate=0.1, **options).init(draw({"w": (4, 4)}, 0))
