"""The table of drafters: each on a model of four tokens, whose laws can be enumerated."""

import dataclasses

import numpy as np
import pytest

from specjax import drafters, testing
from specjax.drafters import Adaptive, DraftModel, FixedTree, PromptLookup, TreeModel
from specjax.drafting.datastore import Datastore
from specjax.drafting.topology import from_choices, from_widths
from specjax.models import modules
from specjax.models.heads.dflash_head import DFlashHead, DFlashHeadConfig
from specjax.models.heads.eagle1_head import Eagle1Head, Eagle1HeadConfig
from specjax.models.heads.eagle3_head import Eagle3Head, Eagle3HeadConfig
from specjax.models.heads.medusa_heads import MedusaHeads, MedusaHeadsConfig
from specjax.models.heads.pass_tokens import PassConfig, PassTokens

SHAPE = dict(
    vocab_size=4, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=4, max_position_embeddings=256,
)  # fmt: skip
TARGET = testing.tiny_lm(0, std=0.7, **SHAPE)
DEEP = testing.tiny_lm(1, std=0.7, **{**SHAPE, "num_hidden_layers": 2})  # for drafters that leave layers out
SELF = DraftModel(TARGET, prefill_chunk=4)
TWIN = DraftModel(testing.noisy_twin(TARGET, 0.25), prefill_chunk=4)
THIRD = DraftModel(testing.noisy_twin(TARGET, 0.4, seed=7), prefill_chunk=4)
FAR = DraftModel(testing.noisy_twin(TARGET, 1.0, seed=3), prefill_chunk=4)
HEAD_SHAPE = Eagle3HeadConfig(dataclasses.replace(TARGET.config, vocab_size=3), (0, 1, 2))
HEAD = drafters.Eagle(HEAD_SHAPE, modules.init(Eagle3Head, HEAD_SHAPE, 0), np.array([0, 1, 3]), prefill_chunk=4)
EAGLE1_SHAPE = Eagle1HeadConfig(HEAD_SHAPE.layer)
EAGLE1 = drafters.Eagle(EAGLE1_SHAPE, modules.init(Eagle1Head, EAGLE1_SHAPE, 0), np.array([0, 1, 3]), prefill_chunk=4)
DFLASH_SHAPE = DFlashHeadConfig(
    dataclasses.replace(HEAD_SHAPE.layer, num_hidden_layers=2, qk_norm=True), (0, 2), block_size=4, mask_token_id=2
)
DFLASH = drafters.DFlash(DFLASH_SHAPE, modules.init(DFlashHead, DFLASH_SHAPE, 0), np.array([0, 1, 3]), prefill_chunk=4)
PASS = drafters.PaSS(PassConfig(8, 2), modules.init(PassTokens, PassConfig(8, 2), 0))
MEDUSA_SHAPE = MedusaHeadsConfig(8, 4, num_heads=2)
MEDUSA = drafters.Medusa(MEDUSA_SHAPE, modules.init(MedusaHeads, MEDUSA_SHAPE, 0), np.arange(4))
CORPUS = np.random.default_rng(0).integers(0, 4, (6, 40)).tolist()

DRAFTERS = {
    "prompt lookup": PromptLookup(prompt_lookup_min=1),
    "noisy twin": TWIN,
    "greedy twin": dataclasses.replace(TWIN, temperature=0.0),
    "early exit": drafters.LayerSkip(exit_layer=1),
    "sublayers": drafters.LayerSkip(skip_attention=(0,), skip_mlp=(1,)),
    "sink and window": drafters.SinkWindow(sink=1, window=2),
    "unigram": drafters.NGramTable.count(CORPUS, 4, order=1),
    "bigram": drafters.NGramTable.count(CORPUS, 4, order=2, keep=2),
    "random": drafters.RandomDraft(),
    "oracle": drafters.Oracle.of([p + [1, 1, 3, 0, 2, 2, 0, 1, 3] for p in testing.checks.PROMPTS]),
    "retrieval": drafters.Retrieval.over(Datastore.build(CORPUS), retrieval_max=3, retrieval_min=1),
    "jacobi": drafters.Jacobi(),
    "lookahead": drafters.Lookahead(window=2, guesses=2, slots=6),
    "lookup, else lookahead": drafters.FirstOf(PromptLookup(), drafters.Lookahead(window=2, guesses=3, slots=9)),
    "cascade over lookahead": drafters.Cascade(drafters.Lookahead(3, 2, 8), TWIN.lm, 2, prefill_chunk=4),
    "cascade": drafters.Cascade(PromptLookup(prompt_lookup_min=1), TWIN.lm, 2, prefill_chunk=4),
    "cascade of three models": drafters.Cascade(
        drafters.Cascade(drafters.RandomDraft(), SELF.lm, 1, prefill_chunk=4), TWIN.lm, 2, prefill_chunk=4
    ),
    "lookup, else twin": drafters.FirstOf(PromptLookup(), TWIN),
    "twin, heuristic": Adaptive(TWIN, drafters.Heuristic(start=1)),
    "twin, confidence": Adaptive(TWIN, drafters.Confidence(0.45)),
    "twin, entropy": Adaptive(TWIN, drafters.EntropyGuided(gamma_min=1, ema_beta=0.5)),
    "twin, cost model": Adaptive(TWIN, drafters.CostModel(c=0.5)),
    "tree": TreeModel(TWIN.lm, (2, 2, 1), prefill_chunk=4),
    "tree, replaced": TreeModel(TWIN.lm, FixedTree(from_widths((2, 2, 1)), with_replacement=True), prefill_chunk=4),
    "tree of the best": TreeModel(TWIN.lm, (2, 2, 1), temperature=0.0, prefill_chunk=4),
    "tree as wide as the vocabulary": TreeModel(TWIN.lm, (4, 1, 2), prefill_chunk=4),
    "two models in one tree": drafters.Forest(
        (TreeModel(TWIN.lm, (2, 1), prefill_chunk=4), TreeModel(THIRD.lm, (1, 1), prefill_chunk=4))
    ),
    "one model twice in one tree": drafters.Forest((TreeModel(FAR.lm, (1, 1), prefill_chunk=4),) * 2),
    "model and head in one tree": drafters.Forest((TreeModel(TWIN.lm, (1,), temperature=0.0, prefill_chunk=4), HEAD)),
    "uneven tree": TreeModel(TWIN.lm, from_choices([(0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (1, 1, 0)])),
    "lookup, else tree": drafters.FirstOf(PromptLookup(), TreeModel(TWIN.lm, (2, 1), prefill_chunk=4)),
    "cascade over a tree": drafters.Cascade(TreeModel(SELF.lm, (2, 1), prefill_chunk=4), TWIN.lm, 2, prefill_chunk=4),
    "dynamic tree": TreeModel(TWIN.lm, drafters.DynamicTree(breadth=2, nodes=5), prefill_chunk=4),
    "head": HEAD,
    "head, tree": dataclasses.replace(HEAD, tree=(2, 2, 1)),
    "head, dynamic tree": dataclasses.replace(HEAD, tree=drafters.DynamicTree(breadth=3, nodes=7)),
    "head of the first EAGLE": EAGLE1,
    "block head": DFLASH,
    "block head, tree": dataclasses.replace(DFLASH, tree=(2, 2, 1)),
    "look-ahead tokens": PASS,
    "look-ahead tokens, tree": dataclasses.replace(PASS, tree=(2, 2)),
    "medusa": MEDUSA,
    "medusa, tree": dataclasses.replace(MEDUSA, tree=(3, 2)),
    "lookup, else head": drafters.FirstOf(PromptLookup(), HEAD),
}
TARGETS = {d: DEEP for d in DRAFTERS if d in ("early exit", "sublayers") or "head" in d}
TREES = [d for d, drafter in DRAFTERS.items() if drafter.plan(TARGETS.get(d, TARGET), 3).trees]


def pairs(default):
    """Parameters (drafter, verifier): each drafter with each lossless verifier that judges its drafts.

    Those that are not in ``default`` are slow.
    """
    return [
        pytest.param(d, v, marks=() if (d, v) in default else pytest.mark.slow, id=f"{d}-{v}")
        for d in DRAFTERS
        for v in testing.lossless_verifiers()
        if d not in TREES or testing.checks.VERIFIERS[v].trees
    ]
