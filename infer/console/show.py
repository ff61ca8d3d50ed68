"""Prompts of generate.py, and its output: streamed texts with a card, or a comparison with a card and one JSON line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

from tqdm import tqdm

from infer.config import GenerateConfig
from infer.console.card import acceptance, describe_engine, describe_sampling, print_card
from infer.console.compare import Comparison, Prompts, compare, timed
from infer.console.display import Display, use_color
from infer.devices import dtype_name
from infer.engine import Engine
from infer.request import SamplingParams, SpeculationStats
from models.tokenizer import Tokenizer


def show_texts(config: GenerateConfig, engine: Engine, groups: Sequence[Prompts], params: SamplingParams) -> None:
    assert engine.tokenizer is not None
    color = use_color(config.color, sys.stdout)
    total = sum(map(len, groups))
    stats, tokens, seconds, first = SpeculationStats(), 0, 0.0, 0
    for group in groups:
        display = Display(engine.tokenizer, group, first=first, total=total, color=color, out=sys.stdout)
        begin = time.perf_counter()
        try:
            completions = engine.generate(group, params, on_output=display.on_output)
        finally:
            display.close()
        seconds += time.perf_counter() - begin
        first += len(group)
        for completion in completions:
            stats.merge(completion.stats)
            tokens += len(completion.token_ids)
    print()
    rows = [
        ("tokens", f"{tokens} in {seconds:.2f} s"),
        ("tokens/s", f"{tokens / seconds:.1f}"),
        *(acceptance(stats) if engine.proposer_name != "none" else ()),
        *([("color", "green: accepted draft tokens")] if color else ()),
    ]
    show_card(config, engine, params, rows)


def show_card(config: GenerateConfig, engine: Engine, params: SamplingParams, rows: Sequence[tuple[str, str]]) -> None:
    """Print how the user's prompts were formatted, the engine's configuration and the results `rows`."""
    assert engine.tokenizer is not None
    formatted = []
    if config.prompt is not None or config.prompts_file is not None:
        text = "a plain text" + ("" if config.chat is False else ": the model has no chat template")
        if uses_chat(config.chat, engine.tokenizer):
            text = "a user's message, in the model's chat template; chat=false continues a plain text"
        formatted = [("prompt", text)]
    described = describe_engine(engine, config.model, config.head, config.output_dir)
    title = f"{config.model.name}, {dtype_name(config.model)}"
    print_card(title, [*formatted, ("sampling", describe_sampling(params)), *described, *rows])


def show_comparison(config: GenerateConfig, engine: Engine, groups: Sequence[Prompts], params: SamplingParams) -> bool:
    """Measure with the requested sampling, and check that ids are identical in both greedy and sampled decoding.

    Returns whether all token ids were identical.
    """
    modes = [params, replace(params, temperature=0.0 if params.temperature else 1.0)]
    results = []
    proposer = engine.proposer_name
    with tqdm(total=len(modes) * len(groups), unit="pair", disable=None, dynamic_ncols=True) as bar:
        bar.set_description("warm-up")
        for name in ("none", proposer):
            timed(engine, name, groups[0], params)
        for mode in modes:
            bar.set_description("sampled" if mode.temperature else "greedy")
            pairs = []
            for pair in compare(engine, groups, mode):
                pairs.append(pair)
                bar.update()
            results.append(Comparison(pairs))
    measured = results[0]
    identical = all(result.identical for result in results)
    ratio, prompts = measured.ratio, sum(map(len, groups))
    checks = ", ".join(
        f"{describe_sampling(mode)}: {yes_no(result.identical)}" for mode, result in zip(modes, results, strict=True)
    )
    rows = [
        ("prompts", f"{prompts}, {config.batch} at a time, {measured.tokens} tokens each way"),
        ("tokens/s off", f"{measured.off_tokens_per_s:.1f}"),
        ("tokens/s on", f"{measured.on_tokens_per_s:.1f}"),
        ("ratio on/off", f"{ratio.median:.2f} median of pairs, quartiles {ratio.low:.2f} to {ratio.high:.2f}"),
        *acceptance(measured.speculation),
        ("compared", checks),
    ]
    show_card(config, engine, params, rows)
    print(f"identical token ids: {yes_no(identical)}")
    document = {
        "identical": identical,
        "acceptance_length": round(measured.speculation.acceptance_length, 4),
        "acceptance_by_position": [round(share, 4) for share in measured.speculation.acceptance_by_position],
        "tokens_per_s": {"off": round(measured.off_tokens_per_s, 2), "on": round(measured.on_tokens_per_s, 2)},
        "ratio": {name: round(value, 4) for name, value in asdict(ratio).items()},
        "prompts": prompts,
        "tokens": measured.tokens,
    }
    print(json.dumps(document), flush=True)
    return identical


def yes_no(value: bool) -> str:
    return "yes" if value else "no"


def uses_chat(chat: bool | None, tokenizer: Tokenizer) -> bool:
    """Return whether to use the chat template. `chat` None: if there is one. True: ValueError if there is none."""
    if chat and not tokenizer.chat.texts:
        raise ValueError(f"chat=true: {tokenizer.source} has no chat template; leave out chat=true for a plain text")
    return bool(tokenizer.chat.texts) if chat is None else chat


def prompt_ids(text: str, tokenizer: Tokenizer, *, chat: bool | None) -> list[int]:
    """Return a prompt's ids. A text in the chat template gets the ids that it would get as a message to the server.

    Raises ValueError as `uses_chat` does.
    """
    if not uses_chat(chat, tokenizer):
        return tokenizer.encode(text)
    return tokenizer.apply_chat_template([{"role": "user", "content": text}])
