"""Decides which drafted tokens are accepted where a request asked for another rule than the exact one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.batch.tree import DraftTree
from infer.request import Request
from infer.sampling.choose import Choices
from infer.sampling.isolation import together
from kernels.acceptance import block, synthetic, typical_mask
from kernels.copies import sent
from kernels.verify import accept


def rule_for(request: Request, proposer: str) -> str:
    """Return the acceptance rule in force: at temperature 0 all but synthetic acceptance are the exact rule."""
    if proposer == "synthetic":
        return "synthetic"
    return (request.params.temperature > 0 and request.params.acceptance) or "exact"


def verify_by_rules(
    requests: Sequence[Request], tree: DraftTree, choices: Choices, choice: Tensor, rates: Sequence[float]
) -> Tensor:
    """Return the last accepted node of each request, `[B]`, by its request's rule.

    `choice` `[B, N]`: the target's choice at every node, in which the bonus tokens of rules that draw their own are
    written. `rates`: the acceptance rates of synthetic acceptance.
    """
    row_by_id = {request.request_id: b for b, request in enumerate(requests)}

    def active_rows(rule: str, subset: Sequence[Request]) -> list[int]:
        rows = [row_by_id[request.request_id] for request in subset if not request.failed]
        return [b for b in rows if requests[b].rule == rule]

    def by_typical(subset: Sequence[Request]) -> Tensor | None:
        typical = active_rows("typical", subset)
        return typical_nodes(requests, tree, choices, typical) if typical else None

    def by_block(subset: Sequence[Request]) -> dict[int, tuple[int, int]]:
        blocks = [b for b in active_rows("block", subset) if tree.is_chain_of(b)]
        return dict(zip(blocks, verify_blocks(requests, tree, choices, blocks), strict=True))

    typical_mask, verified = together(requests, by_typical), together(requests, by_block)
    last = accept(tree.nodes, choice, typical_mask)
    for b, (accepted, bonus) in verified.items():
        last[b] = accepted
        if choice[b, accepted] >= 0:
            choice[b, accepted] = bonus
    for b, request in enumerate(requests):
        if request.rule == "synthetic":
            last[b] = synthetic(rates, int(tree.length[b]) - 1, request.seed, request.computed)
    return last


def verify_blocks(
    requests: Sequence[Request], tree: DraftTree, choices: Choices, wanted: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the number of accepted tokens and the bonus token of each of the requests `wanted`; drafts are chains."""
    if not wanted:
        return []
    lengths, tokens = tree.length.tolist(), tree.token.tolist()
    return block(
        target_probs(tree, choices, wanted),
        [tokens[b][1 : lengths[b]] for b in wanted],
        [tree.draft_probs.get(b) for b in wanted],
        [requests[b].seed for b in wanted],
        [requests[b].computed for b in wanted],
    )


def typical_nodes(requests: Sequence[Request], tree: DraftTree, choices: Choices, wanted: Sequence[int]) -> Tensor:
    """Return bool `[B, N]`: the nodes of the requests `wanted` that typical acceptance accepts."""
    selected = torch.zeros_like(tree.inside)
    selected[list(wanted)] = tree.inside[list(wanted)]
    row_index = selected.flatten().cumsum(0).view_as(tree.token) - 1  # index of a node's row among those of `wanted`
    selected[:, 0] = False
    above, probs = row_index.gather(1, tree.parent.clamp(min=0).long()), target_probs(tree, choices, wanted)
    accepted = torch.zeros_like(selected)
    parents, tokens = sent(torch.stack([above[selected], tree.token[selected]]), probs.device)
    limits = torch.tensor([request.params.typical for request in requests], dtype=torch.float64)
    limits = sent(limits[selected.nonzero()[:, 0]], probs.device).unbind(1)
    accepted[selected] = typical_mask(probs, parents, tokens, *limits).cpu()
    return accepted


def target_probs(tree: DraftTree, choices: Choices, wanted: Sequence[int]) -> Tensor:
    """Return the target's warped probabilities `[R, V]` at every node of the requests `wanted` (ascending)."""
    inside = torch.zeros_like(tree.inside)
    inside[list(wanted)] = True
    return choices.warped_log_probs(inside[tree.inside].nonzero()[:, 0].tolist()).softmax(-1)
