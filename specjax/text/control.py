"""Control strings in a user's text: ``<|im_end|>`` in a message must be text, not the token that ends a turn.

A noncharacter is put after the first character of each control string in what the user wrote, before the template
sees it. The template may trim, cut, split, join or recase the text. Afterwards the text is broken where such a mark
stands inside a control string, and the parts are encoded one by one, so no tokenizer can find the string.
transformers' ``sanitize_control_tokens`` works likewise, with marks around the string.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Any

MARK = "\ufdd0"  # Unicode keeps it for a program's own use; it never stands in text


class Control:
    """The control strings of one tokenizer. Strings of a single character can't be told from that character."""

    def __init__(self, strings: Iterable[str]):
        self.strings = sorted({s for s in strings if len(s) > 1 and not s.isspace()}, key=len, reverse=True)
        one = "|".join(map(re.escape, self.strings)) or "(?!)"  # which never matches
        self._here = re.compile(f"(?=({one}))")
        self._first = re.compile(f"(?=(?:{one})).", re.IGNORECASE | re.DOTALL)  # templates may change the case
        self._begun = {s[:i].lower() for s in self.strings for i in range(1, len(s))}

    def mark(self, value: Any) -> Any:
        """A string, or all strings in lists and dicts, with marks where control strings begin.

        A string that ends inside of one is marked at its end, since templates join strings.
        """
        if isinstance(value, str):
            value = value.replace(MARK, "")
            longest = len(self.strings[0]) if self.strings else 0
            ends = any(value[-i:].lower() in self._begun for i in range(1, min(longest, len(value) + 1)))
            return self._first.sub(rf"\g<0>{MARK}", value) + MARK * ends
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        return [self.mark(item) for item in value] if isinstance(value, list) else value

    def parts(self, text: str) -> list[str]:
        """The text without marks, broken at those that stand inside a control string."""
        pieces = text.split(MARK)
        clean, places, at = "".join(pieces), [], 0
        for piece in pieces[:-1]:
            at += len(piece)
            places.append(at)
        spans = [m.span(1) for m in self._here.finditer(clean)] if places else []
        inside = {p for start, end in spans for p in places[bisect_right(places, start) : bisect_left(places, end)]}
        breaks = sorted(inside)
        return [clean[i:j] for i, j in zip([0, *breaks], [*breaks, len(clean)], strict=True)]
