"""Preparation of a run before its first step: target, engine, sequences, head, optimiser, features.

The order matters. The engine packs the target's weights, so it is made before any feature is computed, in new and
resumed runs alike (packed and unpacked linears differ in their last bits); a head initialized from the target's weights
takes them from an unpacked copy.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from infer.engine import Engine
from models.heads.base import Head
from models.targets.llama import LlamaTarget
from models.vocab import coverage
from train.config import TrainConfig
from train.data.folder import Data
from train.data.sequences import Sequences, best_fit
from train.distributed.collectives import log_main
from train.distributed.exchange import ProcessExchange
from train.distributed.strategies import PLACEMENTS, Replicated
from train.evaluation import Evaluator
from train.features.online import FeatureSource, online_features
from train.objectives.joint import JointObjective
from train.preparation.features import open_features
from train.preparation.head import give_vocabulary, make_head, make_objective
from train.preparation.target import open_engine, pool_for
from train.publishing.target_view import AdaptedTarget, ServedTarget
from train.schedule import peak_rate
from train.signals import StopRequest


@dataclass
class Prepared:
    target: LlamaTarget
    sequences: Sequences  # cut to sequence_length
    packs: list[list[int]]  # indices of the sequences that share a row
    placement: Replicated  # head, objective and optimiser
    served: ServedTarget | AdaptedTarget
    data_source: str
    data_hash: str
    data_counts: dict[str, Any]  # of rows and conversations
    features: FeatureSource | None = None  # of a run with steps left: `open_features`

    @property
    def head(self) -> Head:
        return self.placement.head

    def open_features(self, config: TrainConfig, engine: Engine, stop: StopRequest) -> None:
        """Compute the features. Raises Interrupted on every process if a stop is requested meanwhile."""
        layers, accelerator = self.head.config.aux_layers, self.placement.accelerator
        self.features = open_features(config, engine, layers, self.sequences, accelerator, stop)


def start_engine(config: TrainConfig, accelerator: Accelerator, resources: ExitStack) -> Engine:
    """Return the engine with the target, which `resources` closes. Seeds torch."""
    torch.manual_seed(config.seed)
    sharded = config.features.target == "sharded"
    exchange = ProcessExchange(accelerator) if sharded else None
    engine = open_engine(config, accelerator.device, exchange)
    resources.callback(engine.close)
    return engine


def prepare(
    config: TrainConfig,
    accelerator: Accelerator,
    engine: Engine,
    data: Data,
    stop: StopRequest,
    resources: ExitStack,
) -> Prepared:
    """Prepare a run without its features; `resources` closes what it opens."""
    target, tokenizer = engine.target, engine.tokenizer
    assert tokenizer is not None
    head = make_head(config.head, target.config)
    uncut = data.train
    sequences = uncut.cut(config.sequence_length)
    if not len(sequences):
        raise ValueError(
            f"sequence_length={config.sequence_length}: cuts every sequence before its second generated token; raise "
            f"it (the longest sequence has {int(uncut.lengths.max())} tokens)"
        )
    give_vocabulary(head, config, target, sequences, tokenizer)
    head.to(accelerator.device)
    objective = make_objective(config, head)
    rate = peak_rate(config.optim, head.config.hidden_size)
    placement = PLACEMENTS[config.parallel.name](accelerator, objective, config.optim, rate)
    # an error, of which other processes need not know, leaves the block of `resources`; an end or a stop is of all
    resources.push(lambda error, *_: placement.close(together=error is None))
    served: ServedTarget | AdaptedTarget
    if isinstance(objective, JointObjective):
        served = AdaptedTarget(config, objective, tokenizer, pool_for(config), data.held_out, stop.check)
    else:
        features_of = online_features(target, head.config.aux_layers)
        served = ServedTarget(config, target, Evaluator(config, engine, data.held_out, features_of, stop.check))
    counts = {
        "sequences": len(sequences),
        "tokens": int(sequences.offsets[-1]),
        "learnt": int(sequences.assistant.sum()),
        "left_out": len(uncut) - len(sequences),  # of which cutting left no token to train on
    }
    lost = 1 - counts["learnt"] / max(1, int(uncut.assistant.sum()))
    log_main(
        accelerator,
        f"{counts['sequences']} sequences, {counts['tokens']} tokens, {counts['learnt']} of them trained on "
        f"(sequence_length={config.sequence_length} cut {100 * lost:.1f} % off, and dropped "
        f"{counts['left_out']} sequences with no token left to train on); "
        f"the draft vocabulary of {head.config.draft_vocab_size} covers "
        f"{100 * coverage(sequences.ids[sequences.assistant], head.target_ids):.2f} % of these",
    )
    packs = [[index] for index in range(len(sequences))]
    if config.packing:
        packs = best_fit(sequences.lengths.tolist(), config.sequence_length)
        filled = int(sequences.offsets[-1]) / (len(packs) * config.sequence_length)
        log_main(
            accelerator, f"packed into {len(packs)} rows of {config.sequence_length} tokens, {100 * filled:.1f} % full"
        )
    return Prepared(
        target=target,
        sequences=sequences,
        packs=packs,
        placement=placement,
        served=served,
        data_source=data.source,
        data_counts={**data.counts, "learnt": counts},
        data_hash=uncut.content_hash(),
    )
