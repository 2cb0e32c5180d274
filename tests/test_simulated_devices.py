"""What XLA's simulated CPU devices do not survive: piled-up programs and used-up buffers."""

import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import matrixfsdp_jax as mfsdp
from tests.models import make_mesh

LOOP = """
import jax, jax.numpy as jnp, numpy as np
import matrixfsdp_jax as mfsdp

params = {f"layer_{i}": np.eye(32, dtype=np.float32) for i in range(12)}

def loss_fn(params, batch):
    for kernel in params.values():
        batch = jnp.tanh(batch @ kernel)
    return jnp.mean(batch**2)

layout = mfsdp.plan(params, jax.make_mesh((8,), ("fsdp",)))
tx = mfsdp.muon(0.02, layout=layout)
owned = layout.shard(params)
state = layout.init(tx, owned)
step, evaluate = mfsdp.train_step(loss_fn, tx, layout), mfsdp.eval_step(loss_fn, layout)
batch = np.ones((16, 32), np.float32)
for _ in range(200):
    owned, state, metrics = step(owned, state, batch)
losses = [evaluate(owned, batch) for _ in range(200)]
print("finite", bool(np.isfinite(float(metrics["loss"]) + float(losses[-1]))))
"""


def test_steps_that_nobody_waits_for():
    flags = "--xla_force_host_platform_device_count=8"
    run = subprocess.run(
        [sys.executable, "-c", LOOP],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.stdout.strip() == "finite True", run.stderr[-2000:]


def test_buffers_that_a_step_used_up_are_refused():
    """XLA's CPU devices would end the process."""
    params = {"w": np.ones((4, 8), np.float32)}
    layout = mfsdp.plan(params, make_mesh(8))
    tx = mfsdp.muon(0.1, layout=layout)
    owned = layout.shard(params)
    state = layout.init(tx, owned)
    step = mfsdp.train_step(lambda p, b: jnp.sum(p["w"]) * jnp.mean(b), tx, layout)
    batch = np.ones((8, 2), np.float32)
    new_owned, _, _ = step(owned, state, batch)
    with pytest.raises(ValueError, match=r"owned.stacks\['4x8:float32'\] was donated"):
        step(owned, state, batch)
    with pytest.raises(ValueError, match=r"state.* was donated to an earlier step"):
        step(new_owned, state, batch)
    with pytest.raises(ValueError, match="was donated"):
        mfsdp.eval_step(lambda p, b: jnp.sum(p["w"]), layout)(owned, batch)
