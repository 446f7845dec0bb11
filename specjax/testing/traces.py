"""Counts what JAX traces and compiles, and the messages between devices in a compiled program."""

import collections
import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax


@dataclasses.dataclass
class Compilations:
    """The programs of any function in the process since the ``with`` block was entered."""

    # The number of programs that were traced.
    traced: int = 0
    # The number of programs that were compiled or fetched.
    compiled: int = 0
    # The number of these that came from a persistent cache.
    fetched: int = 0


@contextmanager
def count_traces() -> Iterator[Compilations]:
    """Counts the programs of a ``with`` block.

    An example: ``with count_traces() as seen: ...; assert seen.compiled == 0``.
    """
    seen = Compilations()

    def listen(event: str, duration_secs: float, **_) -> None:
        del duration_secs
        seen.traced += event.endswith("/jaxpr_trace_duration")
        seen.compiled += event.endswith("/backend_compile_duration")

    def listen_for_hits(event: str, **_) -> None:
        seen.fetched += event.endswith("/compilation_cache/cache_hits")

    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.monitoring.register_event_listener(listen_for_hits)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
        jax.monitoring.unregister_event_listener(listen_for_hits)


def collectives(compiled: Any) -> dict[str, int]:
    """The number of messages between devices in a compiled program, by kind. The body of a loop counts once.

    Args:
      compiled: a ``jax.stages.Compiled``.
    """
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
    return dict(collections.Counter(re.findall(rf"= [^=]*? ({kinds})(?:-start)?\(", compiled.as_text())))


def h100_devices(count: int) -> list | None:
    """``count`` H100 GPUs to compile for, on a machine that has none. None if JAX's CUDA plugin does not offer them.

    With ``JAX_PLATFORMS=cpu``, ``pip install --no-deps jax-cuda12-pjrt jax-cuda12-plugin`` in JAX's own version is
    enough. Lower a function on arguments whose shardings name these devices. Compile it with
    ``xla_gpu_autotune_level=0``, because there is no GPU to time kernels on.
    """
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc("", "cuda", target_config=_H100, topology=f"1x1x{count}").devices
    except NotImplementedError:  # the CUDA plugin is not installed
        return None


# The properties of a GPU that XLA needs: those of the SXM5 card with 80 GB, from NVIDIA's Hopper tuning guide and data
# sheet.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  device_memory_size: 84978434048
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
