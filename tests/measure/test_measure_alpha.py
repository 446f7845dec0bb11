"""Alpha by corollary 3.6, against tables whose overlaps are known; prompt files; the script's table."""

import json

import numpy as np
import pytest
from cli.prompt_files import read_prompts
from commands import script
from hf_folders import HF, write_hf
from small_tokenizers import byte_level

from specjax import generate, testing
from specjax.drafters import DraftModel
from specjax.drafting import theory
from specjax.measure import acceptance

VOCAB, SIZE, NEW, ROWS = 4, 2, 40, 32
P = np.array([[0.4, 0.3, 0.2, 0.1], [0.5, 0.3, 0.1, 0.1], [0.3, 0.5, 0.1, 0.1], [0.45, 0.35, 0.1, 0.1]])
# After 2 and 3, which the draft proposes too often, it is nearly always wrong.
Q = np.array([[0.25, 0.25, 0.25, 0.25], [0.2, 0.3, 0.2, 0.3], [0.02, 0.02, 0.48, 0.48], [0.05, 0.01, 0.5, 0.44]])
TARGET, DRAFT = testing.table_lm(P), DraftModel(testing.table_lm(Q))
PROMPTS = [[i % VOCAB, 1] for i in range(ROWS)]
OVERLAP = theory.acceptance_rate(P, Q)  # after each token


@pytest.fixture(scope="module")
def samples():
    return acceptance.measure(TARGET, PROMPTS, DRAFT, SIZE, NEW, temperature=1.0, ignore_eos=True)


@pytest.fixture(scope="module")
def last_tokens():
    """The last token of each prefix of plain sampling with the same seeds, [ROWS, NEW]."""
    plain = generate(TARGET, PROMPTS, max_new_tokens=NEW, temperature=1.0, ignore_eos=True)
    return np.array([[prompt[-1], *new[:-1]] for prompt, new in zip(PROMPTS, plain.tokens, strict=True)])


def test_a_prompt_without_room_has_no_prefixes():
    full = TARGET.max_positions
    none, some = acceptance.measure(TARGET, [[1] * full, [0, 1]], DRAFT, SIZE, 3, temperature=1.0, ignore_eos=True)
    assert none.overlap.shape == none.weight.shape == (0, SIZE) and len(some.overlap) == 3


def test_overlap_is_sum_min_p_q_at_every_prefix_of_plain_sampling(samples, last_tokens):
    seen = np.array([sample.overlap[:, 0] for sample in samples])
    np.testing.assert_allclose(seen, OVERLAP[last_tokens], atol=1e-5)
    assert all(np.array_equal(sample.weight[:, 0], np.ones(NEW)) for sample in samples)
    assert acceptance.coverage(samples) == 1.0
    found = acceptance.alpha(samples)
    assert found.mean == pytest.approx(OVERLAP[last_tokens].mean(), abs=1e-5)


def test_a_later_position_counts_as_often_as_it_is_reached(samples, last_tokens):
    both = np.minimum(P, Q) @ OVERLAP  # the chance that two tokens in a row are accepted, after each token
    exact = both[last_tokens].sum() / OVERLAP[last_tokens].sum()
    found = acceptance.alpha(samples, position=1)
    assert abs(found.mean - exact) < 4 * found.error
    unweighted = np.mean([sample.overlap[:, 1] for sample in samples])
    assert abs(unweighted - exact) > 4 * found.error, "the weights must matter for this test to mean anything"


def test_the_error_is_that_of_prompts():
    rng = np.random.default_rng(1)

    def experiment(prompts=30):
        levels = rng.uniform(0.2, 0.9, (prompts, 1))  # prefixes of a prompt resemble each other
        counts = rng.integers(5, 40, prompts)
        rows = [np.full((n, 1), level) for level, n in zip(levels[:, 0], counts, strict=True)]
        return acceptance.alpha([acceptance.Sample(row, np.ones_like(row)) for row in rows])

    runs = [experiment() for _ in range(400)]
    assert np.mean([run.error for run in runs]) == pytest.approx(np.std([run.mean for run in runs]), rel=0.15)


def test_nothing_drafted_is_not_zero():
    empty = acceptance.Sample(np.zeros((3, 2)), np.zeros((3, 2)))
    full = acceptance.Sample(np.full((1, 2), 0.5), np.ones((1, 2)))
    assert acceptance.alpha([empty]) == acceptance.Alpha(None, None)
    assert acceptance.alpha([empty, full]).mean == 0.5 and acceptance.coverage([empty, full]) == 0.25
    assert acceptance.alpha([full]) == acceptance.Alpha(0.5, None)
    with pytest.raises(ValueError, match="no alpha"):
        acceptance.measure(TARGET, PROMPTS, None)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_of_a_prompt_file_end_at_newlines_alone(tmp_path, end):
    """JSON allows all but control characters in a string, and text may hold what str.splitlines takes for an end."""
    texts = [f"one{c}two" for c in "\u2028\u2029\u0085\x0b\x0c\x1c\x1d\x1e\r"]
    for kind, written in {
        "raw": [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts],
        "escaped": [json.dumps({"turns": [text]}) for text in texts],
        "plain": texts[:-1],
    }.items():
        path = tmp_path / kind
        path.write_bytes(end.join([*written, ""]).encode())
        assert [prompt for _, prompt in read_prompts(path)] == texts[: len(written)]


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "one"}\n')
    assert read_prompts(path) == [("all", "one")]


@pytest.mark.parametrize("line", ['{"prompt": 3}', '{"turns": 3}', '{"turns": []}', '{"turns": "one"}'])
def test_a_line_without_text_is_named(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match='line 1 has neither a "prompt" nor "turns"'):
        read_prompts(path)


def test_read_prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"category": "qa", "turns": ["one", "two"]},
        {"category": "coding", "turns": ["three"]},
        {"prompt": "four"},
    ]
    path.write_text("\n".join([*map(json.dumps, lines), "", "five"]))
    assert read_prompts(path) == [("qa", "one"), ("mt-bench", "three"), ("all", "four"), ("all", "five")]
    for text, says in [
        ("", "holds no prompt"),
        ('{"turns": []}', "line 1 has neither"),
        ("{oops", "line 1 is not JSON"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=says):
            read_prompts(path)


def test_the_table(capsys, tmp_path):
    write_hf(tmp_path / "tiny", {**HF, "vocab_size": 300, "eos_token_id": None}, tokenizer=byte_level())
    prompts = [{"category": name, "turns": ["abcabcabc"]} for name in ("qa", "writing", "qa")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    args = ["--model", str(tmp_path / "tiny"), "--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "4"]
    main = script("measure_alpha").main
    assert main([*args, "--temperature", "0", "--num-speculative-tokens", "2"]) == 0
    out, err = capsys.readouterr()
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in out.splitlines() if line.startswith("|")]
    assert rows[0] == ["target", "draft", "sampling", "alpha", "coverage", "position 2"] and not err
    assert rows[2][1:3] == ["ngram, prompt_lookup_max 3, prompt_lookup_min 2", "T = 0"]
    assert [row[3:4] + row[6:] for row in rows[5:]] == [["mt-bench", "1"], ["qa", "2"]]
    assert "3 prompts, 12 prefixes" in out
    assert main([*args, "--drafter", "none"]) == 2
    assert "no alpha" in capsys.readouterr().err
    assert main([*args[:3], "nowhere.jsonl"]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main([*args, "--batch", "0"])
    assert stop.value.code == 2 and "--batch must be at least 1" in capsys.readouterr().err
