import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from matrixfsdp_jax.layout.blocks import block_groups, merge_dims, pieces

inf = math.inf


@pytest.mark.parametrize(
    ("shape", "max_dim", "target", "merged"),
    [
        # seen in the state of facebookresearch/optimizers
        ((6, 4), 1024, 1, (24,)),
        ((6, 4), 12, 2, (6, 4)),
        ((3, 4, 5), 12, 1, (12, 5)),
        ((3, 4, 5), 12, inf, (3, 4, 5)),
        ((4, 3, 3, 3), 12, 1, (12, 9)),
        ((1, 6, 1, 4), 12, 3, (6, 4)),
        ((1, 1), 12, 3, (1,)),
        ((), 12, 2, (1,)),
        # by the rule: from the last dim, while there are more dims than wanted
        ((3, 3, 4, 8), 1024, 2, (3, 96)),
        ((8, 4, 3, 3), 1024, 2, (8, 36)),
        ((2, 3, 1024), 1024, 1, (6, 1024)),
        ((2, 3, 5), 15, 1, (2, 15)),
        ((2, 3, 5), 14, 1, (6, 5)),
        ((2, 3, 5), inf, 1, (30,)),
        ((2, 3, 5), inf, 2, (2, 15)),
        ((2, 1, 5), inf, 2, (2, 5)),
        ((1, 5, 1), 1024, inf, (1, 5, 1)),
        ((), 1024, inf, ()),
        ((4, 0, 3), 1024, 2, (0,)),
        ((4, 0, 3), 1024, inf, (0,)),
        ((2000, 3), 1024, 1, (2000, 3)),
    ],
)
def test_merged_dims(shape, max_dim, target, merged):
    assert merge_dims(shape, max_dim, target) == merged


@given(
    st.lists(st.integers(1, 9), max_size=5).map(tuple),
    st.sampled_from([1, 2, 7, 30, inf]),
    st.sampled_from([1, 2, 3, inf]),
)
def test_merging_joins_neighbours_within_the_limits(shape, max_dim, target):
    merged = merge_dims(shape, max_dim, target)
    assert math.prod(merged) == math.prod(shape)
    assert merge_dims(merged, max_dim, target) == merged
    if target == inf:
        return
    big = [d for d in shape if d > 1]
    assert len(merged) >= min(target, len(big))
    ends = set(itertools.accumulate(big, lambda a, b: a * b)) | {1}
    assert set(itertools.accumulate(merged, lambda a, b: a * b)) <= ends, "only neighbours join"
    for d in merged:
        assert d <= max_dim or d in big
    if len(merged) > target:
        assert all(a * b > max_dim for a, b in itertools.pairwise(merged))


@pytest.mark.parametrize(
    ("dim", "max_dim", "want"),
    [
        (10, 4, [(4, 2, 0), (2, 1, 8)]),
        (8, 4, [(4, 2, 0)]),
        (10, inf, [(10, 1, 0)]),
        (3, 1, [(1, 3, 0)]),
        (0, 4, []),
    ],
)
def test_pieces_of_a_dim(dim, max_dim, want):
    assert pieces(dim, max_dim) == want


@given(st.lists(st.integers(1, 9), max_size=4).map(tuple), st.sampled_from([1, 2, 4, inf]))
def test_kinds_of_blocks_are_those_of_cutting_every_dim(merged, max_dim):
    def cut(d):
        step = d if max_dim == inf else max_dim
        return [min(step, d - start) for start in range(0, d, step)]

    want = Counter(itertools.product(*map(cut, merged)))
    groups = block_groups(merged, max_dim)
    assert {group.shape: group.num_blocks for group in groups} == want
