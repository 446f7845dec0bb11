"""Small models for tests: random Llamas, perturbed twins, and Llamas whose next-token law is a given table."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from specjax.decode import random
from specjax.models import llama, parallel
from specjax.models.config import LlamaConfig
from specjax.models.lm import LM
from specjax.models.quantized import map_with_path

# Weights can't be minus infinity. A logit this low is probability 0 exactly in float32, at temperatures up to 90.
IMPOSSIBLE = -1e4

TINY = LlamaConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
)


def random_params(
    config: LlamaConfig, seed: int, std: float | None = None, dtype: Any = jnp.float32, mesh: Mesh | None = None
) -> dict:
    """A parameter tree drawn leaf by leaf where it stays, so at most one leaf is there twice.

    Args:
      config: its shape.
      seed: of all leaves.
      std: of every matrix; None: fan_in ** -0.5, and 1 for the embedding. Norms are ones, biases zeros.
      dtype: of the leaves.
      mesh: each device draws its part of each leaf (``specjax.parallel``), the values being the same; None: the
        default device draws all.
    """
    if mesh is not None:
        parallel.check(config, mesh)
    count = iter(range(10**9))

    def leaf(path, x):
        index, shape = next(count), x.shape
        where = None if mesh is None else parallel.sharding(path, x, mesh)
        if path[-1] == "bias" or len(shape) == 1:
            return jnp.full(shape, float(path[-1] != "bias"), dtype, device=where)
        scale = std if std is not None else 1.0 if path == ("embed",) else shape[-1] ** -0.5
        key = jax.random.fold_in(random.key(seed), index)
        return _normal(key, jnp.float32(scale), shape, jnp.dtype(dtype), where)

    return map_with_path(leaf, llama.structure(config)[1])


@jax.jit(static_argnums=(2, 3, 4))
def _normal(key, scale, shape, dtype, where):
    x = jax.random.normal(key, shape, dtype) * scale.astype(dtype)
    return x if where is None else lax.with_sharding_constraint(x, where)


def tiny_lm(seed: int = 0, std: float = 0.3, dtype: Any = jnp.float32, **overrides) -> LM:
    """A random Llama of two layers that runs in microseconds, and has every part that a large one has.

    Args:
      seed: of the weights.
      std: of every matrix; 0.3 gives distributions neither flat nor one-hot.
      dtype: of the weights.
      **overrides: fields of :class:`specjax.LlamaConfig`; the others are those of ``TINY``.
    """
    config = dataclasses.replace(TINY, **overrides)
    return LM(config, random_params(config, seed, std, dtype))


def noisy_twin(lm: LM, scale: float = 0.1, seed: int = 1) -> LM:
    """``lm`` with Gaussian noise of standard deviation ``scale`` added to every weight: a draft whose acceptance rate
    falls from 1 as the scale rises."""
    leaves, tree = jax.tree.flatten(lm.params)
    keys = jax.random.split(random.key(seed), len(leaves))
    noisy = [x + scale * jax.random.normal(key, x.shape, x.dtype) for x, key in zip(leaves, keys, strict=True)]
    return dataclasses.replace(lm, params=jax.tree.unflatten(tree, noisy))


def table_lm(table: Any, **overrides) -> LM:
    """An ordinary Llama whose next-token law after token t is ``table[t]``, at temperature 1.

    With the attention and MLP outputs zero, what reaches the head is the last token's embedding; that is a unit
    vector here, so the head's column t holds the logits after t.

    Args:
      table: f[V, V]; rows are normalised. Zeros are kept: they become logits of ``IMPOSSIBLE``.
      **overrides: fields of :class:`specjax.LlamaConfig`; by default one layer and hidden_size = V. Models of one
        shape share compiled programs.

    Raises:
      ValueError: if the table isn't square, a row isn't non-negative with a positive sum, or hidden_size < V.
    """
    table = np.asarray(table, np.float64)
    if table.ndim != 2 or table.shape[0] != table.shape[1]:
        raise ValueError(f"table must be square, one row of next-token probabilities a token, got {table.shape}")
    if not (np.isfinite(table).all() and (table >= 0).all() and (table.sum(axis=1) > 0).all()):
        raise ValueError("every row of the table must be non-negative and finite with a positive sum")
    vocab = table.shape[0]
    smallest = dict(
        hidden_size=vocab,
        intermediate_size=2,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=2,
        max_position_embeddings=256,
    )
    config = LlamaConfig(vocab_size=vocab, **{**smallest, **overrides})
    if config.hidden_size < vocab or config.tie_word_embeddings:
        raise ValueError("a table needs hidden_size >= its vocabulary, and a head of its own")
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), llama.structure(config)[1])
    logits = np.full(table.shape, IMPOSSIBLE)
    np.log(table / table.sum(axis=1, keepdims=True), out=logits, where=table > 0)
    normed = (1 / config.hidden_size + config.rms_norm_eps) ** -0.5  # what RMS norm makes of a unit vector's 1
    params["embed"] = jnp.eye(vocab, config.hidden_size)
    params["lm_head"] = params["lm_head"].at[:, :vocab].set(logits.T / normed)
    params["norm"]["weight"] = jnp.ones(config.hidden_size)
    return LM(config, params)
