"""Ends one of several processes without the interpreter's teardown.

gloo's threads release the tensors of a collective after the thread that waited for it has continued, and take the GIL
to do so. A thread that waits for the GIL during the interpreter's teardown is terminated within a C++ destructor, which
aborts the process (`terminate called without an active exception`, SIGABRT) after all its work was done.
`destroy_process_group` does not help: these threads are joined only when nothing refers to a group any more, and
torch's caches and DeepSpeed's modules refer to groups until the end. So the teardown is skipped.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn


def run_process(main: Callable[[], Any]) -> None:
    """Run a command's main function. If a launcher started several processes, end this one right after it, with the
    exit code that it would have had.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        main()
        return
    try:
        main()
    except SystemExit as error:  # a text is an error message, as to the interpreter
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
            end_process(1)
        end_process(error.code or 0)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        end_process(1)
    end_process(0)


def end_at_once(message: str = "", code: int = 1) -> NoReturn:
    """End the process from any thread, whatever the main thread waits for. `message` goes to standard error."""
    if message:
        with contextlib.suppress(OSError):
            os.write(2, f"{message}\n".encode())
    os._exit(code)


def end_process(code: int) -> NoReturn:
    """Join threads, run atexit functions, flush standard output and error, and end the process."""
    try:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code)
