"""Answers from an OpenAI-compatible server that serves the same target: our own, vLLM, SGLang.

Prompts go as token ids and answers must come back as token ids (`return_token_ids`), so nothing is tokenised twice and
the loss mask stays exact. Passing failures are tried again; a conversation that cannot be answered is reported and
left to the next run.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import httpx

from infer.request import SamplingParams
from infer.server.address import key_of_environment
from train.config import DataConfig
from train.data.regenerate import Finished, Job

PASSING = (408, 409, 425, 429, 500, 502, 503, 504)
LONGEST_PAUSE = 30.0
HEED = 0.2  # seconds between two looks at whether to stop


class Unanswered(Exception):
    """This conversation cannot be answered now; others may be."""


def check_server(data: DataConfig) -> None:
    """Raises ValueError where nothing answers at `data.server`, or does not serve what is asked for."""
    ServerAnswerer(data, 0).close()


class ServerAnswerer:
    def __init__(self, data: DataConfig, vocab_size: int, *, first_pause: float = 0.5) -> None:
        """Asks the server for its models. Raises ValueError when it cannot be used."""
        assert data.server is not None
        self._data, self._vocab_size, self._first_pause = data, vocab_size, first_pause
        self._stopping = threading.Event()
        key = key_of_environment()
        self._client = httpx.Client(
            base_url=data.server.rstrip("/") + "/",
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(data.timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=data.concurrency),
        )
        try:
            self._model = self._choose_model()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._client.close()

    def answer(self, jobs: Iterator[Job], finished: Finished, check: Callable[[], None]) -> None:
        """Raises ValueError once nothing at all is answered any more, or answers are not what they must be."""
        in_a_row, patience = 0, max(8, self._data.concurrency)
        pool = ThreadPoolExecutor(self._data.concurrency, thread_name_prefix="answer")
        running: dict[Future[None], Job] = {}
        try:
            while True:
                while len(running) < self._data.concurrency and (job := next(jobs, None)) is not None:
                    running[pool.submit(self._converse, job)] = job
                if not running:
                    return
                check()
                for future in wait(running, timeout=HEED, return_when=FIRST_COMPLETED).done:
                    job = running.pop(future)
                    try:
                        future.result()
                    except Unanswered as error:
                        in_a_row += 1
                        finished(job, str(error))
                        if in_a_row >= patience:
                            raise ValueError(
                                f"data.server={self._data.server}: {in_a_row} requests in a row failed, the last: "
                                f"{error}. What was answered is kept; run the same command again to go on"
                            ) from error
                    else:
                        in_a_row = 0
                        finished(job, None)
        finally:
            self._stopping.set()
            self.close()  # ends what is still in flight
            pool.shutdown(wait=False, cancel_futures=True)

    def _converse(self, job: Job) -> None:
        try:
            while (prompt := job.dialogue.next_prompt()) is not None:
                job.dialogue.take(self._complete(prompt, job.params))
        except ValueError as error:
            if isinstance(error, WrongServer):
                raise
            raise Unanswered(str(error)) from error

    def _complete(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed,
            "return_token_ids": True,
        }
        if params.top_k:
            body["top_k"] = params.top_k
        answer = self._request("POST", "completions", json=body)
        choice = (answer.get("choices") or [{}])[0]
        ids = choice.get("token_ids")
        if not isinstance(ids, list):
            raise WrongServer(
                f"data.server={self._data.server}: its answers hold no token_ids, without which no loss mask is exact; "
                "use a server that knows return_token_ids (this repository's, vLLM), or drop data.server"
            )
        if not all(type(token) is int and 0 <= token < self._vocab_size for token in ids):
            raise WrongServer(
                f"data.server={self._data.server}: answers with ids beyond this target's vocabulary of "
                f"{self._vocab_size}; it serves another model"
            )
        counted = (answer.get("usage") or {}).get("prompt_tokens")
        if counted is not None and counted != len(prompt):
            raise WrongServer(
                f"data.server={self._data.server}: read {counted} prompt tokens where {len(prompt)} were sent; it "
                "adds or tokenises something"
            )
        return ids

    def _choose_model(self) -> str:
        wanted = self._data.server_model
        try:
            names = [str(entry["id"]) for entry in self._request("GET", "models").get("data", [])]
        except Unanswered as error:
            raise ValueError(f"data.server={self._data.server}: cannot be used: {error}") from error
        if wanted in names:
            return wanted
        served = f"data.server={self._data.server}: serves {', '.join(names) or 'nothing'}"
        if wanted is not None:
            raise ValueError(f"{served}, not data.server_model={wanted}; give one of these")
        if len(names) != 1:
            raise ValueError(f"{served}; say data.server_model=")
        return names[0]

    def _request(self, method: str, path: str, **options: object) -> dict:
        """With retries. Raises Unanswered."""
        pause = self._first_pause
        for attempt in range(self._data.retries + 1):
            asked = pause
            try:
                response = self._client.request(method, path, **options)  # type: ignore[arg-type]
                if response.status_code == 200:
                    return response.json()
                reason = f"status {response.status_code}: {response.text[:200]}"
                if response.status_code not in PASSING:
                    raise Unanswered(reason)
                asked = retry_after(response) or pause
            except (httpx.HTTPError, RuntimeError, ValueError) as error:  # a closed client raises RuntimeError
                reason = f"{type(error).__name__}: {error}"
            if attempt < self._data.retries and self._stopping.wait(asked * random.uniform(0.8, 1.2)):
                break
            pause = min(2 * pause, LONGEST_PAUSE)
        raise Unanswered(reason)


class WrongServer(ValueError):
    """No further request can help."""


def retry_after(response: httpx.Response) -> float | None:
    """In seconds; None where the server names none, or a date."""
    text = response.headers.get("retry-after", "")
    return min(float(text), LONGEST_PAUSE) if text.isdigit() else None
