"""Turns token ids and options into the arrays of a request, with every check. All of this runs on the host.

The arrays are NumPy's, apart from the random keys. A compiled program takes them as they are.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specjax.decode import random
from specjax.decode.numeric import (
    LARGEST_FLOAT,
    SMALLEST_FLOAT,
    STRONGEST,
    STRONGEST_REPETITION,
    Number,
    in_range,
    integer,
    is_int,
    is_real,
    per_row,
    real,
    without_arrays,
)
from specjax.decode.sampling import NO_TOKEN, EarlyStops, SamplingParams, TokenBias
from specjax.decode.types import Request
from specjax.generation import known_ids
from specjax.generation.options import Options, seeds
from specjax.generation.padding import padded
from specjax.generation.stops import stop_ids
from specjax.models import tuning
from specjax.models.lm import LM

MIN_TEMPERATURE = 1e-5  # lower temperatures count as 0


def build(
    lm: LM,
    prompts: list[list[int]],
    options: Options,
    headroom: int,
    keys_of: Callable[[list[int]], Any] = random.request_keys,
) -> tuple[Request, np.ndarray, int]:
    """Checks the options and builds the arrays of a request.

    Args:
      lm: the target.
      prompts: the token ids of each prompt, from :func:`encode_prompts`.
      options: the user's options.
      headroom: the number of tokens that a round may write past a row's limit, by ``Decoder.headroom``.
      keys_of: makes the random keys of the rows' seeds.

    Returns:
      The request, the prompts i32[B, L], and the number of tokens that a prefill call reads, by :func:`_capacity`.

    Raises:
      ValueError: an option can't be used. The message names the option, the value and the expected values.
    """
    batch, vocab = len(prompts), lm.vocab_size
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    limits = lengths + _new_tokens(options.max_new_tokens, batch)
    _check_least(options, batch)
    limits = np.minimum(limits, lm.max_positions).astype(np.int32)
    capacity, chunk = _capacity(lm, options.capacity, int(lengths.max()), int(limits.max()), headroom)
    tokens = np.zeros((batch, capacity), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    stops = stop_ids(lm, options, batch)
    known = None if options.allow_unknown_ids else known_ids.known_ids(lm, stops[0])
    arrays: dict[str, Any] = {"stop_ids": stops, "limit": limits, "prompt_lengths": lengths}
    keys = keys_of(seeds(options.seed, batch))
    return Request(keys, sampling_params(options, batch, vocab, known, stops), **arrays), tokens, chunk


def _capacity(lm: LM, asked: Any, longest: int, limit: int, headroom: int) -> tuple[int, int]:
    """The capacity and the prefill chunk. The chunk divides the capacity, or holds the longest source of an encoder.

    Args:
      lm: the target.
      asked: the option ``capacity``, or None.
      longest: the length of the longest prompt.
      limit: the largest length at which a row ends.
      headroom: the number of tokens that a round may write past a row's limit.

    Raises:
      ValueError: ``asked`` is too small, or no integer.
    """
    needed = limit + headroom
    if asked is not None:
        if not (is_int(asked) and asked >= needed):
            raise ValueError(
                f"capacity must be an integer of at least {needed}: prompt, max_new_tokens, and {headroom} for a block "
                f"of drafted tokens and one more; got {asked!r}; give a larger capacity or leave it out"
            )
        longest = needed = min(int(asked), lm.max_positions + headroom)  # a text never needs more
    if lm.has_encoder:  # reads each source whole
        return bucket(needed), bucket(longest - 1, least=64)
    chunk = tuning.prefill_chunk(longest=longest)
    return bucket(needed, chunk), chunk


def bucket(needed: int, multiple: int = 1, least: int = 128) -> int:
    """A capacity for ``needed`` tokens, rounded up to a multiple of ``multiple``.

    Before this rounding the capacity is a power of two, or one and a half times a power of two, and at least ``least``,
    which is a power of two. Few programs thus serve all lengths.
    """
    size = least
    while size < needed:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return -(-size // multiple) * multiple


# The options that take a number for each row, and the numbers that each one takes.
NUMBERS = {
    "temperature": real(0.0, 0, STRONGEST),
    "top_k": integer(-1, " (0 and -1 are off)"),
    "top_p": Number(
        1.0, np.float32, lambda p: in_range(p, 0, 1) and p > 0, "a number above 0 and at most 1", low=SMALLEST_FLOAT
    ),
    "min_p": real(0.0, 0, 1),
    "repetition_penalty": real(1.0, 1 / STRONGEST_REPETITION, STRONGEST_REPETITION),
    "presence_penalty": real(0.0, -STRONGEST, STRONGEST),
    "frequency_penalty": real(0.0, -STRONGEST, STRONGEST),
    "no_repeat_ngram_size": integer(0, " (0 is off)"),
    "min_new_tokens": integer(0, " (0 is off)"),
}


def sampling_params(
    options: Options, batch: int, vocab: int, known: np.ndarray | None = None, stop_ids: np.ndarray | None = None
) -> SamplingParams:
    """Checks the sampling options and packs them into arrays. A parameter that no row uses is None.

    Args:
      options: the user's options.
      batch: B.
      vocab: V.
      known: bool[V], the ids that may be generated; None: every id.
      stop_ids: i32[B, E], the stop tokens that ``min_new_tokens`` forbids, padded with NO_TOKEN; None: there are none.

    Raises:
      ValueError: an option can't be used. The message names the option, the value and the expected values.
    """
    values: dict[str, Any] = {
        name: number.array(name, getattr(options, name), batch) for name, number in NUMBERS.items()
    }
    temperature, top_k, least = (values.pop(name) for name in ("temperature", "top_k", "min_new_tokens"))
    if temperature is None:
        raise ValueError(f"temperature must be {NUMBERS['temperature'].expected}, got None")
    end = vocab if known is None else int(np.flatnonzero(known)[-1]) + 1
    holes = [] if known is None else np.flatnonzero(~known[:end]).tolist()
    values["temperature"] = np.where(temperature < MIN_TEMPERATURE, np.float32(0.0), temperature)
    if top_k is not None:
        values["top_k"] = np.where(top_k <= 0, vocab, np.minimum(top_k, vocab)).astype(np.int32)
    if end < vocab:
        values["vocabulary"] = np.full(batch, end, np.int32)
    if least is not None and stop_ids is not None:
        values["min_new_tokens"] = EarlyStops(least, stop_ids)  # type: ignore[arg-type]
    bias = _logit_bias(options.logit_bias, batch, vocab, holes)
    return SamplingParams(logit_bias=bias, allowed=_allowed(options.allowed_token_ids, batch, vocab, known), **values)


def _new_tokens(value: Any, batch: int) -> np.ndarray:
    """The largest number of new tokens of each row, from the option ``max_new_tokens``. -> i64[B]."""
    values = per_row("max_new_tokens", value, batch)
    for v in values:
        if v is not None and not (is_int(v) and v >= -1):
            raise ValueError(
                f"max_new_tokens must be an integer >= 0, or None or -1 for up to the model's context, got {v!r}"
            )
    unlimited = 1 << 30
    return np.array([unlimited if v is None or v == -1 else min(v, unlimited) for v in values], np.int64)


def _check_least(options: Options, batch: int) -> None:
    """Raises ValueError if ``min_new_tokens`` of a row is above its ``max_new_tokens``."""
    bounds = (per_row(name, getattr(options, name), batch) for name in ("min_new_tokens", "max_new_tokens"))
    for row, (least, most) in enumerate(zip(*bounds, strict=True)):
        if is_int(least) and most is not None and 0 <= most < least:
            raise ValueError(f"min_new_tokens must be at most max_new_tokens, got {least} and {most} in row {row}")


def _logit_bias(value: Any, batch: int, vocab: int, unknown: Sequence[int]) -> TokenBias | None:
    """The biases of each row, from the option ``logit_bias``. The ids in ``unknown`` are forbidden in every row."""
    rows = per_row("logit_bias", value, batch)
    if not unknown and all(row is None for row in rows):
        return None
    listed = []
    for entries in rows:
        if not isinstance(entries, Mapping | None):
            raise ValueError(f"logit_bias must map token ids to numbers, got {entries!r:.200}")
        for token, amount in (entries or {}).items():
            if not (is_int(token) and 0 <= token < vocab):
                raise ValueError(f"logit_bias maps token ids below {vocab} to numbers, got {token!r}: {amount!r}")
            if not (in_range(amount, -LARGEST_FLOAT, STRONGEST) or (is_real(amount) and amount == -math.inf)):
                raise ValueError(
                    f"logit_bias must be numbers from -3.4e38 to {STRONGEST:g}, or -inf to forbid a token, got "
                    f"{token!r}: {amount!r}"
                )
        listed.append({**(entries or {}), **dict.fromkeys(unknown, -math.inf)})
    return TokenBias(
        _id_lists([list(entries) for entries in listed]),
        padded([list(entries.values()) for entries in listed], 0.0, np.float32),  # type: ignore[arg-type]
    )


def _allowed(value: Any, batch: int, vocab: int, known: np.ndarray | None) -> Any:
    """The tokens that each row may generate, from the option ``allowed_token_ids``. -> i32[B, A].

    A row of NO_TOKEN alone allows all tokens. The result is None if every row allows all tokens.
    """
    value = without_arrays(value)
    one_list_for_all = isinstance(value, list | tuple | set | frozenset) and all(is_int(v) for v in value)
    rows = [value] * batch if one_list_for_all else per_row("allowed_token_ids", value, batch)
    if all(row is None for row in rows):
        return None
    listed: list[list[int]] = []
    for row, given in enumerate(rows):
        given = without_arrays(given)
        is_list = isinstance(given, Iterable) and not isinstance(given, Mapping)  # a mapping's values would be lost
        ids = None if given is None else list(given) if is_list else []
        if ids is not None and (not ids or not all(is_int(token) and 0 <= token < vocab for token in ids)):
            raise ValueError(
                f"allowed_token_ids of row {row} must be at least one id below {vocab}, got {given!r}; give ids of the "
                "vocabulary, or None to allow every token"
            )
        listed.append([token for token in sorted(set(ids or ())) if known is None or known[token]])
        if ids is not None and not listed[-1]:
            raise ValueError(
                f"allowed_token_ids of row {row} must hold an id that the tokenizer has, got {given!r}; "
                f"{known_ids.ALLOW}"
            )
    return _id_lists(listed)


def _id_lists(rows: Sequence[Sequence[int]]) -> Any:
    """Lists of ids as one array, padded with NO_TOKEN. -> i32[B, E]."""
    return padded(rows, NO_TOKEN, np.int32)
