"""From token ids and options to the arrays of a request, with every check, on the host."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
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
)
from specjax.decode.sampling import NO_TOKEN, EarlyStops, SamplingParams, TokenBias
from specjax.decode.types import Request
from specjax.generation import known_ids
from specjax.generation.options import Options, seeds
from specjax.generation.stops import stop_ids
from specjax.models import tuning
from specjax.models.lm import LM

MIN_TEMPERATURE = 1e-5


def build(lm: LM, prompts: list[list[int]], options: Options, headroom: int) -> tuple[Request, jax.Array, int]:
    """The request, the prompts' tokens i32[B, L], and the prefill chunk.

    Args:
      lm: the target.
      prompts: token ids, from :func:`encode_prompts`.
      options: the caller's.
      headroom: tokens past the limit that a round may write: those of its widest block.

    Raises:
      ValueError: naming the option, the value got and the values expected.
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
    request = Request(
        key=random.request_keys(seeds(options.seed, batch)),
        sampling=sampling_params(options, batch, vocab, known, stops),
        stop_ids=jnp.asarray(stops),
        limit=jnp.asarray(limits),
        prompt_lengths=jnp.asarray(lengths),
    )
    return request, jnp.asarray(tokens), chunk


def _capacity(lm: LM, asked: Any, longest: int, limit: int, headroom: int) -> tuple[int, int]:
    """Tokens that a row has room for, and the prefill chunk, which divides them."""
    needed = limit + headroom
    if asked is not None:
        if not (is_int(asked) and asked >= needed):
            raise ValueError(
                f"capacity must be an integer of at least {needed}: prompt, max_new_tokens, and {headroom} for a block "
                f"of drafted tokens and one more; got {asked!r}"
            )
        longest = needed = min(int(asked), lm.max_positions + headroom)  # no text is longer
    chunk = tuning.prefill_chunk(longest=longest)
    return bucket(needed, chunk), chunk


def bucket(needed: int, multiple: int) -> int:
    """Capacity for ``needed`` tokens: a power of two, or one and a half, so that few programs serve all lengths."""
    size = 128
    while size < needed:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return -(-size // multiple) * multiple


NUMBERS = {
    "temperature": real(0.0, 0, STRONGEST),
    "top_k": integer(-1, " (0 and -1 are off)"),
    "top_p": Number(
        1.0, jnp.float32, lambda p: in_range(p, 0, 1) and p > 0, "a number above 0 and at most 1", low=SMALLEST_FLOAT
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
    """Checks and packs the sampling options; transforms that no row uses stay None.

    Args:
      options: the caller's.
      batch: B.
      vocab: V.
      known: bool[V], the ids that may be generated at all; None: every id.
      stop_ids: i32[B, E], padded with NO_TOKEN; ``min_new_tokens`` forbids them. None: there are none.

    Raises:
      ValueError: naming the option, the value got and the values expected.
    """
    values = {name: number.array(name, getattr(options, name), batch) for name, number in NUMBERS.items()}
    temperature, top_k, least = (values.pop(name) for name in ("temperature", "top_k", "min_new_tokens"))
    if temperature is None:
        raise ValueError(f"temperature must be {NUMBERS['temperature'].expected}, got None")
    end = vocab if known is None else int(np.flatnonzero(known)[-1]) + 1
    holes = [] if known is None else np.flatnonzero(~known[:end]).tolist()
    return SamplingParams(
        temperature=jnp.where(temperature < MIN_TEMPERATURE, 0.0, temperature),
        top_k=None if top_k is None else jnp.where(top_k <= 0, vocab, jnp.minimum(top_k, vocab)),
        logit_bias=_logit_bias(options.logit_bias, batch, vocab, holes),
        vocabulary=None if end == vocab else jnp.full(batch, end, jnp.int32),
        allowed=_allowed(options.allowed_token_ids, batch, vocab, known),
        min_new_tokens=None if least is None or stop_ids is None else EarlyStops(least, jnp.asarray(stop_ids)),
        **values,
    )


def _new_tokens(value: Any, batch: int) -> np.ndarray:
    values = per_row("max_new_tokens", value, batch)
    for v in values:
        if v is not None and not (is_int(v) and v >= -1):
            raise ValueError(
                f"max_new_tokens must be an integer >= 0, or None or -1 for up to the model's context, got {v!r}"
            )
    unlimited = 1 << 30
    return np.array([unlimited if v is None or v == -1 else min(v, unlimited) for v in values], np.int64)


def _check_least(options: Options, batch: int) -> None:
    """Raises ValueError if a row must have more new tokens than it may."""
    bounds = (per_row(name, getattr(options, name), batch) for name in ("min_new_tokens", "max_new_tokens"))
    for row, (least, most) in enumerate(zip(*bounds, strict=True)):
        if is_int(least) and most is not None and 0 <= most < least:
            raise ValueError(f"min_new_tokens must be at most max_new_tokens, got {least} and {most} in row {row}")


def _logit_bias(value: Any, batch: int, vocab: int, unknown: Sequence[int]) -> TokenBias | None:
    """The biases of each row; ``unknown`` ids are forbidden in every row."""
    rows = per_row("logit_bias", value, batch)
    if not unknown and all(row is None for row in rows):
        return None
    listed = []
    for entries in rows:
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
        jnp.asarray(_padded([list(entries.values()) for entries in listed], 0.0, np.float32)),
    )


def _allowed(value: Any, batch: int, vocab: int, known: np.ndarray | None) -> jax.Array | None:
    """The tokens that each row may have, i32[B, A]; a row without a list allows all."""
    one_list_for_all = isinstance(value, list | tuple | set | frozenset) and all(is_int(v) for v in value)
    rows = [value] * batch if one_list_for_all else per_row("allowed_token_ids", value, batch)
    if all(row is None for row in rows):
        return None
    listed: list[list[int]] = []
    for row, given in enumerate(rows):
        ids = None if given is None else sorted(set(given))
        if ids is not None and (not ids or not all(is_int(token) and 0 <= token < vocab for token in ids)):
            raise ValueError(
                f"allowed_token_ids of row {row} must be at least one id below {vocab}, got {given!r}: nothing could "
                "be generated"
            )
        listed.append([token for token in ids or () if known is None or known[token]])
        if ids is not None and not listed[-1]:
            raise ValueError(
                f"allowed_token_ids of row {row} must hold an id that the tokenizer has, got {given!r}; "
                f"{known_ids.ALLOW}"
            )
    return _id_lists(listed)


def _id_lists(rows: Sequence[Sequence[int]]) -> jax.Array:
    """Lists of ids as i32[B, E], padded with NO_TOKEN."""
    return jnp.asarray(_padded(rows, NO_TOKEN, np.int32))


def _padded(rows: Sequence[Sequence[Any]], filler: Any, dtype: Any) -> np.ndarray:
    """Lists as an array [B, E], where E is a power of two, so that longer lists seldom compile anew."""
    longest = max(map(len, rows))
    padded = np.full((len(rows), max(4, 1 << max(0, longest - 1).bit_length())), filler, dtype)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return padded
