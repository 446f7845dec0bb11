"""Keeps compiled programs in a folder, so that a later process need not compile them again."""

import contextlib
import os
import re
import warnings
from pathlib import Path

import jax

from specjax.checkpoints.user_cache import cache_dir

NONE = "none"


def compilation_cache(folder: str | Path) -> None:
    """Keeps every compiled program in ``folder``, and loads the programs that the folder holds already.

    This switches on JAX's own persistent cache for the whole process, from this call on. A program is found again by
    its computation, the device, the processor, XLA's flags, and the versions of JAX and XLA. One folder may therefore
    serve several models, machines, versions and processes at the same time. Only damaged entries are ever removed.

    Args:
      folder: a folder, which is made if it does not exist. The process runs the programs in this folder, so whoever can
        write there can make this process run their code.

    Raises:
      OSError: the folder can't be made, or nothing can be written there.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(
            f"compiled programs can't be kept in {folder}: no permission to write there; choose another folder"
        )
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # many small programs take a second too
    _remove_damaged_entries(folder)


def compilation_cache_of_script(where: str | None) -> None:
    """Sets up the compilation cache as a script's flag ``--compilation-cache`` says.

    Args:
      where: the flag's value. A folder: compiled programs are kept there. "none": no program is kept. None (no flag):
        programs are kept in the folder ``compiled`` in the user's cache, unless ``JAX_COMPILATION_CACHE_DIR`` names
        another folder or ``JAX_ENABLE_COMPILATION_CACHE`` switches the cache off.

    Raises:
      OSError: the user named a folder, and it can't be made or written.
    """
    if where == NONE:
        jax.config.update("jax_compilation_cache_dir", None)
    elif where is not None:
        compilation_cache(where)
    elif jax.config.values["jax_compilation_cache_dir"] is None and jax.config.values["jax_enable_compilation_cache"]:
        with contextlib.suppress(OSError):  # nobody asked for this folder, so the script runs without it
            compilation_cache(cache_dir() / "compiled")


def _remove_damaged_entries(folder: Path) -> None:
    """From now on, removes each entry that JAX can't read. JAX then compiles the program and writes the entry again.

    JAX warns of such an entry; this function removes the entry in place of the warning. JAX doesn't write entries
    atomically. A process that was killed leaves half an entry: without this function, JAX would warn of the entry in
    every later run and never replace it. A process may also read an entry while another process still writes it.
    """
    show = warnings.showwarning
    watched: frozenset[Path] = getattr(show, "watched", frozenset())
    if folder in watched:
        return

    def remove_or_show(message, *args, **kwargs) -> None:
        found = re.match(r"Error reading persistent compilation cache entry for '(.*?)'", str(message))
        if found is None:
            return show(message, *args, **kwargs)
        for entry in folder.glob(f"{found[1]}-*"):  # the warning doesn't say which program of that name
            with contextlib.suppress(OSError):
                entry.unlink()

    remove_or_show.watched = watched | {folder}  # type: ignore[attr-defined]
    warnings.showwarning = remove_or_show
