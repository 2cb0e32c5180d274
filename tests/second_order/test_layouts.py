"""Layouts, plans and masks that do not go with an optimizer are refused by name."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import optax
import pytest

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.owner.params import OwnerLayout
from tests.models import make_mesh
from tests.second_order.cases import RULES
from tests.test_optimizers import draw

SECOND_ORDER: list[Callable[..., Any]] = [
    partial(mfsdp.shampoo, 1e-3),
    partial(mfsdp.soap, 1e-3),
    mfsdp.scale_by_shampoo,
    mfsdp.scale_by_soap,
]
MUON: list[Callable[..., Any]] = [
    partial(mfsdp.muon, 1e-3),
    partial(mfsdp.muon_like, "keller", 1e-3),
    mfsdp.scale_by_muon,
]


@pytest.mark.parametrize("planned", ["muon", "adamw"])
@pytest.mark.parametrize("build", SECOND_ORDER)
def test_a_layout_for_another_method_says_what_to_plan(
    build: Callable[..., Any], planned: str
) -> None:
    """Also where no matrix is stored transposed."""
    for shape in ((16, 8), (4, 4)):
        layout = mfsdp.plan(draw({"w": shape}, 0), make_mesh(2), optimizer=planned)
        with pytest.raises(
            ValueError, match=rf"planned for {planned} .*optimizer=\"shampoo\" or \"soap\""
        ):
            build(layout=layout)


@pytest.mark.parametrize("build", MUON)
@pytest.mark.parametrize("planned", ["soap", mfsdp.shampoo_method("shampoo", 8, 2, 10)])
def test_muon_refuses_a_layout_for_shampoo(build: Callable[..., Any], planned: Any) -> None:
    """Its convolutions are no matrices, and its vectors would be left as they are."""
    layout = mfsdp.plan(
        draw({"w": (4, 8), "conv": (3, 3, 2, 4)}, 0), make_mesh(2), optimizer=planned
    )
    with pytest.raises(ValueError, match=r"planned for (soap|shampoo) .*optimizer=\"muon\""):
        build(layout=layout)


@pytest.mark.parametrize("build", [*SECOND_ORDER, *MUON])
def test_what_is_no_layout_is_refused(build: Callable[..., Any]) -> None:
    layout = mfsdp.plan(draw({"w": (4, 8)}, 0), make_mesh(2), optimizer="soap")
    for other in (layout.plan, layout.mesh, "fsdp"):
        with pytest.raises(TypeError, match=r"layout=.* an OwnerLayout, from mfsdp\.plan\("):
            build(layout=other)


@pytest.mark.parametrize(
    "optimizer", [mfsdp.RootInverse(), mfsdp.soap, optax.sgd(0.1), None, ["soap"]]
)
def test_a_plan_for_what_is_no_method_is_refused(optimizer: Any) -> None:
    with pytest.raises(TypeError, match=r"optimizer=.* must be a name \(.*shampoo_method"):
        mfsdp.plan(draw({"w": (4, 8)}, 0), make_mesh(2), optimizer=optimizer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("muon", 256, 2, 10), "name='muon' must be one of shampoo, soap"),
        (("soap", 0, 2, 10), "max_preconditioner_dim=0"),
        (("soap", 256.0, 2, 10), "max_preconditioner_dim=256.0"),
        (("soap", True, 2, 10), "max_preconditioner_dim=True"),
        (("soap", -math.inf, 2, 10), "max_preconditioner_dim=-inf"),
        (("soap", 256, 0, 10), "target=0"),
        (("soap", 256, 2, 0), "precondition_frequency=0"),
        (("soap", 256, 2, 10.0), "precondition_frequency=10.0"),
        (("soap", 256, 2, 10**6), "precondition_frequency=1000000"),
    ],
)
def test_shampoo_method_refuses_bad_arguments(arguments: tuple[Any, ...], message: str) -> None:
    mfsdp.shampoo_method("soap", 256, 2, 10)  # equal to some of them, and cached
    with pytest.raises(ValueError, match=message):
        mfsdp.shampoo_method(*arguments)


@pytest.mark.parametrize(
    ("build", "method"),
    [(SECOND_ORDER[0], "shampoo"), (SECOND_ORDER[1], "soap"), (MUON[0], "muon")],
)
def test_a_mask_that_is_no_prefix_is_refused_in_both_forms(
    build: Callable[..., Any], method: str
) -> None:
    params = draw({"w": (4, 4), "bias": (4,)}, 0)
    layout = mfsdp.plan(params, make_mesh(2), optimizer=method)
    options = {"weight_decay": 0.1, "weight_decay_mask": {"w": True, "other": False}}
    with pytest.raises(ValueError, match="weight_decay_mask is not a prefix of the parameter tree"):
        build(**options).init(params)
    with pytest.raises(ValueError, match="weight_decay_mask is not a prefix of the parameter tree"):
        build(layout=layout, **options)


def test_rules_with_a_layout_are_refused() -> None:
    layout: OwnerLayout = mfsdp.plan(draw({"w": (4, 8)}, 0), make_mesh(2), optimizer="soap")
    with pytest.raises(ValueError, match=r"rules=.*mfsdp\.plan"):
        mfsdp.soap(1e-3, layout=layout, rules=RULES)
