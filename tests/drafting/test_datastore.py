"""Suffix arrays and what retrieval reads from them, against a search by hand."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from proposals import propose

from specjax.drafters import Retrieval
from specjax.drafting.datastore import SEPARATOR, Datastore
from specjax.testing import tiny_lm

RNG = np.random.default_rng(0)
TEXTS = [RNG.integers(0, 3, n).tolist() for n in (50, 1, 80, 7)]


def test_suffixes_are_sorted_by_their_first_tokens():
    store = Datastore.build(TEXTS)
    assert sorted(store.order) == list(range(len(store.tokens)))
    suffixes = [tuple(store.tokens[i : i + Datastore.DEPTH]) for i in store.order]
    assert suffixes == sorted(suffixes)


def occurrences(query):
    """Text and place of each."""
    n = len(query)
    return [(t, i) for t in TEXTS for i in range(len(t) - n + 1) if t[i : i + n] == query]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranges_hold_every_occurrence_and_nothing_else(size):
    store = Datastore.build(TEXTS)
    drafter = Retrieval.over(store, retrieval_max=4)
    find = jax.jit(lambda drafter, query: drafter._range(query, jnp.int32(size)))
    for code in range(3**size):
        query = [code // 3**i % 3 for i in range(size)]
        low, high = find(drafter, jnp.array(query + [0] * (4 - size), jnp.int32))
        got = sorted(tuple(store.tokens[store.order[r] :][:size]) for r in range(low, high))
        assert got == [tuple(query)] * len(occurrences(query))


def test_the_longest_match_wins_and_its_continuations_vote():
    corpus = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 7, 8], [9, 2, 3, 8, 8]]
    drafter = Retrieval.over(Datastore.build(corpus), retrieval_max=4)
    assert propose(drafter, [[1, 2, 3]], 1) == [[4]]  # two against one
    assert propose(drafter, [[9, 2, 3]], 3) == [[8, 8]]  # the longer match, up to the text's end
    assert propose(drafter, [[0, 2, 3]], 1) == [[4]]
    assert propose(drafter, [[5, 5], [3], [8, 8]], 3) == [[], [], []]  # unknown, too short, nothing follows
    padded = Retrieval.over(Datastore.build([[4, 0, 0, 6]]))
    assert propose(padded, [[4], [7, 0]], 1) == [[], []]  # what stands after a row's tokens is not searched


def test_votes_are_those_of_the_texts_that_agreed_so_far():
    corpus = [[1, 2, 5, 6], [1, 2, 5, 7], [1, 2, 5, 7], [1, 2, 8, 6], [1, 2, 8, 6]]
    drafter = Retrieval.over(Datastore.build(corpus))
    assert propose(drafter, [[1, 2]], 2) == [[5, 7]]
    few = Retrieval.over(Datastore.build([[1, 2, 5], [1, 2, 6], [1, 2, 6]]), candidates=4)
    assert propose(few, [[1, 2]], 1) == [[6]]  # no place votes twice
    most = Counter(t[i + 2] for t, i in occurrences([0, 1]) if i + 2 < len(t)).most_common(1)[0][1]
    drafter = Retrieval.over(Datastore.build(TEXTS), retrieval_max=2, candidates=256)
    ((got,),) = propose(drafter, [[0, 1]], 1)
    assert sum(t[i + 2 : i + 3] == [got] for t, i in occurrences([0, 1])) == most


def test_a_datastore_comes_back_from_its_folder_and_grows(tmp_path):
    store = Datastore.build(TEXTS)
    store.save(tmp_path)
    again = Datastore.load(tmp_path)
    assert np.array_equal(again.tokens, store.tokens) and np.array_equal(again.order, store.order)
    grown = again.extended([[2, 2, 2, 2, 2, 2, 1]])
    assert grown.tokens.shape == store.tokens.shape, "a little more fits the same programs"
    drafter = Retrieval.over(grown)
    assert propose(drafter, [[2, 2, 2, 2, 2, 2]], 1) == [[1]]


def test_what_is_not_a_corpus_is_refused(tmp_path):
    with pytest.raises(ValueError, match="empty"):
        Datastore.build([[], []])
    with pytest.raises(ValueError, match=">= 0"):
        Datastore.build([[1, SEPARATOR]])
    with pytest.raises(ValueError, match="no datastore"):
        Datastore.load(tmp_path)
    with pytest.raises(ValueError, match="retrieval_min"):
        Retrieval.over(Datastore.build(TEXTS), retrieval_max=1, retrieval_min=2)
    with pytest.raises(ValueError, match="another tokenizer"):
        Retrieval.over(Datastore.build([[1, 99]])).plan(tiny_lm(0, vocab_size=50), 3)
