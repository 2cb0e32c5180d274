"""The benchmark scripts run, at a size that measures nothing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(script: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    return done.stdout


def test_optimizer_step():
    out = run(
        "optimizer_step.py", *["--layers", "1", "--width", "32", "--devices", "2", "--rounds", "2"]
    )
    assert "6 matrices, width 32, 2 simulated devices" in out
    cells = {
        row[1].strip(): [c.strip() for c in row[2:-1]]
        for row in (line.split("│") for line in out.splitlines())
        if len(row) > 3
    }
    collectives = {name: row[4] for name, row in cells.items() if len(row) > 4}
    assert collectives["owner muon"] == "0"
    assert collectives["sharded, FSDP"] == "4", "two all-to-alls for each of two classes"
    assert collectives["sharded,"] == "2", "replicated: one all-gather for each class"
    assert int(collectives["optax, FSDP"]) > 0
    assert len(re.findall(r"\d+\.\dx faster than optax", out)) == 3


def test_shampoo():
    out = run("shampoo.py", "--tiny", "--basis", "qr", "--root", "newton")
    assert "6 matrices, width 16, 2 simulated devices" in out
    assert "SOAP by QRBasis, Shampoo by CoupledNewtonRoot, every 2 steps" in " ".join(out.split())
    cells = {
        row[1].strip(): [c.strip() for c in row[2:-1]]
        for row in (line.split("│") for line in out.splitlines())
        if len(row) > 3
    }
    sides = [f"{t}, {h}" for t in ("SOAP", "Shampoo") for h in ("staggered", "all at once")]
    assert set(cells) == {"Muon", *sides, "SOAP, replicated", "Shampoo, replicated"}
    assert all(row[-1] == "0" for row in cells.values()), "matrix collectives"
    assert all(float(row[3]) >= 1 for row in cells.values()), "the longest step over the mean"
    for title in ("SOAP", "Shampoo"):
        for words in (f"{title} over owner Muon", f"{title} replicated over on owners"):
            assert re.search(rf"{words}: \d+\.\d\d x, in CPU time \d+\.\d\d x", out)
    assert re.search(r"planned: busiest owner 1\.00 x the mean", out)


def test_torch_compat():
    pytest.importorskip("torch")
    out = " ".join(run("torch_compat.py", "--tiny").split())
    assert "1 layers of width 16, 6 parameters" in out
    assert re.search(r"this layer over plain torch Shampoo: \d+\.\d\d x", out)
    assert re.search(r"crossing: \d+\.\d% of the step", out)
    apart = float(re.search(r"parameters of both apart by (\S+) of", out).group(1))
    assert apart < 1e-3
