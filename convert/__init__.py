"""Checkpoints of other formats to specjax's parameter tree, and that tree to and from disk."""

import specjax  # noqa: F401  (first, whichever of the two is imported first: specjax.load imports from here)
