"""The tables and the rules of ``docs/numerics.md`` are those of the code."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from matrixfsdp_jax.linalg.algorithms import newton_schulz_flops
from matrixfsdp_jax.linalg.coefficients import SCHEDULES
from tests.linalg import bands

TEXT = bands.PAGE.read_text()
CELLS = bands.cells(TEXT)


@pytest.mark.parametrize(("name", "steps"), bands.SCALAR)
def test_scalar_bands(name, steps):
    expected = [bands.scalar_band(name, steps, lower) for lower in bands.LOWER]
    assert CELLS[name, str(steps)] == expected


@pytest.mark.parametrize("dtype", bands.DTYPES)
@pytest.mark.parametrize(("name", "steps"), [("keller", 5), ("cans_schatten", 5), ("aol", 4)])
def test_matrix_bands(name, steps, dtype):
    written = CELLS[name, str(steps), dtype]
    for condition, cell in zip(bands.CONDITIONS, written, strict=True):
        again = bands.matrix_band(name, steps, dtype, condition)
        # Another processor may round another way.
        atol = 0.011 if dtype == "float32" else 0.05
        for old, new in zip(cell.split(" to "), again.split(" to "), strict=True):
            np.testing.assert_allclose(float(new), float(old), atol=atol)


def test_all_rows_are_there():
    assert len(CELLS) == len(bands.SCALAR) + len(bands.MATRIX) * len(bands.DTYPES)
    named = re.findall(r"^\| `(\w+)` \| ([A-Z][\w-]+) \| (.+) \|$", TEXT, re.M)
    assert {name: start.lower().replace("-", "") for name, start, _ in named} == {
        name: schedule.start for name, schedule in SCHEDULES.items()
    }
    for name, _, source in named:
        assert source.split()[0] in SCHEDULES[name].source or name == "cubic"


def test_flops_table():
    rows = re.findall(r"^\| (\d+) x (\d+), (\w+) \| (.*) \|$", TEXT, re.M)
    assert len(rows) == 4
    for m, n, dtype, shares in rows:
        platform = "cpu" if dtype == "float32" else "gpu"
        standard = newton_schulz_flops(int(m), int(n), 5)
        for algorithm, share in zip(
            ("standard_symmetric", "gram", "gram_symmetric"), shares.split(" | "), strict=True
        ):
            flops = newton_schulz_flops(
                int(m), int(n), 5, algorithm, dtype=dtype, platform=platform
            )
            assert f"{flops / standard:.2f}" == share


@pytest.mark.slow
def test_benchmark_runs():
    root = bands.PAGE.parents[1]
    command = [sys.executable, "benchmarks/newton_schulz.py", "--tiny", "--rounds", "1"]
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for expected in ("gram_symmetric", "optax.contrib.muon", "JAX sees no GPU", "standard bf16"):
        assert expected in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
