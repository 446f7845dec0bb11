"""Thresholds that were measured on hardware: all of the package are in this file."""

from typing import Any

import jax

from specjax.models import axes

# The most queries of one kv head for which the hand-written attention kernel runs. With more queries, XLA's attention
# is as fast (measured on an H100).
MOST_KERNEL_QUERIES = 32
# Up to so many programs the attention kernels cut any cache: two for each multiprocessor of a card with 132 of them.
MOST_KERNEL_PROGRAMS = 264
# A part of a long cache has about so many slots, however many rows there are. A program reads its part tile after tile,
# so in few parts one long row would hold up all others (docs/lab/attention-kernel.md).
LONG_PART = 512
# The most programs that the attention kernel of a prompt's chunk makes by cutting caches: one for each multiprocessor,
# which has no room for two.
MOST_PROMPT_PROGRAMS = 132
# Up to so many rows times kv heads, the Hopper kernel cuts a short cache too. Eight rows of eight heads lose by cuts.
FEW_KERNEL_PROGRAMS = 32
# The hidden size from which a GPU runs two tokens as fast as one (docs/performance.md). Sizes from 2048 to 4096 gain,
# sizes 576 and 960 lose.
TWO_TOKENS_FROM = 2048

# Up to so many of a row's largest numbers, a GPU finds them by merging lists (docs/lab/tried-and-dropped.md).
LONGEST_LIST = 16


def merges_lists(count: int) -> bool:
    """Whether the ``count`` largest numbers of wide rows are found by merging lists of ``count`` numbers."""
    return 0 < count <= LONGEST_LIST and jax.default_backend() == "gpu"


def filter_search(rows: int) -> tuple[int, int]:
    """How a filter's threshold is searched in ``rows`` rows of a vocabulary (docs/lab/tried-and-dropped.md).

    On a GPU a pass over one row waits for memory and for launches, not for arithmetic, so fewer passes that try more
    thresholds take less time.

    Returns:
      How many bits of the threshold one pass settles, and into how many pieces a row is cut.
    """
    if jax.default_backend() != "gpu":
        return 2, 1
    return (6, 8) if rows <= 2 else (3, 8)


def search_unrolled() -> bool:
    """Whether the passes of that search are written out, in place of a loop.

    On a GPU a pass takes some 4 us, and its share of a loop 15 us more. On a CPU the loop costs nothing, and programs
    compile faster with it.
    """
    return jax.default_backend() == "gpu"


def levels_unrolled() -> bool:
    """Whether the steps of a chain from a head of one layer are written out, in place of a loop.

    On a GPU a loop cuts the round's graph of kernels into several, and its counter and outputs take kernels too. On a
    CPU the loop costs nothing, and programs compile faster with it.
    """
    return jax.default_backend() == "gpu"


def least_tokens(lm: Any, batch: int) -> int:
    """The least number of tokens per row for a call of the model: 1 or 2.

    If matrices are large, XLA's products on a GPU take longer for a single token than for two. So a row that is alone
    in its part of the mesh feeds two. The second, unused token is written past the row's length, and the capacity
    leaves room for it.
    """
    large = lm.hidden_size >= TWO_TOKENS_FROM
    return 2 if large and batch <= axes.parts(lm.mesh) and not lm.in_parts and jax.default_backend() == "gpu" else 1


def prefill_chunk(asked: int | None = None, longest: int | None = None) -> int:
    """How many tokens of each prompt a prefill call reads: ``asked``, or else a number that suits the machine.

    On a CPU arithmetic is soon the limit, so padding costs time and chunks are small. A GPU needs large products. There
    the chunk is at most the power of two that holds the ``longest`` prompt.
    """
    if asked is not None:
        return asked
    if jax.default_backend() == "cpu":
        return 64
    return 512 if longest is None else min(512, max(64, 1 << (longest - 1).bit_length()))


def engine_chunk(asked: int | None = None) -> int:
    """How many tokens of a prompt the engine reads between two rounds: ``asked``, or else a number for the machine.

    On a GPU a call of 128 tokens takes little longer than a call of one. With 512, running requests would wait longer,
    and a short prompt would cost four times as much.
    """
    if asked is not None:
        return asked
    return 64 if jax.default_backend() == "cpu" else 128
