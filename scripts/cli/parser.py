"""The command line that all scripts share: refusing bad arguments, exit codes, and a closed output."""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

from specjax.report import progress

INTERRUPTED = 130  # the exit code that a shell gives to a program that SIGINT (2) ended
CLOSED_PIPE = 141  # the exit code that a shell gives to a program that SIGPIPE (13) ended
# Modules that come with an extra: who needs them, and the extra.
EXTRAS = {
    "matplotlib": ("the pictures need", "plots"),
    "httpx": ("sending requests to an address needs", "test"),
    "ray": ("--ray needs", "ray"),
    **dict.fromkeys(("fastapi", "uvicorn", "prometheus_client", "starlette"), ("the server needs", "serve")),
}


def flag(name: str) -> str:
    """The flag that a user types for the argument ``name``."""
    return "--" + name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    """Refuses bad arguments in one sentence, with exit code 2."""

    def error(self, message):
        self.exit(2, f"error: {message} (see --help)\n")

    def add_compilation_cache(self) -> None:
        """Adds the flag ``--compilation-cache``."""
        self.add_argument(
            "--compilation-cache", metavar="FOLDER",
            help="keep compiled programs in this folder and load them from there; 'none' keeps nothing (default: a "
            "folder in the user's cache)",
        )  # fmt: skip

    def at_least_one(self, args: argparse.Namespace, *names: str) -> None:
        """Refuses an argument that is below 1, or is a list with a number below 1. None is allowed."""
        for name in names:
            value = getattr(args, name)
            values = value if isinstance(value, (list, tuple)) else [value]
            if any(x is not None and x < 1 for x in values):
                self.error(f"{flag(name)} must be at least 1, got {value}")

    def in_a_folder(self, args: argparse.Namespace, *names: str) -> None:
        """Refuses a file whose folder does not exist, before any work is done. "-" stands for no file."""
        for name in names:
            value = getattr(args, name)
            if value not in (None, "-") and not Path(value).parent.is_dir():
                self.error(f"{flag(name)} {value}: there is no folder {Path(value).parent}; make it first")


def refusing(action: Callable[[], int | None]) -> int:
    """Runs a whole script, and turns bad requests into one sentence.

    Characters that the output's encoding lacks are printed as backslash escapes. On a terminal, stderr shows progress.

    Args:
      action: the script, the parsing of its arguments included. It returns an exit code; None is 0.

    Returns:
      The exit code of the script: that of ``action``. 2, after one sentence on stderr, if the request can't be met. 130
      after Ctrl-C. 141 if the reader of the output has closed the pipe.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    progress.show()
    try:
        try:
            return _refusing(action)
        finally:
            sys.stdout.flush()  # flushed here, because at exit Python itself would report a closed pipe
    except BrokenPipeError:
        _discard_output()
        return CLOSED_PIPE


def _refusing(action: Callable[[], int | None]) -> int:
    """Runs ``action``. Prints the errors of bad requests as one sentence, and returns the exit code."""
    try:
        return action() or 0
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        return INTERRUPTED
    except ModuleNotFoundError as problem:
        if problem.name not in EXTRAS:
            raise
        what, extra = EXTRAS[problem.name]
        progress.say(f"error: {what} {problem.name}: python -m pip install -e '.[{extra}]'", sys.stderr)
        return 2
    except (ValueError, OSError) as problem:
        progress.say(f"error: {problem}", sys.stderr)
        return 2


def _discard_output() -> None:
    """Sends all further output nowhere. At exit Python flushes its buffers once more, and the pipe is closed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a stream in memory has no file
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
