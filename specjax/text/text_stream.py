"""Text as tokens arrive, and stop strings. The pieces add up, byte for byte, to the text of all tokens at once."""

import codecs
from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_LONGEST = 4  # bytes of a character in UTF-8


def check_unicode(name: str, text: str) -> None:
    """Raises ValueError if the text holds half of a surrogate pair. No tokenizer has ids for such a half.

    ``name`` is what the error calls the text.
    """
    place = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
    if place is not None:
        raise ValueError(
            f"{name} holds a lone surrogate {text[place]!a} at character {place} and is no valid Unicode; to replace "
            "all lone surrogates, use text.encode(errors='replace').decode()"
        )


class TextStream:
    """Decodes the tokens of one row incrementally. Each push decodes only a few tokens.

    Each piece is the difference of two decodings that both begin with the token before the piece. So the text is right
    even if a tokenizer treats the first token of a text specially, as SentencePiece does: it drops the leading space.

    SentencePiece decodes a run of byte tokens as a whole. One bad byte turns the whole run into replacement characters.
    So the text of a run is held back until another token ends the run, or until a bad byte comes. Stop strings are also
    found in text that is held back.

    Args:
      tokenizer: has ``decode(ids)``. If it also has ``prints`` and ``byte_of``, as ``Tokenizer`` has, they say which
        tokens print nothing and which are byte tokens.
      stop: the stop strings.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.watching = True  # whether stop strings are looked for; the caller may change it between tokens
        self.stopped = False  # whether a stop string is complete
        self._pieces: list[str] = []  # the pieces emitted so far
        self._end = ""  # the last emitted characters, as many as the longest stop string has
        self._window: list[int] = []  # the last emitted token, then the tokens that are held back
        self._known = 0  # how many tokens of the window are emitted: 0 or 1
        self._run: _ByteRun | None = None  # the run of byte tokens in which the text ends; None: it ends in none

    @property
    def text(self) -> str:
        """All text emitted so far."""
        return "".join(self._pieces)

    def push(self, token: int) -> str:
        """The text that one more token adds. It is empty while the text ends inside a character or a run of bytes."""
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
        """The text that was held back as incomplete. Call this once, after the last token."""
        before, after = self._decoded()
        return self._emit(after[len(before) :], len(self._window))

    def _push_byte(self, token: int, byte: int) -> str:
        """:meth:`push` for a byte token."""
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
        """Of a text that ends inside a character, emits the part that no later token can change.

        The part ends at a boundary between two tokens that is also a boundary between two characters. Such a boundary
        is found by decoding its two sides apart: if the results join to the decoded whole, no character is cut, because
        the parts of a cut character give more replacement characters than the whole character. A character has at most
        four bytes, so one of the last four tokens begins a character.
        """
        if len(self._window) - self._known > _LONGEST:
            for cut in range(len(self._window) - 1, len(self._window) - 1 - _LONGEST, -1):
                head, tail = (self.tokenizer.decode(part) for part in (self._window[:cut], self._window[cut:]))
                if tail and head + tail == after:
                    return self._emit(head[len(before) :], cut)
        return ""

    def _decoded(self) -> tuple[str, str]:
        """The text of the window's emitted token, and the text of the whole window."""
        return self.tokenizer.decode(self._window[: self._known]), self.tokenizer.decode(self._window)

    def _emit(self, piece: str, count: int) -> str:
        """Emits the first ``count`` tokens of the window, whose text is ``piece``."""
        self._window, self._known = self._window[max(count - 1, 0) :], min(count, 1)
        self._pieces.append(piece)
        self._end = self._tail(self._end + piece)
        return piece

    def _look(self, before: str, piece: str) -> None:
        """Sets ``stopped`` if ``piece``, after the text ``before``, completes a stop string."""
        if self.watching:
            recent = ((s, before[max(0, len(before) - len(s) + 1) :] + piece) for s in self.stop)
            self.stopped = self.stopped or any(s in text for s, text in recent)

    def _tail(self, text: str) -> str:
        """The last characters of a text, as many as the longest stop string has."""
        return text[max(0, len(text) - max(map(len, self.stop), default=0)) :]


class _ByteRun:
    """A run of byte tokens, decoded byte by byte. ``end`` is the end of the text before the run."""

    def __init__(self, end: str):
        self.end = end  # the end of the text, the run included
        self.broken = False  # whether a bad byte came, so that the run is no text
        self._utf8 = codecs.getincrementaldecoder("utf-8")()

    def add(self, byte: int) -> str:
        """The end of the text after one more byte. If the byte completes no character, nothing is added."""
        try:
            return self.end + self._utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            self.broken = True
            return self.end + _INCOMPLETE


def _always(token: int) -> bool:
    return True


def _never(token: int) -> None:
    return None
