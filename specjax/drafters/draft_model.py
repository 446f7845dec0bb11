"""A draft model: any smaller model with the target's tokenizer. The draft model decodes ahead in its own cache."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.decode.arrays import row_at, span
from specjax.decode.beam_round import BeamState, Levels
from specjax.decode.prefill import catch_up, check_chunk
from specjax.decode.types import DecodeState, Draft, Plan
from specjax.drafting.base import FixedWidth
from specjax.drafting.draw_beams import draw_beams
from specjax.drafting.draw_chain import check_temperature, draw_chain
from specjax.drafting.own_model import DraftState, OwnModel
from specjax.models import cache as kv
from specjax.models import tuning
from specjax.models.cache import KVCache
from specjax.models.model import Model
from specjax.text.tokenizer import check_same_tokenizer


@dataclasses.dataclass(frozen=True)
class DraftModel(OwnModel, FixedWidth):
    """Draws K tokens from the draft model with the request's own sampling transforms (Leviathan et al. 2023).

    Args:
      lm: the draft model.
      temperature: replaces the request's temperature while drafting. None: the request's. At 0 the draft is greedy, and
        q is one-hot, because each token is then certain.
      prefill_chunk: how many tokens are fed at a time when the cache is behind, at first use or after a pause. None:
        512, on a CPU 64.
      any_tokenizer: drafts although the draft model's tokenizer gives some ids another meaning than the target's
        tokenizer does. The text stays the target's.

    Raises:
      ValueError: ``temperature`` is no number from 0 on, or ``prefill_chunk`` is no integer of at least 1.
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
            # Feeds the token before the last once more. If the whole last draft was accepted, the cache has no entry of
            # this token: a draft's own last token is never fed.
            fed = jnp.maximum(position - 1, cache.first)
            pair = jnp.where((position > fed)[:, None], jnp.stack([previous, last], 1), jnp.stack([last, last], 1))
            out = self.lm(pair, kv.with_lengths(cache, fed))
            return row_at(out.logits, position - fed), out.cache

        def one(cache, previous, last, position):
            del previous
            out = self.lm(last[:, None], kv.with_lengths(cache, position))
            return out.logits[:, 0], out.cache

        # The first draft step feeds the last two tokens, so the cache needs only the tokens before them.
        wanted = jnp.maximum(state.lengths - 2, 0)
        cache = catch_up(self.lm, own.cache, state, wanted, self.prefill_chunk)
        held = jnp.where(state.active, state.lengths - 1 + num_speculative_tokens, cache.lengths)  # idle rows may lag
        vocab = target.vocab_size
        # If a call with one token is no faster than a call with two, every step feeds two: K steps of one program.
        steps = (two, None) if tuning.least_tokens(self.lm, len(held)) == 2 else (one, two)
        draft, cache = draw_chain(
            steps[0], cache, state, keys, num_speculative_tokens, vocab, self.temperature, first=steps[1]
        )
        cache = kv.with_lengths(cache, held)
        positions = state.lengths[:, None] + span(num_speculative_tokens)
        fits = positions <= self.lm.max_positions
        return draft._replace(valid=draft.valid & fits), DraftState(cache), state.cache

    def propose_beams(
        self, target: Model, own: DraftState, state: BeamState, num_speculative_tokens: int, width: int
    ) -> tuple[Levels, DraftState]:
        levels, cache = draw_beams(self.lm, own.cache, state, num_speculative_tokens, width, target.vocab_size)
        return levels, DraftState(cache)

    def commit_beams(
        self, own: DraftState, slots: jax.Array, starts: jax.Array, lengths: jax.Array
    ) -> DraftState:
        return DraftState(kv.with_lengths(kv.move(own.cache, slots, starts), lengths))


def check_draft_model(target: Model, draft: Model, any_tokenizer: bool = False) -> None:
    """Checks that one model can draft for another.

    Raises:
      ValueError: the models are on different devices, their tokenizers differ and ``any_tokenizer`` is False, or only
        one of them has an encoder.
    """
    if draft.has_encoder != target.has_encoder:
        raise ValueError(
            f"the target has {'an' if target.has_encoder else 'no'} encoder and the draft model has "
            f"{'one' if draft.has_encoder else 'none'}; they must read prompts alike: give a draft of the target's kind"
        )
    if draft.mesh != target.mesh:
        raise ValueError(
            f"the draft model is on {_devices(draft)} and the target on {_devices(target)}; put the draft beside "
            "it with specjax.parallel.replicate(draft, target.mesh)"
        )
    if draft.tokenizer is not None and target.tokenizer is not None and not any_tokenizer:
        check_same_tokenizer(
            target.tokenizer, draft.tokenizer, min(target.vocab_size, draft.vocab_size)
        )


jax.tree_util.register_dataclass(
    DraftModel, data_fields=["lm"], meta_fields=["temperature", "prefill_chunk", "any_tokenizer"]
)


def _devices(lm: Model) -> str:
    return "one device" if lm.mesh is None else f"a mesh of {dict(lm.mesh.shape)}"
