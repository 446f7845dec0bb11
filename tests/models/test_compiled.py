"""What a round compiles to: caches updated in place, nothing large copied, a known number of messages.

On the CPU a tiny model's caches; copies within attention are that backend's own affair. For an H100 a layer of Llama
3.1 8B: on a card if there is one, else compiled without if jax's CUDA plugin is installed
(``specjax.testing.h100_devices`` says how), else skipped.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from kernels import kernels

from specjax import LM, drafters, testing
from specjax.decode import decoder, prefill
from specjax.drafters import DraftModel, NoDraft, PromptLookup
from specjax.generation.generate import prepare
from specjax.models import cache as kv
from specjax.models import llama, modules, parallel, quantized
from specjax.models.config import PRESETS
from specjax.models.heads.eagle3_head import Eagle3Head, Eagle3HeadConfig
from specjax.verify import VERIFIERS

CAPACITY, K = 8192, 2  # one layer's keys are then larger than anything that a round has to compute
LEVEL = 25  # kernels that one more level of a chain adds: 24 with jax 0.10.2, and one to spare


def nbytes(tree):
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("program", ["run_jit", "round_jit"])
def test_both_caches_are_updated_in_place_on_the_cpu(program):
    lm = testing.tiny_lm(0, num_hidden_layers=1)
    job = prepare(lm, [[1, 2, 3]], drafter=DraftModel(lm), max_new_tokens=8)
    state = jax.eval_shape(job.start)
    lowered = getattr(decoder, program).lower(job.decoder, state)
    compiled = lowered.compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= nbytes((state.cache, state.drafter))


def devices(count):
    if jax.default_backend() == "gpu":
        return jax.devices()[:count] if len(jax.devices()) >= count else pytest.skip(f"needs {count} GPUs")
    return testing.h100_devices(count) or pytest.skip("needs a GPU, or jax's CUDA plugin to compile for one")


def abstract(config, kind, where):
    """The parameters of a model as shapes, where ``where(path, leaf)`` says."""

    def leaf(path, x):
        x = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
        if kind and quantized.is_matrix(config, path):
            x = jax.eval_shape(lambda x: quantized.quantize(x, kind), x)
        return placed(x, where(path, x))

    return quantized.map_with_path(leaf, llama.structure(config)[1])


def placed(tree, shardings):
    """Shapes with their sharding: one for all, or a tree of them."""
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def compile_round(monkeypatch, count, drafter, quantize=None, kv_dtype=None, paged=False, size=K, **shape):
    """One round of an 8B target (one layer of it) at long context. -> (compiled, target, state), per device."""
    at = devices(count)
    if jax.default_backend() != "gpu" and jax.__version_info__ >= (0, 11):
        if paged:
            pytest.skip("from jax 0.11 on such a kernel needs the card to compile, and XLA gathers pages")
        monkeypatch.setenv("SPECJAX_FUSED_ATTENTION", "0")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # what is traced is for one
    mesh = Mesh(np.array(at), ("model",), axis_types=(AxisType.Auto,)) if count > 1 else None
    whole = SingleDeviceSharding(at[0]) if mesh is None else NamedSharding(mesh, PartitionSpec())
    config = dataclasses.replace(PRESETS["llama-3.1-8b"], num_hidden_layers=1, **shape)
    small = dataclasses.replace(PRESETS["llama-3.2-1b"], num_hidden_layers=1)
    cut = (lambda _, x: whole) if mesh is None else (lambda path, x: parallel.sharding(path, x, mesh))
    target = LM(config, abstract(config, quantize, cut), None, kv_dtype, parallel.cache_sharding(mesh))
    draft = LM(small, abstract(small, quantize, lambda *_: whole), None, None, mesh and whole)
    shape = Eagle3HeadConfig(dataclasses.replace(config, tie_word_embeddings=False), (0, 1))
    leaves = modules.structure(Eagle3Head, shape)[1]
    weights = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), leaves)
    head = drafters.Eagle(shape, placed(weights, whole), None)
    drafter = {
        "none": NoDraft(), "ngram": PromptLookup(), "model": DraftModel(draft, prefill_chunk=2), "eagle": head,
    }[drafter]  # fmt: skip
    request = prepare(testing.tiny_lm(0), [[1, 2, 3]], max_new_tokens=8).request
    size = 0 if isinstance(drafter, NoDraft) else size
    made = decoder.Decoder(target, drafter, VERIFIERS["rejection"], size)
    tokens = jax.ShapeDtypeStruct((1, CAPACITY), jnp.int32)
    state = jax.eval_shape(lambda *given: prefill.start(*given, 64), made, request, tokens)
    heads = parallel.cache_sharding(mesh) or whole
    cache = state.cache
    if paged:
        cache = jax.eval_shape(lambda cache: kv.paged(cache, 1, 1 + CAPACITY // kv.PAGE), cache)
    cache = cache.replace(keys=placed(cache.keys, heads), values=placed(cache.values, heads),
                          lengths=placed(cache.lengths, whole), table=placed(cache.table, whole))  # fmt: skip
    state = placed(state._replace(cache=()), whole)._replace(cache=cache)
    lowered = decoder.round_jit.lower(made, state)
    return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0}), target, state


@pytest.mark.parametrize(
    "drafter, quantize, kv_dtype, paged",
    [("model", None, None, False), ("model", "int8", None, False), ("none", "fp8", "int8", False),
     ("model", None, None, True)],
)  # fmt: skip
def test_one_h100_copies_neither_weights_nor_caches(monkeypatch, drafter, quantize, kv_dtype, paged):
    compiled, target, state = compile_round(monkeypatch, 1, drafter, quantize, kv_dtype, paged)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= nbytes((state.cache, state.drafter))
    layer = target.params["layers"]["0"]
    large = (layer["attention"]["o"], layer["mlp"]["down"], target.params["lm_head"], state.cache.keys)
    assert memory.temp_size_in_bytes < min(map(nbytes, large))
    assert testing.collectives(compiled) == {}


def test_a_level_of_a_chain_takes_few_kernels_and_no_loop(monkeypatch):
    """A round of a small model is as long as its kernels are many. One more drafted token is one more level."""
    if jax.default_backend() != "gpu" and jax.__version_info__ >= (0, 11):
        pytest.skip("from jax 0.11 on the attention kernel needs the card to compile")
    rounds = []
    for size in (2, 3):
        with monkeypatch.context() as patch:  # each call looks for the devices anew
            rounds.append(compile_round(patch, 1, "eagle", size=size)[0])
    assert " while(" not in rounds[1].as_text(), "a loop cuts the round's graph of kernels into several"
    assert kernels(rounds[1]) - kernels(rounds[0]) <= LEVEL


@pytest.mark.parametrize("drafter", ["none", "ngram", "model", "eagle"])
@pytest.mark.parametrize("tied", [False, True])
def test_four_h100s_talk_twice_a_layer(monkeypatch, drafter, tied):
    compiled, target, state = compile_round(monkeypatch, 4, drafter, tie_word_embeddings=tied)
    programs = 2 if drafter == "ngram" else 1
    expected = {"all-reduce": 2 + tied, "all-gather": 2 - tied}  # a tied head's logits are sums, not parts
    # A head looks embeddings up, of the block's tokens and of each that it drafts: rows, never the table.
    expected["all-gather"] += 2 * (drafter == "eagle")
    assert testing.collectives(compiled) == {kind: count * programs for kind, count in expected.items()}
    memory = compiled.memory_analysis()
    own = nbytes((state.cache.keys, state.cache.values)) // 4
    assert memory.alias_size_in_bytes >= own + nbytes(state.drafter)
    smallest = target.params["layers"]["0"]["attention"]["o"]
    assert memory.temp_size_in_bytes < nbytes(smallest) / 2, "no matrix is fetched from the other devices"
