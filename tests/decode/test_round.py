"""The round and its loops on a random two-layer GQA model: limits, capacity, drafts, failures, replay.

Three prompts a call and one bucket throughout, so that few programs serve all tests.
"""

import dataclasses
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import NoDistributionError, generate, stream, testing, warmup
from specjax.decode import decoder
from specjax.decode import round as rounds
from specjax.decode.types import Plan
from specjax.drafters import DraftModel, PromptLookup
from specjax.drafting.base import static
from specjax.generation.generate import prepare
from specjax.models import tuning

LM = testing.tiny_lm(0, max_position_embeddings=64)
SELF, TWIN = DraftModel(LM), DraftModel(testing.noisy_twin(LM, 0.05))
PROMPTS = [[5], [3, 9], [4, 8, 1, 4, 8, 1, 30, 2, 7, 7, 7, 11, 6, 40, 41, 4, 8]]
NEW = 40


def run(drafter=None, prompts=PROMPTS, **options):
    out = generate(LM, prompts, drafter=drafter, **{"max_new_tokens": NEW, **options})
    for metrics in out.metrics:
        metrics.check()
    return out


@pytest.fixture(scope="module")
def plain():
    return run()


@pytest.mark.parametrize("drafter", [SELF, TWIN, PromptLookup(prompt_lookup_min=1)], ids=["self", "twin", "lookup"])
def test_greedy_equals_plain_on_ragged_prompts(drafter, plain):
    out = run(drafter)
    assert out.tokens == plain.tokens
    assert [len(row) for row in out.tokens] == [NEW] * 3


def test_self_draft_is_accepted_whole():
    for options in ({}, {"temperature": 1.0}):
        for metrics in run(SELF, **options).metrics:
            assert metrics.draft_acceptance_rate == 1.0
            assert metrics.num_steps == -(-NEW // 6), "K + 1 tokens a round"


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_self_draft_is_accepted_whole_at_other_draft_lengths(size, plain):
    out = run(SELF, num_speculative_tokens=size)
    assert out.tokens == plain.tokens
    assert all(m.draft_acceptance_rate == 1.0 for m in out.metrics)


def test_without_eos_rows_run_to_their_limit(plain):
    assert LM.config.eos_token_ids == ()
    assert plain.finish_reasons == ["length"] * 3
    assert run(TWIN).finish_reasons == ["length"] * 3


@pytest.mark.parametrize("drafter", [None, SELF, TWIN], ids=["plain", "self", "twin"])
def test_context_is_filled_exactly(drafter):
    prompts = [[(7 * i + n) % 50 for i in range(n)] for n in (64, 63, 60)]
    out = run(drafter, prompts, max_new_tokens=None)
    assert [len(row) for row in out.tokens] == [0, 1, 4]
    assert out.finish_reasons == ["length"] * 3
    assert out.tokens == run(None, prompts, max_new_tokens=None).tokens
    prompts = [p[:n] for p, n in zip(prompts, (62, 58, 25), strict=True)]
    assert run(drafter, prompts, max_new_tokens=None).tokens == run(None, prompts, max_new_tokens=None).tokens


def test_prompt_past_the_context_is_refused():
    with pytest.raises(ValueError, match="65 tokens"):
        run(TWIN, [[1] * 65])


def test_draft_with_a_smaller_context_stops_drafting_there(plain):
    short = testing.tiny_lm(0, max_position_embeddings=16)  # the target's own weights
    out = run(DraftModel(short))
    assert out.tokens == plain.tokens
    for metrics, prompt in zip(out.metrics, PROMPTS, strict=True):
        assert (metrics.num_draft_tokens > 0) == (len(prompt) < 16)
        assert len(prompt) + metrics.num_accepted_tokens <= 17
        assert metrics.draft_acceptance_rate in (None, 1.0)


def test_rows_of_other_lengths_change_nothing(plain):
    for drafter in (SELF, TWIN):
        alone = run(drafter)
        out = run(drafter, max_new_tokens=[1, NEW, 0])
        assert out.tokens == [plain.tokens[0][:1], plain.tokens[1], []]
        assert out.metrics[1] == alone.metrics[1]
        assert out.metrics[0].num_steps == 1 and out.metrics[2].num_steps == 0


def test_what_lies_past_a_rows_length_is_never_seen(plain):
    job = prepare(LM, PROMPTS, drafter=TWIN, max_new_tokens=NEW)
    state = job.start()
    stale = jnp.arange(state.cache.capacity) >= state.cache.lengths[:, None]

    def spoil(x):
        return jnp.where(stale[:, None, :, None], 1e4, x)

    cache = state.cache.replace(keys=tuple(map(spoil, state.cache.keys)), values=tuple(map(spoil, state.cache.values)))
    end = job.decoder.run(state._replace(cache=cache))
    for row, prompt in enumerate(PROMPTS):
        assert np.asarray(end.tokens)[row, len(prompt) : len(prompt) + NEW].tolist() == plain.tokens[row]


def test_caches_cover_all_but_the_last_token_after_each_round():
    job = prepare(LM, PROMPTS, drafter=TWIN, max_new_tokens=NEW)
    state = job.start()
    for _ in range(5):
        state, _ = job.decoder.round(state)
        assert np.array_equal(state.cache.lengths, state.lengths - 1)
        assert (np.asarray(state.drafter.cache.lengths) <= np.asarray(state.lengths) - 1).all()
        assert (np.asarray(state.drafter.cache.lengths) >= np.asarray(state.lengths) - 2).all()


def test_no_finite_logit_names_the_rows():
    leaves = jax.tree.map(lambda x: x * jnp.nan, LM.params)
    broken = dataclasses.replace(LM, params=leaves)
    with pytest.raises(NoDistributionError, match="row 0 after 0 new tokens, row 1"):
        generate(broken, PROMPTS, max_new_tokens=NEW)
    with pytest.raises(NoDistributionError, match="row 1 after 0 new tokens: ") as caught:
        run(logit_bias=[None, dict.fromkeys(range(50), -np.inf), None])
    assert [len(row) for row in caught.value.result.tokens] == [NEW, 0, NEW]
    with pytest.raises(NoDistributionError):
        list(stream(broken, PROMPTS, drafter=TWIN, max_new_tokens=NEW))


def test_tokens_before_a_position_without_a_distribution_are_kept_and_may_end_the_row():
    """Each row may have two tokens, each of them once. A draft holds both, and nothing may follow them."""
    options = dict(drafter=SELF, max_new_tokens=NEW, no_repeat_ngram_size=[1, 1, 0], eos_token_id=7, logprobs=True)
    options["allowed_token_ids"] = [[7, 12], [8, 12], None]
    with pytest.raises(NoDistributionError, match="finite logit in row 1 after 2 new tokens: ") as caught:
        list(stream(LM, PROMPTS, **options))
    result = caught.value.result
    assert result.tokens[0][-1] == 7 and sorted(result.tokens[1]) == [8, 12] and len(result.logprobs[1]) == 2
    assert result.finish_reasons[:2] == ["stop", None] and result.metrics[1].per_step_accepted == [2]
    for metrics in result.metrics:
        metrics.check()


def test_a_draft_without_a_distribution_is_plain_decoding(plain):
    broken = dataclasses.replace(LM, params=jax.tree.map(lambda x: x * jnp.nan, LM.params))
    out = run(DraftModel(broken))
    assert out.tokens == plain.tokens
    assert all(m.num_draft_tokens == 0 for m in out.metrics)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_stream_is_generate(temperature):
    options = dict(drafter=TWIN, temperature=temperature, max_new_tokens=NEW, seed=[3, 4, 5])
    out = generate(LM, PROMPTS, **options)
    events = stream(LM, PROMPTS, **options)
    streamed = [[], [], []]
    for event in events:
        streamed[event.row].append(event)
    assert [[e.token for e in row] for row in streamed] == out.tokens == events.result().tokens
    assert events.result().metrics == out.metrics
    assert [row[-1].finish_reason for row in streamed] == out.finish_reasons
    assert [sum(e.from_draft for e in row) for row in streamed] == [m.num_accepted_tokens for m in out.metrics]


def test_a_row_alone_is_the_row_of_a_batch():
    options = dict(temperature=0.9, max_new_tokens=NEW)
    for drafter in (TWIN, None):
        together = run(drafter, seed=[3, 4, 5], **options)
        backwards = run(drafter, PROMPTS[::-1], seed=[5, 4, 3], **options)
        assert backwards.tokens == together.tokens[::-1]
        assert backwards.metrics == together.metrics[::-1]
        if drafter is None:
            continue
        for row in range(3):
            alone = run(drafter, [PROMPTS[row]], seed=3 + row, **options)
            assert alone.tokens == [together.tokens[row]]
            assert alone.metrics == [together.metrics[row]]


@pytest.mark.slow  # every operation is compiled on its own
def test_a_round_outside_jit_is_the_compiled_round():
    job = prepare(LM, PROMPTS, drafter=TWIN, max_new_tokens=NEW, temperature=0.9)
    state = job.start()
    loose, info = rounds.round(job.decoder, state)
    tight, compiled = job.decoder.round(state)
    assert np.array_equal(info.committed, compiled.committed)
    assert np.array_equal(loose.lengths, tight.lengths)
    np.testing.assert_allclose(info.p, compiled.p, atol=1e-5)
    for row, length in enumerate(np.asarray(loose.lengths)):
        assert np.array_equal(loose.tokens[row, :length], tight.tokens[row, :length])


@pytest.mark.parametrize("drafter", [None, PromptLookup(prompt_lookup_min=1)], ids=["plain", "lookup"])
def test_a_call_of_two_tokens_at_least_says_the_same(monkeypatch, drafter):
    """Up to the context's end, in no more room than a block needs: what the second token writes harms nothing."""
    job = prepare(LM, [[5]], drafter=drafter, temperature=0.7)
    room = int(job.request.limit[0]) + job.decoder.plan.block
    state = dataclasses.replace(job, tokens=job.tokens[:, :room], chunk=1).start()

    def run_and_widths():
        def rounds(state):
            return decoder.run(job.decoder, state).tokens[0]

        with mock.patch.object(type(LM), "__call__", autospec=True, side_effect=type(LM).__call__) as calls:
            tokens = jax.jit(rounds)(state)
        return tokens.tolist(), min(call.args[1].shape[1] for call in calls.call_args_list)

    alone, width = run_and_widths()
    assert width == 1
    monkeypatch.setattr(tuning, "least_tokens", lambda *_: 2)
    assert run_and_widths() == (alone, 2)


def test_widths_that_come_to_the_same_are_compiled_once(monkeypatch):
    job = prepare(LM, [[5]], drafter=PromptLookup(), num_speculative_tokens=1)
    assert job.decoder.plan.widths == (1, 2)
    state = jax.eval_shape(job.start)

    def calls_of_a_round():
        with mock.patch.object(type(LM), "__call__", autospec=True, side_effect=type(LM).__call__) as calls:
            jax.eval_shape(lambda state: rounds.round(job.decoder, state), state)
        return [call.args[1].shape[1] for call in calls.call_args_list]

    assert calls_of_a_round() == [1, 2]
    monkeypatch.setattr(tuning, "least_tokens", lambda *_: 2)
    assert calls_of_a_round() == [2]


@static
@dataclasses.dataclass(frozen=True)
class Misstated(PromptLookup):
    """Prompt lookup that says of itself what is asked of it."""

    says: tuple[int, ...] = ()

    def plan(self, target, num_speculative_tokens):
        return Plan(self.says)


@pytest.mark.parametrize("widths", [(1,), (1, 3), (3,), (1, 5), (4, 1), (4, 4)], ids=str)
def test_widths_that_do_not_rise_to_the_block_are_refused(widths):
    """A draft that no width holds would be cut, and its last tokens judged by zeros."""
    says = re.escape(f"widths must rise to its block of 4 tokens, the last committed and 3 drafted, got {widths}")
    with pytest.raises(ValueError, match=says):
        run(Misstated(says=widths), num_speculative_tokens=3)


def test_where_one_token_is_fed_as_two(monkeypatch):
    def least(hidden, batch=1, sharding=None):
        config = dataclasses.replace(LM.config, hidden_size=hidden)
        return tuning.least_tokens(dataclasses.replace(LM, config=config, cache_sharding=sharding), batch)

    assert least(4096) == 1, "on a CPU"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert [least(4096), least(2048), least(576), least(4096, batch=2)] == [2, 2, 1, 1]
    mesh = jax.make_mesh((1,), ("model",))
    assert least(4096, sharding=jax.NamedSharding(mesh, jax.P())) == 2, "whole on each device"
    assert least(4096, sharding=jax.NamedSharding(mesh, jax.P(None, "model"))) == 1


def test_calls_leave_nothing_behind(plain):
    before = jax.tree.map(np.asarray, LM.params)
    first = run(TWIN, temperature=0.9)
    run(TWIN, PROMPTS[::-1], max_new_tokens=7)
    again = run(TWIN, temperature=0.9)
    assert again.tokens == first.tokens and again.metrics == first.metrics
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), before, LM.params))


def test_warmup_reads_no_more_of_a_long_prompt_than_one_block(monkeypatch):
    """Whatever the prompt's length, the programs are the same: a prompt is not read twice before its first token."""
    read = []

    def start(made, request, tokens, **fixed):
        read.append(np.asarray(request.prompt_lengths).tolist())
        return start_jit(made, request, tokens, **fixed)

    start_jit = decoder.start_jit
    monkeypatch.setattr(decoder, "start_jit", start)
    warmup(LM, [[1] * 40, [1]], drafter=TWIN, num_speculative_tokens=2, max_new_tokens=20)
    assert read == [[2, 1]]


def test_warmup_compiles_what_generate_runs():
    options = dict(drafter=TWIN, num_speculative_tokens=2, max_new_tokens=20)
    warmup(LM, PROMPTS, **options)
    with testing.count_traces() as seen:
        generate(LM, PROMPTS, **options)
        generate(LM, PROMPTS[::-1], **{**options, "max_new_tokens": 31, "temperature": 0.5, "seed": 8})
    assert seen.compiled == 0
