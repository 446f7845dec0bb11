"""Rotary position embeddings: the frequencies under each scaling rule, and the rotation itself.

Sources: RoFormer (Su et al. 2021); position interpolation (Chen et al. 2023) for ``linear``; the Llama 3.1 release
for ``llama3``; YaRN (Peng et al. 2023), sections 3.2 and 3.4, for ``yarn``.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.config import LlamaConfig, RopeScaling


def inverse_frequencies(config: LlamaConfig) -> tuple[np.ndarray, float]:
    """The angle per position of each rotated pair, f32[head_dim / 2], and the factor on cos and sin.

    The factor is 1 except under YaRN. ``dynamic`` scaling (NTK-aware, bloc97 2023) changes the base only for texts
    longer than ``max_position_embeddings``, and specjax reads no such text. So its frequencies are the plain ones.
    """
    dim, scaling = config.head_dim, config.rope_scaling
    inv_freq = 1.0 / config.rope_theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    factor = 1.0
    if scaling is not None:
        if scaling.kind == "linear":
            inv_freq = inv_freq / scaling.factor
        elif scaling.kind == "llama3":
            inv_freq = _llama3(inv_freq, scaling)
        elif scaling.kind == "yarn":
            inv_freq, factor = _yarn(inv_freq, scaling, dim, config.rope_theta)
        elif scaling.kind == "factors":
            inv_freq = inv_freq / np.asarray(scaling.factors)
    return inv_freq.astype(np.float32), factor


def _llama3(inv_freq: np.ndarray, s: RopeScaling) -> np.ndarray:
    """Frequencies of long wavelengths are divided by the factor. Frequencies of short wavelengths are kept.

    Frequencies in between are blended, linearly in 1 / wavelength.
    """
    wavelength = 2 * math.pi / inv_freq
    turns = s.original_max_position_embeddings / wavelength
    keep = np.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0)
    return keep * inv_freq + (1 - keep) * inv_freq / s.factor


def _yarn(inv_freq: np.ndarray, s: RopeScaling, dim: int, theta: float) -> tuple[np.ndarray, float]:
    """NTK-by-parts interpolation, and the factor on cos and sin that sets the attention temperature."""

    def dimension_of(turns: float) -> float:
        return dim * math.log(s.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(s.beta_fast), dimension_of(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    inv_freq = (1 - ramp) * inv_freq + ramp * inv_freq / s.factor

    def mscale(m: float) -> float:
        return 1.0 if s.factor <= 1 else 0.1 * m * math.log(s.factor) + 1.0

    if s.attention_factor is not None:
        return inv_freq, s.attention_factor
    if s.mscale and s.mscale_all_dim:
        return inv_freq, mscale(s.mscale) / mscale(s.mscale_all_dim)
    return inv_freq, mscale(1.0)


def cos_sin(config: LlamaConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of positions i32[B, T], each f32[B, T, head_dim]. Both halves of a head hold the same angles."""
    inv_freq, factor = inverse_frequencies(config)
    angles = positions[..., None].astype(jnp.float32) * np.tile(inv_freq, 2)[None, None]  # [B, T, D]
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x[B, T, ..., D], rotated in float32 by cos and sin [B, T, D]. Pair i of a head is (x_i, x_{i + D/2})."""
    extra = tuple(range(2, x.ndim - 1))
    cos, sin = jnp.expand_dims(cos, extra), jnp.expand_dims(sin, extra)
    xf = x.astype(jnp.float32)
    first, second = jnp.split(xf, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    return (xf * cos + turned * sin).astype(x.dtype)
