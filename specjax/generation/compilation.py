"""Compiled programs kept from one process to the next."""

import contextlib
import os
import re
import warnings
from pathlib import Path

import jax

from specjax.checkpoints.user_cache import cache_dir

NONE = "none"


def compilation_cache(folder: str | Path) -> None:
    """Keeps every compiled program in ``folder``, and takes those that are there: JAX's own persistent cache.

    For the whole process, from this call on. Programs are found again by what they compute, by device and processor,
    by XLA's flags, and by the versions of JAX and XLA, so one folder may serve several models, machines, versions and
    processes at once. Nothing is ever removed from the folder, but for damaged entries.

    Args:
      folder: made if need be. Whoever can write there can have code run here.

    Raises:
      OSError: the folder can't be made or written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"compiled programs can't be kept in {folder}: no permission to write there")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # many small programs are a second as well
    _remove_damaged_entries(folder)


def compilation_cache_of_script(where: str | None) -> None:
    """What a script's ``--compilation-cache`` asks for.

    Args:
      where: a folder; "none": no program is kept; None: the folder ``compiled`` in the user's cache, unless
        ``JAX_COMPILATION_CACHE_DIR`` or ``JAX_ENABLE_COMPILATION_CACHE`` says otherwise.

    Raises:
      OSError: the folder that was asked for can't be made or written.
    """
    if where == NONE:
        jax.config.update("jax_compilation_cache_dir", None)
    elif where is not None:
        compilation_cache(where)
    elif jax.config.values["jax_compilation_cache_dir"] is None and jax.config.values["jax_enable_compilation_cache"]:
        with contextlib.suppress(OSError):  # nobody asked for this folder: the script runs without
            compilation_cache(cache_dir() / "compiled")


def _remove_damaged_entries(folder: Path) -> None:
    """From now on, removes entries that JAX can't read, in place of its warning; JAX then compiles and writes anew.

    JAX doesn't write atomically. A process that was killed leaves half an entry, which JAX would warn of in every
    later run and never replace. Another process may also meet an entry that is still being written.
    """
    show = warnings.showwarning

    def remove_or_show(message, *args, **kwargs) -> None:
        found = re.match(r"Error reading persistent compilation cache entry for '(.*?)'", str(message))
        if found is None:
            return show(message, *args, **kwargs)
        for entry in folder.glob(f"{found[1]}-*"):  # the warning doesn't say which program of that name
            with contextlib.suppress(OSError):
                entry.unlink()

    warnings.showwarning = remove_or_show
