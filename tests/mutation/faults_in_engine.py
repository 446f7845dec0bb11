"""Faults of the engine: pages, slots, keys and the prefix cache."""

import jax
import numpy as np
from planting import BUSY, PAGE_KEYS, SAMPLES, SWAPPED, fault, wrap

from specjax.decode import rows
from specjax.decode.sampling import SamplingParams
from specjax.engine import pages, programs, saved, swap, ticket
from specjax.engine.loop import Loop


@fault(BUSY("head-block"))
def freed_pages_are_still_written():
    rows.release = lambda state, idle: state._replace(active=state.active & ~idle)


@fault(BUSY("head-block"))
def a_late_result_is_given_to_the_slots_next_request():
    wrap(Loop, "_learn", lambda learn: lambda self, flight: learn(
        self, flight._replace(tickets=list(self.running))))


@fault(BUSY("head-block"))
def a_drafters_caches_get_no_pages():
    wrap(rows, "with_table", lambda give: lambda state, table: state._replace(cache=give(state.cache, table)))


@fault(BUSY("head-block"))
def a_request_draws_with_the_key_of_the_slots_last_request():
    def make(insert):
        def faulty(state, slots, other):
            new = insert(state, slots, other)
            return new._replace(request=new.request._replace(key=state.request.key))

        return faulty

    wrap(rows, "insert", make)


@fault(BUSY("head-block"))
def penalties_are_left_out_of_a_batch():
    ticket.SIMPLE = SamplingParams._fields


@fault(PAGE_KEYS)
def a_page_is_known_by_its_own_tokens_alone():
    class Short:
        """An array of ids whose slices lack their last token."""

        def __init__(self, ids):
            self.ids = ids

        def __getitem__(self, where):
            return self.ids[where.start : where.stop - 1]

    wrap(pages, "token_ids", lambda ids_of: lambda prompt: Short(ids_of(prompt)))


@fault(SWAPPED("noisy twin-block"))
def a_request_is_swapped_out_while_a_round_of_its_own_is_in_flight():
    Loop.learn_all = lambda self: None


@fault(SWAPPED("noisy twin-block"), SWAPPED("head-rejection"))
def a_drafters_pages_are_lost_when_a_request_is_swapped_out():
    def make(request_of):
        def faulty(*given):
            found = request_of(*given)
            return found._replace(groups=[[g[0], *jax.tree.map(np.zeros_like, g[1:])] for g in found.groups])

        return faulty

    wrap(saved, "request_of", make)


@fault(SWAPPED("noisy twin-block"))
def pages_that_a_growing_request_gets_stay_unknown_to_the_device():
    wrap(swap, "_tables", lambda tables: lambda loop: np.concatenate([tables(loop)[:, :1], 0 * tables(loop)[:, 1:]], 1))


@fault(SWAPPED("noisy twin-block"))
def the_oldest_request_is_swapped_out():
    swap.max = min


@fault(SWAPPED("noisy twin-block"))
def a_swapped_request_loses_its_last_page():
    def make(request_of):
        def faulty(*given):
            found = request_of(*given)
            return found._replace(groups=found.groups[:-1])

        return faulty

    wrap(saved, "request_of", make)


@fault(SAMPLES("head-rejection-True"), SAMPLES("head-rejection-False"))
def samples_miss_the_last_page_of_their_prompt():
    wrap(saved, "prompt_of", lambda prompt_of: lambda *given: prompt_of(*given)._replace(groups=[]))


@fault(SAMPLES("head-rejection-True"))
def samples_draw_with_the_key_of_the_first():
    wrap(programs, "resumed", lambda resumed: lambda row, key, table: rows.with_table(row, table))
