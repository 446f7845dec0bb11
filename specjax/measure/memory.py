"""The memory of decoding: the bytes that weights and caches of the target and the drafter take on the device."""

import jax

from specjax.generation.job import Job


def report(job: Job) -> dict[str, int]:
    """The bytes of each part of a job. Nothing is allocated or compiled.

    A step needs further memory while it runs, mostly for logits. On a mesh each array counts once, even if every device
    holds a copy.

    Args:
      job: from :func:`specjax.prepare`.

    Returns:
      The bytes of "target_weights", "target_cache", "draft_weights" (weights that the drafter does not share with the
      target), "draft_state", "record" (tokens and counters), and their sum as "total".
    """
    state, lm = jax.eval_shape(job.start), job.decoder.target
    target_leaves = {id(leaf) for leaf in jax.tree.leaves(lm)}
    parts = {
        "target_weights": lm,
        "target_cache": state.cache,
        "draft_weights": [leaf for leaf in jax.tree.leaves(job.decoder.drafter) if id(leaf) not in target_leaves],
        "draft_state": state.drafter,
        "record": state._replace(cache=None, drafter=None),
    }
    sizes = {name: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(part)) for name, part in parts.items()}
    return {**sizes, "total": sum(sizes.values())}
