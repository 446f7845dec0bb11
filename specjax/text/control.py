"""Control strings in a user's text: ``<|im_end|>`` in a message must be text, not the token that ends a turn.

Before the template sees the user's text, ``mark`` puts a mark after the first character of each control string. The
mark is a Unicode noncharacter. The template may then trim, cut, split, join or recase the text. Afterwards ``parts``
breaks the rendered text wherever a mark stands inside a control string, and removes all marks. The parts are encoded
one by one, so no tokenizer can find the control string.

    the user's text     a<|im_end|>b
    after ``mark``      a<*|im_end|>b                         * is the mark
    rendered            <|im_start|>user a<*|im_end|>b        the template's own control string has no mark
    after ``parts``     "<|im_start|>user a<", "|im_end|>b"

transformers' ``sanitize_control_tokens`` works alike, with marks around the control string.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Any

MARK = "\ufdd0"  # Unicode reserves this noncharacter for a program's own use, so text never contains it


class Control:
    """The control strings of one tokenizer. Strings of one character are left out: a mark can't stand in them."""

    def __init__(self, strings: Iterable[str]):
        self.strings = sorted({s for s in strings if len(s) > 1 and not s.isspace()}, key=len, reverse=True)
        one = "|".join(map(re.escape, self.strings)) or "(?!)"  # "(?!)" never matches
        self._here = re.compile(f"(?=({one}))")
        self._first = re.compile(f"(?=(?:{one})).", re.IGNORECASE | re.DOTALL)  # templates may change the case
        self._begun = {s[:i].lower() for s in self.strings for i in range(1, len(s))}

    def mark(self, value: Any) -> Any:
        """A string, or all strings in lists and dicts, with a mark after the first character of each control string.

        A string that ends with the beginning of a control string is marked at its end too, because templates join
        strings.
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
        """The text without marks, broken at each mark that stands inside a control string."""
        pieces = text.split(MARK)
        clean, places, place = "".join(pieces), [], 0
        for piece in pieces[:-1]:
            place += len(piece)
            places.append(place)
        spans = [m.span(1) for m in self._here.finditer(clean)] if places else []
        inside = {p for start, end in spans for p in places[bisect_right(places, start) : bisect_left(places, end)]}
        breaks = sorted(inside)
        return [clean[i:j] for i, j in zip([0, *breaks], [*breaks, len(clean)], strict=True)]
