"""A block's attention to the cache, in five steps: rotation, cache write, scores, softmax, mixture.

XLA makes seven kernels of the five steps. Each takes a microsecond or two, together half the time of a small model's
layer. For the few tokens of decoding on an NVIDIA GPU, one hand-written kernel does all five steps:
:mod:`specjax.models.fused_attention`, or on a Hopper card :mod:`specjax.models.hopper_attention`
(:func:`implementation`). On a Hopper card :mod:`specjax.models.prompt_attention` serves a prompt's chunk.

Two environment variables are read when a program is traced. ``SPECJAX_FUSED_ATTENTION=0`` leaves all attention to XLA.
``SPECJAX_HOPPER_KERNELS`` is 0 for no kernel that only Hopper cards run, and 1 for such a kernel wherever there is one:
by default few tokens get it only if JAX has no Triton any more. The logger of this module says which attention programs
get.
"""

import importlib
import logging
import os
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from specjax.decode.arrays import span
from specjax.models import axes, rope, tuning
from specjax.models import cache as kv
from specjax.models.cache import PAGE, Buffer
from specjax.models.quantized import Quantized


class Block(NamedTuple):
    """Where a block of tokens stands and which slots its tokens see. All layers of one call share it."""

    # i32[B] The slot of the block's first token in each row. The block's entries are written from there on.
    starts: jax.Array
    # f32[B, T, D] twice: cos and sin of each token's angles. None: queries and keys are not rotated.
    angles: tuple[jax.Array, jax.Array] | None
    # bool[B, T, S] The slots that each token sees. None: every slot up to the token's own.
    mask: jax.Array | None = None
    # f32[B or 1, heads, T, S] A bias that is added to the scores. None: no bias.
    bias: jax.Array | None = None
    # i32[B, W] The pages of each row's cache. None: the cache is contiguous.
    table: jax.Array | None = None


class Score(NamedTuple):
    """How scores are made of the products of queries and keys. Numbers are static."""

    # The factor on each product. None: D ** -0.5.
    scale: float | None = None
    # A score s becomes cap * tanh(s / cap) (Gemma 2, section 2). None: scores stay as they are.
    cap: float | None = None


PLAIN = Score()


def attend(
    qkv: jax.Array,
    block: Block,
    keys: Buffer,
    values: Buffer,
    sharding: NamedSharding | None = None,
    score: Score = PLAIN,
) -> tuple[jax.Array, Buffer, Buffer]:
    """Writes a block's keys and values to the cache, then mixes for each query the values that the query sees.

    Args:
      qkv: [B, T, kv_heads, group + 2, D]. For each kv head these are its queries, its key and its value, not yet
        rotated.
      block: where the block stands and which slots its tokens see.
      keys, values: the cache of one layer: [B, kv_heads, S, D], or pools [P, kv_heads, PAGE, D] with ``block.table``.
      sharding: how keys and values lie on a mesh; None: on one device. XLA's partitioner can't cut a hand-written
        kernel, and doesn't know that a row's pages lie where the row lies. So each device attends to its own rows, with
        its own kv heads if the cache is cut by them, else with all heads.
      score: how scores are made. XLA makes those that aren't plain, as it does for blocks that aren't rotated.

    Returns:
      [B, T, kv_heads * group * D], and both buffers with the block in them.
    """
    angles, bias, dim = block.angles, block.bias, qkv.shape[-1]
    short = _is_short(qkv) and dim in (32, 64, 128)
    typed = not isinstance(keys, Quantized) and keys.dtype == qkv.dtype and qkv.dtype in (jnp.bfloat16, jnp.float16)
    plain = typed and angles is not None and bias is None and score == PLAIN
    platform = kernels() if plain and (short or _is_chunk(qkv, block, keys)) else None
    run = partial(by_xla, score=score) if platform is None else partial(_by_kernel, platform)
    if sharding is None or (platform is None and axes.parts(sharding.mesh) == 1):
        return run(qkv, block, keys, values)
    return _on_each_device(run, sharding, qkv, block, keys, values)


def _by_kernel(
    platform: str, qkv: jax.Array, block: Block, keys: Buffer, values: Buffer
) -> tuple[jax.Array, Buffer, Buffer]:
    """:func:`attend` by the hand-written kernel that serves the block, if the program runs on ``platform``."""
    _, size, _, width, dim = qkv.shape
    given = size, width - 2, dim, keys.shape[2], block.table is not None
    name = implementation(platform, *given) if _is_short(qkv) else "prompt"
    if name == "xla":
        return by_xla(qkv, block, keys, values)

    def plainly(qkv, angles, mask, keys, values, starts, table):
        return by_xla(qkv, Block(starts, angles, mask, None, table), keys, values)

    kernel = jax.custom_jvp(partial(_module(name).attend, **({"interpret": True} if platform == "cpu" else {})))
    # The kernel computes the same as plainly(), so its derivative is that of plainly().
    kernel.defjvp(lambda args, tangents: (kernel(*args), jax.jvp(plainly, args, tangents)[1]))
    args = qkv, block.angles, block.mask, keys, values, block.starts, block.table
    return lax.platform_dependent(*args, **{platform: kernel}, default=plainly)


def _on_each_device(
    run: Callable, sharding: NamedSharding, qkv: jax.Array, block: Block, keys: Buffer, values: Buffer
) -> tuple[jax.Array, Buffer, Buffer]:
    """``run`` on each device of a mesh, with the device's own rows and kv heads. -> as :func:`attend`."""
    sharding = sharding if block.table is not None else axes.fitted(sharding, len(qkv))
    of_row, of_head = (*sharding.spec, None, None)[:2]
    of_heads = PartitionSpec(of_row, None, of_head)  # for qkv and for the result
    of_block = jax.tree.map(lambda x: PartitionSpec(of_row if len(x) == len(qkv) else None), block)
    if block.bias is not None:
        of_block = of_block._replace(bias=PartitionSpec(*of_block.bias, of_head))

    def own(qkv: jax.Array, block: Block, keys: Buffer, values: Buffer):
        if of_row is not None and block.table is not None:
            block = block._replace(table=kv.own_pages(block.table, keys))
        return run(qkv, block, keys, values)

    return jax.shard_map(
        own,
        mesh=sharding.mesh,
        in_specs=(of_heads, of_block, sharding.spec, sharding.spec),
        out_specs=(of_heads, sharding.spec, sharding.spec),
        check_vma=False,  # Pallas gives no information for this check
    )(qkv, block, keys, values)


def kernels() -> str | None:
    """The platform for which the program that is now traced gets the hand-written kernel: "cuda", or None.

    Tests replace this function by one that returns "cpu"; there Pallas interprets the kernel.
    """
    if os.environ.get("SPECJAX_FUSED_ATTENTION", "1") == "0" or jax.default_backend() != "gpu":
        return None
    return "cuda" if _capability() >= 8.0 else None  # older cards have no bfloat16 products


def hopper_kernels() -> bool:
    """Whether the card runs the kernels in Pallas for Mosaic GPU, and the user has not switched them off."""
    return _hopper_wish() != "0" and _capability() == 9.0  # only Hopper has their matrix products


def _hopper_wish() -> str | None:
    """The value of the variable, or None. Raises ValueError if it is neither 0 nor 1."""
    value = os.environ.get("SPECJAX_HOPPER_KERNELS") or None
    if value not in (None, "0", "1"):
        raise ValueError(f"SPECJAX_HOPPER_KERNELS must be 0 or 1, got {value!r}; leave it out for the default")
    return value


def implementation(platform: str | None, block: int, group: int, dim: int, capacity: int, paged: bool) -> str:
    """Which attention serves a plain block of few queries: "mosaic" (the Hopper kernel), "triton" or "xla".

    Triton's kernel takes less time than the Hopper kernel in texts of a few hundred tokens, and the Hopper kernel gains
    in long texts and in pages. The choice depends on neither, because then the bits of a text would too.

    Args:
      platform: what :func:`kernels` gives. Pallas can't interpret the Hopper kernel, so a CPU gets "triton".
      block: tokens of the block.
      group: queries of a kv head.
      dim: of a head.
      capacity: slots of a row; of a paged cache, any number.
      paged: whether the cache is paged.
    """
    if platform is None:
        return "xla"
    # The copy engine moves eight tokens of a query, and groups of eight slots.
    fits = block <= 8 and group <= 8 and dim in (64, 128) and (paged or capacity % 8 == 0)
    usable = {"triton": True, "mosaic": platform == "cuda" and hopper_kernels() and fits}
    order = ("mosaic", "triton") if _hopper_wish() == "1" else ("triton", "mosaic")
    name = next((name for name in order if usable[name] and _module(name)), "xla")
    _log(name)
    return name


def usual_implementation() -> str:
    """:func:`implementation` of a token on a paged cache with heads of 64 or 128."""
    return implementation(kernels(), 1, 1, 64, PAGE, True)


def _is_short(qkv: jax.Array) -> bool:
    """Whether a block has so few queries that a kernel for decoding serves it."""
    _, size, _, width, _ = qkv.shape
    return size * (width - 2) <= tuning.MOST_KERNEL_QUERIES


def _is_chunk(qkv: jax.Array, block: Block, keys: Any) -> bool:
    """Whether the kernel for a prompt's chunk serves a plain block: :mod:`specjax.models.prompt_attention`."""
    size, dim = qkv.shape[1], qkv.shape[-1]
    whole = size % PAGE == 0 and (block.table is not None or keys.shape[2] % PAGE == 0)
    if not whole or block.mask is not None or dim not in (64, 128) or not hopper_kernels():
        return False
    version = cuda_version()
    # The compilers of CUDA 12.8.0 to 12.9.0 get causal masks wrong. JAX's own kernel refuses them too.
    return version is not None and not 12080 <= version < 12091 and _module("prompt") is not None


def cuda_version() -> int | None:
    """The version of CUDA, 12091 for 12.9.1. None: there is no CUDA, or JAX hides the version."""
    try:
        from jax._src.lib import cuda_versions  # JAX has no public name for the version

        return None if cuda_versions is None else cuda_versions.cuda_runtime_get_version()
    except (ImportError, RuntimeError):  # RuntimeError: JAX's plugin is there, and CUDA's library is not
        return None


_MODULES = {"mosaic": "hopper_attention", "triton": "fused_attention", "prompt": "prompt_attention"}


@cache
def _module(name: str) -> Any:
    """The module of a kernel. None: JAX has not, or no longer, what the kernel is written in."""
    if name == "mosaic" and jax.__version_info__ < (0, 11):
        return None  # Mosaic then takes no buffers that a kernel changes in place
    try:
        return importlib.import_module(f"specjax.models.{_MODULES[name]}")
    except (ImportError, AttributeError):  # JAX promises neither Triton nor the names of Mosaic
        return None


@cache
def _log(name: str) -> None:
    logger = logging.getLogger(__name__)
    if name == "xla":
        logger.warning(
            "attention to few tokens runs by XLA, several times slower than a kernel: jax %s has no "
            "jax.experimental.pallas.triton, and the Hopper kernel does not serve these shapes or this card",
            jax.__version__,
        )
    else:
        logger.info("attention to few tokens runs by the %s kernel", name)


def _capability() -> float:
    """The compute capability of the first device. A GPU that is not NVIDIA's has 0.

    A CPU, on which programs for a GPU are only compiled, counts as Hopper, whose capability is 9.0.
    """
    capability = getattr(jax.devices()[0], "compute_capability", "9.0")
    return float(capability) if re.fullmatch(r"\d+\.\d+", capability) else 0.0


def by_xla(
    qkv: jax.Array, block: Block, keys: Buffer, values: Buffer, score: Score = PLAIN
) -> tuple[jax.Array, Buffer, Buffer]:
    """:func:`attend` in plain JAX: for any block and cache, on any device and any number of devices."""
    size, (starts, _, mask, bias, table) = qkv.shape[1], block
    q, keys, values = rotated(qkv, block, keys, values)
    if mask is None:
        slots = starts[:, None] + span(size)  # [B, T]
        capacity = keys.shape[2] if table is None else table.shape[1] * kv.PAGE
        mask = span(capacity)[None] <= slots[..., None]  # [B, T, S]
    return mix(q, keys, values, mask, bias, table, score), keys, values


def rotated(qkv: jax.Array, block: Block, keys: Buffer, values: Buffer) -> tuple[jax.Array, Buffer, Buffer]:
    """The rotated queries [B, T, kv_heads, group, D] of a block, and both buffers with the block in them."""
    group, angles = qkv.shape[3] - 2, block.angles
    qk = qkv[..., : group + 1, :] if angles is None else rope.rotate(qkv[..., : group + 1, :], *angles)
    return qk[..., :group, :], *written(qk[..., group, :], qkv[..., group + 1, :], block, keys, values)


def mix(
    q: jax.Array,
    keys: Buffer,
    values: Buffer,
    mask: jax.Array,
    bias: jax.Array | None = None,
    table: jax.Array | None = None,
    score: Score = PLAIN,
) -> jax.Array:
    """Mixes for each query the cached values that the query sees. Nothing is written.

    Args:
      q: [B, T, kv_heads, group, D], the queries.
      keys, values, bias, table, score: as in :func:`attend` and :class:`Block`.
      mask: bool[B, T or 1, S], the slots that each query sees.

    Returns:
      [B, T, kv_heads * group * D].
    """
    batch, size, kv_heads, group, dim = q.shape
    row_keys, row_values = kv.by_rows(keys, table), kv.by_rows(values, table)  # [B, kv, S, D]
    q = q.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * size, dim)  # one matrix for each kv head
    scale = dim**-0.5 if score.scale is None else score.scale
    scores = kv.scores(q, row_keys).reshape(batch, kv_heads, group, size, -1) * scale  # [B, kv, g, T, S]
    if score.cap is not None:
        scores = score.cap * jnp.tanh(scores / score.cap)
    if bias is not None:
        scores += bias.reshape(len(bias), kv_heads, group, size, -1)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -jnp.inf), axis=-1)
    out = kv.mixture(weights.reshape(batch, kv_heads, group * size, -1), row_values, q.dtype)
    out = out.reshape(batch, kv_heads, group, size, dim).transpose(0, 3, 1, 2, 4)  # [B, T, kv, g, D]
    return out.reshape(batch, size, -1)


def written(k: jax.Array, v: jax.Array, block: Block, keys: Buffer, values: Buffer) -> tuple[Buffer, Buffer]:
    """The cache of one layer with a block's keys, already rotated, and values, each [B, T, kv_heads, D], in it."""
    k, v = kv.finite_values(k, v)
    keys = kv.write(keys, k.swapaxes(1, 2), block.starts, block.table)
    return keys, kv.write(values, v.swapaxes(1, 2), block.starts, block.table)
