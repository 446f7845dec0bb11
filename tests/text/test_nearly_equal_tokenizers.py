"""A draft whose tokenizer is nearly the target's: what must agree, what need not, and the way round a refusal."""

import dataclasses

import pytest
from commands import run
from hf_folders import HF, write_hf
from small_tokenizers import added, byte_level, saved
from tokenizers import pre_tokenizers

from specjax import drafters, generate, stream, testing
from specjax.checkpoints.load import load
from specjax.text.tokenizer import Tokenizer, check_same_tokenizer

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SWAPPED = [*LETTERS[:4], LETTERS[5], LETTERS[4], *LETTERS[6:]]


def model(seed, tokenizer, vocab):
    return dataclasses.replace(testing.tiny_lm(seed, vocab_size=vocab), tokenizer=tokenizer)


def every_drafter(lm, **options):
    return [
        drafters.DraftModel(lm, **options),
        drafters.TreeModel(lm, (2, 1), **options),
        drafters.Cascade(drafters.PromptLookup(), lm, **options),
    ]


def test_ids_that_only_one_has_and_names_of_bos_and_eos_need_not_agree():
    one = byte_level()
    eos = byte_level()
    eos.eos_id = 2
    no_bos = Tokenizer(byte_level().backend, None, 1)
    for other in (byte_level(extra=["[PAD]"]), byte_level(bos="<t>"), eos, no_bos):
        check_same_tokenizer(one, other)
        check_same_tokenizer(other, one)
    far = byte_level(extra=["xx", "yy"]), byte_level(extra=["xx", "zz"])
    check_same_tokenizer(*far, vocab=260)
    with pytest.raises(ValueError, match="1 of the 261 ids"):
        check_same_tokenizer(*far)


def test_what_differs_is_said_precisely():
    message = f"differ in 2 of the 259 ids .*first at id 7: '{LETTERS[4]}' and '{LETTERS[5]}'.*any_tokenizer=True"
    with pytest.raises(ValueError, match=message):
        check_same_tokenizer(byte_level(), byte_level(order=SWAPPED))


@pytest.mark.parametrize("which", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2))])
def test_any_tokenizer_lets_a_draft_with_other_tokens_draft(which):
    target, draft = model(0, byte_level(), 259), model(0, byte_level(order=SWAPPED), 259)
    with pytest.raises(ValueError, match="first at id 7"):
        generate(target, "ab", drafter=every_drafter(draft)[which])
    drafter = every_drafter(draft, any_tokenizer=True)[which]
    options = dict(max_new_tokens=9, num_speculative_tokens=2, ignore_eos=True)
    out = generate(target, "ab", drafter=drafter, **options)
    assert out.tokens == generate(target, "ab", **options).tokens
    assert out.metrics[0].draft_acceptance_rate == 1  # the weights are the same


def test_a_draft_never_proposes_an_id_that_the_target_lacks():
    target, draft = model(0, byte_level(), 259), model(1, byte_level(extra=["[PAD]"]), 260)
    pad = draft.params["lm_head"].at[259].set(100 * draft.params["lm_head"][0])
    draft = dataclasses.replace(draft, params={**draft.params, "lm_head": pad})
    options = dict(max_new_tokens=12, num_speculative_tokens=3, ignore_eos=True, temperature=1.0, verifier="coupled")
    for drafter in every_drafter(draft)[:2]:  # a cascade needs one number of rows
        events = stream(target, "ab", drafter=drafter, **options)
        assert [event.token for event in events] == generate(target, "ab", **options).tokens[0]
        assert all(d["token"] < 259 for entry in events.trace[0] for d in entry["drafted"])


def test_a_target_whose_tokenizer_has_a_surplus_pad_loads(tmp_path):
    write_hf(tmp_path, {**HF, "vocab_size": 259})
    saved(tmp_path, added_tokens_decoder={"259": added("[PAD]")}, pad_token="[PAD]", eos_token="</s>")
    lm = load(tmp_path)
    assert lm.tokenizer.vocab_size == 260
    assert len(generate(lm, "ab", max_new_tokens=3).tokens[0]) == 3
    with pytest.raises(ValueError, match=r"token id 259 \('\[PAD\]'\), outside the model's vocabulary of 259"):
        generate(lm, "a[PAD]")


def test_the_command_line_has_the_same_switch(capsys, tmp_path):
    for name, order in (("a", None), ("b", SWAPPED)):
        write_hf(tmp_path / name, {**HF, "vocab_size": 300}, tokenizer=byte_level(order=order))
    draft = ("--drafter", "model", "--draft-model", str(tmp_path / "b"))
    args = ("--model", str(tmp_path / "a"), "--prompt", "ab", *draft)
    code, _, err = run(capsys, *args)
    assert code == 2 and "--any-draft-tokenizer" in err
    assert run(capsys, *args, "--any-draft-tokenizer")[0] == 0
