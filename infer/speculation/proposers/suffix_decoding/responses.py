"""Responses to earlier requests of each tenant, which suffix decoding copies from: bounded, and of no other tenant."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from infer.settings.paths import private
from infer.speculation.proposers.suffix_decoding.automaton import SuffixAutomaton

MOST_TOKENS = 200_000  # of all tenants' responses; an automaton of 32,000 tokens takes 17 MB
log = logging.getLogger(__name__)


class Generation:
    """Responses that are forgotten together."""

    def __init__(self) -> None:
        self.automaton, self.responses = SuffixAutomaton(), 0

    def add(self, tokens: Sequence[int]) -> None:
        self.automaton.begin()
        for token in tokens:
            self.automaton.append(token)
        self.responses += 1


class EarlierResponses:
    """At most `most_responses` responses and `most_tokens` tokens, the least recently used tenants forgotten first.

    A tenant has two generations: when the newer one holds half of what is allowed, the older one is forgotten. With
    `file` they are written to it, and those that it holds are read.
    """

    def __init__(self, most_responses: int, file: ResponseFile | None = None, most_tokens: int = MOST_TOKENS) -> None:
        self._most_responses, self._most_tokens, self._file = most_responses, most_tokens, None
        self._tenants: OrderedDict[str, list[Generation]] = OrderedDict()  # newest first; last used last
        if file is not None and most_responses:
            for tenant, tokens in file.read(most_responses, most_tokens):
                self._remember(tenant, tokens)
            self._file = file

    def of(self, salt: str) -> list[Generation]:
        """Return the generations of the tenant with this `cache_salt`."""
        generations = self._tenants.get(tenant := digest(salt), [])
        if generations:
            self._tenants.move_to_end(tenant)
        return generations

    def add(self, salt: str, tokens: Sequence[int]) -> None:
        """Remember a response of at least one token."""
        tokens = tokens[: self._most_tokens // 2]
        if self._most_responses and tokens:
            self._remember(digest(salt), tokens)
            if self._file is not None:
                self._file.append(digest(salt), tokens)

    def _remember(self, tenant: str, tokens: Sequence[int]) -> None:
        generations = self._tenants.setdefault(tenant, [Generation()])
        self._tenants.move_to_end(tenant)
        newest, size = generations[0], generations[0].automaton.tokens + len(tokens)
        if newest.responses and (size > self._most_tokens // 2 or newest.responses >= self._most_responses / 2):
            generations[:] = [Generation(), newest]
        generations[0].add(tokens)
        while len(self._tenants) > 1 and self._too_many():
            self._tenants.popitem(last=False)
        if self._too_many():
            del generations[1:]

    def _too_many(self) -> bool:
        every = [generation for generations in self._tenants.values() for generation in generations]
        tokens = sum(generation.automaton.tokens for generation in every)
        return tokens > self._most_tokens or sum(generation.responses for generation in every) > self._most_responses


def digest(salt: str) -> str:
    """Return the name under which a tenant's responses are kept: a file must not reveal the salt."""
    return hashlib.sha256(salt.encode()).hexdigest()[:32]


class ResponseFile:
    """JSON Lines: {"vocabulary": V}, then {"tenant": digest, "ids": [...]} for each response, the newest last.

    It holds texts of all tenants, so only its owner may read it. A line that cannot be read, as a stop in the middle of
    writing leaves one, is left out. Raises ValueError for a file of another kind or vocabulary, or one that cannot be
    written.
    """

    def __init__(self, path: str, vocabulary: int) -> None:
        self._path, self._vocabulary = Path(path), vocabulary
        self._header = json.dumps({"vocabulary": vocabulary}) + "\n"
        self._full = False

    def read(self, most_responses: int, most_tokens: int) -> Iterator[tuple[str, list[int]]]:
        """Yield the newest responses within these bounds, and drop the others from the file."""
        lines = self._lines()
        kept, tokens = deque[str](), 0
        for line in reversed(lines):
            response = parse(line, self._vocabulary)
            if response is None:
                continue
            tokens += len(response[1])
            if len(kept) == most_responses or tokens > most_tokens:
                break
            kept.appendleft(line)
        if len(kept) < len(lines) or not self._path.exists() or self._path.stat().st_mode & 0o077:
            self._write(kept)
        for line in kept:
            response = parse(line, self._vocabulary)
            assert response is not None
            yield response

    def append(self, tenant: str, tokens: Sequence[int]) -> None:
        """Write a response; what cannot be written is lost, with one warning."""
        try:
            with open(self._path, "a", opener=private) as file:
                file.write(json.dumps({"tenant": tenant, "ids": list(tokens)}) + "\n")
        except OSError as error:
            if not self._full:
                log.warning("proposer.memory=%s: responses are no longer written: %s", self._path, error)
            self._full = True

    def _lines(self) -> list[str]:
        try:
            with self._path.open() as file:
                header, *lines = [line.rstrip("\n") for line in file] or [self._header.rstrip("\n")]
            vocabulary = json.loads(header)["vocabulary"]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ValueError(f"proposer.memory={self._path}: cannot be read: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"proposer.memory={self._path}: is no file of responses; name a new file") from error
        if vocabulary != self._vocabulary:
            raise ValueError(
                f"proposer.memory={self._path}: holds responses in a vocabulary of {vocabulary} tokens, and this "
                f"target has {self._vocabulary}; name another file"
            )
        return lines

    def _write(self, lines: Sequence[str]) -> None:
        part = self._path.with_name(self._path.name + ".part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.unlink(missing_ok=True)  # whose mode may be another
            with open(part, "w", opener=private) as file:
                file.write(self._header + "".join(line + "\n" for line in lines))
            os.replace(part, self._path)
        except OSError as error:
            raise ValueError(f"proposer.memory={self._path}: cannot be written: {error}") from error


def parse(line: str, vocabulary: int) -> tuple[str, list[int]] | None:
    """Return tenant and tokens of a line; None if it is not one."""
    try:
        response = json.loads(line)
        tenant, ids = response["tenant"], response["ids"]
    except (ValueError, KeyError, TypeError):
        return None
    if not (isinstance(tenant, str) and isinstance(ids, list) and ids):
        return None
    return (tenant, ids) if all(type(token) is int and 0 <= token < vocabulary for token in ids) else None
