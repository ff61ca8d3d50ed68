"""What training computes is what serving computes: the training-time-test form equals cached chain decoding."""

from __future__ import annotations

import pytest
import torch

from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.request import SamplingParams
from models.attention import CausalAttention
from models.heads.eagle3 import Eagle3Config, Eagle3Head
from models.targets import load_target
from models.vocab import build_draft_vocab
from train.objectives.ttt import draft_states

STEPS = 5
FLAGS = {
    "default": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "eagle-3.1": {"fc_norm": True, "norm_output": True},
    "two layers": {"num_layers": 2},
}


@pytest.mark.parametrize("variant", FLAGS)
def test_trainer_logits_equal_the_engines(tiny_target_folder, variant):
    target = load_target(str(tiny_target_folder))
    flags = dict(FLAGS[variant])
    config = Eagle3Config.for_target(target.config, draft_vocab_size=200, **flags)
    head = Eagle3Head(config)
    head.set_vocabulary(*build_draft_vocab(torch.arange(384) % 11, 200, [0]))
    head.initialise(target, from_target=variant != "two layers", seed=4)
    generator = torch.Generator().manual_seed(9)
    prompt = torch.randint(1, 384, (37,), generator=generator).tolist()

    drafting = ProposerConfig(name="head", max_draft_tokens=STEPS)
    small = EngineConfig(prefill_chunk=16, max_rows=64)
    engine = Engine(target, head=head, proposer="none", config=small, proposer_config=drafting)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    sequence = prompt + engine.generate([prompt], params)[0].token_ids

    # The engine drafts what we say: round r is right for r % (K + 1) tokens and wrong after, so every length of
    # accepted run occurs, and the head's cache is overwritten after every kind of rejection.
    engine.set_proposer("head")
    proposer = engine._head
    seen: list[tuple[int, int, torch.Tensor]] = []  # slot of the round's first draft, depth, logits
    rounds = 0

    def forced_choice(state, slots, parameters):
        nonlocal rounds
        (slot,) = slots
        if not seen or slot != seen[-1][0] + seen[-1][1] + 1 or seen[-1][1] == STEPS - 1:
            rounds += 1
            seen.append((slot, 0, proposer._head.logits(state)[0].clone()))
        else:
            seen.append((seen[-1][0], seen[-1][1] + 1, proposer._head.logits(state)[0].clone()))
        depth = seen[-1][1]
        right = sequence[slot + 2]
        return torch.tensor([right if depth < rounds % (STEPS + 1) else (right + 1) % 384])

    proposer._choose = forced_choice
    (completion,) = engine.generate([prompt], params)
    assert prompt + completion.token_ids == sequence

    ids = torch.tensor([sequence])
    with torch.no_grad():
        aux = target(ids, torch.arange(len(sequence))[None], CausalAttention(), aux_layers=config.aux_layers).aux
        trained = [head.logits(state)[0] for state in draft_states(head, ids, aux, STEPS)]
    compared, rounds = [0] * STEPS, 0
    for first, depth, logits in seen:
        rounds += depth == 0
        if depth <= rounds % (STEPS + 1):  # what was drafted before it equals the forced tokens of training
            expected = trained[depth][first]
            assert (logits - expected).abs().max() / expected.abs().max() < 1e-5, f"slot {first}, step {depth}"
            compared[depth] += 1
    assert min(compared) > 0, f"depths compared: {compared}"
