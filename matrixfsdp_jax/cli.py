"""The command line: advice for a model on a mesh, before anything runs on a device."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from matrixfsdp_jax.layout import advice_report, picture
from matrixfsdp_jax.layout.advice import Advice, compare
from matrixfsdp_jax.layout.costs import METHODS
from matrixfsdp_jax.layout.hardware import HARDWARE
from matrixfsdp_jax.layout.models import MODELS, Model, model, read_shapes
from matrixfsdp_jax.layout.planner import CAST_DTYPES
from matrixfsdp_jax.layout.rules import NoRuleError, default_rules, route, stacked

_UNITS = {"": 1} | {
    f"{prefix}{ending}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for ending, base in (("B", 1000), ("iB", 1024))
}
_PLAN = """\
Compares the ways to store a model's parameters on a mesh: replicated, sharded
(FSDP, matrices visit their owners for the update) and owner storage (whole
matrices live at their owners). Only shapes are looked at; no device is used."""
_EXAMPLES = """\
examples:
  python -m matrixfsdp_jax plan --model llama3-8b --mesh fsdp=8
  python -m matrixfsdp_jax plan --model llama3-70b --mesh replica=8,fsdp=64 \\
      --hardware v5p --optimizer soap --memory-budget 60GiB
  python -m matrixfsdp_jax plan --shapes shapes.json --stacked 'blocks/*/experts/*' \\
      --mesh fsdp=8 --json advice.json --picture owners.png

A file of shapes is {"blocks/0/mlp/kernel": [768, 3072], ...}; an entry may also
be {"shape": [768, 3072], "dtype": "float32"}."""


class _Parser(argparse.ArgumentParser):
    """Errors are one line, and exit with code 2."""

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split())
        self.exit(2, f"{self.prog}: error: {line}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, 1 if no option fits.

    Raises:
      SystemExit: with code 2 for bad input, after one line on standard error.
    """
    parser, plan = _parsers()
    given = parser.parse_args(argv)
    try:
        advice = _advice(given)
        print(advice_report.render(advice, width=given.width))
        if given.json:
            text = json.dumps(advice_report.to_dict(advice), indent=2)
            Path(given.json).write_text(text + "\n", encoding="utf-8")
        if given.picture and advice.chosen:
            picture.plot(advice.chosen.plan, given.picture)
        elif given.picture:
            print(f"{given.picture} is not drawn: nothing is chosen", file=sys.stderr)
    except NoRuleError as error:
        first = error.leaves[0]
        plan.error(
            f"leaf {first.path!r} has rank {len(first.shape)}; if it is a stack of matrices say "
            f"--stacked {re.sub(r'[0-9]+', '*', first.path)!r}"
        )
    except (ValueError, OSError, ImportError) as error:
        plan.error(str(error))
    return 0 if advice.chosen else 1


def _advice(given: argparse.Namespace) -> Advice:
    described = _described(given)
    leaves = {leaf.path: leaf for leaf in described.leaves}
    routed = route(leaves, described.rules, optimizer=given.optimizer)
    owners = given.owner_axis or ["fsdp" if "fsdp" in given.mesh else next(iter(given.mesh))]
    return compare(
        routed,
        given.mesh,
        owner_axis=owners,
        optimizer=given.optimizer,
        ns_steps=given.ns_steps,
        gather_dtype=given.gather_dtype,
        reduce_dtype=given.reduce_dtype,
        dealing=given.dealing,
        spread=bool(given.picture),
        memory_budget=given.memory_budget,
        hardware=given.hardware,
    )


def _described(given: argparse.Namespace) -> Model:
    if given.model:
        if given.stacked:
            raise ValueError("--stacked is for --shapes; a known model brings its own rules")
        return model(given.model, given.dtype)
    rules = default_rules(*map(stacked, given.stacked or ()))
    return read_shapes(given.shapes, given.dtype, rules)


def _mesh(text: str) -> dict[str, int]:
    """``"fsdp=8,replica=4"``."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*([1-9]\d*)\s*", part)
        if not found or found[1] in sizes:
            raise argparse.ArgumentTypeError(
                f"{text!r} must name axes with sizes of at least 1, each once: fsdp=8,replica=4"
            )
        sizes[found[1]] = int(found[2])
    return sizes


def _size(text: str) -> int:
    """``"80GiB"``, ``"80GB"``, ``"80000000000"``."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)?B?\s*", text)
    size = int(float(found[1]) * _UNITS[found[2] or ""]) if found else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a size such as 80GiB or 80GB")
    return size


def _axes(text: str) -> list[str]:
    return [axis.strip() for axis in text.split(",")]


def _parsers() -> tuple[_Parser, _Parser]:
    raw: Any = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="python -m matrixfsdp_jax",
        description="Matrix optimizers for JAX on whole-matrix owners.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    plan = commands.add_parser(
        "plan",
        usage="%(prog)s --model NAME --mesh AXIS=SIZE,... [options]",
        help="compare the ways to store a model's parameters on a mesh",
        description=_PLAN,
        epilog=_EXAMPLES,
        formatter_class=raw,
    )
    what = plan.add_argument_group("the model (one of these)").add_mutually_exclusive_group(
        required=True
    )
    what.add_argument("--model", choices=MODELS, metavar="NAME", help=", ".join(MODELS))
    what.add_argument("--shapes", metavar="FILE", help="JSON file of paths and shapes")
    how = plan.add_argument_group("how it is trained")
    how.add_argument(
        "--mesh", type=_mesh, required=True, metavar="AXIS=SIZE,...", help="e.g. replica=8,fsdp=8"
    )
    how.add_argument(
        "--owner-axis", type=_axes, metavar="AXIS,...",
        help="axes over which parameters are dealt out; default fsdp, or the first; the batch is "
        "split over the others too",
    )  # fmt: skip
    how.add_argument(
        "--optimizer", choices=METHODS, default="muon", metavar="NAME",
        help=f"{', '.join(METHODS)}; default %(default)s",
    )  # fmt: skip
    how.add_argument("--ns-steps", type=int, default=5, metavar="K", help="default %(default)s")
    how.add_argument(
        "--stacked", action="append", metavar="PATTERN",
        help="leaves of a file of shapes whose leading dims count matrices; may be repeated",
    )  # fmt: skip
    how.add_argument(
        "--dtype", default="bfloat16", help="of parameters that name none; default %(default)s"
    )
    for name, text in (
        ("gather", "in which parameters are gathered; default their own"),
        ("reduce", "in which gradients are summed; default float32"),
    ):
        how.add_argument(f"--{name}-dtype", choices=CAST_DTYPES, metavar="DTYPE", help=text)
    how.add_argument(
        "--dealing", choices=("slots", "lpt", "auto"), default="slots", metavar="HOW",
        help="slots: equal on all devices; lpt: by work; auto: lpt where it saves; default "
        "%(default)s",
    )  # fmt: skip
    how.add_argument(
        "--hardware", choices=HARDWARE, default="h100", metavar="NAME",
        help=f"for the estimate of time: {', '.join(HARDWARE)}; default %(default)s",
    )  # fmt: skip
    how.add_argument(
        "--memory-budget", type=_size, metavar="SIZE",
        help="per device, without activations, e.g. 60GiB; default all of the hardware's",
    )  # fmt: skip
    out = plan.add_argument_group("output")
    out.add_argument("--json", metavar="FILE", help="write everything, exactly")
    out.add_argument("--picture", metavar="FILE", help="draw who owns what in the chosen plan")
    out.add_argument("--width", type=int, default=80, help="columns; default %(default)s")
    return parser, plan
