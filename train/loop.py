"""The training run from end to end: open the run, prepare, optimise, evaluate, checkpoint, publish.

Each part has its own module; this one calls them in order. Everything a run depends on is in its folder, so running
the same command again resumes it, bit for bit.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from tqdm import tqdm

from infer.processes.threads import cpu_threads
from infer.settings.paths import resolve_path
from train import checkpoint, schedule
from train.acceptance import stated
from train.config import TrainConfig
from train.data.folder import open_data
from train.data.sequences import Batch, rows_at, seed_of
from train.distributed.collectives import (
    any_process,
    broadcast,
    log_main,
    lost_process,
    make_accelerator,
    release,
    stopping_together,
    total,
)
from train.evaluation import acceptance_metrics, describe_loss, step_metrics
from train.features.online import online_features
from train.features.teacher import recall
from train.objectives.base import StepSums
from train.planning.memory_plan import out_of_memory
from train.planning.plan import check_plan, describe_plan, readable, refuse
from train.planning.precision import choose_precision
from train.planning.time_limit import time_limit
from train.preparation.prepare import feature_recorder, prepare, start_engine, trial_data
from train.publishing.publish import publish_run, verdict
from train.publishing.trackers import Trackers, make_trackers
from train.signals import Interrupted, StopRequest
from train.step_clock import StepClock, head_flops, limited_memory, memory_bytes
from train.storage import run_folder
from train.threads import work_threads

STATE: tuple[str, ...] = ("tokens", "seconds", "skipped", "best", "evaluated", "data_hash", "processes")  # saved
SHOWN_ROWS = 16  # at most, in the message about a non-finite update
MOST_SKIPPED = 5  # updates in a row with a non-finite loss or gradient, after which a run stops


class StepResult(NamedTuple):
    loss: float
    sums: StepSums
    tokens: int


def train(config: TrainConfig, overrides: Sequence[str] = ()) -> dict[str, Any] | None:
    """Train and export a head; return the result's summary, or None if the run was stopped before the end.

    `overrides` is the command line, quoted in the command to resume. Raises ValueError for what the user can fix.
    """
    plan = check_plan(config, overrides) if config.check else None
    if plan is not None and not plan.can_be_tried:
        return {"check": plan.numbers}
    started = time.perf_counter()
    precision = choose_precision(config)
    config = dataclasses.replace(config, precision=precision.name)
    accelerator = make_accelerator(config)
    config = dataclasses.replace(config, run=broadcast(accelerator, run_folder.name_run(config).run))
    with StopRequest() as stop, ExitStack() as resources:
        resume = run_folder.resume_command(config, overrides, accelerator.num_processes)
        resources.callback(release, accelerator)
        run = Run(config, accelerator, stop, resources, started)
        try:
            if plan is not None:
                return {"check": plan.numbers | run.try_update()}
            if accelerator.is_main_process:
                refuse(config, overrides)
            if precision.reason:
                log_main(accelerator, f"precision={precision.name}: {precision.reason}")
            return run.execute()
        except Interrupted:
            log_main(accelerator, f"stopped; resume with: {resume}")
            return None
        except (RuntimeError, MemoryError) as error:
            short = out_of_memory(error)
            if short:
                raise ValueError(f"after step {run.step}: {short}") from error
            if not lost_process(error):
                raise
            last = (
                checkpoint.find_checkpoint(resolve_path(config.output_dir) / str(config.run) / "checkpoints")
                or "none yet"
            )
            raise ValueError(
                f"parallel={config.parallel.name}: another process has ended or does not respond "
                f"({str(error).splitlines()[0]}), so this process ends too; the other's output says why. Last good "
                f"checkpoint: {last}; resume with: {resume}"
            ) from error


class Run:
    """The state of one run. `step` counts finished optimiser steps and determines the position in the data."""

    def __init__(
        self, config: TrainConfig, accelerator: Accelerator, stop: StopRequest, resources: ExitStack, started: float
    ) -> None:
        self.config, self.accelerator, self.stop, self.started = config, accelerator, stop, started
        self.resources = resources  # closed at the end, in reverse order
        self.folder = resolve_path(config.output_dir) / str(config.run)
        self.trackers = Trackers()
        self.clock = StepClock(accelerator.device)
        self.threads = work_threads(config, accelerator.device, accelerator.num_processes)
        self.step = self.tokens = 0
        self.seconds = 0.0  # spent on updates, summed over all resumptions of the run
        self.skipped = self.skipped_in_a_row = 0  # updates skipped for a non-finite loss or gradient
        self.best = 0.0  # highest acceptance length in the engine
        self.evaluated = 0  # the step of the last evaluation

    def execute(self) -> dict[str, Any]:
        config, accelerator = self.config, self.accelerator
        if accelerator.is_main_process:
            self.resources.enter_context(run_folder.open_run(config))
        accelerator.wait_for_everyone()
        log_main(accelerator, f"run {config.run}: {self.folder}")
        if config.stage == "all":
            self._log("\n".join(describe_plan(config)))
        engine = start_engine(config, accelerator, self.resources)
        recorder = feature_recorder(config, engine)
        limit = partial(time_limit, config, engine, self.started, recording=recorder is not None)
        data = open_data(config, engine, accelerator, self.folder / "data", self.stop, limit, recorder)
        if config.stage == "regenerate":
            self._log("runs with the same data settings and output_dir will reuse these sequences")
            return {"run": config.run, "data": str(self.folder / "data"), "counts": data.counts}
        self.prepared = prepare(config, accelerator, engine, data, self.stop, self.resources)
        self._log("\n".join(self.prepared.lines))
        self._restore(checkpoint.find_checkpoint(self.folder / "checkpoints"))
        budget = run_folder.read_budget(self.folder)
        limits = config.steps, config.minutes
        if budget is None or self.step < budget.decided or limits != (budget.steps, budget.minutes):
            self.prepared.open_features(config, engine, self.stop)  # which a run that has ended does not read
        if budget is not None:
            budget = self._extended_budget(budget)
        if accelerator.is_main_process:  # trackers drop what was logged for later steps
            settings = dataclasses.asdict(config)
            self.trackers = make_trackers(config.tracker, self.folder, str(config.run), settings, resume_step=self.step)
            self.resources.callback(self.trackers.finish)
        budget = budget or self._initial_budget()
        self.steps, self.warmup = budget.decided, budget.warmup
        self._optimise()
        return self._finish()

    def try_update(self) -> dict[str, Any]:
        """Make an update of short rows, which makes the optimizer's state, and one of rows as long as the data allow.

        Nothing is saved. Returns the seconds of the second one, and the peak memory in bytes.
        """
        config, accelerator = self.config, self.accelerator
        self._log("trial   loads the target for one update")
        engine = start_engine(config, accelerator, self.resources)
        data = trial_data(config, engine.context)
        self.prepared = prepare(config, accelerator, engine, data, self.stop, self.resources)
        placement = self.prepared.placement
        self.prepared.features = online_features(engine.target, placement.head.config.aux_layers)
        with limited_memory(accelerator.device), cpu_threads(self.threads.count):
            for row in range(len(self.prepared.sequences)):
                self.prepared.packs = [[row]]
                self.clock.start()
                placement.update(0.0, sound=math.isfinite(self._forward_backward(metrics=True).loss))
        seconds, memory = self.clock.elapsed, memory_bytes(accelerator.device)
        self._log(f"trial   an update took {readable(seconds)}, and the process {memory / 1e9:.2f} GB at most")
        return {"trial": {"seconds": seconds, "memory_bytes": memory}}

    # ---- the loop -----------------------------------------------------------------------------------------------

    def _optimise(self) -> None:
        config, show = self.config, self.accelerator.is_main_process
        peak = schedule.peak_rate(config.optim, self.prepared.head.config.hidden_size)
        with tqdm(total=self.steps, initial=self.step, unit="step", dynamic_ncols=True, disable=not show) as bar:
            self._catch_up()
            flops = head_flops(self.prepared.head, self.prepared.placement.plain.steps)
            if self.threads.due and self.step < self.steps:
                self.threads.look(self._trial)
            while self.step < self.steps:
                self.clock.start()
                rate = schedule.learning_rate(self.step, self.steps, config.optim, peak, self.warmup)
                logged = (self.step + 1) % config.log_every == 0 or self.step + 1 == self.steps
                with cpu_threads(self.threads.count):
                    result = self._forward_backward(metrics=logged)
                    with self.clock.part("optimizer"):
                        norm = self._update(result.loss, rate)
                self.step += 1
                self.tokens += result.tokens
                seconds = self.clock.elapsed
                self.seconds += seconds
                speed = result.tokens / seconds
                metrics = step_metrics("train", result.sums, self.prepared.placement.plain.step_weight)
                loss = stated(metrics["train/loss"])
                if self.skipped_in_a_row:
                    self.trackers.log(self.step, {"train/skipped_steps": self.skipped, "train/lr": rate})
                elif logged:
                    metrics |= {"train/lr": rate, "train/grad_norm": norm}
                    metrics |= {"train/tokens": self.tokens, "train/tokens_per_s": speed}
                    useful = flops.step(result.tokens, float(result.sums.count.sum()))
                    metrics |= {"train/head_flops_per_s": useful / seconds, **self.clock.metrics()}
                    metrics["train/memory_bytes"] = memory_bytes(self.accelerator.device)
                    self.trackers.log(self.step, metrics)
                bar.set_postfix_str(f"loss {loss}, {speed:.0f} tokens/s", refresh=False)
                bar.update()
                self._between_steps()

    def _catch_up(self) -> None:
        """Run the evaluation that was due when the run was stopped, if any."""
        due = 0 < self.step < self.steps and self.step % self.config.eval_every == 0
        if due and self.evaluated != self.step and self._improved(self._evaluate()):
            self._save(best=True)

    def _between_steps(self) -> None:
        """Evaluate and save if due; evaluation comes first, so that a checkpoint contains its result.

        A skipped update leaves the state intact, but no periodic checkpoint is saved after it: a run that stops after
        several of them keeps the checkpoints from before the problem.
        """
        last = self.step == self.steps
        stopping = any_process(self.accelerator, self.stop.requested)
        better = False
        if not (last or stopping) and self.step % self.config.eval_every == 0:
            try:
                better = self._improved(self._evaluate())
            except Interrupted:
                stopping = True
        due = self.step % self.config.checkpoint_every == 0 and not self.skipped_in_a_row
        optim = self.config.optim
        stable = optim.schedule == "wsd" and self.step == schedule.decay_start(self.steps, optim)
        if stopping or last or better or due or stable:
            self._save(best=better, stable=stable)
        if stopping and not last:
            raise Interrupted

    def _improved(self, tau: float) -> bool:
        better = tau > self.best
        self.best, self.evaluated = max(tau, self.best), self.step
        return better

    def _forward_backward(self, *, metrics: bool) -> StepResult:
        """Compute the gradients of one optimiser step, over its accumulated batches and all processes."""
        prepared, config, accelerator = self.prepared, self.config, self.accelerator
        with self.clock.part("data"):
            batches = [self._batch(micro) for micro in range(config.accumulate)]
        placement = prepared.placement
        counts = torch.stack([placement.plain.denominators(batch) for batch in batches]).sum(0)
        denominators = total(accelerator, counts)
        losses, sums = [], []
        for micro, batch in enumerate(batches):
            with self.clock.part("target"):
                assert prepared.features is not None, "opened if steps are left"
                features = prepared.features(batch)
                if features.top is None:
                    teacher = placement.plain.teach(prepared.target, features.hidden, batch, features.whole)
                else:
                    teacher = recall(features.top, batch, prepared.head.target_ids, prepared.target.config.vocab_size)
            generator = torch.Generator(accelerator.device).manual_seed(seed_of(config.seed, self._number(micro)))
            inputs = (batch, features, teacher, denominators, metrics, generator)
            last = micro + 1 == len(batches)
            with self.clock.part("head"), placement.accumulating(last):
                loss, part = placement.objective(*inputs)
                # Gradients are averaged over processes, but their losses are parts of one sum.
                placement.backward(loss * accelerator.num_processes, last=last)
            losses.append(loss.detach())
            sums.append(torch.stack(list(part)))
        lengths = prepared.sequences.lengths[[row for batch in batches for row in batch.rows]]
        tokens = total(accelerator, lengths.sum().float().to(accelerator.device))
        loss = total(accelerator, torch.stack(losses).sum())
        return StepResult(
            loss.item(), StepSums(*total(accelerator, torch.stack(sums).sum(0)).cpu()), int(tokens.item())
        )

    def _update(self, loss: float, rate: float) -> float:
        """Update the parameters; return the gradient norm before clipping. All processes skip a non-finite update.

        Raises ValueError after MOST_SKIPPED of them in a row.
        """
        norm = self.prepared.placement.update(rate, sound=math.isfinite(loss))
        wrong = next((n for n, v in (("loss", loss), ("gradient norm", norm)) if not math.isfinite(v)), None)
        if wrong is None:
            self.skipped_in_a_row = 0
            return norm
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= MOST_SKIPPED:
            kept = checkpoint.find_checkpoint(self.folder / "checkpoints")
            rows = ", ".join(map(str, self._sequences_of_step()[:SHOWN_ROWS]))
            raise ValueError(
                f"step {self.step + 1}: the {wrong} is {loss if wrong == 'loss' else norm}, the "
                f"{self.skipped_in_a_row}. time in a row, here in sequences {rows}, ...; the run stops. Last good "
                f"checkpoint: {kept or 'none yet'}. Try a smaller optim.lr (it is {rate:.3g} here) or optim.clip="
                f"{self.config.optim.clip} under another run="
            )
        self._log(f"step {self.step + 1} skipped: the {wrong} is not finite")
        return norm

    def _sequences_of_step(self) -> list[int]:
        """Return the sequences of the next step, over all its batches and processes."""
        packs, per_step = self.prepared.packs, self.config.batch_size * self.config.accumulate
        per_step *= self.accelerator.num_processes
        chosen = rows_at(len(packs), self.step * per_step, per_step, self.config.seed)
        return [index for number in chosen for index in packs[number]]

    def _batch(self, micro: int) -> Batch:
        """Return this process's micro-batch `micro` of the next step, which depends only on seed and step."""
        config, packs = self.config, self.prepared.packs
        chosen = rows_at(len(packs), self._number(micro) * config.batch_size, config.batch_size, config.seed)
        return self.prepared.sequences.packed([packs[number] for number in chosen]).to(self.accelerator.device)

    def _number(self, micro: int) -> int:
        """Return the global number of a micro-batch, counted over the whole run and all processes."""
        config, accelerator = self.config, self.accelerator
        return (self.step * config.accumulate + micro) * accelerator.num_processes + accelerator.process_index

    # ---- before, between and after ------------------------------------------------------------------------------

    def _restore(self, path: Path | None) -> None:
        """Resume from a checkpoint, if there is one."""
        if path is None:
            return
        placement = self.prepared.placement
        loaded = checkpoint.load_checkpoint(path, checkpoint.module_tensors(placement.head))
        state = loaded.state
        if state["data_hash"] != self.prepared.data_hash:
            raise ValueError(
                f"run={self.config.run}: {path} was written for data {state['data_hash']}, here are "
                f"{self.prepared.data_hash}; its files have changed since. Begin anew with another run=<name>"
            )
        placement.load(loaded.trained)
        checkpoint.restore_random_state(loaded.random)
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.skipped, self.best, self.evaluated = state["skipped"], state["best"], state["evaluated"]
        best = checkpoint.find_checkpoint(path.parent, checkpoint.BEST)
        if best is not None:  # may be of a later step than `path`, if an extended run went back
            self.best = max(self.best, checkpoint.read_state(best)["best"])
        self._log(f"resumed after step {self.step}")

    def _save(self, *, best: bool = False, stable: bool = False) -> None:
        trained = self.prepared.placement.state()
        if not self.accelerator.is_main_process:
            return
        identity = self.prepared.data_hash, self.accelerator.num_processes
        progress = self.tokens, self.seconds, self.skipped, self.best, self.evaluated
        state = dict(zip(STATE, (*progress, *identity), strict=True))
        folder, keep = self.folder / "checkpoints", self.config.keep_checkpoints
        checkpoint.save_checkpoint(folder, self.step, trained, state, keep=keep, best=best, stable=stable)

    def _evaluate(self) -> float:
        """Return τ in the engine, measured on the main process while others wait. Raises Interrupted on all of them."""
        self.prepared.placement.collect()
        taus: list[float] = []
        with cpu_threads(self.threads.count):  # the engine's steps have their own
            self._on_main_process(lambda: taus.append(self._evaluate_alone()))
        return broadcast(self.accelerator, taus[0] if taus else 0.0)

    def _evaluate_alone(self) -> float:
        evaluator = self.prepared.evaluator
        metrics = evaluator.losses(self.prepared.placement.measured) | acceptance_metrics(
            evaluator.measure(self.prepared.head)
        )
        self.trackers.log(self.step, metrics)
        tqdm.write(
            f"step {self.step}: held-out loss {describe_loss(metrics)}, acceptance length τ "
            f"{metrics['eval/tau_engine']:.3f} in the engine, {metrics['eval/tau_simulated']:.3f} simulated",
            file=sys.stderr,
        )
        return metrics["eval/tau_engine"]

    def _log(self, message: str) -> None:
        log_main(self.accelerator, message)

    def _on_main_process(self, work: Callable[[], None]) -> None:
        """Run `work` on the main process; if interrupted, raise on all processes, which would wait otherwise."""
        with stopping_together(self.accelerator, self.prepared.target.join_gathers):
            if self.accelerator.is_main_process:
                work()

    def _initial_budget(self) -> schedule.Budget:
        """Convert the budget of a new run into steps."""
        config = self.config
        start = time.perf_counter()
        self._evaluate()  # the untrained head
        eval_seconds = time.perf_counter() - start
        fit = pace = None
        if config.minutes is not None:
            step_seconds = self._trial_seconds()
            pace = step_seconds + eval_seconds / config.eval_every
            left = 60 * config.minutes - (time.perf_counter() - self.started)
            fit = schedule.steps_in(left, step_seconds, eval_seconds, config.eval_every)
            if fit < schedule.LEAST_UPDATES:
                self._log(
                    f"minutes={config.minutes:g}: on this machine there is time for {fit} updates; up to "
                    f"{schedule.LEAST_UPDATES} are made, since a head is no use after fewer"
                )
                fit = schedule.LEAST_UPDATES
        decided = min(limit for limit in (config.steps, fit) if limit is not None)
        budget = schedule.Budget(broadcast(self.accelerator, decided), config.steps, config.minutes, fit, pace)
        budget = dataclasses.replace(budget, warmup=schedule.warmup_steps(budget.decided, config.optim))
        self._write_budget(budget)
        return budget

    def _extended_budget(self, old: schedule.Budget) -> schedule.Budget:
        """Return the budget of a resumed run. If extended after its decay began, it goes back to before the decay."""
        config, folder = self.config, self.folder / "checkpoints"
        new = old.changed(config.steps, config.minutes, done=self.step, fit_from_now=self._fit_from_now)
        new = dataclasses.replace(new, decided=broadcast(self.accelerator, new.decided))
        if new == old:
            return old
        move = schedule.extension(self.step, old.decided, new.decided, config.optim)
        if move == "mark" and self.accelerator.is_main_process:
            newest = checkpoint.find_checkpoint(folder)
            assert newest is not None, "steps were done, and saved"
            checkpoint.mark_stable(newest)
        if move == "return":
            stable = checkpoint.find_checkpoint(folder, checkpoint.STABLE)
            if stable is None:
                self._log("no checkpoint from before the decay exists; the rate rises again from here")
            else:
                self.accelerator.wait_for_everyone()  # every process has read `stable`
                if self.accelerator.is_main_process:
                    checkpoint.return_to(stable)
                self._restore(stable)
        self._write_budget(new, old)
        return new

    def _write_budget(self, new: schedule.Budget, old: schedule.Budget | None = None) -> None:
        config = self.config
        if self.accelerator.is_main_process:
            run_folder.write_budget(self.folder, new)
        per_step = config.batch_size * config.accumulate * self.accelerator.num_processes
        epochs = new.decided * per_step / len(self.prepared.packs)
        rows = "packs" if config.packing else "sequences"
        before = "" if old is None else f" (before: {old.decided})"
        self._log(f"{new.decided} steps{before} of {per_step} {rows}, {epochs:.1f} epochs")

    def _fit_from_now(self) -> int:
        assert self.config.minutes is not None
        return schedule.steps_in(60 * self.config.minutes, self._trial_seconds(), 0.0, self.config.eval_every)

    def _trial_seconds(self) -> float:
        """Return the seconds of one step, with as many threads as are fastest."""
        self._trial()  # warm-up
        return self.threads.look(self._trial)

    def _trial(self) -> None:
        """Compute the next step, of a later one its gradients; no state changes."""
        with stopping_together(self.accelerator):
            self.stop.check()
        self._forward_backward(metrics=False)
        placement = self.prepared.placement
        (placement.drop if self.step else placement.rehearse)()

    def _finish(self) -> dict[str, Any]:
        """Export and return the summary on the main process; the others have nothing left to do."""
        summary: dict[str, Any] = {"run": self.config.run}
        progress = {"steps": self.steps, "tokens": self.tokens, "seconds": self.seconds}
        inputs = self.config, self.folder, self.prepared, self.trackers, progress, self.best, self._judge, self._log
        self.prepared.placement.collect()
        with cpu_threads(self.threads.count):
            self._on_main_process(lambda: summary.update(publish_run(*inputs)))
        return {**summary, "seconds": round(time.perf_counter() - self.started, 1)}

    def _judge(self, tau: float) -> str | None:
        other = max(0.0, time.perf_counter() - self.started - self.seconds)
        limit = self.config.minutes if self.config.steps != self.steps else None
        return verdict(tau, self.steps, tokens=self.tokens, seconds=self.seconds, other_seconds=other, minutes=limit)
