"""llama.cpp's logits of a text, from the library that scripts/peers.sh builds, by llama-cpp-python's declarations."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from scripts.peer_folders import built, llama_cpp


def declarations(peers: Path) -> ModuleType:
    """Return llama-cpp-python's module of declarations, bound to the build. Raises ValueError if that is not there."""
    source = built(peers, "llama.cpp", "source/llama_cpp/llama_cpp.py").parent
    os.environ["LLAMA_CPP_LIB_PATH"] = str(llama_cpp(peers, "libllama.so").parent)
    package = ModuleType("llama_cpp")  # without its __init__, which imports what we do not have
    package.__path__ = [str(source)]
    sys.modules["llama_cpp"] = package
    return importlib.import_module("llama_cpp.llama_cpp")


class LlamaCpp:
    """A GGUF file in llama.cpp on the CPU, for up to `window` tokens at a time; its keys and values are in fp16."""

    def __init__(self, peers: Path, file: Path, window: int, threads: int) -> None:
        self._library: Any = declarations(peers)
        self._silent = self._library.llama_log_callback(lambda level, text, data: None)
        self._library.llama_log_set(self._silent, None)
        self._library.llama_backend_init()
        self._model = self._library.llama_model_load_from_file(
            os.fsencode(file), self._library.llama_model_default_params()
        )
        if not self._model:
            raise ValueError(f"{file}: llama.cpp does not load it")
        self._vocabulary = self._library.llama_vocab_n_tokens(self._library.llama_model_get_vocab(self._model))
        options = self._library.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = window
        options.n_threads = options.n_threads_batch = threads
        self._context = self._library.llama_init_from_model(self._model, options)
        self._batch = self._library.llama_batch_init(window, 0, 1)

    def __call__(self, ids: Sequence[int]) -> Tensor:
        """Return the logits `[T, V]` in fp32 of token ids from position 0 on."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        batch = self._batch
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
        if status := self._library.llama_decode(self._context, batch):
            raise ValueError(f"llama.cpp: llama_decode returned {status}")
        address = ctypes.cast(self._library.llama_get_logits(self._context), ctypes.c_void_p).value
        assert address is not None
        values = (ctypes.c_float * (len(ids) * self._vocabulary)).from_address(address)
        return torch.frombuffer(values, dtype=torch.float32).view(len(ids), -1).clone()
