"""Random draws. Each draw has an address: the request's key, the draw's purpose and the token's absolute position.

No key is split or advanced during decoding. A row's tokens therefore do not depend on the batch, on the row's place in
the batch, on the other rows, or on how the row's tokens were grouped into rounds.

A round may draw for a position and not commit the drawn token. A later round then draws for this position again, with
the same key. The second draw is sound if no committed token depended on the first draw. A verifier for which this does
not hold (block verification) adds the start of the round to its keys: see ``Verifier.draft_keys``.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# The purposes of draws. TOKEN: the target's own token, which is a bonus, a correction or a plain token. DRAFT: a
# drafted token. ACCEPT: whether a drafted token is accepted.
TOKEN, DRAFT, ACCEPT = 0, 1, 2

# The kind of random keys. In JAX the process can choose another kind (``jax_default_prng_impl``), another way to compute
# random bits (``jax_threefry_partitionable``) and another form of Gumbel noise (``jax_high_dynamic_range_gumbel``). This
# file fixes all three, because another choice gives other tokens. The kinds "rbg" and "unsafe_rbg" also give all rows of
# a batch the same noise.
IMPLEMENTATION = "threefry2x32"


class Apart(NamedTuple):
    """Draft keys under which nodes of one depth draw independently if their parents differ (:func:`at_children`).

    Plain draft keys let such nodes share the noise of their position. The verifier chooses: ``Coupled`` needs the
    shared noise, and ``Traversal``, which may judge children of several nodes of one depth, needs independent noise.
    """

    # key[B]
    keys: jax.Array


def _settled(draw):
    """``draw``, made independent of the process's settings for random numbers."""

    @functools.wraps(draw)
    def settled(*args):
        with jax.threefry_partitionable(True):
            return draw(*args)

    return settled


def key(seed) -> jax.Array:
    """The key of one seed. -> key[].

    Args:
      seed: an integer, or u32[].
    """
    return jax.random.key(seed, impl=IMPLEMENTATION)


def check_keys(keys: jax.Array) -> None:
    """Refuses keys of the wrong kind.

    Raises:
      ValueError: ``keys`` are raw numbers, or keys of another implementation than :data:`IMPLEMENTATION`.
    """
    got = (
        str(jax.random.key_impl(keys))
        if jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
        else f"an array of {keys.dtype}"
    )
    if got != IMPLEMENTATION:
        raise ValueError(
            f"a request's keys must be of the implementation {IMPLEMENTATION!r}, got {got!r}; "
            "specjax.random.request_keys(seeds) makes them"
        )


def request_keys(seeds) -> jax.Array:
    """One key for each request. -> key[B].

    Args:
      seeds: u64[B], integers on the host. The upper and the lower 32 bits of a seed are the two words of its key. For
        seeds below 2^32 the key is the same as that of ``jax.random.key``.
    """
    return wrapped(jnp.asarray(key_words(seeds)))


def key_words(seeds) -> np.ndarray:
    """The words of the keys of :func:`request_keys`, on the host. -> u32[B, 2]."""
    seeds = np.asarray(seeds, np.uint64)
    return np.stack([seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)], axis=-1).astype(np.uint32)


def wrapped(words: jax.Array) -> jax.Array:
    """The keys of u32[B, 2], the two words of each. -> key[B]."""
    return jax.random.wrap_key_data(words, impl=IMPLEMENTATION)


def fold(keys: Any, data) -> Any:
    """key[B] with ``data`` folded in. -> key[B], or :class:`Apart` if ``keys`` are.

    Args:
      keys: key[B], or :class:`Apart`.
      data: one integer for all rows, or i32[B].
    """
    if isinstance(keys, Apart):
        return Apart(fold(keys.keys, data))
    return jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(jnp.asarray(data, jnp.int32), keys.shape))


def shared(keys: Any) -> jax.Array:
    """Draft keys as plain ones, key[B]: with these, nodes of one depth share the noise of their position."""
    return keys.keys if isinstance(keys, Apart) else keys


def at(keys: Any, positions: jax.Array) -> jax.Array:
    """The keys of absolute positions i32[B, T], made from the rows' keys, key[B] or :class:`Apart`. -> key[B, T]."""
    return jax.vmap(lambda key, row: jax.vmap(lambda position: jax.random.fold_in(key, position))(row))(
        shared(keys), positions
    )


def at_children(keys: Any, positions: jax.Array, parents: int) -> jax.Array:
    """The keys of the children of ``parents`` = W nodes of one depth, one key a parent.

    Args:
      keys: draft keys, key[B] or :class:`Apart`.
      positions: i32[B], the absolute position of the children.
      parents: W.

    Returns:
      key[B, 1] for plain keys: all share the key of the position. key[B, W] for :class:`Apart`; the first parent's
      children have the key of the position.
    """
    own = at(keys, positions[:, None])  # [B, 1]
    if not isinstance(keys, Apart) or parents == 1:
        return own
    # Fold in negative numbers: ranks are never negative, so no sibling (``siblings``) has such a key.
    others = [fold(own[:, 0], -number)[:, None] for number in range(1, parents)]
    return jnp.concatenate([own, *others], axis=1)


def siblings(keys: jax.Array, ranks: jax.Array) -> jax.Array:
    """The keys of siblings in a tree: key[B, T] with ranks i32[B, T] folded in. -> key[B, T].

    The first sibling has rank 0 and keeps the unchanged key.
    """
    return jnp.where(ranks > 0, jax.vmap(jax.vmap(jax.random.fold_in))(keys, ranks), keys)


@_settled
def uniform(keys: jax.Array) -> jax.Array:
    """One number from [0, 1) for each of key[B, T]. -> f32[B, T]."""
    return jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, dtype=jnp.float32)))(keys)


@_settled
def gumbel(keys: jax.Array, size: int) -> jax.Array:
    """Standard Gumbel noise, ``size`` numbers for each of key[B, T]. -> f32[B, T, size]."""
    return jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (size,), jnp.float32, mode="low")))(keys)


def categorical(keys: jax.Array, probs: jax.Array) -> jax.Array:
    """Draws one token from each distribution by the Gumbel trick. -> i32[B, T].

    A token of probability 0 is never drawn. A tie goes to the lowest id.

    Args:
      keys: key[B, T].
      probs: f32[B, T, V], the probabilities, which need not be normalised.
    """
    return jnp.argmax(jnp.log(probs) + gumbel(keys, probs.shape[-1]), axis=-1).astype(jnp.int32)
