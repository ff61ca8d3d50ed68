"""A server that starts with a head that another one learnt goes on from there."""

from __future__ import annotations

import itertools
import os
import signal
from dataclasses import replace
from pathlib import Path

import torch

from models.heads.files import load_head
from models.targets.llama import LlamaTarget
from tests.server.harness import MODEL, MakeServer, Server, repeat_until, wait_until
from tests.server.test_learning import EAGER, learning_of, status_of


def learn_from(server: Server, prompts: list[str]) -> None:
    """Answer requests until a head was taken over."""
    numbers = itertools.count()

    def ask() -> None:
        number = next(numbers)
        prompt = prompts[number % len(prompts)] + str(number % 10)
        server.complete(prompt=prompt, max_tokens=32, ignore_eos=True, temperature=0)

    repeat_until(lambda: status_of(server).taken_over > 0, ask)


def test_a_restart_goes_on_from_a_head_that_was_kept(
    make_server: MakeServer, tiny_target: LlamaTarget, tiny_head_folder: Path, tmp_path: Path
) -> None:
    place = tmp_path / "heads" / MODEL / "eagle3-learned"
    saving = replace(EAGER, save=True)
    states = torch.randn(5, tiny_target.config.hidden_size, generator=torch.Generator().manual_seed(0))

    def drafts(folder: Path) -> torch.Tensor:
        return load_head(folder, target=tiny_target).logits(states, 0)

    with make_server(learning=saving, output_dir=str(tmp_path)) as server:
        learn_from(server, ["x = 1\n", "def f("])
        os.kill(learning_of(server)._trainer.pid, signal.SIGTERM)
        wait_until(lambda: not status_of(server).running)
        kept = place / str(status_of(server).taken_over)
        torch.testing.assert_close(server.engine.head.logits(states, 0), drafts(kept))
        assert not torch.allclose(drafts(kept), drafts(tiny_head_folder), atol=1e-2)
    with make_server(learning=saving, output_dir=str(tmp_path), head_folder=kept) as server:
        torch.testing.assert_close(server.engine.head.logits(states, 0), drafts(kept))
        learn_from(server, ["import os\n", "return a", "class A"])
        assert status_of(server).tau_after > status_of(server).tau_before
    assert (place / str(int(kept.name) + 1)).is_dir()
    assert kept.is_dir()
