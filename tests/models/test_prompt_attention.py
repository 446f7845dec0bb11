"""The attention kernel of prompts against plain JAX: interpreted on a CPU, as compiled on a Hopper GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import case, in_pages

import specjax
from specjax import testing
from specjax.models import attention, fused_attention, prompt_attention
from specjax.models import cache as kv
from specjax.models.attention import Block, Score

# Rows' lengths, tokens, kv heads, queries a kv head, head size, capacity.
CASES = {
    "the first chunk": ((0,), 64, 1, 1, 64, 128),
    "two parts, and a diagonal that both cut": ((832,), 128, 1, 1, 64, 1024),
    "three heads, so that one tile is made twice": ((64,), 64, 2, 3, 128, 192),
    "rows that start anywhere": ((77, 0), 128, 1, 2, 64, 256),
    "more parts than steps": ((3,), 64, 1, 1, 64, 2048),
}
SLOW = {name: pytest.param(name, marks=pytest.mark.slow) for name in CASES}
QUICK = ["two parts, and a diagonal that both cut"]


def interpreter(**options):
    """How Pallas runs the kernel here."""
    if jax.default_backend() == "gpu":
        return False
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # public from JAX 0.11 on

    return InterpretGPUParams(**options)


def arguments(name, dtype=jnp.bfloat16):
    """Those of attend. Stale keys are NaN: no such key may reach a result. Values are always finite."""
    qkv, angles, _, keys, values, starts = case(*CASES[name], False)
    stale = (jnp.arange(keys.shape[2]) >= starts[:, None])[:, None, :, None]  # [B, 1, S, 1]
    return jax.tree.map(lambda x: x.astype(dtype), (qkv, jnp.where(stale, jnp.nan, keys), values)), angles, starts


def paged(buffers, starts):
    """Pools and a table with the entries of contiguous buffers."""
    width = buffers[0].shape[2] // kv.PAGE
    table = 1 + np.random.default_rng(0).permutation(len(starts) * width).reshape(-1, width)
    pools = [in_pages(x, table, table.size + 1) for x in buffers]
    return [pools[0], jnp.nan_to_num(pools[1])], jnp.asarray(table, jnp.int32)


def numbers(x):
    return np.asarray(x, np.float32)


@pytest.mark.parametrize("name", [name if name in QUICK else SLOW[name] for name in CASES])
def test_the_kernel_on_pages_is_the_plain_function(name):
    """Another slot next to a query's own would change the result by far more than the tolerance."""
    (qkv, *buffers), angles, starts = arguments(name)
    pools, table = paged(buffers, starts)
    want, *want_pools = jax.block_until_ready(attention.by_xla(qkv, Block(starts, angles, None, None, table), *pools))
    got, *got_pools = prompt_attention.attend(qkv, angles, None, *pools, starts, table, interpreter())
    # Weights are rounded to 16 bits before they are divided by their total, not after.
    np.testing.assert_allclose(numbers(got), numbers(want), atol=0.02)
    for pool, want_pool in zip(got_pools, want_pools, strict=True):
        np.testing.assert_array_equal(numbers(pool)[1:], numbers(want_pool)[1:])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_pages_give_the_bits_of_a_contiguous_cache_without_a_race(name):
    (qkv, *buffers), angles, starts = arguments(name, jnp.float16)
    pools, table = paged(buffers, starts)
    attend = partial(prompt_attention.attend, interpret=interpreter(detect_races=True))
    want, got = attend(qkv, angles, None, *buffers, starts)[0], attend(qkv, angles, None, *pools, starts, table)[0]
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), np.asarray(want).view(np.uint16))


@pytest.mark.slow
def test_a_row_keeps_its_bits_beside_other_rows_and_at_another_place():
    (qkv, *buffers), angles, starts = arguments("rows that start anywhere")
    attend = partial(prompt_attention.attend, interpret=interpreter())
    want = numbers(attend(qkv, angles, None, *buffers, starts)[0])[0]
    qkv, starts = qkv.at[1].set(1.0), starts.at[1].set(128)
    turned = jax.tree.map(lambda x: x[::-1], (qkv, angles, buffers, starts))
    got = attend(turned[0], turned[1], None, *turned[2], turned[3])[0]
    np.testing.assert_array_equal(numbers(got)[1], want)


@pytest.mark.slow
def test_a_token_without_numbers_reaches_only_those_that_see_it():
    (qkv, *buffers), angles, starts = arguments("two parts, and a diagonal that both cut")
    attend = partial(prompt_attention.attend, interpret=interpreter())
    want = numbers(attend(qkv, angles, None, *buffers, starts)[0])
    got = numbers(attend(qkv.at[:, 70].set(jnp.inf), angles, None, *buffers, starts)[0])
    np.testing.assert_array_equal(got[:, :70], want[:, :70])
    assert np.isfinite(want).all()
    assert np.isnan(got[:, 70:]).all()


def test_an_engine_gives_the_same_bits_whether_the_prompt_was_known():
    if interpreter():  # in an engine's programs the interpreter waits for threads that it holds
        pytest.skip("needs a Hopper GPU")
    lm = testing.tiny_lm(3, dtype=jnp.bfloat16, head_dim=64, num_hidden_layers=1, num_key_value_heads=1)
    prompt = np.random.default_rng(0).integers(0, 50, 150).tolist()
    with specjax.Engine(lm, drafter="ngram", slots=2, capacity=200, prefill_chunk=64) as engine:
        handles = [engine.submit(prompt, max_new_tokens=12, ignore_eos=True, logprobs=True) for _ in range(2)]
        unknown, known = (handle.result() for handle in handles)
    assert [handle.cached_tokens for handle in handles] == [0, 128]
    assert known.tokens == unknown.tokens
    assert known.logprobs == unknown.logprobs


@pytest.mark.parametrize("dim, group, room", [(64, 3, 192), (128, 4, 16384)])
def test_the_kernel_is_lowered_for_a_gpu_on_any_machine(dim, group, room):
    def attend(qkv, angles, pools, starts, table):
        return prompt_attention.attend(qkv, angles, None, *pools, starts, table)

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    angles, pool, indices = array(1, 128, dim, dtype=jnp.float32), array(9, 2, 64, dim), partial(array, dtype=jnp.int32)
    args = array(1, 128, 2, group + 2, dim), (angles, angles), (pool, pool), indices(1), indices(1, room // 64)
    assert "mosaic_gpu" in jax.jit(attend).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def hopper(monkeypatch):
    """A machine that seems to have a Hopper GPU; the kernels say that they were called, in place of running."""

    def called(*_, **__):
        raise RuntimeError("the kernel of prompts")

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(prompt_attention, "attend", called)
    monkeypatch.setattr(fused_attention, "attend", lambda *_, **__: pytest.fail("too many tokens"))
    monkeypatch.setattr(attention, "cuda_version", lambda: 13000)


def test_what_the_kernel_does_not_serve_is_left_to_xla(hopper, monkeypatch):
    def runs(tokens=64, dim=64, slots=128, mask=None, bias=None, score=attention.PLAIN, dtype=jnp.bfloat16, turn=True):
        qkv = jnp.zeros((1, tokens, 1, 6, dim), dtype)
        cache, angles = jnp.zeros((1, 1, slots, dim), dtype), jnp.zeros((1, tokens, dim))
        block = Block(jnp.zeros(1, jnp.int32), (angles, angles) if turn else None, mask, bias)
        try:
            jax.eval_shape(partial(attention.attend, score=score), qkv, block, cache, cache)
        except RuntimeError as error:
            return str(error)
        return "XLA"

    assert runs() == runs(tokens=128, dim=128, slots=192) == "the kernel of prompts"
    assert runs(tokens=65) == runs(dim=32) == runs(slots=130) == runs(dtype=jnp.float32) == runs(turn=False) == "XLA"
    assert runs(mask=jnp.ones((1, 64, 128), bool)) == runs(bias=jnp.zeros((1, 4, 64, 128))) == "XLA"
    assert runs(score=Score(cap=50.0)) == runs(score=Score(scale=0.1)) == "XLA"
    for version, server in ((12040, True), (12080, False), (12090, False), (12091, True), (None, False)):
        monkeypatch.setattr(attention, "cuda_version", lambda version=version: version)
        assert (runs() == "the kernel of prompts") == server
    monkeypatch.setattr(attention, "cuda_version", lambda: 13000)
    for name in ("SPECJAX_FUSED_ATTENTION", "SPECJAX_HOPPER_KERNELS"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "0")
            assert runs() == "XLA"
