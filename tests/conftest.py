"""Eight simulated CPU devices and strict rank promotion for every test."""

import os

# Must be set before jax is imported. Other flags of the caller stay; another device count does not.
_COUNT = "--xla_force_host_platform_device_count"
_others = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(_COUNT)]
# A busy machine may not run all eight devices within the 40 seconds that XLA grants a collective.
_PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=300"
os.environ["XLA_FLAGS"] = " ".join([_PATIENCE, *_others, f"{_COUNT}=8"])
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# JAX's decompositions on CPU are those of OpenBLAS. Eight devices that each start its threads, on
# the few cores of a container, made one 256 x 256 eigh take 1.3 s instead of 5 ms.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

from collections.abc import Iterator  # noqa: E402

import pytest  # noqa: E402


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Names of the functions that XLA compiles while the test runs, as they come."""
    names: list[str] = []

    def listen(event: str, _: float, **details: str) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(details.get("fun_name", ""))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)
