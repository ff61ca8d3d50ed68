"""Makes an engine's proposers fail for chosen requests, before their work is done or after it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from infer.engine import Engine
from infer.proposers.combined import CombinedProposer
from infer.request import Request

MOMENTS = ("before propose", "after propose", "before commit", "after commit")


class Fault(Exception):
    pass


def install(engine: Engine, doom: Callable[[Request], str | None]) -> None:
    """`doom(request)`: the moment at which a proposer fails whenever this request is in its hands, or None.

    What `combined` asks its sources for passes through here too. To be called once the engine's proposers are made.
    """

    def failing(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(requests: Sequence[Request], *rest: Any) -> Any:
            fail(f"before {name}", requests)
            done = work(requests, *rest)
            fail(f"after {name}", requests)
            return done

        return call

    def fail(moment: str, requests: Sequence[Request]) -> None:
        for request in requests:
            if doom(request) == moment:
                raise Fault(request.request_id)

    for proposer, _ in engine._proposers.values():
        if not isinstance(proposer, CombinedProposer):
            for name in ("propose", "commit"):
                setattr(proposer, name, failing(name, getattr(proposer, name)))


@contextmanager
def said() -> Iterator[list[str]]:
    """The requests of which the log says that nothing drafts for them any more, instead of the log itself.

    A record would keep the exception, and that the frames it passed through with all their tensors.
    """
    told: list[str] = []
    log = logging.getLogger("infer.drafting")

    def note(record: logging.LogRecord) -> bool:
        assert isinstance(record.args, tuple)
        told.append(str(record.args[0]))
        return False

    log.addFilter(note)
    try:
        yield told
    finally:
        log.removeFilter(note)
