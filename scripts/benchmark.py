"""Times specjax on planted weights of a real model's shape: full compute, known text, an acceptance rate of choice.

Every figure stands beside its floor: bytes that must be read over the read bandwidth measured in the same run.

    python scripts/benchmark.py --target llama-3.1-8b --draft llama-3.2-1b --alpha 0.8
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone that is not installed

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import specjax
from specjax import parallel, random, sampling, theory
from specjax.config import PRESETS
from specjax.datastore import Datastore
from specjax.drafters import Cascade, DraftModel, Jacobi, LayerSkip, Lookahead, PromptLookup, Retrieval
from specjax.metrics import Totals
from specjax.models import cache as kv
from specjax.models.quantized import KINDS
from specjax.testing import planted_exit, planted_pair
from specjax.timing import Given
from specjax.topology import from_widths
from specjax.types import Draft
from specjax.verify import VERIFIERS

MODES = ("verify", "draft", "arithmetic", "round", "drafters", "trees")


def timed(function, *args, repeats: int = 5) -> float:
    """Median seconds of a call, after one that compiles."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def bandwidth(gigabytes: float) -> dict[str, float]:
    """Bytes a second of reading (a sum) and of copying (read plus write), on random data."""
    size = int(gigabytes * 1e9 / 2)
    x = jax.jit(lambda key: jax.random.bits(key, (size,), jnp.uint16))(jax.random.key(0))
    read = timed(jax.jit(lambda x: jnp.max(x)), x)
    copy = timed(jax.jit(lambda x: x + jnp.uint16(1)), x)
    return {"read": 2 * size / read, "copy": 4 * size / copy}


def weight_bytes(lm: specjax.LM) -> int:
    """Read in one step: everything but the embedding table, of which a step reads a row a token."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params))
    return total if lm.config.tie_word_embeddings else total - lm.params["embed"].nbytes


def exit_bytes(lm: specjax.LM, after: int) -> int:
    """Of these, what a draft step reads that leaves the model after some of its layers."""
    later = [layer for name, layer in lm.params["layers"].items() if int(name) >= after]
    return weight_bytes(lm) - sum(leaf.nbytes for leaf in jax.tree.leaves(later))


def calls(lm: specjax.LM, batch: int, width: int, capacity: int, filled: int, count: int = 20) -> float:
    """Seconds of one call of ``width`` tokens on a cache of ``filled`` entries, ``count`` of them in one program."""

    @jax.jit
    def loop(lm, cache, tokens):
        def body(_, carry):
            cache, tokens = carry
            out = lm(tokens, cache)
            return out.cache, jnp.argmax(out.logits, axis=-1).astype(jnp.int32)

        return lax.fori_loop(0, count, body, (cache, tokens))[1]

    cache = kv.with_lengths(lm.alloc_cache(batch, capacity), jnp.full(batch, filled, jnp.int32))
    tokens = jax.random.randint(jax.random.key(1), (batch, width), 0, lm.config.vocab_size)
    return timed(loop, lm, cache, tokens) / count


def arithmetic(vocab: int, batch: int, size: int, params: sampling.SamplingParams, count: int = 20) -> float:
    """Seconds of one round's transforms, softmax, acceptance and draws, on random logits."""
    key = jax.random.key(2)
    logits = 4 * jax.random.normal(key, (batch, size + 1, vocab))
    tokens = jax.random.randint(key, (batch, size), 0, vocab)
    lengths = jnp.full(batch, 8, jnp.int32)
    keys = random.request_keys(np.arange(batch))

    @jax.jit
    def loop(logits, tokens):
        def body(i, total):
            context = sampling.Context(jnp.zeros((batch, 64), jnp.int32), lengths, lengths, sampling.chain_path(tokens))
            p = sampling.distribution(logits + total[:, None, None] * 1e-9, params, context)
            draft = Draft(tokens, jnp.ones_like(tokens, bool), p[:, :-1])
            verdict = VERIFIERS["rejection"].verify(p, draft, keys, lengths + i)
            return total + verdict.count + verdict.token

        return lax.fori_loop(0, count, body, jnp.zeros(batch, jnp.int32))

    return timed(loop, logits, tokens) / count


def generation(lm: specjax.LM, prompts, **options) -> dict[str, float]:
    """Seconds and tokens of a whole ``generate``; the median of three runs after one that compiles."""
    specjax.warmup(lm, prompts, **options)
    runs = [specjax.generate(lm, prompts, **options) for _ in range(3)]
    out = sorted(runs, key=lambda run: run.seconds["decode"])[1]
    rounds = max(m.num_steps for m in out.metrics)
    sums = Totals.of(out.metrics)
    return {
        "seconds": out.seconds["decode"],
        "prefill": out.seconds["prefill"],
        "per_round": out.seconds["decode"] / rounds,
        "tokens_per_second": sums.tokens / out.seconds["decode"],
        "tokens_per_step": sums.tokens_per_step,
        "alpha": sums.draft_acceptance_rate or 0.0,
        "tokens": out.tokens,
    }


def given_tree(widths: tuple[int, ...], vocab: int, batch: int) -> Given:
    """A drafter that proposes random tokens in a tree of these widths, at no cost."""
    topology = from_widths(widths)
    size = len(topology.parents)
    tokens = jax.random.randint(jax.random.key(3), (batch, size), 0, vocab)
    parents = jnp.broadcast_to(jnp.array(topology.parents, jnp.int32), tokens.shape)
    return Given(Draft(tokens, jnp.ones(tokens.shape, bool), None, parents), (size + 1,))


def follow(successor: np.ndarray, token: int, count: int) -> list[int]:
    """The planted text after a token."""
    text = [token]
    for _ in range(count):
        text.append(int(successor[text[-1]]))
    return text[1:]


class Table:
    """Prints and keeps the rows: what, milliseconds, floor, ratio."""

    def __init__(self):
        self.rows: list[dict] = []

    def add(self, name: str, seconds: float, floor: float | None = None, note: str = "") -> None:
        self.rows.append({"name": name, "ms": seconds * 1e3, "floor_ms": floor and floor * 1e3, "note": note})
        ratio = f"{floor * 1e3:9.3f} {seconds / floor:6.2f}" if floor else " " * 16
        print(f"{name:<44}{seconds * 1e3:10.3f} {ratio}  {note}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", choices=PRESETS, default="llama-3.1-8b")
    parser.add_argument("--draft", choices=PRESETS, default="llama-3.2-1b")
    parser.add_argument("--alpha", type=float, default=0.8, help="share of tokens that the draft predicts right")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--num-speculative-tokens", type=int, default=5)
    parser.add_argument("--prompt-length", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--quantize", choices=KINDS, help="the target's weights in eight bits")
    parser.add_argument("--quantize-draft", choices=KINDS, help="the draft's")
    parser.add_argument("--exit-layer", type=int, help="where early exit leaves the target; default: a quarter of it")
    parser.add_argument("--corpus", type=int, default=2_000_000, help="random tokens for retrieval to search")
    parser.add_argument("--devices", type=int, default=1, help="GPUs that share the target (the draft is on each)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="plain decoding is always measured")
    parser.add_argument("--json", help="also write the table to this file")
    args = parser.parse_args()

    device = jax.devices()[0]
    print(
        f"{device.device_kind}, jax {jax.__version__}, {args.target} + {args.draft}, B = {args.batch}, "
        f"K = {args.num_speculative_tokens}, alpha = {args.alpha}, {args.dtype}, {args.devices} device(s)"
    )
    speed = bandwidth(4.0 if device.platform != "cpu" else 0.2)
    print(f"read {speed['read'] / 1e12:.3f} TB/s, copy {speed['copy'] / 1e12:.3f} TB/s")
    target_config, draft_config = PRESETS[args.target], PRESETS[args.draft]
    mesh = None if args.devices == 1 else parallel.mesh(args.devices)
    dtype = jnp.dtype(args.dtype)
    target, draft, successor = planted_pair(target_config, draft_config, args.alpha, dtype=dtype, mesh=mesh)
    target = target.quantize(args.quantize) if args.quantize else target
    draft = draft.quantize(args.quantize_draft) if args.quantize_draft else draft
    step_floor = weight_bytes(target) / args.devices / speed["read"]
    draft_floor = weight_bytes(draft) / speed["read"]
    size, batch = args.num_speculative_tokens, args.batch
    capacity = specjax.requests.bucket(args.prompt_length + args.max_new_tokens + size + 1, 128)
    table = Table()
    print(f"{'':<44}{'ms':>10} {'floor':>9} {'ratio':>6}")

    if "verify" in args.modes:
        for width in range(1, size + 2):
            seconds = calls(target, batch, width, capacity, args.prompt_length)
            table.add(f"target call, {width} tokens", seconds, step_floor)
    if "draft" in args.modes:
        for width in (1, 2):
            seconds = calls(draft, batch, width, capacity, args.prompt_length)
            table.add(f"draft call, {width} tokens", seconds, draft_floor)

    settings = {
        "T = 0": dict(temperature=0.0),
        "T = 1": dict(temperature=1.0),
        "T = 0.8, top-p 0.9": dict(temperature=0.8, top_p=0.9),
        "T = 0.8, top-k 50": dict(temperature=0.8, top_k=50),
    }
    if "arithmetic" in args.modes:
        for name, options in settings.items():
            params = specjax.requests.sampling_params(specjax.Options(**options), batch, target_config.vocab_size)
            table.add(f"verification arithmetic, {name}", arithmetic(target_config.vocab_size, batch, size, params))

    rng = np.random.default_rng(0)
    prompts = rng.integers(0, target_config.vocab_size, (batch, args.prompt_length)).tolist()
    common = dict(max_new_tokens=args.max_new_tokens)
    plain = generation(target, prompts, **common)
    right = plain["tokens"][0] == follow(successor, prompts[0][-1], args.max_new_tokens)
    table.add(
        "plain decoding, a step",
        plain["per_round"],
        step_floor,
        f"{plain['tokens_per_second']:.1f} tokens/s, prefill {plain['prefill'] * 1e3:.1f} ms, text right: {right}",
    )
    if "round" in args.modes:
        floor = size * draft_floor + step_floor
        for name, options in settings.items():
            out = generation(
                target, prompts, drafter=DraftModel(draft), num_speculative_tokens=size, **options, **common
            )
            cost = draft_floor / step_floor
            bound = theory.walltime_factor(args.alpha, size, cost)
            table.add(
                f"round, {name}",
                out["per_round"],
                floor,
                f"{out['tokens_per_second']:.1f} tokens/s, {out['tokens_per_step']:.2f} a round, "
                f"{out['tokens_per_second'] / plain['tokens_per_second']:.2f} x plain (theorem 3.8 at the floors: "
                f"{bound:.2f}), same text: {out['tokens'] == plain['tokens']}",
            )
    if "drafters" in args.modes:  # what their machinery costs beside the target's call
        corpus = Datastore.build([rng.integers(0, target_config.vocab_size, args.corpus)])
        machinery = {
            "prompt lookup (no match)": (PromptLookup(), 0.0),
            "prompt lookup, 1-token matches": (PromptLookup(prompt_lookup_min=1), 0.0),
            f"retrieval from {args.corpus:,} tokens": (Retrieval.over(corpus, retrieval_min=1), 0.0),
            "jacobi": (Jacobi(), 0.0),
            "lookahead, window 8": (Lookahead(), 0.0),
            "cascade, prompt lookup under the draft": (Cascade(PromptLookup(), draft), size * draft_floor),
        }
        for name, (drafter, extra) in machinery.items():
            out = generation(target, prompts, drafter=drafter, num_speculative_tokens=size, **common)
            note = f"{out['tokens_per_step']:.2f} a round"
            table.add(f"round, {name}", out["per_round"], step_floor + extra, note)
        after = args.exit_layer or max(1, target_config.num_hidden_layers // 4)
        leaves, cycle = planted_exit(target_config, after, args.alpha, dtype=dtype, mesh=mesh)
        leaves = leaves.quantize(args.quantize) if args.quantize else leaves
        cost = exit_bytes(leaves, after) / weight_bytes(leaves)
        drafter = LayerSkip(exit_layer=after)
        out = generation(leaves, prompts, drafter=drafter, num_speculative_tokens=size, **common)
        ratio = out["tokens_per_second"] / plain["tokens_per_second"]
        best = theory.best_gamma(args.alpha, cost, 16)
        table.add(
            f"round, early exit after layer {after}",
            out["per_round"],
            (1 + size * cost) * step_floor,
            f"{out['tokens_per_step']:.2f} a round, {ratio:.2f} x plain "
            f"(theorem 3.8 at the floors, c = {cost:.2f}: {theory.walltime_factor(args.alpha, size, cost):.2f}; best "
            f"K {best}), text right: {out['tokens'][0] == follow(cycle, prompts[0][-1], args.max_new_tokens)}",
        )
        del leaves
    if "trees" in args.modes:  # a round that keeps nothing of a given tree: the block, judging it, moving the path
        for widths in ((2, 1, 1, 1), (4, 1, 1, 1), (8, 1, 1, 1), (16, 1, 1, 1)):
            drafter = given_tree(widths, target_config.vocab_size, batch)
            for name, options in (("point masses, T = 0", {}), ("sampled, T = 1", dict(temperature=1.0))):
                q = jax.nn.one_hot(drafter.draft.tokens, target_config.vocab_size) if options else None
                judged = dataclasses.replace(drafter, draft=drafter.draft._replace(probs=q))
                out = generation(target, prompts, drafter=judged, num_speculative_tokens=4, **options, **common)
                nodes = drafter.draft.tokens.shape[1]
                table.add(f"round, tree of {nodes} nodes, {name}", out["per_round"], step_floor)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {
                    "device": device.device_kind,
                    "jax": jax.__version__,
                    "arguments": vars(args),
                    "bandwidth": speed,
                    "rows": table.rows,
                },
                file,
                indent=1,
            )


if __name__ == "__main__":
    main()
