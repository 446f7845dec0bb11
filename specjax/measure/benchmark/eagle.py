"""An EAGLE-3 head of a published head's shape in a benchmark: acceptance rates by depth and rank, and its trees."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from specjax.drafters import DynamicTree, Eagle
from specjax.drafting import theory
from specjax.drafting.topology import Topology, expected_length, from_choices, sequoia
from specjax.measure.benchmark.drafting import Drafting
from specjax.testing.planted_eagle import FALL

# How often each drafted token of a chain of 7 was accepted: EAGLE-3's head of Llama 3.1 8B on MT-bench, greedy, in vLLM
# (github.com/vllm-project/vllm/issues/26191, the earlier of its two measurements, 3.53 tokens a round).
REACHED = (0.74, 0.54, 0.41, 0.31, 0.23, 0.17, 0.13)
# Tokens a round of the same head with a dynamic tree 8 deep, greedy (Li et al. 2025, EAGLE-3, table 1).
TREE_TOKENS, TREE_DEPTH = {"mt-bench": 6.13, "gsm8k": 6.23, "humaneval": 6.74}, 8
PRESETS = tuple(TREE_TOKENS)
WAYS = ("chain", "static", "dynamic")


def acceptance_table(given: Sequence[str], depths: int) -> np.ndarray:
    """The acceptance table f[depths, M] of a head: by depth, and by the rank of the guess.

    No paper gives rates by rank. A preset derives them. The chance that any of a level's guesses is right is constant
    and gives the published tokens of a tree. The best guess has the published rate of a chain at its depth on MT-bench.
    On other tasks this rate is larger by as much as the chance of the level is. All else has rank 1.

    Args:
      given: one name of ``PRESETS``; or for each depth the rates by rank, joined by colons, such as "0.75:0.1". The
        last one holds for all further depths.
      depths: the number of depths.

    Raises:
      ValueError: a rate is no number, or a depth's rates are out of range.
    """
    if len(given) == 1 and given[0] in PRESETS:
        first = np.array(REACHED) / np.array((1.0, *REACHED[:-1]))
        level, least = (_level_chance(TREE_TOKENS[name]) for name in (given[0], "mt-bench"))
        first *= level / least
        rates = np.stack([first, level - first], axis=1)
    else:
        try:
            ranks = [[float(rate) for rate in depth.split(":")] for depth in given]
        except ValueError:
            raise ValueError(
                f"acceptance is one of {', '.join(PRESETS)}, or rates by depth such as 0.8 0.7:0.1, got {given}"
            ) from None
        rates = np.zeros((len(ranks), max(map(len, ranks))))
        for row, of_depth in zip(rates, ranks, strict=True):
            row[: len(of_depth)] = of_depth
    if not ((rates >= 0) & (rates <= 1)).all() or (rates.sum(axis=1) > 1).any():
        raise ValueError(f"acceptance rates are from 0 to 1, and those of one depth add up to at most 1, got {given}")
    return rates[np.minimum(np.arange(depths), len(rates) - 1)]


def _level_chance(tokens: float) -> float:
    """The acceptance rate of a level at which a tree ``TREE_DEPTH`` deep gives so many tokens a round."""
    chances = np.linspace(0, 1, 10001)
    return float(np.interp(tokens, theory.expected_tokens(chances, TREE_DEPTH), chances))


def by_head(head: Eagle, table: np.ndarray, ways: Sequence[str], breadth: int, nodes: int) -> tuple[Drafting, ...]:
    """The ways to draft with a planted head.

    Args:
      head: the head, a drafter of chains.
      table: f[K, M], its acceptance table.
      ways: of ``WAYS``: a chain; the best static tree for the table; a dynamic tree.
      breadth: of a dynamic tree.
      nodes: the number of nodes of a tree.
    """
    sizes = {name: sum(x.nbytes for x in jax.tree.leaves(part)) for name, part in head.params.items()}
    everything, step, commit = sum(sizes.values()), -sizes["fuse"], -sizes["lm_head"]
    table_of = {size: table[:size] for size in range(1, len(table) + 1)}
    static = {size: sequoia(rates, nodes).of_depth(size) for size, rates in table_of.items() if "static" in ways}
    dynamic = {size: likeliest(rates, breadth, nodes) for size, rates in table_of.items()}
    known = {
        "chain": (
            "chain",
            lambda size: head,
            lambda size: 1 + float(theory.expected_accepted_length(table_of[size][:, 0])),
        ),
        "static": (
            f"static tree of {nodes}",
            lambda size: dataclasses.replace(head, tree=static[size]),
            lambda size: 1 + expected_length(static[size], table_of[size]),
        ),
        "dynamic": (
            f"dynamic tree of {nodes}",
            lambda size: dataclasses.replace(head, tree=DynamicTree(breadth, nodes)),
            lambda size: 1 + expected_length(dynamic[size], table_of[size]),
        ),
    }
    return tuple(
        Drafting(name, drafter, everything + step, everything + commit, expected, siblings=name != "chain")
        for name, drafter, expected in (known[way] for way in ways)
    )


def likeliest(table: np.ndarray, breadth: int, nodes: int) -> Topology:
    """The dynamic tree of a planted head. A planted guess of rank m has FALL^m times the logit of the best guess.

    Guesses of which none is ever right are left out.
    """
    depths, ranks = table.shape
    front: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    grown: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(depths):
        level = [(lost + 1 - FALL**rank, (*path, rank)) for lost, path in front for rank in range(ranks)]
        grown += level
        front = sorted(level)[:breadth]
    best = sorted(grown, key=lambda node: (round(node[0], 9), len(node[1])))[:nodes]
    return from_choices(path for _, path in best)
