"""One of two processes with four CPU devices each; prints the losses of two steps.

Run by test_training.py: ``python two_processes.py RANK PORT``.
"""

import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax

RANK = int(sys.argv[1])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", num_processes=2, process_id=RANK)

import matrixfsdp_jax as mfsdp  # noqa: E402
from tests.test_training import PROBLEMS, Run  # noqa: E402

problem = PROBLEMS["tiny"]
run = Run(problem, 8)
losses = []
for batch in problem.batches[:2]:
    mine = jax.tree.map(lambda x: x[12 * RANK : 12 * RANK + 12], batch)
    losses.append(float(run(mine)["loss"]))
held_out = mfsdp.eval_step(problem.loss, run.layout)(run.owned, mine)
assert held_out < losses[0]
run.layout.unshard(run.owned)
print(*losses)
