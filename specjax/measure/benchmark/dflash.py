"""A DFlash head of a published head's shape in a benchmark: what a round reads, and the tokens to expect."""

import jax
import numpy as np

from specjax.drafters import DFlash
from specjax.drafting import theory
from specjax.measure.benchmark.drafting import Drafting


def by_head(head: DFlash, table: np.ndarray) -> tuple[Drafting, ...]:
    """Drafting with a planted head: one call for all tokens, whatever their number.

    Args:
      head: the head, a drafter of chains.
      table: f[K, M], its acceptance table, of which the first column counts.
    """
    layers = head.params["layers"].values()
    entries = sum(x.nbytes for layer in layers for x in jax.tree.leaves(layer["attention"]["qkv"]))
    everything = sum(x.nbytes for x in jax.tree.leaves(head.params))  # and ``commit`` reads the qkv weights again

    def expected(size: int) -> float:
        return 1 + float(theory.expected_accepted_length(table[:size, 0]))

    return (Drafting("block", lambda size: head, 0, everything + entries, expected),)
