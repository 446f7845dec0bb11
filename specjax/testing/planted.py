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

from specjax.models import parallel
from specjax.models.config import LlamaConfig
from specjax.models.lm import LM
from specjax.testing.tiny_models import random_params


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
    pi, guess = _successors(vocab, alpha, seed)
    target = planted_lm(target_config, pi, 2 * seed, dtype, peak, mesh)
    draft = planted_lm(draft_config, guess, 2 * seed + 1, dtype, peak)
    return target, parallel.replicate(draft, mesh), pi


def planted_exit(
    config: LlamaConfig,
    exit_layer: int,
    alpha: float,
    seed: int = 0,
    dtype: Any = jnp.bfloat16,
    peak: float = 40.0,
    mesh: Mesh | None = None,
) -> tuple[LM, np.ndarray]:
    """A model that follows a random cycle pi, and that is right on a share alpha of its vocabulary if it is left after
    ``exit_layer`` layers: what training for early exit is for, with a rate chosen in advance.

    Half of each hidden state says pi's successor, half, twice as loudly, a guess. The layer after the exit takes the
    guess away; all others add nothing. So c, the cost of a draft step, is that of the layers up to the exit and of the
    head, and the rate holds for one depth: no claim of what a trained model reaches there.

    Args:
      config: the model's shape, as of :func:`planted_lm`; its MLP at least half as wide as its hidden state.
      exit_layer: from 1 to the last layer but one.
      alpha: share of the vocabulary whose successor the exit predicts right.
      seed, dtype, peak, mesh: as of :func:`planted_pair`.

    Returns:
      The model, and pi i64[V].

    Raises:
      ValueError: if alpha, the layer or the shape is out of range.
    """
    layers, half, wide = config.num_hidden_layers, config.hidden_size // 2, config.intermediate_size
    if not 1 <= exit_layer < layers:
        raise ValueError(f"exit_layer must be from 1 to {layers - 1}: a later layer corrects it; got {exit_layer!r}")
    if wide < half:
        raise ValueError(f"the MLP must be at least {half} wide to take half of a hidden state away, got {wide}")
    pi, guess = _successors(config.vocab_size, alpha, seed)
    model = planted_lm(config, pi, 2 * seed, dtype, peak, mesh)
    params = model.params

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return jax.device_put(new.astype(old.dtype), old.sharding)

    def two_voices(embed, before, before_guess):
        """Embeddings with halves of one loudness and a first entry of 1, and the head rows that answer to both."""
        x = embed.astype(jnp.float32).reshape(len(embed), 2, half)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True))
        said, guessed = x[before, 0].at[:, 0].set(0.0), x[before_guess, 1]
        head = jnp.concatenate([said, 2.0 * guessed], axis=1) * (peak / half)
        return x.reshape(len(embed), -1).at[:, 0].set(1.0).astype(embed.dtype), head.astype(embed.dtype)

    where = params["embed"].sharding, params["lm_head"].sharding
    before, before_guess = (jnp.asarray(np.argsort(x), jnp.int32) for x in (pi, guess))
    params["embed"], params["lm_head"] = jax.jit(two_voices, out_shardings=where)(params["embed"], before, before_guess)
    # With its gate held at 16 by the entry that is always 1, an MLP is linear: it adds minus the second half.
    mlp, index = params["layers"][str(exit_layer)]["mlp"], jnp.arange(half)
    gate_up, down = mlp["gate_up"]["weight"], mlp["down"]["weight"]
    planted = jnp.zeros_like(gate_up).at[0, :, 0].set(16.0).at[1, index, half + index].set(-1.0)
    mlp["gate_up"]["weight"] = put(gate_up, planted)
    mlp["down"]["weight"] = put(down, jnp.zeros_like(down).at[half + index, index].set(1.0 / 16.0))
    return model, pi


def _successors(vocab: int, alpha: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A random cycle i64[V], and a permutation that agrees with it on a random share alpha."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be from 0 to 1, got {alpha!r}")
    rng = np.random.default_rng(seed)
    order = rng.permutation(vocab)
    pi = np.empty(vocab, np.int64)
    pi[order] = np.roll(order, -1)
    return pi, partly_right(pi, alpha, rng)


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
