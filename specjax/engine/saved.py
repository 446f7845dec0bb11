"""What a request goes on from, in any slot and in any pages: its row, and the entries of its own pages.

There are two uses. A request that is swapped out leaves the device: its pages go to the host's memory.

A request of several samples reads its prompt once. The whole pages of the prompt are found by their keys and shared.
The last page is filled in part, and each sample writes to its own copy. So that page is saved, with the row.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from specjax.decode.types import DecodeState
from specjax.engine.programs import Programs
from specjax.models.cache import PAGE

if TYPE_CHECKING:
    from specjax.engine.ticket import Ticket

GROUP = 8  # pages that one call copies. What is left over is copied page by page, so there are two programs.


class Saved(NamedTuple):
    """A row and pages. The pages before the saved ones must be known, by their keys."""

    # The row, without pools. Its table and key are replaced.
    row: DecodeState
    # The place in the row's table of the first saved page.
    first: int
    # The entries of groups of pages, on the device or on the host.
    groups: list[Any]


class Samples:
    """The samples of one prompt. The first one to be admitted reads the prompt; the others go on from there."""

    def __init__(self) -> None:
        self.waiting: set[Ticket] = set()  # the samples that have no slot yet
        self.read: Saved | None = None  # the prompt; None: not read yet, or nobody needs it any more

    def leave(self, ticket: "Ticket") -> None:
        """A sample has been admitted, or has ended. The prompt is kept as long as a sample waits."""
        self.waiting.discard(ticket)
        if not self.waiting:
            self.read = None


def prompt_of(programs: Programs, state: DecodeState, row: DecodeState, pages: Sequence[int], length: int) -> Saved:
    """A prompt of ``length`` tokens that was read into ``pages``, with its row. Its last page stays on the device.

    The last prompt token is not read, and an EAGLE head's last entry comes with the first round. So the whole pages are
    those of ``prefix_keys``, and all further entries are in the page after them.
    """
    whole = (length - 2) // PAGE
    return Saved(row, whole, list(_entries(programs, state, pages[whole : whole + 1])))


def request_of(programs: Programs, state: DecodeState, ticket: "Ticket") -> Saved:
    """A running request, whose pages go to the host. Entries past its length are worth nothing, and are left out.

    The host waits for each group of pages, so the device needs room for one group more, and no further room.
    """
    assert ticket.slot is not None
    row = programs.take_row(state, _numbers([ticket.slot]))
    pages = ticket.pages[: -(-ticket.length // PAGE)]
    return Saved(row, 0, [jax.device_get(entries) for entries in _entries(programs, state, pages)])


def restored(programs: Programs, state: DecodeState, saved: Saved, pages: Sequence[int]) -> DecodeState:
    """The state with the saved entries in ``pages``: the request's table from place ``saved.first`` on, or more."""
    start = 0
    for entries in saved.groups:
        size = len(jax.tree.leaves(entries)[0])
        state = programs.write_pages(state, _numbers(pages[start : start + size]), entries)
        start += size
    return state


def compiled(programs: Programs, state: DecodeState, swaps: bool) -> DecodeState:
    """The state as it is, once the programs of this file have run. Without ``swaps``: those that samples need."""
    if swaps:
        programs.take_row(state, _numbers([0]))
    for pages in ([0], [0] * GROUP) if swaps else ([0],):
        for entries in _entries(programs, state, pages):
            state = programs.write_pages(state, _numbers(pages), entries)
            if swaps:
                state = programs.write_pages(state, _numbers(pages), jax.device_get(entries))
    return state


def _entries(programs: Programs, state: DecodeState, pages: Sequence[int]) -> Iterator[Any]:
    """The entries of pages in every pool, group by group."""
    start = 0
    while start < len(pages):
        size = GROUP if start + GROUP <= len(pages) else 1
        yield programs.read_pages(state, _numbers(pages[start : start + size]))
        start += size


def _numbers(pages: Sequence[int]) -> Any:
    return np.array(pages, np.int32)
