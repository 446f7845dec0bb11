"""Spec-Bench: the authors' rules, a run that goes on after a stop, and transformers beside specjax."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from cli.prompt_files import read_questions
from commands import script
from hf_folders import HF, write_hf
from small_tokenizers import byte_level

import specjax
from specjax.measure import spec_bench
from specjax.measure.spec_bench import Answer, Question, Record

QUESTIONS = (
    {"question_id": 1, "category": "writing", "turns": ["ab ab", "again"]},
    {"question_id": 2, "category": "qa", "turns": ["ab ab ab"]},
    {"question_id": 3, "category": "coding", "turns": ["abc", "more"]},
    {"question_id": 4, "category": "qa", "turns": ["b"]},
)


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, QUESTIONS)))
    return path


class Scripted:
    """A contestant that says what it is told, and keeps the prompts."""

    name = plain = "scripted"

    def __init__(self, *texts):
        self.texts, self.prompts = list(texts), []

    def answer(self, prompt, temperature, seed):
        self.prompts.append(prompt)
        return Answer(byte_level().encode(self.texts.pop(0))[1:], 2, 0.5)


def test_the_second_turn_sees_the_first_answer():
    lm = dataclasses.replace(specjax.testing.tiny_lm(vocab_size=300), tokenizer=byte_level())
    teller = Scripted(" one </s>", "two")
    record = spec_bench.ask(lm, Question(7, "qa", ("first", "second")), teller, 0.0)
    assert [byte_level().decode(prompt) for prompt in teller.prompts] == [
        "[user]first[a]", "[user]first[assistant]one[user]second[a]",
    ]  # fmt: skip
    assert record.turns == ["one", "two"] and record.new_tokens == [6, 3]
    assert record.decoding_steps == [2, 2] and record.wall_time == [0.5, 0.5]


def test_figures_are_means_over_questions():
    """The speed is the mean of the questions' speeds, and not all tokens over all seconds; steps are pooled."""
    def record(name, question, task, tokens, steps, seconds, temperature=0.0, text="x"):
        return Record(name, "plain", temperature, question, task, [text], tokens, steps, seconds)

    records = [
        record("plain", 1, "mt-bench", [10, 10], [10, 10], [1.0, 1.0]),  # 10 tokens/s
        record("plain", 2, "mt-bench", [30], [30], [1.0]),  # 30
        record("plain", 3, "qa", [20], [20], [1.0]),  # 20
        record("fast", 1, "mt-bench", [10, 10], [4, 6], [0.5, 0.5]),  # 20
        record("fast", 2, "mt-bench", [40], [10], [1.0]),  # 40
        record("fast", 3, "qa", [20], [5], [1.0], text="y"),  # 20
        record("fast", 3, "qa", [90], [5], [1.0], temperature=1.0),  # another table
    ]
    found = spec_bench.figures(records, 0.0)
    assert found["plain"]["overall"]["speedup"] == 1
    fast = found["fast"]
    assert fast["mt-bench"]["speedup"] == pytest.approx(60 / 40) and fast["qa"]["speedup"] == 1
    assert fast["overall"]["speedup"] == pytest.approx(80 / 60)
    assert fast["overall"]["tokens_per_second"] == pytest.approx(80 / 3)
    assert fast["mt-bench"]["mean_accepted_tokens"] == 60 / 20 and fast["overall"]["mean_accepted_tokens"] == 80 / 25
    assert (fast["overall"]["same_texts"], fast["overall"]["questions"]) == (2, 3)
    assert spec_bench.markdown(found).splitlines()[-1] == "| fast | 1.50 | 1.00 | 1.33 | 3.20 | 26.7 | 2 of 3 |"


class Machine:
    """A clock that runs by the tokens that are made, and two loops that make tokens on it."""

    def __init__(self, monkeypatch):
        self.now, self.calls, self.torch = 0, [], SimpleNamespace(manual_seed=lambda seed: None)
        monkeypatch.setattr(spec_bench.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(spec_bench, "prepare", self.prepare)

    def spend(self, what, count):
        self.calls.append(what)
        self.now += count

    def call(self, prompt, count, **settings):
        """What a peer does."""
        self.spend(count, count)
        return [1] * count, SimpleNamespace(times=[0] * (count + 1))

    def prepare(self, lm, prompts, **options):
        """A job, which can only be warmed up and run."""
        shape, metrics = (1, -(-len(prompts[0]) // 64) * 64), SimpleNamespace(num_steps=20)
        out = SimpleNamespace(tokens=[[1] * 30], metrics=[metrics])
        return SimpleNamespace(
            tokens=SimpleNamespace(shape=shape), chunk=64, warmup=lambda: self.spend("warmup", 1000),
            generate=lambda: self.spend("generate", 30) or out,
        )  # fmt: skip


def test_specjax_is_warmed_up_for_each_program_and_a_peer_once_by_a_few_tokens(monkeypatch):
    """A peer compiles nothing, and a turn takes it seconds. No warm-up counts as time of an answer."""
    machine = Machine(monkeypatch)
    asked = [([1] * 50, 0.0), ([1] * 60, 0.0), ([1] * 70, 0.0), ([1] * 70, 1.0), ([1] * 50, 0.0)]
    peer = spec_bench.Theirs("peer", "peer", machine, 30, [2])
    assert {peer.answer(prompt, temperature, 0)[1:] for prompt, temperature in asked} == {(30, 30)}
    assert machine.calls == [8, 30, 30, 30, 30, 30]
    machine.calls.clear()
    ours = spec_bench.Ours("ours", "ours", None)
    assert {ours.answer(prompt, temperature, 0)[1:] for prompt, temperature in asked} == {(20, 30)}
    new, known = ["warmup", "generate"], ["generate"]
    assert machine.calls == new + known + new + new + known


def test_questions_are_spread_over_each_task(questions, tmp_path):
    assert [q.question_id for q in read_questions(questions)] == [1, 3, 2, 4]
    many = [json.dumps({**QUESTIONS[1], "question_id": i}) for i in range(9)]
    (tmp_path / "many.jsonl").write_text("\n".join(many))
    assert [q.question_id for q in read_questions(tmp_path / "many.jsonl", 2)] == [0, 4]
    assert read_questions(questions)[0] == Question(1, "mt-bench", ("ab ab", "again"))
    for line, why in (('{"prompt": "a"}', 'no "turns"'), ('{"turns": ["a"]}', '"question_id" of its own'), ("", "no ")):
        (tmp_path / "bad.jsonl").write_text(line)
        with pytest.raises(ValueError, match=why):
            read_questions(tmp_path / "bad.jsonl")


def test_a_run_goes_on_where_it_was_stopped(questions, tmp_path, capsys, monkeypatch):
    """The second call asks only what is missing, and both print one table."""
    path, answers = tmp_path / "chat", tmp_path / "answers.jsonl"
    write_hf(path, {**HF, "vocab_size": 300, "max_position_embeddings": 256}, tokenizer=byte_level())
    module, ask = script("spec_bench"), spec_bench.ask
    args = ["--model", str(path), "--prompts", str(questions), "--per-task", "1", "--max-new-tokens", "6"]
    args += ["--temperature", "0", "--only", "prompt lookup, 3..2", "--answers", str(answers)]
    assert module.main([*args, "--json", str(tmp_path / "figures.json")]) == 0
    whole = capsys.readouterr().out
    assert "| specjax, plain | 1.00 | 1.00 | 1.00 | 1.00 |" in whole and "| prompt lookup, 3..2 |" in whole
    figures = json.loads((tmp_path / "figures.json").read_text())
    row = figures["temperatures"]["0"]["prompt lookup, 3..2"]
    assert set(row) == {"mt-bench", "qa", "overall"} and row["overall"]["same_texts"] == 2
    lines = answers.read_text().splitlines(keepends=True)
    assert len(lines) == 5
    answers.write_text("".join(lines[:-1]) + lines[-1][:20])  # as a process leaves the file that is killed
    asked = []
    monkeypatch.setattr(spec_bench, "ask", lambda *given: asked.append(given[2].name) or ask(*given))
    assert module.main(args) == 0 and asked == ["prompt lookup, 3..2"]
    assert len(answers.read_text().splitlines()) == 5
    assert module.main([*args, "--max-new-tokens", "7"]) == 2 and len(asked) == 1
    assert "the settings with which this file was begun" in capsys.readouterr().err


@pytest.mark.parametrize("args, named", [
    (["--alpha", "0.5"], "--alpha is for --planted"),
    (["--planted", "tiny", "tiny", "--draft-model", "x"], "brings its own draft model"),
    (["--per-task", "0"], "--per-task must be at least 1"),
])  # fmt: skip
def test_flags_that_would_do_nothing_are_refused(capsys, args, named):
    with pytest.raises(SystemExit):
        script("spec_bench").parse(["--prompts", "x", *args])
    assert named in capsys.readouterr().err


@pytest.mark.slow
def test_transformers_answers_are_those_of_specjax(questions, tmp_path, capsys):
    """Greedy, transformers' three ways say what specjax says, and drafts save target calls."""
    path, draft = tmp_path / "chat", tmp_path / "draft"
    for folder in (path, draft):
        # specjax gives no ids without a meaning, but transformers does, so there are none.
        size = len(byte_level())
        write_hf(folder, {**HF, "vocab_size": size, "max_position_embeddings": 256}, tokenizer=byte_level())
    args = ["--model", str(path), "--draft-model", str(draft), "--prompts", str(questions), "--max-new-tokens", "12"]
    args += ["--only", "prompt lookup, 3..2", "--peers", "--answers", str(tmp_path / "answers.jsonl")]
    assert script("spec_bench").main(args) == 0
    rows = [Record(**json.loads(line)) for line in (tmp_path / "answers.jsonl").read_text().splitlines()[1:]]
    greedy = {row.key[0::2]: row for row in rows if not row.temperature}
    names = sorted({row.drafter for row in rows if row.drafter.startswith("transformers")})
    assert [name.split(", ")[1] for name in names] == ["assisted", "plain", "prompt lookup"]
    for name in names:
        for question in (1, 2, 3, 4):
            assert greedy[name, question].turns == greedy["specjax, plain", question].turns
    calls = {name: sum(sum(row.decoding_steps) for row in rows if row.key[:2] == (name, 0.0)) for name in names}
    assert calls[names[0]] < calls[names[1]], "the draft is the target itself"
    assert any(row.temperature == 1 and row.drafter == names[0] for row in rows)
