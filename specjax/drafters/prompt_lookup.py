"""Prompt lookup: propose what followed the last n tokens earlier in the same text (Saxena 2023; vLLM's ``ngram``)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from specjax.drafters.base import OftenSilent, static
from specjax.models.lm import LM
from specjax.ngram import longest_match
from specjax.types import DecodeState, Draft


@static
@dataclasses.dataclass(frozen=True)
class PromptLookup(OftenSilent):
    """Copies from the context, on the device; a row without a match proposes nothing.

    The longest match of ``prompt_lookup_max`` down to ``prompt_lookup_min`` tokens wins, the latest one among equals.
    A copy that runs into the end of the text goes on with what it has itself copied, as a loop would.
    """

    gives_probs: ClassVar[bool] = False
    prompt_lookup_max: int = 3
    prompt_lookup_min: int = 2

    def __post_init__(self):
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if not (isinstance(low, int) and isinstance(high, int) and 1 <= low <= high):
            raise ValueError(
                f"prompt lookup needs integers 1 <= prompt_lookup_min <= prompt_lookup_max, got {low!r} and {high!r}"
            )

    def propose(
        self, target: LM, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, DecodeState]:
        del target, keys

        def row(tokens, length):
            run, start = longest_match(tokens, length, self.prompt_lookup_max)
            offset = jnp.arange(num_speculative_tokens) % jnp.maximum(length - start, 1)
            found = run >= self.prompt_lookup_min
            return tokens[start + offset], jnp.broadcast_to(found, (num_speculative_tokens,))

        tokens, valid = jax.vmap(row)(state.tokens, state.lengths)
        return Draft(tokens, valid, None), state
