"""What a run came to, in plain words: what was solved, how well, whether to believe it, and what to try next."""

from typing import Any

import numpy as np

from bilax.app.run_folder import RunRecord
from bilax.run.solution import Status

PURPOSES = {
    "toy": "The paper's non-convex example, min x + x y such that y minimises −sin(x y)",
    "convex": "The paper's convex example",
    "cleaning": "A weight for every training example, some of which have wrong labels, so that a network trained with "
    "these weights does well on clean ones",
    "few-shot": "A representation from which new classes are learned by a few examples of each",
    "quadratic": "A simulated quadratic, by mini-batches",
    "logistic": "A penalty for each feature of a logistic regression, by mini-batches",
    "linear-cleaning": "A weight for every training example, some of which have wrong labels, by mini-batches",
}
"""what the leader of each experiment is after"""
STILL = 0.01
"""share of its whole change that F may still change in the last tenth of a run that has come to rest"""


def conclusion(record: RunRecord) -> list[str]:
    """Four sentences on one run; a run that is damaged or has not begun has fewer."""
    found = [solved(record), quality(record), trust(record), advice(record)]
    return [sentence for sentence in found if sentence]


def solved(record: RunRecord) -> str:
    """What was asked."""
    config = record.config["config"]
    name = config.get("experiment") or "a problem"
    what = PURPOSES.get(name, name) if isinstance(name, str) else "A problem"
    data = f" ({config['dataset']})" if config.get("dataset") else ""
    steps = (record.result or {}).get("steps")
    steps = steps if isinstance(steps, int) and 0 < steps < 1 << 53 else _curve(record, "upper").size
    method = f" Method: {config['method']}," if config.get("method") else ""
    inner = f", {config['inner_steps']} follower steps in each" if config.get("inner_steps") else ""
    return f"{what}{data}.{method} {steps:,} outer steps{inner}."


def quality(record: RunRecord) -> str:
    """How far F came, and what was measured."""
    upper = _curve(record, "upper")
    end = (record.result or {}).get("upper")
    end = end if isinstance(end, float) else upper[-1] if upper.size else None
    said = f"The leader's objective went from {upper[0]:.4g} to {end:.4g}. " if upper.size else ""
    measures = (record.result or {}).get("measures")
    numbers = measures if isinstance(measures, dict) else {}
    shown = [f"{name} {value:.4g}" for name, value in numbers.items() if isinstance(value, float)]
    return said + (f"Measured: {', '.join(shown)}." if shown else "")


def trust(record: RunRecord) -> str:
    """A certificate in its cheapest form: how the run ended, whether it moves, and whether the follower is solved."""
    status = _status(record)
    if record.result is None:
        return "It has not ended: what follows is where it is."
    if status is not None and status.failed:
        return f"It broke off ({status.name}), and what is reported is the best solved point before that."
    doubts = []
    if status is Status.doubtful:
        doubts.append("the follower is not at its minimum at the end, or has no single one")
    if _still_moving(record):
        doubts.append("F was still changing at the end")
    if _unsolved(record):
        doubts.append("the follower's residual has not fallen to a hundredth of its largest")
    if doubts:
        return f"Do not rely on it yet: {'; '.join(doubts)}."
    return (
        "F has come to rest and the follower is nearly stationary. Whether that is the follower's lowest point is not "
        "known from the curves: bilax.certify tells."
    )


def advice(record: RunRecord) -> str:
    """What to try next."""
    status, config = _status(record), record.config["config"]
    if status is not None and (status.failed or status is Status.doubtful):
        return f"Try next: {status.message}"
    if record.result is None:
        return ""
    k_bar, tries = _curve(record, "k_bar"), []
    steps = config.get("inner_steps")
    if _still_moving(record):
        tries.append("more outer steps, or a longer outer step")
    if _unsolved(record):
        tries.append("more follower steps, or a longer follower step (bilax.diagnose says how long it may be)")
    if "iaptt" in str(config.get("method")) and k_bar.size and isinstance(steps, int) and steps > 1:
        late = k_bar[len(k_bar) // 2 :]
        if np.all(late == 1):
            tries.append("longer follower steps: truncation always chose the first")
        elif np.all(late == steps):
            tries.append("ia-gm, which is the same here: truncation always chose the last step")
    return (
        f"Try next: {'; '.join(tries)}."
        if tries
        else "Try next: another start or seed, to see whether it ends there too."
    )


def _status(record: RunRecord) -> Status | None:
    name = (record.result or {}).get("status")
    return Status[name] if isinstance(name, str) and name in Status.__members__ else None


def _still_moving(record: RunRecord) -> bool:
    upper = _curve(record, "upper")
    if upper.size < 10 or _status(record) is Status.converged:
        return False
    change = np.max(upper) - np.min(upper)
    return bool(abs(upper[-1] - upper[-1 - upper.size // 10]) > STILL * change)


def _unsolved(record: RunRecord) -> bool:
    residual = _curve(record, "residual")
    return bool(residual.size) and not np.median(residual[-1 - residual.size // 10 :]) <= 1e-2 * np.max(residual)


def _curve(record: RunRecord, name: str) -> Any:
    """One number per outer step, the mean where there are several starts; empty where nothing was recorded."""
    curves = np.atleast_2d(np.asarray(record.history.get(name, ())))
    if curves.ndim != 2 or curves.dtype.kind not in "biuf" or not curves.size:
        return np.zeros(0)
    with np.errstate(all="ignore"):
        return np.clip(np.nan_to_num(curves.astype(float), nan=np.inf), -1e100, 1e100).mean(axis=0)
