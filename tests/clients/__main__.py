"""python -m tests.clients [CLIENT ...]: see scripts/clients.sh."""

from __future__ import annotations

import argparse
import sys

import infer.options.environment  # noqa: F401

# isort: split

from tests.clients.programs import PROGRAMS, run_program, table
from tests.clients.setting import install, serving


def parse(argv: list[str]) -> list[str]:
    parser = argparse.ArgumentParser(
        prog="./scripts/clients.sh",
        description="Client programs of OpenAI's and Anthropic's APIs against a server of ours, each as it comes.",
        epilog="clients: " + ", ".join(PROGRAMS),
        allow_abbrev=False,
    )
    parser.add_argument("client", nargs="*", help="some of them; all without")
    chosen = parser.parse_args(argv).client or list(PROGRAMS)
    if unknown := [name for name in chosen if name not in PROGRAMS]:
        parser.error(f"{unknown[0]}: no such client; there are: {', '.join(PROGRAMS)}")
    return chosen


def main(argv: list[str]) -> int:
    programs = [PROGRAMS[name] for name in parse(argv)]
    for environment in dict.fromkeys(program.environment for program in programs):
        install(environment)
    outcomes = []
    with serving() as url:
        for program in programs:
            say(f"{program.name} ...")
            outcomes.append(run_program(program, url))
    print(table(outcomes))
    for outcome in outcomes:
        for check, error in outcome.errors.items():
            print(f"\n{outcome.name}, {check}: {error}")
    return int(any(outcome.errors for outcome in outcomes))


def say(text: str) -> None:
    print(f"headway: {text}", file=sys.stderr, flush=True)


sys.exit(main(sys.argv[1:]))
