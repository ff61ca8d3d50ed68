"""Counts of a request's tokens, for penalties."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.copies import upload


class TokenCounts:
    """Which tokens occur in a request's prompt, and how often each occurs in its output; updated incrementally."""

    def __init__(self, vocab_size: int, prompt: Sequence[int], device: torch.device) -> None:
        self.prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.prompt.index_fill_(0, upload(list(prompt), device), True)  # assignment would copy the value from the host
        self.output = torch.zeros(vocab_size, device=device)
        self._counted = len(prompt)

    def update(self, tokens: Sequence[int]) -> None:
        """Count new tokens. `tokens`, prompt and output, extends the sequence of the last call."""
        new = upload(list(tokens[self._counted :]), self.output.device)
        self.output.index_add_(0, new, torch.ones(len(new), device=self.output.device))
        self._counted = len(tokens)
