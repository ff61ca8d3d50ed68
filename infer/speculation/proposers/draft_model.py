"""Drafts a chain or a tree with a second, smaller model; its KV lies in the engine's pool.

Every token of the text has a place, as for the target; what the draft model reads there is its own token for it
(models/token_map.py). Accepted tokens of a chain are not run again, since their KV depends on the tokens alone. So a
round costs one forward over the tokens that it has not seen, and one per further level; of a parallel draft model, one
forward in all. The nodes of a tree lie in the order in which they were run, so accepted ones are read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from infer.batch.tree import Budget, DraftTree
from infer.config import EngineConfig, ModelConfig, ProposerConfig
from infer.options.stored_weights import why_widened
from infer.request import DrafterState, Phase, ProposerState, Request
from infer.speculation.proposers.head import ModelProposer
from kernels.copies import upload
from models.config import read_config_json
from models.gguf import is_gguf
from models.heads.draft_model.head import DraftModelHead
from models.heads.weights import dtype_of
from models.targets import load_target, resolve_checkpoint
from models.targets.llama import LlamaTarget
from models.token_map import map_tokens
from models.tokenizer import Tokenizer

MASK_TOKENS = ("pard_token", "ptd_token_id")  # keys of published config.json files


@dataclass
class DraftModelState(ProposerState):
    """What a draft model keeps of one request."""

    seen: list[int] = field(default_factory=list)  # tokens whose KV is written, in order
    agreed: int = 0  # how many of the first of them surely are the request's
    base: int = 0  # its KV begins with the request

    def prefix(self, request: Request) -> int:
        """Return for how many of the request's tokens the KV is written."""
        return common_prefix(self.seen, request.tokens, self.agreed)

    def synced(self, request: Request) -> int:
        return min(request.computed, self.prefix(request))


class DraftModelProposer(ModelProposer):
    """Drafts with `head`, packed for serving."""

    name = "draft_model"
    module: DraftModelHead

    def __init__(self, head: DraftModelHead, config: ProposerConfig) -> None:
        super().__init__(head, config, "engine.draft_weights")
        self.context = head.config.model.max_position_embeddings

    def begin(self, request: Request) -> DraftModelState:
        filled = request.computed if request.drafter.state is DrafterState.FULL else 0
        return DraftModelState(request.tokens[:filled], filled)

    def commit(
        self, requests: Sequence[Request], states: Sequence[DraftModelState], features: Sequence[Tensor]
    ) -> None:
        # In prefill it runs over each chunk right after the target; any other tokens are read by the next draft.
        pairs = zip(requests, states, strict=True)
        prefilling = [pair for pair in pairs if pair[0].phase is Phase.PREFILL and pair[0].computed <= self.context]
        if prefilling:
            self._fill(*map(list, zip(*prefilling, strict=True)))

    def propose(
        self, requests: Sequence[Request], states: Sequence[DraftModelState], budgets: Sequence[Budget]
    ) -> DraftTree:
        """Requests beyond the draft model's context get no drafts."""
        depths = [min(b.depth, self.context - len(r.tokens)) for r, b in zip(requests, budgets, strict=True)]
        return super().propose(requests, states, [b._replace(depth=d) for b, d in zip(budgets, depths, strict=True)])

    def catch_up(self, request: Request, state: DraftModelState) -> None:
        if state.prefix(request) < request.computed <= self.context:
            self._fill([request], [state])

    def _choices(self, config: ProposerConfig) -> int:
        return self.module.num_drafted

    def _chains(
        self, requests: Sequence[Request], states: Sequence[DraftModelState], budgets: Sequence[Budget]
    ) -> DraftTree:
        depths = [budget.depth for budget in budgets]
        unread = self._unread_rows(requests, states, max(depths))
        tokens = self.loop.chain(unread, upload(depths, unread.ids.device), max(depths)).token.tolist()
        drafts = [row[:depth] for row, depth in zip(tokens, depths, strict=True)]
        self.was_read(requests, states)
        if not self.loop.one_forward:
            for state, draft in zip(states, drafts, strict=True):
                state.seen += draft[:-1]
        return DraftTree.chains([request.tokens[-1] for request in requests], drafts)

    def _unread_slots(
        self, requests: Sequence[Request], states: Sequence[DraftModelState], *, drafting: bool
    ) -> tuple[list[int], list[int], list[Tensor]]:
        """The last token is always run again, as its hidden state is needed."""
        ends = ends_of(requests, drafting=drafting)
        triples = zip(requests, states, ends, strict=True)
        starts = [min(state.prefix(request), end - 1) for request, state, end in triples]
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        nothing = torch.empty(0, dtype=dtype_of(self.module), device=self.module.read.device)
        return [start - 1 for start in starts], counts, [nothing.expand(count, 0) for count in counts]

    def was_read(
        self, requests: Sequence[Request], states: Sequence[DraftModelState], *, drafting: bool = True
    ) -> None:
        """Take note of what was read of each request; nothing after it is written any more."""
        for request, state, end in zip(requests, states, ends_of(requests, drafting=drafting), strict=True):
            state.seen[state.agreed :] = request.tokens[state.agreed : end]
            state.agreed = end


def ends_of(requests: Sequence[Request], *, drafting: bool) -> list[int]:
    """Return how many tokens of each request are read: with the root for a draft, else those that are committed."""
    return [len(request.tokens) if drafting else request.computed for request in requests]


def common_prefix(first: Sequence[int], second: Sequence[int], agreed: int) -> int:
    """Return the length of the common prefix of two sequences, which is at least `agreed`."""
    length = agreed
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length


def draft_folder(proposer: ProposerConfig, *, weights: bool = True) -> Path:
    """Return the folder or GGUF file of `proposer.draft_model`; as resolve_checkpoint does."""
    model = ModelConfig(name="draft", path=str(proposer.draft_model))
    path, revision = model.path_or_hub_id, proposer.draft_model_revision
    return resolve_checkpoint(path, revision, weights=weights, option="proposer.draft_model=")


def load_draft_model(
    proposer: ProposerConfig, target: LlamaTarget, tokenizer: Tokenizer, engine: EngineConfig
) -> DraftModelHead:
    """Load `proposer.draft_model`, in the target's dtype and on its device, whole even if the target is divided.

    Weights that are stored in blocks or groups stay so where a kernel reads them, unless `engine.draft_weights` says
    otherwise. Raises ValueError if it shares no token with the target.
    """
    key, folder, weight = f"proposer.draft_model={proposer.draft_model}", draft_folder(proposer), target.norm.weight
    native = engine.draft_weights in ("same", "auto") and not why_widened(
        folder, weight.dtype, weight.device, divided=False
    )
    context = engine.max_model_len
    draft = load_target(str(folder), dtype=weight.dtype, device=weight.device, native=native, context=context)
    sizes = target.config.vocab_size, draft.config.vocab_size
    tokens = map_tokens(tokenizer, Tokenizer.load(folder), *sizes)
    head = DraftModelHead.of(draft, sizes[0], tokens, parallel_token(proposer, folder, sizes[1]))
    if not head.num_drafted:
        raise ValueError(f"{key}: its tokenizer has no token of the target's; take a draft model that shares some")
    return head


def parallel_token(proposer: ProposerConfig, folder: Path, rows: int) -> int | None:
    """Return the mask token of a parallel draft model, None if it drafts token by token.

    Raises ValueError if `proposer.parallel_drafting` asks for one that config.json does not name, or that has no row.
    """
    config = {} if is_gguf(folder) else read_config_json(folder / "config.json")
    name = next((name for name in MASK_TOKENS if config.get(name) is not None), None)
    if proposer.parallel_drafting is False or (name is None and proposer.parallel_drafting is None):
        return None
    if name is None:
        raise ValueError(
            f"proposer.parallel_drafting=true: {folder} names no mask token ({' or '.join(MASK_TOKENS)} in "
            "config.json); it was not trained to draft in parallel: drop the key"
        )
    if type(config[name]) is not int or not 0 <= config[name] < rows:
        raise ValueError(f"{folder}: config.json: {name}={config[name]!r}: must be a token of its {rows}")
    return config[name]
