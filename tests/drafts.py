"""Draft trees, made-up results of verifying drafts, what was learnt from them, and costs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from infer.batch.history import UNSEEN, History
from infer.batch.tree import MAX_NODES, Budget, DraftTree, VerifiedDraft
from infer.request import Drafter, Proposer, Request, SamplingParams
from infer.speculation.control.acceptance_model import AcceptanceModel
from infer.speculation.control.batch_plan import Candidate
from infer.speculation.control.cost_model import CostModel, CostTable, Curve


def chain(depth: int, accepted: int) -> VerifiedDraft:
    return VerifiedDraft(Budget(depth, depth), depth, depth, range(1, accepted + 1))


def make_costs(row: float, draft: float, fixed: float = 11.0) -> CostModel:
    """Return costs in ms: a step takes `fixed` plus `row` per row, drafting `draft` per level."""
    batches = (1, 4, 16)
    steps = tuple(Curve((b, 8.0 * b), (fixed + row * b, fixed + 8 * row * b)) for b in batches)
    drafts = tuple(Curve((1.0, 4.0), (draft, 4 * draft)) for _ in batches)
    return CostModel(CostTable(batches, steps, {"head": drafts}))


def make_request(tokens: list[int], prompt: int = 1, **params: Any) -> Request:
    """Return a decoding request whose first `prompt` tokens are its prompt."""
    request = Request(
        "r" + "-".join(map(str, tokens)), tokens[:prompt], SamplingParams(max_tokens=50, **params), 0, tokens
    )
    request.computed = len(tokens) - 1
    return request


def propose(proposer: Proposer, requests: Sequence[Request], budgets: Sequence[Budget]) -> DraftTree:
    """Let a proposer draft for requests, of which it becomes the drafter with its first draft."""
    for request in requests:
        if request.drafter.proposer is not proposer:
            request.drafter = Drafter(proposer)
            request.drafter.begin(request)
    return proposer.propose(requests, [request.drafter.kept for request in requests], budgets)


def chains(depth: int, histories: Sequence[History] = (UNSEEN,)) -> list[Candidate]:
    """Return a candidate for a chain per request, which are named by their number."""
    limit = Budget(depth, depth)
    return [Candidate(str(index), "head", limit, history=history) for index, history in enumerate(histories)]


def with_rates(rates: list[float]) -> tuple[AcceptanceModel, list[History]]:
    """Return an acceptance model and requests' histories with much evidence that drafts of the i-th are right at
    `rates[i]` at every depth.
    """
    acceptance, histories, rng = AcceptanceModel(), [History() for _ in rates], random.Random(0)
    for history, rate in zip(histories, rates, strict=True):
        for _ in range(300):
            right = next((place for place in range(4) if rng.random() > rate), 4)
            acceptance.record(history, "head", chain(4, right), 0.0)
    return acceptance, histories


def checked_tree(token: Tensor, parent: Tensor, length: Tensor) -> DraftTree:
    """Return the tree of `token` and `parent` `[B, N]`, after checking order and distinct siblings."""
    assert token.shape[1] <= MAX_NODES
    for node in range(1, token.shape[1]):
        above, inside = parent[:, node], node < length
        assert not bool((inside & ((above < 0) | (above >= node))).any()), f"node {node} precedes its parent"
        twins = (parent[:, :node] == above[:, None]) & (token[:, :node] == token[:, node, None])
        twins[:, 0] = False
        assert not bool((twins.any(1) & inside).any()), f"node {node}: a sibling carries the same token"
    return DraftTree.assemble(token, parent, length)
