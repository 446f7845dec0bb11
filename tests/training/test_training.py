"""Training: losses, acceptance in use, going on bit for bit after a break, and the texts that are learned from."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.decode import round as rounds
from specjax.drafters import DFlash, DraftModel, Eagle, LayerSkip, Medusa, PaSS
from specjax.generation.generate import prepare
from specjax.models import llama, modules
from specjax.models.heads.dflash_head import DFlashHeadConfig
from specjax.models.heads.eagle1_head import Eagle1HeadConfig
from specjax.models.heads.eagle3_head import Eagle3HeadConfig
from specjax.models.heads.medusa_heads import MedusaHeadsConfig
from specjax.models.heads.pass_tokens import PassTokens
from specjax.models.model import Output
from specjax.testing import table_lm, tiny_lm
from specjax.training import loop, losses
from specjax.training.sublayers import weighted
from specjax.training.texts import Texts, dialogues, over_passages
from specjax.training.train_dflash import DFlashObjective
from specjax.training.train_draft import DraftObjective
from specjax.training.train_eagle import EagleObjective
from specjax.training.train_early_exit import EarlyExitObjective
from specjax.training.train_medusa import MedusaObjective
from specjax.training.train_pass import PaSSObjective

TARGET = tiny_lm(2, vocab_size=24, std=0.5, num_hidden_layers=3)
CONFIG = Eagle3HeadConfig(dataclasses.replace(TARGET.config, num_hidden_layers=1), (1, 2))
HEAD = EagleObjective(jnp.arange(24), TARGET.head_table(), CONFIG, steps=2)
HEAD1 = EagleObjective(jnp.arange(24), TARGET.head_table(), Eagle1HeadConfig(CONFIG.layer), steps=2)
BLOCKS = DFlashObjective(jnp.arange(24), TARGET.head_table(), DFlashHeadConfig(CONFIG.layer, (1, 2), 3, 0))
PASS = PaSSObjective.of(TARGET, num_tokens=2, places=6)
HEADS = MedusaObjective(jnp.arange(24), TARGET.head_table(), MedusaHeadsConfig(32, 24, num_heads=2))
EARLY = EarlyExitObjective.of(TARGET, (1,), dropout=0.3)
RECIPE = loop.Recipe(steps=40, batch=8, learning_rate=1e-2, warmup=4)


def own_texts(target=TARGET, count: int = 48, size: int = 24) -> Texts:
    prompts = [[i % 24, i // 24] for i in range(count)]
    said = specjax.generate(target, prompts, temperature=1.0, max_new_tokens=size - 2, ignore_eos=True).tokens
    return Texts.of([p + t for p, t in zip(prompts, said, strict=True)], [2] * count, size, 24)


TEXTS = own_texts()

# What a random target says after look-ahead tokens hardly depends on them. After these it is their own law, and each
# token of a text follows the same.
ONE_LAW = table_lm(np.tile(np.random.default_rng(2).dirichlet(np.full(24, 0.2)), (24, 1)))
ANY_TOKENS = {"table": 0.3 * jax.random.normal(jax.random.key(2), (2, 24))}
ANY_PASS = dataclasses.replace(PaSSObjective.of(ONE_LAW, num_tokens=2, places=6), first=ANY_TOKENS)


def test_losses_of_a_draft_that_is_right_and_of_one_that_is_not():
    p = jnp.array([[0.5, 0.3, 0.1], [0.0, 1.0, 0.0]])  # the first row's token 3 can't be drafted
    q = jnp.array([[0.25, 0.25, 0.5], [0.5, 0.25, 0.25]])
    following = jnp.array([3, 1])
    log_q = jnp.log(q)
    np.testing.assert_allclose(losses.cross_entropy(p, log_q, following), [0.0, np.log(4)], rtol=1e-6)
    np.testing.assert_allclose(losses.kl(p, log_q, following)[1], np.log(4), rtol=1e-6)
    np.testing.assert_allclose(losses.rejection(p, log_q, following), [1 - 0.6, 1 - 0.25], rtol=1e-6)


def test_a_lesson_pairs_the_answer_to_each_token_with_the_token_that_follows():
    p = np.array([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.4, 0.1]])
    tokens, weights = jnp.array([[0, 3, 1]]), jnp.array([[1.0, 2.0, 3.0]])
    lesson = losses.Lesson.of(jnp.log(p)[None], tokens, weights, jnp.array([3, 0]))  # tokens 1 and 2 can't be drafted
    np.testing.assert_allclose(lesson.p[0], p[:, [3, 0]], rtol=1e-6)
    assert lesson.best.tolist() == [[0, 1, 2]] and lesson.following[0, :2].tolist() == [0, 2]
    assert lesson.weights.tolist() == [[2.0, 3.0, 0.0]], "the weight is that of the token that follows"
    assert lesson.after(1).weights.tolist() == [[3.0, 0.0]]
    assert losses.mean(jnp.array([1.0, 5.0]), jnp.array([3.0, 1.0])) == 2.0
    assert losses.combined([{"loss": 1.0}, {"loss": 4.0}], jnp.array([2.0, 1.0]))[0] == 2.0


OBJECTIVES = {
    "eagle3": HEAD,
    "eagle": HEAD1,
    "dflash": BLOCKS,
    "medusa": HEADS,
    "pass": ANY_PASS,
    "draft": DraftObjective.from_layers(TARGET, (0, 2)),
    "early exit": dataclasses.replace(EARLY, dropout=0.0),
}


@pytest.mark.parametrize(
    "objective",
    [pytest.param(x, id=n, marks=() if n == "eagle3" else pytest.mark.slow) for n, x in OBJECTIVES.items()],
)
def test_training_raises_acceptance_in_use(objective, monkeypatch):
    """What the loop reports is what a run shows: acceptance rises, and the drafter of the weights decodes with it."""
    dispatched, steps = [], loop.train_steps
    monkeypatch.setattr(loop, "train_steps", lambda *x, **recipe: dispatched.append(x[5]) or steps(*x, **recipe))
    teacher, texts = (ONE_LAW, own_texts(ONE_LAW)) if objective is ANY_PASS else (TARGET, TEXTS)
    params, curve = loop.train(objective, teacher, texts, texts.rows(slice(0, 8)), RECIPE, every=20)

    def acceptance(params):
        target = teacher
        if isinstance(objective, EagleObjective):
            drafter = Eagle(objective.config, {**params, "lm_head": HEAD.lm_head}, HEAD.tokens)
        elif objective is BLOCKS:
            drafter = DFlash(BLOCKS.config, {**params, "lm_head": HEAD.lm_head}, BLOCKS.tokens)
        elif objective is ANY_PASS:
            drafter = PaSS(objective.config, params)
        elif objective is HEADS:
            drafter = Medusa(HEADS.config, {**params, "lm_head": HEADS.lm_head}, HEADS.tokens)
        elif isinstance(objective, EarlyExitObjective):
            target, drafter = objective.whole.lm(params, jnp.float32), LayerSkip(exit_layer=1)
        else:
            drafter = DraftModel(objective.lm(params, jnp.float32))
        out = specjax.generate(
            target, [[i] for i in range(24)], drafter=drafter, num_speculative_tokens=2, temperature=1.0,
            max_new_tokens=24, ignore_eos=True,
        )  # fmt: skip
        return sum(m.num_accepted_tokens for m in out.metrics) / sum(m.num_draft_tokens for m in out.metrics)

    before, after = acceptance(objective.init(0)), acceptance(params)
    # Training the last layer alone makes the exit better by 0.03 too.
    assert after > before + (0.08 if isinstance(objective, EarlyExitObjective) else 0.02), (before, after)
    assert dispatched == [10] * 4, "a dispatch makes several steps"
    assert [c["step"] for c in curve] == [20, 40] and np.all(np.isfinite(curve[-1]["held_out_loss"]))


def test_entry_j_of_a_head_learns_token_j_plus_2_and_only_from_drafts_that_have_begun():
    """A target that says t after token t. The outputs are right of entries with a draft, and wrong of the others."""

    class Target:
        def alloc_cache(self, batch, capacity):
            return None

        def __call__(self, tokens, cache, taps):
            return Output(100 * jnp.eye(5, 24)[None], None, None, {})

    class Right(EagleObjective):
        def unrolled(self, params, target, tokens, out):
            right = jax.nn.log_softmax(100 * jnp.eye(6, 24)[None, 1:5])
            yield from (right.at[:, :step].set(-100.0) for step in range(self.steps))

    objective = Right(HEAD.tokens, HEAD.lm_head, CONFIG, steps=2)
    loss, figures = objective({}, Target(), jnp.ones((1, 5), jnp.int32), jnp.ones((1, 5)), None)
    assert loss == 0 and figures["alpha"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "loss", [pytest.param(name, marks=() if name == "acceptance" else pytest.mark.slow) for name in losses.LOSSES]
)
def test_every_loss_falls(loss, bars):
    objective = dataclasses.replace(HEAD, loss=loss)
    _, curve = loop.train(objective, TARGET, TEXTS, TEXTS.rows(slice(0, 8)), RECIPE, every=10)
    assert np.mean(curve[-1]["train_loss"]) < np.mean(curve[0]["train_loss"])
    assert bars() == [("training", RECIPE.steps, RECIPE.steps)]


def test_layers_are_left_out_more_often_the_deeper_they_stand():
    objective = EarlyExitObjective.of(tiny_lm(num_hidden_layers=4), dropout=0.8)
    kept = jnp.mean(jax.vmap(objective.kept)(jax.random.split(jax.random.key(0), 4000)), axis=0)
    np.testing.assert_allclose(kept[:, 0], 1 - 0.8 * (2 ** (np.arange(4) / 3) - 1), atol=0.03)
    np.testing.assert_array_equal(kept[:, 0], kept[:, 1])
    tokens = jnp.arange(12).reshape(2, 6)
    cache, sublayers = TARGET.alloc_cache(2, 6), jnp.array([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    run = tuple((bool(a), bool(m)) for a, m in sublayers)
    np.testing.assert_array_equal(
        weighted(TARGET, sublayers)(tokens, cache).logits, TARGET(tokens, cache, run=run).logits
    )


def test_each_step_leaves_out_layers_of_its_own():
    objective = dataclasses.replace(EARLY, dropout=0.9)

    def loss(step):
        state = loop.start(objective, RECIPE)._replace(step=jnp.int32(step))
        rows = np.tile(loop.rows_of(len(TEXTS.tokens), RECIPE, 0), (loop.STEPS, 1))
        texts = jnp.asarray(TEXTS.tokens), jnp.asarray(TEXTS.weights())
        return loop.train_steps(objective, TARGET, state, texts, rows, 1, recipe=RECIPE)[1]["loss"].tolist()

    found = [loss(step) for step in (0, 0, 1, 2, 3)]
    assert found[0] == found[1] and any(x != found[0] for x in found[2:])


def test_a_model_that_can_not_be_trained_to_leave_early_is_refused():
    for target, exits, dropout, why in (
        (TARGET, (4,), 0.1, "after 1 to 3"),
        (TARGET, (1,), 1.0, "dropout"),
        (TARGET.quantize("int8"), (1,), 0.1, "int8"),
    ):
        with pytest.raises(ValueError, match=why):
            EarlyExitObjective.of(target, exits, dropout)


class Killed(Exception):
    pass


@pytest.mark.parametrize("objective", [
    pytest.param(HEAD, id="eagle"),
    pytest.param(EARLY, id="early exit, layers left out by chance", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_run_that_was_broken_off_goes_on_bit_for_bit(tmp_path, objective):
    recipe = dataclasses.replace(RECIPE, steps=12)

    def train(folder, progress=lambda curve: None):
        return loop.train(objective, TARGET, TEXTS, TEXTS.rows(slice(0, 8)), recipe, folder, every=4, progress=progress)

    def kill(curve):
        if curve[-1]["step"] == 8:
            raise Killed

    whole, whole_curve = train(tmp_path / "whole")
    with pytest.raises(Killed):
        train(tmp_path / "broken", kill)
    kept = tmp_path / "broken" / "curve.json"
    kept.write_text(json.dumps([*json.loads(kept.read_text()), {"step": 8, "seconds": 0.0}]))  # killed a moment later
    resumed, curve = train(tmp_path / "broken")
    assert [line["step"] for line in curve] == [4, 8, 12], "step 8 is measured again: its weights were not written"
    assert curve == [{**line, "seconds": now["seconds"]} for line, now in zip(whole_curve, curve, strict=True)]
    assert curve[0]["seconds"] < curve[2]["seconds"], "the clock goes on"
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)
    other = dataclasses.replace(objective, loss="acceptance")
    for changed, texts in ((other, TEXTS), (objective, TEXTS.rows(slice(8, None)))):
        with pytest.raises(ValueError, match="checkpoints of another run"):
            loop.train(changed, TARGET, texts, texts, recipe, tmp_path / "broken")


def test_each_epoch_shows_every_text_once():
    recipe = dataclasses.replace(RECIPE, batch=12)
    count = len(TEXTS.tokens)
    epochs = [np.concatenate([loop.rows_of(count, recipe, 4 * e + i) for i in range(4)]) for e in range(2)]
    for shown in epochs:
        assert sorted(shown) == list(range(count))
    assert not np.array_equal(*epochs)


class Template:
    """A tokenizer whose text is digits, and whose template puts 20 21 before a turn and 22 23 after it."""

    vocab_size = 24

    def encode(self, text: str) -> list[int]:
        return [ord(c) % 19 for c in text]

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))

    def apply_chat_template(self, message: str, add_generation_prompt: bool = True) -> list[int]:
        return [20, 21, *self.encode(message), 22, 23]


def test_dialogues_are_the_targets_own_words_in_its_template(tmp_path, bars):
    lm = dataclasses.replace(
        TARGET, tokenizer=Template(), config=dataclasses.replace(TARGET.config, eos_token_ids=(19,))
    )
    texts = dialogues(lm, 8, size=60, question=12, batch=4, prompts=["abc"])
    assert bars() == [("rows", 8, 8)]
    assert texts.tokens.shape == (8, 60)
    assert texts.tokens[0, :7].tolist() == [20, 21, *Template().encode("abc"), 22, 23]
    for row, length in zip(texts.tokens, texts.lengths, strict=True):
        assert row[:2].tolist() == [20, 21] and 22 in row[2 : 2 + 12 + 20]
        assert length == 60 or row[length - 1] == 19
    starts = texts.own.argmax(axis=1)
    assert starts.tolist() == [7] + [2] * 7, "the given question is not the model's own"
    assert texts.weights().sum() == texts.own_tokens == np.sum(texts.lengths - starts)
    again = dialogues(lm, 8, size=60, question=12, batch=4, prompts=["abc"])
    assert np.array_equal(again.tokens, texts.tokens)
    told = dialogues(lm, 8, size=60, question=12, batch=4, prompts=["abc"], folder=tmp_path / "kept")
    said = tmp_path / "kept" / "60-12" / "said.jsonl"
    first, *_, last = said.read_text().splitlines()
    mark = json.loads(first) | {"tokens": [1, 2, 3]}
    said.write_text(json.dumps(mark) + "\n" + last[:9])  # a process that is killed leaves half a line
    marked = dialogues(lm, 8, size=60, question=12, batch=4, prompts=["abc"], folder=tmp_path / "kept")
    same = (marked.tokens == told.tokens).all(axis=1)
    assert np.flatnonzero(~same).tolist() == [mark["id"]], "what was kept is not said again, all else is the same"
    with pytest.raises(ValueError, match="begun with other settings"):
        dialogues(lm, 8, size=60, question=12, batch=4, prompts=["abd"], folder=tmp_path / "kept")
    texts.save(tmp_path / "t.npz")
    assert np.array_equal(Texts.load(tmp_path / "t.npz").tokens, texts.tokens)
    with pytest.raises(ValueError, match="no tokenizer"):
        dialogues(TARGET, 4)


def test_packed_rows_hold_every_text_and_no_more():
    rows = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10], [11, 12]]
    texts = Texts.of(rows, [1, 0, 2, 0, 2], 4, 24)
    packed = texts.packed(6)
    assert packed.tokens.tolist() == [[1, 2, 3, 4, 5, 0], [6, 7, 8, 9, 10, 0], [11, 12, 0, 0, 0, 0]]
    assert packed.lengths.tolist() == [5, 5, 2]
    assert packed.own.astype(int).tolist() == [[0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 0], [0] * 6]
    assert packed.own_tokens == texts.own_tokens
    with pytest.raises(ValueError, match="a text of 4 tokens doesn't fit a row of 3"):
        texts.packed(3)


def test_questions_on_passages_hold_what_dialogues_said():
    lm = dataclasses.replace(TARGET, tokenizer=Template())
    texts = Texts.of([[20, 21, 1, 2, 22, 23, 3, 4, 5], [20, 21, 7, 22, 23, 8, 9], [20, 21, 7]], [2, 2, 2], 12, 24)
    asked = over_passages(lm, texts, 8, longest=4)
    assert asked[0].startswith("Summarize the following text:\n\n")
    assert all(any(answer in q for answer in "38") for q in asked)
    assert any("1 2" in q or "7" in q for q in asked) and not any("20" in q or "23" in q for q in asked)
    assert asked == over_passages(lm, texts, 8, longest=4)
    with pytest.raises(ValueError, match="none of the texts is a dialogue"):
        over_passages(lm, texts.rows(slice(2, 3)), 8, longest=4)


@pytest.mark.slow
def test_look_ahead_tokens_see_in_training_what_they_see_when_drafting():
    """After the last token of a prompt, training has the very states that a draft's own call gives."""
    prompt, params = [3, 1, 8, 2, 2, 6, 10], modules.init(PassTokens, PASS.config, 1)
    text = jnp.array([[*prompt, 5, 7, 9, 11]])
    at = jnp.array([2, len(prompt) - 1])
    hidden = PASS._hidden(params, TARGET, text, at, at[:, None] + 1 + jnp.arange(2))
    drafter = PaSS(PASS.config, params)
    job = prepare(TARGET, [prompt], drafter=drafter, num_speculative_tokens=3, temperature=1.0)
    draft = jax.jit(rounds.propose)(job.decoder, job.start())[0]
    q = jax.nn.softmax(llama.merge(TARGET.config, TARGET.params).head(hidden[0, -2:]), axis=-1)
    np.testing.assert_allclose(q, draft.probs[0, 1:], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("objective", [HEAD, HEAD1], ids=["eagle3", "eagle"])
def test_a_head_sees_in_training_what_it_sees_when_drafting(objective):
    """A step's entry sees the target's states up to where its draft began, and the draft's own outputs after that."""
    prompt, params = [3, 1, 8, 2, 2, 6, 10], objective.init(1)
    drafter = Eagle(objective.config, {**params, "lm_head": objective.lm_head}, objective.tokens)
    job = prepare(TARGET, [prompt], drafter=drafter, num_speculative_tokens=2, temperature=1.0)
    draft = jax.jit(rounds.propose)(job.decoder, job.start())[0]
    text = jnp.array([[*prompt, *draft.tokens[0].tolist()]])
    out = TARGET(text, TARGET.alloc_cache(*text.shape), taps=objective.config.taps)
    for step, log_q in enumerate(objective.unrolled(params, TARGET, text, out)):
        np.testing.assert_allclose(jnp.exp(log_q[0, len(prompt) - 2 + step]), draft.probs[0, step], atol=2e-5)


@pytest.mark.parametrize("wrong", [dict(batch=0), dict(steps=1.5), dict(learning_rate=-1), dict(clip=0)])
def test_a_recipe_of_the_wrong_kind_is_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
        loop.Recipe(**{"steps": 3, **wrong})
