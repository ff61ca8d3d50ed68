"""Other servers' names of options: which of them are taken, and what a command line that sets another is told."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path

# What other servers call it, vLLM's words mostly, fields of its speculative_config included, and what it is here.
_HERE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
ELSEWHERE: dict[str, str] = {name: here for here, names in _HERE.items() for name in names}
# Keys that may be written without their group, where a command has no key of that name
SHORT = {
    **{name: f"engine.{name}" for name in ("max_model_len", "memory_share", "seed")},
    **{
        name: f"proposer.{name}"
        for name in (
            *("acceptance", "posterior_threshold", "posterior_alpha"),
            *("parallel_drafting", "prompt_lookup_max", "prompt_lookup_min"),
            *("suffix_decoding_max_tree_depth", "suffix_decoding_max_spec_factor"),
            *("suffix_decoding_min_token_prob", "suffix_decoding_max_cached_requests"),
        )
    },
}


def elsewhere(key: str) -> str | None:
    """Return what a key of other servers is called here, None for any other."""
    name = key.rpartition(".")[2].replace("-", "_")
    return SHORT.get(key.replace("-", "_")) or ELSEWHERE.get(name)


def full_keys(words: Iterable[str], fields: Collection[str]) -> list[str]:
    """Return the words of a command line with the groups of keys in SHORT that are not among the command's `fields`.

    Raises ValueError for an option written as other servers have it: --max-model-len 4096.
    """
    result = []
    for word in words:
        key, equals, value = word.partition("=")
        if word.startswith("--") and (here := elsewhere(key[2:])):
            name = key[2:].replace("-", "_")
            here = name if name in fields else here
            raise ValueError(f"{key}: options are written key=value, without dashes; here {here}")
        if equals and key in ELSEWHERE and key not in fields:  # before Hydra reads the value, which may be JSON
            raise ValueError(unknown(key))
        full = SHORT.get(key, "") if equals and key not in fields else ""
        result.append(f"{full}={value}" if full.partition(".")[0] in fields else word)
    return result


def unknown(key: str) -> str | None:
    """Return what an unknown key that other servers have is called here; None for any other."""
    here = elsewhere(key)
    return f"{key}: unknown key; here {here}" if here else None
