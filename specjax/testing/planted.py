"""Models of a real model's shape with planted weights.

They cost as much compute as the real model. Their output is known, and the acceptance rate is chosen in advance.

The output weights of attention and MLP are zero, so the hidden state of token x is x's embedding. Of a model with an
encoder, this holds for the decoder: it reads the source in full, and the source changes nothing. Random embeddings are
nearly orthogonal. A head row that is equal to x's normalised embedding therefore gives a high logit after x, and a
logit near 0 after other tokens.
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
from specjax.models.t5_config import T5Config
from specjax.testing.tiny_models import random_params

Config = LlamaConfig | T5Config


def planted_pair(
    target_config: Config,
    draft_config: Config,
    alpha: float,
    seed: int = 0,
    dtype: Any = jnp.bfloat16,
    peak: float = 40.0,
    mesh: Mesh | None = None,
) -> tuple[LM, LM, np.ndarray]:
    """A target that follows a random cycle pi over its vocabulary, and a draft that is right on a share alpha of it.

    The tokens whose successor the draft knows are chosen at random. Each drafted token that is reached is therefore
    accepted with probability alpha, independently, as the theory assumes: a round gives 1 + alpha + ... + alpha^K
    tokens on average. If ``peak`` is high, decoding at temperature 1 gives the same text as greedy decoding. A decoder
    after an encoder starts with one token, so it writes one text, whatever the source.

    Args:
      target_config: the target's shape.
      draft_config: the draft's shape, with the same vocabulary size.
      alpha: the share of the vocabulary, from 0 to 1, whose successor the draft predicts right.
      seed: the seed of the weights, of the cycle, and of the tokens that the draft knows.
      dtype: the dtype of both models' weights.
      peak: the logit of the planted successor. All other logits are about peak / sqrt(hidden_size) times a standard
        normal number.
      mesh: the devices that share the target; each of them has the whole draft. None: the default device.

    Returns:
      The target, the draft, and pi i64[V]: token x is followed by pi[x].

    Raises:
      ValueError: the vocabularies differ, or alpha is out of range.
    """
    vocab = target_config.vocab_size
    if draft_config.vocab_size != vocab:
        raise ValueError(f"planted models need one vocabulary size, got {vocab} and {draft_config.vocab_size}")
    pi, guess = _successors(vocab, alpha, seed)
    target = planted_lm(target_config, pi, 2 * seed, dtype, peak, mesh)
    draft = planted_lm(draft_config, guess, 2 * seed + 1, dtype, peak)
    return target, parallel.replicate(draft, mesh), pi


def _check_exit(config: LlamaConfig, exit_layer: int) -> None:
    """Raises ValueError if the exit or the width of the MLP is out of range."""
    last, half = config.num_hidden_layers - 1, config.hidden_size // 2
    if not 1 <= exit_layer <= last:
        raise ValueError(
            f"exit_layer must be from 1 to {last}, so that a later layer can remove the guess; got {exit_layer!r}"
        )
    if config.intermediate_size < half:
        raise ValueError(
            f"the MLP must be at least {half} wide to take half of a hidden state away, got {config.intermediate_size}"
        )


def _two_voices(embed, before, before_guess, peak):
    """Embeddings whose halves have one norm and whose first entry is 1, and head rows that read both halves."""
    half = embed.shape[1] // 2
    x = embed.astype(jnp.float32).reshape(len(embed), 2, half)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True))
    said, guessed = x[before, 0].at[:, 0].set(0.0), x[before_guess, 1]
    head = jnp.concatenate([said, 2.0 * guessed], axis=1) * (peak / half)
    return x.reshape(len(embed), -1).at[:, 0].set(1.0).astype(embed.dtype), head.astype(embed.dtype)


def planted_exit(
    config: LlamaConfig,
    exit_layer: int,
    alpha: float,
    seed: int = 0,
    dtype: Any = jnp.bfloat16,
    peak: float = 40.0,
    mesh: Mesh | None = None,
) -> tuple[LM, np.ndarray]:
    """A model that follows a random cycle pi, and whose first layers alone are right on a share alpha of the tokens.

    The model behaves like one that was trained for early exit, but the acceptance rate is chosen in advance.

    One half of each hidden state points to pi's successor. The other half points to a guess, twice as strongly. The
    layer after the exit removes the guess. All other layers add nothing. The cost c of a draft step is that of the
    layers up to the exit and of the head. The rate holds for this exit alone; a trained model may reach another rate.

    Args:
      config: the model's shape, as in :func:`planted_lm`. The MLP must be at least half as wide as the hidden state.
      exit_layer: the number of layers before the exit, from 1 to the number of layers - 1.
      alpha: the share of the vocabulary whose successor the exit predicts right.
      seed, dtype, peak, mesh: as in :func:`planted_pair`.

    Returns:
      The model, and pi i64[V]: token x is followed by pi[x].

    Raises:
      ValueError: alpha, the layer or the shape is out of range.
    """
    half = config.hidden_size // 2
    _check_exit(config, exit_layer)
    pi, guess = _successors(config.vocab_size, alpha, seed)
    model = planted_lm(config, pi, 2 * seed, dtype, peak, mesh)
    params = model.params

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return jax.device_put(new.astype(old.dtype), old.sharding)

    where = params["embed"].sharding, params["lm_head"].sharding
    before, before_guess = (jnp.asarray(np.argsort(x), jnp.int32) for x in (pi, guess))
    params["embed"], params["lm_head"] = jax.jit(
        lambda embed: _two_voices(embed, before, before_guess, peak), out_shardings=where
    )(params["embed"])
    # The entry that is always 1 holds the gate of the MLP at 16. The MLP is then linear and adds minus the second half.
    mlp, index = params["layers"][str(exit_layer)]["mlp"], jnp.arange(half)
    gate_up, down = mlp["gate_up"]["weight"], mlp["down"]["weight"]
    planted = jnp.zeros_like(gate_up).at[0, :, 0].set(16.0).at[1, index, half + index].set(-1.0)
    mlp["gate_up"]["weight"] = put(gate_up, planted)
    mlp["down"]["weight"] = put(down, jnp.zeros_like(down).at[half + index, index].set(1.0 / 16.0))
    return model, pi


def _successors(vocab: int, alpha: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A random cycle i64[V], and a permutation i64[V] that agrees with the cycle on a random share alpha of tokens."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be from 0 to 1, got {alpha!r}")
    rng = np.random.default_rng(seed)
    order = rng.permutation(vocab)
    pi = np.empty(vocab, np.int64)
    pi[order] = np.roll(order, -1)
    return pi, partly_right(pi, alpha, rng)


def partly_right(successor: np.ndarray, alpha: float, seed: int | np.random.Generator = 0) -> np.ndarray:
    """A permutation i64[V] that is equal to ``successor`` on a random share alpha of the tokens, and wrong elsewhere.

    Args:
      successor: i64[V], a permutation.
      alpha: the share, from 0 to 1.
      seed: a seed, or a generator of random numbers.
    """
    wrong = np.random.default_rng(seed).permutation(len(successor))[: round((1 - alpha) * len(successor))]
    guess = successor.copy()
    guess[wrong] = np.roll(successor[wrong], 1)
    return guess


def planted_lm(
    config: Config,
    successor: np.ndarray,
    seed: int = 0,
    dtype: Any = jnp.bfloat16,
    peak: float = 40.0,
    mesh: Mesh | None = None,
) -> LM:
    """A model of the given shape in which token x is followed by ``successor[x]``.

    Each leaf is made in ``dtype`` on the device where it stays, one leaf at a time. There is never a float32 copy of
    the model. Weights that do not change the output are random, because zeros would draw less power on an accelerator.

    Args:
      config: the model's shape. Tied embeddings are untied, because with a tied head x could only be followed by x. An
        untied model reads no more bytes in a step, but holds V x hidden_size more weights. T5's factor on a tied head
        goes too. End-of-text ids are removed, so that runs reach their limit.
      successor: i[V], a permutation.
      seed: the seed of the weights.
      dtype: the dtype of the weights.
      peak: the logit of the planted successor.
      mesh: the devices that make the model; each makes its own part of each leaf. None: the default device.

    Raises:
      ValueError: ``successor`` isn't a permutation of the vocabulary.
    """
    successor = np.asarray(successor)
    if not np.array_equal(np.sort(successor), np.arange(config.vocab_size)):
        raise ValueError(
            f"successor must be a permutation of the {config.vocab_size} tokens of the vocabulary, because each row of "
            f"the head can follow one token only; got an array of shape {successor.shape}"
        )
    changes: dict[str, Any] = {"tie_word_embeddings": False, "scaled_head": False, "eos_token_ids": ()}
    config = dataclasses.replace(config, **{name: value for name, value in changes.items() if hasattr(config, name)})
    params = random_params(config, seed, dtype=dtype, mesh=mesh)

    def place(x: jax.Array):
        # Without a mesh the weight is not pinned to a device: a pinned weight would need other compiled programs.
        return x.sharding if mesh is not None else None

    for layer in params["layers"].values():
        for part in layer.values():
            for last in part.keys() & {"o", "down"}:
                weight = part[last]["weight"]
                part[last]["weight"] = jnp.zeros_like(weight, device=place(weight))
    where = place(params.pop("lm_head"))  # the old head is freed before the new one is made
    before = jnp.asarray(np.argsort(successor), jnp.int32)
    params["lm_head"] = jax.jit(_head, out_shardings=where)(params["embed"], before, jnp.float32(peak))
    return LM(config, params, cache_sharding=parallel.cache_sharding(mesh))


def _head(embed, before, peak):
    """The head's rows. Row y is the normalised embedding of the token before y, scaled to give y the logit ``peak``."""
    x = embed[before].astype(jnp.float32)
    normed = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True))
    return (normed * (peak / embed.shape[1])).astype(embed.dtype)
