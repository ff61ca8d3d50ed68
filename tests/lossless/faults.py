"""Makes an engine's proposers fail for chosen requests, and its own work for one request, at every stage of it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from infer.engine import Engine
from infer.request import Request
from infer.speculation.proposers.combined import CombinedProposer

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
    log = logging.getLogger("infer.speculation.speculator")

    def note(record: logging.LogRecord) -> bool:
        assert isinstance(record.args, tuple)
        told.append(str(record.args[0]))
        return False

    log.addFilter(note)
    try:
        yield told
    finally:
        log.removeFilter(note)


class PanicException(BaseException):
    """As a library in Rust raises it: by this name, and no Exception."""


# Of functions that work for one request, or for several: whether these arguments are of the request.
Concerns = Callable[[Request, tuple[Any, ...]], bool]
FUNCTIONS: dict[str, tuple[str, Concerns]] = {
    "penalty counts": ("infer.sampling.choose.count_tokens", lambda own, args: args[0] is own),
    "shaping": ("infer.sampling.choose.shape_logits", lambda own, args: args[1] is own.params),
    "log-probabilities": ("infer.sampling.choose.token_logprobs", lambda own, args: args[2] == own.params.logprobs),
    "prompt log-probabilities": (
        "infer.engine.step.token_logprobs",
        lambda own, args: args[2] == own.params.prompt_logprobs,
    ),
    "block verification": (
        "infer.speculation.verify.verify_blocks",
        lambda own, args: own in [args[0][b] for b in args[3]],
    ),
    "typical acceptance": (
        "infer.speculation.verify.likely_nodes",
        lambda own, args: own.params.acceptance == "typical",
    ),
}
METHODS = {
    "grammar mask": ("constraint", "words"),
    "grammar push": ("constraint", "push"),
    "grammar on a draft": ("constraint", "allowed"),
    "stop text": ("stop_text", "push"),
}
STAGES = (*FUNCTIONS, *METHODS, "choice parameters")


def install_at(stage: str, own: Request, monkeypatch: Any, *, late: int, error: type[BaseException] = Fault) -> None:
    """Work at this stage raises for the request `own`, once it has emitted `late` tokens."""

    def failing(work: Callable[..., Any], concerns: Concerns) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if own.output_length >= late and concerns(own, args):
                raise error(own.request_id)
            return work(*args, **options)

        return call

    if stage in METHODS:
        holder, name = METHODS[stage]
        part = getattr(own, holder)
        setattr(part, name, failing(getattr(part, name), lambda own, args: True))
    elif stage in FUNCTIONS:
        place, concerns = FUNCTIONS[stage]
        module, name = place.rsplit(".", 1)
        monkeypatch.setattr(place, failing(getattr(sys.modules[module], name), concerns))
    else:
        object.__setattr__(own.params, "top_k", 2**63)  # no constructor lets it through, and no int64 tensor takes it
