"""What each rank of a launch does, for ``test_ddp.py``.

Run as ``torchrun --nproc-per-node N -m tests.torch_compat.ddp_cases PLAN FOLDER``. Rank ``R``
writes ``CASE.rankR.npz``, the parameters after every event of a case, and ``rankR.json``, all else.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from matrixfsdp_jax.torch_compat import (
    AdaGradPreconditionerConfig,
    ClassicMomentumConfig,
    DDPDistributedConfig,
    DistributedConfig,
    DistributedShampoo,
    EigenvalueCorrectedShampooPreconditionerConfig,
    RootInvShampooPreconditionerConfig,
    ScheduleFreeConfig,
    SingleDeviceDistributedConfig,
    WeightDecayType,
)
from tests.test_goldens import ENTRIES
from tests.torch_compat.cases import Replay

F64 = torch.float64
ONE_DEVICE = SingleDeviceDistributedConfig(target_parameter_dimensionality=2)
# Seconds after which a collective of the launch with a silent rank gives up.
PATIENCE = 10


def ddp(**options: Any) -> DDPDistributedConfig:
    return DDPDistributedConfig(
        target_parameter_dimensionality=2, communication_dtype=F64, **options
    )


def roots(**options: Any) -> RootInvShampooPreconditionerConfig:
    return RootInvShampooPreconditionerConfig(
        factor_matrix_dtype=F64, inv_factor_matrix_dtype=F64, **options
    )


# ---- problems ----------------------------------------------------------------------------------


class Problem(Protocol):
    """Parameters, their optimizer, and a number of events, of which most are steps."""

    params: list[torch.nn.Parameter]
    optimizer: DistributedShampoo
    steps: int

    def step(self, t: int) -> None:
        """Event ``t``, counted from 0."""


class Drawn:
    """A problem with drawn parameters and gradients, float64.

    Args:
      shapes: of the parameters.
      steps: number of events.
      absent: event -> the parameters that have no gradient in it.
      modes: event -> "eval" or "train", instead of a step.
      split: the number of parameters in the first of two groups; None for one group.
      options: of the optimizer.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        steps: int,
        absent: Mapping[int, Sequence[int]] | None = None,
        modes: Mapping[int, str] | None = None,
        split: int | None = None,
        **options: Any,
    ) -> None:
        rng = np.random.default_rng(7)
        self.steps, self._absent, self._modes = steps, absent or {}, modes or {}
        draws = [[rng.standard_normal(s) for s in shapes] for _ in range(steps + 1)]
        self.params = [torch.nn.Parameter(torch.tensor(x)) for x in draws[0]]
        self._grads = draws[1:]
        groups = [self.params] if split is None else [self.params[:split], self.params[split:]]
        self.optimizer = DistributedShampoo([{"params": own} for own in groups], **options)

    def step(self, t: int) -> None:
        if t in self._modes:
            getattr(self.optimizer, self._modes[t])()
            return
        for i, (p, grad) in enumerate(zip(self.params, self._grads[t], strict=True)):
            p.grad = None if i in self._absent.get(t, ()) else torch.tensor(grad)
        self.optimizer.step()


def golden(name: str) -> Callable[[DistributedConfig | None], Replay]:
    config = ENTRIES[name]["ddp"]["config"]
    return lambda one: Replay(name, {"distributed_config": one or config})


def soap(one: DistributedConfig | None) -> Drawn:
    """Two parameter groups, blocks of two sizes, groups of 2 ranks, parameters are sent."""
    return Drawn(
        [(6, 4), (5,), (4, 4)],
        steps=7,
        split=2,
        lr=0.05,
        betas=(0.9, 0.95),
        epsilon=1e-6,
        max_preconditioner_dim=4,
        precondition_frequency=2,
        preconditioner_config=EigenvalueCorrectedShampooPreconditionerConfig(
            factor_matrix_dtype=F64,
            factor_matrix_eigenvectors_dtype=F64,
            corrected_eigenvalues_dtype=F64,
        ),
        distributed_config=one or ddp(num_trainers_per_group=2, communicate_params=True),
    )


ABSENT = {1: [0], 3: [0, 1], 4: [1]}


def few_blocks(one: DistributedConfig | None) -> Drawn:
    """Two blocks for four ranks; gradients that are None."""
    return Drawn(
        [(3, 2), (4,)],
        steps=7,
        absent=ABSENT,
        lr=0.05,
        betas=(0.9, 0.95),
        epsilon=1e-6,
        weight_decay=0.1,
        weight_decay_type=WeightDecayType.L2,
        iterate_averaging_config=ClassicMomentumConfig(momentum=0.75, dampening=0.25),
        preconditioner_config=roots(),
        distributed_config=one or ddp(),
    )


MODES = {3: "eval", 4: "train", 6: "eval"}


def averaging(one: DistributedConfig | None) -> Drawn:
    """Two parameter groups, the second with one block; evaluation between steps."""
    return Drawn(
        [(3, 2), (4,), (2, 2)],
        steps=7,
        modes=MODES,
        split=2,
        lr=0.05,
        betas=(0.9, 0.95),
        epsilon=1e-6,
        weight_decay=0.1,
        iterate_averaging_config=ScheduleFreeConfig(),
        grafting_config=AdaGradPreconditionerConfig(),
        preconditioner_config=roots(),
        distributed_config=one or ddp(),
    )


PROBLEMS: dict[str, Callable[[DistributedConfig | None], Problem]] = {
    **{name: golden(name) for name, entry in ENTRIES.items() if "ddp" in entry},
    "soap": soap,
    "few_blocks": few_blocks,
    "averaging": averaging,
}
# Case -> the event before which it is saved, by the launch with 2 ranks.
SAVED = {"ddp2_f64": 6, "averaging": 3}
# Checkpoints of ``torch.distributed.checkpoint``: as it is, or with a flattened optimizer.
FORMS = [("ddp2_f64", "nested"), ("averaging", "nested"), ("averaging", "flat")]


# ---- what a rank tells -------------------------------------------------------------------------


class Report:
    """The files of one rank."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rank, self.facts = folder, dist.get_rank(), {}  # type: ignore[var-annotated]

    def write(self) -> None:
        (self.folder / f"rank{self.rank}.json").write_text(json.dumps(self.facts))

    def trace(self, name: str, params: Sequence[torch.Tensor], events: Iterator[None]) -> None:
        """The parameters after every event."""
        rows = [[p.detach().numpy().copy() for p in params] for _ in events]
        arrays = {f"p{i}": np.stack(own) for i, own in enumerate(zip(*rows, strict=True))}
        np.savez(self.folder / f"{name}.rank{self.rank}.npz", **arrays)  # type: ignore[arg-type]

    @contextmanager
    def failure(self, name: str) -> Iterator[None]:
        """The error that the block raises, and how long that took; None without one."""
        start = time.monotonic()
        self.facts[name] = None
        try:
            yield
        except Exception as error:
            seconds = time.monotonic() - start
            self.facts[name] = {
                "type": type(error).__name__,
                "message": str(error),
                "seconds": seconds,
            }


def keys(state: Any, lead: str) -> list[str]:
    if not isinstance(state, dict):
        return [lead]
    return sorted(key for name, value in state.items() for key in keys(value, f"{lead}/{name}"))


def about(problem: Problem) -> dict[str, Any]:
    """Who owns what, and what the state dict of this rank shows."""
    state = problem.optimizer.state_dict()["state"]
    exchanges = [getattr(group, "exchange") for group in problem.optimizer._groups]  # noqa: B009
    return {
        "groups": [
            {
                "size": exchange.num_ranks,
                "bytes": exchange.bytes_per_rank,
                "blocks": [
                    [block.param, block.name, list(block.shape), size, owner]
                    for block, size, owner in zip(
                        exchange._blocks, exchange.sizes, exchange.ranks, strict=True
                    )
                ],
            }
            for exchange in exchanges
        ],
        "keys": keys(state, "state"),
        "steps": [int(own["step"]) for own in state.values()],
        "lr_sums": [float(own["lr_sum"]) for own in state.values() if "lr_sum" in own],
    }


def events(problem: Problem, first: int = 0) -> Iterator[None]:
    for t in range(first, problem.steps):
        problem.step(t)
        yield


# ---- cases -------------------------------------------------------------------------------------


def run_alone(report: Report, names: Sequence[str]) -> None:
    """The single-process runs, dealt to the ranks."""
    for name in names[report.rank :: dist.get_world_size()]:
        problem = PROBLEMS[name](ONE_DEVICE)
        report.trace(f"{name}.alone", problem.params, events(problem))


def run_shared(report: Report, name: str) -> None:
    problem = PROBLEMS[name](None)

    def with_saving() -> Iterator[None]:
        for t in range(problem.steps):
            if dist.get_world_size() == 2 and SAVED.get(name) == t:
                save(report, name, problem)
            if name == "averaging" and MODES.get(t - 1) == "eval":
                with report.failure("step in evaluation"):
                    problem.optimizer.step()
            problem.step(t)
            yield

    report.trace(name, problem.params, with_saving())
    report.facts[name] = about(problem)


def checkpoint(problem: Problem, form: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """What is given to and taken from ``torch.distributed.checkpoint``."""
    model = torch.nn.ParameterList(problem.params)
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    optimizer = get_optimizer_state_dict(model, problem.optimizer, options=options)
    return model, {"model": get_model_state_dict(model), "optimizer": optimizer}


def save(report: Report, name: str, problem: Problem) -> None:
    """One file of every rank, and two checkpoints of all."""
    own = {
        "params": [p.detach().clone() for p in problem.params],
        "optimizer": problem.optimizer.state_dict(),
    }
    torch.save(own, report.folder / f"{name}.rank{report.rank}.pt")
    for form in (form for case, form in FORMS if case == name):
        _, state = checkpoint(problem, form)
        dcp.save(state, checkpoint_id=report.folder / f"{name}.{form}")


def load_file(problem: Problem, path: Path) -> None:
    own = torch.load(path, weights_only=False)
    problem.optimizer.load_state_dict(own["optimizer"])
    with torch.no_grad():
        for p, value in zip(problem.params, own["params"], strict=True):
            p.copy_(value)


def load_checkpoint(problem: Problem, name: str, form: str, saved: Path) -> None:
    model, state = checkpoint(problem, form)
    dcp.load(state, checkpoint_id=saved / f"{name}.{form}")
    set_model_state_dict(model, state["model"])
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    set_optimizer_state_dict(model, problem.optimizer, state["optimizer"], options=options)


def run_resumed(report: Report, saved: Path) -> None:
    """From the checkpoints, in a world of any size."""
    for name, form in FORMS:
        problem = PROBLEMS[name](None)
        with report.failure(f"{name}.{form}"):
            load_checkpoint(problem, name, form, saved)
        failed = torch.tensor(report.facts[f"{name}.{form}"] is not None)
        dist.all_reduce(failed, dist.ReduceOp.MAX)
        if not failed:
            report.trace(f"{name}.{form}", problem.params, events(problem, SAVED[name]))


def run_reloaded(report: Report) -> None:
    """From the rank's own file, in the same world."""
    for name, event in SAVED.items():
        problem = PROBLEMS[name](None)
        load_file(problem, report.folder / f"{name}.rank{report.rank}.pt")
        report.trace(f"{name}.reloaded", problem.params, events(problem, event))


def run_misloaded(report: Report, saved: Path) -> None:
    """From a rank's own file of a world of another size."""
    problem = PROBLEMS["ddp2_f64"](None)
    problem.step(0)
    before = problem.optimizer.state_dict()
    before["param_groups"] = [dict(group) for group in before["param_groups"]]
    given = torch.load(saved / f"ddp2_f64.rank{report.rank % 2}.pt", weights_only=False)
    given["optimizer"]["param_groups"][0]["lr"] = 0.5
    with report.failure("another world"):
        problem.optimizer.load_state_dict(given["optimizer"])
    after = problem.optimizer.state_dict()
    report.facts["unchanged"] = after["param_groups"] == before["param_groups"] and all(
        torch.equal(a, b)
        for a, b in zip(tensors(before["state"]), tensors(after["state"]), strict=True)
    )
    found = keys(given["optimizer"]["state"], "state")
    report.facts["missing"] = sorted(set(keys(before["state"], "state")) - set(found))


def tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    return [x for name in state for x in tensors(state[name])]


def run_model(report: Report) -> None:
    """A model in DistributedDataParallel, and the same model alone on the whole batch."""
    rng = np.random.default_rng(3)
    inputs, targets = (torch.tensor(rng.standard_normal((3, 8, n))) for n in (5, 3))
    world = dist.get_world_size()

    def train(name: str, one: bool, part: slice) -> None:
        torch.manual_seed(11)
        layers = torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)
        model: torch.nn.Module = torch.nn.Sequential(*layers).to(F64)
        params = list(model.parameters())
        if not one:
            model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = DistributedShampoo(
            params,
            lr=0.05,
            betas=(0.9, 0.99),
            epsilon=1e-6,
            preconditioner_config=roots(),
            distributed_config=ONE_DEVICE if one else ddp(),
        )

        def steps() -> Iterator[None]:
            for x, y in zip(inputs, targets, strict=True):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x[part]), y[part]).backward()
                optimizer.step()
                yield

        report.trace(name, params, steps())

    size = inputs.shape[1] // world
    train("model", False, slice(report.rank * size, (report.rank + 1) * size))
    train("model.alone", True, slice(None))


def run_disagreements(report: Report) -> None:
    """Optimizers that cannot be built on any rank: what one rank gives is not what others give."""

    def build(shapes: Sequence[tuple[int, ...]], split: int | None = None, **options: Any) -> None:
        config = options.pop("distributed_config", ddp())
        Drawn(shapes, 1, split=split, distributed_config=config, **options)

    first = report.rank == 0
    last = report.rank == dist.get_world_size() - 1
    two = [(3, 2), (4,)]
    cases: dict[str, Callable[[], None]] = {
        "shape": lambda: build([(3, 2), (5,)] if last else two),
        "more parameters": lambda: build([*two, (2,)] if last else two),
        "fewer parameters": lambda: build(two[:1] if first else two),
        "more groups": lambda: build(two, split=1 if last else None),
        "option": lambda: build(two, epsilon=1e-3 if first else 1e-4),
        "preconditioner": lambda: build(
            two, preconditioner_config=roots(use_trace_scaling=bool(last))
        ),
        "communication": lambda: build(two, distributed_config=ddp(communicate_params=bool(first))),
        "group size": lambda: build(two, distributed_config=ddp(num_trainers_per_group=3)),
    }
    for name, case in cases.items():
        with report.failure(name):
            case()


# ---- a launch whose ranks fall silent ----------------------------------------------------------


def run_silent(report: Report) -> None:
    """Rank 3 sleeps through a step of the group of ranks 2 and 3; later rank 1 dies.

    Ranks 0 and 1 are another group, which is not disturbed by the first.
    """
    pairs = Drawn(
        [(3, 2), (2,), (3,)], 6, preconditioner_config=roots(),
        distributed_config=ddp(num_trainers_per_group=2),
    )  # fmt: skip
    everyone = Drawn([(3, 2), (2,)], 6, preconditioner_config=roots(), distributed_config=ddp())
    for problem in (pairs, everyone):  # compiles
        problem.step(0)
    dist.barrier()
    awake = time.monotonic() + PATIENCE + 3
    if report.rank != 3:
        with report.failure("asleep"):
            pairs.step(1)
    report.write()
    time.sleep(max(0.0, awake - time.monotonic()))
    everyone.step(1)
    # The launcher ends the others when a rank has died: they shall end by themselves here.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if report.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with report.failure("dead"):
        everyone.step(2)
    report.write()
    os._exit(3)


def run(report: Report, plan: str) -> None:
    if plan == "silent":
        run_silent(report)
        return
    first = "ddp2" if plan == "two" else "ddp4"
    names = [name for name in ENTRIES if name.startswith(first)]
    names += ["averaging"] if plan == "two" else ["soap", "few_blocks"]
    if plan == "four":
        run_disagreements(report)
    run_alone(report, names)
    for name in names:
        run_shared(report, name)
    if plan == "two":
        run_model(report)
        run_reloaded(report)
    else:
        saved = report.folder.parent / "two"
        run_misloaded(report, saved)
        run_resumed(report, saved)


def main() -> None:
    plan, folder = sys.argv[1:]
    torch.set_num_threads(1)
    patience = PATIENCE if plan == "silent" else 120
    dist.init_process_group("gloo", timeout=timedelta(seconds=patience))
    report = Report(Path(folder))
    run(report, plan)
    report.write()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
