"""What the scripts share in how they meet a user."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def flag(name: str) -> str:
    """As a user types the name of an argument."""
    return "--" + name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    """Refuses bad arguments in one sentence, with exit code 2."""

    def error(self, message):
        self.exit(2, f"error: {message} (see --help)\n")

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
    """The exit code of a script: ``action``'s (None is 0), or 2 and one sentence on stderr for what can't be done."""
    try:
        return action() or 0
    except ModuleNotFoundError as problem:
        if problem.name != "matplotlib":
            raise
        print("error: the pictures need matplotlib: python -m pip install -e '.[plots]'", file=sys.stderr)
        return 2
    except (ValueError, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
