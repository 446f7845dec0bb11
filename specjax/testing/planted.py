"""Models of real shape with planted weights: full compute, known output, and an acceptance rate chosen in advance.

With the attention and MLP outputs zero, the hidden state of token x is its embedding. Random embeddings are nearly
orthogonal, so a head row equal to x's normalised embedding answers to x and to little else.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax import parallel
from specjax.config import LlamaConfig
from specjax.models.lm import LM
from specjax.testing.models import random_params


def planted_pair(
    target_config: LlamaConfig,
    draft_config: LlamaConfig,
    alpha: float,
    seed: int = 0,
    dtype: Any = jnp.bfloat16,
    peak: float = 40.0,
    mesh: Mesh | None = None,
) -> tuple[LM, LM, np.ndarray]:
    """A target that follows a random cycle pi over its vocabulary, and a draft that agrees on a share alpha of it.

    Which tokens the draft knows is random, so along the cycle each drafted token that is reached is accepted with
    probability alpha, independently, as the theory assumes: 1 + alpha + ... + alpha^K tokens a round. Greedy and
    temperature-1 decoding give the same text, as far as ``peak`` is high.

    Args:
      target_config: the target's shape.
      draft_config: the draft's, with the same vocabulary size.
      alpha: share of the vocabulary, from 0 to 1, whose successor the draft predicts right.
      seed: of the weights, the cycle and the draft's share.
      dtype: of both models' weights.
      peak: the logit of the planted successor; all others are about peak / sqrt(hidden_size) times a standard normal.
      mesh: devices to make the target on, in parts, and the draft on, whole each; None: the default device.

    Returns:
      The target, the draft, and pi i64[V]: token x is followed by pi[x].

    Raises:
      ValueError: if the vocabularies differ or alpha is out of range.
    """
    vocab = target_config.vocab_size
    if draft_config.vocab_size != vocab:
        raise ValueError(f"planted models need one vocabulary size, got {vocab} and {draft_config.vocab_size}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be from 0 to 1, got {alpha!r}")
    rng = np.random.default_rng(seed)
    order = rng.permutation(vocab)
    pi = np.empty(vocab, np.int64)
    pi[order] = np.roll(order, -1)
    guess = partly_right(pi, alpha, rng)
    target = planted_lm(target_config, pi, 2 * seed, dtype, peak, mesh)
    draft = planted_lm(draft_config, guess, 2 * seed + 1, dtype, peak)
    return target, draft if mesh is None else parallel.replicate(draft, mesh), pi


def partly_right(successor: np.ndarray, alpha: float, seed: int | np.random.Generator = 0) -> np.ndarray:
    """``successor`` i64[V] on a random share alpha of the tokens and another's elsewhere: a permutation as it is."""
    wrong = np.random.default_rng(seed).permutation(len(successor))[: round((1 - alpha) * len(successor))]
    guess = successor.copy()
    guess[wrong] = np.roll(successor[wrong], 1)
    return guess


def planted_lm(
    config: LlamaConfig,
    successor: np.ndarray,
    seed: int = 0,
    dtype: Any = jnp.bfloat16,
    peak: float = 40.0,
    mesh: Mesh | None = None,
) -> LM:
    """A model of the given shape in which token x is followed by ``successor[x]``.

    Made where it stays, one leaf at a time in ``dtype``: no float32 copy of the model exists. Weights that
    don't matter are random, since zeros would draw less power on an accelerator.

    Args:
      config: its shape. Tied embeddings are untied, as a tied head could answer to x only with x; that reads no more
        bytes a step, but holds V x hidden_size more. End-of-text ids are dropped: runs last as long as asked.
      successor: i[V], a permutation.
      seed: of the weights.
      dtype: of the weights.
      peak: the planted successor's logit.
      mesh: devices to make it on, each its own part of each leaf; None: the default device.

    Raises:
      ValueError: if ``successor`` isn't a permutation of the vocabulary.
    """
    successor = np.asarray(successor)
    if not np.array_equal(np.sort(successor), np.arange(config.vocab_size)):
        raise ValueError("successor must be a permutation of the vocabulary: one head row serves one token")
    config = dataclasses.replace(config, tie_word_embeddings=False, eos_token_ids=())
    params = random_params(config, seed, dtype=dtype, mesh=mesh)

    def place(x: jax.Array):  # None without a mesh: a weight pinned to a device would make programs of its own
        return x.sharding if mesh is not None else None

    for layer in params["layers"].values():
        for last in (layer["attention"]["o"], layer["mlp"]["down"]):
            last["weight"] = jnp.zeros_like(last["weight"], device=place(last["weight"]))
    where = place(params.pop("lm_head"))  # freed before its successor is made
    before = jnp.asarray(np.argsort(successor), jnp.int32)
    params["lm_head"] = jax.jit(_head, out_shardings=where)(params["embed"], before, jnp.float32(peak))
    return LM(config, params, cache_sharding=parallel.cache_sharding(mesh))


def _head(embed, before, peak):
    """Row y is peak times the normalised embedding of the token before y, over its squared norm: logit ``peak``."""
    x = embed[before].astype(jnp.float32)
    normed = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True))
    return (normed * (peak / embed.shape[1])).astype(embed.dtype)
