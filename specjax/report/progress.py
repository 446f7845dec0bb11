"""Lines of progress: what the scripts show on stderr while a user waits, and nothing where stderr is no terminal.

The library calls the same functions, but they show nothing until a script asks (:func:`show`).
"""

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_shown = False


def show() -> None:
    """From now on lines of progress are shown in this process, if stderr is a terminal."""
    global _shown
    _shown = True


def bar(items: Iterable | None = None, **options: Any):
    """A ``tqdm`` bar over ``items``, or one to ``update``; gone once it is closed.

    Args:
      items: what is gone through, if anything.
      **options: of ``tqdm``: ``desc`` (what is done), ``total``, ``unit``, ``initial``, ``bar_format``.
    """
    from tqdm import tqdm  # slow to import

    return tqdm(items, file=sys.stderr, leave=False, disable=None if _shown else True, dynamic_ncols=True, **options)


def say(line: str, stream: TextIO | None = None) -> None:
    """Prints a line above any bar, on stdout unless ``stream`` is another."""
    from tqdm import tqdm

    stream = stream or sys.stdout
    tqdm.write(line, file=stream)
    stream.flush()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Shows ``what`` and the seconds that it has taken, for the time of a ``with`` block: work of unknown length."""
    done = threading.Event()
    with bar(desc=what, bar_format="{desc} {elapsed}") as line:

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
