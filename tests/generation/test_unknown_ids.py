"""Ids that the model has rows for and the tokenizer lacks: neither generated nor accepted in prompts."""

import dataclasses

import numpy as np
import pytest
import tokenizers

from specjax import Engine, generate, stream, testing
from specjax.drafters import Cascade, DraftModel, Jacobi, LayerSkip, Lookahead, PromptLookup, RandomDraft, TreeModel
from specjax.generation import known_ids
from specjax.generation.generate import prepare
from specjax.text.tokenizer import Tokenizer

VOCAB, KNOWN = 8, [0, 1, 2, 4, 6]  # 3 and 5 are holes, 7 is padding


def tokenizer(ids=KNOWN) -> Tokenizer:
    words = {f"w{i}": i for i in ids}
    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")))


LM = dataclasses.replace(testing.tiny_lm(0, std=0.7, vocab_size=VOCAB, num_hidden_layers=1), tokenizer=tokenizer())
BARE = dataclasses.replace(LM, tokenizer=None)
TWIN = testing.noisy_twin(BARE, 0.2)
DRAFTERS = {
    "plain": None,
    "prompt lookup": PromptLookup(prompt_lookup_min=1),
    "itself": DraftModel(BARE, prefill_chunk=4),
    "noisy twin": DraftModel(TWIN, prefill_chunk=4),
    "tree": TreeModel(TWIN, (2, 2, 1), prefill_chunk=4),
    "cascade": Cascade(PromptLookup(prompt_lookup_min=1), TWIN, 2, prefill_chunk=4),
    "skipped sublayer": LayerSkip(skip_mlp=(0,)),
    "jacobi": Jacobi(),
    "lookahead": Lookahead(window=2, guesses=2, slots=6),
    "random": RandomDraft(),
}


def drafted(drafter, lm=LM, **options):
    rows = [[1, 2, 0, 1, 2], [4]] * 20
    given = dict(drafter=drafter, num_speculative_tokens=3, max_new_tokens=20, ignore_eos=True)
    return generate(lm, rows, **{"temperature": 1.5, **given, **options})


def test_requests_share_one_mask_and_a_stop_token_of_one_changes_no_other():
    shared = known_ids.known_ids(LM)
    assert known_ids.known_ids(LM, [2]) is shared, "made once"
    own = known_ids.known_ids(LM, [3, 999, -1])
    assert np.flatnonzero(own).tolist() == [0, 1, 2, 3, 4, 6]
    assert np.flatnonzero(known_ids.known_ids(LM)).tolist() == KNOWN


def test_the_mask_follows_a_tokenizer_that_grows():
    own = dataclasses.replace(LM, tokenizer=tokenizer())
    assert np.flatnonzero(known_ids.known_ids(own)).tolist() == KNOWN
    own.tokenizer.backend.add_tokens(["new"])
    new = own.tokenizer.backend.token_to_id("new")
    assert new not in KNOWN and np.flatnonzero(known_ids.known_ids(own)).tolist() == sorted({*KNOWN, new})


def test_a_tokenizer_that_has_no_hash_will_do():
    @dataclasses.dataclass
    class Bare:
        vocab_size: int = 3

        def ids(self):
            return np.arange(self.vocab_size)

    assert np.flatnonzero(known_ids.known_ids(dataclasses.replace(LM, tokenizer=Bare()))).tolist() == [0, 1, 2]


QUICK = ("itself", "tree", "random")


@pytest.mark.parametrize("drafter", [pytest.param(d, marks=() if d in QUICK else pytest.mark.slow) for d in DRAFTERS])
def test_no_drafter_and_no_target_emits_an_id_that_the_tokenizer_lacks(drafter):
    for temperature in (1.5, 0.0):
        out = drafted(DRAFTERS[drafter], temperature=temperature)
        assert set(np.unique(out.tokens)) <= set(KNOWN)
    if drafter == "itself":
        assert sum(m.num_draft_tokens - m.num_accepted_tokens for m in out.metrics) == 0, "q is not p"


LAWS = [("plain", "rejection"), ("tree", "rejection")]
LAWS += [pytest.param("noisy twin", v, marks=pytest.mark.slow) for v in testing.lossless_verifiers()]


@pytest.mark.parametrize("drafter, verifier", LAWS)
def test_what_is_left_follows_the_targets_law_over_the_known_ids(drafter, verifier):
    sampled = dict(temperature=1.0, drafter=DRAFTERS[drafter], verifier=verifier, num_speculative_tokens=3)
    drawn = testing.laws.sample_sequences(LM, [1, 2, 0, 1], 2000, 3, batch=1000, **sampled)
    law = testing.laws.joint_law(BARE, [1, 2, 0, 1], 3, temperature=1.0, allowed_token_ids=KNOWN)
    assert testing.laws.chi_square(testing.laws.count_sequences(drawn, VOCAB), law) > 1e-4


def test_greedy_text_is_that_of_the_known_ids():
    allowed = drafted(None, BARE, temperature=0.0, allowed_token_ids=KNOWN)
    for drafter in ("noisy twin", "tree", "jacobi"):
        assert drafted(DRAFTERS[drafter], temperature=0.0).tokens == allowed.tokens


def test_a_switch_allows_them_and_without_a_tokenizer_nothing_is_forbidden():
    bare = drafted(None, BARE)
    assert set(np.unique(bare.tokens)) == set(range(VOCAB))
    assert drafted(None, allow_unknown_ids=True).tokens == bare.tokens
    sampling = prepare(BARE, [[1]]).request.sampling
    assert sampling.vocabulary is None and sampling.logit_bias is None


def test_a_tokenizer_that_covers_the_vocabulary_costs_nothing():
    whole = dataclasses.replace(LM, tokenizer=tokenizer(list(range(VOCAB + 2))))  # more ids than rows too
    sampling = prepare(whole, [[1]]).request.sampling
    assert sampling.vocabulary is None and sampling.logit_bias is None


def test_an_engines_plain_rounds_draw_no_id_past_the_tokenizers_last():
    padded = dataclasses.replace(LM, tokenizer=tokenizer(list(range(5))))
    with Engine(padded, drafter="none", slots=2, capacity=64, prefill_chunk=64) as engine:
        sampled = dict(max_new_tokens=40, temperature=1.5, ignore_eos=True)
        handles = [engine.submit([1, 2], seed=i, **sampled) for i in range(2)]
        drawn = [token for handle in handles for token in handle.result().tokens[0]]
    assert set(drawn) == set(range(5))


def test_a_callers_own_allowed_ids_are_cut_to_the_known_ones():
    sampling = prepare(LM, [[1]] * 2, allowed_token_ids=[[1, 3, 6], None]).request.sampling
    assert [[i for i in row if i >= 0] for row in sampling.allowed.tolist()] == [[1, 6], []]
    forbidden = {*np.asarray(sampling.logit_bias.ids[1]).tolist(), *range(int(sampling.vocabulary[1]), VOCAB)} - {-1}
    assert sorted(set(range(VOCAB)) - forbidden) == KNOWN
    with pytest.raises(ValueError, match=r"allowed_token_ids of row 0.*tokenizer.*allow_unknown_ids=True"):
        prepare(LM, [[1]], allowed_token_ids=[3, 7])
    bias = prepare(LM, [[1]], logit_bias={3: 9.0, 4: 2.0}).request.sampling.logit_bias
    amounts = dict(zip(bias.ids[0].tolist(), bias.amounts[0].tolist(), strict=True))
    assert (amounts[3], amounts[4]) == (-np.inf, 2.0), "no bias brings an unknown id back"


@pytest.mark.parametrize("unknown", [3, 7])
def test_a_prompt_with_an_unknown_id_is_refused(unknown):
    with pytest.raises(ValueError, match=rf"prompt 1 has token id {unknown}, .*tokenizer.*allow_unknown_ids=True"):
        generate(LM, [[1], [1, unknown]])
    prepare(LM, [[1], [1, unknown]], allow_unknown_ids=True)


def test_a_models_own_stop_token_can_end_a_row_whatever_the_tokenizer_says():
    config = dataclasses.replace(LM.config, eos_token_ids=(7,))
    out = generate(dataclasses.replace(LM, config=config), [[1]] * 20, temperature=3.0, max_new_tokens=60)
    assert "stop" in out.finish_reasons
    assert {token for row in out.tokens for token in row} <= {*KNOWN, 7}
    assert any(row[-1] == 7 for row in out.tokens)
    generate(dataclasses.replace(LM, config=config), [[1, 7, 2]], max_new_tokens=1)  # an earlier turn of a dialogue


def test_streams_forbid_them_too():
    assert {e.token for e in stream(LM, [[1]], temperature=1.5, max_new_tokens=60)} <= set(KNOWN)
