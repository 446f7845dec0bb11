"""The engine's programs as numbered calls: rank 0 makes them and tells the other ranks, which make the same calls.

Rank 0 alone makes all decisions of an engine. A call's arguments are the engine's decoder, arrays that stay on the
devices, which the ranks know by number, and a few numbers and small NumPy arrays, which are sent.
"""

import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from specjax.decode.decoder import Decoder
from specjax.decode.types import DecodeState
from specjax.engine import programs
from specjax.engine.programs import Limits, Programs, Row
from specjax.engine.shortened import by_length
from specjax.models import axes
from specjax.models.cache import KVCache
from specjax.models.lm import LM

if TYPE_CHECKING:
    from specjax.distributed.replica import Replica


@jax.tree_util.register_pytree_node_class
class Held:
    """Arrays that stay on the devices, and the number by which all ranks know them."""

    def __init__(self, value: Any, number: int):
        self.value, self.number = value, number

    def tree_flatten(self) -> tuple[tuple[Any], int]:
        return (self.value,), self.number

    @classmethod
    def tree_unflatten(cls, number: int, children: tuple[Any]) -> "Held":
        return cls(children[0], number)


class Calls:
    """The programs of one engine, in place of :class:`specjax.engine.programs.Programs`.

    Args:
      replica: the processes.
      index: which engine of the replica this is. All ranks count alike.
    """

    def __init__(self, replica: "Replica", index: int):
        self._replica, self.index = replica, index
        self._target: LM
        self._decoders: dict[int, Decoder] = {}  # by the number of tokens that they draft
        self._programs: Programs
        self._limits: Limits
        self._row: Any  # the tree of a request's row, by which rows are rebuilt from their arrays
        self._held = 0  # numbers given to arrays so far
        self._dropped: deque[int] = deque()  # numbers that rank 0 has let go, and has not told yet
        self._arrays: dict[int, Any] = {}  # of another rank than 0: the arrays by number

    def empty(self, decoder: Decoder, limits: Limits) -> Any:
        """As the program of this name. On another rank than 0: the shapes of the state alone."""
        if decoder.target.mesh is None or not decoder.target.in_parts:
            raise ValueError(
                "an engine over several processes needs a model that is cut over their devices; load it with "
                "mesh=specjax.parallel.mesh()"
            )
        self._target, self._decoders, self._limits = decoder.target, by_length(decoder), limits  # type: ignore[assignment]
        self._programs = programs.programs_of(decoder, limits)
        self._row = jax.tree.structure(jax.eval_shape(lambda: programs.idle(decoder.target.vocab_size, limits)))
        if self._replica.rank:
            return jax.eval_shape(lambda: programs.empty(decoder, limits))
        return self._make("empty", decoder)

    def stage(self, decoder: Decoder, row: Row) -> Held:
        return self._make("stage", decoder, row)

    def feed(
        self, decoder: Decoder, state: Held, row: Held, start: Any, part: Any, chunk: int, width: int
    ) -> tuple[Held, Held]:
        return self._make("feed", decoder, state, row, start, part, chunk, width)

    def join(self, state: Held, row: Held, slot: Any) -> Held:
        return self._make("join", state, row, slot)

    def release(self, state: Held, slots: Any) -> Held:
        return self._make("release", state, slots)

    def take_row(self, state: Held, slot: Any) -> Held:
        return self._make("take_row", state, slot)

    def give_tables(self, state: Held, tables: Any) -> Held:
        return self._make("give_tables", state, tables)

    def read_pages(self, state: Held, pages: Any) -> Held:
        return self._make("read_pages", state, pages)

    def write_pages(self, state: Held, pages: Any, entries: Held) -> Held:
        return self._make("write_pages", state, pages, entries)

    def resumed(self, row: Held, key: Any, table: Any) -> Held:
        return self._make("resumed", row, key, table)

    def round(self, decoder: Decoder, state: Held, full: bool) -> tuple[Held, Any]:
        return self._make("round", decoder, state, full)

    def scoring_cache(self, lm: LM, room: int) -> Held:
        return self._make("scoring_cache", lm, room)

    def score(self, lm: LM, cache: Held, part: Any, start: Any, count: int) -> tuple[Held, Any, Any]:
        return self._make("score", lm, cache, part, start, count)

    def _make(self, name: str, *args: Any) -> Any:
        """A call of rank 0: the other ranks are told, and the program is dispatched here."""
        with self._replica.turn() as number:
            arrays: list[np.ndarray] = []
            head = {"call": number, "of": self.index, "name": name, "args": [self._sent(arg, arrays) for arg in args]}
            head["drop"] = [self._dropped.popleft() for _ in range(len(self._dropped))]
            self._replica.tell(head, arrays)
            given = [arg.value if isinstance(arg, Held) else arg for arg in args]
            results = self._dispatch(number, name, given)
            found = tuple(self._keep(result) if _stays(result) else result for result in results)
        return found if len(found) > 1 else found[0]

    def follow(self, head: dict[str, Any], arrays: list[np.ndarray]) -> None:
        """A call of another rank than 0, as rank 0 has told it."""
        received = iter(arrays)
        given = [self._given(kind, value, received) for kind, value in head["args"]]
        for result in filter(_stays, self._dispatch(head["call"], head["name"], given)):
            self._held += 1
            self._arrays[self._held] = result
        for number in head["drop"]:
            del self._arrays[number]

    def _dispatch(self, number: int, name: str, args: list[Any]) -> list[Any]:
        """Dispatches a program. What leaves the devices is made whole on each of them."""
        args = [*args, self._limits] if name == "empty" else args
        out = getattr(self._programs, name)(*args)
        results = list(out) if type(out) is tuple else [out]
        leaving = [result for result in results if not _stays(result)]
        whole = axes.whole(self._target.mesh)  # type: ignore[arg-type]
        shown = _copies_for_all(leaving or getattr(results[0], "lengths", None), whole)
        self._replica.started(number, name, shown)
        return [result for result in results if _stays(result)] + (shown if leaving else [])

    def _keep(self, value: Any) -> Held:
        self._held += 1
        held = Held(value, self._held)
        weakref.finalize(held, self._dropped.append, self._held).atexit = False
        return held

    def _sent(self, arg: Any, arrays: list[np.ndarray]) -> list[Any]:
        """An argument as JSON. Its arrays are added to ``arrays``."""
        if isinstance(arg, Held):
            return ["held", arg.number]
        if isinstance(arg, LM):
            return ["target", None]
        if isinstance(arg, Decoder):  # each has a block width of its own
            return ["decoder", next(k for k, one in self._decoders.items() if one.block_width == arg.block_width)]
        if isinstance(arg, Row):
            leaves = jax.tree.leaves(arg)
            arrays += leaves
            return ["row", len(leaves)]
        if isinstance(arg, np.ndarray):
            arrays.append(arg)
            return ["array", None]
        return ["value", arg]

    def _given(self, kind: str, value: Any, arrays: Any) -> Any:
        """The argument that :meth:`_sent` has described."""
        if kind == "held":
            return self._arrays[value]
        if kind == "target":
            return self._target
        if kind == "decoder":
            return self._decoders[value]
        if kind == "row":
            return jax.tree.unflatten(self._row, [next(arrays) for _ in range(value)])
        return next(arrays) if kind == "array" else value


def _stays(result: Any) -> bool:
    """Whether a program's result stays on the devices: a state, a row, a cache, or the entries of pages."""
    return isinstance(result, DecodeState | KVCache | list)


@partial(jax.jit, static_argnames=("whole",))
def _copies_for_all(tree: Any, whole: NamedSharding) -> Any:
    """Copies that are whole on every device, so that every rank can read them. The originals may be donated."""
    return jax.lax.with_sharding_constraint(jax.tree.map(jnp.copy, tree), whole)
