"""Training and serving compute the same logits, step by step, for every head and flag, in fp32.

Training runs all slots in parallel and teacher-forces the tokens; the engine keeps a KV cache, drafts chains, and
overwrites what it wrote when a draft is rejected.
"""

from __future__ import annotations

import pytest
import torch

from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.request import SamplingParams
from infer.speculation.proposers.draft_loops import block
from infer.speculation.proposers.draft_loops.base import RecurrentLoop
from kernels import walk
from kernels.walk import rank_candidates
from models.attention import CausalAttention
from models.heads.base import RecurrentHead
from models.heads.block import BlockHead, Corrector
from models.heads.files import load_head, save_head
from models.targets import load_target
from tests.heads import VARIANTS, make_head
from tests.lossless.test_family_modules import FAMILIES
from tests.train.conftest import write_family
from train.objectives.draft_states import draft_states

STEPS = 5


@pytest.mark.parametrize(
    ("variant", "family"), [*((name, None) for name in VARIANTS), *(("mtp", name) for name in FAMILIES)]
)
def test_trainer_logits_equal_the_engines(tiny_target_folder, tmp_path, variant, family, monkeypatch):
    """`family`: of the target, whose kind of layer the modules have."""
    folder, options = tiny_target_folder, {}
    if family is not None:
        kind, sizes, modules = FAMILIES[family]
        folder, options = write_family(kind, tmp_path / "target", **sizes), {"num_modules": modules}
    target = load_target(str(folder))
    head = make_head(target, variant, **options)
    steps = min(STEPS, head.config.max_depth or STEPS)
    provenance = {"target_fingerprint": target.fingerprint}
    architecture = target.config.architecture
    metadata = {"verifier": target.path, "verifier_architecture": architecture, "speculative_tokens": steps}
    (tmp_path / "head").mkdir()
    save_head(head, tmp_path / "head", provenance=provenance, **metadata)
    generator = torch.Generator().manual_seed(9)
    prompt = torch.randint(1, 384, (37,), generator=generator).tolist()

    proposer_config = ProposerConfig(name="head", max_draft_tokens=steps)
    engine_config = EngineConfig(prefill_chunk=16, max_rows=64)
    served_head = load_head(tmp_path / "head", name=head.config.name, target=target)
    engine = Engine(target, head=served_head, proposer="none", config=engine_config, proposer_config=proposer_config)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    sequence = prompt + engine.generate([prompt], params)[0].token_ids

    # The test sets the drafted tokens: round r is right for r % (K + 1) tokens and wrong after, so every accepted
    # length occurs, and the head's KV is overwritten after every kind of rejection.
    engine.set_proposer("head")
    proposer = engine._head
    rounds: list[tuple[int, list[torch.Tensor]]] = []  # slot of the first draft, logits by depth
    real_propose = proposer.propose

    def propose(requests, *rest):
        rounds.append((len(requests[0].tokens) - 2, []))
        return real_propose(requests, *rest)

    def forced_token(position, logits):
        first, seen = rounds[-1]
        assert position == first + len(seen) + 1
        right = sequence[position + 1]
        token = right if len(seen) < len(rounds) % (steps + 1) else (right + 1) % 384
        seen.append(logits)
        return token

    def forced_choice(logits, positions, parameters):
        pairs = zip(positions.tolist(), logits.clone(), strict=True)
        return torch.tensor([forced_token(position, row) for position, row in pairs])

    def forced_rank(lattice, slot, transition, query, parameters, positions, count):
        every = lattice.column.shape[-1]
        tokens, values = rank_candidates(lattice, slot, transition, query, parameters, positions, every)
        column = torch.searchsorted(served_head.target_ids, tokens[0, 0])
        logits = torch.full((len(served_head.target_ids),), -torch.inf).scatter(0, column, values[0, 0])
        return torch.tensor([[[forced_token(int(positions), logits)]]]), values[..., :1]

    proposer.propose, proposer.loop.choice = propose, forced_choice
    for module in (walk, block):
        monkeypatch.setattr(module, "rank_candidates", forced_rank)
    monkeypatch.setattr(walk, "fused_walk", lambda *parts: None)  # which would choose the tokens itself
    if isinstance(proposer.loop, RecurrentLoop):
        proposer.loop.native = None  # which would choose the tokens itself; its drafts are the same (test_levels.py)
    (completion,) = engine.generate([prompt], params)
    assert prompt + completion.token_ids == sequence

    ids = torch.tensor([sequence])
    with torch.no_grad():
        positions = torch.arange(len(sequence))[None]
        aux = target(ids, positions, CausalAttention(), aux_layers=head.config.aux_layers).aux
        states = draft_states(head, ids, aux, steps)
        trained = [head.logits(state, depth)[0] for depth, state in enumerate(states)]
    compared = [0] * steps
    corrector = head.corrector if isinstance(head, BlockHead) else Corrector()
    corrects = corrector.num_candidates(1) is not None
    for number, (first, seen) in enumerate(rounds, start=1):
        for depth, logits in enumerate(seen):
            # the tokens drafted before it must equal the forced tokens of training, unless the head never reads them
            if depth <= number % (steps + 1) or not (isinstance(head, RecurrentHead) or corrects):
                expected, ruled_out = trained[depth][first], logits == -torch.inf
                if corrects:  # log-probabilities among the candidates
                    if corrector.num_candidates(1) == 1:  # as many as are configured
                        expected = expected.masked_fill(ruled_out, -torch.inf)
                    assert torch.equal(ruled_out, expected == -torch.inf)
                    expected, logits = expected.log_softmax(-1), logits.log_softmax(-1)
                expected, logits = expected[~ruled_out], logits[~ruled_out]
                assert (logits - expected).abs().max() / expected.abs().max() < 1e-5, f"slot {first}, step {depth}"
                compared[depth] += 1
    assert min(compared) > 0, f"depths compared: {compared}"
