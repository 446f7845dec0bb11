"""One process of a replica, for tests: ``RANK SIZE PORT [WAY]``. It prints what it finds as lines of JSON."""

import json
import os
import signal
import sys

from specjax import distributed

rank, size, port, way = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], "".join(sys.argv[4:])
times = dict(silence=3) if way == "silent" else dict(stuck=4) if way == "hang" else {}
replica = distributed.join(f"127.0.0.1:{port}", size, rank, **times)

from processes_cases import DRAFTERS, ENGINE, LM, OPTIONS, PROMPTS, ROWS, SAMPLED  # noqa: E402  (JAX has found its devices)

import specjax  # noqa: E402
from specjax.models import parallel  # noqa: E402

USUAL = way in ("", "parts")  # nothing goes wrong
MESH = parallel.mesh(data=2 if way == "parts" else 1)
CUT = parallel.shard(LM, MESH)


def say(**found):
    print(json.dumps(found), flush=True)


def engine(name):
    drafter = parallel.everywhere(DRAFTERS[name], MESH)
    return specjax.Engine(CUT, drafter, **ENGINE, calls=replica.calls())


def generated():
    """By ``generate`` and ``stream``, which every process calls alike."""
    for name, drafter in DRAFTERS.items():
        options = {**OPTIONS, "drafter": parallel.everywhere(drafter, MESH)}
        say(by="generate", drafter=name, tokens=specjax.generate(CUT, PROMPTS, **options).tokens)
    events = specjax.stream(CUT, PROMPTS[:1], **options)
    say(by="stream", drafter=name, tokens=[event.token for event in events])


def spoil(first):
    """What goes wrong on rank 1."""
    if way == "lie":
        right = type(replica).digest
        replica.digest = lambda shown: right(replica, shown) ^ (replica._watch.position()[0] > 20)
    if way == "hang":
        real = first.programs.follow
        first.programs.follow = lambda head, arrays: signal.pause() if head["call"] == 20 else real(head, arrays)
    if way == "fail":
        real = first.programs.follow
        first.programs.follow = lambda head, arrays: 1 / 0 if head["call"] == 20 else real(head, arrays)


def endless(engine):
    """Requests without end, until something ends the engine."""
    say(by="running", process=os.getpid())
    signal.signal(signal.SIGTERM, lambda number, frame: engine.close(drain=False))
    try:
        for number in range(10**6):
            engine.submit([number % 40], max_new_tokens=100, temperature=1.0, seed=number).result()
    except specjax.EngineClosedError:
        say(by="closed")


def run():
    names = list(DRAFTERS) if USUAL else ["plain"]
    if USUAL:
        generated()
    engines = [engine(name) for name in names]
    if rank:
        spoil(engines[0])
        say(by="running", process=os.getpid())
        replica.follow()
    elif not USUAL:
        endless(engines[0])
    else:
        for name, one in zip(names, engines, strict=True):
            handles = [*(one.submit(**row) for row in ROWS), *one.submit_many(**SAMPLED, n=2)]
            say(by="engine", drafter=name, tokens=[handle.result().tokens[0] for handle in handles])
    for one in engines:
        one.close()
    replica.close()
    say(by="end")


run()
