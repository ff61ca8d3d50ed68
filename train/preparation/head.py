"""Makes the head and the objective of a run, from the configuration and the target."""

from __future__ import annotations

from pathlib import Path

from infer.options.exported_heads import head_at
from models.config import TargetConfig
from models.heads.base import Head
from models.heads.config import HeadConfig, HeadShape, NewHeadConfig
from models.heads.files import load_head
from models.heads.weights import dtype_of, initialize, set_vocabulary
from models.targets.llama import LlamaTarget
from models.tokenizer import Tokenizer
from models.vocab import build_draft_vocab
from train.config import TrainConfig
from train.data.sequences import Sequences
from train.objectives.base import Objective
from train.objectives.joint import JointObjective
from train.objectives.registry import OBJECTIVES
from train.preparation.target import unpacked_target


def make_head(config: HeadConfig, target: TargetConfig) -> Head:
    """Make a head of the target's sizes, without vocabulary. Raises ValueError if settings do not fit the target."""
    assert isinstance(config, NewHeadConfig)
    return config.make(target)


def make_objective(config: TrainConfig, head: Head) -> Objective:
    """Make the objective of a head with its vocabulary. Raises ValueError for `lora_on` layers the target lacks."""
    objective = OBJECTIVES[config.objective.name](head, config.objective)
    if isinstance(objective, JointObjective):
        objective.adapt_target(unpacked_target(config, head), config.seed)
    return objective


def give_vocabulary(
    head: Head, config: TrainConfig, target: LlamaTarget, sequences: Sequences, tokenizer: Tokenizer
) -> None:
    """Choose the draft vocabulary from the target's generated tokens and initialize the head for it."""
    assert isinstance(config.head, NewHeadConfig)
    vocab_size = target.config.vocab_size
    special = {*tokenizer.special_ids, *tokenizer.eos_ids, *target.end_tokens, target.config.bos_token_id}
    forced = [token for token in special if token is not None and token < vocab_size]
    set_vocabulary(head, *build_draft_vocab(sequences.counts(vocab_size), head.config.draft_vocab_size, forced))
    reads = config.head.init_from_target or head.config.reads_lm_head
    count = target.config.num_layers
    layers = [index for index in head.config.donor_layers if -count <= index < count]
    donor = unpacked_target(config, head, layers=layers) if reads else target
    initialize(head, donor, from_target=config.head.init_from_target, seed=config.seed)
    if config.head.start_from is not None:
        folder = head_at(config.head.start_from, config.head.revision, option="head.start_from=")
        go_on_from(head, folder, target)


def refuse_other_shape(folder: Path, earlier: HeadShape, shape: HeadShape) -> None:
    """Raises ValueError if a run's head cannot load the weights of an earlier one."""
    if earlier != shape:
        raise ValueError(
            f"head.start_from={folder}: is a {earlier}, this run's head a {shape}; give the keys of head= that it was "
            "trained with"
        )


def go_on_from(head: Head, folder: Path, target: LlamaTarget) -> None:
    """Load the weights and the draft vocabulary of an exported head of the same shape."""
    earlier = load_head(folder, name=head.config.name, dtype=dtype_of(head), target=target)
    refuse_other_shape(folder, earlier.config, head.config)  # checked again: it may have been re-exported meanwhile
    head.load_state_dict(earlier.state_dict())
