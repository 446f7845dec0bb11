"""Compiled programs kept from one process to the next."""

from pathlib import Path

import jax


def compilation_cache(folder: str | Path) -> None:
    """Keeps every compiled program in ``folder``, and takes those that are there: JAX's own persistent cache.

    For the whole process, from this call on. Programs are found again by what they compute, by device, and by the
    versions of JAX and XLA, so one folder may serve several models and machines. Nothing is ever removed from it.

    Args:
      folder: made if need be. Whoever can write there can have code run here.

    Raises:
      OSError: it can't be made.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # many small programs are a second as well
