"""Modules of multi-token prediction that a target ships in its checkpoint: their tensors, by name.

A module is a decoder layer over the projection of a token and a hidden state (models/heads/mtp/). Families agree on
that and on little else. `num_nextn_predict_layers` of config.json counts the modules, or Qwen's own key. The target
itself is loaded without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from models.fields import Fields

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # keys of config.json
OURS = "mtp_layers.{index}."  # speculators' prefix of a module's tensors, which is ours


@dataclass(frozen=True)
class Layout:
    """`renamed`: our modules around the layer -> the family's; other names are the same, after `layer_prefix`."""

    prefix: str  # of the names of a module's tensors, by its index and the index of a layer that it would be
    renamed: dict[str, str] = field(default_factory=dict)
    layer_prefix: str = ""
    copies: tuple[str, ...] = ()  # of the target's embedding and LM head, which are used in their place
    hidden_first: bool = False  # the projection reads the hidden state before the token
    zero_first: bool = True  # the embedding at position 0 is zero
    count: int = 0  # of modules, where config.json states none

    def prefixes(self, layers: int, modules: int) -> tuple[str, ...]:
        return tuple(self.prefix.format(index=index, layer=layers + index) for index in range(modules))

    def names(self, stored: Iterable[str], layers: int, modules: int) -> dict[str, str]:
        """Return the tensors of the modules, but for copies, of a target of so many layers: our name -> the stored."""
        ours, names = {theirs: ours for ours, theirs in self.renamed.items()}, dict[str, str]()
        prefixes = self.prefixes(layers, modules)
        for name in sorted(name for name in stored if name.startswith(prefixes)):
            index = next(index for index, prefix in enumerate(prefixes) if name.startswith(prefix))
            rest = name.removeprefix(prefixes[index])
            module, dot, kind = rest.rpartition(".")
            if rest not in self.copies:
                module = ours.get(module, module.removeprefix(self.layer_prefix))
                names[OURS.format(index=index) + module + dot + kind] = name
        return names


DEEPSEEK = Layout(  # and GLM
    "model.layers.{layer}.",
    {
        "token_layernorm": "enorm",
        "hidden_layernorm": "hnorm",
        "input_proj": "eh_proj",
        "final_layernorm": "shared_head.norm",
    },
    copies=("embed_tokens.weight", "shared_head.head.weight"),
)
MIMO = Layout("model.mtp_layers.{index}.", hidden_first=True)
QWEN_NEXT = Layout(
    "mtp.",
    {
        "token_layernorm": "pre_fc_norm_embedding",
        "hidden_layernorm": "pre_fc_norm_hidden",
        "input_proj": "fc",
        "final_layernorm": "norm",
    },
    layer_prefix="layers.0.",
    zero_first=False,
    count=1,
)
NEMOTRON = Layout("mtp.")  # modules of two blocks each, which head=mtp has not


def modules_of(config: Mapping[str, Any]) -> int:
    """Return how many modules a target's config.json states. Raises ValueError for a value that is no number."""
    names, fields = config.get("architectures"), Fields(config)
    layout = layout_of(str(names[0]) if isinstance(names, list) and names else "")
    return next((count for key in COUNTS if (count := fields.maybe(key, int)) is not None), layout.count)


def layout_of(architecture: str) -> Layout:
    if architecture.startswith(("Qwen3Next", "Qwen3_5")):
        return QWEN_NEXT
    if architecture == "NemotronHForCausalLM":
        return NEMOTRON
    return MIMO if architecture == "MiMoForCausalLM" else DEEPSEEK
