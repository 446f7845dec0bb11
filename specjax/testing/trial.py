"""The batch that the conformance checks run: rows of several sampling settings and ragged prompts side by side."""

import dataclasses
from typing import Any

import numpy as np

from specjax.decode.types import DecodeState, Drafter, Verifier
from specjax.models.lm import LM
from specjax.testing.laws import run_tightly

# Sampling settings that use every transform, some alone and some together. They need a vocabulary of at least 4 tokens.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature and top-k": {"temperature": 0.7, "top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.2, "temperature": 1.5},
    "repetition": {"repetition_penalty": 1.5},
    "presence and frequency": {"presence_penalty": 0.8, "frequency_penalty": -0.5},
    "no repeated trigram": {"no_repeat_ngram_size": 3},
    "bias": {"logit_bias": {0: 1.0, 2: -2.0}},
    "allowed": {"allowed_token_ids": [0, 1, 3]},
    "no early stop": {"min_new_tokens": 5},
    "greedy": {"temperature": 0.0},
}

# The longest prompt has n-grams to look up. The shortest has one token, so its row starts with an empty cache.
PROMPTS = [[1, 2, 0, 1, 2, 0], [3], [2, 1, 1, 3]]


@dataclasses.dataclass(frozen=True)
class Trial:
    """The batch that the checks run: ``rows`` rows for each of ``SETTINGS``.

    The joint law is enumerated over all V ** length continuations, so the vocabulary must be small.

    Args:
      target: a model with a vocabulary of at least 4 tokens.
      drafter: the drafter under test.
      verifier: the verifier under test, or its name.
      num_speculative_tokens: K.
      rows: the number of rows of each setting in the batch.
      draws: the number of continuations of each setting that are compared with the joint law. They are drawn in as many
        batches as needed.
      length: the number of tokens whose joint law is compared.
      new_tokens: the number of tokens that each row generates. It is longer than a block, so that each row has several
        rounds.
    """

    target: LM
    drafter: Drafter
    verifier: Verifier | str = "rejection"
    num_speculative_tokens: int = 3
    rows: int = 200
    draws: int = 1600
    length: int = 4
    new_tokens: int = 9

    def __str__(self) -> str:
        verifier = self.verifier if isinstance(self.verifier, str) else type(self.verifier).__name__
        return f"{type(self.drafter).__name__} with {verifier}, K = {self.num_speculative_tokens}"

    @property
    def batch(self) -> int:
        """B, the number of rows."""
        return len(SETTINGS) * self.rows

    @property
    def prompts(self) -> list[list[int]]:
        """The prompt of each row. The rows of one setting have the same prompt."""
        return [PROMPTS[i % len(PROMPTS)] for i in range(len(SETTINGS)) for _ in range(self.rows)]

    @property
    def neutral(self) -> dict[str, Any]:
        """Options with which every transform is present and none has an effect. All settings then share a program."""
        return {
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "no_repeat_ngram_size": 0,
            "logit_bias": {},
            "min_new_tokens": 0,
            "allowed_token_ids": list(range(self.target.config.vocab_size)),
        }

    @property
    def options(self) -> dict[str, list]:
        """Each sampling parameter as a list with one value for each row. No transform is left out of the program."""
        return {
            name: [s.get(name, default) for s in SETTINGS.values() for _ in range(self.rows)]
            for name, default in self.neutral.items()
        }

    def run(self, order: np.ndarray | None = None, **changes) -> DecodeState:
        """Runs the batch.

        Args:
          order: i[B], the row of the batch that stands at each place; None: the rows in order.
          **changes: other options; a list has one value for each row.

        Returns:
          The last state, in NumPy arrays, without caches.
        """
        order = np.arange(self.batch) if order is None else order
        options: dict[str, Any] = {"seed": list(range(self.batch)), "max_new_tokens": self.new_tokens, **self.options}
        options |= {"drafter": self.drafter, "verifier": self.verifier, "ignore_eos": "eos_token_id" not in changes}
        options |= {"num_speculative_tokens": self.num_speculative_tokens, "lossy": True, **changes}
        options["room"] = self.new_tokens  # whatever the limits are, so that one compiled program runs them all
        options = {k: [v[i] for i in order] if isinstance(v, list) else v for k, v in options.items()}
        prompts = self.prompts
        return run_tightly(self.target, [prompts[i] for i in order], **options)

    def sequences(self, state: DecodeState) -> list[np.ndarray]:
        """The new tokens of each row."""
        pairs = zip(state.tokens, state.request.prompt_lengths, state.lengths, strict=True)
        return [row[start:end] for row, start, end in pairs]
