"""Choosing K while running: a wrapper that lets a policy say how many tokens each row drafts in a round.

The shapes stay fixed: a row's choice masks what lies past it, and the drafter runs at the smallest of a few compiled
sizes that holds every row's. A choice may rest on what is settled by then, the committed text and the judgement of
it, and for later positions of a block on the tokens before them; never on draws that the next round repeats.
"""

import dataclasses
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode.arrays import leading_run, span, where_rows
from specjax.decode.types import DecodeState, Draft, Drafter, Outcome, Plan
from specjax.drafting import theory
from specjax.drafting.base import static
from specjax.models.cache import KVCache
from specjax.models.model import Model, Output
from specjax.verify import pieces as chain


class Round(NamedTuple):
    """What a policy learns of a row's round."""

    drafted: jax.Array  # i32[B] tokens that were verified
    accepted: jax.Array  # i32[B] of those, accepted
    entropy: jax.Array  # f32[B] mean of ``Draft.entropy`` over the positions that were judged; NaN without any


class Policy(Protocol):
    """Says how many tokens a row drafts. Hashable and static; what it learns is a pytree of arrays with rows first.

    ``by_probs`` is True if it judges by the draft's probabilities: then a drafter must give some.
    """

    by_probs: ClassVar[bool]

    def init(self, batch: int, num_speculative_tokens: int) -> Any: ...

    def choose(self, own: Any, num_speculative_tokens: int) -> jax.Array:
        """i32[B], from 0 to K."""
        ...

    def goes_on(self, draft: Draft) -> jax.Array:
        """bool[B, K]: whether the chain goes on after each drafted token."""
        ...

    def learn(self, own: Any, seen: Round) -> Any: ...


class Unconditional:
    """Part of policies that choose before the draft is there."""

    by_probs: ClassVar[bool] = False

    def goes_on(self, draft: Draft) -> jax.Array:
        return jnp.ones(draft.tokens.shape, bool)


@static
@dataclasses.dataclass(frozen=True)
class Heuristic(Unconditional):
    """Two more after a round that was accepted whole, one fewer after any other (Hugging Face's ``heuristic``)."""

    start: int = 5
    smallest: int = 1

    def init(self, batch: int, num_speculative_tokens: int) -> jax.Array:
        return jnp.full(batch, min(self.start, num_speculative_tokens), jnp.int32)

    def choose(self, own: jax.Array, num_speculative_tokens: int) -> jax.Array:
        return jnp.clip(own, self.smallest, num_speculative_tokens)

    def learn(self, own: jax.Array, seen: Round) -> jax.Array:
        # Clipped by choose(); kept within reach here so that a long winning streak is not a debt later.
        step = jnp.where(seen.accepted == seen.drafted, 2, -1)
        return jnp.where(seen.drafted > 0, jnp.maximum(jnp.minimum(own, seen.drafted) + step, self.smallest), own)


@static
@dataclasses.dataclass(frozen=True)
class Confidence:
    """Stops after a drafted token of which the draft was less sure than ``threshold``; that token is still verified.

    Leaving the token out would be wrong: whether a token is judged must not depend on which token it is. How sure the
    draft was is the token's probability before temperature and filters (``Draft.confidence``): at temperature 0 q is
    certain of every token.
    """

    by_probs: ClassVar[bool] = True
    threshold: float = 0.4

    def init(self, batch: int, num_speculative_tokens: int) -> tuple:
        return ()

    def choose(self, own: tuple, num_speculative_tokens: int) -> jax.Array:
        return jnp.int32(num_speculative_tokens)

    def goes_on(self, draft: Draft) -> jax.Array:
        return chain.told_confidence(draft) >= self.threshold

    def learn(self, own: tuple, seen: Round) -> tuple:
        return own


@static
@dataclasses.dataclass(frozen=True)
class EntropyGuided(Unconditional):
    """EGAG: K falls from ``gamma_max`` to ``gamma_min`` as the draft's normalised entropy rises from 0 to 1.

    The entropy is that of the positions judged in the rounds before, smoothed: beta * old + (1 - beta) * new. It is
    that of the draft's law before temperature and filters (``Draft.entropy``).
    """

    by_probs: ClassVar[bool] = True
    gamma_min: int = 1
    gamma_max: int | None = None  # None: num_speculative_tokens
    ema_beta: float = 0.0

    def __post_init__(self):
        high = self.gamma_max if self.gamma_max is not None else self.gamma_min
        if not (0 <= self.gamma_min <= high and 0 <= self.ema_beta < 1):
            raise ValueError(
                f"needs 0 <= gamma_min <= gamma_max and 0 <= ema_beta < 1, got {self.gamma_min!r}, "
                f"{self.gamma_max!r} and {self.ema_beta!r}"
            )

    def init(self, batch: int, num_speculative_tokens: int) -> jax.Array:
        return jnp.full(batch, jnp.nan, jnp.float32)  # no entropy yet

    def choose(self, own: jax.Array, num_speculative_tokens: int) -> jax.Array:
        high = num_speculative_tokens if self.gamma_max is None else min(self.gamma_max, num_speculative_tokens)
        low = min(self.gamma_min, high)
        return jnp.round(high - jnp.nan_to_num(own) * (high - low)).astype(jnp.int32)

    def learn(self, own: jax.Array, seen: Round) -> jax.Array:
        old = jnp.where(jnp.isnan(own), seen.entropy, own)
        new = self.ema_beta * old + (1 - self.ema_beta) * seen.entropy
        return jnp.where(jnp.isnan(seen.entropy), own, new)


@static
@dataclasses.dataclass(frozen=True)
class CostModel(Unconditional):
    """The K of theorem 3.8 for a running estimate of alpha (Leviathan et al. 2023, section 3.5); 0 where none pays.

    Args:
      c: time of a draft step over that of a target step, as measured.
      prior: alpha before anything is known, worth ``weight`` judged tokens.
      decay: what a round leaves of the evidence before it. A row that stopped drafting so forgets, and tries again.
    """

    c: float
    prior: float = 0.7
    weight: float = 4.0
    decay: float = 0.95

    def init(self, batch: int, num_speculative_tokens: int) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(batch, jnp.float32), jnp.zeros(batch, jnp.float32)  # accepted, judged

    def choose(self, own: tuple[jax.Array, jax.Array], num_speculative_tokens: int) -> jax.Array:
        accepted, judged = own
        alpha = (accepted + self.prior * self.weight) / (judged + self.weight)
        return theory.best_gamma(alpha, self.c, num_speculative_tokens).astype(jnp.int32)

    def learn(self, own: tuple[jax.Array, jax.Array], seen: Round) -> tuple[jax.Array, jax.Array]:
        judged = jnp.minimum(seen.accepted + 1, seen.drafted)
        seen_accepted, judged = seen.accepted.astype(jnp.float32), judged.astype(jnp.float32)
        return self.decay * own[0] + seen_accepted, self.decay * own[1] + judged


class AdaptiveState(NamedTuple):
    inner: Any
    policy: Any
    entropy: jax.Array  # f32[B, K] of the draft under way
    asked: jax.Array  # bool[B] whether the row takes part in it: others' rounds are not the policy's to learn from


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """``drafter`` with K chosen by ``policy``, per row, up to num_speculative_tokens; nothing outlives a request."""

    drafter: Drafter
    policy: Policy

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        plan = self.drafter.plan(target, num_speculative_tokens)
        if plan.trees:
            raise ValueError(
                f"Adaptive chooses how long a chain is, and {type(self.drafter).__name__} drafts trees; run it as it is"
            )
        if self.policy.by_probs and not plan.gives_probs:
            raise ValueError(
                f"{type(self.policy).__name__} judges by the draft's probabilities, and {type(self.drafter).__name__} "
                "gives no probabilities of its own; choose Heuristic or CostModel"
            )
        return plan._replace(widths=(1, *(size + 1 for size in self.sizes(num_speculative_tokens))))

    def init(self, target: Model, batch: int, capacity: int, num_speculative_tokens: int) -> AdaptiveState:
        return AdaptiveState(
            self.drafter.init(target, batch, capacity, num_speculative_tokens),
            self.policy.init(batch, num_speculative_tokens),
            jnp.zeros((batch, num_speculative_tokens), jnp.float32),
            jnp.zeros(batch, bool),
        )

    def follow(
        self, target: Model, own: AdaptiveState, state: DecodeState, starts: jax.Array, out: Output
    ) -> AdaptiveState:
        return own._replace(inner=self.drafter.follow(target, own.inner, state, starts, out))

    def resume(self, target: Model, own: AdaptiveState, state: DecodeState) -> AdaptiveState:
        return own._replace(inner=self.drafter.resume(target, own.inner, state))

    def propose(
        self, target: Model, own: AdaptiveState, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, AdaptiveState, KVCache]:
        chosen = jnp.broadcast_to(self.policy.choose(own.policy, num_speculative_tokens), state.lengths.shape)  # [B]
        sizes = self.sizes(num_speculative_tokens)

        def at_size(size: int, inner: Any, cache: KVCache) -> tuple[Draft, Any, KVCache]:
            draft, inner, cache = self.drafter.propose(target, inner, state._replace(cache=cache), keys, size)
            short = ((0, 0), (0, num_speculative_tokens - size))
            probs = None if draft.probs is None else jnp.pad(draft.probs, (*short, (0, 0)))
            told = chain.told_confidence(draft), chain.told_entropy(draft)
            tokens, valid, confidence, entropy = (jnp.pad(x, short) for x in (draft.tokens, draft.valid, *told))
            draft = draft._replace(tokens=tokens, valid=valid, probs=probs, confidence=confidence, entropy=entropy)
            return draft, inner, cache

        most = jnp.max(jnp.where(state.active, chosen, 0))
        branch = jnp.sum(most > jnp.array(sizes[:-1], jnp.int32), dtype=jnp.int32)
        branches = [partial(at_size, size) for size in sizes]
        draft, inner, cache = lax.switch(branch, branches, own.inner, state.cache)
        goes_on = self.policy.goes_on(draft)[:, :-1]
        length = jnp.minimum(1 + leading_run(goes_on), chosen)
        valid = draft.valid & (span(num_speculative_tokens) < length[:, None])
        return draft._replace(valid=valid), AdaptiveState(inner, own.policy, draft.entropy, state.active), cache

    def commit(self, target: Model, own: AdaptiveState, state: DecodeState, outcome: Outcome | None) -> AdaptiveState:
        inner, policy = self.drafter.commit(target, own.inner, state, outcome), own.policy
        if outcome is not None:
            judged = jnp.minimum(outcome.accepted + 1, outcome.drafted)
            was_judged = span(own.entropy.shape[1]) < judged[:, None]
            total = jnp.sum(jnp.where(was_judged, own.entropy, 0.0), axis=1)
            mean = total / judged.astype(jnp.float32)  # 0 / 0 is the NaN of no evidence
            learned = self.policy.learn(policy, Round(outcome.drafted, outcome.accepted, mean))
            policy = where_rows(own.asked, learned, policy)
        return AdaptiveState(inner, policy, own.entropy, jnp.zeros_like(own.asked))

    def sizes(self, num_speculative_tokens: int) -> list[int]:
        """Draft lengths that are compiled: 1, 2, 4, ... and K."""
        return [*(1 << i for i in range((num_speculative_tokens - 1).bit_length())), num_speculative_tokens]


jax.tree_util.register_dataclass(Adaptive, data_fields=["drafter"], meta_fields=["policy"])
