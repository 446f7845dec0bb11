"""The likeliest tokens at each position, with their log-probabilities under the model's raw logits."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.numeric import is_int


class Top(NamedTuple):
    """The n likeliest tokens at each position, the likeliest first; of equal ones the lowest id first."""

    tokens: jax.Array  # i32[B, T, n]
    logprobs: jax.Array  # f32[B, T, n], natural logarithms


def likeliest(logprobs: jax.Array, count: int) -> Top:
    """The ``count`` largest of f32[B, T, V]."""
    values, tokens = lax.top_k(logprobs, count)
    return Top(tokens.astype(jnp.int32), values)


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
