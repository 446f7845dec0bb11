"""The checks of ``SPECJAX_CHECK=1``: after every turn the pages add up, and no published page has changed."""

import os
from typing import TYPE_CHECKING, Optional

import jax
import numpy as np

from specjax.engine import programs

if TYPE_CHECKING:
    from specjax.engine.loop import Loop


class Checks:
    """Reads all published pages after every turn. That is slow, and meant for tests and for finding faults."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[bytes, list[bytes]]] = {}  # of each published page its prefix, and its entries then

    @classmethod
    def wanted(cls) -> Optional["Checks"]:
        """The checks if the environment asks for them, else None."""
        return cls() if os.environ.get("SPECJAX_CHECK", "0") not in ("", "0") else None

    def check(self, loop: "Loop") -> None:
        """Raises RuntimeError if the pages of a loop don't add up, or if a published page has changed."""
        tickets = [ticket for ticket in [loop.staged, *loop.running] if ticket is not None]
        for part in loop.parts:
            part.pages.check([ticket.pages for ticket in tickets if ticket.part is part])
        self.compare(loop)
        _check_tables(loop)

    def compare(self, loop: "Loop") -> None:
        """Raises RuntimeError if a published page has changed since the last call. Remembers all published pages."""
        found = {}
        for key, page in [pair for part in loop.parts for pair in part.pages.published().items()]:
            entries = _entries(loop, page)
            before = self._seen.get(page)
            if before is not None and before[0] == key and before[1] != entries:
                raise RuntimeError(f"page {page} holds a known prefix, and its entries have changed")
            found[page] = key, entries
        self._seen = found


def _entries(loop: "Loop", page: int) -> list[bytes]:
    """The bytes of one page in every pool."""
    pools = jax.tree.leaves([(cache.keys, cache.values) for cache in programs.caches(loop.state)])
    return [np.asarray(pool[page]).tobytes() for pool in pools]


def _check_tables(loop: "Loop") -> None:
    """Raises RuntimeError if the device's tables differ from the pages that the host gave to the slots."""
    for cache in programs.caches(loop.state):
        for slot, row in enumerate(np.asarray(cache.table).tolist()):
            ticket = loop.running[slot]
            expected = [] if ticket is None else ticket.pages
            expected = (expected + [0] * len(row))[: len(row)]
            if row != expected:
                raise RuntimeError(f"slot {slot} has the pages {row} on the device, expected {expected}")
