"""A cascade: the draft model is itself decoded speculatively, by the same round, with a cheaper drafter below it.

A cascade can be of any depth: n-grams may draft for a 1B model that drafts for an 8B model. Sources: staged speculation
(Spector and Re 2023) and cascade speculative drafting (Chen et al. 2023). TriForce (Sun et al. 2024) is a cascade whose
draft model reads a compressed cache.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode import random, sampling
from specjax.decode import round as rounds
from specjax.decode.arrays import span
from specjax.decode.decoder import Decoder
from specjax.decode.history import put
from specjax.decode.numeric import check_count
from specjax.decode.prefill import catch_up, check_chunk, read_along, read_sources
from specjax.decode.types import DecodeState, Draft, Drafter, Outcome, Plan
from specjax.drafters.draft_model import check_draft_model
from specjax.drafting.base import FixedWidth
from specjax.models import cache as kv
from specjax.models.cache import KVCache
from specjax.models.model import Model, Output
from specjax.verify import pieces as chain
from specjax.verify.coupled import Coupled


class CascadeState(NamedTuple):
    # The draft model's cache.
    cache: KVCache
    # The inner drafter's own state.
    inner: Any


class GivenNoise(Coupled):
    """Coupled verification that draws with the given keys, so that the draft model draws the tokens of ``DraftModel``.

    A drafter gets keys that are already folded for drafting. :class:`Coupled` itself would fold them once more.
    """

    def draft_keys(self, keys: jax.Array, lengths: jax.Array) -> jax.Array:
        del lengths
        return keys


@dataclasses.dataclass(frozen=True)
class Cascade(FixedWidth):
    """Proposes token for token the draft of ``DraftModel(lm)``, in fewer calls of ``lm``.

    Args:
      inner: the drafter that drafts for ``lm``.
      lm: the draft model. Its vocabulary has the size of the target's.
      num_speculative_tokens: how many tokens ``inner`` proposes to ``lm`` at a time.
      prefill_chunk: how many tokens are fed at a time when ``lm``'s cache is behind. None: 512, on a CPU 64.
      any_tokenizer: drafts although the tokenizer of ``lm`` differs from the target's, as in ``DraftModel``.

    Raises:
      ValueError: num_speculative_tokens or prefill_chunk is no integer of at least 1.
    """

    inner: Drafter
    lm: Model
    num_speculative_tokens: int = 3
    prefill_chunk: int | None = None
    any_tokenizer: bool = False

    def __post_init__(self):
        check_count("a cascade's own num_speculative_tokens", self.num_speculative_tokens)
        check_chunk(self.prefill_chunk)

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        check_draft_model(target, self.lm, self.any_tokenizer)
        if self.lm.vocab_size != target.vocab_size:
            raise ValueError(
                f"a cascade's models need one vocabulary size, got {target.vocab_size} for the target and "
                f"{self.lm.vocab_size} for the draft; use DraftModel, which fits a draft of another size to the target"
            )
        inner = self.inner.plan(self.lm, self.num_speculative_tokens)
        return super().plan(target, num_speculative_tokens)._replace(shared_shapes=inner.shared_shapes)

    def init(self, target: Model, batch: int, capacity: int, num_speculative_tokens: int) -> CascadeState:
        del target
        room = kv.room(capacity + num_speculative_tokens + self._decoder.plan.block)
        inner = self.inner.init(self.lm, batch, room, self.num_speculative_tokens)
        return CascadeState(self.lm.alloc_cache(batch, room), inner)

    def follow(
        self, target: Model, own: CascadeState, state: DecodeState, starts: jax.Array, out: Output
    ) -> CascadeState:
        del target
        taps = self._decoder.plan.taps
        read = read_along(self.lm, own.cache, state, starts, out.hidden.shape[1], taps)
        return CascadeState(read.cache, self.inner.follow(self.lm, own.inner, state, starts, read))

    def resume(self, target: Model, own: CascadeState, state: DecodeState) -> CascadeState:
        del target  # all else catches up in ``propose``
        return own._replace(cache=read_sources(self.lm, own.cache, state))

    def propose(
        self, target: Model, own: CascadeState, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, CascadeState, KVCache]:
        decoder, size = self._decoder, num_speculative_tokens
        drafting = self._begin(own, state, keys, size)
        held, batch, room = drafting.cache.lengths, len(state.lengths), size + decoder.plan.block

        def body(carry: tuple) -> tuple:
            drafting, told = carry
            before = drafting.lengths - state.lengths  # i32[B] tokens drafted so far
            draft, drafting = rounds.propose(decoder, drafting)
            scored = rounds.score(decoder, drafting, draft)
            judged = rounds.judge(decoder, drafting, scored)
            path = sampling.chain_path(judged.draft.tokens)
            logits = sampling.unsharpened(judged.out.logits, drafting.request.sampling, drafting.context(path))
            drafting, info = rounds.commit(decoder, drafting, scored, judged)
            new = judged.p, *chain.certainty(logits, info.tokens)
            return drafting, jax.tree.map(lambda buffer, block: put(buffer, block, before), told, new)

        sure = jnp.zeros((batch, room), jnp.float32)
        told = jnp.zeros((batch, room, target.vocab_size), jnp.float32), sure, sure  # q, confidence and entropy
        drafting, told = lax.while_loop(lambda carry: jnp.any(carry[0].active), body, (drafting, told))
        q, confidence, entropy = jax.tree.map(lambda x: x[:, :size], told)
        offset = span(size)
        tokens = jnp.take_along_axis(drafting.tokens, state.lengths[:, None] + offset, axis=1)
        drafted = offset < (drafting.lengths - state.lengths)[:, None]
        fits = state.lengths[:, None] + offset <= self.lm.max_positions
        valid = drafted & fits & jnp.isfinite(q[..., 0])
        draft = Draft(tokens, valid, q, confidence=confidence, entropy=entropy)
        lengths = jnp.where(state.active, drafting.cache.lengths, held)  # an idle row's cache may lag behind
        return draft, CascadeState(kv.with_lengths(drafting.cache, lengths), drafting.drafter), state.cache

    def commit(self, target: Model, own: CascadeState, state: DecodeState, outcome: Outcome | None) -> CascadeState:
        del target, outcome
        cache = kv.with_lengths(own.cache, jnp.minimum(own.cache.lengths, state.lengths - 1))
        # One round of the target may undo several rounds of the draft model. So the inner drafter is told only the new
        # lengths, by an outcome of None.
        inner = self.inner.commit(self.lm, own.inner, state._replace(cache=cache, drafter=own.inner), None)
        return CascadeState(cache, inner)

    @property
    def _decoder(self) -> Decoder:
        """The decoder whose target is the draft model and whose drafter is the inner drafter.

        All its calls have one width. With several widths the last bits of a row's q would depend on how long the inner
        drafts of other rows are.
        """
        block = self.inner.plan(self.lm, self.num_speculative_tokens).block
        return Decoder(self.lm, self.inner, GivenNoise(), self.num_speculative_tokens, block_width=block)

    def _begin(self, own: CascadeState, state: DecodeState, keys: jax.Array, size: int) -> DecodeState:
        """The state from which the draft model decodes ``size`` = K more tokens for every active row.

        No stop token ends a row there, only the new limit. The token buffer has room for one inner block more.
        """
        request = state.request._replace(
            key=random.shared(keys),
            stop_ids=jnp.full_like(state.request.stop_ids, sampling.NO_TOKEN),
            limit=state.lengths + size,
        )
        drafting = state._replace(
            request=request,
            tokens=jnp.pad(state.tokens, ((0, 0), (0, self._decoder.plan.block))),
            failed=jnp.zeros_like(state.failed),
            cache=catch_up(self.lm, own.cache, state, state.lengths - 1, self.prefill_chunk),
            drafter=own.inner,
            history=None,
        )
        return drafting._replace(drafter=self.inner.resume(self.lm, own.inner, drafting))


jax.tree_util.register_dataclass(
    Cascade, data_fields=["inner", "lm"], meta_fields=["num_speculative_tokens", "prefill_chunk", "any_tokenizer"]
)
