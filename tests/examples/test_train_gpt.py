"""The example as its user runs it, in a size that takes seconds."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import train_gpt  # noqa: E402
from gpt import data, model, plots, training  # noqa: E402
from gpt.config import Config, Optimizer  # noqa: E402

import matrixfsdp_jax as mfsdp  # noqa: E402

SMALL = {"layers": 1, "width": 32, "heads": 2, "context": 16, "batch": 8, "steps": 2}
TINY = ["train", *(f"--{key}={n}" for key, n in SMALL.items()), "--eval-every=1", "--seed=3"]


def run(*args, code=0):
    """Output of the command line with single spaces and without the box of an error."""
    result = CliRunner().invoke(train_gpt.app, [str(a) for a in args], env={"COLUMNS": "80"})
    assert result.exit_code == code, result.output
    return " ".join(result.output.replace("│", " ").split())


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# ---- one run -----------------------------------------------------------------------------------


# Tall matrices are turned, or (where each dim has its own factor) a class of their own.
CLASSES = {"muon": 2, "shampoo": 3, "soap": 3, "adamw": 2}


@pytest.fixture(scope="module", params=list(CLASSES))
def tiny_run(request, tmp_path_factory):
    """Optimizer, output and folder of one run."""
    out = tmp_path_factory.mktemp("runs")
    refresh = ["--precondition-every=1"] if CLASSES[request.param] == 3 else []
    shown = run(*TINY, *refresh, "--optimizer", request.param, "--name", "tiny", "--out", out)
    return request.param, shown, out / "tiny"


def test_a_run_shows_its_layout_its_collectives_and_its_progress(tiny_run):
    optimizer, shown, _ = tiny_run
    assert f"{optimizer} on 8 devices: 6 matrices in {CLASSES[optimizer]} classes" in shown
    assert "blocks/0/attn/qkv/kernel" in shown
    assert "mfsdp.gather" in shown, "the table of collectives"
    assert "optimizer step: 0 matrix collectives, 1 scalar" in shown
    assert "tokens/s" in shown
    assert "ETA" in shown


def test_a_run_leaves_its_files(tiny_run):
    optimizer, _, folder = tiny_run
    records = metrics(folder)
    assert [r["step"] for r in records] == [0, 1, 2]
    assert records[0]["held_out_loss"] == pytest.approx(math.log(256), abs=1e-4)
    assert records[1]["loss"] == pytest.approx(math.log(256), abs=1e-4)
    assert records[2]["held_out_loss"] < records[0]["held_out_loss"]
    assert all(r["grad_norm"] > 0 and r["update_norm"] > 0 for r in records[1:])
    config = json.loads((folder / "config.json").read_text())
    assert (config["optimizer"], config["width"], config["seed"]) == (optimizer, 32, 3)
    factors = (1, 256) if CLASSES[optimizer] == 3 else (None, None)
    assert (config["precondition_every"], config["max_factor_dim"]) == factors
    for picture in ("loss.png", "layout.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")
    assert len((folder / "sample.txt").read_text()) > 100


@pytest.mark.parametrize("tiny_run", ["muon"], indirect=True)
def test_devices_and_micro_batches_do_not_change_the_losses(tiny_run, tmp_path):
    optimizer, _, folder = tiny_run
    run(*TINY, "--optimizer", optimizer, "--devices=2", "--accumulate=2", "--out", tmp_path)
    for key in ("loss", "held_out_loss", "grad_norm"):
        ours, others = (
            [r[key] for r in metrics(f) if key in r] for f in (folder, tmp_path / optimizer)
        )
        np.testing.assert_allclose(ours, others, rtol=1e-4)


def test_the_first_free_folder_is_taken(tmp_path):
    assert train_gpt.run_folder(tmp_path, None, "muon") == tmp_path / "muon"
    (tmp_path / "muon").mkdir()
    (tmp_path / "muon-2").mkdir()
    assert train_gpt.run_folder(tmp_path, None, "muon") == tmp_path / "muon-3"


def test_the_script_simulates_its_devices_and_computes_in_bfloat16(tmp_path):
    keep = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    env = keep | {"PYTHONPATH": str(ROOT), "COLUMNS": "80", "JAX_PLATFORMS": "cpu"}
    script = [sys.executable, str(ROOT / "examples" / "train_gpt.py")]
    command = [*script, *TINY, "--devices", "4", "--compute-dtype", "bfloat16"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "4 x cpu" in done.stdout
    assert "gather in bfloat16" in done.stdout
    assert math.isfinite(metrics(tmp_path / "runs" / "muon")[-1]["loss"])


def test_a_run_that_diverges_says_so_and_fails(tmp_path, monkeypatch):
    def step(owned, state, windows):
        return owned, state, dict.fromkeys(training.METRICS, float("nan"))

    build = training.build
    monkeypatch.setattr(training, "build", lambda *args: build(*args)._replace(step=step))
    monkeypatch.setattr(training, "show_audit", lambda *args: None)
    assert "the loss is nan at step 1; lower --lr" in run(*TINY, "--out", tmp_path, code=1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--optimizer", "sgd"], "'sgd' is not one of 'muon', 'shampoo', 'soap', 'adamw'"),
        (["--batch", "12"], "--batch 12 does not divide over 8 devices x --accumulate 1"),
        (["--accumulate", "3"], "give a multiple of 24"),
        (["--heads", "3"], "make it a multiple of 6"),
        (["--width", "18", "--heads", "6"], "even number of channels"),
        (["--optimizer", "adamw", "--rest-lr", "0.1"], "AdamW has one rate, --lr"),
        (["--precondition-every", "5"], "shampoo or soap; Muon has no factors"),
        (["--optimizer", "adamw", "--max-factor-dim", "8"], "--max-factor-dim 8 goes with"),
        (["--devices", "9"], "--devices 9, but there are 8 (cpu)"),
        (["--steps", "0"], "Invalid value for '--steps'"),
        (["--lr", "-1"], "Invalid value for '--lr'"),
        (["--name", "taken"], "exists and is not empty; give another --name"),
        (["--name", "taken/file"], "exists and is not empty"),
    ],
)
def test_bad_flags_are_explained(tmp_path, flags, message):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("precious")
    assert message in run(*TINY, "--out", tmp_path, *flags, code=2)
    assert os.listdir(tmp_path) == ["taken"], "nothing is written before the flags are checked"


# ---- demo and grid -----------------------------------------------------------------------------


def falling(start, end, steps=4):
    losses = np.linspace(start, end, steps + 1)
    return [{"step": k, "held_out_loss": x, "tokens_per_s": 10.0} for k, x in enumerate(losses)]


@pytest.mark.parametrize("other", ["muon", "shampoo", "soap"])
def test_the_demo_says_when_each_other_optimizer_reaches_adamw(tmp_path, monkeypatch, other):
    def train_all(configs, num_devices):
        (tmp_path / "demo").mkdir()
        return dict(zip(configs, [falling(5.0, 2.0), falling(5.0, 1.0)], strict=True))

    monkeypatch.setattr(train_gpt, "train_all", train_all)
    shown = run("demo", "--optimizer", "adamw", "--optimizer", other, "--out", tmp_path)
    name = {"muon": "Muon", "shampoo": "Shampoo", "soap": "SOAP"}[other]
    assert f"{name} reaches AdamW's final loss at step 3 of" in shown
    assert "AdamW reaches" not in shown


def test_demo_compares_both_optimizers_from_one_seed(tmp_path, monkeypatch):
    trained = {}

    def train_all(configs, num_devices):
        trained.update(configs)
        (tmp_path / "demo").mkdir()  # as each run makes its own folder
        return dict(zip(configs, [falling(5.0, 1.0), falling(5.0, 2.0)], strict=True))

    monkeypatch.setattr(train_gpt, "train_all", train_all)
    shown = run("demo", "--steps", 4, "--seed", 7, "--out", tmp_path)
    muon, adamw = trained.values()
    assert (muon.optimizer, adamw.optimizer) == (Optimizer.muon, Optimizer.adamw)
    assert (muon.seed, adamw.seed, muon.steps, adamw.steps) == (7, 7, 4, 4)
    assert "1.000" in shown
    assert "2.885" in shown, "2 nats in bits"
    assert "Muon reaches AdamW's final loss at step 3 of 4" in shown
    assert (tmp_path / "demo" / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_grid_names_each_rate_and_what_diverged(tmp_path, monkeypatch):
    def train_all(configs, num_devices):
        return {path: falling(5.0, 1.5) if k else [] for k, path in enumerate(configs)}

    monkeypatch.setattr(train_gpt, "train_all", train_all)
    shown = run("grid", "--out", tmp_path)
    rates = sum(len(rates) for rates in train_gpt.GRID.values())
    assert Counter(shown.split())["1.500"] == rates - 1
    assert "diverged" in shown
    only = run("grid", "--optimizer", "soap", "--out", tmp_path)
    assert "soap" in only
    assert "muon" not in only


def test_the_demo_uses_rates_of_the_grid():
    for optimizer, rates in train_gpt.GRID.items():
        assert Config(optimizer).matrix_rate in rates


def test_the_step_at_which_a_curve_comes_below_a_loss():
    assert plots.first_step_below(falling(5.0, 1.0), 2.5) == pytest.approx(2.5)
    assert plots.first_step_below(falling(5.0, 1.0), 4.5) == 1, "the start is no evaluation"
    assert plots.first_step_below(falling(5.0, 1.0), 0.5) is None


# ---- parts -------------------------------------------------------------------------------------


def test_the_corpus_is_the_same_each_time_and_keeps_held_out_files_apart():
    first, second = data.load_corpus(), data.load_corpus()
    for name in ("train", "held_out"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert len(first.train) > 5e6
    train = first.train.tobytes()
    stdlib = Path(os.__file__).parent
    held_out = [
        text
        for file in data.source_files(stdlib)
        if data.is_held_out(file.relative_to(stdlib).as_posix())
        and len(text := file.read_bytes()) > 1000
    ]
    assert len(held_out) > 10
    assert all(text in first.held_out.tobytes() and text not in train for text in held_out)


def test_a_text_that_occurs_twice_is_taken_once_and_tests_are_left_out(tmp_path):
    names = [f"m{k}.py" for k in range(200)]
    train_name, *_ = (n for n in names if not data.is_held_out(n))
    held_name, *_ = (n for n in names if data.is_held_out(n))
    (tmp_path / train_name).write_text("a" * 20_000)
    (tmp_path / held_name).write_text("b" * 20_000)
    (tmp_path / "z_copy.py").write_text("a" * 20_000)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "m.py").write_text("c")
    corpus = data.load_corpus(tmp_path)
    assert corpus.train.tobytes() == b"a" * 20_000
    assert corpus.held_out.tobytes() == b"b" * 20_000


def test_a_python_without_sources_is_explained(tmp_path):
    with pytest.raises(ValueError, match=r"found 0 bytes to train on.*run it with a Python"):
        data.load_corpus(tmp_path)


def test_windows_are_text_and_follow_the_seed():
    text = np.arange(200, dtype=np.uint8)
    first, again, other = (next(data.random_batches(text, 4, 8, seed)) for seed in (0, 0, 1))
    assert first.shape == (4, 9)
    assert (np.diff(first) == 1).all()
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    even = np.concatenate(data.even_batches(text, 3, 4, 8))
    assert even.shape == (12, 9)
    assert (even[0, 0], even[-1, -1]) == (0, 199)


def test_the_model_sees_no_later_byte_and_where_the_earlier_ones_stand():
    graphdef, params = nnx.split(model.GPT(2, 32, 2, nnx.Rngs(0)), nnx.Param)
    keys = iter(jax.random.split(jax.random.key(1), 100))
    params = jax.tree.map(lambda p: 0.2 * jax.random.normal(next(keys), p.shape), params)
    logits = jax.jit(lambda tokens: nnx.merge(graphdef, params)(tokens))
    tokens = np.arange(10, 26)[None]
    changed, swapped = tokens.copy(), tokens.copy()
    changed[0, 8] = 99
    swapped[0, [2, 3]] = swapped[0, [3, 2]]
    base = logits(tokens)
    np.testing.assert_allclose(logits(changed)[:, :8], base[:, :8], atol=1e-5)
    assert np.abs(logits(changed)[:, 8:] - base[:, 8:]).max() > 1e-2
    assert np.abs(logits(swapped)[:, -1] - base[:, -1]).max() > 1e-3


@pytest.mark.parametrize("name", ["shampoo", "soap"])
def test_planner_and_optimizer_know_the_same_factors(monkeypatch, name):
    """As many blocks are due in a step as the plan was balanced for."""
    given = {}

    def optimizer(rate, **options):
        given.update(options)
        return getattr(mfsdp, f"scale_by_{name}")()

    monkeypatch.setattr(mfsdp, name, optimizer)
    config = Config(Optimizer(name), precondition_every=3, max_factor_dim=16, weight_decay=0.5)
    params = {"kernel": np.zeros((32, 48), np.float32)}
    mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
    layout = mfsdp.plan(params, mesh, optimizer=training.planned_for(config))
    training.make_optimizer(config, layout)
    assert (given["precondition_frequency"], given["max_preconditioner_dim"]) == (3, 16)
    assert given["weight_decay"] == 0.5
    assert layout.plan.optimizer.refresh_frequency == 3
    assert layout.plan.optimizer.refresh_units((32, 48)) == ((6, 2 * 16.0**3),)


@pytest.mark.parametrize("steps", [1, 2, 10, 300])
def test_the_rate_rises_to_its_peak_and_falls_to_nothing(steps):
    rates = np.array([training.schedule(0.5, steps)(k) for k in range(steps + 1)])
    peak = max(1, steps // 10) - 1
    assert (rates[:-1] > 0).all()
    assert rates[peak] == pytest.approx(0.5)
    assert (np.diff(rates[: peak + 1]) > 0).all()
    assert (np.diff(rates[peak + 1 :]) < 0).all()
    assert rates[-1] == 0


def test_a_sample_holds_nothing_that_a_terminal_would_obey():
    shown = training.printable(np.arange(256, dtype=np.uint8))
    assert "\x1b" not in shown
    assert all(c.isprintable() or c in "\n\t" for c in shown)
    assert "abc" in shown
