"""What any ``torch.optim.Optimizer`` does, of ``DistributedShampoo``.

With the gradient's second moment as its preconditioner it is AdamW, and torch's own is the oracle.
"""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.optim import lr_scheduler

from matrixfsdp_jax import torch_compat as tc
from matrixfsdp_jax.torch_compat import crossing

EXACT: dict[str, Any] = {"rtol": 0, "atol": 0}
CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 1e-6}
MATRICES = tc.SingleDeviceDistributedConfig(target_parameter_dimensionality=2)
ADAM = tc.AdamPreconditionerConfig(beta2=0.96875, epsilon=1e-8)
ADAMW: dict[str, Any] = {"lr": 0.125, "betas": (0.875, 1.0), "weight_decay": 0.0625}
SGD = tc.SGDPreconditionerConfig()
PLAIN: dict[str, Any] = {"lr": 0.125, "betas": (0.0, 1.0), "preconditioner_config": SGD}
SHAMPOO: dict[str, Any] = {
    "lr": 0.125, "betas": (0.875, 0.96875), "epsilon": 1e-3, "distributed_config": MATRICES,
}  # fmt: skip

Params = list[torch.nn.Parameter]


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Params:
    return [torch.nn.Parameter(draw(100 + i, *s, dtype=dtype)) for i, s in enumerate(shapes)]


def give(params: Sequence[torch.Tensor], t: int) -> None:
    """The gradients of step ``t``."""
    for i, p in enumerate(params):
        p.grad = draw(1000 * t + i, *p.shape, dtype=p.dtype)


def ours(params: Any, **options: Any) -> tc.DistributedShampoo:
    """AdamW by this package."""
    return tc.DistributedShampoo(params, **{**ADAMW, "preconditioner_config": ADAM, **options})


def adamw(params: Any, **options: Any) -> torch.optim.AdamW:
    """And by torch."""
    betas = (ADAMW["betas"][0], ADAM.beta2)
    return torch.optim.AdamW(params, **{**ADAMW, "betas": betas, "eps": ADAM.epsilon, **options})


def values(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [p.detach().clone() for p in params]


def assert_close(got: Iterable[torch.Tensor], want: Iterable[torch.Tensor], **how: float) -> None:
    torch.testing.assert_close(values(got), values(want), **(how or CLOSE))


class Pair:
    """Our optimizer and the oracle, on parameters of their own."""

    def __init__(self, *shapes: tuple[int, ...], groups: Any = None, **options: Any) -> None:
        self.mine, self.theirs = parameters(*shapes), parameters(*shapes)
        cut: Callable[[Params], Any] = groups or (lambda params: params)
        self.optimizer = ours(cut(self.mine), **options)
        self.oracle = adamw(cut(self.theirs), **options)

    def go(self, *steps: int) -> None:
        for t in steps:
            before = values(self.mine)
            give(self.mine, t)
            give(self.theirs, t)
            self.optimizer.step()
            self.oracle.step()
            assert_close(self.mine, self.theirs)
            assert all((p != x).all() for p, x in zip(self.mine, before, strict=True))


# ---- parameter groups --------------------------------------------------------------------------


def test_groups_have_options_of_their_own() -> None:
    pair = Pair(
        (3, 2), (4,), (2,),
        groups=lambda p: [
            {"params": p[:1]}, {"params": p[1:], "lr": 0.25, "weight_decay": 0.0},
        ],
    )  # fmt: skip
    pair.go(1, 2, 3)
    pair.optimizer.param_groups[0]["lr"] = pair.oracle.param_groups[0]["lr"] = 0.5
    pair.go(4)


def test_a_group_is_added_between_steps() -> None:
    """It counts its steps from 1, while the others go on."""
    pair = Pair((3, 2))
    pair.go(1, 2)
    for params, optimizer in ((pair.mine, pair.optimizer), (pair.theirs, pair.oracle)):
        new = torch.nn.Parameter(draw(7, 4))
        params.append(new)
        optimizer.add_param_group({"params": [new], "lr": 0.25})
    pair.go(3, 4)
    state = pair.optimizer.state_dict()["state"]
    assert [int(state[i]["step"]) for i in range(2)] == [4, 2]


def test_a_group_that_is_refused_is_not_added() -> None:
    pair = Pair((3, 2))
    pair.go(1)
    for bad, message in (({"lr": -1.0}, "lr=-1.0"), ({"betas": (1.0, 1.0)}, "betas")):
        with pytest.raises(ValueError, match=message):
            pair.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], **bad})
    with pytest.raises(ValueError, match="some parameters appear in more than one"):
        pair.optimizer.add_param_group({"params": pair.mine})
    assert len(pair.optimizer.param_groups) == 1
    assert len(pair.optimizer.state_dict()["state"]) == 1
    pair.go(2)


def test_names_of_parameters_are_kept() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    optimizer = ours(model.named_parameters())
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert optimizer.param_groups[0]["param_names"] == names
    state_dict = optimizer.state_dict()
    assert state_dict["param_groups"][0]["param_names"] == names
    give(list(model.parameters()), 1)
    optimizer.step()
    optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["param_names"] == names
    optimizer.step()
    assert optimizer.state_dict()["state"][3]["step"] == 1


# ---- calls of a training loop ------------------------------------------------------------------


def test_a_closure_is_called_with_gradients_on() -> None:
    params = parameters((3, 2))
    optimizer = ours(params)
    seen = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        seen.append(torch.is_grad_enabled())
        loss = (params[0] ** 2).sum()
        loss.backward()
        return loss

    want = float((params[0].detach() ** 2).sum())
    with torch.no_grad():
        first = optimizer.step(closure)
    assert float(first) == pytest.approx(want)
    assert seen == [True]
    assert float(optimizer.step(closure)) < want
    assert optimizer.step() is None


def test_gradients_are_reset() -> None:
    params = parameters((3, 2), (2,))
    optimizer = ours(params)
    give(params, 1)
    before = values(params)
    optimizer.zero_grad(set_to_none=False)
    assert all((p.grad == 0).all() for p in params)
    optimizer.step()  # a zero gradient is one: weights decay
    assert_close(params, [(1 - 0.125 * 0.0625) * x for x in before])
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)
    before = values(params)
    optimizer.step()
    assert_close(params, before, **EXACT)


def halved(epoch: int) -> float:
    return 0.5**epoch


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, halved),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=8, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
}


@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedules(name: str, as_tensor: bool, compilations: list[str]) -> None:
    """Without a compilation, whether the learning rate is a number or a tensor."""
    pair = Pair((3, 2), lr=torch.tensor(0.125) if as_tensor else 0.125)
    both = [SCHEDULERS[name](o) for o in (pair.optimizer, pair.oracle)]
    rates = []
    for t in range(6):
        pair.go(t)
        rates.append(float(pair.optimizer.param_groups[0]["lr"]))
        for scheduler in both:
            scheduler.step(*[1.0] if name == "ReduceLROnPlateau" else [])
    assert len(set(rates)) > 2
    assert sum("_update" in function for function in compilations) == 1


def test_the_peak_stays_where_the_rate_was_first() -> None:
    """Also where a schedule writes to the tensor that the learning rate is."""
    lr = torch.tensor(0.125)
    optimizer = tc.DistributedShampoo(
        params := parameters((3, 2)), **{**PLAIN, "lr": lr, "weight_decay": 0.5},
        weight_decay_type=tc.WeightDecayType.CORRECTED,
    )  # fmt: skip
    scheduler = lr_scheduler.LambdaLR(optimizer, halved)
    want = params[0].detach().numpy().copy()
    for t, rate in enumerate((0.125, 0.0625, 0.03125)):
        give(params, t)
        optimizer.step()
        want -= rate * (params[0].grad.numpy() + 0.5 * rate / 0.125 * want)
        np.testing.assert_allclose(params[0].detach().numpy(), want, rtol=1e-5)
        scheduler.step()
    assert float(optimizer.param_groups[0]["peak_lr"]) == 0.125


def test_a_cycle_of_momentum(compilations: list[str]) -> None:
    """Works as in the formula, and compiles anew for every value of ``betas``."""
    params = parameters((3, 2))
    optimizer = tc.DistributedShampoo(
        params, lr=0.125, betas=(0.9, 1.0), preconditioner_config=SGD, use_bias_correction=True
    )
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=10)
    beta3 = optimizer.param_groups[0]["beta3"]
    want = params[0].detach().double().numpy()
    m = np.zeros_like(want)
    cycled = []
    for t in range(1, 5):
        lr, beta1 = (optimizer.param_groups[0][name] for name in ("lr", "betas"))
        beta1 = beta1[0]
        cycled.append(beta1)
        give(params, t)
        g = params[0].grad.double().numpy()
        optimizer.step()
        used = beta3 * m + (1 - beta3) * g
        m = beta1 * m + (1 - beta1) * g
        want = want - lr * used / (1 - beta3 * beta1 ** (t - 1))
        np.testing.assert_allclose(params[0].detach().numpy(), want, rtol=1e-4, atol=1e-5)
        scheduler.step()
    assert len(set(cycled)) == 4
    assert sum("_update" in function for function in compilations) == 4


def test_thirty_steps_are_compiled_once(compilations: list[str]) -> None:
    """Whatever learning rate and weight decay are; and nothing else is compiled later."""
    params = parameters((3, 2), (4,))
    optimizer = tc.DistributedShampoo(
        params, **SHAMPOO, weight_decay=0.5, precondition_frequency=3, grafting_config=ADAM
    )
    for t in range(30):
        if t == 1:
            del compilations[:]
        optimizer.param_groups[0]["lr"] = 0.125 / (t + 1)
        optimizer.param_groups[0]["weight_decay"] = 0.5 / (t + 1)
        give(params, t)
        optimizer.step()
    assert compilations == []
    assert all(torch.isfinite(p).all() for p in params)


@pytest.mark.parametrize("decays", [(0.0, 0.5, 0.25), (0.5, 0.0, 0.25)], ids=["on", "off"])
def test_weight_decay_is_switched(decays: tuple[float, ...]) -> None:
    pair = Pair((3, 2), weight_decay=decays[0])
    for t, decay in enumerate(decays):
        for optimizer in (pair.optimizer, pair.oracle):
            optimizer.param_groups[0]["weight_decay"] = decay
        pair.go(t)


def test_other_options_may_change() -> None:
    """With a new compilation, of the same state."""
    pair = Pair((3, 2))
    pair.go(1)
    pair.optimizer.param_groups[0]["preconditioner_config"] = tc.AdamPreconditionerConfig(
        beta2=0.9375, epsilon=1e-8
    )
    pair.oracle.param_groups[0]["betas"] = (0.875, 0.9375)
    pair.go(2, 3)


def test_hooks() -> None:
    params = parameters((3, 2))
    optimizer = ours(params)
    calls: list[Any] = []
    optimizer.register_step_pre_hook(
        lambda o, args, kwargs: calls.append(("before", values(params)))
    )
    optimizer.register_step_post_hook(
        lambda o, args, kwargs: calls.append(("after", values(params)))
    )
    give(params, 1)
    start = values(params)
    optimizer.step()
    assert [name for name, _ in calls] == ["before", "after"]
    assert_close(calls[0][1], start, **EXACT)
    assert_close(calls[1][1], params, **EXACT)


def test_hooks_of_state_dicts() -> None:
    """They see the whole state, and what they return counts."""
    params = parameters((3, 2))
    optimizer = ours(params)
    calls: list[str] = []

    def on_save(o: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        calls.append("saved")
        assert state_dict["state"][0]["block_0"]["adagrad"].shape == (6,)
        return {**state_dict, "note": 1}

    def on_load(o: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        calls.append("loading")
        assert "adagrad" in state_dict["state"][0]["block_0"]
        state_dict = copy.deepcopy(state_dict)
        state_dict["state"][0]["step"].fill_(7)
        return state_dict

    def after_load(o: Any) -> None:
        calls.append("loaded")
        assert o.state[params[0]]["step"] == 7

    optimizer.register_state_dict_pre_hook(lambda o: calls.append("saving"))
    optimizer.register_state_dict_post_hook(on_save)
    optimizer.register_load_state_dict_pre_hook(on_load)
    optimizer.register_load_state_dict_post_hook(after_load)
    saved = optimizer.state_dict()
    assert saved["note"] == 1
    optimizer.load_state_dict(saved)
    assert calls == ["saving", "saved", "loading", "loaded"]
    assert optimizer.state_dict()["state"][0]["step"] == 7


def test_a_gradient_scaler_skips_infinite_steps() -> None:
    params, plain = parameters((3, 2)), parameters((3, 2))
    optimizer, unscaled = ours(params), ours(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def loss(p: torch.Tensor, t: float) -> torch.Tensor:
        return (p * draw(5, 3, 2)).sum() * t

    for t in (1.0, math.inf, 2.0):
        optimizer.zero_grad()
        scaler.scale(loss(params[0], t)).backward()
        scaler.step(optimizer)
        scaler.update()
        if t == math.inf:
            assert scaler.get_scale() == 2.0
            continue
        unscaled.zero_grad()
        loss(plain[0], t).backward()
        unscaled.step()
        assert_close(params, plain)
    assert optimizer.state_dict()["state"][0]["step"] == 2


def test_a_compiled_model() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="eager")
    x = draw(3, 8, 3)
    for run, own in ((compiled, model), (twin, twin)):
        optimizer = ours(own.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            (run(x) ** 2).mean().backward()
            optimizer.step()
    assert_close(model.parameters(), twin.parameters())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_modes_of_autograd(mode: Any) -> None:
    pair = Pair((3, 2))
    pair.go(1)
    give(pair.mine, 2)
    give(pair.theirs, 2)
    with mode():
        pair.optimizer.step()
    pair.oracle.step()
    assert_close(pair.mine, pair.theirs)
    (p,) = pair.mine
    assert p.is_leaf
    assert p.requires_grad
    (p**2).sum().backward()


def test_autograd_sees_that_parameters_changed() -> None:
    params = parameters((3, 2))
    optimizer = ours(params)
    loss = (params[0] ** 2).sum()
    give(params, 1)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- parameters --------------------------------------------------------------------------------


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    """Also one that wants none; the step of the group counts."""
    params = parameters((3, 2), (3, 2), (2,))
    params[2].requires_grad_(False)
    optimizer = tc.DistributedShampoo(params, **SHAMPOO, weight_decay=0.5, grafting_config=ADAM)
    give(params[:2], 1)
    optimizer.step()
    before, state = values(params), optimizer.state_dict()["state"]
    give(params[:1], 2)
    params[1].grad = None
    optimizer.step()
    after = optimizer.state_dict()["state"]
    assert_close(params[1:], before[1:], **EXACT)
    assert (params[0] != before[0]).all()
    for i in (1, 2):
        torch.testing.assert_close(after[i]["block_0"], state[i]["block_0"], **EXACT)
        assert after[i]["step"] == state[i]["step"] + 1 == 2
    assert (after[0]["block_0"]["filtered_grad"] != state[0]["block_0"]["filtered_grad"]).all()
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 3


def test_parameters_may_change_between_steps() -> None:
    pair = Pair((3, 2))
    pair.go(1)
    with torch.no_grad():
        for params in (pair.mine, pair.theirs):
            params[0].mul_(2).add_(1)
    pair.go(2)


def test_the_memory_of_a_parameter_may_change() -> None:
    """As ``p.data = ...`` and ``torch.nn.utils.vector_to_parameters`` do between steps."""
    pair = Pair((3, 2), (2,))
    pair.go(1)
    for params in (pair.mine, pair.theirs):
        torch.nn.utils.vector_to_parameters(draw(9, 8), params)
    pair.go(2, 3)


def test_parameters_of_no_and_of_one_element() -> None:
    shapes: tuple[tuple[int, ...], ...] = ((), (0,), (2, 0), (1, 1), (3, 2))
    mine, theirs = parameters(*shapes), parameters(*shapes)
    optimizer, oracle = ours(mine), adamw(theirs)
    for t in range(3):
        give(mine, t)
        give(theirs, t)
        optimizer.step()
        oracle.step()
    assert_close(mine, theirs)
    state = optimizer.state_dict()["state"]
    assert [set(state[i]) for i in range(3)] == [{"step", "block_0"}, {"step"}, {"step"}]
    optimizer.load_state_dict(optimizer.state_dict())


def test_only_parameters_without_elements() -> None:
    params = parameters((0,), (2, 0))
    optimizer = ours(params)
    give(params, 1)
    optimizer.step()
    assert optimizer.state_dict()["state"][0] == {"step": torch.tensor(1)}


def test_dtypes_may_be_mixed_in_a_group() -> None:
    """Every parameter as in an optimizer of its own, and the wider ones more exactly."""
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    params = [torch.nn.Parameter(draw(1, 3, 2, dtype=dtype)) for dtype in dtypes]
    theirs = [torch.nn.Parameter(draw(1, 3, 2, dtype=torch.float64)) for _ in dtypes]
    optimizer, oracle = ours(params), adamw(theirs)
    for t in range(1, 4):
        for p, x in zip(params, theirs, strict=True):
            x.grad = draw(t, 3, 2, dtype=torch.bfloat16).double()
            p.grad = x.grad.to(p.dtype)
        optimizer.step()
        oracle.step()
    assert [p.dtype for p in params] == list(dtypes)
    for p, x, places in zip(params, theirs, (2e-6, 1e-7, 3e-2, 4e-3), strict=True):
        torch.testing.assert_close(p.detach().double(), x.detach(), rtol=0, atol=places)
        assert (p.detach().double() - draw(1, 3, 2)).abs().max() > 0.1


def test_parameters_may_be_views_of_one_buffer() -> None:
    flat = torch.cat([draw(100, 3, 2).reshape(-1), draw(101, 5)])
    params = [torch.nn.Parameter(x) for x in (flat[:6].view(3, 2), flat[6:])]
    theirs = parameters((3, 2), (5,))
    optimizer, oracle = ours(params), adamw(theirs)
    for t in range(3):
        give(params, t)
        give(theirs, t)
        optimizer.step()
        oracle.step()
    assert_close(params, theirs)
    assert_close([flat[:6].view(3, 2), flat[6:]], theirs)


# ---- gradients ---------------------------------------------------------------------------------


def transposed(g: torch.Tensor) -> torch.Tensor:
    return g.t().contiguous().t()


def sliced(g: torch.Tensor) -> torch.Tensor:
    return torch.stack([g, torch.zeros_like(g)], -1)[..., 0]


def bucketed(g: torch.Tensor) -> torch.Tensor:
    """A view that begins at no multiple of 64 bytes."""
    bucket = torch.zeros(g.numel() + 3)
    bucket[3:] = g.reshape(-1)
    return bucket[3:].view(g.shape)


def expanded(g: torch.Tensor) -> torch.Tensor:
    return g[:1].expand(g.shape)


@pytest.mark.parametrize("laid", [transposed, sliced, bucketed, expanded])
def test_gradients_laid_out_otherwise(laid: Callable[[torch.Tensor], torch.Tensor]) -> None:
    mine, theirs = parameters((3, 2)), parameters((3, 2))
    optimizer, oracle = ours(mine), adamw(theirs)
    for t in range(1, 4):
        mine[0].grad = laid(draw(t, 3, 2))
        theirs[0].grad = laid(draw(t, 3, 2)).clone(memory_format=torch.contiguous_format)
        assert not mine[0].grad.is_contiguous() or mine[0].grad.data_ptr() % 64
        optimizer.step()
        oracle.step()
        assert_close(mine, theirs)


def test_gradients_are_not_written_to() -> None:
    params = parameters((3, 2), (2,))
    optimizer = tc.DistributedShampoo(
        params, **SHAMPOO, weight_decay=0.5, weight_decay_type=tc.WeightDecayType.L2
    )
    give(params, 1)
    kept = [(p.grad, p.grad.clone(), p.grad.data_ptr()) for p in params]
    optimizer.step()
    for p, (same, value, place) in zip(params, kept, strict=True):
        assert p.grad is same
        assert p.grad.data_ptr() == place
        torch.testing.assert_close(p.grad, value, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tensors_cross_without_a_copy(dtype: torch.dtype) -> None:
    tensor = draw(1, 16, 16, dtype=dtype)
    assert tensor.data_ptr() % 64 == 0
    with jax.enable_x64(True):
        array = crossing.to_jax(tensor)
        assert array.unsafe_buffer_pointer() == tensor.data_ptr()
        assert str(array.dtype) == str(tensor.dtype).removeprefix("torch.")
        made = jax.numpy.asarray(array) + 1
        back = crossing.to_torch(made)
    assert back.data_ptr() == made.unsafe_buffer_pointer()
    torch.testing.assert_close(back, tensor + 1, **EXACT)
    own = crossing.owned(array)
    assert own.data_ptr() != tensor.data_ptr()


def test_an_early_check_of_gradients() -> None:
    params = parameters((3, 2), (2,))
    checking = tc.ShampooRuntimeConfig(eager_nan_check=True)
    optimizer = ours(params, shampoo_runtime_config=checking)
    give(params, 1)
    optimizer.step()
    before, state = values(params), optimizer.state_dict()["state"]
    for bad in (math.nan, math.inf):
        give(params, 2)
        params[1].grad[1] = bad
        with pytest.raises(ValueError, match="gradient of parameter 1 of its group is not finite"):
            optimizer.step()
        assert_close(params, before, **EXACT)
        torch.testing.assert_close(optimizer.state_dict()["state"], state, **EXACT)
    give(params, 2)
    optimizer.step()


# ---- a scale that is a function of tensors -----------------------------------------------------


@pytest.mark.parametrize("decay", ["L2", "DECOUPLED"])
def test_signs_are_scaled_by_a_function_of_tensors(decay: str) -> None:
    """It is given every block of the filtered gradient, which L2 decay is part of."""
    given: list[torch.Tensor] = []

    def scale(block: torch.Tensor) -> torch.Tensor:
        given.append(block.clone())
        return block.abs().mean()

    params = parameters((4, 2), (2,))
    optimizer = tc.DistributedShampoo(
        params,
        lr=0.125,
        betas=(0.5, 1.0),
        weight_decay=0.25,
        weight_decay_type=tc.WeightDecayType(decay),
        max_preconditioner_dim=2,
        distributed_config=MATRICES,
        preconditioner_config=tc.SignDescentPreconditionerConfig(scale_fn=scale),
    )
    want = [p.detach().double().numpy() for p in params]
    means = [np.zeros_like(x) for x in want]
    for t in range(1, 4):
        give(params, t)
        del given[:]
        optimizer.step()
        used = []
        for i, p in enumerate(params):
            g = p.grad.double().numpy() + (0.25 * want[i] if decay == "L2" else 0)
            means[i] = 0.5 * means[i] + 0.5 * g
            m = means[i] / (1 - 0.5**t)
            blocks = np.split(m, 2) if i == 0 else [m]
            used += blocks
            step = np.concatenate([np.sign(b) * np.abs(b).mean() for b in blocks])
            want[i] = want[i] - 0.125 * (step + (0.25 * want[i] if decay == "DECOUPLED" else 0))
            np.testing.assert_allclose(p.detach().numpy(), want[i], rtol=1e-5, atol=1e-6)
        assert all(isinstance(x, torch.Tensor) for x in given)
        for got, block in zip(given, used, strict=True):
            np.testing.assert_allclose(got.numpy(), block, rtol=1e-5, atol=1e-6)


def test_scaled_signs_graft() -> None:
    """The norm of a block's step is that of its scaled signs."""
    params = parameters((3, 2))
    signs = tc.SignDescentPreconditionerConfig(scale_fn=lambda block: block.abs().max())
    optimizer = tc.DistributedShampoo(params, **{**PLAIN, "grafting_config": signs})
    want = params[0].detach().double().numpy()
    for t in range(1, 3):
        give(params, t)
        optimizer.step()
        g = params[0].grad.double().numpy()
        want = want - 0.125 * g * np.sqrt(g.size) * np.abs(g).max() / np.linalg.norm(g)
        np.testing.assert_allclose(params[0].detach().numpy(), want, rtol=1e-5, atol=1e-6)


# ---- what is refused ---------------------------------------------------------------------------


def test_a_sparse_gradient() -> None:
    embedding = torch.nn.Embedding(4, 3, sparse=True)
    optimizer = ours(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    before = values(embedding.parameters())
    with pytest.raises(RuntimeError, match=r"shape \(4, 3\) is sparse; use dense"):
        optimizer.step()
    assert_close(embedding.parameters(), before, **EXACT)
    assert optimizer.state_dict()["state"][0]["step"] == 0


def channels_last() -> torch.Tensor:
    return torch.zeros(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)


ONE = torch.zeros(2)
PARAMETERS: dict[str, tuple[list[torch.Tensor], str]] = {
    "complex": ([torch.zeros(2, dtype=torch.complex64)], r"\(2,\) is complex .*view_as_real"),
    "sparse": ([torch.zeros(2, 2).to_sparse()], "layout torch.sparse_coo; give dense"),
    "integers": ([torch.zeros(2, dtype=torch.int32)], "dtype torch.int32"),
    "meta": ([torch.zeros(2, device="meta")], "meta device and has no values yet"),
    "devices": ([ONE, torch.zeros(2, device="meta")], r"several devices, \['cpu', 'meta'\]"),
    "channels last": ([channels_last()], r"\(4, 3, 2, 2\) and strides .*contiguous"),
    "nothing": ([], "empty parameter list"),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_that_are_refused(name: str) -> None:
    params, message = PARAMETERS[name]
    with pytest.raises(ValueError, match=message):
        ours(params)


def test_an_empty_group() -> None:
    with pytest.raises(ValueError, match="a parameter group has no parameters"):
        ours([{"params": parameters((2,))}, {"params": []}])


NAN = math.nan
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"lr": -0.1}, r"lr=-0\.1 must be >= 0"),
    ({"lr": NAN}, "lr=nan must be >= 0"),
    ({"betas": (1.0, 1.0)}, r"betas\[0\]=1\.0 must be in \[0, 1\)"),
    ({"betas": (0.5, 1.5)}, r"betas\[1\]=1\.5 must be in \[0, 1\]"),
    ({"beta3": 1.0}, r"beta3=1\.0 must be in \[0, 1\), or -1"),
    ({"beta3": -0.5}, r"beta3=-0\.5 must be"),
    ({"epsilon": 0.0}, r"epsilon=0\.0 must be > 0"),
    ({"weight_decay": -1.0}, r"weight_decay=-1\.0 must be >= 0"),
    ({"max_preconditioner_dim": 0}, "max_preconditioner_dim=0 must be an int >= 1"),
    ({"max_preconditioner_dim": 8.0}, "max_preconditioner_dim=8.0 must be an int >= 1"),
    ({"max_preconditioner_dim": True}, "max_preconditioner_dim=True must be an int >= 1"),
    ({"precondition_frequency": 0}, "precondition_frequency=0 must be >= 1"),
    (
        {"precondition_frequency": 4, "start_preconditioning_step": 2},
        "start_preconditioning_step=2 must be >= precondition_frequency=4",
    ),
    (
        {"lr": 0.0, "weight_decay_type": tc.WeightDecayType.CORRECTED},
        r"peak_lr=0\.0 must be > 0 with",
    ),
    (
        {
            "preconditioner_config": tc.RootInvShampooPreconditionerConfig(
                amortized_computation_config=tc.EigenConfig(tc.PseudoInverseConfig())
            )
        },
        "must be 0 with PseudoInverseConfig",
    ),
]
TYPES: list[tuple[dict[str, Any], str]] = [
    ({"weight_decay_type": "L2"}, "weight_decay_type='L2' must be one of"),
    ({"preconditioner_config": "shampoo"}, "must be a configuration .*'shampoo'"),
    ({"grafting_config": 1}, "must be a configuration .*got 1"),
    ({"iterate_averaging_config": ADAM}, "iterate_averaging_config must be a configuration"),
    ({"concurrency_config": None}, "concurrency_config=None must be a ConcurrencyConfig"),
    ({"shampoo_runtime_config": None}, "shampoo_runtime_config=None must be a"),
    ({"betas": 0.9}, r"betas=0\.9"),
    ({"lr": "0.1"}, r"lr='0\.1'"),
    ({"precondition_frequency": 1.5}, r"frequency=1\.5"),
    ({"preconditioner_config": None}, "preconditioner_config"),
]
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"use_pin_memory": True}, "use_pin_memory=True: .*leave it False"),
    ({"shampoo_pt2_compile_config": {}}, "shampoo_pt2_compile_config: .*leave it None"),
    ({"distributed_config": "ddp"}, "distributed_config='ddp': this layer carries"),
    (
        {
            "preconditioner_config": tc.RootInvShampooPreconditionerConfig(
                factor_matrix_dtype=torch.bfloat16
            )
        },
        "factor_matrix_dtype=torch.bfloat16 is not carried here",
    ),
]
REFUSED = [
    *((options, ValueError, message) for options, message in OPTIONS),
    *((options, (TypeError, ValueError), message) for options, message in TYPES),
    *((options, NotImplementedError, message) for options, message in UNSUPPORTED),
]


@pytest.mark.parametrize(("options", "kind", "message"), REFUSED)
def test_options_that_are_refused(
    options: dict[str, Any], kind: Any, message: str, compilations: list[str]
) -> None:
    """Before there is any state, in the constructor and in a group."""
    shared = ("concurrency_config", "shampoo_runtime_config", "shampoo_pt2_compile_config")
    with pytest.raises(kind, match=message):
        tc.DistributedShampoo(parameters((3, 2)), **options)
    if not options.keys() & {*shared, "use_pin_memory"} and options.get("lr") != 0:
        group = {"params": parameters((3, 2)), **options}
        with pytest.raises(kind, match=message):
            tc.DistributedShampoo([group])
    assert compilations == []


def test_ddp_needs_a_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"needs torch\.distributed: call .*init_process_group"):
        ours(parameters((2,)), distributed_config=tc.DDPDistributedConfig())


def test_blocks_are_for_good() -> None:
    params = parameters((3, 2))
    optimizer = ours(params)
    give(params, 1)
    optimizer.param_groups[0]["max_preconditioner_dim"] = 2
    with pytest.raises(
        ValueError, match=r"max_preconditioner_dim was 1024 .*build a new optimizer"
    ):
        optimizer.step()
    optimizer.param_groups[0]["max_preconditioner_dim"] = 1024
    optimizer.step()


def test_spectral_descent_leaves_a_config_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """The reference writes to the object that it is given, which other optimizers share."""
    config = tc.SingleDeviceDistributedConfig()
    params = parameters((2, 2, 2))
    optimizer = tc.DistributedShampoo(
        params,
        distributed_config=config,
        precondition_frequency=3,
        preconditioner_config=tc.SpectralDescentPreconditionerConfig(),
    )
    assert config.target_parameter_dimensionality == 1
    own = optimizer.param_groups[0]
    assert own["distributed_config"].target_parameter_dimensionality == 2
    assert own["precondition_frequency"] == 1
    for text in ("target_parameter_dimensionality is set to 2", "is set from 3 to 1"):
        assert text in caplog.text


def test_a_gradient_with_the_negative_bit_is_read_as_it_is() -> None:
    p = torch.nn.Parameter(torch.ones(4, 3))
    plain = torch.nn.Parameter(torch.ones(4, 3))
    g = torch.randn(4, 3)
    p.grad, plain.grad = torch._neg_view(-g), g
    assert p.grad.is_neg()
    for one in (p, plain):
        tc.DistributedShampoo([one], lr=0.1).step()
    assert torch.equal(p, plain)


def test_a_mesh_of_the_user_is_not_used() -> None:
    p = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = tc.DistributedShampoo([p], lr=0.1)
    p.grad = torch.ones(4, 3)
    with jax.set_mesh(jax.make_mesh((8,), ("x",))):
        optimizer.step()
    assert not torch.equal(p, torch.ones(4, 3))


def test_options_that_need_another_state_are_refused_in_the_step() -> None:
    p = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = tc.DistributedShampoo([p], lr=0.1)
    p.grad = torch.ones(4, 3)
    optimizer.step()
    before = p.detach().clone()
    optimizer.param_groups[0]["grafting_config"] = tc.AdamPreconditionerConfig()
    with pytest.raises(ValueError, match=r"grafting_config is Adam.* now and was None"):
        optimizer.step()
    assert torch.equal(p, before)
