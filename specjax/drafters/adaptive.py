"""A wrapper that chooses K while running: a policy says how many tokens each row drafts in a round.

Shapes stay fixed. The drafter runs at the smallest of a few compiled sizes that is enough for every row, and the tokens
past a row's choice are masked. A policy may use the committed text and the verdicts on it. For later positions of a
block a policy may also use the drafted tokens before them. A policy must never use draws that the next round repeats.
"""

import dataclasses
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode.arrays import fitted, leading_run, span, where_rows
from specjax.decode.numeric import SMALLEST_FLOAT, check_counts, check_number, in_range, is_int
from specjax.decode.types import DecodeState, Draft, Drafter, Outcome, Plan
from specjax.drafting import theory
from specjax.drafting.base import static
from specjax.drafting.combine import widened
from specjax.models.cache import KVCache
from specjax.models.model import Model, Output
from specjax.verify import pieces as chain


class Round(NamedTuple):
    """What a policy learns of a row's round."""

    # i32[B] How many drafted tokens were verified.
    drafted: jax.Array
    # i32[B] How many of them were accepted.
    accepted: jax.Array
    # f32[B] The mean of ``Draft.entropy`` over the judged positions: the accepted ones and the first refused one. NaN
    # if no position was judged.
    entropy: jax.Array


class Policy(Protocol):
    """Says how many tokens a row drafts. Hashable, and static in jit.

    A policy's own state, ``own``, is a pytree of arrays with rows first.
    """

    # Whether the policy judges by the draft's probabilities. If so, only drafters with probabilities can be wrapped.
    by_probs: ClassVar[bool]

    def init(self, batch: int, num_speculative_tokens: int) -> Any:
        """The own state of ``batch`` rows before their first round."""
        ...

    def choose(self, own: Any, num_speculative_tokens: int) -> jax.Array:
        """How many tokens are drafted, chosen before the draft: i32[B], or i32[] for all rows, from 0 to K."""
        ...

    def goes_on(self, draft: Draft) -> jax.Array:
        """Whether the chain goes on after each drafted token, chosen from the draft: bool[B, K]."""
        ...

    def learn(self, own: Any, seen: Round) -> Any:
        """The own state after one more round."""
        ...


class Unconditional:
    """Base of the policies that choose before the draft, and so never end a chain by its tokens."""

    by_probs: ClassVar[bool] = False

    def goes_on(self, draft: Draft) -> jax.Array:
        return jnp.ones(draft.tokens.shape, bool)


@static
@dataclasses.dataclass(frozen=True)
class Heuristic(Unconditional):
    """Drafts two tokens more after a round that was accepted whole, and one fewer after any other round.

    This is the schedule ``heuristic`` of Hugging Face's transformers.

    Args:
      start: tokens drafted in the first round.
      smallest: the fewest tokens that are drafted. A round without a draft would teach the policy nothing.

    Raises:
      ValueError: unless both are integers of at least 1.
    """

    start: int = 5
    smallest: int = 1

    def __post_init__(self):
        check_counts(1, start=self.start, smallest=self.smallest)

    def init(self, batch: int, num_speculative_tokens: int) -> jax.Array:
        return jnp.full(batch, min(self.start, num_speculative_tokens), jnp.int32)

    def choose(self, own: jax.Array, num_speculative_tokens: int) -> jax.Array:
        return jnp.clip(own, self.smallest, num_speculative_tokens)

    def learn(self, own: jax.Array, seen: Round) -> jax.Array:
        # ``choose`` clips the number to K. Here the step starts from the number that was drafted, so that the number
        # does not grow far above K while everything is accepted, and falls at once after a refusal.
        step = jnp.where(seen.accepted == seen.drafted, 2, -1)
        return jnp.where(seen.drafted > 0, jnp.maximum(jnp.minimum(own, seen.drafted) + step, self.smallest), own)


@static
@dataclasses.dataclass(frozen=True)
class Confidence:
    """Ends the chain after the first drafted token whose confidence is below ``threshold``.

    This token is still verified. To leave the token out would be wrong, because whether a token is judged must not
    depend on the token itself. The confidence is the token's probability before temperature and filters
    (``Draft.confidence``), because q at temperature 0 is 1 for every token.

    Args:
      threshold: the least confidence after which the chain goes on.

    Raises:
      ValueError: ``threshold`` is no number from 0 to 1.
    """

    by_probs: ClassVar[bool] = True
    threshold: float = 0.4

    def __post_init__(self):
        check_number("threshold", self.threshold, 0, 1)

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

    The entropy is a moving average over the judged positions of earlier rounds: beta * old + (1 - beta) * new. The
    draft's distribution before temperature and filters has this entropy (``Draft.entropy``).

    Args:
      gamma_min: tokens drafted at entropy 1, at least one: a round without a draft would teach the policy nothing.
      gamma_max: tokens drafted at entropy 0. None: num_speculative_tokens.
      ema_beta: beta, the weight of the old average.

    Raises:
      ValueError: unless gamma_min and gamma_max are integers, 1 <= gamma_min <= gamma_max, and 0 <= ema_beta < 1.
    """

    by_probs: ClassVar[bool] = True
    gamma_min: int = 1
    gamma_max: int | None = None
    ema_beta: float = 0.0

    def __post_init__(self):
        high = self.gamma_max if self.gamma_max is not None else self.gamma_min
        sizes = is_int(self.gamma_min) and is_int(high) and 1 <= self.gamma_min <= high
        if not (sizes and in_range(self.ema_beta, 0, 1) and self.ema_beta < 1):
            raise ValueError(
                f"EntropyGuided needs integers 1 <= gamma_min <= gamma_max and 0 <= ema_beta < 1, got "
                f"gamma_min={self.gamma_min!r}, gamma_max={self.gamma_max!r} and ema_beta={self.ema_beta!r}"
            )

    def init(self, batch: int, num_speculative_tokens: int) -> jax.Array:
        return jnp.full(batch, jnp.nan, jnp.float32)  # NaN: no entropy yet

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
    """Chooses the K that is fastest for a running estimate of alpha (Leviathan et al. 2023, theorem 3.8, section 3.5).

    K is 0 where no draft pays.

    Args:
      c: the time of a draft step over the time of a target step, as measured.
      prior: the estimate of alpha before anything is known.
      weight: how many judged tokens the prior counts as.
      decay: the factor by which each round shrinks the evidence of the rounds before. So a row that stopped drafting
        forgets its evidence, and drafts again.

    Raises:
      ValueError: unless c is a number >= 0, prior and decay are numbers from 0 to 1, and weight is one above 0.
    """

    c: float
    prior: float = 0.7
    weight: float = 4.0
    decay: float = 0.95

    def __post_init__(self):
        check_number("c", self.c, 0)
        check_number("prior", self.prior, 0, 1)
        check_number("weight", self.weight, SMALLEST_FLOAT)
        check_number("decay", self.decay, 0, 1)

    def init(self, batch: int, num_speculative_tokens: int) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(batch, jnp.float32), jnp.zeros(batch, jnp.float32)  # tokens accepted and judged

    def choose(self, own: tuple[jax.Array, jax.Array], num_speculative_tokens: int) -> jax.Array:
        accepted, judged = own
        alpha = (accepted + self.prior * self.weight) / (judged + self.weight)
        return theory.best_gamma(alpha, self.c, num_speculative_tokens).astype(jnp.int32)

    def learn(self, own: tuple[jax.Array, jax.Array], seen: Round) -> tuple[jax.Array, jax.Array]:
        judged = jnp.minimum(seen.accepted + 1, seen.drafted)  # the accepted ones and the first refused one
        seen_accepted, judged = seen.accepted.astype(jnp.float32), judged.astype(jnp.float32)
        return self.decay * own[0] + seen_accepted, self.decay * own[1] + judged


class AdaptiveState(NamedTuple):
    # The inner drafter's own state.
    inner: Any
    # The policy's own state.
    policy: Any
    # f32[B, K] ``Draft.entropy`` of the draft that is being verified.
    entropy: jax.Array
    # bool[B] Whether the row was asked for this draft. The policy learns only from rounds of such rows.
    asked: jax.Array


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """Runs ``drafter`` with a K that ``policy`` chooses for each row and round, up to num_speculative_tokens.

    A row's policy starts anew with each request.

    Args:
      drafter: the drafter that is wrapped. Its drafts are chains.
      policy: the policy.
    """

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
        sizes = self.sizes(num_speculative_tokens)
        shared = plan.shared_shapes or (plan.shaped_by_size and len(sizes) > 1)
        return plan._replace(widths=(1, *(size + 1 for size in sizes)), shared_shapes=shared)

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
            draft = draft._replace(confidence=chain.told_confidence(draft), entropy=chain.told_entropy(draft))
            return widened(draft, num_speculative_tokens), inner, cache

        most = jnp.max(jnp.where(state.active, chosen, 0))
        branch = jnp.sum(most > jnp.array(sizes[:-1], jnp.int32), dtype=jnp.int32)
        branches = [partial(at_size, size) for size in sizes]
        draft, inner, cache = lax.switch(branch, branches, own.inner, state.cache)
        goes_on = self.policy.goes_on(draft)[:, :-1]
        length = jnp.minimum(1 + leading_run(goes_on), chosen)
        valid = draft.valid & (span(num_speculative_tokens) < length[:, None])
        entropy = fitted(draft.entropy, own.entropy.shape[1])  # an engine may ask for a smaller K for a while
        return draft._replace(valid=valid), AdaptiveState(inner, own.policy, entropy, state.active), cache

    def commit(self, target: Model, own: AdaptiveState, state: DecodeState, outcome: Outcome | None) -> AdaptiveState:
        inner, policy = self.drafter.commit(target, own.inner, state, outcome), own.policy
        if outcome is not None:
            judged = jnp.minimum(outcome.accepted + 1, outcome.drafted)
            was_judged = span(own.entropy.shape[1]) < judged[:, None]
            total = jnp.sum(jnp.where(was_judged, own.entropy, 0.0), axis=1)
            mean = total / judged.astype(jnp.float32)  # NaN, as 0 / 0, if nothing was judged
            learned = self.policy.learn(policy, Round(outcome.drafted, outcome.accepted, mean))
            policy = where_rows(own.asked, learned, policy)
        return AdaptiveState(inner, policy, own.entropy, jnp.zeros_like(own.asked))

    def sizes(self, num_speculative_tokens: int) -> list[int]:
        """The draft lengths that are compiled: 1, 2, 4, ... and K."""
        below = max(num_speculative_tokens - 1, 0)
        return [*(1 << i for i in range(below.bit_length())), num_speculative_tokens]


jax.tree_util.register_dataclass(Adaptive, data_fields=["drafter"], meta_fields=["policy"])
