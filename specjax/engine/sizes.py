"""The sizes of an engine's arrays."""

import dataclasses
from typing import Any

import jax
import numpy as np

from specjax.decode.decoder import Decoder
from specjax.decode.numeric import check_count, per_row
from specjax.engine import programs
from specjax.generation.job import Job
from specjax.generation.known_ids import known_ids
from specjax.models import axes
from specjax.models.cache import PAGE
from specjax.models.lm import LM


def check_chunk(prefill_chunk: Any) -> None:
    """Raises ValueError unless the argument is None or a positive multiple of a page."""
    if prefill_chunk is not None and check_count("prefill_chunk", prefill_chunk) % PAGE:
        raise ValueError(f"prefill_chunk must be a positive multiple of {PAGE}, or None, got {prefill_chunk!r}")


def parts(lm: LM, slots: int) -> int:
    """The parts of the model's mesh that share the slots. Raises ValueError if the slots can't be shared evenly."""
    found = axes.parts(lm.mesh)
    if slots % found:
        raise ValueError(f"slots must be a multiple of the {found} parts of the mesh that share them, got {slots}")
    return found


def longest(lm: LM, capacity: int, kv_tokens: int, headroom: int, parts: int) -> int:
    """The most tokens of a request, whose pages lie in one of the ``parts`` that share ``kv_tokens`` evenly.

    Raises:
      ValueError: not even the request of ``Engine.warmup`` fits.
    """
    found, least = min(capacity, kv_tokens // parts - headroom), 3 + len(lm.config.start_ids)
    if found < least:
        shared = f", of which each of the {parts} parts of the mesh has its share," if parts > 1 else ""
        raise ValueError(
            f"no request fits into capacity {capacity} and kv_tokens {kv_tokens}{shared}: a prompt of two tokens and "
            f"one new token need room for {least} tokens, and for {headroom} more in kv_tokens; give larger numbers"
        )
    return found


def within(job: Job, limited: bool, longest: int, capacity: int, kv_tokens: int) -> Job:
    """The job of one request, with its limit cut to what fits, unless the request has a limit of its own.

    Args:
      job: the job.
      limited: whether the request has a limit of its own.
      longest: the most tokens of a request, prompt included.
      capacity, kv_tokens: the engine's arguments, from which ``longest`` follows.

    Raises:
      ValueError: the request needs more than ``longest`` tokens.
    """
    length, limit = len(job.prompts[0]), int(job.request.limit[0])
    if not limited or per_row("max_new_tokens", job.options.max_new_tokens, 1)[0] in (None, -1):
        limit = min(limit, longest)
    if limit > longest or length >= longest:
        raise ValueError(
            f"the request needs room for {max(limit, length + 1)} tokens, {length} of the prompt and "
            f"{max(limit - length, 1)} new ones, but a request of this engine has at most {longest} (capacity "
            f"{capacity}, kv_tokens {kv_tokens}); shorten the prompt, or lower max_new_tokens"
        )
    limits: Any = np.array([limit], np.int32)
    return dataclasses.replace(job, request=job.request._replace(limit=limits))


def further_room(decoder: Decoder) -> int:
    """The number of entries that a drafter's caches have beyond a request's tokens: room for its draft trees."""
    tokens = PAGE  # so few that ``kv.room`` doesn't round the caches' capacity up
    own = jax.eval_shape(lambda: decoder.drafter.init(decoder.target, 1, tokens, decoder.num_speculative_tokens))
    return max([0, *(cache.capacity - tokens for cache in programs.caches(own))])


def reads(whole: bool, chunk: int, widest: int) -> list[tuple[int, int]]:
    """The programs that read prompts: the pages to which tables are cut, and the tokens that one call reads.

    Args:
      whole: whether a call reads a whole prompt, as an encoder does, and so all that the table holds.
      chunk: the tokens that a call reads at most.
      widest: the pages of the widest table. The others have 1, 4, 16 pages and so on, or from 16 on if not ``whole``.
    """
    found, width = [], 1 if whole else max(16, chunk // PAGE)
    while width < widest:
        found.append(width)
        width *= 4
    return [(width, min(width * PAGE, chunk) if whole else chunk) for width in [*found, widest]]


def listed(lm: LM, asked: int) -> int:
    """The room for lists of tokens: what a request may list, and the ids that no request may generate."""
    known = known_ids(lm)
    holes = 0 if known is None else int(np.sum(~known[: int(np.flatnonzero(known)[-1]) + 1]))
    return asked + holes
