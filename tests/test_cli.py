import json
import subprocess
import sys

import jax
import pytest

from matrixfsdp_jax.cli import main

SHAPES = {"blocks/0/experts/up": [4, 8, 16], "blocks/0/w": [8, 8], "embed": [32, 8]}


@pytest.fixture
def shapes(tmp_path):
    file = tmp_path / "shapes.json"
    file.write_text(json.dumps(SHAPES))
    return str(file)


def refused(capsys, *argv):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert len(err) < 400
    return err


def test_a_plan_for_a_known_model(capsys):
    assert main(["plan", "--model", "llama3-8b", "--mesh", "fsdp=8,replica=8"]) == 0
    out, err = capsys.readouterr()
    assert not err
    assert max(map(len, out.splitlines())) <= 80
    assert "replicas='shared'" in out
    assert "memory limit 74.5 GiB" in out  # the H100's


def test_everything_can_be_said(capsys, tmp_path, shapes):
    json_file, png = tmp_path / "advice.json", tmp_path / "owners.png"
    argv = [
        *("--shapes", shapes, "--stacked", "blocks/*/experts/*", "--mesh", "a=2,b=2"),
        *("--owner-axis", "b", "--optimizer", "soap", "--dtype", "float32"),
        *("--gather-dtype", "bfloat16", "--reduce-dtype", "float32", "--dealing", "lpt"),
        *("--hardware", "v5p", "--memory-budget", "1.5KiB", "--width", "100"),
        *("--json", str(json_file), "--picture", str(png)),
    ]
    assert main(["plan", *argv]) == 1
    _, err = capsys.readouterr()
    assert err == f"{png} is not drawn: nothing is chosen\n"
    found = json.loads(json_file.read_text())
    assert found["memory_budget"] == 1536
    assert found["mesh"] == {"a": 2, "b": 2}
    assert found["chosen"] is None
    argv[argv.index("1.5KiB")] = "1MB"
    assert main(["plan", *argv]) == 0
    found = json.loads(json_file.read_text())
    assert found["memory_budget"] == 10**6
    assert found["hardware"]["name"] == "v5p"
    owner = found["options"][-1]
    assert owner["owner_axis"] == ["b"]
    assert owner["dealing"] == "lpt"
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--mesh", "fsdp=8"], "one of the arguments --model --shapes is required"),
        (["--model", "gpt2-small"], "the following arguments are required: --mesh"),
        (["--model", "gpt9", "--mesh", "fsdp=8"], "invalid choice: 'gpt9'"),
        (["--model", "gpt2-small", "--mesh", "fsdp"], "'fsdp' must name axes with sizes"),
        (["--model", "gpt2-small", "--mesh", "fsdp=0"], "'fsdp=0' must name axes"),
        (["--model", "gpt2-small", "--mesh", "a=2,a=2"], "each once"),
        (["--model", "gpt2-small", "--mesh", "a=2", "--owner-axis", "b"], "of the mesh {'a': 2}"),
        (["--model", "gpt2-small", "--mesh", "a=2", "--memory-budget", "1 hectare"], "a size such"),
        (["--model", "gpt2-small", "--mesh", "a=2", "--ns-steps", "0"], "ns_steps is 0"),
        (["--model", "gpt2-small", "--mesh", "a=2", "--dtype", "f7"], "dtype 'f7' is unknown"),
        (["--model", "gpt2-small", "--mesh", "a=2", "--stacked", "x"], "--stacked is for --shapes"),
        (["--shapes", "/no/such/file", "--mesh", "a=2"], "No such file"),
    ],
)
def test_bad_input_is_one_line_and_code_2(capsys, argv, message):
    assert message in refused(capsys, "plan", *argv)


def test_no_command(capsys):
    assert "required: COMMAND" in refused(capsys)


def test_a_leaf_without_a_rule_says_what_to_add(capsys, shapes):
    line = refused(capsys, "plan", "--shapes", shapes, "--mesh", "fsdp=2")
    assert "leaf 'blocks/0/experts/up' has rank 3" in line
    assert "--stacked 'blocks/*/experts/up'" in line


def test_a_pattern_that_matches_nothing(capsys, shapes):
    argv = ["--shapes", shapes, "--mesh", "fsdp=2", "--stacked", "block/*", "--stacked", "*/up"]
    assert "'block/*'" in refused(capsys, "plan", *argv)


@pytest.mark.parametrize("argv", [["--help"], ["plan", "--help"]])
def test_help(capsys, argv):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 0
    out, _ = capsys.readouterr()
    assert "plan" in out
    assert "(default: None)" not in out


def test_as_a_module_without_any_device():
    """No backend is started: an unknown platform would be an error."""
    code = (
        "import sys, jax, runpy\n"
        "jax.config.update('jax_platforms', 'no_such_platform')\n"
        "sys.argv = ['matrixfsdp_jax', 'plan', '--model', 'llama3-70b', '--mesh', 'fsdp=512']\n"
        "runpy.run_module('matrixfsdp_jax', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "chosen: sharded storage over fsdp" in done.stdout
    assert jax.devices()  # in this process there is one
