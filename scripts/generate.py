"""Decodes prompts speculatively and shows how the drafts fared.

python scripts/generate.py --prompt "Why is the sky blue?" --chat
"""

import argparse
import itertools
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone that is not installed

import specjax
from specjax import display, memory, parallel, progress, record, timing, trace
from specjax.commandline import Parser, refusing
from specjax.compilation import compilation_cache_of_script
from specjax.drafters import choices
from specjax.generation import prepare
from specjax.models.quantized import KINDS, kind_of
from specjax.tokenizer import template_renderer
from specjax.verify import VERIFIERS

DEFAULT_PROMPT = "What is photosynthesis? Explain it in two sentences."


def parse(argv) -> argparse.Namespace:
    parser = Parser(description="Decodes prompts speculatively with a Llama-family model.")
    add = parser.add_argument
    add("--model", default="smollm2-135m-instruct", help="default model, folder, GGUF file or hub name (%(default)s)")
    add("--prompt", action="append", default=[], help="text to continue; repeat it for a batch")
    add("--prompt-file", action="append", default=[], type=Path, help="file that holds one prompt; may be repeated")
    add("--chat", action="store_true", help="wrap each prompt as a user's turn in the model's chat template")
    choices.add_flags(parser)
    add("--num-speculative-tokens", type=int, help="K, drafted tokens a round at most (3 of a trained drafter, else 5)")
    add("--verifier", choices=[name for name, v in VERIFIERS.items() if v.lossless], default="rejection")
    add("--max-new-tokens", type=int, default=128)
    add("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    add("--top-k", type=int)
    add("--top-p", type=float)
    add("--min-p", type=float)
    add("--repetition-penalty", type=float)
    add("--presence-penalty", type=float)
    add("--frequency-penalty", type=float)
    add("--no-repeat-ngram-size", type=int)
    add("--stop", action="append", help="text that ends a completion; may be repeated")
    add("--ignore-eos", action="store_true")
    add("--seed", type=int, default=0, help="prompt i uses seed + i (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights; float32 on CPU by default")
    add("--quantize", choices=KINDS, help="the target's weights in eight bits; --quantize-draft is the draft model's")
    add("--kv-dtype", choices=("int8",), help="the cache in eight bits")
    add("--devices", type=int, default=1, help="GPUs that share the target; a drafter is on each (%(default)s)")
    parser.add_compilation_cache()
    add("--stream", action=argparse.BooleanOptionalAction, help="print text as it is made (default for one prompt)")
    add("--compare", action="store_true", help="also decode plainly: both times, their ratio, same output or not")
    add("--trace", action="store_true", help="show each round: drafted tokens with q and p, and their fate")
    add("--profile", action="store_true", help="also time a plain step, a draft and a verification, each by itself")
    add("--memory", action="store_true", help="show how much memory weights and caches take, the drafter's too")
    add(
        "--json", nargs="?", const="-", metavar="FILE",
        help="write the record of the run to FILE (scripts/report.py makes a page of it); without FILE print it "
        "instead of text",
    )  # fmt: skip
    args = parser.parse_args(argv)
    try:
        choices.settle(args)
        if args.num_speculative_tokens is None:
            args.num_speculative_tokens = choices.CHOICES[args.drafter].size
    except ValueError as problem:
        parser.error(str(problem))
    if args.compare and args.drafter == "none":
        parser.error("--compare compares a drafter with plain decoding, so --drafter none leaves nothing to compare")
    if args.stream and (args.json == "-" or args.compare or args.trace):
        parser.error("--stream can't go with --json without FILE, --compare or --trace")
    if args.memory and args.json == "-":
        parser.error("--memory prints a line, so it can't go with --json without FILE")
    if args.compare and args.trace:
        parser.error("--compare and --trace can't go together: looking at each round takes time")
    parser.in_a_folder(args, "json")
    return args


SAMPLING = (
    "temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty no_repeat_ngram_size "
    "stop ignore_eos chat"
).split()


def options_of(lm: specjax.LM, args: argparse.Namespace) -> dict:
    """Keyword arguments of specjax.generate."""
    names = [*SAMPLING, "verifier", "num_speculative_tokens", "max_new_tokens", "seed"]
    return {"drafter": choices.build(lm, args), **{name: getattr(args, name) for name in names}}


def settings_of(lm: specjax.LM, args: argparse.Namespace, result: specjax.Result) -> dict:
    """specjax.record.SETTINGS."""
    return {
        "model": args.model,
        "dtype": lm.dtype.name,
        "quantize": kind_of(lm.params),
        "kv_dtype": lm.kv_dtype,
        "devices": 1 if lm.mesh is None else lm.mesh.size,
        "drafter": choices.settings(args),
        "verifier": args.verifier,
        "num_speculative_tokens": result.metrics[0].num_speculative_tokens,
        "sampling": {name: getattr(args, name) for name in SAMPLING},
        "max_new_tokens": None if args.max_new_tokens == -1 else args.max_new_tokens,
        "seed": args.seed,
    }


def read_prompts(args: argparse.Namespace) -> list[str]:
    prompts = args.prompt + [path.read_text(encoding="utf-8") for path in args.prompt_file]
    if not prompts:
        args.chat = True
        prompts = [DEFAULT_PROMPT]
    return prompts


def run(args: argparse.Namespace) -> None:
    demonstrates = not (args.prompt or args.prompt_file)
    prompts = read_prompts(args)
    compilation_cache_of_script(args.compilation_cache)
    mesh = None if args.devices == 1 else parallel.mesh(args.devices)
    with ThreadPoolExecutor(1) as pool:
        if args.chat:
            pool.submit(template_renderer)  # takes half a second to import, while the weights are read
        lm = specjax.load(args.model, args.dtype, args.quantize, args.kv_dtype, mesh)
    options = options_of(lm, args)
    size = prepare(lm, prompts, specjax.Options(**options)).num_speculative_tokens
    quiet = args.json == "-"
    if not quiet:  # to stderr: what reads the text gets the text
        print(display.heading(lm, args.model, choices.settings(args), size, prompts), file=sys.stderr, flush=True)
    result, rounds = decode(lm, prompts, options, args, quiet)
    times = {**result.seconds, "tokens_per_second": display.speed(result), "streamed": rounds is not None}
    times["streamed"] |= bool(args.stop)
    plain = None
    if args.compare:
        plain = compare(lm, prompts, options, result, times)
    if args.profile:
        with progress.waiting("timing the parts of a round"):
            times["calls"] = timing.calls(lm, prompts, **options)
    if args.json:
        found = record.run(result, prompts, settings_of(lm, args, result), times, lm.tokenizer, rounds)
        text = json.dumps(found, allow_nan=False)
        if quiet:
            print(text)
            return
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    if display.in_colour() and not args.trace:
        print("\n" + display.legend())
    print("\n" + display.summary(result), flush=True)
    if plain is not None:
        print(display.against_plain(result, plain, times))
    elif demonstrates and size:
        with progress.waiting("timing a plain step"):
            step = times["calls"]["plain_step"] if args.profile else timing.plain_step(lm, prompts, **options)
        print(display.against_plain_steps(result, step))
    if args.profile:
        print(display.calls_line(times["calls"]))
    if args.memory:
        sizes = memory.report(lm, prompts, **options)
        print("; ".join(f"{name.replace('_', ' ')} {size / 1e6:.1f} MB" for name, size in sizes.items()))


def decode(
    lm: specjax.LM, prompts: list[str], options: dict, args: argparse.Namespace, quiet: bool
) -> tuple[specjax.Result, list[list[dict]] | None]:
    """Decodes after a warm-up, and prints the text; the result, and the rounds if it was streamed."""
    several = len(prompts) > 1
    streamed = args.trace or (args.stream if args.stream is not None else not several and not quiet)
    streamed = streamed and not args.compare
    with progress.waiting("compiling, or fetching compiled programs"):
        specjax.warmup(lm, prompts, streaming=streamed, **options)
    rounds = None
    if streamed:
        events = specjax.stream(lm, prompts, **options)
        show(events, args, quiet, several)
        result, rounds = events.result(), events.trace
    else:
        with progress.waiting("decoding"):
            result = specjax.generate(lm, prompts, **options)
    if not quiet and (not streamed or args.trace or several):
        for i, text in enumerate(result.texts or []):
            if display.in_colour():
                text = display.painted(record.pieces_of(lm.tokenizer, result.tokens[i]), result.metrics[i].origins())
            print(f"--- {prompts[i]}\n{text}" if several else text)
    return result, rounds


def compare(lm: specjax.LM, prompts: list[str], options: dict, result: specjax.Result, times: dict) -> specjax.Result:
    """Decodes plainly too; adds what specjax.record.TIMING says of that."""
    options = {**options, "drafter": None}
    with progress.waiting("decoding plainly"):
        specjax.warmup(lm, prompts, **options)
        plain = specjax.generate(lm, prompts, **options)
    speed = display.speed(plain)
    times["plain"] = {**plain.seconds, "tokens_per_second": speed}
    times["ratio"] = display.speed(result) / speed if speed else None
    times["identical"] = result.tokens == plain.tokens
    return plain


def show(events: specjax.generation.Stream, args: argparse.Namespace, quiet: bool, several: bool) -> None:
    """Runs the stream, and prints its text or rounds as they come."""
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
            print_rounds(unread=1)  # the last one may not be read to its end
        elif not several:
            print(display.paint(event.text, event.origin) if colour else event.text, end="", flush=True)
    if args.trace and not quiet:
        print_rounds(unread=0)
    elif not args.trace:
        print()


def main(argv=None) -> int:
    """Exit code 0, or 2 and one sentence on stderr for what can't be done."""
    return refusing(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
