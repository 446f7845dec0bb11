"""The counts of /metrics are those of the answers."""

import asyncio
import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from served import client, engine, running

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"


async def samples(one):
    text = (await one.get("/metrics")).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny", sample
            found[sample.name, *sorted(labels.values())] = sample.value
    return found


def test_metrics_add_up_to_the_answers():
    async def whole():
        async with running() as app, client(app) as one:
            before = await samples(one)
            assert before["specjax:prompt_tokens_total",] == 0 == before["specjax:request_success_total", "length"]
            answers = [
                (await one.post("/v1/completions", json=dict(
                    prompt="abcabc" * 24, max_tokens=60, seed=seed, temperature=0.1, ignore_eos=True
                ))).json()
                for seed in range(4)
            ]  # fmt: skip
            after = await samples(one)
            get = lambda name, *labels: after[f"specjax:{name}", *labels]  # noqa: E731
            usage = [answer["usage"] for answer in answers]
            cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usage)
            assert get("generation_tokens_total") == sum(u["completion_tokens"] for u in usage) == 240
            assert get("prompt_tokens_total") == get("prefix_cache_queries_total") == 4 * 144
            assert get("prefix_cache_hits_total") == cached > 0
            drafted = sum(answer["specjax"]["drafted"] for answer in answers)
            accepted = sum(answer["specjax"]["accepted"] for answer in answers)
            assert get("spec_decode_num_draft_tokens_total") == drafted >= get("spec_decode_num_drafts_total") > 0
            assert get("spec_decode_num_accepted_tokens_total") == accepted > 0
            per_place = [get("spec_decode_num_accepted_tokens_per_pos_total", str(i)) for i in range(3)]
            assert sum(per_place) == accepted and per_place == sorted(per_place, reverse=True)
            assert get("request_success_total", "length") == 4
            assert get("num_requests_running") == get("num_requests_waiting") == get("kv_cache_usage_perc") == 0
            assert get("time_to_first_token_seconds_count") == get("e2e_request_latency_seconds_count") == 4
            assert get("request_queue_time_seconds_count") == 4
            assert get("inter_token_latency_seconds_count") == 236
            first, last = get("time_to_first_token_seconds_sum"), get("e2e_request_latency_seconds_sum")
            assert 0 < first < first + get("inter_token_latency_seconds_sum") < last + 1

    asyncio.run(whole())


def test_each_model_has_metrics_of_its_own():
    def other(first):
        made = engine(first.lm)
        made.warmup = lambda: None
        return made

    async def whole():
        async with running(others={"other": other}) as app, client(app) as one:
            for model, count in (("tiny", 7), ("tiny:other", 5)):
                body = dict(prompt="abc", max_tokens=count, model=model, ignore_eos=True)
                assert (await one.post("/v1/completions", json=body)).status_code == 200
            text = (await one.get("/metrics")).text
            for name in ("generation_tokens_total", "inter_token_latency_seconds_count"):
                found = re.findall(rf'^specjax:{name}{{model_name="(.*)"}} (.*)$', text, re.MULTILINE)
                less = name.startswith("inter")
                assert found == [("tiny", str(7.0 - less)), ("tiny:other", str(5.0 - less))]

    asyncio.run(whole())


def test_the_dashboard_draws_metrics_that_are_there():
    async def whole():
        async with running() as app, client(app) as one:
            names = {name for name, *_ in await samples(one)}
            panels = json.loads(DASHBOARD.read_text())["panels"]
            queries = [target["expr"] for panel in panels for target in panel["targets"]]
            assert len(queries) > 10
            for query in queries:
                used = set(re.findall(r"specjax:\w+", query))
                assert used and used <= names, (query, used - names)
            for part in ("time_to_first_token", "inter_token", "per_pos", "kv_cache_usage", "prefix_cache_hits"):
                assert any(part in query for query in queries), part

    asyncio.run(whole())
