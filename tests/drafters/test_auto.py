"""The drafter that an engine takes when nobody chooses one."""

import dataclasses

from specjax import drafters, testing
from specjax.checkpoints import trained_drafters
from specjax.drafters import FirstOf, PromptLookup

LM = testing.tiny_lm(0)


def test_a_model_with_a_shipped_head_gets_lookup_then_the_head(monkeypatch):
    asked, head = [], PromptLookup(prompt_lookup_max=5)
    monkeypatch.setattr(trained_drafters, "load", lambda name, lm: asked.append(name) or head)
    named = dataclasses.replace(LM, name="smollm2-135m-instruct")
    assert drafters.auto(named) == FirstOf(PromptLookup(), head)
    assert asked == ["smollm2-135m-instruct-eagle3"]


def test_other_models_get_prompt_lookup(tmp_path):
    for name in (None, "a folder", str(tmp_path)):
        assert drafters.auto(dataclasses.replace(LM, name=name)) == PromptLookup()
