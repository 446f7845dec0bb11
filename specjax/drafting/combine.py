"""Gives the drafts of several drafters the same fields and sizes, so that one block can hold parts of each."""

from collections.abc import Sequence

import jax.numpy as jnp

from specjax.decode.draft_shape import grown, parents_of
from specjax.decode.types import Draft
from specjax.verify import pieces as chain


def alike(drafts: Sequence[Draft], vocab: int) -> tuple[Draft, ...]:
    """The same drafts, each with the same fields and sizes, so that a batch can take each row from any of them.

    If one draft is sampled, the probabilities of point masses are written out as one-hot. If one draft is a tree,
    chains become trees.

    Args:
      drafts: drafts for the same rows.
      vocab: V.
    """
    result = same_probs(drafts, vocab)
    if any(d.confidence is not None for d in drafts):
        told = (d._replace(confidence=chain.told_confidence(d), entropy=chain.told_entropy(d)) for d in result)
        result = tuple(told)
    if not any(d.shape.is_tree for d in drafts):
        return result
    size = max(d.tokens.shape[1] for d in drafts)
    return tuple(as_tree(d, size) for d in result)


def same_probs(drafts: Sequence[Draft], vocab: int) -> tuple[Draft, ...]:
    """The same drafts. Point masses get one-hot probabilities, unless all drafts are point masses. V is ``vocab``."""
    if all(d.probs is None for d in drafts):
        return tuple(drafts)
    return tuple(d._replace(probs=chain.draft_probs(d, vocab)) for d in drafts)


def as_tree(draft: Draft, size: int) -> Draft:
    """The same draft as a grown tree of ``size`` nodes. The nodes that are added are not valid."""
    rows, drafted = draft.tokens.shape
    parents = jnp.pad(parents_of(draft.shape, rows, drafted), ((0, 0), (0, size - drafted)))
    return widened(draft, size)._replace(shape=grown(parents))


def widened(draft: Draft, size: int) -> Draft:
    """The same draft with room for ``size`` tokens a row. The tokens that are added are not valid."""
    missing = size - draft.tokens.shape[1]

    def wide(x):  # [B, N, ...] -> [B, size, ...]
        return None if x is None else jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)))

    per_token = {name: wide(getattr(draft, name)) for name in ("tokens", "valid", "probs", "confidence", "entropy")}
    return draft._replace(**per_token)

