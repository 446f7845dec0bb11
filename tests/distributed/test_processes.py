"""One model over two processes: the tokens of one process, and no process left behind, whatever ends."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from processes_cases import DRAFTERS, ENGINE, LM, OPTIONS, PROMPTS, ROWS, SAMPLED

import specjax
from specjax.distributed.watch import EXIT

ROOT = Path(__file__).resolve().parents[2]
WORKER = ROOT / "tests" / "support" / "processes_worker.py"


class Rank:
    """One process, and the lines that it has printed."""

    def __init__(self, *args):
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support", os.environ.get("PYTHONPATH", ""))))
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
        command = [sys.executable, str(WORKER), *map(str, args)]
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout), daemon=True)
        self._reader.start()

    def found(self):
        """What the process has said so far."""
        return [json.loads(line) for line in list(self.lines) if line.startswith("{")]

    def running(self, seconds=240):
        """Waits until the process says that requests run."""
        end = time.monotonic() + seconds
        while not any(one["by"] == "running" for one in self.found()):
            assert self.process.poll() is None and time.monotonic() < end, self.text()
            time.sleep(0.05)

    def ended(self, seconds):
        """The exit code, within so many seconds."""
        code = self.process.wait(seconds)
        self._reader.join()
        return code

    def text(self):
        return "".join(self.lines)


@contextlib.contextmanager
def ranks(size, *way):
    """The processes of a replica for a ``with`` block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [Rank(rank, size, port, *way) for rank in range(size)]
    try:
        yield started
    finally:
        for rank in started:
            rank.process.kill()
            rank.process.wait()


def alone(name, prompts, **options):
    return specjax.generate(LM, prompts, drafter=DRAFTERS[name], num_speculative_tokens=3, **options).tokens


@pytest.mark.slow
@pytest.mark.parametrize("size, way", [(2, ()), (4, ()), (2, ("parts",))])
def test_processes_have_the_tokens_of_one(size, way):
    """By generate, stream and the engine; plain, with prompt lookup and with a draft model.

    Of a mesh in two parts, each process holds its own rows alone.
    """
    with ranks(size, *way) as every:
        for rank in every:
            assert rank.ended(400) == 0, rank.text()
    found = [one for one in every[0].found() if one["by"] != "end"]
    assert [one["by"] for one in found] == ["generate"] * 3 + ["stream"] + ["engine"] * 3
    sizes = dict(block_width=None, capacity=ENGINE["capacity"] + 64)
    for one in found:
        if one["by"] == "generate":
            expected = alone(one["drafter"], PROMPTS, **{k: v for k, v in OPTIONS.items() if "spec" not in k})
        elif one["by"] == "stream":
            expected = alone(one["drafter"], PROMPTS[:1], **{k: v for k, v in OPTIONS.items() if "spec" not in k})[0]
        else:
            sizes["block_width"] = 1 if one["drafter"] == "plain" else 4
            rows = [dict(row) for row in (*ROWS, SAMPLED, {**SAMPLED, "seed": 7})]
            expected = [alone(one["drafter"], [row.pop("prompt")], **sizes, **row)[0] for row in rows]
        assert one["tokens"] == expected, one
    for rank in every[1:]:
        assert [one for one in rank.found() if one["by"] in ("generate", "stream")] == found[:4]


# What goes wrong, the signal that rank 0 or 1 gets, what each rank says (None: the rank is killed or stopped), and the
# seconds in which the processes have ended. The stated times are those of the fixture's worker: silence 3, stuck 4.
ENDS = {
    "a killed follower": ("go", (1, signal.SIGKILL), "rank 1 .* has gone without a good-bye", None, 5),
    "a killed leader": ("go", (0, signal.SIGKILL), None, "rank 0 .* has gone without a good-bye", 5),
    "a stopped follower": ("silent", (1, signal.SIGSTOP), "rank 1 .* was not heard for 3 seconds", None, 10),
    "other tokens": ("lie", None, "rank 1 .* has other results than rank 0 in call", "has ended: rank 1 .* other", 20),
    "a hanging follower": ("hang", None, "rank 1 .* is stuck: in 4 seconds .* after call 19", "has ended: rank 1", 20),
    "a failing follower": ("fail", None, "rank 1 .* has ended: call 20 .*ZeroDivision", "call 20 .*ZeroDivision", 20),
}
QUICK = ("a killed follower",)


@pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in ENDS])
def test_all_processes_end_in_time_with_a_message_that_names_the_rank(name):
    way, given, leader, follower, seconds = ENDS[name]
    with ranks(2, way) as every:
        for rank in every:
            rank.running()
        if given:
            time.sleep(1)  # so that requests are on their way
            every[given[0]].process.send_signal(given[1])
        began = time.monotonic()
        for rank, expected in zip(every, (leader, follower), strict=True):
            if expected is not None:
                assert rank.ended(seconds + began - time.monotonic()) == EXIT
                assert re.search(f"specjax: rank . .* ends: .*{expected}", rank.text()), rank.text()


@pytest.mark.slow
def test_sigterm_to_all_with_requests_in_flight_ends_all_with_0():
    """As launchers send it: rank 0 aborts its requests, and the others leave with it."""
    with ranks(2, "term") as every:
        for rank in every:
            rank.running()
        time.sleep(1)
        for rank in every:
            rank.process.send_signal(signal.SIGTERM)
        assert [rank.ended(10) for rank in every] == [0, 0], every[0].text() + every[1].text()
    assert [one["by"] for one in every[0].found()] == ["running", "closed", "end"]
