"""Where a text ends: at all that config, generation config and tokenizer name, and at stop strings that are tokens."""

import dataclasses
import json

import numpy as np
import pytest
from commands import run
from hf_folders import HF, write_hf
from small_tokenizers import byte_level, chatml

from convert import checkpoint
from specjax import generate, testing
from specjax.checkpoints.load import load
from specjax.generation.generate import prepare


def folder(path, eos, generation=None):
    """A ChatML fine-tune: its tokenizer ends turns with <|im_end|>, id 260; its config is as before."""
    write_hf(path, {**HF, "vocab_size": 300, "eos_token_id": eos}, generation=generation)
    chatml(path)
    return path


@pytest.mark.parametrize(
    "eos, generation, expected",
    [
        (None, None, (260,)),
        (1, None, (1, 260)),
        (1, {"eos_token_id": [7, 9]}, (7, 9, 1, 260)),
        ([1, 260], {"eos_token_id": 1}, (1, 260)),
        (1, {"eos_token_id": None}, (1, 260)),
    ],
)
def test_the_stop_tokens_are_all_that_the_files_name(tmp_path, eos, generation, expected):
    lm = load(folder(tmp_path / "a", eos, generation))
    assert lm.config.eos_token_ids == expected
    checkpoint.save(tmp_path / "b", dataclasses.replace(lm.config, eos_token_ids=(1,)), lm.params, lm.tokenizer)
    assert load(tmp_path / "b").config.eos_token_ids == (1, 260)
    assert ids_of(prepare(lm, "a", eos_token_id=5)) == [5]
    assert ids_of(prepare(lm, "a", ignore_eos=True)) == []


def ids_of(job):
    """The stop tokens of a job's only row, without padding."""
    return [int(i) for i in np.asarray(job.request.stop_ids)[0] if i >= 0]


def reciting(tokenizer):
    """A model that follows each id with the next."""
    lm = testing.table_lm(np.roll(np.eye(len(tokenizer)), 1, axis=1))
    return dataclasses.replace(lm, tokenizer=tokenizer)


def test_a_stop_string_that_is_a_special_token_matches_the_token(tmp_path):
    lm = reciting(chatml(tmp_path))
    out = generate(lm, [[250]], stop=["<|im_end|>", "never"], max_new_tokens=20, drafter="ngram")
    assert out.tokens == [list(range(251, 261))] and out.finish_reasons == ["stop"] and out.stop_token_ids == [260]
    out = generate(lm, [[250]], stop="<|im_start|>", eos_token_id=255, ignore_eos=True, max_new_tokens=20)
    assert out.tokens[0][-1] == 259 and out.stop_token_ids == [259]
    assert ids_of(prepare(lm, [[3]], stop="<tool>")) == []  # prints its text: found as such


def test_stop_tokens_are_shown_and_recorded(capsys, tmp_path):
    model = str(folder(tmp_path / "m", 1))
    code, out, _ = run(capsys, "--model", model, "--prompt", "a")
    assert code == 0 and "stops at '</s>' (1), '<|im_end|>' (260)" in out
    code, out, _ = run(capsys, "--model", model, "--prompt", "a", "--eos-token-id", "7", "8", "--json")
    found = json.loads(out)
    texts = [byte_level().decode([i]) for i in (7, 8)]
    assert code == 0 and found["stop_tokens"] == [{"token": i, "text": t} for i, t in zip((7, 8), texts, strict=True)]


@pytest.mark.parametrize("stop", [5, 0, False, (text for text in ["ab"]), ["ab", 5], "", b""])
def test_no_stop_string_is_ignored_because_it_is_none(stop):
    lm = dataclasses.replace(testing.tiny_lm(0, vocab_size=300), tokenizer=byte_level())
    with pytest.raises(ValueError, match="stop must be a non-empty string"):
        prepare(lm, "a", stop=stop)
    assert prepare(lm, "a", stop=np.array(["ab", "c"])).options.stop is not None


@pytest.mark.parametrize("token", [-1, 300, 10**400])
def test_an_id_that_no_tokenizer_can_spell_is_refused_like_every_other(token):
    lm = dataclasses.replace(testing.tiny_lm(0, vocab_size=300), tokenizer=byte_level())
    with pytest.raises(ValueError, match="prompt 0 has token id .* outside the model's vocabulary of 300"):
        prepare(lm, [[3, token]])
