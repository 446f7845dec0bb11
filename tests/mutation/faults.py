"""Faults that shipped systems have had, each a small patch of a public function, and the tests that must see it.

Loaded as a pytest plugin it plants the one that the environment names, before anything is traced, so that any test
can be tried against it by hand (from the repository's root):

    SPECJAX_FAULT=residual_not_subtracted PYTHONPATH=.:tests/mutation python -m pytest -p faults
"""

import dataclasses
import functools
import os
import types

import jax
import jax.numpy as jnp
from jax import lax

import specjax
from specjax import verify
from specjax.decode import draft_shape, random, sampling
from specjax.decode import round as rounds
from specjax.decode.draft_shape import FixedTreeShape
from specjax.drafters import Adaptive, Cascade, DraftModel, Jacobi, LayerSkip, Lookahead
from specjax.models import cache as kv
from specjax.models import fused_attention
from specjax.verify import Block, Coupled, Rejection, block
from specjax.verify import pieces as chain
from specjax.verify import siblings as multi

FAULTS = {}  # name -> (function that plants it, ids of default-run tests that must fail)

LAW = "tests/drafters/test_conformance.py::test_joint_law[noisy twin-rejection]"
ROWS = "tests/drafters/test_conformance.py::test_row_depends_on_neither_slot_nor_neighbours[noisy twin-rejection]"
STOPS = "tests/drafters/test_conformance.py::test_greedy_is_plain_at_every_stop_and_limit[noisy twin-rejection]"
SELF = "tests/drafters/test_conformance.py::test_self_draft_is_accepted_whole_under_every_setting[rejection]"
LAW_OF = "tests/drafters/test_conformance.py::test_joint_law[{}-rejection]".format
PATH = "tests/drafters/test_conformance.py::test_path_independence[noisy twin]"
WELL_FORMED = "tests/drafters/test_conformance.py::test_proposals_are_well_formed[noisy twin]"
TABLE_LAW = "tests/verify/test_verifiers.py::test_joint_law_over_rounds[drawn-rejection]"
GREEDY_Q = "tests/drafters/test_conformance.py::test_a_greedy_draft_is_a_point_mass[0.0]"
RESIDUAL = "tests/verify/test_verifiers.py::test_the_residual_is_normalised_and_keeps_its_zeros[rejection]"
BONUS = "tests/verify/test_verifiers.py::test_the_bonus_follows_the_last_accepted_token[rejection]"
SIBLINGS = "tests/verify/test_siblings.py::test_siblings_leave_the_targets_law[0-2-not_replaced]"
PADDING = "tests/verify/test_verifiers.py::test_padding_is_never_accepted[rejection]"
FLOAT32 = "tests/drafters/test_drafters.py::test_bfloat16_models_are_sampled_and_judged_in_float32[{}]".format
EQUAL_DRAFT = "tests/verify/test_verifiers.py::test_a_draft_equal_to_the_target_is_accepted_whole[3-rejection]"
TREE_LAW = LAW_OF("tree")
TREE_TEXT = "tests/drafters/test_conformance.py::test_coupled_is_plain_token_for_token_under_sampling[tree]"
TREE_CACHE = "tests/drafters/test_trees.py::test_after_a_tree_the_cache_holds_the_accepted_path[None]"
TREE_SIBLINGS = "tests/drafters/test_trees.py::test_the_first_token_has_the_targets_law[{}-3-False]".format
KERNEL = "tests/models/test_attention.py::test_the_kernel_is_the_plain_function[{}]".format
GRADIENT = "tests/models/test_attention.py::test_a_model_and_its_gradient_are_the_same_with_the_kernel"
BLOCK = "tests/verify/test_block.py::test_block_draws_anew_in_every_round[Block]"
BLOCK_LAW = "tests/verify/test_block.py::test_block_commits_with_the_targets_law[3-2]"


def fault(*caught_by):
    def register(plant):
        FAULTS[plant.__name__] = (plant, caught_by)
        return plant

    return register


def wrap(owner, name, make):
    """Replaces ``owner.name`` by ``make(the original)``."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


# ---- the verdict ----


@fault(RESIDUAL, TABLE_LAW)
def residual_not_subtracted():
    chain.residual = lambda p, q: p


@fault(RESIDUAL, TABLE_LAW)
def residual_softmaxed():
    chain.residual = lambda p, q: jax.nn.softmax(jnp.maximum(p - q, 0.0), axis=-1)


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


# ---- the draft model ----


@fault(SELF)
def top_p_on_the_target_alone():
    """Still lossless: it costs acceptance only."""
    def make(propose):
        def faulty(self, target, own, state, *rest):
            request = state.request._replace(sampling=state.request.sampling._replace(top_p=None))
            return propose(self, target, own, state._replace(request=request), *rest)

        return faulty

    wrap(DraftModel, "propose", make)


@fault(WELL_FORMED)
def q_reported_in_bfloat16():
    """Drawn from one array, judged by another."""
    def make(propose):
        def faulty(self, *arguments):
            draft, *after = propose(self, *arguments)
            return draft._replace(probs=draft.probs.astype(jnp.bfloat16).astype(jnp.float32)), *after

        return faulty

    wrap(DraftModel, "propose", make)


@fault(GREEDY_Q)
def greedy_draft_scored_with_its_softmax():
    def make(propose):
        def faulty(self, *arguments):
            draft, *after = propose(self, *arguments)
            if self.temperature == 0:
                draft = draft._replace(probs=propose(dataclasses.replace(self, temperature=None), *arguments)[0].probs)
            return draft, *after

        return faulty

    wrap(DraftModel, "propose", make)


@fault(PATH)
def draft_cache_never_sees_the_prompt():
    specjax.drafters.draft_model.catch_up = lambda lm, cache, state, wanted, chunk: cache


@fault(PATH)
def draft_cache_rolled_back_to_the_wrong_slot():
    """Costs acceptance only, so no test of laws can see it."""
    def make(commit):
        def faulty(self, *arguments):
            own = commit(self, *arguments)
            return own._replace(cache=own.cache.replace(keys=tuple(jnp.roll(x, 1, axis=2) for x in own.cache.keys)))

        return faulty

    wrap(DraftModel, "commit", make)


# ---- other drafters ----


def change_draft(drafter, change):
    """``change(self, draft)`` after every proposal."""
    def make(propose):
        def faulty(self, *arguments):
            draft, *after = propose(self, *arguments)
            return change(self, draft), *after

        return faulty

    wrap(drafter, "propose", make)


@fault(LAW_OF("twin, confidence"))
def unsure_token_is_not_judged():
    """Whether a token is judged then depends on which token it is."""
    change_draft(Adaptive, lambda self, draft: draft._replace(valid=draft.valid & self.policy.goes_on(draft)))


@fault(LAW_OF("jacobi"))
def guess_judged_by_a_flat_q():
    change_draft(Jacobi, lambda self, draft: draft._replace(probs=0 * draft.probs + 1 / draft.probs.shape[-1]))


@fault(LAW_OF("cascade"))
def cascade_reports_q_of_the_token_before():
    change_draft(Cascade, lambda self, draft: draft._replace(probs=jnp.roll(draft.probs, 1, axis=1)))


@fault(LAW_OF("early exit"))
def draft_writes_over_a_committed_entry():
    def make(propose):
        def faulty(self, target, own, state, *rest):
            draft, own, cache = propose(self, target, own, state, *rest)
            rows = jnp.arange(state.lengths.shape[0])
            keys = tuple(k.at[rows, :, state.lengths - 2].set(0.0) for k in cache.keys)
            return draft, own, cache.replace(keys=keys)

        return faulty

    wrap(LayerSkip, "propose", make)


@fault("tests/drafters/test_drafters.py::test_the_window_of_lookahead_goes_on_by_the_targets_answers")
def lookahead_learns_nothing():
    wrap(Lookahead, "commit", lambda commit: lambda self, target, own, state, outcome: own)


# ---- kernels ----


def change_kernel(change):
    """``change(*arguments)`` before every call of the attention kernel."""
    wrap(fused_attention, "attend", lambda attend: lambda *args, **kw: attend(*change(*args), **kw))


@fault(KERNEL("nothing cached yet"), KERNEL("a long cache, cut among programs"))
def kernel_reads_a_stale_entry():
    change_kernel(lambda *args: (*args[:-1], args[-1] + 1))


@fault(KERNEL("a tree"), KERNEL("a tree on a long cache"))
def kernel_ignores_the_mask():
    change_kernel(lambda qkv, angles, mask, *rest: (qkv, angles, None, *rest))


@fault(KERNEL("one token"), GRADIENT)
def kernel_turns_the_other_way():
    change_kernel(lambda qkv, angles, *rest: (qkv, (angles[0], -angles[1]), *rest))


if os.environ.get("SPECJAX_FAULT"):
    FAULTS[os.environ["SPECJAX_FAULT"]][0]()
