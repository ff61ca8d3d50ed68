"""Keeps an exception in one request's work from ending the step that all requests share.

Work for a single request runs in `isolated`; tensors built from several requests' parameters are built by `together`.
An exception marks its request as failed: the request emits nothing more, ends with the finish reason "error" and
releases its resources; the other requests continue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from infer.request import Request

log = logging.getLogger(__name__)
T = TypeVar("T")
INTERNAL = "internal error; the log has the details"


def is_panic(error: BaseException) -> bool:
    """Return whether a Rust library (tokenizers, llguidance) panicked; its exception is no Exception."""
    return type(error).__name__ == "PanicException"


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Turn a panic into a RuntimeError, which `except Exception` catches."""
    try:
        yield
    except BaseException as error:
        if is_panic(error):
            raise RuntimeError(f"a library panicked: {error}") from error
        raise


@contextmanager
def isolated(request: Request) -> Iterator[None]:
    """Run work for `request` alone: an exception ends the block and marks the request as failed."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise  # Ctrl-C
        request.failed = True
        log.exception("%s: exception while processing this request; it ends with an error", request.request_id)


def together(requests: Sequence[Request], work: Callable[[Sequence[Request]], T]) -> T:
    """Return `work(requests)`. If it raises, find the requests that cause it, mark them as failed, and run it again.

    They are found by running `work` for each request alone. `work` must skip failed requests. Raises if no single
    request is the cause.
    """
    try:
        return work(requests)
    except Exception:
        for request in requests:
            with isolated(request):
                work([request])
        return work(requests)
