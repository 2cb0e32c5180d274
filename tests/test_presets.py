"""``mfsdp.muon_like`` against the systems it names: optax and torch live, the others by oracle."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.layout import rules
from tests.oracle import AdamWOracle, MuonOracle
from tests.test_optimizers import FORMS, Trainer, assert_trees_close, draw, ramp

SHAPES = {"tall": (16, 8), "wide": (8, 16), "square": (8, 8), "layers": (3, 8, 16), "bias": (16,)}
FLAT = {k: s for k, s in SHAPES.items() if k != "layers"}
RULES = [rules.stacked("layers")]
each_form = pytest.mark.parametrize("form", FORMS)

SYSTEMS = ("optax", "torch", "keller", "moonshot")
DEFAULT_RATES = {"torch": 1e-3, "keller": 0.02, "moonshot": 1e-3}

# The table of the docstring, and what each system's code has for eps.
TABLE: dict[str, dict[str, Any]] = {
    "optax": {
        "bias_correction": True,
        "momentum_rule": "ema",
        "scale": "sqrt_max_1_out_in",
        "weight_decay": 0.0,
        "ns_dtype": jnp.float32,
        "eps": 1e-8,
    },
    "torch": {
        "bias_correction": False,
        "momentum_rule": "ema",
        "scale": "sqrt_max_1_out_in",
        "weight_decay": 0.1,
        "ns_dtype": jnp.bfloat16,
        "eps": 1e-7,
    },
    "keller": {
        "bias_correction": False,
        "momentum_rule": "ema",
        "scale": "sqrt_max_1_out_in",
        "weight_decay": 0.0,
        "ns_dtype": jnp.bfloat16,
        "eps": 1e-7,
    },
    "moonshot": {
        "bias_correction": False,
        "momentum_rule": "sum",
        "scale": "rms_0.2",
        "weight_decay": 0.1,
        "ns_dtype": jnp.bfloat16,
        "eps": 1e-7,
    },
}
COMMON = {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "ns_coefficients": "keller"}
RESTS: dict[str, Any] = {
    "optax": lambda rate: optax.nadam(rate),
    "torch": lambda rate: optax.adamw(1e-3, weight_decay=0.01),
    "keller": lambda rate: optax.adam(3e-4, b1=0.9, b2=0.95, eps=1e-10),
    "moonshot": lambda rate: optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1),
}


def like(system: str, *args: Any, **options: Any) -> Any:
    """A factory for ``Trainer``."""
    return lambda **where: mfsdp.muon_like(system, *args, **options, **where)


def train(form: str, make: Any, shapes: Any, given: Any = None, steps: int = 4) -> Any:
    """The parameters after every step with recorded gradients."""
    trainer = Trainer(form, make, draw(shapes, 0), given)
    return [trainer.step(draw(shapes, seed)) for seed in range(1, steps + 1)]


def assert_runs_close(got: Any, want: Any, atol: float, shapes: Any) -> None:
    for a, b in zip(got, want, strict=True):
        assert_trees_close(a, b, atol=atol)
    for name, start in draw(shapes, 0).items():  # it did move
        assert np.abs(np.asarray(want[-1][name]) - start).max() > 50 * atol, name


# ---- the table ---------------------------------------------------------------------------------


@pytest.mark.parametrize("system", SYSTEMS)
@each_form
def test_a_preset_is_muon_with_the_options_of_the_table(form: str, system: str) -> None:
    """Bit for bit, with a schedule for the rate."""
    rate = ramp(0.03, -0.002)

    def by_hand(**where: Any) -> Any:
        return mfsdp.muon(rate, rest=RESTS[system](rate), **COMMON, **TABLE[system], **where)

    got = train(form, like(system, rate), SHAPES, RULES)
    want = train(form, by_hand, SHAPES, RULES)
    for a, b in zip(got, want, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_rows_of_the_docstring(system: str) -> None:
    """The table above is the one that users read."""
    doc = " ".join((mfsdp.muon_like.__doc__ or "").split())
    row = doc[doc.index(f'| ``"{system}"`` |') :].split("|")
    momentum, scale, decay, dtype, rest = (cell.strip() for cell in row[2:7])
    own = TABLE[system]
    assert "0.95, Nesterov" in momentum
    assert ("bias-corrected" in momentum) == own["bias_correction"]
    assert ("decaying sum" in momentum) == (own["momentum_rule"] == "sum")
    assert scale == f"``{own['scale']}``"
    assert float(decay) == own["weight_decay"]
    assert dtype == jnp.dtype(own["ns_dtype"]).name
    assert ("at the same rate" in rest) == (system in ("optax", "moonshot"))


@pytest.mark.parametrize("system", DEFAULT_RATES)
def test_default_rates(system: str) -> None:
    got = train("single", like(system), FLAT, steps=2)
    want = train("single", like(system, DEFAULT_RATES[system]), FLAT, steps=2)
    jax.tree.map(np.testing.assert_array_equal, got, want)


# ---- live peers --------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.05, ramp(0.05, -0.004)], ids=["number", "schedule"])
@each_form
def test_optax_live_with_its_adam_on_the_rest(form: str, rate: Any) -> None:
    dims = dict.fromkeys(FLAT, optax.contrib.MuonDimensionNumbers()) | {
        "layers": optax.contrib.MuonDimensionNumbers(1, 2),
        "bias": None,
    }

    def theirs(**where: Any) -> Any:
        return optax.contrib.muon(rate, muon_weight_dimension_numbers=dims)

    want = train("single", theirs, SHAPES, steps=6)
    got = train(form, like("optax", rate), SHAPES, RULES, steps=6)
    assert_runs_close(got, want, 1e-5, SHAPES)


TORCH_RULES = [rules.matrix(k, out="rows") for k in FLAT if k != "bias"]


def train_torch(steps: int = 4, **options: Any) -> list[dict[str, np.ndarray]]:
    """``torch.optim.Muon`` on the matrices and ``torch.optim.AdamW`` on the bias, as they come."""
    torch = pytest.importorskip("torch")
    params = {k: torch.nn.Parameter(torch.from_numpy(x.copy())) for k, x in draw(FLAT, 0).items()}
    optimizers = [
        torch.optim.Muon([p for k, p in params.items() if k != "bias"], **options),
        torch.optim.AdamW([params["bias"]]),
    ]
    out = []
    for seed in range(1, steps + 1):
        for name, grad in draw(FLAT, seed).items():
            params[name].grad = torch.from_numpy(grad)
        for optimizer in optimizers:
            optimizer.step()
        out.append({k: p.detach().numpy().copy() for k, p in params.items()})
    return out


@pytest.mark.parametrize("rate", [None, 0.05], ids=["default rate", "large rate"])
@each_form
def test_torch_live_in_float32(
    form: str, rate: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch casts at one place, by ``grad.bfloat16()``; here that copies and rounds nothing."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    want = train_torch(**({} if rate is None else {"lr": rate}))
    got = train(form, like("torch", rate, ns_dtype=jnp.float32), FLAT, TORCH_RULES)
    assert_runs_close(got, want, 1e-5, FLAT)


def test_torch_live_in_its_own_bfloat16() -> None:
    """Within 3% of the largest move of each matrix: all that two bfloat16 iterations agree to."""
    want = train_torch(lr=0.05)[-1]
    got = train("single", like("torch", 0.05), FLAT, TORCH_RULES)[-1]
    for name, start in draw(FLAT, 0).items():
        moved = np.abs(want[name] - start).max()
        np.testing.assert_allclose(got[name], want[name], atol=0.03 * moved, err_msg=name)


# ---- oracles -----------------------------------------------------------------------------------


ORACLES: dict[str, Any] = {
    "keller": lambda rate: (
        MuonOracle(rate),
        AdamWOracle(3e-4, b1=0.9, b2=0.95, eps=1e-10, weight_decay=0.0),
    ),
    "moonshot": lambda rate: (
        MuonOracle(rate, momentum_rule="sum", scale="rms_0.2", weight_decay=0.1),
        AdamWOracle(rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("rate", [0.02, ramp(0.03, -0.002)], ids=["number", "schedule"])
@pytest.mark.parametrize("system", ORACLES)
@each_form
def test_systems_that_are_no_library_follow_the_oracles(form: str, system: str, rate: Any) -> None:
    matrix, other = ORACLES[system](rate)
    trainer = Trainer(form, like(system, rate, ns_dtype=jnp.float32), draw(FLAT, 0))
    want: dict[str, Any] = draw(FLAT, 0)
    for seed in range(1, 7):
        grads = draw(FLAT, seed)
        got = trainer.step(grads)
        bias = other.step({"bias": want.pop("bias")}, {"bias": grads.pop("bias")})
        want = matrix.step(want, grads) | bias
        assert_trees_close(got, {k: want[k] for k in got}, atol=1e-5)


@pytest.mark.parametrize("system", ORACLES)
def test_their_own_bfloat16_is_near_the_oracle(system: str) -> None:
    """One step, within 5% of its largest entry: the iteration has 8 bits."""
    matrix, _ = ORACLES[system](0.1)
    params, grads = draw(FLAT, 0), draw(FLAT, 1)
    got = Trainer("single", like(system, 0.1), params).step(grads)
    names = [k for k in FLAT if k != "bias"]
    want = matrix.step({k: params[k] for k in names}, {k: grads[k] for k in names})
    for k in names:
        moved = np.abs(want[k] - params[k]).max()
        np.testing.assert_allclose(got[k], want[k], atol=0.05 * moved, err_msg=k)
        assert np.abs(got[k] - want[k]).max() > 1e-5 * moved  # it is not float32


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_schedule_reaches_the_rest_where_the_table_says_so(system: str) -> None:
    """A rate that is zero but for the second step moves the bias there alone, or always."""

    def rate(count: Any) -> Any:
        return jnp.where(count == 1, 0.1, 0.0)

    runs = [draw(FLAT, 0), *train("single", like(system, rate), FLAT, steps=3)]

    def moved(name: str) -> list[bool]:
        return [bool((a[name] != b[name]).any()) for a, b in itertools.pairwise(runs)]

    follows = system in ("optax", "moonshot")
    assert moved("bias") == ([False, True, False] if follows else [True, True, True])
    assert moved("tall") == [False, True, False]


# ---- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "system", "options"),
    [
        ("owner", "moonshot", {"weight_decay": 0.3, "scale": "none", "momentum_rule": "ema"}),
        ("single", "optax", {"bias_correction": False, "momentum": 0.8, "nesterov": False}),
        ("single", "torch", {"rest": optax.sgd(0.1), "ns_steps": 3, "ns_dtype": jnp.float32}),
        ("single", "keller", {"variant": mfsdp.variants.normuon(), "weight_decay": 0.2}),
    ],
)
def test_own_options_replace_those_of_the_preset(
    form: str, system: str, options: dict[str, Any]
) -> None:
    few = {k: FLAT[k] for k in ("tall", "bias")}
    whole = {"rest": RESTS[system](0.05), **COMMON, **TABLE[system], **options}
    got = train(form, like(system, 0.05, **options), few, steps=2)
    want = train(form, lambda **where: mfsdp.muon(0.05, **whole, **where), few, steps=2)
    preset = train(form, like(system, 0.05), few, steps=2)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert np.abs(got[-1]["tall"] - preset[-1]["tall"]).max() > 1e-3


def test_no_rest_is_the_rest_of_the_preset() -> None:
    options = {"rest": None}
    got = train("single", like("keller", **options), FLAT, steps=2)
    want = train("single", like("keller"), FLAT, steps=2)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert options == {"rest": None}


@each_form
def test_injected_rates_reach_both_parts(form: str, compilations: list[str]) -> None:
    def injected(**where: Any) -> Any:
        return optax.inject_hyperparams(
            lambda learning_rate: mfsdp.muon_like("moonshot", learning_rate, **where)
        )(0.1)

    trainer = Trainer(form, injected, draw(FLAT, 0))
    before = draw(FLAT, 0)
    for seed, rate in ((1, 0.0), (2, 0.05)):
        rates = trainer.state.hyperparams
        rates["learning_rate"] = jnp.full_like(rates["learning_rate"], rate)
        got = trainer.step(draw(FLAT, seed))
        for name, x in before.items():
            assert (np.abs(got[name] - x).max() > 1e-3) == (rate > 0), name
    assert compilations.count("jit(_apply)") == 1


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["Torch", "adam", "", None])
def test_unknown_systems(system: Any) -> None:
    with pytest.raises(ValueError, match=rf"unknown system {system!r}; known: 'optax' .*moonshot"):
        mfsdp.muon_like(system, 0.1)


def test_optax_has_no_default_rate() -> None:
    with pytest.raises(ValueError, match=r"optax\.contrib\.muon .* give learning_rate"):
        mfsdp.muon_like("optax")


def test_bad_options_are_those_of_muon() -> None:
    with pytest.raises(TypeError, match="momentun"):
        mfsdp.muon_like("torch", momentun=0.9)
    with pytest.raises(ValueError, match="learning_rate=-1"):
        mfsdp.muon_like("torch", -1.0)
