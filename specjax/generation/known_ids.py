"""Which token ids have a meaning. A model may have rows for more ids than its tokenizer has: the surplus is padding."""

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from specjax.models.lm import LM

ALLOW = "pass allow_unknown_ids=True to allow such ids"


def known_ids(lm: LM, stop_ids: Sequence[int] = ()) -> np.ndarray | None:
    """Which ids may be generated. -> bool[V], or None if every id may.

    An id may be generated if the tokenizer has the id or if the id is a stop token. A stop token has no text, so the
    tokenizer need not have it. The result is also None if the known ids can't be found out: the model has no tokenizer,
    or its tokenizer has no method ``ids``.

    Args:
      lm: the model.
      stop_ids: the stop tokens of the request, beside the model's own. Ids outside the vocabulary are ignored.
    """
    tokenizer = lm.tokenizer
    if tokenizer is None or not hasattr(tokenizer, "ids"):
        return None
    find = _of_model if isinstance(tokenizer, Hashable) else _of_model.__wrapped__
    known = find(tokenizer, len(tokenizer.ids()), lm.vocab_size, tuple(lm.config.eos_token_ids))
    if known is None:
        return None
    more = [token for token in stop_ids if 0 <= token < len(known) and not known[token]]
    if not more:
        return known
    known = known.copy()
    known[more] = True
    return None if known.all() else known


@lru_cache(maxsize=8)  # each request asks, and the masks of Llama 3's 128,256 ids take a millisecond
def _of_model(tokenizer: Any, size: int, vocab: int, eos: tuple[int, ...]) -> np.ndarray | None:
    """:func:`known_ids` without stop tokens of a request, kept until ``size``, the tokenizer's number of ids, grows."""
    del size
    known = np.zeros(vocab, bool)
    for ids in (tokenizer.ids(), np.array(eos, np.int64)):
        known[ids[(ids >= 0) & (ids < vocab)]] = True
    known.flags.writeable = False  # all requests share the mask
    return None if known.all() else known


def check_prompts(lm: LM, prompts: Sequence[Sequence[int]]) -> None:
    """Raises ValueError if a prompt holds an id that the tokenizer lacks."""
    known = known_ids(lm)
    for row, ids in enumerate(prompts):
        if known is not None and not known[ids].all():
            unknown = next(token for token in ids if not known[token])
            raise ValueError(
                f"prompt {row} has token id {unknown}, which the tokenizer lacks: the model has a row for this id, "
                f"but the row is padding that was never trained; {ALLOW}"
            )
