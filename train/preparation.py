"""Everything that must be there before the first step: target, engine, sequences, head, optimiser, features.

The order matters. The engine packs the target, so it comes before any feature is computed (packed and unpacked
linears differ in their last bits), on a fresh run and on a resumed one alike; a head that starts from the target's
weights takes them from a copy that was never packed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from infer.config import EngineConfig, HeadConfig, NewHeadConfig, ProposerConfig
from infer.engine import Engine
from infer.request import SamplingParams
from models.heads import HEADS
from models.heads.base import Head
from models.targets import load_target
from models.targets.llama import LlamaTarget
from models.tokenizer import Tokenizer
from models.vocab import build_draft_vocab, coverage
from train import atomic
from train.config import DemoDataConfig, JsonlDataConfig, Medusa2ObjectiveConfig, TrainConfig
from train.data import Sequences
from train.evaluation import Evaluator
from train.features import FeatureSource, OnlineFeatures, make_features
from train.objectives import OBJECTIVES, Objective
from train.objectives.medusa import MedusaTogether
from train.parallel import any_process, say
from train.prompts import Row, read_prompts
from train.regenerate import collect_parts, continue_rows, sampling_params
from train.reuse import RECIPE, copy_twin, find_twin, recipe
from train.schedule import peak_rate
from train.served import AdaptedTarget, FrozenTarget, ServedTarget
from train.stopping import Interrupted, StopRequest

TRAIN, HELD_OUT, SOURCE = "train.safetensors", "held_out.safetensors", "source.json"


@dataclass
class Prepared:
    target: LlamaTarget
    sequences: Sequences  # cut to sequence_length
    features: FeatureSource
    head: Head
    objective: Objective  # around the head, as accelerate prepared it
    optimizer: torch.optim.Optimizer
    served: ServedTarget
    data_source: str
    data_hash: str


def prepare(config: TrainConfig, accelerator: Accelerator, folder: Path, stop: StopRequest) -> Prepared:
    torch.manual_seed(config.seed)
    dtype = getattr(torch, config.model.dtype)
    path, revision = config.model.path_or_hub_id, config.model.revision
    target = load_target(path, revision=revision, dtype=dtype, device=accelerator.device)
    tokenizer = Tokenizer.load(target.folder)
    head = make_head(config.head, target)
    drafts = ProposerConfig(name="head", max_draft_tokens=config.eval_draft_tokens)
    engine = Engine(target, tokenizer=tokenizer, proposer="none", config=pool_for(config), proposer_config=drafts)
    data = folder / "data"
    if not (data / TRAIN).is_file():
        make_data(config, engine, tokenizer, accelerator, data, stop)
    whole, held_out = Sequences.load(data / TRAIN), Sequences.load(data / HELD_OUT)
    sequences = whole.cut(config.sequence_length)
    if not len(sequences):
        raise ValueError(
            f"sequence_length={config.sequence_length}: cuts every sequence before its second generated token; raise "
            f"it (the longest sequence has {int(whole.lengths.max())} tokens)"
        )
    give_vocabulary(head, config, target, sequences, tokenizer)
    head.to(accelerator.device)
    own = make_objective(config, head)
    optimizer = torch.optim.AdamW(
        parameter_groups(config, own),
        lr=peak_rate(config.optim, head.config.hidden_size),
        betas=(config.optim.betas[0], config.optim.betas[1]),
        eps=config.optim.eps,
        weight_decay=config.optim.weight_decay,
    )
    objective, optimizer = accelerator.prepare(own, optimizer)
    show = accelerator.is_main_process
    features = make_features(
        config.features, target, head.config.aux_layers, sequences, batch_size=config.batch_size, show=show
    )
    served: ServedTarget
    if isinstance(own, MedusaTogether):
        served = AdaptedTarget(config, own, tokenizer, pool_for(config), held_out, stop.check)
    else:
        features_of = OnlineFeatures(target, head.config.aux_layers)
        served = FrozenTarget(config, target, Evaluator(config, engine, held_out, features_of, stop.check))
    say(
        accelerator,
        f"{len(sequences)} sequences, {int(sequences.offsets[-1])} tokens, {int(sequences.assistant.sum())} of them "
        f"the target's own; the draft vocabulary of {head.config.draft_vocab_size} covers "
        f"{100 * coverage(sequences.ids[sequences.assistant], head.target_ids):.2f} % of these",
    )
    return Prepared(
        target=target,
        sequences=sequences,
        features=features,
        head=head,
        objective=objective,
        optimizer=optimizer,
        served=served,
        data_source=json.loads((data / SOURCE).read_text(encoding="utf-8"))["source"],
        data_hash=whole.content_hash(),
    )


def pool_for(config: TrainConfig) -> EngineConfig:
    """The engine's settings, with a KV pool for the sequences of this run where none was asked for."""
    if config.engine.max_tokens_in_cache is not None:
        return config.engine
    data = config.data
    assert isinstance(data, DemoDataConfig | JsonlDataConfig)
    prompt = data.prompt_tokens if isinstance(data, DemoDataConfig) else data.max_prompt_tokens
    longest = prompt + max(data.max_new_tokens, config.eval_max_tokens) + config.eval_draft_tokens
    tokens = config.engine.max_batch * (longest + config.engine.page_size)
    return replace(config.engine, max_tokens_in_cache=tokens)


def make_head(config: HeadConfig, target: LlamaTarget) -> Head:
    """Of the target's sizes, with no vocabulary yet. Raises ValueError for settings that do not fit the target."""
    kind, common = HEADS[config.name], {field.name for field in fields(NewHeadConfig)}
    options = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in common}
    return kind(kind.config_class.for_target(target.config, **options))


def make_objective(config: TrainConfig, head: Head) -> Objective:
    """Around a head with its vocabulary. Raises ValueError for layers to adapt that the target does not have."""
    if isinstance(config.objective, Medusa2ObjectiveConfig):
        return MedusaTogether(head, config.objective, unpacked_target(config, head), config.seed)
    return OBJECTIVES[config.objective.name](head, config.objective)


def parameter_groups(config: TrainConfig, objective: Objective) -> list[dict[str, Any]]:
    """What is trained, in the order of its modules; `scale` is a group's share of the step size."""
    head = [parameter for parameter in objective.head.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": head, "scale": 1.0}]
    if isinstance(objective, MedusaTogether):
        adapters = [parameter for parameter in objective.target.parameters() if parameter.requires_grad]
        groups.append({"params": adapters, "scale": objective.config.lora_rate})
    return groups


def unpacked_target(config: TrainConfig, like: torch.nn.Module) -> LlamaTarget:
    """A second copy: packed weights, the engine's, can neither be copied nor be differentiated through."""
    dtype, device = getattr(torch, config.model.dtype), next(like.parameters()).device
    return load_target(config.model.path_or_hub_id, revision=config.model.revision, dtype=dtype, device=device)


def give_vocabulary(
    head: Head, config: TrainConfig, target: LlamaTarget, sequences: Sequences, tokenizer: Tokenizer
) -> None:
    """Chooses the draft vocabulary from what the target wrote, and initialises the head for it."""
    assert isinstance(config.head, NewHeadConfig)
    vocab_size = target.config.vocab_size
    special = {*tokenizer.special_ids, *tokenizer.eos_ids, *target.config.eos_token_ids, target.config.bos_token_id}
    forced = [token for token in special if token is not None and token < vocab_size]
    head.set_vocabulary(*build_draft_vocab(sequences.counts(vocab_size), head.config.draft_vocab_size, forced))
    donor = unpacked_target(config, head) if config.head.init_from_target or head.reads_lm_head else target
    head.initialise(donor, from_target=config.head.init_from_target, seed=config.seed)


def make_data(
    config: TrainConfig,
    engine: Engine,
    tokenizer: Tokenizer,
    accelerator: Accelerator,
    folder: Path,
    stop: StopRequest,
) -> None:
    """Writes the sequences of both splits, or what is finished of them when a stop is requested."""
    prompts = read_prompts(config, tokenizer, engine.context)
    for complaint in prompts.complaints[:8]:
        say(accelerator, f"left out: {complaint}")
    if len(prompts.complaints) > 8:
        say(accelerator, f"left out: {len(prompts.complaints)} rows in all")
    own = recipe(config, engine.target, prompts.source)
    if copied(folder, own, accelerator):
        return
    say(accelerator, f"the target continues {len(prompts.train)} training and {len(prompts.held_out)} held-out prompts")
    rank, world, show = accelerator.process_index, accelerator.num_processes, accelerator.is_main_process

    def greedy(index: int) -> SamplingParams:
        return SamplingParams(max_tokens=config.eval_max_tokens)

    def sampled(index: int) -> SamplingParams:
        return sampling_params(index, config.data, config.seed)

    held_out = [Row(row.prompt) for row in prompts.held_out]
    for rows, params, name in ((held_out, greedy, HELD_OUT), (prompts.train, sampled, TRAIN)):
        parts = folder / Path(name).stem
        cut = False
        try:
            continue_rows(engine, rows, params, parts, share=(rank, world), check=stop.check, show=show)
        except Interrupted:
            cut = True
        if any_process(accelerator, cut):
            raise Interrupted
        if accelerator.is_main_process:
            atomic.write_text(folder / SOURCE, json.dumps({"source": prompts.source, RECIPE: own}) + "\n")
            collect_parts(parts, len(rows)).save(folder / name)  # the training part comes last: it marks the whole
            atomic.discard(parts)
    accelerator.wait_for_everyone()


def copied(folder: Path, own: str, accelerator: Accelerator) -> bool:
    """Takes the sequences of another run beside this one, if it was given the very same to make."""
    twin = find_twin(folder.parents[1], own, SOURCE, (SOURCE, HELD_OUT, TRAIN))
    if any_process(accelerator, twin is None):
        return False
    assert twin is not None
    say(accelerator, f"sequences as in {twin}")
    if accelerator.is_main_process:
        copy_twin(twin, folder, (SOURCE, HELD_OUT, TRAIN))
    accelerator.wait_for_everyone()
    return True
