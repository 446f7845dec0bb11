"""Every random draw, addressed by (request key, purpose, absolute position): nothing is split along the way.

So a row's tokens don't depend on its batch, slot, neighbours or on how its tokens were grouped into rounds. A
position that a round drew for and did not commit is drawn again with the same key later; that is sound as long as
nothing committed depended on the earlier draw, and a verifier for which it would folds more in (see Verifier).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

# Purposes. TOKEN is the target's own draw, of a bonus, a correction or a plain token.
TOKEN, DRAFT, ACCEPT = 0, 1, 2

# Both are settings of the process in JAX (``jax_default_prng_impl``, ``jax_threefry_partitionable``). They are fixed
# here, since another choice gives other tokens, and the kinds "rbg" and "unsafe_rbg" give all rows one noise.
IMPLEMENTATION = "threefry2x32"


def _settled(draw):
    """``draw``, independent of the process's settings of random numbers."""

    @functools.wraps(draw)
    def settled(*args):
        with jax.threefry_partitionable(True):
            return draw(*args)

    return settled


def key(seed) -> jax.Array:
    """The key of one seed: key[] of a u32[]."""
    return jax.random.key(seed, impl=IMPLEMENTATION)


def check_keys(keys: jax.Array) -> None:
    """Refuses keys that the rows of a batch can't be drawn with.

    Raises:
      ValueError: if ``keys`` are raw numbers or of another implementation than :data:`IMPLEMENTATION`.
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
    """One key a request: integers u64[B], on the host, to key[B].

    The two words of a seed are those of its key, as in ``jax.random.key`` of seeds below 2^32.
    """
    seeds = np.asarray(seeds, np.uint64)
    words = np.stack([seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)], axis=-1).astype(np.uint32)  # [B, 2]
    return jax.random.wrap_key_data(jnp.asarray(words), impl=IMPLEMENTATION)


def fold(keys: jax.Array, data) -> jax.Array:
    """Folds an integer, or one i32[B] value a row, into key[B]."""
    return jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(jnp.asarray(data, jnp.int32), keys.shape))


def at(keys: jax.Array, positions: jax.Array) -> jax.Array:
    """key[B] at absolute positions i32[B, T]. -> key[B, T]."""
    return jax.vmap(lambda key, row: jax.vmap(lambda position: jax.random.fold_in(key, position))(row))(keys, positions)


def siblings(keys: jax.Array, ranks: jax.Array) -> jax.Array:
    """key[B, T] with ranks i32[B, T] folded in, except that the first sibling, of rank 0, has the key itself."""
    return jnp.where(ranks > 0, jax.vmap(jax.vmap(jax.random.fold_in))(keys, ranks), keys)


@_settled
def uniform(keys: jax.Array) -> jax.Array:
    """One f32 in [0, 1) for each key[B, T]."""
    return jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, dtype=jnp.float32)))(keys)


@_settled
def gumbel(keys: jax.Array, size: int) -> jax.Array:
    """Standard Gumbel noise f32[B, T, size] for key[B, T]."""
    return jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (size,), jnp.float32)))(keys)


def categorical(keys: jax.Array, probs: jax.Array) -> jax.Array:
    """Draws from unnormalised probs f32[B, T, V] with key[B, T] by the Gumbel trick. -> i32[B, T].

    A token of probability 0 is never drawn; ties (temperature 0 is one of them) go to the lowest id.
    """
    return jnp.argmax(jnp.log(probs) + gumbel(keys, probs.shape[-1]), axis=-1).astype(jnp.int32)
