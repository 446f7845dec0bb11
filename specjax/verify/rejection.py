"""Speculative rejection sampling of Leviathan et al. 2023 (algorithm 1) and Chen et al. 2023.

On a tree the rule is applied to one child after the other (``tree_rejection``). A point mass x is accepted with
probability p(x); after a refusal the rule draws from the rest of p. The result is the same as that of one draw from p,
of which x is accepted if the draw equals x. Drafts of point masses are judged by such draws (``coupled.own_draws``).
"""

import dataclasses

import jax

from specjax.decode import random
from specjax.decode.types import Draft, Verdict
from specjax.verify import pieces as chain
from specjax.verify.coupled import own_draws
from specjax.verify.tree_rejection import recursive_rejection


@dataclasses.dataclass(frozen=True)
class Rejection:
    """Accepts x ~ q with probability min(1, p(x)/q(x)). At the first refusal draws from norm(max(0, p - q))."""

    lossless = True
    trees = True

    def draft_keys(self, keys: jax.Array, lengths: jax.Array) -> jax.Array:
        # A refused position may be drawn again with the same key: no verdict depends on tokens past a refusal.
        del lengths
        return random.fold(keys, random.DRAFT)

    def verify(self, p: jax.Array, draft: Draft, keys: jax.Array, lengths: jax.Array) -> Verdict:
        if draft.probs is None:
            return own_draws(p, draft, random.fold(keys, random.TOKEN), lengths)
        if draft.shape.is_tree:
            return recursive_rejection(p, draft, keys, lengths)
        return chain.reject(p, draft, keys, lengths)
