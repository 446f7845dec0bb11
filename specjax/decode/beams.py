"""Beam search: the W likeliest unfinished texts of each prompt grow token by token, and the best that end are kept.

The rules are those of Hugging Face's beam search, so the texts are the same token for token. In each step all tokens
after all beams compete. A token's score is the log-probability of the whole text: log-softmax, then bias, penalties and
masks, then the beam's score is added. Of the candidates that don't end a text, the W best are the next beams. A
candidate that ends its text is kept only if it is among the W best of all candidates.

B is the number of prompts, W the number of beams, C the number of candidates, L the token capacity, S the slots of the
cache. Axis 0 of every array is the prompt. All beams of one prompt have the same length.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.decode import rows, sampling
from specjax.decode.arrays import rows_at, span
from specjax.decode.likeliest import top_k
from specjax.decode.round import is_stop
from specjax.decode.types import Request
from specjax.models import cache as kv
from specjax.models.cache import KVCache
from specjax.models.model import Model


class Beams(NamedTuple):
    """Unfinished texts, the best first. Axis 1 is the beam."""

    # i32[B, W, L] Prompt and new tokens; meaningful below the prompt's present length.
    tokens: jax.Array
    # f32[B, W] The log-probability of the new tokens. -inf: there is no such beam, and no text comes of it.
    scores: jax.Array
    # bool[B, W, S] The slots of the cache that hold the beam's tokens. The last token has no slot until it is fed.
    sees: jax.Array


class Finished(NamedTuple):
    """Texts that have ended, the best first. Axis 1 is the text."""

    # i32[B, W, L] Prompt and new tokens.
    tokens: jax.Array
    # i32[B, W] The number of tokens, prompt included.
    lengths: jax.Array
    # f32[B, W] The log-probability of the new tokens over (their number) ** length_penalty. -inf: there is no text yet.
    scores: jax.Array


class Children(NamedTuple):
    """Candidates: beams with one more token, the best first."""

    # i32[B, C] The beam that each candidate continues.
    parents: jax.Array
    # i32[B, C] The token that each candidate adds.
    tokens: jax.Array
    # f32[B, C] The log-probability of all new tokens.
    scores: jax.Array


class Rules(NamedTuple):
    """What the search asks of each prompt, beside the request."""

    # f32[B] The power of the length by which the score of a finished text is divided.
    length_penalty: jax.Array
    # bool[B] Whether the search ends as soon as W texts have ended.
    early: jax.Array
    # bool[B] Whether the search goes on while a text of the greatest length could still be better.
    never_early: jax.Array


def children(
    beams: Beams, lengths: jax.Array, logits: jax.Array, request: Request, begins: jax.Array, width: int
) -> Children:
    """The best candidates: so many that at least ``width`` of them don't end in a stop token.

    Args:
      beams: W beams.
      lengths: i32[B], the length of the beams.
      logits: [B, W, V], the model's logits after each beam.
      request: the request of each prompt.
      begins: i32[B], where the text begins, of which repetition counts (``Context.begins``).
      width: how many beams will be chosen.

    Returns:
      C candidates. C is ``width`` * (1 + the number of stop tokens), and at most W * V.
    """
    batch, old, vocab = logits.shape
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32)).reshape(batch * old, 1, vocab)
    params, ends, starts, begins = jax.tree.map(
        lambda x: jnp.repeat(x, old, axis=0), (request.sampling, lengths, request.prompt_lengths, begins)
    )
    no_path = jnp.zeros((batch * old, 1, 0), jnp.int32)
    context = sampling.Context(beams.tokens.reshape(batch * old, -1), ends, starts, no_path, begins)
    logprobs = sampling.unsharpened(logprobs, params, context).reshape(batch, old, vocab)
    scores = (logprobs + beams.scores[..., None]).reshape(batch, old * vocab)
    count = min(width * (1 + request.stop_ids.shape[1]), old * vocab)
    scores, places = top_k(scores, count)
    return Children(places // vocab, places % vocab, scores)


def best(found: Children, wanted: jax.Array, count: int) -> Children:
    """The ``count`` best of the candidates that bool[B, C] marks. If fewer are marked, the rest have the score -inf."""
    scores, places = jax.lax.top_k(jnp.where(wanted, found.scores, -jnp.inf), count)
    return Children(rows_at(found.parents, places), rows_at(found.tokens, places), scores)


def grown(beams: Beams, lengths: jax.Array, found: Children) -> Beams:
    """The beams that the candidates make: rows of their parents, each with one more token."""
    beams = jax.vmap(rows.take)(beams, found.parents)
    tokens = jax.vmap(lambda rows, end, new: rows.at[:, end].set(new))(beams.tokens, lengths, found.tokens)
    return Beams(tokens, found.scores, beams.sees)


def advance(
    beams: Beams,
    finished: Finished,
    lengths: jax.Array,
    logits: jax.Array,
    request: Request,
    begins: jax.Array,
    rules: Rules,
) -> tuple[Children, Finished, jax.Array]:
    """One step of the search.

    Args:
      beams: W beams.
      finished: the texts that have ended so far.
      lengths: i32[B], the length of the beams.
      logits: [B, W, V], the target's logits after each beam.
      request: the request of each prompt.
      begins: as in :func:`children`.
      rules: how the search ends.

    Returns:
      The W candidates that are the next beams, the finished texts, and bool[B], whether the search goes on.
    """
    width = beams.scores.shape[1]
    found = children(beams, lengths, logits, request, begins, width)
    ends = is_stop(found.tokens, request.stop_ids) | (lengths + 1 >= request.limit)[:, None]  # [B, C]
    chosen = best(found, ~ends, width)
    new = (lengths + 1 - request.prompt_lengths).astype(jnp.float32)
    scores = found.scores / (new**rules.length_penalty)[:, None]
    ended = Finished(
        grown(beams, lengths, found).tokens,
        jnp.broadcast_to(lengths[:, None] + 1, ends.shape),
        jnp.where(ends & (span(ends.shape[1]) < width), scores, -jnp.inf),
    )
    finished = _best_of_both(finished, ended)
    longest = jnp.where(
        rules.never_early & (rules.length_penalty > 0), request.limit - request.prompt_lengths, new
    )
    could_be = chosen.scores[:, 0] / longest**rules.length_penalty
    full = jnp.all(jnp.isfinite(finished.scores), axis=1)
    goes_on = (could_be > jnp.min(finished.scores, axis=1)) & ~(rules.early & full) & (lengths + 1 < request.limit)
    return chosen, finished, goes_on


def _best_of_both(old: Finished, new: Finished) -> Finished:
    """The best of two lists of finished texts, as many as the first has."""
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), old, new)
    places = jax.lax.top_k(both.scores, old.scores.shape[1])[1]
    return jax.vmap(rows.take)(both, places)


def last_tokens(beams: Beams, lengths: jax.Array) -> jax.Array:
    """The last token of each beam. -> i32[B, W]."""
    return jax.vmap(lambda rows, end: rows[:, end - 1])(beams.tokens, lengths)


def placed(sees: jax.Array, starts: jax.Array) -> jax.Array:
    """``sees`` bool[B, W, S] with the slots of the beams' last tokens: beam w has its slot at starts i32[B] + w."""
    own = starts[:, None] + span(sees.shape[1])  # [B, W]
    return sees | (span(sees.shape[2])[None] == own[..., None])


def feed(lm: Model, cache: KVCache, beams: Beams, lengths: jax.Array) -> tuple[jax.Array, KVCache, Beams]:
    """Feeds the last token of each beam to a model, all in one row of its cache a prompt.

    Args:
      lm: the model.
      cache: its cache. Beam w gets the slot w past each prompt's length.
      beams: W beams.
      lengths: i32[B], the length of the beams.

    Returns:
      The logits [B, W, V], the cache with W more entries, and the beams, which see their new slots.
    """
    beams = beams._replace(sees=placed(beams.sees, cache.lengths))
    positions = jnp.broadcast_to(lengths[:, None] - 1, beams.scores.shape)
    out = lm(last_tokens(beams, lengths), cache, positions, beams.sees)
    return out.logits, kv.with_lengths(out.cache, cache.lengths + beams.scores.shape[1]), beams
