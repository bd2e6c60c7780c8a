"""The command line. Nothing heavy is imported before it is known what is asked for."""

import dataclasses
import importlib
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bilax
from bilax.app.errors import nearest, refuse

COMMANDS = {
    "run": {
        "toy": ("bilax.experiments.toy.run:Toy", "the paper's non-convex example, one method, one start"),
        "convex": ("bilax.experiments.convex.run:Convex", "the paper's convex example, n = 50"),
        "cleaning": (
            "bilax.experiments.cleaning.run:Cleaning",
            "half the labels wrong: digits, MNIST, FashionMNIST",
        ),
        "quadratic": (
            "bilax.experiments.stochastic.run:Quadratic",
            "a noisy quadratic, mini-batches",
        ),
        "logistic": ("bilax.experiments.stochastic.run:Logistic", "a penalty per feature of ijcnn1, mini-batches"),
        "linear-cleaning": (
            "bilax.experiments.stochastic.run:LinearCleaning",
            "wrong labels, linear softmax, mini-batches",
        ),
        "few-shot": (
            "bilax.experiments.few_shot.run:FewShot",
            "new classes from a few examples: digits, sinusoids, Omniglot, ...",
        ),
    },
    "compare": {
        "toy": (
            "bilax.experiments.toy.compare:CompareToy",
            "all methods on the non-convex example, a table and a figure",
        ),
        "quadratic": (
            "bilax.experiments.stochastic.compare:CompareQuadratic",
            "mini-batch methods over time and samples seen",
        ),
        "logistic": (
            "bilax.experiments.stochastic.compare:CompareLogistic",
            "the same on ijcnn1",
        ),
        "cleaning": (
            "bilax.experiments.stochastic.compare:CompareCleaning",
            "the paper's hyper-cleaning by mini-batches: all methods for the same time",
        ),
        "truncation": (
            "bilax.experiments.few_shot.truncation:Truncation",
            "IAPTT-GM with and without truncation, as the follower of few-shot tasks gets harder",
        ),
    },
    "reproduce": {
        "figure-1": ("bilax.experiments.toy.figures:Figure1", "error curves from three starts, and basin maps"),
        "figure-2": ("bilax.experiments.toy.figures:Figure2", "k̄ and speed, with and without truncation"),
        "table-1": ("bilax.experiments.toy.figures:Table1", "time and memory of five methods"),
        "table-2": ("bilax.experiments.few_shot.table_2:Table2", "few-shot learning by all methods"),
        "table-3": ("bilax.experiments.cleaning.table_3:Table3", "hyper-cleaning of MNIST and FashionMNIST"),
        "table-3-relu": ("bilax.experiments.cleaning.table_3:Table3Relu", "the same with ReLU, by mini-batches"),
        "figure-3-left": ("bilax.experiments.convex.figures:Figure3Left", "acceleration on the convex example"),
        "figure-3-right": ("bilax.experiments.cleaning.table_3:Figure3Right", "acceleration in hyper-cleaning"),
        "theory": (
            "bilax.experiments.theory.theorems:Theory",
            "the lemmas and theorems, measured against what they predict",
        ),
        "all": ("bilax.experiments.stored.everything:Everything", "all of these, going on where it was broken off"),
        "claims": ("bilax.experiments.stored.pages:Claims", "the page that tells each claim beside what is stored"),
    },
    "diagnose": {
        "toy": ("bilax.experiments.diagnose:DiagnoseToy", "the non-convex example at a point"),
        "convex": ("bilax.experiments.diagnose:DiagnoseConvex", "the convex example"),
        "suite": ("bilax.experiments.diagnose:DiagnoseSuite", "one of twelve problems with known answers"),
    },
    "bench": {
        "suite": (
            "bilax.experiments.suite.bench:Suite",
            "twelve problems with known answers, every method and solve_global",
        ),
        "everyday": (
            "bilax.experiments.everyday.bench:EverydayBench",
            "ordinary problems by the default call, judged by SciPy",
        ),
        "clean": (
            "bilax.experiments.cleaning.bench:CleanBench",
            "wrong labels found, beside cleanlab and a model of the trusted rows alone",
        ),
        "sklearn": (
            "bilax.experiments.linear.bench:LinearBench",
            "tuned penalties beside scikit-learn's grids",
        ),
        "certificates": (
            "bilax.experiments.suite.certificates:Certificates",
            "two thousand random followers, to catch a certificate that is wrong",
        ),
        "proofs": (
            "bilax.experiments.suite.proofs:Proofs",
            "39 problems with known answers: what solve_global proves of follower and leader",
        ),
        "auto": ("bilax.experiments.suite.by_auto:ByAuto", "the same problems by the default call"),
        "stale": ("bilax.experiments.stored.stale:Stale", "which stored numbers are older than the code they measure"),
        "speed": ("bilax.experiments.speed.bench:Speed", "what the outer loop and the sweep cost"),
        "implicit": ("bilax.experiments.peers.implicit:Implicit", "a hypergradient of a solved follower beside jaxopt"),
        "peers": (
            "bilax.experiments.peers.side_by_side:Peers",
            "outer steps beside PyTorch, higher, TorchOpt, BOAT and Betty",
        ),
        "stochastic": (
            "bilax.experiments.peers.stochastic:Stochastic",
            "mini-batch methods beside benchmark_bilevel's own solvers",
        ),
        "scale": (
            "bilax.experiments.scale.bench:Scale",
            "memory and time of long followers, growth of an outer step, what devices exchange",
        ),
        "roofline": ("bilax.experiments.speed.roofline:Roofline", "hyper-cleaning against the matrix-multiply rate"),
    },
    "data": {
        "list": ("bilax.app.data_command:DataList", "which data sets are here, and where"),
        "check": ("bilax.app.data_command:DataCheck", "whether their files are whole"),
        "fetch": ("bilax.app.data_command:DataFetch", "download one, resumed and checked"),
    },
}

VERBS = {
    "demo": ("bilax.experiments.demo:Demo", "the paper's example, and wrong labels found among digits"),
    "clean": ("bilax.experiments.cleaning.clean:Clean", "find wrong labels in your own tables, arrays and pictures"),
    "evaluate": (
        "bilax.experiments.few_shot.trained:Evaluate",
        "test a few-shot run again, also by Omniglot's own test",
    ),
    "adapt": ("bilax.experiments.few_shot.trained:Adapt", "name pictures of your own classes with a few-shot run"),
    "sweep": ("bilax.experiments.sweep:Sweep", "settings of an experiment, searched by Optuna"),
    "report": ("bilax.app.report:Report", "one HTML page on one or several runs: curves, settings, a comparison"),
    "completion": ("bilax.app.completion:Completion", "a script that completes commands and options in your shell"),
}

SUMMARY = {
    "run": "one experiment with one method",
    "compare": "all methods on one experiment",
    "reproduce": "a table or figure of the paper, with its claims checked",
    "diagnose": "curvature, step length, minima, and which method to use",
    "bench": "speed, memory, and problems with known answers",
    "data": "data sets",
}

EXAMPLES = """\
examples
  bilax compare toy                                     every method on the paper's example
  bilax run toy --method iaptt-gm --inner-steps 80      one method, your settings
  bilax report runs/toy-*                               look at runs side by side
  bilax reproduce figure-1 --quick                      a figure of the paper, in small
  bilax run toy --help                                  what can be set
  eval "$(bilax completion bash)"                       completion, also for zsh"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `bilax`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return
    if words[0] in ("-V", "--version"):
        print(f"bilax {bilax.__version__}")
        return
    command = _pick("command", words[0], COMMANDS | VERBS)
    if command in VERBS:
        place, rest = VERBS[command][0], words[1:]
        name = command
    elif len(words) == 1 or words[1] in ("-h", "--help"):
        print(_things(command))
        return
    else:
        name = f"{command} {_pick(f'thing to {command}', words[1], COMMANDS[command])}"
        place, rest = COMMANDS[command][words[1]][0], words[2:]
    _cache_compiled_programs()
    import tyro

    cut = rest.index("--") if name == "sweep" and "--" in rest else len(rest)
    config = tyro.cli(load(place), prog=f"bilax {name}", args=rest[:cut])
    if cut < len(rest):
        config = dataclasses.replace(config, rest=tuple(rest[cut + 1 :]))
    if getattr(config, "convolves", False):
        from bilax.models.faster_convolutions import faster_convolutions

        faster_convolutions()
    several = getattr(config, "devices", None), getattr(config, "distributed", False)
    if any(several):
        from bilax.app.several_devices import prepare

        prepare(*several)
    try:
        config.main()
    except (RuntimeError, ValueError) as error:
        from bilax.app.several_devices import lost, says_lost

        if not (several[1] and says_lost(error)):
            raise
        lost(name, error)
    except BrokenPipeError:
        sys.exit(141)
    except KeyboardInterrupt:
        print(f"\nbilax {name}: broken off.", file=sys.stderr)
        sys.exit(130)


def load(place: str) -> Any:
    """The dataclass that a place such as `package.module:Name` stands for."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _cache_compiled_programs() -> None:
    # Compiled programs are kept between runs, unless the user has chosen a place or none.
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "bilax" / "compiled"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")


def _pick(kind: str, word: str, known: dict[str, Any]) -> str:
    if word not in known:
        refuse(f"bilax: unknown {kind} '{word}': {nearest(word, list(known))}")
    return word


def _overview() -> str:
    lines = [
        "bilax: bilevel optimization whose followers need not be convex",
        "",
        "usage: bilax COMMAND NAME [options]",
        "",
    ]
    for command, summary in SUMMARY.items():
        names = textwrap.wrap(", ".join(COMMANDS[command]), 84)
        lines += [f"  {command:<11} {summary}", *(f"  {'':<11} {line}" for line in names)]
    lines += [f"  {command:<11} {text}" for command, (_, text) in VERBS.items()]
    return "\n".join([*lines, "", EXAMPLES])


def _things(command: str) -> str:
    lines = [f"usage: bilax {command} NAME [options]", ""]
    lines += [f"  {name:<14} {text}" for name, (_, text) in COMMANDS[command].items()]
    return "\n".join([*lines, "", f"bilax {command} NAME --help shows what can be set."])
