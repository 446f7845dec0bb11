"""Prompt lookup: propose what followed the last n tokens earlier in the same text (Saxena 2023; vLLM's ``ngram``)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.decode.ngram import longest_match
from specjax.decode.types import DecodeState, Draft, Plan
from specjax.drafting.base import OftenSilent, static
from specjax.models.cache import KVCache
from specjax.models.model import Model


@static
@dataclasses.dataclass(frozen=True)
class PromptLookup(OftenSilent):
    """Copies from the context, on the device; a row without a match proposes nothing.

    The longest match of ``prompt_lookup_max`` down to ``prompt_lookup_min`` tokens wins, the latest one among equals.
    A copy that runs into the end of the text goes on with what it has itself copied, as a loop would.
    """

    prompt_lookup_max: int = 3
    prompt_lookup_min: int = 2

    def __post_init__(self):
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if not (isinstance(low, int) and isinstance(high, int) and 1 <= low <= high):
            raise ValueError(
                f"prompt lookup needs integers 1 <= prompt_lookup_min <= prompt_lookup_max, got {low!r} and {high!r}"
            )

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        return super().plan(target, num_speculative_tokens)._replace(gives_probs=False)

    def propose(
        self, target: Model, own: tuple, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, tuple, KVCache]:
        del target, keys

        def row(tokens, length):
            run, start = longest_match(tokens, length, self.prompt_lookup_max)
            offset = jnp.arange(num_speculative_tokens, dtype=jnp.int32) % jnp.maximum(length - start, 1)
            found = run >= self.prompt_lookup_min
            return tokens[start + offset], jnp.broadcast_to(found, (num_speculative_tokens,))

        tokens, valid = jax.vmap(row)(state.tokens, state.lengths)
        return Draft(tokens, valid, None), own, state.cache
