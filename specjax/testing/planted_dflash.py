"""A DFlash head of a published head's shape that is right with a chosen probability at each place of its block.

The head runs in full, and its first layer does the following; the other layers add next to nothing. E is the width of
the part of an embedding that the head reads.

    channels of the hidden state       content
    0                                  1 in the embedding of every token, 0 in that of a masked token
    1                                  a large number in the embedding of a masked token, 0 in that of every other token
    2 to E + 1                         the token's identity
    blocks 1 to K, E channels each     block d holds the last token's identity at place d; the other blocks are empty

Masked tokens differ by their positions alone. One query head of each kv head that serves place d attends to the token
that stands d positions earlier and has a 1 in channel 0: the pairs that turn fastest under rotation are turned back by
d positions. At other places that query attends to masked tokens, whose values are empty: the pair that hardly turns
gives these a score between the two. So the last token's identity reaches block d at place d alone, and each place has
guesses of its own in the rows of the output matrix.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.drafters.dflash import DFlash
from specjax.models import rope
from specjax.models.config import LlamaConfig
from specjax.models.heads.dflash_head import DFlashHeadConfig, layers_for
from specjax.models.lm import LM
from specjax.testing.planted import planted_lm
from specjax.testing.planted_eagle import cycle, identities, idle, output_rows, table_of

FIRST = 2  # the first channel of an embedding that tells tokens apart
SHARP = 200.0  # the attention score of the last token at the place that a query head serves
SETTLED = 12.0  # how far the score of what a query shall see must lie above all others
LAYERS, BLOCK, PER_HIDDEN = 5, 10, 3  # of the published head of the 8B; its MLP is three times as wide as its states


def planted_dflash(
    config: LlamaConfig, acceptance: Any, seed: int = 0, dtype: Any = jnp.bfloat16, peak: float = 40.0
) -> tuple[LM, DFlash, np.ndarray]:
    """A target that follows a random cycle over all tokens but the one that masks, and a head that drafts the cycle.

    The tokens after which a guess is right are chosen at random. Each drafted token that is reached is therefore
    accepted with the given probability, independently, as the theory assumes.

    Args:
      config: the target's shape. The head has five layers with as many heads as the target's, blocks of ten tokens, and
        an output matrix over all tokens, and reads the target's states after five layers, as the published head of the
        8B. That head shares its output matrix with the target; this one has one of its own, of the same size.
      acceptance: f[K, M], of which the first column counts: entry d is the probability that the guess at place d + 1 is
        right, given that the guess before is right. K is at most 9.
      seed: the seed of the weights, of the cycle and of the guesses.
      dtype: the dtype of the weights of both.
      peak: the logit of the target's successor and of the head's guess.

    Returns:
      The target, the head as a drafter of chains, and pi i64[V]: token x is followed by pi[x]. The token that masks is
      followed by itself.

    Raises:
      ValueError: ``acceptance`` is no such table, or the shape is too small for K places.
    """
    chances = table_of(acceptance)[:, 0]
    if len(chances) >= BLOCK:
        raise ValueError(f"a block of {BLOCK} tokens has {BLOCK - 1} places to draft, got {len(chances)} chances")
    rng = np.random.default_rng(seed)
    vocab = config.vocab_size
    masking, pi = vocab - 1, np.arange(vocab)
    pi[:masking] = cycle(masking, rng)
    target = planted_lm(config, pi, 2 * seed, dtype, peak)
    size, places = config.hidden_size, _Places.of(target.config, len(chances))
    embed = target.params["embed"].at[:, 0].set(1).at[:, 1].set(0).at[masking].set(0)
    target.params["embed"] = embed.at[masking, 1].set(places.constant)
    layers = layers_for(target.config, LAYERS, PER_HIDDEN * size, vocab)
    head = DFlashHeadConfig(layers, _taps(config.num_hidden_layers), BLOCK, masking)
    params = _head(idle(head, 2 * seed + 1, dtype), head, places)
    before = np.stack([[x] for x in _before(pi, masking, chances, rng)])  # [K, 1, V]
    rms = (places.constant**2 + places.width) ** 0.5 / size**0.5
    known = identities(target.params["embed"], FIRST, places.width)
    params["lm_head"] = output_rows(known, jnp.asarray(before), places.block, peak * rms, head, dtype)
    return target, DFlash(head, params, None), pi


def _taps(layers: int) -> tuple[int, ...]:
    """The layers of the target that the published head reads: five, from the second on, or all of a small target."""
    if layers <= LAYERS + 3:
        return tuple(range(1, layers + 1))
    return tuple(np.round(np.linspace(2, layers - 2, LAYERS)).astype(int).tolist())


def _before(pi: np.ndarray, masking: int, chances: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """For each place, the last token for which each token is the guess: i64[V], a permutation."""
    order, share, truth, found = rng.permutation(masking), 1.0, np.arange(len(pi)), []
    for chance in chances:
        share, truth = share * chance, pi[truth]
        wrong, guess = order[round(share * masking) :], truth.copy()  # wrong at one place: wrong at all later ones
        guess[wrong] = np.roll(truth[wrong], 1)
        found.append(np.argsort(guess))
    return found


@dataclasses.dataclass(frozen=True)
class _Places:
    """Where the identities lie, and how the query heads tell the places of a block apart."""

    depths: int  # K
    width: int  # E
    heads: int  # the kv heads that bring the identity to one place
    pairs: tuple[int, ...]  # the pairs of a query that are turned back
    angles: tuple[float, ...]  # how far each of these pairs turns from one position to the next
    share: float  # the score of masked tokens, relative to that of the last token at the right place

    @classmethod
    def of(cls, c: LlamaConfig, depths: int) -> "_Places":
        turns = rope.inverse_frequencies(c)[0]
        pairs = np.flatnonzero(turns >= min(0.5, turns[1]))
        away = np.cos(np.outer(np.delete(np.arange(-BLOCK, BLOCK + 1), BLOCK), turns[pairs])).mean(axis=1).max()
        heads = c.num_key_value_heads // -(-depths // c.group_size)
        width = min((c.hidden_size - FIRST) // (depths + 1), heads * c.head_dim)
        if SHARP * (1 - away) / 2 < SETTLED or width < 8:
            raise ValueError(
                f"a planted head of {depths} places needs a wider model: with {c.num_key_value_heads} kv heads of "
                f"{c.head_dim} channels each place gets {max(width, 0)}, and it needs 8"
            )
        return cls(depths, width, heads, tuple(pairs.tolist()), tuple(turns[pairs].tolist()), float(1 + away) / 2)

    def block(self, depth: int) -> np.ndarray:
        """The channels of block ``depth``, from 1."""
        return FIRST + depth * self.width + np.arange(self.width)

    @property
    def constant(self) -> float:
        """The number in channel 1 of a masked token. It is large: identities differ in length."""
        return 8 * self.width**0.5


def _head(params: dict, head: DFlashHeadConfig, places: _Places) -> dict:
    """The parameters of an idle head, whose first layer now attends as this file says."""
    c = head.layer
    # The key of an entry of the context is the opposite of a masked token's, so that no query sees the context.
    tap = jnp.arange(len(head.taps)) * c.hidden_size
    params["fuse"]["weight"] = params["fuse"]["weight"].at[1, tap].set(-8)
    kv_heads, group, dim = c.num_key_value_heads, c.group_size, c.head_dim
    attention = params["layers"]["0"]["attention"]
    qkv = attention["qkv"]["weight"].reshape(kv_heads, group + 2, dim, c.hidden_size)
    pairs, still = np.array(places.pairs), dim // 2 - 1
    qkv = qkv.at[:, group, pairs, 0].set(1).at[:, group, still, 1].set(len(pairs) ** 0.5)
    out = attention["o"]["weight"]
    for depth in range(1, places.depths + 1):
        set_of_heads, slot = divmod(depth - 1, group)
        turned = depth * np.array(places.angles)
        channels = np.arange(places.width)
        kv_head, channel = set_of_heads * places.heads + channels // dim, channels % dim
        query = jnp.zeros((dim, c.hidden_size), qkv.dtype).at[pairs, 1].set(jnp.asarray(np.cos(turned), qkv.dtype))
        query = query.at[pairs + dim // 2, 1].set(jnp.asarray(-np.sin(turned), qkv.dtype))
        query = query.at[still, 1].set(places.share * len(pairs) ** 0.5)
        qkv = qkv.at[np.unique(kv_head), slot].set(query)
        qkv = qkv.at[kv_head, group + 1, channel].set(0).at[kv_head, group + 1, channel, FIRST + channels].set(1)
        out = out.at[places.block(depth), (kv_head * group + slot) * dim + channel].set(1)
    attention["qkv"]["weight"], attention["o"]["weight"] = qkv.reshape(attention["qkv"]["weight"].shape), out
    norm = jnp.full(dim, (SHARP * (1 + places.share**2) ** 0.5 / dim**0.5) ** 0.5, qkv.dtype)
    attention["q_norm"]["weight"] = attention["k_norm"]["weight"] = norm
    return params
