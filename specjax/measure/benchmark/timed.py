"""Takes times. Programs are first compiled side by side, then run one after another while nothing else runs."""

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
from specjax.models.quantized import map_with_path


@dataclasses.dataclass(frozen=True)
class Call:
    """A call ``function(*arguments, count=count)`` of a jitted function that repeats its work ``count`` times.

    The repetition is on the device, so that the host's share of a call is left out.
    """

    # The jitted function.
    function: Any
    # Its arguments, but for ``count``.
    arguments: tuple
    # The number of repetitions.
    count: int = 20

    def compile(self) -> None:
        """Compiles the function for its arguments."""
        self.function.lower(*self.arguments, count=self.count).compile()

    def seconds(self, repeats: int = 5) -> float:
        """The median seconds of one of the ``count`` repetitions, over ``repeats`` calls."""
        return timed(lambda: self.function(*self.arguments, count=self.count), repeats) / self.count


def timed(action: Callable[[], Any], repeats: int = 5) -> float:
    """The median seconds of an action over ``repeats`` runs. One more run comes first and is not counted."""
    jax.block_until_ready(action())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(action())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def side_by_side(actions: Iterable[Callable[[], Any]]) -> None:
    """Runs actions that compile in as many threads as there are processors. XLA compiles without Python's lock.

    A program that is compiled ahead of time (``jit(f).lower(...).compile()``) is not compiled again when ``f`` is
    called.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(action) for action in actions]:
            done.result()


def all_seconds(calls: Mapping[str, Call]) -> dict[str, float]:
    """The seconds of each call. All calls are compiled before the first one is timed."""
    side_by_side(call.compile for call in calls.values())
    return {name: call.seconds() for name, call in calls.items()}


def bandwidth(gigabytes: float) -> dict[str, float]:
    """The bandwidth of reading ("read") and of copying ("copy": read plus write), in bytes a second, on random data.

    Reading is measured with a maximum and with a product of a matrix and a vector, and the faster one counts. The
    maximum is faster on a GPU, the product on a CPU.

    Args:
      gigabytes: the size of the data.
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
    def body(i, most):  # the values differ in each pass, so that the compiler can leave out no pass
        return jnp.maximum(most, jnp.max(x ^ i.astype(x.dtype)))

    return lax.fori_loop(0, count, body, jnp.zeros((), x.dtype))


@partial(jax.jit, static_argnames="count")
def _product(matrix: jax.Array, vector: jax.Array, count: int) -> jax.Array:
    return lax.fori_loop(0, count, lambda i, vector: vector + 1e-9 * jnp.max(matrix @ vector), vector)


@partial(jax.jit, static_argnames="count")
def _copy(x: jax.Array, count: int) -> jax.Array:
    return lax.fori_loop(0, count, lambda i, _: x + i.astype(x.dtype), jnp.zeros_like(x))


def weight_bytes(lm: LM, exit_layer: int | None = None) -> int:
    """The bytes of weights that one step reads.

    These are all weights but the embedding table, of which a step reads only one row for each token. A tied embedding
    table is also the head, so it counts. An encoder and the keys and values of its states are read once a request.

    Args:
      lm: the model.
      exit_layer: the number of layers that the step runs; None: all layers.
    """
    end = lm.config.num_hidden_layers if exit_layer is None else exit_layer

    def read(path: tuple[str, ...], leaf: Any) -> int:
        of_source = path[0] == "encoder" or {"cross", "kv"} <= set(path)
        once = of_source or (path == ("embed",) and not lm.config.tie_word_embeddings)
        skipped = path[0] == "layers" and int(path[1]) >= end
        return 0 if once or skipped else sum(x.nbytes for x in jax.tree.leaves(leaf))

    return sum(jax.tree.leaves(map_with_path(read, lm.params)))


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of ``generate``: of several runs, the one with the median decoding time."""

    # The seconds of prefill.
    prefill: float
    # The seconds of decoding.
    seconds: float
    # The number of rounds of the row that took the most.
    rounds: int
    # The new tokens of each row.
    tokens: list[list[int]]
    # The counts of all rows together.
    totals: Totals

    @property
    def per_round(self) -> float:
        """The seconds of a round."""
        return self.seconds / self.rounds

    @property
    def tokens_per_second(self) -> float:
        """The new tokens of all rows in a second of decoding."""
        return self.totals.tokens / self.seconds


def generations(lm: LM, prompts: list[list[int]], options: Mapping[str, dict], repeats: int = 3) -> dict[str, Run]:
    """The run of each set of options. All programs are compiled before the first run is timed.

    Args:
      lm: the target.
      prompts: the token ids of each prompt.
      options: the options of each run, by its name.
      repeats: the number of times that each run is repeated.
    """
    jobs = {name: prepare(lm, prompts, **given) for name, given in options.items()}
    distinct = {}  # one job for each program: a program does not depend on the values of arrays, such as a temperature
    for job in jobs.values():
        kinds = jax.tree.map(jax.typeof, (job.decoder.drafter, job.request, job.tokens))
        distinct[str((kinds, job.decoder.num_speculative_tokens, job.chunk))] = job
    side_by_side(job.compile for job in distinct.values())
    return {name: _run(job, repeats) for name, job in jobs.items()}


def _run(job: Job, repeats: int) -> Run:
    job.warmup()  # the first run of a compiled program is slow
    results = [job.generate() for _ in range(repeats)]
    result = sorted(results, key=lambda result: result.seconds["decode"])[repeats // 2]
    rounds = max(m.num_steps for m in result.metrics)
    seconds = result.seconds
    return Run(seconds["prefill"], seconds["decode"], rounds, result.tokens, Totals.of(result.metrics))
