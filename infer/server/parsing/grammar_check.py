"""Check of a client's grammar in a separate process, which may hang or run out of memory without harm to the server."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import sys
from collections import OrderedDict
from dataclasses import asdict
from typing import Any

from infer.config_checks import REPO_ROOT
from infer.sampling.grammar import Grammar
from infer.server.parsing.grammar_worker import MEMORY_MB

log = logging.getLogger("headway.server")

KNOWN = 1024  # digests of valid grammars that are cached
TIMEOUT_S = 5.0  # for compiling a grammar: the request waits for it, those after it too
START_S = 30.0  # for the process to start: it builds the tokenizer's trie


class GrammarRefused(ValueError):
    """The grammar is invalid, or takes too much memory or time to compile."""


class GrammarCheck:
    """Checks grammars in one worker process, started on first use and again after it had to be killed."""

    def __init__(self, settings: dict[str, Any], timeout_s: float = TIMEOUT_S) -> None:
        """`settings`: sent to the worker as its first line (grammar_worker.py)."""
        self._settings, self._timeout_s = settings, timeout_s
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

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._process = None

    async def _ask(self, line: str) -> str | None:
        try:
            if self._process is None:
                await self._start()
            return await self._exchange(line, self._timeout_s)
        except TimeoutError:
            await self.close()
            return f"takes longer to compile than {self._timeout_s:g} s"
        except BaseException as error:  # the worker died, or this request was cancelled during an exchange
            await self.close()
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
        await self._exchange(json.dumps(self._settings), START_S)

    async def _exchange(self, line: str, seconds: float) -> str | None:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(seconds):
            self._process.stdin.write(line.encode() + b"\n")
            await self._process.stdin.drain()
            reply = await self._process.stdout.readline()
        if not reply:
            raise EOFError
        return json.loads(reply)["error"]
