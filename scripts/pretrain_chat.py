"""Trains a target on conversations from files, so that it responds in chat format and ends its responses.

    python scripts/inflate_demo.py --shape intermediate_size=1792 --dtype float32 outputs/grown     # 25.7 M parameters
    python scripts/pretrain_chat.py model=outputs/grown path=[gsm8k/train.jsonl.xz,sgd-dialogues/train.jsonl.xz] \\
        columns='{prompt: question, response: answer}' steps=500 export=outputs/chat_target
    python train/run.py model=outputs/chat_target head=eagle3 data=files data.path=...

`path` takes what data.path of training takes; rows are taken from the files in turn. Conversations that training holds
out (data.held_out_share, by hash) are not trained on here either; the held-out loss is measured on them. Conversations
are packed into rows of `sequence_length` tokens without attention across documents. Running the same command again
resumes; the target is exported to `export` at the end.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.environment  # noqa: F401

# isort: split

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import MISSING
from torch import Tensor

from infer.config_checks import resolve_path
from models.chat import TEMPLATE_FILE, TEMPLATE_FOLDER
from models.checks import at_least, one_of
from models.targets import load_target
from models.targets.llama import LlamaTarget
from models.targets.writing import save_target
from models.tokenizer import Tokenizer
from scripts.pretraining import LoopConfig, read_config, run_steps
from train.config import FilesDataConfig
from train.data.dialogue import provided_rows
from train.data.examples import Example
from train.data.prompts import Prompts, Reader
from train.data.sequences import Batch, Sequences, best_fit, rows_at
from train.features.online import target_features
from train.objectives import alignment
from train.storage import atomic

# Like the demo target's, but an assistant message ends with the EOS token, and texts are trimmed so that generated and
# provided messages are rendered alike.
CHAT_TEMPLATE = (
    "{% for message in messages %}# {{ message['role'] }}: {{ message['content'] | trim }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)
NOT_PREDICTED = -100  # ignore_index of cross_entropy


@dataclass
class ChatConfig(LoopConfig):
    model: str = "models/demo"  # what to start from
    path: Any = MISSING  # conversations: a file, folder or pattern, or a list of them
    columns: Any = None  # as data.columns of training
    num_sequences: int = 100_000  # at most this many conversations
    held_out_conversations: int = 96
    sequence_length: int = 512
    learn: str = "all"  # all tokens | answers
    steps: int = 500
    warmup: int = 20
    muon_lr: float = 0.01
    folder: str = "outputs/pretrain_chat"
    export: str = "outputs/chat_target"

    def __post_init__(self) -> None:
        one_of("learn", self.learn, ("all", "answers"))
        at_least("sequence_length", self.sequence_length, 4)
        at_least("num_sequences", self.num_sequences, 1)
        at_least("held_out_conversations", self.held_out_conversations, 1)
        if self.batch_tokens < self.sequence_length:
            raise ValueError(f"batch_tokens={self.batch_tokens}: less than sequence_length={self.sequence_length}")


def with_template(folder: Path) -> Tokenizer:
    """Return the folder's tokenizer with CHAT_TEMPLATE. Raises ValueError if it has no eos_token."""
    tokenizer = Tokenizer.load(folder)
    if "eos_token" not in tokenizer.special_tokens:
        raise ValueError(f"{folder}: its tokenizer_config.json names no eos_token, which is to end an answer")
    special = {"eos_ids": tokenizer.eos_ids, "special_tokens": tokenizer.special_tokens}
    return Tokenizer(tokenizer.backend, chat_template=CHAT_TEMPLATE, source=str(folder), **special)


def read_conversations(config: ChatConfig, tokenizer: Tokenizer, context: int) -> Prompts:
    settings = FilesDataConfig(
        name="files",
        path=config.path,
        columns=config.columns,
        num_sequences=config.num_sequences,
        responses="given",
        interleave=True,
    )
    return Reader(settings, tokenizer, context - 3, config.held_out_conversations).read()


def to_sequences(examples: Iterable[Example], tokenizer: Tokenizer, context: int, length: int) -> Sequences:
    """Return the examples that contain a response, tokenized and cut to `length` tokens."""
    rows = []
    for example in examples:
        try:
            rows += provided_rows(example, tokenizer, context - 3)
        except ValueError as error:  # a held-out conversation, of which only the prompt was checked before
            print(f"left out: {example.place}: {error}", file=sys.stderr)
    return Sequences.of(rows).cut(length)


def labels_of(batch: Batch, lengths: Tensor) -> Tensor:
    """Return the next token of every slot, `[B, T]`; `lengths` `[B]` are the rows' lengths without padding.

    The label is NOT_PREDICTED in the padding and where the next token begins another document.
    """
    predicted = torch.arange(batch.ids.shape[1]) < lengths[:, None] - 1
    if batch.starts is not None:
        predicted &= alignment.shift_left(batch.starts, 1) == batch.starts
    return alignment.shift_left(batch.ids, 1).masked_fill(~predicted, NOT_PREDICTED)


def answered(batch: Batch) -> Tensor:
    """Return bool `[B, T]`: whether a slot's next token belongs to an assistant message."""
    return alignment.shift_left(batch.assistant, 1)


def token_losses(model: LlamaTarget, batch: Batch, labels: Tensor) -> Tensor:
    """Return the losses in nats, `[B * T]`; 0 where the label is NOT_PREDICTED."""
    logits = model.logits(target_features(model, batch, ()).hidden)
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none", ignore_index=NOT_PREDICTED)


class Rows:
    """Sequences packed into rows, with the loss of a batch and of all rows."""

    def __init__(self, sequences: Sequences, config: ChatConfig) -> None:
        self.sequences, self.learn, self.seed = sequences, config.learn, config.seed
        self.packs = best_fit(sequences.lengths.tolist(), config.sequence_length)
        self.size = config.batch_tokens // config.sequence_length  # rows per batch

    def labelled(self, packs: list[list[int]]) -> tuple[Batch, Tensor]:
        batch = self.sequences.packed(packs)
        lengths = torch.stack([self.sequences.lengths[pack].sum() for pack in packs])
        return batch, labels_of(batch, lengths)

    def loss_at(self, model: LlamaTarget, step: int) -> Tensor:
        chosen = [self.packs[row] for row in rows_at(len(self.packs), step * self.size, self.size, self.seed)]
        batch, labels = self.labelled(chosen)
        if self.learn == "answers":
            labels = labels.masked_fill(~answered(batch), NOT_PREDICTED)
        return token_losses(model, batch, labels).sum() / (labels != NOT_PREDICTED).sum()

    @torch.no_grad()
    def nats(self, model: LlamaTarget) -> dict[str, float]:
        """Return the mean nats per token over all rows: of every token, and of those in assistant messages."""
        losses, masks = [], []
        for start in range(0, len(self.packs), self.size):
            batch, labels = self.labelled(self.packs[start : start + self.size])
            predicted = labels != NOT_PREDICTED
            losses.append(token_losses(model, batch, labels)[predicted.flatten()])
            masks.append(answered(batch)[predicted])
        all_losses, is_answer = torch.cat(losses), torch.cat(masks)
        return {"held_out": all_losses.mean().item(), "held_out_answers": all_losses[is_answer].mean().item()}


def export(model: LlamaTarget, folder: Path) -> None:
    """Export the model in bf16, in the layout it was read in, with CHAT_TEMPLATE; the folder is written atomically."""
    model.to(torch.bfloat16)
    with atomic.replace_folder(folder) as staging:
        save_target(model, staging)
        (staging / TEMPLATE_FILE).write_text(CHAT_TEMPLATE, encoding="utf-8")  # overrides tokenizer_config.json
        shutil.rmtree(staging / TEMPLATE_FOLDER, ignore_errors=True)  # the model was trained on CHAT_TEMPLATE only


def train(config: ChatConfig) -> dict[str, Any] | None:
    """Train and export the target; return a summary, or None when stopped.

    Raises ValueError for data and models that cannot be used.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    model = load_target(str(resolve_path(config.model)))
    context, length = model.config.max_position_embeddings, config.sequence_length
    if length > context:
        raise ValueError(f"sequence_length={length}: longer than the model's context of {context}")
    tokenizer = with_template(model.folder)
    data = read_conversations(config, tokenizer, context)
    print("\n".join(data.reading.lines()))
    training = Rows(to_sequences(data.train.values(), tokenizer, context, length), config)
    held_out = Rows(to_sequences(data.held_out_conversations.values(), tokenizer, context, length), config)
    if not held_out.packs:
        raise ValueError(f"path={config.path}: no held-out conversation has an answer; raise held_out_conversations")
    parameters = sum(p.numel() for p in model.parameters())
    tokens = int(training.sequences.offsets[-1])
    print(
        f"{parameters / 1e6:.2f} M parameters; {len(training.sequences)} conversations, {tokens / 1e6:.2f} M tokens, "
        f"{100 * training.sequences.assistant.float().mean():.0f} % of them answers, in {len(training.packs)} rows; "
        f"{int(held_out.sequences.offsets[-1])} tokens held out"
    )
    before = held_out.nats(model)
    print(f"before: {before['held_out']:.3f} nats per held-out token, of answers {before['held_out_answers']:.3f}")
    model.train().requires_grad_(True)
    train_loss = run_steps(config, model, lambda step: training.loss_at(model, step), lambda: held_out.nats(model))
    if train_loss is None:
        return None
    export(model, resolve_path(config.export))
    after = held_out.nats(model.float())  # of the exported bf16 weights
    measured = {"before": before, "after": after, "train": train_loss}
    tokens_seen = config.steps * training.size * tokens / len(training.packs)
    return {"steps": config.steps, "tokens": round(tokens_seen), "parameters": parameters, "nats": measured}


def main(argv: list[str]) -> None:
    config = read_config(ChatConfig, argv, __doc__)
    try:
        result = train(config)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    if result is not None:
        print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
