"""From logits to the distribution that is sampled: a chain of small transforms, the same for the target and the draft.

Each transform works row by row. The order is Hugging Face's:

    logit bias -> repetition, presence and frequency penalties -> no-repeat n-grams -> vocabulary -> allowed tokens
    -> early stop tokens -> temperature -> top-k -> top-p -> min-p

At temperature 0 the chain gives its limit for T to 0: a one-hot distribution on the best token, and of several best
tokens on the one with the lowest id. The logits are cast to float32 once, and every transform works in float32.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode.arrays import largest, span
from specjax.decode.ngram import suffix_runs
from specjax.decode.sampling_params import NO_TOKEN, Context, EarlyStops, SamplingParams, TokenBias
from specjax.models import tuning


def chain_path(drafted: jax.Array) -> jax.Array:
    """The ``Context.path`` of a chain's K + 1 positions, from its drafted tokens i32[B, K]. -> i32[B, K+1, K]."""
    size = drafted.shape[1]
    before = span(size) < jnp.arange(size + 1, dtype=jnp.int32)[:, None]  # [K+1, K]
    return jnp.where(before[None], drafted[:, None, :], NO_TOKEN)


def distribution(logits: jax.Array, sampling: SamplingParams, context: Context) -> jax.Array:
    """The probabilities that tokens are sampled by. -> f32[B, T, V].

    If no logit of a position is finite after the chain, all probabilities of this position are NaN.

    Args:
      logits: [B, T, V], the model's raw logits.
      sampling: how each row is sampled.
      context: the tokens before each position.
    """
    return normalised(transformed(logits, sampling, context))


def transformed(logits: jax.Array, sampling: SamplingParams, context: Context) -> jax.Array:
    """The logits after the whole chain, shifted so that the largest is 0. -> f32[B, T, V].

    If no logit of a position is finite after the chain, all logits of this position are NaN. The arguments are those of
    :func:`distribution`.
    """
    return _through(CHAIN, logits, sampling, context)


def ranked(logits: jax.Array, sampling: SamplingParams, context: Context) -> jax.Array:
    """Like :func:`transformed`, but temperature 0 is treated as 1, so that the logits still rank all tokens."""
    return _through(RANKING, logits, sampling, context)


def unsharpened(logits: jax.Array, sampling: SamplingParams, context: Context) -> jax.Array:
    """The logits after the part of the chain that comes before the temperature. -> f32[B, T, V].

    The softmax of these logits says how sure the model is of a token. The sampled distribution does not: at a low
    temperature or after a filter, a token of which the model is unsure may be the only one left.
    """
    return _through(BEFORE_TEMPERATURE, logits, sampling, context)


def _through(chain: "dict[str, Transform]", logits: jax.Array, sampling: SamplingParams, context: Context) -> jax.Array:
    """The logits after those transforms of ``chain`` whose parameter is not None. -> f32[B, T, V]."""
    logits = logits.astype(jnp.float32)
    for name, transform in chain.items():
        value = getattr(sampling, name)
        if value is not None:
            logits = transform(logits, value, context)
    return logits


def names_tokens(sampling: SamplingParams) -> bool:
    """Whether a transform looks at tokens' ids. The others give the same whichever token a logit belongs to."""
    by_value = ("temperature", "top_k", "top_p", "min_p")
    return any(value is not None for name, value in sampling._asdict().items() if name not in by_value)


def normalised(logits: jax.Array) -> jax.Array:
    """The softmax of logits f32[..., V] whose largest is 0, as the chain leaves them. The maximum is not computed."""
    mass = jnp.exp(logits)
    return mass / jnp.sum(mass, axis=-1, keepdims=True)


def add_bias(logits: jax.Array, bias: TokenBias, context: Context) -> jax.Array:
    """Adds each amount to the logit of its token."""
    del context
    places = _places(bias.ids, logits.shape[-1])
    return jax.vmap(lambda row, columns, amounts: row.at[:, columns].add(amounts[None], mode="drop"))(
        logits, places, bias.amounts
    )


def _places(ids: jax.Array, vocab: int) -> jax.Array:
    """The ids, with padding replaced by ``vocab``: this index is out of range, so a scatter drops it."""
    return jnp.where(ids == NO_TOKEN, vocab, ids)


def penalise_repetition(logits: jax.Array, penalty: jax.Array, context: Context) -> jax.Array:
    """Divides the positive logits of seen tokens by the penalty, and multiplies the negative ones by the penalty.

    CTRL, Keskar et al. 2019, section 4.1.
    """
    penalty = penalty[:, None, None]
    seen = _counts(context, logits.shape[-1], from_prompt=True) > 0
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def penalise_presence(logits: jax.Array, penalty: jax.Array, context: Context) -> jax.Array:
    """Subtracts the penalty from the logits of tokens that the output holds."""
    seen = _counts(context, logits.shape[-1], from_prompt=False) > 0
    return logits - jnp.where(seen, penalty[:, None, None], 0.0)


def penalise_frequency(logits: jax.Array, penalty: jax.Array, context: Context) -> jax.Array:
    """Subtracts the penalty from a token's logit once for each time that the output holds the token."""
    counts = _counts(context, logits.shape[-1], from_prompt=False)
    return logits - penalty[:, None, None] * counts.astype(jnp.float32)


def _counts(context: Context, vocab: int, from_prompt: bool) -> jax.Array:
    """How often each token stands before each position. -> i32[B, T, V].

    Args:
      context: the tokens before each position.
      vocab: V.
      from_prompt: whether the prompt is counted too; False: the output alone.
    """
    index = span(context.tokens.shape[1])
    start = context.counted_from if from_prompt else context.prompt_lengths
    counted = (index >= start[:, None]) & (index < context.lengths[:, None])  # [B, L]

    def row(tokens, counted, path):
        committed = jnp.zeros(vocab, jnp.int32).at[tokens].add(counted.astype(jnp.int32), mode="drop")
        return jax.vmap(lambda ids: committed.at[ids].add(1, mode="drop"))(_places(path, vocab))

    return jax.vmap(row)(context.tokens, counted, context.path)


def forbid_repeated_ngrams(logits: jax.Array, size: jax.Array, context: Context) -> jax.Array:
    """Forbids tokens that would complete an n-gram a second time.

    Args:
      logits: f32[B, T, V].
      size: i32[B], n. 0 forbids nothing.
      context: the tokens before each position. Prompt and output count, an encoder's source does not.
    """
    vocab = logits.shape[-1]

    def position(logits, size, tokens, length, begin, path):
        end = length + jnp.sum(path != NO_TOKEN, dtype=jnp.int32)
        tokens = lax.dynamic_update_slice(tokens, jnp.maximum(path, 0), (length,))
        repeats = suffix_runs(tokens, end, size - 1) >= size - 1
        index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        repeats &= (index < end) & (index - begin >= size - 1) & (size > 0)
        return logits.at[jnp.where(repeats, tokens, vocab)].set(-jnp.inf, mode="drop")

    over_positions = jax.vmap(position, in_axes=(0, None, None, None, None, 0))
    return jax.vmap(over_positions)(logits, size, context.tokens, context.lengths, context.counted_from, context.path)


def forbid_padding(logits: jax.Array, vocabulary: jax.Array, context: Context) -> jax.Array:
    """Forbids the ids from ``vocabulary`` i32[B] on: a model may have rows for more ids than its tokenizer has."""
    del context
    return jnp.where(span(logits.shape[-1])[None] < vocabulary[:, None, None], logits, -jnp.inf)


def allow_only(logits: jax.Array, allowed: jax.Array, context: Context) -> jax.Array:
    """Forbids all tokens but those in ``allowed`` i32[B, A]. A row that lists no token allows all tokens."""
    del context
    vocab, everything = logits.shape[-1], jnp.all(allowed == NO_TOKEN, axis=1, keepdims=True)
    listed = jax.vmap(lambda ids: jnp.zeros(vocab, bool).at[ids].set(True, mode="drop"))(_places(allowed, vocab))
    return jnp.where((listed | everything)[:, None, :], logits, -jnp.inf)


def forbid_early_stops(logits: jax.Array, early: EarlyStops, context: Context) -> jax.Array:
    """Forbids stop tokens at each position before which fewer than ``early.least`` new tokens stand."""
    drafted = jnp.sum(context.path != NO_TOKEN, axis=-1, dtype=jnp.int32)  # [B, T]
    new = (context.lengths - context.prompt_lengths)[:, None] + drafted
    vocab = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    stops = jnp.any(early.stop_ids[:, :, None] == vocab, axis=1)  # [B, V]
    return jnp.where((new < early.least[:, None])[..., None] & stops[:, None, :], -jnp.inf, logits)


def apply_temperature(logits: jax.Array, temperature: jax.Array, context: Context) -> jax.Array:
    """Divides the logits by T f32[B] and shifts them to a maximum of 0.

    At T = 0 the result is the limit: 0 for the best token, and of several best tokens for the one with the lowest id;
    -inf for all other tokens.
    """
    del context
    top, best = (x[..., None] for x in largest(logits))  # [B, T, 1]
    scaled = _divided(logits, top, temperature)
    tokens = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None]
    kept = (temperature > 0)[:, None, None] | (tokens == best)
    return jnp.where(kept, scaled, jnp.where(jnp.isnan(scaled), jnp.nan, -jnp.inf))


def divide(logits: jax.Array, temperature: jax.Array, context: Context) -> jax.Array:
    """Divides the logits by T, or by 1 where T = 0, and shifts them to a maximum of 0."""
    del context
    return _divided(logits, jnp.max(logits, axis=-1, keepdims=True), temperature)


def _divided(logits: jax.Array, top: jax.Array, temperature: jax.Array) -> jax.Array:
    """The logits f32[B, T, V] less their largest, ``top`` f32[B, T, 1], divided by T, or by 1 where T = 0."""
    return (logits - top) / jnp.where(temperature > 0, temperature, 1.0)[:, None, None]


def keep_top_k(logits: jax.Array, k: jax.Array, context: Context) -> jax.Array:
    """Keeps the k largest logits, and all logits that tie with the smallest of these. The largest logit must be 0."""
    del context
    lost = -logits  # how far each logit lies below the largest

    def too_few(marks):  # no number is below NaN, so the count says nothing there
        return (_totals(lost[:, :, None] < marks[..., None]) < k[:, None, None]) & ~jnp.isnan(marks)

    return jnp.where(lost > _largest_that_holds(too_few, logits.shape[:2], 31), -jnp.inf, logits)


def keep_top_p(logits: jax.Array, p: jax.Array, context: Context) -> jax.Array:
    """Keeps the smallest set of likeliest tokens whose probabilities add up to p or more: nucleus sampling.

    Tokens that tie with the least likely one of the set are kept too. At p = 1 all tokens are kept. The largest logit
    must be 0.
    """
    del context
    mass = jnp.exp(logits)  # the probabilities, but for their total
    needed = p[:, None, None] * _totals(mass[:, :, None])  # [B, T, 1], in the order of the sums below

    def enough(marks):
        of_tokens = mass[:, :, None]
        return _totals(jnp.where(of_tokens >= marks[..., None], of_tokens, 0.0)) >= needed

    unlikely = mass < _largest_that_holds(enough, logits.shape[:2], 30)
    return jnp.where(unlikely & (p[:, None, None] < 1.0), -jnp.inf, logits)


def _totals(x: jax.Array) -> jax.Array:
    """The sums of x [B, T, R, V] over V, f32 or i32[B, T, R].

    By itself XLA would sum a wide row in two kernels on a GPU, and cut it into too many pieces. Here the row is cut
    into a few pieces, if their number divides V. The pieces' sums are one kernel, and the next kernel adds them up.
    """
    x = x.astype(jnp.int32) if x.dtype == bool else x
    _, pieces = tuning.filter_search(x.shape[0] * x.shape[1])
    pieces = math.gcd(pieces, x.shape[-1])
    of_pieces = jnp.sum(x.reshape(*x.shape[:-1], pieces, -1), axis=-1, dtype=x.dtype)
    return sum((of_pieces[..., i] for i in range(1, pieces)), start=of_pieces[..., 0])


def _largest_that_holds(holds: Callable, rows: tuple[int, ...], bits: int) -> jax.Array:
    """The largest number t for which holds(t), which is true of 0 and false from some number on. -> f32[B, T, 1].

    Numbers that are not negative sort as their bits do. Each pass settles one digit of these bits by trying all R
    digits but 0 at once. This search is cheaper than sorting a vocabulary. The time of a pass is bound by latency, so
    for few rows many numbers cost as much as one.

    Args:
      holds: takes numbers f32[B, T, R] and says of each whether the condition holds: bool[B, T, R].
      rows: B and T.
      bits: how many of the lowest bits of t can be set. With 31 bits some of the numbers that are tried are NaN.
    """
    width, _ = tuning.filter_search(rows[0] * rows[1])

    def settled(found, shift, width):
        digits = jnp.arange(1, 1 << width, dtype=jnp.uint32)[None, None]
        tried = lax.bitcast_convert_type(found | (digits << shift), jnp.float32)  # [B, T, R]
        digit = jnp.sum(holds(tried), axis=-1, keepdims=True, dtype=jnp.uint32)  # the number that hold is the largest
        return found | (digit << shift)

    first = bits % width or width  # the width of the first digit
    passes = (bits - first) // width  # of the other digits
    start = settled(jnp.zeros((*rows, 1), jnp.uint32), jnp.uint32(bits - first), first)

    def step(i, found):
        return settled(found, (width * (passes - 1 - i)).astype(jnp.uint32), width)

    found = lax.fori_loop(0, passes, step, start, unroll=tuning.search_unrolled())
    return lax.bitcast_convert_type(found, jnp.float32)


def keep_min_p(logits: jax.Array, p: jax.Array, context: Context) -> jax.Array:
    """Keeps the tokens whose probability is at least p times that of the likeliest token."""
    del context
    return jnp.where(logits >= jnp.max(logits, axis=-1, keepdims=True) + jnp.log(p)[:, None, None], logits, -jnp.inf)


Transform = Callable[[jax.Array, Any, Context], jax.Array]

# Each field of SamplingParams and its transform, in the order in which the transforms are applied. A transform takes
# logits f32[B, T, V], the field's value [B, ...] and the context, and returns logits f32[B, T, V].
CHAIN: dict[str, Transform] = {
    "logit_bias": add_bias,
    "repetition_penalty": penalise_repetition,
    "presence_penalty": penalise_presence,
    "frequency_penalty": penalise_frequency,
    "no_repeat_ngram_size": forbid_repeated_ngrams,
    "vocabulary": forbid_padding,
    "allowed": allow_only,
    "min_new_tokens": forbid_early_stops,
    "temperature": apply_temperature,
    "top_k": keep_top_k,
    "top_p": keep_top_p,
    "min_p": keep_min_p,
}
RANKING = {**CHAIN, "temperature": divide}
BEFORE_TEMPERATURE = dict(list(CHAIN.items())[: list(CHAIN).index("temperature")])
