"""Checks that an engine holds nothing of requests that have ended."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from types import FunctionType, ModuleType

from infer.engine import Engine
from infer.request import ProposerState
from tests.pools import check_pool

PREFIX = "request "  # of request ids in these tests, by which they are recognised wherever they are kept


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def kept(engine: Engine) -> set[str]:
    """Return the ids of requests of which a proposer keeps state."""
    built = [build()[0] for build in engine.speculator._proposers.values()]
    states = (value for keeper in built for value in vars(keeper).values())
    keys = (key for state in states if isinstance(state, (dict, set)) for key in state)
    return {key for key in keys if isinstance(key, str) and key.startswith(PREFIX)}


def held_by(root: object) -> Iterator[object]:
    """Yield what can be reached from an object, but by way of modules, classes and functions' globals."""
    seen, left = {id(root)}, [root]
    while left:
        each = left.pop()
        yield each
        beneath = each.__closure__ or () if isinstance(each, FunctionType) else gc.get_referents(each)
        for other in beneath:
            if id(other) not in seen and gc.is_tracked(other) and not isinstance(other, (ModuleType, type)):
                seen.add(id(other))
                left.append(other)


def assert_nothing_left(engine: Engine) -> None:
    """Assert that no page, slot or proposer state is left and, once the prefix cache is cleared, no key or features."""
    assert not engine.has_work
    scheduler, pages = engine._scheduler, engine._pool.pages
    assert not scheduler.running
    assert not scheduler.waiting
    assert sorted(scheduler._free_rows) == list(range(engine.config.max_batch))
    check_pool(engine._pool, [])
    assert pages.free == len(pages.ids)
    assert not kept(engine)
    states = (each for each in held_by(engine) if isinstance(each, ProposerState))
    assert {type(state) for state in states} <= {ProposerState}
    pages.clear_cache()
    assert len(pages._free) == len(pages.ids)
    assert not any((pages._key_of, pages._page_of, pages._value_of))
