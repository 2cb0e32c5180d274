"""``torch_compat.Muon`` beside ``torch.optim.Muon``: same arguments, moves, state."""

import copy
import pickle
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from matrixfsdp_jax.torch_compat import Muon

SHAPES = [(16, 32), (32, 16), (16, 32), (8, 8)]


def parameters(dtype: Any = torch.float32) -> list[Any]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def give(params: list[Any], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def apart(a: list[Any], b: list[Any]) -> float:
    """The largest difference over the farthest way."""
    start = parameters()
    a, b = [x.detach() for x in a], [x.detach() for x in b]
    far = max(float((x - s).abs().max()) for x, s in zip(a, start, strict=True))
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True)) / far


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
        {"nesterov": False, "ns_steps": 3},
    ],
    ids=["defaults", "match_rms_adamw", "no nesterov"],
)
def test_five_steps_are_those_of_torch(options: dict[str, Any]) -> None:
    ours, theirs = parameters(), parameters()
    a, b = Muon(ours, lr=0.02, **options), torch.optim.Muon(theirs, lr=0.02, **options)
    for seed in range(5):
        for params, optimizer in ((ours, a), (theirs, b)):
            give(params, seed)
            optimizer.step()
    # Both iterate in bfloat16, with other orders of summation.
    assert apart(ours, theirs) < 0.04
    other = parameters()
    wrong = torch.optim.Muon(other, lr=0.02, **{**options, "momentum": 0.8})
    for seed in range(5):
        give(other, seed)
        wrong.step()
    assert apart(ours, other) > 0.08, "the bound tells a wrong momentum"


def test_either_loads_the_others_state() -> None:
    ours, theirs = parameters(), parameters()
    a, b = Muon(ours, lr=0.02), torch.optim.Muon(theirs, lr=0.02)
    for seed in range(3):
        give(ours, seed)
        a.step()
        give(theirs, seed)
        b.step()
    momenta = [own["momentum_buffer"] for own in a.state_dict()["state"].values()]
    for x, own in zip(momenta, b.state_dict()["state"].values(), strict=True):
        torch.testing.assert_close(x, own["momentum_buffer"])
        assert own.keys() == {"momentum_buffer"}
    a.load_state_dict(b.state_dict())
    for x, own in zip(
        a.state_dict()["state"].values(), b.state_dict()["state"].values(), strict=True
    ):
        assert torch.equal(x["momentum_buffer"], own["momentum_buffer"])
    b.load_state_dict(a.state_dict())
    give(theirs, 7)
    b.step()


def test_copies_and_pickles_go_on_alike() -> None:
    ours = parameters()
    a = Muon(ours, lr=0.02)
    give(ours, 0)
    a.step()
    for b in (pickle.loads(pickle.dumps(a)), copy.deepcopy(a)):
        theirs = b.param_groups[0]["params"]
        mine = [p.detach().clone() for p in ours]
        again = Muon(mine, lr=0.02)
        again.load_state_dict(a.state_dict())
        give(theirs, 1)
        give(mine, 1)
        b.step()
        again.step()
        assert all(torch.equal(x, y) for x, y in zip(theirs, mine, strict=True))


def test_a_missing_gradient_leaves_parameter_and_momentum() -> None:
    ours = parameters()
    a = Muon(ours, lr=0.02)
    give(ours, 0)
    a.step()
    before, momentum = ours[1].detach().clone(), a.state_dict()["state"][1]["momentum_buffer"]
    give(ours, 1)
    ours[1].grad = None
    a.step()
    assert torch.equal(ours[1], before)
    assert torch.equal(a.state_dict()["state"][1]["momentum_buffer"], momentum)
    assert not torch.equal(a.state_dict()["state"][0]["momentum_buffer"], momentum)


def test_a_new_rate_compiles_nothing(compilations: list[str]) -> None:
    ours = parameters()
    a = Muon(ours, lr=0.02)
    give(ours, 0)
    a.step()
    del compilations[:]
    for rate in (0.01, 0.005):
        a.param_groups[0] |= {"lr": rate, "momentum": 1 - rate, "weight_decay": rate}
        give(ours, 1)
        a.step()
    assert not compilations


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0 must be >= 0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 must be >= 0"),
        ({"momentum": 1.5}, "momentum"),
        ({"ns_steps": 0}, "steps"),
        ({"adjust_lr_fn": "other"}, "adjust_lr_fn='other' must be one of"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon(parameters(), **options)


def test_only_matrices() -> None:
    with pytest.raises(ValueError, match=r"matrices, got a parameter of shape \(3,\)"):
        Muon([torch.nn.Parameter(torch.ones(3))])
