"""What each head's config.py defines: the keys of `head=<name>`, and the shape that a config.json states.

Imports no torch: command lines are read before it is needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from models.checks import MISSING, check_fields
from models.config import ATTENTION, TargetConfig
from models.heads.objectives import ObjectiveConfig

if TYPE_CHECKING:
    from models.heads.base import Head


EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"  # tensors that a head may share with its target
# Tokens of a slot that a corrector chooses among where nothing else is configured, and the most that kernels rank: τ of
# SmolLM2's dspark head is 1.412, 1.489 and 1.516 with 4, 16 and 64, and 1.507 over the whole vocabulary
CANDIDATES, MAX_CANDIDATES = 64, 64
PROVENANCE = "provenance.json"  # beside config.json and the weights of an exported head


class Facts(NamedTuple):
    """What a config.json states of a head beside its shape: its target, and how many tokens to draft."""

    verifier: str
    architecture: str
    speculative_tokens: int

    @property
    def verifier_json(self) -> dict[str, Any]:
        return {"name_or_path": self.verifier, "architectures": [self.architecture]}


class AttentionShape(NamedTuple):
    """The number of a head's layers that keep KV, and their common shape; from the third on as kernels' LayerShape."""

    layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None  # a value is the first numbers of its key, so many; None: beside it

    @classmethod
    def of(cls, layer: TargetConfig) -> AttentionShape:
        if layer.latent is not None:
            return cls(layer.num_layers, layer.num_heads, 1, layer.cached_numbers(1), layer.latent.rank)
        return cls(layer.count(ATTENTION), layer.num_heads, layer.num_kv_heads, layer.head_dim)


class HeadShape(ABC):
    """The config of a head, as its config.json states it: one frozen dataclass per head, whose fields or properties
    these are. Reading a config.json is up to the head's formats.
    """

    name: ClassVar[str]  # of the head
    vocab_size: int  # of the target
    target_hidden_size: int
    hidden_size: int  # of the head's own states
    draft_vocab_size: int
    aux_layers: tuple[int, ...]  # hidden states that `fuse` takes, LAST for the final one
    max_depth: int | None = None  # how many tokens it can draft; None: unbounded
    attention: AttentionShape | None = None  # None for a head without decoder layers, which keeps no KV
    projected_heads: tuple[int, int] = (1, 1)  # of query and KV heads in a merged projection
    reads_lm_head: bool = False  # initializing it needs the target's LM head, whether it `starts_from_target` or not
    # the target's layers that initializing copies; negative from the last with attention
    donor_layers: range = range(-1, 0)

    @abstractmethod
    def to_json(self, facts: Facts) -> dict[str, Any]:
        """Return config.json with every flag written out, because readers disagree on defaults."""


class DecoderShape(HeadShape):
    """The config of a head of decoder layers, whose sizes are those of `layer`. `layer.vocab_size` is the target's."""

    layer: TargetConfig

    @property
    def vocab_size(self) -> int:
        return self.layer.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape.of(self.layer)

    @property
    def projected_heads(self) -> tuple[int, int]:
        return self.layer.projected_heads


@dataclass
class HeadConfig:
    """Keys that all heads share, and all there are for serving: an exported head brings its shape."""

    name: str = MISSING
    path: str | None = None  # a folder, GGUF file or hub id; null: looked up by infer/options/exported_heads.py
    revision: str | None = None  # of a hub id: branch, tag or commit
    allow_mismatch: bool = False  # load a head even if it was trained for another target

    def __post_init__(self) -> None:
        check_fields(self, "head.")

    @property
    def max_depth(self) -> int | None:
        """Maximum tokens that a new head with these settings can draft; None: no bound."""
        return None


@dataclass
class NewHeadConfig(HeadConfig, ABC):
    """Hyper-parameters of a new head. The class also describes the kind of head, which is `HEADS[name]`."""

    objectives: ClassVar[Mapping[str, type[ObjectiveConfig]]]  # that train it, by name; the first is the default
    fuses_layers: ClassVar[bool] = False  # reads intermediate layers of the target, not its last hidden state
    separate_depths: ClassVar[bool] = False  # depths share no weights, or not all
    is_target: ClassVar[bool] = False  # its export is a target, which `proposer=draft_model` serves
    output_layers: ClassVar[tuple[str, ...]] = ("lm_head", "lm_heads")  # modules that map to the vocabulary
    loose_parameters: ClassVar[tuple[str, ...]] = ()  # those that are read without calling the module that holds them
    starts_from_target: ClassVar[bool] = True  # initialized from the target's weights where it can hold them
    files: ClassVar[str]  # the model card's sentence on the exported files

    start_from: str | None = None  # a folder or hub id of a head of the same shape: training continues from its weights

    @abstractmethod
    def for_target(self, target: TargetConfig) -> HeadShape:
        """Return the shape of a new head. Raises ValueError naming the key that does not fit the target."""

    def make(self, target: TargetConfig) -> Head:
        """Make a new head, without vocabulary or weights. Raises ValueError as `for_target` does."""
        return self.part("head").HEAD.kind(self.for_target(target))

    @classmethod
    def part(cls, name: str) -> Any:
        """Return a module of the head's folder: "head", with HEAD, or "formats", with FORMATS and LAYOUT.

        Typed by `module_of` of weights.py, and `formats_of` and `export_format` of models/formats/checkpoint.py.
        """
        return import_module(f"{cls.__module__.rpartition('.')[0]}.{name}")
