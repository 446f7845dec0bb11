"""Rows see nothing of each other: no drafter writes to shared pages, and no draft's bits depend on a neighbour."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import testing
from specjax.decode import round as rounds
from specjax.decode import rows
from specjax.decode.decoder import Decoder
from specjax.drafters import (
    Adaptive,
    Cascade,
    DFlash,
    DraftModel,
    Eagle,
    FirstOf,
    Heuristic,
    LayerSkip,
    PaSS,
    PromptLookup,
    SinkWindow,
    TreeModel,
)
from specjax.engine import programs
from specjax.models import modules
from specjax.models.cache import by_rows
from specjax.models.heads.dflash_head import DFlashHead, DFlashHeadConfig
from specjax.models.heads.eagle1_head import Eagle1Head, Eagle1HeadConfig
from specjax.models.heads.pass_tokens import PassConfig, PassTokens
from specjax.verify.rejection import Rejection

# Large enough that an entry's last bits depend on the shape of the call that computes it.
TARGET = testing.tiny_lm(
    0, vocab_size=64, hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    max_position_embeddings=512,
)  # fmt: skip
TWIN = testing.noisy_twin(TARGET, 0.1)
HEAD = Eagle(
    Eagle1HeadConfig(TARGET.config), modules.init(Eagle1Head, Eagle1HeadConfig(TARGET.config), 0), None,
    prefill_chunk=100,
)  # fmt: skip
BLOCK_SHAPE = DFlashHeadConfig(TARGET.config, (1, 2), block_size=6, mask_token_id=3)
BLOCKS = DFlash(BLOCK_SHAPE, modules.init(DFlashHead, BLOCK_SHAPE, 0), None, prefill_chunk=100)
SLOW = ("cascade over a tree", "cascade over a draft model", "cascade over a head", "block head")
SLOW += ("cascade over a block head",)
DRAFTERS = {
    "tree": TreeModel(TWIN, (2, 1, 1)),
    "cascade over a draft model": Cascade(DraftModel(TARGET), TWIN, 2),
    "cascade over a tree": Cascade(TreeModel(TARGET, (1, 1, 1, 1, 1)), TWIN, 5),
    "cascade over a head": Cascade(HEAD, TWIN, 2),
    "block head": BLOCKS,
    "cascade over a block head": Cascade(BLOCKS, TWIN, 2),
}
AHEAD = PassConfig(128, 2)
CHAINS = {
    "draft model": DraftModel(TWIN),
    "head": HEAD,
    "block head": BLOCKS,
    "early exit": LayerSkip(exit_layer=1),
    "cascade": Cascade(DraftModel(TARGET), TWIN, 2),
    "sink and window": SinkWindow(sink=2, window=62),
    "look-ahead tokens": PaSS(AHEAD, modules.init(PassTokens, AHEAD, 0)),
}
TEXT = np.random.default_rng(5).integers(0, 64, 180).tolist()


@pytest.mark.parametrize(
    "drafter", [pytest.param(d, marks=pytest.mark.slow if d in SLOW else ()) for d in DRAFTERS]
)
def test_shared_pages_stay_as_prefill_wrote_them(drafter, monkeypatch):
    monkeypatch.setenv("SPECJAX_CHECK", "1")
    sizes = dict(slots=2, capacity=200, prefill_chunk=64, num_speculative_tokens=3)
    with specjax.Engine(TARGET, drafter=DRAFTERS[drafter], **sizes) as engine:
        for length in (180, 66, 67, 129, 130, 131, 180):
            handle = engine.submit(TEXT[:length], max_new_tokens=15, temperature=1.0, ignore_eos=True)
            assert handle.result(300).finish_reasons == ["length"]
        assert handle.cached_tokens == 128


@pytest.mark.parametrize("checked", ["0", "1"])
def test_a_row_that_ends_on_its_first_drafted_token_leaves_the_prompts_shared_page_alone(checked, monkeypatch):
    """Of a prompt of 66 tokens the head's last entry but one is the last of a page that other requests find."""
    monkeypatch.setenv("SPECJAX_CHECK", checked)
    sizes = dict(slots=2, capacity=200, prefill_chunk=64, num_speculative_tokens=3)
    with specjax.Engine(TARGET, drafter=HEAD, **sizes) as engine:
        options = dict(prompt=TEXT[:66], max_new_tokens=9, temperature=1.0)
        ended = engine.submit(allowed_token_ids=[7], eos_token_id=7, **options).result(300)
        assert ended.finish_reasons == ["stop"] and ended.metrics[0].per_step_accepted == [1]
        hit, miss = (engine.submit(cache_salt=salt, ignore_eos=True, **options) for salt in ("", "none"))
        assert hit.result(300).tokens == miss.result(300).tokens
        assert hit.result(300).metrics[0].to_dict() == miss.result(300).metrics[0].to_dict()
        assert (hit.cached_tokens, miss.cached_tokens) == (64, 0)
        pages = np.array(list(engine._loop.parts[0].pages.published().values()))
        entries = engine.between_rounds(lambda: programs.read_pages(engine._loop.state, pages)).result()
        assert all(np.array_equal(*leaf) for leaf in jax.tree.leaves(entries))  # leaves [2, kv_heads, PAGE, head_dim]


def test_a_head_that_catches_up_near_the_end_leaves_earlier_entries_of_a_paged_cache_alone():
    decoder = Decoder(TARGET, HEAD, Rejection(), 3)
    state = programs.empty(decoder, programs.Limits(slots=1, tokens=128, pages=4, stops=1, lists=1))
    pages = jnp.array([[1, 2, 3]])
    state = rows.with_table(state._replace(lengths=jnp.array([110]), active=jnp.array([True])), pages)
    cache = state.drafter.cache
    marked = cache.replace(keys=tuple(keys + 7 for keys in cache.keys), lengths=jnp.array([90]))
    own = HEAD.resume(TARGET, state.drafter._replace(cache=marked), state)
    assert bool(own.ready[0]) and own.cache.lengths.tolist() == [109]
    assert (by_rows(own.cache.keys[0], own.cache.table)[:, :, :90] == 7).all()


def test_no_bit_of_a_cascades_draft_depends_on_how_long_the_inner_drafts_of_other_rows_are():
    drafter, rng = Cascade(PromptLookup(prompt_lookup_min=1), TWIN, 3), np.random.default_rng(0)
    without_repeats, seen = rng.permutation(64)[:30].tolist(), []
    propose = jax.jit(lambda decoder, state: rounds.propose(decoder, state)[0].probs)
    for neighbour in (rng.permutation(64)[:30].tolist(), [1, 2, 3] * 10):
        job = specjax.prepare(TARGET, [without_repeats, neighbour], drafter=drafter, temperature=1.0, block_width=6)
        seen.append(np.asarray(propose(job.decoder, job.start()))[0])
    np.testing.assert_array_equal(*seen)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "draft model" else pytest.mark.slow) for n in CHAINS]
)
def test_only_a_drafter_whose_plan_says_so_has_other_bits_at_another_length(name):
    """``Adaptive`` drafts at the length that the longest draft of all rows needs."""
    drafter, seen = CHAINS[name], []
    for size in (1, 3):
        way = dict(drafter=drafter, num_speculative_tokens=size, temperature=1.0, block_width=4)
        job = specjax.prepare(TARGET, [TEXT[:90], TEXT[:77]], **way)
        seen.append(np.asarray(rounds.propose(job.decoder, job.start())[0].probs)[:, :1])
    assert drafter.plan(TARGET, 3).shaped_by_size or all(np.array_equal(seen[0], probs) for probs in seen)
    shared = Adaptive(drafter, Heuristic())
    for outer in (shared, Cascade(shared, TARGET), FirstOf(PromptLookup(), shared)):
        assert outer.plan(TARGET, 3).shared_shapes == drafter.plan(TARGET, 3).shaped_by_size
    assert not drafter.plan(TARGET, 3).shared_shapes and not shared.plan(TARGET, 1).shared_shapes
