"""What was measured to be fast on which hardware: every such threshold of the package, in one place."""

from typing import Any

import jax

# Queries of one kv head, beyond which XLA's attention is as fast as the hand-written kernel (measured on an H100).
MOST_KERNEL_QUERIES = 32
# Programs of the attention kernel that share the GPU: two for each multiprocessor of a card with 132 of them.
MOST_KERNEL_PROGRAMS = 264
# Hidden size from which a call of two tokens takes a GPU no longer than a call of one (docs/performance.md): 2048 to
# 4096 gain, 576 and 960 lose.
TWO_TOKENS_FROM = 2048


def least_tokens(lm: Any, batch: int) -> int:
    """Tokens that a call of the model feeds each row at least.

    Where matrices are large, XLA's products on a GPU take longer for a single row than for two. The second, unused
    token is written past the row's length; the capacity leaves room for it.
    """
    large = lm.hidden_size >= TWO_TOKENS_FROM
    return 2 if large and batch == 1 and not lm.in_parts and jax.default_backend() == "gpu" else 1


def prefill_chunk(asked: int | None = None, longest: int | None = None) -> int:
    """Tokens that a prefill call reads: ``asked``, or what suits the machine.

    A CPU is bound by arithmetic early and pays for padding; a GPU wants large products. On a GPU the chunk is at most
    the power of two that holds the ``longest`` prompt.
    """
    if asked is not None:
        return asked
    if jax.default_backend() == "cpu":
        return 64
    return 512 if longest is None else min(512, max(64, 1 << (longest - 1).bit_length()))
