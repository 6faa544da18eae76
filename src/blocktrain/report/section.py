"""What a section of the page is. Each section has a file in `sections/`, and `sections/registry.py` lists them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Literal

from blocktrain.report.figure import figure
from blocktrain.report.run import RunRecord


def _always(run: RunRecord) -> bool:
    return True


def _no_note(run: RunRecord) -> str:
    return ""


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
    note: Callable[[RunRecord], str] = _no_note
    condition: Callable[[RunRecord], bool] = _always
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
