"""Which method with which steps: the settings that benchmark_bilevel's authors found by grid search, and others."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

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
        "saba": Setting(0.1, 1.0),
        "srba": Setting(0.1, 1.0, {"period_frac": 0.5}),
        "stocbio": Setting(0.1, 1.0),
        "amigo": Setting(0.01, 0.1),
        "mrbo": Setting(0.1, 0.1),
        "f2sa": Setting(0.1, 1.0, {"delta_lmbda": 0.01}),
    },
    "logistic": {
        "soba": Setting(0.03125, 0.01),
        "saba": Setting(0.125, 1.0),
        "fsla": Setting(0.03125, 0.01),
        "srba": Setting(0.25, 1.0, {"period_frac": 0.5}),
        "stocbio": Setting(0.125, 1.0),
        "amigo": Setting(0.125, 0.31622776601683794),
        "ttsa": Setting(0.5, 0.03162277660168379),
        "bsa": Setting(0.5, 0.01),
        "sustain": Setting(0.5, 0.1),
        "mrbo": Setting(0.5, 0.03162277660168379),
    },
    "cleaning 0.5": {
        "soba": Setting(1.0, 1e-4),
        "saba": Setting(0.1, 1e-3),
        "fsla": Setting(1.0, 1e-4),
        "srba": Setting(1e-3, 1e-5, {"period_frac": 512.0}),
        "stocbio": Setting(0.01, 1e-5),
        "amigo": Setting(1e-3, 1e-5),
        "ttsa": Setting(0.1, 1e-5),
        "bsa": Setting(0.1, 1e-5),
        "sustain": Setting(0.1, 1e-4),
        "mrbo": Setting(0.1, 1e-4),
        "f2sa": Setting(0.1, 1e-4, {"delta_lmbda": 1.0}),
    },
    "cleaning 0.9": {
        "soba": Setting(1.0, 1e-3),
        "saba": Setting(0.1, 1e-3),
        "fsla": Setting(1.0, 1e-3),
        "srba": Setting(1e-3, 1e-5, {"period_frac": 512.0}),
        "stocbio": Setting(0.01, 1e-5),
        "amigo": Setting(1e-3, 1e-5),
        "ttsa": Setting(0.1, 1e-5),
        "bsa": Setting(0.1, 1e-5),
        "sustain": Setting(0.1, 1e-4),
        "mrbo": Setting(1.0, 0.01),
    },
}
"""by problem and method; where there is none, benchmark_bilevel's default"""


def setting(problem: str, method: str) -> Setting:
    """What a method is run with on a problem; MA-SOBA, which was not searched for, with SOBA's."""
    known = SETTINGS.get(problem, {})
    return known.get(method) or known.get(method.removeprefix("ma-"), DEFAULT)._replace(tuned=False)


def decaying(rate: float, exponent: float = 0.5) -> Callable[[Any], Any]:
    """The schedule rate / (k + 1)^exponent."""

    def schedule(step):
        return rate / (step + 1.0) ** exponent

    return schedule


def growing(start: float, rate: float, exponent: float) -> Callable[[Any], Any]:
    """The schedule start + Σ_{j<k} rate / (j + 1)^exponent, its sum as an integral."""

    def schedule(step):
        return start + rate * ((step + 1.0) ** (1 - exponent) - 1) / (1 - exponent)

    return schedule


INNER_STEPS, TERMS = 10, 10
"""of the methods with an inner loop, and products with a Hessian: benchmark_bilevel's"""


def _rates(steps: Setting, y: float, x: float) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """The schedules of the follower and of the leader, by their exponents."""
    return decaying(steps.step_size, y), decaying(steps.step_size / steps.outer_ratio, x)


def _constant(steps: Setting) -> tuple[float, float]:
    return steps.step_size, steps.step_size / steps.outer_ratio


def _soba(steps: Setting, batches: float) -> Any:
    return bilax.soba(*_rates(steps, 0.5, 0.5))


def _ma_soba(steps: Setting, batches: float) -> Any:
    return bilax.ma_soba(*_rates(steps, 0.5, 0.5))


def _saba(steps: Setting, batches: float) -> Any:
    return bilax.saba(*_constant(steps), filled=False)


def _srba(steps: Setting, batches: float) -> Any:
    return bilax.srba(*_constant(steps), period=max(1, int(steps.more.get("period_frac", 0.5) * batches)))


def _fsla(steps: Setting, batches: float) -> Any:
    return bilax.fsla(*_rates(steps, 0.5, 0.5), forgetting=decaying(steps.step_size, 0.5))


def _stocbio(steps: Setting, batches: float) -> Any:
    return bilax.stocbio(INNER_STEPS, TERMS, *_constant(steps), v_rate=steps.step_size)


def _amigo(steps: Setting, batches: float) -> Any:
    return bilax.amigo(INNER_STEPS, TERMS, *_constant(steps), v_rate=steps.step_size)


def _bsa(steps: Setting, batches: float) -> Any:
    return bilax.bsa(INNER_STEPS, TERMS, *_rates(steps, 0.5, 0.5), v_rate=steps.step_size)


def _ttsa(steps: Setting, batches: float) -> Any:
    return bilax.ttsa(TERMS, *_rates(steps, 0.4, 0.6), v_rate=steps.step_size)


def _sustain(steps: Setting, batches: float) -> Any:
    return bilax.sustain(TERMS, *_rates(steps, 1 / 3, 1 / 3), v_rate=steps.step_size, forgetting=decaying(0.5, 2 / 3))


def _mrbo(steps: Setting, batches: float) -> Any:
    return bilax.mrbo(TERMS, *_rates(steps, 1 / 3, 1 / 3), v_rate=steps.step_size, forgetting=decaying(0.5, 2 / 3))


def _f2sa(steps: Setting, batches: float) -> Any:
    weight, z_rate = growing(1.0, steps.more.get("delta_lmbda", 0.1), 1 / 7), decaying(steps.step_size, 4 / 7)
    return bilax.f2sa(INNER_STEPS, *_rates(steps, 5 / 7, 4 / 7), z_rate=z_rate, weight=weight)


METHODS: dict[str, Callable[[Setting, float], Any]] = {
    "soba": _soba,
    "ma-soba": _ma_soba,
    "saba": _saba,
    "srba": _srba,
    "fsla": _fsla,
    "stocbio": _stocbio,
    "amigo": _amigo,
    "bsa": _bsa,
    "ttsa": _ttsa,
    "sustain": _sustain,
    "mrbo": _mrbo,
    "f2sa": _f2sa,
}
"""(steps, batches in both levels' examples) -> the method with the schedules that benchmark_bilevel gives it"""
PEERS = tuple(name for name in METHODS if name != "ma-soba")
"""those that benchmark_bilevel has too"""


PAPER_RATES = (0.03, 0.1)
"""of the follower: the paper's step of 0.03 for all data, and a longer one"""


def hyper_cleaning_methods(rate: float) -> dict[str, Any]:
    """All methods for the paper's hyper-cleaning by mini-batches: x by the paper's Adam, the follower by `rate`.

    Penalties weigh f ten times as much as F, products with a Hessian are scaled by `rate`, and recipes take ten steps
    on the batch of their outer step.
    """
    x = optax.adam(0.01)
    storm: Any = {"forgetting": 0.1}
    single, double = (rate, x), (rate, x, rate)
    return {
        "soba": bilax.soba(*single),
        "ma-soba": bilax.ma_soba(*single),
        "saba": bilax.saba(*single, filled=False),
        "srba": bilax.srba(*single, period=156),
        "fsla": bilax.fsla(*single, **storm),
        "stocbio": bilax.stocbio(INNER_STEPS, TERMS, *double),
        "amigo": bilax.amigo(INNER_STEPS, TERMS, *double),
        "bsa": bilax.bsa(INNER_STEPS, TERMS, *double),
        "ttsa": bilax.ttsa(TERMS, *double),
        "sustain": bilax.sustain(TERMS, *double, **storm),
        "mrbo": bilax.mrbo(TERMS, *double, **storm),
        "f2sa": bilax.f2sa(1, rate / 10, x, rate, 10.0),
        "f3sa": bilax.f3sa(rate / 10, x, rate, 10.0, 0.1),
        "bome": bilax.bome(INNER_STEPS, rate, rate, x),
        "v-pbgd": bilax.v_pbgd(1, rate, rate / 10, x, 10.0, carried=True),
        "g-pbgd": bilax.g_pbgd(rate / 10, x, 10.0),
        "meha": bilax.meha(rate, x),
        "pzobo": bilax.pzobo(INNER_STEPS, rate, x, 10),
        "rhg": bilax.rhg(INNER_STEPS, rate, start="warm"),
        "iaptt-gm": bilax.iaptt_gm(INNER_STEPS, rate),
        "one-step": bilax.one_step(rate),
    }


def samples_per_step(name: str, method: Any, steps: Setting, batch: int) -> float:
    """Examples of both levels that an outer step looks at; SRBA's whole passes are spread over its period."""
    passes = 1 / steps.more.get("period_frac", 0.5) if name == "srba" else 0.0
    return batch * (sum(method.draws) + passes)
