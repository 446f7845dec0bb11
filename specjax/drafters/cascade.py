"""A cascade: the draft model is itself decoded speculatively, by the same round, with a cheaper drafter under it.

Any depth: n-grams under a 1B model under an 8B one; the staged speculation of Spector and Re 2023 and of Chen et al.
2023 (cascade speculative drafting), with TriForce (Sun et al. 2024) as the case of a compressed cache.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax import decode, sampling
from specjax.drafters.base import Chain
from specjax.drafters.model import check_draft_model
from specjax.drafters.prefill import catch_up, check_chunk
from specjax.models import cache as kv
from specjax.models.cache import KVCache
from specjax.models.lm import LM
from specjax.types import DecodeState, Draft, Drafter, Outcome
from specjax.verify.chain import certainty
from specjax.verify.coupled import Coupled


class CascadeState(NamedTuple):
    cache: KVCache  # the draft model's
    inner: Any


class GivenNoise(Coupled):
    """Coupled verification with the keys as they are: the draft model draws what :class:`DraftModel` would draw."""

    def draft_keys(self, keys: jax.Array, lengths: jax.Array) -> jax.Array:
        del lengths
        return keys


@dataclasses.dataclass(frozen=True)
class Cascade(Chain):
    """Proposes token for token what ``DraftModel(lm)`` proposes, in fewer calls of ``lm``.

    Args:
      inner: the drafter that drafts for ``lm``.
      lm: the draft model, with the target's vocabulary.
      num_speculative_tokens: that ``inner`` proposes to ``lm`` at a time.
      prefill_chunk: tokens fed at a time when ``lm``'s cache is behind; None: 512, on a CPU 64.
    """

    inner: Drafter
    lm: LM
    num_speculative_tokens: int = 3
    prefill_chunk: int | None = None

    def __post_init__(self):
        size = self.num_speculative_tokens
        if isinstance(size, int) and size < 1:
            raise ValueError(f"a cascade's own num_speculative_tokens must be at least 1, got {size}")
        check_chunk(self.prefill_chunk)

    def check(self, target: LM) -> None:
        check_draft_model(target, self.lm)
        if self.lm.config.vocab_size != target.config.vocab_size:
            raise ValueError(
                f"a cascade's models need one vocabulary size, got {target.config.vocab_size} for the target and "
                f"{self.lm.config.vocab_size} for the draft; DraftModel can do with two"
            )
        self.inner.check(self.lm)

    def init(self, target: LM, batch: int, capacity: int, num_speculative_tokens: int) -> CascadeState:
        del target
        room = kv.room(capacity + num_speculative_tokens + self._block)
        inner = self.inner.init(self.lm, batch, room, self.num_speculative_tokens)
        return CascadeState(self.lm.alloc_cache(batch, room), inner)

    def propose(
        self, target: LM, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, DecodeState]:
        own = self._request(state, keys, num_speculative_tokens)
        batch, size, headroom = own.lengths.shape[0], num_speculative_tokens, self._block
        verifier, held = GivenNoise(), own.cache.lengths

        def body(carry):
            own, told = carry
            before = own.lengths - state.lengths  # drafted so far
            own, info, p, logits = decode.advance(self.lm, self.inner, verifier, self.num_speculative_tokens, own)
            new = p, *certainty(logits, info.tokens)
            return own, jax.tree.map(lambda all_rows, rows: jax.vmap(_put)(all_rows, rows, before), told, new)

        sure = jnp.zeros((batch, size + headroom), jnp.float32)
        told = jnp.zeros((batch, size + headroom, target.config.vocab_size), jnp.float32), sure, sure
        own, told = lax.while_loop(lambda carry: jnp.any(carry[0].active), body, (own, told))
        q, confidence, entropy = jax.tree.map(lambda x: x[:, :size], told)
        offset = jnp.arange(size)
        tokens = jnp.take_along_axis(own.tokens, state.lengths[:, None] + offset, axis=1)
        drafted = offset < (own.lengths - state.lengths)[:, None]
        fits = state.lengths[:, None] + offset <= self.lm.config.max_position_embeddings
        valid = drafted & fits & jnp.isfinite(q[..., 0])
        draft = Draft(tokens, valid, q, confidence=confidence, entropy=entropy)
        cache = kv.with_lengths(own.cache, jnp.where(state.active, own.cache.lengths, held))  # idle rows may lag
        return draft, state._replace(drafter=CascadeState(cache, own.drafter))

    @property
    def _block(self) -> int:
        """The widest block that the draft model verifies."""
        return self.inner.widths(self.num_speculative_tokens)[-1]

    def _request(self, state: DecodeState, keys: jax.Array, size: int) -> DecodeState:
        """The draft model's own decoding: K more tokens for every active row, with nothing to stop it but that."""
        cache = catch_up(self.lm, state.drafter.cache, state, state.lengths - 1, self.prefill_chunk)
        nothing = jnp.zeros((state.lengths.shape[0], size), jnp.int32)
        asked = state._replace(
            key=keys,
            stop_ids=jnp.full_like(state.stop_ids, sampling.NO_TOKEN),
            limit=state.lengths + size,
            tokens=jnp.pad(state.tokens, ((0, 0), (0, self._block))),
            failed=jnp.zeros_like(state.failed),
            cache=cache,
            drafter=state.drafter.inner,
            rounds=nothing[:, 0],
            drafted=nothing,
            accepted=nothing,
            logprobs=None,
        )
        return self.inner.resume(self.lm, asked)

    def commit(self, target: LM, state: DecodeState, outcome: Outcome | None) -> DecodeState:
        del target, outcome
        cache, inner = state.drafter
        cache = kv.with_lengths(cache, jnp.minimum(cache.lengths, state.lengths - 1))
        # One round of the target may undo several of the draft model's.
        inner = self.inner.commit(self.lm, state._replace(cache=cache, drafter=inner), None).drafter
        return state._replace(drafter=CascadeState(cache, inner))


def _put(row: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(row, new, (at, *(0,) * (row.ndim - 1)))


jax.tree_util.register_dataclass(
    Cascade, data_fields=["inner", "lm"], meta_fields=["num_speculative_tokens", "prefill_chunk"]
)
