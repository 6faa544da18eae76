"""The page around the figures: one HTML file that needs no network and no other file.

Its content security policy allows one script, ours, by its hash: should a run's text ever slip through unescaped,
the browser still refuses to run it or to fetch what it names.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from html import escape
from importlib import resources

from blocktrain.report import cache_section, comparison, figures, memory_section, samples
from blocktrain.report.format import ABSENT, decimal, plural
from blocktrain.report.in_words import in_words
from blocktrain.report.multiplier import loss_of, multipliers, multipliers_text
from blocktrain.report.palette import style
from blocktrain.report.records import Evaluation
from blocktrain.report.run import RunRecord
from blocktrain.report.series import evenly
from blocktrain.report.summary import Summary, columns, rows, summaries_of
from blocktrain.units import format_count, format_seconds

MOST_ROWS = 200  # evaluations in the table
WRITTEN_FROM = "<p>Written by blocktrain from the run's events.jsonl. Losses are in nats.</p>\n"


def page(runs: Sequence[RunRecord]) -> str:
    """The report of one run, or the comparison of several, as HTML."""
    summaries = summaries_of(runs)
    names = [item["name"] for item in summaries]
    named = list(zip(runs, names if runs[1:] else [""], strict=True))  # alone, a run needs no name in its headings
    if len(runs) == 1:
        run = runs[0]
        title, meta, sentences = run.header.name, _meta(run), in_words(run, summaries[0])
        body = _single(run)
    else:
        comparison.comparable(runs)
        title, meta = " · ".join(names), plural(len(runs), "run") + " compared"
        if len(runs) > 3:
            title, meta = meta, title
        sentences, body = [_comparison_words(runs, names)], comparison.figures(runs, names)
    told = zip(named, summaries, strict=True)
    notices = [text for (run, name), item in told for text in _notices(run, item, name)]
    header = f'<h1>{escape(title)}</h1>\n<p class="meta">{escape(meta)}</p>\n'
    header += "".join(f'<p class="lede">{escape(text)}</p>\n' for text in sentences)
    header += "".join(f'<p class="notice">{escape(text)}</p>\n' for text in notices)
    tables = _figures_table(summaries) + "".join(
        part(run, name)
        for part in (memory_section.section, cache_section.section, samples.section, _evaluations)
        for run, name in named
    )
    footer = "".join(_details(run, name) for run, name in named)
    return document(
        title, header, body + tables, footer + WRITTEN_FROM, max(len(runs), *(len(run.header.blocks) for run in runs))
    )


def _comparison_words(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    unit, _ = loss_of(runs)
    found = multipliers(runs, names)
    if found:
        return multipliers_text(found, runs[0].header.unit, unit)
    return f"Validation losses in {unit}. A B-F multiplier needs a full run and a BCD run."


def _meta(run: RunRecord) -> str:
    header = run.header
    state = {"drop": "moments dropped", "host": "moments kept on the host", "disk": "moments kept on disk"}
    told = [header.method, header.optimizer, header.precision]
    told += [state.get(header.state, header.state)] if not run.is_full else []
    told += ["visits train all blocks above too"] if header.span == "suffix" else []
    told += [f"tail moved by {header.tail}"] if header.tail != "none" else []
    told.append(str(run.details.get("started", "")).replace("T", " ").replace("+00:00", " UTC"))
    told.append(f"ended: {run.end.reason}" if run.end else "")
    return " · ".join(text for text in told if text)


def _notices(run: RunRecord, item: Summary, name: str) -> list[str]:
    lead = f"{name}: " if name else ""
    notices = []
    if run.end is None:
        planned = f" of {run.header.steps_planned:,} planned" if run.header.steps_planned else ""
        notices.append(
            f"{lead}This run has not finished: its log stops at step {run.steps_done:,}{planned}. It is still going or "
            f"was interrupted."
        )
    if item["nonfinite_steps"]:
        notices.append(
            f"{lead}The loss of {plural(item['nonfinite_steps'], 'step')} was not a finite number: gaps in the lines."
        )
    if item["skipped_steps"]:
        notices.append(f"{lead}{plural(item['skipped_steps'], 'step')} computed but skipped by the optimizer.")
    return notices


def _single(run: RunRecord) -> str:
    if not run.steps and not run.evaluations:
        losses = ""
    else:
        losses = figures.loss_by_tokens(run) + figures.accuracy(run) + figures.loss_by_time(run)
    unit = run.header.unit
    rate = figures.by_tokens(run, "Learning rate", f"by training {unit}.", lambda row: row.lr, "lr")
    norm = figures.by_tokens(
        run,
        "Gradient norm",
        f"of the active block before clipping, by training {unit}.",
        lambda row: row.grad_norm,
        "norm",
    )
    return losses + figures.memory(run) + figures.flops(run) + rate + norm


def _figures_table(summaries: Sequence[Summary]) -> str:
    headings = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in columns(summaries))
    body = "".join(
        f'<tr><th scope="row"{" class=inner" if row.label.startswith(" ") else ""}>{escape(row.label.strip())}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row.cells)
        + "</tr>\n"
        for row in rows(summaries)
    )
    return (
        f'<div class="scroll"><table><caption>In figures</caption><thead><tr><th></th>{headings}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>\n"
    )


def _evaluations(run: RunRecord, name: str) -> str:
    """Every evaluation in a table, with the measures that the log has."""
    if not run.evaluations:
        return ""
    unit = run.header.unit
    optional: dict[str, Callable[[Evaluation], float | None]] = {
        "loss per byte": lambda row: row.loss_per_byte,
        "accuracy": lambda row: row.accuracy,
        "exact match": lambda row: row.exact_match,
    }
    known = {text: read for text, read in optional.items() if any(read(row) is not None for row in run.evaluations)}
    headings = ("step", unit, "time", "block", f"loss per {unit.removesuffix('s')}", *known)
    body = ""
    for row in (run.evaluations[index] for index in evenly(len(run.evaluations), MOST_ROWS)):
        cells = [f"{row.step:,}", format_count(row.tokens), format_seconds(row.seconds)]
        cells += [ABSENT if row.block is None else str(row.block), decimal(row.loss, 4)]
        cells += [decimal(read(row), 4) for read in known.values()]
        body += f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n"
    heading = "".join(f'<th scope="col">{escape(text)}</th>' for text in headings)
    title = "Every evaluation" + (f" of {name}" if name else "")
    return (
        f'<details><summary>{escape(title)}</summary><div class="scroll"><table><thead>'
        f"<tr>{heading}</tr></thead><tbody>{body}</tbody></table></div></details>\n"
    )


def _details(run: RunRecord, name: str) -> str:
    title = "Configuration and environment" + (f" of {name}" if name else "")
    if not run.details:
        return f"<p>{escape(title)}: run.json is missing or cannot be read.</p>\n"
    text = json.dumps(run.details, indent=2, ensure_ascii=False)
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>\n"


def document(title: str, header: str, body: str, footer: str, colours: int) -> str:
    """One HTML file: `header`, `body` and `footer` are markup, `title` is text."""
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
