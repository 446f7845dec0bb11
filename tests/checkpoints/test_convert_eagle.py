"""EAGLE heads in the layouts that are published."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from eagle_heads import CONFIG, TARGET, TOKENS, draft_of, generated, perfect_pair, random_head
from published_heads import publish_eagle

import specjax
from convert import eagle_weights
from specjax.checkpoints import trained_drafters as files
from specjax.drafters import Eagle
from specjax.models import modules
from specjax.models.heads.eagle1_head import Eagle1HeadConfig
from specjax.testing import tiny_lm


def rename(tensors):
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensors[name.replace("midlayer.", "model.layers.0.")] = tensors.pop(name)


@pytest.mark.parametrize("change", [lambda tensors: None, rename], ids=["midlayer", "layers.0"])
def test_a_published_head_drafts_as_it_did(tmp_path, change):
    drafter = random_head()
    back = files.load(publish_eagle(tmp_path / "head", drafter, TARGET, change), TARGET)
    assert dataclasses.replace(back.config.layer, eos_token_ids=()) == dataclasses.replace(CONFIG.layer)
    assert back.config.taps == CONFIG.taps and np.array_equal(back.tokens, TOKENS)
    a, b = generated(drafter), generated(back)
    assert a.tokens == b.tokens and a.metrics == b.metrics


@pytest.mark.parametrize("said", [None, {}, {"use_aux_hidden_state": True}])
def test_a_head_that_names_no_layers_reads_an_early_a_middle_and_a_late_one(tmp_path, said):
    publish_eagle(tmp_path / "head", random_head(), TARGET, eagle_config=said)
    deep = dataclasses.replace(TARGET, config=dataclasses.replace(TARGET.config, num_hidden_layers=32))
    assert eagle_weights.read_config(tmp_path / "head", deep).taps == (2, 16, 29)  # as the EAGLE-3 paper's code


@pytest.mark.parametrize("bias", [True, False])
def test_a_published_head_of_the_first_eagle_drafts_as_it_did(tmp_path, bias):
    """It has no output head of its own and drafts every token of the target's."""
    config = Eagle1HeadConfig(dataclasses.replace(CONFIG.layer, vocab_size=12), bias)
    params = modules.init(config.module, config, 0)
    drafter = Eagle(config, {**params, "lm_head": TARGET.head_table()}, None)

    def rename(tensors):
        for name in [name for name in tensors if name.startswith("midlayer.")]:
            tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)

    said = {} if bias else {"bias": False}
    back = files.load(publish_eagle(tmp_path / "head", drafter, TARGET, rename, **said), TARGET)
    assert back.config.bias == bias and back.tokens is None
    a, b = generated(drafter), generated(back)
    assert a.tokens == b.tokens and a.metrics == b.metrics
    other = tiny_lm(0, vocab_size=13)
    with pytest.raises(ValueError, match="a head of 12 tokens drafts with the target's output head, which has 13"):
        files.load(tmp_path / "head", other)


def test_a_published_perfect_head_is_never_refused(tmp_path):
    target, drafter = perfect_pair()
    head = files.load(publish_eagle(tmp_path / "head", drafter, target), target)
    out = specjax.generate(target, [[2, 5]], drafter=head, num_speculative_tokens=4, max_new_tokens=20)
    assert out.metrics[0].draft_acceptance_rate == 1.0


def test_a_head_with_an_embedding_of_its_own_uses_it(tmp_path):
    own = np.asarray(TARGET.params["embed"]) * 2 + 1

    def add(tensors):
        tensors["embed_tokens.weight"] = own.astype(np.float32)

    with_own = files.load(publish_eagle(tmp_path / "own", random_head(), TARGET, add), TARGET)
    other = dataclasses.replace(random_head(), embed=jnp.asarray(own, jnp.float32))
    q, same, without = (draft_of(d, [1, 2, 3], 2).probs for d in (with_own, other, random_head()))
    assert np.array_equal(q, same) and np.abs(q - without).max() > 1e-3


def taps(layers):
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": layers}}


@pytest.mark.parametrize(
    "change, config, says",
    [
        (lambda t: t.pop("fc.weight"), {}, r"missing: fc.weight \[32, 96\]"),
        (lambda t: t.update(extra=np.zeros(3, np.float32)), {}, r"unexpected: extra \[3\]"),
        (lambda t: t.update({"norm.weight": np.zeros(3, np.float32)}), {}, r"misshapen: norm.weight is \[3\]"),
        (lambda t: t.update(d2t=t["d2t"] + 1), {}, "d2t must send 8 drafted tokens to as many of the target's 12"),
        (lambda t: t.update(t2d=~t["t2d"]), {}, "t2d and d2t name different tokens"),
        (lambda t: None, {"num_hidden_layers": 2}, "heads of one layer"),
        (lambda t: None, {"target_hidden_size": 64}, "a target of width 64"),
        (lambda t: None, {"draft_vocab_size": 0}, "draft_vocab_size must be a positive integer, got 0"),
        (lambda t: None, {"draft_vocab_size": "8"}, "draft_vocab_size must be a positive integer, got '8'"),
        (lambda t: None, {"target_hidden_size": False}, "target_hidden_size must be a positive integer, got False"),
        (lambda t: None, {"bias": "no"}, "bias must be true or false, got 'no'"),
        (lambda t: None, {"eagle_config": [0, 1, 2]}, r"eagle_config must be an object or null, got \[0, 1, 2\]"),
        (lambda t: None, taps(3), "eagle_aux_hidden_state_layer_ids must be .*, got 3"),
        (lambda t: None, taps([]), r"eagle_aux_hidden_state_layer_ids must be .*, got \[\]"),
        (lambda t: None, taps([0, 1, 99]), r"rising list of layers from 0 to 2, got \[0, 1, 99\]"),
        (lambda t: None, taps([0, 1, 1]), r"rising list of layers from 0 to 2, got \[0, 1, 1\]"),
        (lambda t: None, {"eagle_config": {"norm_before_residual": True}}, "norm_before_residual = True is not impl"),
        (lambda t: None, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = False is not impl"),
        (lambda t: None, taps([0, 1, "2"]), "eagle_aux_hidden_state_layer_ids must be"),
        (lambda t: None, {"rms_norm_eps": -1}, "config.json can't be used.*rms_norm_eps must be a positive number"),
        (lambda t: None, {"norm_before_residual": True}, "norm_before_residual = True is unknown"),
    ],
)
def test_other_layouts_are_refused_by_name(tmp_path, change, config, says):
    with pytest.raises(ValueError, match=f"(?s){says}"):
        files.load(publish_eagle(tmp_path / "head", random_head(), TARGET, change, **config), TARGET)


def test_special_tokens_of_a_head_are_not_read(tmp_path):
    """A head's config.json often names ids that its own vocab_size does not reach."""
    config = {"bos_token_id": 128000, "eos_token_id": [128001]}
    files.load(publish_eagle(tmp_path / "head", random_head(), TARGET, **config), TARGET)
