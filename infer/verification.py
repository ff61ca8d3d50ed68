"""Which drafted tokens are accepted, request by request: by the exact rule, or by the one that a request asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infer import lossy
from infer.choosing import Choices
from infer.lossy import Verdict
from infer.request import Request
from infer.tree import DraftTree
from kernels.choose import law
from kernels.verify import accept


def rule_for(request: Request, proposer: str) -> str:
    """The rule that is in force: where nothing is sampled, all but synthetic acceptance are the exact one."""
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
    """One verdict per request. `rates`: of synthetic acceptance."""
    lengths = tree.length.tolist()
    grid = choices.token.new_full(tree.token.shape, -1)
    grid[tree.inside.to(grid.device)] = choices.token
    grid = grid.cpu()
    last = accept(tree.token, tree.parent, tree.depth, tree.ancestors, tree.length, grid).tolist()
    chosen, verdicts, first = grid.tolist(), [], 0
    for b, (request, rule) in enumerate(zip(requests, rules, strict=True)):
        count, root = lengths[b], request.computed
        if rule == "synthetic":
            verdicts.append(lossy.synthetic(rates, count - 1, chosen[b], request.seed, root))
        elif rule == "exact" or (rule == "block" and not tree.is_chain_of(b)):
            path = list(range(last[b] + 1)) if tree.is_chain else tree.path(b, last[b])
            verdicts.append(Verdict(path, chosen[b][last[b]]))
        else:
            tokens, parents = tree.token[b, :count].tolist(), tree.parent[b, :count].tolist()
            rows = torch.arange(first, first + count, device=choices.shaped.device)
            probabilities = law(choices.shaped[rows], choices.parameters and choices.parameters.rows(rows)).softmax(-1)
            if rule == "block":
                drawn = tree.laws.get(b)
                verdicts.append(lossy.block(probabilities.cpu(), drawn, tokens[1:], request.seed, root))
            else:
                verdicts.append(lossy.typical(probabilities.cpu(), tokens, parents, chosen[b]))
        first += count
    return verdicts
