"""What decoding keeps on the device, in bytes: weights and caches of the target and of whatever drafts for it."""

from typing import Any

import jax

from specjax.generation import prepare
from specjax.models.lm import LM
from specjax.requests import Options


def report(lm: LM, prompts: Any, **options) -> dict[str, int]:
    """Bytes of each part for a call of :func:`specjax.generate` with these arguments. Nothing is allocated or compiled.

    What a step holds for its own duration, logits above all, comes on top. On a mesh an array counts once, however
    it is cut or copied.

    Args:
      lm: the target.
      prompts: as of ``generate``.
      **options: fields of :class:`specjax.requests.Options`; the drafter brings its own weights and caches.

    Returns:
      "target_weights", "target_cache", "draft_weights" (those that are not the target's own), "draft_state", "record"
      (tokens and counters), and their sum as "total".
    """
    job = prepare(lm, prompts, Options(**options))
    state = jax.eval_shape(job.start, job.request)
    own = {id(leaf) for leaf in jax.tree.leaves(lm)}
    parts = {
        "target_weights": lm,
        "target_cache": state.cache,
        "draft_weights": [leaf for leaf in jax.tree.leaves(job.drafter) if id(leaf) not in own],
        "draft_state": state.drafter,
        "record": state._replace(cache=None, drafter=None),
    }
    sizes = {name: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(part)) for name, part in parts.items()}
    return {**sizes, "total": sum(sizes.values())}
