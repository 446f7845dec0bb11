"""Reads checkpoints of other formats into specjax's parameter tree, and stores the tree on disk.

This package imports specjax. Of specjax, only ``specjax/checkpoints/load.py`` imports this package.
"""

import specjax  # noqa: F401  (imported first, because specjax.load imports modules of this package)
