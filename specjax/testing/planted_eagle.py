"""An EAGLE-3 head of a real head's shape that is right with a chosen probability at each depth and rank.

The head runs in full, and its weights do the following. E is the width of the part of an embedding that the head reads.

    channels of the hidden state       content
    0                                  always the same large number, so that every norm divides by the same amount
    1 to K                             a counter: channel d holds a number at depth d, and the others hold 0
    identity, E channels               the token that attention has read; empty before and after the layer
    blocks 1 to K, E channels each     block d holds the token's identity at depth d; the other blocks are empty

Attention finds the entry of its own token: queries and keys are the same random projection of the token's embedding.
The values bring the identity. The MLP moves the identity to the block of the counter's depth, empties the block of the
depth before, and advances the counter. So each depth has guesses of its own in the rows of the output matrix.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax.decode import random
from specjax.drafters.eagle import Eagle
from specjax.models import axes, modules, parallel
from specjax.models.config import LlamaConfig
from specjax.models.heads.eagle3_head import Eagle3HeadConfig
from specjax.models.lm import LM
from specjax.testing.planted import planted_lm

FALL = 0.7  # the logit of each guess over the logit of the next better one
SHARP = 150.0  # the attention score of a token's own entry; scores of other tokens are near 0
GATE = 16.0  # silu(16) is 16, and silu(-16) is nearly 0
IDLE = 1e-4  # the size of weights that change nothing: zeros would draw less power on an accelerator


def planted_eagle3(
    config: LlamaConfig, acceptance: Any, seed: int = 0, dtype: Any = jnp.bfloat16, peak: float = 40.0,
    tokens: np.ndarray | None = None, mesh: Mesh | None = None,
) -> tuple[LM, Eagle, np.ndarray]:  # fmt: skip
    """A target that follows a random cycle over the tokens that a head can draft, and such a head.

    The tokens for which a guess is right are chosen at random, for each depth anew. Each drafted token that is reached
    is therefore accepted with the given probability, independently, as the theory assumes. A text must begin with
    draftable tokens (``Eagle.tokens``): the target then never leaves them.

    Args:
      config: the target's shape. The head has one layer of this shape, drafts a quarter of the tokens and at most 32000
        of them, as published heads do, and reads the target's states after three layers.
      acceptance: f[K, M]. Entry [d, m] is the probability that the guess of rank m at depth d + 1 is right, given that
        the token before is right. Depths from K + 1 on are like depth K.
      seed: the seed of the weights, of the cycle and of the guesses.
      dtype: the dtype of the weights of both.
      peak: the logit of the target's successor and of the head's best guess.
      tokens: i64[D], the tokens that the head can draft, in rising order. None: random ones.
      mesh: the devices that share the target; each of them has the whole head. None: the default device.

    Returns:
      The target, the head as a drafter of chains, and pi i64[V]: token x is followed by pi[x].

    Raises:
      ValueError: ``acceptance`` is no such table, or the shape is too small for K depths.
    """
    table = table_of(acceptance)
    vocab, rng = config.vocab_size, np.random.default_rng(seed)
    tokens = np.sort(rng.choice(vocab, draftable_tokens(config), replace=False)) if tokens is None else tokens
    draftable = len(tokens)
    following = cycle(draftable, rng)  # among the draftable tokens, by their place in ``tokens``
    others, pi = np.setdiff1d(np.arange(vocab), tokens), np.empty(vocab, np.int64)
    pi[tokens], pi[others] = tokens[following], others[cycle(len(others), rng)]

    target = planted_lm(config, pi, 2 * seed, dtype, peak, mesh)
    embed = target.params["embed"]
    marked = embed.at[:, 0].set(1.0)  # from it the head makes its constant channel
    target.params["embed"] = marked if mesh is None else jax.device_put(marked, embed.sharding)
    embedded = target.params["embed"][jnp.asarray(tokens)]  # [D, H]
    if mesh is not None:
        embedded = jax.device_put(embedded, axes.whole(mesh))
    last = config.num_hidden_layers
    taps = (2, last // 2, last - 3) if last > 8 else tuple(sorted({0, last // 2, last}))
    layer = dataclasses.replace(target.config, vocab_size=draftable, num_hidden_layers=1)
    head = Eagle3HeadConfig(layer, taps)
    places = _Places.of(head, len(table))
    before = np.stack([_before(following, chances, rng) for chances in table])  # [K, M, D]
    params = _head(embedded, jnp.asarray(before), 2 * seed + 1, head, places, peak)
    return target, parallel.everywhere(Eagle(head, params, jnp.asarray(tokens, jnp.int32)), mesh), pi


def table_of(acceptance: Any) -> np.ndarray:
    """An acceptance table f64[K, M]. Raises ValueError if its entries or the sums of its rows are no chances."""
    table = np.asarray(acceptance, np.float64)
    if table.ndim != 2 or not table.size or not ((table >= 0) & (table <= 1)).all() or (table.sum(1) > 1 + 1e-9).any():
        raise ValueError(f"acceptance must be a table [K, M] of chances, rows of sum at most 1, got {acceptance!r}")
    return table


def draftable_tokens(config: LlamaConfig) -> int:
    """How many tokens a planted head drafts: a quarter of the tokens and at most 32000, as published heads do."""
    return min(32000, config.vocab_size // 4)


def cycle(size: int, rng: np.random.Generator) -> np.ndarray:
    """A random permutation i64[size] that is one cycle."""
    order, following = rng.permutation(size), np.empty(size, np.int64)
    following[order] = np.roll(order, -1)
    return following


def _before(following: np.ndarray, chances: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """For each rank, the token before each guess: i64[M, D], permutations. Rank m is right on a share chances[m]."""
    order = rng.permutation(len(following))
    ends = np.round(np.cumsum([0, *chances]) * len(order)).astype(int)
    found = []
    for rank, (first, end) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
        wrong, guess = np.concatenate([order[:first], order[end:]]), following.copy()
        guess[wrong] = np.roll(following[wrong], rank + 1)  # another shift for each rank: guesses of one token differ
        found.append(np.argsort(guess))
    return np.stack(found)


@dataclasses.dataclass(frozen=True)
class _Places:
    """Where the channels of the head's hidden state lie."""

    depths: int  # K
    width: int  # E

    @classmethod
    def of(cls, head: Eagle3HeadConfig, depths: int) -> "_Places":
        layer = head.layer
        width = min(
            (layer.hidden_size - 1 - depths) // (depths + 1),
            layer.num_key_value_heads * layer.head_dim,
            (layer.intermediate_size - depths + 1) // (2 * depths - 1),
        )
        if width < 8:
            raise ValueError(
                f"a planted head of {depths} depths needs a wider model: of hidden size {layer.hidden_size} and MLP "
                f"width {layer.intermediate_size} each depth gets {width} channels, and it needs 8"
            )
        return cls(depths, width)

    @property
    def identity(self) -> np.ndarray:
        return 1 + self.depths + np.arange(self.width)

    def block(self, depth: int) -> np.ndarray:
        """The channels of block ``depth``, from 1."""
        return self.identity + depth * self.width

    @property
    def constant(self) -> float:
        """The number in channel 0. It is large: tokens' identities differ in length, and the norms hardly notice."""
        return 30 * self.width**0.5

    @property
    def counted(self) -> float:
        """The number in the counter's channel."""
        return self.constant / 4

    def rms(self, size: int) -> float:
        """What a norm over ``size`` channels divides by."""
        return (self.constant**2 + self.counted**2) ** 0.5 / size**0.5


def _head(embedded, before, seed: int, head: Eagle3HeadConfig, places: _Places, peak: float) -> dict:
    """The head's parameters, from the embeddings [D, H] of the tokens that the head can draft."""
    params = idle(head, seed, embedded.dtype)
    layer, identity = head.layer, places.identity
    size, rms = layer.hidden_size, places.rms(layer.hidden_size)

    fuse = np.array([[0], [1]]), np.arange(len(head.taps)) * size  # channels 0 and 1, from channel 0 of each tap
    amounts = np.array([[places.constant], [places.counted]]) / len(head.taps)
    params["fuse"]["weight"] = params["fuse"]["weight"].at[fuse].set(jnp.asarray(amounts, embedded.dtype))

    kv_heads, group, dim = layer.num_key_value_heads, layer.group_size, layer.head_dim
    keys = jax.random.normal(random.key(seed), (kv_heads, 1, dim, size)) * (SHARP / dim**0.5 / size) ** 0.5
    qkv = params["attention"]["qkv"]["weight"].reshape(kv_heads, group + 2, dim, 2 * size)
    qkv = qkv.at[:, : group + 1, :, :size].set(keys.astype(embedded.dtype)).at[:, : group + 1, :, size:].set(0)
    values, channel = np.divmod(np.arange(places.width), dim)
    qkv = qkv.at[values, group + 1, channel, 1 + np.arange(places.width)].set(1)  # of the embedding, without its 1
    params["attention"]["qkv"]["weight"] = qkv.reshape(kv_heads, (group + 2) * dim, 2 * size)
    of_query = (values * group)[:, None] * dim + np.arange(group) * dim + channel[:, None]  # [E, group]
    o = params["attention"]["o"]["weight"]
    params["attention"]["o"]["weight"] = o.at[identity[:, None], of_query].set(1 / group)

    params["mlp"] = _mlp(params["mlp"], places, rms)
    known = identities(embedded, 1, places.width)
    params["lm_head"] = output_rows(known, before, places.block, peak * rms, head, embedded.dtype)
    return params


def idle(head: Any, seed: int, dtype) -> dict:
    """Random parameters of size ``IDLE`` for a head of this configuration. Norms are ones."""
    leaves, tree = jax.tree.flatten(modules.structure(head.module, head)[1])
    keys = jax.random.split(random.key(seed), len(leaves))

    def leaf(key, x):
        return jnp.ones(x.shape, dtype) if len(x.shape) == 1 else IDLE * jax.random.normal(key, x.shape, dtype)

    return jax.tree.unflatten(tree, [leaf(key, x) for key, x in zip(keys, leaves, strict=True)])


def _mlp(params: dict, places: _Places, rms: float) -> dict:
    """An MLP whose units run only at one depth: they move the identity, empty the block before, and count on."""
    gate_up, down = params["gate_up"]["weight"], params["down"]["weight"]
    used = 0
    on, off = 2 * GATE * rms / places.counted, -GATE * rms / places.constant

    def units(depth: int, read, amount: float, put) -> None:
        """Adds amount * x[read] to the channels ``put[0]`` and takes it from ``put[1]``, at this depth."""
        nonlocal gate_up, down, used
        index = used + np.arange(len(read))
        used += len(read)
        gate_up = gate_up.at[0, index].set(0).at[0, index, 0].set(off).at[0, index, depth].set(on)
        gate_up = gate_up.at[1, index].set(0).at[1, index, read].set(1)
        for channels, sign in zip(put, (1, -1), strict=True):
            if channels is not None:
                down = down.at[channels, index].set(sign * amount * rms / GATE)

    for depth in range(1, places.depths + 1):
        units(depth, places.identity, 1, (places.block(depth), places.identity))
        if depth > 1:
            units(depth, places.block(depth - 1), 1, (None, places.block(depth - 1)))
        if depth < places.depths:
            step = places.counted / places.constant
            units(depth, np.array([0]), step, (np.array([depth + 1]), np.array([depth])))
    return {"gate_up": {"weight": gate_up}, "down": {"weight": down}}


def identities(embedded, first: int, width: int):
    """What a head reads of embeddings [D, H], from channel ``first`` on, after its norm: f32[D, E], of length 1."""
    x = embedded.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True))
    x = x[:, first : first + width]
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6)  # a token that masks has none


def output_rows(x, before, block: Callable[[int], np.ndarray], scale: float, head: Any, dtype):
    """The rows of the output matrix, [D, H]: in block d the identities of the tokens of which a row is a guess.

    Args:
      x: f32[D, E], the tokens' identities.
      before: i[K, M, D], for each depth and rank the token of which each row is a guess.
      block: the E channels of the block of a depth, from 1.
      scale: the logit of the best guess, times what the last norm divides by.
      head: the head's configuration.
      dtype: the dtype of the rows.
    """
    rows = jnp.zeros((len(x), head.layer.hidden_size), dtype)
    for depth, of_ranks in enumerate(before, 1):
        said = sum(FALL**rank * x[place] for rank, place in enumerate(of_ranks))
        rows = rows.at[:, block(depth)].set((said * (scale / x.shape[1] ** 0.5)).astype(dtype))
    return rows
