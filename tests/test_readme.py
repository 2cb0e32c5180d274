"""Python blocks of the README and the guides run as printed, and what they name exists."""

import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def run_blocks(name: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.S)
    assert len(blocks) >= 2
    namespace: dict = {}
    with jax.numpy_rank_promotion("allow"):  # the tests' own strictness is not the reader's
        for block in blocks:
            exec(compile(block, name, "exec"), namespace)


@pytest.mark.parametrize("name", ["docs/muon.md", "docs/shampoo.md"])
def test_the_guides_run(name, capsys):
    run_blocks(name)


def test_the_guide_of_the_torch_layer_runs(capsys):
    pytest.importorskip("torch")
    run_blocks("docs/torch.md")


def test_the_readme_runs(capsys):
    run_blocks("README.md")
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
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for path in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / path).exists(), (page.name, path)
