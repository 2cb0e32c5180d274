"""Faults that users of other Muons have met, each on the smallest input that shows it."""

import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.layout import rules
from matrixfsdp_jax.linalg.algorithms import ALGORITHMS
from matrixfsdp_jax.linalg.coefficients import SCHEDULES
from matrixfsdp_jax.linalg.orthogonalize import orthogonalize
from tests.models import make_mesh


def one_update(tx: optax.GradientTransformation, grads: Any, params: Any = None) -> Any:
    params = jax.tree.map(jnp.zeros_like, grads) if params is None else params
    return jax.jit(tx.update)(grads, tx.init(params), params)[0]


def test_the_plainest_optimizer_does_orthogonalise() -> None:
    """No fallback to gradient descent: ill-conditioned in, near-orthogonal out."""
    u, _, vt = np.linalg.svd(np.random.default_rng(0).standard_normal((16, 16)))
    g = (u * np.geomspace(1, 0.03, 16) @ vt).astype(np.float32)
    update = np.asarray(one_update(mfsdp.muon(1.0), {"w": g})["w"], np.float64)
    cosine = abs((update * g).sum()) / np.linalg.norm(update) / np.linalg.norm(g)
    assert cosine < 0.9
    singular = np.linalg.svd(update, compute_uv=False)
    assert 0.4 < singular.min() < singular.max() < 1.3


@pytest.mark.parametrize(
    ("scale", "wide", "tall"), [("rms_0.2", 0.18, 0.18), ("sqrt_max_1_out_in", 0.113, 0.057)]
)
def test_exactly_one_scale_rule_applies(scale: str, wide: float, tall: float) -> None:
    rng = np.random.default_rng(0)
    grads = {k: rng.standard_normal(s, np.float32) for k, s in
             {"wide": (64, 256), "tall": (256, 64)}.items()}  # fmt: skip
    update = one_update(mfsdp.muon(1.0, scale=scale), grads)
    rms = {k: float(jnp.sqrt(jnp.mean(x * x))) for k, x in update.items()}
    np.testing.assert_allclose([rms["wide"], rms["tall"]], [wide, tall], rtol=0.1)


@pytest.mark.parametrize("wrap", [lambda tx: optax.apply_if_finite(tx, 3), mfsdp.skip_nonfinite])
def test_a_convolution_takes_two_guarded_steps(wrap: Any) -> None:
    tx = wrap(mfsdp.muon(0.1, rules=[rules.conv("conv")]))
    rng = np.random.default_rng(0)
    params = {"conv": jnp.asarray(rng.standard_normal((3, 3, 4, 8), np.float32))}
    state = tx.init(params)
    for _ in range(2):
        grads = {"conv": jnp.asarray(rng.standard_normal((3, 3, 4, 8), np.float32))}
        updates, state = jax.jit(tx.update)(grads, state, params)
        assert updates["conv"].shape == (3, 3, 4, 8)
        matrix = np.asarray(updates["conv"], np.float64).reshape(36, 8)
        assert np.linalg.svd(matrix, compute_uv=False).min() > 0.05


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_temporary_memory_does_not_grow_with_the_steps(algorithm: Any) -> None:
    x = jax.ShapeDtypeStruct((2, 2048, 6144), jnp.bfloat16)

    def temp_bytes(steps: int) -> int:
        def run(x: jax.Array) -> jax.Array:
            return orthogonalize(x, steps=steps, dtype=jnp.bfloat16, algorithm=algorithm)

        return mfsdp.audit(run, x).temp_bytes

    assert temp_bytes(12) <= 1.05 * temp_bytes(6)


def test_every_table_that_the_docs_name_exists() -> None:
    named = re.search(
        r"ns_coefficients: name of a coefficient table \(([^)]*)\)", mfsdp.muon.__doc__
    )
    assert set(re.findall(r'"(\w+)"', named[1])) == set(SCHEDULES)
    forms = re.search(r"ns_algorithm: form of the iteration,([^;]*);", mfsdp.muon.__doc__)
    assert set(re.findall(r'"(\w+)"', forms[1])) == {"auto", *ALGORITHMS}


class Tied(nn.Module):
    """One table, used to embed and to read out."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(32, 8, name="embed")
        x = nn.Dense(8, use_bias=False, name="hidden")(embed(tokens))
        return embed.attend(x)


def test_a_table_tied_by_use_is_one_leaf_with_one_state() -> None:
    model = Tied()
    tokens = jnp.arange(16)
    params = model.init(jax.random.key(0), tokens)["params"]

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = model.apply({"params": params}, batch)
        return optax.softmax_cross_entropy_with_integer_labels(logits, (batch + 1) % 32).mean()

    layout = mfsdp.plan(params, make_mesh(8))
    tx = mfsdp.muon(0.1, layout=layout, rest=optax.adam(0.1))
    owned = layout.shard(params)
    state = layout.init(tx, owned)
    assert set(owned.stacks) == {"8x8:float32"}
    assert set(owned.rest) == {"embed/embedding"}
    step = mfsdp.train_step(loss_fn, tx, layout)
    losses = []
    for _ in range(3):
        owned, state, metrics = step(owned, state, np.arange(16))
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[0]


def test_one_nnx_param_referenced_twice_is_one_leaf() -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.table = nnx.Param(jax.random.normal(jax.random.key(0), (32, 8)))
            self.head = self.table

        def __call__(self, tokens: jax.Array) -> jax.Array:
            return self.table[tokens] @ self.head[...].T

    model = Model()
    holder = nnx.Optimizer(model, mfsdp.muon(0.1, rules=[rules.rest("*")]), wrt=nnx.Param)
    tokens = jnp.arange(8)
    for _ in range(3):
        grads = nnx.grad(lambda m: jnp.mean((m(tokens) - 1.0) ** 2))(model)
        holder.update(model, grads)
    assert model.table is model.head
    assert len(jax.tree.leaves(nnx.state(model, nnx.Param))) == 1


def test_nnx_with_a_partition_of_two_transforms() -> None:
    model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    before = np.asarray(model.bias[...])
    tx = optax.partition(
        {"muon": mfsdp.muon(0.1), "sgd": optax.sgd(0.1)},
        lambda tree: jax.tree.map(lambda x: "muon" if x.ndim == 2 else "sgd", tree),
    )
    holder = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model: nnx.Linear, holder: nnx.Optimizer) -> None:
        holder.update(model, nnx.grad(lambda m: jnp.sum(m(jnp.ones((2, 4))) ** 2))(model))

    step(model, holder)
    assert not np.array_equal(model.bias[...], before)


def test_a_bare_transform_takes_a_dict_and_skips_none() -> None:
    g = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
    update = one_update(mfsdp.scale_by_muon(), {"w": g, "no": None})
    assert update["no"] is None
    assert update["w"].shape == (8, 16)


@pytest.mark.slow
def test_equal_leaves_compile_in_a_fraction_of_the_time() -> None:
    """Of what one iteration per leaf takes: 0.06 on a quiet machine, a third leaves it room."""
    params = {f"w{i}": jax.ShapeDtypeStruct((64, 128), jnp.float32) for i in range(64)}
    layout = mfsdp.plan(params, make_mesh(8))
    owned = layout.trainable(layout.abstract)

    def seconds(tx: optax.GradientTransformation, params: Any) -> float:
        state = jax.eval_shape(tx.init, params)
        start = time.perf_counter()
        jax.jit(tx.update).lower(params, state, params).compile()
        return time.perf_counter() - start

    ours = seconds(mfsdp.muon(0.1, layout=layout), owned)
    assert ours < seconds(optax.contrib.muon(0.1), params) / 3
