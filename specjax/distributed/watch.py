"""Ends the whole replica, with a message that names the rank, if a rank has gone, is silent, is stuck or differs."""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

EXIT = 70  # EX_SOFTWARE of sysexits.h
LAST_WORDS = 0.5  # seconds in which the other ranks are told why this one ends


class Watch:
    """What this rank knows of all ranks. Times are in seconds.

    Args:
      rank: this process's rank.
      names: the host and the process id of each rank.
      silence: the longest time without any message of a rank.
      stuck: the longest time in which no rank starts or ends a call, while calls are on the way. The first calls
        compile, so this is minutes.
      tell: sends a message to all ranks that can be reached.
    """

    def __init__(
        self, rank: int, names: dict[int, str], silence: float, stuck: float, tell: Callable[[dict[str, Any]], None]
    ):
        self.rank, self._names, self._silence, self._stuck, self._tell = rank, names, silence, stuck, tell
        now = time.monotonic()
        self._lock = threading.RLock()
        peers = [0] if rank else [other for other in names if other]
        self._heard = dict.fromkeys(peers, now)  # when each was heard last; peers that left are removed
        self._moved = now  # when a rank started or ended a call last
        self._at = dict.fromkeys(names, (0, "none"))  # the last call that each rank has started
        self._done = dict.fromkeys(names, 0)  # the last call that each rank has ended
        self._digests: dict[int, dict[int, int]] = {}  # call -> rank -> digest, until all have ended the call
        self._ending = False
        threading.Thread(target=self._look, name="specjax watch", daemon=True).start()

    def position(self) -> tuple[int, str]:
        """The number and the name of the last call that this rank has started."""
        return self._at[self.rank]

    def heard(self, peer: int) -> None:
        """A message of a peer has come."""
        with self._lock:
            if peer in self._heard:
                self._heard[peer] = time.monotonic()

    def started(self, rank: int, number: int, name: str) -> None:
        """A rank has started a call."""
        with self._lock:
            if number > self._at[rank][0]:
                self._at[rank], self._moved = (number, name), time.monotonic()

    def finished(self, rank: int, number: int, digest: int) -> None:
        """A rank has the results of a call. On rank 0 the digests of all ranks are compared."""
        with self._lock:
            self._done[rank], self._moved = number, time.monotonic()
            if self.rank:
                return
            found = self._digests.setdefault(number, {})
            found[rank] = digest
            if len(found) < len(self._names):
                return
            del self._digests[number]
        for other, one in found.items():
            if one != found[0]:
                self.end(f"{self._name(other)} has other results than rank 0 in call {number}")

    def leaves(self, peer: int) -> None:
        """A peer has said good-bye."""
        with self._lock:
            self._heard.pop(peer, None)

    def gone(self, peer: int) -> None:
        """The connection to a peer is gone."""
        if peer in self._heard:
            self.end(f"{self._name(peer)} has gone without a good-bye")

    def told(self, peer: int, problem: str) -> None:
        """A peer has ended, and has said why."""
        self.end(f"{self._name(peer)} has ended: {problem}")

    def end(self, problem: str) -> None:
        """Ends this process with exit code ``EXIT``, after telling the other ranks why. No exception could do that.

        A thread that waits for a collective with a rank that has gone can't be interrupted.
        """
        with self._lock:
            if self._ending:
                threading.Event().wait()
            self._ending = True
        print(f"specjax: {self._name(self.rank)} ends: {problem}", file=sys.stderr, flush=True)
        telling = threading.Thread(target=self._tell, args=({"problem": problem},), daemon=True)
        telling.start()
        telling.join(LAST_WORDS)
        sys.stdout.flush()
        os._exit(EXIT)

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._names[rank]})"

    def _look(self) -> None:
        """A thread: looks at all ranks a few times a second."""
        while True:
            time.sleep(min(self._silence, self._stuck) / 20)
            with self._lock:
                problem = self._problem(time.monotonic())
            if problem:
                self.end(problem)

    def _problem(self, now: float) -> str | None:
        """What is wrong with a rank; None: nothing."""
        for peer, heard in self._heard.items():
            if now - heard > self._silence:
                return f"{self._name(peer)} was not heard for {self._silence:g} seconds"
        last = self._at[0][0]
        if self.rank or min(self._done.values()) >= last or now - self._moved <= self._stuck:
            return None
        slowest = min(self._at, key=lambda rank: self._at[rank][0])
        if self._at[slowest][0] < last:
            return (f"{self._name(slowest)} is stuck: in {self._stuck:g} seconds it has not started the call after "
                    f"call {self._at[slowest][0]} ({self._at[slowest][1]})")  # fmt: skip
        waiting = ", ".join(self._name(rank) for rank, done in self._done.items() if done < last)
        return f"call {last} ({self._at[0][1]}) has not ended in {self._stuck:g} seconds on {waiting}"
