"""Generates with a target and its head, or compares with and without it: python infer/generate.py model=demo"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.options.environment

# isort: split

if __name__ == "__main__":
    infer.options.environment.rest_collector()

from infer.config import GenerateConfig
from infer.options.cli import engine_entry_point
from infer.processes.process_end import run_process
from infer.settings.paths import resolve_path

CORPUS_MODEL = "demo"  # the only target whose corpus is in the repository, so that held-out prompts can be cut


def run(config: GenerateConfig) -> None:
    texts = user_prompts(config)
    # Imports that take seconds come only now, so that a mistake above is reported at once.
    from infer.console.show import prompt_ids, show_comparison, show_texts
    from infer.engine import Engine

    engine = Engine.load(config.model, config.head, config.engine, config.proposer, output_dir=config.output_dir)
    infer.options.environment.wake_collector()
    assert engine.tokenizer is not None
    if texts is None:
        from models.demo.corpus import held_out_prompts

        prompts = held_out_prompts(engine.tokenizer, config.num_prompts, config.prompt_tokens)
    else:
        prompts = [prompt_ids(text, engine.tokenizer, chat=config.chat) for text in texts]
    params = config.sampling(ignore_eos=config.ignore_eos)
    groups = [prompts[start : start + config.batch] for start in range(0, len(prompts), config.batch)]
    try:
        if not config.compare:
            show_texts(config, engine, groups, params)
        elif not show_comparison(config, engine, groups, params):
            sys.exit(1)
    finally:
        engine.close()


def user_prompts(config: GenerateConfig) -> list[str] | None:
    """Return the user's prompts; None: they are cut from the demo corpus, once there is a tokenizer."""
    if config.prompt is not None:
        return [config.prompt]
    if config.prompts_file is not None:
        try:
            text = resolve_path(config.prompts_file).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"prompts_file={config.prompts_file}: cannot be read ({error})") from error
        texts = [line for line in text.split("\n") if line.strip()][: config.num_prompts]
        if not texts:
            raise ValueError(f"prompts_file={config.prompts_file}: holds no prompt; write one per line")
        return texts
    if config.model.name != CORPUS_MODEL:
        raise ValueError(f"prompt: model={config.model.name} brings no prompts; give prompt='...' or prompts_file=...")
    return None


main = engine_entry_point("generate", GenerateConfig)(run)

if __name__ == "__main__":
    run_process(main)
