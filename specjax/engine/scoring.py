"""The log-probabilities of a text that is given: the model reads the text and generates nothing."""

from functools import partial
from typing import Any

import jax
import numpy as np

from specjax.decode.likeliest import Top
from specjax.engine.engine import Engine
from specjax.generation import logprobs
from specjax.models import cache as kv
from specjax.models.model import check_no_encoder

# The tokens that one call reads. Each call holds the logits of so many tokens.
CHUNK = 64


def score(engine: Engine, tokens: list[int], count: int) -> list[tuple[float, list[tuple[int, float]]]]:
    """The log-probability of each token of a text after the tokens before it, under the model's raw logits.

    The engine's thread dispatches one call of the model for each ``CHUNK`` tokens, between two rounds. All calls have
    one shape. The text has a cache of its own, so it takes no slot and no page.

    Args:
      engine: the engine. Call this from another thread than the engine's: it blocks.
      tokens: the text's token ids.
      count: how many of the likeliest tokens to give at each position, at most ``engine.max_logprobs``.

    Returns:
      For each token but the first: its natural log-probability, and the likeliest tokens at its position as (id,
      log-probability) pairs.

    Raises:
      ValueError: the text is longer than ``engine.longest``, or the model has an encoder.
      EngineClosedError: the engine is closed.
    """
    check_no_encoder(engine.lm, "scoring a text")
    if len(tokens) > engine.longest:
        raise ValueError(f"the text has {len(tokens)} tokens, and this engine reads at most {engine.longest}")
    room = kv.room(-(-engine.longest // CHUNK) * CHUNK)
    padded = np.zeros((1, room + 1), np.int32)
    padded[0, : len(tokens)] = tokens
    cache: Any = None
    read = []
    for start in range(0, len(tokens) - 1, CHUNK):
        part = padded[:, start : start + CHUNK + 1]
        cache, chosen, top = engine.between_rounds(partial(_chunk, engine, cache, room, part, start)).result()
        read.append((chosen, top))
    found: list[tuple[float, list[tuple[int, float]]]] = []
    for chosen, top in jax.device_get(read):
        best = logprobs.pairs(Top(*(x[:, :count] for x in top)))
        found += zip(chosen.tolist(), best, strict=True)
    return found[: len(tokens) - 1]


def _chunk(engine: Engine, cache: Any, room: int, part: np.ndarray, start: int) -> tuple[Any, Any, Top]:
    """Called by the engine's thread: dispatches the call for i32[1, CHUNK + 1] ``part`` at position ``start``."""
    cache = engine.programs.scoring_cache(engine.lm, room) if cache is None else cache
    return engine.programs.score(engine.lm, cache, part, np.array([start], np.int32), engine.max_logprobs)
