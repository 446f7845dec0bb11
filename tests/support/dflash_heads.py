"""DFlash heads for a tiny target, and the published forward pass in NumPy, from the published names of its tensors."""

import dataclasses

import jax
import numpy as np

from specjax.decode import round as rounds
from specjax.drafters import DFlash
from specjax.generation.generate import prepare
from specjax.models import modules
from specjax.models.heads.dflash_head import DFlashHead, DFlashHeadConfig
from specjax.testing import tiny_lm

TARGET = tiny_lm(2, vocab_size=12, std=0.5, num_hidden_layers=3)
LAYER = dataclasses.replace(TARGET.config, num_hidden_layers=2, model_type="qwen3", qk_norm=True)
CONFIG = DFlashHeadConfig(LAYER, (1, 3), block_size=4, mask_token_id=7)


def random_head(seed: int = 0) -> DFlash:
    """A head that drafts all of the target's tokens with the target's output head. Its norms are not ones."""
    params = modules.init(DFlashHead, CONFIG, seed)
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    leaves = [x * rng.uniform(0.5, 1.5, x.shape).astype(np.float32) if x.ndim == 1 else x for x in leaves]
    return DFlash(CONFIG, {**jax.tree.unflatten(tree, leaves), "lm_head": TARGET.head_table()}, None, prefill_chunk=4)


def draft_of(drafter: DFlash, prompt: list[int], size: int, **options):
    job = prepare(TARGET, [prompt], drafter=drafter, num_speculative_tokens=size, **{"temperature": 1.0, **options})
    return jax.jit(rounds.propose)(job.decoder, job.start())[0]


def published_laws(tensors: dict[str, np.ndarray], prompt: list[int]) -> np.ndarray:
    """q at the masked places after a prompt, f64[S - 1, V], as the published code computes it."""
    c, states = LAYER, TARGET(np.array([prompt[:-1]]), TARGET.alloc_cache(1, len(prompt)), taps=CONFIG.taps).taps
    t = {name: np.asarray(x, np.float64) for name, x in tensors.items()}

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.rms_norm_eps) * t[weight]

    def heads(x, name, positions=None):
        x = (x @ t[f"{name}_proj.weight"].T).reshape(len(x), -1, c.head_dim)
        if positions is None:
            return x
        x = norm(x, f"{name}_norm.weight")
        angles = positions[:, None] / c.rope_theta ** (np.arange(0, c.head_dim, 2) / c.head_dim)
        cos, sin = (np.concatenate([f(angles)] * 2, -1)[:, None] for f in (np.cos, np.sin))
        first, second = np.split(x, 2, -1)
        return x * cos + np.concatenate([-second, first], -1) * sin

    context = norm(np.concatenate([states[i][0] for i in CONFIG.taps], -1) @ t["fc.weight"].T, "hidden_norm.weight")
    block = [prompt[-1]] + [CONFIG.mask_token_id] * (CONFIG.block_size - 1)
    x = np.asarray(TARGET.params["embed"], np.float64)[block]
    places = np.arange(len(context) + len(block))
    for i in range(c.num_hidden_layers):
        layer = f"layers.{i}"
        y = norm(x, f"{layer}.input_layernorm.weight")
        q = heads(y, f"{layer}.self_attn.q", places[len(context) :])
        k = heads(np.concatenate([context, y]), f"{layer}.self_attn.k", places)
        v = heads(np.concatenate([context, y]), f"{layer}.self_attn.v")
        k, v = (np.repeat(a, c.group_size, axis=1) for a in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * c.head_dim**-0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(len(block), -1)
        x = x + mixed @ t[f"{layer}.self_attn.o_proj.weight"].T
        y = norm(x, f"{layer}.post_attention_layernorm.weight")
        gate, up = (y @ t[f"{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ t[f"{layer}.mlp.down_proj.weight"].T
    logits = norm(x, "norm.weight")[1:] @ np.asarray(TARGET.head_table(), np.float64).T
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    return odds / odds.sum(-1, keepdims=True)
