"""Medusa's heads in the layout that is published."""

import jax.numpy as jnp
import numpy as np
import pytest
from eagle_heads import TARGET
from published_heads import MEDUSA, MEDUSA_CONFIG, publish_medusa

import specjax
from specjax.checkpoints import trained_drafters as files
from specjax.models import modules
from specjax.models.heads.medusa_heads import MedusaHeads as Module


def prefix(tensors):
    for name in list(tensors):
        tensors[f"medusa_head.{name}"] = tensors.pop(name)


@pytest.mark.parametrize("change", [lambda tensors: None, prefix], ids=["plain", "prefixed"])
def test_published_heads_draft_as_they_did(tmp_path, change):
    back = files.load(publish_medusa(tmp_path / "heads", change), TARGET)
    assert back.config == MEDUSA_CONFIG
    options = dict(num_speculative_tokens=3, max_new_tokens=16, temperature=1.0)
    a, b = (specjax.generate(TARGET, [[1, 2, 3], [4]], drafter=d, **options) for d in (MEDUSA, back))
    assert a.tokens == b.tokens and a.metrics == b.metrics


def test_each_head_answers_with_its_own_table():
    hidden = jnp.linspace(-1, 1, 64).reshape(1, 2, 32)
    module = modules.merge(Module, MEDUSA_CONFIG, MEDUSA.params)
    logits = module.head(module(hidden))  # [1, 2, heads, D]
    for i, table in enumerate(MEDUSA.params["lm_head"]):
        np.testing.assert_allclose(logits[:, :, i], module(hidden)[:, :, i] @ table.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "change, config, says",
    [
        (lambda t: t.pop("1.0.linear.bias"), {}, r"missing: 1.0.linear.bias \[32\]"),
        (lambda t: t.update({"3.0.weight": np.zeros(3, np.float32)}), {}, r"unexpected: 3.0.weight \[3\]"),
        (lambda t: t.update({"2.2.weight": np.zeros((9, 32), np.float32)}), {}, r"2.2.weight is \[9, 32\]"),
        (lambda t: None, {"medusa_num_heads": 0}, r"config.json: medusa_num_heads must be a positive integer, got 0"),
        (lambda t: None, {"medusa_num_heads": "3"}, r"medusa_num_heads must be a positive integer, got '3'"),
        (lambda t: None, {"medusa_num_heads": None}, r"config.json: medusa_num_heads is missing"),
        (lambda t: None, {"medusa_num_layers": -1}, r"medusa_num_layers must be a positive integer, got -1"),
        (lambda t: None, {"medusa_num_layers": True}, r"medusa_num_layers must be a positive integer, got True"),
        (lambda t: None, {"medusa_num_heads": 2}, r"unexpected: 2.0.linear"),
    ],
)
def test_other_layouts_are_refused_by_name(tmp_path, change, config, says):
    with pytest.raises(ValueError, match=says):
        files.load(publish_medusa(tmp_path / "heads", change, **config), TARGET)


def test_a_folder_without_a_config_is_no_head(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no config.json, so it is no trained head"):
        files.load(tmp_path, TARGET)


def test_output_heads_of_their_own_are_not_dropped_in_silence(tmp_path):
    with pytest.raises(ValueError, match="own output heads"):
        files.save(tmp_path / "heads.safetensors", "medusa", MEDUSA_CONFIG, MEDUSA.params, np.arange(12))
    assert not any(tmp_path.iterdir())
