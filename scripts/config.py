"""The schemas of the scripts that measure: bench, served, eval and step_time.

Builds on the schemas of `infer/config.py` (target, head, proposer, engine). Only checks values and their combinations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from infer.config import (
    SOURCES,
    EngineConfig,
    ModelConfig,
    ProposerConfig,
    TrackerConfig,
    check_head_and_proposer,
    register,
)
from models.checks import MISSING, at_least, check_fields, number, one_of
from models.heads import DEFAULT_HEAD, HEADS
from models.heads.config import HeadConfig

# systems of a bench, by the first part of their names; scripts/systems.py defines them
ENGINE_SYSTEMS = ("off", *SOURCES, "combined", *HEADS)
TRANSFORMERS = ("hf", "hf_lookup", "hf_assisted")
SERVERS = ("server", "vllm", "llama.cpp")
LISTS = ("systems", "loads", "concurrency", "temperatures", "shapes", "chat_template")  # lists of at least one item


@dataclass
class MeasureConfig:
    """The keys of every measurement."""

    model: ModelConfig = MISSING
    head: HeadConfig = MISSING
    engine: EngineConfig = MISSING
    output_dir: str = "outputs"
    num_prompts: int = number(16, low=1)
    prompt_tokens: int = number(64, low=1)  # length of a prompt cut from the corpus or from plain text
    max_tokens: int = number(128, low=1)

    def __post_init__(self) -> None:
        check_fields(self)
        for key in LISTS:
            if getattr(self, key, None) == []:
                raise ValueError(f"{key}=[]: name at least one")
        for temperature in getattr(self, "temperatures", ()):
            at_least("temperatures", temperature, 0)


@dataclass
class PromptsConfig(MeasureConfig):
    """The keys of a measurement whose prompts may come from files and whose result can be saved."""

    seed: int = 0
    save: str | None = None  # also write scripts/results/<save>-<model>_<hardware>_<date>.json
    files: list[str] = field(default_factory=list)  # prompts, as data.path of training; empty: of the demo corpus
    columns: Any = None  # maps our column names to the files': {prompt: question}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.save is not None and not re.fullmatch(r"[a-z0-9-]+", self.save):
            raise ValueError(f"save={self.save}: becomes part of a file name; use small letters, digits and '-'")


@dataclass
class SystemsConfig(PromptsConfig):
    """The keys of a comparison of systems; scripts/systems.py says what their names mean."""

    proposer: ProposerConfig = MISSING
    systems: list[str] = field(default_factory=list)
    peers: str = ".peers"  # where scripts/peers.sh built vLLM and llama.cpp
    compile: bool = True  # vLLM compiles its model, which takes minutes at every start; false: it runs eager

    def __post_init__(self) -> None:
        super().__post_init__()
        check_head_and_proposer(self.head, self.proposer)


@dataclass
class BenchConfig(SystemsConfig):
    systems: list[str] = field(default_factory=lambda: ["off", "ngram", "head", "hf", "hf_lookup"])
    concurrency: list[int] = number([1, 4, 16], low=1)
    min_tokens: int | None = number(None, low=1)  # output lengths vary from this to max_tokens; null: all are that
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    rounds: int = number(3, low=1)  # repetitions, each in another order of systems: A, B, C, B, C, A, ...
    # fail if an `auto` system is slower than `off` by more than this plus noise
    never_slower: float | None = number(None, low=0)
    ignore_eos: bool = True  # outputs have exactly the requested length; false: they end at the target's end token

    def __post_init__(self) -> None:
        super().__post_init__()
        for system in self.systems:
            one_of("systems", system.partition(":")[0], (*ENGINE_SYSTEMS, *TRANSFORMERS, *SERVERS))
        if self.min_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens}: is more than max_tokens={self.max_tokens}")


@dataclass
class ServedConfig(SystemsConfig):
    """A bench of servers under an open-loop load: requests arrive whether or not earlier ones have finished.

    A file of today that `save` names is extended.
    """

    systems: list[str] = field(default_factory=lambda: ["server", "server:head:chain3", "server:head:auto3"])
    num_prompts: int = number(64, low=1)
    max_tokens: int = number(64, low=1)
    # requests/s at a load of 1; null: the measured capacity of the first system
    capacity: float | None = number(None, above=0)
    loads: list[float] = number([0.1, 0.5, 0.9, 1.5, 3.0], above=0)
    seconds: float = number(20.0, above=0)  # duration of each load
    slots: int = number(16, low=1)  # requests that a server runs concurrently

    def __post_init__(self) -> None:
        super().__post_init__()
        for system in self.systems:
            one_of("systems", system.partition(":")[0], SERVERS)


@dataclass
class EvalConfig(PromptsConfig):
    """An evaluation of an exported head; `num_prompts` counts per file."""

    tracker: TrackerConfig = MISSING
    chat_template: list[bool] = field(default_factory=lambda: [True])  # [true,false]: every file with and without
    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.6, 1.0])
    shapes: list[str] = field(default_factory=lambda: ["chain5", "tree16"])  # see scripts/systems.py
    concurrency: list[int] = number([1], low=1)  # prompts in flight together

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head.name == "none":
            raise ValueError(f"head=none: an evaluation needs a head; say head={DEFAULT_HEAD}")
        if self.engine.tensor_parallel > 1:
            raise ValueError(f"engine.tensor_parallel={self.engine.tensor_parallel}: is for serving; use one process")


@dataclass
class StepTimeConfig(MeasureConfig):
    proposer: ProposerConfig = MISSING
    num_prompts: int = number(4, low=1)
    temperature: float = 0.0
    plot: str | None = None  # file for a plot of the costs of steps and drafts, measured with proposer.adaptive=true

    def __post_init__(self) -> None:
        super().__post_init__()
        check_head_and_proposer(self.head, self.proposer)
        at_least("temperature", self.temperature, 0)
        if self.plot is not None and not self.proposer.adaptive:
            raise ValueError(f"plot={self.plot}: costs are measured with proposer.adaptive=true only; add it")
        if self.plot is not None and not self.plot.endswith((".png", ".svg", ".pdf")):
            raise ValueError(f"plot={self.plot}: must end in .png, .svg or .pdf")


COMMANDS: dict[str, type] = {
    "bench": BenchConfig,
    "served": ServedConfig,
    "eval": EvalConfig,
    "step_time": StepTimeConfig,
}
register({}, COMMANDS)
