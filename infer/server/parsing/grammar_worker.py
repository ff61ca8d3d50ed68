"""Worker process that compiles grammars not checked before: `python -m infer.server.parsing.grammar_worker`.

Reads one line of JSON with the tokenizer, then one grammar per line, and writes `{"error": ...}` for each line, null if
it is valid. A grammar that takes more CPU time than the settings allow ends it with SIGPROF; it exits when its parent's
pipe closes. Does not import torch, to stay light.
"""

from __future__ import annotations

import json
import resource
import signal
import sys

import numpy as np

from infer.batch.grammar import Grammar, GrammarTokenizer, compile_matcher, make_tokenizer, reason_of

MEMORY_MB = 1024  # address space of this process: the tokenizer's trie and many times a sensible grammar
WALK = 24  # tokens of a trial run: some grammars are cheap to compile and expensive to advance


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    tokenizer = make_tokenizer(settings["tokenizer"], settings["vocab_size"], settings["eos_ids"])
    limit = MEMORY_MB * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    print(json.dumps({"error": None}), flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, settings["cpu_s"])
        try:
            walk(Grammar(**json.loads(line)), tokenizer)
            error = None
        except ValueError as problem:
            error = str(problem)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps({"error": error}), flush=True)


def walk(grammar: Grammar, tokenizer: GrammarTokenizer) -> None:
    """Advance the matcher by up to WALK tokens, each the middle one of those allowed. Raises ValueError on an error."""
    matcher = compile_matcher(grammar, tokenizer)
    for _ in range(WALK):
        if matcher.is_stopped():
            break
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = bits.nonzero()[0]
        if matcher.is_error() or not len(allowed):
            break
        matcher.consume_token(int(allowed[len(allowed) // 2]))
    if matcher.is_error():
        raise ValueError(f"{grammar.kind}: {reason_of(matcher)}")


if __name__ == "__main__":
    main()
