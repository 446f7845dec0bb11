"""A chat with a model in the terminal, with speculative decoding. Colours show where each token came from.

python scripts/chat.py
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone that is not installed

from cli import choices, display, model_flags
from cli.parser import Parser, refusing

import specjax
from specjax.generation.compilation import compilation_cache_of_script
from specjax.report import progress

HELP = """\
/temperature T    0 is greedy                     /seed N       the next answer's seed; each later one is one more
/top-p P          1 is off                        /drafter NAME ngram, none and others, as --drafter
/max N            the most tokens of an answer    /system TEXT  instructions before the conversation
/again            the last answer once more       /compare      the last answer, drafted and plain: times and texts
/new              forget the conversation         /save FILE    the conversation with its settings, as JSON
Ctrl-C ends an answer and keeps what there is; Ctrl-D leaves."""


def parse(argv) -> argparse.Namespace:
    """The settled arguments. If they can't be used, the process ends with one sentence."""
    parser = Parser(description="Chats with a model in the terminal.")
    add = parser.add_argument
    model_flags.add_all(parser)
    add("--system", help="instructions before the conversation")
    add("--temperature", type=float, default=0.7, help="0 is greedy (%(default)s)")
    add("--top-p", type=float, default=0.95, help="1 is off (%(default)s)")
    add("--seed", type=int, default=0, help="the first answer's seed (%(default)s)")
    add("--max-new-tokens", type=int, default=512, help="the most tokens of an answer (%(default)s)")
    add("--capacity", type=int, default=2048, help="the most tokens of the whole conversation (%(default)s)")
    args = parser.parse_args(argv)
    parser.at_least_one(args, "max_new_tokens", "capacity", "devices")
    try:
        model_flags.settle(args)
    except ValueError as problem:
        parser.error(str(problem))
    return args


class Chat:
    """A conversation, and the engine that answers. The engine's prefix cache knows the conversation so far.

    Args:
      args: the settled arguments.

    Raises:
      ValueError: the model has no chat template, or an argument can't be used.
    """

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.lm = model_flags.load_model(args)
        if self.lm.tokenizer is None or self.lm.tokenizer.chat_template is None:
            raise ValueError(f"{args.model} has no chat template and can't chat; scripts/generate.py continues a text")
        self.sampling = {"temperature": args.temperature, "top_p": args.top_p, "max_new_tokens": args.max_new_tokens}
        self.seed = args.seed
        self.messages: list[dict[str, str]] = []
        self.last: dict[str, Any] | None = None  # the arguments of the last answer's request
        self.engine = self.started(args)
        self.new(args.system)

    def started(self, args: argparse.Namespace) -> specjax.Engine:
        """An engine whose programs are compiled."""
        engine = specjax.Engine(
            self.lm, choices.build(self.lm, args), args.verifier, args.num_speculative_tokens, slots=1,
            capacity=args.capacity,
        )  # fmt: skip
        try:
            engine.warmup()
        except BaseException:
            engine.close(drain=False)
            raise
        return engine

    def new(self, system: str | None) -> None:
        """Forgets the conversation."""
        self.messages, self.last = ([{"role": "system", "content": system}] if system else []), None

    def say(self, text: str) -> None:
        """Adds what the user said, and answers. The conversation stays as it was if the request is refused."""
        given = {"prompt": [*self.messages, {"role": "user", "content": text}], "seed": self.seed, **self.sampling}
        if given["temperature"] == 0:
            given.pop("top_p")
        answer = self.answer(given)
        self.messages = [*given["prompt"], {"role": "assistant", "content": answer}]
        self.last, self.seed = given, self.seed + 1

    def answer(self, given: dict[str, Any]) -> str:
        """Runs a request, prints its text as it comes, and one line on its speed. Ctrl-C ends it. -> the text."""
        handle, began = self.engine.submit(**given), time.perf_counter()
        try:
            first = None
            for event in handle:
                first = first or time.perf_counter() - began
                text = display.paint(event.text, event.origin) if display.in_colour() else event.text
                print(text, end="", flush=True)
        except KeyboardInterrupt:
            handle.abort()
        result = handle.result()
        self.show_speed(result, handle, first or 0.0)
        return (result.texts or [""])[0].strip()

    def show_speed(self, result: specjax.Result, handle: specjax.Handle, first: float) -> None:
        """Prints one line on an answer: tokens, speed, acceptance, and what the prefix cache spared."""
        metrics, seed = result.metrics[0], result.seeds[0]
        ended = " (stopped)" if result.finish_reasons == ["abort"] else ""
        print(
            f"\n[{metrics.completion_tokens} tokens{ended}, {display.speed(result):.1f} tokens/s, "
            f"{metrics.tokens_per_step or 0:.2f} a step; first after {first:.2f} s; seed {seed}; "
            f"{handle.cached_tokens} of {len(handle.prompt_tokens)} prompt tokens were known]",
            file=sys.stderr,
        )

    def again(self) -> None:
        """Answers the last question again, with the same seed: the same text."""
        if self.last is None:
            raise ValueError("there is no answer yet")
        self.answer(self.last)

    def compare(self) -> None:
        """Decodes the last answer twice, drafted and plain, and prints the times."""
        if self.last is None:
            raise ValueError("there is no answer yet")
        given = {**self.last, "prompt": [self.last["prompt"]]}
        way = dict(
            drafter=choices.build(self.lm, self.args), verifier=self.args.verifier,
            num_speculative_tokens=self.args.num_speculative_tokens,
        )  # fmt: skip
        job = specjax.prepare(self.lm, given.pop("prompt"), **given, **way)
        found = {}
        for name, one in (("drafted", job), ("plain", job.plain())):
            with progress.waiting(f"decoding, {name}"):
                one.warmup()
                found[name] = one.generate()
        times = {name: run.seconds["decode"] for name, run in found.items()}
        same = "same text" if found["drafted"].tokens == found["plain"].tokens else "another text of the same law"
        print(
            f"[drafted {times['drafted']:.2f} s, plain {times['plain']:.2f} s: {times['plain'] / times['drafted']:.2f} "
            f"times as fast; {same}]",
            file=sys.stderr,
        )

    def use_drafter(self, name: str) -> None:
        """Changes the drafter. The conversation stays. The old engine stays too, until the new one is ready."""
        args = model_flags.with_drafter(self.args, name)
        with progress.waiting("compiling"):
            made = self.started(args)
        self.engine.close(drain=False)
        self.engine, self.args = made, args

    def save(self, path: str) -> None:
        """Writes the conversation and its settings as JSON."""
        about = {"model": self.args.model, "drafter": choices.settings(self.args), "next_seed": self.seed}
        text = json.dumps({**about, "sampling": self.sampling, "messages": self.messages}, indent=1, ensure_ascii=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    def obey(self, line: str) -> None:
        """Runs one command. Raises ValueError if there is no such command, or its value can't be used."""
        name, _, value = line.partition(" ")
        value = value.strip()
        commands: dict[str, Callable[[], Any]] = {
            "/temperature": lambda: self.sampling.update(temperature=number(float, name, value)),
            "/top-p": lambda: self.sampling.update(top_p=number(float, name, value)),
            "/max": lambda: self.sampling.update(max_new_tokens=number(int, name, value)),
            "/seed": lambda: setattr(self, "seed", number(int, name, value)),
            "/drafter": lambda: self.use_drafter(value),
            "/system": lambda: self.new(value),
            "/again": self.again,
            "/compare": self.compare,
            "/new": lambda: self.new(None),
            "/save": lambda: self.save(shlex.split(value)[0] if value else "chat.json"),
            "/help": lambda: print(HELP, file=sys.stderr),
        }
        if name not in commands:
            raise ValueError(f"there is no command {name}; /help lists them")
        commands[name]()


def number(kind: type, command: str, value: str) -> Any:
    """The number of a command. Raises ValueError if there is none."""
    try:
        return kind(value)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise ValueError(f"{command} takes {wanted}, got {value!r}") from None


def talk(chat: Chat) -> None:
    """Reads lines from the user until there are no more. What can't be done is said in one line."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        try:
            if line.startswith("/"):
                chat.obey(line)
            elif line:
                chat.say(line)
        except (OSError, ValueError) as problem:
            print(f"[{problem}]", file=sys.stderr)
        except KeyboardInterrupt:
            print("[stopped]", file=sys.stderr)


def run(args: argparse.Namespace) -> None:
    compilation_cache_of_script(args.compilation_cache)
    with progress.waiting(f"loading {args.model} and compiling"):
        chat = Chat(args)
    try:
        print(f"{args.model}, drafter {args.drafter}; /help lists the commands", file=sys.stderr)
        if display.in_colour():
            print(display.legend(), file=sys.stderr)
        talk(chat)
    finally:
        chat.engine.close(drain=False)


def main(argv=None) -> int:
    """Runs the script. -> exit code 0; 2, after one sentence on stderr, for a request that can't be met."""
    return refusing(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
