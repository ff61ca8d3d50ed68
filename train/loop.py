"""Training from end to end: open the run, prepare, optimise, evaluate, checkpoint, export.

Each part lives in its own module; this one puts them in order. Everything a run depends on is in its folder, so
running the same command again resumes it, bit for bit.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from tqdm import tqdm

from infer.config import resolve_path
from train import checkpoint, run_folder, schedule
from train.config import TrainConfig
from train.data import Batch, rows_at
from train.evaluation import acceptance_metrics, step_metrics
from train.export import check_room, export_head
from train.objectives import StepSums, teach
from train.parallel import any_process, broadcast_text, make_accelerator, release, say, total
from train.plots import draw_plots
from train.preparation import prepare
from train.provenance import provenance
from train.stopping import Interrupted, StopRequest
from train.trackers import Trackers, make_trackers

TRIAL_STEPS = 3  # timed to turn minutes into steps


class StepResult(NamedTuple):
    loss: float
    sums: StepSums
    tokens: int


def train(config: TrainConfig, overrides: Sequence[str] = ()) -> dict[str, Any] | None:
    """Trains and exports; the result's summary, or None when it was stopped before the end.

    `overrides` is the command line, quoted in the command to resume. Raises ValueError for what the user can mend.
    """
    started = time.perf_counter()
    accelerator = make_accelerator(config)
    config = dataclasses.replace(config, run=broadcast_text(accelerator, str(run_folder.name_run(config).run)))
    with StopRequest() as stop:
        run = Run(config, accelerator, stop, started)
        try:
            return run.execute()
        except Interrupted:
            say(accelerator, f"stopped; resume with: {resume_command(config, overrides, accelerator.num_processes)}")
            return None
        finally:
            run.trackers.finish()
            release(accelerator)


def resume_command(config: TrainConfig, overrides: Sequence[str], processes: int = 1) -> str:
    launcher = ["python"] if processes == 1 else ["torchrun", "--nproc_per_node", str(processes)]
    kept = [item for item in overrides if not item.startswith("run=")]
    return shlex.join([*launcher, "train/run.py", *kept, f"run={config.run}"])


class Run:
    """The state of one run. `step` counts finished optimiser steps; where the data stand follows from it."""

    def __init__(self, config: TrainConfig, accelerator: Accelerator, stop: StopRequest, started: float) -> None:
        self.config, self.accelerator, self.stop, self.started = config, accelerator, stop, started
        self.trackers = Trackers([])
        self.step = self.tokens = 0

    def execute(self) -> dict[str, Any]:
        config, accelerator = self.config, self.accelerator
        self.folder = resolve_path(config.output_dir) / str(config.run)
        if accelerator.is_main_process:
            run_folder.open_run(config)
        accelerator.wait_for_everyone()
        say(accelerator, f"run {config.run}: {self.folder}")
        self.prepared = prepare(config, accelerator, self.folder, self.stop)
        check_room(config, self.prepared.head, self.prepared.target)
        self._restore()
        if accelerator.is_main_process:
            settings = dataclasses.asdict(config)
            self.trackers = make_trackers(config.tracker, self.folder, str(config.run), settings, resume_step=self.step)
        self.steps = self._decide_steps()
        self._optimise()
        return self._finish()

    # ---- the loop -----------------------------------------------------------------------------------------------

    def _optimise(self) -> None:
        config, show = self.config, self.accelerator.is_main_process
        peak = schedule.peak_rate(config.optim, self.prepared.head.config.hidden_size)
        with tqdm(total=self.steps, initial=self.step, unit="step", dynamic_ncols=True, disable=not show) as bar:
            while self.step < self.steps:
                begun = time.perf_counter()
                rate = schedule.learning_rate(self.step, self.steps, config.optim, peak)
                logged = (self.step + 1) % config.log_every == 0 or self.step + 1 == self.steps
                result = self._forward_backward(metrics=logged)
                norm = self._update(result.loss, rate)
                self.step += 1
                self.tokens += result.tokens
                speed = result.tokens / (time.perf_counter() - begun)
                if logged:
                    metrics = {"train/loss": result.loss, **step_metrics("train", result.sums), "train/lr": rate}
                    metrics |= {"train/grad_norm": norm, "train/tokens": self.tokens, "train/tokens_per_s": speed}
                    self.trackers.log(self.step, metrics)
                bar.set_postfix_str(f"loss {result.loss:.3f}, {speed:.0f} tokens/s", refresh=False)
                bar.update()
                self._between_steps()

    def _between_steps(self) -> None:
        last = self.step == self.steps
        stopping = any_process(self.accelerator, self.stop.requested)
        if stopping or last or self.step % self.config.checkpoint_every == 0:
            self._save()
        if stopping and not last:
            raise Interrupted
        if not last and self.step % self.config.eval_every == 0:
            try:
                self._evaluate()
            except Interrupted:
                self._save()
                raise

    def _forward_backward(self, *, metrics: bool) -> StepResult:
        """Gradients of one optimiser step, over its accumulated batches and all processes."""
        prepared, config, accelerator = self.prepared, self.config, self.accelerator
        batches = [self._batch(micro) for micro in range(config.accumulate)]
        objective = self._objective()
        counts = torch.stack([objective.denominators(batch.assistant) for batch in batches]).sum(0)
        denominators = total(accelerator, counts)
        losses, sums = [], []
        for micro, batch in enumerate(batches):
            features = prepared.features(batch)
            ids = prepared.head.target_ids
            teacher = teach(prepared.target, features.hidden, batch, ids, keep=not objective.fused)
            generator = torch.Generator(accelerator.device).manual_seed((config.seed << 32) + self._number(micro))
            given = (batch, features, teacher, denominators, metrics, generator)
            if micro + 1 < len(batches):
                with accelerator.no_sync(prepared.objective):
                    loss, part = prepared.objective(*given)
                    accelerator.backward(loss * accelerator.num_processes)
            else:
                loss, part = prepared.objective(*given)
                # Gradients are averaged over processes; the losses, parts of one, are to be summed.
                accelerator.backward(loss * accelerator.num_processes)
            losses.append(loss.detach())
            sums.append(torch.stack(list(part)))
        lengths = prepared.sequences.lengths[[row for batch in batches for row in batch.rows]]
        tokens = total(accelerator, lengths.sum().float().to(accelerator.device))
        loss = total(accelerator, torch.stack(losses).sum())
        return StepResult(
            loss.item(), StepSums(*total(accelerator, torch.stack(sums).sum(0)).cpu()), int(tokens.item())
        )

    def _update(self, loss: float, rate: float) -> float:
        """Clips, updates and clears the gradients; their norm before clipping. Raises ValueError when not finite."""
        optimizer = self.prepared.optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = float(self.accelerator.clip_grad_norm_(parameters, self.config.optim.clip) or 0.0)
        for name, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                kept = checkpoint.latest_checkpoint(self.folder / "checkpoints")
                raise ValueError(
                    f"step {self.step + 1}: the {name} is {value}; the run stops before it touches the head. Last good "
                    f"checkpoint: {kept or 'none yet'}. Try a smaller optim.lr (it is {rate:.3g} here) or optim.clip="
                    f"{self.config.optim.clip} under another run="
                )
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        return norm

    def _batch(self, micro: int) -> Batch:
        """Of this process: number `micro` of the coming step. Depends on seed and step alone."""
        config, sequences = self.config, self.prepared.sequences
        rows = rows_at(len(sequences), self._number(micro) * config.batch_size, config.batch_size, config.seed)
        return sequences.batch(rows).to(self.accelerator.device)

    def _number(self, micro: int) -> int:
        """Of a batch among all of the run's, over all processes."""
        config, accelerator = self.config, self.accelerator
        return (self.step * config.accumulate + micro) * accelerator.num_processes + accelerator.process_index

    # ---- before, between and after ------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Takes up the newest checkpoint, if there is one."""
        path = checkpoint.latest_checkpoint(self.folder / "checkpoints")
        if path is None:
            return
        state = checkpoint.load_checkpoint(path, self.prepared.head, self.prepared.optimizer)
        if state["data_hash"] != self.prepared.data_hash or state["processes"] != self.accelerator.num_processes:
            raise ValueError(
                f"run={self.config.run}: {path} was written for data {state['data_hash']} by {state['processes']} "
                f"processes, here are data {self.prepared.data_hash} and {self.accelerator.num_processes} processes"
            )
        self.step, self.tokens = state["step"], state["tokens"]
        say(self.accelerator, f"resumed after step {self.step}")

    def _save(self) -> None:
        if not self.accelerator.is_main_process:
            return
        state = {
            "tokens": self.tokens,
            "data_hash": self.prepared.data_hash,
            "processes": self.accelerator.num_processes,
        }
        folder, keep = self.folder / "checkpoints", self.config.keep_checkpoints
        checkpoint.save_checkpoint(folder, self.step, self.prepared.head, self.prepared.optimizer, state, keep=keep)

    def _evaluate(self) -> None:
        """On the main process, while the others wait. Raises Interrupted on all of them."""
        self._alone(self._evaluate_alone)

    def _evaluate_alone(self) -> None:
        evaluator = self.prepared.evaluator
        metrics = evaluator.losses(self._objective()) | acceptance_metrics(evaluator.measure(self.prepared.head))
        self.trackers.log(self.step, metrics)
        tqdm.write(
            f"step {self.step}: held-out loss {metrics['eval/loss']:.3f}, acceptance length τ "
            f"{metrics['eval/tau_engine']:.3f} in the engine, {metrics['eval/tau_simulated']:.3f} simulated",
            file=sys.stderr,
        )

    def _alone(self, work: Callable[[], None]) -> None:
        """Runs `work` on the main process; an interruption there is one everywhere, or the others would wait on."""
        cut = False
        if self.accelerator.is_main_process:
            try:
                work()
            except Interrupted:
                cut = True
        if any_process(self.accelerator, cut):
            raise Interrupted

    def _objective(self) -> Any:
        return self.accelerator.unwrap_model(self.prepared.objective)

    def _decide_steps(self) -> int:
        """Evaluates the untrained head, and turns `minutes` into steps; once per run."""
        decided = run_folder.read_steps(self.folder)
        if decided is None:
            begun = time.perf_counter()
            self._evaluate()
            eval_seconds = time.perf_counter() - begun
            limits = [self.config.steps] if self.config.steps is not None else []
            if self.config.minutes is not None:
                seconds = self._trial_seconds()
                left = 60 * self.config.minutes - (time.perf_counter() - self.started)
                limits.append(schedule.steps_in(left, seconds, eval_seconds, self.config.eval_every))
            decided = int(broadcast_text(self.accelerator, str(min(limits))))
            if self.accelerator.is_main_process:
                run_folder.write_steps(self.folder, decided)
            per_step = self.config.batch_size * self.config.accumulate * self.accelerator.num_processes
            epochs = decided * per_step / len(self.prepared.sequences)
            say(self.accelerator, f"{decided} steps of {per_step} sequences, {epochs:.1f} epochs")
        return decided

    def _trial_seconds(self) -> float:
        """Of one step, measured without changing anything."""
        times = []
        for _ in range(1 + TRIAL_STEPS):
            self.stop.check()
            begun = time.perf_counter()
            self._forward_backward(metrics=False)
            self.prepared.optimizer.zero_grad()
            times.append(time.perf_counter() - begun)
        return sorted(times[1:])[TRIAL_STEPS // 2]  # the first one warms up

    def _finish(self) -> dict[str, Any]:
        """Export and summary, on the main process; the others have nothing left to do."""
        summary: dict[str, Any] = {"run": self.config.run}
        self._alone(lambda: summary.update(self._export()))
        return summary

    def _export(self) -> dict[str, Any]:
        config, prepared = self.config, self.prepared
        trained = sum(p.numel() for p in prepared.head.parameters() if p.requires_grad)
        facts = {"run": config.run, "steps": self.steps, "tokens": self.tokens}
        facts |= {"trained_parameters": trained, "seconds": round(time.perf_counter() - self.started, 1)}
        facts |= {"data_source": prepared.data_source, "data_hash": prepared.data_hash}
        record = provenance(dataclasses.asdict(config), **facts)
        evaluator = prepared.evaluator
        export, measured = export_head(prepared.head, prepared.target, config, record, evaluator.measure_fully)
        greedy = measured.greedy
        metrics = evaluator.losses(self._objective()) | acceptance_metrics(greedy)
        self.trackers.log(self.step, metrics)
        draw_plots(self.folder)
        lengths = greedy.summary()
        positions = " ".join(f"{share:.2f}" for share in greedy.engine.acceptance_by_position)
        say(self.accelerator, f"acceptance length τ {lengths['engine']:.3f} in the engine (by position {positions})")
        say(self.accelerator, f"exported to {export}")
        say(self.accelerator, f"serve it: python infer/serve.py model={config.model.name} head={config.head.name}")
        seconds = round(time.perf_counter() - self.started, 1)
        return {"export": str(export), "acceptance_length": lengths, "gap": round(greedy.gap, 4), "seconds": seconds}
