"""The server as a process: it says where it is, drains at SIGTERM and ends with exit code 0."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from commands import script
from hf_folders import TINY, write_hf
from server_process import serving
from small_tokenizers import byte_level

import specjax

CONFIG = {**TINY, "vocab_size": 259, "eos_token_id": 1, "max_position_embeddings": 4096}
FLAGS = ["--slots", "2", "--capacity", "4000", "--compilation-cache", "none"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of a tiny model over bytes."""
    path = tmp_path_factory.mktemp("served") / "model"
    write_hf(path, CONFIG, byte_level(add_bos=False))
    return path


def lines_of(address, body, found):
    """Reads a stream into ``found``."""
    with httpx.stream("POST", f"{address}/v1/completions", json={**body, "stream": True}, timeout=120) as answer:
        for line in answer.iter_lines():
            found += [line] if line else []


def test_sigterm_lets_streams_end_refuses_others_and_exits_with_0(folder):
    body = dict(prompt="ab", max_tokens=900, seed=2, ignore_eos=True, return_token_ids=True)
    with serving("--model", str(folder), "--served-model-name", "tiny", "other", *FLAGS) as process:
        address, found = process.address(), []
        reader = threading.Thread(target=lines_of, args=(address, body, found))
        reader.start()
        while len(found) < 5:
            time.sleep(0.01)
        process.popen.send_signal(signal.SIGTERM)
        while (health := httpx.get(f"{address}/health")).json()["status"] != "draining":
            time.sleep(0.01)
        assert health.status_code == 503
        refused = httpx.post(f"{address}/v1/completions", json=body)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        reader.join()
        assert process.ended() == 0, process.lines
    assert found[-1] == "data: [DONE]"
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in found[:-1]]
    ids = sum((choice.get("token_ids", []) for choice in choices), [])
    width = 6  # the last token and five drafted ones
    options = dict(drafter="ngram", block_width=width, capacity=4000, temperature=1.0, ignore_eos=True, seed=2)
    expected = specjax.generate(specjax.load(str(folder)), ["ab"], max_new_tokens=900, **options)
    assert ids == expected.tokens[0] and "".join(choice["text"] for choice in choices) == expected.texts[0]
    assert process.lines[-1].startswith("specjax serves tiny at http://127.0.0.1:")


LOADS_FOR_EVER = """
import sys, time
from specjax.server.lifetime import serve
from specjax.server.service import Service
serve(Service(lambda: time.sleep(600), ["slow"]), "127.0.0.1", int(sys.argv[1]), 30)
"""


def test_sigterm_while_the_model_loads_ends_the_process_at_once():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, "-c", LOADS_FOR_EVER, str(port)]) as process:
        try:
            while process.poll() is None:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"http://127.0.0.1:{port}/health").json() == {"status": "loading"}:
                        break
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=10) == 0
        finally:
            process.kill()


@pytest.mark.slow
def test_after_the_time_limit_streams_are_cut_off_with_an_error(folder):
    flags = [*FLAGS, "--shutdown-timeout", "0.2", "--api-key", "k", "--also", "none"]
    with serving("--model", str(folder), *flags) as process:
        address, found = process.address(), []
        body, key = dict(prompt="ab", max_tokens=3900, ignore_eos=True, stream=True), {"authorization": "Bearer k"}
        names = [entry["id"] for entry in httpx.get(f"{address}/v1/models", headers=key).json()["data"]]
        assert names == [str(folder), f"{folder}:none"]
        with httpx.stream("POST", f"{address}/v1/completions", json=body, headers=key) as answer:
            for line in answer.iter_lines():
                found += [line] if line else []
                if len(found) == 5:
                    process.popen.send_signal(signal.SIGTERM)
        assert process.ended() == 0, process.lines
    assert json.loads(found[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert found[-1] == "data: [DONE]"


@pytest.mark.parametrize(
    "args, word",
    [
        (["--model", "no/where/at/all"], "no/where/at/all"),
        (["--slots", "0"], "--slots"),
        (["--port", "99999"], "--port"),
        (["--api-key", ""], "empty"),
        (["--api-key-file", "no-such-file"], "no-such-file"),
        (["--also", "nobody"], "nobody"),
        (["--also", "model"], "--draft-model"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout"),
        (["--draft-model", "x"], "--draft-model is used only with"),
        (["--drafter", "none", "--num-speculative-tokens", "3"], "drafts nothing"),
    ],
)
def test_flags_that_can_not_be_used_are_refused_in_one_sentence(capsys, args, word):
    try:
        code = script("serve").main(["--port", "0", "--compilation-cache", "none", *args])
    except SystemExit as end:
        code = end.code
    assert code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ") and word in last


def test_an_address_that_is_taken_is_refused_in_one_sentence(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert script("serve").main(["--port", str(port), "--compilation-cache", "none"]) == 2
    assert "address" in capsys.readouterr().err.lower()


def test_keys_come_from_flags_files_and_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("one\n\ntwo\n")
    monkeypatch.setenv("SPECJAX_API_KEY", "three")
    args = script("serve").parse(["--api-key", "zero", "--api-key-file", str(file)])
    assert args.keys == ["zero", "one", "two", "three"]


@pytest.mark.slow
def test_the_default_model_answers_with_no_other_argument():
    with serving() as process:
        address = process.address(600)
        for temperature in (0, 0.8):
            body = dict(messages=[{"role": "user", "content": "What is the capital of France?"}], max_tokens=24, seed=3,
                        temperature=temperature)  # fmt: skip
            answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=300).json()
            again = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=300).json()
            assert again["choices"] == answer["choices"]
            assert temperature or "Paris" in answer["choices"][0]["message"]["content"]
            assert answer["specjax"]["accepted"] > 0
        process.popen.send_signal(signal.SIGINT)
        assert process.ended() == 0, process.lines
