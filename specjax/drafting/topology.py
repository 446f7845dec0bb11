"""Static shapes of token trees, and the best shape for measured acceptance rates.

An acceptance table f[K, M] has at [d, m] the probability that, of a node of depth d that was accepted, the child of
rank m is the child that is accepted. Ranks count siblings from 0, the best first. Each row sums to at most 1.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from specjax.decode.draft_shape import FixedTreeShape
from specjax.drafting import theory


@dataclasses.dataclass(frozen=True)
class Topology:
    """A tree in breadth-first order. Node 0 is the last committed token. Siblings stand together, the best first.

    Args:
      parents: the parent node of each of the nodes 1 to N.

    Raises:
      ValueError: there is no node, or the order is not breadth-first.
    """

    parents: tuple[int, ...]

    def __post_init__(self):
        rising = all(a <= b for a, b in zip(self.parents, self.parents[1:], strict=False))
        if not self.parents or not rising or not all(0 <= p <= i for i, p in enumerate(self.parents)):
            raise ValueError(
                f"parents of nodes 1, 2, ... must come before them and never fall, such as (0, 0, 1, 1, 2), got "
                f"{self.parents}"
            )

    @cached_property
    def ancestors(self) -> np.ndarray:
        """bool[N+1, N+1]: entry [i, j] says whether node j is node i or an ancestor of node i."""
        return FixedTreeShape(self.parents).ancestors[0]

    @property
    def depths(self) -> np.ndarray:
        """The depth of every node, i[N+1]; 0 for the root."""
        return self.ancestors.sum(1) - 1

    @property
    def depth(self) -> int:
        """The depth of the deepest node."""
        return int(self.depths.max())

    @property
    def ranks(self) -> np.ndarray:
        """How many siblings stand before each node, i[N+1]; 0 for the root."""
        parents = np.array((-1, *self.parents))
        return np.arange(len(parents)) - np.searchsorted(parents, parents)

    def of_depth(self, depth: int) -> "Topology":
        """This tree with exactly ``depth`` levels.

        A deeper tree is cut. In a shallower tree the first of the deepest leaves goes on as a chain.
        """
        parents = list(np.array(self.parents)[self.depths[1:] <= depth].tolist())
        last = int(np.argmax(self.depths))
        for _ in range(depth - self.depth):
            parents.append(last)
            last = len(parents)
        return Topology(tuple(parents))


def from_widths(widths: Sequence[int]) -> Topology:
    """The tree in which each node of depth d has ``widths[d]`` children. Widths (3, 2, 1) make 3 + 6 + 6 tokens.

    Raises:
      ValueError: there is no width, or a width is no integer of at least 1.
    """
    if not widths or not all(isinstance(w, int | np.integer) and not isinstance(w, bool) and w >= 1 for w in widths):
        raise ValueError(f"widths must be one or more integers of at least 1, such as (3, 2, 1), got {widths!r}")
    parents: list[int] = []
    level = [0]
    for width in widths:
        first = len(parents) + 1
        parents += [parent for parent in level for _ in range(width)]
        level = list(range(first, len(parents) + 1))
    return Topology(tuple(parents))


def from_choices(choices: Iterable[Sequence[int]]) -> Topology:
    """The tree of given paths of ranks, as Medusa lists them.

    Args:
      choices: one path a node. (0,) is the best child of the root, and (0, 1) is the second best child of node (0,).

    Raises:
      ValueError: a path's parent or better sibling is missing, or a path is empty or given twice.
    """
    paths = sorted((tuple(path) for path in choices), key=lambda path: (len(path), path))
    number: dict[tuple[int, ...], int] = {(): 0}
    for path in paths:
        if not path or path in number:
            raise ValueError(f"every path must be there once and not be empty, got {path} again")
        needed = path[:-1] if path[-1] == 0 else (*path[:-1], path[-1] - 1)
        if needed not in number:
            raise ValueError(f"{path} needs {needed}, which is not among the choices")
        number[path] = len(number)
    return Topology(tuple(number[path[:-1]] for path in paths))


def expected_length(topology: Topology, acceptance: np.ndarray) -> float:
    """The expected number of accepted tokens a round: the sum over nodes of the chance that a node's path is accepted.

    Args:
      topology: the tree.
      acceptance: f[K, M], the table described at the top of this file. Nodes outside the table are never accepted.
    """
    table = np.asarray(acceptance, np.float64)
    parents, levels, ranks = np.array(topology.parents), topology.depths[1:] - 1, topology.ranks[1:]
    inside = (levels < table.shape[0]) & (ranks < table.shape[1])
    chances = np.zeros(len(parents))
    chances[inside] = table[levels[inside], ranks[inside]]
    return float(theory.tree_expected_tokens(chances, (parents - 1).tolist())) - 1


def sequoia(acceptance: np.ndarray, nodes: int) -> Topology:
    """The tree of at most ``nodes`` tokens with the highest expected accepted length (Chen et al. 2024, Sequoia).

    The method is dynamic programming over best[d, m, n]: the most accepted tokens to expect from n tokens that are
    spread over the children of rank m and later ranks of a node of depth d, and over the subtrees of these children.
    The child of rank m with its subtree gets k tokens, and the later children get n - k; the best k is taken. Tokens
    that would add nothing are left out.

    Args:
      acceptance: f[K, M], the table described at the top of this file.
      nodes: N, at least 1.

    Raises:
      ValueError: ``acceptance`` is no such table, ``nodes`` is below 1, or no tree has an accepted token to expect.
    """
    table = np.asarray(acceptance, np.float64)
    if table.ndim != 2 or not ((table >= 0) & (table <= 1)).all() or not (table.sum(1) <= 1 + 1e-6).all():
        raise ValueError(f"acceptance must be a table [K, M] of chances, rows of sum at most 1, got {acceptance!r}")
    if nodes < 1 or not table[0, 0] > 0:
        raise ValueError(f"needs nodes >= 1 and a first child that may be accepted, got {nodes} and {table[0, 0]}")
    levels, ranks = table.shape
    best = np.zeros((levels + 1, ranks + 1, nodes + 1))  # [depth, first rank, tokens]
    share = np.zeros(best.shape, int)  # the best k: how many of the tokens the first child and its subtree get
    for level in reversed(range(levels)):
        for rank in reversed(range(ranks)):
            for size in range(1, nodes + 1):
                taken = np.arange(1, size + 1)
                earned = table[level, rank] * (1 + best[level + 1, 0, taken - 1]) + best[level, rank + 1, size - taken]
                if earned.max() > 0:
                    share[level, rank, size] = taken[np.argmax(earned)]
                    best[level, rank, size] = earned.max()

    def paths(prefix: tuple[int, ...], size: int):
        level, rank = len(prefix), 0
        while level < levels and rank < ranks and share[level, rank, size]:
            taken = share[level, rank, size]
            yield (*prefix, rank)
            yield from paths((*prefix, rank), taken - 1)
            rank, size = rank + 1, size - taken

    return from_choices(paths((), nodes))
