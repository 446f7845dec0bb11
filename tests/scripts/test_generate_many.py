"""scripts/generate_many.py, run in this process on a tiny checkpoint."""

import json
import signal

import pytest
from commands import script

import specjax


def test_the_script_answers_every_row_and_says_what_it_did(capsys, tmp_path, folder):
    """Flags are the defaults of rows."""
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text('{"prompt": "ab"}\n{"prompt": "ab", "max_new_tokens": 2}\nx\n')
    many = script("generate_many")
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    flags = ["--model", folder, "--max-new-tokens", "5", "--capacity", "64", "--keep-order", "--seed", "4"]
    assert many.main([str(source), str(target), *flags, "--temperature", "1"]) == 0
    assert "3 rows written, 1 of them errors; 0 were there, 0 of them errors; 7 tokens" in capsys.readouterr().out
    found = [json.loads(line) for line in target.read_text().splitlines()]
    lm = specjax.load(folder)
    options = dict(drafter="ngram", block_width=6, capacity=128, temperature=1.0, seed=4, max_new_tokens=5)
    assert found[0]["text"] == specjax.generate(lm, "ab", **options).texts[0]
    assert [len(answer.get("tokens", ())) for answer in found] == [5, 2, 0]
    with pytest.raises(SystemExit):
        many.main([str(tmp_path / "absent"), str(target)])
    assert "there is no file" in capsys.readouterr().err
    for one, handler in zip((signal.SIGINT, signal.SIGTERM), handlers, strict=True):
        signal.signal(one, handler)


def test_chat_is_for_texts_and_errors_that_were_there_are_counted(capsys, tmp_path, folder):
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text('{"prompt": [5, 6]}\n{"prompt": "ab"}\nx\n')
    flags = ["--model", folder, "--max-new-tokens", "2", "--capacity", "64", "--chat"]
    for said in ("3 rows written, 1 of them errors; 0 were there", "3 were there, 1 of them errors"):
        assert script("generate_many").main([str(source), str(target), *flags]) == 0
        assert said in (out := capsys.readouterr().out)
    assert "remove their lines" in out
