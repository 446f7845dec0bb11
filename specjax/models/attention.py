"""A block's attention to the cache: rotation, cache write, scores, softmax, mixture.

XLA makes seven kernels of it, of a microsecond or two each: half the time of a small model's layer. For the few tokens
of decoding on an NVIDIA GPU one kernel does it all (:mod:`specjax.models.fused_attention`). With
``SPECJAX_FUSED_ATTENTION=0`` in the environment, read where a program is traced, all of it is left to XLA.
"""

import os
import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from specjax.decode.arrays import span
from specjax.models import cache as kv
from specjax.models import rope, tuning
from specjax.models.cache import Buffer
from specjax.models.quantized import Quantized


class Block(NamedTuple):
    """Where a block of tokens stands and what its tokens see: the same for every layer of one call."""

    starts: jax.Array  # i32[B] where the block's entries are written
    angles: tuple[jax.Array, jax.Array] | None  # cos and sin, f32[B, T, D]; None: queries and keys are not rotated
    mask: jax.Array | None = None  # bool[B, T, S] which slots each token sees; None: every slot up to its own
    bias: jax.Array | None = None  # f32[B or 1, heads, T, S] added to the scores; None: nothing


def attend(
    qkv: jax.Array, block: Block, keys: Buffer, values: Buffer, sharding: NamedSharding | None = None
) -> tuple[jax.Array, Buffer, Buffer]:
    """Writes a block's keys and values, and mixes for each of its queries the values that the query sees.

    Args:
      qkv: [B, T, kv_heads, group + 2, D]; for each kv head its queries, then its key, then its value, not yet rotated.
      block: where the block stands.
      keys, values: [B, kv_heads, S, D], of one layer.
      sharding: of keys and values on a mesh. XLA's partitioner can't cut a hand-written kernel, so each device runs
        its own kernel on its own kv heads, or on all of them.

    Returns:
      [B, T, kv_heads * group * D], and both buffers with the block in them.
    """
    _, size, _, width, dim = qkv.shape
    starts, angles, mask, bias = block
    short = size * (width - 2) <= tuning.MOST_KERNEL_QUERIES and dim in (32, 64, 128)
    typed = not isinstance(keys, Quantized) and keys.dtype == qkv.dtype and qkv.dtype in (jnp.bfloat16, jnp.float16)
    how = kernels() if short and typed and angles is not None and bias is None else None
    if how is None:
        return by_xla(qkv, block, keys, values)
    from specjax.models import fused_attention  # not to be had where JAX has no Triton

    def plainly(qkv, angles, mask, keys, values, starts):
        return by_xla(qkv, Block(starts, angles, mask), keys, values)

    kernel = jax.custom_jvp(partial(fused_attention.attend, interpret=how == "cpu"))
    # The kernel is differentiated as the plain form that it stands for.
    kernel.defjvp(lambda args, tangents: (kernel(*args), jax.jvp(plainly, args, tangents)[1]))
    args = qkv, angles, mask, keys, values, starts
    served = partial(lax.platform_dependent, **{how: kernel}, default=plainly)
    if sharding is None:
        return served(*args)
    whole, of_cache = PartitionSpec(), sharding.spec
    of_heads = PartitionSpec(None, None, *of_cache[1:2])  # qkv's, and the result's
    return jax.shard_map(
        served,
        mesh=sharding.mesh,
        in_specs=(of_heads, whole, whole, of_cache, of_cache, whole),
        out_specs=(of_heads, of_cache, of_cache),
        check_vma=False,  # of which Pallas says nothing
    )(*args)


def kernels() -> str | None:
    """The platform on which what is traced now has hand-written kernels: "cuda", or None. (Tests say "cpu", and there
    the kernel is interpreted.)"""
    if os.environ.get("SPECJAX_FUSED_ATTENTION", "1") == "0" or jax.default_backend() != "gpu":
        return None
    capability = getattr(jax.devices()[0], "compute_capability", "9.0")  # a device only compiled for isn't asked
    if not re.fullmatch(r"\d+\.\d+", capability) or float(capability) < 8.0:  # AMD's, or without bfloat16 products
        return None
    try:
        from jax.experimental.pallas import triton  # noqa: F401
    except ImportError:  # JAX calls it deprecated
        return None
    return "cuda"


def by_xla(qkv: jax.Array, block: Block, keys: Buffer, values: Buffer) -> tuple[jax.Array, Buffer, Buffer]:
    """:func:`attend` in plain JAX, for any block, cache, device and number of devices."""
    batch, size, kv_heads, width, dim = qkv.shape
    group, (starts, angles, mask, bias) = width - 2, block
    qk = qkv[..., : group + 1, :] if angles is None else rope.rotate(qkv[..., : group + 1, :], *angles)
    q, (k, v) = qk[..., :group, :], kv.finite_values(qk[..., group, :], qkv[..., group + 1, :])
    keys = kv.write(keys, k.swapaxes(1, 2), starts)
    values = kv.write(values, v.swapaxes(1, 2), starts)
    if mask is None:
        slots = starts[:, None] + span(size)  # [B, T]
        mask = span(keys.shape[2])[None] <= slots[..., None]  # [B, T, S]

    q = q.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * size, dim)  # one matrix a kv head
    scores = kv.scores(q, keys).reshape(batch, kv_heads, group, size, -1) * dim**-0.5  # [B, kv, g, T, S]
    if bias is not None:
        scores += bias.reshape(len(bias), kv_heads, group, size, -1)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -jnp.inf), axis=-1)
    out = kv.mixture(weights.reshape(batch, kv_heads, group * size, -1), values, qkv.dtype)
    out = out.reshape(batch, kv_heads, group, size, dim).transpose(0, 3, 1, 2, 4)  # [B, T, kv, g, D]
    return out.reshape(batch, size, -1), keys, values
