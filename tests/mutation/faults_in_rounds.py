"""Faults of verifiers, trees, keys and the round."""

import types

import jax
import jax.numpy as jnp
from jax import lax
from planting import (
    BLOCK,
    BLOCK_LAW,
    BONUS,
    EQUAL_DRAFT,
    FLOAT32,
    LAW,
    PADDING,
    RESIDUAL,
    SELF,
    SIBLINGS,
    STOPS,
    TABLE_LAW,
    TRAVERSAL,
    TREE_CACHE,
    TREE_LAW,
    TREE_SIBLINGS,
    TREE_TEXT,
    WALK,
    fault,
    wrap,
)

from specjax import verify
from specjax.decode import draft_shape, random, sampling
from specjax.decode import round as rounds
from specjax.decode.draft_shape import FixedTreeShape
from specjax.models import cache as kv
from specjax.verify import Block, Coupled, Rejection, block
from specjax.verify import pieces as chain
from specjax.verify import siblings as multi
from specjax.verify.tree_rejection import elder_siblings

# ---- the verdict ----


@fault(RESIDUAL, TABLE_LAW)
def residual_not_subtracted():
    chain.rest = lambda p, q: p


@fault(RESIDUAL, TABLE_LAW)
def residual_softmaxed():
    chain.rest = lambda p, q: jax.nn.softmax(jnp.maximum(p - q, 0.0), axis=-1)


@fault(TABLE_LAW, EQUAL_DRAFT)
def q_ignored():
    chain.draft_token_probs = lambda draft: jnp.ones(draft.tokens.shape)


@fault(BONUS, TABLE_LAW)
def bonus_from_the_row_before():
    def make(judge):
        def faulty(self, p, draft, keys, lengths):
            end = jnp.sum(draft.valid, axis=1)[:, None, None]
            last = jnp.arange(p.shape[1])[:, None] == end
            before = jnp.concatenate([p[:, :1], p[:, :-1]], axis=1)
            return judge(self, jnp.where(last, before, p), draft, keys, lengths)

        return faulty

    wrap(Rejection, "verify", make)


@fault(TABLE_LAW)
def refusals_do_not_end_the_prefix():
    verify.rejection.leading_run = lambda accept: jnp.sum(accept, axis=1, dtype=jnp.int32)


@fault(PADDING)
def padding_judged_like_drafts():
    def make(judge):
        return lambda self, p, draft, *rest: judge(self, p, draft._replace(valid=jnp.ones_like(draft.valid)), *rest)

    wrap(Rejection, "verify", make)


@fault(EQUAL_DRAFT, SELF)
def drafts_kept_only_if_the_target_draws_them_too():
    Rejection.verify = lambda self, *arguments: Coupled().verify(*arguments)


@fault(BLOCK_LAW)
def block_judged_with_the_full_residual():
    """What is drawn from after a cut as if nothing had been lost on the way there: w = 1."""
    wrap(block, "remainder", lambda f: lambda p, draft, w, count: f(p, draft, jnp.ones_like(w), count))


@fault(SIBLINGS, TREE_SIBLINGS("skewed"))
def siblings_share_one_softmax():
    for module in (multi, verify):
        module.without_replacement = lambda q, drawn: jnp.repeat(q[:, None], drawn.shape[1], axis=1)


@fault(TREE_SIBLINGS("refused twice"))
def siblings_judged_by_one_uniform():
    random.siblings = lambda keys, ranks: keys


# ---- trees ----


@fault(TREE_TEXT, TREE_CACHE)
def nodes_do_not_see_their_ancestors():
    def make(seen):
        return lambda ancestors, *rest: seen(ancestors & jnp.eye(*ancestors.shape[1:], dtype=bool), *rest)

    wrap(draft_shape, "seen", make)


@fault(TREE_TEXT, TREE_CACHE)
def positions_by_node_number():
    def make(attention):
        def faulty(self, starts, capacity):
            return starts[:, None] + jnp.arange(self.ancestors.shape[1]), attention(self, starts, capacity)[1]

        return faulty

    wrap(draft_shape.TreeShape, "attention", make)


@fault(TREE_TEXT, TREE_CACHE)
def accepted_entries_left_among_their_siblings():
    kv.move = lambda cache, slots, starts: cache


@fault(TREE_TEXT)
def penalties_blind_to_the_path_in_a_tree():
    wrap(draft_shape.TreeShape, "path", lambda f: lambda self, *rest: jnp.full_like(f(self, *rest), sampling.NO_TOKEN))


@fault(TREE_LAW)
def tree_walked_past_a_refusal():
    """Children of every node are judged, whether or not their parent was accepted: parents all count as the root."""
    wrap(verify.rejection, "recursive_rejection", lambda f: lambda p, draft, *rest: f(
        p, draft._replace(shape=FixedTreeShape((0,) * draft.tokens.shape[1])), *rest))


# ---- keys ----


@fault(TABLE_LAW)
def one_key_for_draft_and_acceptance():
    random.ACCEPT = random.DRAFT


@fault(TABLE_LAW)
def one_key_for_acceptance_and_correction():
    random.ACCEPT = random.TOKEN


@fault(BLOCK)
def block_draft_keys_without_the_rounds_start():
    Block.draft_keys = Rejection.draft_keys


@fault(TRAVERSAL)
def one_noise_for_the_children_of_all_nodes_under_traversal():
    random.at_children = lambda keys, positions, parents: random.at(keys, positions[:, None])


@fault(WALK, TRAVERSAL)
def the_last_sibling_that_passes_is_kept():
    verify.traversal.elder_siblings = lambda parents: jnp.swapaxes(elder_siblings(parents), 1, 2)


@fault(LAW)
def keys_by_place_in_the_round():
    wrap(random, "at", lambda at: lambda keys, positions: at(keys, positions * 0))


@fault(LAW)
def one_key_for_all_rows():
    wrap(random, "request_keys", lambda f: lambda seeds: f([0] * len(seeds)))


# ---- the round ----


def shift_target_lengths(change):
    patched = types.SimpleNamespace(**vars(kv))
    patched.with_lengths = lambda cache, lengths: kv.with_lengths(cache, change(lengths))
    rounds.kv = patched


@fault(LAW)
def target_cache_off_by_one():
    shift_target_lengths(lambda lengths: jnp.maximum(lengths - 1, 0))


@fault(LAW, STOPS)
def one_cursor_for_all_rows():
    shift_target_lengths(lambda lengths: jnp.full_like(lengths, jnp.max(lengths)))


@fault(STOPS)
def stop_looked_for_only_at_the_end():
    def make(append):
        def faulty(decoder, state, judged):
            last = rounds.is_stop(judged.verdict.token[:, None], state.request.stop_ids)  # [B, 1]
            seen = state.request._replace(stop_ids=jnp.where(last, state.request.stop_ids, sampling.NO_TOKEN))
            new, info = append(decoder, state._replace(request=seen), judged)
            return new._replace(request=state.request), info

        return faulty

    wrap(rounds, "append", make)


@fault(STOPS)
def limit_not_enforced():
    def make(append):
        def faulty(decoder, state, judged):
            unlimited = state._replace(request=state.request._replace(limit=state.request.limit + 1))
            new, info = append(decoder, unlimited, judged)
            return new._replace(request=state.request), info

        return faulty

    wrap(rounds, "append", make)


@fault(FLOAT32(0.3), FLOAT32(1.0))
def target_judged_from_bfloat16_logits():
    """What is drawn follows the rounded law as well, so only the law itself can tell."""
    # Not a cast there and back, which XLA may leave out.
    wrap(sampling, "distribution", lambda f: lambda logits, *rest: f(lax.reduce_precision(logits, 8, 7), *rest))


@fault(LAW, SELF)
def penalties_blind_to_drafted_tokens():
    wrap(sampling, "chain_path", lambda f: lambda drafted: jnp.full_like(f(drafted), sampling.NO_TOKEN))


@fault(LAW, SELF)
def target_judged_at_temperature_1():
    """The raw softmax in the accept test, while the draft is sharpened."""
    def make(distribution):
        def faulty(logits, params, context):
            if logits.shape[1] > 1:  # a block: the target's
                params = params._replace(temperature=jnp.ones_like(params.temperature))
            return distribution(logits, params, context)

        return faulty

    wrap(sampling, "distribution", make)
