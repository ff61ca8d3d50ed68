"""A conversation in the terminal with a target and its head: python infer/chat.py"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.options.environment

# isort: split

if __name__ == "__main__":
    infer.options.environment.rest_collector()

from infer.config import ChatConfig
from infer.options.cli import engine_entry_point
from infer.processes.process_end import run_process


def run(config: ChatConfig) -> None:
    # Imports that take seconds come only now, so that a mistake above is reported at once.
    from infer.console.chat_session import ChatSession
    from infer.engine import Engine

    params = config.sampling()
    print(f"loading {config.model.name} ...", file=sys.stderr, flush=True)
    # Start without profiling: that is done while the user types the first message.
    engine = Engine.load(
        config.model, config.head, config.engine, config.proposer, output_dir=config.output_dir, profile=False
    )
    infer.options.environment.wake_collector()
    try:
        ChatSession(config, engine, params).run()
    finally:
        engine.close()


main = engine_entry_point("chat", ChatConfig)(run)

if __name__ == "__main__":
    run_process(main)
