"""Runs to record: a model that says the alphabet, and a draft that is right half the time."""

import numpy as np

from specjax import stream, testing
from specjax.drafters import DraftModel

VOCAB, SIZE = 20, 3


class Letters:
    """Token i is the i-th letter; the last one is special."""

    def encode(self, text):
        return [ord(c) - ord("a") for c in text]

    def special_id(self, text):
        return VOCAB - 1 if text == "</s>" else None

    def decode(self, tokens, skip_special_tokens=True):
        return "".join(
            "</s>" if t == VOCAB - 1 else chr(ord("a") + t) for t in tokens if t < VOCAB - 1 or not skip_special_tokens
        )


def cycle(step):
    """A model that follows each letter by the one ``step`` letters on."""
    lm = testing.table_lm(np.roll(np.eye(VOCAB), step, axis=1) + 0.001)
    return lm.__class__(lm.config, lm.params, Letters())


TARGET = cycle(1)


# The draft is right after even letters only.
table = np.where(
    np.arange(VOCAB)[:, None] % 2 == 0, np.roll(np.eye(VOCAB), 1, axis=1), np.roll(np.eye(VOCAB), 2, axis=1)
)


DRAFT = DraftModel(testing.table_lm(table + 0.001))


SETTINGS = {
    "model": "cycle",
    "dtype": "float32",
    "drafter": {"name": "model"},
    "verifier": "rejection",
    "num_speculative_tokens": SIZE,
    "sampling": {"temperature": 0.0},
    "max_new_tokens": 12,
    "seed": 0,
}


def streamed(prompts=("a", "bcd"), read=None, **options):
    options = {"drafter": DRAFT, "max_new_tokens": 12, **options}
    events = stream(TARGET, list(prompts), num_speculative_tokens=SIZE, **options)
    for count, _ in enumerate(events, 1):
        if count == read:
            break
    return events
