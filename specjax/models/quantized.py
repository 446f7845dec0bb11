"""Arrays stored in eight bits, with one float32 scale per row. A value is its code times its row's scale.

In weights [*out, in] a row is an output channel, and the scale is applied after the channel's sum. In cached keys and
values a row is the vector of one head and one token. Only storage changes: products are computed in the activations'
dtype with float32 accumulation, as for unquantised weights.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models.configs import ModelConfig

# Kind -> (dtype of the codes, largest code in use). int8 doesn't use -128, so the codes are symmetric about 0.
KINDS = {"int8": (jnp.int8, 127.0), "fp8": (jnp.float8_e4m3fn, 448.0)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """Codes and scales. An index takes rows of both."""

    values: jax.Array  # int8 or float8_e4m3fn [*rows, n], the codes
    scale: jax.Array  # f32[*rows], the scale of each row

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the codes."""
        return self.values.shape

    def __getitem__(self, index) -> "Quantized":
        return Quantized(self.values[index], self.scale[index])


@partial(jax.jit, static_argnames="kind")
def quantize(x: jax.Array, kind: str) -> Quantized:
    """x[*rows, n], rounded to the nearest codes. The largest magnitude of a row gets the largest code.

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
    """The values that the codes stand for, as ``dtype``. An ordinary array is only cast."""
    if isinstance(x, Quantized):
        return (x.values.astype(jnp.float32) * x.scale[..., None]).astype(dtype)
    return x.astype(dtype)


def check_kind(name: str, kind: Any, allowed: tuple = (*KINDS, None)) -> None:
    """Raises ValueError unless ``kind``, the value of the argument ``name``, is one of ``allowed``."""
    if kind not in allowed:
        raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}, got {kind!r}")


def is_matrix(config: ModelConfig, path: tuple[str, ...]) -> bool:
    """Whether the leaf at ``path`` is a matrix that every step reads whole. A quantised model stores these as codes.

    An embedding table counts only if it is also the output head. Otherwise a step reads one row per token from it, and
    it is not quantised. Norms and biases are never quantised.
    """
    if path == ("embed",):
        return config.tie_word_embeddings
    return path == ("lm_head",) or (path[-1] == "weight" and not path[-2].endswith("norm"))


def map_with_path(function: Callable, tree: dict) -> dict:
    """The tree with ``function(path, leaf)`` in place of each leaf. A Quantized counts as one leaf."""

    def visit(keys, leaf):
        return function(tuple(key.key for key in keys), leaf)

    return jax.tree_util.tree_map_with_path(visit, tree, is_leaf=is_quantized)


def kind_of(params: dict) -> str | None:
    """The kind in which a parameter tree is quantised: "int8" or "fp8"; None: it is not quantised."""
    codes = {x.values.dtype for x in jax.tree.leaves(params, is_leaf=is_quantized) if is_quantized(x)}
    return next((kind for kind, (dtype, _) in KINDS.items() if jnp.dtype(dtype) in codes), None)


def is_quantized(x: Any) -> bool:
    """Whether a leaf of a parameter tree is quantised."""
    return isinstance(x, Quantized)
