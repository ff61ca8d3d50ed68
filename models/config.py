"""The configuration of a target: sizes and constants read from a Hugging Face `config.json`.

Sizes always come from the checkpoint, never from a built-in table. An architecture option that would change the logits
and is not implemented is an error here, not a silent difference later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from models.fields import asks_for_nothing
from models.mtp_names import modules_of

LAST = -1  # layer id of the LM head's input, as HF's `hidden_states[-1]`
UNNORMED = -2  # layer id of the final norm's input
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings",
)  # fmt: skip
# architectures that read images too -> those of their language model alone, whose config is in `text_config`
LANGUAGE_PARTS = {
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
SECTION = "quantization_config"
ORIGINAL = "original_max_position_embeddings"
ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": ("factor",),
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: `theta` is the base, `parameters` holds the scaling numbers of `rope_type` under HF's names."""

    theta: float = 10000.0
    rope_type: str = "default"
    parameters: tuple[tuple[str, float], ...] = ()  # whole numbers, true and false as such
    divisors: tuple[float, ...] = ()  # of the frequencies, of rope_type longrope (models/targets/phi3.py)

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> RopeConfig:
        """Read `rope_theta` and `rope_scaling` (transformers 4) as well as `rope_parameters` (transformers 5)."""
        section = dict[str, Any]()
        for key in ("rope_scaling", "rope_parameters"):
            if not isinstance(value := config.get(key) or {}, dict):
                raise ValueError(f"{key}={value!r}: must be an object")
            section |= value
        rope_type = section.pop("rope_type", section.pop("type", "default"))
        section.pop("type", None)
        theta = float(section.pop("rope_theta", config.get("rope_theta", 10000.0)))
        if rope_type not in tuple(ROPE_NEEDS):  # a tuple, because a JSON value may be unhashable
            raise ValueError(f"rope_type={rope_type!r}: not supported; one of {', '.join(ROPE_NEEDS)}")
        if float(section.pop("partial_rotary_factor", None) or 1.0) != 1.0:
            raise ValueError("partial_rotary_factor: a rotary embedding over part of the head is not supported")
        numbers = {key: value for key, value in section.items() if not asks_for_nothing(value)}
        for key, value in numbers.items():
            if not isinstance(value, (int, float)):
                raise ValueError(f"rope_scaling.{key}={value!r}: expected a number")
        for key in ROPE_NEEDS[rope_type]:
            if key not in numbers:
                raise ValueError(f"rope_scaling.{key}: missing, rope_type={rope_type!r} needs it")
        if rope_type == "default":  # reads none
            return cls(theta)
        if isinstance(original := numbers.get(ORIGINAL), float) and original.is_integer():  # as some exporters write it
            numbers[ORIGINAL] = int(original)
        return cls(theta, rope_type, tuple(sorted(numbers.items())))

    def to_json(self) -> dict[str, Any]:
        return {"rope_theta": self.theta, "rope_type": self.rope_type, **dict(self.parameters)}


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP: each token uses the `active` likeliest of `count` experts."""

    count: int
    active: int
    intermediate_size: int
    normalize: bool  # the weights of the active experts sum to one
    clamp: tuple[float, float] | None = None  # limit and alpha of gpt-oss's experts, which have biases, as their router
    # Options of DeepSeek
    sigmoid: bool = False  # scores are a sigmoid, to which a learned bias is added for the choice; else a softmax
    groups: int = 1  # of equal size, of which the best `active_groups` offer their experts
    active_groups: int = 1
    scale: float = 1.0  # of the weights
    shared_size: int = 0  # inner size of an MLP beside the experts, which every token uses
    shared_gate: bool = False  # whose output a sigmoid scales (Qwen)
    first_layer: int = 0  # those before it have a plain MLP


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (arXiv 2405.04434): keys and values are projections of one latent per token."""

    rank: int  # numbers of the latent
    query_rank: int | None  # numbers of the latent that queries are made from; None: the layer's input
    key_size: int  # of a head's query and key, without the part that is rotated
    value_size: int  # of a head's value
    interleaved: bool = True  # numbers 2 i and 2 i + 1 of the rotated part form a pair, not i and half its size + i


@dataclass(frozen=True)
class RecurrentConfig:
    """What a recurrent layer keeps of a request (kernels/recurrence.py), in place of keys and values or beside them."""

    channels: int  # of the convolution
    taps: int  # of the convolution, the row's own included
    heads: int = 0  # of the linear recurrence, each with a matrix; 0: there is none
    groups: int = 0  # of heads that share queries and keys (Mamba-2: C and B)
    key_size: int = 0  # rows of a head's matrix (Mamba-2: the state size N)
    value_size: int = 0  # columns of a head's matrix (Mamba-2: the head size P)

    def bytes(self, itemsize: int) -> int:
        """Return the bytes that one layer keeps of a request, for inputs of the convolution of `itemsize` bytes."""
        columns = (self.taps - 1) * self.channels * itemsize
        return columns + 4 * self.heads * self.key_size * self.value_size


ATTENTION, RECURRENT, BOTH, NEITHER = "attention", "recurrent", "both", "neither"  # of a layer


@dataclass(frozen=True)
class TargetConfig:
    """The config of a decoder-only target of Llama's kind, under our names for the keys of `config.json`.

    `from_json` reads what the families share; what differs in one of them is in its file in models/targets/.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool  # of the QKV projections
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    rope: RopeConfig
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # from config.json alone; all end tokens: models/end_tokens.py
    qk_norm: bool = False  # queries and keys are normed per head, before the rotary embedding
    windows: tuple[int | None, ...] = ()  # per layer: positions a row attends to, including itself; () or None: all
    experts: ExpertsConfig | None = None
    # Options of Gemma
    activation: str = "silu"  # of the MLP's gate; or "gelu_pytorch_tanh"; of an MLP without gate "relu", "gelu" too
    centered_norms: bool = False  # a norm's scale is 1 + its weight
    attention_scale: float | None = None  # None: 1/sqrt(head_dim)
    embedding_scale: float = 1.0  # of the target's input only: heads read the embedding as it is stored
    local_rope: RopeConfig | None = None  # of the layers with a window, if it differs
    # Options of Granite
    stream_scale: float = 1.0  # a layer's input as heads read it, over the residual stream that layers add to
    logits_scaling: float = 1.0  # logits are divided by it
    # Of Phi
    rotary_dim: int | None = None  # the first numbers of a head that are rotated; None: all
    short_rope: RopeConfig | None = None  # longrope's for texts within its original_max_position_embeddings
    # Of gpt-oss
    sinks: bool = False  # each head of attention has a sink (models/attention.py)
    # Options of OPT and GPT-BigCode (models/targets/learned.py)
    learned_positions: bool = False  # which are added to the embedding
    unrotated: bool = False  # attention has no rotary embedding; only heads have
    embedding_size: int | None = None  # of the embedding and the LM head's input; None: hidden_size
    norm_after: bool = False  # norms follow attention and MLP, and none is left to precede the LM head
    mtp_modules: int = 0  # that predict further tokens, in the checkpoint beside the layers (models/mtp_names.py)
    # Of DeepSeek
    latent: LatentConfig | None = None  # of its own attention; head_dim and num_kv_heads are then for heads
    # Of hybrids
    recurrent: RecurrentConfig | None = None  # of the layers that have a recurrence
    output_gate: bool = False  # each head's query is followed by a gate, of which a sigmoid scales attention's output
    mixers: tuple[str, ...] = ()  # per layer: what mixes its rows, of the four names above; (): attention in all
    stated: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # config.json itself

    @classmethod
    def from_json(cls, config: dict[str, Any], *, activation: str = "silu") -> TargetConfig:
        """Read a config.json. Raises ValueError naming the key that is missing, inconsistent or not implemented."""
        config = {key: value for key, value in config.items() if not asks_for_nothing(value)}

        def need(key: str) -> Any:
            if key not in config:
                raise ValueError(f"config.json: {key} is missing")
            return config[key]

        for key in SIZES:
            value = config.get(key)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"config.json: {key}={value!r}: must be a whole number, at least 1")
        architectures = config.get("architectures") or [config.get("model_type")]
        if config.get("hidden_act", "silu") != activation:
            raise ValueError(f"config.json: hidden_act={config.get('hidden_act')!r}: only {activation!r} is supported")
        if "quantization_config" in config:
            raise ValueError(
                "config.json: quantization_config: a quantized target can be served and trained for, not this"
            )
        hidden_size, num_heads = need("hidden_size"), need("num_attention_heads")
        num_kv_heads = config.get("num_key_value_heads") or num_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"config.json: num_attention_heads={num_heads} is no multiple of {num_kv_heads} KV heads")
        return cls(
            architecture=str(architectures[0]),
            vocab_size=need("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=need("intermediate_size"),
            num_layers=need("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=config.get("head_dim") or hidden_size // num_heads,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=config.get("max_position_embeddings", 2048),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            output_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            rope=RopeConfig.from_json(config),
            activation=activation,
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=token_ids("config.json: eos_token_id", config.get("eos_token_id")),
            mtp_modules=modules_of(config),
            stated=config,
        )

    def extended(self) -> TargetConfig:
        """Return the config with the context that YaRN reaches: its factor times the one that the model was trained on,
        which many files leave as `max_position_embeddings`.
        """
        if self.rope.rope_type != "yarn":
            return self
        numbers = dict(self.rope.parameters)
        original = numbers[ORIGINAL] = numbers.get(ORIGINAL) or self.max_position_embeddings
        context = max(self.max_position_embeddings, int(original * numbers["factor"]))
        rope = replace(self.rope, parameters=tuple(sorted(numbers.items())))
        return replace(self, rope=rope, max_position_embeddings=context)

    def within(self, context: int | None) -> TargetConfig:
        """Return the config for texts of at most `context` tokens (None: of any), which decides longrope's frequencies.

        The length of a text, by which transformers decides, would change keys that are cached.
        """
        if self.short_rope is None or context is None:
            return self
        original = int(dict(self.rope.parameters)[ORIGINAL])
        if context > original:
            return self
        return replace(self, rope=self.short_rope, short_rope=None, max_position_embeddings=original)

    @property
    def norm_eps(self) -> float:
        """Of the norms of the residual stream, which for Granite is kept divided by its scale."""
        return self.rms_norm_eps / self.stream_scale**2

    def cached_numbers(self, ranks: int) -> int:
        """Return how many numbers of a token a layer caches on each of so many tensor parallel ranks."""
        if self.latent is not None:
            return self.latent.rank + (self.rotary_dim or 0)
        return 2 * max(self.num_kv_heads // ranks, 1) * self.head_dim

    @property
    def attention_width(self) -> int:
        """A generous bound on how many numbers of a row a layer's attention holds at once."""
        if self.latent is not None:  # queries as projected, and queries and outputs of the latent
            return 3 * self.num_heads * self.cached_numbers(1)
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def projected_heads(self) -> tuple[int, int]:
        """Numbers of query heads, a gate being one more, and of KV heads that attention projects."""
        return self.num_heads * (1 + self.output_gate), self.num_kv_heads

    def mixes(self, layer: int, kind: str) -> bool:
        """Return whether a layer has attention or a recurrence (`kind`)."""
        return (self.mixers[layer] if self.mixers else ATTENTION) in (kind, BOTH)

    def index(self, layer: int, kind: str) -> int:
        """Return how many layers before this one have attention or a recurrence."""
        return sum(self.mixes(before, kind) for before in range(layer))

    def count(self, kind: str) -> int:
        """Return how many layers have attention, so keep keys and values, or a recurrence, so keep a state."""
        return self.index(self.num_layers, kind)

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    @property
    def default_aux_layers(self) -> tuple[int, int, int]:
        """The three features of EAGLE-3: id j means HF `hidden_states[j]`, the input of decoder layer j."""
        layers = (2, self.num_layers // 2, self.num_layers - 3)
        if not 0 <= layers[0] < layers[1] < layers[2]:
            raise ValueError(
                f"head.aux_layers: the defaults {layers} collide on a target of {self.num_layers} layers; name them"
            )
        return layers


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """Return token ids, which HF writes as one id, a list, or null. Raises ValueError with `name` for anything else."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    ids = tuple(item for item in values if type(item) is int)  # a bool is an int to isinstance
    if len(ids) < len(values):
        raise ValueError(f"{name}={value!r}: must be a token id, a list of token ids, or null")
    return ids


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object. Raises ValueError naming the file if it holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return content


def read_config_json(path: Path) -> dict[str, Any]:
    """Read a target's config.json, of one of several parts the `language_part`. Raises ValueError as `read_json`."""
    return language_part(read_json(path))


def language_part(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a model that reads text alone for one of LANGUAGE_PARTS; another as it is."""
    names, text = config.get("architectures"), config.get("text_config")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if name not in LANGUAGE_PARTS or not isinstance(text, dict):
        return config
    outer, text = ({key: x for key, x in part.items() if not asks_for_nothing(x)} for part in (config, text))
    shared = {key: outer[key] for key in ("tie_word_embeddings", SECTION) if key in outer}
    stated = {key: outer[key] for key in ("dtype", "torch_dtype", "eos_token_id", "bos_token_id") if key in outer}
    return stated | text | shared | {"architectures": [LANGUAGE_PARTS[name]]}
