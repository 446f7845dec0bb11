"""Meshes whose parts share the rows, on four forced host devices; test_parallel.py runs this file."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest
from attention_cases import CASES, case, in_pages

from specjax import Engine, drafters, generate, stream, testing
from specjax.decode import decoder
from specjax.drafters import DraftModel, PromptLookup, TreeModel
from specjax.generation.generate import prepare
from specjax.measure.benchmark import timed
from specjax.measure.benchmark.case import Case
from specjax.models import attention, modules, parallel
from specjax.models import cache as kv
from specjax.models.heads.dflash_head import DFlashHead, DFlashHeadConfig
from specjax.models.heads.eagle3_head import Eagle3Head, Eagle3HeadConfig

SHAPE = dict(num_attention_heads=8, num_key_value_heads=4, vocab_size=64, intermediate_size=96)
LM = testing.tiny_lm(0, **SHAPE)
DRAFT = testing.noisy_twin(LM, 0.05)
HEAD = Eagle3HeadConfig(dataclasses.replace(LM.config, num_hidden_layers=1), (0, 1, 2))
BLOCKS = DFlashHeadConfig(LM.config, (0, 1, 2), block_size=4, mask_token_id=5)
TWO, GRID = parallel.mesh(2), parallel.mesh(4, data=2)
PROMPTS = [[3, 9], [4, 8, 1, 4, 8, 1, 30, 2, 7, 7, 4, 8], [5, 6, 5, 6, 5], [7] * 9]
OPTIONS = dict(max_new_tokens=20, num_speculative_tokens=3, temperature=0.8, logprobs=2)
CHAINS = {
    "plain": (None, {}),
    "ngram": (PromptLookup(prompt_lookup_min=1), dict(block_width=4)),
    "model": (DraftModel(DRAFT), {}),
    "eagle": (drafters.Eagle(HEAD, modules.init(Eagle3Head, HEAD, 3), None), {}),
    "dflash": (drafters.DFlash(BLOCKS, modules.init(DFlashHead, BLOCKS, 3), None), {}),
}
WAYS = {**CHAINS, "tree": (TreeModel(DRAFT, (2, 1, 1)), {}), "coupled": (DraftModel(DRAFT), dict(verifier="coupled"))}


def asked(mesh, name, rows):
    """The arguments of ``generate`` for some of the prompts. A row's seed stays with the row."""
    drafter, further = WAYS[name]
    given = {**OPTIONS, **further, "drafter": parallel.everywhere(drafter, mesh), "seed": [7 + row for row in rows]}
    return dict(lm=parallel.shard(LM, mesh), prompts=[PROMPTS[row] for row in rows], **given)


@pytest.mark.parametrize("name", WAYS)
def test_each_part_has_the_tokens_and_bits_of_a_mesh_of_its_own(name):
    out = generate(**asked(GRID, name, range(4)))
    alone = [generate(**asked(TWO, name, rows)) for rows in ((0, 1), (2, 3))]
    assert out.tokens == alone[0].tokens + alone[1].tokens
    assert out.metrics == alone[0].metrics + alone[1].metrics
    if name in CHAINS:
        assert out.logprobs == alone[0].logprobs + alone[1].logprobs
        assert out.top_logprobs == alone[0].top_logprobs + alone[1].top_logprobs


def test_streams_write_the_same_tokens():
    events = stream(**asked(GRID, "model", range(4)))
    for _ in events:
        pass
    assert events.result().tokens == generate(**asked(GRID, "model", range(4))).tokens


def compiled_round(mesh, name):
    job = prepare(**asked(mesh, name, range(4) if mesh is GRID else (0, 1)))
    state = job.start()
    return decoder.round_jit.lower(job.decoder, state).compile(), state


@pytest.mark.parametrize("name", CHAINS)
def test_the_parts_of_a_round_do_not_talk(name):
    compiled, state = compiled_round(GRID, name)
    more = {"all-reduce": int(name == "model")}  # the draft model asks whether any row is behind
    alone = testing.collectives(compiled_round(TWO, name)[0])
    assert testing.collectives(compiled) == {kind: count + more.get(kind, 0) for kind, count in alone.items()}
    assert {x.addressable_shards[0].data.shape[:2] for x in state.cache.keys} == {(2, 2)}, "rows, kv heads"


def test_rows_that_the_parts_cannot_share_evenly_are_whole_on_each():
    out = generate(**asked(GRID, "model", (0, 1, 2)))
    assert out.tokens == generate(**asked(GRID, "model", range(4))).tokens[:3]


TABLE = np.array([[4, 1, 3, 2], [6, 9, 8, 7]], np.int32)  # of a pool of ten pages: 0 and 5 are the parts' null pages


@pytest.mark.parametrize("platform", [None, "cpu"], ids=["by XLA", "by the kernel"])
def test_each_part_attends_to_its_own_pages(monkeypatch, platform):
    monkeypatch.setattr(attention, "kernels", lambda: platform)
    lengths, *sizes, _, masked = CASES["nothing cached yet"]
    qkv, angles, mask, *buffers, starts = case(lengths, *sizes, TABLE.shape[1] * kv.PAGE, masked)
    pools = [in_pages(x, TABLE, 10) for x in buffers]

    def attended(sharding):
        attend = jax.jit(partial(attention.attend, sharding=sharding))
        return attend(qkv, attention.Block(starts, angles, mask, None, TABLE), *pools)

    where = parallel.cache_sharding(GRID)
    alone, out = attended(None), attended(where)
    assert all(x.sharding.is_equivalent_to(where, 4) for x in out[1:])
    for got, want in zip(out, alone, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=0.02)


def test_entries_are_moved_within_the_pages_of_a_part():
    pool = jax.random.normal(jax.random.key(0), (10, 4, kv.PAGE, 8))
    alone = kv.KVCache((pool,), (pool + 1,), np.array([3, 130], np.int32), None, TABLE)
    slots, starts = np.array([[7, 70], [131, 200]], np.int32), np.array([3, 130], np.int32)
    move = jax.jit(kv.move)
    got, want = (move(x, slots, starts) for x in (alone.replace(sharding=parallel.cache_sharding(GRID)), alone))
    for a, b in zip((*got.keys, *got.values), (*want.keys, *want.values), strict=True):
        np.testing.assert_array_equal(a, b)


REQUESTS = [
    dict(prompt=PROMPTS[1], seed=1, temperature=0.9, max_new_tokens=20),
    dict(prompt=[*range(50)] * 4, seed=2, max_new_tokens=12, top_p=0.8, temperature=0.7, logprobs=2),
    dict(prompt=PROMPTS[0], max_new_tokens=15),
    dict(prompt=[*range(50)] * 4, seed=3, temperature=1.0, max_new_tokens=12),
    dict(prompt=PROMPTS[2], seed=4, temperature=1.0, max_new_tokens=80),
    dict(prompt=[*range(50)] * 4, seed=2, max_new_tokens=12, top_p=0.8, temperature=0.7, logprobs=2),
]


LONG = [dict(prompt=[*range(row, 60)], seed=row, temperature=1.0, max_new_tokens=120) for row in range(4)]


def served(mesh, name, slots, requests=REQUESTS, **sizes):
    """The results of all requests at once, and the engine's counts after them."""
    drafter, further = WAYS[name]
    given = dict(num_speculative_tokens=3, slots=slots, capacity=320, **further, **sizes)
    with Engine(parallel.shard(LM, mesh), parallel.everywhere(drafter, mesh), **given) as engine:
        handles = [engine.submit(**request) for request in requests]
        handles += engine.submit_many([5, 6, 7] * 30, 2, seed=6, temperature=1.0, max_new_tokens=10)
        results = [handle.result() for handle in handles]
        return results, engine.stats()


@pytest.mark.parametrize("name", ["ngram", *(pytest.param(x, marks=pytest.mark.slow) for x in ("model", "eagle"))])
def test_an_engine_over_parts_has_the_tokens_and_bits_of_one_part(monkeypatch, name):
    monkeypatch.setenv("SPECJAX_CHECK", "1")
    got, stats = served(GRID, name, 4)
    want, _ = served(TWO, name, 2)
    assert [x.tokens for x in got] == [x.tokens for x in want]
    assert [x.logprobs for x in got] == [x.logprobs for x in want]
    assert stats.cached_tokens >= 128, "the long prompt is known when it comes for the third time"


def test_requests_are_swapped_out_within_their_part(monkeypatch):
    monkeypatch.setenv("SPECJAX_CHECK", "1")
    got, stats = served(GRID, "ngram", 4, LONG, overcommit=True, kv_tokens=2 * 320)
    assert stats.swaps > 0
    assert [x.tokens for x in got] == [x.tokens for x in served(TWO, "ngram", 2, LONG)[0]]


def test_slots_that_the_parts_cannot_share_are_refused():
    with pytest.raises(ValueError, match="slots must be a multiple of the 2 parts of the mesh that share them, got 3"):
        Engine(parallel.shard(LM, GRID), slots=3)


def test_meshes_with_parts_that_do_not_suit_are_refused():
    with pytest.raises(ValueError, match="data must be a divisor of the 4 devices of the mesh, got 3"):
        parallel.mesh(4, data=3)
    with pytest.raises(ValueError, match="expected one, or \"data\" and one more"):
        parallel.shard(LM, jax.make_mesh((2, 2), ("rows", "model")))


def test_a_benchmark_reads_the_target_once_a_part():
    sizes = dict(num_speculative_tokens=2, batch=4, prompt_length=4, max_new_tokens=8)
    case = Case.planted("tiny", "tiny", 0.7, "float32", {"read": 1e9}, devices=4, data_parallel=2, **sizes)
    assert case.target.mesh.shape == GRID.shape and case.step_floor == timed.weight_bytes(case.target) / 2 / 1e9
    prompts = case.prompts()
    out = generate(case.target, prompts, drafter=DraftModel(case.draft), num_speculative_tokens=2, max_new_tokens=8)
    assert out.tokens == [case.planted_text(prompt, 8) for prompt in prompts]
