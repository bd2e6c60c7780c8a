"""The command line. Nothing heavy is imported before it is known what is asked for."""

import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

import bilax

COMMANDS = {
    "run": {
        "toy": ("bilax.experiments.single:Toy", "the paper's non-convex example, one method, one start"),
        "convex": ("bilax.experiments.single:Convex", "the paper's convex example, n = 50"),
    },
    "compare": {
        "toy": ("bilax.experiments.single:CompareToy", "all methods on the non-convex example, a table and a figure"),
    },
    "reproduce": {
        "figure-1": ("bilax.experiments.toy:Figure1", "error curves from three starts, and basin maps"),
        "figure-2": ("bilax.experiments.toy:Figure2", "k̄ and speed, with and without truncation"),
        "table-1": ("bilax.experiments.toy:Table1", "time and memory of five methods"),
        "figure-3-left": ("bilax.experiments.convex:Figure3Left", "acceleration on the convex example"),
    },
    "bench": {
        "speed": ("bilax.experiments.speed:Speed", "what the outer loop and the sweep cost"),
    },
}

SUMMARY = {
    "run": "one experiment with one method",
    "compare": "all methods on one experiment",
    "reproduce": "a table or figure of the paper, with its claims checked",
    "bench": "speed and memory",
}

EXAMPLES = """\
examples
  bilax compare toy                                     every method on the paper's example
  bilax run toy --method iaptt-gm --inner-steps 80      one method, your settings
  bilax reproduce figure-1 --quick                      a figure of the paper, in small
  bilax run toy --help                                  what can be set"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `bilax`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return
    if words[0] in ("-V", "--version"):
        print(f"bilax {bilax.__version__}")
        return
    command = _pick("command", words[0], COMMANDS)
    things = COMMANDS[command]
    if len(words) == 1 or words[1] in ("-h", "--help"):
        print(_things(command))
        return
    name = _pick(f"thing to {command}", words[1], things)
    module, _, attribute = things[name][0].partition(":")
    import tyro

    thing = getattr(importlib.import_module(module), attribute)
    config = tyro.cli(thing, prog=f"bilax {command} {name}", args=words[2:])
    try:
        config.main()
    except BrokenPipeError:
        sys.exit(141)


def nearest(word: str, known: Sequence[str]) -> str:
    """A hint for a mistyped word: the nearest known one, or all of them."""
    close = difflib.get_close_matches(word, known, 1, 0.5)
    return f"did you mean {close[0]}?" if close else f"known are: {', '.join(known)}."


def _pick(kind: str, word: str, known: dict) -> str:
    if word not in known:
        _refuse(f"bilax: unknown {kind} '{word}': {nearest(word, list(known))}")
    return word


def _refuse(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(2)


def _overview() -> str:
    lines = [
        "bilax: bilevel optimization whose followers need not be convex",
        "",
        "usage: bilax COMMAND NAME [options]",
        "",
    ]
    for command, summary in SUMMARY.items():
        lines.append(f"  {command:<10} {summary}: {', '.join(COMMANDS[command])}")
    return "\n".join([*lines, "", EXAMPLES])


def _things(command: str) -> str:
    lines = [f"usage: bilax {command} NAME [options]", ""]
    lines += [f"  {name:<14} {text}" for name, (_, text) in COMMANDS[command].items()]
    return "\n".join([*lines, "", f"bilax {command} NAME --help shows what can be set."])
