"""``DDPDistributedConfig``: launches of 2 and 4 ranks by torchrun, with gloo on CPU.

``ddp_cases.py`` is what the ranks run; a launch runs once, and the tests read what it wrote.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from matrixfsdp_jax.torch_compat import DDPDistributedConfig, DistributedShampoo
from matrixfsdp_jax.torch_compat.ddp import deal
from tests.test_goldens import ENTRIES, FOLDER
from tests.torch_compat import ddp_cases
from tests.torch_compat.cases import decode

ROOT = Path(__file__).parent.parent.parent
WORLDS = {"two": 2, "four": 4, "silent": 4}
GOLDEN = [name for name, entry in ENTRIES.items() if "ddp" in entry]
OWN = {"averaging": "two", "soap": "four", "few_blocks": "four"}
LAUNCH = {**{n: "two" if ENTRIES[n]["ddp"]["world_size"] == 2 else "four" for n in GOLDEN}, **OWN}
# Updates are not sent in the dtype of the parameters: no single process does the same.
ROUNDED = ("ddp2_bf16_comm",)
DISAGREEMENTS = {
    "shape": "(5,)",
    "more parameters": "parameter 2 of group 0",
    "fewer parameters": "nothing more",
    "more groups": "in group 1",
    "option": "epsilon=0.0001",
    "preconditioner": "use_trace_scaling=True",
    "communication": "communicate_params=True",
    "group size": "num_trainers_per_group=3 must divide the world size 4",
}

Trace = dict[str, np.ndarray]


class Launch:
    """What the ranks of one launch wrote."""

    def __init__(self, plan: str, root: Path) -> None:
        self.folder, self.world = root / plan, WORLDS[plan]
        self.folder.mkdir()
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(self.world), "-m", "tests.torch_compat.ddp_cases"]
        process = subprocess.Popen(
            [*command, plan, str(self.folder)],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            self.output = process.communicate(timeout=400)[0]
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends the ranks
            pytest.fail(f"the launch {plan} hangs:\n{process.communicate()[0][-3000:]}")
        if plan != "silent":
            assert process.returncode == 0, self.output[-6000:]

    @property
    def facts(self) -> list[dict[str, Any]]:
        files = [self.folder / f"rank{rank}.json" for rank in range(self.world)]
        return [json.loads(file.read_text()) for file in files]

    def about(self, name: str) -> list[Any]:
        """The same fact of all ranks."""
        return [facts[name] for facts in self.facts]

    def traces(self, name: str) -> list[Trace]:
        """Of all ranks."""
        return [read(self.folder / f"{name}.rank{rank}.npz") for rank in range(self.world)]

    def trace(self, name: str) -> Trace:
        """Of one of the ranks that have it."""
        return read(next(self.folder.glob(f"{name}.rank*.npz")))


def read(file: Path) -> Trace:
    with np.load(file) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ddp")


@pytest.fixture(scope="module")
def two(root: Path) -> Launch:
    return Launch("two", root)


@pytest.fixture(scope="module")
def four(two: Launch, root: Path) -> Launch:
    """It reads what the launch of two has saved."""
    return Launch("four", root)


@pytest.fixture(scope="module")
def silent(root: Path) -> Launch:
    return Launch("silent", root)


@pytest.fixture
def launch(name: str, request: pytest.FixtureRequest) -> Launch:
    """The launch with the case ``name``."""
    return request.getfixturevalue(LAUNCH[name])


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def assert_equal(found: Trace, expected: Trace) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def assert_near(found: Trace, expected: Trace, tolerance: float) -> None:
    """Relative to the way that a parameter has gone since the first event."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].shape == values.shape
        way = np.abs(values - values[0]).max()
        assert way > 0
        assert np.abs(found[name] - values).max() <= tolerance * way, name


# ---- trajectories ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDEN)
def test_trajectory_of_reference(name: str, launch: Launch) -> None:
    entry = ENTRIES[name]
    golden = read(FOLDER / entry["file"])
    found = launch.trace(name)
    assert len(found) == len(entry["shapes"])
    for i in range(len(found)):
        expected = golden[f"ddp_p{i}"].astype(np.float64)
        way = np.abs(expected - golden[f"p{i}_init"]).max()
        assert np.abs(found[f"p{i}"] - expected).max() <= entry["suggested_tol"] * way


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LAUNCH, "model"])
def test_ranks_are_bit_equal(name: str, request: pytest.FixtureRequest) -> None:
    first, *others = request.getfixturevalue(LAUNCH.get(name, "two")).traces(name)
    for other in others:
        assert_equal(other, first)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LAUNCH if name not in ROUNDED])
def test_as_one_process(name: str, launch: Launch) -> None:
    """Bit for bit, where the parameters' dtype is the one of communication."""
    found, alone = launch.trace(name), launch.trace(f"{name}.alone")
    assert found.keys() == alone.keys()
    for key, values in found.items():
        np.testing.assert_array_equal(values, alone[key])


@pytest.mark.slow
def test_data_parallel_model(two: Launch) -> None:
    assert_near(two.trace("model"), two.trace("model.alone"), 1e-6)


@pytest.mark.slow
def test_parameters_without_gradient_rest(four: Launch) -> None:
    for i in (0, 1):
        values = four.trace("few_blocks")[f"p{i}"]
        rests = [t for t in range(1, len(values)) if np.array_equal(values[t], values[t - 1])]
        assert rests == [t for t, absent in ddp_cases.ABSENT.items() if i in absent]


@pytest.mark.slow
def test_evaluation_moves_and_returns(two: Launch) -> None:
    trace, modes = two.trace("averaging"), ddp_cases.MODES
    first = next(t for t, mode in modes.items() if mode == "eval")
    for values in trace.values():
        assert not np.array_equal(values[first], values[first - 1])
        np.testing.assert_allclose(values[first + 1], values[first - 1], rtol=0, atol=1e-14)


@pytest.mark.slow
def test_no_step_in_evaluation(two: Launch) -> None:
    for error in two.about("step in evaluation"):
        assert error["type"] == "RuntimeError"
        assert "train()" in error["message"]


# ---- who owns what -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOLDEN)
def test_deal_of_reference(name: str) -> None:
    given = ENTRIES[name]["ddp"]
    config = decode(given["config"])
    (group,) = given["groups"]
    blocks = [
        torch.empty(shape, device="meta", dtype=config.communication_dtype)
        for _, _, shape, _, _ in group["assignment"]
    ]
    costs = [config.load_balancing_config.cost_model.cost(block) for block in blocks]
    owners = [owner for *_, owner in group["assignment"]]
    assert deal(costs, group["group_size"]) == owners


@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDEN)
def test_blocks_and_buffers_of_reference(name: str, launch: Launch) -> None:
    expected = [
        {"size": g["group_size"], "bytes": g["bytes_per_rank"], "blocks": g["assignment"]}
        for g in ENTRIES[name]["ddp"]["groups"]
    ]
    for found in launch.about(name):
        assert found["groups"] == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDEN)
def test_state_keys_of_reference(name: str, launch: Launch) -> None:
    expected = ENTRIES[name]["ddp"]["state_keys_per_rank"]
    assert [found["keys"] for found in launch.about(name)] == [sorted(own) for own in expected]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCH)
def test_every_rank_counts_steps(name: str, launch: Launch) -> None:
    """Also steps in which a rank, or every rank, had nothing to do."""
    steps = len(launch.trace(name)["p0"]) - (len(ddp_cases.MODES) if name == "averaging" else 0)
    for found in launch.about(name):
        assert found["steps"]
        assert set(found["steps"]) == {steps}


@pytest.mark.slow
def test_ranks_without_blocks(four: Launch) -> None:
    owning, idle = four.about("few_blocks")[:2], four.about("few_blocks")[2:]
    assert all("state/0/step" in found["keys"] and len(found["keys"]) > 2 for found in owning)
    assert [found["keys"] for found in idle] == [["state/0/step", "state/1/step"]] * 2


@pytest.mark.slow
def test_groups_of_ranks_do_the_same(four: Launch) -> None:
    a, b, c, d = (found["keys"] for found in four.about("soap"))
    assert (a, b) == (c, d)
    assert a != b


@pytest.mark.slow
def test_every_rank_shows_the_sum_of_learning_rates(two: Launch) -> None:
    """``torch.distributed.checkpoint`` saves it from any rank, one without blocks too."""
    steps = two.about("averaging")[0]["steps"][0]
    for found in two.about("averaging"):
        np.testing.assert_allclose(found["lr_sums"], [steps * 0.05**2] * 3, rtol=1e-6)


# ---- refusals ----------------------------------------------------------------------------------


def test_no_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"init_process_group.*torchrun"):
        DistributedShampoo(
            [torch.nn.Parameter(torch.ones(2))], distributed_config=DDPDistributedConfig()
        )


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("size", [0, 2, -2])
def test_groups_that_do_not_fit(size: int) -> None:
    config = DDPDistributedConfig(num_trainers_per_group=size)
    with pytest.raises(ValueError, match=f"num_trainers_per_group={size} must divide"):
        DistributedShampoo([torch.nn.Parameter(torch.ones(2))], distributed_config=config)


@pytest.mark.slow
@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_disagreement_is_refused_on_all_ranks(name: str, four: Launch) -> None:
    for error in four.about(name):
        assert error is not None
        assert error["type"] == "ValueError"
        assert DISAGREEMENTS[name] in error["message"]
        assert error["seconds"] < 20


@pytest.mark.slow
def test_group_with_a_silent_rank_ends(silent: Launch) -> None:
    """Within the timeout of the world; another group of ranks goes on."""
    done, dead, waiting, _ = silent.facts
    assert done["asleep"] is None
    assert dead["asleep"] is None
    assert waiting["asleep"]["type"] == "RuntimeError"
    assert waiting["asleep"]["seconds"] < 2 * ddp_cases.PATIENCE


@pytest.mark.slow
def test_ranks_end_when_one_has_died(silent: Launch) -> None:
    facts = silent.facts
    assert "dead" not in facts[1]
    for rank in (0, 2, 3):
        assert facts[rank]["dead"]["type"] == "RuntimeError"
        assert facts[rank]["dead"]["seconds"] < 2 * ddp_cases.PATIENCE


# ---- state -------------------------------------------------------------------------------------


def rest(two: Launch, name: str) -> Trace:
    """The uninterrupted run from where it was saved."""
    return {k: values[ddp_cases.SAVED[name] :] for k, values in two.trace(name).items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ddp_cases.SAVED)
def test_reloaded_in_the_same_world(name: str, two: Launch) -> None:
    for found in two.traces(f"{name}.reloaded"):
        assert_equal(found, rest(two, name))


@pytest.mark.slow
def test_files_of_another_world_are_refused(four: Launch) -> None:
    """By every rank that lacks a block; a rank that finds all of its own takes them."""
    refusing = [facts for facts in four.facts if facts["missing"]]
    assert refusing
    for facts in refusing:
        error = facts["another world"]
        assert error["type"] == "ValueError"
        assert facts["unchanged"]
        found = re.match(r"the state dict has no (\S+) of parameter (\d+)", error["message"])
        assert found is not None
        assert f"state/{found[2]}/{found[1]}" in facts["missing"]
    assert all(not facts["another world"] for facts in four.facts if not facts["missing"])


@pytest.mark.slow
@pytest.mark.usefixtures("world_of_one")
def test_file_of_one_rank_of_two_is_refused_by_one(two: Launch) -> None:
    problem = ddp_cases.PROBLEMS["ddp2_f64"](None)
    with pytest.raises(ValueError, match=r"has no block_\d/\w+ of parameter \d"):
        ddp_cases.load_file(problem, two.folder / "ddp2_f64.rank0.pt")
    assert all(int(own["step"]) == 0 for own in problem.optimizer.state_dict()["state"].values())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), ddp_cases.FORMS)
def test_checkpoint_continues_on_four(name: str, form: str, two: Launch, four: Launch) -> None:
    """Saved by 2 ranks through ``torch.distributed.checkpoint``."""
    assert four.about(f"{name}.{form}") == [None] * 4
    for found in four.traces(f"{name}.{form}"):
        assert_near(found, rest(two, name), 1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(("name", "form"), ddp_cases.FORMS)
def test_checkpoint_continues_on_one(name: str, form: str, two: Launch) -> None:
    problem = ddp_cases.PROBLEMS[name](None)
    ddp_cases.load_checkpoint(problem, name, form, two.folder)
    rows: list[list[np.ndarray]] = []
    for t in range(ddp_cases.SAVED[name], problem.steps):
        problem.step(t)
        rows.append([p.detach().numpy().copy() for p in problem.params])
    found = {f"p{i}": np.stack(own) for i, own in enumerate(zip(*rows, strict=True))}
    assert_near(found, rest(two, name), 1e-12)
