"""The steps of ``benchmarks/aot_scale.py``, compiled for a TPU v5e 2x4 that is not there."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "aot_scale.py"
# The tiny model: elements of its matrices by class, two layers, and of everything else.
QO, KV, MLP = 256 * 256, 256 * 128, 256 * 512
TABLES, NORMS = 2 * 512 * 256, 5 * 256
BF16, OTHERS = 2, 7 / 8  # bytes of an element; the part that a chip of eight has not


def python(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_missing_compiler_is_named():
    hide = f"import sys, runpy; sys.modules['libtpu'] = None; runpy.run_path({str(SCRIPT)!r})"
    done = python("-c", hide)
    assert done.returncode == 2
    assert "pip install '.[tpu-aot]'" in done.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, the TPU compiler, is not installed: pip install '.[tpu-aot]'",
)
def test_received_bytes_are_those_of_the_layout(tmp_path):
    file = tmp_path / "figures.json"
    done = python(SCRIPT, "--quick", "--storage", "owner-each", "sharded", "--json", file)
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert "met: owner-each: the optimizer sends nothing" in done.stdout
    owner, sharded = (row["whole"] for row in json.loads(file.read_text())["rows"])

    # Waves of eight, of which four, four and six slots hold matrices; the tables are sharded.
    waves = 8 * (QO + KV + MLP) + TABLES
    assert owner["forward GB"] * 1e9 == pytest.approx(waves * BF16 * OTHERS, rel=1e-3)
    assert owner["optimizer collectives"] == owner["optimizer GB"] == 0

    whole = 4 * QO + 4 * KV + 6 * MLP + TABLES + NORMS
    assert sharded["forward GB"] * 1e9 == pytest.approx(whole * BF16 * OTHERS, rel=1e-3)
    there_and_back = 2 * (QO + KV + MLP)  # a chip owns one slot of every class
    assert sharded["optimizer GB"] * 1e9 == pytest.approx(there_and_back * BF16 * OTHERS)
    assert sharded["optimizer collectives"] == 6
    assert owner["no origin GB"] == sharded["no origin GB"] == 0
