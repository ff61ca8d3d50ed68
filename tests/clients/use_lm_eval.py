"""lm_eval's local-completions and local-chat-completions, on a task of one row."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import ASKED, MODEL, SAID, URL, run

# Six stop strings, more than the four that OpenAI allows, as in lm_eval's tasks for code.
TASK = """\
task: headway_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{target}"
{more}
"""
GENERATE = """\
generation_kwargs: {until: ["\\n\\n", "#", "Q:", "</s>", "<|im_end|>", "\\nclass"], max_gen_toks: 32, do_sample: false}
metric_list: [{metric: exact_match}]
"""
CHOOSE = """\
doc_to_choice: ["It is 3.", "It is four."]
metric_list: [{metric: acc}]
"""


def evaluate(model: str, route: str, kind: str, question: str, *more: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rows.jsonl").write_text(json.dumps({"question": question, "answer": SAID}) + "\n")
        choose = kind == "multiple_choice"
        task = TASK.format(
            kind=kind,
            rows=folder / "rows.jsonl",
            target="0" if choose else "{{answer}}",
            more='target_delimiter: ""\n' + CHOOSE if choose else GENERATE,
        )
        (folder / "task.yaml").write_text(task)
        options = f"base_url={URL}{route},model={MODEL},max_length=1024,max_retries=1"
        command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", options]
        command += ["--tasks", f"headway_{kind}", "--include_path", name, "--output_path", f"{name}/out", *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip()[-500:])
        (results,) = (folder / "out").rglob("results_*.json")
        scores = json.loads(results.read_text())["results"][f"headway_{kind}"]
        score = scores["acc,none" if choose else "exact_match,none"]
        if score != 1:
            raise AssertionError(scores)


def plain() -> None:
    question = f"# user: {ASKED}\n# assistant:"
    evaluate("local-completions", "/v1/completions", "generate_until", question)
    evaluate("local-completions", "/v1/completions", "multiple_choice", question)
    evaluate("local-chat-completions", "/v1/chat/completions", "generate_until", ASKED, "--apply_chat_template")


run("lm_eval", plain=plain)
