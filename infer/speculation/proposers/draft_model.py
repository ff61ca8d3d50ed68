"""Drafts a chain or a tree with a second, smaller model; its KV lies in the engine's pool.

Every token of the text has a place, as for the target; what the draft model reads there is its own token for it
(models/token_map.py). Accepted tokens of a chain are not run again, since their KV depends on the tokens alone. So a
round costs one forward over the tokens that it has not seen, and one per further level; of a parallel draft model, one
forward in all. The nodes of a tree lie in the order in which they were run, so accepted ones are read again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from infer.config import EngineConfig, ModelConfig, ProposerConfig
from infer.kvcache.pool import KVPool
from infer.kvcache.tensors import LayerShape
from infer.options.stored_weights import why_widened
from infer.request import Phase, Request
from infer.sampling.choose import choice_parameters
from infer.speculation.budget import Budget
from infer.speculation.draft_loop import TorchLoop, Unread
from infer.speculation.proposers.base import Needs, NoProposer, Proposer, Tracker
from infer.speculation.proposers.parallel_loop import ParallelLoop
from infer.speculation.tree import DraftTree
from infer.speculation.tree_shapes import StaticShape, TreeShape, propose_best, tree_shape
from kernels.slower import say_slower, slower_layers
from kernels.upload import upload, upload_columns
from models.config import read_json
from models.gguf import is_gguf
from models.heads.draft_model.head import DraftModelHead
from models.layers import Linear
from models.targets import load_target, resolve_checkpoint
from models.targets.llama import LlamaTarget
from models.token_map import map_tokens
from models.tokenizer import Tokenizer

MASK_TOKENS = ("pard_token", "ptd_token_id")  # keys of published config.json files


class DraftModelProposer(Proposer, Tracker):
    """Drafts with `head`, packed for serving; once attached, `pool` holds its KV layers from `first_layer` on."""

    name = "draft_model"
    loop: TorchLoop  # once attached

    def __init__(self, head: DraftModelHead, config: ProposerConfig) -> None:
        layers = [module.packed for module in head.modules() if isinstance(module, Linear)]
        say_slower(slower_layers((packed for packed in layers if packed is not None), "engine.draft_weights"))
        shape = head.attention
        self.needs = Needs(kv_layers=(LayerShape(shape.num_kv_heads, shape.head_dim),) * shape.layers)
        self.context = head.config.model.max_position_embeddings
        self.shape: TreeShape | None = None
        self._head = head
        self.set_drafts(config)
        self._pool: KVPool | None = None
        self._seen: dict[str, list[int]] = {}  # tokens whose KV is written, in order
        self._agreed: dict[str, int] = {}  # how many of the first of them surely are the request's

    @property
    def tracker(self) -> Tracker:
        return self

    @property
    def module(self) -> DraftModelHead:
        return self._head

    def set_drafts(self, config: ProposerConfig) -> None:
        """Set whether it drafts chains or trees. Raises ValueError for a tree wider than what it can draft."""
        shape, choices = tree_shape(config), self._head.num_drafted
        if isinstance(shape, StaticShape) and shape.widest > choices:
            raise ValueError(f"proposer.tree: rank {shape.widest - 1}: the draft model drafts from {choices} tokens")
        self.shape = shape

    def attach(self, pool: KVPool, first_layer: int) -> None:
        _, num_heads, num_kv_heads, head_dim = self._head.attention
        sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        attend = partial(pool.layers.attention, **sizes, first_layer=first_layer)
        self._pool, self.loop = pool, (ParallelLoop if self._head.parallel else TorchLoop)(self._head, attend)

    def places(self, budget: Budget) -> int:
        return max(*budget, 0 if self.shape is None else self.shape.rows)

    def commit(self, requests: Sequence[Request], counts: Sequence[int], features: Tensor) -> None:
        # In prefill it runs over each chunk right after the target; any other tokens are read by the next draft.
        prefilling = [r for r in requests if r.phase is Phase.PREFILL and r.computed <= self.context]
        if prefilling:
            self._fill(prefilling)

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> DraftTree:
        """Requests beyond the draft model's context get no drafts, those under block verification chains."""
        depths = [min(b.depth, self.context - len(r.tokens)) for r, b in zip(requests, budgets, strict=True)]
        undrafted = [i for i, depth in enumerate(depths) if depth <= 0]
        drafting = [i for i, depth in enumerate(depths) if depth > 0]
        chains = [i for i in drafting if self.shape is None or requests[i].params.acceptance == "block"]
        trees = [i for i in drafting if i not in chains]
        drafted = [
            (draft([requests[i] for i in rows], [budgets[i]._replace(depth=depths[i]) for i in rows]), rows)
            for draft, rows in ((NoProposer().propose, undrafted), (self._chains, chains), (self._trees, trees))
            if rows
        ]
        if len(drafted) == 1:
            return drafted[0][0]
        return DraftTree.stack([tree for tree, _ in drafted], [rows for _, rows in drafted])

    def synced(self, request: Request) -> int:
        return min(request.computed, self._prefix(request))

    def resume(self, request: Request) -> None:
        self._seen[request.request_id] = request.tokens[: request.computed]
        self._agreed[request.request_id] = request.computed

    def release(self, request: Request) -> None:
        self._seen.pop(request.request_id, None)
        self._agreed.pop(request.request_id, None)

    def catch_up(self, request: Request) -> None:
        if request.computed <= self.context:
            self._fill([request])

    def _chains(self, requests: list[Request], budgets: list[Budget]) -> DraftTree:
        depths, ends = [budget.depth for budget in budgets], [len(request.tokens) for request in requests]
        unread = self._unread(requests, ends, drafting=True, spare=self.loop.spare_rows(max(depths)))
        tokens = self.loop.chain(unread, upload(depths, unread.ids.device), max(depths)).token.tolist()
        drafts = [row[:depth] for row, depth in zip(tokens, depths, strict=True)]
        self._was_read(requests, ends)
        if not self._head.parallel:
            for request, draft in zip(requests, drafts, strict=True):
                self._seen[request.request_id] += draft[:-1]
        return DraftTree.chains([request.tokens[-1] for request in requests], drafts)

    def _trees(self, requests: list[Request], budgets: list[Budget]) -> DraftTree:
        """Grow every request's tree to the depth of the deepest budget; `propose_best` cuts each to its own budget."""
        assert self.shape is not None
        deepest, ends = max(budget.depth for budget in budgets), [len(request.tokens) for request in requests]
        unread = self._unread(requests, ends, drafting=True, spare=self.loop.spare_rows(deepest))
        grown = self.loop.tree(unread, self.shape, deepest)
        self._was_read(requests, ends)
        return propose_best([request.tokens[-1] for request in requests], grown, budgets)

    def _fill(self, requests: Sequence[Request]) -> None:
        """Write the KV of all committed positions of each request."""
        ends = [request.computed for request in requests]
        self.loop.read(self._unread(requests, ends))
        self._was_read(requests, ends)

    def _prefix(self, request: Request) -> int:
        """Return for how many of the request's tokens the KV is written."""
        agreed = self._agreed.get(request.request_id, 0)
        return common_prefix(self._seen.get(request.request_id, ()), request.tokens, agreed)

    def _unread(
        self, requests: Sequence[Request], ends: Sequence[int], *, drafting: bool = False, spare: int = 0
    ) -> Unread:
        """Return those of `tokens[:end]` of each request that are not read yet, followed by `spare` rows.

        The last token is always run again, as its hidden state is needed.
        """
        assert self._pool is not None
        starts = [min(self._prefix(request), end - 1) for request, end in zip(requests, ends, strict=True)]
        counts = [end - start + spare for start, end in zip(starts, ends, strict=True)]
        rows, device = self._pool.rows(requests, starts, counts), self._head.read.device
        blocks = zip(requests, starts, ends, strict=True)
        ids = [token for request, start, end in blocks for token in (*request.tokens[start:end], *[0] * spare)]
        roots, last_rows = [end - 1 for end in ends], [end - 1 - spare for end in itertools.accumulate(counts)]
        last, root, base = upload_columns([last_rows, roots, [0] * len(roots)], [], device)
        return Unread(
            ids=upload(ids, device),
            features=torch.empty(len(ids), 0, dtype=self._head.dtype, device=device),
            slots=rows.places - 1,
            rows=rows,
            ends=last,
            root=root,
            base=base,
            requests=rows.request[last],
            parameters=choice_parameters(requests, device, drafting=True) if drafting else None,
        )

    def _was_read(self, requests: Sequence[Request], ends: Sequence[int]) -> None:
        """Take note that `tokens[:end]` of each request was read; nothing after it is written any more."""
        for request, end in zip(requests, ends, strict=True):
            agreed = self._agreed.get(request.request_id, 0)
            self._seen.setdefault(request.request_id, [])[agreed:] = request.tokens[agreed:end]
            self._agreed[request.request_id] = end


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
    draft = load_target(str(folder), dtype=weight.dtype, device=weight.device, native=native)
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
    config = {} if is_gguf(folder) else read_json(folder / "config.json")
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
