"""Checks that an engine holds nothing of requests that have ended."""

from __future__ import annotations

import gc
import os

from infer.engine import Engine
from infer.request import ProposerState
from tests.pools import check_pool

PREFIX = "request "  # of request ids in these tests, by which they are recognised wherever they are kept


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def kept(engine: Engine) -> set[str]:
    """Return the ids of requests of which a proposer keeps state."""
    states = (value for keeper, _ in engine.speculator._proposers.values() for value in vars(keeper).values())
    keys = (key for state in states if isinstance(state, (dict, set)) for key in state)
    return {key for key in keys if isinstance(key, str) and key.startswith(PREFIX)}


def assert_nothing_left(engine: Engine) -> None:
    """Assert that no page, slot or proposer state is left and, once the prefix cache is cleared, no key or features."""
    assert not engine.has_work
    scheduler, pages = engine._scheduler, engine._pool.pages
    assert not scheduler.running
    assert not scheduler.waiting
    assert sorted(scheduler._free_rows) == list(range(engine.config.max_batch))
    check_pool(engine._pool, [])
    assert pages.free == pages.count
    assert not kept(engine)
    gc.collect()
    kinds = {type(each) for each in gc.get_objects()}
    assert {kind for kind in kinds if issubclass(kind, ProposerState)} <= {ProposerState}
    pages.clear_cache()
    assert len(pages._free) == pages.count
    assert not any((pages._key_of, pages._page_of, pages._value_of))
