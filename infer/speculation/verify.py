"""Decides which drafted tokens are accepted, by the exact rule or by the one that the request asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.engine.isolation import together
from infer.request import Request
from infer.sampling.choose import Choices
from infer.speculation import lossy
from infer.speculation.lossy import Verdict
from infer.speculation.tree import DraftTree
from kernels.acceptance import block, typical_mask
from kernels.verify import accept


def rule_for(request: Request, proposer: str) -> str:
    """Return the acceptance rule in force: at temperature 0 all but synthetic acceptance are the exact rule."""
    if proposer == "synthetic":
        return "synthetic"
    return request.params.acceptance if request.params.temperature > 0 else "exact"


def verify(
    requests: Sequence[Request],
    tree: DraftTree,
    choices: Choices,
    rules: Sequence[str],
    rates: Sequence[float] = (),
) -> list[Verdict]:
    """Return one verdict per request. `rates`: the acceptance rates of synthetic acceptance."""
    lengths, width = tree.length.tolist(), tree.token.shape[1]
    tokens, chosen, first = choices.token.tolist(), list[list[int]](), 0
    for length in lengths:
        chosen.append(tokens[first : first + length] + [-1] * (width - length))
        first += length
    grid = torch.tensor(chosen)  # [B, N]
    row_by_id = {request.request_id: b for b, request in enumerate(requests)}

    def active_rows(rule: str, subset: Sequence[Request]) -> list[int]:
        rows = [row_by_id[request.request_id] for request in subset if not request.failed]
        return [b for b in rows if rules[b] == rule]

    def by_typical(subset: Sequence[Request]) -> Tensor | None:
        typical = active_rows("typical", subset)
        return typical_nodes(tree, choices, typical) if typical else None

    def by_block(subset: Sequence[Request]) -> dict[int, tuple[int, int]]:
        blocks = [b for b in active_rows("block", subset) if tree.is_chain_of(b)]
        return dict(zip(blocks, verify_blocks(requests, tree, choices, blocks), strict=True))

    typical_mask, verified = together(requests, by_typical), together(requests, by_block)
    last = accept(tree.token, tree.parent, tree.depth, tree.ancestors, tree.length, grid, typical_mask).tolist()
    verdicts = []
    for b, (request, rule) in enumerate(zip(requests, rules, strict=True)):
        if rule == "synthetic":
            verdicts.append(lossy.synthetic(rates, lengths[b] - 1, chosen[b], request.seed, request.computed))
        elif b in verified:
            accepted, bonus = verified[b]
            verdicts.append(Verdict(list(range(accepted + 1)), bonus))
        else:
            path = list(range(last[b] + 1)) if tree.is_chain else tree.path(b, last[b])
            verdicts.append(Verdict(path, chosen[b][last[b]]))
    return verdicts


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


def typical_nodes(tree: DraftTree, choices: Choices, wanted: Sequence[int]) -> Tensor:
    """Return bool `[B, N]`: the nodes of the requests `wanted` that typical acceptance accepts."""
    selected = torch.zeros_like(tree.inside)
    selected[list(wanted)] = tree.inside[list(wanted)]
    row_index = selected.flatten().cumsum(0).view_as(tree.token) - 1  # index of a node's row among those of `wanted`
    selected[:, 0] = False
    above, probs = row_index.gather(1, tree.parent.clamp(min=0).long()), target_probs(tree, choices, wanted)
    accepted = torch.zeros_like(selected)
    accepted[selected] = typical_mask(
        probs, above[selected].to(probs.device), tree.token[selected].to(probs.device)
    ).cpu()
    return accepted


def target_probs(tree: DraftTree, choices: Choices, wanted: Sequence[int]) -> Tensor:
    """Return the target's warped probabilities `[R, V]` at every node of the requests `wanted` (ascending)."""
    inside = torch.zeros_like(tree.inside)
    inside[list(wanted)] = True
    rows = inside[tree.inside].nonzero()[:, 0].to(choices.raw.device)
    return choices.warped_log_probs(rows).softmax(-1)
