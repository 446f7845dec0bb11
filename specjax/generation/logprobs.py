"""The option ``logprobs``: its valid values, and the form in which a result gives the likeliest tokens."""

from typing import Any

from specjax.decode.likeliest import Top
from specjax.decode.numeric import is_int


def pairs(of_row: Top) -> list[list[tuple[int, float]]]:
    """For each position of one row, a list of (token, log-probability) pairs, from NumPy arrays [T, n]."""
    rows = zip(of_row.tokens.tolist(), of_row.logprobs.tolist(), strict=True)
    return [list(zip(tokens, values, strict=True)) for tokens, values in rows]


def check(asked: Any) -> None:
    """Raises ValueError unless ``asked`` is a valid value of the option ``logprobs``."""
    if not (isinstance(asked, bool) or (is_int(asked) and asked >= 0)):
        raise ValueError(
            "logprobs must be True, False, or an integer >= 0: the number of likeliest tokens to give beside each "
            f"generated token; got {asked!r}"
        )


def wanted(asked: bool | int) -> bool:
    """Whether the option asks for the log-probabilities of the generated tokens. 0 asks for them; False does not."""
    return asked is not False


def best_wanted(asked: bool | int, vocab: int) -> int:
    """The number of likeliest tokens that the option asks for at each position, at most ``vocab``."""
    return 0 if isinstance(asked, bool) else min(int(asked), vocab)
