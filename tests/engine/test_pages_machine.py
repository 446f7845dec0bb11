"""Pages under any order of what an engine does with them, against a model in plain lists."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specjax.engine.pages import Pages, prefix_keys
from specjax.models.cache import PAGE

COUNT = 12
PREFIXES = st.lists(st.integers(0, 2), max_size=4)  # a prompt as the contents of its whole pages: many share a prefix


class Machine(RuleBasedStateMachine):
    """Requests with their tables, and where the model says that each page is."""

    def __init__(self):
        super().__init__()
        self.pages = Pages(COUNT)
        self.running = []  # (keys of the prompt, table) of each request
        self.swapped = []  # (keys of the prompt, number of pages) of each request that was swapped out
        self.free = set(range(1, COUNT + 1))
        self.kept = []  # published pages that nobody uses, the oldest one first
        self.page_of = {}  # the published page of each key

    @rule(prefix=PREFIXES, more=st.integers(1, 3), salt=st.sampled_from("ab"))
    def admit_and_share(self, prefix, more, salt):
        keys = prefix_keys([token for block in prefix for token in [block] * PAGE] + [0, 0], salt)
        known = self.pages.known(keys)
        expected = [self.page_of.get(key) for key in keys] + [None]
        assert known == expected[: expected.index(None)]
        self.pages.share(known)
        self.kept = [page for page in self.kept if page not in known]
        missing = len(keys) - len(known) + more
        if missing > self.pages.available:  # the request waits
            self.give_back(known)
        else:
            self.running.append((keys, known + self.take(missing)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def publish(self, data):
        keys, table = data.draw(st.sampled_from(self.running))
        keys = keys[: len(table)]
        self.pages.publish(table[: len(keys)], keys)
        for key, page in zip(keys, table, strict=False):
            if key not in self.page_of and page not in self.page_of.values():
                self.page_of[key] = page

    @precondition(lambda self: self.running and self.pages.available)
    @rule(data=st.data())
    def append(self, data):
        data.draw(st.sampled_from(self.running))[1].extend(self.take(1))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def truncate(self, data):
        keys, table = data.draw(st.sampled_from(self.running))
        length = data.draw(st.integers(min(len(keys), len(table)), len(table)))  # a prompt's own pages stay
        cut, table[length:] = table[length:], []
        self.give_back(cut)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish_or_abort(self, data):
        self.give_back(self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))[1])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def swap_out(self, data):
        keys, table = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.give_back(table)
        self.swapped.append((keys, len(table)))

    @precondition(lambda self: self.swapped and self.swapped[0][1] <= self.pages.available)
    @rule()
    def swap_in(self):
        keys, size = self.swapped.pop(0)
        self.running.append((keys, self.take(size)))

    @precondition(lambda self: self.kept)
    @rule()
    def evict(self):
        self.give_back(self.take(self.pages.available))
        assert self.pages.published().keys() == self.page_of.keys()

    def take(self, count):
        """Pages from the engine: free ones, and then kept ones, the oldest first."""
        taken = self.pages.take(count)
        from_free = min(count, len(self.free))
        assert set(taken[:from_free]) <= self.free and taken[from_free:] == self.kept[: count - from_free]
        self.free -= set(taken)
        self.kept = self.kept[count - from_free :]
        self.page_of = {key: page for key, page in self.page_of.items() if page not in taken}
        return taken

    def give_back(self, given):
        """Pages that a request no longer has in its table. Other requests may have them."""
        self.pages.give_back(given)
        for page in reversed(given):
            if not any(page in table for _, table in self.running):
                if page in self.page_of.values():
                    self.kept.append(page)
                else:
                    self.free.add(page)

    @invariant()
    def every_page_is_where_the_model_says(self):
        self.pages.check([table for _, table in self.running])
        assert self.pages.available == len(self.free) + len(self.kept) and len(self.pages._kept) == len(self.kept)
        assert self.pages.published() == self.page_of

    def teardown(self):
        for _, table in self.running:
            self.pages.give_back(table)
        assert self.pages.available == COUNT
        self.pages.check([])


Machine.TestCase.settings = settings(max_examples=25, stateful_step_count=50, deadline=None)
TestPagesOfAnyEngine = Machine.TestCase
