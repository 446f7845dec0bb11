"""The DFlash head: one call a draft, laws that no drafted token changes, and training as it drafts."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_heads import CONFIG, TARGET, draft_of, random_head

import specjax
from specjax.decode import round as rounds
from specjax.generation.generate import prepare
from specjax.models import cache as kv
from specjax.models.heads.dflash_head import DFlashHead, DFlashHeadConfig
from specjax.testing import tiny_lm
from specjax.training.train_dflash import DFlashObjective

PROMPT = [3, 1, 8, 2, 2, 6, 10]
MASKED = CONFIG.block_size - 1


def test_one_call_of_the_head_gives_laws_that_depend_on_the_committed_text_alone():
    """The head is called once. Neither the drafted tokens nor K change a bit of q, and nothing passes the block."""
    with mock.patch.object(DFlashHead, "__call__", autospec=True, side_effect=DFlashHead.__call__) as calls:
        drafts = [draft_of(random_head(), PROMPT, MASKED, seed=seed) for seed in range(4)]
        assert calls.call_count <= len(drafts), "traced at most once for each draft"
    assert len({tuple(d.tokens[0].tolist()) for d in drafts}) > 1
    longer = draft_of(random_head(), PROMPT, MASKED + 2)
    for draft in drafts + [longer, draft_of(random_head(), PROMPT, 1)]:
        size = min(draft.tokens.shape[1], MASKED)
        np.testing.assert_array_equal(draft.probs[0, :size], drafts[0].probs[0, :size])
        assert draft.valid[0, :size].all()
    assert longer.valid[0].tolist() == [True] * MASKED + [False] * 2


def test_training_sees_at_every_place_what_drafting_computes():
    """Blocks with several anchors in one text give the q of drafts that begin there, beside the right p."""
    drafter, text = random_head(), jnp.array([PROMPT + [5, 0]])
    objective = DFlashObjective(jnp.arange(12), TARGET.head_table(), CONFIG)
    anchors = [0, 1, 3, 5]  # of a measurement: spread evenly, and 5 is the last at which a whole block fits

    @jax.jit
    def trained(params, target, text):
        out = target(text, target.alloc_cache(*text.shape), taps=CONFIG.taps)
        figures = objective(params, target, text, jnp.ones(text.shape), None)[1]
        logits = objective.logits(params, target, text, out, jnp.array([anchors]))
        return jax.nn.softmax(logits)[0], jax.nn.softmax(out.logits)[0], figures["alpha"]

    q, p, alpha = jax.device_get(trained(drafter.params, TARGET, text))  # [A, S - 1, V], [T, V], [S - 1]
    for block in (1, 3):
        draft = draft_of(drafter, text[0, : anchors[block] + 1].tolist(), MASKED)
        np.testing.assert_allclose(q[block], draft.probs[0], atol=2e-5)
    judged = p[np.array(anchors)[:, None] + np.arange(MASKED)]  # by the target's answer after the token before
    np.testing.assert_allclose(alpha, np.minimum(judged, q).sum(-1).mean(0), atol=2e-5)


def test_what_follow_and_commit_keep_is_what_resume_makes_of_the_whole_text():
    """Of ragged prompts over several blocks, and of one token, from which the head drafts too."""
    prompts = [[i % 12 for i in range(size)] for size in (70, 1, 2, 64, 65)]
    job = prepare(TARGET, prompts, drafter=random_head(), num_speculative_tokens=2, max_new_tokens=40, temperature=1.0)
    state = job.start()
    assert state.drafter.lengths.tolist() == [len(p) - 1 for p in prompts]
    assert jax.jit(rounds.propose)(job.decoder, state)[0].valid.all()
    for _ in range(4):
        state, _ = job.decoder.round(state)
    assert state.active.all() and state.history.accepted.sum() > 0
    assert (state.drafter.lengths == state.lengths - 1).all()
    behind = kv.with_lengths(jax.tree.map(jnp.zeros_like, state.drafter), jnp.array([0, 0, 3, 66, 0]))
    made = jax.jit(job.decoder.drafter.resume)(TARGET, behind, state._replace(active=jnp.ones(5, bool)))
    for row, (kept, length) in enumerate(zip(behind.lengths.tolist(), state.lengths.tolist(), strict=True)):
        for found, wanted in zip(made.keys + made.values, state.drafter.keys + state.drafter.values, strict=True):
            np.testing.assert_allclose(found[row, :, kept : length - 1], wanted[row, :, kept : length - 1], atol=1e-4)


def test_a_head_for_another_model_is_refused():
    head = random_head()
    with pytest.raises(ValueError, match="this DFlash head reads hidden states of size 32, but the target's are 16"):
        specjax.generate(tiny_lm(0, hidden_size=16), [[1, 2]], drafter=head)
    with pytest.raises(ValueError, match=r"after layers \(1, 3\), but the target has 2"):
        specjax.generate(tiny_lm(0, vocab_size=12), [[1, 2]], drafter=head)
    beyond = dataclasses.replace(head, config=dataclasses.replace(CONFIG, mask_token_id=12))
    with pytest.raises(ValueError, match="masks with token 12, but the target has 12 tokens"):
        specjax.generate(TARGET, [[1, 2]], drafter=beyond)


@pytest.mark.parametrize("change, says", [
    ({"taps": (3, 1)}, "taps of a DFlash head must be .* got"),
    ({"block_size": 1}, "block_size of a DFlash head must be an integer of at least 2, got 1"),
    ({"mask_token_id": -1}, "mask_token_id of a DFlash head must be a token id, got -1"),
    ({"layer": dataclasses.replace(CONFIG.layer, sliding_window=4, local_layers=(0,))}, "sliding_attention"),
])  # fmt: skip
def test_a_shape_that_no_head_has_is_refused(change, says):
    fields = {"layer": CONFIG.layer, "taps": CONFIG.taps, "block_size": 4, "mask_token_id": 7, **change}
    with pytest.raises(ValueError, match=says):
        DFlashHeadConfig(**fields)
