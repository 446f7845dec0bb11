"""How rows are sampled: the parameters of each row, and the tokens that a position is sampled after."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

NO_TOKEN = -1  # fills lists of tokens that are shorter than their array


class TokenBias(NamedTuple):
    """Amounts that are added to the logits of some tokens."""

    # i32[B, E] The tokens, padded with NO_TOKEN.
    ids: jax.Array
    # f32[B, E] The amount that is added to each token's logit. -inf forbids the token.
    amounts: jax.Array


class EarlyStops(NamedTuple):
    """Stop tokens that are forbidden at the start of the output."""

    # i32[B] The number of new tokens that must stand before the first stop token.
    least: jax.Array
    # i32[B, E] The stop tokens, padded with NO_TOKEN.
    stop_ids: jax.Array


class SamplingParams(NamedTuple):
    """How each row's tokens are sampled. Every field has one value (or one list of values) for each row.

    If a field is None, its transform is left out of the compiled program. :meth:`full` sets every field.
    """

    # f32[B] T. 0 is greedy.
    temperature: jax.Array
    # i32[B] k. Tokens that tie with the k-th are kept too.
    top_k: jax.Array | None = None
    # f32[B] p, in (0, 1]. Tokens that tie with the last kept one are kept too.
    top_p: jax.Array | None = None
    # f32[B] The smallest probability that is kept, as a fraction of the likeliest token's probability; in [0, 1].
    min_p: jax.Array | None = None
    # f32[B] The factor for tokens that the prompt or the output holds, above 0. 1 is off.
    repetition_penalty: jax.Array | None = None
    # f32[B] The amount that is subtracted from the logits of tokens that the output holds.
    presence_penalty: jax.Array | None = None
    # f32[B] The amount that is subtracted for each time that the output holds the token.
    frequency_penalty: jax.Array | None = None
    # i32[B] n. No n-gram of prompt and output may occur twice. 0 is off.
    no_repeat_ngram_size: jax.Array | None = None
    # The amounts that are added to the logits of some tokens.
    logit_bias: TokenBias | None = None
    # i32[B] The lowest id from which on no id is a token: a model may have rows for more ids than its tokenizer has.
    vocabulary: jax.Array | None = None
    # i32[B, A] The only tokens that may be sampled, padded with NO_TOKEN. A row without any token allows all tokens.
    allowed: jax.Array | None = None
    # The stop tokens that are forbidden at the start of the output.
    min_new_tokens: EarlyStops | None = None

    def full(self, vocab: int, biases: int = 16, allowed: int = 16, stops: int = 4) -> "SamplingParams":
        """The same parameters with every field set. Rows of such parameters can share a batch and a compiled program.

        A field that is None gets its neutral value, which changes no bit of any logit.

        Args:
          vocab: V.
          biases: the length that each row's list of biased tokens is padded to.
          allowed: the length that each row's list of allowed tokens is padded to.
          stops: the length that each row's list of stop tokens is padded to.

        Raises:
          ValueError: a list is longer than its length here.
        """
        rows = self.temperature.shape[0]

        def numbers(value, dtype) -> Any:
            return np.full(rows, value, dtype)

        def ids(size: int) -> Any:
            return np.full((rows, size), NO_TOKEN, np.int32)

        neutral = SamplingParams(
            temperature=self.temperature,
            top_k=numbers(vocab, np.int32),
            top_p=numbers(1.0, np.float32),
            min_p=numbers(0.0, np.float32),
            repetition_penalty=numbers(1.0, np.float32),
            presence_penalty=numbers(0.0, np.float32),
            frequency_penalty=numbers(0.0, np.float32),
            no_repeat_ngram_size=numbers(0, np.int32),
            logit_bias=TokenBias(ids(biases), np.zeros((rows, biases), np.float32)),  # type: ignore[arg-type]
            vocabulary=numbers(vocab, np.int32),
            allowed=ids(allowed),
            min_new_tokens=EarlyStops(numbers(0, np.int32), ids(stops)),
        )
        given = {name: value for name, value in self._asdict().items() if value is not None}
        return neutral._replace(**{name: jax.tree.map(_padded, a, getattr(neutral, name)) for name, a in given.items()})


class Context(NamedTuple):
    """The tokens before each of T scored positions: the row's committed tokens, then drafted tokens."""

    # i32[B, L] The committed tokens, prompt included; meaningful below the row's length.
    tokens: jax.Array
    # i32[B] The number of committed tokens, prompt included.
    lengths: jax.Array
    # i32[B] The number of prompt tokens.
    prompt_lengths: jax.Array
    # i32[B, T, D] The drafted tokens before position t, in order, padded with NO_TOKEN.
    path: jax.Array
    # i32[B] Where the text begins, of which repetition counts: after the source of an encoder. None: at 0.
    begins: jax.Array | None = None

    @property
    def counted_from(self) -> jax.Array:
        """i32[B] The first token that repetition counts."""
        return jnp.zeros_like(self.lengths) if self.begins is None else self.begins


def _padded(given: Any, neutral: np.ndarray) -> Any:
    """``given`` padded to the shape of ``neutral``: lists of ids with NO_TOKEN, lists of amounts with 0.

    A NumPy array stays one, so that a request can be built without the device.
    """
    missing = [b - a for a, b in zip(given.shape, neutral.shape, strict=True)]
    if any(count < 0 for count in missing):
        raise ValueError(
            f"a row lists {given.shape[1]} tokens, and there is room for {neutral.shape[1]}; allow more: give "
            "SamplingParams.full a larger length for this list"
        )
    filler = NO_TOKEN if jnp.issubdtype(given.dtype, jnp.integer) else 0.0
    pad = np.pad if isinstance(given, np.ndarray) else jnp.pad
    return pad(given, [(0, count) for count in missing], constant_values=filler)
