"""The schemas of training: data, features, optimiser, parallelism, and the train command.

Builds on the schemas of `infer/config.py` for what training shares with other commands (target, head, engine, tracker).
Checks values and their combinations; does nothing with them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf

from infer.config import EngineConfig, ModelConfig, register
from infer.config_checks import at_least, one_of
from infer.options.head_config import HeadConfig
from infer.options.tracker_config import TrackerConfig
from train.objective_config import (
    EagleObjectiveConfig,
    Medusa2ObjectiveConfig,
    MedusaObjectiveConfig,
    MlpObjectiveConfig,
    ObjectiveConfig,
    PEagleObjectiveConfig,
    TttConfig,
)

COLUMNS = (  # what a row may hold, train/data/examples.py
    "input_ids", "loss_mask", "messages", "tools", "conversations", "system", "turns", "prompt", "response", "text",
)  # fmt: skip
ENTRY_KEYS = ("path", "lines", "chunk", "rows", "columns", "template")  # of data.path, where an entry is an object
TEMPLATE_FIELD = re.compile(r"\{(\w+)\}")


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@dataclass
class DataConfig:
    """Prompts and how the target continues them."""

    name: str = MISSING
    num_sequences: int = 512  # at most this many training conversations or texts
    max_new_tokens: int = 192  # of one answer
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])  # dealt out in turn
    top_k: int = 0
    top_p: float = 1.0
    # who answers the training prompts: null our engine, else an OpenAI-compatible server that serves the same target
    server: str | None = None  # such as http://127.0.0.1:8001/v1
    server_model: str | None = None  # the target's name there; null: the only one it has
    concurrency: int = 32  # requests in flight
    retries: int = 4  # of one request, with growing pauses
    timeout_s: float = 600.0  # of one request

    def __post_init__(self) -> None:
        for key in ("num_sequences", "max_new_tokens", "concurrency"):
            at_least(f"data.{key}", getattr(self, key), 1)
        if not self.temperatures:
            raise ValueError("data.temperatures=[]: give at least one, 0.0 for greedy")
        for temperature in self.temperatures:
            at_least("data.temperatures", temperature, 0)
        at_least("data.top_k", self.top_k, 0)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"data.top_p={self.top_p}: must be above 0 and at most 1")
        if self.server is not None and not re.match(r"https?://[^/]", self.server):
            raise ValueError(f"data.server={self.server}: must be an address such as http://127.0.0.1:8001/v1")
        if self.server_model is not None and self.server is None:
            raise ValueError(f"data.server_model={self.server_model}: needs data.server, the address that serves it")
        at_least("data.retries", self.retries, 0)
        at_least("data.timeout_s", self.timeout_s, 0.001)


@dataclass
class DemoDataConfig(DataConfig):
    prompt_tokens: int = 64  # length of the prompts cut from the corpus, for training and for evaluation

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("data.prompt_tokens", self.prompt_tokens, 1)


@dataclass
class RowsDataConfig(DataConfig):
    """Conversations, prompts or texts of one's own: train/data/examples.py lists the forms of a row."""

    responses: str = "regenerate"  # regenerate: the target writes them | given: the data's own are learnt
    held_out_share: float = 0.05  # of the conversations, chosen by their hash, where no held-out side is given
    # our names for the data's own columns: {prompt: question}; of several, {response: [answer, output]}, what a row has
    columns: Any = None
    chat_template: bool = True  # a prompt is a user's message, if the target has a chat template; false: a plain text
    prompt_tokens: int = 64  # of a plain text, that the target continues; by them it is held out
    max_prompt_tokens: int = 2048  # rows with a longer prompt are left out, and counted; a later turn ends there
    deduplicate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("data.responses", self.responses, ("regenerate", "given"))
        for key in ("prompt_tokens", "max_prompt_tokens"):
            at_least(f"data.{key}", getattr(self, key), 1)
        if not 0 < self.held_out_share < 1:
            raise ValueError(f"data.held_out_share={self.held_out_share}: must be between 0 and 1")
        check_columns("data.columns", {} if self.columns is None else self.columns)
        if self.responses == "given" and self.server is not None:
            raise ValueError(f"data.server={self.server}: has nothing to answer with data.responses=given")


@dataclass
class FilesDataConfig(RowsDataConfig):
    # a file, folder or pattern, or a list of them; relative to `root`. In place of a path an object
    # {path, lines, chunk, rows, columns, template} says more: train/data/entries.py
    path: Any = MISSING
    held_out_path: Any = None  # likewise; null: a share of `path`
    root: str | None = None  # the folder that relative paths count from; null: the repository
    interleave: bool = False  # false: one file after another | true: a row of each entry of `path` in turn

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {"path": self.path} if self.held_out_path is None else vars(self)
        for key in ("path", "held_out_path"):
            value = given.get(key, [""])
            if not as_list(value):
                raise ValueError(f"data.{key}={value}: must be a path or a list of paths")
            for entry in as_list(value):
                check_entry(f"data.{key}", entry)


def check_entry(key: str, entry: object) -> None:
    """Raises ValueError unless it is a path or an object with one, of keys and values that there are."""
    if isinstance(entry, str):
        return
    if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
        raise ValueError(f"{key}={entry}: must be a path, an object with a path, or a list of these")
    for name, value in entry.items():
        one_of(key, name, ENTRY_KEYS)
        if name == "rows" and (type(value) is not int or value < 1):
            raise ValueError(f"{key}: rows={value} of {entry['path']} must be a number from 1")
        if name == "lines" and not (
            isinstance(value, list)
            and len(value) == 2
            and all(type(number) is int for number in value)
            and 1 <= value[0] <= value[1]
        ):
            raise ValueError(f"{key}: lines={value} of {entry['path']} must be the first and the last: [1, 100]")
        if name == "chunk" and not (
            isinstance(value, dict) and value and all(type(size) is int and size > 0 for size in value.values())
        ):
            raise ValueError(f"{key}: chunk={value} of {entry['path']} must be a column with characters: {{text: 900}}")
        if name == "template" and not (isinstance(value, str) and TEMPLATE_FIELD.search(value)):
            raise ValueError(f"{key}: template={value!r} of {entry['path']} must be a text with a {{column}} in it")
        if name == "columns":
            check_columns(key, value)


def check_columns(key: str, columns: object) -> None:
    named = [theirs for value in columns.values() for theirs in as_list(value)] if isinstance(columns, dict) else []
    if not isinstance(columns, dict) or not all(isinstance(theirs, str) for theirs in named):
        raise ValueError(f"{key}={columns}: must be our names with the data's own: {{prompt: question}}")
    for name in columns:
        one_of(key, name, COLUMNS)


@dataclass
class ChatDataConfig(RowsDataConfig):
    """Prompts that every clone has: train/data/builtin_prompts.py."""


@dataclass
class HubDataConfig(RowsDataConfig):
    """Through `datasets`, as a stream: no more is fetched than is used."""

    path: str = MISSING  # owner/name, or a folder that `datasets` can load
    subset: str | None = None
    split: str = "train"
    held_out_split: str | None = None  # null: a share of `split`
    revision: str | None = None


@dataclass
class FeaturesConfig:
    name: str = MISSING
    # whole: every process holds the target | sharded: each holds its share of every layer, and they bring a layer
    # together when it is to run (ZeRO-3, FSDP); embedding and LM head stay whole
    target: str = "whole"

    def __post_init__(self) -> None:
        one_of("features.target", self.target, ("whole", "sharded"))


@dataclass
class OnlineFeaturesConfig(FeaturesConfig):
    """From the target in this process."""

    cache_gb: float = 4.0  # features computed once and kept in memory while all of the data's fit; 0: never

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("features.cache_gb", self.cache_gb, 0)


@dataclass
class OfflineFeaturesConfig(FeaturesConfig):
    """Computed once, before the first step, into files that later runs read again."""

    path: str | None = None  # the store's folder; null: <output_dir>/features/<model>/<hash of all it depends on>
    shard_mb: int = 512  # at most, about; or 1/32 of the store: what an interruption can lose
    dtype: str = "same"  # of the stored hidden states: same: the target's | fp8, a scale per token and layer
    # the teacher: null: made from the last hidden state, which is stored | k: the target's k likeliest tokens and their
    # log-probabilities are stored in its place, all others counting nothing
    top_k: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("features.shard_mb", self.shard_mb, 1)
        one_of("features.dtype", self.dtype, ("same", "fp8"))
        at_least("features.top_k", self.top_k, 1)


@dataclass
class OptimConfig:
    name: str = MISSING
    lr: float | None = None  # at its peak; null: 1 / the head's hidden size, what Adam bears as width grows
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0
    # of the rate after its warm-up: cosine: falls all along | wsd: stable, then a linear decay. A run of wsd that has
    # ended can be extended as if it had had the larger budget from the start
    schedule: str = "cosine"
    warmup: float = 0.04  # share of the run, as its first budget has it
    warmup_steps: int | None = None  # in place of the share
    decay: float = 0.2  # share of the run, its last part; of schedule=wsd
    final_lr: float = 0.05  # the schedule's end, as a share of lr
    clip: float = 1.0  # gradient norm

    def __post_init__(self) -> None:
        for key in ("lr", "eps", "clip"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise ValueError(f"optim.{key}={value}: must be above 0")
        at_least("optim.weight_decay", self.weight_decay, 0)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas={self.betas}: must be two numbers from 0 to below 1")
        one_of("optim.schedule", self.schedule, ("cosine", "wsd"))
        at_least("optim.warmup_steps", self.warmup_steps, 0)
        if not 0 < self.decay <= 1:
            raise ValueError(f"optim.decay={self.decay}: is a share of the run, must be above 0 and at most 1")
        for key in ("warmup", "final_lr"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"optim.{key}={getattr(self, key)}: is a share, must be 0 to 1")


@dataclass
class ParallelConfig:
    name: str = MISSING  # single | ddp | fsdp | zero2 | zero3; train/distributed/strategies.py says what each divides
    # for a process that does not answer. They wait for each other while answers are generated and while one evaluates
    patience_minutes: float = 360.0

    def __post_init__(self) -> None:
        at_least("parallel.patience_minutes", self.patience_minutes, 0.1)
        one_of("parallel.name", self.name, ("single", "ddp", "fsdp", "zero2", "zero3"))


@dataclass
class TrainConfig:
    model: ModelConfig = MISSING
    head: HeadConfig = MISSING
    data: DataConfig = MISSING
    features: FeaturesConfig = MISSING
    objective: ObjectiveConfig = MISSING
    optim: OptimConfig = MISSING
    parallel: ParallelConfig = MISSING
    tracker: TrackerConfig = MISSING
    engine: EngineConfig = MISSING
    # identity: outputs/<run>/ is resumed when it exists; null: <model>-<head>-<date and time>
    run: str | None = None
    output_dir: str = "outputs"
    overwrite: bool = False  # replace the head that another run exported where this one's would go
    seed: int = 0
    check: bool = (
        False  # print the plan (data, memory, disk, time, what will be written), refuse what cannot work, and stop
    )
    stage: str = "all"  # all | regenerate: have the target answer the prompts, and stop there
    # budget: whichever ends first; at least one of them
    steps: int | None = None
    minutes: float | None = None  # of optimisation, regeneration and evaluation included
    # one step
    batch_size: int = 16  # rows per forward
    sequence_length: int = 256  # longer sequences are cut
    # a row: false: one sequence, padded to the longest of its batch | true: as many as fit into sequence_length
    packing: bool = False
    accumulate: int = 1  # forwards per optimiser step
    precision: str = "fp32"  # fp32 | bf16
    # every how many steps
    log_every: int = 1
    eval_every: int = 50
    checkpoint_every: int = 50
    keep_checkpoints: int = 2  # the newest; the one of the highest τ in the engine is kept besides
    export: str = "best"  # best: what had the highest τ in the engine is published | last
    max_skipped: int = 5  # updates in a row whose loss or gradient is not finite, before the run stops
    # held-out prompts on which acceptance is measured, by the trainer and by the engine
    eval_prompts: int = 16
    eval_max_tokens: int = 128
    eval_draft_tokens: int = 3
    # at the end: the speed to plain decoding with so many of them at once; [1,4,16]
    eval_concurrency: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.head.name in ("none", "auto"):
            raise ValueError(f"head={self.head.name}: training needs a head; say head=eagle3")
        if self.head.allow_mismatch:
            raise ValueError("head.allow_mismatch=true: is for serving; a head is trained for the target it is given")
        if self.engine.tensor_parallel > 1 and self.parallel.name != "single":
            raise ValueError(
                f"engine.tensor_parallel={self.engine.tensor_parallel}: divides the target among ranks that serve one "
                f"trainer, and parallel={self.parallel.name} starts several; use parallel=single"
            )
        if self.features.target == "sharded":
            self._check_sharded()
        if self.run is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.run):
            raise ValueError(f"run={self.run}: becomes a folder name; use letters, digits, '.', '_' and '-'")
        if self.run == "heads":
            raise ValueError("run=heads: outputs/heads holds the exported heads; choose another name")
        one_of("export", self.export, ("best", "last"))
        at_least("max_skipped", self.max_skipped, 1)
        one_of("stage", self.stage, ("all", "regenerate"))
        if self.stage == "regenerate" and getattr(self.data, "responses", None) == "given":
            raise ValueError(
                "stage=regenerate: the target has nothing to answer with data.responses=given; leave one of them out"
            )
        one_of("precision", self.precision, ("fp32", "bf16"))
        if self.steps is None and self.minutes is None:
            raise ValueError("steps=null and minutes=null: the run would not end; give one of them")
        at_least("steps", self.steps, 1)
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes={self.minutes}: must be above 0")
        for key in ("batch_size", "accumulate", "log_every", "eval_every", "checkpoint_every", "keep_checkpoints"):
            at_least(key, getattr(self, key), 1)
        for count in self.eval_concurrency:
            at_least("eval_concurrency", count, 1)
        for key in ("eval_prompts", "eval_max_tokens", "eval_draft_tokens"):
            at_least(key, getattr(self, key), 1)
        if isinstance(self.data, DemoDataConfig) and self.sequence_length < self.data.prompt_tokens + 2:
            raise ValueError(
                f"sequence_length={self.sequence_length}: cuts every sequence before its second generated token; "
                f"data.prompt_tokens={self.data.prompt_tokens} come before it"
            )
        self._check_objective()

    @property
    def published_model(self) -> str:
        """The name of the target that the head is for: Medusa-2 makes another one."""
        return f"{self.model.name}-medusa-2" if self.objective.name == "medusa-2" else self.model.name

    @property
    def export_folder(self) -> Path:
        return self.head.folder(self.output_dir, self.published_model)

    @property
    def room(self) -> int | None:
        """Tokens of a row that several sequences may share; None where each has its own."""
        return self.sequence_length if self.packing else None

    def _check_sharded(self) -> None:
        own = "features.target=sharded: divides the target's layers among the processes of a run,"
        if self.parallel.name == "single":
            raise ValueError(
                f"{own} of which parallel=single has one; use parallel=ddp under torchrun, or engine.tensor_parallel="
            )
        if self.engine.weights != "same":
            raise ValueError(f"{own} in its own dtype; use engine.weights=same, or features.target=whole")
        if self.engine.graphs == "on":
            raise ValueError(f"{own} which the host leads; use engine.graphs=auto")
        if self.objective.name == "medusa-2":
            raise ValueError(f"{own} and objective=medusa-2 trains them; use features.target=whole")

    def _check_objective(self) -> None:
        objective, head, depths = self.objective, self.head, self.head.max_depth
        if self.parallel.name not in WHOLE:
            if objective.fused:
                raise ValueError(f"objective.fused=true: needs parallel={' or '.join(WHOLE)}, not {self.parallel.name}")
            objective.fused = False
        if head.name not in TRAINS[objective.name]:
            raise ValueError(
                f"objective={objective.name}: is for head={' or '.join(TRAINS[objective.name])}, not for "
                f"head={head.name}; without objective= it gets {DEFAULT_OBJECTIVE[head.name]}"
            )
        if objective.checkpointing and head.name in OWN_WEIGHTS and objective.name != "medusa-2":
            raise ValueError(
                f"objective.checkpointing=true: drops activations of decoder layers, of which head={head.name} has none"
            )
        top_k = getattr(self.features, "top_k", None)
        if top_k is not None and head.name not in FUSING:
            raise ValueError(
                f"features.top_k={top_k}: saves the last hidden state, which head={head.name} reads itself; it is for "
                f"head={' or '.join(FUSING)}"
            )
        if objective.name == "medusa-2" and (self.engine.tensor_parallel > 1 or self.engine.weights != "same"):
            raise ValueError(
                "objective=medusa-2: trains the target too, which must be whole and in its own dtype; use "
                "engine.tensor_parallel=1 engine.weights=same"
            )
        if objective.name == "medusa-2" and self.parallel.name not in ("single", "ddp"):
            raise ValueError(
                f"parallel={self.parallel.name}: divides a head, and objective=medusa-2 trains the target too; use "
                "parallel=ddp"
            )
        if depths is not None:
            for key, asked in (("objective.steps", objective.steps), ("eval_draft_tokens", self.eval_draft_tokens)):
                if asked is not None and asked > depths:
                    raise ValueError(f"{key}={asked}: this {head.name} head drafts {depths} tokens at most")
        steps = objective.steps or depths
        assert steps is not None
        if head.name in OWN_WEIGHTS and steps != depths:
            raise ValueError(
                f"objective.steps={steps}: leaves some of this {head.name} head's {depths} depths untrained"
            )
        # slot i trains on tokens i+1 .. i+1+steps, so a shorter sequence holds no slot at all
        at_least("sequence_length", self.sequence_length, steps + 2)


# objective -> the heads that it can train, and head -> what conf/train.yaml takes for it
TRAINS = {
    "ttt": ("eagle3", "eagle", "mlp"),
    "eagle": ("eagle",),
    "medusa": ("medusa",),
    "medusa-2": ("medusa",),
    "mlp": ("mlp",),
    "p-eagle": ("p-eagle",),
}
WHOLE = ("single", "ddp")  # parallel= under which every process holds the head's parameters whole
FUSING = ("eagle3", "p-eagle")  # heads that read layers before the last
OWN_WEIGHTS = ("medusa", "mlp")  # heads in which a depth shares no weights, or not all, with the others
DEFAULT_OBJECTIVE = {"eagle3": "ttt", "eagle": "eagle", "medusa": "medusa", "mlp": "mlp", "p-eagle": "p-eagle"}

SCHEMAS: dict[str, dict[str, type]] = {
    "data": {"demo": DemoDataConfig, "chat": ChatDataConfig, "files": FilesDataConfig, "hub": HubDataConfig},
    "features": {"online": OnlineFeaturesConfig, "offline": OfflineFeaturesConfig},
    "objective": {
        "ttt": TttConfig,
        "eagle": EagleObjectiveConfig,
        "medusa": MedusaObjectiveConfig,
        "medusa-2": Medusa2ObjectiveConfig,
        "mlp": MlpObjectiveConfig,
        "p-eagle": PEagleObjectiveConfig,
    },
    "optim": {"adamw": OptimConfig},
    "parallel": {"parallel": ParallelConfig},
}
COMMANDS: dict[str, type] = {"train": TrainConfig}

register(SCHEMAS, COMMANDS)
OmegaConf.register_new_resolver("data_of", lambda model: "demo" if model == "demo" else "chat", replace=True)
# head=none and auto are refused later, with a message of its own
OmegaConf.register_new_resolver("objective_of", lambda head: DEFAULT_OBJECTIVE.get(head, "ttt"), replace=True)
