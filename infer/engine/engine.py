"""The engine: continuous batching over a paged KV pool with speculative decoding, one step at a time.

    engine = Engine.load("owner/name", head="eagle3", engine=EngineConfig(max_batch=8))
    for completion in engine.generate(["def main("], SamplingParams(max_tokens=64)): ...

Not thread-safe: one thread owns an engine. What runs while there are requests is in core.py; this module loads an
engine, chooses who drafts, and prepares that while the engine is idle: pools, CUDA graphs, measured costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from infer.config import EngineConfig, ModelConfig, ProposerConfig
from infer.engine import offline
from infer.engine.core import EngineCore
from infer.engine.loading import load_parts, read_names
from infer.engine.startup.controller import ControllerState, make_controller
from infer.engine.startup.profiled_engine import ProfiledEngine
from infer.graphs.overlap import Overlap
from infer.graphs.step_graph import GraphCache, Recorded
from infer.graphs.warm_up import WarmUp
from infer.processes.comm import Ranks
from infer.processes.launch import ranks_of
from infer.request import PLAIN, Proposer
from infer.speculation.control.acceptance_model import AcceptanceModel
from infer.speculation.control.cost_model import CostTable
from infer.speculation.control.planner import Controller
from infer.speculation.proposers import build_proposers, pack_draft_model, pack_head
from infer.speculation.tree import NOTHING, Budget
from models.heads.base import Head
from models.heads.config import HeadConfig
from models.heads.draft_model.head import DraftModelHead
from models.targets.llama import LlamaTarget
from models.tokenizer import Tokenizer


class Engine(EngineCore):
    """Takes ownership of `target` and `draft_model` and packs them: do not train them afterwards. `head` is copied.

    Drafts are adaptive unless `proposer_config` says otherwise: the first engine of its kind profiles what they cost.
    `probe=False` skips the start-up check of what `exact` assumes of the kernels. `profile=False` leaves profiling of
    step costs to `profile()`, for a start that must not wait. `clock` is the time of deadlines, in seconds; `timer`
    times steps, from which drafts are planned.
    """

    def __init__(
        self,
        target: LlamaTarget,
        *,
        tokenizer: Tokenizer | None = None,
        head: Head | None = None,
        draft_model: DraftModelHead | None = None,
        proposer: str = "auto",
        config: EngineConfig | None = None,
        proposer_config: ProposerConfig | None = None,
        ranks: Ranks | None = None,
        priors: Mapping[str, Sequence[float]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        timer: Callable[[], float] = time.perf_counter,
        probe: bool = True,
        profile: bool = True,
    ) -> None:
        drafts = proposer_config or ProposerConfig(name="auto")
        super().__init__(target, tokenizer, config or EngineConfig(), drafts, ranks, clock, timer, probe=probe)
        self._controller_state, self._profiles_at_start = ControllerState(AcceptanceModel(priors)), profile
        self._graph_cache, self._warm_up = GraphCache(self.config, self.context), WarmUp()
        self.graphs: Recorded | None = None
        if draft_model is not None:
            self._draft_model = pack_draft_model(draft_model, self.target, self.config, drafts)
        if head is not None:
            self._head = pack_head(head, self.target, self.config, drafts)
        self._make_pool()
        self._draft_with("none")
        self.set_proposer(proposer)

    @classmethod
    def load(
        cls,
        model: ModelConfig | str,
        head: HeadConfig | str | None = None,
        engine: EngineConfig | None = None,
        proposer: ProposerConfig | str | None = None,
        *,
        output_dir: str = "outputs",
        profile: bool = True,
    ) -> Engine:
        """Load an engine from configs, or from names as on a command line.

        Names: a model as in `model=` (infer/options/model_names.py), a head or its folder, a proposer. `proposer=auto`
        uses the exported head if there is one, else suffix decoding. Whatever is not said is as in the commands. With
        `engine.tensor_parallel` this process becomes rank 0; `close` the engine, or drop it, to end the other ranks.

        Drafts are made as far as they pay: at the first start on a machine the costs of steps and drafts are measured,
        for a few seconds, unless `profile=False` leaves that to `profile()` or `proposer.adaptive=False` drafts always.
        """
        model, head, proposer = read_names(model, head, proposer or "auto", output_dir)
        engine = engine or EngineConfig()
        with ranks_of(model, engine) as ranks:
            parts = load_parts(model, head, proposer, output_dir=output_dir, engine=engine, ranks=ranks)
            return cls(
                parts.target,
                tokenizer=parts.tokenizer,
                head=parts.head,
                draft_model=parts.draft_model,
                proposer=proposer.name,
                config=engine,
                proposer_config=parts.proposer,
                ranks=ranks,
                priors=parts.priors,
                profile=profile,
            )

    generate = offline.generate

    def close(self) -> None:
        """End the other tensor parallel ranks, if any; the engine cannot compute without them."""
        self._shard.close()

    # ---- who drafts ---------------------------------------------------------------------------------------------

    def set_proposer(self, name: str, head: Head | None = None, *, config: ProposerConfig | None = None) -> None:
        """Change the default proposer and, if passed, the head and the draft config.

        "auto": the head if there is one, else suffix decoding. Raises ValueError for a proposer that this engine does
        not have, and while requests are unfinished.
        """
        if self.has_work:
            raise ValueError("set_proposer: requests are unfinished; wait for them or abort them")
        self._leave_graphs()
        other_head = head is not None and (self._head is None or not self._head.fits(head))
        if other_head or config not in (None, self.proposer_config):
            self._graph_cache = GraphCache(self.config, self.context)  # frees memory before anything new takes it
        if config is not None:
            self.proposer_config = config
        if head is not None:
            self._use_head(head)
        for drafter in (self._head, self._draft_model):
            if config is not None and drafter is not None:
                drafter.set_drafts(config)
        if name == "auto":
            name = "suffix" if self._head is None else "head"
        if name == "head" and self._head is None:
            raise ValueError("proposer=head: no head was given; export one by training, or proposer=ngram")
        vocabulary = self.target.config.vocab_size
        self._proposers = dict(build_proposers(self.proposer_config, self._head, self._draft_model, vocabulary))
        self._draft_with(name)
        default = self._proposers.get(name, (PLAIN, NOTHING))
        adaptive = self.proposer_config.adaptive
        if self._head is not None:
            self._head.confidence = None
        self._warm_up.run(self, self._pool, self._stats, default[1])
        self.graphs = self._graph_cache.record(self._runner, default, self.sizes.max_rows, adaptive=adaptive)
        if self.graphs is not None:
            self.overlap = self.steps.overlap = Overlap(
                self.graphs.graphs,
                self._pool,
                self._scheduler,
                self.speculator,
                self.steps,
                context=self.context,
                timer=self._timer,
            )
        if adaptive and name != "none":
            self.speculator.planner = self._make_controller(profile=self._profiles_at_start)

    def add_proposer(self, proposer: Proposer, limit: Budget) -> None:
        """Add a custom proposer and make it the default. Only while idle; it must not keep KV layers."""
        assert not proposer.needs.kv_layers, "layers of the pool are laid out when the engine is made"
        self.set_proposer("none")
        self._proposers[proposer.name] = (proposer, limit)
        self._draft_with(proposer.name)

    def _use_head(self, head: Head) -> None:
        """Pack a copy of `head`. The pool is rebuilt only if its KV layers differ from the previous head's."""
        before, self._head = self._head, pack_head(head, self.target, self.config, self.proposer_config)
        # another head's acceptance does not apply to this one
        self._controller_state = ControllerState(AcceptanceModel())
        if before is not None and before.needs.kv_layers == self._head.needs.kv_layers:
            self._head = self._head.continuing(before, self._pool)
            self._pool.pages.clear_cache()  # cached pages hold the previous head's KV
            return
        before, self._proposers = None, {}
        self._draft_with("none")  # nothing holds the previous head while memory is planned
        self._make_pool()

    def update_head(self, head: Head) -> None:
        """Draft with other weights of the same head from the next step on, for running requests too.

        Their drafts go on from what the weights before wrote to the KV cache; no token changes. Raises ValueError for
        a head of another kind, shape or vocabulary.
        """
        if self._head is None or not self._head.fits(head):
            raise ValueError("update_head: this engine drafts with no head of that kind, shape and draft vocabulary")
        pack_head(head, self.target, self.config, self.proposer_config).continuing(self._head, self._pool)
        self._pool.pages.clear_cache()  # the KV of new requests is of one head

    def _leave_graphs(self) -> None:
        """Wait for a round in flight, if there is one: all of its requests have finished."""
        if self.overlap is not None:
            self.overlap.drain()
        self.overlap = self.steps.overlap = self._runner.graphs = self.graphs = None
        if self._head is not None:
            self._head.graphs = None

    # ---- what drafts cost ---------------------------------------------------------------------------------------

    @property
    def costs(self) -> CostTable | None:
        """Measured costs of steps and drafts; None if drafting is not adaptive, or if they are guesses (`profile`)."""
        planner = self.speculator.planner
        return planner.costs.measured if isinstance(planner, Controller) else None

    @property
    def profile_due(self) -> bool:
        """Whether step costs are still to be profiled (`profile`); until then drafts are planned on guessed costs."""
        return self._controller_state.profile_due and isinstance(self.speculator.planner, Controller)

    def profile(self, check: Callable[[], None] = lambda: None) -> None:
        """Profile the costs of steps and drafts, if that is due. Only while idle; empties the prefix cache.

        `check` is called every few steps. If it raises, the planner is restored and the profile is still due.
        """
        assert not self.has_work, "profile: requests are unfinished"
        before = self.speculator.planner
        if not self.profile_due:
            return
        try:
            self.speculator.planner = self._make_controller(profile=True, check=check)
        except BaseException:
            self.speculator.planner = before
            raise

    def profiled(self) -> ProfiledEngine:
        """Return what the profiler of step costs needs. Only while idle."""
        return ProfiledEngine(self, self._pool, self.steps, self._stats)

    def _make_controller(self, *, profile: bool, check: Callable[[], None] | None = None) -> Controller:
        limits = {name: limit for name, (_, limit) in self._proposers.items()}
        limiting = (name for name, (proposer, _) in self._proposers.items() if proposer.self_limiting)
        self._controller_state.acceptance.self_limiting = frozenset(limiting)
        return make_controller(
            self, self.profiled(), limits, self._controller_state, self._head, self._timer, profile=profile, check=check
        )
