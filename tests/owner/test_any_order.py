"""Tensors of order 0 to 4 in owner form: round trip, gather, gradients, transforms."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.layout.rules import route
from matrixfsdp_jax.owner.canonical import on_canonical
from matrixfsdp_jax.owner.routed import decay_tables, route_owned, route_tree, slot_tables
from matrixfsdp_jax.owner.update import on_owners
from matrixfsdp_jax.transforms.muon import scale_by_momentum
from matrixfsdp_jax.transforms.stacks import decay_stacks, scale_stacks
from tests.models import make_mesh
from tests.owner.test_params import assert_placed, assert_same_bits, random_bits

tensor = mfsdp.rules.tensor
ITEM = (2, 3, 4, 5)  # of a tensor of order k the first k dims
BATCHES = ((), (3,), (2, 2))


def every_order() -> tuple[dict[str, np.ndarray], list[Any]]:
    """A leaf of every order with 0, 1 and 2 batch dims, first or last, and what is no tensor."""
    rng = np.random.default_rng(0)
    tree, rules = {}, []
    for order in range(5):
        for batch in BATCHES:
            for first in (True, False):
                name = f"t{order}_{len(batch)}_{'first' if first else 'last'}"
                shape = (*batch, *ITEM[:order]) if first else (*ITEM[:order], *batch)
                dims = range(len(batch)) if first else range(-len(batch), 0)
                dtype = "bfloat16" if first and order % 2 else "float32"
                tree[name] = random_bits(rng, shape, dtype)
                rules.append(tensor(name, batch_dims=tuple(dims)))
    tree |= {
        "tall": random_bits(rng, (5, 3), "float32"),
        "bias": random_bits(rng, (24,), "float32"),
    }
    return tree, rules


@pytest.mark.parametrize(("n", "explicit"), [(1, True), (3, False), (8, True)])
def test_shard_then_unshard_is_the_identity(n: int, explicit: bool) -> None:
    tree, rules = every_order()
    layout = mfsdp.plan(tree, make_mesh(n, explicit), rules=rules, optimizer="shampoo")
    owned = layout.shard(tree)
    assert set(owned.rest) == {"bias"}
    assert {len(c.shape) for c in layout.plan.classes} == {0, 1, 2, 3, 4}
    assert_placed(owned, layout.shardings)
    assert_same_bits(layout.unshard(owned), tree)
    for c in layout.plan.classes:
        stack = np.array(owned.stacks[c.key])
        assert stack.shape == (n, c.num_waves, *c.shape)
        assert layout.specs.stacks[c.key] == jax.sharding.PartitionSpec(
            "fsdp", *[None] * (1 + len(c.shape))
        )
        for matrix, slot in zip(c.matrices, c.slots, strict=True):
            x = tree[layout.plan.leaves[matrix.leaf].leaf.path]
            view = layout.plan.leaves[matrix.leaf].route.view
            item = x.transpose(view.permutation).reshape(-1, *matrix.dims)[matrix.batch]
            assert stack[slot].tobytes() == item.tobytes(), matrix.name
            stack[slot] = np.zeros((), stack.dtype)
        assert not stack.view(np.uint8).any(), f"pads of {c.key}"


# ---- gather and gradient -----------------------------------------------------------------------

SHAPES = {
    "conv": (3, 3, 4, 8),
    "patches": (2, 3, 4),
    "tall": (8, 4),
    "wide": (4, 8),
    "vector": (8,),
    "layers": (3, 5),
    "scalar": (),
    "bias": (24,),
}
RULES = [tensor("vector"), tensor("layers", batch_dims=(0,)), tensor("scalar")]


def draw(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {k: np.asarray(rng.standard_normal(s), np.float32) for k, s in SHAPES.items()}


def plan(n: int, explicit: bool = True) -> mfsdp.OwnerLayout:
    return mfsdp.plan(draw(0), make_mesh(n, explicit), rules=RULES, optimizer="shampoo")


def loss(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """Of a 4-D convolution, a 1-D and a 0-D leaf, and more; not symmetric in any of them."""
    maps = jax.lax.conv_general_dilated(
        x, params["conv"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    y = jnp.tanh(maps * jnp.exp(params["scalar"] / 4)).mean((1, 2))
    y = y * jnp.broadcast_to(params["vector"], y.shape)
    y = jnp.tanh(y @ params["tall"]) @ params["wide"]
    shift = jnp.sum(params["bias"] ** 2) + jnp.sum(jnp.sin(params["layers"]) @ jnp.arange(1.0, 6.0))
    weights = jnp.arange(24.0).reshape(2, 3, 4)
    return jnp.mean(y**2) + shift + jnp.sum(weights * jnp.sin(params["patches"]))


def images() -> np.ndarray:
    return np.random.default_rng(9).standard_normal((24, 4, 4, 4)).astype(np.float32)


@pytest.mark.parametrize(("n", "explicit"), [(1, True), (3, True), (8, False)])
def test_loss_and_gradient_are_those_of_one_device(n: int, explicit: bool) -> None:
    layout = plan(n, explicit)
    owned = layout.shard(draw(0))
    value, grads = jax.jit(layout.value_and_grad(loss))(owned, images())
    want_value, want = jax.value_and_grad(loss)(draw(0), images())
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    got = layout.unshard(grads)
    for name, g in want.items():
        assert np.abs(g).max() > 1e-3
        np.testing.assert_allclose(got[name], g, rtol=1e-4, atol=1e-5, err_msg=name)
    for c in layout.plan.classes:
        stack = np.array(grads.stacks[c.key])
        for slot in c.slots:
            stack[slot] = 0
        assert not stack.any(), f"pads of {c.key}"


def test_one_gather_and_one_reduce_scatter_per_wave() -> None:
    layout = plan(8)
    owned = layout.shard(draw(0))
    fn = jax.jit(layout.value_and_grad(loss))
    text = fn.lower(owned, images()).as_text()
    waves = sum(c.num_waves for c in layout.plan.classes)
    assert len(layout.plan.classes) == waves == 7
    sharded = sum(lp.shard_dim is not None for lp in layout.plan.leaves)
    assert text.count('"stablehlo.all_gather"') == waves + sharded
    assert text.count('"stablehlo.reduce_scatter"') == waves + sharded


def test_owner_params_of_another_shape_are_refused() -> None:
    layout = plan(3)
    owned = layout.shard(draw(0))
    for key in ("scalar:float32", "8:float32", "3x3x4x8:float32"):
        wrong = owned._replace(stacks=owned.stacks | {key: owned.stacks[key][..., None]})
        with pytest.raises(ValueError, match=f"{key}.*expects float32.*use the layout"):
            layout.unshard(wrong)
        tx = route_owned(optax.identity(), optax.identity(), layout)
        with pytest.raises(ValueError, match=f"{key}.*use the layout"):
            tx.update(wrong, tx.init(owned), owned)


# ---- transforms on stacks of any order ---------------------------------------------------------


def momentum_scale_decay(tables: Any, decays: Any, local: Any) -> optax.GradientTransformation:
    return optax.chain(
        scale_by_momentum(0.9), decay_stacks(0.1, decays, local), scale_stacks(tables, local)
    )


def factor(matrix: Any) -> float:
    """A number of every matrix that is the same in both forms."""
    return 1.0 + sum(map(ord, matrix.name)) % 7


def on_one_device(steps: int) -> dict[str, Any]:
    def make(plan: Any, local: Any) -> optax.GradientTransformation:
        tables, decays = (slot_tables(plan.classes, f) for f in (factor, lambda m: 1 / factor(m)))
        return momentum_scale_decay(tables, decays, local)

    tx = route_tree(
        lambda routes, _: on_canonical(make, routes, "shampoo"),
        optax.identity(),
        RULES,
        "shampoo",
    )
    params = jax.tree.map(jnp.asarray, draw(0))
    state = tx.init(params)
    for seed in range(1, steps + 1):
        updates, state = tx.update(draw(seed), state, params)
    return updates


@pytest.mark.parametrize("n", [1, 3, 8])
def test_transforms_of_stacks_on_owners_equal_those_on_one_device(n: int) -> None:
    layout = plan(n)
    tables = slot_tables(layout.plan.classes, factor)
    decays = decay_tables(layout, None, factor)
    matrix = on_owners(lambda local: momentum_scale_decay(tables, decays, local), layout)
    tx = route_owned(matrix, optax.identity(), layout)
    owned = layout.shard(draw(0))
    state = layout.init(tx, owned)
    assert_placed(state, layout.state_shardings(tx))
    update = jax.jit(tx.update)
    for seed in (1, 2):
        updates, state = update(layout.shard(draw(seed)), state, owned)
    got, want = layout.unshard(updates), on_one_device(2)
    for name, u in want.items():
        np.testing.assert_allclose(got[name], u, rtol=1e-6, atol=1e-6, err_msg=name)
    mfsdp.audit(tx.update, owned, state, owned).assert_no_matrix_collectives()


# ---- QK-clip under a method that transposes nothing ----------------------------------------------

QK = {"query": (4, 6), "key": (16, 4), "bias": (6,)}
HEADS = {"a": [mfsdp.AttentionWeight(path, 2) for path in QK]}


@pytest.mark.parametrize("n", [None, 3])
def test_qk_clip_of_tall_and_wide_matrices_that_are_not_transposed(n: int | None) -> None:
    rng = np.random.default_rng(0)
    params = {k: rng.standard_normal(s).astype(np.float32) for k, s in QK.items()}
    layout = None if n is None else mfsdp.plan(params, make_mesh(n), optimizer="soap")
    options = {"optimizer": "soap"} if layout is None else {"layout": layout}
    tx = mfsdp.qk_clip(HEADS, 1.0, **options)
    held = params if layout is None else layout.shard(params)
    zeros = jax.tree.map(jnp.zeros_like, held)
    logits = {"a": jnp.asarray([4.0, 0.5])}
    updates, _ = tx.update(zeros, tx.init(held), held, max_logits=logits)
    new = jax.tree.map(jnp.add, held, updates)
    got = new if layout is None else layout.unshard(new)
    for name, p in params.items():
        clipped = np.arange(p.shape[-1]) < p.shape[-1] // 2  # the first of the two heads
        want = np.where(clipped, p / 2, p)  # gamma = 1/4, to the power 1/2
        np.testing.assert_allclose(got[name], want, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("n", [None, 3])
def test_qk_clip_refuses_tensors_and_says_how_to_read_them(n: int | None) -> None:
    params = {"query": np.ones((4, 2, 3), np.float32), "s": np.ones((), np.float32)}
    given = [tensor("s")]
    layers = {"a": [mfsdp.AttentionWeight("query", 2)]}

    def clip(rules: Any) -> Any:
        if n is None:
            tx = mfsdp.qk_clip(layers, rules=rules, optimizer="shampoo")
            held: Any = params
        else:
            layout = mfsdp.plan(params, make_mesh(n), rules=rules, optimizer="shampoo")
            tx, held = mfsdp.qk_clip(layers, layout=layout), layout.shard(params)
        return tx.update(held, tx.init(held), held, max_logits={"a": jnp.ones(2)})

    with pytest.raises(ValueError, match=r"'query' of layer 'a' is read as tensors.*attention_in"):
        clip(given)
    clip([*given, mfsdp.rules.attention_in("query")])


def test_route_takes_the_method_for_trees_on_one_device() -> None:
    with pytest.raises(ValueError, match=r"'conv'.*no rule says"):
        route({"conv": draw(0)["conv"]})
    with pytest.raises(ValueError, match="takes only matrices"):
        mfsdp.muon(0.1, rules=RULES).init(draw(0))
