"""Text as tokens arrive: pieces that add up, byte for byte, to decoding everything at once; and stop strings."""

import codecs
from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_LONGEST = 4  # bytes of a character in UTF-8


def check_unicode(what: str, text: str) -> None:
    """Raises ValueError for half of a surrogate pair: no tokenizer has ids for that."""
    place = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
    if place is not None:
        raise ValueError(
            f"{what} holds a lone surrogate {text[place]!a} at character {place} and is no valid Unicode; for the text "
            "without such, use text.encode(errors='replace').decode()"
        )


class TextStream:
    """Decodes one row's tokens incrementally, a few tokens at a time, whatever the tokens print.

    Each piece is the difference of two decodings that share the token before it, so a tokenizer that treats the
    first token of a text specially (SentencePiece drops its leading space) gives the same text as at once.

    SentencePiece decodes a run of byte tokens as a whole: one bad byte turns all of them into replacement characters.
    So the text of such a run is held back until another token ends the run or a byte spoils it. Stop strings are
    found in what is held back, too.

    Args:
      tokenizer: has ``decode(ids)``. ``Tokenizer`` also says which tokens print nothing
        (``prints``) and which are byte tokens (``byte_of``).
      stop: strings to look for.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.watching = True  # whether a stop string that a token completes counts
        self.stopped = False  # a stop string is complete
        self._pieces: list[str] = []
        self._end = ""  # the last emitted characters, as many as a stop string may need
        self._window: list[int] = []  # the last emitted token, and those held back
        self._known = 0  # emitted tokens in the window: 0 or 1
        self._run: _ByteRun | None = None  # of byte tokens, where the text ends in one

    @property
    def text(self) -> str:
        """All emitted so far."""
        return "".join(self._pieces)

    def push(self, token: int) -> str:
        """The text that one more token adds; empty while the text ends inside a character or a run of bytes."""
        if not getattr(self.tokenizer, "prints", _always)(token):
            return ""
        byte = getattr(self.tokenizer, "byte_of", _never)(token)
        if byte is not None:
            return self._push_byte(token, byte)
        self._run = None
        self._window.append(token)
        before, after = self._decoded()
        piece = after[len(before) :]
        self._look(self._end, piece)
        if piece.endswith(_INCOMPLETE):
            return self._emit_settled(before, after)
        return self._emit(piece, len(self._window)) if piece else ""

    def flush(self) -> str:
        """What was held back as incomplete; call it once, after the last token."""
        before, after = self._decoded()
        return self._emit(after[len(before) :], len(self._window))

    def _push_byte(self, token: int, byte: int) -> str:
        if self._run is None:
            before, after = self._decoded()
            self._run = _ByteRun(self._end + after[len(before) :])
        self._window.append(token)
        if self._run.broken:
            self._look(self._end, _INCOMPLETE)
            return self._emit(_INCOMPLETE, len(self._window))
        end = self._run.add(byte)
        self._look(self._run.end, end[len(self._run.end) :])
        self._run.end = self._tail(end)
        return self.flush() if self._run.broken else ""

    def _emit_settled(self, before: str, after: str) -> str:
        """Emits what no later token can change of a text that ends inside a character.

        A boundary between two tokens is one between characters if the two sides decode to the whole: the parts of a
        character, decoded apart, give more replacement characters than together. One of four tokens begins so.
        """
        if len(self._window) - self._known > _LONGEST:
            for cut in range(len(self._window) - 1, len(self._window) - 1 - _LONGEST, -1):
                head, tail = (self.tokenizer.decode(part) for part in (self._window[:cut], self._window[cut:]))
                if tail and head + tail == after:
                    return self._emit(head[len(before) :], cut)
        return ""

    def _decoded(self) -> tuple[str, str]:
        """The text of the window's emitted token, and that of the whole window."""
        return self.tokenizer.decode(self._window[: self._known]), self.tokenizer.decode(self._window)

    def _emit(self, piece: str, count: int) -> str:
        """Emits the first ``count`` tokens of the window, of which ``piece`` is the text."""
        self._window, self._known = self._window[max(count - 1, 0) :], min(count, 1)
        self._pieces.append(piece)
        self._end = self._tail(self._end + piece)
        return piece

    def _look(self, before: str, piece: str) -> None:
        """Notes whether ``piece``, which follows ``before``, completes a stop string."""
        if self.watching:
            recent = ((s, before[max(0, len(before) - len(s) + 1) :] + piece) for s in self.stop)
            self.stopped = self.stopped or any(s in text for s, text in recent)

    def _tail(self, text: str) -> str:
        return text[max(0, len(text) - max(map(len, self.stop), default=0)) :]


class _ByteRun:
    """A run of byte tokens: the end of the text so far, and whether the bytes can no longer become characters."""

    def __init__(self, end: str):
        self.end = end
        self.broken = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")()

    def add(self, byte: int) -> str:
        """The end of the text with the characters that this byte completes."""
        try:
            return self.end + self._utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            self.broken = True
            return self.end + _INCOMPLETE


def _always(token: int) -> bool:
    return True


def _never(token: int) -> None:
    return None
