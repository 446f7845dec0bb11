"""A draft model: any smaller Llama with the target's tokenizer, decoding ahead with a cache of its own."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.decode.arrays import row_at, span
from specjax.decode.prefill import catch_up, check_chunk
from specjax.decode.types import DecodeState, Draft, Outcome, Plan
from specjax.drafting.base import FixedWidth
from specjax.drafting.draw_chain import check_temperature, draw_chain
from specjax.models import cache as kv
from specjax.models import tuning
from specjax.models.cache import KVCache
from specjax.models.model import Model
from specjax.text.tokenizer import check_same_tokenizer


class DraftState(NamedTuple):
    cache: KVCache  # the draft model's; its lengths say how much of the committed text it holds


@dataclasses.dataclass(frozen=True)
class DraftModel(FixedWidth):
    """Draws K tokens from the draft model with the request's own sampling transforms (Leviathan et al. 2023).

    Args:
      lm: the draft model.
      temperature: replaces the request's while drafting. 0 drafts greedily, and then q is one-hot, as it must be.
      prefill_chunk: how many tokens are fed at a time when the cache is behind: at first use, or after a pause; None:
        512, on a CPU 64.
      any_tokenizer: drafts although its tokenizer gives ids another meaning than the target's does. The text stays the
        target's.
    """

    lm: Model
    temperature: float | None = None
    prefill_chunk: int | None = None
    any_tokenizer: bool = False

    def __post_init__(self):
        check_temperature(self.temperature)
        check_chunk(self.prefill_chunk)

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        check_draft_model(target, self.lm, self.any_tokenizer)
        return super().plan(target, num_speculative_tokens)

    def init(self, target: Model, batch: int, capacity: int, num_speculative_tokens: int) -> DraftState:
        del target, num_speculative_tokens
        return DraftState(self.lm.alloc_cache(batch, capacity))

    def propose(
        self, target: Model, own: DraftState, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, DraftState, KVCache]:
        def two(cache, previous, last, position):
            # The token before the last again: then full acceptance leaves no hole in the cache.
            fed = jnp.maximum(position - 1, 0)
            pair = jnp.where((position > 0)[:, None], jnp.stack([previous, last], 1), jnp.stack([last, last], 1))
            out = self.lm(pair, kv.with_lengths(cache, fed))
            return row_at(out.logits, position - fed), out.cache

        def one(cache, previous, last, position):
            del previous
            out = self.lm(last[:, None], kv.with_lengths(cache, position))
            return out.logits[:, 0], out.cache

        # The first step feeds the last two tokens itself.
        wanted = jnp.maximum(state.lengths - 2, 0)
        cache = catch_up(self.lm, own.cache, state, wanted, self.prefill_chunk)
        held = jnp.where(state.active, state.lengths - 1 + num_speculative_tokens, cache.lengths)  # idle rows may lag
        vocab = target.vocab_size
        # Where one token is no faster than two, all K steps are one program.
        steps = (two, None) if tuning.least_tokens(self.lm, len(held)) == 2 else (one, two)
        draft, cache = draw_chain(
            steps[0], cache, state, keys, num_speculative_tokens, vocab, self.temperature, first=steps[1]
        )
        cache = kv.with_lengths(cache, held)
        positions = state.lengths[:, None] + span(num_speculative_tokens)
        fits = positions <= self.lm.max_positions
        return draft._replace(valid=draft.valid & fits), DraftState(cache), state.cache

    def commit(self, target: Model, own: DraftState, state: DecodeState, outcome: Outcome | None) -> DraftState:
        # Fed and committed tokens agree up to the new last one, which is a correction or a bonus the draft never fed.
        del target, outcome
        return DraftState(kv.with_lengths(own.cache, jnp.minimum(own.cache.lengths, state.lengths - 1)))


def check_draft_model(target: Model, draft: Model, any_tokenizer: bool = False) -> None:
    """Raises ValueError if the two live on different devices, or speak different tokens and may not."""
    if draft.mesh != target.mesh:
        raise ValueError(
            f"the draft model is on {_devices(draft)} and the target on {_devices(target)}; put the draft beside "
            "it with specjax.parallel.replicate(draft, mesh)"
        )
    if draft.tokenizer is not None and target.tokenizer is not None and not any_tokenizer:
        check_same_tokenizer(
            target.tokenizer, draft.tokenizer, min(target.vocab_size, draft.vocab_size)
        )


jax.tree_util.register_dataclass(
    DraftModel, data_fields=["lm"], meta_fields=["temperature", "prefill_chunk", "any_tokenizer"]
)


def _devices(lm: Model) -> str:
    return "one device" if lm.mesh is None else f"a mesh of {lm.mesh.size}"
