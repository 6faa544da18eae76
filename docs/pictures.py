"""The pictures of the documentation, drawn with the report's own charts.

    python docs/pictures.py docs/pictures                the README's picture, from benchmarks/memory/result.json
    python docs/pictures.py docs/pictures runs/how       and those of how.md, from a run's log:

    blocktrain train examples/quickstart.toml --out runs/how --set sampling.scope=sweep --set sampling.rate=0.0064 \\
      --set schedule.visit="2 epochs" --set prefix.store=host

Writes step.svg; with a run also loss.svg, memory.svg and flops.svg. They carry their own colours, light and dark.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from blocktrain.report.chart import Bar, stacked_bars
from blocktrain.report.memory_parts import part_colour, parts_key
from blocktrain.report.palette import style
from blocktrain.report.run import RunRecord
from blocktrain.report.section import figure
from blocktrain.report.sections import loss
from blocktrain.report.sections.step_flops import STEP_FLOPS
from blocktrain.report.sections.step_memory import STEP_MEMORY

RESULT = Path(__file__).resolve().parent.parent / "benchmarks" / "memory" / "result.json"
CARD_GIB = 24e9 / 2**30  # a card of 24 GB
# The report's parts of memory, and what the memory benchmark calls them.
PARTS = {
    "weights": ("frozen", "active"),
    "master": ("master",),
    "gradients": ("gradients",),
    "moments": ("moments",),
    "activations": ("activations", "logits", "inputs", "buffers"),
}
# The bars of step.svg: their names and the rows of the result file, all Llama-2-7B with AdamW.
ROWS = {
    "full training": {"blocks": 1},
    "blocks, bf16": {"blocks": 132, "precision": "bf16-exact", "moments": "fp32", "options": {"fused": True}},
    "blocks, int8": {"blocks": 132, "precision": "int8"},
    "blocks, nf4": {"blocks": 132, "precision": "nf4"},
}
WIDTH = 720
CHART = re.compile(r'<svg class="chart" height="(\d+)".*?</svg>(?=<p |</div>)', re.DOTALL)
SWATCH = re.compile(r'<i class="swatch ([\w ]+)"></i>(.*?)</li>', re.DOTALL)
MARKUP = re.compile(r"<[^>]+>")


def picture(markup: str, blocks: int, *, left: int, right: int) -> str:
    """The charts of a report's figure (its HTML), one below the other under its key, as an SVG that stands alone."""
    key, top = _key([(css, MARKUP.sub("", text)) for css, text in SWATCH.findall(markup)])
    placed = [key]
    for chart in CHART.finditer(markup):
        box = f'x="{left}" y="{top}" width="{WIDTH - left - right}" '
        placed.append(chart[0].replace('<svg class="chart" ', f'<svg class="chart" {box}', 1))
        top += int(chart[1]) + 20
    css = resources.files("blocktrain.report").joinpath("report.css").read_text(encoding="utf-8")
    rules = css.replace(".chart { display: block; width: 100%;", ".chart {") + style(blocks)
    below = 25 if 'class="name"' in markup else -10  # the name of an x axis hangs below its chart
    font = "text { font-family: system-ui, sans-serif; font-size: 12px; fill: var(--soft); }"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + below}">'
        f"<style>{rules}{font}</style>"
        f'<rect width="100%" height="100%" rx="6" style="fill: var(--ground)"/>{"".join(placed)}</svg>\n'
    )


def _key(items: Sequence[tuple[str, str]]) -> tuple[str, int]:
    """Swatches and their names in lines that fit the width; also where the charts below begin."""
    x, y, drawn = 10, 16, ""
    for css, text in items:
        wide = 26 + round(6.6 * len(text))
        if x + wide > WIDTH:
            x, y = 10, y + 20
        if css == "ring":
            drawn += f'<circle class="dot ring" cx="{x + 5}" cy="{y - 4}" r="4"/>'
        elif css == "mark":
            drawn += f'<line class="mark" x1="{x + 5}" x2="{x + 5}" y1="{y - 11}" y2="{y + 2}"/>'
        else:
            drawn += f'<rect class="fill {css}" x="{x}" y="{y - 9}" width="10" height="10" rx="2"/>'
        drawn += f'<text x="{x + 15}" y="{y}">{text}</text>'
        x += wide
    return drawn, y + 24 if items else 10


def step() -> str:
    """What the largest step of Llama-2-7B holds, by part, in full training and in blocks."""
    found = [row for row in json.loads(RESULT.read_text())["rows"] if row["model"] == "llama-2-7b"]
    device = [row for row in found if row["memory"]["frozen"] == "device" and row["optimizer"] == "AdamW"]
    bars = []
    for label, keys in ROWS.items():
        (row,) = [row for row in device if all(row[key] == value for key, value in keys.items())]
        pieces = [
            (sum(row["parts_gib"].get(name, 0.0) for name in names), part_colour(part), part)
            for part, names in PARTS.items()
        ]
        text = f"{row['peak_gib']:.1f} GiB"
        bars.append(Bar(label=label, pieces=pieces, text=text, mark=CARD_GIB, strong=row["blocks"] == 1))
    limit = max(sum(value for value, _, _ in bar.pieces) for bar in bars)
    chart = stacked_bars(bars, limit, label="memory of a step of Llama-2-7B by part", row_height=30)
    key = parts_key([*PARTS]).replace("</ul>", '<li><i class="swatch mark"></i>a card of 24 GB</li></ul>')
    return picture(figure("", "", key, f'<div class="bars">{chart}</div>'), 1, left=120, right=90)


def main() -> None:
    """Write the README's picture; with a run, those of its log too."""
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    drawn = {"step": step()}
    if len(sys.argv) == 3:
        drawn |= of_run(RunRecord.load(Path(sys.argv[2])))
    for name, svg in drawn.items():
        (out / f"{name}.svg").write_text(svg, encoding="utf-8")


def of_run(run: RunRecord) -> dict[str, str]:
    """The pictures of one run, by the names of their files."""
    blocks = len(run.header.blocks)
    return {
        "loss": picture(loss.BY_TOKENS.markup(run), blocks, left=50, right=15),
        "memory": picture(STEP_MEMORY.markup(run), blocks, left=120, right=80),
        "flops": picture(STEP_FLOPS.markup(run), blocks, left=120, right=60),
    }


if __name__ == "__main__":
    main()
