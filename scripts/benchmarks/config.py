"""The schemas of the subcommands of scripts/bench.py.

Builds on the schemas of `infer/config.py` (target, head, proposer, engine). Only checks values and their combinations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from infer.config import SOURCES, EngineConfig, ModelConfig, ProposerConfig, check_head_and_proposer, register
from models.checks import MISSING, at_least, bounded, check_fields, number, one_of
from models.heads import DEFAULT_HEAD, HEADS
from models.heads.config import HeadConfig

# systems of a comparison, by the first part of their names; scripts/benchmarks/comparison/systems.py defines them
ENGINE_SYSTEMS = ("off", *SOURCES, "combined", *HEADS)
TRANSFORMERS = ("hf", "hf_lookup")
OURS, THEIRS = "headway", "speculators"  # systems of a comparison of training
SAVED = "becomes part of a file name; use small letters, digits and '-'", re.compile("[a-z0-9-]+").fullmatch


@dataclass
class PromptsConfig:
    """The keys of a measurement with prompts, of the demo corpus or of files."""

    model: ModelConfig = MISSING
    head: HeadConfig = MISSING
    engine: EngineConfig = MISSING
    output_dir: str = "outputs"
    save: str | None = bounded(None, *SAVED)  # also write scripts/results/<save>-<model>_<hardware>_<date>.json
    num_prompts: int = number(16, low=1)
    prompt_tokens: int = number(64, low=1)  # length of a prompt cut from the corpus or from plain text
    max_tokens: int = number(128, low=1)
    seed: int = 0
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    files: list[str] = field(default_factory=list)  # prompts, as data.path of training; empty: of the demo corpus
    columns: Any = None  # maps our column names to the files': {prompt: question}

    def __post_init__(self) -> None:
        check_fields(self)
        for key, value in vars(self).items():
            if value == [] and key != "files":
                raise ValueError(f"{key}=[]: name at least one")
        for temperature in self.temperatures:
            at_least("temperatures", temperature, 0)


@dataclass
class CompareConfig(PromptsConfig):
    """A comparison of systems; scripts/benchmarks/comparison/systems.py says what their names mean."""

    proposer: ProposerConfig = MISSING
    systems: list[str] = field(default_factory=lambda: ["off", "ngram", "head", "hf", "hf_lookup"])
    # by the name of another program: the command that starts its server (scripts/benchmarks/comparison/servers.py)
    servers: dict[str, str] = field(default_factory=dict)
    peers: str = ".peers"  # where scripts/peers.sh built other programs
    compile: bool = True  # vLLM compiles its model, which takes minutes at every start; false: it runs eager
    concurrency: list[int] = number([1, 4, 16], low=1)
    min_tokens: int | None = number(None, low=1)  # output lengths vary from this to max_tokens; null: all are that
    rounds: int = number(3, low=1)  # repetitions, each in another order of systems: A, B, C, B, C, A, ...
    # fail if an `auto` system is slower than `off` by more than this plus noise
    never_slower: float | None = number(None, low=0)
    ignore_eos: bool = True  # outputs have exactly the requested length; false: they end at the target's end token

    def __post_init__(self) -> None:
        super().__post_init__()
        check_head_and_proposer(self.head, self.proposer)
        programs = [name for name in self.servers if ":" not in name]
        for system in self.systems:
            one_of("systems", system.partition(":")[0], (*ENGINE_SYSTEMS, *TRANSFORMERS, *programs))
        if self.min_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens}: is more than max_tokens={self.max_tokens}")


@dataclass
class EvaluateConfig(PromptsConfig):
    """An evaluation of an exported head; `num_prompts` counts per file."""

    chat_template: list[bool] = field(default_factory=lambda: [True])  # [true,false]: every file with and without
    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.6, 1.0])
    shapes: list[str] = field(default_factory=lambda: ["chain5", "tree16"])  # see comparison/systems.py
    concurrency: list[int] = number([1], low=1)  # prompts in flight together

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head.name == "none":
            raise ValueError(f"head=none: an evaluation needs a head; say head={DEFAULT_HEAD}")
        if self.engine.tensor_parallel > 1:
            raise ValueError(f"engine.tensor_parallel={self.engine.tensor_parallel}: is for serving; use one process")


@dataclass
class TrainingConfig:
    """The keys of `train` beside those of train/run.py; scripts/benchmarks/train.py says what the systems are."""

    systems: list[str] = bounded(
        [OURS, f"{THEIRS}:1x1024:sdpa"],
        f"must be {OURS} or {THEIRS}:<rows>x<tokens>, with :sdpa or :eager behind it",
        re.compile(rf"{OURS}(:\w+)?|{THEIRS}:\d+x\d+(:(sdpa|eager))?").fullmatch,
    )
    rounds: int = number(3, low=1)
    seconds: float = number(20.0, above=0)  # of the measured updates of another library's run; there are at least two
    peers: str = ".peers"
    output_dir: str = "outputs"
    save: str | None = bounded(None, *SAVED)

    def __post_init__(self) -> None:
        check_fields(self)


COMMANDS: dict[str, type] = {"bench": CompareConfig, "evaluate": EvaluateConfig, "bench_train": TrainingConfig}
register({}, COMMANDS)
