"""Text, stop strings and the record, on a model that recites a known cycle."""

import dataclasses
import json

import numpy as np
import pytest

from specjax import Metrics, NoDistributionError, generate, stream, testing
from specjax.drafters import DraftModel
from specjax.generation.completion import Completion, RowRound
from specjax.generation.generate import prepare
from specjax.text.text_stream import TextStream


class Pieces:
    """A tokenizer of pieces, some of them single bytes; decoding drops a leading space, as SentencePiece does."""

    def __init__(self, pieces):
        self.pieces = pieces

    def decode(self, tokens):
        text = b"".join(self.pieces[t] for t in tokens).decode("utf-8", errors="replace")
        return text.removeprefix(" ")

    def special_id(self, text):
        return None


ALPHABET = Pieces([b" a", b"b", b" ", b"\n", b"c d", *(bytes([b]) for b in "é€🙂".encode()), b"ab"])


@pytest.mark.parametrize("seed", range(20))
def test_pieces_add_up_to_the_whole_text(seed):
    rng = np.random.default_rng(seed)
    emoji = list(range(5, 14))  # é€🙂, byte by byte
    tokens = [t for _ in range(8) for t in (emoji if rng.random() < 0.3 else [int(rng.integers(len(ALPHABET.pieces)))])]
    text = TextStream(ALPHABET)
    pieces = [text.push(t) for t in tokens] + [text.flush()]
    assert "".join(pieces) == text.text == ALPHABET.decode(tokens)


def test_an_unfinished_character_is_held_back():
    text = TextStream(ALPHABET)
    assert [text.push(t) for t in (1, 5, 6, 7, 8, 9)] == ["b", "", "é", "", "", "€"]
    text.push(10)
    assert text.text == "bé€"
    assert text.flush() == "\N{REPLACEMENT CHARACTER}"


def test_stop_strings_are_found_across_pushes_and_only_whole():
    text = TextStream(ALPHABET, stop=("bcc", "a c d"))
    for token, stopped in [(1, False), (0, False), (2, False), (1, False), (0, False), (2, False), (4, True)]:
        text.push(token)
        assert text.stopped is stopped, text.text
    text = TextStream(ALPHABET, stop=("b\nc",))
    assert [text.push(t) and text.stopped for t in (1, 3, 4)] == [False, False, True]
    text = TextStream(ALPHABET, stop=("\n", "bbb"))  # one stop string is longer than the other
    assert [text.push(t) and text.stopped for t in (1, 1, 1)] == [False, False, True]


VOCAB = 20
LETTERS = Pieces([bytes([ord("a") + i]) for i in range(VOCAB)])


@pytest.fixture(scope="module")
def cycle():
    """A model that follows a with b, b with c, ..., and a draft that does too."""
    table = np.roll(np.eye(VOCAB), 1, axis=1)
    lm = testing.table_lm(table)
    return lm.__class__(lm.config, lm.params, LETTERS)


SIZE = 8


def recite(cycle, **options):
    return generate(cycle, "a", drafter=DraftModel(cycle), num_speculative_tokens=SIZE, **options)


@pytest.fixture(autouse=True, scope="module")
def encode():
    Pieces.encode = lambda self, text: [self.pieces.index(c.encode()) for c in text]
    yield
    del Pieces.encode


@pytest.mark.parametrize("length", [1, 2, 3])
def test_stop_string_is_found_at_every_place_of_a_block(cycle, length):
    text = "bcdefghijklmnopqrst"
    for end in range(length, 2 * SIZE + 2):
        out = recite(cycle, stop=text[end - length : end], max_new_tokens=30)
        assert out.texts == [text[:end]]
        assert out.finish_reasons == ["stop"]
        assert len(out.tokens[0]) == out.metrics[0].completion_tokens == end
        out.metrics[0].check()


@pytest.mark.parametrize("least", [0, 1, 2, 3, 4, SIZE, SIZE + 1, 2 * SIZE, 2 * SIZE + 1])
def test_no_stop_token_and_no_stop_string_ends_a_row_before_min_new_tokens(cycle, least):
    """The text is a b c d ...: stop strings that end early are passed by, one that ends later counts."""
    options = dict(min_new_tokens=least, max_new_tokens=30)
    want = "bcdefghijklmnopqrst"
    for text in ("d", "cde", "ijk"):
        out, end = recite(cycle, stop=[text, "rs"], **options), want.index(text) + len(text)
        assert out.texts == [want[: end if end > least else want.index("s") + 1]]
        assert out.finish_reasons == ["stop"]
        out.metrics[0].check()
    out = recite(cycle, eos_token_id=[3, 17], **options)
    # The forbidden token is followed by another, as a model that recites has nothing else to say: its own next best.
    assert out.finish_reasons == ["stop"] and len(out.tokens[0]) > least
    assert not {3, 17} & set(out.tokens[0][:least]) and out.tokens[0][-1] in (3, 17)


def test_a_row_has_its_own_min_new_tokens(cycle):
    job = prepare(cycle, ["a", "a"], stop="de", min_new_tokens=[0, 5])
    rows = [Completion(job, index) for index in range(2)]
    for row in rows:
        list(row.advance(RowRound(6, 5, 5, True, False, np.arange(1, 7), None, None)))
    assert [row.tokens for row in rows] == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]


def test_the_earliest_of_several_stops_wins(cycle):
    out = recite(cycle, stop=["hij", "f", "gh"], max_new_tokens=30)
    assert out.texts == ["bcdef"]


def test_ids_logprobs_text_and_record_end_together(cycle):
    events = stream(
        cycle, "a", drafter=DraftModel(cycle), num_speculative_tokens=SIZE, stop="de", logprobs=True, max_new_tokens=30
    )
    seen = list(events)
    out = events.result()
    assert "".join(e.text for e in seen) == out.texts[0] == "bcde"
    assert len(out.tokens[0]) == len(out.logprobs[0]) == len(seen) == out.metrics[0].completion_tokens == 4
    assert [e.finish_reason for e in seen] == [None, None, None, "stop"]
    np.testing.assert_allclose(out.logprobs[0], 0.0, atol=1e-6)
    follow_up = generate(cycle, [out.prompt_tokens[0] + out.tokens[0]], max_new_tokens=5)
    assert follow_up.texts == ["fghij"]


@pytest.mark.parametrize("place", range(1, 2 * SIZE + 2))
def test_stop_token_ends_row_and_counters(cycle, place):
    out = recite(cycle, eos_token_id=place, max_new_tokens=30)
    metrics = out.metrics[0]
    assert out.tokens == [list(range(1, place + 1))]
    assert out.finish_reasons == ["stop"]
    metrics.check()
    assert metrics.completion_tokens == place
    assert metrics.num_accepted_tokens == place - (place // (SIZE + 1)), "every ninth token is the target's own"
    again = stream(cycle, "a", drafter=DraftModel(cycle), num_speculative_tokens=SIZE, eos_token_id=place)
    assert [e.token for e in again] == out.tokens[0] and again.result().metrics == out.metrics


def test_a_token_inside_a_draft_after_which_nothing_is_possible_is_the_last(cycle):
    embed = cycle.params["embed"]
    broken = dataclasses.replace(cycle, params={**cycle.params, "embed": embed.at[5].set(np.nan)})
    with pytest.raises(NoDistributionError, match="no token has a finite logit in row 0 after 5 new tokens"):
        generate(broken, "a", drafter=DraftModel(cycle), num_speculative_tokens=SIZE, max_new_tokens=30)


def test_tokens_per_step_of_perfect_and_useless_drafts(cycle):
    right = recite(cycle, max_new_tokens=45, ignore_eos=True).metrics[0]
    assert (right.tokens_per_step, right.mean_acceptance_length) == (9.0, 9.0)
    assert right.acceptance_per_position == [1.0] * SIZE
    assert right.acceptance_histogram == [0] * SIZE + [5]
    backwards = testing.table_lm(np.roll(np.eye(VOCAB), -1, axis=1))
    wrong = generate(cycle, "a", drafter=DraftModel(backwards), num_speculative_tokens=SIZE, max_new_tokens=20).metrics[
        0
    ]
    assert (wrong.tokens_per_step, wrong.mean_acceptance_length, wrong.num_steps) == (1.0, 1.0, 20)


def test_leaving_a_stream_early_keeps_what_was_read(cycle):
    events = stream(cycle, "a", drafter=DraftModel(cycle), num_speculative_tokens=SIZE)
    for _ in range(3):
        next(events)
    out = events.result()
    assert out.tokens == [[1, 2, 3]] and out.finish_reasons == [None]
    out.metrics[0].check()


def test_a_record_is_cut_where_the_tokens_end():
    full = Metrics.from_record([3, 3, 0], [3, 1, 0], 7, 3)
    assert (full.per_step_accepted, full.num_steps, full.num_spec_steps) == ([3, 1, 0], 3, 2)
    assert (full.draft_acceptance_rate, full.mean_acceptance_length) == (4 / 6, 3.0)
    assert full.acceptance_per_position == [1.0, 0.5, 0.5]
    cut = Metrics.from_record([3, 3, 0], [3, 1, 0], 2, 3)
    assert (cut.per_step_drafted, cut.per_step_accepted) == ([3], [2])
    none = Metrics.from_record([], [], 0, 3)
    assert none.draft_acceptance_rate is none.mean_acceptance_length is none.tokens_per_step is None
    for metrics in (full, cut, none):
        metrics.check()
        assert json.loads(json.dumps(metrics.to_dict()))["completion_tokens"] == metrics.completion_tokens
    with pytest.raises(ValueError, match="completion_tokens is 9"):
        Metrics(9, [3], [3], 3).check()
    with pytest.raises(ValueError, match="accepted 2 of 1"):
        Metrics(3, [1], [2], 3).check()
