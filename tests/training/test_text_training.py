"""Training from scratch on text: rows, the loss by transformers, and a pair of each family from text to table."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers
from commands import script

import specjax
from specjax.drafters import DraftModel
from specjax.measure import timing
from specjax.measure.trial import Trial
from specjax.testing import tiny_lm
from specjax.training import text_rows
from specjax.training.presets import PRESETS
from specjax.training.train_text import TextObjective

WORDS = "the a one old red small king ship door river sees takes follows leaves and but of with".split()
LAST = 10  # the number of training steps of the script


def written_text(lines: int = 700) -> str:
    rng = np.random.default_rng(3)
    sentences = (" ".join(rng.choice(WORDS, rng.integers(3, 7))).capitalize() + "." for _ in range(3 * lines))
    return "\n".join(" ".join(next(sentences) for _ in range(3)) for _ in range(lines))


TEXT = written_text()
PASSAGES = text_rows.passages(TEXT)
TOKENIZER = text_rows.train_tokenizer(PASSAGES.training, 290)


def test_one_passage_in_twenty_is_held_out_and_no_line_is_lost():
    lines = [line for part in PASSAGES for passage in part for line in passage.split("\n")]
    count = sum(map(len, PASSAGES))
    assert len(PASSAGES.held_out) == count // 20 and len(PASSAGES.training) > 19
    assert not set(PASSAGES.held_out) & set(PASSAGES.training)
    assert set(lines) <= set(TEXT.split("\n")) and len(lines) > 680, "only lines at the end may be left over"
    with pytest.raises(ValueError, match="1 passages of 1000 characters"):
        text_rows.passages(TEXT[:1500])


def test_the_same_texts_give_the_same_tokenizer_and_any_text_comes_back():
    again = text_rows.train_tokenizer(PASSAGES.training, 290)
    assert again.backend.to_str() == TOKENIZER.backend.to_str()
    assert TOKENIZER.decode(TOKENIZER.encode("Größe 7 of the king")) == " Größe 7 of the king"
    assert TOKENIZER.encode("king", with_eos=True)[-1] == TOKENIZER.eos_id == 1
    with pytest.raises(ValueError, match="at least 258"):
        text_rows.train_tokenizer(PASSAGES.training, 257)


def test_plain_rows_are_the_texts_one_after_another():
    rows = text_rows.plain_rows(["one old king", "a river"], TOKENIZER, 4)
    whole = [*TOKENIZER.encode("one old king"), 1, *TOKENIZER.encode("a river"), 1]
    assert rows.tokens.ravel().tolist() == whole[: rows.tokens.size] and rows.tokens.size > len(whole) - 4
    assert rows.own.all()


def test_the_text_of_a_row_is_its_source_with_the_lines_in_reverse_order():
    text = "The king sees. A red ship leaves and follows the one old river of the door!\nBut of a king"
    lines = text_rows.short_lines(text, np.random.default_rng(0))
    assert " ".join(lines) == text.replace("\n", " ") and {len(line.split()) for line in lines} <= set(range(1, 9))
    ends = {line.split()[-1] for line in lines}
    assert {"sees.", "door!", "king"} <= ends, "no line goes past the end of a sentence"
    rows = text_rows.reversal_rows([text], TOKENIZER, 120, orders=6)
    found = set()
    for row, own in zip(rows.tokens, rows.own, strict=True):
        first = int(own.argmax())
        source, said = row[: first - 2].tolist(), row[own].tolist()
        assert row[first - 2 : first].tolist() == [1, 0] and said[-1] == 1, "end, first token; and the end of the text"
        assert TOKENIZER.encode(TOKENIZER.decode(source).strip()) == source, "a prompt has the tokens of the row"
        parts = TOKENIZER.decode(source).strip().split(" / ")
        assert TOKENIZER.decode(said).strip() == " / ".join(reversed(parts)) and len(parts) > 1
        assert set(parts) <= set(lines) and len(set(parts)) == len(parts)
        found.add(tuple(parts))
    assert len(found) > 3, "each order is another one"
    alike = text_rows.reversal_rows(["King. " * 80], TOKENIZER, 120, orders=2)
    assert len(set(alike.lengths)) > 4, "sources are short and long"
    assert not len(text_rows.reversal_rows(["Alone."], TOKENIZER, 64).tokens), "one line is its own reverse"
    again = text_rows.reversal_rows([text], TOKENIZER, 120, orders=6)
    assert np.array_equal(again.tokens, rows.tokens)


def test_a_model_of_another_family_is_refused():
    with pytest.raises(ValueError, match="for GPT-2 and T5, got a llama"):
        TextObjective(tiny_lm().config).init(0)


@pytest.mark.parametrize("preset, tokens", [("97m", 98_032_128), ("6m", 5_905_408)])
def test_sizes_of_the_paper_come_out_if_the_tied_head_is_counted(preset, tokens):
    c = PRESETS[preset].config(8192, 1, 512)
    layer = 12 * c.hidden_size**2 + 13 * c.hidden_size
    total = c.num_hidden_layers * layer + 2 * c.hidden_size + (2 * c.vocab_size + 512) * c.hidden_size
    assert total == tokens


@pytest.fixture(scope="module", params=["gpt2-tiny", "t5-tiny"])
def pair(request, tmp_path_factory):
    """A folder with a model of one layer that was trained for a few steps, and the name of its preset."""
    folder = tmp_path_factory.mktemp("pair")
    (folder / "text.txt").write_text(TEXT, "utf-8")
    given = ["--text", str(folder / "text.txt"), "--vocab", "290", "--row-tokens", "48", "--context", "96"]
    short = ["--batch", "8", "--steps", str(LAST), "--every", "5", "--out", str(folder)]
    preset = PRESETS[request.param]
    layers = {name: 1 for name in preset.sizes if name.endswith("_layers")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, request.param, dataclasses.replace(preset, sizes={**preset.sizes, **layers}))
        assert script("train_pair").main(["--presets", request.param, *given, *short]) == 0
    return folder, request.param


def test_transformers_reads_the_folder_and_finds_the_loss_that_the_curve_says(pair):
    folder, name = pair
    reads = transformers.AutoModelForSeq2SeqLM if name.startswith("t5") else transformers.AutoModelForCausalLM
    model = reads.from_pretrained(folder / name).eval()
    make = text_rows.reversal_rows if name.startswith("t5") else text_rows.plain_rows
    rows = make(PASSAGES.held_out, TOKENIZER, 48).shuffled(0).rows(slice(0, 16))
    losses = []
    for i, row in enumerate(rows.tokens):
        ids = torch.tensor(row[: rows.lengths[i]].astype(int))[None]
        given = {"input_ids": ids, "labels": ids}
        if name.startswith("t5"):
            first = int(rows.own[i].argmax())
            given = {"input_ids": ids[:, : first - 1], "labels": ids[:, first:]}
        with torch.no_grad():
            count = given["labels"].shape[1] - (not name.startswith("t5"))
            losses.append((float(model(**given).loss) * count, count))
    total, count = np.sum(losses, axis=0)
    curve = json.loads((folder / name / "curve.json").read_text())
    assert [line["step"] for line in curve] == [5, LAST]
    assert curve[1]["held_out_loss"] < curve[0]["held_out_loss"]
    np.testing.assert_allclose(curve[1]["held_out_loss"], total / count, atol=2e-4)


def test_prompts_are_of_held_out_text_and_the_corpus_is_what_is_learned(pair):
    folder, name = pair
    prompts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    corpus = (folder / "corpus.txt").read_text().split("\n")
    kept, learned = (" ".join(" ".join(part).split()) for part in (PASSAGES.held_out, PASSAGES.training))
    if name.startswith("t5"):
        assert all(part in kept for prompt in prompts for part in prompt.split(" / "))
        assert all(part.strip() in learned for line in corpus for part in line.split(" / "))
    else:
        assert all(p.startswith(x) for x, p in zip(prompts, PASSAGES.held_out, strict=True))
        assert "\n".join(corpus) == "\n".join(PASSAGES.training)
    assert len(prompts) >= 2 and len(corpus) > 300


@pytest.mark.parametrize("pair", ["gpt2-tiny", pytest.param("t5-tiny", marks=pytest.mark.slow)], indirect=True)
def test_the_pair_is_measured_beside_the_theory(pair, capsys):
    """The model drafts for itself: every token is accepted, and the line is that of theorem 3.8 at alpha = 1."""
    folder, name = pair
    model = str(folder / name)
    given = ["--model", model, "--drafts", model, "--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", "12"]
    few = ["--alpha-prompts", "2", "--speed-prompts", "1", "--num-speculative-tokens", "2", "--temperature", "1"]
    assert script("measure_pair").main([*given, *few]) == 0
    cells = [cell.strip() for cell in capsys.readouterr().out.splitlines()[-1].strip("|").split("|")]
    assert cells[:5] == [model, "1", "2", "1.000 ± 0.000", "1.00"]
    c, by_theory, tokens = float(cells[5]), float(cells[10]), float(cells[9])
    assert tokens == 3.0 == float(cells[8])
    assert cells[7] in ("0", "16"), "if every token is accepted, the best K is none or the most"
    assert by_theory == pytest.approx(3 / (2 * c + 1), abs=2e-3) and float(cells[11]) > 0


def test_costs_are_shares_of_a_plain_step(monkeypatch):
    seconds = {"plain_step": 2.0, "draft": 3.0, "verify": {"1": 6.0, "4": 5.0}}
    monkeypatch.setattr(timing, "calls", lambda job, count: seconds)
    assert Trial(tiny_lm(), DraftModel(tiny_lm()), [[1, 2]], 3, 8, 64).costs() == (0.5, 2.5)


@pytest.mark.parametrize("given, words", [
    (["--presets", "97m", "t5-tiny"], "are of two families"),
    (["--presets", "6m", "--row-tokens", "600"], "--context 512 must hold a row"),
])  # fmt: skip
def test_bad_arguments_of_the_training_are_refused(given, words, capsys):
    with pytest.raises(SystemExit):
        script("train_pair").main([*given, "--text", "t.txt", "--out", "o"])
    assert words in capsys.readouterr().err


def test_counted_drafts_need_a_corpus(capsys):
    with pytest.raises(SystemExit):
        script("measure_pair").main(["--model", "m", "--drafts", "bigram", "--prompts", "p"])
    assert "give --corpus FILE" in capsys.readouterr().err


@pytest.mark.slow
def test_counted_drafts_are_measured_too(pair, capsys):
    folder, name = pair
    given = ["--model", str(folder / name), "--drafts", "unigram", "bigram", "--corpus", str(folder / "corpus.txt")]
    few = ["--alpha-prompts", "2", "--speed-prompts", "1", "--max-new-tokens", "8", "--num-speculative-tokens", "2"]
    assert script("measure_pair").main([*given, "--prompts", str(folder / "prompts.jsonl"), *few]) == 0
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert [line.split("|")[1].strip() for line in lines] == ["unigram"] * 2 + ["bigram"] * 2
    assert all(0 <= float(line.split("|")[4].split("±")[0]) <= 1 for line in lines)


def test_the_folder_loads_with_its_tokenizer(pair):
    folder, name = pair
    lm = specjax.load(folder / name)
    assert lm.tokenizer.backend.to_str() == TOKENIZER.backend.to_str() and lm.vocab_size == len(TOKENIZER)
    assert lm.config.eos_token_ids == (1,) and lm.has_encoder == name.startswith("t5")
