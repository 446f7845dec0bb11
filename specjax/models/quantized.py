"""Arrays stored in eight bits with one float32 scale a row: symmetric, so a value is its code times its row's scale.

For weights [*out, in] a row is an output channel, whose scale can wait until the channel's sum is done; for cached
keys and values a row is one head's vector of one token. Only storage changes: products are computed in the
activations' dtype with float32 accumulation, as for unquantised weights.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models.config import LlamaConfig

# Code dtype and the largest code in use: int8 leaves -128 out, which keeps it symmetric.
KINDS = {"int8": (jnp.int8, 127.0), "fp8": (jnp.float8_e4m3fn, 448.0)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """Codes and scales; indexing takes rows of both."""

    values: jax.Array  # int8 or float8_e4m3fn [*rows, n]
    scale: jax.Array  # f32[*rows]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, index) -> "Quantized":
        return Quantized(self.values[index], self.scale[index])


@partial(jax.jit, static_argnames="kind")
def quantize(x: jax.Array, kind: str) -> Quantized:
    """x[*rows, n] rounded to the nearest code; a row's largest magnitude gets the largest code.

    The error is at most scale / 2 for int8, and max(abs(x) / 16, scale / 1024) for fp8. The scale of a row that holds
    NaN is NaN.
    """
    dtype, largest = KINDS[kind]
    x = x.astype(jnp.float32)
    peak = jnp.max(jnp.abs(x), axis=-1)
    scale = jnp.where(peak != 0, peak / largest, 1.0)
    codes = x / scale[..., None]
    return Quantized((jnp.round(codes) if dtype == jnp.int8 else codes).astype(dtype), scale)


def dequantize(x: jax.Array | Quantized, dtype=jnp.float32) -> jax.Array:
    """What the codes stand for; an ordinary array is only cast."""
    if isinstance(x, Quantized):
        return (x.values.astype(jnp.float32) * x.scale[..., None]).astype(dtype)
    return x.astype(dtype)


def check_kind(what: str, kind: Any, allowed: tuple = (*KINDS, None)) -> None:
    """Raises ValueError unless ``kind`` is one of ``allowed``."""
    if kind not in allowed:
        raise ValueError(f"{what} must be {' or '.join(map(repr, allowed))}, got {kind!r}")


def is_matrix(config: LlamaConfig, path: tuple[str, ...]) -> bool:
    """Whether the leaf at ``path`` is a factor of a product, and so quantised where the model is.

    Every such matrix is read whole at each step. An embedding table is one only if it is the output head too; else a
    step reads a row a token from it, and it stays as it is. Norms and biases always do.
    """
    if path == ("embed",):
        return config.tie_word_embeddings
    return path == ("lm_head",) or (path[-1] == "weight" and not path[-2].endswith("norm"))


def map_with_path(function: Callable, tree: dict) -> dict:
    """``function(path, leaf)`` of every leaf of a parameter tree; a quantised leaf is one leaf."""

    def visit(keys, leaf):
        return function(tuple(key.key for key in keys), leaf)

    return jax.tree_util.tree_map_with_path(visit, tree, is_leaf=is_quantized)


def kind_of(params: dict) -> str | None:
    """How a parameter tree is quantised."""
    codes = {x.values.dtype for x in jax.tree.leaves(params, is_leaf=is_quantized) if is_quantized(x)}
    return next((kind for kind, (dtype, _) in KINDS.items() if jnp.dtype(dtype) in codes), None)


def is_quantized(x: Any) -> bool:
    return isinstance(x, Quantized)
