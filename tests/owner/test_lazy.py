"""Parameters that are gathered where the model uses them: same numbers, less memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.layout import rules

WIDTH, HIDDEN = 8, 12


def stacked_params(layers: int, before: bool = False) -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / 3).astype(np.float32)

    blocks = {
        "attention": normal(layers, WIDTH, WIDTH),
        "heads": normal(layers, 2, WIDTH, WIDTH),  # two matrices in each layer
        "up": normal(layers, WIDTH, HIDDEN),
        "down": normal(layers, HIDDEN, WIDTH),
        "scale": normal(layers, WIDTH),
    }
    first = {"a_first": normal(WIDTH, WIDTH)} if before else {}
    return {**first, "blocks": blocks, "head": normal(WIDTH, 5)}


def block(x: jax.Array, p: dict[str, Any]) -> jax.Array:
    x = x + jnp.tanh(x @ p["attention"]) @ (p["heads"][0] @ p["heads"][1])
    return x + jnp.tanh(x * p["scale"][None] @ p["up"]) @ p["down"]


def unstacked(params: dict[str, Any]) -> dict[str, Any]:
    layers = len(params["blocks"]["scale"])
    blocks = {str(k): jax.tree.map(lambda x, k=k: x[k], params["blocks"]) for k in range(layers)}
    return params | {"blocks": blocks}


def head_loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["head"] + jnp.sum(params.get("a_first", 0.0))) ** 2)


def plain(params: Any, batch: jax.Array) -> jax.Array:
    def body(x: jax.Array, p: Any) -> tuple[jax.Array, jax.Array]:
        return block(x, p), x.sum()

    x, sums = jax.lax.scan(body, batch, params["blocks"])
    return head_loss(params, x) + 0.1 * jnp.mean(sums)


def scanned(prefetch: bool) -> Callable[..., Any]:
    def loss(lazy: mfsdp.LazyParams, batch: jax.Array) -> jax.Array:
        def body(x: jax.Array, p: Any) -> tuple[jax.Array, jax.Array]:
            return block(x, p), x.sum()

        x, sums = lazy.scan(body, batch, "blocks", prefetch=prefetch)
        names = [n for n in ("a_first", "head") if n in lazy.below("")]
        return head_loss(dict(zip(names, lazy.gather(names), strict=True)), x) + 0.1 * jnp.mean(
            sums
        )

    return loss


def plain_unrolled(params: Any, batch: jax.Array) -> jax.Array:
    x = batch
    for k in range(len(params["blocks"])):
        x = block(x, params["blocks"][str(k)])
    return head_loss(params, x)


def folded(lazy: mfsdp.LazyParams, batch: jax.Array) -> jax.Array:
    x = lazy.fold(block, batch, "blocks")
    return lazy.remat(lambda head, x: head_loss({"head": head}, x), "head")(x)


MESHES = {
    "n8": ((8,), ("fsdp",), {}),
    "n3": ((3,), ("fsdp",), {}),
    "each": ((2, 4), ("replica", "fsdp"), {"replica_axis": "replica", "replicas": "each"}),
    "shared": ((2, 4), ("replica", "fsdp"), {"replica_axis": "replica", "replicas": "shared"}),
    "soap": ((4,), ("fsdp",), {"optimizer": mfsdp.shampoo_method("soap", 8, 2, 3)}),
    "lpt": ((4,), ("fsdp",), {"dealing": "lpt"}),
}


def layout_on(case: str, params: Any, **options: Any) -> mfsdp.OwnerLayout:
    shape, names, own = MESHES[case]
    devices = jax.devices()[: int(np.prod(shape))]
    kinds = (AxisType.Explicit,) * len(names)
    mesh = jax.make_mesh(shape, names, devices=devices, axis_types=kinds)
    several = rules.stacked(lambda leaf: len(leaf.shape) > 2)
    scale = rules.tensor if case == "soap" and "scale" in params["blocks"] else None
    scales = [scale("blocks/scale", (0,))] if scale else []
    given = rules.default_rules(several, *scales)
    return mfsdp.plan(params, mesh, rules=given, **own, **options)


def differences(layout: Any, params: Any, loss: Any, lazy_loss: Any) -> None:
    owned = layout.shard(params)
    batch = np.random.default_rng(1).standard_normal((24, WIDTH)).astype(np.float32)
    want, grads = jax.jit(layout.value_and_grad(loss))(owned, batch)
    got, lazy_grads = jax.jit(layout.value_and_grad(lazy_loss, lazy=True))(owned, batch)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), lazy_grads, grads
    )


@pytest.mark.parametrize("case", MESHES)
@pytest.mark.parametrize(("layers", "before", "prefetch"), [(8, False, False), (9, True, True)])
def test_scan_is_the_scan_of_whole_parameters(case, layers, before, prefetch):
    params = stacked_params(layers, before)
    layout = layout_on(case, params)
    differences(layout, params, plain, scanned(prefetch))


@pytest.mark.parametrize("case", MESHES)
def test_fold_is_the_loop_over_whole_blocks(case):
    params = unstacked(stacked_params(5))
    layout = layout_on(case, params)
    differences(layout, params, plain_unrolled, folded)
