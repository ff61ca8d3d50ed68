"""The page ledger against a plain model: holders, the prefix cache, and the order of eviction."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from infer.kvcache.pages import PageKeys, Pages
from tests.pools import check_pages

COUNT = 9


class Ledger(RuleBasedStateMachine):
    """`held`: lists of pages, one list per holder."""

    def __init__(self):
        super().__init__()
        self.pages = Pages(range(1, COUNT + 1))
        self.held: list[list[int]] = []
        self.content: dict[bytes, int] = {}
        self.num_keys = 0

    groups = Bundle("groups")

    @rule(target=groups, count=st.integers(1, 4))
    def take(self, count):
        if count > self.pages.free:
            return multiple()
        before = {page for group in self.held for page in group}
        taken = self.pages.take(count)
        assert len(set(taken)) == count
        assert not set(taken) & before, "a held page was given away"
        for key in [key for key, page in self.content.items() if page in taken]:
            del self.content[key]
        self.held.append(taken)
        return taken

    @rule(group=groups, place=st.integers(0, 3))
    def publish(self, group, place):
        if group not in self.held or place >= len(group) or group[place] in self.content.values():
            return
        self.num_keys += 1
        key = self.num_keys.to_bytes(16, "big")
        self.pages.publish(group[place], key, self.num_keys)
        self.content[key] = group[place]

    @rule(target=groups, data=st.data())
    def share(self, data):
        if not self.content:
            return multiple()
        key = data.draw(st.sampled_from(sorted(self.content)))
        (page,) = self.pages.find([key, b"unknown", key])
        assert page == self.content[key]
        assert self.pages.value(page) == int.from_bytes(key, "big")
        self.pages.hold([page])
        self.held.append([page])
        return self.held[-1]

    @rule(group=consumes(groups))
    def drop(self, group):
        for index, candidate in enumerate(self.held):
            if candidate is group:
                del self.held[index]
                self.pages.drop(group)
                return

    @rule()
    def forget(self):
        if not self.held:
            self.pages.clear_cache()
            self.content.clear()
            assert self.pages.find([b"anything"]) == []

    @invariant()
    def adds_up(self):
        check_pages(self.pages, [page for group in self.held for page in group])
        held = {page for group in self.held for page in group}
        assert self.pages.free == COUNT - len(held)
        unheld = [page for page in self.content.values() if page not in held]
        assert self.pages.free_without(unheld) == self.pages.free - len(unheld)


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_page_let_go_first_is_reused_first_and_prefixes_outlive_what_follows():
    pages = Pages(range(1, 5))
    group = pages.take(3)
    for index, page in enumerate(group):
        pages.publish(page, bytes([index]) * 16, None)
    pages.drop(group)
    assert pages.free == 4
    pages.take(1)  # the page that was never published
    pages.take(1)
    assert [len(pages.find([bytes([i]) * 16 for i in range(3)]))] == [2]
    pages.take(1)
    assert pages.find([bytes([0]) * 16, bytes([1]) * 16]) == group[:1]


def test_keys_depend_on_all_tokens_before_on_the_salt_and_on_what_fills_the_pages():
    secret = bytes(32)

    def keys(tokens, salt="", filled_by="", own_secret=secret):
        return PageKeys(own_secret, salt, filled_by, 4).upto(tokens, len(tokens) // 4)

    base = keys(list(range(12)))
    assert len(set(base)) == 3
    assert keys([*range(8), 99, 9, 10, 11])[:2] == base[:2]
    assert keys([99, *range(1, 12)])[1:] != base[1:]
    assert not set(keys(list(range(12)), salt="a")) & set(base)
    assert not set(keys(list(range(12)), filled_by="head")) & set(base)
    assert not set(keys(list(range(12)), own_secret=b"x" * 32)) & set(base)
    assert set(keys(list(range(4)), salt="a", filled_by="b")).isdisjoint(keys(list(range(4)), salt="ab"))


def test_keys_grow_with_the_tokens():
    keys = PageKeys(bytes(32), "", "", 2)
    tokens = [1, 2, 3, 4]
    first = keys.upto(tokens, 1)
    tokens += [5, 6]
    assert keys.upto(tokens, 3)[:1] == first
    assert keys.upto(tokens, 3) == PageKeys(bytes(32), "", "", 2).upto(tokens, 3)
