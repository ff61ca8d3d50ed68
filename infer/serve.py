"""Serves a target and its head over HTTP, as OpenAI's API: python infer/serve.py [model=... head=...]"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.options.environment

# isort: split

if __name__ == "__main__":
    infer.options.environment.rest_collector()

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from socket import socket

from infer.config import ServeConfig
from infer.options.cli import engine_entry_point
from infer.processes.process_end import run_process


def run(config: ServeConfig) -> None:
    from infer.server.address import bind, check_exposure, read_api_keys, url

    api_keys = read_api_keys(config.server)
    check_exposure(config.server, api_keys)
    if config.learn and len(api_keys) > 1 and not config.learning.shared:
        raise ValueError(
            f"learn=true: {len(api_keys)} API keys are as many tenants, whose requests would train the one head that "
            "they share; say learning.shared=true if they may"
        )
    replicas = config.server.replicas
    if replicas > 1 and importlib.util.find_spec("ray") is None:
        raise ValueError(f"server.replicas={replicas}: needs Ray; pip install -e '.[serve,ray]', or server.replicas=1")
    listener = bind(config.server.host, config.server.port)
    address = url(listener)
    print(f"{address}: loading {config.model.name}" + (f", {replicas} times" if replicas > 1 else ""), flush=True)
    if replicas > 1:
        infer.options.environment.wake_collector()
        return run_replicas(config, listener, address, api_keys)

    # Imports that take seconds come only now, so that a mistake above is reported at once.
    from infer.console.card import describe_costs, describe_engine
    from infer.engine import Engine
    from infer.learning.loop import LearningLoop
    from infer.learning.trainer import Trainer
    from infer.options.exported_heads import lacks_head
    from infer.server.lifecycle import log_to_console, serve
    from infer.server.runtime import Runtime

    log_to_console()
    trainer = Trainer(config) if config.learn else None  # which loads the head meanwhile
    if trainer and lacks_head(config.head, config.output_dir, config.model):
        config = replace(config, head=replace(config.head, path=trainer.new_head()))

    def load() -> Engine:
        parts = config.model, config.head, config.engine, config.proposer
        return Engine.load(*parts, output_dir=config.output_dir, profile=config.server.profile_first)

    def show(engine: Engine, _service: object) -> None:
        infer.options.environment.wake_collector()
        rows = [
            *describe_engine(engine, config.model, config.head, config.output_dir),
            *([("graphs", str(engine.graphs))] if engine.graphs else ()),
            *describe_costs(engine.costs),
            *(describe_learning(config, trainer.pid) if trainer else ()),
        ]
        announce(rows, address, config.model.name, keyed=bool(api_keys))

    runtime = Runtime(load, config.server, trainer and partial(LearningLoop, trainer=trainer))
    code = serve(config.model.name, runtime, listener, api_keys=api_keys, on_ready=show)
    if code:
        sys.exit(code)


def describe_learning(config: ServeConfig, pid: int) -> Sequence[tuple[str, str]]:
    folder = f"{config.output_dir}/heads/{config.model.name}/{config.head.name}-learned/"
    kept = f"heads that draft better are kept in {folder}" if config.learning.save else "nothing of it is written"
    return [("learning", f"process {pid} trains the head on what is served; {kept}")]


def run_replicas(config: ServeConfig, listener: socket, address: str, api_keys: Sequence[str]) -> None:
    from infer.console.card import describe_end_tokens
    from infer.devices import dtype_name
    from infer.server.ray_app import serve_replicas
    from models.targets import resolve_checkpoint
    from models.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(resolve_checkpoint(config.model.path_or_hub_id, config.model.revision, weights=False))

    def show() -> None:
        rows = [
            ("model", f"{config.model.name} ({config.model.path}), {dtype_name(config.model)}"),
            ("end tokens", describe_end_tokens(tokenizer.eos_ids, tokenizer)),
            ("replicas", f"{config.server.replicas}, by Ray Serve; a session (x-session-id) stays with one"),
        ]
        announce(rows, address, config.model.name, keyed=bool(api_keys))

    port = listener.getsockname()[1]
    listener.close()  # it only checked that the address is free; from here on Ray's proxy listens
    serve_replicas(config, port=port, api_keys=api_keys, on_ready=show)


def announce(rows: Sequence[tuple[str, str]], address: str, model: str, *, keyed: bool) -> None:
    from infer.console.card import print_card

    print_card("Headway serves", [*rows, ("address", address + (", API key needed" if keyed else ""))])
    body = json.dumps({"model": model, "prompt": "def main(", "max_tokens": 64, "stream": True})
    key = ' -H "authorization: Bearer $HEADWAY_API_KEY"' if keyed else ""
    print(f"\nopen {address}/ in a browser, or", end="")
    print(f"\ntry: curl -N {address}/v1/completions -H 'content-type: application/json'{key} -d '{body}'\n", flush=True)


main = engine_entry_point("serve", ServeConfig)(run)

if __name__ == "__main__":
    run_process(main)
