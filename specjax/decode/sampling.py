"""From logits to the distribution that is sampled: a chain of small per-row transforms, for target and draft alike.

The order is Hugging Face's: logit bias, repetition, presence and frequency penalties, no-repeat n-grams, allowed
tokens, stop tokens that come too early, temperature, top-k, top-p, min-p. Temperature 0 is the limit of the same chain:
a one-hot distribution on the lowest-numbered best token. Everything is float32 from one cast of the logits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode.arrays import span
from specjax.decode.ngram import suffix_runs


class TokenBias(NamedTuple):
    ids: jax.Array  # i32[B, E] tokens, padded with NO_TOKEN
    amounts: jax.Array  # f32[B, E] added to their logits; -inf forbids a token


class EarlyStops(NamedTuple):
    least: jax.Array  # i32[B] new tokens before the first stop token
    stop_ids: jax.Array  # i32[B, E], padded with NO_TOKEN


class SamplingParams(NamedTuple):
    """How each row's tokens are sampled: one value a row.

    A field that is None leaves its transform out of the compiled program. :meth:`full` has every field.
    """

    temperature: jax.Array  # f32[B]; 0 is greedy
    top_k: jax.Array | None = None  # i32[B]; keeps ties with the k-th
    top_p: jax.Array | None = None  # f32[B] in (0, 1]; keeps ties with the last kept
    min_p: jax.Array | None = None  # f32[B] in [0, 1], relative to the most likely token
    repetition_penalty: jax.Array | None = None  # f32[B] > 0, over prompt and output
    presence_penalty: jax.Array | None = None  # f32[B], over the output
    frequency_penalty: jax.Array | None = None  # f32[B], over the output
    no_repeat_ngram_size: jax.Array | None = None  # i32[B]; 0 is off; over prompt and output
    logit_bias: TokenBias | None = None
    vocabulary: jax.Array | None = None  # i32[B]; ids from here on are no tokens: rows of the model that are padding
    allowed: jax.Array | None = None  # i32[B, A] the only tokens, padded with NO_TOKEN; without any, all are allowed
    min_new_tokens: EarlyStops | None = None

    def full(self, vocab: int, biases: int = 16, allowed: int = 16, stops: int = 4) -> "SamplingParams":
        """The same parameters with every field, so that any row may join a batch of others without a new program.

        A field that is missing gets its neutral value, which changes no bit of any logit.

        Args:
          vocab: V.
          biases, allowed, stops: the lengths that the lists of a row are padded to.

        Raises:
          ValueError: a list is longer.
        """
        rows = self.temperature.shape[0]

        def numbers(value, dtype) -> jax.Array:
            return jnp.full(rows, value, dtype)

        def ids(size: int) -> jax.Array:
            return jnp.full((rows, size), NO_TOKEN, jnp.int32)

        neutral = SamplingParams(
            temperature=self.temperature,
            top_k=numbers(vocab, jnp.int32),
            top_p=numbers(1.0, jnp.float32),
            min_p=numbers(0.0, jnp.float32),
            repetition_penalty=numbers(1.0, jnp.float32),
            presence_penalty=numbers(0.0, jnp.float32),
            frequency_penalty=numbers(0.0, jnp.float32),
            no_repeat_ngram_size=numbers(0, jnp.int32),
            logit_bias=TokenBias(ids(biases), jnp.zeros((rows, biases), jnp.float32)),
            vocabulary=numbers(vocab, jnp.int32),
            allowed=ids(allowed),
            min_new_tokens=EarlyStops(numbers(0, jnp.int32), ids(stops)),
        )
        given = {name: value for name, value in self._asdict().items() if value is not None}
        return neutral._replace(**{name: jax.tree.map(_padded, a, getattr(neutral, name)) for name, a in given.items()})


class Context(NamedTuple):
    """The tokens before each scored position: a row's committed ones, then the drafted ones on the way there."""

    tokens: jax.Array  # i32[B, L]
    lengths: jax.Array  # i32[B] committed tokens
    prompt_lengths: jax.Array  # i32[B]
    path: jax.Array  # i32[B, T, D] drafted tokens before position t, then NO_TOKEN


NO_TOKEN = -1


def _padded(given: jax.Array, neutral: jax.Array) -> jax.Array:
    """``given`` at the shape of ``neutral``: lists [B, E] are padded with what a neutral list holds."""
    missing = [b - a for a, b in zip(given.shape, neutral.shape, strict=True)]
    if any(count < 0 for count in missing):
        raise ValueError(f"a row lists {given.shape[1]} tokens, and there is room for {neutral.shape[1]}; allow more")
    filler = NO_TOKEN if jnp.issubdtype(given.dtype, jnp.integer) else 0.0
    return jnp.pad(given, [(0, count) for count in missing], constant_values=filler)


def chain_path(drafted: jax.Array) -> jax.Array:
    """Path of every position of a chain: drafted i32[B, K] to i32[B, K+1, K]."""
    size = drafted.shape[1]
    before = span(size) < jnp.arange(size + 1, dtype=jnp.int32)[:, None]  # [K+1, K]
    return jnp.where(before[None], drafted[:, None, :], NO_TOKEN)


def distribution(logits: jax.Array, sampling: SamplingParams, context: Context) -> jax.Array:
    """The probabilities that are sampled from, f32[B, T, V]; a position with no finite logit left is NaN throughout."""
    return normalised(transformed(logits, sampling, context))


def transformed(logits: jax.Array, sampling: SamplingParams, context: Context) -> jax.Array:
    """Logits [B, T, V] after the whole chain, in float32, the largest 0; NaN throughout where none is finite."""
    return _through(CHAIN, logits, sampling, context)


def ranked(logits: jax.Array, sampling: SamplingParams, context: Context) -> jax.Array:
    """:func:`transformed`, but at temperature 0 as at 1: tokens can be ranked by them, and all but one are not lost."""
    return _through(RANKING, logits, sampling, context)


def unsharpened(logits: jax.Array, sampling: SamplingParams, context: Context) -> jax.Array:
    """Logits [B, T, V] before temperature and filters, f32[B, T, V]: by their softmax a model may be unsure of a token
    where the law that is sampled from has only that one left."""
    return _through(BEFORE_TEMPERATURE, logits, sampling, context)


def _through(chain: "dict[str, Transform]", logits: jax.Array, sampling: SamplingParams, context: Context) -> jax.Array:
    logits = logits.astype(jnp.float32)
    for name, transform in chain.items():
        value = getattr(sampling, name)
        if value is not None:
            logits = transform(logits, value, context)
    return logits


def normalised(logits: jax.Array) -> jax.Array:
    """The softmax of logits f32[..., V] whose largest is 0, as the chain leaves them: no pass to find it again."""
    mass = jnp.exp(logits)
    return mass / jnp.sum(mass, axis=-1, keepdims=True)


def add_bias(logits: jax.Array, bias: TokenBias, context: Context) -> jax.Array:
    del context
    places = _places(bias.ids, logits.shape[-1])
    return jax.vmap(lambda row, at, amounts: row.at[:, at].add(amounts[None], mode="drop"))(
        logits, places, bias.amounts
    )


def _places(ids: jax.Array, vocab: int) -> jax.Array:
    """Ids with padding moved out of range, where scatters drop it."""
    return jnp.where(ids == NO_TOKEN, vocab, ids)


def penalise_repetition(logits: jax.Array, penalty: jax.Array, context: Context) -> jax.Array:
    """Divides positive and multiplies negative logits of seen tokens (CTRL, Keskar et al. 2019, section 4.1)."""
    penalty = penalty[:, None, None]
    seen = _counts(context, logits.shape[-1], from_prompt=True) > 0
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def penalise_presence(logits: jax.Array, penalty: jax.Array, context: Context) -> jax.Array:
    seen = _counts(context, logits.shape[-1], from_prompt=False) > 0
    return logits - jnp.where(seen, penalty[:, None, None], 0.0)


def penalise_frequency(logits: jax.Array, penalty: jax.Array, context: Context) -> jax.Array:
    counts = _counts(context, logits.shape[-1], from_prompt=False)
    return logits - penalty[:, None, None] * counts.astype(jnp.float32)


def _counts(context: Context, vocab: int, from_prompt: bool) -> jax.Array:
    """How often each token stands before each position, i32[B, T, V]."""
    index = span(context.tokens.shape[1])
    start = jnp.zeros_like(context.lengths) if from_prompt else context.prompt_lengths
    counted = (index >= start[:, None]) & (index < context.lengths[:, None])  # [B, L]

    def row(tokens, counted, path):
        committed = jnp.zeros(vocab, jnp.int32).at[tokens].add(counted.astype(jnp.int32), mode="drop")
        slot = jnp.where(path == NO_TOKEN, vocab, path)  # out of range, so dropped
        return jax.vmap(lambda p: committed.at[p].add(1, mode="drop"))(slot)

    return jax.vmap(row)(context.tokens, counted, context.path)


def forbid_repeated_ngrams(logits: jax.Array, size: jax.Array, context: Context) -> jax.Array:
    """Forbids what would complete an n-gram of the given size a second time."""
    vocab = logits.shape[-1]

    def position(logits, size, tokens, length, path):
        end = length + jnp.sum(path != NO_TOKEN, dtype=jnp.int32)
        tokens = lax.dynamic_update_slice(tokens, jnp.maximum(path, 0), (length,))
        repeats = suffix_runs(tokens, end, size - 1) >= size - 1
        index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        repeats &= (index < end) & (index >= size - 1) & (size > 0)
        return logits.at[jnp.where(repeats, tokens, vocab)].set(-jnp.inf, mode="drop")

    over_positions = jax.vmap(position, in_axes=(0, None, None, None, 0))
    return jax.vmap(over_positions)(logits, size, context.tokens, context.lengths, context.path)


def forbid_padding(logits: jax.Array, vocabulary: jax.Array, context: Context) -> jax.Array:
    """Forbids the ids that no tokenizer has: a model may have more rows than its tokenizer has ids."""
    del context
    return jnp.where(span(logits.shape[-1])[None] < vocabulary[:, None, None], logits, -jnp.inf)


def allow_only(logits: jax.Array, allowed: jax.Array, context: Context) -> jax.Array:
    """Forbids all but the listed tokens; a row that lists none allows all."""
    del context
    vocab, everything = logits.shape[-1], jnp.all(allowed == NO_TOKEN, axis=1, keepdims=True)
    listed = jax.vmap(lambda at: jnp.zeros(vocab, bool).at[at].set(True, mode="drop"))(_places(allowed, vocab))
    return jnp.where((listed | everything)[:, None, :], logits, -jnp.inf)


def forbid_early_stops(logits: jax.Array, early: EarlyStops, context: Context) -> jax.Array:
    """Forbids stop tokens at positions that fewer new tokens stand before than there must be."""
    drafted = jnp.sum(context.path != NO_TOKEN, axis=-1, dtype=jnp.int32)  # [B, T]
    new = (context.lengths - context.prompt_lengths)[:, None] + drafted
    vocab = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    stops = jnp.any(early.stop_ids[:, :, None] == vocab, axis=1)  # [B, V]
    return jnp.where((new < early.least[:, None])[..., None] & stops[:, None, :], -jnp.inf, logits)


def apply_temperature(logits: jax.Array, temperature: jax.Array, context: Context) -> jax.Array:
    """Logits over T, shifted to a maximum of 0; at T = 0 its limit, 0 on the lowest-numbered best token, -inf else."""
    scaled, best = divide(logits, temperature, context), jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32)
    tokens = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None]
    kept = (temperature > 0)[:, None, None] | (tokens == best)
    return jnp.where(kept, scaled, jnp.where(jnp.isnan(scaled), jnp.nan, -jnp.inf))


def divide(logits: jax.Array, temperature: jax.Array, context: Context) -> jax.Array:
    """Logits over T, or over 1 where T = 0, shifted to a maximum of 0."""
    del context
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    return shifted / jnp.where(temperature > 0, temperature, 1.0)[:, None, None]


def keep_top_k(logits: jax.Array, k: jax.Array, context: Context) -> jax.Array:
    """Keeps the k largest logits and all that tie with the last of them."""
    del context
    bits = lax.bitcast_convert_type(logits + 0.0, jnp.uint32)  # + 0.0 makes one zero of two
    order = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))  # uint32 that sorts as the floats do

    def enough(kept):
        return jnp.sum(kept, axis=-1, keepdims=True, dtype=jnp.int32) >= k[:, None, None]

    return jnp.where(order >= _largest_threshold(order, enough, 32), logits, -jnp.inf)


def keep_top_p(logits: jax.Array, p: jax.Array, context: Context) -> jax.Array:
    """Keeps the smallest set of most likely tokens whose mass reaches p, and all that tie with the last (nucleus)."""
    del context
    probs = jax.nn.softmax(logits, axis=-1)
    order = lax.bitcast_convert_type(probs, jnp.uint32)  # non-negative floats sort as their bits do

    def enough(kept):
        return jnp.sum(jnp.where(kept, probs, 0.0), axis=-1, keepdims=True) >= p[:, None, None]

    kept = (order >= _largest_threshold(order, enough, 30)) | (p[:, None, None] >= 1.0)
    return jnp.where(kept, logits, -jnp.inf)


def _largest_threshold(order: jax.Array, enough: Callable, bits: int) -> jax.Array:
    """The largest t with enough(order >= t), uint32[B, T, 1]: cheaper than sorting a vocabulary.

    Two bits a pass: a pass is bound by its latency, so one that tries three thresholds costs what one of one does.
    """

    def set_digit(i, threshold):
        shift = (bits - 2 * (i + 1)).astype(jnp.uint32)
        raised = [threshold | (jnp.uint32(digit) << shift) for digit in (1, 2, 3)]
        passed = sum(enough(order >= t).astype(jnp.uint32) for t in raised)  # enough() falls as its threshold rises
        return threshold | (passed << shift)

    start = jnp.zeros((*order.shape[:-1], 1), jnp.uint32)
    return lax.fori_loop(0, bits // 2, set_digit, start)


def keep_min_p(logits: jax.Array, p: jax.Array, context: Context) -> jax.Array:
    """Keeps tokens at least p times as likely as the most likely one."""
    del context
    return jnp.where(logits >= jnp.max(logits, axis=-1, keepdims=True) + jnp.log(p)[:, None, None], logits, -jnp.inf)


Transform = Callable[[jax.Array, Any, Context], jax.Array]

# SamplingParams field -> transform (logits f32[B, T, V], value [B, ...], context) -> logits, in the order applied.
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
