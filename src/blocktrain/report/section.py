"""What a section of the page is, and what it is made of: frame, plots, table, the colours of blocks.

Each section has a file in `sections/`, and `sections/__init__.py` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

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


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page that shows one run.

    title: plain text, in which "{unit}" becomes what the run counts (tokens, texts or images).
    note: a plain text that follows the title. Title and note are escaped here.
    html: the markup below them; it must escape every text that comes from the run.
    condition: whether the run's log has what the section shows.
    form: "wide" or "half" of the page's width, or "folded" until it is clicked.
    in_comparison: whether a page that compares several runs has the section too, once for each run.
    """

    title: str
    html: Callable[[RunRecord], str]
    note: Callable[[RunRecord], str] = lambda run: ""
    condition: Callable[[RunRecord], bool] = lambda run: True
    form: Literal["wide", "half", "folded"] = "wide"
    in_comparison: bool = False

    def markup(self, run: RunRecord, name: str = "") -> str:
        """The section for `run`, or nothing where its condition does not hold; `name` tells compared runs apart."""
        if not self.condition(run):
            return ""
        title = self.title.format(unit=run.header.unit) + (f" of {name}" if name else "")
        if self.form == "folded":
            summary = f"<summary>{escape(title)}</summary>{escape(self.note(run))}"
            return f"<details>{summary}{self.html(run)}</details>\n"
        return figure(title, self.note(run), self.html(run), css="half" if self.form == "half" else "")
