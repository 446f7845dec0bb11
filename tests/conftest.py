"""What all tests share: the tests' own folder on the path, and slow sweeps kept out of the default run (pyproject)."""

import os

# Compiling is most of the time, and small models gain nothing from optimised machine code: a third less of it.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
