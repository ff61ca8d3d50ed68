"""Selects the steps of an engine to capture as CUDA graphs, and captures them before the first request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from infer.config import EngineConfig
from infer.engine.runner import Runner
from infer.graphs.cuda_graph import Buckets, GraphMemory, doubling
from infer.graphs.draft_graphs import DraftGraphs
from infer.graphs.round_graphs import RoundGraphs
from infer.graphs.verify_graphs import VerifyGraphs
from infer.kvcache.memory import MIB
from infer.parallel.target_worker import Shard
from infer.speculation.budget import NOTHING, Budget, candidate_budgets
from infer.speculation.proposers.base import NoProposer, Proposer
from infer.speculation.proposers.combined import CombinedProposer
from infer.speculation.proposers.head import HeadProposer
from infer.speculation.tree import MAX_NODES
from kernels.triton import in_use


class Recorded(NamedTuple):
    count: int
    bytes: int  # of GPU memory, out of the planned workspace of a step
    rounds: tuple[RoundGraphs, ...]  # empty without overlap scheduling

    def __str__(self) -> str:
        ahead = ", rounds launched ahead" if self.rounds else ""
        return f"{self.count} graphs of decoding steps, {self.bytes / MIB:.0f} MiB{ahead}"


def wants_graphs(config: EngineConfig, shard: Shard) -> bool:
    if config.graphs == "off" or (config.graphs == "auto" and shard.device.type != "cuda"):
        return False
    reason = unsupported_reason(shard)
    if reason and config.graphs == "on":
        raise ValueError(f"engine.graphs=on: {reason}; engine.graphs=auto runs without")
    return reason is None


def unsupported_reason(shard: Shard) -> str | None:
    """Return why the target's steps cannot be captured; None if they can."""
    if shard.target.config.experts is not None:
        return "which experts this target runs is decided by the host"
    if shard.ranks > 1:
        return "the ranks of a divided target are led by the host"
    if shard.device.type == "cuda" and not in_use(shard.device):
        return "the torch forms of the kernels ask the host for sizes (HEADWAY_KERNELS)"
    if not has_kernel(shard, *shard.target.heads):
        return "attention of this target's sizes has no kernel"
    return None


def has_kernel(shard: Shard, num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    """Return whether attention of these sizes runs without the host reading sizes back from the device."""
    if shard.device.type != "cuda":
        return True
    from kernels.triton.attention import supported

    return supported(num_heads, num_kv_heads, head_dim, shard.dtype)


def record_graphs(
    config: EngineConfig,
    shard: Shard,
    runner: Runner,
    head: HeadProposer | None,
    default: tuple[Proposer, Budget],
    *,
    context: int,
    adaptive: bool,
) -> Recorded | None:
    """Capture verify steps, the drafts of `head` if the `default` proposer uses it, and whole rounds that need no host.

    Verify steps are captured for every row count that the `default` proposer may need. With `adaptive` a round may
    draft less than the budget in `default`, or nothing. Replaces earlier graphs. Returns None if graphs are not in
    use. Raises ValueError if engine.graphs=on or engine.rounds_ahead=1 is impossible.
    """
    runner.graphs = None  # frees the memory of earlier graphs
    if head is not None:
        head.graphs = None
    if not wants_graphs(config, shard):
        if config.rounds_ahead:
            raise ValueError("engine.rounds_ahead=1: rounds are graphs, and there are none; engine.graphs=on says why")
        return None
    proposer, limit = default
    sources = proposer.sources if isinstance(proposer, CombinedProposer) else (proposer,)
    used = head if head in sources else None
    trees = len(sources) > 1 or (used is not None and used.shape is not None)
    buckets = buckets_for(config, min(MAX_NODES, 1 + limit.nodes), min(context, config.graph_context))
    memory = GraphMemory(shard.device)
    verify = VerifyGraphs(shard, runner.pool, buckets, proposer.aux_layers, memory)
    work = verify.recordings(trees=trees)
    runner.graphs = verify
    if used is not None:
        part = used.module.attention
        if part is None or has_kernel(shard, part.num_heads, part.num_kv_heads, part.head_dim):
            used.graphs = DraftGraphs(used, runner.pool, buckets, limit.depth, memory)
            work += used.graphs.recordings()
    rounds = list[RoundGraphs]()
    if config.rounds_ahead == 1 or (config.rounds_ahead is None and shard.device.type == "cuda"):
        if drafted := budgets_ahead(proposer, limit, adaptive=adaptive):
            rounds.append(RoundGraphs(shard, runner.pool, used, buckets, drafted, memory))
        if adaptive or isinstance(proposer, NoProposer):
            rounds.append(RoundGraphs(shard, runner.pool, None, buckets, (NOTHING,), memory))
        work += [recording for part in rounds for recording in part.recordings()]
    return Recorded(len(work), memory.record(work, "decoding"), tuple(rounds))


def budgets_ahead(proposer: Proposer, limit: Budget, *, adaptive: bool) -> Sequence[Budget]:
    """Return the budgets to capture whole rounds for; empty if drafting needs the host."""
    if not isinstance(proposer, HeadProposer) or proposer.graphs is None:
        return ()
    return candidate_budgets(limit) if adaptive else (limit,)


def buckets_for(config: EngineConfig, widest: int, longest: int) -> Buckets:
    """Return the sizes to capture: `widest` rows per request in a verify, `longest` keys per row, at most.

    Raises ValueError if none of the configured sizes fits the limits.
    """
    batches = config.graph_batches or doubling(config.max_batch)
    rows = config.graph_rows or doubling(widest)
    buckets = Buckets(
        tuple(sorted({size for size in batches if size <= config.max_batch})),
        tuple(sorted({size for size in rows if size <= MAX_NODES})),
        config.max_rows,
        longest,
    )
    if not buckets.all():
        raise ValueError(
            f"engine.graph_batches={config.graph_batches}, engine.graph_rows={config.graph_rows}: none fit "
            f"engine.max_batch={config.max_batch} requests and engine.max_rows={config.max_rows} of {MAX_NODES} each"
        )
    return buckets
