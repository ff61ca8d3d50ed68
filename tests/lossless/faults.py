"""Fault injection: proposers fail for chosen requests, and any stage of the engine's work for one request."""

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


def install(engine: Engine, fault_of: Callable[[Request], str | None]) -> None:
    """Make proposers raise Fault at the moment `fault_of(request)` of every call with it; None: never.

    Covers calls of `combined` to its sources. Call it after the engine's proposers have been created.
    """

    def failing(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(requests: Sequence[Request], *rest: Any) -> Any:
            fail(f"before {name}", requests)
            result = work(requests, *rest)
            fail(f"after {name}", requests)
            return result

        return call

    def fail(moment: str, requests: Sequence[Request]) -> None:
        for request in requests:
            if fault_of(request) == moment:
                raise Fault(request.request_id)

    for proposer, _ in (build() for build in engine._proposers.values()):
        if not isinstance(proposer, CombinedProposer):
            proposer.propose = failing("propose", proposer.propose)
            if proposer.needs.tracking:
                proposer.commit = failing("commit", proposer.commit)


@contextmanager
def failed_requests() -> Iterator[list[str]]:
    """Collect the requests whose drafting is logged as failed, and suppress these log records.

    A record would keep the exception alive, and with it the tensors of all frames that it passed through.
    """
    request_ids: list[str] = []
    logger = logging.getLogger("infer.speculation.speculator")

    def collect(record: logging.LogRecord) -> bool:
        assert isinstance(record.args, tuple)
        request_ids.append(str(record.args[0]))
        return False

    logger.addFilter(collect)
    try:
        yield request_ids
    finally:
        logger.removeFilter(collect)


class PanicException(BaseException):
    """Like the exception of a panic in a Rust library: it has this name and is no Exception."""


# Whether a call with these arguments, on behalf of one or of several requests, concerns the request.
Concerns = Callable[[Request, tuple[Any, ...]], bool]
FUNCTIONS: dict[str, tuple[str, Concerns]] = {
    "penalty counts": ("infer.sampling.logits_processors.count_tokens", lambda request, args: args[0] is request),
    "shaping": ("infer.sampling.choose.shape_rows", lambda request, args: args[0] is request),
    "log-probabilities": (
        "infer.sampling.choose.token_logprobs",
        lambda request, args: request.params.logprobs in args[2],
    ),
    "prompt log-probabilities": (
        "infer.steps.step.token_logprobs",
        lambda request, args: request.params.prompt_logprobs in args[2],
    ),
    "block verification": (
        "infer.speculation.verify.verify_blocks",
        lambda request, args: request in [args[0][b] for b in args[3]],
    ),
    "typical acceptance": (
        "infer.speculation.verify.typical_nodes",
        lambda request, args: request.params.acceptance == "typical",
    ),
}
METHODS = {
    "grammar mask": ("constraint", "words"),
    "grammar push": ("constraint", "push"),
    "grammar on a draft": ("constraint", "allowed"),
    "stop text": ("stop_text", "push"),
}
STAGES = (*FUNCTIONS, *METHODS, "choice parameters")


def install_at(
    stage: str, request: Request, monkeypatch: Any, *, late: int, error: type[BaseException] = Fault
) -> None:
    """Make work at this stage raise `error` for `request`, once it has emitted `late` tokens."""

    def failing(work: Callable[..., Any], concerns: Concerns) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if request.output_length >= late and concerns(request, args):
                raise error(request.request_id)
            return work(*args, **options)

        return call

    if stage in METHODS:
        holder, name = METHODS[stage]
        part = getattr(request, holder)
        setattr(part, name, failing(getattr(part, name), lambda request, args: True))
    elif stage in FUNCTIONS:
        path, concerns = FUNCTIONS[stage]
        module, name = path.rsplit(".", 1)
        monkeypatch.setattr(path, failing(getattr(sys.modules[module], name), concerns))
    else:
        object.__setattr__(
            request.params, "top_k", 2**63
        )  # the constructor rejects it, and it overflows an int64 tensor
