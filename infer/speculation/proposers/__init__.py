"""Builds the proposers, which draft tokens for the engine, by name, and packs what they draft with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache

from infer.batch.tree import MAX_NODES, Budget
from infer.config import EngineConfig, ProposerConfig
from infer.options.stored_weights import drafter_format
from infer.request import Proposer
from infer.settings.draft_tree import Beam
from infer.speculation.proposers.combined import CombinedProposer
from infer.speculation.proposers.draft_model import DraftModelProposer
from infer.speculation.proposers.head import HeadProposer
from infer.speculation.proposers.hybrid_draft_model import HybridDraftModelProposer
from infer.speculation.proposers.ngram import NgramProposer
from infer.speculation.proposers.suffix_decoding.proposer import SuffixProposer
from infer.speculation.proposers.suffix_decoding.responses import EarlierResponses, ResponseFile
from infer.speculation.proposers.synthetic import SyntheticProposer
from models.heads.base import Head
from models.heads.borrowing import borrow
from models.heads.draft_model.head import DraftModelHead
from models.heads.weights import pack
from models.targets.llama import LlamaTarget

SELF_LIMITING = frozenset({SuffixProposer.name})  # the proposers below that are


Maker = Callable[[], tuple[Proposer, Budget]]


def build_proposers(
    config: ProposerConfig, head: HeadProposer | None, draft_model: DraftModelProposer | None, vocab_size: int
) -> dict[str, Maker]:
    """Return every proposer available to this engine, with its budget per step; each is built when first asked for.

    Raises ValueError for a file of responses that cannot be used.
    """
    chain = Budget(config.draft_tokens, config.draft_tokens)
    most = config.shape.nodes if isinstance(config.shape, Beam) else MAX_NODES - 1
    makers: dict[str, Maker] = {
        "ngram": lambda: (NgramProposer(*config.lookup_sizes), chain),
        "suffix": lambda: (suffix_proposer(config, vocab_size), chain),
    }
    if head is not None:
        deepest = min(chain.depth, head.max_depth or chain.depth)
        makers["head"] = lambda: (head, Budget(most, head.shape.depth) if head.shape else Budget(deepest, deepest))
    if draft_model is not None:
        shape = draft_model.shape
        makers["draft_model"] = lambda: (draft_model, Budget(most, shape.depth) if shape else chain)
    if rates := config.acceptance:
        makers["synthetic"] = lambda: (SyntheticProposer(vocab_size), Budget(len(rates), len(rates)))
    makers = {name: cache(maker) for name, maker in makers.items()}
    sources = {name: makers[name] for name in config.sources if name in makers}
    if len(sources) > 1:
        makers["combined"] = cache(lambda: combined(sources, most))  # no reference to `makers`, which would be a cycle
    if config.memory is not None:
        makers["suffix"]()
    return makers


def combined(sources: Mapping[str, Maker], most: int) -> tuple[Proposer, Budget]:
    """Return the proposer that merges these, of at most so many nodes."""
    built = {name: build() for name, build in sources.items()}
    limits = [limit for _, limit in built.values()]
    nodes, depth = min(most, sum(limit.nodes for limit in limits)), max(limit.depth for limit in limits)
    return CombinedProposer(built), Budget(nodes, depth)


def pack_head(
    head: Head, target: LlamaTarget, engine: EngineConfig, drafts: ProposerConfig, *, own: bool = False
) -> HeadProposer:
    """Return the proposer that drafts with a copy of `head`, or `own` itself, packed beside the packed `target`."""
    weight = target.norm.weight
    packed = head if own else copy.deepcopy(head, {id(target.embed_tokens): target.embed_tokens})
    borrow(packed, target)
    packed.to(device=weight.device, dtype=weight.dtype).eval().requires_grad_(False)
    narrow = drafter_format(engine.head_weights, weight.dtype, weight.device)
    pack(packed, exact=engine.exact, weight_format=narrow)
    return HeadProposer(packed, drafts)


def pack_draft_model(
    model: DraftModelHead, target: LlamaTarget, engine: EngineConfig, drafts: ProposerConfig
) -> DraftModelProposer:
    """Return the proposer that drafts with `model` itself, packed for serving."""
    weight = target.norm.weight
    narrow = drafter_format(engine.draft_weights, weight.dtype, weight.device)
    pack(model, exact=engine.exact, weight_format=narrow)
    kind = DraftModelProposer if model.config.model.recurrent is None else HybridDraftModelProposer
    return kind(model, drafts)


def suffix_proposer(config: ProposerConfig, vocab_size: int) -> SuffixProposer:
    memory = None if config.memory is None else ResponseFile(config.memory, vocab_size)
    return SuffixProposer(
        EarlierResponses(config.suffix_decoding_max_cached_requests, memory),
        max_depth=config.suffix_decoding_max_tree_depth,
        factor=config.suffix_decoding_max_spec_factor,
        min_probability=config.suffix_decoding_min_token_prob,
    )
