"""The block of each layer: windows in chains and trees, and which layers the attention kernel serves."""

import dataclasses

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import testing
from specjax.models import attention, fused_attention
from specjax.models import cache as kv
from specjax.models.blocks import blocks, window_mask


def cache_of(lengths, capacity, **features):
    lm = testing.tiny_lm(0, **features)
    return lm, kv.with_lengths(lm.alloc_cache(len(lengths), capacity), jnp.array(lengths, jnp.int32))


@pytest.mark.parametrize("window", [1, 4, 30])
def test_a_token_of_a_chain_sees_itself_and_the_tokens_before_it_in_the_window(window):
    lengths, size = [0, 3, 11], 3
    _, cache = cache_of(lengths, 16)
    seen = np.asarray(window_mask(cache, size, None, window))
    for row, length in enumerate(lengths):
        for token in range(size):
            own = length + token
            assert np.flatnonzero(seen[row, token]).tolist() == list(range(max(0, own - window + 1), own + 1))


@pytest.mark.parametrize("window", [1, 2, 5])
def test_a_node_of_a_tree_sees_the_tokens_of_its_own_branch_in_the_window(window):
    """Whatever slots the nodes stand in: the window is one of positions."""
    lengths, parents = np.array([2, 9]), [-1, 0, 0, 1, 2, 4, 3]
    positions = np.zeros((2, 16), int) + np.arange(16)
    mask = np.zeros((2, len(parents), 16), bool)
    for row, length in enumerate(lengths):
        mask[row, :, :length] = True
        for node, parent in enumerate(parents):
            own = length + node
            positions[row, own] = length if parent < 0 else positions[row, length + parent] + 1
            if parent >= 0:
                mask[row, node] = mask[row, parent]
            mask[row, node, own] = True
    _, cache = cache_of(lengths.tolist(), 16)
    got = np.asarray(window_mask(cache, len(parents), jnp.asarray(mask), window))
    own = np.take_along_axis(positions, lengths[:, None] + np.arange(len(parents)), 1)[..., None]
    np.testing.assert_array_equal(got, mask & (positions[:, None] > own - window))


def test_layers_without_features_share_one_block():
    lm, cache = cache_of([2], 8, num_hidden_layers=3)
    first, *others = blocks(lm.config, cache, jnp.array([[2, 3]]), None)
    assert all(block is first for block in others) and first.mask is None


def test_a_cache_no_longer_than_the_window_needs_no_mask():
    for window, masked in ((8, False), (7, True)):
        lm, cache = cache_of([2], 8, sliding_window=window, local_layers=(1,))
        plain, local = blocks(lm.config, cache, jnp.array([[2, 3]]), None)
        assert plain.mask is None and (local.mask is not None) == masked


SERVED = {"mistral": "window", "gemma3_text": "window", "qwen3": "plain", "smollm3": "plain", "gemma2": "", "gpt2": ""}


DEFAULT = {"mistral", "gemma2"}


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in DEFAULT else pytest.mark.slow) for f in SERVED])
def test_the_kernel_serves_windows_and_leaves_other_scores_to_xla(monkeypatch, family):
    size = {} if family == "gpt2" else {"head_dim": 32}
    lm = families.tiny(family, vocab_size=50, std=0.2, hidden_size=64, **size)
    if family == "gemma3_text":  # its scale is then that of the kernel
        lm = dataclasses.replace(lm, config=dataclasses.replace(lm.config, query_pre_attn_scalar=32))
    lm = dataclasses.replace(lm, params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), lm.params))
    tokens = np.arange(6, dtype=np.int32).reshape(2, 3)
    cache = kv.with_lengths(lm.alloc_cache(2, 80), jnp.array([1, 70], jnp.int32))
    masks, attend = [], fused_attention.attend
    monkeypatch.setattr(fused_attention, "attend", lambda *args, **kw: masks.append(args[2]) or attend(*args, **kw))
    plain = jax.jit(lambda lm, cache: lm(tokens, cache).logits)(lm, cache)
    assert not masks
    monkeypatch.setattr(attention, "kernels", lambda: "cpu" if jax.default_backend() == "cpu" else "cuda")
    fused = jax.jit(lambda lm, cache: lm(tokens, cache).logits)(lm, cache)
    np.testing.assert_allclose(fused, plain, atol=0.03 * np.abs(plain).max())
    windows = {"window" if mask is not None else "plain" for mask in masks}
    assert SERVED[family] in windows if SERVED[family] else not masks
