"""Faults of drafters and of the attention kernel."""

import dataclasses

import jax.numpy as jnp
from planting import GRADIENT, GREEDY_Q, KERNEL, LAW_OF, PATH, SELF, WELL_FORMED, fault, wrap

import specjax
from specjax.drafters import Adaptive, Cascade, DraftModel, Jacobi, LayerSkip, Lookahead
from specjax.models import fused_attention

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
    change_kernel(lambda *args: (*args[:5], args[5] + 1, *args[6:]))


@fault(KERNEL("a tree"), KERNEL("a tree on a long cache"))
def kernel_ignores_the_mask():
    change_kernel(lambda qkv, angles, mask, *rest: (qkv, angles, None, *rest))


@fault(KERNEL("one token"), GRADIENT)
def kernel_turns_the_other_way():
    change_kernel(lambda qkv, angles, *rest: (qkv, (angles[0], -angles[1]), *rest))


@fault("tests/models/test_attention.py::test_the_kernel_gives_the_same_bits_from_pages[triton-a tree]")
def kernel_reads_pages_in_another_order():
    change_kernel(lambda *args: (*args[:6], *(table[:, ::-1] for table in args[6:])))
