"""Sampling transforms against slow NumPy versions that sort and loop, ties and extremes included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode import random, sampling
from specjax.decode.arrays import largest
from specjax.decode.sampling import Context, SamplingParams
from specjax.generation import requests
from specjax.generation.options import Options

VOCAB = 11
TOKENS = np.array([[1, 2, 3, 1, 2, 0, 0, 0], [5, 5, 5, 0, 0, 0, 0, 0], [7, 0, 0, 0, 0, 0, 0, 0]], np.int32)
LENGTHS, PROMPTS = np.array([5, 3, 1], np.int32), np.array([2, 3, 1], np.int32)
DRAFTED = np.array([[3, 1], [5, 6], [7, 7]], np.int32)
STOPS = [2, 7]
CONTEXT = Context(jnp.asarray(TOKENS), jnp.asarray(LENGTHS), jnp.asarray(PROMPTS), sampling.chain_path(DRAFTED))


@pytest.mark.parametrize("shape", [(1, 7), (2, 3, 300)])
def test_one_search_gives_the_largest_number_and_its_place(shape):
    x = np.round(np.random.default_rng(1).normal(size=shape)).astype(np.float32)  # with ties
    x[-1, ..., -2:] = np.nan
    x[0, ..., :] = np.where(x[0] > 0, -np.inf, x[0]) if len(shape) == 3 else -np.inf
    top, place = largest(jnp.asarray(x))
    np.testing.assert_array_equal(top, np.max(x, axis=-1))
    np.testing.assert_array_equal(place, jnp.argmax(x, axis=-1))


def logits(seed=0, ties=False):
    drawn = np.random.default_rng(seed).normal(size=(3, 3, VOCAB)) * 2
    return (np.round(drawn) if ties else drawn).astype(np.float32)


def sequence(row, node):
    return [*TOKENS[row, : LENGTHS[row]], *DRAFTED[row, :node]]


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def reference(x, row, node, temperature=1.0, top_k=None, top_p=None, min_p=None, repetition_penalty=1.0,
              presence_penalty=0.0, frequency_penalty=0.0, no_repeat_ngram_size=0, min_new_tokens=0):  # fmt: skip
    """One position's probabilities, by the book."""
    x = x.astype(np.float64).copy()
    before, output = sequence(row, node), sequence(row, node)[PROMPTS[row] :]
    for token in range(VOCAB):
        if token in before:
            x[token] = x[token] / repetition_penalty if x[token] > 0 else x[token] * repetition_penalty
        x[token] -= presence_penalty * (token in output) + frequency_penalty * output.count(token)
        n = no_repeat_ngram_size
        if n and any((*before, token)[-n:] == tuple(before[i : i + n]) for i in range(len(before) - n + 1)):
            x[token] = -np.inf
        if token in STOPS and len(output) < min_new_tokens:
            x[token] = -np.inf
    if temperature == 0:
        return np.eye(VOCAB)[np.argmax(x)]
    x = x / temperature
    if top_k is not None:
        x[x < np.sort(x)[-top_k]] = -np.inf
    if top_p is not None and top_p < 1:
        probs = softmax(x)
        order = np.sort(probs)[::-1]
        last = order[np.searchsorted(np.cumsum(order), top_p - 1e-7)]
        x[probs < last - 1e-9] = -np.inf
    if min_p is not None:
        x[softmax(x) < min_p * softmax(x).max() * (1 - 1e-6)] = -np.inf
    return softmax(x)


CASES = [
    {},
    {"temperature": 0.5},
    {"temperature": 0.0},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": VOCAB},
    {"top_p": 0.6},
    {"top_p": 1.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.1},
    {"frequency_penalty": -0.9},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
    {"min_new_tokens": 0},
    {"min_new_tokens": 1},
    {"min_new_tokens": 4},
    {"min_new_tokens": 10**12},
    {"min_new_tokens": 2, "temperature": 0.0},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.7, "min_p": 0.05, "repetition_penalty": 1.2, "presence_penalty": 0.3},
]


def probabilities(x, context=CONTEXT, **options):
    stops = np.tile(np.array([*STOPS, sampling.NO_TOKEN], np.int32), (x.shape[0], 1))
    given = Options(**{"temperature": 1.0, **options})
    params = requests.sampling_params(given, x.shape[0], x.shape[-1], stop_ids=stops)
    return np.asarray(sampling.distribution(jnp.asarray(x), params, context))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_each_transform_is_the_textbook_one(options, ties):
    x = logits(ties=ties)
    got = probabilities(x, **options)
    for row in range(3):
        for node in range(3):
            np.testing.assert_allclose(got[row, node], reference(x[row, node], row, node, **options), atol=2e-6)


@pytest.mark.parametrize(
    "options", [{"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 2}, {"repetition_penalty": 1.7}], ids=str
)
def test_an_encoders_source_counts_for_no_repetition(options):
    """An n-gram that begins in the source and ends in the text does not count either."""
    source = np.array([[4, 3], [6, 5], [1, 7]], np.int32)  # each ends with a token of the text
    begin = jnp.full(3, source.shape[1], jnp.int32)
    tokens, ends = jnp.asarray(np.concatenate([source, TOKENS], axis=1)), (CONTEXT.lengths, CONTEXT.prompt_lengths)
    context = Context(tokens, *(end + begin for end in ends), CONTEXT.path, begins=begin)
    x = logits()
    np.testing.assert_array_equal(probabilities(x, context, **options), probabilities(x, **options))


def test_rows_keep_their_own_parameters():
    x, listed = (
        logits(),
        {
            "temperature": [0.0, 1.0, 0.5],
            "top_k": [None, 2, 5],
            "repetition_penalty": [1.3, None, 2.0],
            "min_new_tokens": [4, None, 1],
        },
    )
    got = probabilities(x, **listed)
    for row in range(3):
        own = {name: values[row] for name, values in listed.items() if values[row] is not None}
        np.testing.assert_allclose(got[row, 1], reference(x[row, 1], row, 1, **own), atol=2e-6)


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-6])
def test_tiny_temperatures_are_argmax(temperature):
    x = logits(ties=True)  # at a merely small temperature tied tokens would share the mass
    assert np.array_equal(probabilities(x, temperature=temperature), np.eye(VOCAB)[x.argmax(-1)])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("temperature", [1e-4, 1e6])
def test_extreme_temperatures_stay_finite(temperature, dtype):
    x = jnp.asarray(logits() * 100, dtype)
    params = requests.sampling_params(Options(temperature=temperature), 3, VOCAB)
    got = np.asarray(sampling.distribution(x, params, CONTEXT))
    assert np.isfinite(got).all() and np.allclose(got.sum(-1), 1, atol=1e-5)
    if temperature == 1e-4:
        best = np.asarray(x, np.float32)
        assert (np.take_along_axis(got, best.argmax(-1)[..., None], -1) > 0.3).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("top_p", [1e-8, 1e-4, 1e-3])
def test_tiny_top_p_keeps_the_most_likely(top_p, dtype):
    x = jnp.asarray(logits(), dtype)
    got = np.asarray(
        sampling.distribution(x, requests.sampling_params(Options(temperature=1.0, top_p=top_p), 3, VOCAB), CONTEXT)
    )
    best = np.asarray(x, np.float32)
    assert np.array_equal(got > 0, best == best.max(-1, keepdims=True))


def test_filters_apply_in_hugging_faces_order():
    p = np.array([0.4, 0.3, 0.2, 0.05, 0.05], np.float32)
    x, context = np.log(p)[None, None], Context(*(jnp.zeros(s, jnp.int32) for s in ((1, 4), (1,), (1,), (1, 1, 0))))
    assert np.array_equal(probabilities(x, context, top_k=1, top_p=0.8)[0, 0], np.eye(5)[0])
    # After top-k = 3 the masses are 4/9, 3/9, 2/9, so top-p = 0.5 needs two; on the raw ones it would as well, but
    # with top-p = 0.42 it is one token after top-k and two before it.
    assert (probabilities(x, context, top_k=3, top_p=0.42)[0, 0] > 0).sum() == 1
    assert (probabilities(x, context, top_p=0.42)[0, 0] > 0).sum() == 2
    assert (probabilities(x, context, top_k=3, top_p=0.5, min_p=0.3)[0, 0] > 0).sum() == 2


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB, VOCAB + 1, 10**6])
def test_top_k_of_nothing_or_all_is_off(top_k):
    np.testing.assert_allclose(probabilities(logits(), top_k=top_k), probabilities(logits()), atol=1e-7)


def test_penalties_count_drafted_tokens_and_their_own_window():
    x = np.zeros((3, 3, VOCAB), np.float32) + 1.0
    repetition = probabilities(x, repetition_penalty=2.0)
    presence = probabilities(x, presence_penalty=2.0)
    # Row 0: token 1 in the prompt and output, 3 committed and drafted; row 1's output is drafted alone.
    assert repetition[1, 0, 5] < repetition[1, 0, 4], "the repetition penalty reads the prompt"
    assert presence[1, 0, 5] == presence[1, 0, 4], "the presence penalty does not"
    assert presence[1, 1, 5] < presence[1, 1, 4], "a drafted token counts from the next position on"
    assert presence[1, 1, 6] == presence[1, 1, 4] and presence[1, 2, 6] < presence[1, 2, 4]


def test_logit_bias_and_allowed_ids():
    x = logits()
    got = probabilities(x, logit_bias=[{3: 100.0}, None, {}], allowed_token_ids=[None, [2, 4], range(VOCAB)])
    assert (got[0, :, 3] > 0.99).all()
    assert set(np.flatnonzero(got[1].sum(0))) == {2, 4}
    np.testing.assert_allclose(got[2], probabilities(x)[2], atol=1e-7)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_nothing_left_is_nan_throughout_and_only_there(bad):
    x = logits()
    x[1, 2] = bad
    for options in ({}, {"temperature": 0.0}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}):
        got = probabilities(x, **options)
        assert np.isnan(got[1, 2]).all()
        assert np.isfinite(np.delete(got.reshape(9, -1), 5, axis=0)).all()


def test_a_greedy_row_takes_the_lowest_of_tied_tokens_beside_a_sampled_one():
    x = np.zeros((2, 1, 6), np.float32)
    x[:, :, [2, 4]] = 3.0
    context = Context(*(jnp.zeros(s, jnp.int32) for s in ((2, 4), (2,), (2,), (2, 1, 0))))
    p = jnp.asarray(probabilities(x, context, temperature=[0.0, 1.0], top_k=[None, 5]))
    drawn = {0: set(), 1: set()}
    for seed in range(20):
        keys = random.at(random.request_keys([seed, seed + 100]), jnp.zeros((2, 1), jnp.int32))
        for row, token in enumerate(np.asarray(random.categorical(keys, p))[:, 0]):
            drawn[row].add(int(token))
    assert drawn[0] == {2}
    assert len(drawn[1]) > 1


def test_draws_follow_probabilities_and_never_take_an_impossible_token():
    p = np.array([0.5, 0.0, 0.3, 0.2], np.float32)
    keys = random.at(random.request_keys(np.arange(20000)), jnp.zeros((20000, 1), jnp.int32))
    drawn = np.asarray(jax.jit(random.categorical)(keys, jnp.broadcast_to(p, (20000, 1, 4))))[:, 0]
    shares = np.bincount(drawn, minlength=4) / 20000
    assert shares[1] == 0
    assert np.abs(shares - p).max() < 4 * 0.5 / np.sqrt(20000)


def test_draws_of_rows_positions_and_purposes_are_independent():
    keys = random.request_keys([0, 1])
    folded = [random.fold(keys, purpose) for purpose in (random.TOKEN, random.DRAFT, random.ACCEPT)]
    draws = [np.asarray(random.uniform(random.at(k, jnp.arange(4000) * jnp.ones((2, 1), jnp.int32)))) for k in folded]
    flat = np.concatenate(draws)  # 6 series of 4000
    correlation = np.corrcoef(flat) - np.eye(6)
    assert np.abs(correlation).max() < 5 / np.sqrt(4000)


def test_unused_transforms_leave_no_trace_in_the_program():
    assert requests.sampling_params(Options(), 2, 5)[1:] == SamplingParams(temperature=None)[1:]


@pytest.mark.parametrize("width, pieces, unrolled", [(2, 1, False), (6, 8, True), (3, 8, True), (6, 4, False)])
def test_filters_find_the_same_threshold_by_digits_of_any_width(monkeypatch, width, pieces, unrolled):
    """Of random and of tied logits, by their definitions. Sums of probabilities that are powers of two are exact."""
    monkeypatch.setattr(sampling.tuning, "filter_search", lambda rows: (width, pieces))
    monkeypatch.setattr(sampling.tuning, "search_unrolled", lambda: unrolled)
    rng = np.random.default_rng(0)
    x = np.log(2.0 ** -rng.integers(1, 9, (64, 2, 40))).astype(np.float32)
    x[rng.random(x.shape) < 0.3] = -np.inf
    x[::2] = rng.normal(size=x[::2].shape)
    x[..., 0] = 1.0
    x -= x.max(axis=-1, keepdims=True)
    x[1::4] *= 4e37  # next to the largest number that is no infinity
    k = rng.integers(1, 41, 64).astype(np.int32)
    smallest = np.take_along_axis(-np.sort(-x, axis=-1), k[:, None, None] - 1, axis=-1)
    assert np.array_equal(sampling.keep_top_k(x, k, CONTEXT) > -np.inf, (x >= smallest) & (x > -np.inf))
    p = rng.random(64).astype(np.float32)
    probs = np.asarray(jax.nn.softmax(x, axis=-1))
    above = np.sum(np.where(probs[..., None, :] > probs[..., None], probs[..., None, :], 0.0), axis=-1)
    sure = np.abs(above - p[:, None, None]) > 1e-5  # nearer than that, rounding decides
    kept = np.asarray(sampling.keep_top_p(jnp.asarray(x), jnp.asarray(p), CONTEXT)) > -np.inf
    assert np.array_equal(kept[sure], ((above < p[:, None, None]) & (x > -np.inf))[sure])
