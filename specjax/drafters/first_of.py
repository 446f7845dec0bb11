"""Several drafters in order of preference: each row takes the first that has something to say."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from specjax import tree
from specjax.drafters.base import each, gives_probs
from specjax.models.llama import Output
from specjax.models.lm import LM
from specjax.types import DecodeState, Draft, Drafter, Outcome, Request
from specjax.verify.chain import draft_probs, told_confidence, told_entropy


@dataclasses.dataclass(frozen=True)
class FirstOf:
    """``first``'s draft where it has one, else ``second``'s; ``second`` runs only if some row needs it.

    Chains of more nest: ``FirstOf(a, FirstOf(b, c))``. Either may draft trees.
    """

    first: Drafter
    second: Drafter

    @property
    def gives_probs(self) -> bool:
        return gives_probs(self.first) or gives_probs(self.second)

    def widths(self, num_speculative_tokens: int) -> tuple[int, ...]:
        first, second = (d.widths(num_speculative_tokens) for d in (self.first, self.second))
        return tuple(sorted({*second, *(w for w in first if w > 1)}))  # where the first is silent the second speaks

    def taps(self, target: LM) -> tuple[int, ...]:
        return tuple(sorted({*self.first.taps(target), *self.second.taps(target)}))

    def check(self, target: LM) -> None:
        self.first.check(target)
        self.second.check(target)

    def init(self, target: LM, batch: int, capacity: int, num_speculative_tokens: int) -> tuple:
        return tuple(d.init(target, batch, capacity, num_speculative_tokens) for d in (self.first, self.second))

    def follow(self, target: LM, own: tuple, request: Request, starts: jax.Array, out: Output) -> tuple:
        both = zip((self.first, self.second), own, strict=True)
        return tuple(d.follow(target, s, request, starts, out) for d, s in both)

    def resume(self, target: LM, state: DecodeState) -> DecodeState:
        return each((self.first, self.second), state, lambda member, state: member.resume(target, state))

    def propose(
        self, target: LM, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, DecodeState]:
        own = state.drafter
        draft, after = self.first.propose(target, state._replace(drafter=own[0]), keys, num_speculative_tokens)
        silent = state.active & ~draft.valid[:, 0]
        # A row that does not need the second is idle to it.
        asked = state._replace(active=silent, cache=after.cache, drafter=own[1])

        def ask(asked: DecodeState):
            return self.second.propose(target, asked, keys, num_speculative_tokens)

        def rest(asked: DecodeState):
            shapes = jax.eval_shape(ask, asked)[0]
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), asked

        other, after_both = lax.cond(jnp.any(silent), ask, rest, asked)
        chosen = _choose(silent, other, draft, target.config.vocab_size)
        return chosen, state._replace(cache=after_both.cache, drafter=(after.drafter, after_both.drafter))

    def commit(self, target: LM, state: DecodeState, outcome: Outcome | None) -> DecodeState:
        return each((self.first, self.second), state, lambda member, state: member.commit(target, state, outcome))


jax.tree_util.register_dataclass(FirstOf, data_fields=["first", "second"], meta_fields=[])


def _choose(where: jax.Array, a: Draft, b: Draft, vocab: int) -> Draft:
    """a's rows where bool[B] says that b is silent, else b's; a point mass beside a sampled draft is written out as
    one-hot, and a chain beside a tree as a tree. To a policy the point mass is certain, and its entropy unknown."""
    if a.confidence is not None or b.confidence is not None:
        a, b = (d._replace(confidence=told_confidence(d), entropy=told_entropy(d)) for d in (a, b))
    if (a.probs is None) != (b.probs is None):
        a, b = (d._replace(probs=draft_probs(d, vocab)) for d in (a, b))
    if a.least is not None or b.least is not None:
        wish_a, wish_b = (0 if d.least is None else d.least for d in (a, b))
        least = jnp.maximum(jnp.where(where, wish_a, 0), wish_b)  # of the first even where it was silent
        a, b = (d._replace(least=least) for d in (a, b))
    if a.parents is not None or b.parents is not None:
        size = max(a.tokens.shape[1], b.tokens.shape[1])
        a, b = tree.as_tree(a, size), tree.as_tree(b, size)
    return jax.tree.map(lambda x, y: jnp.where(where.reshape(-1, *(1,) * (x.ndim - 1)), x, y), a, b)
