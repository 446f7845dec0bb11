"""What each policy chooses, and that nothing of it outlives a request."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import testing
from specjax.decode.types import Draft
from specjax.drafters import (
    Adaptive,
    Cascade,
    Confidence,
    CostModel,
    DraftModel,
    EntropyGuided,
    FirstOf,
    Heuristic,
    Jacobi,
    Oracle,
    PromptLookup,
)
from specjax.drafters.adaptive import Round
from specjax.drafting import theory

LM = testing.tiny_lm(0, vocab_size=8, std=0.7, num_hidden_layers=1)
TWIN = DraftModel(testing.noisy_twin(LM, 0.25))


def seen(drafted, accepted, entropy=0.0):
    return Round(jnp.array([drafted]), jnp.array([accepted]), jnp.array([entropy]))


def test_heuristic_goes_up_by_two_and_down_by_one():
    policy = Heuristic(start=3)
    own, chosen = policy.init(1, 6), []
    for drafted, accepted in ((3, 3), (5, 5), (6, 2), (5, 0), (0, 0)):
        chosen.append(int(policy.choose(own, 6)[0]))
        own = policy.learn(own, seen(drafted, accepted))
    assert [*chosen, int(policy.choose(own, 6)[0])] == [3, 5, 6, 5, 4, 4]
    for _ in range(9):
        own = policy.learn(own, seen(1, 0))
    assert int(policy.choose(own, 6)[0]) == 1


def test_confidence_keeps_the_first_unsure_token_and_stops_after_it():
    q = jnp.zeros((1, 3, 4)).at[0, :, 1].set(jnp.array([0.9, 0.3, 0.9]))
    draft = Draft(jnp.ones((1, 3), jnp.int32), jnp.ones((1, 3), bool), q)
    assert Confidence(0.5).goes_on(draft).tolist() == [[True, False, True]]
    out = specjax.generate(
        LM, [[1, 2]], drafter=Adaptive(TWIN, Confidence(1.0)), num_speculative_tokens=4, temperature=1.0
    )
    assert set(out.metrics[0].per_step_drafted) <= {0, 1}, "never sure: one token a round"


UNSURE = DraftModel(testing.tiny_lm(5, std=0.2, vocab_size=8, num_hidden_layers=1))  # its laws are nearly flat
CERTAIN_Q = {
    "confidence": (UNSURE, Confidence(0.99), {}),
    "entropy": (UNSURE, EntropyGuided(), {}),
    "one token left by a filter": (UNSURE, Confidence(0.99), {"temperature": 1.0, "top_k": 1}),
    "a cascade": (Cascade(PromptLookup(), UNSURE.lm, 2), EntropyGuided(), {}),
    "the second of two": (FirstOf(PromptLookup(9, 9), UNSURE), EntropyGuided(), {}),
}


QUICK = ("the second of two",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CERTAIN_Q])
def test_policies_see_that_a_draft_is_unsure_where_its_q_is_certain(name):
    """At temperature 0 and under filters every q is one-hot; the law of the draft's logits is not."""
    drafter, policy, options = CERTAIN_Q[name]
    out = specjax.generate(LM, [[1, 2]], drafter=Adaptive(drafter, policy), num_speculative_tokens=4, max_new_tokens=20,
                           ignore_eos=True, **options)  # fmt: skip
    assert out.tokens == specjax.generate(LM, [[1, 2]], max_new_tokens=20, ignore_eos=True).tokens
    drafted = out.metrics[0].per_step_drafted
    assert max(drafted[isinstance(policy, EntropyGuided) :]) < 3, "the first round knows no entropy yet"


def test_what_a_policy_is_told_is_the_law_of_the_logits_whatever_sharpens_q():
    job = specjax.prepare(LM, [[1, 2, 3]], drafter=TWIN, num_speculative_tokens=3)
    told, propose = {}, jax.jit(TWIN.propose, static_argnums=4)
    for temperature in (0.0, 1.0):
        request = job.request._replace(sampling=job.request.sampling._replace(temperature=jnp.array([temperature])))
        keys = job.decoder.verifier.draft_keys(request.key, request.prompt_lengths)
        state = job.start(request)
        draft = propose(LM, state.drafter, state, keys, 3)[0]
        told[temperature] = float(draft.entropy[0, 0])
        law = draft.probs[0, 0] if temperature else None
    entropy = -float(jnp.sum(law * jnp.log(law))) / np.log(8)
    np.testing.assert_allclose([told[0.0], told[1.0]], entropy, rtol=1e-4)


@pytest.mark.parametrize("policy", [Confidence(1.0), EntropyGuided()])
@pytest.mark.parametrize("drafter", [PromptLookup(), Jacobi(), FirstOf(PromptLookup(), Oracle.of([[1, 2]]))])
def test_policies_of_probabilities_refuse_drafters_without_any(policy, drafter):
    with pytest.raises(ValueError, match=f"{type(policy).__name__}.*{type(drafter).__name__}.*no probabilities"):
        specjax.prepare(LM, [[1, 2]], drafter=Adaptive(drafter, policy))
    specjax.prepare(LM, [[1, 2]], drafter=Adaptive(drafter, Heuristic()))


def test_entropy_moves_k_between_its_bounds():
    policy = EntropyGuided(gamma_min=1, gamma_max=5, ema_beta=0.5)
    own = policy.init(1, 8)
    assert int(policy.choose(own, 8)[0]) == 5
    own = policy.learn(own, seen(5, 2, 1.0))
    assert int(policy.choose(own, 8)[0]) == 1
    own = policy.learn(own, seen(1, 1, 0.0))
    assert int(policy.choose(own, 8)[0]) == 3  # halfway, by beta
    assert int(policy.choose(policy.learn(own, seen(0, 0, np.nan)), 8)[0]) == 3  # no evidence, no change
    assert int(EntropyGuided().choose(jnp.array([0.0]), 8)[0]) == 8


@pytest.mark.parametrize("alpha, c", [(0.9, 0.05), (0.6, 0.3), (0.3, 0.5)])
def test_cost_model_finds_the_theorems_k(alpha, c):
    policy = CostModel(c=c, decay=1.0)
    own = policy.init(1, 8)
    rng = np.random.default_rng(0)
    for _ in range(400):
        accepted = int(np.argmin(np.append(rng.random(8) < alpha, False)))
        own = policy.learn(own, seen(8, accepted))
    assert abs(int(policy.choose(own, 8)[0]) - int(theory.best_gamma(alpha, c, 8))) <= 1


def test_cost_model_gives_up_and_tries_again():
    policy = CostModel(c=0.5, prior=0.7)
    own, chosen = policy.init(1, 8), []
    for _ in range(60):
        chosen.append(int(policy.choose(own, 8)[0]))
        own = policy.learn(own, seen(chosen[-1], 0))
    assert chosen[0] > 0 and 0 in chosen and any(b > 0 for a, b in zip(chosen, chosen[1:], strict=False) if a == 0)


@pytest.mark.parametrize(
    "policy",
    [
        Heuristic(start=1),
        pytest.param(EntropyGuided(), marks=pytest.mark.slow),
        pytest.param(CostModel(c=0.3), marks=pytest.mark.slow),
    ],
)
def test_the_same_request_twice_has_the_same_record(policy):
    drafter = Adaptive(TWIN, policy)
    options = dict(drafter=drafter, num_speculative_tokens=4, temperature=1.0, max_new_tokens=30)
    first, second = (specjax.generate(LM, [[1, 2], [3]], **options) for _ in range(2))
    assert first.tokens == second.tokens and first.metrics == second.metrics
    assert len({d for m in first.metrics for d in m.per_step_drafted}) > 1, "K should have moved"
    assert drafter == Adaptive(TWIN, policy)


@pytest.mark.slow
def test_rows_choose_for_themselves():
    prompts = [[1, 2], [3, 4]]
    plain = specjax.generate(LM, prompts, max_new_tokens=40)
    known = Oracle.of([prompts[0] + plain.tokens[0], prompts[1] + [0] * 40])  # right for row 0, wrong for row 1
    out = specjax.generate(
        LM, prompts, drafter=Adaptive(known, Heuristic(start=2)), num_speculative_tokens=8, max_new_tokens=40
    )
    assert out.tokens == plain.tokens
    assert max(out.metrics[0].per_step_drafted) == 8 and max(out.metrics[1].per_step_drafted) <= 2


@pytest.mark.slow
def test_entropy_is_recorded_each_round():
    events = specjax.stream(LM, [[1, 2]], drafter=Adaptive(TWIN, EntropyGuided()), num_speculative_tokens=4,
                            temperature=1.0, max_new_tokens=20)  # fmt: skip
    for _ in events:
        pass
    rounds = [r for r in events.trace[0] if r["drafted"]]
    assert rounds and all(0 < r["entropy"] <= 1 for r in rounds)


def test_entropy_over_log_v_is_one_for_a_uniform_draft():
    from specjax.verify.pieces import draft_entropy

    q = jnp.stack([jnp.full(4, 0.25), jnp.eye(4)[0]])[None]
    draft = Draft(jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool), q)
    np.testing.assert_allclose(jax.jit(draft_entropy, static_argnums=1)(draft, 4), [[1.0, 0.0]], atol=1e-6)
