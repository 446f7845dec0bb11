"""Times whole runs of ``generate``: plain decoding, and rounds of the case's drafters, of others and of given trees."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode import random
from specjax.decode.draft_shape import FixedTreeShape
from specjax.decode.types import Draft, Drafter, Plan
from specjax.drafters import Cascade, Jacobi, Lookahead, PromptLookup, Retrieval
from specjax.drafting.datastore import Datastore
from specjax.drafting.topology import from_widths
from specjax.measure.benchmark.calls import DRAFT_STEP, SETTINGS
from specjax.measure.benchmark.case import Case
from specjax.measure.benchmark.table import Table
from specjax.measure.benchmark.timed import Run, generations
from specjax.measure.timing import Given


def rounds(case: Case, table: Table, settings: tuple[str, ...] = tuple(SETTINGS)) -> dict[str, Run]:
    """Times plain decoding, and rounds of each of the case's drafters under each sampling setting.

    Args:
      case: the models and the request.
      table: the table that the figures go to.
      settings: names of ``parts.SETTINGS``.

    Returns:
      The run of each setting by the name of its row after "round, ", and plain decoding as "plain".
    """
    size, common = case.num_speculative_tokens, dict(max_new_tokens=case.max_new_tokens)
    ways = {
        f"{way.name}, {name}".removeprefix(", "): (way, name)
        for way in case.drafts
        for name in settings
        if not (way.siblings and {"top_p", "top_k"} & set(SETTINGS[name]))
    }
    options = {
        row: dict(drafter=way.drafter(size), num_speculative_tokens=size, **SETTINGS[name], **common)
        for row, (way, name) in ways.items()
    }
    prompts = case.prompts()
    runs = generations(case.target, prompts, {"plain": common, **options})
    plain = runs["plain"]
    right = plain.tokens[0] == case.planted_text(prompts[0], case.max_new_tokens)
    table.add(
        "plain decoding, a step",
        plain.per_round,
        case.step_floor,
        f"{plain.tokens_per_second:.1f} tokens/s, prefill {plain.prefill * 1e3:.1f} ms, text right: {right}",
        tokens_per_second=plain.tokens_per_second,
    )
    for name, (way, _) in ways.items():
        run, floor, expected = runs[name], way.floor(size, case.speed) + case.step_floor, way.expected(size)
        bound = (run.totals.tokens_per_step or 0.0) * case.step_floor / floor  # with the kept tokens
        table.add(
            f"round, {name}",
            run.per_round,
            floor,
            f"{run.tokens_per_second:.1f} tokens/s, {run.totals.tokens_per_step:.2f} a round (expected "
            f"{expected:.2f}), {run.tokens_per_second / plain.tokens_per_second:.2f} x plain (at the expected tokens: "
            f"{expected * plain.per_round / run.per_round:.2f}; theorem 3.8 at the floors: {bound:.2f}), same text: "
            f"{run.tokens == plain.tokens}",
            tokens_per_second=run.tokens_per_second,
            tokens_per_round=run.totals.tokens_per_step,
            expected_tokens_per_round=expected,
        )
    return runs


def against_theory(case: Case, table: Table, runs: dict[str, Run]) -> None:
    """Prints each measured speedup beside the speedup of theorem 3.8, and adds the section ``theory``.

    The theorem uses the measured tokens of a round, and c from the measured draft step. Nothing is printed if there are
    no rounds, or if the mode ``draft`` did not run.
    """
    draft = next((row["ms"] / 1e3 for row in table.rows if row["name"] == DRAFT_STEP), None)
    plain = runs["plain"]
    if draft is None or len(runs) == 1:
        return
    c, found = draft / plain.per_round, []
    for name, run in runs.items():
        if name == "plain":
            continue
        bound = run.totals.tokens_per_step / (case.num_speculative_tokens * c + 1)
        measured = run.tokens_per_second / plain.tokens_per_second
        found.append({"round": name, "c": c, "theorem": bound, "measured": measured})
        print(
            f"theorem 3.8 at the measured {run.totals.tokens_per_step:.2f} tokens a round and c = {c:.3f}, {name}: "
            f"{bound:.2f} x plain; measured {measured:.2f}"
        )
    table.sections["theory"] = found
    table.save()


def drafters(case: Case, table: Table, corpus: int) -> None:
    """Times rounds of other drafters. They show the cost of a drafter's machinery beside the target's call.

    Args:
      case: the models and the request.
      table: the table that the figures go to.
      corpus: the number of random tokens that retrieval searches.
    """
    rng = np.random.default_rng(case.seed + 1)
    store = Datastore.build([rng.integers(0, case.target.config.vocab_size, corpus)])
    cascade = "cascade, prompt lookup under the draft"
    machinery: dict[str, Drafter] = {
        "prompt lookup (no match)": PromptLookup(),
        "prompt lookup, 1-token matches": PromptLookup(prompt_lookup_min=1),
        f"retrieval from {corpus:,} tokens": Retrieval.over(store, retrieval_min=1),
        "jacobi": Jacobi(),
        "lookahead, window 8": Lookahead(),
        cascade: Cascade(PromptLookup(), case.draft),
    }
    size = case.num_speculative_tokens
    common = dict(num_speculative_tokens=size, max_new_tokens=case.max_new_tokens)
    options = {name: dict(drafter=drafter, **common) for name, drafter in machinery.items()}
    for name, run in generations(case.target, case.prompts(), options).items():
        extra = size * case.draft_floor if name == cascade else 0.0
        note = f"{run.totals.tokens_per_step:.2f} a round"
        table.add(f"round, {name}", run.per_round, case.step_floor + extra, note)


def trees(case: Case, table: Table) -> None:
    """Times rounds whose draft is a given tree of random tokens, of which nearly none is accepted.

    The time is that of the target's call on the block, of the verdict, and of moving the accepted path in the cache.
    """
    vocab, options = case.target.config.vocab_size, {}
    for widths in ((2, 1, 1, 1), (4, 1, 1, 1), (8, 1, 1, 1), (16, 1, 1, 1)):
        drafter = _given_tree(widths, vocab, case.batch)
        nodes = drafter.draft.tokens.shape[1]
        common = dict(num_speculative_tokens=4, max_new_tokens=case.max_new_tokens)
        options[f"round, tree of {nodes} nodes, point masses, T = 0"] = dict(drafter=drafter, **common)
        sampled = drafter.draft._replace(probs=jax.nn.one_hot(drafter.draft.tokens, vocab))
        options[f"round, tree of {nodes} nodes, sampled, T = 1"] = dict(
            drafter=dataclasses.replace(drafter, draft=sampled), temperature=1.0, **common
        )
    for name, run in generations(case.target, case.prompts(), options).items():
        table.add(name, run.per_round, case.step_floor)


def _given_tree(widths: tuple[int, ...], vocab: int, batch: int) -> Given:
    """A drafter that proposes random tokens in a tree of the given widths, at no cost."""
    topology = from_widths(widths)
    size = len(topology.parents)
    tokens = jax.random.randint(random.key(3), (batch, size), 0, vocab)
    draft = Draft(tokens, jnp.ones(tokens.shape, bool), None, FixedTreeShape(topology.parents))
    return Given(draft, Plan((size + 1,), trees=True))
