"""A block's attention to the cache: rotation, cache write, scores, softmax, mixture.

XLA makes seven kernels of it, of a microsecond or two each: half the time of a small model's layer. For the few tokens
of decoding on an NVIDIA GPU one kernel does it all (:mod:`specjax.models.fused_attention`). With
``SPECJAX_FUSED_ATTENTION=0`` in the environment, read where a program is traced, all of it is left to XLA.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from specjax.decode.arrays import span
from specjax.models import cache as kv
from specjax.models import rope
from specjax.models.cache import Buffer
from specjax.models.quantized import Quantized

_CUT: ContextVar[NamedSharding | None] = ContextVar("how caches are cut among devices", default=None)
_MOST = 32  # queries a kv head, beyond which XLA's kernels are as fast (measured on an H100)


@contextmanager
def cut(caches: NamedSharding | None) -> Iterator[None]:
    """What is traced within attends to caches on several devices, cut so: whole on each, or each its own kv heads.

    XLA's partitioner can't cut a hand-written kernel, so each device runs its own.

    Raises:
      ValueError: for caches cut along anything but their heads.
    """
    if caches is not None and (len(caches.spec) > 2 or any(caches.spec[:1])):
        raise ValueError(
            f"keys and values [B, kv_heads, S, D] are cut as {caches.spec}, expected by kv heads alone or not at all: "
            "specjax.parallel.cache_sharding(mesh) makes that"
        )
    token = _CUT.set(caches)
    try:
        yield
    finally:
        _CUT.reset(token)


def attend(
    qkv: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    mask: jax.Array | None,
    keys: Buffer,
    values: Buffer,
    starts: jax.Array,
) -> tuple[jax.Array, Buffer, Buffer]:
    """Writes a block's keys and values, and mixes for each of its queries the values that it sees.

    Args:
      qkv: [B, T, kv_heads, group + 2, D]; of each kv head its queries, then its key, then its value, not yet rotated.
      angles: cos and sin, f32[B, T, D].
      mask: bool[B, T, S], which slots each token sees; None: every slot up to its own.
      keys, values: [B, kv_heads, S, D], of one layer.
      starts: i32[B] where the block is written.

    Returns:
      [B, T, kv_heads * group * D], and both buffers with the block in them.
    """
    _, block, _, width, dim = qkv.shape
    short = block * (width - 2) <= _MOST and dim in (32, 64, 128)
    plain = not isinstance(keys, Quantized) and keys.dtype == qkv.dtype and qkv.dtype in (jnp.bfloat16, jnp.float16)
    how = kernels() if short and plain else None
    if how is None:
        return by_xla(qkv, angles, mask, keys, values, starts)
    from specjax.models import fused_attention  # not to be had where JAX has no Triton

    kernel = jax.custom_jvp(partial(fused_attention.attend, interpret=how == "cpu"))
    # Differentiated as what it stands for.
    kernel.defjvp(lambda args, tangents: (kernel(*args), jax.jvp(by_xla, args, tangents)[1]))
    args = qkv, angles, mask, keys, values, starts
    served, own = partial(lax.platform_dependent, **{how: kernel}, default=by_xla), _CUT.get()
    if own is None:
        return served(*args)
    whole, of_cache = PartitionSpec(), own.spec
    of_heads = PartitionSpec(None, None, *of_cache[1:2])  # qkv's, and the result's
    return jax.shard_map(
        served,
        mesh=own.mesh,
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


def by_xla(
    qkv: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    mask: jax.Array | None,
    keys: Buffer,
    values: Buffer,
    starts: jax.Array,
) -> tuple[jax.Array, Buffer, Buffer]:
    """:func:`attend` in plain JAX, for any block, cache, device and number of them."""
    batch, block, kv_heads, width, dim = qkv.shape
    group = width - 2
    qk = rope.rotate(qkv[..., : group + 1, :], *angles)
    q, (k, v) = qk[..., :group, :], kv.finite_values(qk[..., group, :], qkv[..., group + 1, :])
    keys = kv.write(keys, k.swapaxes(1, 2), starts)
    values = kv.write(values, v.swapaxes(1, 2), starts)
    if mask is None:
        slots = starts[:, None] + span(block)  # [B, T]
        mask = span(keys.shape[2])[None] <= slots[..., None]  # [B, T, S]

    q = q.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * block, dim)  # one matrix a kv head
    scores = kv.scores(q, keys).reshape(batch, kv_heads, group, block, -1) * dim**-0.5  # [B, kv, g, T, S]
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -jnp.inf), axis=-1)
    out = kv.mixture(weights.reshape(batch, kv_heads, group * block, -1), values, qkv.dtype)
    out = out.reshape(batch, kv_heads, group, block, dim).transpose(0, 3, 1, 2, 4)  # [B, T, kv, g, D]
    return out.reshape(batch, block, -1), keys, values
