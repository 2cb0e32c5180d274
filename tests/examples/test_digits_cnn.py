"""The digits example as its user runs it, in a size that takes seconds."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import digits_cnn


def run(*args):
    result = CliRunner().invoke(digits_cnn.app, [str(a) for a in args], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("digits")
    return run("--tiny", "--out", out), out, json.loads((out / "results.json").read_text())


def test_convolutions_are_tensors_and_biases_and_head_are_not(tiny_run):
    shown, _, _ = tiny_run
    assert "shampoo on 4 devices: 4 matrices in 4 classes, 10 leaves" in shown
    assert "conv_1/kernel 1 f32[3,3,1,4] tensor 3x3x1x4: rule" in shown
    assert "conv_2/kernel 1 f32[3,3,4,8] tensor 3x3x4x8: rank 4: a tensor as it is" in shown
    assert "head/kernel 1 f32[16,10] rest" in shown


def test_the_run_leaves_its_files_and_the_loss_falls(tiny_run):
    shown, out, results = tiny_run
    assert (out / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert list(results) == ["Shampoo", "AdamW"]
    for name, result in results.items():
        (losses,) = result["loss"]
        assert len(losses) == 12
        assert losses[0] == pytest.approx(np.log(10), abs=0.3)
        assert losses[-1] < losses[0] - 0.05, name
        assert list(result["validation_loss"]) == ["0.016"]
        (accuracy,) = result["test_accuracy"]
        assert f"{name}, rate 0.016: test accuracy {accuracy:.2%}" in shown
        assert f"{name}, steps to 98% from each seed: [None]" in shown
    assert results["Shampoo"]["loss"] != results["AdamW"]["loss"]


def test_a_run_repeats_by_its_seed():
    trainer = digits_cnn.Trainer(digits_cnn.load(), devices=2, channels=4, batch=96)
    start = trainer.runner("Shampoo", 0.01, steps=3, every=2)
    first, again, other = start(0), start(0), start(1)
    assert first == again
    assert first.steps == [2, 3]
    assert first.losses != other.losses


def test_the_rate_of_the_lowest_validation_loss_gets_the_further_seeds(tmp_path, monkeypatch):
    seeds = []

    def runner(self, name, rate, steps, every):
        def start(seed):
            seeds.append((name, rate, seed))
            loss = abs(rate - (0.2 if name == "Shampoo" else 0.3))
            measured = {"loss": loss, "accuracy": 0.99 - loss / 100}
            return digits_cnn.Run([1.0], [1], [measured], [measured])

        return start

    monkeypatch.setattr(digits_cnn.Trainer, "runner", runner)
    rates = [f"--rate={rate}" for rate in (0.1, 0.2, 0.3)]
    shown = run(*rates, "--seeds=2", "--seed=5", "--out", tmp_path)
    expected = {"Shampoo": 0.2, "AdamW": 0.3}
    for name, best in expected.items():
        assert f"{name}, rate {best}: test accuracy 99.00%" in shown
        assert f"{name}, steps to 98% from each seed: [1, 1]" in shown
        grid = [(name, rate, 5) for rate in (0.1, 0.2, 0.3)]
        assert [s for s in seeds if s[0] == name] == [*grid, (name, best, 6)]


def test_the_split_is_fixed_and_keeps_images_apart():
    first, second = digits_cnn.load(), digits_cnn.load()
    for name, size in {"train": 1149, "validation": 288, "test": 360}.items():
        part = first[name]
        np.testing.assert_array_equal(part["image"], second[name]["image"])
        np.testing.assert_array_equal(part["label"], second[name]["label"])
        assert part["image"].shape == (size, 8, 8, 1)
        assert part["image"].min() == 0
        assert part["image"].max() == 1
    seen = [{image.tobytes() for image in part["image"]} for part in first.values()]
    assert not seen[0] & seen[1]
    assert not seen[0] & seen[2]
    assert not seen[1] & seen[2]


def test_batches_are_shuffled_by_the_seed_and_an_epoch_takes_no_image_twice():
    data = {"label": np.arange(10), "image": np.arange(10) * 2}
    stream = digits_cnn.batches(data, 5, seed=1)
    a, b, c = next(stream), next(stream), next(stream)
    assert sorted([*a["label"], *b["label"]]) == list(range(10))
    assert list(c["label"]) != list(a["label"])
    np.testing.assert_array_equal(a["image"], 2 * a["label"])
    np.testing.assert_array_equal(next(digits_cnn.batches(data, 5, seed=1))["label"], a["label"])


def test_steps_to_the_target_are_those_of_the_first_evaluation_that_reaches_it():
    accuracies = [0.5, 0.98, 0.97, 0.99]
    done = digits_cnn.Run([], [5, 10, 15, 20], [], [{"accuracy": a} for a in accuracies])
    assert done.steps_to_target() == 10
    assert digits_cnn.Run([], [5], [], [{"accuracy": 0.979}]).steps_to_target() is None
