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

from infer.batch.grammar import Grammar
from infer.server.parsing.grammar_worker import MEMORY_MB
from infer.settings.paths import REPO_ROOT

log = logging.getLogger("headway.server")

KNOWN = 1024  # digests of valid grammars that are cached
CPU_S = 5.0  # for compiling a grammar and its trial run: the request waits for it, those after it too
HANG_S = 120.0  # for the process to start, or to reply beside busy processes; it limits its CPU time itself


class GrammarCheck:
    """Checks grammars in one worker process, started on first use and again after it had to be killed."""

    def __init__(self, settings: dict[str, Any], *, cpu_s: float = CPU_S) -> None:
        """`settings`: sent to the worker as its first line (grammar_worker.py). `cpu_s`: its CPU time for a grammar."""
        self._settings, self._cpu_s = settings | {"cpu_s": cpu_s}, cpu_s
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._good: OrderedDict[bytes, None] = OrderedDict()

    async def check(self, grammar: Grammar) -> None:
        """Raises ValueError with the reason if the grammar is invalid, or takes too much memory or time to compile."""
        line = json.dumps(asdict(grammar))
        digest = hashlib.sha256(line.encode()).digest()
        if digest in self._good:
            self._good.move_to_end(digest)
            return
        async with self._lock:
            error = await self._ask(line)
        if error is not None:
            raise ValueError(error)
        self._good[digest] = None
        if len(self._good) > KNOWN:
            self._good.popitem(last=False)

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._process = None

    async def _ask(self, line: str) -> str | None:
        slow = f"takes more than {self._cpu_s:g} s of CPU time to compile"
        try:
            while True:
                is_new = self._process is None
                try:
                    if is_new:
                        await self._start()
                    return await self._exchange(line)
                except (EOFError, OSError):  # the worker has died
                    if self._process is None:  # or could not be started
                        raise
                    code = await self._process.wait()  # not killed first: asyncio would lose its exit code
                    self._process = None
                    if code == -signal.SIGPROF:
                        return slow
                    if is_new:  # an older one may have been killed before
                        return f"needs more memory to compile than {MEMORY_MB} MB"
        except TimeoutError:
            await self.close()
            return slow
        except BaseException:  # this request was cancelled during an exchange
            await self.close()
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
