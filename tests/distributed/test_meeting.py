"""How ranks find each other: strangers are turned away, and a rank that stays away is named."""

import json
import queue
import socket
import threading

import pytest

from specjax.distributed import meeting
from specjax.distributed.channel import Channel
from specjax.distributed.replica import Replica

HELLO = {"rank": 1, "name": "one", "version": "0"}


@pytest.fixture
def place(monkeypatch):
    """Where rank 0 listens, in place of JAX's coordination service."""
    found = queue.Queue()
    service = type("Service", (), {"key_value_set": staticmethod(lambda key, value: found.put(json.loads(value)))})
    monkeypatch.setattr(meeting, "_service", service)
    monkeypatch.setattr(meeting, "HELLO_SECONDS", 0.2)
    return found


def gathering(size, timeout):
    """A thread in which rank 0 gathers the others, and the list that its result or its error goes to."""
    found = []

    def gather():
        try:
            found.append(meeting._gather(size, {**HELLO, "rank": 0, "name": "zero"}, timeout))
        except Exception as problem:
            found.append(problem)

    thread = threading.Thread(target=gather, daemon=True)
    thread.start()
    return thread, found


def test_strangers_are_turned_away_and_ranks_let_in(place):
    thread, found = gathering(2, 20)
    port, token = place.get(timeout=5)
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]  # the first one says nothing
    strangers[1].sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    Channel(strangers[2]).send({**HELLO, "token": "guessed"})
    rank = Channel(socket.create_connection(("127.0.0.1", port)))
    rank.send({**HELLO, "token": token})
    assert dict(rank.receive()[0]["names"]) == {0: "zero", 1: "one"}
    thread.join(5)
    [(channels, names)] = found
    assert list(channels) == [1] and names == {0: "zero", 1: "one"}
    for one in strangers:
        one.settimeout(5)
        try:
            assert one.recv(1) == b""
        except ConnectionResetError:
            pass
        one.close()


def test_a_rank_that_stays_away_is_named(place):
    thread, found = gathering(3, 0.2)
    thread.join(5)
    [problem] = found
    assert isinstance(problem, RuntimeError) and "ranks [1, 2] of 3 did not come" in str(problem)


def test_a_replica_of_one_process_closes():
    replica = Replica(0, {}, {0: "zero"}, 20, 600)
    closing = threading.Thread(target=replica.close, daemon=True)
    closing.start()
    closing.join(5)
    assert not closing.is_alive()
