"""The schema of scripts/prove.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from infer.batch.params import MAX_SEED
from infer.config import EngineCommandConfig, register
from models.checks import choice, number


@dataclass
class ProveConfig(EngineCommandConfig):
    without_head: ClassVar[str] = "none"  # proves what drafts without one
    minutes: float = number(5.0, above=0)  # all together: three fifths for the cells, the rest for speed
    # run exactly so many cells, and one round of speed, however long they take; null: as many as `minutes` hold
    cells: int | None = number(None, low=1)
    requests: list[int] = number([1, 4, 8, 16], low=1)  # how many are decoded together
    files: list[str] = field(default_factory=list)  # prompts, as data.path of training; empty: a mix of its own
    columns: Any = None  # maps our column names to the files': {prompt: question}
    num_prompts: int = number(10, low=1)
    seed: int = number(0, low=0, high=MAX_SEED // 2)  # of sampled requests, and of their order
    repeat: str | None = None  # a failing case that an earlier run wrote; only that is run
    # addresses of a running server, or of two, the second with drafts; only these are asked, and nothing is loaded
    servers: list[str] = field(default_factory=list)
    fields: Any = None  # of every request to them
    plain_fields: Any = None  # of those without drafts: {speculative: {enabled: false}}
    drafted_fields: Any = None  # of those with drafts
    endpoint: str = choice("chat", "chat", "completions")
    max_tokens: int = number(64, low=1)  # of an answer of theirs

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.requests:
            raise ValueError("requests=[]: name at least one number of requests")
        if len(self.servers) > 2:
            raise ValueError(f"servers={self.servers}: give one address, or two: without drafts, and with them")
        for key in ("fields", "plain_fields", "drafted_fields"):
            if not isinstance(getattr(self, key), dict | None):
                raise ValueError(f"{key}={getattr(self, key)}: must be fields of a request, as {{temperature: 0}}")
        rule = self.proposer.acceptance
        if self.proposer.name in ("none", "synthetic"):
            raise ValueError(
                f"proposer={self.proposer.name}: leaves nothing to prove; proposer=auto tries all that there are"
            )
        if rule not in (None, "exact"):
            raise ValueError(f"proposer.acceptance={rule}: gives up what is proved here; leave it out")


COMMANDS: dict[str, type] = {"prove": ProveConfig}
register({}, COMMANDS)
