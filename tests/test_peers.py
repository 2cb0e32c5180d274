"""The same parameters as the Muons of torch and of optax, from the same gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import matrixfsdp_jax as mfsdp
from matrixfsdp_jax.layout import rules

STEPS = 5
SHAPES = {"tall": (24, 8), "wide": (8, 20), "square": (12, 12), "column": (6, 1)}


def draw(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {k: rng.standard_normal(s, np.float32) for k, s in SHAPES.items()}


def train(tx: optax.GradientTransformation) -> dict[str, np.ndarray]:
    """Parameters after ``STEPS`` recorded gradients."""
    params: Any = jax.tree.map(jnp.asarray, draw(0))
    state = tx.init(params)
    update = jax.jit(tx.update)
    for seed in range(1, STEPS + 1):
        updates, state = update(draw(seed), state, params)
        params = optax.apply_updates(params, updates)
    return jax.tree.map(np.asarray, params)


def assert_close(got: dict[str, np.ndarray], want: dict[str, np.ndarray], atol: float) -> None:
    for name in SHAPES:
        assert np.abs(want[name] - draw(0)[name]).max() > 100 * atol  # it did move
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("consistent_rms", [None, 0.2], ids=["width", "rms"])
@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "plain"])
def test_optax_muon(nesterov: bool, consistent_rms: float | None) -> None:
    theirs = optax.contrib.muon(
        0.05, nesterov=nesterov, weight_decay=0.1, consistent_rms=consistent_rms
    )
    ours = mfsdp.muon(
        0.05,
        nesterov=nesterov,
        weight_decay=0.1,
        bias_correction=True,
        scale="sqrt_max_1_out_in" if consistent_rms is None else "rms_0.2",
    )
    assert_close(train(ours), train(theirs), atol=1e-5)


def train_torch(**options: Any) -> dict[str, np.ndarray]:
    torch = pytest.importorskip("torch")
    params = {k: torch.nn.Parameter(torch.from_numpy(x)) for k, x in draw(0).items()}
    optimizer = torch.optim.Muon(params.values(), lr=0.05, momentum=0.9, **options)
    for seed in range(1, STEPS + 1):
        for name, grad in draw(seed).items():
            params[name].grad = torch.from_numpy(grad)
        optimizer.step()
    return {k: p.detach().numpy() for k, p in params.items()}


def train_like_torch(adjust: str, nesterov: bool, **options: Any) -> dict[str, np.ndarray]:
    """A torch weight is ``[out, in]``, which the rules say once."""
    return train(
        mfsdp.muon(
            0.05,
            momentum=0.9,
            nesterov=nesterov,
            weight_decay=0.1,
            scale={"original": "sqrt_max_1_out_in", "match_rms_adamw": "rms_0.2"}[adjust],
            rules=[rules.matrix("*", out="rows")],
            **options,
        )
    )


TORCH_CASES = pytest.mark.parametrize(
    ("adjust", "nesterov"),
    [("original", True), ("original", False), ("match_rms_adamw", True)],
)


@TORCH_CASES
def test_torch_muon_in_float32(
    adjust: str, nesterov: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of ``torch.optim.Muon``, its own Newton-Schulz included, but not rounded to bfloat16.

    torch casts to bfloat16 at one place, by ``grad.bfloat16()``; here that makes the copy and no
    rounding. Every other operation is torch's.
    """
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    theirs = train_torch(weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=adjust)
    assert_close(train_like_torch(adjust, nesterov), theirs, atol=1e-5)


@TORCH_CASES
def test_torch_muon_in_its_own_bfloat16(adjust: str, nesterov: bool) -> None:
    """torch as it is, against ours in bfloat16: within 3% of the largest move of each matrix.

    Both round every product to bfloat16 (8 bits), torch also the norm and each sum, so the two
    agree no better than torch with its own float32 result (about 1.5%).
    """
    theirs = train_torch(weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=adjust)
    ours = train_like_torch(adjust, nesterov, ns_dtype=jnp.bfloat16)
    for name, start in draw(0).items():
        moved = np.abs(theirs[name] - start).max()
        np.testing.assert_allclose(ours[name], theirs[name], atol=0.03 * moved, err_msg=name)
