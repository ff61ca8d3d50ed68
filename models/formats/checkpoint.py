"""The common form that every format is converted to and from, and the interface of a format.

The common form is what Headway's own export holds: a head's config, and tensors under the names and shapes of that
head's module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from models.fields import Fields
from models.heads.config import Facts, HeadShape, NewHeadConfig

Shapes = Mapping[str, tuple[int, ...]]
Blame = tuple[tuple[str, tuple[str, ...]], ...]
DRAFT_TOKENS = 5  # per step, for a head that has no bound and states no number


@dataclass(frozen=True)
class Verifier:
    """The target that a head drafts for. The sizes are None when only its name is known."""

    name: str
    architecture: str | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_layers: int | None = None

    @property
    def default_aux_layers(self) -> tuple[int, ...] | None:
        """The layers that EAGLE-3 reads by default."""
        return None if self.num_layers is None else (2, self.num_layers // 2, self.num_layers - 3)


@dataclass(frozen=True)
class ConversionOptions:
    """What a checkpoint may leave ambiguous, specified by the user who converts it.

    `layer_ids`: whether auxiliary layer ids in the source are HF `hidden_states` indices or 0-based layer `outputs`.
    `norm_output`: whether that key has the meaning of `vllm`, or that of `specforge` before September 2026.
    """

    verifier: Verifier | None = None
    speculative_tokens: int | None = None
    layer_ids: str | None = None
    norm_output: str | None = None


@dataclass(frozen=True)
class ParsedConfig:
    """The content of a config.json. `notes` tell the user what was assumed or converted; `blame` is as in Format."""

    config: HeadShape
    verifier: Verifier | None = None
    speculative_tokens: int | None = None
    notes: list[str] = field(default_factory=list)
    blame: Blame = ()


@dataclass(frozen=True)
class Checkpoint:
    """A head as read: the config, the tensors under our names, and the name of each in the source.

    `remarks`: what was done to a tensor of the source, by its name there; one that is not in `sources` was left out.
    """

    head: str
    config: HeadShape
    tensors: dict[str, Tensor]
    sources: dict[str, str] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)
    verifier: Verifier | None = None
    speculative_tokens: int | None = None
    notes: list[str] = field(default_factory=list)
    provenance: dict[str, Any] | None = None

    def facts(self, *, needs_verifier: bool = True) -> Facts:
        """Return what a head's `to_json` states beside its shape.

        Raises ValueError when the verifier must be known and is not.
        """
        verifier = self.verifier or Verifier("")
        if needs_verifier and not (verifier.name and verifier.architecture):
            raise ValueError(
                "the head's target is part of this format and not known; give --verifier (a folder with its "
                "config.json, or a hub id)"
            )
        tokens = self.speculative_tokens or self.config.max_depth or DRAFT_TOKENS
        return Facts(verifier.name, verifier.architecture or "", tokens)


@dataclass(frozen=True)
class Format:
    """How one family of files stores a Checkpoint. The strict checks common to all formats are done by the caller.

    `spell` returns our tensor name in this format. `blame` says which keys of config.json a tensor follows from: those
    of the first pattern that the spelled name matches. `incoming` converts a file's tensors, in place, to those that
    `spell` names, and returns a remark on each change by name.
    """

    name: str
    heads: tuple[str, ...]
    matches: Callable[[Mapping[str, Any], Collection[str]], bool]  # config.json and the names of the files beside it
    read: Callable[[Fields, Shapes, ConversionOptions], ParsedConfig]
    write: Callable[[Checkpoint], dict[str, Any]] = lambda checkpoint: checkpoint.config.to_json(checkpoint.facts())
    # file names, in order of preference; the first is what is written
    weights: tuple[str, ...] = ("model.safetensors", "pytorch_model.bin")
    open: Callable[[Path], dict[str, Tensor]] | None = None  # reads them from a folder that holds more than a head
    spell: Callable[[str, HeadShape], str] = lambda name, config: name
    prefixes: tuple[str, ...] = ()  # that tensor names may have
    written_prefix: str = ""
    aliases: tuple[tuple[str, str], ...] = ()  # (another beginning of names, this format's beginning)
    optional: Callable[[HeadShape], frozenset[str]] = lambda config: frozenset()  # our names; absent: the target's
    unstated: frozenset[str] = frozenset()  # fields of a head's config that have no place in the format
    implied: frozenset[str] = frozenset()  # our names of tensors that are not written, since others determine them
    blame: Blame = ()
    incoming: Callable[[dict[str, Tensor], HeadShape], dict[str, str]] = lambda tensors, config: {}
    # the inverse of what `incoming` does to values
    outgoing: Callable[[dict[str, Tensor], HeadShape], dict[str, Tensor]] = lambda tensors, config: tensors
    losses: Callable[[Checkpoint], list[str]] = lambda checkpoint: []  # what a written file cannot express or do
    asks: frozenset[str] = frozenset()  # fields of ConversionOptions that this format may leave ambiguous
    states_tokens: bool = True  # config.json says how many tokens to draft
    kind: Callable[[Mapping[str, Any]], str] | None = (
        None  # of its heads, the one that config.json is of; None: the only
    )
    final_state: bool = True  # of the target's L layers the id L is the stream before the final norm; else it is open
    gguf: bool = False  # one GGUF file, in place of a folder (models/gguf/head.py)


def formats_of(head: type[NewHeadConfig]) -> tuple[Format, ...]:
    """Return the formats that hold a head."""
    return head.part("formats").FORMATS


def export_format(head: type[NewHeadConfig]) -> Format:
    """Return the format that our export of a head follows."""
    return head.part("formats").LAYOUT


def write_with_base_model(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return config.json of a head whose layout names the verifier, where known, as `base_model_name_or_path`."""
    config = checkpoint.config.to_json(checkpoint.facts(needs_verifier=False))
    del config["verifier"]
    if checkpoint.verifier is not None:
        config["base_model_name_or_path"] = checkpoint.verifier.name
    return config
