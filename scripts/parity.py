"""Compares speculative with plain greedy decoding in a dtype: where the outputs part, and how near the top logits are.

    python scripts/parity.py --dtype bfloat16 --prompt-file prompts.jsonl --prompts 10

This checks claims A to C and E of docs/exactness.md. The exit code is 1 if a claim that is promised for this dtype does
not hold, and 2 for bad input.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone that is not installed

import jax
import jax.numpy as jnp
import numpy as np
from cli.parser import Parser, refusing
from cli.prompt_files import read_prompts

import specjax
from specjax.decode.types import Drafter
from specjax.drafters import DraftModel, PromptLookup
from specjax.generation.compilation import compilation_cache_of_script
from specjax.models.model import check_no_encoder
from specjax.testing.muted import Muted

PROMPTS = (
    "Write three sentences about the sea.",
    "Translate to French: The weather is nice today.",
    "What is the capital of Italy, and what is it known for?",
    "List five animals that live in water.",
)


def texts_of(path: Path | None, count: int, skip: int) -> list[str]:
    """The first ``count`` prompts: of the built-in ones, or of every ``skip``-th of a file."""
    found = PROMPTS if path is None else [prompt for _, prompt in read_prompts(path)][::skip]
    return list(found)[:count]


@jax.jit
def teacher_forced(lm: specjax.LM, tokens: jax.Array) -> jax.Array:
    """The logits after each of tokens i32[L]. -> f32[L, V]."""
    return lm(tokens[None], lm.alloc_cache(1, tokens.shape[0])).logits[0]


def gaps(lm: specjax.LM, prompt: list[int], new: list[int], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Gaps between teacher-forced logits at each new token.

    Args:
      lm: the model.
      prompt: the prompt's token ids.
      new: the n new tokens.
      size: the sequence is padded to this length, so that all calls share one program.

    Returns:
      f32[n], the best logit minus the new token's logit; and f32[n], the best logit minus the second best one.
    """
    tokens = prompt + new
    padded = tokens + [0] * (size - len(tokens))
    logits = np.asarray(teacher_forced(lm, jnp.asarray(padded)))[len(prompt) - 1 : len(tokens) - 1]
    top = np.sort(np.partition(logits, -2, axis=-1)[:, -2:], axis=-1)
    return top[:, 1] - logits[np.arange(len(new)), new], top[:, 1] - top[:, 0]


def compare(
    lm: specjax.LM, prompts: list[list[int]], ours: list[list[int]], theirs: list[list[int]], size: int
) -> dict:
    """Where two sets of outputs part.

    Returns:
      "rows", the number of prompts; and "parted", for each row that differs: the row, the index of the first different
      new token, and the gap between the two best logits there.
    """
    parted = []
    for row, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        where = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if where is None and len(a) != len(b):
            where = min(len(a), len(b))
        if where is not None:
            gap = gaps(lm, prompts[row], a[: where + 1], size)[1][-1] if where < len(a) else float("nan")
            parted.append((row, where, float(gap)))
    return {"rows": len(ours), "parted": parted}


def transformers_greedy(lm: specjax.LM, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The new tokens of each prompt by greedy decoding with transformers' model of the family on the same weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from convert.llama_weights import iter_hf
    from specjax.models.configs import to_hf

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**to_hf(lm.config))).eval()
    weights = {n: torch.from_numpy(np.array(w, np.float32)) for n, w in iter_hf(lm.config, lm.params)}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"transformers names other tensors: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        stop = list(lm.config.eos_token_ids) or None
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
                             eos_token_id=stop, pad_token_id=0)  # fmt: skip
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def parse(argv) -> argparse.Namespace:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--prompt-file", type=Path, help="JSON lines with 'turns' or 'prompt', or one prompt a line")
    parser.add_argument("--prompts", type=int, default=10, help="how many prompts, decoded as one batch")
    parser.add_argument("--every", type=int, default=1, help="take every n-th prompt of the file")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-speculative-tokens", type=int, default=5)
    parser.add_argument("--transformers", action="store_true", help="also compare with transformers (needs torch)")
    parser.add_argument(
        "--margin", type=float, default=0.5, help="claim C: the largest tolerated gap to the best logit"
    )
    parser.add_compilation_cache()
    return parser.parse_args(argv)


class Report:
    """Prints one line for each comparison, and keeps whether all promised claims held so far."""

    def __init__(self):
        self.held = True

    def add(self, name: str, result: dict, promised: bool) -> None:
        """Prints the result of :func:`compare`. If identical output is promised, a difference breaks a claim."""
        self.held = self.held and not (promised and result["parted"])
        where = "; ".join(f"row {r} at {w}, top-2 gap {g:.4f}" for r, w, g in result["parted"][:6])
        verdict = "identical" if not result["parted"] else f"{len(result['parted'])} of {result['rows']} part: {where}"
        print(f"{name:<58} {verdict}", flush=True)

    def add_margin(self, name: str, distances: np.ndarray, margin: float) -> None:
        """Prints how far the tokens' logits are below the best ones. Claim C: no distance is above ``margin``."""
        flips, worst = int((distances > 0).sum()), float(distances.max())
        self.held = self.held and worst <= margin
        print(
            f"   {name}: {flips} of {distances.size} tokens aren't the teacher-forced argmax; largest gap {worst:.4f}"
        )


def run(args: argparse.Namespace) -> int:
    compilation_cache_of_script(args.compilation_cache)
    lm = specjax.load(args.model, dtype=args.dtype)
    check_no_encoder(lm, "scripts/parity.py")
    texts = texts_of(args.prompt_file, args.prompts, args.every)
    common = {
        "max_new_tokens": args.max_new_tokens,
        "num_speculative_tokens": args.num_speculative_tokens,
        "chat": lm.tokenizer.chat_template is not None,
    }
    plain = specjax.generate(lm, texts, **common)
    width = args.num_speculative_tokens + 1
    padded = specjax.generate(lm, texts, block_width=width, **common)
    prompts = plain.prompt_tokens
    size = max(map(len, prompts)) + args.max_new_tokens
    device = jax.devices()[0]
    print(f"{args.model}, {args.dtype}, {device.device_kind}, jax {jax.__version__}: {len(texts)} prompts of "
          f"{min(map(len, prompts))} to {max(map(len, prompts))} tokens, {args.max_new_tokens} new, "
          f"K = {args.num_speculative_tokens}")  # fmt: skip
    report, exact = Report(), args.dtype == "float32"

    def compare_drafter(name: str, drafter: Drafter) -> None:
        loud, silent = (
            specjax.generate(lm, texts, drafter=Muted(drafter, jnp.array(speaks)), **common).tokens
            for speaks in (True, False)
        )
        against_itself = compare(lm, prompts, loud, silent, size)
        report.add(f"A  {name}, against the same executable one by one", against_itself, promised=True)
        drafted = specjax.generate(lm, texts, drafter=drafter, **common).tokens
        against_plain = compare(lm, prompts, drafted, plain.tokens, size)
        report.add(f"{'B' if exact else 'C'}  {name}, against plain decoding", against_plain, promised=exact)
        one_width = specjax.generate(lm, texts, drafter=drafter, block_width=width, **common).tokens
        against_padded = compare(lm, prompts, one_width, padded.tokens, size)
        report.add(f"E  {name}, against plain decoding of one width", against_padded, promised=True)
        pairs = zip(prompts, drafted, strict=True)
        report.add_margin(name, np.concatenate([gaps(lm, p, new, size)[0] for p, new in pairs if new]), args.margin)

    compare_drafter("prompt lookup", PromptLookup())
    compare_drafter("draft model = target", DraftModel(lm))
    if args.transformers:
        theirs = transformers_greedy(lm, prompts, args.max_new_tokens)
        report.add("B  plain decoding, against transformers", compare(lm, prompts, plain.tokens, theirs, size), exact)
    print("every promised claim held" if report.held else "a promised claim did not hold")
    return 0 if report.held else 1


def main(argv=None) -> int:
    """Runs the script. -> exit code 0; 1 if a promised claim does not hold; 2, after one sentence, for bad input."""
    return refusing(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
