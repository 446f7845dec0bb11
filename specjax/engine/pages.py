"""The pages of a pool, as the host knows them: which are free, which requests use each, and which hold a known prefix.

A page is in one of three places:

    free      nobody uses the page, and its entries are worth nothing
    in use    one request or several requests have the page in their tables
    kept      nobody uses the page, but its entries are those of a known prefix; the page that was used longest ago is
              the first to be given away

The null page of :mod:`specjax.models.cache`, the page before the first one here, is in none of these places.
"""

import hashlib
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

import numpy as np

from specjax.models.cache import PAGE


class Pages:
    """The pages ``first`` to ``first + count - 1``.

    Args:
      count: the number of pages, the null page not counted.
      first: the number of the page after the null page.
    """

    def __init__(self, count: int, first: int = 1):
        self.count = count
        self._free: deque[int] = deque(range(first, first + count))
        self._users = dict.fromkeys(self._free, 0)  # how many requests use each page
        self._key: dict[int, bytes] = {}  # the prefix of each published page
        self._page: dict[bytes, int] = {}  # the published page of each prefix
        self._kept: OrderedDict[int, None] = OrderedDict()  # published pages that nobody uses, oldest first

    @property
    def available(self) -> int:
        """The number of pages that a request can get: free ones and kept ones."""
        return len(self._free) + len(self._kept)

    def take(self, count: int) -> list[int]:
        """``count`` pages for one request. Free pages go first, then kept pages, the oldest one first.

        The caller guarantees ``count <= available``.
        """
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.popleft()
            else:
                page, _ = self._kept.popitem(last=False)
                del self._page[self._key.pop(page)]
            self._users[page] = 1
            pages.append(page)
        return pages

    def known(self, keys: Sequence[bytes]) -> list[int]:
        """The published pages of the longest known prefix, by the keys of :func:`prefix_keys`. Nothing is reserved."""
        pages: list[int] = []
        for key in keys:
            if key not in self._page:
                break
            pages.append(self._page[key])
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more request uses these published pages."""
        for page in pages:
            self._users[page] += 1
            self._kept.pop(page, None)

    def publish(self, pages: Sequence[int], keys: Sequence[bytes]) -> None:
        """From now on these pages, which are in use, are the known pages of these prefixes.

        A prefix that has a page already keeps that page. A published page is never written again.
        """
        for page, key in zip(pages, keys, strict=True):
            if key not in self._page and page not in self._key:
                self._page[key], self._key[page] = page, key

    def published(self) -> dict[bytes, int]:
        """The page of every known prefix."""
        return dict(self._page)

    def give_back(self, pages: Sequence[int]) -> None:
        """A request no longer uses these pages. Published pages are kept, all others become free.

        The last page of a prefix is the first to be given away, because a page is found only after all pages before it.
        """
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page] == 0 and page in self._key:
                self._kept[page] = None
            elif self._users[page] == 0:
                self._free.append(page)

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Checks that every page is in exactly one place.

        Args:
          tables: the pages of every request that has pages.

        Raises:
          RuntimeError: a page is lost, in two places, or in more tables than it has users. This is a fault of specjax.
        """
        users = Counter(page for table in tables for page in table)
        problems = [
            f"page {page} is in {users[page]} tables and has {self._users.get(page, 0)} users"
            for page in {*users, *self._users}
            if users[page] != self._users.get(page, 0)
        ]
        idle = sorted([*self._free, *self._kept])
        expected = [page for page in self._users if not users[page]]
        if problems or idle != expected or any(page not in self._key for page in self._kept):
            raise RuntimeError(
                f"the pages don't add up: {len(self._free)} free and {len(self._kept)} kept, expected {len(expected)} "
                f"in both; {'; '.join(problems) or 'users agree'}"
            )


def prefix_keys(prompt: Sequence[int], salt: str) -> list[bytes]:
    """The keys of a prompt's pages that can be shared: one SHA-256 a page, each over the key of the page before.

    A page's key covers the page's tokens and one token more: an entry of an EAGLE head is made from two neighbouring
    tokens. The last prompt token is fed by the first round and not by prefill. So a prompt of P tokens has
    (P - 2) // PAGE such pages.

    Args:
      prompt: the token ids.
      salt: prompts with different salts share nothing.
    """
    keys, key = [], hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()
    ids = token_ids(prompt)
    for start in range(0, max(0, len(prompt) - 2) // PAGE * PAGE, PAGE):
        key = hashlib.sha256(key + ids[start : start + PAGE + 1].tobytes()).digest()
        keys.append(key)
    return keys


def token_ids(prompt: Sequence[int]) -> np.ndarray:
    """The ids as one array, whose bytes are hashed. -> i32[P]."""
    return np.asarray(prompt, np.int32)
