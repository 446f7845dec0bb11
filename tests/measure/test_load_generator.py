"""The load generator: its definitions, its ways to an engine, and the script."""

import asyncio
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
from commands import script
from served import LM, engine, real_server

from specjax.measure.benchmark.table import Table
from specjax.measure.load import compare
from specjax.measure.load import drive as drive_module
from specjax.measure.load.compare import Load
from specjax.measure.load.drive import Request, drive
from specjax.measure.load.figures import Seen, figures
from specjax.measure.load.names import with_names
from specjax.measure.load.ways import OverHTTP, ThroughTheApp
from specjax.server.service import Service

LOAD = Load(count=5, max_new_tokens=12, temperature=0.7, seed=3, streams=2)
PROMPTS = [[65, 66, 67] * 5, [70, 71]]


def test_figures_follow_the_definitions():
    one = Seen(began=10.0, arrivals=[10.5, 10.7, 11.5], prompt_tokens=7, new_tokens=6, text="abcdef")
    two = Seen(began=10.0, arrivals=[10.1], prompt_tokens=3, new_tokens=1, text="a")
    found = figures([one, two, Seen(10.0, [], 0, 0, "", "status 429")], seconds=2.0)
    assert (found["completed"], found["failed"], found["duration"]) == (2, 1, 2.0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (10, 7)
    assert (found["request_throughput"], found["output_throughput"], found["total_token_throughput"]) == (1, 3.5, 8.5)
    assert found["mean_ttft_ms"] == pytest.approx(300) and found["median_ttft_ms"] == pytest.approx(300)
    assert found["mean_tpot_ms"] == pytest.approx(200), "one second for the five tokens after the first text"
    assert found["mean_itl_ms"] == pytest.approx(500) and found["p99_itl_ms"] == pytest.approx(200 + 0.99 * 600)
    assert found["mean_e2el_ms"] == pytest.approx(800)
    with pytest.raises(ValueError, match="status 429"):
        figures([Seen(10.0, [], 0, 0, "", "status 429")], 1.0)


def driven(count, streams, rate):
    """The times at which requests were sent, the most that ran at once, and what was seen."""
    sent, running, most = [], 0, 0

    async def ask(request):
        nonlocal running, most
        sent.append((request.seed, time.perf_counter()))
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001 * (request.seed % 3))
        running -= 1
        return lambda: Seen(0.0, [1.0], 1, 1, str(request.seed))

    requests = [Request("a", 1, 0.0, seed) for seed in range(count)]
    seen, _ = asyncio.run(drive(requests, ask, streams, rate, seed=1))
    assert [one.text for one in seen] == [str(seed) for seed in range(count)]
    assert [seed for seed, _ in sent] == list(range(count))
    return [moment for _, moment in sent], most


def test_streams_send_the_next_request_when_one_ends():
    _, most = driven(count=12, streams=3, rate=None)
    assert most == 3


def test_rates_send_at_random_times_whose_mean_is_the_rate(monkeypatch):
    """The clock stands still, so each request waits for its own moment."""
    moments = []

    async def sleep(seconds):
        moments.append(seconds)

    monkeypatch.setattr(drive_module, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    monkeypatch.setattr(drive_module, "asyncio", SimpleNamespace(sleep=sleep, gather=asyncio.gather))
    driven(count=300, streams=None, rate=2000.0)
    gaps = np.diff(moments)
    assert moments[0] == 0 and len(gaps) == 299 and gaps.min() >= 0
    assert abs(gaps.mean() * 2000 - 1) < 0.2 and abs(gaps.std() * 2000 - 1) < 0.2, "exponential gaps"


def test_both_ways_to_an_engine_give_the_same_texts_and_stand_side_by_side(tmp_path):
    lm = with_names(LM)
    assert lm.tokenizer.decode([0, 17]) == " 0 17"
    table = Table({}, tmp_path / "load.json")
    asyncio.run(compare.engine_and_app(lambda: engine(lm), PROMPTS, LOAD, 1, "K = 3", table))
    written = json.loads((tmp_path / "load.json").read_text())
    assert [row["name"] for row in written["rows"]] == [
        f"{way}, K = 3, 2 streams, a token" for way in ("engine", "app")
    ]
    for row in written["rows"]:
        assert (row["completed"], row["failed"], row["total_output_tokens"]) == (5, 0, 60)
        assert row["total_input_tokens"] == 3 * 15 + 2 * 2 and row["mean_ttft_ms"] <= row["mean_e2el_ms"]
    [compared] = written["app_over_engine"].values()
    assert compared["same_texts"] and compared["ratio"] > 0


def test_http_sees_the_texts_of_the_application_and_why_requests_fail(capsys, tmp_path):
    service = Service(engine, ["tiny"], ["secret"])
    with real_server(service) as address:

        async def whole():
            way = OverHTTP(address, "tiny", "secret")
            found, same = await compare.best({"http": way, "again": way}, LOAD.requests(PROMPTS), LOAD, 1)
            assert same and found["http"]["total_output_tokens"] == 60
            refused = (await OverHTTP(address, "tiny", None)(LOAD.requests(PROMPTS)[0]))()
            assert "status 401" in refused.error and refused.arrivals == []

        asyncio.run(whole())
        flags = ["--streams", "2", "--num-prompts", "4", "--max-new-tokens", "5", "--repeats", "1"]
        flags = ["--address", address, "--api-key", "secret", "--prompt-length", "9", *flags]
        assert script("load_server").main(flags) == 2, "ids below 32000 are outside of this vocabulary"
        (tmp_path / "prompts").write_text("abc abc abc\n")
        flags = [*flags, "--prompts", str(tmp_path / "prompts"), "--json", str(tmp_path / "load.json")]
        assert script("load_server").main(flags) == 0
    assert "outside the vocabulary" in capsys.readouterr().err
    [row] = json.loads((tmp_path / "load.json").read_text())["rows"]
    assert (row["name"], row["total_output_tokens"]) == ("tiny, 2 streams, a token", 20)


def test_an_error_in_the_stream_is_an_error_of_the_request():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for body in (
            b'data: {"choices":[{"text":"a"}]}\n',
            b'\ndata: {"error":{"message":"over"}}\n\ndata: [DONE]\n\n',
        ):
            await send({"type": "http.response.body", "body": body, "more_body": True})

    seen = asyncio.run(ThroughTheApp(app, "x")(Request("a", 1, 0.0, 0)))()
    assert seen.error == "over" and seen.text == "a" and len(seen.arrivals) == 1


@pytest.mark.parametrize(
    "flags, word",
    [
        (["--address", "http://x", "--slots", "4"], "--slots"),
        (["--streams", "2", "--rates", "1"], "leave one out"),
        (["--rates", "0"], "--rates"),
        (["--draft", "tiny"], "--target"),
        (["--target", "tiny", "--drafter", "ngram"], "--drafter"),
        (["--target", "tiny", "--prompts", "x"], "--prompts"),
        (["--served-model", "x"], "--address"),
    ],
)
def test_flags_that_contradict_each_other_are_refused_in_one_sentence(capsys, flags, word):
    with pytest.raises(SystemExit) as end:
        script("load_server").main(flags)
    assert end.value.code == 2 and word in capsys.readouterr().err
