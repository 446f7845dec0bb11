"""EAGLE heads for a tiny target: random ones, and one whose every draft is right."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.decode import round as rounds
from specjax.drafters import Eagle
from specjax.generation.generate import prepare
from specjax.models import modules
from specjax.models.heads.eagle1_head import Eagle1HeadConfig
from specjax.models.heads.eagle3_head import Eagle3Head, Eagle3HeadConfig
from specjax.testing import table_lm, tiny_lm

TARGET = tiny_lm(2, vocab_size=12, std=0.5)
CONFIG = Eagle3HeadConfig(dataclasses.replace(TARGET.config, num_hidden_layers=1, vocab_size=8), (0, 1, 2))
TOKENS = jnp.array([0, 1, 2, 4, 5, 7, 9, 11])  # those that the head can draft
CONFIGS = {"eagle3": CONFIG, "eagle": Eagle1HeadConfig(CONFIG.layer)}
each_head = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def random_head(seed: int = 0, config=CONFIG) -> Eagle:
    return Eagle(config, modules.init(config.module, config, seed), TOKENS, prefill_chunk=4)


def draft_of(drafter: Eagle, prompt: list[int], size: int):
    job = prepare(TARGET, [prompt], drafter=drafter, num_speculative_tokens=size, temperature=1.0)
    return jax.jit(rounds.propose)(job.decoder, job.start())[0]


def generated(drafter):
    return specjax.generate(
        TARGET, [[1, 2, 3], [4]], drafter=drafter, num_speculative_tokens=3, max_new_tokens=16, temperature=1.0
    )


def perfect_pair(vocab: int = 6):
    """A target that follows x by pi(x) whatever came before, and a head that knows pi."""
    following = np.array([3, 0, 5, 1, 2, 4])
    target = table_lm(np.eye(vocab)[following] + 1e-9, hidden_size=8, intermediate_size=8)
    config = Eagle3HeadConfig(dataclasses.replace(target.config, vocab_size=vocab), (0,))
    params = jax.tree.map(jnp.zeros_like, modules.init(Eagle3Head, config, 0))
    ones = {name: {"weight": jnp.ones(8)} for name in ("embed_norm", "hidden_norm", "mlp_norm", "norm")}
    # What stands for token x becomes what stands for pi(x): the MLP of a unit vector adds the difference.
    moves = np.zeros((8, 8), np.float32)
    moves[following, np.arange(vocab)] += 1
    moves[np.arange(vocab), np.arange(vocab)] -= 1
    scale = float((1 / 8 + target.config.rms_norm_eps) ** -0.5)
    gate = jnp.stack([jnp.eye(8), jnp.eye(8)])
    grown = float(jax.nn.silu(scale)) * scale
    mlp = {"gate_up": {"weight": gate}, "down": {"weight": jnp.asarray(moves) / grown}}
    own = {"fuse": {"weight": jnp.eye(8)}, "mlp": mlp, "lm_head": target.params["lm_head"]}
    return target, Eagle(config, {**params, **ones, **own}, jnp.arange(vocab))
