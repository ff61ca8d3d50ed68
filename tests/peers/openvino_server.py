"""Answers OpenAI's completions of token ids with OpenVINO GenAI's continuous batching, for scripts/bench.py.

    .peers/openvino/bin/python tests/peers/openvino_server.py --model FILE.gguf --port 8000 ...

Runs in OpenVINO's own environment (`scripts/peers.sh openvino`) and imports nothing of this repository. A request has
one prompt of token ids and is not streamed. /metrics has vLLM's counters of drafts, if it looks n-grams up: every step
of a request counts as a verify, as OpenVINO does not say in which steps it drafted.
"""

from __future__ import annotations

import json
import queue
import threading
from argparse import ArgumentParser
from collections import Counter
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

import openvino  # pyright: ignore[reportMissingImports]
import openvino_genai  # pyright: ignore[reportMissingImports]

CACHE_GB = 1


class Batcher:
    """OpenVINO's pipeline, which one thread steps, and to which the others give requests."""

    def __init__(self, model: str, threads: int, slots: int, ngram: int, drafts: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs, scheduler.enable_prefix_caching = CACHE_GB, slots, False
        lookup = {"prompt_lookup": True} if ngram else {}
        properties = {"INFERENCE_NUM_THREADS": threads, **lookup}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._end = self._pipeline.get_tokenizer().get_eos_token_id()
        self._lookup = {"max_ngram_size": ngram, "num_assistant_tokens": drafts} if ngram else {}
        self._arrived = queue.SimpleQueue[tuple[dict[str, Any], Future[list[int]]]]()
        self.counts = Counter[str]()

    def answer(self, body: dict[str, Any]) -> list[int]:
        """Return the ids of the completion that the body of a request asks for. Raises what OpenVINO does."""
        future = Future[list[int]]()
        self._arrived.put((body, future))
        return future.result()

    def _config_of(self, body: dict[str, Any]) -> Any:
        config = self._pipeline.get_config()
        config.set_eos_token_id(self._end)  # a pipeline that looks n-grams up has none
        sampling = {"do_sample": True, "temperature": body["temperature"], "rng_seed": body["seed"]}
        values = {"max_new_tokens": body["max_tokens"], "ignore_eos": body["ignore_eos"], **self._lookup}
        for key, value in (values | (sampling if body["temperature"] else {"do_sample": False})).items():
            setattr(config, key, value)
        return config

    def run(self) -> None:
        """Step the pipeline, and wait while it has no request. Raises what a step does, which ends all requests."""
        numbers, active = count(), []
        while True:
            while not active or not self._arrived.empty():
                body, future = self._arrived.get()
                try:
                    prompt = openvino.Tensor([body["prompt"]])
                    handle = self._pipeline.add_request(next(numbers), prompt, self._config_of(body))
                    active.append((handle, [], future))
                except Exception as error:  # only this request's
                    future.set_exception(error)
            self._pipeline.step()
            for entry in list(active):
                handle, ids, future = entry
                while handle.can_read():
                    (output,) = handle.read().values()
                    if ids and self._lookup:  # the first token comes of the prompt
                        self.counts.update(drafts=1, accepted_tokens=len(output.generated_ids) - 1)
                    ids += output.generated_ids
                if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                    active.remove(entry)
                    future.set_result(ids)


class Handler(BaseHTTPRequestHandler):
    protocol_version, wbufsize, disable_nagle_algorithm = "HTTP/1.1", -1, True
    batcher: Batcher

    def do_GET(self) -> None:
        lines = (f"vllm:spec_decode_num_{key}_total {value}\n" for key, value in self.batcher.counts.items())
        self._reply(200, "".join(lines))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            self._reply(200, json.dumps({"choices": [{"token_ids": self.batcher.answer(body)}]}))
        except Exception as error:
            self._reply(400, f"{type(error).__name__}: {error}")

    def _reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


class Listener(ThreadingHTTPServer):
    request_queue_size = 128


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    for name in ("port", "threads", "slots"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("ngram", "drafts"):
        parser.add_argument(f"--{name}", type=int, default=0)
    options = vars(parser.parse_args())
    port = options.pop("port")
    Handler.batcher = Batcher(**options)
    threading.Thread(target=Listener(("127.0.0.1", port), Handler).serve_forever, daemon=True).start()
    Handler.batcher.run()


if __name__ == "__main__":
    main()
