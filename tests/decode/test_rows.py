"""Rows of a whole state, taken, inserted, permuted and released between rounds: what engines and beams need.

Every drafter of the conformance table is a case: its state moves with its row, and no drafter has code for that.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafter_table import DRAFTERS, TARGET, TARGETS

import specjax
from specjax import stream, testing
from specjax.decode import history, rows, sampling
from specjax.decode.sampling import SamplingParams

PROMPTS = [[1, 2, 3, 1, 2], [0, 3, 2, 2, 1, 0, 3, 2], [2], [3, 1, 1, 3], [1, 2], [3, 3, 0, 1, 2], [0]]
OPTIONS = dict(num_speculative_tokens=3, max_new_tokens=12, capacity=64, temperature=0.9, ignore_eos=True)
QUICK = ("head, tree",)


def each_drafter():
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in DRAFTERS]


def job_of(name, prompts, seeds, **options):
    target = TARGETS.get(name, TARGET)
    return specjax.prepare(target, prompts, drafter=DRAFTERS[name], seed=seeds, **{**OPTIONS, **options})


@functools.cache
def alone(name):
    """The texts of the requests, each by itself; request i has seed i."""
    return [job_of(name, [p], [i]).generate().tokens[0] for i, p in enumerate(PROMPTS)]


def texts(state, prompts):
    tokens, lengths = jax.device_get((state.tokens, state.lengths))
    return [tokens[i, len(p) : lengths[i]].tolist() for i, p in enumerate(prompts)]


@pytest.mark.parametrize("name", each_drafter())
def test_a_freed_row_takes_another_request_and_all_texts_are_those_of_the_requests_alone(name):
    job, take, insert = job_of(name, PROMPTS[:4], [0, 1, 2, 3]), jax.jit(rows.take), jax.jit(rows.insert)
    state, held, found = job.start(), [0, 1, 2, 3], {}
    waiting = [4, 5, 6]
    for _ in range(40):
        state, _ = job.decoder.round(state)
        for row in np.flatnonzero(~np.asarray(state.active)):
            if held[row] is not None:
                found[held[row]] = texts(take(state, jnp.array([row])), [PROMPTS[held[row]]])[0]
            held[row] = waiting.pop(0) if waiting else None
            if held[row] is not None:
                one = job_of(name, [PROMPTS[held[row]]], [held[row]]).start()
                state = insert(state, jnp.array([row]), one)
        if held == [None] * 4:
            break
    assert [found[i] for i in range(len(PROMPTS))] == alone(name)


@pytest.mark.parametrize("name", each_drafter())
def test_rows_permuted_between_rounds_go_on_as_if_nothing_had_happened(name):
    job = job_of(name, PROMPTS[:4], [0, 1, 2, 3])
    state, order, take = job.start(), np.arange(4), jax.jit(rows.take)
    for step in range(OPTIONS["max_new_tokens"]):
        state, _ = job.decoder.round(state)
        change = np.random.default_rng(step).permutation(4)
        state, order = take(state, jnp.asarray(change)), order[change]
    assert not state.active.any()
    assert texts(state, [PROMPTS[i] for i in order]) == [alone(name)[i] for i in order]


def test_a_released_row_stands_still():
    prompts, want = PROMPTS[:4], alone("noisy twin")
    job = job_of("noisy twin", prompts, [0, 1, 2, 3])
    state, _ = job.decoder.round(job.start())
    before = texts(state, prompts)
    state = job.decoder.run(rows.release(state, jnp.array([False, True, False, True])))
    after = texts(state, prompts)
    assert [after[0], after[2]] == [want[0], want[2]] and [after[1], after[3]] == [before[1], before[3]]


def test_a_round_is_noted_for_running_rows_alone():
    """In a batch, and by the slice update of a row alone."""
    empty = history.empty(2, 4, logprobs=False, top_logprobs=0)
    before = empty._replace(rounds=jnp.array([1, 2]), drafted=jnp.arange(8).reshape(2, 4), accepted=jnp.ones((2, 4)))
    news, running = (jnp.array([30, 40]), jnp.array([5.0, 6.0])), jnp.array([True, False])
    after = history.counted(before, *news, running)
    assert after.rounds.tolist() == [2, 2]
    assert after.drafted.tolist() == [[0, 30, 2, 3], [4, 5, 6, 7]]
    assert after.accepted.tolist() == [[1, 5, 1, 1], [1, 1, 1, 1]]
    for row in (0, 1):
        alone = history.counted(*jax.tree.map(lambda x, row=row: x[row : row + 1], (before, *news, running)))
        jax.tree.map(np.testing.assert_array_equal, alone, jax.tree.map(lambda x, row=row: x[row : row + 1], after))


def test_a_stop_string_found_by_the_host_releases_its_row(monkeypatch):
    class Letters:
        def decode(self, ids):
            return "".join("abcd"[i] for i in ids)

        def special_id(self, text):
            return None

    lm = dataclasses.replace(TARGET, tokenizer=Letters())
    released = []
    monkeypatch.setattr(rows, "release", lambda state, which: released.append(which.tolist()) or state)
    options = dict(max_new_tokens=40, ignore_eos=True, seed=[0, 1], temperature=1.0)
    texts = [event.text for event in stream(lm, [[1], [2]], stop="a", **options) if event.row == 0]
    assert "".join(texts).endswith("a") and len(texts) < 40
    assert released and all(any(which) and not all(which) for which in released)


# ---- parameters that any row can join ----


def random_params(name: str, vocab: int = 12) -> SamplingParams:
    setting = {
        **testing.SETTINGS["plain"],
        **{k: v for k, v in testing.SETTINGS[name].items() if k != "allowed_token_ids"},
        **({"allowed_token_ids": [0, 1, 3, 7, 9, 11]} if name == "allowed" else {}),
    }
    job = specjax.prepare(testing.tiny_lm(0, vocab_size=vocab), [[1, 2, 1, 2], [3]], eos_token_id=2, **{
        "temperature": 1.0, **setting})  # fmt: skip
    return job.request.sampling


@pytest.mark.parametrize("name", testing.SETTINGS)
def test_full_parameters_change_no_bit(name):
    """Every field is there, and those that a request left out are without effect, to the last bit."""
    params, vocab = random_params(name), 12
    full = params.full(vocab)
    assert all(field is not None for field in full)
    assert jax.tree.structure(full) == jax.tree.structure(random_params("plain").full(vocab))
    rng = np.random.default_rng(0)
    logits = (
        jnp.asarray(rng.normal(size=(2, 3, vocab)) * 4, jnp.float32).at[0, 0, :3].set(jnp.array([0.0, -0.0, -jnp.inf]))
    )
    tokens = jnp.asarray(rng.integers(0, vocab, (2, 16)), jnp.int32)
    path = jnp.array([[[-1, -1], [1, -1], [1, 2]], [[-1, -1], [0, -1], [0, 3]]], jnp.int32)
    context = sampling.Context(tokens, jnp.array([6, 3]), jnp.array([4, 1]), path)
    for function in (sampling.distribution, sampling.ranked, sampling.unsharpened):
        a, b = (np.asarray(jax.jit(function)(logits, p, context)) for p in (params, full))
        np.testing.assert_array_equal(a.view(np.uint32) & 0x7FFFFFFF, b.view(np.uint32) & 0x7FFFFFFF)


def test_rows_of_any_kind_share_one_program_in_full():
    shapes = {jax.tree.structure(random_params(name).full(12)) for name in testing.SETTINGS}
    sizes = {str(jax.tree.map(jax.typeof, random_params(name).full(12))) for name in testing.SETTINGS}
    assert len(shapes) == len(sizes) == 1
    with pytest.raises(ValueError, match="lists 4 tokens.*room for 2"):
        random_params("bias").full(12, biases=2)
