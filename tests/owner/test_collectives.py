"""Gathering whole parameters and reducing gradients to their owners."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.owner import collectives
from matrixfsdp_jax.owner.params import OwnerParams
from tests.models import make_mesh

ON_MESHES = pytest.mark.parametrize(
    ("n", "explicit"), [(1, True), (2, False), (3, True), (4, False), (8, True)]
)


def inside(
    layout: mfsdp.OwnerLayout, fn: Callable[..., Any], out_specs: Any, *in_specs: Any
) -> Any:
    """``fn(owned, *args)`` under ``jax.shard_map`` and ``jit``."""
    return jax.jit(
        jax.shard_map(fn, mesh=layout.mesh, in_specs=(layout.specs, *in_specs), out_specs=out_specs)
    )


def refuses(error: type[Exception], *words: str) -> Any:
    return pytest.raises(error, match="(?s)" + ".*".join(words))


# ---- gather ------------------------------------------------------------------------------------


def every_kind_of_leaf() -> tuple[dict[str, np.ndarray], list[Any]]:
    rng = np.random.default_rng(0)

    def bits(dtype: str, *shape: int) -> np.ndarray:
        dtype = jnp.dtype(dtype)
        data = rng.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
        return data.view(dtype).reshape(shape)

    tree = {
        "wide": bits("float32", 3, 5),
        "tall": bits("float32", 5, 3),
        "same_class": bits("float32", 3, 5),
        "half": bits("bfloat16", 4, 4),
        "qkv": bits("float16", 4, 7),
        "conv": bits("float32", 2, 2, 3, 4),
        "experts": bits("float32", 3, 4, 6),
        "output": bits("float32", 2, 3, 4),
        "vector": bits("float32", 24),
        "second_dim": bits("bfloat16", 5, 24),
        "odd_bias": bits("float32", 5),
        "scalar": bits("float32"),
        "base": bits("bfloat16", 24, 5),
        "integers": bits("int32", 24),
        "mask": rng.random(24) < 0.5,
        "complex": bits("complex64", 24),
        "empty": bits("float32", 0, 4),
    }
    rules = mfsdp.rules
    given = [
        rules.fused("qkv", (4, 1, 2)),
        rules.conv("conv"),
        rules.stacked("experts"),
        rules.attention_out("output"),
        rules.rest("second_dim"),
        rules.frozen("base"),
    ]
    return tree, given


def gathered_everywhere(layout: mfsdp.OwnerLayout, owned: OwnerParams, dtype: Any = None) -> Any:
    """What each device gathers, stacked along a new dim 0."""

    def fn(owned: OwnerParams) -> Any:
        return jax.tree.map(lambda x: x[None], layout.gather(owned, dtype=dtype))

    return inside(layout, fn, P(layout.axis_entry))(owned)


def assert_each_is(got: Any, want: dict[str, np.ndarray], n: int) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        parts = np.asarray(got[name])
        assert (parts.dtype, parts.shape) == (value.dtype, (n, *value.shape)), name
        assert all(part.tobytes() == value.tobytes() for part in parts), name


@ON_MESHES
def test_every_device_gathers_the_canonical_params_bit_for_bit(n: int, explicit: bool) -> None:
    tree, rules = every_kind_of_leaf()
    layout = mfsdp.plan(tree, make_mesh(n, explicit), rules=rules)
    assert_each_is(gathered_everywhere(layout, layout.shard(tree)), tree, n)


@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a")])
def test_gather_over_two_mesh_axes_in_either_order(axes: tuple[str, str]) -> None:
    tree = {"w": np.arange(15, dtype=np.float32).reshape(3, 5)}
    tree |= {f"w{i}": i + tree["w"] for i in range(9)} | {"v": np.arange(16, dtype=np.float32)}
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    layout = mfsdp.plan(tree, mesh, owner_axis=axes)
    assert_each_is(gathered_everywhere(layout, layout.shard(tree)), tree, 8)


def test_dtype_casts_floats_alone() -> None:
    tree, rules = every_kind_of_leaf()
    floats = [k for k, v in tree.items() if jnp.issubdtype(v.dtype, jnp.floating)]
    for k in floats:  # no NaN: what a cast makes of its payload is the platform's choice
        third = np.arange(tree[k].size).reshape(tree[k].shape) / 3
        tree[k] = third.astype(tree[k].dtype)
    want = tree | {k: tree[k].astype(jnp.bfloat16) for k in floats}
    layout = mfsdp.plan(tree, make_mesh(4), rules=rules)
    assert_each_is(gathered_everywhere(layout, layout.shard(tree), jnp.bfloat16), want, 4)
    planned = mfsdp.plan(tree, make_mesh(4), rules=rules, gather_dtype="bfloat16")
    owned = planned.shard(tree)
    assert_each_is(gathered_everywhere(planned, owned), want, 4)


# ---- what travels in which dtype ---------------------------------------------------------------

WIRE_TREE = {
    "matrix": np.ones((4, 6), np.float32),
    "sharded": np.ones(16, np.float32),
    "replicated": np.ones(3, np.float32),
    "half": np.ones((4, 8), jnp.bfloat16),
}


def total(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    scale = jnp.mean(batch)
    return sum(jnp.sum(v * scale.astype(v.dtype)).astype(jnp.float32) for v in params.values())


def operands(text: str, op: str) -> list[str]:
    """Types of the operands of each such operation in StableHLO text, as ``"16xbf16"``."""
    found = re.findall(rf'"stablehlo\.{op}"\(.*? : \((.*?)\) ->', text, re.DOTALL)
    return sorted(t for types in found for t in re.findall(r"tensor<([^>]*)>", types))


def test_parameters_travel_in_gather_dtype_and_gradients_in_reduce_dtype() -> None:
    layout = mfsdp.plan(WIRE_TREE, make_mesh(4), gather_dtype="bfloat16")
    owned, batch = layout.shard(WIRE_TREE), np.ones(4, np.float32)
    text = jax.jit(layout.value_and_grad(total)).lower(owned, batch).as_text()
    assert operands(text, "all_gather") == ["1x4x6xbf16", "1x4x8xbf16", "4xbf16"]
    assert operands(text, "reduce_scatter") == ["16xf32", "4x4x6xf32", "4x4x8xf32"]
    assert operands(text, "all_reduce") == ["3xf32", "f32"], "replicated rest, and the loss"
    assert not operands(text, "all_to_all")
    assert not operands(text, "collective_permute")


def test_reduce_dtype_can_be_chosen() -> None:
    layout = mfsdp.plan(WIRE_TREE, make_mesh(4), reduce_dtype=jnp.bfloat16)
    owned, batch = layout.shard(WIRE_TREE), np.ones(4, np.float32)
    text = jax.jit(layout.value_and_grad(total)).lower(owned, batch).as_text()
    assert operands(text, "all_gather") == ["1x4x6xf32", "1x4x8xbf16", "4xf32"]
    assert operands(text, "reduce_scatter") == ["16xbf16", "4x4x6xbf16", "4x4x8xbf16"]


def test_bf16_cotangents_are_summed_exactly() -> None:
    """32 + 7/8 needs 9 bits: a bfloat16 sum of 32 and seven 1/8 stays at 32."""
    tree = {k: np.ones_like(v) for k, v in WIRE_TREE.items() if k != "half"}
    layout = mfsdp.plan(tree, make_mesh(8), gather_dtype="bfloat16")
    batch = np.array([256, *[1] * 7], np.float32)
    _, grads = jax.jit(layout.value_and_grad(total))(layout.shard(tree), batch)
    for name, grad in layout.unshard(grads).items():
        assert grad.dtype == jnp.float32
        np.testing.assert_array_equal(grad, np.full_like(tree[name], 32.875), name)


# ---- gradients ---------------------------------------------------------------------------------


def net_params() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    return {
        "embedding": normal(24, 6) / 2,  # rest, sharded wherever N divides 24 or 6
        "wide": normal(6, 8) / 3,
        "tall": normal(8, 6) / 3,
        "fused": normal(6, 7) / 3,
        "bias": normal(8) / 3,
        "shift": normal(5) / 3,  # rest, replicated on more than one device
        "frozen": normal(6, 6) / 3,
        "offsets": np.arange(24, dtype=np.int32),
    }


NET_RULES = [mfsdp.rules.fused("fused", (2, 3, 2)), mfsdp.rules.frozen("frozen")]


def net_errors(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """Squared error of each example."""
    tokens = (batch["x"] + jnp.asarray(params["offsets"])[batch["x"]]) % 24
    x = jnp.asarray(params["embedding"])[tokens]
    x = x + jnp.tanh(x @ params["wide"] + params["bias"][None]) @ params["tall"]
    x = jnp.tanh(x @ params["frozen"]) @ params["fused"]
    return jnp.sum((x[:, :5] + params["shift"][None] - batch["y"]) ** 2, 1) + jnp.sum(x**2, 1)


def mean_loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean(net_errors(params, batch))


def weighted_loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> Any:
    return jnp.sum(net_errors(params, batch) * batch["weight"]), jnp.sum(batch["weight"])


def net_batch(weight: Any = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    return {
        "x": rng.integers(0, 24, 24, dtype=np.int32),
        "y": rng.standard_normal((24, 5)).astype(np.float32),
        "weight": np.broadcast_to(np.asarray(weight, np.float32), 24).copy(),
    }


TRAINED = tuple(k for k in net_params() if k not in ("frozen", "offsets"))


def single_device(batch: dict[str, np.ndarray], params: Any = None) -> tuple[Any, dict[str, Any]]:
    """Weighted mean loss and gradients without a layout."""
    params = net_params() if params is None else params

    def loss(trained: dict[str, jax.Array]) -> jax.Array:
        value, count = weighted_loss(params | trained, batch)
        return value / count

    return jax.jit(jax.value_and_grad(loss))({k: params[k] for k in TRAINED})


def assert_gradients(layout: mfsdp.OwnerLayout, grads: OwnerParams, want: dict[str, Any]) -> None:
    assert grads.frozen == {}
    whole = layout.unshard(grads._replace(frozen=layout.shard(net_params()).frozen))
    for name, gradient in want.items():
        np.testing.assert_allclose(whole[name], gradient, rtol=1e-5, atol=1e-6, err_msg=name)
    for c in layout.plan.classes:
        stack = np.asarray(grads.stacks[c.key]).copy()
        for slot in c.slots:
            stack[slot] = 0
        assert not stack.any(), f"pads of {c.key}"


@ON_MESHES
def test_gradients_are_those_of_one_device(n: int, explicit: bool) -> None:
    layout = mfsdp.plan(net_params(), make_mesh(n, explicit), rules=NET_RULES)
    owned = layout.shard(net_params())
    loss, grads = jax.jit(layout.value_and_grad(mean_loss))(owned, net_batch())
    want_loss, want = single_device(net_batch())
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    assert_gradients(layout, grads, want)
    shardings = layout.trainable(layout.shardings)
    for g, sharding in zip(jax.tree.leaves(grads), jax.tree.leaves(shardings), strict=True):
        assert g.sharding.is_equivalent_to(sharding, g.ndim)


@pytest.fixture(scope="module")
def net_layout() -> mfsdp.OwnerLayout:
    return mfsdp.plan(net_params(), make_mesh(4), rules=NET_RULES)


@pytest.fixture(scope="module")
def net_owned(net_layout: mfsdp.OwnerLayout) -> OwnerParams:
    return net_layout.shard(net_params())


def test_weighted_loss_is_the_mean_over_the_global_batch(
    net_layout: mfsdp.OwnerLayout, net_owned: OwnerParams
) -> None:
    """Also where one device has no weight at all, and where none has."""
    fn = jax.jit(net_layout.value_and_grad(weighted_loss))
    batch = net_batch(weight=[0] * 6 + [1] * 6 + [3, 0, 0, 0, 0, 0] + [2] * 6)
    loss, grads = fn(net_owned, batch)
    want_loss, want = single_device(batch)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    assert_gradients(net_layout, grads, want)
    loss, grads = fn(net_owned, net_batch(weight=0))
    assert loss == 0
    assert all(not np.asarray(g).any() for g in jax.tree.leaves(grads))


def test_value_and_grad_inside_the_users_own_shard_map(
    net_layout: mfsdp.OwnerLayout, net_owned: OwnerParams
) -> None:
    """``check_vma`` holds by default, and the batch may be spread as the user likes."""

    def local(owned: OwnerParams, batch: Any) -> Any:
        loss, grads = net_layout.value_and_grad(mean_loss)(owned, batch)
        return loss, jax.tree.map(lambda g: 2 * g, grads)

    specs = net_layout.trainable(net_layout.specs)
    fn = inside(net_layout, local, (P(), specs), P("fsdp"))
    loss, grads = fn(net_owned, mfsdp.shard_batch(net_layout, net_batch()))
    want_loss, want = single_device(net_batch())
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    assert_gradients(net_layout, grads, {k: 2 * g for k, g in want.items()})


def test_gather_works_under_checkpoint(
    net_layout: mfsdp.OwnerLayout, net_owned: OwnerParams
) -> None:
    """A recomputed forward pass gathers again and gives the same gradients."""

    def local(owned: OwnerParams, batch: Any) -> Any:
        @jax.checkpoint
        def loss(trainable: OwnerParams) -> jax.Array:
            whole = net_layout.gather(trainable._replace(frozen=owned.frozen))
            return collectives.mean_over(mean_loss(whole, batch), net_layout.owner_axis)

        return jax.value_and_grad(loss)(net_layout.trainable(owned))

    specs = net_layout.trainable(net_layout.specs)
    fn = inside(net_layout, local, (P(), specs), P("fsdp"))
    _, grads = fn(net_owned, mfsdp.shard_batch(net_layout, net_batch()))
    assert_gradients(net_layout, grads, single_device(net_batch())[1])


def test_aux_and_keys(net_layout: mfsdp.OwnerLayout, net_owned: OwnerParams) -> None:
    """Aux is averaged over devices, and each device gets its own key."""

    def loss_fn(params: Any, batch: Any, key: jax.Array) -> Any:
        noise = jax.random.uniform(key)
        aux = {"x": jnp.mean(batch["x"].astype(jnp.float32)), "bits": [noise, noise**2]}
        return mean_loss(params, batch), aux

    key = jax.random.key(5)
    fn = jax.jit(net_layout.value_and_grad(loss_fn, has_aux=True))
    (loss, aux), grads = fn(net_owned, net_batch(), key)
    want_loss, want = single_device(net_batch())
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    assert_gradients(net_layout, grads, want)
    np.testing.assert_allclose(aux["x"], net_batch()["x"].mean(), rtol=1e-6)
    noise = np.array([jax.random.uniform(jax.random.fold_in(key, d)) for d in range(4)])
    assert len(set(noise.tolist())) == 4
    np.testing.assert_allclose(aux["bits"], [noise.mean(), (noise**2).mean()], rtol=1e-6)


def test_float64_is_exact_under_x64() -> None:
    with jax.enable_x64(True):
        tree = {k: v.astype(np.float64) for k, v in net_params().items() if k in TRAINED}
        tree |= {k: net_params()[k] for k in ("frozen", "offsets")}
        batch = net_batch()
        layout = mfsdp.plan(tree, make_mesh(4), rules=NET_RULES, reduce_dtype="float64")
        loss, grads = jax.jit(layout.value_and_grad(mean_loss))(layout.shard(tree), batch)
        want_loss, want = single_device(batch, tree)
        assert loss.dtype == jnp.float64
        np.testing.assert_allclose(loss, want_loss, rtol=1e-13)
        whole = layout.unshard(grads._replace(frozen=layout.shard(tree).frozen))
        for name, gradient in want.items():
            assert whole[name].dtype == jnp.float64
            np.testing.assert_allclose(whole[name], gradient, rtol=1e-12, atol=1e-13)


# ---- batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("form", ["numpy", "one_device", "replicated", "sharded"])
def test_batches_may_lie_anywhere(form: str, explicit: bool) -> None:
    tree = {"w": np.ones((3, 4), np.float32)}
    layout = mfsdp.plan(tree, make_mesh(4, explicit))
    batch = np.arange(8, dtype=np.float32)
    forms = {
        "numpy": lambda: batch,
        "one_device": lambda: jnp.asarray(batch),
        "replicated": lambda: jax.device_put(batch, NamedSharding(layout.mesh, P())),
        "sharded": lambda: mfsdp.shard_batch(layout, batch),
    }
    fn = jax.jit(layout.value_and_grad(lambda p, b: jnp.sum(p["w"]) * jnp.mean(b)))
    loss, grads = fn(layout.shard(tree), forms[form]())
    assert loss == 12 * 3.5
    np.testing.assert_array_equal(layout.unshard(grads)["w"], np.full((3, 4), 3.5))


def test_a_batch_that_does_not_divide_is_refused(
    net_layout: mfsdp.OwnerLayout, net_owned: OwnerParams
) -> None:
    fn = net_layout.value_and_grad(mean_loss)
    short = jax.tree.map(lambda x: x[:6], net_batch())
    for call in (fn, jax.jit(fn)):
        with refuses(ValueError, r"\['weight'\]", r"\(6,\)", "4 devices", "multiple of 4"):
            call(net_owned, short)
    with refuses(ValueError, r"\['weight'\]", "0 examples"):
        fn(net_owned, jax.tree.map(lambda x: x[:0], net_batch()))
    with refuses(ValueError, r"\['weight'\]", "no dim 0"):
        fn(net_owned, net_batch() | {"weight": np.float32(1)})
    with refuses(ValueError, r"\['weight'\]", "6 examples", "multiple of 4"):
        mfsdp.shard_batch(net_layout, short)
    with refuses(ValueError, "no dim 0"):
        mfsdp.shard_batch(net_layout, 3.0)


# ---- what is refused ---------------------------------------------------------------------------


def test_gather_outside_shard_map_is_refused(
    net_layout: mfsdp.OwnerLayout, net_owned: OwnerParams
) -> None:
    for call in (net_layout.gather, jax.jit(net_layout.gather)):
        with refuses(ValueError, "fsdp", "shard_map", "layout.unshard"):
            call(net_owned)


def test_gather_refuses_other_dtypes_and_other_params(
    net_layout: mfsdp.OwnerLayout, net_owned: OwnerParams
) -> None:
    def gather(change: Callable[[OwnerParams], Any], dtype: Any = None) -> Any:
        fn = inside(net_layout, lambda o: net_layout.gather(change(o), dtype), P("fsdp"))
        return jax.eval_shape(fn, net_owned)

    with refuses(ValueError, "bf17", "bfloat16"):
        gather(lambda o: o, "bf17")
    with refuses(ValueError, "int8", "bfloat16"):
        gather(lambda o: o, "int8")
    with refuses(TypeError, "got dict", "layout.shard"):
        gather(lambda o: o._asdict())
    with refuses(ValueError, "stacks", "2x6", r"\[1, 1, 6, 2\]", r"\[1, 1, 2, 6\]"):
        gather(lambda o: o._replace(stacks={k: v.mT for k, v in o.stacks.items()}))
    with refuses(ValueError, "rest", "bias", "float16", "float32"):
        gather(lambda o: o._replace(rest=jax.tree.map(lambda x: x.astype("float16"), o.rest)))


@pytest.mark.parametrize(
    ("loss_fn", "has_aux", "words"),
    [
        (lambda p, b: net_errors(p, b), False, ("scalar", r"\(6,\)", "average")),
        (lambda p, b: (1.0, 2.0, 3.0), False, (r"\(sum, count\)", "3", "has_aux=True")),
        (lambda p, b: (net_errors(p, b), 2.0), False, ("scalar", r"\(6,\)")),
        (mean_loss, True, (r"\(loss, aux\)", "Tracer")),
        (lambda p, b: (1.0, 2.0, 3.0), True, (r"\(loss, aux\)", "tuple")),
    ],
)
def test_losses_of_a_wrong_form_are_refused(
    loss_fn: Any,
    has_aux: bool,
    words: tuple[str, ...],
    net_layout: mfsdp.OwnerLayout,
    net_owned: OwnerParams,
) -> None:
    with refuses(ValueError, *words):
        jax.eval_shape(net_layout.value_and_grad(loss_fn, has_aux), net_owned, net_batch())


def test_value_and_grad_needs_check_vma(
    net_layout: mfsdp.OwnerLayout, net_owned: OwnerParams
) -> None:
    """Without it the transpose of a mean over N devices is N times too large."""
    fn = jax.shard_map(
        net_layout.value_and_grad(mean_loss),
        mesh=net_layout.mesh,
        in_specs=(net_layout.specs, P("fsdp")),
        out_specs=(P(), net_layout.trainable(net_layout.specs)),
        check_vma=False,
    )
    with refuses(ValueError, "check_vma=True"):
        fn(net_owned, mfsdp.shard_batch(net_layout, net_batch()))


# ---- the functions themselves ------------------------------------------------------------------


def test_reductions_and_local_rows() -> None:
    mesh: Mesh = make_mesh(8)
    axis = ("fsdp",)
    table = np.arange(16).reshape(8, 2)

    def fn(x: jax.Array) -> Any:
        row = collectives.local_slots(table, axis)
        assert collectives.manual_over(axis)
        assert collectives.varying_axes(row) == {"fsdp"}
        one = jnp.ones(())
        assert collectives.varying_axes(collectives.varying(one, axis)) == {"fsdp"}
        reductions = collectives.sum_over, collectives.mean_over, collectives.max_over
        return row, [reduce({"x": x[0], "one": one}, axis) for reduce in reductions]

    x = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P("fsdp")))
    run = partial(jax.shard_map, mesh=mesh, in_specs=P("fsdp"), out_specs=(P("fsdp"), P()))
    rows, (sums, means, largest) = run(fn)(x)
    np.testing.assert_array_equal(rows, table)
    assert (sums["x"], means["x"], largest["x"]) == (28, 3.5, 7)
    assert (sums["one"], means["one"], largest["one"]) == (8, 1, 1)
    assert not collectives.manual_over(axis)
