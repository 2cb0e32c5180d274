"""Canonical to owner form and back: exact, never aliased, every device only its own part."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.owner.params import OwnerParams
from tests.models import TINY_RULES, make_mesh, tiny_params

NUM_DEVICES = (1, 2, 3, 4, 8)
MATRIX_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")
OTHER_DTYPES = (*MATRIX_DTYPES, "complex64", "int32", "uint8", "int8", "bool")


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Any bit pattern of a dtype: infinities, subnormals, -0.0 and NaN payloads come up."""
    dtype = jnp.dtype(dtype)
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    data = rng.integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8)
    return data.view(dtype).reshape(shape)


def assert_same_bits(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes()), path


def assert_placed(arrays: Any, shardings: Any) -> None:
    """Every array is sharded as said, and no device holds more than its part."""
    assert jax.tree.structure(arrays) == jax.tree.structure(shardings)
    for x, sharding in zip(jax.tree.leaves(arrays), jax.tree.leaves(shardings), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
        assert x.committed
        shards = x.addressable_shards
        assert [s.device for s in shards] == list(sharding.mesh.devices.flat)
        splits = sharding.num_devices if any(sharding.spec) else 1
        assert all(s.data.size * splits == x.size for s in shards)


def buffers(tree: Any) -> set[int]:
    return {
        shard.data.unsafe_buffer_pointer()
        for x in jax.tree.leaves(tree)
        for shard in x.addressable_shards
        if shard.data.size
    }


def add_one_donated(owned: OwnerParams) -> OwnerParams:
    """Overwrite the memory of owner params, as a donated step does."""
    step = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)
    new = jax.block_until_ready(step(owned))
    assert all(x.is_deleted() for x in jax.tree.leaves(owned))
    return new


# ---- any tree, any view, any bits --------------------------------------------------------------


@st.composite
def matrix_leaf(draw: Any) -> tuple[tuple[int, ...], str, mfsdp.MatrixView]:
    """Wide, tall, square, batched, with dims permuted and cut into unequal blocks."""
    rank = draw(st.integers(2, 4))
    shape = tuple(draw(st.sampled_from((1, 2, 3, 5))) for _ in range(rank))
    dims = tuple(draw(st.permutations(range(rank))))
    rows = draw(st.integers(1, rank - 1))
    cols = rows + draw(st.integers(1, rank - rows))
    side = draw(st.sampled_from(("rows", "cols")))
    view = mfsdp.MatrixView(dims[:rows], dims[rows:cols], dims[cols:], split_side=side)
    size = view.matrix_shape(shape)[1 if side == "rows" else 2]
    cuts = draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else set()
    ends = [0, *sorted(cuts), size]
    splits = tuple(np.diff(ends).tolist()) if cuts else ()
    return shape, draw(st.sampled_from(MATRIX_DTYPES)), dataclasses.replace(view, splits=splits)


@st.composite
def other_leaf(draw: Any) -> tuple[tuple[int, ...], str, str]:
    """Scalars, empty leaves, leaves that divide over the devices and leaves that do not."""
    shape = tuple(draw(st.lists(st.sampled_from((0, 1, 3, 4, 24)), max_size=3)))
    return shape, draw(st.sampled_from(OTHER_DTYPES)), draw(st.sampled_from(("rest", "frozen")))


WRAPPERS = (
    lambda x: x,
    lambda x: {"kernel": x, "none": None},
    lambda x: [optax.MaskedNode(), (x,)],
)
FORMS = (lambda x: x, jnp.asarray, lambda x: lambda: x)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    leaves=st.lists(st.one_of(matrix_leaf(), other_leaf()), min_size=1, max_size=6),
    wrapper=st.lists(st.sampled_from(WRAPPERS), min_size=6, max_size=6),
    form=st.lists(st.sampled_from(FORMS), min_size=6, max_size=6),
    n=st.sampled_from(NUM_DEVICES),
    explicit=st.booleans(),
    min_size=st.sampled_from((0, 30)),
    seed=st.integers(0, 2**32 - 1),
)
def test_shard_then_unshard_is_the_identity(
    leaves: Any, wrapper: Any, form: Any, n: int, explicit: bool, min_size: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = [random_bits(rng, shape, dtype) for shape, dtype, _ in leaves]
    wrap = [lambda x, f=f, i=i: {f"leaf{i}": f(x)} for i, f in enumerate(wrapper)]
    tree = [w(v) for w, v in zip(wrap, values, strict=False)]
    given_tree = [w(f(v)) for w, f, v in zip(wrap, form, values, strict=False)]
    layout = mfsdp.plan(
        tree,
        make_mesh(n, explicit),
        rules=lambda leaf: leaves[int(leaf.path.split("/")[0])][2],
        rest_shard_min_size=min_size,
    )
    owned = layout.shard(given_tree)
    assert_placed(owned, layout.shardings)
    assert_same_bits(layout.unshard(owned), tree)


def test_special_values_keep_their_bits() -> None:
    bits = {
        "float32": (0x80000000, 0x7F800001, 0xFFC12345, 0x00000001, 0xFF800000, 0x7FC00000),
        "bfloat16": (0x8000, 0x7F81, 0xFFC1, 0x0001, 0xFF80, 0x7FC0),
        "float16": (0x8000, 0x7C01, 0xFE01, 0x0001, 0xFC00, 0x7E00),
    }
    tree = {
        f"{dtype}_{kind}": np.array(patterns, f"uint{8 * jnp.dtype(dtype).itemsize}")
        .view(jnp.dtype(dtype))
        .reshape((3, 2) if kind == "matrix" else (6,))
        for dtype, patterns in bits.items()
        for kind in ("matrix", "rest")
    }
    layout = mfsdp.plan(tree, make_mesh(3))
    assert_same_bits(layout.unshard(layout.shard(tree)), tree)


# ---- what lies where ---------------------------------------------------------------------------


def reading_examples() -> tuple[dict[str, np.ndarray], list[Any], dict[str, np.ndarray]]:
    """A tree, its rules, and by name the matrices that it holds, cut out by hand."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    tree = {
        "conv": normal(3, 3, 2, 5),
        "query": normal(6, 2, 4),
        "output": normal(2, 4, 6),
        "qkv": normal(6, 6 + 2 + 4),
        "scan": normal(3, 4, 6),
        "experts": normal(2, 2, 6, 4),
        "tall": normal(8, 6),
        "square": normal(6, 6),
        "bias": normal(8),
    }
    rules = mfsdp.rules
    given_rules = [
        rules.conv("conv"),
        rules.attention_in("query"),
        rules.attention_out("output"),
        rules.fused("qkv", (6, 2, 4)),
        rules.stacked("scan"),
        rules.stacked("experts"),
    ]
    matrices = {
        "conv": tree["conv"].reshape(18, 5),
        "query": tree["query"].reshape(6, 8),
        "output": tree["output"].reshape(8, 6),
        "qkv:0": tree["qkv"][:, :6],
        "qkv:1": tree["qkv"][:, 6:8],
        "qkv:2": tree["qkv"][:, 8:],
        **{f"scan[{i}]": tree["scan"][i] for i in range(3)},
        **{f"experts[{i},{j}]": tree["experts"][i, j] for i in range(2) for j in range(2)},
        "tall": tree["tall"],
        "square": tree["square"],
    }
    return tree, given_rules, matrices


@pytest.mark.parametrize("n", [1, 3, 8])
def test_each_slot_holds_its_matrix_and_pads_are_zero(n: int) -> None:
    tree, rules, matrices = reading_examples()
    layout = mfsdp.plan(tree, make_mesh(n), rules=rules)
    owned = layout.shard(tree)
    found = {}
    for c in layout.plan.classes:
        stack = np.array(owned.stacks[c.key])
        for matrix, slot in zip(c.matrices, c.slots, strict=True):
            found[matrix.name] = stack[slot].copy()
            stack[slot] = 0
        assert not stack.any(), f"pads of {c.key}"
    assert found.keys() == matrices.keys()
    for name, matrix in matrices.items():
        rows, cols = matrix.shape
        np.testing.assert_array_equal(found[name], matrix.T if rows > cols else matrix, name)
    assert_same_bits(layout.unshard(owned), tree)


def test_owner_axis_over_two_mesh_axes_in_either_order() -> None:
    tree = tiny_params(1, 8)
    layouts = []
    for axes in (("a", "b"), ("b", "a")):
        mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
        layout = mfsdp.plan(tree, mesh, owner_axis=axes, rules=TINY_RULES(8))
        owned = layout.shard(tree)
        assert layout.num_devices == 8
        assert_placed(owned, layout.shardings)
        assert_same_bits(layout.unshard(owned), tree)
        layouts.append((layout, owned))
    (first, owned), (second, _) = layouts
    assert first.plan == second.plan
    assert first != second
    assert_same_bits(second.unshard(owned), tree)


def test_unshard_takes_owner_params_that_lie_otherwise() -> None:
    tree = tiny_params(1, 8)
    layout = mfsdp.plan(tree, make_mesh(4), rules=TINY_RULES(8))
    owned = layout.shard(tree)
    assert_same_bits(layout.unshard(jax.tree.map(np.asarray, owned)), tree)
    replicated = jax.device_put(owned, NamedSharding(layout.mesh, P()))
    assert_same_bits(layout.unshard(replicated), tree)


# ---- trees of users ----------------------------------------------------------------------------


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(2)])


class Boxed(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
        return nn.Dense(8, kernel_init=init, use_bias=False)(x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weight: Any
    bias: Any


USER_TREES = {
    "nnx_state": lambda: nnx.state(Net(nnx.Rngs(0)), nnx.Param),
    "nnx_state_with_statistics": lambda: nnx.state(Net(nnx.Rngs(0))),
    "nnx_module": lambda: Net(nnx.Rngs(0)),
    "linen_boxed": lambda: Boxed().init(jax.random.key(0), jnp.ones((2, 4))),
    "dataclass": lambda: {
        "a": Layer(np.ones((4, 6), np.float32), None),
        "b": Layer(np.ones((6, 4), np.float32), optax.MaskedNode()),
    },
    "one_array": lambda: np.ones((3, 5), np.float32),
}


@pytest.mark.parametrize("name", USER_TREES)
def test_trees_of_users_come_back_as_they_were(name: str) -> None:
    tree = USER_TREES[name]()
    layout = mfsdp.plan(tree, make_mesh(4))
    assert any(lp.route.route == "matrix" for lp in layout.plan.leaves)
    back = layout.unshard(layout.shard(tree))
    assert_same_bits(back, tree)
    assert layout == mfsdp.plan(tree, make_mesh(4))
    assert hash(layout) == hash(mfsdp.plan(tree, make_mesh(4)))


def test_a_mesh_that_the_user_has_set_does_not_disturb() -> None:
    tree = tiny_params(1, 8)
    layout = mfsdp.plan(tree, make_mesh(4), rules=TINY_RULES(8))
    with jax.set_mesh(layout.mesh):
        owned = layout.shard(tree)
        assert_placed(owned, layout.shardings)
        assert_same_bits(layout.unshard(owned), tree)
        assert jax.sharding.get_abstract_mesh() == layout.mesh.abstract_mesh


# ---- memory of its own -------------------------------------------------------------------------


def aligned(x: np.ndarray) -> np.ndarray:
    """A copy of ``x`` that a CPU device would take over as it is."""
    raw = np.empty(x.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out = raw[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    out[...] = x
    return out


@pytest.mark.parametrize("form", ["numpy", "jax", "already_sharded"])
@pytest.mark.parametrize("n", [1, 4])
def test_donating_owner_params_leaves_the_callers_arrays_alone(form: str, n: int) -> None:
    want = {
        "one_matrix": np.arange(64, dtype=np.float32).reshape(8, 8),
        "sharded_rest": np.arange(64, dtype=np.float32),
        "replicated_rest": np.arange(5, dtype=np.float32),
        "frozen": np.arange(64, dtype=np.float32),
        "integers": np.arange(64, dtype=np.int32),
    }
    layout = mfsdp.plan(want, make_mesh(n), rules=[mfsdp.rules.frozen("frozen")])
    if form == "numpy":
        given_tree = {k: aligned(v) for k, v in want.items()}
    elif form == "jax":
        given_tree = {k: jnp.array(v) for k, v in want.items()}
    else:
        given_tree = layout.unshard(layout.shard(want))
        for k, part in (("sharded_rest", "rest"), ("frozen", "frozen")):
            target = getattr(layout.shardings, part)[k]
            assert given_tree[k].sharding.is_equivalent_to(target, 1)
    owned = layout.shard(given_tree)
    if form != "numpy":
        assert not buffers(owned) & buffers(given_tree)
    new = add_one_donated(owned)
    assert_same_bits(given_tree, want)
    if form == "numpy":
        for x in given_tree.values():
            x[...] = 0
        assert_same_bits(layout.unshard(new), {k: v + 1 for k, v in want.items()})


@pytest.mark.parametrize("n", [1, 4])
def test_unshard_copies_too(n: int) -> None:
    tree = tiny_params(1, 8) | {"integers": np.arange(64, dtype=np.int32)}
    layout = mfsdp.plan(tree, make_mesh(n), rules=TINY_RULES(8))
    owned = layout.shard(tree)
    back = layout.unshard(owned)
    assert not buffers(owned) & buffers(back)
    add_one_donated(owned)
    assert_same_bits(back, tree)


def test_functions_are_called_once_each() -> None:
    tree, rules, _ = reading_examples()
    calls: list[str] = []

    def make(name: str) -> Any:
        return lambda: calls.append(name) or tree[name]

    layout = mfsdp.plan(jax.eval_shape(lambda: tree), make_mesh(4), rules=rules)
    owned = layout.shard({name: make(name) for name in tree})
    assert sorted(calls) == sorted(tree)
    assert_same_bits(layout.unshard(owned), tree)


def test_shard_takes_arrays_that_lie_on_other_devices() -> None:
    tree = {"w": np.arange(32, dtype=np.float32).reshape(4, 8), "b": np.arange(8.0, dtype="f4")}
    layout = mfsdp.plan(tree, make_mesh(4))
    other = make_mesh(8, explicit=False)
    moved = {
        "w": jax.device_put(tree["w"], NamedSharding(other, P(None, "fsdp"))),
        "b": jax.device_put(tree["b"], jax.devices()[7]),
    }
    assert_same_bits(layout.unshard(layout.shard(moved)), tree)


# ---- optimizer state ---------------------------------------------------------------------------

SMALL = {
    "wide": np.ones((4, 8), np.float32),
    "tall": np.ones((8, 4), np.float32),
    "sharded": np.ones(16, np.float32),
    "replicated": np.ones(3, np.float32),
    "frozen": np.ones((8, 8), np.float32),
}


def small_layout(n: int = 4, explicit: bool = True) -> mfsdp.OwnerLayout:
    return mfsdp.plan(SMALL, make_mesh(n, explicit), rules=[mfsdp.rules.frozen("frozen")])


def label(owned: OwnerParams) -> OwnerParams:
    stacks, rest = (jax.tree.map(lambda _, n=n: n, getattr(owned, n)) for n in ("stacks", "rest"))
    return owned._replace(stacks=stacks, rest=rest, frozen={})


OPTIMIZERS: dict[str, Any] = {
    "muon": lambda layout: mfsdp.muon(0.1, layout=layout),
    "adam": lambda layout: optax.adam(1e-3, mu_dtype="bfloat16"),
    "clip_muon": lambda layout: optax.chain(
        mfsdp.clip_by_global_norm(1.0, layout=layout), mfsdp.muon(0.1, layout=layout)
    ),
    "multi_steps": lambda layout: optax.MultiSteps(mfsdp.muon(0.1, layout=layout), 2),
    "ema": lambda layout: optax.chain(mfsdp.muon(0.1, layout=layout), optax.ema(0.9)),
    "keeps_params": lambda layout: optax.contrib.schedule_free_adamw(1e-3),
    "factored": lambda layout: optax.adafactor(1e-3, min_dim_size_to_factor=2),
    "partition": lambda layout: optax.partition(
        {"stacks": optax.adam(1e-3), "rest": optax.sgd(0.1, momentum=0.9)}, label
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_born_sharded_in_memory_of_its_own(name: str) -> None:
    layout = small_layout()
    tx = OPTIMIZERS[name](layout)
    owned = layout.shard(SMALL)
    state = layout.init(tx, owned)
    assert_placed(state, layout.state_shardings(tx))
    assert not buffers(state) & buffers(owned)
    assert len(buffers(state)) == len(
        [s for x in jax.tree.leaves(state) for s in x.addressable_shards if s.data.size]
    ), "two leaves of the state share a buffer: donating it would fail"
    for keys, x in jax.tree_util.tree_leaves_with_path(state):
        text = jax.tree_util.keystr(keys)
        assert "frozen'" not in text
        if "4x8" in text and x.ndim >= 2:
            assert all(s.data.shape[0] == 1 for s in x.addressable_shards), text
        if x.shape == SMALL["sharded"].shape:
            assert all(s.data.size == 4 for s in x.addressable_shards), text
    specs = layout.state_specs(tx)
    assert jax.tree.map(lambda s: s.spec, layout.state_shardings(tx)) == specs


@pytest.mark.parametrize("explicit", [True, False])
def test_init_works_eagerly_under_jit_and_by_shape(explicit: bool) -> None:
    layout = small_layout(explicit=explicit)
    tx = OPTIMIZERS["clip_muon"](layout)
    owned = layout.shard(SMALL)
    eager = layout.init(tx, owned)
    jitted = jax.jit(lambda o: layout.init(tx, o))(owned)
    assert_same_bits(jitted, eager)
    assert_placed(jitted, layout.state_shardings(tx))
    shapes = jax.eval_shape(lambda o: layout.init(tx, o), owned)
    assert jax.tree.map(lambda s: (s.shape, s.dtype), shapes) == jax.tree.map(
        lambda s: (s.shape, s.dtype), eager
    )
    assert jax.tree.structure(layout.state_shardings(tx)) == jax.tree.structure(eager)
    snapshot = optax.GradientTransformation(lambda params: {"start": params}, tx.update)
    for init in (layout.init, jax.jit(layout.init, static_argnums=0)):
        assert not buffers(init(snapshot, owned)) & buffers(owned)


# ---- what is refused ---------------------------------------------------------------------------


def refuses(error: type[Exception], *words: str) -> Any:
    """The message holds all these words, in this order."""
    return pytest.raises(error, match="(?s)" + ".*".join(words))


def changed(**leaves: Any) -> dict[str, Any]:
    return {k: v for k, v in (SMALL | leaves).items() if v is not None}


@pytest.mark.parametrize(
    ("tree", "error", "words"),
    [
        (changed(wide=None), ValueError, ("missing.*'wide'", "plan again")),
        (changed(more=np.ones(2)), ValueError, ("not planned.*'more'", "plan again")),
        (changed(wide=np.ones((8, 4), "f4")), ValueError, ("'wide'", r"\[8, 4\]", r"\[4, 8\]")),
        (changed(tall=np.ones((8, 4), "f2")), ValueError, ("'tall'", "float16", "float32")),
        (changed(wide=lambda: np.ones((4, 9), "f4")), ValueError, ("'wide'", r"\[4, 9\]")),
        (changed(sharded=lambda: np.ones(16)), ValueError, ("'sharded'", "float64", "float32")),
        (changed(replicated=1.0), ValueError, ("'replicated'", r"float64\[\]")),
        (jax.eval_shape(lambda: SMALL), TypeError, ("'frozen'|'replicated'", "no values")),
    ],
)
def test_shard_refuses_another_tree(tree: Any, error: Any, words: Any) -> None:
    with refuses(error, *words):
        small_layout().shard(tree)


def test_shard_refuses_traced_values() -> None:
    with refuses(TypeError, "leaf '", "no values", "outside jit"):
        jax.jit(small_layout().shard)(SMALL)


def test_owner_params_of_another_layout_are_refused() -> None:
    layout = small_layout()
    owned = layout.shard(SMALL)
    tx = mfsdp.muon(0.1, layout=layout)
    other_tree = mfsdp.plan({"w": np.ones((3, 5), np.float32)}, make_mesh(4))
    cases = [
        (SMALL, TypeError, ("got dict", "layout.shard")),
        (None, TypeError, ("got NoneType",)),
        (small_layout(2).shard(SMALL), ValueError, ("4x8", r"\[2, 1", r"\[4, 1")),
        (small_layout(explicit=False).shard(SMALL), ValueError, ("Auto", "Explicit", "unshard")),
        (other_tree.shard({"w": np.ones((3, 5), "f4")}), ValueError, ("3x5", "4x8")),
        (owned._replace(rest={}), ValueError, ("0 rest", "use the layout that sharded")),
        (jax.tree.map(lambda x: x.astype("bfloat16"), owned), ValueError, ("4x8", "bfloat16")),
        (
            owned._replace(rest=owned.rest | {"sharded": owned.rest["sharded"].astype(jnp.int32)}),
            ValueError,
            ("rest", "sharded", "int32", "float32"),
        ),
        (
            owned._replace(frozen={"frozen": jnp.ones((8, 4))}),
            ValueError,
            ("frozen", r"\[8, 4\]", r"\[8, 8\]"),
        ),
    ]
    for wrong, error, words in cases:
        with refuses(error, *words):
            layout.unshard(wrong)
        with refuses(error, *words):
            layout.init(tx, wrong)


def test_plan_refuses_what_it_cannot_lay_out() -> None:
    mesh, tree = make_mesh(4), {"w": np.ones((3, 4), np.float32)}
    two_axes = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    cases: list[tuple[Any, Any, type[Exception], tuple[str, ...]]] = [
        (tree, {"owner_axis": "data"}, ValueError, ("'data'", "fsdp", "4")),
        (tree, {"owner_axis": ()}, ValueError, ("owner_axis", "fsdp")),
        (tree, {"owner_axis": ("fsdp", "fsdp")}, ValueError, ("owner_axis", "fsdp")),
        (tree, {"mesh": two_axes}, ValueError, ("data", "2", r"owner_axis=\('data', 'fsdp'\)")),
        (tree, {"mesh": None}, TypeError, ("NoneType", "make_mesh")),
        (tree, {"mesh": AbstractMesh((4,), ("fsdp",))}, TypeError, ("AbstractMesh", "make_mesh")),
        (tree, {"gather_dtype": "bfloat17"}, ValueError, ("gather_dtype", "bfloat17", "bfloat16")),
        (tree, {"gather_dtype": "int8"}, ValueError, ("gather_dtype", "int8", "bfloat16")),
        (tree, {"reduce_dtype": "floaty"}, ValueError, ("reduce_dtype", "floaty")),
        (tree, {"reduce_dtype": np.int32}, ValueError, ("reduce_dtype", "int32")),
        ({}, {}, ValueError, ("no leaf",)),
        ({"w": np.ones((3, 4))}, {}, ValueError, ("'w'", "float64", "enable_x64")),
        ({"i": np.ones(3, np.int64)}, {}, ValueError, ("'i'", "int64", "enable_x64")),
        (tree | {"k": jax.random.key(0)}, {}, ValueError, ("'k'", "random key", "nnx.Param")),
        (
            {"a/b": np.ones(3, "f4"), "a": {"b": np.zeros(3, "f4")}},
            {},
            ValueError,
            ("two leaves", "'a/b'", "rename"),
        ),
    ]
    for params, options, error, words in cases:
        with refuses(error, *words):
            mfsdp.plan(params, **({"mesh": mesh} | options))


def test_float64_needs_x64_and_then_is_exact() -> None:
    rng = np.random.default_rng(0)
    tree = {"w": rng.standard_normal((3, 4)), "b": rng.standard_normal(8), "i": np.arange(8)}
    with jax.enable_x64(True):
        layout = mfsdp.plan(tree, make_mesh(4), reduce_dtype="float64")
        owned = layout.shard(tree)
        assert_same_bits(layout.unshard(owned), tree)
    with refuses(ValueError, "'b'|'i'|'w'", "64", "enable_x64"):
        layout.shard(tree)
