"""Sequences that the head was trained on before, which are mixed into what it learns from later, lest it forget them.

A random sample of a run's training data (train/data/folder.py), in pieces, and of the responses that the run held back,
to judge on. A copy of the target computes features and likeliest tokens of a sequence when it is first needed; these
stay in memory, which bounds the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import torch

from infer.config import LearningConfig
from infer.learning.traffic import TOP_K
from infer.settings.paths import resolve_path
from models.targets.llama import LlamaTarget
from train.data.folder import HELD_OUT, SOURCE, TRAIN
from train.data.sequences import Sequences, rows_at
from train.features.layout import Layout
from train.features.online import compute_features
from train.learning.examples import Example, part, rooms, teaches
from train.storage.run_folder import INGREDIENTS, read_record


class Replay:
    """`trained` and `held_back` are kept in memory with features of `layers` once they are drawn.

    `load` loads the target, when features are first computed. Examples to train on have at most `piece` tokens, which
    are together `ratio` times those of the examples that they are drawn beside. Raises ValueError if there are none.
    """

    def __init__(
        self,
        trained: Sequences,
        held_back: Sequences,
        load: Callable[[], LlamaTarget],
        layers: Sequence[int],
        piece: int,
        ratio: float,
    ) -> None:
        self._trained, self._held_back, self._load = trained, held_back, load
        self._layers, self._ratio = tuple(sorted(set(layers))), ratio
        starts = [(row, start) for row in range(len(trained)) for start in range(0, int(trained.lengths[row]), piece)]
        spans = [(row, slice(start, start + piece)) for row, start in starts]
        self._pieces = [(row, span) for row, span in spans if teaches(trained.row(row)[1][span])]
        if not (self._pieces and len(held_back)):
            raise ValueError("learning.replay: no sequence of it fits into memory; raise learning.most_mb")
        self._computed = dict[int, Example]()  # by row
        self._drawn = 0  # pieces
        self._owed = 0.0  # tokens still to be drawn

    @cached_property
    def judged(self) -> list[Example]:
        return [self._example(self._held_back, row) for row in range(len(self._held_back))]

    def beside(self, examples: Sequence[Example]) -> list[Example]:
        """Return the next examples to train on, to be mixed with these; a token too many now is one less later."""
        self._owed += self._ratio * sum(len(example.ids) for example in examples)
        drawn = list[Example]()
        while self._owed > 0:
            row, span = self._pieces[rows_at(len(self._pieces), self._drawn, 1, seed=0)[0]]
            if row not in self._computed:
                self._computed[row] = self._example(self._trained, row)
            drawn.append(part(self._computed[row], span))
            self._drawn += 1
            self._owed -= len(drawn[-1].ids)
        return drawn

    @cached_property
    def _target(self) -> LlamaTarget:
        return self._load()

    def _example(self, sequences: Sequences, row: int) -> Example:
        target, batch = self._target, sequences.batch([row])
        sizes, dtype = (target.config.hidden_size, target.config.vocab_size), target.norm.weight.dtype
        layout = Layout(self._layers, *sizes, dtype, top_k=min(TOP_K, target.config.vocab_size))
        features = compute_features(target, batch, self._layers)
        stored = layout.encode(torch.stack([layer[0] for layer in features.aux], 1), target, features.hidden[0])
        tensors = stored["features"], stored["top_ids"], stored["top_log_probs"]
        return Example(batch.ids[0], *tensors, batch.assistant[0], first=0, temperature=0.0, seed=0)


def open_replay(
    config: LearningConfig, fingerprint: str, load: Callable[[], LlamaTarget], layers: Sequence[int], state_bytes: int
) -> Replay:
    """Return the replay of `learning.replay` for the target with this fingerprint, at so many bytes of states a token.

    Raises ValueError for a folder that is not a training run's data, of this target.
    """
    assert config.replay is not None
    folder, name = resolve_path(config.replay), f"learning.replay={config.replay}"
    if not (folder / TRAIN).is_file():
        raise ValueError(f"{name}: {folder} holds no {TRAIN}; give outputs/<run>/data of the head's training, or null")
    made_for = read_record(folder / SOURCE).get(INGREDIENTS, {}).get("target")
    if made_for != fingerprint:
        raise ValueError(
            f"{name}: was made with another target (fingerprint {made_for}, this one has {fingerprint}); give the data "
            "of a run with this one, or null"
        )
    ratio = config.replay_tokens / config.traffic_tokens
    train_room, judge_room = (int(ratio * room) for room in rooms(config, state_bytes))
    trained, held_back = sample(folder / TRAIN, train_room), sample(folder / HELD_OUT, judge_room)
    piece = config.replay_tokens // 2  # so that a batch with little of what is served has some of it too
    return Replay(trained, held_back, load, layers, piece, ratio)


def sample(path: Path, room: int) -> Sequences:
    """Return the sequences of a file in random order, as many as have `room` tokens together."""
    sequences = Sequences.load(path)
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(0))
    return sequences.select(order[sequences.lengths[order].cumsum(0) <= room].tolist())
