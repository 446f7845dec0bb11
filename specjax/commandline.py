"""What the scripts share in how they meet a user."""

import argparse
import sys
from collections.abc import Callable


class Parser(argparse.ArgumentParser):
    """Refuses bad arguments in one sentence, with exit code 2."""

    def error(self, message):
        self.exit(2, f"error: {message} (see --help)\n")


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
