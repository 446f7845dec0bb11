"""What users may write, and the error for everything else; all of it before device work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import generate, stream, testing, warmup
from specjax.decode import numeric
from specjax.drafters import PromptLookup
from specjax.generation import requests
from specjax.generation.generate import prepare
from specjax.generation.job import Job
from specjax.verify.rejection import Rejection

LM = testing.tiny_lm(0, eos_token_ids=(7,))
PROMPT = [[1, 2, 3]]


def job(prompts=PROMPT, **options):
    return prepare(LM, prompts, **options)


@pytest.mark.parametrize(
    "option, values",
    {
        "temperature": ["temperature", -1, float("nan"), float("inf"), "1", None, True, 1e38, 10**400],
        "repetition_penalty": ["repetition_penalty", 0, -1, float("inf"), 1e39, 1e-50],
        "top_p": ["top_p", 0, 1.1, -0.1, float("nan")],
        "min_p": ["min_p", -0.1, 1.1],
        "top_k": ["top_k", 2.5, -2, "3", True, [[1, 2], None]],
        "block_width": ["block_width", 0, 1.5, "4", True, 1 << 40],
        "presence_penalty": ["presence_penalty", float("nan"), "x", 1e39, -1e39],
        "frequency_penalty": ["frequency_penalty", float("inf"), 1e38, -(10**400)],
        "no_repeat_ngram_size": ["no_repeat_ngram_size", -1, 1.5],
        "min_new_tokens": ["min_new_tokens", -1, 1.5, True, "3", 129],
        "max_new_tokens": ["max_new_tokens", 1.5, True, -2, "3"],
        "num_speculative_tokens": ["num_speculative_tokens", -1, 2.0, "4", True, None],
        "seed": ["seed", -1, 1.5, "a", True, 1 << 64, [-(1 << 63)]],
        "eos_token_id": ["eos_token_id", 50, -1, "a", [1, 50]],
        "logit_bias": ["logit_bias", {50: 1.0}, {1: float("nan")}, {"a": 1.0}, {1: 1e39}, {1: -1e39}, {1: np.inf},
                       5, [[(1, 2.0)]]],  # fmt: skip
        "allowed_token_ids": ["allowed_token_ids", [], [50], [-1], 5, [["a"]], np.array([50, 3]), {3: 1.0}, [{3: 1.0}]],
        "capacity": ["capacity", 1, 1.5, "a", True],
        "drafter": ["drafter", "nope", 3, PromptLookup],
        "verifier": ["verifier", "nope", 3, Rejection],
        **{name: [name, "no", 1] for name in ("allow_unknown_ids", "ignore_eos", "chat", "lossy")},
        "parse_special": ["parse_special", 1, 0.0, "yes"],
        "stop": ["stop", "x", "", [""]],
    }.items(),
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_values_are_refused_by_name(option, values):
    del option
    name, *bad = values
    for value in bad:
        with pytest.raises(ValueError, match="stop" if name == "stop" else name):
            job(**{name: value})


@pytest.mark.parametrize(
    "prompts, message",
    [
        ([], "prompts"),
        (3, "prompts"),
        (np.array(3), "prompts"),
        ([[]], "empty"),
        ([[1], []], "prompt 1 is empty"),
        ([[1, 50]], "50, outside"),
        ([[-1]], "outside"),
        ([1, 2], r"pass \[\[...\]\]"),
        ([[1.5]], "token ids"),
        (["text"], "no tokenizer"),
        ("text", "no tokenizer"),
        ([[1] * 257], "257 tokens"),
    ],
)
def test_bad_prompts_are_refused(prompts, message):
    with pytest.raises(ValueError, match=message):
        job(prompts)


def test_the_drafter_that_suits_a_model_has_a_name():
    assert job(drafter="auto").decoder.drafter == PromptLookup()  # no head comes with specjax for this model
    with pytest.raises(ValueError, match="one of 'none', 'ngram', 'auto' or an object with .propose, got 'nope'"):
        job(drafter="nope")


def test_the_first_argument_is_a_model():
    with pytest.raises(ValueError, match="lm must be a model, such as specjax.load gives, got 'smollm2"):
        generate("smollm2-135m-instruct", PROMPT)


def test_chat_wants_text():
    with pytest.raises(ValueError, match="chat"):
        job(chat=True)


def test_lossy_verifiers_want_consent():
    lossy = [v for v in testing.checks.VERIFIERS.values() if not v.lossless]

    class Lossy:
        lossless = False

        def verify(self):
            pass

    for verifier in [*lossy, Lossy()]:
        with pytest.raises(ValueError, match="lossy=True"):
            job(verifier=verifier)
        job(verifier=verifier, lossy=True)


@pytest.mark.parametrize("value, limit", [(None, 256), (-1, 256), (0, 3), (5, 8), (10**12, 256), ([5], 8)])
def test_limits_of_none_minus_one_and_zero(value, limit):
    assert job(max_new_tokens=value).request.limit.tolist() == [limit]


def test_zero_is_plain_decoding_and_a_thousand_is_clipped():
    assert job(drafter="ngram", num_speculative_tokens=0).decoder.num_speculative_tokens == 0
    assert job(drafter="ngram", num_speculative_tokens=1000).decoder.num_speculative_tokens == 256
    assert job(drafter="ngram", num_speculative_tokens=np.int64(4)).decoder.num_speculative_tokens == 4


def test_top_k_is_clipped_to_the_vocabulary():
    two = [[1], [2]]
    for value, want in [(-1, 50), (0, 50), (1, 1), (51, 50), (10**6, 50)]:
        assert job(two, top_k=value).request.sampling.top_k.tolist() == [want, want]
    assert job(top_k=None).request.sampling.top_k is None


HUGE = (1 << 31, 1 << 63, 10**30)


@pytest.mark.parametrize("huge", HUGE)
def test_sizes_beyond_every_text_and_vocabulary_mean_all_of_it(huge):
    plain, room = job(), job(max_new_tokens=huge)
    assert job(top_k=huge).request.sampling.top_k.tolist() == [50]
    assert job(max_new_tokens=huge).request.limit.tolist() == [256]
    assert job(drafter="ngram", num_speculative_tokens=huge).decoder.num_speculative_tokens == 256
    assert job(capacity=huge).tokens.shape == room.tokens.shape, "no text is longer than the context"
    ngrams = job(no_repeat_ngram_size=huge).request.sampling.no_repeat_ngram_size
    assert ngrams.dtype == np.int32 and ngrams[0] >= plain.tokens.shape[1], "no n-gram is as long, so none repeats"


def test_the_smallest_top_p_and_min_p_have_their_meaning_in_float32():
    sampling = job(temperature=1.0, top_p=1e-60, min_p=1e-60).request.sampling
    assert 0 < sampling.top_p[0] < 1e-30, "0 would keep no token at all"
    assert sampling.min_p[0] == 0, "0 keeps every token, as 1e-60 does"


def test_the_strongest_options_together_leave_a_distribution():
    """Each is finite, and so is whatever the transforms make of all of them."""
    strongest = dict(
        temperature=numeric.STRONGEST,
        repetition_penalty=numeric.STRONGEST_REPETITION,
        presence_penalty=-numeric.STRONGEST,
        frequency_penalty=numeric.STRONGEST,
        logit_bias={3: numeric.STRONGEST, 4: -3.4e38, 5: -float("inf")},
    )
    for factor in (1, -1):
        for name in ("presence_penalty", "frequency_penalty"):
            strongest[name] *= factor
        for temperature in (numeric.STRONGEST, 1.0, 1e-5, 0.0):
            for repetition in (numeric.STRONGEST_REPETITION, 1 / numeric.STRONGEST_REPETITION):
                given = {**strongest, "temperature": temperature, "repetition_penalty": repetition}
                out = generate(LM, [[3, 4, 5, 1]], max_new_tokens=8, ignore_eos=True, **given)
                assert len(out.tokens[0]) == 8 and 5 not in out.tokens[0]


def test_seeds_count_in_all_of_their_64_bits():
    small, large = job(seed=5), job(seed=(1 << 32) + 5)
    assert np.array_equal(_data(small)[0], jax.random.key_data(jax.random.key(5))), "as it has always been"
    assert not np.array_equal(_data(small), _data(large))
    assert np.array_equal(_data(large)[0], [1, 5])
    across = job([[1]] * 2, seed=(1 << 32) - 1)
    assert np.array_equal(_data(across), [[0, (1 << 32) - 1], [1, 0]])
    assert np.array_equal(_data(job(seed=np.array([1 << 63], np.uint64)))[0], [1 << 31, 0])
    job(seed=(1 << 64) - 1)
    with pytest.raises(ValueError, match="seed"):
        job([[1]] * 2, seed=(1 << 64) - 1)  # the second row's


def test_lists_give_one_value_a_row():
    two = [[1], [2, 3]]
    request = job(
        two,
        temperature=[0.0, 1.0],
        top_p=[None, 0.5],
        max_new_tokens=[4, None],
        logit_bias=[None, {3: 2.0}],
        allowed_token_ids=[[1, 2], None],
    ).request
    assert request.sampling.temperature.tolist() == [0.0, 1.0]
    assert request.sampling.top_p.tolist() == [1.0, 0.5]
    assert request.limit.tolist() == [5, 256]
    ids, amounts = request.sampling.logit_bias
    assert ids.tolist() == [[-1] * 4, [3, -1, -1, -1]] and amounts.tolist() == [[0.0] * 4, [2.0, 0.0, 0.0, 0.0]]
    assert request.sampling.allowed.tolist() == [[1, 2, -1, -1], [-1] * 4]
    assert np.array_equal(job(temperature=np.array([1.0])).request.sampling.temperature, [1.0])
    for name, value in {"temperature": [1.0], "seed": [1], "max_new_tokens": [1, 2, 3], "logit_bias": [{}]}.items():
        with pytest.raises(ValueError, match=f"{name} has {len(value)} values for 2 prompts"):
            job(two, **{name: value})
    with pytest.raises(ValueError, match="in row 1"):
        job(two, temperature=[1.0, -1.0])


def test_one_seed_gives_every_row_its_own_key():
    keys = _data(job([[1]] * 4, seed=5))
    assert len({tuple(k) for k in keys}) == 4
    assert np.array_equal(keys[2], _data(job(seed=7))[0])
    assert np.array_equal(keys, _data(job([[1]] * 4, seed=[5, 6, 7, 8])))


@pytest.mark.parametrize("seed", [None, [1, None, 3]])
def test_a_row_without_a_seed_gets_a_fresh_one_that_replays_it(seed):
    sampled = dict(temperature=1.0, max_new_tokens=20, ignore_eos=True)
    first, second = (generate(LM, [[1]] * 3, seed=seed, **sampled) for _ in range(2))
    drawn = range(3) if seed is None else [1]
    for row in range(3):
        assert (first.seeds[row] == second.seeds[row]) == (row not in drawn)
        assert (first.tokens[row] == second.tokens[row]) == (row not in drawn)
    assert all(type(s) is int and 0 <= s < 1 << 53 for s in first.seeds), "a JSON number holds so much exactly"
    if seed:
        assert first.seeds[::2] == [1, 3]
    else:
        assert len(set(first.seeds)) == 3
    assert generate(LM, [[1]] * 3, seed=first.seeds, **sampled).tokens == first.tokens
    streamed = stream(LM, [[1]] * 3, seed=seed, **sampled)
    list(streamed)
    assert generate(LM, [[1]] * 3, seed=streamed.result().seeds, **sampled).tokens == streamed.result().tokens


def test_the_seeds_of_all_rows_are_reported():
    assert generate(LM, [[1]] * 3, seed=5, max_new_tokens=1).seeds == [5, 6, 7]
    assert generate(LM, [[1]], seed=np.uint64(1 << 63), max_new_tokens=1).seeds == [1 << 63]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", [np.uint8(255), np.array(255, np.uint8), jnp.uint8(255), np.int32(2**31 - 1)])
def test_seeds_of_rows_never_wrap_around_in_the_type_of_an_arrays_number(seed):
    assert job([[1]] * 2, seed=seed).options.seed == [int(seed), int(seed) + 1]


@pytest.mark.filterwarnings("error")
def test_options_may_be_numbers_and_lists_of_numpy_and_jax():
    assert job(temperature=np.float16(0.5)).request.sampling.temperature.tolist() == [0.5]
    for ids in (np.array([3, 4]), jnp.array([3, 4]), (3, 4)):
        assert job(eos_token_id=ids).request.stop_ids.tolist() == [[3, 4, -1, -1]]
    assert job(allowed_token_ids=[jnp.array([4, 3])]).request.sampling.allowed.tolist()[0][:2] == [3, 4]


@pytest.mark.parametrize("run", [generate, stream, warmup])
def test_a_filter_without_a_temperature_is_greedy_and_says_so(run, recwarn, monkeypatch):
    for work in ("generate", "warmup"):  # the host says so, before any work
        monkeypatch.setattr(Job, work, lambda job, *args: None)
    for given in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": [None, 0.5]}):
        with pytest.warns(UserWarning, match=f"{next(iter(given))} .*temperature") as said:
            run(LM, [[1]] * 2, max_new_tokens=1, **given)
        assert len(said) == 1 and said[0].filename == __file__, "the caller's own line is named"
    recwarn.clear()
    for given in (
        {"top_p": 0.9, "temperature": 0.0}, {"top_p": 0.9, "temperature": [0.0, 1.0]}, {}, {"repetition_penalty": 1.1},
        {"top_p": 1.0, "top_k": 0, "min_p": 0.0}, {"top_p": None, "top_k": [None, -1]},
    ):  # fmt: skip
        run(LM, [[1]] * 2, max_new_tokens=1, **given)
    assert not recwarn.list


def _data(one):
    return np.asarray(jax.random.key_data(one.request.key))


def test_stop_ids_default_to_the_models_own():
    assert set(job().request.stop_ids[0].tolist()) == {7, -1}
    assert set(job(ignore_eos=True).request.stop_ids[0].tolist()) == {-1}
    assert set(job(eos_token_id=[1, 2]).request.stop_ids[0].tolist()) == {1, 2, -1}
    assert job(eos_token_id=list(range(5))).request.stop_ids.shape == (1, 8)


def test_capacity_leaves_room_for_a_block_past_the_limit():
    for prompt, new, size in [(1, 0, 1), (25, 7, 8), (250, None, 200), (64, 63, 5), (25, 98, 5)]:  # the last needs 129
        one = job([[1] * prompt], max_new_tokens=new, drafter="ngram", num_speculative_tokens=size)
        capacity = one.tokens.shape[1]
        assert int(one.request.limit[0]) + one.decoder.num_speculative_tokens + 1 <= capacity
        assert capacity % one.chunk == 0, "a last prefill chunk past the end would be clamped backwards"


def test_buckets_grow_by_at_most_a_half():
    sizes = sorted({requests.bucket(n, 1) for n in range(1, 5000)})
    assert all(b <= 1.5 * a for a, b in zip(sizes, sizes[1:], strict=False))
    assert all(requests.bucket(n, 1) >= n for n in range(1, 5000, 7))
    assert all(requests.bucket(n, 100) >= n and requests.bucket(n, 100) % 100 == 0 for n in range(1, 5000, 7))
