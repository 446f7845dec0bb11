"""How a time is taken: programs compiled side by side first, then run one after another with nothing else going on."""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode import random
from specjax.generation.generate import prepare
from specjax.generation.job import Job
from specjax.generation.metrics import Totals
from specjax.models.lm import LM


@dataclasses.dataclass(frozen=True)
class Call:
    """A jitted ``function(*arguments, count=count)`` that does the same thing ``count`` times over.

    Repeating on the device leaves the host's share of a call out.
    """

    function: Any
    arguments: tuple
    count: int = 20

    def compile(self) -> None:
        self.function.lower(*self.arguments, count=self.count).compile()

    def seconds(self, repeats: int = 5) -> float:
        """Median seconds of one of the ``count``."""
        return timed(lambda: self.function(*self.arguments, count=self.count), repeats) / self.count


def timed(action: Callable[[], Any], repeats: int = 5) -> float:
    """Median seconds of an action, after one that isn't counted."""
    jax.block_until_ready(action())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(action())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def side_by_side(actions: Iterable[Callable[[], Any]]) -> None:
    """Runs them in as many threads as there are processors: XLA compiles without holding Python's lock.

    For compiling only. Whatever is compiled ahead (``jit(f).lower(...).compile()``) is there when ``f`` is called.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(action) for action in actions]:
            done.result()


def all_seconds(calls: Mapping[str, Call]) -> dict[str, float]:
    """Each call's seconds, all compiled before the first is timed."""
    side_by_side(call.compile for call in calls.values())
    return {name: call.seconds() for name, call in calls.items()}


def bandwidth(gigabytes: float) -> dict[str, float]:
    """Bytes a second of reading and of copying (read plus write), on random data.

    Reading is the faster of a maximum, which is a GPU's, and of a product with a vector, which is a CPU's.
    """
    size, width = int(gigabytes * 1e9 / 2), 8192
    x = jax.jit(lambda key: jax.random.bits(key, (size,), jnp.uint16))(random.key(0))
    largest, copy = Call(_largest, (x,)).seconds(), Call(_copy, (x,)).seconds()
    del x
    rows = size // 2 // width
    matrix = jax.jit(lambda key: jax.random.normal(key, (rows, width)))(random.key(0))  # f32
    product = Call(_product, (matrix, jnp.ones(width))).seconds()
    return {"read": max(2 * size / largest, 4 * rows * width / product), "copy": 4 * size / copy}


@partial(jax.jit, static_argnames="count")
def _largest(x: jax.Array, count: int) -> jax.Array:
    def body(i, most):  # of other values each time, so that no pass can be spared
        return jnp.maximum(most, jnp.max(x ^ i.astype(x.dtype)))

    return lax.fori_loop(0, count, body, jnp.zeros((), x.dtype))


@partial(jax.jit, static_argnames="count")
def _product(matrix: jax.Array, vector: jax.Array, count: int) -> jax.Array:
    return lax.fori_loop(0, count, lambda i, vector: vector + 1e-9 * jnp.max(matrix @ vector), vector)


@partial(jax.jit, static_argnames="count")
def _copy(x: jax.Array, count: int) -> jax.Array:
    return lax.fori_loop(0, count, lambda i, _: x + i.astype(x.dtype), jnp.zeros_like(x))


def weight_bytes(lm: LM, exit_layer: int | None = None) -> int:
    """Read in one step, which may leave the model after some layers: all but the embedding table, of which a step reads
    a row a token."""
    end = lm.config.num_hidden_layers if exit_layer is None else exit_layer
    layers = {name: layer for name, layer in lm.params["layers"].items() if int(name) < end}
    total = sum(leaf.nbytes for leaf in jax.tree.leaves({**lm.params, "layers": layers}))
    return total if lm.config.tie_word_embeddings else total - lm.params["embed"].nbytes


@dataclasses.dataclass(frozen=True)
class Run:
    """A whole ``generate``: the median of several by its seconds of decoding."""

    prefill: float  # seconds
    seconds: float  # of decoding
    rounds: int  # of the row that took the most
    tokens: list[list[int]]
    totals: Totals

    @property
    def per_round(self) -> float:
        return self.seconds / self.rounds

    @property
    def tokens_per_second(self) -> float:
        return self.totals.tokens / self.seconds


def generations(lm: LM, prompts: list[list[int]], options: Mapping[str, dict], repeats: int = 3) -> dict[str, Run]:
    """One ``generate`` for each set of options, all compiled before the first is timed."""
    jobs = {name: prepare(lm, prompts, **given) for name, given in options.items()}
    distinct = {}  # by what programs depend on: values of arrays, such as a temperature, are no part of that
    for job in jobs.values():
        kinds = jax.tree.map(jax.typeof, (job.decoder.drafter, job.request, job.tokens))
        distinct[str((kinds, job.decoder.num_speculative_tokens, job.chunk))] = job
    side_by_side(job.compile for job in distinct.values())
    return {name: _run(job, repeats) for name, job in jobs.items()}


def _run(job: Job, repeats: int) -> Run:
    job.warmup()  # the first run of a compiled program is slow too
    results = [job.generate() for _ in range(repeats)]
    result = sorted(results, key=lambda result: result.seconds["decode"])[repeats // 2]
    rounds = max(m.num_steps for m in result.metrics)
    seconds = result.seconds
    return Run(seconds["prefill"], seconds["decode"], rounds, result.tokens, Totals.of(result.metrics))
