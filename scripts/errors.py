"""What the scripts with options share: how these are read, and how a user's error is reported."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import ParamSpec

USER_ERROR, INTERRUPTED = 2, 130
P = ParamSpec("P")


def command_line(script: str, doc: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of scripts/`script`, whose --help shows its docstring; options are not abbreviated."""
    return argparse.ArgumentParser(
        prog=f"python scripts/{script}",
        description=doc,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def reports_errors(main: Callable[P, int]) -> Callable[P, int]:
    """Decorate a script's main function, which returns its exit code.

    A ValueError or OSError is the user's error: one line on standard error and exit code 2. Ctrl-C exits with 130.
    """

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return USER_ERROR
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return INTERRUPTED

    return run
