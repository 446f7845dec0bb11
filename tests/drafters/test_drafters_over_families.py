"""Drafters that look inside the target, over every family: greedy texts are those of plain decoding."""

import dataclasses

import families
import numpy as np
import pytest

import specjax
from specjax import drafters
from specjax.models import modules
from specjax.models.heads.dflash_head import DFlashHead, DFlashHeadConfig
from specjax.models.heads.eagle3_head import Eagle3Head, Eagle3HeadConfig
from specjax.models.heads.medusa_heads import MedusaHeads, MedusaHeadsConfig
from specjax.models.heads.pass_tokens import PassConfig, PassTokens
from specjax.testing import tiny_lm

VOCAB, HIDDEN = 4, 8
PROMPTS = [[1, 2, 0, 1, 2, 0, 3], [3], [2, 1, 1, 3]]
LAYER = dataclasses.replace(tiny_lm(0, vocab_size=VOCAB, hidden_size=HIDDEN).config, num_hidden_layers=1)
EAGLE = Eagle3HeadConfig(LAYER, (0, 1, 2))
DFLASH = DFlashHeadConfig(LAYER, (0, 1, 2), block_size=4, mask_token_id=2)
MEDUSA = MedusaHeadsConfig(HIDDEN, VOCAB, num_heads=2)
PASS = PassConfig(HIDDEN, 2)
MADE = {
    "eagle": lambda: drafters.Eagle(EAGLE, modules.init(Eagle3Head, EAGLE, 0), np.arange(VOCAB), prefill_chunk=4),
    "eagle tree": lambda: drafters.Eagle(
        EAGLE, modules.init(Eagle3Head, EAGLE, 0), np.arange(VOCAB), tree=(2, 2, 1), prefill_chunk=4
    ),
    "dflash": lambda: drafters.DFlash(DFLASH, modules.init(DFlashHead, DFLASH, 0), np.arange(VOCAB), prefill_chunk=4),
    "medusa": lambda: drafters.Medusa(MEDUSA, modules.init(MedusaHeads, MEDUSA, 0), np.arange(VOCAB)),
    "early exit": lambda: drafters.LayerSkip(exit_layer=1),
    "sublayers": lambda: drafters.LayerSkip(skip_attention=(0,), skip_mlp=(1,)),
    "look-ahead tokens": lambda: drafters.PaSS(PASS, modules.init(PassTokens, PASS, 0)),
    "sink and window": lambda: drafters.SinkWindow(sink=1, window=4),
    "lookahead": lambda: drafters.Lookahead(window=2, guesses=2, slots=6),
}
DEFAULT = {("gemma2", "eagle")}


@pytest.mark.parametrize(
    "family, drafter",
    [
        pytest.param(f, d, marks=() if (f, d) in DEFAULT else pytest.mark.slow) for f in families.DECODERS for d in MADE
    ],
)
def test_greedy_texts_are_those_of_plain_decoding(family, drafter):
    lm = families.tiny(family)
    size = 2 if drafter in ("medusa", "look-ahead tokens") else 3
    options = dict(max_new_tokens=24, ignore_eos=True)
    plain = specjax.generate(lm, PROMPTS, drafter=None, **options)
    out = specjax.generate(lm, PROMPTS, drafter=MADE[drafter](), num_speculative_tokens=size, **options)
    assert out.tokens == plain.tokens
    assert sum(m.num_draft_tokens for m in out.metrics) > 0
