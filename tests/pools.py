"""Checks of the accounting of pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from infer.kvcache.pages import Pages
from infer.kvcache.pool import KVPool
from infer.request import Request


def check_pages(pages: Pages, held: Iterable[int]) -> None:
    """Assert that every page is free, cached or held. `held`: pages of running requests, once per holder."""
    holders = Counter(held)
    assert all(pages._holders[page] == holders[page] for page in pages.ids), "holders miscounted"
    unheld = set(pages._unheld)
    assert not unheld & set(holders), "a held page could be taken"
    assert sorted([*holders, *pages._free, *unheld]) == sorted(pages.ids), "pages leaked"
    assert unheld <= set(pages._key_of) == set(pages._value_of), "an unknown page is kept"
    assert {page: key for key, page in pages._page_of.items()} == pages._key_of


def check_pool(pool: KVPool, running: Sequence[Request]) -> None:
    """Assert that pages are accounted for and that block tables match. `running`: all requests that hold pages."""
    check_pages(pool.pages, (page for request in running for page in request.pages))
    for request in running:
        assert pool.table[request.table_row, : len(request.pages)].tolist() == request.pages
