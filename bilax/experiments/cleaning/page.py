"""The page that `bilax clean` writes: what to do, what was found, and the most suspicious examples to look at."""

import base64
import html
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

import bilax
from bilax.app.report import STYLE
from bilax.datasets.labelled import Labelled, shown_row

SHOWN = 60
"""suspicious examples on the page"""
CLASSES = 20
"""up to which labels against suggestions are a matrix; of more, the commonest pairs are listed"""
MORE_STYLE = """
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(6.5rem, 1fr)); gap: .7rem; }
figure { margin: 0; font-size: .8rem; line-height: 1.25; } figure img { width: 100%; image-rendering: pixelated; }
td.off { background: #d55e0033; } .lead { font-size: 1.1rem; }
"""


def page(title: str, data: Labelled, found: bilax.CleanedLabels, flagged: np.ndarray, others: dict[str, int]) -> str:
    """The whole page; `others` are further tools and how many labels they flag."""
    order = np.argsort(-found.probability, kind="stable")[:SHOWN]
    show = _pictures if data.is_picture else _rows
    return "\n".join(
        [
            "<!doctype html><html lang=en><head><meta charset=utf-8>",
            '<meta name=viewport content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title><style>{STYLE}{MORE_STYLE}</style></head><body>",
            f"<h1>{html.escape(title)}</h1><p class=lead>{html.escape(advice(found, flagged))}</p>",
            *(f"<p>{html.escape(note)}</p>" for note in found.notes),
            "<h2>The most suspicious labels</h2>",
            show(data, found, order),
            "<h2>Labels against suggestions</h2>",
            _confusion(data, found),
            "<h2>What other ways of judging say</h2>",
            _table(found, others),
            "</body></html>",
        ]
    )


def advice(found: bilax.CleanedLabels, flagged: np.ndarray) -> str:
    """One sentence on what to do."""
    n, count = len(flagged), int(flagged.sum())
    expected = float(found.probability.sum())
    if not count:
        return f"No label of {n:,} is flagged; about {expected:.0f} are expected to be wrong, none of them surely."
    precision = found.expected_precision(flagged)
    missed = expected - precision * count
    what = (
        "Leave them out or take the suggestions"
        if precision > 0.9
        else "Look at them before anything is changed, beginning with the first on this page"
    )
    return (
        f"{count:,} of {n:,} labels are flagged; {100 * precision:.0f} % of these are expected to be wrong, and about "
        f"{missed:.0f} wrong ones among the others. {what}."
    )


def _pictures(data: Labelled, found: bilax.CleanedLabels, order: np.ndarray) -> str:
    return f"<div class=pictures>{''.join(_figure(data, found, int(i)) for i in order)}</div>"


def _figure(data: Labelled, found: bilax.CleanedLabels, i: int) -> str:
    where = data.files[i].name if data.files else f"row {i}"
    words = f"{data.labels[i]} → {found.suggested[i]}, {100 * found.probability[i]:.0f} %"
    return (
        f'<figure><img alt="{html.escape(where, quote=True)}" src="{_png(data.inputs[i])}">'
        f"<figcaption>{html.escape(words)}<br><small>{html.escape(where)}</small></figcaption></figure>"
    )


def _png(picture: np.ndarray) -> str:
    values = picture.astype(np.float32)
    low, high = values.min(), values.max()
    pixels = (255 * (values - low) / max(high - low, 1e-12)).astype(np.uint8)
    pixels = pixels[..., 0] if pixels.shape[2:] == (1,) else pixels
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def _rows(data: Labelled, found: bilax.CleanedLabels, order: np.ndarray) -> str:
    names = [name for name, _ in shown_row(data, 0)]
    head = ["row", "label", "suggestion", "wrong with", *names]
    body = [
        [
            i,
            data.labels[i],
            found.suggested[i],
            f"{100 * found.probability[i]:.0f} %",
            *(v for _, v in shown_row(data, i)),
        ]
        for i in map(int, order)
    ]
    return table(head, body)


def _confusion(data: Labelled, found: bilax.CleanedLabels) -> str:
    classes = found.classes
    places = np.searchsorted(classes, data.labels.astype(classes.dtype)), np.searchsorted(classes, found.suggested)
    counts = np.zeros((len(classes), len(classes)), int)
    np.add.at(counts, places, 1)
    if len(classes) <= CLASSES:
        rows = []
        for i, name in enumerate(classes):
            cells = "".join(
                f"<td class='number{' off' if i != j and value else ''}'>{value or ''}</td>"
                for j, value in enumerate(counts[i])
            )
            rows.append(f"<tr><th>{html.escape(str(name))}</th>{cells}</tr>")
        head = "".join(f"<th>{html.escape(str(name))}</th>" for name in classes)
        words, whole = "<p>Rows: the label; columns: what is suggested.</p>", f"<tr><th></th>{head}</tr>{''.join(rows)}"
        return f"{words}<div class=scroll><table>{whole}</table></div>"
    np.fill_diagonal(counts, 0)
    first = np.argsort(-counts, axis=None)[:CLASSES]
    pairs = zip(*np.unravel_index(first, counts.shape), strict=True)
    return table(
        ["label", "suggested", "rows"], [[classes[i], classes[j], counts[i, j]] for i, j in pairs if counts[i, j]]
    )


def _table(found: bilax.CleanedLabels, others: dict[str, int]) -> str:
    rows = [[*row] for row in candidate_rows(found, others)]
    return table(["", "AUC on held-out trusted rows", "labels flagged", ""], rows)


def candidate_rows(found: bilax.CleanedLabels, others: dict[str, int]) -> list[tuple[str, str, int, str]]:
    """Each candidate: its AUC with a standard error, how many labels it flags, and whether it was taken."""
    rows = [
        (
            name,
            "" if np.isnan(judged.auc) else f"{judged.auc:.3f} ± {judged.error:.3f}",
            judged.flagged,
            "taken" if name == found.recommended else "",
        )
        for name, judged in found.table.items()
    ]
    return rows + [(name, "as confident learning", count, "") for name, count in others.items()]


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in HTML."""
    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
