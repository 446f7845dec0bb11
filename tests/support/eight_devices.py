"""Tensor parallelism on eight forced host devices; test_parallel.py runs this file (it is no test module by name)."""

import dataclasses
import functools
from functools import partial

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, case, in_pages
from hf_folders import HF, write_hf
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from convert import checkpoint
from specjax import Engine, LlamaConfig, drafters, generate, stream, testing
from specjax.checkpoints.load import load
from specjax.decode import decoder
from specjax.drafters import DraftModel, PromptLookup
from specjax.generation.generate import prepare
from specjax.models import attention, fused_attention, modules, parallel
from specjax.models import cache as kv
from specjax.models.heads.dflash_head import DFlashHead, DFlashHeadConfig
from specjax.models.heads.eagle3_head import Eagle3Head, Eagle3HeadConfig
from specjax.models.quantized import map_with_path

SHAPE = dict(num_attention_heads=8, num_key_value_heads=4, vocab_size=64, intermediate_size=96)
LM = testing.tiny_lm(0, **SHAPE)
TIED = testing.tiny_lm(0, tie_word_embeddings=True, **SHAPE)
DRAFT = testing.noisy_twin(LM, 0.05)
HEAD = Eagle3HeadConfig(dataclasses.replace(LM.config, num_hidden_layers=1), (0, 1, 2))
BLOCKS = DFlashHeadConfig(LM.config, (0, 1, 2), block_size=4, mask_token_id=5)
PROMPTS = [[3, 9], [4, 8, 1, 4, 8, 1, 30, 2, 7, 7, 4, 8]]
IDS = np.arange(12, dtype=np.int32).reshape(2, 6)
OPTIONS = dict(max_new_tokens=20, num_speculative_tokens=3)
FEW = {"gemma3_text", "gpt2"}  # of the families; the others are slow
DRAFTERS = {
    "plain": lambda _: None,
    "ngram": lambda _: PromptLookup(prompt_lookup_min=1),
    "model": lambda mesh: DraftModel(parallel.replicate(DRAFT, mesh)),
    "eagle": lambda _: drafters.Eagle(HEAD, modules.init(Eagle3Head, HEAD, 3), None),
    "dflash": lambda _: drafters.DFlash(BLOCKS, modules.init(DFlashHead, BLOCKS, 3), None),
}


@jax.jit
def call(lm, ids):
    return lm(ids, lm.alloc_cache(2, 8))


@functools.cache
def alone(name):
    return generate(LM, PROMPTS, drafter=DRAFTERS[name](None), **OPTIONS).tokens


def compiled_round(lm, drafter):
    """The program of one round, and the state that it takes."""
    job = prepare(lm, PROMPTS, drafter=drafter, **OPTIONS)
    state = job.start()
    lowered = decoder.round_jit.lower(job.decoder, state)
    return lowered.compile(), state


def nbytes_here(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def assert_in_parts(params, count):
    """No device holds a whole matrix."""
    cut = {path for path, x in paths(params) if not x.sharding.is_fully_replicated}
    names = {path[-1] if len(path) == 1 else path[-2] for path in cut}
    assert names == {"embed", "lm_head", "qkv", "o", "gate_up", "down"}
    for path, x in paths(params):
        assert len(x.addressable_shards) == count
        for shard in x.addressable_shards:
            assert shard.data.size * (count if path in cut else 1) == x.size, path


def paths(params):
    found = []
    map_with_path(lambda path, leaf: found.extend((path, x) for x in jax.tree.leaves(leaf) if x.ndim > 1), params)
    return found


def counts(quick):
    """Meshes of 1, 2 and 4, all but one of them slow."""
    sizes = [pytest.param(n, marks=() if n == quick else pytest.mark.slow) for n in (1, 2, 4)]
    return pytest.mark.parametrize("count", sizes)


@counts(4)
@pytest.mark.parametrize("name", DRAFTERS)
def test_same_tokens_as_one_device(name, count):
    mesh = parallel.mesh(count)
    out = generate(parallel.shard(LM, mesh), PROMPTS, drafter=DRAFTERS[name](mesh), **OPTIONS)
    assert out.tokens == alone(name)
    assert (sum(m.num_draft_tokens for m in out.metrics) > 0) == (name != "plain")


@counts(2)
@pytest.mark.parametrize("name", DRAFTERS)
def test_streams_write_them_too(name, count):
    mesh = parallel.mesh(count)
    events = stream(parallel.shard(LM, mesh), PROMPTS, drafter=DRAFTERS[name](mesh), **OPTIONS)
    for _ in events:
        pass
    assert events.result().tokens == alone(name)


@pytest.mark.parametrize("name", ["ngram", pytest.param("model", marks=pytest.mark.slow)])
def test_an_engine_on_a_mesh_compiles_nothing_after_its_warm_up(name, caplog):
    mesh, logger = parallel.mesh(2), "jax._src.interpreters.pxla"
    long = PROMPTS[1] * 14  # read in three chunks, of two programs
    with Engine(parallel.shard(LM, mesh), DRAFTERS[name](mesh), num_speculative_tokens=3, slots=2) as engine:
        with caplog.at_level("DEBUG", logger):
            engine.warmup()
            assert "Compiling jit(round)" in caplog.text
            caplog.clear()
            prompts = [*PROMPTS, long, PROMPTS[1]]
            handles = [engine.submit(p, max_new_tokens=20, logprobs=i == 1) for i, p in enumerate(prompts)]
            tokens = [handle.result().tokens[0] for handle in handles]
    assert "Compiling" not in caplog.text
    assert [*tokens[:2], tokens[3]] == [*alone(name), alone(name)[1]]


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_round_talks_twice_a_layer_and_updates_caches_in_place(name):
    mesh = parallel.mesh(4)
    compiled, state = compiled_round(parallel.shard(LM, mesh), DRAFTERS[name](mesh))
    programs = 2 if name == "ngram" else 1  # one a width
    layers = LM.config.num_hidden_layers
    assert testing.collectives(compiled) == {
        "all-reduce": 2 * layers * programs,  # after attention, after the MLP
        # embeddings, logits; a head's embeddings: of the block and of each drafted token, or of all of them at once
        "all-gather": 2 * programs + {"eagle": 2, "dflash": 1}.get(name, 0),
    }
    caches = (state.cache, state.drafter)
    assert compiled.memory_analysis().alias_size_in_bytes >= nbytes_here(caches)
    shards = {x.addressable_shards[0].data.shape[1] for x in (*state.cache.keys, *state.cache.values)}
    assert shards == {1}, "a kv head a device"
    after = compiled.output_shardings[0].cache
    assert all(a.is_equivalent_to(b.sharding, 4) for a, b in zip(after.keys, state.cache.keys, strict=True))


@pytest.fixture
def kernel(monkeypatch):
    """The attention kernel, interpreted; a list of how many kv heads each call of it was traced for."""
    heads, attend = [], fused_attention.attend

    def seen(qkv, *args, **options):
        heads.append(qkv.shape[2])
        return attend(qkv, *args, **options)

    monkeypatch.setattr(fused_attention, "attend", seen)
    monkeypatch.setattr(attention, "kernels", lambda: "cpu")
    return heads


@pytest.mark.parametrize("name", ["nothing cached yet", "a tree on a long cache"])
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("count", [1, 4], ids=["whole", "in parts"])
def test_each_device_runs_the_kernel_on_its_own_heads(kernel, name, count, paged):
    *start, _, group, dim, capacity, masked = CASES[name]
    width = -(-capacity // kv.PAGE)
    qkv, angles, mask, *buffers, starts = case(*start, 4, group, dim, width * kv.PAGE, masked)
    table = np.arange(len(starts) * width, 0, -1, np.int32).reshape(-1, width) if paged else None
    buffers = [in_pages(x, table, table.size + 1) for x in buffers] if paged else buffers
    mesh = parallel.mesh(4)
    cut = parallel.cache_sharding(mesh) if count == 4 else NamedSharding(mesh, PartitionSpec())

    def attended(sharding):
        attend = jax.jit(partial(attention.attend, sharding=sharding))
        return attend(qkv, attention.Block(starts, angles, mask, None, table), *buffers)

    alone, out = attended(None), attended(cut)
    assert set(kernel) == {4, 4 // count}
    assert all(x.sharding.is_equivalent_to(cut, 4) for x in out[1:])
    for got, want in zip(out, alone, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_models_on_a_mesh_decode_with_the_kernel(kernel):
    target = testing.tiny_lm(0, dtype=jnp.bfloat16, head_dim=32, **SHAPE)
    draft, mesh = testing.noisy_twin(target, 0.05), parallel.mesh(4)
    want = generate(target, PROMPTS, drafter=DraftModel(draft), **OPTIONS).tokens
    assert set(kernel) == {4}
    kernel.clear()
    drafter = DraftModel(parallel.replicate(draft, mesh))
    assert generate(parallel.shard(target, mesh), PROMPTS, drafter=drafter, **OPTIONS).tokens == want
    assert set(kernel) == {1, 4}, "a kv head a device of the target's, all of the draft's on each"


def test_a_tied_table_serves_both_ends():
    lm = parallel.shard(TIED, parallel.mesh(4))
    np.testing.assert_allclose(call(lm, IDS).logits, call(TIED, IDS).logits, atol=1e-4)
    counts = testing.collectives(compiled_round(lm, None)[0])
    assert counts == {"all-reduce": 2 * TIED.config.num_hidden_layers + 1, "all-gather": 1}  # logits are sums here


def test_loading_puts_each_tensor_on_its_devices(tmp_path):
    hf = {**HF, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 48}
    write_hf(tmp_path / "hf", hf)
    whole = load(tmp_path / "hf")
    checkpoint.save(tmp_path / "own", whole.config, whole.params)
    checkpoint.save(tmp_path / "int8", whole.config, whole.quantize("int8").params)
    mesh = parallel.mesh(4)
    for source, quantize in (("hf", None), ("own", None), ("hf", "int8"), ("own", "int8"), ("int8", None)):
        lm = load(tmp_path / source, quantize=quantize, mesh=mesh)
        exact = quantize is None and source != "int8"
        if exact:
            assert_in_parts(lm.params, 4)
        want = whole.params if exact else whole.quantize("int8").params
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), lm.params, want))
        assert lm.mesh == mesh and lm.alloc_cache(2, 8).keys[0].addressable_shards[0].data.shape == (2, 1, 8, 4)
    weight = lm.params["layers"]["0"]["attention"]["o"]["weight"]
    assert weight.values.addressable_shards[0].data.shape == (32, 8) and weight.scale.sharding.is_fully_replicated
    weight = lm.params["layers"]["0"]["mlp"]["gate_up"]["weight"]
    assert weight.values.addressable_shards[0].data.shape[1] == weight.scale.addressable_shards[0].data.shape[1] == 12


def test_a_quantised_model_with_an_int8_cache_in_parts():
    small = dataclasses.replace(LM.quantize("int8"), kv_dtype="int8")
    lm = parallel.shard(small, parallel.mesh(4))
    want, out = call(small, IDS), call(lm, IDS)
    np.testing.assert_allclose(out.logits, want.logits, atol=0.05)  # sums in another order may round to another code
    spec = parallel.cache_sharding(lm.mesh).spec
    assert {x.sharding.spec for x in jax.tree.leaves((out.cache.keys, lm.alloc_cache(2, 8).keys))} == {spec}


@pytest.mark.slow
def test_a_t5_decodes_in_parts():
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=96, num_attention_heads=4, head_dim=8)
    lm, mesh = families.tiny("t5", std=0.3, **sizes), parallel.mesh(2)
    cut, draft = parallel.shard(lm, mesh), testing.noisy_twin(lm, 0.05)
    whole = {path for path, x in paths(cut.params) if x.sharding.is_fully_replicated}
    assert all("distance_bias" in path or any(name.endswith("norm") for name in path) for path in whole)
    want = generate(lm, PROMPTS, drafter=DraftModel(draft), **OPTIONS)
    out = generate(cut, PROMPTS, drafter=DraftModel(parallel.replicate(draft, mesh)), **OPTIONS)
    assert out.tokens == want.tokens and sum(m.num_accepted_tokens for m in out.metrics) > 0
    assert cut.alloc_cache(2, 8).keys[0].addressable_shards[0].data.shape[1] == lm.config.num_key_value_heads // 2


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FEW else pytest.mark.slow) for n in families.DECODERS]
)
def test_models_of_every_family_decode_in_parts(name):
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=96, num_attention_heads=4)
    sizes |= {} if name == "gpt2" else dict(num_key_value_heads=2, head_dim=8)
    lm, mesh = families.tiny(name, std=0.3, **sizes), parallel.mesh(2)
    cut, draft = parallel.shard(lm, mesh), testing.noisy_twin(lm, 0.05)
    np.testing.assert_allclose(call(cut, IDS).logits, call(lm, IDS).logits, atol=1e-3)
    np.testing.assert_allclose(jax.jit(type(lm).embed)(cut, IDS), jax.jit(type(lm).embed)(lm, IDS), atol=1e-5)
    whole = {path for path, x in paths(cut.params) if x.sharding.is_fully_replicated}
    assert {path[0] for path in whole} <= {"position_embed"}
    want = generate(lm, PROMPTS, drafter=DraftModel(draft), **OPTIONS).tokens
    out = generate(cut, PROMPTS, drafter=DraftModel(parallel.replicate(draft, mesh)), **OPTIONS)
    assert out.tokens == want
    assert cut.alloc_cache(2, 8).keys[0].addressable_shards[0].data.shape[1] == lm.config.num_key_value_heads // 2


def test_planted_models_are_made_in_parts():
    config = dataclasses.replace(LM.config, vocab_size=400, hidden_size=128)
    target, draft, pi = testing.planted_pair(config, config, 0.75, dtype=jnp.float32)
    mesh = parallel.mesh(4)
    cut, copied, cycle = testing.planted_pair(config, config, 0.75, dtype=jnp.float32, mesh=mesh)
    assert_in_parts(cut.params, 4)
    assert (cycle == pi).all() and copied.mesh == mesh
    for a, b in ((cut, target), (copied, draft)):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), a.params, b.params)
    out = generate(cut, [[5]], **OPTIONS).tokens[0]
    assert out == [int(x) for x in np.asarray(pi)[[5, *out[:-1]]]]


def test_a_planted_head_drafts_beside_a_target_in_parts():
    config = LlamaConfig(1024, 256, 512, 3, 8, 4, 32, max_position_embeddings=512)
    rates, mesh = np.array([[0.8], [0.7]]), parallel.mesh(4)
    target, head, pi = testing.planted_eagle3(config, rates, dtype=jnp.float32)
    cut, copied, cycle = testing.planted_eagle3(config, rates, dtype=jnp.float32, mesh=mesh)
    assert_in_parts(cut.params, 4)
    assert (cycle == pi).all() and all(x.sharding.is_fully_replicated for x in jax.tree.leaves(copied))
    for a, b in ((cut, target), (copied, head)):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), a.params, b.params)
    prompts = np.asarray(head.tokens[: 8 * 4]).reshape(8, 4).tolist()
    one, out = (
        generate(lm, prompts, drafter=drafter, num_speculative_tokens=2, max_new_tokens=24)
        for lm, drafter in ((target, head), (cut, copied))
    )
    assert out.tokens == one.tokens and out.metrics == one.metrics
    assert sum(m.num_accepted_tokens for m in out.metrics) > 0
    caches = jax.tree.leaves(prepare(cut, prompts, drafter=copied, num_speculative_tokens=2).start().drafter.cache)
    assert all(x.sharding.is_fully_replicated for x in caches)


def test_meshes_that_do_not_suit_are_refused_with_their_numbers():
    with pytest.raises(ValueError, match="3 devices can't share evenly num_key_value_heads = 4, hidden_size = 32"):
        parallel.shard(LM, parallel.mesh(3))
    odd = LlamaConfig(**{**LM.config.__dict__, "vocab_size": 63})
    with pytest.raises(ValueError, match="4 devices can't share evenly vocab_size = 63"):
        testing.planted_lm(odd, np.arange(63), mesh=parallel.mesh(4))
    with pytest.raises(ValueError, match="9 devices.* jax sees 8"):
        parallel.mesh(9)
    for mesh in (jax.make_mesh((2, 2), ("x", "y")), jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))):
        with pytest.raises(ValueError, match="specjax.parallel.mesh"):
            parallel.shard(LM, mesh)
    with pytest.raises(ValueError, match="is on one device and the target on a mesh of {'model': 2}.*replicate"):
        generate(parallel.shard(LM, parallel.mesh(2)), PROMPTS, drafter=DraftModel(DRAFT))
