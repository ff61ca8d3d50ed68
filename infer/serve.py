"""Serves a target and its head over HTTP, as OpenAI's API: python infer/serve.py model=demo head=eagle3"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
os.environ.setdefault("USE_HUB_KERNELS", "NO")

import json
import logging

from infer.cli import entry_point
from infer.config import ServeConfig
from infer.launched import launched_rank


def run(config: ServeConfig) -> None:
    if launched_rank(config.engine):
        from infer.launch import follow_launched

        return follow_launched(config.model, config.engine)
    from infer.server.address import bind, check_exposure, read_api_keys, url

    api_keys = read_api_keys(config.server)
    check_exposure(config.server, api_keys)
    listener = bind(config.server.host, config.server.port)
    print(f"{url(listener)}: loading {config.model.name}", flush=True)

    # Only now what takes seconds to import: a mistake above is answered at once.
    from infer.card import describe_proposer, describe_ranks, print_card
    from infer.engine import Engine
    from infer.server.lifecycle import serve
    from infer.server.service import Service

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)

    def load() -> Engine:
        return Engine.load(config.model, config.head, config.engine, config.proposer, output_dir=config.output_dir)

    def show(engine: Engine) -> None:
        pages, size = engine.memory.pages, config.engine.page_size
        drafts = describe_proposer(engine.proposer_name, config.proposer, config.head, config.model, config.output_dir)
        print_card(
            "Headway serves",
            [
                ("model", f"{config.model.name} ({config.model.path}), {config.model.dtype} on {engine.device}"),
                ("speculation", drafts),
                ("context", f"{engine.context} tokens"),
                ("KV pool", f"{pages} pages of {size} tokens"),
                *describe_ranks(engine.config),
                ("memory", str(engine.memory)),
                *([("graphs", str(engine.graphs))] if engine.graphs else ()),
                ("address", url(listener) + (", API key needed" if api_keys else "")),
            ],
        )
        body = json.dumps({"model": config.model.name, "prompt": "def main(", "max_tokens": 64, "stream": True})
        key = ' -H "authorization: Bearer $HEADWAY_API_KEY"' if api_keys else ""
        print(f"\nopen {url(listener)}/ in a browser, or", end="")
        print(
            f"\ntry: curl -N {url(listener)}/v1/completions -H 'content-type: application/json'{key} -d '{body}'\n",
            flush=True,
        )

    code = serve(Service(config.model.name, config.server, load), listener, api_keys=api_keys, on_ready=show)
    if code:
        sys.exit(code)


main = entry_point("serve", ServeConfig)(run)

if __name__ == "__main__":
    main()
