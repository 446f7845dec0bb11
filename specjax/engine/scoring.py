"""The log-probabilities of a text that is given: the model reads the text and generates nothing."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode.likeliest import Top, likeliest
from specjax.engine.engine import Engine
from specjax.generation import logprobs
from specjax.models import cache as kv
from specjax.models.cache import KVCache
from specjax.models.lm import LM

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
      ValueError: the text is longer than ``engine.longest``.
      EngineClosedError: the engine is closed.
    """
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


def _chunk(engine: Engine, cache: KVCache | None, room: int, part: np.ndarray, start: int) -> tuple[KVCache, Any, Top]:
    """Called by the engine's thread: dispatches the call for i32[1, CHUNK + 1] ``part`` at position ``start``."""
    cache = _empty(engine.lm, room) if cache is None else cache
    return _read(engine.lm, cache, part, np.array([start], np.int32), engine.max_logprobs)


@partial(jax.jit, static_argnames=("room",))
def _empty(lm: LM, room: int) -> KVCache:
    return lm.alloc_cache(1, room)


@partial(jax.jit, static_argnames=("count",), donate_argnames=("cache",))
def _read(lm: LM, cache: KVCache, part: Any, start: Any, count: int) -> tuple[KVCache, jax.Array, Top]:
    """The cache, and for the last CHUNK tokens of ``part`` f32[CHUNK] log-probabilities and the likeliest tokens."""
    out = lm(part[:, :-1], kv.with_lengths(cache, start))
    laws = jax.nn.log_softmax(out.logits[0].astype(jnp.float32), axis=-1)
    chosen = jnp.take_along_axis(laws, part[0, 1:, None], axis=1)[:, 0]
    return out.cache, chosen, likeliest(laws, count)
