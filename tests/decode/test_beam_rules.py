"""One step of beam search on numbers that can be worked out by hand."""

import jax
import numpy as np
import pytest

from specjax.decode import beams as b
from specjax.decode.beam_round import certain
from specjax.decode.sampling import SamplingParams
from specjax.decode.types import Request

LN = np.log
STOP = 3  # of tokens 0 to 3
DEAD = -np.inf
ADVANCE = jax.jit(b.advance)


def advance(probs, scores, length, limit=9, finished=(DEAD, DEAD), penalty=1.0, early=False, never=False):
    """A step of two beams of one prompt of one token, from probabilities [2, 4]. -> the three results, as NumPy."""
    request = Request(
        None, SamplingParams(np.zeros(1, np.float32)), np.array([[STOP]], np.int32), np.array([limit], np.int32),
        np.ones(1, np.int32),
    )  # fmt: skip
    tokens = np.zeros((1, 2, 12), np.int32)
    tokens[0, :, 1] = 1, 2
    beams = b.Beams(tokens, np.array([scores], np.float32), np.eye(2, 12, dtype=bool)[None])
    done = b.Finished(tokens, np.full((1, 2), 2, np.int32), np.array([finished], np.float32))
    rules = b.Rules(np.array([penalty], np.float32), np.array([early]), np.array([never]))
    with np.errstate(divide="ignore"):
        logits = np.log(np.array([probs], np.float32))
    begins, lengths = np.zeros(1, np.int32), np.array([length], np.int32)
    return jax.tree.map(lambda x: np.asarray(x)[0], ADVANCE(beams, done, lengths, logits, request, begins, rules))


PROBS = [[0.1, 0.2, 0.3, 0.4], [0.05, 0.6, 0.3, 0.05]]


def test_candidates_of_all_beams_compete_and_a_stop_token_ends_a_text_that_is_among_the_best():
    chosen, done, goes_on = advance(PROBS, [LN(0.5), LN(0.4)], length=2)
    # Beam 1 with token 1: 0.24. Beam 0 with the stop token: 0.2. Beam 0 with token 2: 0.15.
    assert chosen.parents.tolist() == [1, 0] and chosen.tokens.tolist() == [1, 2]
    np.testing.assert_allclose(chosen.scores, LN([0.24, 0.15]), rtol=1e-5)
    np.testing.assert_allclose(done.scores, [LN(0.2) / 2, DEAD], rtol=1e-5)  # over two new tokens
    assert done.tokens[0, :3].tolist() == [0, 1, STOP] and done.lengths[0] == 3
    assert goes_on


def test_a_stop_token_that_is_not_among_the_best_ends_nothing():
    chosen, done, _ = advance(PROBS, [LN(0.1), LN(0.9)], length=2)
    assert chosen.tokens.tolist() == [1, 2] and chosen.parents.tolist() == [1, 1]
    assert (done.scores == DEAD).all()


def test_at_the_limit_every_one_of_the_best_ends():
    _, done, goes_on = advance(PROBS, [LN(0.5), LN(0.4)], length=2, limit=3)
    np.testing.assert_allclose(done.scores, LN([0.24, 0.2]) / 2, rtol=1e-5)
    assert not goes_on


def test_a_child_sees_what_its_parent_saw():
    chosen, _, _ = advance(PROBS, [LN(0.5), LN(0.4)], length=2)
    beams = b.Beams(np.zeros((1, 2, 12), np.int32), np.zeros((1, 2), np.float32), np.eye(2, 12, dtype=bool)[None])
    children = jax.jit(b.grown)(beams, np.array([5]), jax.tree.map(lambda x: x[None], chosen))
    assert children.sees[0].argmax(axis=1).tolist() == [1, 0] and children.tokens[0, :, 5].tolist() == [1, 2]


# The best beam has the log-probability ln 0.24 = -1.43 after 2 of 8 new tokens: -0.71 a token now, -0.18 at the limit.
ENDS = {
    "the worst text is better": dict(finished=(-0.1, -0.5), goes_on=False),
    "the worst text is worse": dict(finished=(-0.1, -0.9), goes_on=True),
    "the best beam could still win at the limit": dict(finished=(-0.1, -0.5), never=True, goes_on=True),
    "it could not even there": dict(finished=(-0.1, -0.15), never=True, goes_on=False),
    "no bonus for length, so the limit does not count": dict(
        finished=(-0.1, -0.5), never=True, penalty=0.0, goes_on=False),
    "two texts are enough": dict(finished=(-0.1, -0.9), early=True, goes_on=False),
    "one text is not": dict(finished=(-0.1, DEAD), early=True, probs=[[0.5, 0.3, 0.2, 0.0]] * 2, goes_on=True),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_when_the_search_ends(name):
    case = dict(ENDS[name])
    expected, probs = case.pop("goes_on"), case.pop("probs", PROBS)
    assert advance(probs, [LN(0.5), LN(0.4)], length=2, **case)[2] == expected


def test_a_beam_that_is_not_there_has_no_children():
    chosen, done, goes_on = advance([[0.0, 1.0, 0.0, 0.0], PROBS[1]], [0.0, DEAD], length=2)
    assert chosen.scores.tolist() == [0.0, DEAD] and chosen.tokens[0] == 1
    assert (done.scores == DEAD).all() and goes_on
    nothing = advance([[np.nan] * 4] * 2, [0.0, DEAD], length=2)
    assert (nothing[0].scores == DEAD).all() and not nothing[2]


LOST = {
    "none is lost": ([-0.5, -1.5], [False, False], {}, True),
    "every child is better than the lost beam": ([-0.5, -2.5], [False, True], {}, True),
    "a child of the lost beam could be better": ([-0.5, -1.5], [False, True], {}, False),
    "it could be as good": ([-0.5, -2.0], [False, True], {}, False),
    "the lost beam is not there": ([-0.5, DEAD], [False, True], {}, True),
    "a penalty may raise a score": ([-0.5, -2.5], [False, True], {"presence_penalty": np.zeros(1)}, False),
    "a penalty, and none is lost": ([-0.5, -1.5], [False, False], {"presence_penalty": np.zeros(1)}, True),
}


@pytest.mark.parametrize("name", LOST)
def test_a_beam_that_was_not_drafted_matters_unless_all_that_is_chosen_is_better(name):
    scores, lost, penalties, expected = LOST[name]
    chosen = b.Children(np.zeros((1, 2), int), np.zeros((1, 2), int), np.array([[-1.0, -2.0]]))
    params = SamplingParams(np.zeros(1), **penalties)
    assert certain(chosen, np.array([scores]), np.array([lost]), params).tolist() == [expected]
