"""Verifiers that trade exactness for acceptance. ``generate`` refuses them unless ``lossy=True``.

docs/exactness.md lists the error of each verifier on small tables, in total variation;
tests/verify/test_lossy.py measures it.
No verdict depends on tokens past a refusal. So a refused position may be drawn again with the same key, as for
``Rejection``.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.scipy.special import entr

from specjax.decode import random
from specjax.decode.arrays import leading_run, row_at, token_probs
from specjax.decode.numeric import in_range
from specjax.decode.types import Draft, Verdict
from specjax.verify import pieces as chain


class _RedrawsWithOneKey:
    """Base of the verifiers of this file, which judge chains only. A later round drafts with the same keys."""

    lossless = False
    trees = False

    def draft_keys(self, keys: jax.Array, lengths: jax.Array) -> jax.Array:
        del lengths
        return random.fold(keys, random.DRAFT)


@dataclasses.dataclass(frozen=True)
class Lenient(_RedrawsWithOneKey):
    """Accepts x ~ q with probability min(1, p(x) / (l q(x))). After a refusal draws from norm(max(0, p - q)).

    No token becomes likelier than p/l, and no token with p > q becomes likelier than p. At temperature 0 p and q are
    one-hot, and the lenience changes nothing: :class:`LenientGreedy` is for this case. Source: Leviathan et al. 2023,
    appendix A.5.

    Args:
      lenience: l, in (0, 1]. At 1 this is ``Rejection``: with the same tokens for sampled drafts, and with the same
        distribution for point masses.

    Raises:
      ValueError: ``lenience`` is no number in (0, 1].
    """

    lenience: float = 0.5

    def __post_init__(self):
        _check_fraction("lenience", self.lenience)

    def verify(self, p: jax.Array, draft: Draft, keys: jax.Array, lengths: jax.Array) -> Verdict:
        return chain.reject(p, draft, keys, lengths, self.lenience)


@dataclasses.dataclass(frozen=True)
class LenientGreedy(_RedrawsWithOneKey):
    """Greedy decoding that also accepts x if p(x) > l max p. Corrections and bonuses are the most likely token.

    The comparison needs a p that temperature 0 has not made one-hot. So ask for temperature 1, and let the drafter be
    greedy (``DraftModel(temperature=0)``). Nothing is drawn. At temperature 0 this is plain greedy decoding. Source:
    Leviathan et al. 2023, appendix A.5, last paragraph, which prints the inequality the other way round.

    Args:
      lenience: l, in (0, 1]. At 1 this is greedy decoding, token for token.

    Raises:
      ValueError: ``lenience`` is no number in (0, 1].
    """

    lenience: float = 0.5

    def __post_init__(self):
        _check_fraction("lenience", self.lenience)

    def verify(self, p: jax.Array, draft: Draft, keys: jax.Array, lengths: jax.Array) -> Verdict:
        del keys, lengths
        best = jnp.argmax(p, axis=-1).astype(jnp.int32)  # [B, K+1]; ties go to the lowest id
        p_x = token_probs(p[:, :-1], draft.tokens)  # [B, K]
        near = p_x > self.lenience * jnp.max(p[:, :-1], axis=-1)
        count = leading_run(draft.valid & (near | (draft.tokens == best[:, :-1])))
        return Verdict(count, row_at(best, count))


@dataclasses.dataclass(frozen=True)
class TypicalAcceptance(_RedrawsWithOneKey):
    """Accepts x if p(x) > min(epsilon, delta exp(-H(p))), where H is the entropy in nats. After a refusal draws from p.

    q is not used. The less certain the target is, the more tokens are accepted. At temperature 0 this is greedy
    decoding, token for token. Source: Cai et al. 2024, "Medusa", typical acceptance.

    Args:
      epsilon: the fixed threshold, in (0, 1].
      delta: the factor of the threshold that depends on the entropy, in (0, 1].

    Raises:
      ValueError: ``epsilon`` or ``delta`` is no number in (0, 1].
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self):
        _check_fraction("epsilon", self.epsilon)
        _check_fraction("delta", self.delta)

    def verify(self, p: jax.Array, draft: Draft, keys: jax.Array, lengths: jax.Array) -> Verdict:
        p_x = token_probs(p[:, :-1], draft.tokens)  # [B, K]
        entropy = jnp.sum(entr(p[:, :-1]), axis=-1)  # [B, K]
        typical = p_x > jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
        count = leading_run(draft.valid & typical)
        return Verdict(count, chain.draw(keys, lengths + count, row_at(p, count)))


def _check_fraction(name: str, value: float) -> None:
    if not (in_range(value, 0, 1) and value > 0):
        raise ValueError(f"{name} must be a number above 0 and at most 1, got {value!r}")
