"""Many clients at once, some of which leave or send nonsense: each answer is that of its seed, and nothing is lost."""

import asyncio
import json
import random
import resource

import pytest
from served import Caller, alone, client, engine, events, running

KINDS = [
    {}, {"temperature": 0}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"presence_penalty": 0.6},
    {"repetition_penalty": 1.2}, {"logit_bias": {"70": 2}}, {"ignore_eos": True}, {"stop": ["a", "b"]}, {"logprobs": 1},
]  # fmt: skip
JSON = {"content-type": "application/json"}
NONSENSE = [b"", b"{", b'{"prompt": 5}', b'{"prompt": "a", "max_tokens": 999}', b'{"prompt": "a", "n": "x"}']


def requests(count, seed=0):
    """Random requests: a body, and what its client does."""
    rng = random.Random(seed)
    for i in range(count):
        common = "The beginning that many prompts have, longer than a page of the cache is, to be shared. "
        prompt = common * rng.randrange(2) + "".join(rng.choices("abc ", k=rng.randrange(1, 60)))
        body = dict(prompt=prompt, seed=1000 + i, max_tokens=rng.choice([1, 5, 20, 60]), **rng.choice(KINDS))
        yield body, rng.choices(["read", "stream", "leave", "nonsense"], [4, 4, 2, 1])[0], rng.random()


async def one_client(app, work, answers):
    """Takes requests from an iterator that all clients share, until there are none left."""
    async with client(app) as one:
        for body, act, share in work:
            if act == "nonsense":
                content = NONSENSE[int(share * len(NONSENSE))]
                answer = await one.post("/v1/completions", content=content, headers=JSON)
                assert answer.status_code == 400, answer.text
            elif act == "leave":
                caller = Caller(app, "/v1/completions", {**body, "stream": share < 0.5})
                await asyncio.sleep(share * 0.2)
                caller.gone.set()
                await caller.task
            else:
                answer = await one.post("/v1/completions", json={**body, "stream": act == "stream"})
                assert answer.status_code == 200, answer.text
                if act == "read":
                    choice = answer.json()["choices"][0]
                    text, reason = choice["text"], choice["finish_reason"]
                else:
                    parts = [event["choices"][0] for event in events(answer.text)]
                    text, reason = "".join(part["text"] for part in parts), parts[-1]["finish_reason"]
                answers.append((body, text, reason))


def expected(body):
    """The text and the finish reason that ``generate`` gives."""
    given = dict(body)
    prompt, limit, stop = given.pop("prompt"), given.pop("max_tokens"), given.get("stop", [])
    given["logit_bias"] = {int(token): amount for token, amount in given.pop("logit_bias", {}).items()} or None
    given["temperature"] = float(given.get("temperature", 1.0))
    result = alone(prompt, max_new_tokens=limit, **given)
    text, reason = result.texts[0], result.finish_reasons[0]
    found = [text.index(one) for one in stop if one in text]
    return text[: min(found)] if found else text, reason


@pytest.mark.parametrize("count", [24, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_crowd_gets_the_answers_of_its_seeds_and_leaves_nothing_behind(count):
    async def whole():
        async with running(lambda: engine(max_waiting=64)) as app:
            service, answers, work = app.state.service, [], requests(count)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            await asyncio.gather(*(one_client(app, work, answers) for _ in range(16)))
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            while (stats := service.engine.stats()).running or stats.waiting:
                await asyncio.sleep(0.01)
            assert stats.free_kv_tokens == stats.kv_tokens
            assert service.running == 0 and not service.answers
            return answers, grown

    answers, grown = asyncio.run(whole())
    assert len(answers) > count * 0.6
    for body, text, reason in answers:
        assert (text, reason) == expected(body), json.dumps(body)
    assert grown < 300_000, f"{grown} kB more than before the requests"
