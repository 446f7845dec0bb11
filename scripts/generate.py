"""Decodes prompts speculatively, and shows how many drafted tokens were accepted.

python scripts/generate.py --prompt "Why is the sky blue?" --chat
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone that is not installed

from cli import beams, choices, display, distributed_flags, model_flags
from cli.generate_flags import SAMPLING, parse
from cli.parser import refusing

import specjax
from specjax.distributed import Replica
from specjax.generation import options as options_room
from specjax.generation import trace
from specjax.generation.compilation import compilation_cache_of_script
from specjax.generation.stream import Stream
from specjax.measure import timing
from specjax.models.quantized import kind_of
from specjax.report import progress, record

DEFAULT_PROMPT = "What is photosynthesis? Explain it in two sentences."


def options_of(lm: specjax.LM, args: argparse.Namespace) -> dict:
    """The keyword arguments of ``specjax.prepare``."""
    names = [*SAMPLING, "date", "verifier", "num_speculative_tokens", "block_width", "max_new_tokens", "seed",
             *options_room.OF_BEAMS]  # fmt: skip
    logprobs = False if args.logprobs is None else args.logprobs
    given = {name: getattr(args, name) for name in names}
    return {"drafter": choices.build(lm, args), "logprobs": logprobs, **given, "temperature": args.temperature or 0.0}


def greedy_note(args: argparse.Namespace) -> None:
    """Prints a note if the user gave filters but no temperature: the filters then have no effect."""
    asked = specjax.Options(top_k=args.top_k, top_p=args.top_p, min_p=args.min_p)
    unused = options_room.filters_without_effect(asked)
    if args.temperature is None and unused:
        flags = " and ".join("--" + name.replace("_", "-") for name in unused)
        print(f"note: {flags} without --temperature: decoding is greedy, so this has no effect", file=sys.stderr)


def settings_of(lm: specjax.LM, args: argparse.Namespace, result: specjax.Result) -> dict:
    """The settings for a record, with the keys of ``specjax.record.SETTINGS``."""
    return {
        "model": args.model,
        "dtype": lm.dtype.name,
        "quantize": kind_of(lm.params),
        "kv_dtype": lm.kv_dtype,
        "devices": 1 if lm.mesh is None else lm.mesh.size,
        "drafter": choices.settings(args),
        "verifier": args.verifier,
        "num_speculative_tokens": result.metrics[0].num_speculative_tokens,
        "block_width": args.block_width,
        "sampling": {**{name: getattr(args, name) for name in SAMPLING}, "temperature": args.temperature or 0.0},
        "max_new_tokens": None if args.max_new_tokens == -1 else args.max_new_tokens,
        "seed": args.seed,
    }


def text_of(path: Path) -> str:
    """The text of a file. Raises ValueError, which names the file, if the file is no UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise ValueError(f"{path} is no text in UTF-8: {problem}") from problem


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of the flags and files. Without any: the default prompt, in the chat template."""
    prompts = args.prompt + [text_of(path) for path in args.prompt_file]
    if not prompts:
        args.chat = True
        prompts = [DEFAULT_PROMPT]
    return prompts


def run(args: argparse.Namespace) -> None:
    with distributed_flags.joined(args) as replica:
        run_here(args, replica)


def run_here(args: argparse.Namespace, replica: Replica | None) -> None:
    """Runs the script in one process. All processes of a replica run the same."""
    demonstrates = not (args.prompt or args.prompt_file)
    prompts, args.seed = distributed_flags.agreed(replica, [read_prompts(args), args.seed])
    compilation_cache_of_script(args.compilation_cache)
    lm = model_flags.load_model(args)
    if args.num_beams != 1:
        distributed_flags.compare(replica, beams.run(lm, prompts, options_of(lm, args), args).tokens)
        return
    job = specjax.prepare(lm, prompts, **options_of(lm, args))
    size, quiet = job.decoder.num_speculative_tokens, args.json == "-"
    if not quiet:  # the heading goes to stderr, so that a program that reads stdout gets the text alone
        print(display.heading(lm, args.model, choices.settings(args), size, prompts), file=sys.stderr, flush=True)
    greedy_note(args)
    result, rounds = decode(job, prompts, args, quiet)
    distributed_flags.compare(replica, result.tokens)
    times = {**result.seconds, "tokens_per_second": display.speed(result), "streamed": rounds is not None}
    times["streamed"] |= bool(args.stop)
    plain = compare(job, result, times) if args.compare else None
    if args.profile:
        with progress.waiting("timing the parts of a round"):
            times["calls"] = timing.calls(job)
    if args.json and not distributed_flags.follows(replica):
        found = record.run(result, prompts, settings_of(lm, args, result), times, lm.tokenizer, rounds)
        text = json.dumps(found, allow_nan=False)
        if quiet:
            print(text)
            return
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    show_record(job, args, result, plain, times, demonstrates and size > 0)


def show_record(
    job: specjax.Job,
    args: argparse.Namespace,
    result: specjax.Result,
    plain: specjax.Result | None,
    times: dict,
    estimates: bool,
) -> None:
    """Prints the lines under the text.

    Args:
      job: the job that ran.
      args: the settled arguments.
      result: the result of the run.
      plain: the result of plain decoding, or None without --compare.
      times: the times for a record, with the keys of ``specjax.record.TIMING``.
      estimates: whether to time a plain step and to estimate the time of plain decoding.
    """
    if display.in_colour() and not args.trace:
        print("\n" + display.legend())
    print("\n" + display.summary(job.decoder.target, result), flush=True)
    if result.date and not args.date:
        print(f"the chat template was told that today is {result.date}; --date {result.date} repeats this another day")
    if plain is not None:
        print(display.against_plain(result, plain, times))
    elif estimates:
        with progress.waiting("timing a plain step"):
            step = times["calls"]["plain_step"] if args.profile else timing.plain_step(job)
        print(display.against_plain_steps(result, step))
    if args.profile:
        print(display.calls_line(times["calls"]))
    if args.memory:
        print("; ".join(f"{name.replace('_', ' ')} {size / 1e6:.1f} MB" for name, size in job.memory().items()))


def decode(
    job: specjax.Job, prompts: list[str], args: argparse.Namespace, quiet: bool
) -> tuple[specjax.Result, list[list[dict]] | None]:
    """Decodes after a warm-up, and prints the text. -> the result, and the rounds of a streamed run, else None."""
    several = len(prompts) > 1
    streamed = args.trace or (args.stream if args.stream is not None else not several and not quiet)
    streamed = streamed and not args.compare
    with progress.waiting("compiling, or fetching compiled programs"):
        job.warmup(streaming=streamed)
    rounds = None
    if streamed:
        events = job.stream()
        show(events, args, quiet, several)
        result, rounds = events.result(), events.trace
    else:
        with progress.waiting("decoding"):
            result = job.generate()
    if not quiet and (not streamed or args.trace or several):
        for i, text in enumerate(result.texts or []):
            if display.in_colour():
                pieces = record.pieces_of(job.decoder.target.tokenizer, result.tokens[i])
                text = display.painted(pieces, result.metrics[i].origins())
            print(f"--- {prompts[i]}\n{text}" if several else text)
    return result, rounds


def compare(job: specjax.Job, result: specjax.Result, times: dict) -> specjax.Result:
    """Decodes plainly too, and adds the keys ``plain``, ``ratio`` and ``identical`` to ``times``."""
    plain_job = job.plain()
    with progress.waiting("decoding plainly"):
        plain_job.warmup()
        plain = plain_job.generate()
    speed = display.speed(plain)
    times["plain"] = {**plain.seconds, "tokens_per_second": speed}
    times["ratio"] = display.speed(result) / speed if speed else None
    times["identical"] = result.tokens == plain.tokens
    return plain


def show(events: Stream, args: argparse.Namespace, quiet: bool, several: bool) -> None:
    """Runs the stream, and prints its text or its rounds as soon as they are there."""
    shown, colour = [0] * len(events.trace), display.in_colour()

    def print_rounds(unread: int) -> None:
        for row, entries in enumerate(events.trace):
            for entry in entries[shown[row] : len(entries) - unread]:
                label = f"[{row}] " if several else ""
                print(label + trace.line(entry, colour), flush=True)
                shown[row] += 1

    with progress.waiting("reading the prompt"):
        first = list(itertools.islice(events, 1))
    for event in itertools.chain(first, events):
        if quiet:
            continue
        if args.trace:
            print_rounds(unread=1)  # the tokens of the last round may not all be read yet
        elif not several:
            print(display.paint(event.text, event.origin) if colour else event.text, end="", flush=True)
    if args.trace and not quiet:
        print_rounds(unread=0)
    elif not args.trace:
        print()


def main(argv=None) -> int:
    """Runs the script. -> exit code 0; 2, after one sentence on stderr, for a request that can't be met."""
    return refusing(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
