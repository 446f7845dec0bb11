"""Faults of beam search and of its drafts."""

import jax.numpy as jnp
from planting import CHILD, DRAFT_BEAMS, TEXTS_OF_BEAMS, fault, wrap

from specjax.decode import beam_round, beams
from specjax.drafters import DraftModel, draft_model
from specjax.models import cache as kv


@fault(TEXTS_OF_BEAMS)
def entries_of_accepted_beams_are_not_moved():
    beam_round.kv.move = lambda cache, slots, starts: cache


@fault(DRAFT_BEAMS)
def entries_of_the_drafts_beams_are_not_moved():
    def commit(self, own, slots, starts, lengths):
        return own._replace(cache=kv.with_lengths(own.cache, lengths))

    DraftModel.commit_beams = commit


@fault(CHILD, TEXTS_OF_BEAMS)
def a_child_sees_what_the_beam_in_its_place_saw():
    def make(grown):
        def faulty(old, lengths, found):
            new = grown(old, lengths, found)
            return new._replace(sees=jnp.resize(old.sees, new.sees.shape))

        return faulty

    for module in (beams, beam_round):
        wrap(module, "grown", make)


@fault(DRAFT_BEAMS)
def the_draft_forgets_the_scores_of_the_beams():
    def make(draw):
        def faulty(lm, cache, state, *rest):
            even = jnp.where(jnp.isfinite(state.beams.scores), 0.0, -jnp.inf)
            return draw(lm, cache, state._replace(beams=state.beams._replace(scores=even)), *rest)

        return faulty

    wrap(draft_model, "draw_beams", make)


@fault(TEXTS_OF_BEAMS)
def a_beam_that_was_not_drafted_never_matters():
    beam_round.certain = lambda chosen, scores, lost, sampling: jnp.isfinite(chosen.scores[:, -1])
