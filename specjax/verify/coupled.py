"""Coupled verification: the target's own draws decide, so the output is token for token that of plain decoding.

The target draws argmax(log p + G), with Gumbel noise G that is addressed by absolute position. A drafted token is
accepted if it equals the target's draw. A drafter that draws with the same noise G drafts the target's token with
probability at least (1 - TV) / (1 + TV), where TV is the total variation distance of p and q (Daliri et al. 2024,
"Coupling without communication and drafter-invariant speculative decoding").
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
    """Accepts drafted tokens for as long as they are the tokens that plain decoding would draw at their positions.

    In a tree the longest path of such tokens is accepted.
    """

    lossless = True
    trees = True

    def draft_keys(self, keys: jax.Array, lengths: jax.Array) -> jax.Array:
        del lengths
        return random.fold(keys, random.TOKEN)  # the target's own noise

    def verify(self, p: jax.Array, draft: Draft, keys: jax.Array, lengths: jax.Array) -> Verdict:
        return own_draws(p, draft, self.draft_keys(keys, lengths), lengths)


def own_draws(p: jax.Array, draft: Draft, keys: jax.Array, lengths: jax.Array) -> Verdict:
    """Draws the target's own token after every node, and accepts the draft as far as it holds these tokens.

    Args:
      p: f32[B, N+1, V], the target's probabilities.
      draft: the draft.
      keys: key[B] to draw with. These are not the rows' own keys, which ``Verifier.verify`` takes.
      lengths: i32[B].
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
