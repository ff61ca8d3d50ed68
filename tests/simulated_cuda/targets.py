"""A random target of three layers with a tokenizer, as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 96,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def write_target(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from tests.conftest import END, train_tiny_tokenizer

    with torch.random.fork_rng():
        torch.manual_seed(4)
        LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=train_tiny_tokenizer(), bos_token=END, eos_token=END)
    tokenizer.save_pretrained(folder)
    return folder
