"""What all tests share: the tests' own folder on the path, and slow sweeps kept out of the default run (pyproject)."""

import gc
import io
import os
from importlib import metadata
from pathlib import Path

import pytest
import tqdm

# Compiling is most of the time, and small models gain nothing from good machine code. So: LLVM doesn't optimise, XLA
# makes its kernels the old way (no MLIR passes over each, which take longer than LLVM), and one thread compiles, since
# every core has a process of its own. XLA ends the process at a flag that it doesn't know. Two passes over loops took
# a third of the time of compiling: they ask for every loop how often it runs, and our loops carry many arrays.
_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
_FLAGS += " --xla_disable_hlo_passes=simplify-while-loops,while-loop-invariant-code-motion"
_BEFORE_0_11 = " --xla_cpu_use_fusion_emitters=false"
_old = tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (0, 11)
os.environ.setdefault("XLA_FLAGS", _FLAGS + _BEFORE_0_11 * _old)

# torch's threads wait for work by spinning, and each core has a process of its own.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Scripts keep compiled programs in the user's cache folder; those that they run here are no use to the user.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")

# Tracing makes many objects, and the usual threshold looks through all of them again after every 700 new ones.
gc.set_threshold(50_000, 20, 20)

_MAPS = Path("/proc/self/maps")


@pytest.fixture(autouse=True, scope="module")
def programs_are_forgotten_in_time():
    """Each compiled program maps memory: 15,000 maps are 3 GB, and Linux ends a process at its 65,530th map."""
    yield
    import jax  # not above: it reads the flags, and the process that only hands tests out does without

    if _MAPS.exists() and len(_MAPS.read_text().splitlines()) > 15_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def bars(monkeypatch):
    """The lines of progress that were begun, as tqdm's objects: what they say and how far they came."""
    made = []

    class Kept(tqdm.tqdm):
        def __init__(self, *args, **options):
            super().__init__(*args, **{**options, "disable": False, "file": io.StringIO()})
            made.append(self)

    monkeypatch.setattr(tqdm, "tqdm", Kept)
    return lambda: [(line.desc, line.n, line.total) for line in made]
