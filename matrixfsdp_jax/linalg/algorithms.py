"""The forms of the Newton-Schulz iteration: what each costs, where it restarts, which one to take.

Plain Python, so that a planner can ask before anything runs.

Shape legend: ``m <= n`` rows and columns of a matrix, ``K`` steps, ``S`` segments of the Gram form.
"""

import itertools
from typing import Literal, get_args

Algorithm = Literal["standard", "standard_symmetric", "gram", "gram_symmetric"]
Platform = Literal["cpu", "gpu", "tpu"]

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)

# Steps from one restart of the Gram form to the next: up to the first restart, and between later
# ones. A rounding error of size u in a zero eigenvalue of the Gram matrix grows by the square of
# the slope at 0 (12 for "keller") with each update of that matrix, and is harmless while small.
_SEGMENTS = {"bfloat16": (2, 2), "float16": (2, 3), "float32": (5, 5), "float64": (10, 10)}
_REAL = {"complex64": "float32", "complex128": "float64"}

# Rows of a block of a symmetric product, at least. Smaller ones cost more than the saving: measured
# on CPU, taken from published rates of triangular kernels for the others.
_MIN_BLOCK: dict[Platform, int] = {"cpu": 512, "gpu": 1024, "tpu": 1024}
_MAX_BLOCKS = 8

# Rows from which a symmetric product is taken: at 1024 the Gram form is faster without (by 5 to 15%
# on CPU), at 2048 slower (by 13%).
MIN_SYMMETRIC_ROWS = 2048

# Below this the products are too small for their number of operations to decide: measured on CPU,
# the width of a matrix unit for the others.
_MIN_ROWS: dict[Platform, int] = {"cpu": 64, "gpu": 128, "tpu": 128}


def segment_lengths(steps: int, dtype: str) -> tuple[int, ...]:
    """Return how many of the ``steps`` the Gram form takes between two restarts.

    Args:
      steps: number of Newton-Schulz steps, at least 1.
      dtype: name of the dtype of the iteration.

    Examples:
      >>> segment_lengths(5, "bfloat16"), segment_lengths(5, "float16")
      ((2, 2, 1), (2, 3))
      >>> segment_lengths(5, "float32"), segment_lengths(10, "float32")
      ((5,), (5, 5))
    """
    first, later = _SEGMENTS[_REAL.get(dtype, dtype)]
    lengths = [min(first, steps)]
    while (left := steps - sum(lengths)) > 0:
        lengths.append(min(later, left))
    return tuple(lengths)


def block_edges(m: int, platform: Platform) -> tuple[int, ...]:
    """Return ``0 = e_0 < e_1 < ... < m``, the rows where the blocks of a symmetric product end.

    Between 2 and 8 blocks of equal size (the last may be smaller), as long as they have 512 rows
    on CPU and 1024 on an accelerator; a single row is one block.
    """
    count = min(max(2, min(_MAX_BLOCKS, m // _MIN_BLOCK[platform])), m)
    size = -(-m // count)
    return (*range(0, m, size), m)


def newton_schulz_flops(
    m: int,
    n: int,
    steps: int,
    algorithm: Algorithm = "standard",
    *,
    dtype: str = "float32",
    platform: Platform = "cpu",
    cubic: bool = False,
) -> int:
    """Return the FLOPs of the products of ``steps`` Newton-Schulz steps on one ``[m, n]`` matrix.

    A multiply and an add count as two; complex products are four real ones and are not counted
    apart. With ``t`` the share of a symmetric product that is computed (1 for general products,
    about ``(g + 1) / (2 g)`` for ``g`` blocks) and ``S`` the number of segments::

        standard  K (2 m^2 n (1 + t) + 2 m^3 t)
        gram      S 2 m^2 n (1 + t) + (4 K - 3 S) 2 m^3 t

    A cubic schedule has one product ``[m, m] x [m, m]`` less per step.

    Args:
      m: rows of the matrix; swapped with ``n`` where it is larger, as the iteration does.
      n: columns.
      steps: number of steps.
      algorithm: form of the iteration.
      dtype: of the iteration; it fixes the restarts of the Gram form.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``; it fixes the blocks of the symmetric forms.
      cubic: whether no row of the schedule has a quintic term.
    """
    m, n = min(m, n), max(m, n)
    computed = m * m
    if algorithm.endswith("symmetric"):
        edges = block_edges(m, platform)
        computed = sum((e - s) * e for s, e in itertools.pairwise(edges))
    if algorithm.startswith("gram"):
        segments = len(segment_lengths(steps, dtype))
        passes, squares = segments, 4 * steps - 3 * segments - steps * cubic
    else:
        passes, squares = steps, steps * (not cubic)
    return passes * 2 * n * (m * m + computed) + squares * 2 * m * computed


def choose_algorithm(
    m: int, n: int, steps: int, *, dtype: str, platform: Platform, cubic: bool = False
) -> Algorithm:
    """Return the form that ``algorithm="auto"`` takes: the one of fewest FLOPs, with two limits.

    Matrices of fewer than 64 rows on CPU, 128 on an accelerator, take the standard form, and
    symmetric products are taken from 2048 rows on. Measured on CPU; for accelerators it is from the
    formulas alone.

    Args:
      m: rows of the matrix; swapped with ``n`` where it is larger.
      n: columns.
      steps: number of steps.
      dtype: name of the dtype of the iteration.
      platform: where it runs.
      cubic: whether no row of the schedule has a quintic term.

    Examples:
      >>> choose_algorithm(1024, 4096, 5, dtype="float16", platform="gpu")
      'gram'
      >>> choose_algorithm(4096, 4096, 5, dtype="float16", platform="gpu")
      'standard_symmetric'
    """
    m, n = min(m, n), max(m, n)
    if m < _MIN_ROWS[platform]:
        return "standard"
    candidates = [a for a in ALGORITHMS if m >= MIN_SYMMETRIC_ROWS or not a.endswith("symmetric")]
    return min(
        candidates,
        key=lambda a: newton_schulz_flops(
            m, n, steps, a, dtype=dtype, platform=platform, cubic=cubic
        ),
    )
