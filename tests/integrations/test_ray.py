"""Replicas on a Ray cluster of this machine. The extra ``test`` has no Ray; without Ray these tests are skipped."""

import os
import signal
import threading
from pathlib import Path

import httpx
import pytest

import specjax
from specjax import testing
from specjax.offline.rows import answers, row_of

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
GIVEN = [{"prompt": [3, 4, 3, 4, i % 40], "temperature": 1.0, "max_new_tokens": 20} for i in range(60)]
GIVEN += [{"prompt": [1], "topk": 1}, {"id": "z", "prompt": [1], "logit_bias": {"5": 3.0}, "max_new_tokens": 3}]


def make():
    """An engine of a tiny model."""
    return specjax.Engine(testing.tiny_lm(0), "ngram", num_speculative_tokens=3, slots=2, capacity=128)


def rows():
    return [row_of(place, given, {}, 7) for place, given in enumerate(GIVEN)]


@pytest.fixture
def replicas():
    """The module under test, and a cluster of its own for each test."""
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'integrations'}", "JAX_PLATFORMS": "cpu"}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": env})
    from specjax.integrations import ray as replicas

    yield replicas
    ray.shutdown()


class Mortal:
    """Makes an engine whose process dies after six requests, once."""

    def __init__(self, mark):
        self._mark = mark

    def __call__(self):
        engine = make()
        real, left = engine.submit, iter(range(6, -1, -1))

        def submit(*args, **options):
            if not next(left, 1) and not self._mark.exists():
                self._mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        engine.submit = submit
        return engine


def test_every_row_is_answered_once_though_a_replica_is_lost(replicas, tmp_path):
    mark = tmp_path / "lost"
    found = list(replicas.answers(Mortal(mark), rows(), 2, num_cpus=0.5))
    assert mark.exists()
    with make() as engine:
        expected = {answer["id"]: answer for answer in answers(engine, rows())}
    assert len(found) == len(GIVEN) and {answer["id"] for answer in found} == set(expected)
    assert all(answer == expected[answer["id"]] for answer in found)


def served(folder):
    """What makes an engine of a checkpoint."""
    return lambda: specjax.Engine(specjax.load(folder), "ngram", num_speculative_tokens=3, slots=2, capacity=128)


def test_replicas_of_the_server_give_the_tokens_of_generate(replicas, tmp_path):
    from hf_folders import TINY, write_hf
    from ray import serve
    from small_tokenizers import byte_level

    write_hf(tmp_path / "m", {**TINY, "vocab_size": 260, "max_position_embeddings": 256}, byte_level(add_bos=False))
    options = dict(num_replicas=2, ray_actor_options={"num_cpus": 0.5})
    serve.run(replicas.application(served(str(tmp_path / "m")), ["tiny"], **options))
    found = {}

    def ask(seed):
        body = {"prompt": "abab", "max_tokens": 12, "seed": seed, "return_token_ids": True}
        answer = httpx.post("http://127.0.0.1:8000/v1/completions", json=body, timeout=120)
        found[seed] = answer.json()["choices"][0]["token_ids"]

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(20)]
    for step in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            step(thread)
    options = dict(drafter="ngram", num_speculative_tokens=3, block_width=4, capacity=192, temperature=1.0)
    lm = specjax.load(str(tmp_path / "m"))
    for seed in range(20):
        assert found[seed] == specjax.generate(lm, "abab", seed=seed, max_new_tokens=12, **options).tokens[0]
    with httpx.stream("POST", "http://127.0.0.1:8000/v1/completions", json={"prompt": "a", "stream": True}) as answer:
        assert [line for line in answer.iter_lines() if line][-1] == "data: [DONE]"
    serve.shutdown()
