"""Bands of singular values after Newton-Schulz: the tables of ``docs/numerics.md``.

``python -m tests.linalg.bands`` writes them into the page; a test computes some cells again.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from matrixfsdp_jax.linalg.coefficients import newton_schulz_schedule
from matrixfsdp_jax.linalg.orthogonalize import orthogonalize

PAGE = Path(__file__).parents[2] / "docs" / "numerics.md"

# Schedules from the Frobenius norm, where a singular value goes through the polynomials alone.
SCALAR = [
    ("keller", 3),
    ("keller", 5),
    ("you", 5),
    ("polar_express", 5),
    ("polar_express", 8),
    ("keller_polished", 10),
    ("cubic", 5),
    ("cubic", 15),
]
LOWER = [0.1, 1e-2, 3e-3, 1e-3, 1e-4]
MATRIX = [
    ("keller", 5),
    ("you", 5),
    ("polar_express", 5),
    ("cans_schatten", 5),
    ("aol", 4),
    ("keller_polished", 10),
]
DTYPES = ["float32", "float16", "bfloat16"]
CONDITIONS = [1e1, 1e2, 1e3, 1e5]


def scalar_band(name: str, steps: int, lower: float) -> str:
    """Smallest and largest image of ``[lower, 1]``, in float64."""
    s = np.geomspace(lower, 1, 20_001)
    for a, b, c in newton_schulz_schedule(name, steps).rows:
        s = a * s + b * s**3 + c * s**5
    return f"{s.min():.3f} to {s.max():.3f}"


def matrix_band(name: str, steps: int, dtype: str, condition: float) -> str:
    """Smallest and largest singular value of a 64 x 96 result of the Gram form."""
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.standard_normal((k, 64)))[0] for k in (64, 96))
    x = (u * np.geomspace(1, 1 / condition, 64)) @ v.T
    out = orthogonalize(
        jnp.asarray(x, jnp.float32), steps=steps, coefficients=name, dtype=dtype, algorithm="gram"
    )
    s = np.linalg.svd(np.asarray(out, np.float64), compute_uv=False)
    return f"{s[-1]:.2f} to {s[0]:.2f}"


def scalar_table() -> str:
    head = ["schedule", "steps", *(f"from {x:g}" for x in LOWER)]
    rows = [[f"`{n}`", str(k), *(scalar_band(n, k, x) for x in LOWER)] for n, k in SCALAR]
    return _markdown(head, rows)


def matrix_table() -> str:
    head = ["schedule", "steps", "dtype", *(f"condition {c:g}" for c in CONDITIONS)]
    rows = [
        [f"`{n}`", str(k), d, *(matrix_band(n, k, d, c) for c in CONDITIONS)]
        for n, k in MATRIX
        for d in DTYPES
    ]
    return _markdown(head, rows)


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cells(page: str) -> dict[tuple[str, ...], list[str]]:
    """First columns of every table row of the page -> its bands."""
    found = {}
    for line in page.splitlines():
        parts = [part.strip() for part in line.strip("| ").split("|")]
        bands = [part for part in parts if re.fullmatch(r"-?[\d.]+ to [\d.]+", part)]
        if bands:
            found[tuple(p.strip("`") for p in parts[: len(parts) - len(bands)])] = bands
    return found


def main() -> None:
    page = PAGE.read_text()
    for name, table in (("scalar", scalar_table()), ("matrix", matrix_table())):
        start, end = f"<!-- {name} bands -->\n", f"<!-- end of {name} bands -->"
        before, rest = page.split(start)
        page = before + start + table + "\n" + end + rest.split(end)[1]
    PAGE.write_text(page)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
