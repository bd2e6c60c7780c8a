"""Which method with which steps: the settings that benchmark_bilevel's authors found by grid search, and others."""

from collections.abc import Callable
from typing import Any, NamedTuple

import bilax


class Setting(NamedTuple):
    """The follower's step length, and what the leader's is divided by."""

    step_size: float = 0.1
    outer_ratio: float = 1.0
    more: dict[str, Any] = {}  # noqa: RUF012
    """what one solver alone has, by the name that benchmark_bilevel has for it"""
    tuned: bool = True
    """whether it was searched for, or is that program's default"""


DEFAULT = Setting(tuned=False)
SETTINGS: dict[str, dict[str, Setting]] = {
    "quadratic": {
        "saba": Setting(0.1, 1),
        "srba": Setting(0.1, 1, {"period_frac": 0.5}),
        "stocbio": Setting(0.1, 1),
        "amigo": Setting(0.01, 0.1),
        "mrbo": Setting(0.1, 0.1),
        "f2sa": Setting(0.1, 1, {"delta_lmbda": 0.01}),
    },
    "logistic": {
        "soba": Setting(0.03125, 0.01),
        "saba": Setting(0.125, 1),
        "fsla": Setting(0.03125, 0.01),
        "srba": Setting(0.25, 1, {"period_frac": 0.5}),
        "stocbio": Setting(0.125, 1),
        "amigo": Setting(0.125, 0.31622776601683794),
        "ttsa": Setting(0.5, 0.03162277660168379),
        "bsa": Setting(0.5, 0.01),
        "sustain": Setting(0.5, 0.1),
        "mrbo": Setting(0.5, 0.03162277660168379),
    },
    "cleaning 0.5": {
        "soba": Setting(1, 1e-4),
        "saba": Setting(0.1, 1e-3),
        "fsla": Setting(1, 1e-4),
        "srba": Setting(1e-3, 1e-5, {"period_frac": 512.0}),
        "stocbio": Setting(0.01, 1e-5),
        "amigo": Setting(1e-3, 1e-5),
        "ttsa": Setting(0.1, 1e-5),
        "bsa": Setting(0.1, 1e-5),
        "sustain": Setting(0.1, 1e-4),
        "f2sa": Setting(0.1, 1e-4, {"delta_lmbda": 1.0}),
    },
    "cleaning 0.9": {
        "soba": Setting(1, 1e-3),
        "saba": Setting(0.1, 1e-3),
        "fsla": Setting(1, 1e-3),
        "srba": Setting(1e-3, 1e-5, {"period_frac": 512.0}),
        "stocbio": Setting(0.01, 1e-5),
        "amigo": Setting(1e-3, 1e-5),
        "ttsa": Setting(0.1, 1e-5),
        "bsa": Setting(0.1, 1e-5),
        "sustain": Setting(0.1, 1e-4),
        "mrbo": Setting(1, 0.01),
    },
}
"""by problem and method; where there is none, benchmark_bilevel's default"""


def setting(problem: str, method: str) -> Setting:
    """What a method is run with on a problem."""
    return SETTINGS.get(problem, {}).get(method, DEFAULT)


def decaying(rate: float, exponent: float = 0.5) -> Callable[[Any], Any]:
    """The schedule rate / (k + 1)^exponent."""

    def schedule(step):
        return rate / (step + 1.0) ** exponent

    return schedule


def _soba(steps: Setting) -> Any:
    return bilax.soba(decaying(steps.step_size), decaying(steps.step_size / steps.outer_ratio))


METHODS: dict[str, Callable[[Setting], Any]] = {"soba": _soba}
"""how each is made, with the schedules that benchmark_bilevel gives it"""
