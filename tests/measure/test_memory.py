"""The memory report against the arrays that are there."""

import jax
import pytest
from live_arrays import live

from specjax import drafters
from specjax.generation.generate import prepare
from specjax.measure import memory
from specjax.testing import tiny_lm

SHAPE = dict(vocab_size=512, hidden_size=64, intermediate_size=128, head_dim=16, max_position_embeddings=1024)


def model(seed, layers, heads, kv_heads):
    shape = dict(num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads)
    return tiny_lm(seed, **SHAPE, **shape)


@pytest.mark.parametrize("drafting, batch", [(False, 1), (True, 8)], ids=["alone", "eight rows with a draft model"])
def test_the_report_is_what_is_allocated(drafting, batch):
    before, _ = live()
    target = model(0, layers=4, heads=4, kv_heads=2)
    drafter = drafters.DraftModel(model(1, layers=1, heads=2, kv_heads=1)) if drafting else None
    options = dict(drafter=drafter, max_new_tokens=400)
    prompts = [[1, 2, 3]] * batch
    job = prepare(target, prompts, **options)
    state = jax.block_until_ready(job.start())
    assert job.memory()["total"] == pytest.approx(live()[0] - before, rel=0.05)
    del state


def test_a_drafts_cache_has_the_drafts_own_shape():
    target, draft = model(0, layers=4, heads=4, kv_heads=2), model(1, layers=1, heads=2, kv_heads=1)
    found = memory.report(prepare(target, [[1]], drafter=drafters.DraftModel(draft), capacity=512))
    entry = 2 * 16 * 4  # a key and a value of one head, in float32
    assert found["target_cache"] == pytest.approx(512 * 4 * 2 * entry, abs=4)
    assert found["draft_state"] == pytest.approx(512 * 1 * 1 * entry, abs=4)
    assert found["draft_weights"] == sum(x.nbytes for x in jax.tree.leaves(draft))


def test_weights_that_draft_and_target_share_count_once():
    target = model(0, layers=4, heads=4, kv_heads=2)
    found = memory.report(prepare(target, [[1]], drafter=drafters.DraftModel(target)))
    assert found["draft_weights"] == 0 and found["draft_state"] >= found["target_cache"]
    assert memory.report(prepare(target, [[1]]))["draft_state"] == 0
