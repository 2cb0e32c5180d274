"""Traces of the reference through ``DistributedShampoo`` of this package, in one process.

Cases with several processes are compared with the reference's run in one.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from matrixfsdp_jax.torch_compat import PreconditionerValueError
from tests.test_goldens import AVERAGED, ENTRIES, drawn_gradients, like
from tests.torch_compat.cases import CALLABLES, Replay, decode

# Traces that end before a step in which the reference raises.
FAILING = [name for name, entry in ENTRIES.items() if "expected_error" in entry]
RAISED = {
    "ValueError": (ValueError, "decompositions of block_0 of parameter 0 of its group failed in 4"),
    "PreconditionerValueError": (PreconditionerValueError, "not finite in step 4"),
}


def values(params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [p.detach().clone() for p in params]


def flat(tree: Mapping[Any, Any], lead: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{lead}{name}/")
        else:
            yield f"{lead}{name}", value


def assert_final_state(replay: Replay) -> None:
    """Every array that the reference keeps, and no other, under its names."""
    found = dict(flat(replay.optimizer.state_dict()["state"], "state/"))
    want = {k: x for k, x in replay.trace.items() if k.startswith("state/")}
    assert sorted(found) == sorted(want)
    if "ddp" not in replay.entry:
        assert sorted(found) == sorted(replay.entry["state_keys"])
    for name, x in want.items():
        got = found[name].numpy()
        assert got.dtype == x.dtype, name
        assert got.shape == x.shape, name
        if "/block_" not in name and not name.endswith("lr_sum"):
            assert got == x, name
            continue
        error = np.abs(like(got, x, name) - x).max(initial=0)
        assert error <= replay.entry["suggested_tol"] * np.abs(x).max(initial=0), name


def assert_fails(replay: Replay) -> None:
    """The next step raises what the reference raises, and no parameter moves."""
    expected = replay.entry["expected_error"]
    t = expected["step"] - 1
    assert t == replay.steps
    for i, p in enumerate(replay.params):
        p.grad = torch.tensor(drawn_gradients(replay.entry)[t][f"p{i}"]).to(p.dtype)
    before = values(replay.params)
    kind, message = RAISED[expected["type"]]
    with pytest.raises(kind, match=message) as error:
        replay.optimizer.step()
    assert type(error.value) is kind
    torch.testing.assert_close(values(replay.params), before, rtol=0, atol=0)


def assert_evaluates(replay: Replay) -> None:
    """The average in ``eval()`` and no step there; the training iterate again in ``train()``."""
    before = values(replay.params)
    optimizer = replay.optimizer
    optimizer.train()  # is on already
    torch.testing.assert_close(values(replay.params), before, rtol=0, atol=0)
    optimizer.eval()
    for i, p in enumerate(replay.params):
        want, last = replay.trace[f"p{i}_eval"], replay.trace[f"p{i}"]
        way = np.abs(last - replay.trace[f"p{i}_init"]).max()
        got = p.detach().numpy()
        assert np.abs(got - want).max() <= 1e-6 * way  # the reference's coefficient is float32
        assert np.abs(got - last[-1]).max() > 0.01 * way
    averaged = values(replay.params)
    optimizer.eval()
    with pytest.raises(RuntimeError, match=r"eval mode: call optimizer\.train\(\)"):
        replay.step(0)
    torch.testing.assert_close(values(replay.params), averaged, rtol=0, atol=0)
    optimizer.train()
    torch.testing.assert_close(values(replay.params), before, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ENTRIES)
def test_every_step_of_the_reference(name: str) -> None:
    replay = Replay(name)
    for t in range(replay.steps):
        replay.step(t)
        assert replay.distance(t) <= replay.entry["suggested_tol"], f"step {t}"
        assert all(p.dtype == getattr(torch, replay.entry["dtype"]) for p in replay.params)
    if name in FAILING:
        assert_fails(replay)
    else:
        assert_final_state(replay)
    if name in AVERAGED:
        assert_evaluates(replay)


def test_an_average_that_is_only_an_average() -> None:
    """Without the aliasing of the reference this is momentum with decay, from the formula."""
    name = "alias_sgd_nobc"
    replay = Replay(name, {"reference_aliasing": False})
    (group,) = replay.entry["resolved_groups"]
    beta, decay = group["betas"][0], group["weight_decay"]
    want = [np.array(replay.trace[f"p{i}_init"]) for i in range(len(replay.params))]
    average = [np.zeros_like(x) for x in want]
    for t, rate in enumerate(replay.trace["lr"]):
        replay.step(t)
        for i, p in enumerate(replay.params):
            average[i] = beta * average[i] + (1 - beta) * replay.trace[f"g{i}"][t]
            want[i] = want[i] - rate * (average[i] + decay * want[i])
            np.testing.assert_allclose(p.detach().numpy(), want[i], rtol=0, atol=1e-12)
            kept = replay.optimizer.state_dict()["state"][i]["block_0"]["filtered_grad"]
            np.testing.assert_allclose(kept.numpy(), average[i], rtol=0, atol=1e-12)
    assert replay.distance(replay.steps - 1) > 0.1  # the reference went elsewhere


def test_what_the_traces_leave_to_their_reader() -> None:
    """The cases named above are those of the index, and its callables and configs are ours."""
    assert set(AVERAGED) == {name for name, entry in ENTRIES.items() if has_average(entry)}
    assert FAILING == ["higher_order_bad_root", "tolerated_failures", "inf_grad"]
    assert decode("callable:muon_scale") is CALLABLES["muon_scale"]


def has_average(entry: dict[str, Any]) -> bool:
    return any("lr_sum" in key for key in entry.get("state_keys", ()))
