"""The folder in which specjax keeps fetched models and compiled programs."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """``$SPECJAX_CACHE`` if it is set, else ``$XDG_CACHE_HOME/specjax``, else ``~/.cache/specjax``."""
    if chosen := os.environ.get("SPECJAX_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specjax"
