"""What decoding keeps on the device, in bytes: weights and caches of the target and of whatever drafts for it."""

import jax

from specjax.generation.job import Job


def report(job: Job) -> dict[str, int]:
    """Bytes of each part of a job. Nothing is allocated or compiled.

    What a step holds for its own duration, logits above all, comes on top. On a mesh an array counts once, however
    it is cut or copied.

    Args:
      job: from :func:`specjax.prepare`.

    Returns:
      "target_weights", "target_cache", "draft_weights" (those that are not the target's own), "draft_state", "record"
      (tokens and counters), and their sum as "total".
    """
    state, lm = jax.eval_shape(job.start), job.decoder.target
    own = {id(leaf) for leaf in jax.tree.leaves(lm)}
    parts = {
        "target_weights": lm,
        "target_cache": state.cache,
        "draft_weights": [leaf for leaf in jax.tree.leaves(job.decoder.drafter) if id(leaf) not in own],
        "draft_state": state.drafter,
        "record": state._replace(cache=None, drafter=None),
    }
    sizes = {name: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(part)) for name, part in parts.items()}
    return {**sizes, "total": sum(sizes.values())}
