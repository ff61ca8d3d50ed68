"""Trains the demo target, a small, deep Llama, on the running Python's standard library and exports it to models/demo/.

    python scripts/pretrain_demo.py                      # resumes outputs/pretrain_demo if it is there
    python scripts/pretrain_demo.py steps=40 folder=/somewhere export=/somewhere/demo

The learning rate is constant after a warm-up and then cools down linearly; the last steps use the full context. Until
the cool-down begins the trajectory does not depend on `steps`, so a stopped run can be resumed with another length.
Muon trains the matrices, AdamW embedding and norms (both from torch.optim). `compile=true` needs a C++ compiler and is
a fifth faster.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.options.environment  # noqa: F401

# isort: split

import json
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import tqdm

from infer.config import ModelConfig
from infer.engine import Engine
from infer.options.literal_text import literal_overrides
from infer.options.paths import resolve_path
from infer.request import SamplingParams
from models.attention import CausalAttention
from models.config import TargetConfig
from models.demo.corpus import Split, corpus_hash, read_split
from models.targets import load_target
from models.targets.llama import LlamaTarget
from models.targets.writing import save_target
from train.checkpoint import (
    Trained,
    gather_trained,
    latest_checkpoint,
    load_checkpoint,
    load_trained,
    module_tensors,
    save_checkpoint,
)
from train.signals import StopRequest

Optimizers = Sequence[torch.optim.Optimizer]
RECENT = 100  # steps over which the printed training loss is averaged
END = "<|endoftext|>"
# Renders messages as Python comments, which this base model has seen in training. The demo is no chat model; the
# template makes /v1/chat/completions usable with it.
CHAT_TEMPLATE = (
    "{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)


@dataclass
class PretrainConfig:
    layers: int = 16
    hidden_size: int = 256
    intermediate_size: int = 640
    heads: int = 4
    kv_heads: int = 2
    vocab_size: int = 2048
    context: int = 1024
    short_context: int = 256  # used before the last `long_share` of steps; later positions take a few hundred steps
    long_share: float = 0.15  # share of the steps
    batch_tokens: int = 4096
    steps: int = 1760
    warmup: int = 60
    cooldown: float = 0.4  # share of the steps
    muon_lr: float = 0.02
    adam_lr: float = 0.003
    weight_decay: float = 0.02
    seed: int = 0
    eval_tokens: int = 32768
    eval_every: int = 200
    checkpoint_every: int = 100
    threads: int = 0  # 0 = torch's default
    compile: bool = False
    folder: str = "outputs/pretrain_demo"  # checkpoints and metrics.jsonl
    export: str = "models/demo"


FREE_ON_RESUME = {
    "steps", "cooldown", "long_share", "eval_every", "checkpoint_every", "threads", "compile", "folder", "export",
}  # fmt: skip


def read_config(argv: Sequence[str]) -> PretrainConfig:
    """Parse key=value arguments; -h prints the keys. Raises SystemExit with a message that names the key."""
    structured = OmegaConf.structured(PretrainConfig)
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        print("Options, key=value:\n" + OmegaConf.to_yaml(structured))
        raise SystemExit(0)
    try:
        overrides = OmegaConf.from_dotlist(literal_overrides(argv, PretrainConfig))
        return OmegaConf.to_object(OmegaConf.merge(structured, overrides))  # type: ignore[return-value]
    except (OmegaConfBaseException, ValueError) as error:
        raise SystemExit(f"error: {error}\nkeys: {', '.join(structured)}") from error


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer on the training files; id 0 is END, which separates documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in read_split("train")), trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, split: Split) -> Tensor:
    ids: list[int] = []
    for encoding in tokenizer.encode_batch([document.text for document in read_split(split)]):
        ids += [0, *encoding.ids]
    return torch.tensor(ids)


def hf_config(config: PretrainConfig) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.hidden_size // config.heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": config.context,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }


def initialise(model: LlamaTarget, layers: int) -> None:
    """Initialise matrices from Normal(0, 0.02); projections into the residual stream are scaled by 1 / sqrt(2 · layers)
    (GPT-2).
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)


def sample_batch(stream: Tensor, step: int, config: PretrainConfig) -> Tensor:
    """Return windows `[B, T + 1]` at offsets that depend only on (seed, step), so resuming needs no sampler state."""
    length = config.context if step >= (1 - config.long_share) * config.steps else config.short_context
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    starts = torch.randint(0, len(stream) - length, (config.batch_tokens // length, 1), generator=generator)
    return stream[starts + torch.arange(length + 1)]


def token_losses(model: LlamaTarget, ids: Tensor) -> Tensor:
    positions = torch.arange(ids.shape[1] - 1).expand(ids.shape[0], -1)
    hidden = model(ids[:, :-1], positions, CausalAttention()).hidden
    return F.cross_entropy(model.logits(hidden).float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")


@torch.no_grad()
def held_out_loss(model: LlamaTarget, stream: Tensor, tokens: int, context: int) -> float:
    """Return the mean nats per token over `tokens` held-out tokens in windows spread evenly over the stream."""
    count = max(1, min(tokens, len(stream) - 1) // context)
    starts = torch.linspace(0, len(stream) - context - 1, count).long()[:, None]
    losses = [token_losses(model, stream[rows + torch.arange(context + 1)]) for rows in starts.split(4)]
    return torch.cat(losses).mean().item()


def make_optimizers(model: LlamaTarget, config: PretrainConfig) -> list[torch.optim.Optimizer]:
    inner = [(p.ndim == 2 and not n.startswith(("embed_tokens", "lm_head")), p) for n, p in model.named_parameters()]
    matrices, others = ([p for is_matrix, p in inner if is_matrix == wanted] for wanted in (True, False))
    muon = torch.optim.Muon(matrices, lr=config.muon_lr, weight_decay=config.weight_decay)
    adamw = torch.optim.AdamW(others, lr=config.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adamw]


def learning_rate_factor(step: int, config: PretrainConfig) -> float:
    if step < config.warmup:
        return (step + 1) / config.warmup
    return min(1.0, (config.steps - step) / max(1, config.cooldown * config.steps))


def resume(path: Path, model: LlamaTarget, optimizers: Optimizers, config: PretrainConfig) -> int:
    """Load model and optimisers and return the checkpoint's step.

    Raises SystemExit if a key outside FREE_ON_RESUME differs from the checkpoint's configuration.
    """
    checkpoint = load_checkpoint(path, module_tensors(model))
    saved = checkpoint.state["config"]
    for key, value in asdict(config).items():
        if key not in FREE_ON_RESUME and saved.get(key) != value:
            raise SystemExit(f"error: {key}={value} but {path} was made with {saved.get(key)}; use another folder=")
    load_trained(model, optimizers, checkpoint.trained)
    return checkpoint.state["step"]


def pretrain(config: PretrainConfig, model: LlamaTarget, train_stream: Tensor, held_out: Tensor) -> float | None:
    """Train to config.steps, resuming from the folder's checkpoint if there is one.

    SIGTERM and SIGINT stop the loop after writing a checkpoint, a second one at once. Returns the mean training loss of
    the last RECENT steps, or None when stopped.
    """
    folder, losses_of = resolve_path(config.folder), torch.compile(token_losses) if config.compile else token_losses
    optimizers, checkpoints, step = make_optimizers(model, config), folder / "checkpoints", 0
    peak = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    if (latest := latest_checkpoint(checkpoints)) is not None:
        step = resume(latest, model, optimizers, config)
        print(f"resuming {latest}")
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    recent: list[float] = []
    bar = tqdm(total=config.steps, initial=step, unit="step", dynamic_ncols=True)
    with StopRequest() as stop, (folder / "metrics.jsonl").open("a") as log:
        while step < config.steps and not stop.requested:
            started = time.perf_counter()
            factor = learning_rate_factor(step, config)
            for group, rate in zip(groups, peak, strict=True):
                group["lr"] = rate * factor
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = losses_of(model, sample_batch(train_stream, step, config)).mean()
            loss.backward()
            if not torch.isfinite(loss):
                raise SystemExit(f"error: the loss is {loss.item()} at step {step}; the last checkpoint is kept")
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            recent = [*recent[1 - RECENT :], loss.item()]
            row = {"step": step, "loss": recent[-1], "lr": factor, "seconds": time.perf_counter() - started}
            if step % config.eval_every == 0 or step == config.steps:
                row["held_out"] = held_out_loss(model, held_out, config.eval_tokens, config.short_context)
                bar.write(f"step {step}: train {sum(recent) / len(recent):.3f}, held-out {row['held_out']:.3f} nats")
            log.write(json.dumps(row) + "\n")
            log.flush()
            bar.set_postfix(loss=f"{sum(recent) / len(recent):.3f}", tokens_s=int(config.batch_tokens / row["seconds"]))
            bar.update()
            if step % config.checkpoint_every == 0 or step == config.steps or stop.requested:
                trained = Trained(module_tensors(model), gather_trained(model, optimizers).optimizer)
                save_checkpoint(checkpoints, step, trained, {"config": asdict(config)}, keep=1)
    bar.close()
    if step < config.steps:
        print(f"stopped at step {step}; the same command goes on")
        return None
    return sum(recent) / len(recent) if recent else float("nan")


PROMPTS = ("    def __init__(self, ", "class Error(Exception):\n", "import os\nimport sys\n")
CARD = """# The demo target

A Llama-architecture model of {parameters:.1f} M parameters ({layers} layers of width {hidden_size}, {heads} query and
{kv_heads} KV heads, vocabulary {vocab_size}, context {context}, tied embeddings, bf16), made by
`scripts/pretrain_demo.py` from the standard library of Python {python}, split into train and held-out by file.
It exists so that everything in this repository runs on real text without a download; it is no assistant.

| | |
|---|---|
| held-out loss | {nats:.3f} nats per token, **{bpb:.3f} bits per byte** |
| training loss (last 100 steps) | {train:.3f} nats per token |
| steps, tokens | {steps}, {tokens:.1f} M |
| corpus hash | `{corpus}` (seed {seed}) |
| torch | {torch} |

Greedy completions of held-out prompts:

{completions}

Licence: the training text is CPython's standard library (PSF licence).
"""


def begin(folder: Path, config: PretrainConfig) -> LlamaTarget:
    """Return a fresh target whose checkpoint folder, without weights, is `folder`, where its tokenizer already is."""
    specials = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "model_max_length": config.context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "config.json").write_text(json.dumps(hf_config(config), indent=2) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(specials, indent=2) + "\n")
    model = LlamaTarget(TargetConfig.from_json(hf_config(config)))
    model.folder = folder
    initialise(model, config.layers)
    return model


def export(model: LlamaTarget, config: PretrainConfig, train_loss: float, stream: Tensor) -> dict[str, float]:
    """Write the target in bf16 and its card, whose numbers are measured on what was written."""
    folder = resolve_path(config.export)
    folder.mkdir(parents=True, exist_ok=True)
    save_target(model.to(torch.bfloat16), folder)
    nats = held_out_loss(load_target(str(folder)), stream, len(stream), config.context)
    text_bytes = sum(len(document.text.encode()) for document in read_split("held_out"))
    bpb = nats * len(stream) / text_bytes / math.log(2)
    params = SamplingParams(max_tokens=min(72, config.context // 2))
    completions = Engine.load(ModelConfig(name="demo", path=str(folder))).generate(PROMPTS, params)
    pairs = zip(PROMPTS, completions, strict=True)
    card = CARD.format(
        **asdict(config),
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        python=platform.python_version(),
        nats=nats,
        bpb=bpb,
        train=train_loss,
        tokens=config.steps * config.batch_tokens / 1e6,
        corpus=corpus_hash(),
        torch=torch.__version__,
        completions="\n".join(f"```text\n{prompt}{completion.text}\n```" for prompt, completion in pairs),
    )
    (folder / "README.md").write_text(card)
    return {"held_out_nats": nats, "bits_per_byte": bpb}


def main(argv: list[str]) -> None:
    config = read_config(argv)
    if config.threads:
        torch.set_num_threads(config.threads)
    folder = resolve_path(config.folder)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(config.seed)
    tokenizer_file = folder / "tokenizer.json"
    if not tokenizer_file.exists():
        train_tokenizer(config.vocab_size).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    train_stream, held_out = token_stream(tokenizer, "train"), token_stream(tokenizer, "held_out")
    model = begin(folder, config)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters, {len(train_stream) / 1e6:.2f} M tokens")
    train_loss = pretrain(config, model, train_stream, held_out)
    if train_loss is not None:
        print(json.dumps({"steps": config.steps, **export(model, config, train_loss, held_out)}))


if __name__ == "__main__":
    main(sys.argv[1:])
