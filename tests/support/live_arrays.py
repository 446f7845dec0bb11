"""The arrays that the process holds, for tests that compare them with a report of memory."""

import gc

import jax


def live() -> tuple[int, int]:
    """The bytes and the number of all arrays in the process, one buffer once.

    Garbage is collected first. Otherwise arrays that an earlier test left in a cycle of references could be freed
    between two counts.
    """
    gc.collect()
    plain = [x for x in jax.live_arrays() if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)]
    sizes = {x.unsafe_buffer_pointer(): x.nbytes for x in plain}
    return sum(sizes.values()), len(sizes)
