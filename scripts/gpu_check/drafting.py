"""Steps of drafting: walks over a lattice, convolutions with two taps and early exits, against float64, and times."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kernels.convolution import INPUT, OUTPUT, two_taps
from kernels.early_exit import FIELDS, Drafting, exit_level
from kernels.walk import Lattice, Transition, make_lattice, walk_chain
from scripts.gpu_check.measure import Item, close, same, timed
from scripts.gpu_check.plan import BF16, RANKS, KernelCheck

BOUND = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2}
LEAST = 1e-6  # how far from 0 and 1 the probability of a token is taken to be


def checks(device: torch.device) -> Iterator[KernelCheck]:
    on_gpu = device.type == "cuda"
    dtypes = (torch.bfloat16, torch.float32) if on_gpu else (torch.float32,)
    for dtype in dtypes:
        rank = RANKS[dtype] if on_gpu else BF16
        yield KernelCheck("correctness", f"walk, {dtype}", 2, rank, partial(compare_walks, dtype, device))
        yield KernelCheck("correctness", f"two taps, {dtype}", 2, rank, partial(compare_taps, dtype, device))
    yield KernelCheck("correctness", "early exit", 1, BF16, partial(compare_exits, device))
    dtype = dtypes[0]
    yield KernelCheck("timings", "steps of drafting", 3, BF16, partial(time, dtype, device))


def lattice_case(
    batch: int, slots: int, size: int, rank: int, dtype: torch.dtype, device: torch.device
) -> tuple[Lattice, Transition, Tensor, Tensor]:
    """Return a lattice of 8 candidates, a transition, the tokens before the blocks, and positions."""
    generator = torch.Generator().manual_seed(size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    positions = torch.arange(batch, device=device) + 100
    lattice = make_lattice(3 * normal(batch, slots, size), None, positions, torch.arange(size, device=device), 8)
    transition = Transition(normal(size, rank) * rank**-0.5, normal(size, rank), normal(batch, slots, rank))
    return lattice, transition, torch.arange(batch, device=device) % size, positions


def walked(lattice: Lattice, transition: Transition, before: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens and log-probabilities of greedy chains, in float64 on the CPU."""
    column, token, logit = (part.cpu() for part in lattice)
    successor, predecessor, factor = (part.double().cpu() for part in transition if part is not None)
    chosen, values, last = list[Tensor](), list[Tensor](), before.cpu()
    for slot in range(column.shape[1]):
        query = predecessor[last] * factor[:, slot]
        scores = logit[:, slot].double() + (successor[column[:, slot]] @ query[..., None]).squeeze(-1)
        best = scores.argmax(-1, keepdim=True)
        last = token[:, slot].gather(1, best)[:, 0]
        chosen.append(last)
        values.append(scores.log_softmax(-1).gather(1, best)[:, 0])
    return torch.stack(chosen, 1), torch.stack(values, 1)


@torch.no_grad()
def compare_walks(dtype: torch.dtype, device: torch.device) -> Iterator[Item]:
    sizes = ((1, 7, 32000, 64), (32, 15, 8000, 256)) if device.type == "cuda" else ((3, 4, 90, 16),)
    for batch, slots, size, rank in sizes:
        lattice, transition, before, positions = lattice_case(batch, slots, size, rank, dtype, device)
        tokens, values = walk_chain(lattice, transition, before, None, positions)
        case = f"{batch} chains of {slots}, {size} tokens, rank {rank}, {dtype}"
        true = partial(walked, lattice, transition, before)
        if dtype == torch.float32:  # products of rounded factors may rank two candidates otherwise
            yield same("walk", case, tokens, lambda true=true: true()[0])
            yield close("walk, log-probabilities", case, values, lambda true=true: true()[1], 1e-4)
        else:
            agree = (tokens.cpu() == true()[0]).double().mean()
            yield close("walk", f"share of tokens, {case}", agree, torch.ones(()), 0.05)


@torch.no_grad()
def compare_taps(dtype: torch.dtype, device: torch.device) -> Iterator[Item]:
    hidden, rows, blocks, group = (4096, 8, 5, 16) if device.type == "cuda" else (96, 5, 2, 16)
    z, base, deltas = taps_case(hidden, rows, blocks, group, dtype, device)
    for side in (INPUT, OUTPUT):
        wide = z.double().view(blocks, rows, hidden)
        kernels = base[side].double() + deltas.double().unflatten(1, (2, 2, -1))[:, side].repeat_interleave(group, -1)
        kernels = kernels.view(blocks, rows, 2, hidden)
        before = torch.cat([torch.zeros_like(wide[:, :1]), wide[:, :-1]], dim=1)
        true = (kernels[:, :, 0] * wide + kernels[:, :, 1] * before).view(z.shape)
        case = f"{blocks} blocks of {rows}, {hidden} channels in groups of {group}, side {side}, {dtype}"
        yield close("two taps", case, two_taps(z, base, deltas, side, rows), true, BOUND[dtype])


def taps_case(
    hidden: int, rows: int, blocks: int, group: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (blocks * rows, hidden), (2, 2, hidden), (blocks * rows, 4 * hidden // group)
    z, base, deltas = (torch.randn(*shape, generator=generator).to(dtype).to(device) for shape in shapes)
    return z, base, deltas


def exit_case(batch: int, depth: int, device: torch.device) -> tuple[Drafting, Tensor, Tensor, Tensor]:
    """Return chains, terms, depths and log-probabilities; every fifth chain is not scored."""
    generator = torch.Generator().manual_seed(batch)
    terms = torch.rand(batch, FIELDS + 2 * depth, generator=generator)
    terms[:, 1:FIELDS] *= 0.05  # prices
    terms[::5] = torch.tensor([0.0, 0.0, 0.0, 0.0, *[torch.inf] * (2 * depth)])
    depths = torch.randint(1, depth + 1, (batch,), generator=generator)
    log_probs = torch.rand(batch, generator=generator).log()
    return Drafting.begin(depths.to(device)), terms.to(device), depths.to(device), log_probs.to(device)


def exited(chains: Drafting, terms: Tensor, depths: Tensor, log_probs: Tensor, level: int) -> Drafting:
    """Return the chains after the level, in float64 on the CPU."""
    active, length, chance = (part.cpu() for part in chains)
    wide, depth = terms.double().cpu(), (terms.shape[1] - FIELDS) // 2
    slope, row, step, level_price = wide[:, :FIELDS].T
    offset, following = wide[:, FIELDS + level], wide[:, FIELDS + depth + level]
    confidence = log_probs.double().cpu().exp().clamp(LEAST, 1 - LEAST).logit()
    chance = chance.double() * (offset + slope * confidence).sigmoid()
    keep = active if level == 0 else active & (chance >= row)
    gain = torch.where(keep, chance * following - row - step, 0.0).clamp(min=0.0)
    return Drafting((gain > 0) & (gain.sum() >= level_price) & (depths.cpu() > level + 1), length + keep, chance)


def compare_exits(device: torch.device) -> Iterator[Item]:
    batch, depth = (64, 6) if device.type == "cuda" else (7, 3)
    chains, terms, depths, log_probs = exit_case(batch, depth, device)
    for level in range(depth):
        case, true = f"{batch} chains, level {level}", exited(chains, terms, depths, log_probs, level)
        chains = exit_level(chains, terms, depths, log_probs, level, LEAST)
        yield same("early exit, chains that go on", case, chains.active, true.active)
        yield same("early exit, lengths", case, chains.length, true.length)
        yield close("early exit, chances", case, chains.chance, true.chance, 1e-5)


@torch.no_grad()
def time(dtype: torch.dtype, device: torch.device) -> Iterator[Item]:
    on_gpu = device.type == "cuda"
    for batch in (1, 32) if on_gpu else (2,):
        slots, size, rank = (15, 32000, 256) if on_gpu else (3, 60, 8)
        lattice, transition, before, positions = lattice_case(batch, slots, size, rank, dtype, device)
        moved = batch * slots * 10 * rank * dtype.itemsize
        case = f"{batch} chains of {slots}, rank {rank}, {dtype}"
        yield timed("walk", case, device, moved, walk_chain, lattice, transition, before, None, positions)
        hidden, rows, group = (4096, 16, 16) if on_gpu else (96, 5, 16)
        z, base, deltas = taps_case(hidden, rows, batch, group, dtype, device)
        moved = (2 * z.numel() + deltas.numel()) * dtype.itemsize
        yield timed("two taps", f"{batch} blocks of {rows}, {dtype}", device, moved, two_taps, z, base, deltas, 0, rows)
        chains = exit_case(batch, 5, device)
        moved = chains[1].numel() * 4
        yield timed("early exit", f"{batch} chains", device, moved, exit_level, *chains, 1, LEAST)
