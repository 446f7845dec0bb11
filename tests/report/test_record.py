"""The record of a run: whole wherever its stream ended, and refused when it contradicts itself."""

import copy
import json

import jax
import pytest
from recorded_runs import DRAFT, SETTINGS, SIZE, TARGET, Letters, streamed

from specjax import Metrics, stream
from specjax.generation import trace
from specjax.generation.generate import prepare
from specjax.measure import timing
from specjax.report import record


def recorded(events, prompts=("a", "bcd"), **timing):
    result = events.result()
    speed = sum(map(len, result.tokens)) / 2
    timing = {"prefill": 1.0, "decode": 2.0, "tokens_per_second": speed, "streamed": True, **timing}
    return record.run(result, prompts, SETTINGS, timing, Letters(), events.trace)


@pytest.fixture(scope="module")
def whole():
    return recorded(
        streamed(),
        calls={"plain_step": 0.1, "draft": 0.01, "verify": {"4": 0.1}},
        plain={"prefill": 1.0, "decode": 4.0, "tokens_per_second": 6.0},
        ratio=2.0,
        identical=True,
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"read": 1},
        {"read": 6},
        {"stop": "e"},
        {"stop": "fg"},
        {"eos_token_id": 7},
        {"max_new_tokens": 5},
        {"temperature": 1.0},
    ],
    ids=str,
)
def test_rounds_and_tokens_end_together(options):
    events = streamed(**options)
    found = recorded(events)  # holds every identity, or raises
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert any(entry["drafted"] for entry in events.trace[0])
    for completion, rounds in zip(found["completions"], events.trace, strict=True):
        assert completion["rounds"] == rounds, "the stream's trace is what the record holds"
        own = [entry["token"] for entry in rounds if entry["token"] is not None]
        assert len(own) == sum(origin != "accepted" for origin in completion["origins"])


@pytest.mark.parametrize("asked", [False, True, 0, 2])
def test_log_probabilities_stand_beside_their_tokens(asked):
    events = streamed(logprobs=asked, stop="e")
    found = recorded(events)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    for row, completion in enumerate(found["completions"]):
        assert completion["logprobs"] == (events.result().logprobs[row] if asked is not False else None)
        if asked == 2:
            best = [[tuple(pair) for pair in pairs] for pairs in completion["top_logprobs"]]
            assert best == events.result().top_logprobs[row] and {len(pairs) for pairs in best} == {2}
        else:
            assert completion["top_logprobs"] is None


def test_log_probabilities_that_are_not_the_tokens_are_refused():
    found = recorded(streamed(logprobs=2))
    for name in ("logprobs", "top_logprobs"):
        broken = copy.deepcopy(found)
        broken["completions"][0][name].pop()
        with pytest.raises(ValueError, match=f"{name}, and tokens"):
            record.check(broken)


def test_the_process_wide_settings_that_numbers_depend_on_are_stated():
    usual = {"matmul_precision": None, "x64": False, "prng": "threefry2x32", "attention": "xla"}
    assert {name: record.environment().get(name, "missing") for name in usual} == usual
    with jax.default_matmul_precision("bfloat16"):
        assert record.environment()["matmul_precision"] == "bfloat16"
    with jax.enable_x64(True):
        assert record.environment()["x64"] is True
    found = recorded(streamed())
    record.check(found)
    for name in usual:
        del found["environment"][name]
    record.check(found)  # as records were written before


def test_each_completion_states_its_seed():
    found = recorded(streamed(seed=[3, None]))
    assert found["completions"][0]["seed"] == 3
    again = recorded(streamed(seed=[completion["seed"] for completion in found["completions"]], temperature=1.0))
    assert [c["seed"] for c in again["completions"]] == [c["seed"] for c in found["completions"]]


def test_origins_are_what_the_events_said():
    events = stream(TARGET, ["a", "bcd"], drafter=DRAFT, num_speculative_tokens=SIZE, max_new_tokens=11)
    from_draft = [event.from_draft for event in events if event.row == 0]
    origins = events.result().metrics[0].origins()
    # a: the draft has b right, then d for c; c: d right; ...
    assert origins[:4] == ["accepted", "correction"] * 2
    assert [origin == "accepted" for origin in origins] == from_draft
    assert Metrics(5, [0, 3], [0, 3], 3).origins() == ["plain", *["accepted"] * 3, "bonus"]
    assert Metrics(3, [3], [3], 3).origins() == ["accepted"] * 3
    assert Metrics(3, [3], [2], 3).origins() == ["accepted", "accepted", "correction"]


def test_alpha_counts_only_judged_tokens():
    metrics = streamed(max_new_tokens=20).result().metrics[0]
    # Until the limit leaves less room, each round drafts 3, accepts 1 and refuses 1; the third is never judged.
    assert metrics.per_step_drafted == [3] * 9 + [1] and metrics.per_step_accepted == [1] * 10
    assert metrics.alpha == 10 / 19
    assert metrics.draft_acceptance_rate == 10 / 28
    assert Metrics(2, [3], [2], 3).alpha == 1.0, "a stop string cut the step short: nothing was refused"
    assert Metrics(3, [3], [2], 3).alpha == 2 / 3
    assert Metrics(1, [0], [0], 3).alpha is None


def test_a_trace_line_shows_every_fate(whole):
    first = whole["completions"][0]["rounds"][0]
    line = trace.line(first, colour=False)
    assert "'b' q=1.00 p=1.00 accepted" in line and "rejected" in line and "correction 'c'" in line


def faulty(whole, change):
    broken = copy.deepcopy(whole)
    change(broken)
    return broken


def first(name):
    return lambda r: r["completions"][0][name]


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda r: r.update(format="x"), '"format" must be "specjax-run"'),
        (lambda r: r.update(version=2), "version is 2"),
        (lambda r: r.pop("timing"), "the record lacks 'timing'"),
        (lambda r: r["settings"].update(model=1), "settings: 'model' must be of type str, got 1"),
        (lambda r: r["timing"].update(decode=-1.0), "timing: 'decode' must be a finite number >= 0"),
        (lambda r: r["timing"].update(decode=3.0), "timing.tokens_per_second is"),
        (lambda r: r["timing"].update(ratio=3.0), "timing.ratio is 3.0"),
        (lambda r: r["timing"].pop("plain"), "timing lacks 'plain'"),
        (lambda r: r["timing"]["calls"]["verify"].clear(), "widest block"),
        (lambda r: first("tokens")(r).pop(), r"completions\[0\]: tokens, and completion_tokens"),
        (lambda r: first("origins")(r).reverse(), r"completions\[0\]: origins"),
        (lambda r: first("pieces")(r).__setitem__(0, "z"), r"completions\[0\]: text, and its pieces"),
        (lambda r: first("metrics")(r).update(alpha=0.9), r"completions\[0\].metrics: alpha is 0.9"),
        (lambda r: first("metrics")(r).pop("per_step_drafted"), "metrics lack per_step_drafted"),
        (lambda r: first("metrics")(r)["per_step_accepted"].__setitem__(0, 9), "step 0 accepted 9"),
        (lambda r: first("rounds")(r).pop(), r"completions\[0\].rounds, and steps"),
        (lambda r: first("rounds")(r)[1].update(position=0), r"rounds\[1\]: position"),
        (lambda r: first("rounds")(r)[0].update(kind="bonus"), r"rounds\[0\]: kind"),
        (lambda r: first("rounds")(r)[0].update(token=0), "what they commit, and tokens"),
        (lambda r: first("rounds")(r)[0]["drafted"].pop(), r"rounds\[0\]: drafted, and per_step_drafted"),
        (lambda r: first("rounds")(r)[0]["drafted"][0].update(p=1.5), r"drafted\[0\]: q and p"),
        (lambda r: first("rounds")(r)[0]["drafted"].reverse(), r"rounds\[0\]: accepted tokens, and the first"),
        (lambda r: first("rounds")(r)[0]["drafted"].__setitem__(0, 3), r"drafted\[0\] must be an object, got 3"),
    ],
)  # fmt: skip
def test_a_contradiction_is_named(whole, change, says):
    record.check(whole)
    with pytest.raises(ValueError, match=says):
        record.check(faulty(whole, change))


def test_what_a_later_drafter_adds_is_kept(whole):
    record.check(faulty(whole, lambda r: first("rounds")(r)[0].update(entropy=1.5)))
    with pytest.raises(ValueError, match="'entropy' must be of type int or float"):
        record.check(faulty(whole, lambda r: first("rounds")(r)[0].update(entropy="high")))


def test_load_names_the_file(tmp_path, whole):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(whole))
    assert record.load(path) == whole
    path.write_text("{")
    with pytest.raises(ValueError, match="run.json is not a JSON file"):
        record.load(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="run.json is not a usable record"):
        record.load(path)


def test_calls_are_timed_by_width():
    options = dict(num_speculative_tokens=SIZE, max_new_tokens=2)
    found = timing.calls(prepare(TARGET, ["a", "abab"], drafter="ngram", **options), count=2, repeats=1)
    assert set(found) == {"plain_step", "draft", "verify"} and set(found["verify"]) == {"1", "4"}
    assert all(seconds > 0 for seconds in (found["plain_step"], found["draft"], *found["verify"].values()))
    plain = timing.calls(prepare(TARGET, ["a", "abab"], **options), count=2, repeats=1)
    assert plain["draft"] == 0.0 and plain["verify"] == {"1": plain["plain_step"]}
