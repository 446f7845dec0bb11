"""The requests that wait, in the order in which they are admitted."""

import heapq
from typing import Generic, TypeVar

# A request of one priority level more waits as if it had come this many requests later. So a request of low priority is
# overtaken by a bounded number of later ones, and nobody starves.
LEVEL = 64

Item = TypeVar("Item")


class Waiting(Generic[Item]):
    """A queue with priorities. Lower numbers go first; among equal numbers, the earlier request."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Item]] = []
        self._arrived = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, item: Item, priority: int) -> None:
        """Adds a request."""
        heapq.heappush(self._heap, (self._arrived + LEVEL * priority, self._arrived, item))
        self._arrived += 1

    def first(self) -> Item:
        """The request whose turn it is. It stays in the queue."""
        return self._heap[0][2]

    def pop(self) -> Item:
        """Removes the request whose turn it is."""
        return heapq.heappop(self._heap)[2]

    def remove(self, item: Item) -> bool:
        """Removes a request, wherever it stands. -> whether the request was there."""
        kept = [entry for entry in self._heap if entry[2] is not item]
        found = len(kept) < len(self._heap)
        heapq.heapify(kept)
        self._heap = kept
        return found
