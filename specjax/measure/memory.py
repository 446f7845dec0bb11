"""The memory of decoding: the bytes that weights and caches of the target and the drafter take on the device."""

from typing import Any

import jax

from specjax.decode.decoder import Decoder
from specjax.decode.types import DecodeState
from specjax.engine import programs
from specjax.engine.engine import Engine
from specjax.generation.job import Job


def report(of: Job | Engine) -> dict[str, int]:
    """The bytes of each part of a job, or of an engine. Nothing is allocated or compiled.

    A step needs further memory while it runs, mostly for logits. On a mesh each array counts once, even if every device
    holds a copy.

    Args:
      of: a job from :func:`specjax.prepare`, or an engine.

    Returns:
      The bytes of "target_weights", "target_cache", "draft_weights" (weights that the drafter does not share with the
      target), "draft_state", "record" (tokens and counters), and their sum as "total". The caches of an engine are its
      pools of pages.
    """
    decoder = of.decoder
    state = (
        jax.eval_shape(of.start)
        if isinstance(of, Job)
        else jax.eval_shape(lambda: programs.empty(decoder, of.limits))
    )
    parts = _parts(decoder, state)
    sizes = {name: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(part)) for name, part in parts.items()}
    return {**sizes, "total": sum(sizes.values())}


def _parts(decoder: Decoder, state: DecodeState) -> dict[str, Any]:
    """The arrays of each part."""
    target_leaves = {id(leaf) for leaf in jax.tree.leaves(decoder.target)}
    return {
        "target_weights": decoder.target,
        "target_cache": state.cache,
        "draft_weights": [leaf for leaf in jax.tree.leaves(decoder.drafter) if id(leaf) not in target_leaves],
        "draft_state": state.drafter,
        "record": state._replace(cache=None, drafter=None),  # type: ignore[arg-type]
    }
