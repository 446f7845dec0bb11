"""The EAGLE-3 head: drafting, training as it drafts, and a head whose every draft is right."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_heads import CONFIG, CONFIGS, TARGET, TOKENS, draft_of, each_head, perfect_pair, random_head
from safetensors.numpy import load_file, save_file

import specjax
from specjax.checkpoints import trained_drafters as files
from specjax.decode import round as rounds
from specjax.drafters import Eagle, FirstOf, PromptLookup
from specjax.generation.generate import prepare
from specjax.models.heads.eagle3_head import Eagle3HeadConfig
from specjax.testing import tiny_lm
from specjax.training.train_eagle import EagleObjective


@each_head
def test_training_sees_at_every_step_what_drafting_computes(config):
    """On a text that goes on with a draft, the steps of training give that draft's own q."""
    prompt, size = [3, 1, 8, 2, 2, 6, 10], 4
    drafter = random_head(config=config)
    draft = draft_of(drafter, prompt, size)
    objective = EagleObjective(TOKENS, drafter.params["lm_head"], config, steps=size)
    text = jnp.array([prompt + draft.tokens[0].tolist()])

    @jax.jit
    def trained(params, target, text):
        out = target(text, target.alloc_cache(*text.shape), taps=drafter.config.taps)
        return list(objective.unrolled(params, target, text, out))

    for step, log_q in enumerate(trained(drafter.params, TARGET, text)):
        q = draft.probs[0, step, TOKENS]
        np.testing.assert_allclose(jnp.exp(log_q[0, len(prompt) - 2 + step]), q, atol=2e-5)


def test_the_prompt_is_read_along_with_the_target():
    """After prefill nothing is left to catch up with, however ragged the prompts and however many their blocks."""
    prompts = [[i % 12 for i in range(size)] for size in (150, 1, 2, 64, 65, 66)]
    job = prepare(TARGET, prompts, drafter=random_head(), max_new_tokens=4)
    own = job.start().drafter
    assert own.ready.tolist() == [len(p) > 1 for p in prompts]
    assert own.cache.lengths.tolist() == [len(p) - 1 for p in prompts]


@pytest.mark.parametrize("prompt", [[2], [2, 5, 4, 2, 5]])
def test_a_perfect_head_is_never_refused(prompt):
    target, drafter = perfect_pair()
    options = dict(max_new_tokens=21, num_speculative_tokens=4)
    plain = specjax.generate(target, [prompt], **options)
    out = specjax.generate(target, [prompt], drafter=drafter, **options)
    assert out.tokens == plain.tokens
    steps = out.metrics[0].per_step_drafted
    assert out.metrics[0].draft_acceptance_rate == 1.0
    assert steps == ([0, 4, 4, 4, 4] if len(prompt) == 1 else [4, 4, 4, 4, 0]), "one token has no states to draft from"


def test_a_head_for_another_model_is_refused():
    other = tiny_lm(0, hidden_size=16)
    with pytest.raises(ValueError, match="hidden states of size 32, but the target's are 16"):
        specjax.generate(other, [[1, 2]], drafter=random_head())
    deep = Eagle(dataclasses.replace(CONFIG, taps=(1, 3)), {}, TOKENS)
    with pytest.raises(ValueError, match=r"after layers \(1, 3\), but the target has 2"):
        specjax.generate(TARGET, [[1, 2]], drafter=deep)


def test_a_head_keeps_up_while_another_drafts():
    """Rounds that prompt lookup drafted leave the head where it would be had it drafted them itself."""
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [5]]
    both = FirstOf(PromptLookup(prompt_lookup_min=1), random_head())
    options = dict(max_new_tokens=24, num_speculative_tokens=3)
    plain = specjax.generate(TARGET, prompts, **options)
    assert specjax.generate(TARGET, prompts, drafter=both, **options).tokens == plain.tokens


@each_head
def test_a_file_gives_the_head_back(tmp_path, config):
    drafter = random_head(config=config)
    drafter = dataclasses.replace(drafter, params={**drafter.params, "lm_head": TARGET.head_table()[TOKENS]})
    path = tmp_path / "head.safetensors"
    kind = {v: k for k, v in CONFIGS.items()}[config]
    files.save(path, kind, config, drafter.params, TOKENS, {"note": 1})
    back = files.load(path, TARGET)
    assert back.config == config and files.read_about(path)["about"] == {"note": 1}
    assert np.array_equal(back.tokens, TOKENS)
    for a, b in zip(jax.tree.leaves(drafter.params), jax.tree.leaves(back.params), strict=True):
        np.testing.assert_allclose(a, b, atol=np.abs(a).max() / 200)
    with pytest.raises(ValueError, match="hidden size 32, but the target's is 16"):
        files.load(path, tiny_lm(0, hidden_size=16))
    with pytest.raises(FileNotFoundError, match="there is no drafter 'nothing'"):
        files.load("nothing", TARGET)
    with pytest.raises(ValueError, match="drafts token ids from 0 to 11, outside the target's vocabulary of 9"):
        files.load(path, tiny_lm(0, vocab_size=9))
    damage = {
        "fuse.weight.scale": None,
        "fuse.weight": np.zeros((32, 96), np.float32),
        "tokens": np.zeros(3, np.int32),
        "mlp_norm.weight": np.full(32, np.nan, np.float32),
    }
    for name, bad in damage.items():
        arrays = {**load_file(path), name: bad}
        head = {"specjax": json.dumps(files.read_about(path))}
        save_file({k: v for k, v in arrays.items() if v is not None}, tmp_path / "damaged", head)
        with pytest.raises(ValueError, match=f": {name} (is|holds)"):
            files.load(tmp_path / "damaged", TARGET)
    (tmp_path / "bad").write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="is no drafter that specjax wrote"):
        files.load(tmp_path / "bad", TARGET)


@pytest.mark.parametrize("taps", [(1, 1, 2), (2, 1), (), (-1, 0), (0.5,), (True,), [1, 2], 3])
def test_taps_rise_and_stand_once(taps):
    with pytest.raises(ValueError, match="^the taps of an EAGLE-3 head must be .* got "):
        Eagle3HeadConfig(CONFIG.layer, taps)


def test_the_first_token_is_drafted_without_a_call_of_the_head(monkeypatch):
    """The call that learned the committed tokens has made the output of the last one's entry."""
    drafter = random_head()
    job = prepare(TARGET, [[3, 1, 8, 2]], drafter=drafter, num_speculative_tokens=1, temperature=1.0)
    state = job.start()
    monkeypatch.setattr(type(drafter._head()), "__call__", None)
    draft, _ = jax.jit(rounds.propose)(job.decoder, state)
    assert draft.valid.all()
