"""The option ``logprobs``: what a caller may ask for, and how the likeliest tokens are handed back."""

from typing import Any

from specjax.decode.likeliest import Top
from specjax.decode.numeric import is_int


def pairs(of_row: Top) -> list[list[tuple[int, float]]]:
    """(token, log-probability) pairs of one row's positions, from NumPy arrays [T, n]."""
    rows = zip(of_row.tokens.tolist(), of_row.logprobs.tolist(), strict=True)
    return [list(zip(tokens, values, strict=True)) for tokens, values in rows]


def check(asked: Any) -> None:
    """Raises ValueError for a value that the option ``logprobs`` can't have."""
    if not (isinstance(asked, bool) or (is_int(asked) and asked >= 0)):
        raise ValueError(
            "logprobs must be True or False, or how many of the likeliest tokens to give beside each, an integer >= 0; "
            f"got {asked!r}"
        )


def wanted(asked: bool | int) -> bool:
    """Whether the option asks for the log-probabilities of the generated tokens: 0 does, and False doesn't."""
    return asked is not False


def best_wanted(asked: bool | int, vocab: int) -> int:
    """How many of the likeliest tokens the option asks for."""
    return 0 if isinstance(asked, bool) else min(int(asked), vocab)
