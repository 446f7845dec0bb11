"""The exact joint law of the tokens that plain sampling generates, and a test of whether a sample follows a law."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.decode import sampling
from specjax.decode.types import DecodeState
from specjax.generation import requests, stops
from specjax.generation.generate import prepare
from specjax.generation.options import Options
from specjax.models import cache as kv
from specjax.models.lm import LM

# The smallest expected count of a cell. Below it Pearson's statistic does not follow chi-square (Cochran 1954).
SMALLEST_CELL = 5.0
# Texts are padded to a multiple of this length, so that prompts of several lengths share one compiled program.
PADDED_TO = 16


def joint_law(lm: LM, prompt: Sequence[int], length: int, **options) -> np.ndarray:
    """The probability of every continuation of a prompt under plain sampling, by enumeration.

    The model is teacher-forced: one call without an earlier cache reads all V^(length-1) prefixes. (An encoder first
    reads the prompt.) The chain rule then gives the law. This function uses the sampling transforms of decoding, but
    not its cache, its rounds or its draws.

    Args:
      lm: a model with a vocabulary of a few tokens.
      prompt: the prompt's token ids.
      length: the number of tokens of a continuation. End-of-text ids don't end a continuation.
      **options: sampling parameters of :class:`specjax.Options`, one value each.

    Returns:
      f64[V, ..., V] with ``length`` axes. The entries sum to 1.

    Raises:
      ValueError: there are more than 2^20 continuations, or an option can't be used.
    """
    prompt = [*prompt, *lm.config.start_ids]
    vocab, size = lm.config.vocab_size, len(prompt)
    if length < 1 or vocab**length > 1 << 20:
        raise ValueError(f"can't enumerate {vocab}^{length} continuations; use a model of a few tokens")
    given = Options(**options)
    params = requests.sampling_params(given, 1, vocab, stop_ids=stops.stop_ids(lm, given, 1))
    prefixes = np.indices((vocab,) * (length - 1)).reshape(length - 1, -1).T  # [V^(length-1), length-1], lexicographic
    rows = prefixes.shape[0]
    width = -(-(size + length - 1) // PADDED_TO) * PADDED_TO
    tokens = np.zeros((rows, width), np.int32)
    tokens[:, :size], tokens[:, size : size + length - 1] = prompt, prefixes
    by_depth = _teacher_forced(lm, jnp.asarray(tokens), params, jnp.int32(size), length)
    law = np.ones(1)
    for depth, probs in enumerate(np.asarray(by_depth, np.float64)):
        conditional = probs[:: vocab ** (length - 1 - depth)]  # one row for each prefix of this depth
        # After a prefix of probability 0 there may be no distribution (NaN). Its continuations have probability 0.
        law = (law[:, None] * np.where(law[:, None] > 0, conditional, 0.0)).ravel()
    return law.reshape((vocab,) * length)


@jax.jit(static_argnums=4)
def _teacher_forced(lm, tokens, params, prompt_length, length):
    """The next-token distributions after the prompt and 0..length-1 more tokens of each row. -> f32[length, R, V].

    Args:
      lm: the model.
      tokens: i32[R, T], the prompt and one continuation in each row, then padding.
      params: the sampling parameters, with one row.
      prompt_length: i32[], the number of prompt tokens.
      length: the number of distributions; static.
    """
    rows = tokens.shape[0]
    cache, first = lm.alloc_cache(rows, tokens.shape[1]), 0
    if lm.has_encoder:  # reads the prompt but its last token, and the decoder reads the rest
        first = prompt_length - 1
        cache = kv.with_lengths(lm.read(tokens, cache, jnp.full(rows, first)).cache, jnp.full(rows, first))
        logits = lm(lax.dynamic_slice_in_dim(tokens, first, length, axis=1), cache).logits
    else:
        logits = lm(tokens, cache).logits
    params, begins = jax.tree.map(lambda x: jnp.repeat(x, rows, axis=0), params), jnp.full(rows, first, jnp.int32)

    def after(position):
        lengths, prompt_lengths = (jnp.full(rows, length, jnp.int32) for length in (position, prompt_length))
        context = sampling.Context(tokens, lengths, prompt_lengths, jnp.zeros((rows, 1, 0), jnp.int32), begins)
        own = lax.dynamic_slice_in_dim(logits, position - 1 - first, 1, axis=1)
        return sampling.distribution(own, params, context)[:, 0]

    return lax.map(after, prompt_length + jnp.arange(length, dtype=jnp.int32))


def sample_sequences(
    lm: LM, prompt: Sequence[int], draws: int, length: int, batch: int = 4096, seed: int = 0, **options
) -> np.ndarray:
    """Many continuations of one prompt, drawn as :func:`specjax.generate` draws them. Each has its own seed.

    Args:
      lm: the target.
      prompt: the prompt's token ids.
      draws: the number of continuations.
      length: the number of tokens of each continuation. End-of-text ids don't end a continuation.
      batch: the number of rows of one call.
      seed: the seed of the first continuation; continuation i has seed + i.
      **options: other fields of :class:`specjax.Options`: drafter, verifier, num_speculative_tokens, temperature ...

    Returns:
      i64[draws, length].
    """
    batch = min(batch, draws)
    drawn = [
        run_tightly(lm, [prompt] * batch, max_new_tokens=length, ignore_eos=True, seed=seed + start, **options).tokens
        for start in range(0, draws, batch)
    ]
    size = len(prompt) + len(lm.config.start_ids)
    return np.concatenate(drawn)[:draws, size : size + length]


def run_tightly(lm: LM, prompts: Sequence[Sequence[int]], room: int = 0, **options) -> DecodeState:
    """Decodes like :func:`specjax.generate`, with buffers no longer than needed.

    This is for thousands of short rows: ``generate`` has room for at least 128 tokens in each row.

    Args:
      lm: the target.
      prompts: the token ids of each prompt.
      room: the number of new tokens that every row has room for, if its limit is lower. Runs with several limits then
        share one compiled program.
      **options: fields of :class:`specjax.Options`.

    Returns:
      The last state, in NumPy arrays, without caches.
    """
    job = prepare(lm, prompts, **options)
    prompt = max(map(len, job.prompts))
    needed = max(int(jnp.max(job.request.limit)), prompt + room) + job.decoder.plan.block
    chunk = max(1, prompt - 1)
    capacity = -(-needed // chunk) * chunk
    tokens = jnp.pad(job.tokens, ((0, 0), (0, capacity)))[:, :capacity]
    job = dataclasses.replace(job, tokens=tokens, chunk=chunk)
    state = job.decoder.run(job.start())
    without_keys: dict[str, Any] = {"key": None}  # NumPy has no arrays of keys
    on_device: dict[str, Any] = {"cache": None, "drafter": None, "request": state.request._replace(**without_keys)}
    return jax.device_get(state._replace(**on_device))


def count_sequences(sequences: np.ndarray, vocab: int) -> np.ndarray:
    """How often each sequence occurs among i[N, length]. -> i64[V, ..., V] with ``length`` axes."""
    shape = (vocab,) * sequences.shape[1]
    return np.bincount(np.ravel_multi_index(tuple(sequences.T), shape), minlength=int(np.prod(shape))).reshape(shape)


def chi_square(counts: Any, law: Any) -> float:
    """Pearson's test of whether counts follow a law. Cells with an expected count below 5 are pooled into one.

    Without pooling, the rare cells of a peaked law make every p-value look too good.

    Args:
      counts: i[...], how often each cell was seen.
      law: f[...] of the same shape, the probability of each cell. The probabilities sum to 1.

    Returns:
      The p-value. 0 if a cell of probability 0 was seen. 1 if a single cell is left after pooling.

    Raises:
      ValueError: the shapes differ, or the probabilities do not sum to 1.
    """
    counts, law = np.asarray(counts, np.float64).ravel(), np.asarray(law, np.float64).ravel()
    if counts.shape != law.shape or abs(law.sum() - 1) > 1e-3:
        raise ValueError(
            f"counts and law must have the same shape, and law must sum to 1; got {counts.size} counts and {law.size} "
            f"probabilities that sum to {law.sum()}"
        )
    if counts[law == 0].any():
        return 0.0
    order = np.argsort(law)
    expected, counts = law[order] * counts.sum(), counts[order]
    pooled = int(np.sum(expected < SMALLEST_CELL))
    while 0 < pooled < len(expected) and expected[:pooled].sum() < SMALLEST_CELL:
        pooled += 1
    if pooled:
        expected = np.append(expected[pooled:], expected[:pooled].sum())
        counts = np.append(counts[pooled:], counts[:pooled].sum())
    freedom = len(expected) - 1
    if freedom == 0:
        return 1.0
    statistic = np.sum((counts - expected) ** 2 / expected)
    return float(jax.scipy.special.gammaincc(freedom / 2, statistic / 2))
