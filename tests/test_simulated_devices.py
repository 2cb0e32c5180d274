"""A loop that never waits must not deadlock XLA's CPU devices, which share one thread pool."""

import os
import subprocess
import sys

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
