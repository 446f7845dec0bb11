"""Drafting for beams: a model's own beam search, some steps ahead of the target's."""

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode.beam_round import BeamState, Levels
from specjax.decode.beams import Beams, best, children, feed, grown
from specjax.decode.round import is_stop
from specjax.drafting.draw_chain import fit
from specjax.models.cache import KVCache
from specjax.models.model import Model


def draw_beams(
    lm: Model, cache: KVCache, state: BeamState, num_speculative_tokens: int, width: int, vocab: int
) -> tuple[Levels, KVCache]:
    """Searches K steps ahead from the target's beams and their scores, u beams wide (Leviathan et al. 2023, A.4).

    The draft model reads every token that it proposes, the last level too. So its cache has an entry in every slot that
    the target's cache gets in this round.

    Args:
      lm: the draft model.
      cache: its cache, with the same slots as the target's.
      state: the round's state.
      num_speculative_tokens: K.
      width: u, at least the number of the target's beams.
      vocab: V, the target's vocabulary size.

    Returns:
      The drafted levels, and the cache with W + K * u more entries.
    """
    request, lengths = state.request, state.lengths
    logits, cache, beams = feed(lm, cache, state.beams, lengths)
    more = ((0, 0), (0, width - beams.scores.shape[1]))  # beams that are not there, so that all steps are u wide
    beams = Beams(
        jnp.pad(beams.tokens, (*more, (0, 0))),
        jnp.pad(beams.scores, more, constant_values=-jnp.inf),
        jnp.pad(beams.sees, (*more, (0, 0))),
    )
    logits = jnp.pad(fit(logits, vocab), (*more, (0, 0)))

    def step(carry: tuple[Beams, jax.Array, KVCache], depth: jax.Array):
        beams, logits, cache = carry
        found = children(beams, lengths + depth, logits, request, state.cache.first, width)
        chosen = best(found, ~is_stop(found.tokens, request.stop_ids), width)
        beams = grown(beams, lengths + depth, chosen)
        logits, cache, beams = feed(lm, cache, beams, lengths + depth + 1)
        return (beams, fit(logits, vocab), cache), (chosen.tokens, chosen.parents)

    depths = jnp.arange(num_speculative_tokens, dtype=jnp.int32)
    (_, _, cache), (tokens, parents) = lax.scan(step, (beams, logits, cache), depths)  # [K, B, u]
    return Levels(tokens.swapaxes(0, 1), parents.swapaxes(0, 1)), cache
