"""What single drafters promise beyond the conformance table."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafter_table import TARGET, TWIN

import specjax
from specjax.decode import random, sampling
from specjax.decode import round as rounds
from specjax.drafters import (
    Adaptive,
    Cascade,
    DraftModel,
    Eagle,
    EntropyGuided,
    FirstOf,
    Jacobi,
    LayerSkip,
    Lookahead,
    NGramTable,
    NoDraft,
    Oracle,
    PromptLookup,
    RandomDraft,
    SinkWindow,
    TreeModel,
)
from specjax.drafters.adaptive import AdaptiveState
from specjax.models import cache as kv
from specjax.models import modules
from specjax.models.heads.eagle3_head import Eagle3HeadConfig
from specjax.testing import Trial, check_path_independence, checks, chi_square, noisy_twin, table_lm, tiny_lm


@jax.jit
def judged(decoder, state):
    draft, state = rounds.propose(decoder, state)
    scored = rounds.score(decoder, state, draft)
    info = rounds.commit(decoder, state, scored, rounds.judge(decoder, state, scored))[1]
    return info, scored.p, scored.out.logits


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [pytest.param(0.3, marks=pytest.mark.slow), 1.0])
def test_bfloat16_models_are_sampled_and_judged_in_float32(temperature):
    """By the law of the very call that judged: in bfloat16 calls of other shapes have logits that differ by a tenth."""
    target = tiny_lm(3, std=0.6, dtype=jnp.bfloat16, vocab_size=8)
    drafter = DraftModel(noisy_twin(target, 0.01), prefill_chunk=4)  # thousands of rows would pay for 64 tokens each
    options = dict(drafter=drafter, num_speculative_tokens=2, temperature=temperature)
    job = specjax.prepare(target, [[1, 2, 3]] * 4000, **options)

    info, p, logits = jax.device_get(judged(job.decoder, job.start()))
    assert p.dtype == logits.dtype == np.float32
    exact = np.exp(logits.astype(np.float64) / temperature)  # float64, so that rounding p anywhere would show
    assert np.abs(p - exact / exact.sum(-1, keepdims=True)).max() < 1e-5
    assert chi_square(np.bincount(info.tokens[:, 0], minlength=8), p[:, 0].mean(0)) > 1e-4
    for first in (1, 5):  # the likely ones
        kept = (info.accepted > 0) & (info.tokens[:, 0] == first)
        assert kept.sum() > 100
        assert chi_square(np.bincount(info.tokens[kept, 1], minlength=8), p[kept, 1].mean(0)) > 1e-4


def test_q_is_the_float32_array_that_was_sampled():
    lm = tiny_lm(3, std=0.6, dtype=jnp.bfloat16, vocab_size=8)
    job = specjax.prepare(lm, [[1, 2, 3]], drafter=DraftModel(lm), num_speculative_tokens=3, temperature=0.7)
    state = job.start()
    keys = job.decoder.verifier.draft_keys(state.request.key, state.lengths)
    draft, _ = jax.jit(rounds.propose)(job.decoder, state)
    assert draft.probs.dtype == jnp.float32
    assert np.allclose(draft.probs.sum(-1), 1, atol=1e-6)
    again = random.categorical(random.at(keys, state.lengths[:, None] + jnp.arange(3)), draft.probs)
    assert np.array_equal(again, draft.tokens)
    assert isinstance(state.request.sampling, sampling.SamplingParams)


DEEP = tiny_lm(1, vocab_size=8, std=0.7, num_hidden_layers=2, max_position_embeddings=256)
ROWS = [[1, 2, 3, 1, 2], [4]]


def accepted_share(drafter, **options):
    out = specjax.generate(
        DEEP, ROWS, drafter=drafter, num_speculative_tokens=3, max_new_tokens=24, temperature=1.0, **options
    )
    drafted = sum(m.num_draft_tokens for m in out.metrics)
    return sum(m.num_accepted_tokens for m in out.metrics) / drafted


def test_leaving_out_nothing_is_self_draft_and_leaving_out_more_costs_acceptance():
    assert accepted_share(LayerSkip()) == 1.0
    assert accepted_share(SinkWindow(0, 60)) == 1.0  # a window over everything
    assert 0 < accepted_share(LayerSkip(exit_layer=1)) < 1
    assert 0 < accepted_share(SinkWindow(1, 2)) < 1


def test_a_window_drafts_from_the_sinks_and_the_latest_entries_at_their_own_positions():
    lm = tiny_lm(0, vocab_size=12, num_hidden_layers=1)  # the entries of a first layer depend on no other token
    text, size = np.random.default_rng(0).integers(0, 12, (1, 10)), 3
    job = specjax.prepare(
        lm, text.tolist(), drafter=SinkWindow(1, 2), num_speculative_tokens=size, max_new_tokens=9, temperature=1.0
    )
    draft = jax.jit(rounds.propose)(job.decoder, job.start())[0]
    kept, last = np.array([[0, 7, 8]]), 9
    cache = kv.with_lengths(lm(text[:, kept[0]], lm.alloc_cache(1, 16), positions=kept).cache, jnp.array([3]))
    block = jnp.concatenate([jnp.asarray(text[:, last:]), draft.tokens[:, :-1]], axis=1)
    out = lm(block, cache, positions=last + np.arange(size)[None])
    np.testing.assert_allclose(draft.probs, jax.nn.softmax(out.logits, axis=-1), atol=1e-5)


@pytest.mark.parametrize(
    "wrong, says",
    [
        (dict(exit_layer=3), "exit_layer must be from 1 to the target's 2 layers, got 3"),
        (dict(skip_mlp=(2,)), "skip_mlp must name layers 0 to 1"),
        (dict(skip_attention=(-1,)), "skip_attention must name layers 0 to 1"),
    ],
)
def test_layers_that_are_not_there_are_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        specjax.generate(DEEP, ROWS, drafter=LayerSkip(**wrong))


@pytest.mark.parametrize("verifier", [pytest.param("rejection", marks=pytest.mark.slow), "coupled"])
@pytest.mark.parametrize("inner", ["lookup", pytest.param("model", marks=pytest.mark.slow)])
def test_a_cascade_proposes_what_its_draft_model_would(inner, verifier):
    twin = noisy_twin(DEEP, 0.2)
    inner = PromptLookup(prompt_lookup_min=1) if inner == "lookup" else DraftModel(noisy_twin(twin, 0.2))
    options = dict(num_speculative_tokens=4, max_new_tokens=40, temperature=0.9, top_k=5, seed=3, verifier=verifier)
    want = specjax.generate(DEEP, ROWS, drafter=DraftModel(twin), **options)
    got = specjax.generate(DEEP, ROWS, drafter=Cascade(inner, twin, 2), **options)
    assert got.tokens == want.tokens and got.metrics == want.metrics


def test_a_cascade_refuses_models_of_two_vocabularies():
    with pytest.raises(ValueError, match="one vocabulary size, got 8 for the target and 9"):
        specjax.generate(DEEP, ROWS, drafter=Cascade(PromptLookup(), tiny_lm(0, vocab_size=9)))


def test_tables_count_and_end_where_nothing_follows():
    table = NGramTable.count([[0, 1, 0, 1, 0, 2], [5]], 8, order=2)
    assert table.tokens.shape == (8, 2) and table.tokens[0].tolist() == [1, 2]
    np.testing.assert_allclose(jnp.exp(table.logprobs[0]), [2 / 3, 1 / 3], rtol=1e-6)
    assert table.tokens[2].tolist() == [8, 8]
    unigram = NGramTable.count([[0, 1, 0, 1, 0, 2], [5]], 8, order=1, keep=2)
    assert unigram.tokens.tolist() == [[0, 1]]
    np.testing.assert_allclose(jnp.exp(unigram.logprobs[0]), [3 / 5, 2 / 5], rtol=1e-6)
    out = specjax.generate(DEEP, [[2], [0]], drafter=table, max_new_tokens=1 + 1)
    assert out.metrics[0].per_step_drafted[0] == 0 and out.metrics[1].per_step_drafted[0] == 1
    for bad in (dict(sequences=[[9]]), dict(sequences=[]), dict(sequences=[[1, 2]], order=3)):
        with pytest.raises(ValueError):
            NGramTable.count(**{"vocab_size": 8, **bad})


def test_the_oracle_is_accepted_whole_and_says_nothing_of_what_it_does_not_know():
    plain = specjax.generate(DEEP, ROWS, max_new_tokens=20)
    oracle = Oracle.of([ROWS[0] + plain.tokens[0]])
    out = specjax.generate(DEEP, ROWS, drafter=oracle, num_speculative_tokens=4, max_new_tokens=20)
    assert out.tokens == plain.tokens
    assert out.metrics[0].draft_acceptance_rate == 1.0 and out.metrics[0].num_steps == 4
    assert out.metrics[1].num_draft_tokens == 0


def test_jacobi_finds_the_loop_of_a_text_that_repeats():
    """A model that follows x by x + 1 whatever came before: every answer is right once its own token is."""
    cycle = table_lm(np.roll(np.eye(8), 1, axis=1) + 1e-6)
    out = specjax.generate(cycle, [[3]], drafter=Jacobi(), num_speculative_tokens=4, max_new_tokens=20)
    assert out.tokens[0] == [(4 + i) % 8 for i in range(20)]
    constant = table_lm(np.tile(np.eye(8)[5], (8, 1)) + 1e-6)
    out = specjax.generate(constant, [[3]], drafter=Jacobi(), num_speculative_tokens=4, max_new_tokens=20)
    assert out.tokens[0] == [5] * 20
    assert out.metrics[0].per_step_accepted[:4] == [0, 4, 0, 4], "a round that is kept whole leaves nothing to go on"


def test_lookahead_finds_what_follows_every_token_it_has_guessed():
    """Where a token depends on the last alone, K calls make of every guess an n-gram that is right."""
    cycle, prompt = table_lm(np.roll(np.eye(8), 1, axis=1) + 1e-6), [3, 1, 4, 6, 5, 0, 2, 7]
    for drafter in (Lookahead(), FirstOf(PromptLookup(prompt_lookup_max=3, prompt_lookup_min=3), Lookahead())):
        out = specjax.generate(cycle, [prompt, [2]], drafter=drafter, num_speculative_tokens=3, max_new_tokens=28)
        assert out.tokens == [[i % 8 for i in range(28)], [(3 + i) % 8 for i in range(28)]]
        assert out.metrics[0].per_step_accepted == [0, 0, 0, 3, 3, 3, 3, 3, 3, 0][: out.metrics[0].num_steps]


def test_lookahead_remembers_each_ngram_once_and_proposes_the_latest():
    drafter = Lookahead(window=2, guesses=3, slots=6)
    pool, at = jnp.full((6, 3), -1), jnp.int32(0)
    for new in ([[1, 2, 3], [1, 2, 4]], [[1, 2, 3], [1, 5, 6]], [[9, 9, 9], [9, 9, 9]]):
        pool, at = drafter.remember(pool, at, jnp.array(new))
        ngrams, found = drafter.matches(pool, at, jnp.int32(1))
    assert ngrams.tolist() == [[5, 6], [2, 3], [2, 4]] and found.all()
    assert pool.tolist() == [[-1] * 3, [1, 2, 4], [1, 2, 3], [1, 5, 6], [-1] * 3, [9] * 3]
    assert not drafter.matches(pool, at, jnp.int32(2))[1].any()
    for bad in (dict(window=0), dict(guesses=1.5), dict(slots=7)):
        with pytest.raises(ValueError, match="lookahead needs"):
            Lookahead(**bad)


def test_the_window_of_lookahead_goes_on_by_the_targets_answers():
    """Each column sees the oldest guesses up to its own and then itself, whatever else is in the block."""
    prompts = np.random.default_rng(0).integers(0, 8, (4, 11)).tolist()
    drafter = Lookahead(window=5, guesses=2)
    job = specjax.prepare(DEEP, prompts, drafter=drafter, num_speculative_tokens=2, max_new_tokens=9)
    before = job.start()
    draft, _ = jax.jit(rounds.propose)(job.decoder, before)
    before = before._replace(active=jnp.array([True, True, True, False]))
    after = job.decoder.round(before)[0]
    assert not (after.drafter.pool[3] >= 0).any(), "a row that sits out learns nothing"
    for row, prompt in enumerate(prompts[:3]):
        oldest, newest = np.asarray(draft.tokens[row, :10]).reshape(2, 5)
        paths = [[*prompt, *oldest[: j + 1], newest[j]] for j in range(5)]
        answers = [new[0] for new in specjax.generate(DEEP, paths, max_new_tokens=1).tokens]
        assert after.drafter.window[row].tolist() == [newest.tolist(), answers]
        assert set(map(tuple, after.drafter.pool[row, :5].tolist())) - {(-1,) * 3} == {
            (*pair, answer) for *pair, answer in zip(oldest.tolist(), newest.tolist(), answers, strict=True)
        }


def learned(drafter, size: int, limits: list[int], part=lambda own: own, **options) -> list:
    """What the first row's drafter has learned after each of its rounds; the second row may have nothing to do."""
    prompts = [[1, 2, 0, 1, 3, 0], [0, 1, 2, 2, 1, 4]]
    given = dict(drafter=drafter, num_speculative_tokens=size, max_new_tokens=limits, capacity=64, **options)
    job = specjax.prepare(DEEP, prompts, **given)
    state, found = job.start(), []
    while state.active[0]:
        state, _ = job.decoder.round(state)
        found.append(jax.tree.map(lambda x: np.asarray(x[0]).tolist(), part(state.drafter)))
    return found


@pytest.mark.parametrize("size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_lookahead_learns_the_same_beside_a_drafter_of_narrower_blocks(size):
    """Else it would remember, as the target's, answers to nodes that were never run."""
    lookahead, silent = Lookahead(window=3, guesses=2), PromptLookup(9, 9)
    # A stop token among the guesses leaves little of the window to be judged.
    common = dict(size=size, limits=[20, 0], eos_token_id=1)
    alone = learned(lookahead, **common)
    assert learned(FirstOf(silent, lookahead), part=lambda own: own[1], **common) == alone
    assert learned(FirstOf(lookahead, NoDraft()), part=lambda own: own[0], **common) == alone


@pytest.mark.parametrize("drafter", [
    pytest.param(FirstOf(PromptLookup(prompt_lookup_min=1), Lookahead(window=3, guesses=2)), marks=pytest.mark.slow),
    pytest.param(FirstOf(Jacobi(), PromptLookup(9, 9)), marks=pytest.mark.slow),
    FirstOf(PromptLookup(prompt_lookup_min=1), Adaptive(DraftModel(noisy_twin(DEEP, 0.2)), EntropyGuided())),
], ids=["lookahead", "jacobi", "entropy"])  # fmt: skip
def test_what_a_row_learns_of_a_drafter_is_not_its_neighbours_to_say(drafter):
    """Whether a neighbour asks the second drafter decides whether that runs at all, and how wide the block is."""
    part = lambda own: own[1].policy if isinstance(own[1], AdaptiveState) else own  # noqa: E731
    for seed in range(4):
        common = dict(size=3, part=part, temperature=0.7, seed=seed)
        alone, beside = (learned(drafter, limits=limits, **common) for limits in ([20, 0], [20, 20]))
        # Products of other widths round differently. What a neighbour decided would change whole percents.
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), alone, beside)


@pytest.mark.slow
def test_first_of_prefers_the_first_and_asks_the_second_where_it_is_silent():
    twin = DraftModel(noisy_twin(DEEP, 0.2))
    plain = specjax.generate(DEEP, ROWS, max_new_tokens=20)
    oracle = Oracle.of([ROWS[0] + plain.tokens[0]])
    options = dict(num_speculative_tokens=3, max_new_tokens=20)
    both = specjax.generate(DEEP, ROWS, drafter=FirstOf(oracle, twin), **options)
    alone = specjax.generate(DEEP, ROWS, drafter=twin, **options)
    assert both.tokens == plain.tokens
    assert both.metrics[0].draft_acceptance_rate == 1.0
    assert both.metrics[1] == alone.metrics[1]


@pytest.mark.parametrize("make", [
    pytest.param(lambda lm: DraftModel(lm, prefill_chunk=4), id="model", marks=pytest.mark.slow),
    pytest.param(lambda lm: TreeModel(lm, (2, 1), prefill_chunk=4), id="tree"),
    pytest.param(lambda lm: Cascade(RandomDraft(), lm, 1, prefill_chunk=4), id="cascade", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_row_that_sat_out_is_caught_up_when_it_drafts(make, monkeypatch):
    """Prompt lookup speaks for the first row, whose long prompt the second drafter then hasn't seen."""
    monkeypatch.setattr(checks, "PROMPTS", [[1, 2, 0, 3] * 6 + [1, 2, 0], [3], [2, 1]])
    check_path_independence(Trial(TARGET, FirstOf(PromptLookup(), make(TWIN.lm))), rounds=8)


def eagle(prefill_chunk):
    config = Eagle3HeadConfig(DEEP.config, (0, 1, 2))
    return Eagle(config, modules.init(config.module, config, 0), None, prefill_chunk=prefill_chunk)


@pytest.mark.parametrize("chunk", [0, -1, 1.5, "4", True])
@pytest.mark.parametrize("make", [
    lambda chunk: DraftModel(DEEP, prefill_chunk=chunk), lambda chunk: TreeModel(DEEP, (2, 1), prefill_chunk=chunk),
    lambda chunk: Cascade(PromptLookup(), DEEP, prefill_chunk=chunk), eagle,
], ids=["model", "tree", "cascade", "eagle"])  # fmt: skip
def test_a_chunk_of_no_tokens_is_refused_where_the_drafter_is_made(make, chunk):
    with pytest.raises(ValueError, match="prefill_chunk must be an integer of at least 1, or None, got"):
        make(chunk)
    assert make(1) and make(np.int64(4)) and make(None)


@pytest.mark.slow
def test_random_drafts_are_uniform_over_what_the_filters_leave():
    lm = table_lm(np.full((8, 8), 1 / 8))
    out = specjax.generate(
        lm, [[1]] * 64, drafter=RandomDraft(), num_speculative_tokens=4, max_new_tokens=20, temperature=1.0
    )
    assert all(m.draft_acceptance_rate == 1.0 for m in out.metrics)  # p = q
    rate = specjax.generate(lm, [[1]] * 64, drafter=RandomDraft(), num_speculative_tokens=1, max_new_tokens=20).metrics
    assert 0.05 < sum(m.num_accepted_tokens for m in rate) / sum(m.num_draft_tokens for m in rate) < 0.2  # 1/8


def tree_model(lm, prefill_chunk):
    return TreeModel(lm, (2, 1, 1), prefill_chunk=prefill_chunk)


@pytest.mark.parametrize("chunk, make", [
    (7, DraftModel), *(pytest.param(chunk, DraftModel, marks=pytest.mark.slow) for chunk in (90, 10_000)),
    *(pytest.param(chunk, tree_model, marks=pytest.mark.slow) for chunk in (7, 90, 10_000)),
])  # fmt: skip
def test_a_draft_reads_a_prompt_in_chunks_of_any_size(chunk, make):
    """The last chunk starts early, where the cache ends: nothing is fed past it, and nothing is left out."""
    lm = tiny_lm(0, num_hidden_layers=1)
    prompts = [[i % 50 for i in range(size)] for size in (100, 3, 63)]
    options = dict(num_speculative_tokens=3, max_new_tokens=9, temperature=1.0)
    twin = noisy_twin(lm, 0.1)
    whole, out = (
        specjax.generate(lm, prompts, drafter=make(twin, prefill_chunk=size), **options) for size in (128, chunk)
    )
    assert out.tokens == whole.tokens and out.metrics == whole.metrics
