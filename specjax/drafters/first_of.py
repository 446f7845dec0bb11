"""Several drafters in order of preference: each row takes the first that has something to say."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode.arrays import where_rows
from specjax.decode.types import DecodeState, Draft, Drafter, Outcome, Plan
from specjax.drafting.combine import alike
from specjax.models.cache import KVCache
from specjax.models.model import Model, Output


@dataclasses.dataclass(frozen=True)
class FirstOf:
    """``first``'s draft where ``first`` has one, else ``second``'s; ``second`` runs only if some row needs its draft.

    Chains of more nest: ``FirstOf(a, FirstOf(b, c))``. Either may draft trees.
    """

    first: Drafter
    second: Drafter

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        first, second = (d.plan(target, num_speculative_tokens) for d in (self.first, self.second))
        return Plan(
            # Where the first is silent the second speaks, so no round is as narrow as a silent first's.
            widths=tuple(sorted({*second.widths, *(width for width in first.widths if width > 1)})),
            taps=tuple(sorted({*first.taps, *second.taps})),
            trees=first.trees or second.trees,
            gives_probs=first.gives_probs or second.gives_probs,
        )

    def init(self, target: Model, batch: int, capacity: int, num_speculative_tokens: int) -> tuple:
        return tuple(d.init(target, batch, capacity, num_speculative_tokens) for d in (self.first, self.second))

    def follow(self, target: Model, own: tuple, state: DecodeState, starts: jax.Array, out: Output) -> tuple:
        both = zip((self.first, self.second), own, strict=True)
        return tuple(drafter.follow(target, its_own, state, starts, out) for drafter, its_own in both)

    def resume(self, target: Model, own: tuple, state: DecodeState) -> tuple:
        both = zip((self.first, self.second), own, strict=True)
        return tuple(drafter.resume(target, its_own, state) for drafter, its_own in both)

    def propose(
        self, target: Model, own: tuple, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, tuple, KVCache]:
        first_own, second_own = own
        first, first_own, cache = self.first.propose(target, first_own, state, keys, num_speculative_tokens)
        silent = state.active & ~first.valid[:, 0]
        asking = state._replace(active=silent)  # a row that does not need the second is idle to it

        def ask(second_own, cache: KVCache):
            return self.second.propose(
                target, second_own, asking._replace(cache=cache), keys, num_speculative_tokens
            )

        def rest(second_own, cache: KVCache):
            shapes = jax.eval_shape(ask, second_own, cache)[0]
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), second_own, cache

        second, second_own, cache = lax.cond(jnp.any(silent), ask, rest, second_own, cache)
        return _choose(silent, first, second, target.vocab_size), (first_own, second_own), cache

    def commit(self, target: Model, own: tuple, state: DecodeState, outcome: Outcome | None) -> tuple:
        both = zip((self.first, self.second), own, strict=True)
        return tuple(drafter.commit(target, its_own, state, outcome) for drafter, its_own in both)


jax.tree_util.register_dataclass(FirstOf, data_fields=["first", "second"], meta_fields=[])


def _choose(silent: jax.Array, first: Draft, second: Draft, vocab: int) -> Draft:
    """``second``'s rows where bool[B] ``silent`` says that the first proposes nothing, else ``first``'s."""
    if first.run_at_least is not None or second.run_at_least is not None:
        wish_first, wish_second = (0 if d.run_at_least is None else d.run_at_least for d in (first, second))
        least = jnp.maximum(jnp.where(silent, wish_second, 0), wish_first)  # the first's even where it is silent
        first, second = (d._replace(run_at_least=least) for d in (first, second))
    first, second = alike((first, second), vocab)
    return where_rows(silent, second, first)
