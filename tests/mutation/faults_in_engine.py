"""Faults of the engine: pages, slots, keys and the prefix cache."""

from planting import BUSY, PAGE_KEYS, fault, wrap

from specjax.decode import rows
from specjax.decode.sampling import SamplingParams
from specjax.engine import pages, ticket
from specjax.engine.loop import Loop


@fault(BUSY("noisy twin-block"))
def freed_pages_are_still_written():
    rows.release = lambda state, idle: state._replace(active=state.active & ~idle)


@fault(BUSY("noisy twin-block"))
def a_late_result_is_given_to_the_slots_next_request():
    wrap(Loop, "_learn", lambda learn: lambda self, tickets, packed: learn(self, list(self.running), packed))


@fault(BUSY("noisy twin-block"), BUSY("head-rejection"))
def a_drafters_caches_get_no_pages():
    wrap(rows, "with_table", lambda give: lambda state, table: state._replace(cache=give(state.cache, table)))


@fault(BUSY("noisy twin-block"))
def a_request_draws_with_the_key_of_the_slots_last_request():
    def make(insert):
        def faulty(state, slots, other):
            new = insert(state, slots, other)
            return new._replace(request=new.request._replace(key=state.request.key))

        return faulty

    wrap(rows, "insert", make)


@fault(BUSY("noisy twin-block"))
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
