"""Coupled verification: the target's own draws decide, so the output is token for token that of plain decoding.

The target draws argmax(log p + G) with Gumbel noise G addressed by absolute position; a drafted token stands when it
equals that draw. A drafter that draws with the same noise agrees with probability at least (1 - TV)/(1 + TV) (Daliri
et al. 2024, "Coupling without communication and drafter-invariant speculative decoding").
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.decode import random
from specjax.decode.arrays import leading_run, row_at
from specjax.decode.draft_shape import parents_of
from specjax.decode.types import Draft, Verdict


@dataclasses.dataclass(frozen=True)
class Coupled:
    """Accept while the drafted token is the one that plain decoding would draw at its position.

    Of a tree, the longest path of such tokens.
    """

    lossless = True
    trees = True

    def draft_keys(self, keys: jax.Array, lengths: jax.Array) -> jax.Array:
        del lengths
        return random.fold(keys, random.TOKEN)  # the target's own noise

    def verify(self, p: jax.Array, draft: Draft, keys: jax.Array, lengths: jax.Array) -> Verdict:
        return own_draws(p, draft, self.draft_keys(keys, lengths), lengths)


def own_draws(p: jax.Array, draft: Draft, keys: jax.Array, lengths: jax.Array) -> Verdict:
    """Draws the target's own token at every node, and goes along the draft as far as it holds them.

    Args: as of ``Verifier.verify``, but keys are those to draw with.
    """
    shape, (rows, size) = draft.shape, draft.tokens.shape
    depth = jnp.broadcast_to(shape.depths(size), (rows, size + 1))
    drawn = random.categorical(random.at(keys, lengths[:, None] + depth), p)  # [B, N+1]
    if not shape.is_tree:
        count = leading_run(draft.valid & (drawn[:, :-1] == draft.tokens))
        return Verdict(count, row_at(drawn, count))
    agrees = draft.valid & (jnp.take_along_axis(drawn, parents_of(shape, rows, size), axis=1) == draft.tokens)
    agrees &= ~shape.below(jnp.pad(~agrees, ((0, 0), (1, 0))))
    node = jnp.argmax(jnp.where(jnp.pad(agrees, ((0, 0), (1, 0))), depth, 0), axis=1).astype(jnp.int32)
    return Verdict(row_at(depth, node), row_at(drawn, node), node)
