"""The page: one HTML file that needs no network and no other file.

Its content security policy allows one script, ours, by its hash. Should a run's text ever slip through unescaped, the
browser still refuses to run it or to fetch what it names.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path

from blocktrain.errors import DataError
from blocktrain.outputs import write_output
from blocktrain.report import comparison
from blocktrain.report.format import plural
from blocktrain.report.in_words import in_words
from blocktrain.report.multiplier import loss_of, multipliers, multipliers_text
from blocktrain.report.palette import style
from blocktrain.report.run import RunRecord
from blocktrain.report.section import table
from blocktrain.report.sections import SECTIONS
from blocktrain.report.summary import Summary, summaries_of
from blocktrain.report.summary_table import columns, rows

WRITTEN_FROM = "<p>Written by blocktrain from the run's events.jsonl. Losses are in nats.</p>\n"
STATES = {"drop": "moments dropped", "host": "moments kept on the host", "disk": "moments kept on disk"}


def page(runs: Sequence[RunRecord]) -> str:
    """The report of one run, or the comparison of several, as HTML."""
    summaries = summaries_of(runs)
    names = [item.name for item in summaries] if runs[1:] else [""]  # alone, a run needs no name in its headings
    if len(runs) == 1:
        title, meta = runs[0].header.name, _meta(runs[0])
        sentences = in_words(runs[0], summaries[0])
        body = "".join(section.markup(runs[0]) for section in SECTIONS if not section.in_comparison)
    else:
        body = comparison.figures(runs, names)
        title, meta = " · ".join(names), plural(len(runs), "run") + " compared"
        if len(runs) > 3:
            title, meta = meta, title
        found, (unit, _) = multipliers(runs, names), loss_of(runs)
        sentence = f"Validation losses are in {unit}. A B-F multiplier needs a full run and a BCD run with the same"
        sentences = [multipliers_text(found, runs[0].header.unit, unit) if found else f"{sentence} optimizer."]
    notices = [
        text for run, item, name in zip(runs, summaries, names, strict=True) for text in _notices(run, item, name)
    ]
    header = f'<h1>{escape(title)}</h1>\n<p class="meta">{escape(meta)}</p>\n'
    lede = "".join(f'<p class="lede">{escape(text)}</p>\n' for text in sentences)
    header += lede.replace("`blocktrain compare`", "<code>blocktrain compare</code>")
    header += "".join(f'<p class="notice">{escape(text)}</p>\n' for text in notices)
    named = list(zip(runs, names, strict=True))
    body += table(["", *columns(summaries)], [(row.label, *row.cells) for row in rows(summaries)], caption="In figures")
    body += "".join(section.markup(run, name) for section in SECTIONS if section.in_comparison for run, name in named)
    footer = "".join(_details(run, name) for run, name in named) + WRITTEN_FROM
    return document(title, header, body, footer, max(len(runs), *(len(run.header.blocks) for run in runs)))


def _meta(run: RunRecord) -> str:
    header = run.header
    facts = [header.method, header.optimizer, header.precision]
    facts += [STATES.get(header.state, header.state)] if not run.is_full else []
    facts += ["a visit trains all blocks above, too"] if header.span == "suffix" else []
    facts += [f"the tail is updated by {header.tail}"] if header.tail != "none" else []
    facts.append(str(run.details.get("started", "")).replace("T", " ").replace("+00:00", " UTC"))
    facts.append(f"ended: {run.end.reason}" if run.end else "")
    return " · ".join(text for text in facts if text)


def _notices(run: RunRecord, item: Summary, name: str) -> list[str]:
    lead = f"{name}: " if name else ""
    notices = []
    if run.end is None:
        planned = f" of {run.header.steps_planned:,} planned" if run.header.steps_planned else ""
        notices.append(
            f"{lead}This run has not finished: its log stops at step {run.steps_done:,}{planned}. "
            "It is still training, or it was interrupted."
        )
    if item.nonfinite_steps:
        notices.append(
            f"{lead}The loss of {plural(item.nonfinite_steps, 'step')} was not a finite number, which leaves gaps in "
            "the lines."
        )
    if item.skipped_steps:
        notices.append(
            f"{lead}The optimizer skipped {plural(item.skipped_steps, 'step')} after computing the gradients."
        )
    return notices


def _details(run: RunRecord, name: str) -> str:
    title = "Configuration and environment" + (f" of {name}" if name else "")
    if not run.details:
        return f"<p>{escape(title)}: run.json is missing or cannot be read.</p>\n"
    text = json.dumps(run.details, indent=2, ensure_ascii=False)
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>\n"


def document(title: str, header: str, body: str, footer: str, colours: int) -> str:
    """One HTML file: `header`, `body` and `footer` are markup, `title` is text; it has colours for `colours` blocks or
    runs."""
    folder = resources.files("blocktrain.report")
    css = folder.joinpath("report.css").read_text(encoding="utf-8") + style(colours)
    script = "\n" + folder.joinpath("report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        f"base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)} – blocktrain</title>\n<style>\n{css}\n</style>\n</head>\n<body>\n"
        f"<header>\n{header}</header>\n<main>\n{body}</main>\n<footer>\n{footer}</footer>\n"
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Write the report of one run folder, or the comparison of several, to the HTML file `out`; returns `out`.

    A reader never sees half a page, see `write_output`. Raises `DataError` for a folder without a readable log, and
    `StorageError` where `out` cannot be written.
    """
    if not folders:
        raise DataError("a report needs the folder of at least one run")
    text = page([RunRecord.load(folder) for folder in folders])
    write_output(out, text)
    return out
