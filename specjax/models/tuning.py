"""Thresholds that were measured on hardware: all of the package are in this file."""

from typing import Any

import jax

from specjax.models import axes

# The most queries of one kv head for which the hand-written attention kernel runs. With more queries, XLA's attention
# is as fast (measured on an H100).
MOST_KERNEL_QUERIES = 32
# The most programs that the attention kernel makes by cutting caches: two for each multiprocessor of a
# card with 132 of them.
MOST_KERNEL_PROGRAMS = 264
# The most programs that the attention kernel of a prompt's chunk makes by cutting caches: one for each multiprocessor,
# which has no room for two.
MOST_PROMPT_PROGRAMS = 132
# Up to so many rows times kv heads, the Hopper kernel cuts a short cache too. Eight rows of eight heads lose by cuts.
FEW_KERNEL_PROGRAMS = 32
# The hidden size from which a GPU runs two tokens as fast as one (docs/performance.md). Sizes from 2048 to 4096 gain,
# sizes 576 and 960 lose.
TWO_TOKENS_FROM = 2048

# The most rows of a vocabulary for which a GPU searches a filter's threshold by digits of four bits, not of two
# (docs/lab/tried-and-dropped.md).
WIDE_DIGITS_TO = 2


def search_digit(rows: int) -> int:
    """How many bits of a filter's threshold one pass over ``rows`` rows of a vocabulary settles: 2 or 4.

    Both divide 32, so no digit is cut. A pass of four bits tries fifteen thresholds, a pass of two bits three. On a GPU
    a pass over one row waits for memory, not for arithmetic, so fewer passes take less time.
    """
    return 4 if rows <= WIDE_DIGITS_TO and jax.default_backend() == "gpu" else 2


def search_unrolled() -> bool:
    """Whether the passes of that search are written out, in place of a loop.

    On a GPU a pass takes some 4 us, and its share of a loop 15 us more. On a CPU the loop costs nothing, and programs
    compile faster with it.
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
