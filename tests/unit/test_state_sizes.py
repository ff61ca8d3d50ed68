"""The table of docs/hybrids.md: what the states of published hybrids take, from the sizes in their config.json."""

from __future__ import annotations

import re

import pytest

from models.targets.granite_hybrid import GraniteHybridTarget
from models.targets.lfm2 import Lfm2Target
from models.targets.qwen3_5 import Qwen35Target
from tests.unit.test_layout import ROOT

SHARED = {"vocab_size": 1000, "intermediate_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}
EVERY_FOURTH = ["linear_attention"] * 3 + ["full_attention"]
QWEN = SHARED | {"architectures": ["Qwen3_5ForCausalLM"], "head_dim": 256, "num_key_value_heads": 2}
MODELS = {  # name in the table -> its family, the keys that decide, bytes of keys and values of a token and layer
    "LFM2-1.2B": (
        Lfm2Target,
        SHARED
        | {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "conv_L_cache": 3}
        | {"layer_types": ["conv"] * 10 + ["full_attention"] * 6},
    ),
    "Qwen3.5-0.8B": (
        Qwen35Target,
        QWEN
        | {"hidden_size": 1024, "num_hidden_layers": 24, "layer_types": EVERY_FOURTH * 6}
        | {"linear_num_key_heads": 16, "linear_num_value_heads": 16},
    ),
    "Qwen3.5-4B, 9B": (
        Qwen35Target,
        QWEN
        | {"hidden_size": 2560, "num_hidden_layers": 32, "layer_types": EVERY_FOURTH * 8, "num_key_value_heads": 4}
        | {"linear_num_key_heads": 16, "linear_num_value_heads": 32},
    ),
    "Granite 4.0-H Micro": (
        GraniteHybridTarget,
        SHARED
        | {"hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 32, "shared_intermediate_size": 8192}
        | {"layer_types": (["mamba"] * 9 + ["attention"]) * 4, "mamba_n_heads": 64, "mamba_d_state": 128},
    ),
}
UNITS = {"KiB": 2**10, "MiB": 2**20}


@pytest.mark.parametrize("name", MODELS)
def test_states_take_what_the_page_says(name: str) -> None:
    family, keys = MODELS[name]
    config = family.read_config(keys)
    page = (ROOT / "docs" / "hybrids.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| {re.escape(name)} \| (\d+) \| ([\d.]+) (KiB|MiB) \| ([\d,]+) \|$", page, re.M)
    layers, size, unit, tokens = int(row[0]), float(row[1]), UNITS[row[2]], int(row[3].replace(",", ""))
    assert config.recurrent is not None
    assert config.count("recurrent") == layers
    state = layers * config.recurrent.bytes(2)
    assert state / unit == pytest.approx(size, rel=0.01)
    assert state / (2 * config.cached_numbers(1) * config.count("attention")) == pytest.approx(tokens, rel=0.05)
