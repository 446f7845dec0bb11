"""DFlash heads in the layout that is published."""

import dataclasses

import numpy as np
import pytest
from dflash_heads import CONFIG, TARGET, draft_of, published_laws, random_head
from published_heads import publish_dflash, tensors_of

from convert import dflash_weights
from specjax.checkpoints import trained_drafters as files
from specjax.testing import tiny_lm

PROMPT = [3, 1, 8, 2, 2, 6]
CONFIG_READ = dataclasses.replace(CONFIG, layer=dataclasses.replace(CONFIG.layer, eos_token_ids=()))


def test_a_published_head_drafts_by_the_laws_of_the_published_forward_pass(tmp_path):
    drafter = random_head()
    back = files.load(publish_dflash(tmp_path / "head", drafter, TARGET), TARGET)
    assert back.config == CONFIG_READ and back.tokens is None
    q = draft_of(back, PROMPT, 3).probs[0]
    np.testing.assert_allclose(
        q, published_laws(tensors_of(dflash_weights.table(CONFIG), drafter.params), PROMPT), atol=2e-5
    )


def test_layers_that_the_config_does_not_name_are_those_of_the_published_code(tmp_path):
    deep = tiny_lm(0, vocab_size=12, num_hidden_layers=12)
    folder = publish_dflash(tmp_path / "head", random_head(), deep, **said(target_layer_ids=None))
    assert dflash_weights.read_config(folder / "config.json", deep).taps == (2, 10)


def test_switches_that_are_off_change_nothing(tmp_path):
    off = said(causal=False, use_swa=False, shift_label=False)
    assert files.load(publish_dflash(tmp_path / "head", random_head(), TARGET, **off), TARGET).config == CONFIG_READ


def said(**changes):
    own = {"mask_token_id": 7, "target_layer_ids": [0, 2], **changes}
    return {"dflash_config": {key: value for key, value in own.items() if value is not None}}


@pytest.mark.parametrize(
    "change, config, says",
    [
        (lambda t: t.pop("fc.weight"), {}, r"missing: fc.weight \[32, 64\]"),
        (lambda t: t.update(lm_head=np.zeros(3, np.float32)), {}, r"unexpected: lm_head \[3\]"),
        (lambda t: t.update({"norm.weight": np.zeros(3, np.float32)}), {}, r"misshapen: norm.weight is \[3\]"),
        (lambda t: None, {"block_size": None}, "block_size is missing"),
        (lambda t: None, {"block_size": 1}, "block_size of a DFlash head must be an integer of at least 2"),
        (lambda t: None, {"model_type": "llama"}, "model_type of a DFlash head must be 'qwen3', got 'llama'"),
        (lambda t: None, {"vocab_size": 13}, "vocab_size is 13, but .* which has 12 tokens"),
        (lambda t: None, {"num_target_layers": 36}, "num_target_layers is 36, but the target has 3 layers"),
        (lambda t: None, said(mask_token_id=12), "mask_token_id must be an id from 0 to 11, got 12"),
        (lambda t: None, said(mask_token_id=None), "mask_token_id must be an id from 0 to 11, got None"),
        (lambda t: None, said(target_layer_ids=[0, 3]), r"rising list of layers from 0 to 2, got \[0, 3\]"),
        (lambda t: None, said(target_layer_ids=[2, 0]), r"rising list of layers from 0 to 2, got \[2, 0\]"),
        (lambda t: None, said(causal=True), "dflash_config: causal = True is not implemented"),
        (lambda t: None, said(unheard_of=False), "dflash_config: unheard_of = False is not implemented"),
        (lambda t: None, {"dflash_config": [1, 2]}, r"dflash_config must be an object or null, got \[1, 2\]"),
        (lambda t: None, said(projector_type="domino"), "projector_type = 'domino' is not implemented"),
        (lambda t: None, {"markov_rank": 256}, "markov_rank = 256 is unknown"),
        (
            lambda t: None,
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "use_sliding_window": True},
            "layers of sliding_attention",
        ),
    ],
)
def test_other_layouts_are_refused_by_name(tmp_path, change, config, says):
    with pytest.raises(ValueError, match=f"(?s){says}"):
        files.load(publish_dflash(tmp_path / "head", random_head(), TARGET, change, **config), TARGET)
