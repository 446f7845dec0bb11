"""Pages and the queue: small cases. Pages in any order of steps are in test_pages_machine.py."""

import pytest

from specjax.engine.pages import Pages, prefix_keys
from specjax.engine.queue import LEVEL, Waiting
from specjax.models.cache import PAGE


def test_pages_are_taken_and_come_back():
    pages = Pages(4)
    first, second = pages.take(3), pages.take(1)
    assert sorted(first + second) == [1, 2, 3, 4] and pages.available == 0
    pages.give_back(first)
    assert pages.available == 3
    pages.check([second])


def test_a_known_prefix_is_kept_until_its_page_is_needed_the_oldest_and_last_pages_first():
    pages, keys = Pages(4), [b"a", b"b"]
    held = pages.take(2)
    pages.publish(held, keys)
    assert pages.known(keys) == held and pages.known([b"x", b"b"]) == []
    pages.give_back(held)
    assert pages.available == 4 and len(pages.published()) == 2
    pages.check([])
    shared = pages.known(keys)[:1]
    pages.share(shared)
    assert pages.available == 3
    pages.give_back(shared)
    taken = pages.take(3)  # two free ones, and the kept page that was used longest ago: the second of the prefix
    assert pages.known(keys) == held[:1] and held[1] in taken
    pages.check([taken])


def test_a_page_is_in_use_until_its_last_user_gives_it_back():
    pages = Pages(2)
    held = pages.take(1)
    pages.publish(held, [b"a"])
    pages.share(held)
    pages.give_back(held)
    assert pages.available == 1
    pages.give_back(held)
    assert pages.available == 2


def test_the_first_page_of_a_prefix_stays_its_page():
    pages = Pages(2)
    one, two = pages.take(1), pages.take(1)
    pages.publish(one, [b"a"])
    pages.publish(two, [b"a"])
    assert pages.known([b"a"]) == one
    pages.publish(one, [b"b"])
    assert pages.published() == {b"a": one[0]}, "a published page keeps its prefix"
    pages.give_back(two)
    assert pages.available == 1


@pytest.mark.parametrize("tables", [[[1], [1]], [[]], [[1, 2]], [[0]]])
def test_a_lost_or_doubled_page_is_noticed(tables):
    pages = Pages(3)
    pages.take(1)
    with pytest.raises(RuntimeError, match="add up"):
        pages.check(tables)


def test_keys_cover_whole_pages_their_next_token_and_the_salt():
    text = list(range(3 * PAGE))
    assert [len(prefix_keys(text[:n], "")) for n in (1, 2, PAGE + 1, PAGE + 2, 2 * PAGE + 2)] == [0, 0, 0, 1, 2]
    keys = prefix_keys(text, "")
    assert keys[:1] == prefix_keys(text[: PAGE + 2], "")
    assert keys[0] != prefix_keys(text, "salt")[0]
    changed = text[:]
    changed[PAGE] = 0  # the token after the first page
    assert keys[0] != prefix_keys(changed, "")[0]
    changed = [1, *text[1:]]
    assert all(a != b for a, b in zip(keys, prefix_keys(changed, ""), strict=True))


def test_the_queue_is_first_come_first_served_within_a_level_and_nobody_starves():
    waiting: Waiting[str] = Waiting()
    for name, priority in (("low", 2), ("a", 0), ("b", 0), ("urgent", -1)):
        waiting.add(name, priority)
    assert waiting.first() == "urgent"
    assert waiting.remove("b") and not waiting.remove("b")
    place = waiting.add("swapped", 0)
    assert waiting.remove("swapped")
    waiting.add("later", 0)
    waiting.put_back("swapped", place)
    assert [waiting.pop() for _ in range(4)] == ["urgent", "a", "swapped", "later"]
    for i in range(3 * LEVEL):
        waiting.add(f"late {i}", 0)
    assert [waiting.pop() for _ in range(2 * LEVEL)].index("low") < 2 * LEVEL and len(waiting) == LEVEL + 1
