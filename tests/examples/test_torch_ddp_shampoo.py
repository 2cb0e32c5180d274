"""The DDP example as its user starts it, for fewer steps."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_ddp_shampoo.py"


@pytest.mark.slow
def test_two_processes_train_and_the_run_goes_on_in_jax():
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--steps", "20", "--more", "20"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    out = " ".join(done.stdout.split())
    assert out.count("10x128") == 3  # a matrix of 10 x 384, cut at 128
    assert re.search(r"│ 0 +│ .*│ 1 +│ ", out), "both ranks own blocks"
    losses = [float(x) for x in re.findall(r"step \d+: loss (\d\.\d+)", out)]
    assert losses[1] < losses[0] < 2.2
    logits = float(re.search(r"logits in Flax (\S+) apart", out).group(1))
    params = float(re.search(r"torch and JAX at most (\S+) apart", out).group(1))
    assert logits < 1e-4
    assert params < 1e-4
