"""Speculative rejection sampling, the chain rule of Leviathan et al. 2023 (algorithm 1) and Chen et al. 2023.

On a tree it is applied again and again, child by child (``tree_rejection``). A point mass x is accepted with
probability p(x), and refused for the rest of p: that is to draw from p and see whether it is x, so it is done so.
"""

import dataclasses

import jax

from specjax.decode import random
from specjax.decode.arrays import leading_run, row_at, span, token_probs
from specjax.decode.types import Draft, Verdict
from specjax.verify import pieces as chain
from specjax.verify.coupled import own_draws
from specjax.verify.tree_rejection import recursive_rejection


@dataclasses.dataclass(frozen=True)
class Rejection:
    """Accept x ~ q with probability min(1, p(x)/q(x)); at the first refusal draw from norm(max(0, p - q))."""

    lossless = True
    trees = True

    def draft_keys(self, keys: jax.Array, lengths: jax.Array) -> jax.Array:
        # Redrawing a refused position with the same key is sound here: nothing past a refusal is ever looked at.
        del lengths
        return random.fold(keys, random.DRAFT)

    def verify(self, p: jax.Array, draft: Draft, keys: jax.Array, lengths: jax.Array) -> Verdict:
        if draft.probs is None:
            return own_draws(p, draft, random.fold(keys, random.TOKEN), lengths)
        if draft.shape.is_tree:
            return recursive_rejection(p, draft, keys, lengths)
        size = draft.tokens.shape[1]
        p_x = token_probs(p[:, :size], draft.tokens)  # [B, K]
        q_x = chain.draft_token_probs(draft)  # [B, K]
        positions = lengths[:, None] + span(size)
        u = random.uniform(random.at(random.fold(keys, random.ACCEPT), positions))
        count = leading_run(draft.valid & chain.accepts(u, p_x, q_x))
        rest = chain.residual(row_at(p, count), chain.draft_at(draft, count, p.shape[-1]))
        return Verdict(count, chain.draw(keys, lengths + count, rest))
