"""How many tokens the next round drafts, when an engine may choose: drafting must never cost more than it gives.

A round that drafts takes longer and gives more tokens. Both are measured while the engine runs, because they change
with the requests: how many tokens are accepted, how long the texts are. The number of requests that run changes
neither, because a round computes all slots, idle ones included.
"""

import statistics
from collections import deque
from collections.abc import Iterable

# One in so many rounds is of another kind than the best one, to see how that kind does now. A round that drafts takes
# about twice as long as a plain one, so the trials cost under 2 % of the time.
TRIAL = 64
SAMPLES = 9  # the last rounds of each kind that count


class Pace:
    """Chooses among kinds of rounds by their tokens per second, each measured on its latest rounds.

    Args:
      kinds: the kinds of rounds; each is named by the number of tokens that it drafts.
    """

    def __init__(self, kinds: Iterable[int]) -> None:
        self._kinds = sorted(kinds, reverse=True)
        self._seconds: dict[int, deque[float]] = {kind: deque(maxlen=SAMPLES) for kind in self._kinds}
        self._tokens: dict[int, deque[float]] = {kind: deque(maxlen=SAMPLES) for kind in self._kinds}
        self._last = dict.fromkeys(self._kinds, 0)  # when a round of each kind was last chosen
        self._round = 0

    def next_kind(self) -> int:
        """The kind of the next round."""
        kind, self._round = self._best(), self._round + 1
        others = sorted((self._last[other], other) for other in self._kinds if other != kind)
        if others and self._round - others[-1][0] >= TRIAL:
            kind = others[0][1]  # the kind that was not tried for the longest time
        self._last[kind] = self._round
        return kind

    def learn(self, kind: int, seconds: float, tokens: float) -> None:
        """Learns of a round that nothing else held up.

        Args:
          kind: the kind of the round.
          seconds: how long the round took.
          tokens: the mean number of new tokens of the requests that took part.
        """
        self._seconds[kind].append(seconds)
        self._tokens[kind].append(tokens)

    def _best(self) -> int:
        """The kind that gives the most tokens per second. A kind of which little is known counts as the best."""
        for kind in self._kinds:
            if len(self._seconds[kind]) < SAMPLES // 2:
                return kind
        return max(self._kinds, key=self._rate)

    def _rate(self, kind: int) -> float:
        """Tokens of a request per second. One slow round, for example the first of a program, does not count."""
        return statistics.fmean(self._tokens[kind]) / statistics.median(self._seconds[kind])
