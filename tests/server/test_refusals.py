"""What the server refuses, by name and with the right status, and what it lets in."""

import asyncio
import json

from served import Caller, client, running

from specjax.server import gate
from specjax.server.errors import RefusedError

PATH, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = dict(prompt="abc", max_tokens=240, ignore_eos=True, seed=3)


def run(coroutine):
    return asyncio.run(coroutine)


def test_keys_are_asked_for_and_keep_caches_apart():
    async def whole():
        async with running(keys=["one", "two", "drüben"]) as app, client(app) as nobody:
            for given in (None, "Bearer wrong", "one", "Basic one", "Bearer", "Bearer "):
                headers = {"authorization": given} if given else {}
                answer = await nobody.post(PATH, json=LONG, headers=headers)
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
                assert (await nobody.get("/v1/models", headers=headers)).status_code == 401
                assert (await nobody.get("/health", headers=headers)).status_code == 200
            prompt, cached = "the same words " * 12, []
            for key in ("one", "two", "two"):
                headers = {"Authorization": f"Bearer {key}"}
                answer = await nobody.post(PATH, json=dict(prompt=prompt, max_tokens=2), headers=headers)
                cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
            assert cached == [0, 0, 128]
            headers = {b"authorization": "Bearer drüben".encode()}
            assert (await nobody.get("/v1/models", headers=headers)).status_code == 200

    run(whole())


BAD = [
    (PATH, b"{", "no JSON"),
    (PATH, b"", "JSON object"),
    (PATH, b"[]", "body"),
    (PATH, b'"text"', "body"),
    (PATH, b'{"prompt": "\xff"}', None),
    (PATH, b'{"prompt": ' + b"[" * 100_000, None),
    (PATH, b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", None),
    (PATH, b'{"prompt": "a", "temperature": NaN}', "temperature"),
    (PATH, b'{"prompt": "a", "temperature": Infinity}', "temperature"),
    (PATH, b'{"prompt": "a\\ud800"}', "surrogate"),
    (PATH, b'{"prompt": "a", "stop": "\\ud800"}', "stop"),
    (PATH, b'{"prompt": "a", "model": "\\ud800"}', None),
    *(
        (PATH, json.dumps({"prompt": "a", **given}).encode(), word)
        for given, word in [
            (dict(prompt=""), "at least one character"),
            (dict(prompt=[]), "prompt"),
            (dict(prompt=[[]]), "prompt"),
            (dict(prompt=[1, "a"]), "prompt"),
            (dict(prompt=[1.5]), "prompt"),
            (dict(prompt=[10**6]), "vocabulary"),
            (dict(prompt=[-1]), "prompt"),
            (dict(prompt=None), "prompt"),
            (dict(max_tokens="5"), "max_tokens"),
            (dict(max_tokens=-1), "max_tokens"),
            (dict(max_tokens=10**12), "max_tokens"),
            (dict(max_tokens=300), "maximum context length"),
            (dict(prompt="a" * 300), "maximum context length"),
            (dict(temperature=-1), "temperature"),
            (dict(top_p=0), "top_p"),
            (dict(n=0), "n"),
            (dict(n=1000), "n"),
            (dict(prompt=["a"] * 200, n=2), "n"),
            (dict(stop=[""]), "stop"),
            (dict(stop=["a"] * 99), "stop"),
            (dict(seed=-1), "seed"),
            (dict(seed=1 << 64), "seed"),
            (dict(logprobs=99), "log-probabilities"),
            (dict(logit_bias={"x": 1}), "logit_bias"),
            (dict(logit_bias={"99999": 1}), "logit_bias"),
            (dict(logit_bias={str(i): 1 for i in range(2000)}), "logit_bias"),
            (dict(stop_token_ids=[10**6]), "stop_token_ids"),
            (dict(min_tokens=9, max_tokens=3), "min_tokens must be at most max_tokens"),
            (dict(stream_options={"include_usage": True}), "stream_options"),
            (dict(suffix="b"), "suffix"),
            (dict(best_of=3), "best_of"),
            (dict(guided_regex="a*"), "guided_regex"),
        ]
    ),
    *(
        (CHAT, json.dumps({"messages": [{"role": "user", "content": "a"}], **given}).encode(), word)
        for given, word in [
            (dict(messages=[]), "messages"),
            (dict(messages="hi"), "messages"),
            (dict(messages=[{"content": "a"}]), "messages"),
            (dict(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]), "text"),
            (dict(messages=[{"role": "assistant", "tool_calls": [{"id": "1"}]}]), "tool_calls"),
            (dict(messages=[{"role": "user", "content": "a" * 400}]), "maximum context length"),
            (dict(tools=[{"type": "function", "function": {"name": "f"}}]), "tools"),
            (dict(response_format={"type": "json_object"}), "response_format"),
            (dict(response_format={"type": "json_schema", "json_schema": {}}), "response_format"),
            (dict(top_logprobs=2), "top_logprobs"),
            (dict(logprobs=True, top_logprobs=30), "log-probabilities"),
            (dict(max_tokens=0), "max_tokens"),
            (dict(echo=True), "echo"),
            (dict(chat_template_kwargs={"messages": []}), "chat_template_kwargs"),
        ]
    ),
    ("/tokenize", b"{}", "prompt"),
    ("/detokenize", b'{"tokens": ["a"]}', "tokens"),
    ("/detokenize", b'{"tokens": [2147483648]}', "tokens must be ids from 0 to"),
]


def test_what_can_not_be_met_is_refused_by_name():
    async def whole():
        async with running() as app, client(app, raises=True, headers={"content-type": "application/json"}) as one:
            for path, body, word in BAD:
                answer = await one.post(path, content=body)
                error = answer.json().get("error")
                assert answer.status_code in (400, 404), (body[:99], answer.status_code, error)
                assert set(error) == {"message", "type", "param", "code"} and error["message"]
                assert word is None or word in error["message"] or word == error["param"], (body[:99], error)
                if word == "maximum context length":
                    assert error["code"] == "context_length_exceeded"
                    long = "messages" if path == CHAT else "prompt"
                    assert error["param"] == ("max_tokens" if b'"max_tokens": 300' in body else long)
            stats = app.state.service.engine.stats()
            assert (stats.running, stats.waiting, app.state.service.running) == (0, 0, 0)
            assert (await one.post(PATH, content=b'{"prompt": "a", "model": "other"}')).status_code == 404
            assert (await one.get(PATH)).status_code == 405

    run(whole())


def test_what_changes_nothing_is_let_in():
    harmless = dict(
        tools=[], tool_choice="none", response_format={"type": "text"}, user="me", store=False, metadata={"a": "b"},
        service_tier="auto", parallel_tool_calls=True, best_of=1, unheard_of=1, stop=None, seed=None, logit_bias={},
    )  # fmt: skip

    async def whole():
        async with running() as app, client(app) as one:
            message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
            answer = await one.post(CHAT, json=dict(messages=[message], max_tokens=4, **harmless))
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["prompt_tokens"] == len("[user]a\nb[a]")

    run(whole())


def test_a_body_that_is_too_large_is_refused_before_it_is_read(monkeypatch):
    monkeypatch.setattr(gate, "MAX_BODY", 1000)

    async def parts():
        for _ in range(50):
            yield b" " * 100

    async def whole():
        async with running() as app, client(app) as one:
            for content in (b" " * 1001, parts()):
                answer = await one.post(PATH, content=content)
                assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"
            assert (await one.post(PATH, json=dict(prompt="a"))).status_code == 200
            announced = Caller(app, PATH, dict(prompt="a"), headers=[(b"content-length", b"1001")])
            await announced.task  # refused for what the header says
            assert announced.status == 413

    run(whole())


def test_an_error_with_a_lone_surrogate_can_be_sent():
    assert b"\\ud800" in RefusedError(400, "a \ud800").response().body
