"""Rotary frequencies of every scaling rule against numbers on paper and against transformers."""

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specjax.models import rope
from specjax.models.config import from_hf

SHAPE = {
    "model_type": "llama", "vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256}


def config_dict(scaling, head_dim=32, theta=10000.0):
    return SHAPE | {"hidden_size": 2 * head_dim, "head_dim": head_dim, "rope_theta": theta, "rope_scaling": scaling}


def test_plain_frequencies():
    inv_freq, factor = rope.inverse_frequencies(from_hf(config_dict(None, head_dim=8)))
    np.testing.assert_allclose(inv_freq, [1, 0.1, 0.01, 0.001], rtol=1e-6)
    assert factor == 1 and inv_freq.dtype == np.float32


@pytest.mark.parametrize("factor,expected", [
    (8.0, [1, 0.0427512, 0.01 / 8, 0.001 / 8]),  # wavelengths 6.3, 62.8 (between 128/4 and 128), 628, 6283
    (32.0, [1, 0.0366174, 0.01 / 32, 0.001 / 32]),
])  # fmt: skip
def test_llama3_frequencies_are_those_on_paper(factor, expected):
    scaling = LLAMA3 | {"factor": factor, "original_max_position_embeddings": 128}
    inv_freq, attention = rope.inverse_frequencies(from_hf(config_dict(scaling, head_dim=8)))
    np.testing.assert_allclose(inv_freq, expected, rtol=2e-6)
    assert attention == 1


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [8, 32, 128])
@pytest.mark.parametrize("scaling", [
    {"rope_type": "linear", "factor": 4.0},
    LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 8192},
    LLAMA3 | {"factor": 32.0},  # original length absent: max_position_embeddings
    LLAMA3 | {"factor": 4.0, "high_freq_factor": 9.0, "low_freq_factor": 2.0},
    YARN,
    YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    YARN | {"truncate": False},
    YARN | {"attention_factor": 0.9},
    YARN | {"mscale": 0.8, "mscale_all_dim": 1.2},
    YARN | {"mscale": 0.8},
    YARN | {"factor": 1.0},
    {"rope_type": "yarn", "factor": 2.0},
], ids=lambda s: "-".join(str(v) for v in s.values()))  # fmt: skip
def test_frequencies_equal_transformers_and_oracle(scaling, head_dim, theta):
    config = config_dict(scaling, head_dim, theta)
    inv_freq, factor = rope.inverse_frequencies(from_hf(config))
    kwargs = {k: v for k, v in config.items() if k not in ("model_type", "rope_scaling", "rope_theta")}
    theirs = transformers.LlamaConfig(**kwargs, rope_parameters=scaling | {"rope_theta": theta})
    theirs, their_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, "cpu")
    np.testing.assert_allclose(inv_freq, theirs.numpy(), rtol=2e-5)
    assert factor == pytest.approx(their_factor, rel=1e-9)
    by_hand, by_hand_factor = oracle.inverse_frequencies(config)
    np.testing.assert_allclose(inv_freq, by_hand, rtol=1e-6)
    assert factor == pytest.approx(by_hand_factor, rel=1e-9)


def test_rotation_keeps_norms_and_depends_on_distance_only():
    config = from_hf(config_dict(None))
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, 3, 32), dtype=np.float32)  # [B=1, T=1, heads=3, D]

    def at(x, position):
        return np.asarray(rope.rotate(jnp.asarray(x), *rope.cos_sin(config, jnp.array([[position]]))))

    np.testing.assert_allclose(np.linalg.norm(at(q, 77), axis=-1), np.linalg.norm(q, axis=-1), rtol=1e-5)
    np.testing.assert_array_equal(at(q, 0), q)
    near, far = ((at(q, start + 5) * at(k, start)).sum(-1) for start in (3, 400))
    np.testing.assert_allclose(near, far, atol=1e-3)


def test_rotation_pairs_the_halves():
    config = from_hf(config_dict(None, head_dim=8))
    x = np.zeros((1, 1, 1, 8), np.float32)
    x[..., 1] = 1.0  # pair 1 is (x_1, x_5), turned by 0.1 a position
    turned = rope.rotate(jnp.asarray(x), *rope.cos_sin(config, jnp.array([[2]])))
    np.testing.assert_allclose(turned[0, 0, 0], [0, np.cos(0.2), 0, 0, 0, np.sin(0.2), 0, 0], atol=1e-6)


def test_angles_stay_exact_at_long_range():
    """Positions and angles are float32 even in a bfloat16 model, which can't tell 1000 from 1001."""
    config = from_hf(config_dict(None))
    cos, sin = rope.cos_sin(config, jnp.array([[131071]]))
    angle = 131071 * oracle.inverse_frequencies(config_dict(None))[0]
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(cos[0, 0, :16], np.cos(angle), atol=0.02)
    np.testing.assert_allclose(sin[0, 0, 16:], np.sin(angle), atol=0.02)
