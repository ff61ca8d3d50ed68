"""Examples of what was served: how they are read from messages, which of them are kept, and batches of them."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from infer.config import LearningConfig
from infer.learning.messages import Message
from models.heads.config import HeadShape
from train.data.sequences import Batch, Sequences, best_fit
from train.features.online import Features, TopTokens

HELD_TOKENS = 200_000  # of the examples that are kept, if nothing else is configured
OTHER_BYTES = 200  # of a token besides its hidden states: the id, and the target's 32 likeliest tokens


class Example(NamedTuple):
    ids: Tensor  # int64 [T]
    states: Tensor  # [T, L, H], the target's hidden states of the head's L layers, ascending
    top_ids: Tensor  # integers [T, k], the target's likeliest tokens, in descending order
    top_log_probs: Tensor  # [T, k]; -inf where none was computed
    assistant: Tensor  # bool [T]: the target generated this token
    first: int  # position of ids[0] in its request
    temperature: float
    seed: int


TENSORS = Example._fields[:4]  # of a message


def read_example(message: Message, head: HeadShape) -> Example:
    """Return the example of a message. Raises ValueError for one that is not of this head and its target."""
    tensors, facts = message.tensors, message.facts
    name = f"example {facts.get('number', '')}".rstrip()
    if set(tensors) != set(TENSORS):
        raise ValueError(f"{name}: holds {', '.join(sorted(tensors))}; must hold {', '.join(TENSORS)}")
    try:
        prompt, seed, first = int(facts["prompt"]), int(facts["seed"]), int(facts.get("first", "0"))
        temperature = float(facts["temperature"])
    except (KeyError, ValueError) as error:
        raise ValueError(f"{name}: prompt, first, temperature and seed must be numbers ({error})") from error
    ids, states, top_ids, top_log_probs = (tensors[key] for key in TENSORS)
    sizes = len(ids), len(set(head.aux_layers)), head.target_hidden_size
    fits = {
        "ids": ids.dtype == torch.int64 and ids.ndim == 1 and inside(ids, head.vocab_size),
        "states": states.is_floating_point() and states.shape == sizes,
        "top_ids": top_ids.shape[:1] == ids.shape and top_ids.ndim == 2 and inside(top_ids, head.vocab_size),
        "top_log_probs": top_log_probs.is_floating_point() and top_log_probs.shape == (len(ids), *top_ids.shape[1:]),
        "prompt": 1 <= prompt <= len(ids),
        "first": first >= 0,
        "temperature": 0 <= temperature < math.inf,
        "seed": seed >= 0,
    }
    if wrong := [key for key, fit in fits.items() if not fit]:
        raise ValueError(f"{name}: {', '.join(wrong)}: not as of a request that was served with this head")
    assistant = torch.arange(len(ids)) >= prompt
    return Example(ids, states, top_ids, top_log_probs, assistant, first, temperature, seed)


def inside(ids: Tensor, size: int) -> bool:
    """Return whether all of them are token ids of a vocabulary of this size."""
    return not ids.is_floating_point() and bool(((ids >= 0) & (ids < size)).all())


def last_tokens(example: Example, most: int) -> Example:
    """Return an example of at most so many tokens: the last ones, since the response is at the end."""
    left = len(example.ids) - most
    return example if left <= 0 else part(example, slice(left, None))


def part(example: Example, span: slice) -> Example:
    """Return the tokens of `span` as an example, with copies of their tensors."""
    tensors = {name: getattr(example, name)[span].clone() for name in (*TENSORS, "assistant")}
    return example._replace(**tensors, first=example.first + span.start)


def teaches(assistant: Tensor) -> bool:
    """Return whether there is something to learn from tokens `[T]`: two that the target generated, after the first."""
    return int(assistant[1:].sum()) >= 2


def is_held_back(ids: Tensor, share: float) -> bool:
    """Return whether an example with these ids is only judged on, which depends on nothing else."""
    return int.from_bytes(hashlib.sha256(ids.numpy().tobytes()).digest()[:8], "little") < share * 2**64


class Buffer:
    """The newest examples, of at most `room` tokens together."""

    def __init__(self, room: int) -> None:
        self.examples, self.tokens, self.room = deque[Example](), 0, room

    def add(self, example: Example) -> None:
        self.examples.append(example)
        self.tokens += len(example.ids)
        while self.tokens > self.room:
            self.tokens -= len(self.examples.popleft().ids)

    def draw(self, most: int, generator: torch.Generator) -> list[Example]:
        """Return examples of at most `most` tokens, which none may exceed, drawn at random."""
        drawn, left = list[Example](), most
        for index in torch.randperm(len(self.examples), generator=generator).tolist():
            left -= len(self.examples[index].ids)
            if left < 0:
                break
            drawn.append(self.examples[index])
        return drawn


def rooms(config: LearningConfig, state_bytes: int) -> tuple[int, int]:
    """Return how many tokens are kept to train on, and how many more to judge on, at so many bytes of states each.

    A replay takes memory by its share: as many tokens more, of either kind, as are mixed in. Raises ValueError if all
    together take more memory than is configured.
    """
    share, size = config.held_back / (1 - config.held_back), state_bytes + OTHER_BYTES
    size *= config.batch_tokens / config.traffic_tokens
    fit = int(config.most_mb * 2**20 / (size * (1 + share)))
    tokens = min(HELD_TOKENS, fit) if config.buffer_tokens is None else config.buffer_tokens
    if tokens > fit:
        raise ValueError(
            f"learning.buffer_tokens={tokens}: takes {tokens * (1 + share) * size / 2**20:.0f} MB with this head, more "
            f"than learning.most_mb={config.most_mb}, which holds {fit}; change one of them"
        )
    if min(tokens, tokens * share) < config.batch_tokens:
        raise ValueError(
            f"learning.batch_tokens={config.batch_tokens}: is more than the {int(tokens * share)} tokens that are kept "
            f"to judge heads, of {tokens} to train on; raise learning.most_mb or lower learning.batch_tokens"
        )
    return tokens, int(tokens * share)


def batch_of(examples: Sequence[Example], aux_layers: Sequence[int], room: int = 0) -> tuple[Batch, Features]:
    """Return examples in rows of up to `room` tokens, or of the longest's, with a head's features and top tokens."""
    sequences = Sequences.joined([(example.ids, example.assistant) for example in examples])
    batch = sequences.packed(best_fit(lengths := sequences.lengths.tolist(), room or max(lengths)))
    likeliest = min(example.top_ids.shape[1] for example in examples)

    def placed(values: list[Tensor]) -> Tensor:
        whole = torch.cat(values)
        out = whole.new_zeros(*batch.ids.shape, *whole.shape[1:])
        for place, span in batch.spans(sequences.offsets):
            out[place] = whole[span]
        return out

    states = placed([example.states for example in examples])
    log_probs = placed([example.top_log_probs[:, :likeliest] for example in examples])
    ids = placed([example.top_ids[:, :likeliest] for example in examples])
    layers = sorted(set(aux_layers))
    aux = tuple(states[:, :, layers.index(layer)] for layer in aux_layers)
    return batch, Features(aux, states[:, :, 0, :0], TopTokens(log_probs.float(), ids.long()))
