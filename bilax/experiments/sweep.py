"""`bilax sweep`: settings of an experiment chosen by Optuna, a process for each trial; given again, it goes on."""

import dataclasses
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import tyro

from bilax.app.errors import refuse
from bilax.app.show import Arg, console, show_table


@dataclasses.dataclass
class Sweep:
    """Runs `bilax run EXPERIMENT` with other settings again and again, and keeps what was found in a folder.

    bilax sweep toy --over rate=1e-3..1 inner-steps=10..80 --out sweeps/toy -- --method iaptt-gm --outer-steps 200
    """

    experiment: Annotated[tyro.conf.Positional[str], Arg(help="what `bilax run` knows")]
    over: Annotated[tuple[str, ...], Arg(help="name=low..high of numbers, or name=a,b,c of words, one or several")]
    out: Annotated[Path, Arg(help="folder of the sweep; one that is there is gone on with")]
    trials: Annotated[int, Arg(help="in all, those of earlier calls included")] = 20
    workers: Annotated[int, Arg(help="trials at a time, each in a process of its own")] = 1
    measure: Annotated[str, Arg(help="what is to be low: upper, or one of the run's measures")] = "upper"
    maximize: Annotated[bool, Arg(help="high, not low")] = False
    seed: Annotated[int, Arg(help="of the search")] = 0
    rest: tyro.conf.Suppress[tuple[str, ...]] = ()
    """options of `bilax run`, after --"""

    def main(self) -> None:
        """Takes the trials that are still to be taken and shows the best."""
        try:
            import optuna  # pyright: ignore[reportMissingImports]
        except ImportError:
            refuse("bilax sweep needs Optuna: pip install 'bilax[sweep]'.")
        suggest = [_suggestion(text) for text in self.over]
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.out.mkdir(parents=True, exist_ok=True)
        study = optuna.create_study(
            storage=f"sqlite:///{self.out.absolute() / 'sweep.db'}",
            study_name=self.experiment,
            direction="maximize" if self.maximize else "minimize",
            load_if_exists=True,
        )
        # Else a sweep that goes on would draw again what it drew first.
        study.sampler = optuna.samplers.TPESampler(seed=self.seed + len(study.get_trials(deepcopy=False)))
        states = optuna.trial.TrialState
        for trial in study.get_trials(deepcopy=False):
            if not trial.state.is_finished():  # it was killed: the same settings are taken up again
                study.tell(trial.number, state=states.FAIL, skip_if_finished=True)
                study.enqueue_trial(trial.params)

        # SQLite would give a trial that was enqueued to two who ask at once.
        asking = threading.Lock()

        def one(_: int) -> None:
            with asking:
                trial = study.ask()
                words = [word for each in suggest for word in each(trial)]
            value = self._run(trial.number, words)
            study.tell(trial, value, None if value is not None else states.FAIL)

        done = sum(trial.state == states.COMPLETE for trial in study.get_trials(deepcopy=False))
        with ThreadPoolExecutor(self.workers) as pool:
            list(pool.map(one, range(done, self.trials)))
        self._show(study)

    def _run(self, number: int, words: list[str]) -> float | None:
        """What is measured at the end of one run; None where it failed."""
        command = [sys.executable, "-m", "bilax", "run", self.experiment, *self.rest, *words]
        folder = self.out / f"trial-{number:04d}"
        done = subprocess.run([*command, "--out", str(folder), "--json"], capture_output=True, text=True, check=False)
        if done.returncode == 2:
            refuse(done.stderr.strip())
        try:
            results = json.loads(done.stdout.strip().splitlines()[-1]).values()
            values = [{**result, **result["measures"]}[self.measure] for result in results]
        except (ValueError, IndexError):
            return None
        except KeyError:
            refuse(f"bilax sweep: the runs of {self.experiment} have no measure {self.measure!r}.")
        console.print(f"trial {number}: {self.measure} {sum(values) / len(values):.6g}  {' '.join(words)}")
        return sum(values) / len(values) if done.returncode == 0 else None

    def _show(self, study: Any) -> None:
        found = [trial for trial in study.trials if trial.value is not None]
        found.sort(key=lambda trial: -trial.value if self.maximize else trial.value)
        names = sorted({name for trial in found for name in trial.params})
        rows = [[trial.number, trial.value, *(trial.params.get(name, "") for name in names)] for trial in found[:10]]
        show_table(f"sweep of {self.experiment}, the best of {len(found)}", ["trial", self.measure, *names], rows)
        console.print(f"all of them are in {self.out / 'sweep.db'}, the runs beside it", style="dim", soft_wrap=True)


def _suggestion(text: str) -> Callable[[Any], list[str]]:
    """What an `--over` stands for: a function of a trial that gives words for the command line."""
    name, equal, values = text.partition("=")
    low, dots, high = values.partition("..")
    if not equal or not values:
        refuse(f"bilax sweep: --over {text}: write name=low..high or name=a,b,c.")
    if not dots:
        return lambda trial: [f"--{name}", trial.suggest_categorical(name, values.split(","))]
    try:
        whole = all(re.fullmatch(r"-?\d+", end) for end in (low, high))
        bounds = (int(low), int(high)) if whole else (float(low), float(high))
    except ValueError:
        refuse(f"bilax sweep: --over {text}: low and high must be numbers.")
    if not bounds[0] < bounds[1]:
        refuse(f"bilax sweep: --over {text}: low must be below high.")
    # Over more than a decade a setting is looked for by its size.
    log = bounds[0] > 0 and bounds[1] / bounds[0] > 10
    if whole:
        return lambda trial: [f"--{name}", str(trial.suggest_int(name, *bounds, log=log))]
    return lambda trial: [f"--{name}", repr(trial.suggest_float(name, *bounds, log=log))]
