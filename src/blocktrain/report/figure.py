"""What a figure of the page is made of: its frame, its plots, its table, and the colours of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from blocktrain.report.run import RunRecord

MOST_DOTS = 100  # a line of more evaluations has no dots


def figure(title: str, note: str, *body: str, css: str = "") -> str:
    """A titled figure; `title` and `note` are plain text, `body` is markup."""
    caption = f"<figcaption><strong>{escape(title)}</strong> {escape(note)}</figcaption>"
    return f'<figure class="{escape(css)}">{caption}{"".join(body)}</figure>\n'


def plot(charts: str, name: str, data: str) -> str:
    """Charts that share one x axis and one crosshair, over the values in the data block `name`."""
    return f'<div class="plot" tabindex="0" data-values="{escape(name)}">{charts}</div>{data}'


def table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str = "", total: Sequence[str] = ()
) -> str:
    """A table of plain texts, which are escaped here. The first cell of a row names it; if it starts with a space it
    is indented. `total` is a last row, set apart."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' if text else "<th></th>" for text in headings)
    foot = f"<tfoot>{_table_row(total)}</tfoot>" if total else ""
    return (
        '<div class="scroll"><table>'
        + (f"<caption>{escape(caption)}</caption>" if caption else "")
        + f"<thead><tr>{head}</tr></thead><tbody>{''.join(map(_table_row, rows))}</tbody>{foot}</table></div>\n"
    )


def _table_row(cells: Sequence[str]) -> str:
    label, *others = cells
    css = " class=inner" if label.startswith(" ") else ""
    columns = "".join(f"<td>{escape(cell)}</td>" for cell in others)
    return f'<tr><th scope="row"{css}>{escape(label.strip())}</th>{columns}</tr>\n'


def block_colour(run: RunRecord, block: int) -> str:
    """The class that carries the colour of a block."""
    return f"k{block % max(len(run.header.blocks), 1)}"


def has_several_blocks(run: RunRecord) -> bool:
    """Whether the run visits blocks in turn, so that its lines change colour."""
    return not run.is_full and len(run.header.blocks) > 1 and bool(run.visits)
