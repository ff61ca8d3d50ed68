"""Check of a client's grammar in a separate process, which may hang or run out of memory without harm to the server."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import signal
import sys
from collections import OrderedDict
from dataclasses import asdict
from typing import Any

from infer.config_checks import REPO_ROOT
from infer.sampling.grammar import Grammar
from infer.server.parsing.grammar_worker import MEMORY_MB

log = logging.getLogger("headway.server")

KNOWN = 1024  # digests of valid grammars that are cached
CPU_S = 5.0  # for compiling a grammar and its trial run: the request waits for it, those after it too
HANG_S = 120.0  # for the process to start, or to reply beside busy processes; it limits its CPU time itself


class GrammarRefused(ValueError):
    """The grammar is invalid, or takes too much memory or time to compile."""


class GrammarCheck:
    """Checks grammars in one worker process, started on first use and again after it had to be killed."""

    def __init__(self, settings: dict[str, Any], *, cpu_s: float = CPU_S) -> None:
        """`settings`: sent to the worker as its first line (grammar_worker.py). `cpu_s`: its CPU time for a grammar."""
        self._settings, self._cpu_s = settings | {"cpu_s": cpu_s}, cpu_s
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._good: OrderedDict[bytes, None] = OrderedDict()

    async def check(self, grammar: Grammar) -> None:
        """Raises GrammarRefused with the reason if the grammar cannot be used."""
        digest = hashlib.sha256(f"{grammar.kind}:{grammar.text}".encode("utf-8", "replace")).digest()
        if digest in self._good:
            self._good.move_to_end(digest)
            return
        async with self._lock:
            error = await self._ask(json.dumps(asdict(grammar)))
        if error is not None:
            raise GrammarRefused(error)
        self._good[digest] = None
        if len(self._good) > KNOWN:
            self._good.popitem(last=False)

    async def close(self) -> int | None:
        """End the process; return its exit code, None if there is none."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # no effect on one that has ended by itself
        return await process.wait()

    async def _ask(self, line: str) -> str | None:
        try:
            if self._process is None:
                await self._start()
            return await self._exchange(line)
        except BaseException as error:  # the worker died or hangs, or this request was cancelled during an exchange
            code = await self.close()
            if isinstance(error, TimeoutError) or code == -signal.SIGPROF:
                return f"takes more than {self._cpu_s:g} s of CPU time to compile"
            if isinstance(error, EOFError | OSError):
                return f"needs more memory to compile than {MEMORY_MB} MB"
            raise

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "infer.server.parsing.grammar_worker"),
            cwd=REPO_ROOT,
            env={**os.environ, "PYTHONPATH": str(REPO_ROOT)},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # its messages may quote the grammar
            start_new_session=True,  # only the server handles Ctrl-C
        )
        await self._exchange(json.dumps(self._settings))

    async def _exchange(self, line: str) -> str | None:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(HANG_S):
            self._process.stdin.write(line.encode() + b"\n")
            await self._process.stdin.drain()
            reply = await self._process.stdout.readline()
        if not reply:
            raise EOFError
        return json.loads(reply)["error"]
