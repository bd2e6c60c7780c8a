"""Text that is not ours, such as names of files and classes, made fit for a terminal, a table or a figure."""

from typing import Any


def printable(text: Any) -> str:
    """With what a terminal would obey, and bytes that are no text, written out as \\x1b or \\udcff."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in str(text))


def cell(text: Any) -> str:
    """For a .csv file: a spreadsheet takes what begins with one of these for a formula, unless a quote precedes it."""
    shown = str(text)
    return f"'{shown}" if shown.startswith(("=", "+", "-", "@", "\t", "\r")) else shown


def label(text: Any) -> str:
    """For a figure: matplotlib takes what is between dollars for a formula."""
    return printable(text).replace("$", r"\$")
