"""Text up to a stop string. The engine's text holds the string; clients of OpenAI's interface expect it cut off."""

from collections.abc import Sequence

Segments = list[tuple[str, str]]  # pieces of text, each with the origin of its token


class HeldText:
    """Lets text pass, apart from an end that may turn out to be the beginning of a stop string.

    Args:
      stops: the stop strings.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._held: Segments = []

    def push(self, text: str, origin: str, finish_reason: str | None = None) -> Segments:
        """The text that is settled after one more token.

        Args:
          text: the text of the token. With a finish reason, it ends in a stop string if one ended the request.
          origin: the origin of the token.
          finish_reason: "stop" if the request ended by a stop string or stop token, another reason, or None.
        """
        if not self._stops:
            return [(text, origin)] if text else []
        before = sum(len(held) for held, _ in self._held)
        if text:
            self._held.append((text, origin))
        pending = "".join(held for held, _ in self._held)
        if finish_reason is None:
            return self._take(len(pending) - self._beginning(pending))
        end = len(pending)
        if finish_reason == "stop":  # a stop string ends inside the last token's text, else the token itself is a stop
            found = (pending.find(stop, max(0, before - len(stop) + 1)) for stop in self._stops)
            end = min((place for place in found if place >= 0), default=end)
        settled = self._take(end)
        self._held = []
        return settled

    def _beginning(self, text: str) -> int:
        """The length of the longest end of a text that begins a stop string, and is not all of it."""
        longest = len(text) + 1
        lengths = (n for stop in self._stops for n in range(1, min(len(stop), longest)) if text.endswith(stop[:n]))
        return max(lengths, default=0)

    def _take(self, count: int) -> Segments:
        """Removes the first ``count`` characters."""
        taken: Segments = []
        while count > 0:
            text, origin = self._held.pop(0)
            taken.append((text[:count], origin))
            if len(text) > count:
                self._held.insert(0, (text[count:], origin))
            count -= len(text)
        return taken
