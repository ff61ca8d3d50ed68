"""The proof of servers that speak OpenAI's API: their answers to the same prompts, with drafts, and to more clients.

The reference is the first server's plain decoding for one client, which asks one prompt after the other. Ids are
compared where a server returns them, else the tokens of its log-probabilities, else characters of the text.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import httpx

from scripts.proof.config import ProveConfig

PLAIN, DRAFTED = "plain", "drafted"
SAMPLINGS = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.7, "top_p": 0.95}}
# what not every server takes, in the order in which it is left out of requests that are refused
EXTRAS: dict[str, dict[str, dict[str, Any]]] = {
    "log-probabilities": {"chat": {"logprobs": True, "top_logprobs": 1}, "completions": {"logprobs": 1}},
    "ids": {endpoint: {"return_token_ids": True} for endpoint in ("chat", "completions")},
}
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
REFUSED = (400, 422)
SHOWN = 3  # answers that part, of a cell
COUNTERS = ("draft_tokens", "accepted_tokens")


class Reply(NamedTuple):
    units: tuple[Any, ...] = ()  # ids, tokens or characters
    logprobs: tuple[float, ...] = ()  # of the tokens; empty if there are none
    drafted: tuple[int, int] | None = None  # drafted and accepted tokens, as far as the answer says
    error: str | None = None


def read_reply(body: dict[str, Any]) -> tuple[str, Reply]:
    """Return what an answer's units are, and the reply. Raises KeyError, IndexError or TypeError for no answer."""
    choice = body["choices"][0]
    said, message = choice.get("logprobs") or {}, choice.get("message")
    entries = said.get("content") or []  # chat; llama.cpp says this of completions too, and names ids here
    logprobs = [entry["logprob"] for entry in entries] or said.get("token_logprobs") or []
    tokens = [entry["token"] for entry in entries] or said.get("tokens") or []
    ids = choice.get("token_ids") or [entry["id"] for entry in entries if "id" in entry]
    text = choice["text"] if message is None else message.get("content") or ""
    what, units = ("ids", ids) if ids else ("tokens", tokens) if tokens else ("text", text)
    ours = (body.get("metrics") or {}).get("speculative_decoding") or {}
    theirs = body.get("timings") or {}  # of llama.cpp
    drafted = ours.get("num_draft_tokens", theirs.get("draft_n"))
    accepted = ours.get("num_accepted_draft_tokens", theirs.get("draft_n_accepted"))
    counts = None if drafted is None or accepted is None else (drafted, accepted)
    return what, Reply(tuple(units), tuple(map(float, logprobs)), counts)


class Address:
    """One server, and the fields that its requests carry. Raises ValueError if it does not answer."""

    def __init__(self, config: ProveConfig, url: str, fields: dict[str, Any]) -> None:
        self.url, self.config, self._fields = url, config, fields
        self._client = httpx.Client(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None))
        names = [each["id"] for each in self._get("/v1/models").json().get("data", [])]
        self.model = fields.get("model") or (names[0] if names else "")
        self.extras, self.unit = list(EXTRAS), ""

    def _get(self, path: str) -> httpx.Response:
        try:
            return self._client.get(path).raise_for_status()
        except httpx.HTTPError as error:
            raise ValueError(f"servers={self.url}: does not answer {path}: {error}") from error

    def _body(self, prompt: Any, sampling: str, seed: int) -> dict[str, Any]:
        asked = {"messages": prompt} if self.config.endpoint == "chat" else {"prompt": prompt}
        extras = {key: value for name in self.extras for key, value in EXTRAS[name][self.config.endpoint].items()}
        length = {"model": self.model, "max_tokens": self.config.max_tokens, "stream": False}
        return {**asked, **length, **SAMPLINGS[sampling], "seed": seed, **extras, **self._fields}

    def agree(self, prompt: Any) -> None:
        """Find the extras that the server takes. Raises ValueError if it refuses a request without them."""
        path = PATHS[self.config.endpoint]
        while True:
            response = self._client.post(path, json=self._body(prompt, "greedy", self.config.seed))
            if response.status_code == 200:
                self.unit = read_reply(response.json())[0]
                return
            if response.status_code not in REFUSED or not self.extras:
                raise ValueError(f"servers={self.url}: {path}: {response.status_code}: {response.text[:300]}")
            self.extras.pop(0)

    def ask(self, prompt: Any, sampling: str, seed: int) -> Reply:
        try:
            body = self._body(prompt, sampling, seed)
            response = self._client.post(PATHS[self.config.endpoint], json=body).raise_for_status()
            return read_reply(response.json())[1]
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            return Reply(error=repr(error)[:300])

    def ask_all(self, prompts: Sequence[Any], sampling: str, clients: int) -> list[Reply]:
        """Return the replies to all prompts; each of the clients asks the next one when it has its answer."""
        seeds = range(self.config.seed, self.config.seed + len(prompts))
        with ThreadPoolExecutor(clients) as pool:
            return list(pool.map(self.ask, prompts, [sampling] * len(prompts), seeds))

    def counted(self) -> tuple[int, int] | None:
        """Return the drafted and accepted tokens that /metrics counts, None if it counts none."""
        from scripts.benchmarks.comparison.servers import counters

        try:
            values = counters(self._client.get("/metrics").raise_for_status().text)
        except (httpx.HTTPError, ValueError):
            return None
        found = [[v for key, v in values.items() if key.endswith(f"spec_decode_num_{name}_total")] for name in COUNTERS]
        return (int(max(found[0])), int(max(found[1]))) if all(found) else None


class Parting(NamedTuple):
    prompt: int
    place: int  # of the first unit that differs
    length: int  # of the reference
    expected: Any
    got: Any
    gap: float | None  # between the log-probabilities that both gave their tokens there


def compare(expected: Sequence[Reply], got: Sequence[Reply]) -> tuple[list[Parting], float | None, int]:
    """Return where replies part, the largest difference of log-probabilities of equal tokens before, and how many
    replies have equal tokens and another log-probability; None and 0 without log-probabilities.
    """
    partings, noise, other = list[Parting](), list[float](), 0
    for number, (left, right) in enumerate(zip(expected, got, strict=True)):
        if left.error or right.error:
            continue
        shared = min(len(left.units), len(right.units))
        place = next((at for at in range(shared) if left.units[at] != right.units[at]), shared)
        differences = [abs(a - b) for a, b in zip(left.logprobs[:place], right.logprobs[:place], strict=False)]
        noise += differences
        if left.units == right.units:
            other += any(differences)
            continue
        ends = [each.units[place] if place < len(each.units) else None for each in (left, right)]
        given = [each.logprobs[place] if place < len(each.logprobs) else None for each in (left, right)]
        gap = None if given[0] is None or given[1] is None else abs(given[0] - given[1])
        partings.append(Parting(number, place, len(left.units), ends[0], ends[1], gap))
    return partings, max(noise, default=None), other


def sides_of(config: ProveConfig) -> dict[str, Address]:
    """Return the servers by what they do: one alone decodes plainly, unless fields of requests switch its drafts."""
    shared, plain, drafted = (each or {} for each in (config.fields, config.plain_fields, config.drafted_fields))
    sides = {PLAIN: Address(config, config.servers[0], shared | plain)}
    if len(config.servers) > 1 or plain or drafted:
        sides[DRAFTED] = Address(config, config.servers[-1], shared | drafted)
    return sides


def measure(
    sides: dict[str, Address], prompts: Sequence[Any], config: ProveConfig, until: float, tick: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Yield a record per sampling, number of clients and side, until the time `until`; the reference has none."""
    for sampling in SAMPLINGS:
        tick(f"{sampling}, the reference")
        reference = sides[PLAIN].ask_all(prompts, sampling, 1)
        for clients, (side, address) in ((n, each) for n in sorted(set(config.requests)) for each in sides.items()):
            if time.monotonic() > until:
                return
            tick(f"{sampling}, {side}, {clients} clients")
            before = address.counted()
            replies = address.ask_all(prompts, sampling, clients)
            drafts = drafted(replies, before, address.counted()) if side == DRAFTED else None
            yield record(sampling, side, clients, reference, replies, drafts)


def drafted(
    replies: Sequence[Reply], before: tuple[int, int] | None, after: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Return the drafted and accepted tokens of the replies, None if nobody says."""
    said = [reply.drafted for reply in replies if reply.drafted is not None]
    if said:
        return sum(each[0] for each in said), sum(each[1] for each in said)
    return None if before is None or after is None else (after[0] - before[0], after[1] - before[1])


def record(
    sampling: str,
    side: str,
    clients: int,
    reference: Sequence[Reply],
    replies: Sequence[Reply],
    drafts: tuple[int, int] | None,
) -> dict[str, Any]:
    partings, noise, other = compare(reference, replies)
    errors = [reply.error for reply in (*reference, *replies) if reply.error]
    different = bool(partings or other or errors)
    idle = side == DRAFTED and drafts is not None and not (drafts[1] and drafts[0] > drafts[1])
    return {
        "sampling": sampling,
        "side": side,
        "clients": clients,
        "answers": len(replies),
        "parted": len(partings),
        "place": statistics.median(each.place for each in partings) if partings else None,
        "rest": statistics.mean(1 - each.place / max(1, each.length) for each in partings) if partings else None,
        "gap": max((each.gap for each in partings if each.gap is not None), default=None),
        "other_logprobs": other,
        "noise": noise,
        "drafted": drafts and drafts[0],
        "accepted": drafts and drafts[1],
        "errors": errors[:SHOWN],
        "failed": len(errors),
        "shown": [each._asdict() for each in partings[:SHOWN]],
        "result": "different" if different else "not exercised" if idle else "equal",
    }


def summary(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence per sampling and side: from how many clients on answers part."""
    lines = []
    for sampling, side in dict.fromkeys((cell["sampling"], cell["side"]) for cell in cells):
        rows = [cell for cell in cells if (cell["sampling"], cell["side"]) == (sampling, side)]
        parting = [row for row in rows if row["parted"]]
        said = f"{sampling}, {side}: "
        if parting:
            worst = max(parting, key=lambda row: row["parted"])
            said += f"from {parting[0]['clients']} client{'s' if parting[0]['clients'] > 1 else ''} on answers part, "
            said += f"{worst['parted']} of {worst['answers']} at {worst['clients']}"
        else:
            said += f"no answer parts at up to {rows[-1]['clients']} client{'s' if rows[-1]['clients'] > 1 else ''}"
            noisy = next((row for row in rows if row["other_logprobs"]), None)
            said += f"; other log-probabilities from {noisy['clients']} on" if noisy else ""
        if side == DRAFTED and all(row["result"] == "not exercised" for row in rows):
            said += "; but nothing was drafted, accepted and rejected"
        elif side == DRAFTED and rows[0]["drafted"] is None:
            said += "; whether it drafted it does not say"
        lines.append(said)
    return lines


def read_prompts(config: ProveConfig) -> list[Any]:
    """Return messages, or texts for `endpoint=completions`, of the files' rows or the built-in prompts.

    Raises ValueError for a file that cannot be read, and rows without prompts, messages or text.
    """
    from train.config import FilesDataConfig
    from train.data.builtin_prompts import builtin_items
    from train.data.examples import parse_turns, renamed
    from train.data.sources import read_items

    items: Iterable[Any] = builtin_items(held_out=True)
    if config.files:
        files = FilesDataConfig(name="files", path=config.files, columns=config.columns, interleave=True)
        items = read_items(files, held_out=False) or ()
    prompts = list[Any]()
    for item in islice(items, config.num_prompts):
        row = renamed(item.row or {}, config.columns)
        text = row.get("prompt") or row.get("text")
        chat = [] if isinstance(text, str) or "messages" not in row else parse_turns("messages", row["messages"])[0]
        while chat and chat[-1]["role"] != "user":
            chat.pop()
        if not isinstance(text, str) and not chat:
            raise ValueError(f"files: {item.place}: {item.error or 'holds no prompt, messages or text'}")
        messages = chat or [{"role": "user", "content": text}]
        prompts.append(messages if config.endpoint == "chat" else text or chat[-1]["content"])
    return prompts
