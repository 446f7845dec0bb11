"""Two drafters in order of preference: each row takes the first drafter that proposes something for it."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode.arrays import where_rows
from specjax.decode.types import DecodeState, Draft, Drafter, Plan
from specjax.drafting.base import Several
from specjax.drafting.combine import alike
from specjax.models.cache import KVCache
from specjax.models.model import Model


@dataclasses.dataclass(frozen=True)
class FirstOf(Several):
    """Proposes the draft of ``first`` in rows where ``first`` has a draft, and the draft of ``second`` in other rows.

    ``second`` runs only if some row needs its draft. More than two drafters nest: ``FirstOf(a, FirstOf(b, c))``. Both
    may draft trees.
    """

    first: Drafter
    second: Drafter

    @property
    def members(self) -> tuple[Drafter, Drafter]:
        return self.first, self.second

    def plan(self, target: Model, num_speculative_tokens: int) -> Plan:
        first, second = (d.plan(target, num_speculative_tokens) for d in (self.first, self.second))
        return Plan(
            # A width of 1 is for rounds without any draft. If ``first`` has no draft, ``second`` is asked, so only the
            # widths of ``second`` say whether there are such rounds.
            widths=tuple(sorted({*second.widths, *(width for width in first.widths if width > 1)})),
            taps=tuple(sorted({*first.taps, *second.taps})),
            trees=first.trees or second.trees,
            gives_probs=first.gives_probs or second.gives_probs,
            shaped_by_size=first.shaped_by_size or second.shaped_by_size,
            shared_shapes=first.shared_shapes or second.shared_shapes,
        )

    def propose(
        self, target: Model, own: tuple, state: DecodeState, keys: jax.Array, num_speculative_tokens: int
    ) -> tuple[Draft, tuple, KVCache]:
        first_own, second_own = own
        first, first_own, cache = self.first.propose(target, first_own, state, keys, num_speculative_tokens)
        silent = state.active & ~first.valid[:, 0]
        asking = state._replace(active=silent)  # a row that needs no draft of ``second`` is idle

        def ask(second_own, cache: KVCache):
            return self.second.propose(
                target, second_own, asking._replace(cache=cache), keys, num_speculative_tokens
            )

        def skip(second_own, cache: KVCache):
            shapes = jax.eval_shape(ask, second_own, cache)[0]
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), second_own, cache

        second, second_own, cache = lax.cond(jnp.any(silent), ask, skip, second_own, cache)
        return _choose(silent, first, second, target.vocab_size), (first_own, second_own), cache


jax.tree_util.register_dataclass(FirstOf, data_fields=["first", "second"], meta_fields=[])


def _choose(silent: jax.Array, first: Draft, second: Draft, vocab: int) -> Draft:
    """Rows of ``second`` where bool[B] ``silent`` is True, and rows of ``first`` elsewhere.

    A row is silent if it is active and ``first`` proposes nothing for it. V is ``vocab``.
    """
    if first.run_at_least is not None or second.run_at_least is not None:
        for_first, for_second = (0 if d.run_at_least is None else d.run_at_least for d in (first, second))
        # ``first`` needs its answers also in rows where it proposes nothing. ``second`` was asked only in silent rows.
        least = jnp.maximum(jnp.where(silent, for_second, 0), for_first)
        first, second = (d._replace(run_at_least=least) for d in (first, second))
    first, second = alike((first, second), vocab)
    return where_rows(silent, second, first)
