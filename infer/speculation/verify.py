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
from kernels.acceptance import block, likely
from kernels.choose import law
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
    places = {request.request_id: b for b, request in enumerate(requests)}

    def still(rule: str, some: Sequence[Request]) -> list[int]:
        wanted = [places[request.request_id] for request in some if not request.failed]
        return [b for b in wanted if rules[b] == rule]

    def by_typical(some: Sequence[Request]) -> Tensor | None:
        typical = still("typical", some)
        return likely_nodes(tree, choices, typical) if typical else None

    def by_block(some: Sequence[Request]) -> dict[int, tuple[int, int]]:
        blocks = [b for b in still("block", some) if tree.is_chain_of(b)]
        return dict(zip(blocks, verify_blocks(requests, tree, choices, blocks), strict=True))

    also, verified = together(requests, by_typical), together(requests, by_block)
    last = accept(tree.token, tree.parent, tree.depth, tree.ancestors, tree.length, grid, also).tolist()
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
        laws_of(tree, choices, wanted),
        [tokens[b][1 : lengths[b]] for b in wanted],
        [tree.laws.get(b) for b in wanted],
        [requests[b].seed for b in wanted],
        [requests[b].computed for b in wanted],
    )


def likely_nodes(tree: DraftTree, choices: Choices, wanted: Sequence[int]) -> Tensor:
    """Return bool `[B, N]`: the nodes of the requests `wanted` that typical acceptance accepts."""
    asked = torch.zeros_like(tree.inside)
    asked[list(wanted)] = tree.inside[list(wanted)]
    number = asked.flatten().cumsum(0).view_as(tree.token) - 1  # index of a node's row among those of `wanted`
    asked[:, 0] = False
    above, laws = number.gather(1, tree.parent.clamp(min=0).long()), laws_of(tree, choices, wanted)
    found = torch.zeros_like(asked)
    found[asked] = likely(laws, above[asked].to(laws.device), tree.token[asked].to(laws.device)).cpu()
    return found


def laws_of(tree: DraftTree, choices: Choices, wanted: Sequence[int]) -> Tensor:
    """Return the target's warped probabilities `[R, V]` at every node of the requests `wanted` (ascending)."""
    inside = torch.zeros_like(tree.inside)
    inside[list(wanted)] = True
    rows = inside[tree.inside].nonzero()[:, 0].to(choices.shaped.device)
    return law(choices.shaped[rows], choices.parameters and choices.parameters.rows(rows)).softmax(-1)
