"""The clients that people have, against the application behind uvicorn."""

import asyncio
import itertools

import pytest
from served import TOKENIZER, alone, engine, real_server

from specjax.server.service import Service

openai = pytest.importorskip("openai")
MESSAGES = [{"role": "user", "content": "abcabc"}]
IDS = TOKENIZER.apply_chat_template(MESSAGES)


@pytest.fixture(scope="module")
def address():
    with real_server(Service(engine, ["tiny"], ["secret"])) as found:
        yield found


def client(address, kind=openai.OpenAI, key="secret"):
    return kind(base_url=f"{address}/v1", api_key=key, max_retries=0)


def test_openai_python_reads_completions(address):
    made = client(address).completions.create(
        model="tiny", prompt=["ab", "ba"], n=2, seed=7, max_tokens=20, logprobs=2, stop=["z"], temperature=0.7
    )
    for index, choice in enumerate(made.choices):
        expected = alone(("ab", "ba")[index // 2], seed=7 + index, max_new_tokens=20, temperature=0.7, stop=["z"])
        assert choice.text == expected.texts[0].split("z")[0] and choice.finish_reason == expected.finish_reasons[0]
        assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == len(expected.tokens[0])
    assert made.usage.prompt_tokens_details.cached_tokens == 0 and made.specjax["seed"] == 7


def test_openai_python_reads_chats(address):
    made = client(address).chat.completions.create(
        model="tiny", messages=MESSAGES, n=2, seed=5, max_tokens=15, logprobs=True, top_logprobs=2,
        extra_body={"top_k": 20, "return_token_ids": True},
    )  # fmt: skip
    for index, choice in enumerate(made.choices):
        expected = alone(IDS, seed=5 + index, max_new_tokens=15, top_k=20)
        assert choice.message.content == expected.texts[0] and choice.token_ids == expected.tokens[0]
        assert len(choice.logprobs.content) == len(expected.tokens[0])
        assert len(choice.logprobs.content[0].top_logprobs) == 2


def test_openai_python_reads_streams(address):
    def streamed(**how):
        return client(address).chat.completions.create(
            model="tiny", messages=MESSAGES, seed=5, max_tokens=30, stream=True, **how
        )

    parts = list(streamed(stream_options={"include_usage": True}))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    expected = alone(IDS, seed=5, max_new_tokens=30)
    assert text == expected.texts[0] and parts[-1].usage.completion_tokens == len(expected.tokens[0])
    with streamed() as early:  # a client that leaves
        assert len(list(itertools.islice(early, 3))) == 3
    ask = dict(model="tiny", messages=MESSAGES, seed=5, max_tokens=30, stop=[text[8:10]])
    with client(address).chat.completions.stream(**ask) as helper:
        assert helper.get_final_completion().choices[0].message.content == text[: text.index(text[8:10])]


def test_openai_python_reads_many_at_once(address):
    async def whole():
        async with client(address, openai.AsyncOpenAI) as one:

            async def ask(seed):
                stream = await one.completions.create(model="tiny", prompt="ab", seed=seed, max_tokens=25, stream=True)
                return "".join([part.choices[0].text async for part in stream])

            return await asyncio.gather(*(ask(seed) for seed in range(12)))

    texts = asyncio.run(whole())
    assert texts == [alone("ab", seed=seed, max_new_tokens=25).texts[0] for seed in range(12)]


def test_openai_python_raises_its_own_errors(address):
    ask = dict(model="tiny", messages=MESSAGES)
    with pytest.raises(openai.AuthenticationError):
        client(address, key="wrong").models.list()
    with pytest.raises(openai.NotFoundError) as caught:
        client(address).chat.completions.create(**{**ask, "model": "gpt-4"})
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        client(address).chat.completions.create(**ask, max_tokens=9999)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        client(address).chat.completions.create(**ask, tools=[{"type": "function", "function": {"name": "f"}}])
    assert [model.id for model in client(address).models.list()] == ["tiny"]
    assert client(address).models.retrieve("tiny").id == "tiny"


@pytest.mark.slow
def test_langchain_chats(address):
    langchain = pytest.importorskip("langchain_openai")
    options = dict(base_url=f"{address}/v1", api_key="secret", model="tiny", seed=5, temperature=1.0)
    chat = langchain.ChatOpenAI(**options, max_tokens=15)
    expected = alone(IDS, seed=5, max_new_tokens=15).texts[0]
    assert chat.invoke([("user", "abcabc")]).content == expected
    assert "".join(part.content for part in chat.stream([("user", "abcabc")])) == expected
    completion = langchain.OpenAI(**options, max_tokens=15)
    assert completion.invoke("ab") == alone("ab", seed=5, max_new_tokens=15).texts[0]


@pytest.mark.slow
def test_litellm_reads_answers_streams_and_errors(address):
    litellm = pytest.importorskip("litellm")
    given = dict(
        model="openai/tiny", api_base=f"{address}/v1", api_key="secret", messages=MESSAGES, seed=5, max_tokens=15
    )
    expected = alone(IDS, seed=5, max_new_tokens=15).texts[0]
    assert litellm.completion(**given).choices[0].message.content == expected
    parts = litellm.completion(**given, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected
    with pytest.raises(litellm.BadRequestError, match="maximum context length"):
        litellm.completion(**{**given, "max_tokens": 9999})
