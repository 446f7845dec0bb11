"""The parts of the mesh that share an engine's rows: each has slots and pages of its own (``models/axes.py``).

    part 0    slots 0 to B/2 - 1     pages 0 (the null page) to P/2 - 1
    part 1    slots B/2 to B - 1     pages P/2 (this part's null page) to P - 1

A request has a slot and pages of one part. An engine without such a mesh has one part.
"""

from typing import TYPE_CHECKING, NamedTuple, Optional

from jax.sharding import Mesh

from specjax.engine.pages import Pages
from specjax.engine.programs import Limits
from specjax.models import axes

if TYPE_CHECKING:
    from specjax.engine.ticket import Ticket


class Part(NamedTuple):
    """One part of the mesh."""

    number: int
    # The slots of this part.
    slots: range
    # The pages of this part.
    pages: Pages

    def present(self, running: list[Optional["Ticket"]]) -> list["Ticket"]:
        """The requests that run here, of those in each slot of the engine."""
        return [ticket for slot in self.slots if (ticket := running[slot]) is not None]


def parts_of(limits: Limits, mesh: Mesh | None) -> list[Part]:
    """The parts of an engine on a mesh. Their number divides the slots and the pages."""
    count = axes.parts(mesh)
    slots, pages = limits.slots // count, limits.pages // count
    return [
        Part(number, range(number * slots, (number + 1) * slots), Pages(pages - 1, 1 + number * pages))
        for number in range(count)
    ]


def with_slots(parts: list[Part], running: list[Optional["Ticket"]], ticket: "Ticket") -> list[Part]:
    """The parts that have a free slot, the best one for a request first.

    That is the part that knows most of the prompt, and among equal ones the part with most pages to give.
    """
    free = [part for part in parts if len(part.present(running)) < len(part.slots)]
    return sorted(free, key=lambda part: (-len(part.pages.known(ticket.keys)), -part.pages.available))
