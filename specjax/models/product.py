"""Products with weight matrices, written so that XLA runs them fast on a GPU and on a CPU."""

import jax
import jax.numpy as jnp
from jax import lax

from specjax.models.quantized import Quantized


def product(x: jax.Array, weight: jax.Array | Quantized, dtype) -> jax.Array:
    """x[..., in] times weight[*out, in] over ``in``, accumulated in float32. -> [..., *out] as ``dtype``."""
    if isinstance(weight, Quantized):
        return (product(x, weight.values, jnp.float32) * weight.scale).astype(dtype)
    full = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # float32 stays float32: no tf32
    rows = x.reshape(-1, x.shape[-1])  # [N, in]
    if jax.default_backend() == "cpu":
        y = _product_on_cpu(rows, weight, full)
    else:  # the weight keeps its axes, so a partitioner may cut any of them; codes are converted while they are read
        y = lax.dot_general(rows, weight.astype(x.dtype), (((1,), (weight.ndim - 1,)), ((), ())), full, jnp.float32)
    return y.astype(dtype).reshape(*x.shape[:-1], *weight.shape[:-1])


def _product_on_cpu(rows: jax.Array, weight: jax.Array, precision) -> jax.Array:
    """The product of rows [N, in] and weight [*out, in], in a form that XLA's CPU backend runs fast. -> f32[N, out].

    Left alone, the backend takes ten times as long for a weight of rank 3, copies the weight into another layout for a
    few rows, and converts codes into a whole second matrix.
    """
    if weight.dtype != rows.dtype:
        return _product_by_blocks(rows, weight, precision)
    if len(rows) <= 16:
        return _short_product(rows, weight, precision)
    return lax.dot_general(rows, weight.reshape(-1, weight.shape[-1]), (((1,), (1,)), ((), ())), precision, jnp.float32)


def _short_product(rows: jax.Array, weight: jax.Array, precision) -> jax.Array:
    """The product for a few rows. It decides what verification costs on a CPU.

    XLA copies nothing if the weight comes first and both factors have a batch axis. Rows are padded to a multiple of
    four, which fills the vector unit: 4 rows cost 1.7 times as much as one row, instead of 2.4.
    """
    count = len(rows)
    rows = jnp.pad(rows, ((0, -count % 4 if count > 1 else 0), (0, 0)))
    stack = weight if weight.ndim == 3 else weight[None]  # [G, out, in]
    rows = jnp.broadcast_to(rows, (len(stack), *rows.shape))
    y = lax.dot_general(stack, rows, (((2,), (2,)), ((0,), (0,))), precision, jnp.float32)  # [G, out, N]
    return y.transpose(2, 0, 1)[:count]


def _product_by_blocks(rows: jax.Array, codes: jax.Array, precision, size: int = 64) -> jax.Array:
    """The product with a weight of codes, ``size`` output channels at a time. The converted part fits the cache."""
    matrix = codes.reshape(-1, codes.shape[-1])
    size = min(size, len(matrix))
    # XLA can't slice fp8 on a CPU. It would convert the whole matrix outside the loop, ten times as slowly.
    raw = matrix if codes.dtype == jnp.int8 else lax.bitcast_convert_type(matrix, jnp.uint8)

    def block(i, y):
        # Slice and update both move the last block back to where it fits, so it overlaps the block before it.
        part = lax.bitcast_convert_type(lax.dynamic_slice_in_dim(raw, i * size, size), codes.dtype)
        part = _product_on_cpu(rows, part.astype(rows.dtype), precision).reshape(len(rows), size)
        return lax.dynamic_update_slice_in_dim(y, part, i * size, axis=1)

    return lax.fori_loop(0, -(-len(matrix) // size), block, jnp.zeros((len(rows), len(matrix)), jnp.float32))
