"""Small models for tests: random Llamas, their noisy twins, and Llamas whose next-token law is a given table."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from specjax.decode import random
from specjax.models import families, llama, parallel
from specjax.models.config import LlamaConfig
from specjax.models.configs import ModelConfig
from specjax.models.lm import LM
from specjax.models.quantized import map_with_path

# The logit of an impossible token; weights can't be minus infinity. At temperatures up to 90 the probability of this
# logit is exactly 0 in float32.
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
    config: ModelConfig, seed: int, std: float | None = None, dtype: Any = jnp.float32, mesh: Mesh | None = None
) -> dict:
    """A random parameter tree. Leaves are drawn one by one on the device where they stay.

    Norms are ones, and biases are zeros.

    Args:
      config: the model's shape.
      seed: the seed of all leaves.
      std: the standard deviation of every matrix. None: fan_in ** -0.5, and 1 for the embedding.
      dtype: the dtype of the leaves.
      mesh: the devices (``specjax.parallel``). Each device draws its part of each leaf, and the values are the same as
        without a mesh. None: the default device draws all leaves.
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

    return map_with_path(leaf, families.structure(config)[1])


@jax.jit(static_argnums=(2, 3, 4))
def _normal(key, scale, shape, dtype, where):
    x = jax.random.normal(key, shape, dtype) * scale.astype(dtype)
    return x if where is None else lax.with_sharding_constraint(x, where)


def tiny_lm(seed: int = 0, std: float = 0.3, dtype: Any = jnp.float32, **overrides) -> LM:
    """A random Llama with two layers. It runs in microseconds and has every part that a large Llama has.

    Args:
      seed: the seed of the weights.
      std: the standard deviation of every matrix. 0.3 gives distributions that are neither flat nor one-hot.
      dtype: the dtype of the weights.
      **overrides: fields of :class:`specjax.LlamaConfig`. All other fields are those of ``TINY``.
    """
    config = dataclasses.replace(TINY, **overrides)
    return LM(config, random_params(config, seed, std, dtype))


def noisy_twin(lm: LM, scale: float = 0.1, seed: int = 1) -> LM:
    """``lm`` with Gaussian noise added to every weight. As a draft for ``lm`` it is accepted less as the noise grows.

    Args:
      lm: the model.
      scale: the standard deviation of the noise. At 0 the twin is equal to ``lm``.
      seed: the seed of the noise.
    """
    leaves, tree = jax.tree.flatten(lm.params)
    keys = jax.random.split(random.key(seed), len(leaves))
    noisy = [x + scale * jax.random.normal(key, x.shape, x.dtype) for x, key in zip(leaves, keys, strict=True)]
    return dataclasses.replace(lm, params=jax.tree.unflatten(tree, noisy))


def table_lm(table: Any, **overrides) -> LM:
    """An ordinary Llama whose next-token distribution after token t is ``table[t]``, at temperature 1.

    The outputs of attention and MLP are zero, so the head reads the last token's embedding. This embedding is a unit
    vector. The head's column t therefore holds the logits after token t.

    Args:
      table: f[V, V]. Each row is normalised. An entry of 0 becomes the logit ``IMPOSSIBLE``, and stays exactly 0.
      **overrides: fields of :class:`specjax.LlamaConfig`. By default there is one layer, and hidden_size is V. Models
        of the same shape share compiled programs.

    Raises:
      ValueError: the table isn't square, a row has a negative or infinite entry or a sum of 0, hidden_size < V, or the
        embeddings are tied.
    """
    table = np.asarray(table, np.float64)
    if table.ndim != 2 or table.shape[0] != table.shape[1]:
        raise ValueError(
            f"table must be square, with one row of next-token probabilities for each token; got shape {table.shape}"
        )
    if not (np.isfinite(table).all() and (table >= 0).all() and (table.sum(axis=1) > 0).all()):
        raise ValueError("every row of the table must be non-negative and finite and have a positive sum")
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
        raise ValueError(
            f"a table of {vocab} tokens needs a hidden_size of at least {vocab}, got {config.hidden_size}, and "
            f"tie_word_embeddings=False, got {config.tie_word_embeddings}"
        )
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), llama.structure(config)[1])
    logits = np.full(table.shape, IMPOSSIBLE)
    np.log(table / table.sum(axis=1, keepdims=True), out=logits, where=table > 0)
    normed = (1 / config.hidden_size + config.rms_norm_eps) ** -0.5  # RMS norm turns a unit vector's 1 into this
    params["embed"] = jnp.eye(vocab, config.hidden_size)
    params["lm_head"] = params["lm_head"].at[:, :vocab].set(logits.T / normed)
    params["norm"]["weight"] = jnp.ones(config.hidden_size)
    return LM(config, params)
