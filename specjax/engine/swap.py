"""Overcommitment: requests get pages as they grow, and when the pages run out, the youngest request is swapped out.

Its row and its pages are saved, and it joins the queue again at its old place. Later it goes on in any slot and in any
pages, as if nothing had happened, because no bit depends on slot or page numbers. Requests are only swapped out for
older ones, and one request alone always fits. So the oldest request always comes to its end, and then the next one.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.engine import saved

if TYPE_CHECKING:
    from specjax.engine.loop import Loop
    from specjax.engine.parts import Part
    from specjax.engine.ticket import Ticket


def make_room(loop: "Loop") -> None:
    """Before a round: gives each running request the pages that the round may write to."""
    if any(_missing(loop, part) > part.pages.available for part in loop.parts):
        loop.learn_all()  # some requests may have ended, and of the others the lengths are known exactly
    for part in loop.parts:
        while _missing(loop, part) > part.pages.available:
            staged = [loop.staged] if loop.staged and loop.staged.part is part else []
            _swap_out(loop, max([*staged, *part.present(loop.running)], key=lambda ticket: ticket.place))
    if any(_missing(loop, part) for part in loop.parts):
        for ticket in filter(None, loop.running):
            ticket.pages += ticket.part.pages.take(loop.missing(ticket))
        loop.state = loop.programs.give_tables(loop.state, _tables(loop))


def _missing(loop: "Loop", part: "Part") -> int:
    """The number of pages that the requests of a part lack for the next round."""
    return sum(map(loop.missing, part.present(loop.running)))


def _swap_out(loop: "Loop", ticket: "Ticket") -> None:
    """Takes a request's pages, and its slot if it has one. No round is in flight, so the host knows all its tokens."""
    if ticket is loop.staged:  # its prompt is read again, by the same calls
        loop.staged = loop.staged_row = None
    else:
        ticket.saved = saved.request_of(loop.programs, loop.state, ticket)
        loop.release([ticket])
        ticket.slot = None
        loop.held_up = True
        loop.counts.swaps += 1
    ticket.part.pages.give_back(ticket.pages)
    ticket.pages = []
    loop.waiting.put_back(ticket, ticket.place)


def _tables(loop: "Loop") -> Any:
    """i32[B, W] The pages of every slot."""
    tables = np.zeros((len(loop.running), loop.width), np.int32)
    for slot, ticket in enumerate(loop.running):
        if ticket is not None:
            tables[slot, : len(ticket.pages)] = ticket.pages
    return tables
