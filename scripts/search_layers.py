"""Finds the sublayers that a model can leave out while it drafts for itself (Draft & Verify, Zhang et al. 2024).

    python scripts/search_layers.py --prompts prompts.jsonl --json layers.json

The score of a set of left-out sublayers is its speedup by theorem 3.8 (Leviathan et al. 2023) at the best K. Alpha is
measured at every position of the model's own greedy texts. c is counted from the weights that the draft still reads.
The search first leaves out every sublayer alone. Then it grows a set greedily: in each step it tries the few sublayers
that scored best alone, and adds the best one to the set. --json keeps the state, and the same command goes on from
there.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone that is not installed

import jax
import jax.numpy as jnp
import numpy as np
from cli.parser import Parser, refusing
from cli.prompt_files import read_prompts

import specjax
from specjax.drafters import LayerSkip
from specjax.drafting import theory
from specjax.generation.compilation import compilation_cache_of_script
from specjax.models.model import check_no_encoder
from specjax.training.sublayers import weighted

MAX_K = 8


def texts(lm: specjax.LM, prompts: list[str], new: int) -> tuple[jax.Array, jax.Array]:
    """The model's greedy texts.

    -> i32[N, L], the prompts with their continuations; and bool[N, L], whether the next token is the model's own.
    """
    out = specjax.generate(lm, prompts, max_new_tokens=new, chat=lm.tokenizer.chat_template is not None)
    whole = [p + t for p, t in zip(out.prompt_tokens, out.tokens, strict=True)]
    size = max(map(len, whole))
    tokens, own = np.zeros((len(whole), size), np.int32), np.zeros((len(whole), size), bool)
    for row, (text, prompt) in enumerate(zip(whole, out.prompt_tokens, strict=True)):
        tokens[row, : len(text)] = text
        own[row, len(prompt) - 1 : len(text) - 1] = True
    return jnp.asarray(tokens), jnp.asarray(own)


@jax.jit
def run_layers(lm: specjax.LM, tokens: jax.Array, weights: jax.Array) -> jax.Array:
    """The greedy next tokens of a model whose sublayers' outputs are multiplied by weights. -> i32[N, L].

    A weight of 0 leaves a sublayer out. The same compiled program serves every set of sublayers. Here the keys and
    values of all tokens come from the thinned model. In decoding those of committed tokens come from the whole model,
    so decoding accepts a little more.

    Args:
      lm: the model.
      tokens: i32[N, L].
      weights: f32[layers, 2], for the attention and the MLP of each layer.
    """
    thin = weighted(lm, weights)
    return jnp.argmax(thin(tokens, thin.alloc_cache(*tokens.shape)).logits, axis=-1)


class Search:
    """The scores of all sets that were measured so far.

    A sublayer is a pair: the layer, and 0 for its attention or 1 for its MLP. A set holds the sublayers that are left
    out.
    """

    def __init__(self, lm: specjax.LM, tokens: jax.Array, own: jax.Array, path: Path | None):
        self.lm, self.tokens, self.own, self.path = lm, tokens, own, path
        self.found: dict[frozenset, dict] = {}
        if path is not None and path.exists():
            for entry in json.loads(path.read_text())["measured"]:
                self.found[frozenset(map(tuple, entry["left_out"]))] = entry
        c = lm.config
        attention = c.hidden_size * c.head_dim * (2 * c.num_attention_heads + 2 * c.num_key_value_heads)
        mlp = 3 * c.hidden_size * c.intermediate_size
        self.size = (attention, mlp)
        self.total = c.num_hidden_layers * (attention + mlp) + c.hidden_size * c.vocab_size

    def measure(self, left_out: frozenset) -> dict:
        """The scores of a set. A set that was measured before is not measured again."""
        if left_out not in self.found:
            weights = np.ones((self.lm.config.num_hidden_layers, 2), np.float32)
            for layer, part in left_out:
                weights[layer, part] = 0.0
            guess = run_layers(self.lm, self.tokens, jnp.asarray(weights))
            right = (guess[:, :-1] == self.tokens[:, 1:]) & self.own[:, :-1]
            alpha = float(right.sum() / self.own.sum())
            c = 1 - sum(self.size[part] for _, part in left_out) / self.total
            best = int(theory.best_gamma(alpha, c, MAX_K))
            self.found[left_out] = {
                "left_out": sorted(map(list, left_out)),
                "alpha": alpha,
                "c": c,
                "best_k": best,
                "speedup": float(theory.walltime_factor(alpha, best, c)),
                "speedup_at_k1": float(theory.walltime_factor(alpha, 1, c)),
            }
            if self.path is not None:
                self.path.write_text(json.dumps({"measured": list(self.found.values())}, indent=1))
        return self.found[left_out]


def names(entry: dict) -> str:
    """The sublayers of a set, as text."""
    return " ".join(f"{'attention' if part == 0 else 'mlp'}.{layer}" for layer, part in entry["left_out"]) or "nothing"


def line(entry: dict) -> str:
    """The scores of a set, on one line."""
    return (
        f"alpha {entry['alpha']:.3f}  c {entry['c']:.3f}  speedup at K = 1 {entry['speedup_at_k1']:.3f}  "
        f"best K {entry['best_k']} ({entry['speedup']:.3f})  without {names(entry)}"
    )


def parse(argv) -> argparse.Namespace:
    parser = Parser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", default="smollm2-135m-instruct", help="the model (%(default)s)")
    add("--prompts", type=Path, required=True, help="JSON lines or plain text, one prompt in each line")
    add("--count", type=int, default=8, help="how many prompts, from the start of the file (%(default)s)")
    add("--max-new-tokens", type=int, default=48, help="new tokens of each prompt (%(default)s)")
    add("--steps", type=int, default=6, help="the most sublayers that the greedy search leaves out (%(default)s)")
    add("--width", type=int, default=6, help="candidates that a greedy step tries (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="dtype of the weights; float32 on a CPU by default")
    add("--json", type=Path, help="file of the search's state; a search goes on from an existing file")
    parser.add_compilation_cache()
    return parser.parse_args(argv)


def run(args) -> None:
    compilation_cache_of_script(args.compilation_cache)
    lm = specjax.load(args.model, dtype=args.dtype)
    check_no_encoder(lm, "scripts/search_layers.py")
    prompts = [text for _, text in read_prompts(args.prompts)][: args.count]
    search = Search(lm, *texts(lm, prompts, args.max_new_tokens), args.json)
    everything = [(layer, part) for layer in range(lm.config.num_hidden_layers) for part in (0, 1)]
    alone = []
    for number, sublayer in enumerate(everything, 1):
        alone.append((search.measure(frozenset([sublayer])), sublayer))
        print(f"[{number}/{len(everything)}] {line(alone[-1][0])}", flush=True)
    alone.sort(key=lambda pair: -pair[0]["speedup_at_k1"])
    best, chosen = search.measure(frozenset()), frozenset()
    for step in range(args.steps):
        rest = [s for _, s in alone if s not in chosen][: args.width]
        tried = [(search.measure(chosen | {s}), chosen | {s}) for s in rest]
        entry, chosen = max(tried, key=lambda pair: pair[0]["speedup_at_k1"])
        print(f"greedy {step + 1}: {line(entry)}", flush=True)
        best = max(best, entry, key=lambda e: e["speedup_at_k1"])
    skip = LayerSkip(
        skip_attention=tuple(layer for layer, part in best["left_out"] if part == 0),
        skip_mlp=tuple(layer for layer, part in best["left_out"] if part == 1),
    )
    verdict = "pays" if best["speedup"] > 1 else "does not pay: alpha never exceeds c (corollary 3.9)"
    print(f"best: {line(best)}\n{skip}: drafting with it {verdict}")


def main(argv=None) -> int:
    """Runs the script. -> exit code 0; 2, after one sentence on stderr, for a request that can't be met."""
    return refusing(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
