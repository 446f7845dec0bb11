"""Spec-Bench as its authors run it: questions of one or two turns, answered one at a time, and their figures.

Xia et al. 2024, "Unlocking Efficiency in Large Language Model Inference", section 6; the rules are those of the code at
github.com/hemingkx/Spec-Bench, commit fd2c1cd:

- The prompt is the chat template. The second turn sees the first answer, as text without special tokens.
- The time of an answer is the wall time of the whole call, prefill included.
- The speed on a task is the mean over its questions of new tokens over seconds, both turns added up. The speedup is
  this speed over that of plain decoding.
- Mean accepted tokens are the new tokens of a target call, over all calls of all questions.
"""

import dataclasses
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from specjax.generation.generate import prepare
from specjax.models.lm import LM
from specjax.offline.json_lines import JsonLines

BEGINNING = '{"drafter": '  # of every line of answers


@dataclasses.dataclass(frozen=True)
class Question:
    """A question of the benchmark."""

    # The number of the question.
    question_id: int
    # The task that the question belongs to.
    task: str
    # What the user says, turn by turn.
    turns: tuple[str, ...]


class Answer(NamedTuple):
    """What was said in one turn."""

    # The new tokens.
    tokens: list[int]
    # The number of target calls.
    steps: int
    # The wall time of the call, prefill included.
    seconds: float


class Contestant(Protocol):
    """One way to decode. ``plain`` is the name of the plain decoding that the speedup is over."""

    name: str
    plain: str

    def answer(self, prompt: list[int], temperature: float, seed: int) -> Answer:
        """The answer to a prompt. Whatever must be compiled for it is compiled before the clock starts."""
        ...


class Ours:
    """specjax with one drafter.

    Args:
      name: the name in the table.
      plain: the name of specjax's plain decoding in the table.
      lm: the target.
      **options: fields of :class:`specjax.Options`.
    """

    def __init__(self, name: str, plain: str, lm: LM, **options: Any):
        self.name, self.plain, self._lm, self._options = name, plain, lm, options
        self._warm: set[Any] = set()

    def answer(self, prompt: list[int], temperature: float, seed: int) -> Answer:
        began = time.perf_counter()
        job = prepare(self._lm, [prompt], temperature=temperature, seed=seed, **self._options)
        programs = job.tokens.shape, job.chunk, temperature
        if programs not in self._warm:
            job.warmup()
            self._warm.add(programs)
            return self.answer(prompt, temperature, seed)
        out = job.generate()
        return Answer(out.tokens[0], out.metrics[0].num_steps, time.perf_counter() - began)


class Theirs:
    """transformers' ``generate`` on the same weights.

    Args:
      name: the name in the table.
      plain: the name of transformers' plain decoding in the table.
      peer: a :class:`specjax.measure.benchmark.peers.hugging_face.Transformers` that holds the weights.
      count: the most new tokens of an answer.
      stops: the ids that end an answer.
      **helper: the settings of ``generate`` that choose how it drafts.
    """

    def __init__(self, name: str, plain: str, peer: Any, count: int, stops: Sequence[int], **helper: Any):
        self.name, self.plain, self._peer, self._count = name, plain, peer, count
        self._settings = dict(helper, eos_token_id=list(stops) or None)
        self._warm = False

    def answer(self, prompt: list[int], temperature: float, seed: int) -> Answer:
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if not self._warm:  # a few tokens load all that there is to load: eager PyTorch compiles nothing
            self._peer.call(prompt, min(self._count, 8), **self._settings, **sampling)
            self._warm = True
        self._peer.torch.manual_seed(seed)
        began = time.perf_counter()
        tokens, clock = self._peer.call(prompt, self._count, **self._settings, **sampling)
        # The streamer gets the prompt first, and then the tokens of each call.
        return Answer(tokens, len(clock.times) - 1, time.perf_counter() - began)


@dataclasses.dataclass(frozen=True)
class Record:
    """One contestant's answers to one question. The names of the counts are those of the authors' files."""

    drafter: str
    plain: str
    temperature: float
    question_id: int
    task: str
    # The texts of the answers, and for each turn: new tokens, target calls, seconds.
    turns: list[str]
    new_tokens: list[int]
    decoding_steps: list[int]
    wall_time: list[float]

    @property
    def key(self) -> tuple[str, float, int]:
        return self.drafter, self.temperature, self.question_id

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return sum(self.new_tokens) / sum(self.wall_time)


def ask(lm: LM, question: Question, contestant: Contestant, temperature: float, seed: int = 0) -> Record:
    """Asks one question, turn by turn.

    Args:
      lm: the model, whose tokenizer has a chat template.
      question, contestant, temperature: who is asked what, and how.
      seed: the seed of each turn. The authors' is 0.
    """
    messages: list[dict[str, str]] = []
    answers: list[Answer] = []
    for turn in question.turns:
        messages.append({"role": "user", "content": turn})
        answers.append(contestant.answer(lm.tokenizer.apply_chat_template(messages), temperature, seed))  # type: ignore[union-attr]
        messages.append({"role": "assistant", "content": lm.tokenizer.decode(answers[-1].tokens).strip()})  # type: ignore[union-attr]
    return Record(
        contestant.name, contestant.plain, temperature, question.question_id, question.task,
        [message["content"] for message in messages[1::2]], [len(a.tokens) for a in answers],
        [a.steps for a in answers], [a.seconds for a in answers],
    )  # fmt: skip


class Records:
    """The records of a run, in a file of JSON lines, so that a run that was stopped goes on.

    Args:
      path: the file. None: the records are in memory alone.
      about: the settings of the run. They stand in the first line.

    Raises:
      ValueError: the file holds other lines than records, or the records of a run with other settings.
    """

    def __init__(self, path: Path | None, about: dict[str, Any]):
        self.found: dict[tuple[str, float, int], Record] = {}
        self._lines = None if path is None else JsonLines(path, BEGINNING, lambda one: self._keep(Record(**one)), about)

    def _keep(self, record: Record) -> None:
        self.found[record.key] = record

    def add(self, record: Record) -> None:
        self._keep(record)
        if self._lines is not None:
            self._lines.add(dataclasses.asdict(record))


def figures(records: Iterable[Record], temperature: float) -> dict[str, dict[str, dict[str, float]]]:
    """The figures of each contestant, by task and "overall".

    Returns:
      drafter -> task -> "speedup", "mean_accepted_tokens", "tokens_per_second", "questions" and "same_texts": how many
      questions have the very texts that plain decoding has. All questions weigh the same in "overall".
    """
    rows: dict[str, dict[str, dict[int, Record]]] = {}
    for record in records:
        if record.temperature == temperature:
            for task in (record.task, "overall"):
                rows.setdefault(record.drafter, {}).setdefault(task, {})[record.question_id] = record
    return {
        name: {task: _figures(list(own.values()), rows[_plain(own)][task]) for task, own in tasks.items()}
        for name, tasks in rows.items()
    }


def _plain(own: dict[int, Record]) -> str:
    return next(iter(own.values())).plain


def _figures(own: list[Record], plain: dict[int, Record]) -> dict[str, float]:
    """The figures of one contestant on some questions, beside plain decoding on the same questions."""
    speed = sum(record.speed for record in own) / len(own)
    return {
        "speedup": speed * len(own) / sum(plain[record.question_id].speed for record in own),
        "mean_accepted_tokens": sum(sum(r.new_tokens) for r in own) / sum(sum(r.decoding_steps) for r in own),
        "tokens_per_second": speed,
        "questions": len(own),
        "same_texts": sum(record.turns == plain[record.question_id].turns for record in own),
    }


def markdown(found: dict[str, dict[str, dict[str, float]]], same_texts: bool = True) -> str:
    """The table: a row for each contestant, the speedup by task and overall, mean accepted tokens, and tokens/s.

    Args:
      found: the figures, from :func:`figures`.
      same_texts: whether a last column says how many texts are those of plain decoding. Sampled texts differ.
    """
    tasks = [task for task in next(iter(found.values())) if task != "overall"]
    header = ["drafter", *tasks, "overall", "mean accepted tokens", "tokens/s", *["same texts"] * same_texts]
    rows = [header, ["---"] * len(header)]
    for name, by_task in found.items():
        whole = by_task["overall"]
        speedups = [f"{by_task[task]['speedup']:.2f}" for task in (*tasks, "overall")]
        same = [f"{whole['same_texts']} of {whole['questions']}"] * same_texts
        rows.append([
            name, *speedups, f"{whole['mean_accepted_tokens']:.2f}", f"{whole['tokens_per_second']:.1f}", *same
        ])  # fmt: skip
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
