"""A run that another Muon began, continued here: the same parameters as if it had gone on."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.layout import rules
from tests.models import make_mesh
from tests.test_optimizers import FORMS, Trainer, assert_trees_close, draw, muon, muon_states, ramp

BEFORE, AFTER = 4, 3
SHAPES = {
    "tall": (16, 8),
    "wide": (8, 16),
    "square": (8, 8),
    "layers": (3, 8, 16),
    "heads": (8, 2, 4),
    "bias": (16,),
}
RULES = [rules.stacked("layers"), rules.attention_in("heads")]
MATRICES = [k for k in SHAPES if k != "bias"]
PLACES = [("single", 1), ("owner", 1), ("owner", 3), ("owner", 8)]
each_form = pytest.mark.parametrize("form", FORMS)
each_place = pytest.mark.parametrize(("form", "n"), PLACES)

_D = optax.contrib.MuonDimensionNumbers
DIMS = dict.fromkeys(MATRICES, _D()) | {"layers": _D(1, 2), "heads": _D(0, (1, 2)), "bias": None}
RATE = ramp(0.05, -0.004)

Make = Callable[..., Any]


def like_optax(**options: Any) -> Make:
    """The same here, as a factory for ``Trainer``; the rest is ours alone."""
    return muon(learning_rate=RATE, weight_decay=0.1, bias_correction=True, **options)


@cache
def run_optax(mu_dtype: Any = None) -> list[tuple[Any, Any]]:
    """Parameters and state of optax after 0, 1, .. recorded gradients."""
    tx = optax.contrib.muon(
        RATE, weight_decay=0.1, mu_dtype=mu_dtype, muon_weight_dimension_numbers=DIMS
    )
    params: Any = jax.tree.map(jnp.asarray, draw(SHAPES, 0))
    state = tx.init(params)
    update, out = jax.jit(tx.update), [(params, state)]
    for seed in range(1, BEFORE + AFTER + 1):
        updates, state = update(draw(SHAPES, seed), state, params)
        params = optax.apply_updates(params, updates)
        out.append((params, state))
    return [(jax.tree.map(np.asarray, params), state) for params, state in out]


def go_on(trainer: Trainer, shapes: Any = SHAPES) -> Any:
    """The parameters after the gradients that come next."""
    for seed in range(BEFORE + 1, BEFORE + AFTER + 1):
        got = trainer.step(draw(shapes, seed))
    return got


def momenta(trainer: Trainer) -> dict[str, np.ndarray]:
    """The momentum of every matrix leaf, as the user holds it."""
    (own,) = muon_states(trainer.state)
    if trainer.layout is None:
        return {k: np.asarray(own.mu[k]) for k in own.mu if hasattr(own.mu[k], "shape")}
    layout = trainer.layout
    stacks = {
        key: jax.device_put(x.astype(trainer.params.stacks[key].dtype), x.sharding)
        for key, x in own.mu.items()
    }
    whole = layout.unshard(trainer.params._replace(stacks=stacks))
    return {k: np.asarray(x) for k, x in whole.items() if k not in trainer.params.rest}


def assert_matrices_close(got: Any, want: Any, start: Any, atol: float = 1e-5) -> None:
    names = [k for k in want if np.ndim(want[k]) > 1]
    assert_trees_close({k: got[k] for k in names}, {k: want[k] for k in names}, atol=atol)
    for k in names:  # the last steps did move it, and the momentum tells
        assert np.abs(np.asarray(want[k]) - np.asarray(start[k])).max() > 1e-2, k


# ---- optax -------------------------------------------------------------------------------------


@each_place
def test_a_run_of_optax_goes_on(form: str, n: int) -> None:
    """A schedule and bias correction, so that a wrong count would show."""
    (start, source), (want, _) = run_optax()[BEFORE], run_optax()[-1]
    trainer = Trainer(form, like_optax(), start, RULES, n)
    fresh = trainer.params, trainer.state
    lost = go_on(trainer)  # without the import
    assert all(np.abs(lost[k] - want[k]).max() > 1e-2 for k in MATRICES)
    trainer.params = fresh[0]
    trainer.state = mfsdp.import_momentum(fresh[1], source, layout=trainer.layout)
    assert_matrices_close(go_on(trainer), want, start)
    assert int(muon_states(trainer.state)[0].count) == BEFORE + AFTER


@each_form
def test_every_schedule_goes_on_where_it_was(form: str) -> None:
    """Our own momentum handed over as optax's: the next steps are those of the run itself."""
    make = muon(
        learning_rate=RATE,
        momentum=ramp(0.8, 0.02),
        weight_decay=ramp(0.5, -0.05),
        rest=optax.sgd(0.1),
    )
    first = Trainer(form, make, draw(SHAPES, 0), RULES)
    for seed in range(1, BEFORE + 1):
        params = first.step(draw(SHAPES, seed))
    mu = {k: jnp.asarray(x) for k, x in momenta(first).items()}
    source = optax.contrib.MuonState(count=jnp.int32(BEFORE), mu=mu, ns_coeffs=jnp.zeros(3))
    second = Trainer(form, make, params, RULES)
    second.state = mfsdp.import_momentum(second.state, source, layout=second.layout)
    assert jax.tree.map(jax.typeof, second.state) == jax.tree.map(jax.typeof, first.state)
    for seed in range(BEFORE + 1, BEFORE + AFTER + 1):
        want, got = first.step(draw(SHAPES, seed)), second.step(draw(SHAPES, seed))
        jax.tree.map(np.testing.assert_array_equal, got, want)


@each_form
def test_the_rest_and_the_fresh_state_are_not_touched(form: str) -> None:
    _, source = run_optax()[BEFORE]
    make = like_optax(rest=optax.adamw(RATE))
    trainer = Trainer(form, make, draw(SHAPES, 0), RULES)
    for seed in (1, 2):  # counts and moments of the rest that differ from those of the source
        trainer.step(draw(SHAPES, seed))
    fresh, before = trainer.state, jax.tree.map(np.asarray, trainer.state)
    placed = jax.tree.map(lambda x: (x.dtype, x.sharding), fresh)
    state = mfsdp.import_momentum(fresh, source, layout=trainer.layout)
    jax.tree.map(np.testing.assert_array_equal, fresh, before)
    assert jax.tree.structure(state) == jax.tree.structure(fresh)
    assert jax.tree.map(lambda x: (x.dtype, x.sharding), state) == placed

    rest = state.rest if form == "owner" else state.inner_states["rest"]
    old = before.rest if form == "owner" else before.inner_states["rest"]
    assert {int(x) for x in jax.tree.leaves(rest) if x.ndim == 0} == {2}
    jax.tree.map(np.testing.assert_array_equal, rest, old)
    matrix = state.matrix if form == "owner" else state.inner_states["matrix"]
    assert {int(x) for x in jax.tree.leaves(matrix) if x.ndim == 0} == {BEFORE}


@each_place
def test_momentum_keeps_its_bits_and_takes_the_dtype_here(form: str, n: int) -> None:
    """Also of a fused leaf, which optax takes for one matrix."""
    given = [*RULES, rules.fused("wide", (8, 4, 4))]
    _, source = run_optax()[BEFORE]
    theirs = source.inner_states["muon"].inner_state[0].mu
    for dtype in (jnp.float32, jnp.bfloat16):
        make = like_optax(momentum_dtype=dtype)
        trainer = Trainer(form, make, draw(SHAPES, 0), given, n)
        trainer.state = mfsdp.import_momentum(trainer.state, source, layout=trainer.layout)
        (own,) = muon_states(trainer.state)
        assert {x.dtype for x in jax.tree.leaves(own.mu)} == {jnp.dtype(dtype)}
        got = momenta(trainer)
        assert set(got) == set(MATRICES)
        for k in MATRICES:
            want = np.asarray(theirs[k]).astype(dtype).astype(np.float32)
            np.testing.assert_array_equal(got[k].astype(np.float32), want, err_msg=k)
        if trainer.layout is None:
            continue
        for c in trainer.layout.plan.classes:
            pads = np.ones((c.num_devices, c.num_waves), bool)
            pads[tuple(zip(*c.slots, strict=True))] = False
            assert not np.asarray(own.mu[c.key])[pads].any()
            assert own.mu[c.key].sharding.spec == trainer.layout.specs.stacks[c.key]


@each_form
def test_half_precision_momentum_on_both_sides(form: str) -> None:
    runs = run_optax(jnp.bfloat16)
    (start, source), (want, _) = runs[BEFORE], runs[-1]
    trainer = Trainer(form, like_optax(momentum_dtype=jnp.bfloat16), start, RULES)
    trainer.state = mfsdp.import_momentum(trainer.state, source, layout=trainer.layout)
    assert_matrices_close(go_on(trainer), want, start, atol=3e-3)  # they round at other places


AROUND: dict[str, Callable[[Any, Any], Any]] = {
    "chain": lambda tx, layout: optax.chain(optax.identity(), tx, optax.trace(0.0)),
    "multi steps": lambda tx, layout: optax.MultiSteps(tx, 1),
    "apply if finite": lambda tx, layout: optax.apply_if_finite(tx, 3),
    "skip": lambda tx, layout: mfsdp.skip_nonfinite(tx, layout=layout),
}


def put(state: Any, own: Any) -> Any:
    """``state`` with ``own`` for the state of optax's Muon in it."""

    def is_muon(x: Any) -> bool:
        return isinstance(x, optax.contrib.MuonState)

    return jax.tree.map(lambda x: own if is_muon(x) else x, state, is_leaf=is_muon)


@pytest.mark.parametrize("around", AROUND)
@each_form
def test_states_around_the_source_and_the_target(form: str, around: str) -> None:
    """All that is not Muon's own stays as it was."""
    wrap = AROUND[around]
    _, source = run_optax()[BEFORE]
    theirs = wrap(optax.contrib.muon(0.1, muon_weight_dimension_numbers=DIMS), None)
    own = source.inner_states["muon"].inner_state[0]
    wrapped = put(theirs.init(draw(SHAPES, 0)), own)

    bare = Trainer(form, like_optax(), draw(SHAPES, 0), RULES)
    want = mfsdp.import_momentum(bare.state, source, layout=bare.layout)
    make = lambda **where: wrap(like_optax()(**where), where["layout"])  # noqa: E731
    trainer = Trainer(form, make, draw(SHAPES, 0), RULES)
    got = mfsdp.import_momentum(trainer.state, wrapped, layout=trainer.layout)
    assert jax.tree.structure(got) == jax.tree.structure(trainer.state)
    jax.tree.map(np.testing.assert_array_equal, muon_states(got), muon_states(want))
    changed = [
        jax.tree_util.keystr(keys)
        for (keys, a), b in zip(
            jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(trainer.state), strict=True
        )
        if (np.asarray(a) != np.asarray(b)).any()
    ]
    # The momenta, and the counts of the momentum and of the schedule.
    assert len(changed) == len(jax.tree.leaves(muon_states(want))) + 1, changed
    assert all("matrix" in name for name in changed)


@each_form
def test_multi_steps_go_on(form: str) -> None:
    (start, source), (want, _) = run_optax()[BEFORE], run_optax()[-1]
    make = lambda **where: optax.MultiSteps(like_optax()(**where), 1)  # noqa: E731
    trainer = Trainer(form, make, start, RULES)
    trainer.state = mfsdp.import_momentum(trainer.state, source, layout=trainer.layout)
    assert_matrices_close(go_on(trainer), want, start)


def test_a_partition_of_the_users_own_keeps_the_counts_of_its_rest() -> None:
    """Whatever the label: the rest of Muon inside it counts its own steps."""
    _, source = run_optax()[BEFORE]
    labels = dict.fromkeys(SHAPES, "matrix")

    def make(**where: Any) -> Any:
        return optax.partition({"matrix": like_optax(rest=optax.adam(0.1))(**where)}, labels)

    trainer = Trainer("single", make, draw(SHAPES, 0), RULES)
    state = mfsdp.import_momentum(trainer.state, source)
    counts = {
        jax.tree_util.keystr(keys): int(x)
        for keys, x in jax.tree_util.tree_leaves_with_path(state)
        if x.ndim == 0
    }
    for name, count in counts.items():
        assert count == (0 if "'rest'" in name else BEFORE), name


@each_form
def test_a_parameter_called_count_keeps_its_moments(form: str) -> None:
    params = {"w": draw({"w": (8, 8)}, 0)["w"], "matrix": {"count": np.float32(2)}}
    _, source = _tiny_source({"w": params["w"]})
    make = muon(rest=optax.adam(0.1))
    trainer = Trainer(form, make, params)
    before = jax.tree.map(np.asarray, trainer.state)
    state = mfsdp.import_momentum(trainer.state, source, layout=trainer.layout)
    rest, old = (s.rest if form == "owner" else s.inner_states["rest"] for s in (state, before))
    jax.tree.map(np.testing.assert_array_equal, rest, old)


def _tiny_source(params: dict[str, np.ndarray]) -> tuple[Any, Any]:
    tx = optax.contrib.muon(0.1)
    state = tx.init(params)
    updates, state = tx.update(params, state, params)
    return updates, state


def test_scale_by_muon_and_a_count_of_ones_own() -> None:
    _, source = run_optax()[BEFORE]
    for form in FORMS:
        make = lambda **where: mfsdp.scale_by_muon(**where)  # noqa: E731
        trainer = Trainer(form, make, draw(SHAPES, 0), RULES)
        state = mfsdp.import_momentum(trainer.state, source, layout=trainer.layout, count=17)
        assert [int(s.count) for s in muon_states(state)] == [17]


def test_a_given_up_momentum() -> None:
    """optax has one for an embedding, which is no matrix here."""
    params = draw({"w": (8, 8), "embed": (32, 8), "lm_head": (8, 32)}, 0)
    _, source = _tiny_source(params)
    theirs = source.inner_states["muon"].inner_state[0].mu
    for form in FORMS:
        trainer = Trainer(form, muon(bias_correction=True), params)
        with pytest.raises(ValueError, match=r"\['embed', 'lm_head'\], no matrices here.*drop="):
            mfsdp.import_momentum(trainer.state, source, layout=trainer.layout)
        with pytest.raises(ValueError, match=r"\['lm_head'\], no matrices here"):
            mfsdp.import_momentum(trainer.state, source, layout=trainer.layout, drop=["embed"])
        trainer.state = mfsdp.import_momentum(
            trainer.state, source, layout=trainer.layout, drop=("embed", "lm_head")
        )
        np.testing.assert_array_equal(momenta(trainer)["w"], theirs["w"])


# ---- torch -------------------------------------------------------------------------------------


TORCH_SHAPES = {"tall": (24, 8), "wide": (8, 20), "square": (12, 12)}
TORCH_RATE, TORCH_DECAY = 0.05, 0.1


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch, whose Muon casts to bfloat16 at one place; here that copies and rounds nothing."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    return torch


def run_torch(torch: Any, steps: int, named: bool = True) -> tuple[dict[str, np.ndarray], Any]:
    """Parameters and ``state_dict()`` after recorded gradients, in torch's ``[out, in]``."""
    start = draw(TORCH_SHAPES, 0)
    params = {f"net.{k}.weight": torch.nn.Parameter(torch.from_numpy(x)) for k, x in start.items()}
    given = params.items() if named else params.values()
    optimizer = torch.optim.Muon(given, lr=TORCH_RATE, weight_decay=TORCH_DECAY)
    for seed in range(1, steps + 1):
        for name, grad in draw(TORCH_SHAPES, seed).items():
            params[f"net.{name}.weight"].grad = torch.from_numpy(grad)
        optimizer.step()
    return {k: params[f"net.{k}.weight"].detach().numpy() for k in start}, optimizer.state_dict()


NAMES: dict[str, tuple[bool, Any]] = {
    "mapping": (True, {k: f"net.{k}.weight" for k in TORCH_SHAPES}),
    "function": (True, lambda path: f"net.{path}.weight"),
    "index": (False, {k: i for i, k in enumerate(TORCH_SHAPES)}),
    "index of a named one": (True, lambda path: list(TORCH_SHAPES).index(path)),
}
TURNED: dict[str, tuple[Any, set[str]]] = {
    "all": (True, set(TORCH_SHAPES)),
    "none": (False, set()),
    "some": (["square", "tall"], {"square", "tall"}),
}


def turn(tree: dict[str, np.ndarray], turned: set[str]) -> dict[str, np.ndarray]:
    return {k: np.ascontiguousarray(x.T) if k in turned else x for k, x in tree.items()}


@pytest.mark.parametrize(
    ("turned", "form", "n"),
    [(t, f, n) for t in TURNED for f, n in (("single", 1), ("owner", 8))] + [("some", "owner", 3)],
)
def test_a_run_of_torch_goes_on(turned: str, form: str, n: int, torch: Any) -> None:
    """A square matrix that is turned the wrong way would part with torch at once."""
    given, own = TURNED[turned]
    (start, source), (want, _) = (run_torch(torch, steps) for steps in (BEFORE, BEFORE + AFTER))
    make = muon(learning_rate=TORCH_RATE, weight_decay=TORCH_DECAY, eps=1e-7)
    rows = [rules.matrix(k, out="rows") for k in TORCH_SHAPES if k not in own]
    trainer = Trainer(form, make, turn(start, own), rows or None, n)
    trainer.state = mfsdp.import_momentum(
        trainer.state,
        source,
        layout=trainer.layout,
        count=BEFORE,
        torch_names=NAMES["mapping"][1],
        torch_transposed=given,
    )
    for seed in range(BEFORE + 1, BEFORE + AFTER + 1):
        got = trainer.step(turn(draw(TORCH_SHAPES, seed), own))
    assert_matrices_close(turn(got, own), want, start)
    assert int(muon_states(trainer.state)[0].count) == BEFORE + AFTER


@pytest.mark.parametrize("names", NAMES)
@each_form
def test_names_of_torch(form: str, names: str, torch: Any) -> None:
    named, given = NAMES[names]
    _, source = run_torch(torch, 2, named)
    trainer = Trainer(form, muon(), turn(draw(TORCH_SHAPES, 0), {"square", "wide"}))
    trainer.state = mfsdp.import_momentum(
        trainer.state,
        source,
        layout=trainer.layout,
        count=2,
        torch_names=given,
        torch_transposed=["square", "wide"],
    )
    got = turn(momenta(trainer), {"square", "wide"})
    for k, own in zip(TORCH_SHAPES, source["state"].values(), strict=True):
        np.testing.assert_array_equal(got[k], own["momentum_buffer"].numpy(), err_msg=k)


def test_half_precision_buffers_of_torch(torch: Any) -> None:
    _, source = run_torch(torch, BEFORE)
    buffers = {i: s["momentum_buffer"] for i, s in source["state"].items()}
    source["state"] = {i: {"momentum_buffer": b.to(torch.float16)} for i, b in buffers.items()}
    trainer = Trainer("owner", muon(), draw(TORCH_SHAPES, 0))
    trainer.state = mfsdp.import_momentum(
        trainer.state,
        source,
        layout=trainer.layout,
        count=BEFORE,
        torch_names=NAMES["mapping"][1],
        torch_transposed=False,
    )
    for b, k in zip(buffers.values(), TORCH_SHAPES, strict=True):
        np.testing.assert_array_equal(momenta(trainer)[k], b.to(torch.float16).float().numpy())


# ---- errors ------------------------------------------------------------------------------------


def source_of(params: dict[str, Any], **options: Any) -> Any:
    return optax.contrib.muon(0.1, **options).init(params)


def torch_source(names: bool = True, **shapes: Any) -> dict[str, Any]:
    """A ``state_dict`` without torch."""

    class Tensor(np.ndarray):
        def detach(self) -> Any:
            return self

        def to(self, _: str) -> Any:
            return self

        def float(self) -> Any:
            return self

        def numpy(self) -> np.ndarray:
            return np.asarray(self)

    buffers = {i: np.zeros(s, np.float32).view(Tensor) for i, s in enumerate(shapes.values())}
    group = {"params": list(buffers)} | ({"param_names": list(shapes)} if names else {})
    state = {i: {"momentum_buffer": b} for i, b in buffers.items()}
    return {"state": state, "param_groups": [group]}


HERE = {"w": (8, 16), "square": (8, 8), "bias": (8,)}
BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no momentum there": (
        lambda: source_of(draw({"w": (8, 16)}, 0)),
        {},
        r"matrix 'square' has no momentum in the source, which has \['w'\]",
    ),
    "another shape": (
        lambda: source_of(draw({"w": (16, 8), "square": (8, 8)}, 0)),
        {},
        r"momentum of 'w' is \[16, 8\] in the source and \[8, 16\] here",
    ),
    "not here": (
        lambda: source_of(draw({"w": (8, 16), "square": (8, 8), "more": (4, 4)}, 0)),
        {},
        r"momentum for \['more'\], no matrices here",
    ),
    "no muon there": (
        lambda: optax.adam(0.1).init(draw(HERE, 0)),
        {},
        r"the source holds 0 states of optax\.contrib\.muon.*state_dict\(\)",
    ),
    "two muons there": (
        lambda: (source_of(draw(HERE, 0)),) * 2,
        {},
        r"the source holds 2 states of optax\.contrib\.muon",
    ),
    "our own state": (
        lambda: mfsdp.muon(0.1).init(draw(HERE, 0)),
        {},
        r"the source holds 0 states of optax\.contrib\.muon",
    ),
    "torch without names": (
        lambda: torch_source(w=(8, 16), square=(8, 8)),
        {"count": 1, "torch_transposed": False},
        "torch_names=.*torch_transposed=",
    ),
    "torch without orientation": (
        lambda: torch_source(w=(8, 16), square=(8, 8)),
        {"count": 1, "torch_names": lambda path: path},
        "torch_names=.*torch_transposed=",
    ),
    "torch without count": (
        lambda: torch_source(w=(8, 16), square=(8, 8)),
        {"torch_names": lambda path: path, "torch_transposed": False},
        "a torch state has no count; give count=",
    ),
    "torch name": (
        lambda: torch_source(w=(8, 16), square=(8, 8)),
        {"count": 1, "torch_names": lambda path: f"net.{path}", "torch_transposed": False},
        r"torch_names gives 'net\..*' for '(w|square)', which has no momentum there",
    ),
    "torch name missing": (
        lambda: torch_source(w=(8, 16), square=(8, 8)),
        {"count": 1, "torch_names": {"w": "w"}, "torch_transposed": False},
        "torch_names gives None for 'square', which has no momentum there",
    ),
    "torch name twice": (
        lambda: torch_source(w=(8, 8), square=(8, 8)),
        {"count": 1, "torch_names": lambda path: "square", "torch_transposed": False},
        "torch_names gives 'square' for '(w|square)', which has no momentum there",
    ),
    "torch index": (
        lambda: torch_source(False, w=(8, 16), square=(8, 8)),
        {"count": 1, "torch_names": {"w": 0, "square": 2}, "torch_transposed": False},
        "torch_names gives 2 for 'square'",
    ),
    "torch orientation": (
        lambda: torch_source(w=(8, 16), square=(8, 8)),
        {"count": 1, "torch_names": lambda path: path, "torch_transposed": True},
        r"momentum of 'w' is \[16, 8\] in the source and \[8, 16\] here",
    ),
    "torch leaf not here": (
        lambda: torch_source(w=(8, 16), square=(8, 8), embed=(4, 4)),
        {"count": 1, "torch_names": lambda path: path, "torch_transposed": False},
        r"momentum for \['embed'\], no matrices here",
    ),
    "a typo in the turned paths": (
        lambda: torch_source(w=(8, 16), square=(8, 8)),
        {"count": 1, "torch_names": lambda path: path, "torch_transposed": ["sqare"]},
        "sqare",
    ),
    "one turned path as a string": (
        lambda: torch_source(w=(8, 16), square=(8, 8)),
        {"count": 1, "torch_names": lambda path: path, "torch_transposed": "square"},
        "torch_transposed",
    ),
}


@pytest.mark.parametrize("name", BAD)
@each_form
def test_what_does_not_fit_is_named(form: str, name: str) -> None:
    make, options, message = BAD[name]
    trainer = Trainer(form, muon(), draw(HERE, 0))
    with pytest.raises((ValueError, TypeError), match=message):
        mfsdp.import_momentum(trainer.state, make(), layout=trainer.layout, **options)


def test_a_state_without_one_momentum_is_refused() -> None:
    params = draw(HERE, 0)
    source = source_of(params)
    for tx, count in (
        (optax.adam(0.1), 0),
        (optax.chain(mfsdp.scale_by_muon(), mfsdp.muon(0.1)), 2),
    ):
        with pytest.raises(ValueError, match=rf"the state holds {count} states of mfsdp\.muon"):
            mfsdp.import_momentum(tx.init(params), source)


@pytest.mark.parametrize(
    ("form", "given"), [("single", "own"), ("owner", None), ("owner", "other")]
)
def test_a_layout_goes_with_a_state_on_owner_params(form: str, given: str | None) -> None:
    """And a state on the user's own tree with none."""
    params = draw(HERE, 0)
    layouts = {None: None, "own": mfsdp.plan(params, make_mesh(8))}
    layouts["other"] = mfsdp.plan(params, make_mesh(2))
    state = Trainer(form, muon(), params).state
    with pytest.raises((ValueError, TypeError), match="layout"):
        mfsdp.import_momentum(state, source_of(params), layout=layouts[given])
