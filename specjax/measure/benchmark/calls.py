"""Times the parts of a round one by one: calls of the target and of the draft, and the verification arithmetic."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.decode import random, sampling
from specjax.decode.types import Draft
from specjax.generation import requests
from specjax.generation.options import Options
from specjax.measure.benchmark.case import Case
from specjax.measure.benchmark.table import Table
from specjax.measure.benchmark.timed import Call, all_seconds, weight_bytes
from specjax.models import cache as kv
from specjax.models import quantized, tuning
from specjax.models.lm import LM
from specjax.verify import VERIFIERS

SETTINGS = {
    "T = 0": dict(temperature=0.0),
    "T = 1": dict(temperature=1.0),
    "T = 0.8, top-p 0.9": dict(temperature=0.8, top_p=0.9),
    "T = 0.8, top-k 50": dict(temperature=0.8, top_k=50),
}


DRAFT_STEP = "draft step, mean of a round's"


def verify(case: Case, table: Table) -> None:
    """Times calls of the target on 1 to K + 1 tokens."""
    widths = range(1, case.num_speculative_tokens + 2)
    calls = {f"target call, {width} tokens": _call(case, case.target, width) for width in widths}
    for name, seconds in all_seconds(calls).items():
        table.add(name, seconds, case.step_floor)


def draft(case: Case, table: Table) -> None:
    """Times calls of the draft on one and on two tokens, and gives the mean time of a round's draft steps.

    The first draft step of a round feeds two tokens. The other steps feed one token, or two where two are as fast.
    """
    calls = {f"draft call, {width} tokens": _call(case, case.draft, width) for width in (1, 2)}
    seconds = all_seconds(calls)
    for name, time in seconds.items():
        table.add(name, time, case.draft_floor)
    one, two = seconds.values()
    size, other = case.num_speculative_tokens, two if tuning.least_tokens(case.draft, case.batch) == 2 else one
    table.add(DRAFT_STEP, (two + (size - 1) * other) / size, case.draft_floor)


def eight_bits(case: Case, table: Table) -> None:
    """Times the call of a plain step and of a later draft step, for each way to store weights.

    Raises:
      ValueError: the case's models are in eight bits already.
    """
    calls, floors = {}, {}
    for role, lm, shares in (("target", case.target, case.shares), ("draft", case.draft, 1)):
        width = tuning.least_tokens(lm, case.batch)
        for kind in (None, *quantized.KINDS):
            small = lm.quantize(kind) if kind else lm
            name = f"{role} call, {width} tokens, {kind or lm.dtype.name}"
            calls[name] = _call(case, small, width)
            floors[name] = weight_bytes(small) / shares / case.speed["read"]
    for name, seconds in all_seconds(calls).items():
        table.add(name, seconds, floors[name])


def _call(case: Case, lm: LM, width: int) -> Call:
    """A call of ``lm`` on ``width`` tokens of each row after the prompts."""
    cache = lm.alloc_cache(case.batch, case.capacity)
    read = jnp.full(case.batch, case.prompt_length, jnp.int32)
    cache = kv.with_lengths(cache, read).replace(source=read if lm.has_encoder else None)
    tokens = jax.random.randint(random.key(1), (case.batch, width), 0, lm.config.vocab_size)
    return Call(_greedy, (lm, cache, tokens))


@partial(jax.jit, static_argnames="count")
def _greedy(lm: LM, cache: kv.KVCache, tokens: jax.Array, count: int) -> jax.Array:
    """``count`` calls at the same cache entries. Each call reads the tokens that the call before ranked first."""

    def body(_, carry):
        cache, tokens = carry
        out = lm(tokens, cache)
        return out.cache, jnp.argmax(out.logits, axis=-1).astype(jnp.int32)

    return lax.fori_loop(0, count, body, (cache, tokens))[1]


def arithmetic(case: Case, table: Table) -> None:
    """Times the arithmetic of one round on random logits: sampling transforms, softmax, acceptance and draws."""
    vocab, batch, size = case.target.config.vocab_size, case.batch, case.num_speculative_tokens
    key = random.key(2)
    logits = 4 * jax.random.normal(key, (batch, size + 1, vocab))
    tokens = jax.random.randint(key, (batch, size), 0, vocab)
    calls = {}
    for name, options in SETTINGS.items():
        params = requests.sampling_params(Options(**options), batch, vocab)  # type: ignore[arg-type]
        keys = random.request_keys(np.arange(batch))
        calls[f"verification arithmetic, {name}"] = Call(_judge, (logits, tokens, params, keys))
    for name, seconds in all_seconds(calls).items():
        table.add(name, seconds)


@partial(jax.jit, static_argnames="count")
def _judge(logits: jax.Array, tokens: jax.Array, params: sampling.SamplingParams, keys: jax.Array, count: int):
    """``count`` verdicts on a chain whose q equals p. Each depends on the verdict before, so that none is left out."""
    batch = len(tokens)
    lengths = jnp.full(batch, 8, jnp.int32)

    def body(i, total):
        context = sampling.Context(jnp.zeros((batch, 64), jnp.int32), lengths, lengths, sampling.chain_path(tokens))
        p = sampling.distribution(logits + total[:, None, None] * 1e-9, params, context)
        draft = Draft(tokens, jnp.ones_like(tokens, bool), p[:, :-1])
        verdict = VERIFIERS["rejection"].verify(p, draft, keys, lengths + i)
        return total + verdict.accepted + verdict.token

    return lax.fori_loop(0, count, body, jnp.zeros(batch, jnp.int32))
