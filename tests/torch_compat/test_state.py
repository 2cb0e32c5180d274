"""The state of ``DistributedShampoo``: what is saved, where it can be loaded, what is refused."""

import copy
import dataclasses
import enum
import functools
import io
import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from matrixfsdp_jax import torch_compat as tc
from tests.torch_compat.cases import Replay

EXACT: dict[str, Any] = {"rtol": 0, "atol": 0}
MATRICES = tc.SingleDeviceDistributedConfig(target_parameter_dimensionality=2)
OPTIONS: dict[str, Any] = {
    "lr": 0.1,
    "betas": (0.9, 0.99),
    "epsilon": 1e-4,
    "distributed_config": MATRICES,
}
PLAIN: dict[str, Any] = {**OPTIONS, "betas": (0.0, 0.99)}
SOAP = tc.EigenvalueCorrectedShampooPreconditionerConfig
EIGENDECOMPOSED = tc.EigendecomposedShampooPreconditionerConfig
QR = tc.QREigendecompositionConfig()
ADAM = tc.AdamPreconditionerConfig(epsilon=1e-8)

# Everything that a block may keep, once.
KINDS: dict[str, dict[str, Any]] = {
    "roots": OPTIONS,
    "roots of a sum": {**PLAIN, "betas": (0.0, 1.0), "precondition_frequency": 2},
    "eigenpairs by eigh": {**PLAIN, "preconditioner_config": EIGENDECOMPOSED()},
    "eigenpairs by qr": {
        **PLAIN, "preconditioner_config": EIGENDECOMPOSED(amortized_computation_config=QR),
    },
    "soap": {**OPTIONS, "preconditioner_config": SOAP()},
    "soap by qr, unpacked": {
        **OPTIONS,
        "preconditioner_config": SOAP(amortized_computation_config=QR, use_symmetric_packing=False),
    },
    "kl roots": {**PLAIN, "preconditioner_config": tc.RootInvKLShampooPreconditionerConfig()},
    "kl eigenpairs": {
        **PLAIN, "preconditioner_config": tc.EigendecomposedKLShampooPreconditionerConfig(),
    },
    "grafting and momentum": {
        **OPTIONS,
        "grafting_config": ADAM,
        "start_preconditioning_step": 4,
        "iterate_averaging_config": tc.ClassicMomentumConfig(momentum=0.9),
    },
    "grafting by shampoo": {
        **PLAIN,
        "grafting_config": tc.DefaultShampooConfig,
        "preconditioner_config": tc.AdaGradPreconditionerConfig(),
    },
    "primal averaging": {
        **PLAIN, "iterate_averaging_config": tc.GeneralizedPrimalAveragingConfig(),
    },
    "schedule-free": {**PLAIN, "iterate_averaging_config": tc.ScheduleFreeConfig()},
    "two diagonal moments": {
        **OPTIONS,
        "preconditioner_config": ADAM,
        "grafting_config": tc.RMSpropPreconditionerConfig(beta2=0.9),
    },
    "unpacked": {
        **PLAIN,
        "preconditioner_config": tc.RootInvShampooPreconditionerConfig(use_symmetric_packing=False),
    },
    "blocks": {**OPTIONS, "max_preconditioner_dim": 2, "grafting_config": ADAM},
}  # fmt: skip


def model(dtype: torch.dtype = torch.float32, bias: bool = False) -> torch.nn.Module:
    """Parameters of shape (2, 3) and, with a bias, (2,)."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Linear(3, 2, dtype=dtype, bias=bias)


class Run:
    """A model, its optimizer, and recorded gradients."""

    def __init__(
        self, options: Mapping[str, Any], dtype: torch.dtype = torch.float32, groups: bool = False
    ) -> None:
        self.model = model(dtype, bias=groups)
        params: Any = list(self.model.parameters())
        if groups:
            params = [{"params": params[:1]}, {"params": params[1:], "lr": 0.2, "epsilon": 0.01}]
        self.optimizer = tc.DistributedShampoo(params, **options)

    @property
    def params(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def go(self, *steps: int) -> None:
        """Steps, each with the gradients of its number."""
        for t in steps:
            generator = torch.Generator().manual_seed(t)
            for p in self.params:
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            self.optimizer.step()

    def resume(self, other: "Run", through: Callable[[Any], Any] = copy.deepcopy) -> None:
        """Take over parameters and state of another run."""
        self.model.load_state_dict(other.model.state_dict())
        self.optimizer.load_state_dict(through(other.optimizer.state_dict()))


def assert_equal(a: Run, b: Run) -> None:
    """The same parameters, state and options, to the bit."""
    torch.testing.assert_close(
        [p.detach() for p in a.params], [p.detach() for p in b.params], **EXACT
    )
    one, two = a.optimizer.state_dict(), b.optimizer.state_dict()
    assert one["param_groups"] == two["param_groups"]
    torch.testing.assert_close(one["state"], two["state"], **EXACT)


def assert_goes_on_equal(a: Run, b: Run, *steps: int) -> None:
    before = [p.detach().clone() for p in a.params]
    a.go(*steps)
    b.go(*steps)
    assert_equal(a, b)
    assert all((x != p).any() for x, p in zip(before, a.params, strict=True))


def leaves(tree: Mapping[Any, Any], lead: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{lead}{name}/")
        else:
            yield f"{lead}{name}", value


# ---- the state of the reference ----------------------------------------------------------------

# All kinds of state that the traces end with.
ENDED = (
    "momentum_nesterov_damp", "schedule_free", "eigdec_eigh", "soap_override", "kl_rootinv",
    "block4", "two_groups",
)  # fmt: skip


def given_state(replay: Replay) -> dict[str, Any]:
    """The state dict of the reference at the end of a trace."""
    state: dict[int, Any] = {}
    for name, x in replay.trace.items():
        if not name.startswith("state/"):
            continue
        _, param, *path = name.split("/")
        own: dict[Any, Any] = state.setdefault(int(param), {})
        keys = [int(key) if key.isdigit() else key for key in path]
        for key in keys[:-1]:
            own = own.setdefault(key, {})
        own[keys[-1]] = torch.tensor(x)
    return {"state": state, "param_groups": replay.optimizer.state_dict()["param_groups"]}


@pytest.mark.parametrize("name", ENDED)
def test_the_state_of_the_reference(name: str) -> None:
    """It comes out as it went in, and a run goes on from it as if it had not stopped."""
    whole = Replay(name)
    for t in range(whole.steps):
        whole.step(t)
    resumed = Replay(name)
    with torch.no_grad():
        for p, old in zip(resumed.params, whole.params, strict=True):
            p.copy_(old)
    given = given_state(resumed)
    resumed.optimizer.load_state_dict(given)
    torch.testing.assert_close(resumed.optimizer.state_dict()["state"], given["state"], **EXACT)
    for replay in (whole, resumed):
        replay.step(0)
    tolerance = whole.entry["suggested_tol"]
    for i, (got, want) in enumerate(zip(resumed.params, whole.params, strict=True)):
        way = np.abs(whole.trace[f"p{i}"] - whole.trace[f"p{i}_init"]).max()
        moved = np.abs(want.detach().numpy() - whole.trace[f"p{i}"][-1]).max()
        assert moved > 1000 * tolerance * way
        assert (got - want).abs().max() <= tolerance * way


# ---- save, load, go on -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_from_its_state(kind: str) -> None:
    whole, resumed = Run(KINDS[kind]), Run(KINDS[kind])
    whole.go(0, 1, 2)
    resumed.resume(whole)
    assert_equal(resumed, whole)
    assert_goes_on_equal(resumed, whole, 3, 4)
    entry = whole.optimizer.state_dict()["state"][0]
    assert entry["step"].dtype == torch.int64
    assert entry["step"] == 5


def test_nothing_is_compiled_anew_for_a_loaded_state(compilations: list[str]) -> None:
    run = Run(KINDS["schedule-free"])
    run.go(0, 1)
    run.resume(run)
    run.go(2)
    assert sum("_update" in function for function in compilations) == 1
    run.resume(run)
    del compilations[:]
    run.go(3, 4)
    assert compilations == []


def test_two_groups_go_on() -> None:
    whole, resumed = Run(OPTIONS, groups=True), Run(OPTIONS, groups=True)
    whole.go(0, 1, 2)
    whole.optimizer.param_groups[1]["lr"] = 0.3
    resumed.resume(whole)
    assert [group["lr"] for group in resumed.optimizer.param_groups] == [0.1, 0.3]
    assert_goes_on_equal(resumed, whole, 3, 4)


@pytest.mark.parametrize("kind", ["grafting and momentum", "schedule-free"])
def test_bfloat16_parameters_go_on(kind: str) -> None:
    whole, resumed = (Run(KINDS[kind], torch.bfloat16) for _ in range(2))
    whole.go(0, 1, 2)
    resumed.resume(whole)
    assert_goes_on_equal(resumed, whole, 3, 4)


def test_the_names_and_shapes_of_entries() -> None:
    """Of kinds that the traces of the reference do not have."""
    kinds = ("soap by qr, unpacked", "two diagonal moments", "grafting by shampoo")
    found = {}
    for kind in kinds:
        state = Run(KINDS[kind]).optimizer.state_dict()["state"][0]
        found[kind] = {name: tuple(x.shape) for name, x in leaves(state["block_0"])}
    assert found["soap by qr, unpacked"] == {
        "filtered_grad": (2, 3),
        "shampoo/factor_matrices/0": (2, 2),
        "shampoo/factor_matrices/1": (3, 3),
        "shampoo/factor_matrices_eigenvectors/0": (2, 2),
        "shampoo/factor_matrices_eigenvectors/1": (3, 3),
        "shampoo/corrected_eigenvalues": (2, 3),
    }
    assert found["two diagonal moments"] == {
        "filtered_grad": (2, 3), "preconditioner/adagrad": (2, 3), "adagrad": (2, 3),
    }  # fmt: skip
    packed = {"adagrad"} | {
        f"grafting/shampoo/{name}/{k}"
        for name in ("factor_matrices", "inv_factor_matrices")
        for k in range(2)
    }
    assert set(found["grafting by shampoo"]) == packed
    assert found["grafting by shampoo"]["grafting/shampoo/factor_matrices/1"] == (6,)


def test_packed_and_unpacked_are_the_same_state() -> None:
    """Triangles load where whole matrices are written, and the other way round."""
    packed, unpacked = Run(PLAIN), Run(KINDS["unpacked"])
    packed.go(0, 1)
    own = packed.optimizer.state_dict()
    into = unpacked.optimizer.state_dict()
    unpacked.optimizer.load_state_dict({**own, "param_groups": into["param_groups"]})
    whole = unpacked.optimizer.state_dict()["state"][0]["block_0"]["shampoo"]
    for k, triangle in own["state"][0]["block_0"]["shampoo"]["factor_matrices"].items():
        matrix = whole["factor_matrices"][k]
        torch.testing.assert_close(matrix, matrix.T, **EXACT)
        torch.testing.assert_close(matrix[*torch.triu_indices(*matrix.shape)], triangle, **EXACT)
    again = Run(PLAIN)
    state = unpacked.optimizer.state_dict()["state"]
    again.optimizer.load_state_dict({**own, "state": state})
    torch.testing.assert_close(again.optimizer.state_dict()["state"], own["state"], **EXACT)


def test_a_state_dict_is_a_copy() -> None:
    run = Run(OPTIONS)
    run.go(0)
    saved = run.optimizer.state_dict()
    kept = copy.deepcopy(saved["state"])
    run.go(1)
    torch.testing.assert_close(saved["state"], kept, **EXACT)
    new = run.optimizer.state_dict()["state"]
    name = "filtered_grad"
    assert (new[0]["block_0"][name] != kept[0]["block_0"][name]).all()
    # Nor does the optimizer keep what it was given.
    run.optimizer.load_state_dict(saved)
    for _, x in leaves(saved["state"]):
        x.zero_()
    torch.testing.assert_close(run.optimizer.state_dict()["state"], kept, **EXACT)


def test_the_mode_stays_with_the_optimizer() -> None:
    """As in the reference, a state in eval mode leaves a training optimizer in training."""
    saved, live = (Run(KINDS["schedule-free"]) for _ in range(2))
    saved.go(0, 1)
    saved.optimizer.eval()
    state = saved.optimizer.state_dict()
    assert not state["state"][0]["train_mode"]
    live.optimizer.load_state_dict(state)
    assert live.optimizer.state_dict()["state"][0]["train_mode"]
    live.go(2)


# ---- ways to travel ----------------------------------------------------------------------------


def through_file(state_dict: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, **options)


def through_safe_file(state_dict: Any) -> Any:
    """Configurations are classes, of which ``torch.load`` has to be told."""
    known = [getattr(tc, name) for name in tc.__all__ if isinstance(getattr(tc, name), type)]
    with torch.serialization.safe_globals(known):
        return through_file(state_dict, weights_only=True)


@functools.cache
def travelled() -> tuple[Run, Run, dict[str, Any]]:
    """One run, one that takes over from it in many ways, and the state before it does."""
    options = {**KINDS["grafting and momentum"], "weight_decay": 0.1}
    whole, resumed = Run(options), Run(options)
    whole.go(0, 1, 2)
    return whole, resumed, resumed.optimizer.state_dict()


@pytest.mark.parametrize(
    "through",
    [
        functools.partial(through_file, weights_only=False),
        through_safe_file,
        lambda state: pickle.loads(pickle.dumps(state)),
        copy.deepcopy,
    ],
    ids=["torch.save", "weights only", "pickle", "deepcopy"],
)
def test_a_state_dict_travels(through: Callable[[Any], Any]) -> None:
    whole, resumed, initial = travelled()
    resumed.optimizer.load_state_dict(initial)
    resumed.resume(whole, through)
    assert_equal(resumed, whole)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_torch(flat: bool, tmp_path: Any) -> None:
    whole, resumed = (Run(KINDS["schedule-free"]) for _ in range(2))
    whole.go(0, 1, 2)
    resumed.model.load_state_dict(whole.model.state_dict())
    how = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved: Any = get_optimizer_state_dict(whole.model, whole.optimizer, options=how)
    name = "state.weight.block_0.shampoo.factor_matrices.0"
    if flat:
        assert saved[name].shape == (3,)
    else:
        assert saved["state"]["weight"]["block_0"]["shampoo"]["factor_matrices"][0].shape == (3,)
    dcp.save({"optimizer": saved}, checkpoint_id=tmp_path, no_dist=True)
    into = {"optimizer": get_optimizer_state_dict(resumed.model, resumed.optimizer, options=how)}
    dcp.load(into, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(resumed.model, resumed.optimizer, into["optimizer"], options=how)
    assert_goes_on_equal(resumed, whole, 3)


def through_pickle(pair: Any) -> Any:
    return pickle.loads(pickle.dumps(pair))


@pytest.mark.parametrize("through", [copy.deepcopy, through_pickle], ids=["deepcopy", "pickle"])
def test_an_optimizer_is_copied_with_its_parameters(through: Callable[[Any], Any]) -> None:
    run = Run(
        {
            **KINDS["schedule-free"],
            "reference_aliasing": False,
            "shampoo_runtime_config": tc.ShampooRuntimeConfig(eager_nan_check=True),
        },
        groups=True,
    )
    run.go(0, 1)
    run.optimizer.eval()
    other = copy.copy(run)
    other.model, other.optimizer = through((run.model, run.optimizer))
    assert other.params[0] is other.model.weight
    assert other.params[0] is not run.params[0]
    assert_equal(other, run)
    with pytest.raises(RuntimeError, match="eval mode"):
        other.go(2)
    for each in (run, other):
        each.optimizer.train()
    assert_goes_on_equal(other, run, 2, 3)
    run.go(4)  # the copy is not moved
    with pytest.raises(AssertionError):
        assert_equal(other, run)
    assert other.optimizer.state_dict()["state"][0]["step"] == 4
    other.params[0].grad.fill_(math.nan)
    with pytest.raises(ValueError, match="is not finite"):
        other.optimizer.step()
    other.optimizer.add_param_group({"params": torch.nn.Parameter(torch.ones(2))})
    assert len(other.optimizer.state_dict()["param_groups"]) == 3


# ---- what is refused ---------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], None]


def block(state_dict: dict[str, Any], param: int = 1) -> dict[str, Any]:
    return state_dict["state"][param]["block_0"]


def drop_block(d: dict[str, Any]) -> None:
    del d["state"][1]["block_0"]


def drop_entry(d: dict[str, Any]) -> None:
    del block(d)["shampoo"]["inv_factor_matrices"][0]


def drop_all(d: dict[str, Any]) -> None:
    d["state"] = {}


def drop_steps(d: dict[str, Any]) -> None:
    for own in d["state"].values():
        del own["step"]


def add_entry(d: dict[str, Any]) -> None:
    block(d)["momentum_buffer"] = torch.zeros(2)


def add_block(d: dict[str, Any]) -> None:
    d["state"][1]["block_1"] = copy.deepcopy(block(d))


def add_factor(d: dict[str, Any]) -> None:
    block(d)["shampoo"]["factor_matrices"][1] = torch.zeros(3)


def reshape(d: dict[str, Any]) -> None:
    block(d)["filtered_grad"] = torch.zeros(3)


def resize_factor(d: dict[str, Any]) -> None:
    block(d)["shampoo"]["factor_matrices"][0] = torch.zeros(6)


def half_a_triangle(d: dict[str, Any]) -> None:
    block(d)["shampoo"]["factor_matrices"][0] = torch.zeros(4)


def step_of_one(d: dict[str, Any]) -> None:
    d["state"][2]["step"] = d["state"][2]["step"] + 1


def other_groups(d: dict[str, Any]) -> None:
    d["param_groups"][0]["params"] += d["param_groups"].pop()["params"]


def other_sizes(d: dict[str, Any]) -> None:
    first, last = d["param_groups"]
    first["params"].append(last["params"].pop(0))


def other_blocks(d: dict[str, Any]) -> None:
    d["param_groups"][1]["max_preconditioner_dim"] = 8


def other_merging(d: dict[str, Any]) -> None:
    d["param_groups"][1]["distributed_config"] = tc.SingleDeviceDistributedConfig()


def bad_option(d: dict[str, Any]) -> None:
    d["param_groups"][1]["lr"] = -1.0


def other_kind(d: dict[str, Any]) -> None:
    d["param_groups"][1]["preconditioner_config"] = SOAP()


WRONG: list[tuple[Change, str]] = [
    (drop_block, r"no block_0/\S+ of parameter 0 of its group"),
    (drop_entry, "no block_0/shampoo/inv_factor_matrices/0 of parameter 0"),
    (drop_all, r"no block_0/\S+ of parameter 0"),
    (drop_steps, "step"),
    (add_entry, r"has \['momentum_buffer'\] for block_0 of parameter 0"),
    (add_block, "block_1"),
    (add_factor, r"has \['shampoo/factor_matrices/1'\] for block_0"),
    (reshape, r"block_0/filtered_grad of parameter 0 .*is \(3,\).*expected \(2,\)"),
    (resize_factor, r"block_0/shampoo/factor_matrices/0 .*is \(3, 3\).*expected \(2, 2\)"),
    (half_a_triangle, "4 numbers are no upper triangle"),
    (step_of_one, r"several values of step in one parameter group, \[2.*3"),
    (other_groups, "different number of parameter groups"),
    (other_sizes, "doesn't match the size of optimizer's group"),
    (other_blocks, "max_preconditioner_dim"),
    (other_merging, "distributed_config"),
    (bad_option, r"lr=-1\.0 must be >= 0"),
    (other_kind, r"preconditioner_config|factor_matrices_eigenvectors"),
]


def grouped() -> Run:
    """A matrix, and in a group of their own two vectors."""
    run = Run(OPTIONS, groups=True)
    run.model.extra = torch.nn.Parameter(torch.ones(2))
    weight, *rest = run.model.parameters()
    run.optimizer = tc.DistributedShampoo([{"params": [weight]}, {"params": rest}], **OPTIONS)
    return run


@functools.cache
def never_tried() -> Run:
    run = grouped()
    run.go(0, 1)
    return run


@functools.cache
def tried() -> Run:
    run = grouped()
    run.go(0, 1)
    return run


@functools.cache
def elsewhere() -> dict[str, Any]:
    run = grouped()
    run.go(5, 6)
    run.optimizer.param_groups[0]["lr"] = 0.7
    return run.optimizer.state_dict()


@pytest.fixture
def run() -> Iterator[Run]:
    """One that is as ``never_tried()`` is."""
    yield tried()
    tried().resume(never_tried())


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[w[0].__name__ for w in WRONG])
def test_a_wrong_state_changes_nothing(run: Run, change: Change, message: str) -> None:
    options = [dict(group) for group in run.optimizer.param_groups]
    state_dict = copy.deepcopy(elsewhere())
    change(state_dict)
    given = copy.deepcopy(state_dict["state"])
    with pytest.raises(ValueError, match=message):
        run.optimizer.load_state_dict(state_dict)
    assert run.optimizer.param_groups == options
    assert_equal(run, never_tried())
    torch.testing.assert_close(state_dict["state"], given, **EXACT)


def test_after_wrong_states_a_run_goes_on(run: Run, compilations: list[str]) -> None:
    """With the same options in the same groups, and their compiled functions."""
    for change in (reshape, bad_option, half_a_triangle):
        state_dict = copy.deepcopy(elsewhere())
        change(state_dict)
        with pytest.raises(ValueError, match=r"must be|block_0|triangle"):
            run.optimizer.load_state_dict(state_dict)
    del compilations[:]
    assert_goes_on_equal(run, never_tried(), 2, 3)
    assert "_update" not in str(compilations)


# ---- configurations of other classes -----------------------------------------------------------


def foreign(config: Any) -> Any:
    """As in a state dict that the reference saved: another class of the same name and fields."""
    if isinstance(config, enum.Enum):
        members = {member.name: member.value for member in type(config)}
        other: Any = enum.Enum(type(config).__name__, members)
        return other[config.name]
    if not dataclasses.is_dataclass(config):
        return config
    own = {f.name: foreign(getattr(config, f.name)) for f in dataclasses.fields(config)}
    made = dataclasses.make_dataclass(type(config).__name__, list(own))
    return made(**own)


def test_configurations_of_the_reference_name_ours() -> None:
    """The options of the live optimizer stay where the names of classes agree."""
    options = {**KINDS["grafting and momentum"], "weight_decay": 0.1}
    whole, resumed = Run(options), Run(options)
    whole.go(0, 1, 2)
    state_dict = whole.optimizer.state_dict()
    (group,) = state_dict["param_groups"]
    group["lr"] = 0.05
    for name, value in group.items():
        group[name] = foreign(value)
    assert type(group["preconditioner_config"]) is not tc.RootInvShampooPreconditionerConfig
    resumed.model.load_state_dict(whole.model.state_dict())
    resumed.optimizer.load_state_dict(state_dict)
    own = resumed.optimizer.param_groups[0]
    assert own["lr"] == 0.05
    assert own["grafting_config"] == ADAM
    assert own["weight_decay_type"] is tc.WeightDecayType.DECOUPLED
    whole.optimizer.param_groups[0]["lr"] = 0.05
    assert_goes_on_equal(resumed, whole, 3)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("preconditioner_config", SOAP()),
        ("grafting_config", ADAM),
        ("iterate_averaging_config", tc.ClassicMomentumConfig()),
    ],
)
def test_configurations_of_other_names_are_refused(run: Run, name: str, config: Any) -> None:
    options = dict(run.optimizer.param_groups[1])
    state_dict = never_tried().optimizer.state_dict()
    state_dict["param_groups"][1][name] = foreign(config)
    with pytest.raises(
        ValueError, match=f"{name} is a .*{type(config).__name__} in the state dict"
    ):
        run.optimizer.load_state_dict(state_dict)
    assert run.optimizer.param_groups[1] == options
    assert_equal(run, never_tried())
