"""Completions through the application: each answer is what generate gives for its seed, in every form."""

import asyncio
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, strategies
from served import LM, TOKENIZER, alone, client, events, running

import specjax
from specjax.server.held_text import HeldText

PATH = "/v1/completions"


async def ask(app, **body):
    async with client(app) as one:
        return await one.post(PATH, json={"model": "tiny", **body})


def asked(app_test):
    """Runs a test that is a coroutine of an application, in a loop of its own."""

    def run():
        async def whole():
            async with running() as app:
                await app_test(app)

        asyncio.run(whole())

    run.__name__, run.__doc__ = app_test.__name__, app_test.__doc__
    return run


@asked
async def test_an_answer_is_what_generate_gives_for_its_seed(app):
    prompts = ["abcabcab", "x", "the cat the cat"]
    answer = (await ask(app, prompt=prompts, n=2, seed=40, max_tokens=20, temperature=0.8, top_p=0.9)).json()
    for index, choice in enumerate(answer["choices"]):
        expected = alone(prompts[index // 2], seed=40 + index, max_new_tokens=20, temperature=0.8, top_p=0.9)
        assert choice["index"] == index and choice["text"] == expected.texts[0]
        assert choice["finish_reason"] == expected.finish_reasons[0]
    assert answer["object"] == "text_completion" and answer["model"] == "tiny"
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert answer["specjax"]["seed"] == 40


@asked
async def test_without_a_seed_answers_differ_and_each_says_how_to_replay_it(app):
    first, second = [(await ask(app, prompt="abc", max_tokens=30)).json() for _ in range(2)]
    assert first["choices"][0]["text"] != second["choices"][0]["text"]
    again = (await ask(app, prompt="abc", max_tokens=30, seed=first["specjax"]["seed"])).json()
    assert again["choices"] == first["choices"]


@asked
async def test_a_stream_adds_up_to_the_whole_answer(app):
    body = dict(prompt=["abab", "ba"], n=2, seed=5, max_tokens=40, logprobs=2, return_token_ids=True, echo=True,
                ignore_eos=True)  # fmt: skip
    whole = (await ask(app, **body)).json()
    chunks = events((await ask(app, **body, stream=True, stream_options={"include_usage": True})).text)
    *parts, last = chunks
    assert last["choices"] == [] and last["usage"] == whole["usage"] | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert all(part["usage"] is None for part in parts)
    assert len({part["id"] for part in chunks}) == 1
    for choice in whole["choices"]:
        own = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert [part["finish_reason"] for part in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
        assert own[-1]["text"] == ""
        seeds = [part["specjax"]["seed"] for part in parts if part["choices"][0] == own[-1]]
        assert seeds == [5 + choice["index"]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert sum((part["logprobs"][name] for part in own[:-1]), []) == choice["logprobs"][name]
        assert sum((part["token_ids"] for part in own[:-1]), []) == choice["token_ids"]
        assert len(choice["token_ids"]) == 40
        assert len(choice["logprobs"]["tokens"]) == 40 + (4 if choice["index"] < 2 else 2)  # the prompt's too


@asked
async def test_origins_of_a_stream_add_up_to_its_text(app):
    body = dict(prompt="abcabcabcabc" * 4, seed=5, max_tokens=90, temperature=0, ignore_eos=True, return_origins=True)
    text, pieces = "", []
    for chunk in events((await ask(app, **body, stream=True)).text):
        text += chunk["choices"][0]["text"]
        pieces += chunk["specjax"].get("pieces", [])
    expected = alone(body["prompt"], seed=5, max_new_tokens=90, temperature=0.0, ignore_eos=True)
    assert "".join(piece["text"] for piece in pieces) == text == expected.texts[0]
    assert {piece["origin"] for piece in pieces} <= set(expected.metrics[0].origins())
    assert "accepted" in {piece["origin"] for piece in pieces}
    last = chunk["specjax"]
    assert (last["rounds"], last["drafted"]) == (expected.metrics[0].num_steps, expected.metrics[0].num_draft_tokens)
    assert last["mean_acceptance_length"] == expected.metrics[0].mean_acceptance_length
    assert last["accepted"] == expected.metrics[0].num_accepted_tokens > 0


@asked
async def test_the_record_stands_under_the_names_that_aiperf_reads_if_there_is_one_choice(app):
    body = dict(prompt="abcabcabcabc" * 4, seed=5, max_tokens=60, temperature=0.0, ignore_eos=True)
    metrics = alone(body["prompt"], seed=5, max_new_tokens=60, temperature=0.0, ignore_eos=True).metrics[0]
    whole = (await ask(app, **body)).json()
    usage = events((await ask(app, **body, stream=True, stream_options={"include_usage": True})).text)[-1]
    found = whole["metrics"]["speculative_decoding"]
    assert usage["metrics"] == whole["metrics"]
    assert (found["num_spec_steps"], found["num_draft_tokens"]) == (metrics.num_spec_steps, metrics.num_draft_tokens)
    assert found["mean_acceptance_length"] == metrics.mean_acceptance_length
    histogram = found["acceptance_histogram"]
    assert len(histogram) == found["num_spec_tokens"] + 1 and sum(histogram) == metrics.num_spec_steps
    assert sum(metrics.acceptance_histogram) > sum(histogram), "some rounds should have drafted nothing"
    assert sum(n * count for n, count in enumerate(histogram)) == found["num_accepted_draft_tokens"] > 0
    assert "metrics" not in (await ask(app, **{**body, "n": 2, "max_tokens": 2})).json()


@asked
async def test_logprobs_of_prompt_and_answer_are_the_models(app):
    prompt = "The prompt is longer than one part of sixty-four tokens, so that it is read in several parts."
    answer = (await ask(app, prompt=prompt, seed=1, max_tokens=50, logprobs=3, echo=True, ignore_eos=True)).json()
    found = answer["choices"][0]["logprobs"]
    result = alone(prompt, seed=1, max_new_tokens=50, ignore_eos=True, logprobs=3)
    text = TOKENIZER.encode(prompt) + result.tokens[0]
    logits = LM(np.array([text]), LM.alloc_cache(1, len(text))).logits[0]
    laws = np.asarray(logits - np.logaddexp.reduce(np.asarray(logits), axis=-1, keepdims=True))
    expected = [laws[i, token] for i, token in enumerate(text[1:])]
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    np.testing.assert_allclose(found["token_logprobs"][1:], expected, rtol=1e-3, atol=1e-3)
    for i, top in enumerate(found["top_logprobs"][1:]):
        assert 3 <= len(top) <= 4 and max(top.values()) == pytest.approx(laws[i].max(), abs=1e-3)
        assert top[found["tokens"][i + 1]] == found["token_logprobs"][i + 1]
    assert answer["choices"][0]["text"].startswith(prompt)
    whole, places = answer["choices"][0]["text"], found["text_offset"]
    letters = [(token, place) for token, place in zip(found["tokens"], places, strict=True) if len(token) == 1]
    assert all(whole[place] == token for token, place in letters) and places != list(range(len(places)))


@asked
async def test_echo_without_new_tokens_scores_a_text(app):
    answer = (await ask(app, prompt=[[5, 6, 7]], max_tokens=0, logprobs=1, echo=True)).json()["choices"][0]
    assert len(answer["logprobs"]["token_logprobs"]) == 3 and answer["finish_reason"] == "length"
    assert answer["text"] == TOKENIZER.decode([5, 6, 7])


@asked
async def test_a_stop_string_is_cut_off_wherever_it_falls(app):
    for seed in range(3):
        options = dict(seed=seed, temperature=0.7, ignore_eos=True)
        free = alone("abcabc", max_new_tokens=40, **options)
        for begin, end in ((0, 1), (3, 7), (10, 14), (2, 20)):
            stop = free.texts[0][begin:end]
            body = dict(prompt="abcabc", max_tokens=40, stop=[stop, "never"], logprobs=0, **options)
            whole = (await ask(app, **body)).json()
            choice = whole["choices"][0]
            expected = alone("abcabc", max_new_tokens=40, stop=[stop], **options)
            assert choice["finish_reason"] == expected.finish_reasons[0] == "stop"
            assert choice["text"] == free.texts[0][: free.texts[0].index(stop)]
            assert whole["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"]) == len(expected.tokens[0])
            parts = events((await ask(app, **body, stream=True)).text)
            assert "".join(part["choices"][0]["text"] for part in parts) == choice["text"]


@given(
    text=strategies.text("ab", max_size=30),
    stops=strategies.lists(strategies.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=strategies.lists(strategies.integers(0, 30), max_size=8),
)
def test_held_text_is_the_text_before_the_first_stop_string(text, stops, cuts):
    """Tokens come one by one, and the engine ends the text with the token that completes a stop string."""
    places = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    held, so_far, passed = HeldText(stops), "", []
    for begin, end in itertools.pairwise(places):
        so_far += text[begin:end]
        stopped = any(stop in so_far for stop in stops)
        reason = "stop" if stopped else "length" if end == len(text) else None
        passed += held.push(text[begin:end], str(begin), reason)
        if stopped:
            break
    first = min((so_far.index(stop) for stop in stops if stop in so_far), default=len(so_far))
    assert "".join(piece for piece, _ in passed) == so_far[:first]


def test_held_text_lets_through_what_can_be_no_stop_string():
    held = HeldText(["END", "NEVER"])
    assert held.push("a b", "plain") == [("a b", "plain")]
    assert held.push(" EN", "plain") == [(" ", "plain")]
    assert held.push("T", "accepted") == [("EN", "plain"), ("T", "accepted")]
    assert held.push(" E", "bonus") == [(" ", "bonus")]
    assert held.push("NDLESS", "plain", "stop") == []
    held = HeldText(["END"])
    assert held.push("xEN", "plain") == [("x", "plain")]
    assert held.push("", "plain", "length") == [("EN", "plain")]
    early = HeldText(["aa"])  # a string that came too early to count, because of min_tokens, is text
    assert early.push("aa", "plain") == [("a", "plain")]
    assert early.push("b", "plain") == [("a", "plain"), ("b", "plain")]
    assert early.push("</s>", "plain", "stop") == [("</s>", "plain")]
    early = HeldText(["aa"])  # the early string is in the last token, and the limit ends the text
    assert early.push("baa", "plain", "length") == [("baa", "plain")]
    early = HeldText(["ab", "abc"])  # here the early string is held back, and a stop token ends the text
    assert early.push("ab", "plain") == []
    assert early.push("", "plain", "stop") == [("ab", "plain")]


@asked
async def test_every_parameter_reaches_the_engine(app):
    # With a neutral value for every option the cases share one program, and no value changes a bit.
    neutral = dict(top_k=0, top_p=1.0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)
    neutral |= dict(logit_bias={70: 0.0}, min_new_tokens=0)
    plain = alone("hello", seed=9, max_new_tokens=30, **neutral).tokens[0]
    cases = [
        (dict(temperature=0), dict(temperature=0.0)),
        (dict(top_k=3), dict(top_k=3)),
        (dict(min_p=0.2), dict(min_p=0.2)),
        (dict(top_p=0.4), dict(top_p=0.4)),
        (dict(presence_penalty=1.5), dict(presence_penalty=1.5)),
        (dict(frequency_penalty=-0.9, temperature=0), dict(frequency_penalty=-0.9, temperature=0.0)),
        (dict(repetition_penalty=1.6, temperature=0), dict(repetition_penalty=1.6, temperature=0.0)),
        (dict(logit_bias={"70": 100}), dict(logit_bias={70: 100.0})),
        (dict(stop_token_ids=[plain[9]]), dict(eos_token_id=[1, plain[9]])),
        (dict(stop_token_ids=[3], logit_bias={"1": 9}), dict(eos_token_id=[1, 3], logit_bias={1: 9.0})),
        (dict(stop_token_ids=[plain[9]], ignore_eos=True), dict(eos_token_id=[plain[9]])),
        (dict(min_tokens=25, logit_bias={"1": 9}), dict(min_new_tokens=25, logit_bias={1: 9.0})),
        (dict(ignore_eos=True, logit_bias={"1": 3}), dict(ignore_eos=True, logit_bias={1: 3.0})),
    ]
    for fields, options in cases:
        body = dict(prompt="hello", seed=9, max_tokens=30, return_token_ids=True, **fields)
        choice = (await ask(app, **body)).json()["choices"][0]
        expected = alone("hello", seed=9, max_new_tokens=30, **{**neutral, **options})
        assert choice["token_ids"] == expected.tokens[0], fields
        assert choice["finish_reason"] == expected.finish_reasons[0] and choice["prompt_token_ids"]
        assert expected.tokens[0] != plain, fields


@asked
async def test_a_prompt_that_came_before_is_found_and_salts_are_apart(app):
    prompt = "a long prompt " * 12
    found = []
    for salt in (None, None, "other"):
        answer = (await ask(app, prompt=prompt, max_tokens=2, cache_salt=salt)).json()
        found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert found == [0, 128, 0]
    several = (await ask(app, prompt="another long prompt " * 8, max_tokens=2, n=3)).json()
    assert several["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "a prompt counts once for its choices"


@asked
async def test_a_text_without_a_limit_has_sixteen_tokens_or_what_fits(app):
    body = dict(ignore_eos=True, temperature=0)
    assert (await ask(app, prompt="a", **body)).json()["usage"]["completion_tokens"] == 16
    several = await ask(app, prompt=["a", "a" * 245], **body)  # all have the limit of the longest prompt
    assert several.json()["usage"]["completion_tokens"] == 2 * 5


def test_importing_specjax_needs_no_server():
    import subprocess
    import sys

    code = "import sys, specjax, specjax.engine.engine; print([m for m in ('fastapi', 'uvicorn') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
    assert json.dumps(specjax.__version__)
