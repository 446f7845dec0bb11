"""Prompt lookup: copy the tokens after an earlier place where the text's last n tokens stand.

Source: Saxena 2023, "Prompt lookup decoding"; vLLM calls the method ``ngram``.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.decode.ngram import longest_match
from specjax.decode.numeric import is_int
from specjax.decode.types import DecodeState, Draft, Plan
from specjax.drafting.base import OftenSilent, static
from specjax.models.cache import KVCache
from specjax.models.model import Model


@static
@dataclasses.dataclass(frozen=True)
class PromptLookup(OftenSilent):
    """Copies from the row's own text, on the device. A row without a match proposes nothing.

    A match is an earlier place with the same last tokens. The longest match is taken, and among equally long ones the
    latest. If a copy reaches the end of the text, the copy goes on with its own tokens, as in a loop.

    Args:
      prompt_lookup_max: the most tokens of a match that are compared.
      prompt_lookup_min: the fewest tokens of a match.

    Raises:
      ValueError: unless both are integers and 1 <= prompt_lookup_min <= prompt_lookup_max.
    """

    prompt_lookup_max: int = 3
    prompt_lookup_min: int = 2

    def __post_init__(self):
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if not (is_int(low) and is_int(high) and 1 <= low <= high):
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
