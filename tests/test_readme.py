"""The README's Python blocks run as printed, one after the other, and its commands exist."""

import re
from pathlib import Path

import jax

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_python_blocks_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) >= 3
    namespace: dict = {}
    with jax.numpy_rank_promotion("allow"):  # the tests' own strictness is not the reader's
        for block in blocks:
            exec(compile(block, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    # one wave of four kernels and four biases, each gathered forward and scattered backward
    assert "10 matrix collectives (5 all-gathers, 5 reduce-scatters)" in printed


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"`?make ([a-z-]+)", README)
    assert {"demo", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_files_that_are_named_exist():
    for path in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / path).exists(), path
