"""Text as tokens arrive: pieces that add up, byte for byte, to decoding everything at once; and stop strings."""

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def check_unicode(what: str, text: str) -> None:
    """Raises ValueError for half of a surrogate pair: no tokenizer has ids for that."""
    place = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
    if place is not None:
        raise ValueError(
            f"{what} holds a lone surrogate {text[place]!a} at character {place} and is no valid Unicode; for the text "
            "without such, use text.encode(errors='replace').decode()"
        )


class TextStream:
    """Decodes one row's tokens incrementally.

    Each piece is the difference of two decodings that share the tokens before it, so a tokenizer that treats the
    first token of a text specially (SentencePiece drops its leading space) gives the same text as at once.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.text = ""  # all emitted so far
        self.stopped = False  # a stop string is complete
        self._tokens: list[int] = []
        self._shared = 0  # decoding starts here
        self._emitted = 0  # tokens before this are emitted

    def push(self, token: int) -> str:
        """The text that one more token adds; empty while it ends inside a character."""
        self._tokens.append(token)
        before, after = self._decode()
        piece = after[len(before) :]
        # Only what this token completes counts: strings may have been passed by before ``stop`` held them.
        recent = ((s, self.text[max(0, len(self.text) - len(s) + 1) :] + piece) for s in self.stop)
        self.stopped = self.stopped or any(s in text for s, text in recent)
        if piece.endswith(_INCOMPLETE) or len(after) <= len(before):
            return ""
        return self._emit(piece)

    def flush(self) -> str:
        """What was held back as incomplete; call it once, after the last token."""
        before, after = self._decode()
        return self._emit(after[len(before) :])

    def _decode(self) -> tuple[str, str]:
        return (
            self.tokenizer.decode(self._tokens[self._shared : self._emitted]),
            self.tokenizer.decode(self._tokens[self._shared :]),
        )

    def _emit(self, piece: str) -> str:
        self._shared, self._emitted = self._emitted, len(self._tokens)
        self.text += piece
        return piece
