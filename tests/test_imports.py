"""The layers of the package: who imports whom, and which file may name a collective."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import matrixfsdp_jax

ROOT = Path(matrixfsdp_jax.__file__).parent
PACKAGE = "matrixfsdp_jax"
MODULES = sorted(str(p.relative_to(ROOT).with_suffix("")) for p in ROOT.rglob("*.py"))

# What a layer may import of the package; a layer may always import itself.
ALLOWED = {
    "linalg": (),
    "layout": (),
    "transforms": ("layout", "linalg"),
    "owner": ("layout",),
    "hlo": (),
    "audit": ("hlo",),
    "optimizers": ("layout", "owner", "transforms"),
    "attention": ("layout", "owner", "transforms"),
    "guards": ("owner", "transforms"),
    "interop": ("layout", "owner", "transforms"),
    "presets": ("optimizers",),
    "cli": ("layout",),
    "__main__": ("cli",),
    "assembly": ("layout", "owner", "transforms"),
    "second_order": ("assembly", "layout", "owner", "transforms"),
    "torch_compat": ("assembly", "layout", "linalg", "owner", "second_order", "transforms"),
    "training": ("layout", "owner", "transforms"),
    "__init__": (
        "attention",
        "audit",
        "guards",
        "interop",
        "layout",
        "optimizers",
        "owner",
        "presets",
        "training",
        "transforms",
        "linalg",
        "second_order",
    ),
}

WITHOUT_JAX = (
    "layout/blocks",
    "layout/phases",
    "layout/spec",
    "layout/planner",
    "layout/costs",
    "layout/report",
    "layout/picture",
    "layout/hardware",
    "layout/options",
    "layout/advice",
    "layout/advice_report",
)

COLLECTIVES = {
    "all_gather",
    "all_gather_invariant",
    "all_gather_reduced",
    "all_to_all",
    "axis_index",
    "axis_size",
    "pbroadcast",
    "pcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "preduced",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pswapaxes",
    "pvary",
    "ragged_all_to_all",
    "unreduced_psum",
    "unreduced_psum_scatter",
}


def tree_of(module: str) -> ast.Module:
    return ast.parse((ROOT / f"{module}.py").read_text())


def imports(tree: ast.AST) -> Iterator[str]:
    """Full name of everything imported, at any depth, also for type checking only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer(module: str) -> str:
    return module.replace("/", ".").split(".")[0]


def violations(module: str, tree: ast.AST) -> list[str]:
    """Imports of the package that the layer of ``module`` may not have."""
    own = layer(module)
    inside = [name.split(".", 1)[1] for name in imports(tree) if name.startswith(f"{PACKAGE}.")]
    return [name for name in inside if layer(name) not in (own, *ALLOWED[own])]


def collectives_named(tree: ast.AST) -> set[str]:
    """Collectives used as an attribute or imported by name; words of docstrings do not count."""
    named = {name.rsplit(".", 1)[-1] for name in imports(tree)}
    named |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return named & COLLECTIVES


def test_every_module_has_a_layer() -> None:
    assert MODULES
    assert {layer(m) for m in MODULES} == set(ALLOWED)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downwards(module: str) -> None:
    assert not violations(module, tree_of(module))


@pytest.mark.parametrize("module", MODULES)
def test_only_owner_collectives_names_a_collective(module: str) -> None:
    named = collectives_named(tree_of(module))
    if module == "owner/collectives":
        assert {"all_gather", "psum_scatter", "psum"} <= named
    else:
        assert not named


@pytest.mark.parametrize("module", WITHOUT_JAX)
def test_plans_are_plain_python(module: str) -> None:
    """No jax by name, here or in what is imported of the package.

    ``layout/leaves`` is left out: it asks jax for the structure of trees, and for no more.
    """
    seen, todo = {"layout/leaves"}, [module]
    while todo:
        current = todo.pop()
        seen.add(current)
        for name in imports(tree_of(current)):
            assert name.split(".")[0] not in ("jax", "jaxlib", "optax", "flax", "chex"), current
            parts = name.split(".")
            if parts[0] == PACKAGE:
                found = ["/".join(parts[1:n]) for n in range(2, len(parts) + 1)]
                todo += [m for m in found if m in MODULES and m not in seen]


def test_these_checks_can_fail() -> None:
    upwards = ast.parse("def f():\n    from matrixfsdp_jax.owner import params\n")
    assert violations("linalg/roots", upwards) == ["owner.params"]
    assert violations("transforms/muon", upwards) == ["owner.params"]
    assert not violations("optimizers", upwards)
    assert collectives_named(ast.parse("jax.lax.psum(x, 'i')")) == {"psum"}
    assert collectives_named(ast.parse("from jax.lax import all_to_all as a")) == {"all_to_all"}
    assert not collectives_named(ast.parse("'psum of x'; psum_of_x = 1"))


def test_importing_the_package_starts_no_backend() -> None:
    """Device count and x64 can still be chosen after the import."""
    code = (
        f"import jax, {PACKAGE}\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "assert jax.device_count() == 3\n"
    )
    env = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent, env=env)
