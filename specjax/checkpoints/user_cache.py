"""Where specjax keeps what it fetched or compiled for a user."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """``$SPECJAX_CACHE``, else ``$XDG_CACHE_HOME/specjax``, else ``~/.cache/specjax``."""
    if own := os.environ.get("SPECJAX_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specjax"
