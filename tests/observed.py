"""What engines do in the tests that compare drafts with plain decoding: the record from which docs/coverage.md is made.

While such a test runs, every engine of its process is watched: who drafts for which requests, of which target, in which
dtype and by which kernels, under which parameters, and what happens to them. tests/coverage.txt keeps that by test, and
a test that no longer does what is recorded of it fails. `--record-coverage` records anew what the tests of a run do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from infer.batch.params import SamplingParams
from infer.engine import Engine
from infer.request import Phase, Request
from infer.speculation.control.planner import Planner
from kernels.cpu.library import library
from kernels.dispatch import uses_triton
from models.heads.draft_model.head import MaskDraftModel
from tests.interpreted import INTERPRETED

RECORD = Path(__file__).with_name("coverage.txt")
DEFAULTS = SamplingParams()
CALLS = ("calls", "tagged_calls")  # kinds of grammars that force a tool call
OFTEN = {"accepted", "rejected"}  # whether, depends on rounding
BY_CLIENTS = {"arrival", "batch", "cached", "chunks", "preempted"}  # and these on when clients send
# By file, the tests that compare token ids with drafts, or what is made of them, with those of plain decoding.
COMPARING = {
    "e2e/test_gguf_files": "test_drafts_change_no_token_of_a_file",
    "kernels/triton/test_engine": "test_drafts_change_no_token",
    "lossless/test_controller": "test_no_plan_changes_a_token test_no_price_changes_a_token",
    "lossless/test_demo_target": "test_identical_token_ids_on_held_out_prompts",
    "lossless/test_draft_models": """test_the_target_under_other_ids_is_right_about_every_token
        test_vocabularies_padded_to_other_sizes_are_one test_tokenizers_of_other_kinds
        test_a_parallel_draft_model_changes_no_token test_a_draft_model_in_fewer_bits
        test_a_quantized_draft_model_stays_in_its_bits test_two_ranks_draft_on_the_first""",
    "lossless/test_failures": "test_failures_cost_no_token_and_no_other_requests_drafts",
    "lossless/test_family_modules": """test_drafts_change_no_token test_pre_empted_requests_take_up_what_they_had
        test_modules_begin_within_a_text""",
    "lossless/test_forward_graphs": "test_a_prompt_beside_requests_that_decode test_budgets_at_random",
    "lossless/test_grammars": "test_drafts_change_no_byte test_after_a_pre_emption",
    "lossless/test_head_updates": "test_an_update_within_requests_changes_no_token",
    "lossless/test_hybrid_drafts": "test_the_target_drafts_for_itself test_several_outputs_of_one_prompt",
    "lossless/test_hybrids": """test_every_way_to_serve_gives_the_bits_of_plain_decoding
        test_after_every_step_the_states_are_those_of_plain_decoding test_several_outputs_of_one_prompt""",
    "lossless/test_levels": """test_in_one_call_it_drafts_the_same_tokens
        test_in_one_call_a_level_it_grows_the_same_trees
        test_so_does_a_head_that_gates_attention_and_rotates_half_of_each_head""",
    "lossless/test_native_weights": "test_drafts_change_no_token",
    "lossless/test_parameters": """test_in_one_batch_under_every_proposer test_whatever_happens_to_it
        test_n_answers_have_seeds_in_a_row_and_equal_requests_of_their_own""",
    "lossless/test_prefix_cache": """test_hits_and_misses_answer_alike test_answers_can_be_continued
        test_pre_empted_requests_take_up_what_they_had test_answers_to_one_prompt_share_it""",
    "lossless/test_prove": "test_a_sound_engine",
    "lossless/test_rounds": """test_rounds_ahead_change_nothing test_each_request_has_its_own_budget
        test_budgets_change_between_rounds test_drafts_that_are_often_right test_scarce_pages
        test_who_comes_and_what_ends_a_request""",
    "lossless/test_situations": "test_all_at_once",
    "lossless/test_speculation_changes_no_token": """test_on_and_off_in_any_batch test_every_head
        test_any_draft_length test_chunk_size_does_not_show test_page_size_does_not_show
        test_pre_emption_does_not_show test_order_and_time_of_arrival_do_not_show
        test_every_length_of_accepted_run""",
    "lossless/test_tensor_parallel": """test_two_ranks_answer_like_one test_other_families
        test_ranks_keep_their_parts_of_states test_a_head_that_borrows_the_lm_head""",
    "lossless/test_trees": """test_head_trees test_chains_and_trees_without_the_c_kernels test_trees_of_every_head
        test_an_lstm_speculator_beside_suffixes test_trees_under_memory_pressure test_any_valid_tree""",
    "lossless/test_weights": """test_drafts_change_no_token_of_a_target_with_narrow_weights
        test_a_head_in_fewer_bits_drafts_a_little_otherwise_and_changes_no_token
        test_drafts_change_no_token_over_keys_and_values_of_8_bits""",
    "server/test_forced_calls": "test_marks_are_single_tokens_and_drafts_change_nothing",
    "server/test_learning": """test_learning_changes_no_token
        test_weights_that_change_within_requests_change_no_token""",
    "server/test_structure": "test_a_schema_is_kept_and_drafts_change_nothing",
    "simulated_cuda/test_serving": "test_tokens_are_those_of_the_cpu",
    "unit/test_families": "test_drafts_change_no_token",
}
FUNCTIONS = {f"tests/{file}.py::{name}" for file, names in COMPARING.items() for name in names.split()}


class Setting(NamedTuple):
    """Who drafted for what; one word each."""

    drafter: str
    target: str  # its architecture
    kernels: str
    dtype: str
    weights: str
    kv: str


Uses = dict[Setting, set[str]]


def drafter_of(engine: Engine, name: str) -> str:
    if name == "head" and engine.head is not None:
        return engine.head.config.name
    model = engine.draft_model
    if name != "draft_model" or model is None:
        return name
    drafted = model.drafted_ids.new_ones(len(model.drafted_ids)) if model.undrafted is None else ~model.undrafted
    drafted = drafted.nonzero().flatten()
    kinds = {
        "parallel": isinstance(model, MaskDraftModel),
        "hybrid": model.model.recurrent is not None,
        "other-tokenizer": bool((model.drafted_ids[drafted] != drafted).any()),
    }
    return "-".join(["draft-model-served", *(kind for kind, holds in kinds.items() if holds)])


def setting_of(engine: Engine, drafter: str) -> Setting:
    device = engine.device.type
    narrow = any(linear.narrow for linear in engine._shard.linears)
    stored = engine.config.weight_format
    stored = "stored" if narrow and stored == "same" else stored
    return Setting(
        drafter,
        engine.target.config.architecture,
        device if device != "cpu" else "triton" if uses_triton(engine.device) else "c" if library() else "torch",
        str(engine.dtype).removeprefix("torch."),
        stored + ("+int8-activations" if engine.rounds_activations else ""),
        engine.config.kv_dtype,
    )


def parameters(params: SamplingParams) -> set[str]:
    """Return the names of the parameters that are set, and whether tokens are the likeliest or sampled."""
    names = {field.name for field in fields(params) if getattr(params, field.name) != getattr(DEFAULTS, field.name)}
    if params.grammar is not None and params.grammar.kind in CALLS:
        names.add("tools")
    return {f"p:{name}" for name in names} | {"seeded" if params.temperature else "greedy"}


class Watched:
    """What happens to one request."""

    def __init__(self, engine: Engine, request: Request, facts: set[str]) -> None:
        self.request, self.facts = request, facts | parameters(request.params)
        self.setting = setting_of(engine, drafter_of(engine, request.drafter.name))
        if type(engine.speculator.planner) is not Planner:
            self.facts.add("planned")
        if engine.graphs is not None:
            self.facts.add("graphs")
        if engine.config.tensor_parallel > 1:
            self.facts.add("ranks")

    def look(self, decoding: int) -> None:
        """Note the state that a step has left."""
        request = self.request
        if request.phase is Phase.PREFILL and 0 < request.computed < len(request.prompt_ids):
            self.facts.add("chunks")
        if request.phase is Phase.WAITING and request.output_length:
            self.facts.add("preempted")
        if request.cached:
            self.facts.add("cached")
        if request.phase is Phase.DECODE and decoding > 1:
            self.facts.add("batch")

    @property
    def done(self) -> set[str]:
        """Return what happened; nothing where nothing was drafted, or by another rule than the exact one."""
        stats = self.request.stats
        if not stats.drafted or self.request.rule != "exact":
            return set()
        tree = stats.drafted > sum(stats.drafted_by_position)
        counts = {"accepted": stats.accepted, "rejected": stats.drafted - stats.accepted}
        return self.facts | {name for name, count in counts.items() if count} | {"tree" if tree else "chain"}


class Watch:
    """Watches the engines of this process for the length of a test."""

    def __init__(self) -> None:
        self.watched: list[Watched] = []

    def __enter__(self) -> Watch:
        self._add, self._step = Engine.add, Engine.step
        add, step, watched = self._add, self._step, self.watched
        live: dict[int, list[Watched]] = defaultdict(list)

        def adding(engine: Engine, *args: Any, **options: Any) -> str:
            name = add(engine, *args, **options)
            request, facts = engine.request(name), set[str]()
            if any(other.request.output_length and not other.request.finish_reason for other in live[id(engine)]):
                facts.add("arrival")
            if request.parent is not None:
                facts.add("p:n")
            watched.append(Watched(engine, request, facts))
            live[id(engine)].append(watched[-1])
            return name

        def stepping(engine: Engine) -> Any:
            outputs, others = step(engine), live[id(engine)]
            decoding = sum(other.request.phase is Phase.DECODE for other in others)
            for other in others:
                other.look(decoding)
            others[:] = [other for other in others if other.request.request_id in engine._requests]
            return outputs

        Engine.add, Engine.step = adding, stepping
        return self

    def __exit__(self, *exception: object) -> None:
        Engine.add, Engine.step = self._add, self._step

    @property
    def uses(self) -> Uses:
        uses: Uses = defaultdict(set)
        for each in self.watched:
            if done := each.done:
                uses[each.setting] |= done
        return dict(uses)


def function_of(test: str) -> str:
    return test.partition("[")[0]


@cache
def read() -> dict[str, Uses]:
    """Return what is recorded, by test."""
    record, test = dict[str, Uses](), ""
    for line in RECORD.read_text(encoding="utf-8").splitlines() if RECORD.exists() else []:
        if not line.startswith(" "):
            test = line
            record[test] = {}
        else:
            setting, *facts = line.split()
            record[test][Setting(*setting.split("/"))] = set(facts)
    return record


def write(record: dict[str, Uses]) -> None:
    lines = []
    for test in sorted(record):
        lines += [
            test,
            *sorted(f" {'/'.join(setting)} {' '.join(sorted(facts))}" for setting, facts in record[test].items()),
        ]
    RECORD.write_text("\n".join(lines) + "\n", encoding="utf-8")


def missing(test: str, wanted: Uses, uses: Uses) -> list[str]:
    """Return what is recorded of a test and did not happen, though it must."""
    may = OFTEN | BY_CLIENTS if test.startswith("tests/server/") else OFTEN
    lost = {setting: facts - uses.get(setting, set()) - may for setting, facts in wanted.items()}
    return [f"{'/'.join(setting)}: {', '.join(sorted(facts))}" for setting, facts in lost.items() if facts]


class Observer:
    """The plugin of pytest. Kernels, and so what is recorded, are those of a CPU with a C compiler."""

    def __init__(self, *, records: bool) -> None:
        self._records, self._new = records, dict[str, Uses]()
        self._compares = library() is not None and not INTERPRETED and not torch.cuda.is_available()
        self.stale = list[str]()  # tests that are recorded, and that a file which was collected as a whole lacks

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self._compares and not any("::" in argument for argument in config.args):
            tests = {item.nodeid for item in items}
            files = {test.partition("::")[0] for test in tests}
            self.stale = [test for test in read() if test.partition("::")[0] in files and test not in tests]

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Iterator[None]:
        test = pyfuncitem.nodeid
        if not (self._records or self._compares) or function_of(test) not in FUNCTIONS:
            return (yield)
        with Watch() as watch:
            result = yield
        if self._records:
            self._new[test] = watch.uses
        elif test not in read():
            pytest.fail(f"compares drafts with plain decoding, and tests/coverage.txt lacks it: {AGAIN}")
        elif lost := missing(test, read()[test], watch.uses):
            pytest.fail(f"tests/coverage.txt says that it did more: {'; '.join(lost)}; if that is meant, {AGAIN}")
        return result

    def pytest_sessionfinish(self) -> None:
        if self._new:
            read.cache_clear()
            recorded = {test: uses for test, uses in read().items() if test not in self.stale}
            write(recorded | self._new)


AGAIN = "pytest --record-coverage TESTS records it, python -m tests.coverage_map writes the page"
