"""Trains a target and its drafts from scratch on a text: GPT-2s that continue it, or T5s that reverse its lines.

python scripts/train_pair.py --presets 97m 6m --text wikipedia.txt --out pair
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone that is not installed

import jax
from cli.parser import Parser, refusing

from convert import hugging_face
from specjax.generation.compilation import compilation_cache_of_script
from specjax.models.t5_config import T5Config
from specjax.report.progress import say
from specjax.text.tokenizer import Tokenizer
from specjax.training import loop, text_rows
from specjax.training.presets import PRESETS
from specjax.training.text_rows import Passages
from specjax.training.texts import Texts
from specjax.training.train_text import TextObjective

PROMPTS, CORPUS = 64, 20_000  # the most held-out prompts that are written, and the most rows of a T5 in the corpus


def parse(argv=None) -> argparse.Namespace:
    """The checked arguments. Exits with one sentence for bad ones."""
    parser = Parser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--presets", nargs="+", choices=PRESETS, required=True, metavar="NAME",
        help=f"the models, all GPT-2s or all T5s: {', '.join(PRESETS)}")  # fmt: skip
    add("--text", nargs="+", type=Path, required=True, metavar="FILE", help="texts in UTF-8; 5 %% are held out")
    add("--out", type=Path, required=True, metavar="FOLDER",
        help="gets a model folder for each preset, prompts.jsonl (held out) and corpus.txt (for n-grams)")  # fmt: skip
    add("--vocab", type=int, default=8192, help="tokens of the tokenizer, which all models share (%(default)s)")
    add("--row-tokens", type=int, default=256, help="tokens of a row; of a T5 the source is half of it (%(default)s)")
    add("--context", type=int, default=512, help="positions of a GPT-2, or the longest source and text (%(default)s)")
    add("--steps", type=int, default=600, help="training steps of each model (%(default)s)")
    add("--batch", type=int, default=64, help="rows of a training step (%(default)s)")
    add("--every", type=int, default=100, help="steps between measurements (%(default)s)")
    add("--seconds", type=float, default=float("inf"), help="most seconds of training of each model")
    add("--dtype", choices=("float32", "bfloat16"), help="dtype of the arithmetic and of the saved weights; "
        "bfloat16 by default, on a CPU float32")  # fmt: skip
    add("--seed", type=int, default=0, help="seed of the weights and of the order of the rows (%(default)s)")
    add("--checkpoints", type=Path, metavar="FOLDER", help="a run that was cut short goes on from there")
    parser.add_compilation_cache()
    args = parser.parse_args(argv)
    parser.at_least_one(args, "steps", "batch", "every")
    if args.row_tokens < 16:
        parser.error(f"--row-tokens must be at least 16, got {args.row_tokens}")
    families = {PRESETS[name].family for name in args.presets}
    if len(families) > 1:
        parser.error(f"--presets {' '.join(args.presets)} are of two families, which read texts otherwise; choose one")
    if args.context < args.row_tokens:
        parser.error(f"--context {args.context} must hold a row, which has --row-tokens {args.row_tokens}")
    args.reverses = families == {T5Config}
    args.dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    return args


def rows_of(args: argparse.Namespace, texts: list[str], tokenizer: Tokenizer) -> Texts:
    """The rows of some passages. Raises ValueError if there is none."""
    make = text_rows.reversal_rows if args.reverses else text_rows.plain_rows
    rows = make(texts, tokenizer, args.row_tokens)
    if not len(rows.tokens):
        raise ValueError(f"the text gives no row of {args.row_tokens} tokens; give more text or another --row-tokens")
    return rows


def write_texts(args: argparse.Namespace, texts: Passages, tokenizer: Tokenizer, rows: Texts, held_out: Texts) -> None:
    """Writes ``prompts.jsonl``, beginnings of held-out passages or held-out sources, and ``corpus.txt``.

    The corpus is text that the models learn to say.
    """

    def pairs(rows: Texts):
        return zip(rows.tokens, rows.own, strict=True)

    if args.reverses:
        prompts = [tokenizer.decode(row[: own.argmax()]) for row, own in pairs(held_out)]
        corpus = [tokenizer.decode(row[own]) for row, own in pairs(rows.rows(slice(CORPUS)))]
    else:
        ids = [tokenizer.encode(passage)[: args.row_tokens // 4] for passage in texts.held_out]
        prompts, corpus = [tokenizer.decode(x).rsplit(maxsplit=1)[0] for x in ids], texts.training
    lines = (json.dumps({"prompt": prompt.strip()}, ensure_ascii=False) + "\n" for prompt in prompts[:PROMPTS])
    (args.out / "prompts.jsonl").write_text("".join(lines), "utf-8")
    (args.out / "corpus.txt").write_text("\n".join(corpus), "utf-8")


def train(args: argparse.Namespace, name: str, tokenizer: Tokenizer, training: Texts, held_out: Texts) -> None:
    """Trains the model of a preset, and writes its folder."""
    preset = PRESETS[name]
    config = preset.config(tokenizer.vocab_size, tokenizer.eos_id, args.context)
    objective = TextObjective(config, args.dtype)
    recipe = loop.Recipe(args.steps, args.batch, preset.learning_rate, weight_decay=0.1, seed=args.seed)
    weights = jax.tree.leaves(jax.eval_shape(lambda: objective.init(0)))
    say(f"{name}: {sum(x.size for x in weights):,} weights; {recipe}")
    params, curve = loop.train(
        objective, None, training, held_out, recipe, args.checkpoints and args.checkpoints / name, args.every,
        args.seconds, progress=lambda curve: say(f"{name} {json.dumps(curve[-1])}"),
    )  # fmt: skip
    hugging_face.save(args.out / name, dataclasses.replace(objective.lm(params), tokenizer=tokenizer))
    (args.out / name / loop.CURVE).write_text(json.dumps(curve, indent=1) + "\n", "utf-8")


def run(args: argparse.Namespace) -> None:
    compilation_cache_of_script(args.compilation_cache)
    texts = text_rows.passages("\n".join(path.read_text("utf-8") for path in args.text))
    tokenizer = text_rows.train_tokenizer(texts.training, args.vocab)
    training, held_out = (rows_of(args, part, tokenizer) for part in texts)
    held_out = held_out.shuffled(args.seed).rows(slice(0, 2 * args.batch))
    args.out.mkdir(parents=True, exist_ok=True)
    write_texts(args, texts, tokenizer, training, held_out)
    about = f"vocabulary {tokenizer.vocab_size}; {args.dtype}, {jax.devices()[0].device_kind}, jax {jax.__version__}"
    say(f"{len(texts.training)} passages, {len(training.tokens)} rows, {training.own_tokens} tokens to learn, {about}")
    for name in args.presets:
        train(args, name, tokenizer, training, held_out)


def main(argv=None) -> int:
    """Runs the script. -> exit code 0; 2, after one sentence on stderr, for a request that can't be met."""
    return refusing(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
