"""What a T5 refuses, by name and before any device work, and how its config.json and its sources are read."""

import dataclasses

import families
import numpy as np
import pytest
import small_tokenizers

import specjax
from specjax import drafters
from specjax.drafters import DraftModel
from specjax.engine.scoring import score
from specjax.models import modules
from specjax.models.configs import from_dict, from_hf
from specjax.models.heads.dflash_head import DFlashHead, DFlashHeadConfig
from specjax.models.heads.eagle3_head import Eagle3Head, Eagle3HeadConfig
from specjax.models.heads.medusa_heads import MedusaHeads, MedusaHeadsConfig
from specjax.models.heads.pass_tokens import PassConfig, PassTokens
from specjax.testing import tiny_lm
from specjax.text.text_stream import TextStream
from specjax.training.loop import Recipe, train

T5 = {"model_type": "t5", "vocab_size": 64, "d_model": 48, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
      "is_encoder_decoder": True}  # fmt: skip
FLAN = T5 | {
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 0, "n_positions": 512,
    "dropout_rate": 0.1, "initializer_factor": 1.0, "output_past": True, "pad_token_id": 0, "num_decoder_layers": 3,
    "relative_attention_max_distance": 128, "relative_attention_num_buckets": 32, "architectures": ["T5"],
}  # fmt: skip
LM = families.tiny("t5")
LLAMA = tiny_lm(0, vocab_size=4)
HIDDEN = LM.hidden_size
LAYER = dataclasses.replace(tiny_lm(0, vocab_size=4, hidden_size=HIDDEN).config, num_hidden_layers=1)
EAGLE, MEDUSA = Eagle3HeadConfig(LAYER, (0, 1, 2)), MedusaHeadsConfig(HIDDEN, 4, num_heads=2)
PASS = PassConfig(HIDDEN, 2)
BLOCKS = DFlashHeadConfig(LAYER, (0, 1, 2), block_size=4, mask_token_id=1)


@pytest.mark.parametrize(
    "hf, generation, expected",
    [
        (T5, {}, dict(num_hidden_layers=2, num_encoder_layers=2, scaled_head=True, gated=False)),
        (T5, {}, dict(tie_word_embeddings=True, num_buckets=32, max_distance=128, start_ids=(0,), eos_token_ids=(1,))),
        (FLAN, {}, dict(num_hidden_layers=3, num_encoder_layers=2, scaled_head=False, gated=True)),
        (T5 | {"scale_decoder_outputs": False}, {}, dict(tie_word_embeddings=True, scaled_head=False)),
        (T5 | {"pad_token_id": 5}, {}, dict(start_ids=(5,))),
        (T5 | {"decoder_start_token_id": 6}, {}, dict(start_ids=(6,))),
        (T5, {"decoder_start_token_id": 7, "eos_token_id": [1, 3]}, dict(start_ids=(7,), eos_token_ids=(1, 3))),
    ],
)
def test_what_a_file_leaves_out_is_what_transformers_takes(hf, generation, expected):
    config = from_hf(hf, generation)
    assert {name: getattr(config, name) for name in expected} == expected
    assert from_dict(config.to_dict()) == config and hash(config) == hash(from_hf(dict(hf), generation))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"d_kv": None}, "d_kv is missing"),
        ({"feed_forward_proj": "gelu"}, "feed_forward_proj must be 'relu' or 'gated-gelu' or 'gated-silu', got 'gelu'"),
        ({"relative_attention_num_buckets": 5}, "relative_attention_num_buckets must be an even number.*, got 5"),
        ({"relative_attention_max_distance": 16}, "max_distance must be at least num_buckets / 2 . 1 = 17, got 16"),
        ({"decoder_start_token_id": 64}, "decoder_start_token_id must be an id from 0 to 63, got 64"),
        ({"pad_token_id": None}, "decoder_start_token_id must be an id from 0 to 63, got None"),
        ({"is_decoder": True}, "is_decoder = True is not implemented"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder = False is not implemented .only True"),
        ({"num_heads": 0}, "num_heads must be a positive integer.*, got 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, got 'yes'"),
        ({"rope_theta": 1e4}, "rope_theta = 10000.0 is unknown to specjax"),
        ({"model_type": "umt5"}, "model_type = 'umt5' is not implemented .only llama.* gpt2 and t5"),
    ],
)
def test_a_bad_key_has_one_clear_error(changes, message):
    with pytest.raises(ValueError, match=message):
        from_hf(T5 | changes)


@pytest.mark.parametrize(
    "drafter, message",
    [
        (
            lambda: drafters.Eagle(EAGLE, modules.init(Eagle3Head, EAGLE, 0), np.arange(4)),
            "Eagle is for decoders alone, and this model has an encoder",
        ),
        (
            lambda: drafters.DFlash(BLOCKS, modules.init(DFlashHead, BLOCKS, 0), np.arange(4)),
            "DFlash is for decoders alone, and this model has an encoder",
        ),
        (
            lambda: drafters.Medusa(MEDUSA, modules.init(MedusaHeads, MEDUSA, 0), np.arange(4)),
            "Medusa is for decoders alone, and this model has an encoder",
        ),
        (
            lambda: drafters.PaSS(PASS, modules.init(PassTokens, PASS, 0)),
            "PaSS is for decoders alone, and this model has an encoder",
        ),
        (lambda: drafters.SinkWindow(), "SinkWindow is for decoders alone"),
        (lambda: DraftModel(LLAMA), "the target has an encoder and the draft model has none"),
        (lambda: drafters.TreeModel(LLAMA, (2, 1)), "the target has an encoder and the draft model has none"),
        (lambda: drafters.Cascade(drafters.PromptLookup(), LLAMA), "the target has an encoder and the draft model has"),
    ],
)
def test_a_drafter_that_needs_a_decoder_alone_is_refused(drafter, message):
    with pytest.raises(ValueError, match=message):
        specjax.prepare(LM, [[1, 2]], drafter=drafter(), num_speculative_tokens=2)


def test_a_t5_drafts_for_no_decoder():
    with pytest.raises(ValueError, match="the target has no encoder and the draft model has one"):
        specjax.prepare(LLAMA, [[1, 2]], drafter=DraftModel(LM))


@pytest.mark.parametrize(
    "prompts, message",
    [
        ([[]], "prompt 0 is empty"),
        ([[1] * 256], "prompt 0 has 257 tokens, more than the model's context of 256"),
        ([[1], [4]], "prompt 1 has token id 4"),
    ],
)
def test_a_bad_source_is_refused(prompts, message):
    with pytest.raises(ValueError, match=message):
        specjax.prepare(LM, prompts)


def test_an_engine_refuses_a_chunk_and_scores_no_texts():
    with pytest.raises(ValueError, match="prefill_chunk must be None, as an encoder reads sources whole, got 64"):
        specjax.Engine(LM, prefill_chunk=64)
    with specjax.Engine(LM, drafter="none", slots=1, capacity=64) as engine:
        with pytest.raises(ValueError, match="scoring a text is for decoders alone"):
            score(engine, [1, 2, 3], 0)


def test_no_drafter_is_trained_for_a_t5():
    with pytest.raises(ValueError, match="training is for decoders alone, and this model has an encoder"):
        train(None, LM, None, None, Recipe(steps=2))


def test_a_source_ends_with_eos_and_the_decoder_starts_after_it():
    tokenizer = small_tokenizers.unigram()
    lm = specjax.LM(dataclasses.replace(LM.config, vocab_size=len(tokenizer)), LM.params, tokenizer)
    job = specjax.prepare(lm, ["ab ba", "b</s>", "a</s> b"])
    one, eos = tokenizer.encode("ab ba"), tokenizer.eos_id
    assert job.prompts[0] == [*one, eos, 0] and eos not in one
    assert job.prompts[1][-2:] == [eos, 0] and job.prompts[1].count(eos) == 1
    assert job.prompts[2].count(eos) == 2
    assert tokenizer.decode(job.prompts[0]) == "ab ba"


def test_unigram_text_streams_as_it_is_decoded():
    tokenizer = small_tokenizers.unigram()
    ids = [0, *tokenizer.encode("ab ba a"), tokenizer.eos_id]
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids) == "ab ba a"


def test_a_whole_chunk_holds_the_longest_source():
    for size in (1, 63, 64, 65, 200):
        job = specjax.prepare(LM, [[1] * size, [2]], max_new_tokens=4, drafter=None)
        assert job.chunk >= size and job.tokens.shape[1] >= job.chunk
        assert job.tokens.shape[1] >= size + 1 + 4 + job.decoder.headroom
