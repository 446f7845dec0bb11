"""Shows the progress of long work on stderr, while a user waits. If stderr is no terminal, nothing is shown.

The library calls these functions too. They show nothing until a script calls :func:`show`.
"""

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_shown = False


def show() -> None:
    """Switches progress on for the rest of the process, if stderr is a terminal."""
    global _shown
    _shown = True


def bar(items: Iterable | None = None, **options: Any):
    """A ``tqdm`` bar. The bar disappears when it is closed.

    Args:
      items: the items to iterate over; None: the caller moves the bar with ``update``.
      **options: options of ``tqdm``: ``desc`` (the name of the work), ``total``, ``unit``, ``initial``, ``bar_format``.
    """
    from tqdm import tqdm  # imported here because the import is slow

    return tqdm(items, file=sys.stderr, leave=False, disable=None if _shown else True, dynamic_ncols=True, **options)


def say(line: str, stream: TextIO | None = None) -> None:
    """Prints a line above any bar, to ``stream``. None: to stdout."""
    from tqdm import tqdm

    stream = stream or sys.stdout
    tqdm.write(line, file=stream)
    stream.flush()


@contextmanager
def waiting(work: str) -> Iterator[None]:
    """Shows the name of the work in a ``with`` block and the seconds so far. Use this for work of unknown length."""
    done = threading.Event()
    with bar(desc=work, bar_format="{desc} {elapsed}") as line:

        def tick() -> None:
            while not done.wait(0.5):
                line.refresh()

        clock = threading.Thread(target=tick, daemon=True)
        if not line.disable:
            clock.start()
        try:
            yield
        finally:
            done.set()
            if not line.disable:
                clock.join()
