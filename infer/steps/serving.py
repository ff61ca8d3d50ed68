"""What an engine is to the code that runs requests of its own: start-up, offline generation, recorders."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from infer.config import EngineConfig
from infer.kvcache.memory import EngineSizes
from infer.processes.threads import Threads
from infer.request import Request, SamplingParams, StepOutput
from infer.steps.step import StepRunner
from models.heads.base import Head
from models.heads.draft_model.head import DraftModelHead
from models.targets.llama import LlamaTarget
from models.tokenizer import Tokenizer


class Serving(Protocol):
    """The members of `Engine` that they use."""

    config: EngineConfig
    target: LlamaTarget
    tokenizer: Tokenizer | None
    device: torch.device
    dtype: torch.dtype
    context: int
    sizes: EngineSizes
    seeds: random.Random
    threads: Threads
    steps: StepRunner
    check_ranks: Callable[[], None]

    @property
    def head(self) -> Head | None: ...
    @property
    def draft_model(self) -> DraftModelHead | None: ...
    @property
    def proposer_name(self) -> str: ...
    @property
    def has_work(self) -> bool: ...
    def add(self, prompt_ids: Sequence[int], params: SamplingParams, *, parent: str | None = None) -> str: ...
    def request(self, request_id: str) -> Request: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[StepOutput]: ...
