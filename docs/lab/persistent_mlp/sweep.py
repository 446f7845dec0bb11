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
import tempfile
import time

import jax
import jax.numpy as jnp
from jax import lax
from kernel import ROWS, Chain, Variant

SHAPES = {"1B": (2048, 8192, 16), "8B": (4096, 14336, 16), "132": (2112, 8448, 16)}  # hidden, intermediate, layers


SWEEP = """
mode=stream inputs=2 halves=1 up=64
mode=stream inputs=2 halves=1 down=256 slots=6
mode=stream inputs=2 halves=1 up=256 down=512 slots=3
mode=stream inputs=2 halves=1 down=256 slots=3
mode=stream inputs=2 halves=1 down=256 slots=6 box=16
mode=stream inputs=2 halves=1 down=256 slots=6 warps=False
mode=stream inputs=2 halves=1 shape=132 programs=132 up=192 down=192 slots=4
mode=free halves=1 direct=False up=64 slots=9 inputs=5
mode=free halves=1 direct=False down=256 slots=5 inputs=2
mode=free halves=1 direct=False down=256 slots=5 inputs=2 flight=0
halves=1 direct=False up=64 slots=9 inputs=5
halves=1 direct=False up=64 slots=9 inputs=5 warps=False
halves=1 direct=False down=256 slots=5 inputs=2
halves=1 up=64 slots=9 inputs=5
direct=False
up=128
mode=free
slots=6
flight=0
ahead=4
ahead=8
cluster=2
cluster=2 ahead=8
single=True
shape=8B mode=stream inputs=2 halves=1 up=64 down=256 slots=6
shape=8B mode=stream inputs=2 halves=1 up=128 down=512 slots=3
shape=8B mode=free halves=1 direct=False up=64 down=256 slots=5
shape=8B halves=1 direct=False up=64 down=256 slots=5
shape=8B halves=1 direct=False up=64 down=256 slots=5 flight=0
shape=8B up=64 slots=12
shape=8B mode=free up=64 slots=12
shape=8B up=64 slots=12 ahead=8
shape=8B up=64 slots=12 cluster=2
shape=8B up=64 slots=12 cluster=2 ahead=8
shape=8B up=64 slots=12 single=True
"""


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


def by_xla(weights, x, dtype=jnp.bfloat16):
    """The same chain as XLA's kernels: weights is a list of (gate_up, down). ``dtype`` float32: the reference."""
    full = lax.Precision.HIGHEST if dtype == jnp.float32 else None

    def dot(x, w):
        return lax.dot_general(x, w.astype(dtype), (((1,), (1,)), ((), ())), full, jnp.float32)

    for gate_up, down in weights:
        gate, up = jnp.split(dot(x, gate_up), 2, axis=1)
        x = (x.astype(jnp.float32) + dot((jax.nn.silu(gate) * up).astype(dtype), down)).astype(dtype)
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
    """Microseconds a layer, least and median of the repeats; the result; whether all results have the same bits."""
    first = jax.block_until_ready(run(weights, x))
    times, same = [], True
    for _ in range(repeats):
        start = time.perf_counter()
        y = jax.block_until_ready(run(weights, x))
        times.append((time.perf_counter() - start) / calls / layers * 1e6)
        same = same and bool(jnp.array_equal(first, y))
    return min(times), sorted(times)[repeats // 2], first, same


@contextlib.contextmanager
def alone():
    """This process has the card for itself. A kernel that hangs is ended after 40 s."""
    with open(os.path.join(tempfile.gettempdir(), "persistent_mlp.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        signal.alarm(40)
        yield
        signal.alarm(0)


def error(y, reference):
    y, reference = y.astype(jnp.float32), reference.astype(jnp.float32)
    return float(jnp.linalg.norm(y - reference) / jnp.linalg.norm(reference))


@functools.cache
def expected(shape, layers):
    """The chain in float32, and the error of XLA's bfloat16 chain with its rounding after each layer."""
    gate_up, down, x = drawn(shape, layers)

    def scanned(x, dtype):
        step = jax.jit(lambda weights, x: lax.scan(lambda x, w: (by_xla([w], x, dtype), None), x, weights)[0])
        return step((gate_up, down), x.astype(dtype))

    reference = scanned(x, jnp.float32)
    return reference, error(scanned(x, jnp.bfloat16), reference)


def measure(job: Job):
    layers = job.layers or SHAPES[job.shape][2]
    d, f, _ = SHAPES[job.shape]
    x = jax.ShapeDtypeStruct((ROWS, d), jnp.bfloat16)
    stacked = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((layers, 2 * f, d), (layers, d, f))]
    if job.single:
        one = Chain(job.variant, 1, d, f)
        stacked = [[jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for w in stacked]] * layers
        run = looped(lambda weights, x: functools.reduce(lambda x, w: one(w[0][None], w[1][None], x), weights, x))
    else:
        chain = Chain(job.variant, layers, d, f)
        run = looped(lambda weights, x: chain(*weights, x))
    run = run.lower(stacked, x).compile()
    with alone():
        gate_up, down, x = drawn(job.shape, layers)
        weights = [[gate_up[i] + 0, down[i] + 0] for i in range(layers)] if job.single else [gate_up, down]
        best, median, y, same = timed(run, weights, x, layers)
        exact = ""
        if job.variant.mode == "full":
            reference, by_rounding = expected(job.shape, layers)
            exact = f" | error {error(y, reference):.1e} (XLA {by_rounding:.1e}) same bits {same}"
    rate = 6 * d * f / best / 1e6
    print(f"{best:6.1f} us (median {median:6.1f}) {rate:.2f} TB/s | {job.text}{exact}", flush=True)


def measure_xla(shape):
    layers = SHAPES[shape][2]
    with alone():
        gate_up, down, x = drawn(shape, layers)
        weights = [(gate_up[i] + 0, down[i] + 0) for i in range(layers)]
        del gate_up, down
        drawn.cache_clear()
    line = f"XLA {shape}, {layers} layers:"
    for rows in (2, 6, 8):
        with alone():  # XLA measures tilings while it compiles
            run = looped(by_xla).lower(weights, x[:rows]).compile()
            best, median, *_ = timed(run, weights, x[:rows], layers)
        line += f" {rows} rows {best:.1f} us (median {median:.1f})"
    with alone():
        big = jax.jit(lambda: jax.random.normal(jax.random.key(1), (1 << 30,), jnp.float32))()
        run = looped(lambda w, x: x + jnp.max(w * (1 + x[0, 0].astype(jnp.float32) * 0)).astype(x.dtype))
        run(big, x)
        read, *_ = timed(run, big, x, 1)
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
        main(sys.argv[1:] or SWEEP.strip().splitlines())
