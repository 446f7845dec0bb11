"""Sweeps the persistent MLP chain on one Hopper card, and times XLA's chain in the same run. See ../persistent-mlp.md.

    python docs/lab/persistent_mlp/sweep.py                       the sweep of that page
    python docs/lab/persistent_mlp/sweep.py "shape=8B slots=6"    given variants: fields of Job and of kernel.Variant

Several processes compile at once; a lock gives one of them the card while it draws weights, checks and measures.
"""

import contextlib
import dataclasses
import fcntl
import functools
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
from jax import lax
from kernel import ROWS, Chain, Variant

SHAPES = {"1B": (2048, 8192, 16), "8B": (4096, 14336, 32), "132": (2112, 8448, 16)}  # hidden, intermediate, layers


@dataclasses.dataclass(frozen=True)
class Job:
    text: str
    variant: Variant
    shape: str = "1B"
    layers: int = 0  # 0: as many as the model has
    single: bool = False  # a kernel for each layer, not one for all

    @classmethod
    def parse(cls, text):
        kinds = {field.name: field.type for kind in (Job, Variant) for field in dataclasses.fields(kind)}
        read = {str: str, int: int, bool: lambda word: word == "True"}
        pairs = [word.split("=") for word in text.split()]
        given = {name: read[kinds[name]](value) for name, value in pairs}
        own = {name: given.pop(name) for name in ("shape", "layers", "single") if name in given}
        return cls(text, Variant(**given), **own)


def by_xla(weights, x, dtype=jnp.bfloat16, rounded=False):
    """The same chain as XLA's kernels: weights is a list of (gate_up, down). ``dtype`` float32: the reference.

    XLA carries the residual sums in float32 through bfloat16 layers. ``rounded`` forbids that.
    """
    full = lax.Precision.HIGHEST if dtype == jnp.float32 else None

    def dot(x, w):
        return lax.dot_general(x, w.astype(dtype), (((1,), (1,)), ((), ())), full, jnp.float32)

    for gate_up, down in weights:
        gate, up = jnp.split(dot(x, gate_up), 2, axis=1)
        y = x.astype(jnp.float32) + dot((jax.nn.silu(gate) * up).astype(dtype), down)
        x = (lax.reduce_precision(y, 8, 7) if rounded else y).astype(dtype)
    return x


@functools.cache
def drawn(shape, layers):
    """Random weights [layers, 2F, D] and [layers, D, F], and a random x [8, D]."""
    d, f, _ = SHAPES[shape]

    @jax.jit
    def draw():
        a, b, c = jax.random.split(jax.random.key(0), 3)
        gate_up = jax.random.normal(a, (layers, 2 * f, d), jnp.bfloat16) * d**-0.5
        down = jax.random.normal(b, (layers, d, f), jnp.bfloat16) * f**-0.5 * 0.2
        return gate_up, down, jax.random.normal(c, (ROWS, d), jnp.bfloat16)

    return draw()


def looped(chain_of, calls=20):
    @jax.jit
    def run(weights, x):
        def call(_, y):  # every call reads the same x, and waits for the call before it
            return chain_of(weights, lax.optimization_barrier((x, y))[0])

        return lax.fori_loop(0, calls, call, x)

    return run


def timed(run, weights, x, layers, calls=20, repeats=7):
    """Microseconds a layer: least and median of the repeats."""
    jax.block_until_ready(run(weights, x))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run(weights, x))
        times.append((time.perf_counter() - start) / calls / layers * 1e6)
    return min(times), sorted(times)[repeats // 2]


@contextlib.contextmanager
def alone():
    """This process has the card for itself. A kernel that hangs is ended after 20 s."""
    with open("/tmp/persistent_mlp.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        signal.alarm(20)
        yield
        signal.alarm(0)


def error(y, reference):
    y, reference = y.astype(jnp.float32), reference.astype(jnp.float32)
    return float(jnp.linalg.norm(y - reference) / jnp.linalg.norm(reference))


@functools.cache
def expected(shape, layers):
    """The chain in float32, and the errors of XLA's chain, with and without rounding between layers."""
    gate_up, down, x = drawn(shape, layers)
    weights = [(gate_up[index], down[index]) for index in range(layers)]
    reference = jax.jit(lambda w, x: by_xla(w, x, jnp.float32))(weights, x.astype(jnp.float32))
    errors = [error(jax.jit(lambda w, x, r=r: by_xla(w, x, rounded=r))(weights, x), reference) for r in (False, True)]
    return reference, errors


def measure(job: Job):
    layers = job.layers or SHAPES[job.shape][2]
    d, f, _ = SHAPES[job.shape]
    chain, x = Chain(job.variant, layers, d, f), jax.ShapeDtypeStruct((ROWS, d), jnp.bfloat16)
    stacked = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((layers, 2 * f, d), (layers, d, f))]
    once = jax.jit(chain).lower(*stacked, x).compile()
    if job.single:
        one = Chain(job.variant, 1, d, f)
        stacked = [[jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for w in stacked]] * layers
        run = looped(lambda weights, x: functools.reduce(lambda x, w: one(w[0][None], w[1][None], x), weights, x))
    else:
        run = looped(lambda weights, x: chain(*weights, x))
    run = run.lower(stacked, x).compile()
    with alone():
        gate_up, down, x = drawn(job.shape, layers)
        exact = ""
        if job.variant.mode == "full":
            y = once(gate_up, down, x)
            same = all(bool(jnp.array_equal(y, once(gate_up, down, x))) for _ in range(20))
            reference, (plain, rounded) = expected(job.shape, layers)
            exact = f" | error {error(y, reference):.1e} (XLA {plain:.1e}, rounded {rounded:.1e}) same bits {same}"
        weights = [[gate_up[index] + 0, down[index] + 0] for index in range(layers)] if job.single else [gate_up, down]
        best, median = timed(run, weights, x, layers)
    rate = 6 * d * f / best / 1e6
    print(f"{best:6.1f} us (median {median:6.1f}) {rate:.2f} TB/s | {job.text}{exact}", flush=True)


def measure_xla(shape):
    layers = SHAPES[shape][2]
    with alone():
        gate_up, down, x = drawn(shape, layers)
        weights = [(gate_up[index] + 0, down[index] + 0) for index in range(layers)]
        del gate_up, down
        drawn.cache_clear()
    line = f"XLA {shape}, {layers} layers:"
    for rows in (2, 6, 8):
        run = looped(by_xla).lower(weights, x[:rows]).compile()
        with alone():
            best, median = timed(run, weights, x[:rows], layers)
        line += f" {rows} rows {best:.1f} us (median {median:.1f})"
    with alone():
        big = jax.jit(lambda: jax.random.normal(jax.random.key(1), (1 << 30,), jnp.float32))()
        run = looped(lambda w, x: x + jnp.max(w * (1 + x[0, 0].astype(jnp.float32) * 0)).astype(x.dtype))
        run(big, x)
        read, _ = timed(run, big, x, 1)
    print(f"{line} | a maximum over 4 GiB: {2**32 / read / 1e6:.2f} TB/s", flush=True)


def work(jobs):
    for job in jobs:
        try:
            measure_xla(job[4:]) if job.startswith("xla") else measure(Job.parse(job))
        except Exception as e:
            print(f"failed: {job}: {e!r}"[:500], flush=True)


def main(variants):
    print(jax.__version__, flush=True)
    large = ["shape=8B" in job for job in variants]
    small_jobs = [job for job, big in zip(variants, large, strict=True) if not big]
    large_jobs = [job for job, big in zip(variants, large, strict=True) if big]
    queues = [["xla 1B"], ["xla 8B"]] + [small_jobs[i::4] for i in range(4)] + [large_jobs[i::3] for i in range(3)]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    running = [subprocess.Popen([sys.executable, __file__, "work", *jobs], env=environment) for jobs in queues if jobs]
    for p in running:
        if p.wait():
            print(f"a process ended with {p.returncode}: {p.args[3:]}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(sys.argv[2:])
    else:
        main(sys.argv[1:])
