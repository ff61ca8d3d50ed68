"""The process that compiles grammars which nobody has looked at yet: `python -m infer.server.parsing.grammar_worker`.

Reads one line of JSON with the tokenizer and the limit on its memory, then a grammar per line, and answers each with
`{"error": null}` or what is wrong. Its parent ends it when it takes too long; it ends by itself with its parent's pipe.
Light: no torch.
"""

from __future__ import annotations

import json
import resource
import sys

import numpy as np
from llguidance import LLTokenizer

from infer.sampling.grammar import Grammar, compile_matcher, make_tokenizer, one_line

WALK = 24  # tokens of a trial run: some grammars are cheap to compile and dear to follow


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    tokenizer = make_tokenizer(settings["tokenizer"], settings["vocab_size"], settings["eos_ids"])
    limit = settings["memory_mb"] * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    print(json.dumps({"error": None}), flush=True)
    for line in sys.stdin:
        try:
            walk(Grammar(**json.loads(line)), tokenizer)
            error = None
        except ValueError as problem:
            error = str(problem)
        print(json.dumps({"error": error}), flush=True)


def walk(grammar: Grammar, tokenizer: LLTokenizer) -> None:
    """Follows the grammar some way, always by the middle of what may come. Raises ValueError."""
    matcher = compile_matcher(grammar, tokenizer)
    for _ in range(WALK):
        if matcher.is_stopped():
            break
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        may_come = bits.nonzero()[0]
        if matcher.is_error() or not len(may_come):
            break
        matcher.consume_token(int(may_come[len(may_come) // 2]))
    if matcher.is_error():
        raise ValueError(f"{grammar.kind}: {one_line(matcher.get_error())}")


if __name__ == "__main__":
    main()
