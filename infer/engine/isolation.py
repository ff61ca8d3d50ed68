"""Keeps an exception in work for one request from ending the step that all requests share.

Work for a single request runs in `isolated`; tensors made from several requests' parameters are made `together`. What
raises marks its request as failed: the request emits nothing more, ends with the finish reason "error" and releases
what it held, and the others go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from infer.request import Request

log = logging.getLogger(__name__)
T = TypeVar("T")
INTERNAL = "internal error; the log has the details"


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust (tokenizers, llguidance) panicked. Its exception derives from BaseException alone."""
    return type(error).__name__ == "PanicException"


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Turns a panic into a RuntimeError, which handlers of Exception see."""
    try:
        yield
    except BaseException as error:
        if is_panic(error):
            raise RuntimeError(f"a library panicked: {error}") from error
        raise


@contextmanager
def isolated(request: Request) -> Iterator[None]:
    """For work on behalf of `request` alone: an exception ends the block and fails the request."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise  # Ctrl-C
        request.failed = True
        log.exception("%s: an exception in work for this request alone; it ends with an error", request.request_id)


def together(requests: Sequence[Request], work: Callable[[Sequence[Request]], T]) -> T:
    """`work(requests)`. If that raises, `work` runs for each alone, so that those that it raises for fail, and once
    more for all. It must pass over what has failed. Raises where no single request is the cause.
    """
    try:
        return work(requests)
    except Exception:
        for request in requests:
            with isolated(request):
                work([request])
        return work(requests)
