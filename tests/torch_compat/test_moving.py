"""A run moves to JAX and back: both go on alike, and what comes back is what went."""

import copy
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("torch")

import torch

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.torch_compat import (
    AdaGradPreconditionerConfig,
    AdamPreconditionerConfig,
    ClassicMomentumConfig,
    DistributedShampoo,
    EigendecomposedShampooPreconditionerConfig,
    EigenvalueCorrectedShampooPreconditionerConfig,
    GeneralizedPrimalAveragingConfig,
    RootInvKLShampooPreconditionerConfig,
    ScheduleFreeConfig,
    SGDPreconditionerConfig,
    SignDescentPreconditionerConfig,
    SingleDeviceDistributedConfig,
    WeightDecayType,
    from_jax,
    named_tree,
    to_jax,
)

KINDS: dict[str, dict[str, Any]] = {
    "root inverse": {},
    "grafted with momentum": {
        "grafting_config": AdamPreconditionerConfig(beta2=0.9),
        "iterate_averaging_config": ClassicMomentumConfig(momentum=0.5, use_nesterov=True),
        "weight_decay": 0.1,
    },
    "soap": {
        "preconditioner_config": EigenvalueCorrectedShampooPreconditionerConfig(),
        "start_preconditioning_step": 6,
    },
    "eigendecomposed, schedule-free": {
        "preconditioner_config": EigendecomposedShampooPreconditionerConfig(),
        "iterate_averaging_config": ScheduleFreeConfig(),
        "weight_decay": 0.1,
        "weight_decay_type": WeightDecayType.CORRECTED,
    },
    "kl": {"preconditioner_config": RootInvKLShampooPreconditionerConfig()},
    "two diagonals, primal averaging": {
        "preconditioner_config": AdaGradPreconditionerConfig(),
        "grafting_config": AdamPreconditionerConfig(),
        "iterate_averaging_config": GeneralizedPrimalAveragingConfig(),
    },
}


class Pair:
    """A torch model with its optimizer, and the same run in JAX once it has moved."""

    def __init__(self, groups: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.Linear(10, 7), torch.nn.BatchNorm1d(5)
        )
        self.params = list(self.model.parameters())
        given: Any = self.params
        if groups:  # and one parameter that nobody trains
            given = [
                {"params": self.params[:2]},
                {"params": self.params[2:-1], "lr": 0.02, "betas": (0.0, 0.9)},
            ]
            self.params[-1].requires_grad_(False)
        self.optimizer = DistributedShampoo(
            given,
            **{
                "lr": 0.01,
                "betas": (0.9, 0.95),
                "epsilon": 1e-3,
                "max_preconditioner_dim": 6,
                "precondition_frequency": 2,
                "distributed_config": SingleDeviceDistributedConfig(
                    target_parameter_dimensionality=2
                ),
                **options,
            },
        )
        self.random = np.random.default_rng(0)
        self.layout: Any = None

    def gradients(self) -> list[Any]:
        draws = [self.random.standard_normal(tuple(p.shape)) for p in self.params]
        return [torch.tensor(d, dtype=torch.float32) for d in draws]

    def torch_step(self, gradients: list[Any]) -> None:
        for p, g in zip(self.params, gradients, strict=True):
            p.grad = g if p.requires_grad else None
        self.optimizer.step()

    def move(self, layout: Any = None) -> None:
        self.layout = layout
        self.tx, self.tree, self.state = to_jax(self.optimizer, self.model, layout=layout)
        self._step = jax.jit(self._update)

    def _update(self, grads: Any, state: Any, params: Any) -> Any:
        updates, state = self.tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def jax_step(self, gradients: list[Any]) -> None:
        grads: dict[str, Any] = {}
        for (name, _), g in zip(self.model.named_parameters(), gradients, strict=True):
            module, kind = name.split(".")
            grads.setdefault(module, {})[kind] = jnp.asarray(g.numpy())
        if self.layout is not None:
            grads = self.layout.shard(grads)
        self.tree, self.state = self._step(grads, self.state, self.tree)

    def both_steps(self, count: int) -> None:
        for _ in range(count):
            gradients = self.gradients()
            self.torch_step(gradients)
            self.jax_step(gradients)

    def apart(self) -> float:
        tree = self.tree if self.layout is None else self.layout.unshard(self.tree)
        pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(named_tree(self.model)), strict=True)
        return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


def planned(model: Any, devices: int = 4) -> Any:
    mesh = jax.make_mesh((devices,), ("fsdp",), devices=jax.devices()[:devices])
    rules = [mfsdp.rules.tensor("*")]
    return mfsdp.plan(named_tree(model), mesh, optimizer="shampoo", rules=rules)


# On owners fewer: which kind it is, and where it lies, do not depend on each other.
CASES = [(kind, False) for kind in KINDS] + [
    ("grafted with momentum", True),
    ("soap", True),
    ("eigendecomposed, schedule-free", True),
]


@pytest.mark.parametrize(("kind", "owners"), CASES)
def test_both_go_on_alike_and_the_way_back_is_exact(kind: str, owners: bool) -> None:
    pair = Pair(**KINDS[kind])
    for _ in range(5):
        pair.torch_step(pair.gradients())
    pair.move(planned(pair.model) if owners else None)
    assert pair.apart() == 0
    pair.both_steps(6)
    assert 0 <= pair.apart() < 1e-4

    before = flat(pair.optimizer.state_dict())
    with torch.no_grad():
        for p in pair.params:
            p.add_(1.0)
    from_jax(pair.optimizer, pair.model, pair.tree, pair.state, layout=pair.layout)
    assert pair.apart() == 0
    after = flat(pair.optimizer.state_dict())
    assert before.keys() == after.keys()
    for name, x in before.items():
        assert x.shape == after[name].shape
        assert (x - after[name]).abs().max() <= 1e-2 * max(1.0, float(x.abs().max())), name
    # What came back is JAX's: it moves once more and comes out the same.
    tree, state = pair.tree, pair.state
    pair.move(pair.layout)
    for a, b in zip(
        jax.tree.leaves((tree, state)), jax.tree.leaves((pair.tree, pair.state)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def flat(state_dict: dict[str, Any], lead: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in state_dict.get("state", state_dict).items():
        if isinstance(value, dict):
            found |= flat(value, f"{lead}{name}/")
        else:
            found[f"{lead}{name}"] = value.double()
    return found


def test_parameter_groups_and_parameters_that_nobody_trains() -> None:
    pair = Pair(groups=True, **KINDS["grafted with momentum"])
    for _ in range(3):
        pair.torch_step(pair.gradients())
    pair.move()
    untrained = np.asarray(pair.tree["2"]["bias"])
    pair.both_steps(4)
    assert pair.apart() < 1e-4
    np.testing.assert_array_equal(pair.tree["2"]["bias"], untrained)
    from_jax(pair.optimizer, pair.model, pair.tree, pair.state)
    pair.both_steps(2)
    assert pair.apart() < 1e-4


def test_a_schedule_goes_on_where_torch_stands() -> None:
    pair = Pair()
    for _ in range(3):
        pair.torch_step(pair.gradients())
    seen = to_jax(pair.optimizer, pair.model, learning_rate=lambda count: 0.1 * count)
    own = copy.deepcopy(pair)
    own.optimizer.param_groups[0]["lr"] = 0.3
    gradients = pair.gradients()
    own.torch_step(gradients)
    pair.tx, pair.tree, pair.state = seen
    pair._step = jax.jit(pair._update)
    pair.jax_step(gradients)
    for x, y in zip(
        jax.tree.leaves(pair.tree), jax.tree.leaves(named_tree(own.model)), strict=True
    ):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_float64_needs_x64() -> None:
    model = torch.nn.Linear(3, 2).double()
    optimizer = DistributedShampoo(model.parameters())
    with pytest.raises(ValueError, match=r"float64.*enable_x64"):
        to_jax(optimizer, model)
    with jax.enable_x64(True):
        _, params, _ = to_jax(optimizer, model)
        assert params["weight"].dtype == jnp.float64


def test_what_cannot_move_says_why() -> None:
    model = torch.nn.Linear(3, 2)
    signs = SignDescentPreconditionerConfig(scale_fn=lambda g: g.abs().sum())
    optimizer = DistributedShampoo(model.parameters(), preconditioner_config=signs)
    with pytest.raises(ValueError, match=r"scale_fn.*mfsdp.SignDescent"):
        to_jax(optimizer, model)
    plain = {"preconditioner_config": SGDPreconditionerConfig(), "use_bias_correction": False}
    with pytest.raises(ValueError, match="reference_aliasing=False"):
        to_jax(DistributedShampoo(model.parameters(), **plain), model)
    to_jax(DistributedShampoo(model.parameters(), reference_aliasing=False, **plain), model)
    averaging = DistributedShampoo(
        model.parameters(), iterate_averaging_config=ScheduleFreeConfig()
    )
    averaging.eval()
    with pytest.raises(ValueError, match="train"):
        to_jax(averaging, model)
    with pytest.raises(ValueError, match=r"shape \(2, 3\) of the optimizer"):
        to_jax(DistributedShampoo(model.parameters()), torch.nn.Linear(3, 2))


def test_a_layout_of_another_kind_and_groups_with_a_layout_are_refused() -> None:
    pair = Pair()
    mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
    default = mfsdp.plan(named_tree(pair.model), mesh, optimizer="shampoo")
    with pytest.raises(ValueError, match=r"rules.tensor"):
        to_jax(pair.optimizer, pair.model, layout=default)
    grouped = Pair(groups=True)
    with pytest.raises(ValueError, match="parameter groups"):
        to_jax(grouped.optimizer, grouped.model, layout=planned(grouped.model))


def test_another_tree_does_not_come_back() -> None:
    pair = Pair()
    pair.move()
    before = named_tree(pair.model)
    wrong = {**pair.tree, "0": {**pair.tree["0"], "weight": jnp.zeros((8, 3, 3, 2))}}
    with pytest.raises(ValueError, match=r"'0/weight' is \(8, 3, 3, 3\)"):
        from_jax(pair.optimizer, pair.model, wrong, pair.state)
    with pytest.raises(ValueError, match="not that of a transform made by to_jax"):
        from_jax(pair.optimizer, pair.model, pair.tree, optax.EmptyState())
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(named_tree(pair.model)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_no_limit_on_the_size_of_blocks() -> None:
    pair = Pair(
        max_preconditioner_dim=math.inf,
        distributed_config=SingleDeviceDistributedConfig(target_parameter_dimensionality=math.inf),
    )
    pair.torch_step(pair.gradients())
    pair.move()
    pair.both_steps(3)
    assert pair.apart() < 1e-4
