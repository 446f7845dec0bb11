"""What the scripts share in how they meet a user."""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

from specjax.report import progress

CLOSED_PIPE = 141  # a shell's code for a program that SIGPIPE (13) ended


def flag(name: str) -> str:
    """As a user types the name of an argument."""
    return "--" + name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    """Refuses bad arguments in one sentence, with exit code 2."""

    def error(self, message):
        self.exit(2, f"error: {message} (see --help)\n")

    def add_compilation_cache(self) -> None:
        self.add_argument(
            "--compilation-cache", metavar="FOLDER",
            help="keep compiled programs there, and take those that are there; none: keep nothing (by default they are "
            "in the user's cache folder)",
        )  # fmt: skip

    def at_least_one(self, args: argparse.Namespace, *names: str) -> None:
        """Refuses what is smaller, or holds something smaller; None is nothing."""
        for name in names:
            value = getattr(args, name)
            values = value if isinstance(value, (list, tuple)) else [value]
            if any(x is not None and x < 1 for x in values):
                self.error(f"{flag(name)} must be at least 1, got {value}")

    def in_a_folder(self, args: argparse.Namespace, *names: str) -> None:
        """Refuses files that can't be written, before anything is done; "-" is none."""
        for name in names:
            value = getattr(args, name)
            if value not in (None, "-") and not Path(value).parent.is_dir():
                self.error(f"{flag(name)} {value}: there is no folder {Path(value).parent}")


def refusing(action: Callable[[], int | None]) -> int:
    """Runs ``action``, all that a script does, its arguments' parsing included.

    Characters that the output's encoding lacks are printed as backslash escapes. On a terminal, stderr shows progress.

    Returns:
      The script's exit code: ``action``'s (None is 0); 2, after one sentence on stderr, for a request that can't be
      met; 141 if the reader of the output left.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    progress.show()
    try:
        try:
            return _refusing(action)
        finally:
            sys.stdout.flush()  # here, since Python itself would report a closed pipe at exit
    except BrokenPipeError:
        _discard_output()
        return CLOSED_PIPE


def _refusing(action: Callable[[], int | None]) -> int:
    try:
        return action() or 0
    except BrokenPipeError:
        raise
    except ModuleNotFoundError as problem:
        if problem.name != "matplotlib":
            raise
        progress.say("error: the pictures need matplotlib: python -m pip install -e '.[plots]'", sys.stderr)
        return 2
    except (ValueError, OSError) as problem:
        progress.say(f"error: {problem}", sys.stderr)
        return 2


def _discard_output() -> None:
    """Python flushes its buffers once more at exit; they must not meet the closed pipe again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a stream in memory has no file
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
