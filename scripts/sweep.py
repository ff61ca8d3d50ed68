"""Searches for the training settings with the highest acceptance length, using Optuna: one training run per trial.

    python scripts/sweep.py study=lr trials=12 model=demo head=eagle3 steps=200 \
        'optim.lr=tag(log,interval(1e-4,1e-2))' 'objective.steps=range(3,7)' 'objective.loss=choice(kl,lk)'

Arguments are those of train/run.py. A value that is Hydra's choice, range or interval is searched over, on a
logarithmic scale with the tag `log`; the others hold for all trials. A trial's value is the τ that the engine measured
with its head, which is exported to <output_dir>/sweeps/<study>/<number>. Running the same command again continues the
study. `pip install 'headway[sweep]'` installs Optuna. The last line of standard output is one JSON document.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.options.environment  # noqa: F401

# isort: split

import json
from collections.abc import Callable
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException

from infer.options.literal_text import SWEEP
from scripts.errors import reports_errors
from scripts.training import read_words, run_training, whole_number

Suggest = Callable[[Any], Any]  # takes an optuna.Trial


def searched(override: Override) -> Suggest:
    """Return the function with which a trial chooses the value. Raises ValueError for an unsupported kind of sweep."""
    key, value = override.key_or_group, override.value()
    if isinstance(value, ChoiceSweep):
        choices = [str(choice) for choice in override.sweep_string_iterator()]
        return lambda trial: trial.suggest_categorical(key, choices)
    if isinstance(value, RangeSweep):
        start, stop, step = value.start, value.stop, value.step
        if isinstance(start, int) and isinstance(stop, int) and isinstance(step, int):
            last = start + (stop - 1 - start) // step * step  # the stop is exclusive, as in Python's range
            return lambda trial: trial.suggest_int(key, start, last, step=step)
    if isinstance(value, IntervalSweep) and value.start is not None and value.end is not None:
        low, high, log = float(value.start), float(value.end), "log" in value.tags
        return lambda trial: trial.suggest_float(key, low, high, log=log)
    raise ValueError(f"{override.input_line}: give choice(a,b), range(1,5) or interval(0.1,1.0)")


def read_overrides(words: list[str]) -> tuple[list[str], dict[str, Suggest]]:
    """Split the arguments into those fixed for all trials and those searched over, by key.

    Raises ValueError when there is nothing to search over.
    """
    fixed, free = [], {}
    for word in words:
        key, _, text = word.partition("=")
        if key == "model" and not SWEEP.search(text):
            fixed.append(word)  # a path is taken as typed, whatever Hydra's grammar makes of it
            continue
        try:
            override = OverridesParser.create().parse_override(word)
        except HydraException as error:
            raise ValueError(f"{word}: {error}") from None
        if override.is_sweep_override():
            free[override.key_or_group] = searched(override)
        else:
            fixed.append(word)
    if not free:
        raise ValueError("nothing to search over: give a key choice(a,b), range(1,5) or interval(0.1,1.0)")
    return fixed, free


def train(words: list[str]) -> float | None:
    """Run one training and return the τ that the engine measured with its head; None if the run failed."""
    process = run_training(words)
    if process.returncode or not process.stdout.strip():
        return None
    return float(json.loads(process.stdout.splitlines()[-1])["acceptance_length"]["engine"])


def search(study_name: str, trials: int, fixed: list[str], free: dict[str, Suggest]) -> dict[str, Any]:
    """Run the trials and return a summary of the study.

    Raises ValueError if Optuna is missing, if the settings are wrong, or if no trial succeeded.
    """
    from infer.options.cli import compose
    from infer.options.paths import resolve_path
    from train.config import TrainConfig
    from train.storage.atomic import make_folder

    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend
    except ImportError as error:
        raise ValueError(f"{error}; pip install 'headway[sweep]'") from None
    config = compose("train", TrainConfig, fixed)
    folder = resolve_path(config.output_dir) / "sweeps" / study_name
    make_folder(folder)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    journal = JournalFileBackend(str(folder / "journal.log"))
    study = optuna.create_study(
        study_name=study_name,
        storage=optuna.storages.JournalStorage(journal),
        sampler=optuna.samplers.TPESampler(seed=config.seed),
        direction="maximize",
        load_if_exists=True,
    )

    def objective(trial: optuna.Trial) -> float:
        chosen = [f"{key}={suggest(trial)}" for key, suggest in free.items()]
        overrides = [f"output_dir={folder}", f"run=trial-{trial.number}", f"head.path={folder / str(trial.number)}"]
        tau = train([*(word for word in fixed if not word.startswith("output_dir=")), *chosen, *overrides])
        print(f"trial {trial.number}: {' '.join(chosen)}: {'failed' if tau is None else f'τ {tau:.3f}'}", flush=True)
        if tau is None:
            raise optuna.TrialPruned
        return tau

    study.optimize(objective, n_trials=trials)
    done = [trial for trial in study.trials if trial.value is not None]
    if not done:
        raise ValueError(
            f"study={study_name}: none of {len(study.trials)} trials succeeded; what each run said is above"
        )
    best = study.best_trial
    return {
        "study": study_name,
        "trials": [{"number": trial.number, "tau": trial.value, "settings": trial.params} for trial in done],
        "failed": len(study.trials) - len(done),
        "best": {"tau": best.value, "settings": best.params, "head": str(folder / str(best.number))},
    }


@reports_errors
def main() -> int:
    options = {"study": "sweep", "trials": "20"}
    words = read_words(__doc__, options)
    if not options["study"].replace("-", "").replace("_", "").isalnum():
        raise ValueError(f"study={options['study']}: becomes a folder name; use letters, digits, '_' and '-'")
    result = search(options["study"], whole_number("trials", options["trials"]), *read_overrides(words))
    settings = " ".join(f"{key}={value}" for key, value in result["best"]["settings"].items())
    print(f"best: {settings}, τ {result['best']['tau']:.3f}, head in {result['best']['head']}")
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
