"""Counting what JAX traces and compiles: a second call on the same shapes must do neither."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import jax


@dataclasses.dataclass
class Compilations:
    """Programs since the block was entered, of any function in the process."""

    traced: int = 0
    compiled: int = 0


@contextmanager
def count_traces() -> Iterator[Compilations]:
    """Counts within a ``with`` block: ``with count_traces() as seen: ...; assert seen.compiled == 0``."""
    seen = Compilations()

    def listen(event: str, duration_secs: float, **_) -> None:
        del duration_secs
        seen.traced += event.endswith("/jaxpr_trace_duration")
        seen.compiled += event.endswith("/backend_compile_duration")

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
