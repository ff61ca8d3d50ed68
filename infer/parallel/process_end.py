"""How one of several processes ends: without the interpreter's own teardown.

gloo's threads release the tensors of an exchange after whoever waited for it has gone on, and take the interpreter's
lock to do so. A thread that waits for that lock while the interpreter is torn down is ended by it, within a C++
destructor, and that aborts the process: `terminate called without an active exception`, SIGABRT, after all its work was
done. `destroy_process_group` does not help: these threads are joined only when nothing refers to a group any more, and
torch's caches and DeepSpeed's modules refer to groups until the end. So the teardown is left out.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn


def run_process(main: Callable[[], Any]) -> None:
    """Runs a command's main function. If a launcher started several processes, this one ends with it, by the exit code
    that it would have had.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        main()
        return
    try:
        main()
    except SystemExit as error:
        end_process(exit_code(error))
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        end_process(1)
    end_process(0)


def exit_code(error: SystemExit) -> int:
    """As the interpreter has it: a text is an error's message."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def end_process(code: int) -> NoReturn:
    """Waits for threads, runs what was registered for the end, writes out what was printed, and ends the process."""
    try:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code)
