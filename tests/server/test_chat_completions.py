"""Chat completions through the application, and the paths beside the generating ones."""

import asyncio

import pytest
from openapi_spec_validator import validate
from served import LM, TOKENIZER, alone, client, events, running

import specjax
from specjax.server import shape
from specjax.server.answer import Token
from specjax.server.token_text import TokenText

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "abcabc"}]


def run(coroutine):
    return asyncio.run(coroutine)


def test_a_chat_is_what_generate_gives_for_its_seed():
    async def whole():
        async with running() as app, client(app) as one:
            body = dict(messages=MESSAGES, seed=40, n=2, max_completion_tokens=24, top_p=0.9, logprobs=True,
                        top_logprobs=2)  # fmt: skip
            answer = (await one.post(PATH, json=body)).json()
            for index, choice in enumerate(answer["choices"]):
                ids = TOKENIZER.apply_chat_template(MESSAGES)
                expected = alone(ids, seed=40 + index, max_new_tokens=24, top_p=0.9, logprobs=2)
                assert choice["message"] == {"role": "assistant", "content": expected.texts[0], "refusal": None}
                assert choice["finish_reason"] == expected.finish_reasons[0]
                tokens = choice["logprobs"]["content"]
                assert [token["logprob"] for token in tokens] == pytest.approx(expected.logprobs[0], rel=1e-3, abs=1e-4)
                printed = [t for t, i in zip(tokens, expected.tokens[0], strict=True) if TOKENIZER.prints(i)]
                data = b"".join(bytes(token["bytes"]) for token in printed)
                assert data.decode(errors="replace") == choice["message"]["content"]
                assert all(len(token["top_logprobs"]) == 2 for token in tokens)
            assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")

    run(whole())


@pytest.mark.parametrize("usage", [True, False])
def test_a_chat_streams_in_the_order_that_clients_expect(usage):
    async def whole():
        async with running() as app, client(app) as one:
            body = dict(messages=MESSAGES, seed=3, n=2, max_tokens=20, logprobs=True, return_token_ids=True)
            whole = (await one.post(PATH, json=body)).json()
            options = {"stream_options": {"include_usage": True}} if usage else {}
            parts = events((await one.post(PATH, json={**body, "stream": True, **options})).text)
            assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"]
            if usage:
                last = parts.pop()
                assert last["choices"] == []
                assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
                assert all(part["usage"] is None for part in parts)
            else:
                assert all("usage" not in part for part in parts)
            for choice in whole["choices"]:
                first, *middle, end = [
                    part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]
                ]
                assert first["delta"] == {"role": "assistant", "content": ""} and first["finish_reason"] is None
                assert "".join(part["delta"]["content"] for part in middle) == choice["message"]["content"]
                assert all(part["finish_reason"] is None and "role" not in part["delta"] for part in middle)
                assert sum((part["logprobs"]["content"] for part in middle), []) == choice["logprobs"]["content"]
                assert sum((part["token_ids"] for part in middle), []) == choice["token_ids"]
                assert end["delta"] == {} and end["finish_reason"] == choice["finish_reason"]

    run(whole())


def test_characters_that_fall_across_rounds_are_whole():
    """The model is made to write the three bytes of one character in any order."""
    ids = TOKENIZER.encode("€")
    bias = {str(token): 30 for token in ids}

    async def whole():
        async with running() as app, client(app) as one:
            for seed in range(4):
                body = dict(messages=MESSAGES, seed=seed, max_tokens=50, logit_bias=bias, ignore_eos=True)
                content = (await one.post(PATH, json=body)).json()["choices"][0]["message"]["content"]
                parts = events((await one.post(PATH, json={**body, "stream": True})).text)
                assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == content
                assert any(len(letter.encode()) == 3 for letter in content.replace("\N{REPLACEMENT CHARACTER}", ""))

    run(whole())


def test_the_turn_of_the_assistant_may_be_left_closed():
    async def whole():
        async with running() as app, client(app) as one:
            counts = [
                (await one.post(PATH, json=dict(messages=MESSAGES, max_tokens=1, add_generation_prompt=opened))).json()
                for opened in (True, False)
            ]
            assert counts[0]["usage"]["prompt_tokens"] - counts[1]["usage"]["prompt_tokens"] == len("[a]")
            body = dict(messages=MESSAGES, ignore_eos=True)  # without a limit a chat goes on as long as there is room
            usage = (await one.post(PATH, json=body)).json()["usage"]
            assert usage["total_tokens"] == 250

    run(whole())


def test_texts_become_tokens_and_come_back():
    async def whole():
        async with running() as app, client(app) as one:
            for body, ids in (
                (dict(prompt="héllo"), TOKENIZER.encode("héllo")),
                (dict(messages=MESSAGES), TOKENIZER.apply_chat_template(MESSAGES)),
                (dict(messages=MESSAGES, add_generation_prompt=False),
                 TOKENIZER.apply_chat_template(MESSAGES, add_generation_prompt=False)),
            ):  # fmt: skip
                found = (await one.post("/tokenize", json=body)).json()
                assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), 250)
                assert len(found["token_strs"]) == len(ids)
            back = (await one.post("/detokenize", json=dict(tokens=TOKENIZER.encode("héllo")))).json()
            assert back == {"prompt": "héllo"}

    run(whole())


def test_tokens_have_names_and_bytes():
    text = TokenText(TOKENIZER)
    euro = TOKENIZER.encode("€ a")
    assert b"".join(map(text.bytes_of, euro)) == "€ a".encode()
    assert text.name_of(euro[0]) == "bytes:\\xe2" and text.name_of(euro[-1]) == "a"
    assert text.name_of(1) == "</s>"


def test_a_log_probability_that_json_has_no_number_for_is_openais_least():
    least, token = -9999.0, Token(1, 0, float("-inf"), [(1, -0.5), (2, float("-inf"))])
    assert shape.finite(token.logprob) == least and shape.likeliest(token) == [(1, -0.5), (2, least)]


def test_the_model_is_listed_under_all_its_names():
    async def whole():
        async with running() as app, client(app) as one:
            app.state.service.names[:] = ["tiny", "org/other"]
            listed = (await one.get("/v1/models")).json()
            assert [model["id"] for model in listed["data"]] == ["tiny", "org/other"]
            assert (await one.get("/v1/models/org/other")).json()["max_model_len"] == 250
            assert (await one.get("/v1/models/none")).json()["error"]["code"] == "model_not_found"
            answer = await one.post(PATH, json=dict(messages=MESSAGES, max_tokens=1, model="org/other"))
            assert answer.json()["model"] == "tiny"
            assert (await one.get("/version")).json() == {"version": specjax.__version__}

    run(whole())


def test_the_description_of_the_interface_is_valid():
    async def whole():
        async with running(ready=False) as app, client(app) as one:
            document = (await one.get("/openapi.json")).json()
            validate(document)
            for path in ("/v1/completions", PATH, "/tokenize", "/detokenize"):
                assert "422" not in document["paths"][path]["post"]["responses"]
                assert "400" in document["paths"][path]["post"]["responses"]

    run(whole())
    assert LM.tokenizer is TOKENIZER
