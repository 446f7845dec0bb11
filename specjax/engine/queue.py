"""The requests that wait, in the order in which they are admitted."""

import heapq
from typing import Generic, TypeVar

# A request of one priority level more waits as if it had come this many requests later. So a request of low priority is
# overtaken by a bounded number of later ones, and nobody starves.
LEVEL = 64

Item = TypeVar("Item")
Place = tuple[int, int]  # no two requests have the same


class Waiting(Generic[Item]):
    """A queue with priorities. Lower numbers go first; among equal numbers, the earlier request."""

    def __init__(self) -> None:
        self._heap: list[tuple[Place, Item]] = []
        self._arrived = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, item: Item, priority: int) -> Place:
        """Adds a request. -> its place: lower ones go first."""
        place = self._arrived + LEVEL * priority, self._arrived
        self._arrived += 1
        self.put_back(item, place)
        return place

    def put_back(self, item: Item, place: Place) -> None:
        """Adds a request once more, at the place that it had."""
        heapq.heappush(self._heap, (place, item))

    def first(self) -> Item:
        """The request whose turn it is. It stays in the queue."""
        return self._heap[0][1]

    def pop(self) -> Item:
        """Removes the request whose turn it is."""
        return heapq.heappop(self._heap)[1]

    def remove(self, item: Item) -> bool:
        """Removes a request, wherever it stands. -> whether the request was there."""
        kept = [entry for entry in self._heap if entry[1] is not item]
        found = len(kept) < len(self._heap)
        heapq.heapify(kept)
        self._heap = kept
        return found
