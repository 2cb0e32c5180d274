"""Trajectories of facebookresearch/optimizers' ``DistributedShampoo``, replayed step by step.

``tests/goldens/index.json`` says in ``format`` what the traces hold; they are numbers, and the
configurations in the index are those of the reference. Cases with several devices are compared with
the reference's run in a single process.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.layout.blocks import merge_dims
from matrixfsdp_jax.transforms.averaging import AveragingState, MomentumBuffer

FOLDER = Path(__file__).parent / "goldens"
ENTRIES = {
    entry["name"]: entry for entry in json.loads((FOLDER / "index.json").read_text())["cases"]
}

# What cannot be met, and why; the tests at the end hold what happens instead.
NOT_MET = {
    "alias_sgd_nobc": "the reference writes decay and learning rate into its average of gradients",
    "tolerated_failures": "coupled Newton with a root that is no integer is refused, not tolerated",
}
# Averaging cases whose reference run ends in evaluation mode.
AVERAGED = ("gpa", "schedule_free")


# ---- configurations of the reference -----------------------------------------------------------


def rank_deficiency(config: dict[str, Any]) -> Any:
    rule = config["rank_deficient_stability_config"]
    if rule["type"] == "PerturbationConfig":
        return mfsdp.Perturbation(rule["perturb_before_computation"])
    return mfsdp.PseudoInverse(rule["rank_atol"], rule["rank_rtol"])


SOLVERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "EigenConfig": lambda c: mfsdp.EighRoot(rank_deficiency(c)),
    "CoupledNewtonConfig": lambda c: mfsdp.CoupledNewtonRoot(c["max_iterations"], c["tolerance"]),
    "CoupledHigherOrderConfig": lambda c: mfsdp.CoupledHigherOrderRoot(
        c["rel_epsilon"], c["abs_epsilon"], c["max_iterations"], c["tolerance"], c["order"]
    ),
    "EighEigendecompositionConfig": lambda c: mfsdp.EighBasis(rank_deficiency(c), c["tolerance"]),
    "QREigendecompositionConfig": lambda c: mfsdp.QRBasis(
        c["max_iterations"], c["tolerance"], rank_deficiency(c)
    ),
}
BLOCK_SCALES: dict[Any, Any] = {"callable:l1": lambda g: jnp.sum(jnp.abs(g)), "callable:one": 1.0}
MATRIX_SCALES: dict[str, Callable[[int, int], float]] = {
    "callable:one": lambda rows, cols: 1.0,
    "callable:muon_scale": lambda rows, cols: math.sqrt(max(1.0, rows / cols)),
}
AVERAGING = {
    "ClassicMomentumConfig": mfsdp.ClassicMomentum,
    "GeneralizedPrimalAveragingConfig": mfsdp.GeneralizedPrimalAveraging,
    "ScheduleFreeConfig": mfsdp.ScheduleFree,
}
KRONECKER = {
    "RootInvShampooPreconditionerConfig": (mfsdp.RootInverse, "root", {}),
    "RootInvKLShampooPreconditionerConfig": (mfsdp.RootInverse, "root", {"kl": True}),
    "EigendecomposedShampooPreconditionerConfig": (mfsdp.Eigendecomposed, "basis", {}),
    "EigendecomposedKLShampooPreconditionerConfig": (mfsdp.Eigendecomposed, "basis", {"kl": True}),
    "EigenvalueCorrectedShampooPreconditionerConfig": (mfsdp.EigenvalueCorrected, "basis", {}),
}


def by_order(given: dict[str, Any]) -> dict[int, Any]:
    """Keys of JSON objects back to numbers."""
    return {int(k): by_order(v) if isinstance(v, dict) else v for k, v in given.items()}


def orthogonalization(c: dict[str, Any]) -> Any:
    scale = MATRIX_SCALES[c["scale_by_dims_fn"]]
    if c["type"] == "SVDOrthogonalizationConfig":
        return mfsdp.SVDOrthogonalization(c["scale_by_nuclear_norm"], scale)
    return mfsdp.NewtonSchulzOrthogonalization(c["num_iterations"], [c["coefficients"]], scale)


def preconditioner(c: dict[str, Any] | None) -> Any:
    """A preconditioner or grafting of the reference as a record of this package."""
    match c and c["type"]:
        case None:
            return None
        case "SGDPreconditionerConfig":
            return mfsdp.SGDGrafting()
        case "AdaGradPreconditionerConfig":
            return mfsdp.AdaGradGrafting(epsilon=c["epsilon"])
        case "RMSpropPreconditionerConfig":
            return mfsdp.RMSpropGrafting(c["beta2"], c["epsilon"])
        case "AdamPreconditionerConfig":
            return mfsdp.AdamGrafting(c["beta2"], c["epsilon"])
        case "SignDescentPreconditionerConfig":
            return mfsdp.SignDescent(BLOCK_SCALES.get(c["scale_fn"], c["scale_fn"]))
        case "SpectralDescentPreconditionerConfig":
            return mfsdp.SpectralDescent(orthogonalization(c["orthogonalization_config"]))
    record, solver, more = KRONECKER[c["type"]]
    if record is mfsdp.EigenvalueCorrected:
        more = {"ignored_basis_change_dims": by_order(c["ignored_basis_change_dims"])}
    solving = c["amortized_computation_config"]
    return record(
        factor_dtype=c["factor_matrix_dtype"].removeprefix("torch."),
        inverse_exponent_override=by_order(c["inverse_exponent_override"]),
        drop_weighting_factor_on_gsquare=c["drop_weighting_factor_on_gsquare"],
        trace_scaling_exponent=c["trace_scaling_exponent"] if c["use_trace_scaling"] else None,
        **{solver: SOLVERS[solving["type"]](solving)},
        **more,
    )


def averaging(c: dict[str, Any] | None) -> Any:
    if c is None:
        return None
    return AVERAGING[c["type"]](**{k: v for k, v in c.items() if k != "type"})


def number(value: Any) -> Any:
    return math.inf if value == "inf" else value


def optimizer(group: dict[str, Any], rates: np.ndarray) -> Any:
    """The optimizer of one parameter group; ``rates`` for every step."""
    table = np.asarray(rates, np.float32)  # the reference's learning rate is float32 always
    return mfsdp.shampoo(
        lambda count: jnp.asarray(table)[count],
        rules=[mfsdp.rules.tensor("*")],
        betas=tuple(group["betas"]),
        beta3=group["beta3"],
        epsilon=group["epsilon"],
        weight_decay=group["weight_decay"],
        weight_decay_type=group["weight_decay_type"].lower(),
        peak_learning_rate=group["peak_lr"],
        max_preconditioner_dim=number(group["max_preconditioner_dim"]),
        target_parameter_dimensionality=number(
            group["distributed_config"]["target_parameter_dimensionality"]
        ),
        precondition_frequency=group["precondition_frequency"],
        start_preconditioning_step=group["start_preconditioning_step"],
        stagger=False,
        use_bias_correction=group["use_bias_correction"],
        preconditioner=preconditioner(group["preconditioner_config"]),
        grafting=preconditioner(group["grafting_config"]),
        iterate_averaging=averaging(group["iterate_averaging_config"]),
    )


# ---- replay ------------------------------------------------------------------------------------


class Replay:
    """A case, run through the public optimizer: one for each parameter group."""

    def __init__(self, name: str) -> None:
        self.entry = ENTRIES[name]
        self.trace = dict(np.load(FOLDER / self.entry["file"]))
        self.steps = len(self.trace["lr"])
        everything = {"params": range(len(self.entry["shapes"]))}
        groups = self.entry.get("groups") or [everything]
        self.groups = [[f"p{i}" for i in group["params"]] for group in groups]
        rates = self.trace["lr"]
        self.txs = []
        for own in self.entry["resolved_groups"]:
            scale = own["lr"] / rates[0] if len(groups) > 1 else 1.0
            self.txs.append(optimizer(own, scale * rates))
        self.params = {
            p: jnp.asarray(self.trace[f"{p}_init"], self.entry["dtype"]).reshape(shape)
            for p, shape in self.shapes.items()
        }
        self.states = [
            tx.init(self.of(own, self.params))
            for tx, own in zip(self.txs, self.groups, strict=True)
        ]
        self._step = jax.jit(self._apply)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {f"p{i}": tuple(shape) for i, shape in enumerate(self.entry["shapes"])}

    @staticmethod
    def of(own: list[str], tree: dict[str, Any]) -> dict[str, Any]:
        return {p: tree[p] for p in own}

    def _apply(self, params: Any, states: Any, grads: Any, present: Any) -> Any:
        new_params, new_states = {}, []
        for tx, own, state in zip(self.txs, self.groups, states, strict=True):
            extra = {} if present is None else {"present": self.of(own, present)}
            mine = self.of(own, params)
            updates, state = tx.update(self.of(own, grads), state, mine, **extra)
            new_params |= optax.apply_updates(mine, updates)
            new_states.append(state)
        return new_params, new_states

    def step(self, grads: dict[str, Any], present: dict[str, Any] | None = None) -> None:
        """One step of all groups."""
        self.params, self.states = self._step(self.params, self.states, grads, present)

    def grads(self, t: int) -> dict[str, jax.Array]:
        return {
            p: jnp.asarray(self.trace[f"g{p[1:]}"][t], self.entry["dtype"]).reshape(shape)
            for p, shape in self.shapes.items()
        }

    def present(self, t: int) -> dict[str, Any] | None:
        mask = self.trace["gmask"]
        return None if mask.all() else dict(zip(self.shapes, mask[t], strict=True))

    def distance(self, p: str, got: Any, want: np.ndarray) -> float:
        """The largest difference over the farthest way that the parameter went."""
        got = np.asarray(got, np.float64)
        assert got.shape == want.shape == self.shapes[p]
        way = np.abs(self.trace[p].astype(np.float64) - self.trace[f"{p}_init"]).max()
        return float(np.abs(got - want).max() / way)

    def run(self) -> float:
        """All steps; the largest distance on the way."""
        worst = 0.0
        for t in range(self.steps):
            self.step(self.grads(t), self.present(t))
            for p, x in self.params.items():
                assert x.dtype == self.entry["dtype"]
                worst = max(worst, self.distance(p, x, self.trace[p][t]))
        return worst

    # ---- state ---------------------------------------------------------------------------------

    def shampoo_state(self, group: int = 0) -> mfsdp.ShampooState:
        return find(self.states[group], mfsdp.ShampooState)

    def cut(self, p: str, x: np.ndarray) -> list[np.ndarray]:
        """The blocks of a parameter, in row-major order."""
        g = self.entry["resolved_groups"][0]
        limit = number(g["max_preconditioner_dim"])
        target = number(g["distributed_config"]["target_parameter_dimensionality"])
        merged = merge_dims(self.shapes[p], limit, target)
        cuts = [
            [slice(s, min(s + limit, d)) if limit < d else slice(None) for s in range(0, d, limit)]
            if limit < math.inf
            else [slice(None)]
            for d in merged
        ]
        return [x.reshape(merged)[index] for index in itertools.product(*cuts)]

    def state_blocks(self, group: int, p: str) -> Iterator[dict[str, np.ndarray]]:
        """The state of each block under the reference's names."""
        state = self.shampoo_state(group)
        whole = {}
        for name, kind, field in (
            ("momentum_buffer", MomentumBuffer, "buffer"),
            ("weight_buffer", AveragingState, "z"),
        ):
            for found in find_all(self.states[group], kind):
                whole[name] = self.cut(p, np.asarray(getattr(found, field)[p]))
        (filtered,), (own,), (graft,) = (
            field[p].values() for field in (state.filtered, state.preconditioner, state.grafting)
        )
        shapes = [x.shape for x in self.cut(p, np.zeros(self.shapes[p]))]
        kinds = list(dict.fromkeys(shapes))
        seen = dict.fromkeys(kinds, 0)
        for block, shape in enumerate(shapes):
            at = (0, seen[shape])  # a leaf is one tensor here
            kind = kinds.index(shape)
            seen[shape] += 1
            out = {name: parts[block] for name, parts in whole.items()}
            if not isinstance(filtered[kind], tuple):
                out["filtered_grad"] = filtered[kind][at]
            if graft[kind] != ():
                out["adagrad"] = graft[kind].nu[at]
            out |= kronecker_state(own[kind], at)
            yield {name: np.asarray(x) for name, x in out.items()}


def kronecker_state(own: Any, at: tuple[int, int]) -> dict[str, Any]:
    names = {
        "factors": "factor_matrices",
        "roots": "inv_factor_matrices",
        "vectors": "factor_matrices_eigenvectors",
        "values": "factor_matrices_eigenvalues",
    }
    out = {}
    for field, value in (own._asdict() if own != () else {}).items():
        if field in names:
            out |= {f"shampoo/{names[field]}/{k}": x[at] for k, x in enumerate(value)}
        else:
            out[{"moment": "shampoo/corrected_eigenvalues", "nu": "adagrad"}[field]] = value[at]
    return out


def find_all(state: Any, kind: type) -> list[Any]:
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kind))
    return [x for x in leaves if isinstance(x, kind)]


def find(state: Any, kind: type) -> Any:
    (found,) = find_all(state, kind)
    return found


def x64(name: str) -> Any:
    entry = ENTRIES[name]
    wide = entry["dtype"] == "float64" or "torch.float64" in json.dumps(entry["overrides"])
    return jax.enable_x64(wide)


# ---- all cases ---------------------------------------------------------------------------------


def test_the_list_of_cases() -> None:
    assert len(ENTRIES) == 64
    assert {entry["file"] for entry in ENTRIES.values()} == {x.name for x in FOLDER.glob("*.npz")}
    assert set(NOT_MET) < set(ENTRIES)


@pytest.mark.parametrize("name", [name for name in ENTRIES if name not in NOT_MET])
def test_every_step_of_the_reference(name: str) -> None:
    with x64(name):
        replay = Replay(name)
        assert replay.run() <= replay.entry["suggested_tol"]
        if name in AVERAGED:
            assert_evaluation(replay)
        if "expected_error" not in replay.entry:
            assert_final_state(replay)


def assert_evaluation(replay: Replay) -> None:
    given = averaging(replay.entry["resolved_groups"][0]["iterate_averaging_config"])
    averaged = mfsdp.averaged_params(replay.states, replay.params, given)
    for p, x in averaged.items():
        want = replay.trace[f"{p}_eval"]
        assert replay.distance(p, x, want) <= 1e-6  # the reference's coefficient is float32
        assert replay.distance(p, replay.params[p], want) > 0.01


def assert_final_state(replay: Replay) -> None:
    """Every array that the reference keeps, and no other."""
    places = itertools.count()  # the reference counts parameters group by group
    for group, own in enumerate(replay.groups):
        for p, place in zip(own, places, strict=False):
            for block, got in enumerate(replay.state_blocks(group, p)):
                lead = f"state/{place}/block_{block}/"
                want = {k.removeprefix(lead): x for k, x in replay.trace.items() if lead in k}
                assert not want or set(want) == set(got)
                for name, x in want.items():
                    error = np.abs(like(got[name], x, name) - x).max()
                    assert error <= replay.entry["suggested_tol"] * np.abs(x).max(), lead + name


def like(got: np.ndarray, want: np.ndarray, name: str) -> np.ndarray:
    """``got`` packed as the reference packs it, eigenvectors with the same signs."""
    if "eigenvectors" in name:
        got = got * np.sign(np.sum(got * want, axis=0))
    if got.ndim == 2 and want.ndim == 1 and "matrices" in name:
        got = got[np.triu_indices(len(got))]
    return got.reshape(want.shape)


# ---- where the reference stops -----------------------------------------------------------------


def counters(replay: Replay, name: str) -> dict[str, int]:
    state = getattr(replay.shampoo_state(), name)
    return {p: int(sum(x.sum() for x in jax.tree.leaves(state[p]))) for p in replay.shapes}


def drawn_gradients(entry: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    """The gradients of all steps, by the recipe in the index."""
    rng = np.random.RandomState(entry["seed"])  # the recipe
    shapes = [tuple(shape) for shape in entry["shapes"]]
    for shape in shapes:
        rng.standard_normal(shape)
    base = [rng.standard_normal(shape) for shape in shapes]
    steps = [
        [entry["grad_scale"] * (0.5 * b + rng.standard_normal(b.shape)) for b in base]
        for _ in range(entry["steps"])
    ]
    for t, i in entry.get("inf", []):
        steps[t][i].reshape(-1)[0] = np.inf
    return [{f"p{i}": g for i, g in enumerate(step)} for step in steps]


def test_an_infinite_gradient_keeps_the_last_good_root_and_counts() -> None:
    """The reference raises in this step; ``mfsdp.train_step`` does, by the counter."""
    with x64("inf_grad"):
        replay = Replay("inf_grad")
        replay.run()
        grads = drawn_gradients(replay.entry)
        np.testing.assert_array_equal(grads[2]["p0"], replay.trace["g0"][2])
        before = replay.shampoo_state().preconditioner
        other = np.asarray(replay.params["p1"])
        assert set(counters(replay, "nonfinite").values()) == {0}
        replay.step(grads[replay.entry["expected_error"]["step"] - 1])
        after = replay.shampoo_state().preconditioner
        assert counters(replay, "nonfinite") == counters(replay, "failures") == {"p0": 1, "p1": 0}
        for new, old in zip(*(roots(x["p0"]) for x in (after, before)), strict=True):
            np.testing.assert_array_equal(new, old)
        for new, old in zip(*(roots(x["p1"]) for x in (after, before)), strict=True):
            assert np.isfinite(new).all()
            assert (new != old).any()
        assert np.isfinite(replay.params["p1"]).all()
        assert (replay.params["p1"] != other).all()


def roots(of_leaf: Any) -> list[np.ndarray]:
    (groups,) = of_leaf.values()
    return [np.asarray(x) for group in groups for x in group.roots]


def test_a_root_that_fails_each_time_counts() -> None:
    """The reference tolerates three failures of a block and raises at the fourth."""
    with x64("higher_order_bad_root"):
        replay = Replay("higher_order_bad_root")
        replay.run()
        assert counters(replay, "failures") == {"p0": 3, "p1": 0}
        assert counters(replay, "nonfinite") == {"p0": 0, "p1": 0}
        for root in roots(replay.shampoo_state().preconditioner["p0"]):
            np.testing.assert_array_equal(root[0, 0], np.eye(root.shape[-1]))


# ---- what is not met ---------------------------------------------------------------------------


def test_an_average_that_is_only_an_average() -> None:
    """Without the aliasing of the reference this is momentum with decay, from the formula."""
    with x64("alias_sgd_nobc"):
        replay = Replay("alias_sgd_nobc")
        (group,) = replay.entry["resolved_groups"]
        beta, decay = group["betas"][0], group["weight_decay"]
        want = {p: np.array(replay.trace[f"{p}_init"]) for p in replay.shapes}
        average = dict.fromkeys(replay.shapes, 0.0)
        for t, rate in enumerate(replay.trace["lr"]):
            replay.step(replay.grads(t))
            for p in want:
                average[p] = beta * average[p] + (1 - beta) * replay.trace[f"g{p[1:]}"][t]
                want[p] = want[p] - rate * (average[p] + decay * want[p])
                assert replay.distance(p, replay.params[p], want[p]) < 1e-12
        last = [replay.distance(p, x, replay.trace[p][-1]) for p, x in replay.params.items()]
        assert min(last) > 0.1, "met after all: take it out of NOT_MET"


def test_a_root_that_is_no_integer_is_refused() -> None:
    with (
        x64("tolerated_failures"),
        pytest.raises(ValueError, match=r"CoupledNewtonRoot .*integer .*3\.333"),
    ):
        Replay("tolerated_failures").run()
