"""A draft model: any smaller Llama with the target's tokenizer, decoding ahead with a cache of its own."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax import random, sampling
from specjax.models import cache as kv
from specjax.models.cache import KVCache
from specjax.models.lm import LM
from specjax.tokenizer import check_same_tokenizer
from specjax.types import DecodeState, Draft, Outcome
from specjax.verify.chain import row_at


class DraftState(NamedTuple):
    cache: KVCache  # the draft model's; its lengths say how much of the committed text it holds


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """Draws K tokens from the draft model with the request's own sampling transforms (Leviathan et al. 2023).

    Args:
      lm: the draft model.
      temperature: replaces the request's while drafting. 0 drafts greedily, and then q is one-hot, as it must be.
      prefill_chunk: how many tokens are fed at a time when the cache is behind: at first use, or after a pause.
    """

    lm: LM
    temperature: float | None = None
    prefill_chunk: int = 64

    def __post_init__(self):
        if isinstance(self.temperature, float | int) and not 0 <= self.temperature < float("inf"):
            raise ValueError(f"draft temperature must be a finite number >= 0, got {self.temperature!r}")

    def widths(self, num_speculative_tokens: int) -> tuple[int, ...]:
        return (num_speculative_tokens + 1,)

    def check(self, target: LM) -> None:
        if self.lm.mesh != target.mesh:
            raise ValueError(
                f"the draft model is on {_devices(self.lm)} and the target on {_devices(target)}; put the draft beside "
                "it with specjax.parallel.replicate(draft, mesh)"
            )
        if self.lm.tokenizer is not None and target.tokenizer is not None:
            check_same_tokenizer(target.tokenizer, self.lm.tokenizer)

    def init(self, target: LM, batch: int, capacity: int) -> DraftState:
        del target
        return DraftState(self.lm.alloc_cache(batch, capacity + self.prefill_chunk))

    def propose(
        self, target: LM, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, DraftState]:
        vocab = target.config.vocab_size
        cache = self._catch_up(state)
        params = state.sampling
        if self.temperature is not None:
            params = params._replace(temperature=jnp.full_like(params.temperature, self.temperature))

        def step(carry, i):
            cache, previous, last, drafted = carry
            # Two tokens a step, the one before the last again: then full acceptance leaves no hole in the cache, and
            # all K steps are one program.
            position = state.lengths - 1 + i  # of the last token
            fed = jnp.maximum(position - 1, 0)
            pair = jnp.where((position > 0)[:, None], jnp.stack([previous, last], 1), jnp.stack([last, last], 1))
            out = self.lm(pair, kv.with_lengths(cache, fed))
            logits = _fit(row_at(out.logits, position - fed), vocab)[:, None]  # [B, 1, V]
            context = sampling.Context(state.tokens, state.lengths, state.prompt_lengths, drafted[:, None])
            q = sampling.distribution(logits, params, context)
            token = random.categorical(random.at(keys, position[:, None] + 1), q)[:, 0]
            drafted = jnp.where(jnp.arange(num_speculative_tokens) == i, token[:, None], drafted)
            return (out.cache, last, token, drafted), (token, q[:, 0])

        rows = jnp.arange(state.lengths.shape[0])
        last = state.tokens[rows, state.lengths - 1]
        previous = state.tokens[rows, jnp.maximum(state.lengths - 2, 0)]
        nothing = jnp.full((rows.shape[0], num_speculative_tokens), sampling.NO_TOKEN)
        start: Any = (cache, previous, last, nothing)
        steps = jnp.arange(num_speculative_tokens, dtype=jnp.int32)
        (cache, *_), (tokens, q) = lax.scan(step, start, steps)
        cache = kv.with_lengths(cache, state.lengths - 1 + num_speculative_tokens)
        tokens, q = tokens.swapaxes(0, 1), q.swapaxes(0, 1)  # [B, K], [B, K, V]
        positions = state.lengths[:, None] + jnp.arange(num_speculative_tokens)
        valid = (positions <= self.lm.config.max_position_embeddings) & jnp.isfinite(q[..., 0])
        return Draft(tokens, valid, q), DraftState(cache)

    def commit(self, target: LM, state: DecodeState, outcome: Outcome) -> DraftState:
        # Fed and committed tokens agree up to the new last one, which is a correction or a bonus the draft never fed.
        del target, outcome
        cache = state.drafter.cache
        return DraftState(kv.with_lengths(cache, jnp.minimum(cache.lengths, state.lengths - 1)))

    def _catch_up(self, state: DecodeState) -> KVCache:
        """Feeds committed tokens in chunks until each active row lacks at most the two that a draft step feeds."""
        chunk, wanted = self.prefill_chunk, jnp.maximum(state.lengths - 2, 0)

        def behind(cache: KVCache):
            return jnp.any(state.active & (cache.lengths < wanted))

        def feed(cache: KVCache) -> KVCache:
            index = cache.lengths[:, None] + jnp.arange(chunk)
            tokens = jnp.take_along_axis(state.tokens, index, axis=1, mode="clip")
            out = self.lm(tokens, cache, with_logits=False)
            return kv.with_lengths(out.cache, jnp.minimum(cache.lengths + chunk, jnp.maximum(wanted, cache.lengths)))

        return lax.while_loop(behind, feed, state.drafter.cache)


jax.tree_util.register_dataclass(DraftModel, data_fields=["lm"], meta_fields=["temperature", "prefill_chunk"])


def _devices(lm: LM) -> str:
    return "one device" if lm.mesh is None else f"a mesh of {lm.mesh.size}"


def _fit(logits: jax.Array, vocab: int) -> jax.Array:
    """Logits over the target's vocabulary: padding that only one model has can't be drafted."""
    logits = logits[..., :vocab]
    return jnp.pad(logits, ((0, 0), (0, vocab - logits.shape[-1])), constant_values=-jnp.inf)
