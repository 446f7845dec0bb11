"""Which token ids have a meaning: a model may have more rows than its tokenizer has ids, and the surplus is padding."""

from collections.abc import Sequence

import numpy as np

from specjax.models.lm import LM

ALLOW = "pass allow_unknown_ids=True if that is what you want"


def known_ids(lm: LM, stop_ids: Sequence[int] = ()) -> np.ndarray | None:
    """bool[V]: ids that the tokenizer has, and stop tokens, the model's own and those given, whose text is nothing.

    None if these are all, or if nobody says: without a tokenizer, or with one that has no method ``ids``.
    """
    tokenizer = lm.tokenizer
    if tokenizer is None or not hasattr(tokenizer, "ids"):
        return None
    known = np.zeros(lm.vocab_size, bool)
    for ids in (tokenizer.ids(), np.array([*lm.config.eos_token_ids, *stop_ids], np.int64)):
        known[ids[(ids >= 0) & (ids < len(known))]] = True
    return None if known.all() else known


def check_prompts(lm: LM, prompts: Sequence[Sequence[int]]) -> None:
    """Raises ValueError if a prompt holds an id that the tokenizer lacks."""
    known = known_ids(lm)
    for row, ids in enumerate(prompts):
        unknown = [] if known is None else [token for token in ids if not known[token]]
        if unknown:
            raise ValueError(
                f"prompt {row} has token id {unknown[0]}, which the model has a row for but its tokenizer lacks: the "
                f"row is padding that was never trained; {ALLOW}"
            )
