"""Errors for people: a sentence and an exit code in place of a traceback, and a hint for a mistyped word."""

import contextlib
import difflib
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from bilax.app.text import printable


def nearest(word: str, known: Sequence[str]) -> str:
    """A hint for a mistyped word: the nearest known one, or all of them."""
    spelt = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), spelt, 1, 0.5)
    return f"did you mean {spelt[close[0]]}?" if close else f"known are: {', '.join(known)}."


def refuse(message: str) -> NoReturn:
    """Ends the program with a message and the exit code of wrong usage."""
    print(printable(message), file=sys.stderr)
    sys.exit(2)


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """What is wrong with data, options or places to write ends the program with a message in place of a traceback."""
    try:
        yield
    except (ValueError, FloatingPointError, OSError) as error:
        raise SystemExit(f"error: {printable(error)}") from error
