"""Flax linen and nnx: who may hold owner params, and training of their models."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import matrixfsdp_jax as mfsdp
from tests.models import make_mesh

VOCABULARY, WIDTH = 16, 8


def batches(count: int, size: int = 16) -> list[dict[str, np.ndarray]]:
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (count, size), dtype=np.int32)
    return [{"x": x, "y": (5 * x + 1) % VOCABULARY} for x in tokens]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def optimizer(layout: Any = None) -> optax.GradientTransformation:
    return mfsdp.muon(0.05, layout=layout, rest=optax.adamw(0.01), weight_decay=0.1)


def train(params: Any, loss_fn: Any, steps: int = 6, n: int = 8) -> tuple[list[float], Any]:
    """Losses and canonical parameters of owner training."""
    layout = mfsdp.plan(params, make_mesh(n))
    owned, tx = layout.shard(params), optimizer(layout)
    state = layout.init(tx, owned)
    step = mfsdp.train_step(loss_fn, tx, layout)
    losses = []
    for batch in batches(steps):
        owned, state, metrics = step(owned, state, batch)
        losses.append(float(metrics["loss"]))
    return losses, layout.unshard(owned)


def train_alone(params: Any, loss_fn: Any, steps: int = 6) -> tuple[list[float], Any]:
    """The same on one device, on the user's own tree."""
    tx = optimizer()
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return loss, optax.apply_updates(params, updates), state

    losses = []
    for batch in batches(steps):
        loss, params, state = step(params, state, batch)
        losses.append(float(loss))
    return losses, params


def assert_same(got: Any, want: Any) -> None:
    (losses, params), (want_losses, want_params) = got, want
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(losses, want_losses, atol=1e-5)
    assert jax.tree.structure(params) == jax.tree.structure(want_params)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(want_params), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-4)


# ---- linen -------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """Embedding, two hidden layers, head; ``box`` adds partitioning metadata to the kernels."""

    box: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        kernel = nn.initializers.lecun_normal()
        if self.box is not None:
            kernel = self.box(kernel, ("fsdp", None))
        x = nn.Embed(VOCABULARY, WIDTH, name="embed")(tokens)
        x = x + nn.Dense(WIDTH, kernel_init=kernel, use_bias=False, name="up")(x)
        x = x + nn.Dense(WIDTH, kernel_init=kernel, use_bias=False, name="down")(jnp.tanh(x))
        return nn.Dense(VOCABULARY, kernel_init=kernel, use_bias=False, name="lm_head")(x)


def linen(box: Any = None) -> tuple[Tagger, Any, Any]:
    model = Tagger(box)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros(2, jnp.int32))["params"]

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return cross_entropy(model.apply({"params": params}, batch["x"]), batch["y"])

    return model, params, loss_fn


@pytest.fixture(scope="module")
def linen_run() -> tuple[list[float], Any]:
    _, params, loss_fn = linen()
    return train(params, loss_fn)


@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "auto"])
def test_train_state_holds_owner_params(linen_run: Any, explicit: bool) -> None:
    model, params, loss_fn = linen()
    layout = mfsdp.plan(params, make_mesh(8, explicit))
    state = TrainState.create(
        apply_fn=model.apply, params=layout.shard(params), tx=optimizer(layout)
    )
    value_and_grad = layout.value_and_grad(loss_fn)

    @jax.jit
    def step(state: TrainState, batch: Any) -> tuple[jax.Array, TrainState]:
        loss, grads = value_and_grad(state.params, batch)
        return loss, state.apply_gradients(grads=grads)

    losses = []
    for batch in batches(6):
        loss, state = step(state, batch)
        losses.append(float(loss))
    assert_same((losses, layout.unshard(state.params)), linen_run)
    momentum = jax.tree.leaves(state.opt_state)[1]
    assert momentum.sharding.is_equivalent_to(layout.shardings.stacks["8x8:float32"], 4)


def test_linen_equals_one_device(linen_run: Any) -> None:
    _, params, loss_fn = linen()
    assert_same(linen_run, train_alone(params, loss_fn))


@pytest.mark.parametrize("box", [nn.with_partitioning, nn.with_logical_partitioning])
def test_boxed_linen_params_train_and_stay_boxed(linen_run: Any, box: Any) -> None:
    _, params, loss_fn = linen(box)
    losses, trained = train(params, loss_fn)
    assert isinstance(trained["up"]["kernel"], nn.Partitioned)
    assert trained["up"]["kernel"].names == ("fsdp", None)
    assert_same((losses, nn.meta.unbox(trained)), linen_run)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array, training: bool) -> jax.Array:
        x = nn.Embed(VOCABULARY, WIDTH, name="embed")(tokens)
        x = nn.BatchNorm(use_running_average=not training, momentum=0.5, name="norm")(x)
        x = nn.Dropout(0.2, deterministic=not training)(x)
        return nn.Dense(VOCABULARY, use_bias=False, name="hidden")(x)


def test_batch_norm_and_dropout_train() -> None:
    """The running mean of the devices' statistics is that of the global batch."""
    model = Normed()
    variables = model.init(jax.random.key(0), jnp.zeros(2, jnp.int32), training=False)
    params, stats = variables["params"], variables["batch_stats"]

    def loss_fn(params: Any, batch: Any, key: jax.Array, model_state: Any) -> Any:
        logits, new = model.apply(
            {"params": params, "batch_stats": model_state},
            batch["x"],
            training=True,
            rngs={"dropout": key},
            mutable=["batch_stats"],
        )
        return cross_entropy(logits, batch["y"]), new["batch_stats"]

    layout = mfsdp.plan(params, make_mesh(8))
    tx = optimizer(layout)
    owned = layout.shard(params)
    state = layout.init(tx, owned)
    step = mfsdp.train_step(loss_fn, tx, layout, model_state_reduction="mean")
    batch = batches(1, 32)[0]
    want = 0.5 * np.asarray(params["embed"]["embedding"])[batch["x"]].mean(0)
    losses = []
    for i in range(8):
        owned, state, stats, metrics = step(
            owned, state, batch, key=jax.random.key(i), model_state=stats
        )
        losses.append(float(metrics["loss"]))
        if i == 0:
            np.testing.assert_allclose(stats["norm"]["mean"], want, atol=1e-6)
    assert losses[-1] < 0.8 * losses[0]


# ---- nnx ---------------------------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.hidden = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.lm_head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.hidden:
            x = x + jnp.tanh(layer(x))
        return self.lm_head(x)


def nnx_loss(graphdef: Any, *rest: Any) -> Any:
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        model = nnx.merge(graphdef, params, *rest)
        return cross_entropy(model(batch["x"]), batch["y"])

    return loss_fn


def test_nnx_state_trains_and_comes_back_as_a_state() -> None:
    model = Block(nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)
    losses, trained = train(params, nnx_loss(graphdef))
    assert isinstance(trained, nnx.State)
    assert_same((losses, trained), train_alone(params, nnx_loss(graphdef)))
    nnx.update(model, trained)
    np.testing.assert_array_equal(model.hidden[0].kernel[...], trained["hidden"][0]["kernel"][...])


def test_nnx_optimizer_works_without_a_layout() -> None:
    model = Block(nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)
    want = train_alone(params, nnx_loss(graphdef))
    holder = nnx.Optimizer(model, optimizer(), wrt=nnx.Param)

    @nnx.jit
    def step(model: Block, holder: nnx.Optimizer, batch: Any) -> jax.Array:
        def loss_fn(model: Block) -> jax.Array:
            return cross_entropy(model(batch["x"]), batch["y"])

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        holder.update(model, grads)
        return loss

    losses = [float(step(model, holder, batch)) for batch in batches(6)]
    assert_same((losses, nnx.state(model, nnx.Param)), want)


def test_nnx_optimizer_refuses_a_layout_and_names_what_to_use() -> None:
    model = Block(nnx.Rngs(0))
    layout = mfsdp.plan(nnx.state(model, nnx.Param), make_mesh(8))
    with pytest.raises(TypeError, match=r"mfsdp\.train_step.*without a layout"):
        nnx.Optimizer(model, optimizer(layout), wrt=nnx.Param)


def test_nnx_optimizer_of_a_single_vector() -> None:
    """Nothing for Muon to do: no state for matrices, and no error."""

    class Scale(nnx.Module):
        def __init__(self) -> None:
            self.scale = nnx.Param(jnp.ones(1))

    model = Scale()
    holder = nnx.Optimizer(model, mfsdp.muon(0.1, rest=optax.sgd(0.5)), wrt=nnx.Param)
    grads = nnx.grad(lambda m: m.scale[0] ** 2)(model)
    holder.update(model, grads)
    np.testing.assert_allclose(model.scale[...], [0.0])
