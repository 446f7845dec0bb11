"""Whether the next round drafts, when an engine may choose: drafting must never cost more than it gives.

A round that drafts takes longer and gives more tokens. Both are measured while the engine runs, because they change
with the requests: how many tokens are accepted, how long the texts are, how busy the slots are.
"""

import statistics
from collections import deque

# Every so many rounds the other kind of round is tried once. A drafted round takes about twice as long as a plain one,
# so the trials cost under 2 % of the time.
TRIAL = 64
SAMPLES = 9  # the last rounds of each kind that count


class Pace:
    """Chooses between drafted and plain rounds by their tokens per second, each measured on its latest rounds."""

    def __init__(self) -> None:
        self._seconds: dict[bool, deque[float]] = {kind: deque(maxlen=SAMPLES) for kind in (True, False)}
        self._tokens: dict[bool, deque[float]] = {kind: deque(maxlen=SAMPLES) for kind in (True, False)}
        self._since = {True: 0, False: 0}  # rounds of the other kind since one of this kind

    def next_drafts(self) -> bool:
        """Whether the next round drafts."""
        drafts = self._better()
        if self._since[not drafts] >= TRIAL:
            drafts = not drafts
        self._since[drafts], self._since[not drafts] = 0, self._since[not drafts] + 1
        return drafts

    def learn(self, drafted: bool, seconds: float, tokens: float) -> None:
        """Learns of a round that nothing else held up.

        Args:
          drafted: whether the round drafted.
          seconds: how long the round took.
          tokens: the mean number of new tokens of the requests that took part.
        """
        self._seconds[drafted].append(seconds)
        self._tokens[drafted].append(tokens)

    def _better(self) -> bool:
        """Whether drafted rounds give more tokens per second. A kind of which little is known counts as the better."""
        for kind in (True, False):
            if len(self._seconds[kind]) < SAMPLES // 2:
                return kind
        return self._rate(True) >= self._rate(False)

    def _rate(self, kind: bool) -> float:
        """Tokens of a request per second. One slow round, for example the first of a program, does not count."""
        return statistics.fmean(self._tokens[kind]) / statistics.median(self._seconds[kind])
