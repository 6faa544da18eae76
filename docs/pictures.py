"""The pictures of how.md, drawn from a real run's log with the report's own charts.

    blocktrain train examples/quickstart.toml --out runs/how --set sampling.scope=sweep --set sampling.rate=0.0128 \\
      --set schedule.visit="2 epochs" --set prefix.store=host
    python docs/pictures.py runs/how docs/pictures

Writes loss.svg, memory.svg and flops.svg. They carry their own colours, light and dark.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from blocktrain.report.palette import style
from blocktrain.report.run import RunRecord
from blocktrain.report.sections import loss
from blocktrain.report.sections.step_flops import STEP_FLOPS
from blocktrain.report.sections.step_memory import STEP_MEMORY

WIDTH = 720
CHART = re.compile(r'<svg class="chart" height="(\d+)".*?</svg>(?=<p |</div>)', re.DOTALL)
SWATCH = re.compile(r'<i class="swatch ([\w ]+)"></i>(.*?)</li>', re.DOTALL)
MARKUP = re.compile(r"<[^>]+>")


def picture(figure: str, blocks: int, *, left: int, right: int) -> str:
    """The charts of a report's figure, one below the other under its key, as an SVG that stands alone."""
    key, top = _key([(css, MARKUP.sub("", text)) for css, text in SWATCH.findall(figure)])
    placed = [key]
    for chart in CHART.finditer(figure):
        box = f'x="{left}" y="{top}" width="{WIDTH - left - right}" '
        placed.append(chart[0].replace('<svg class="chart" ', f'<svg class="chart" {box}', 1))
        top += int(chart[1]) + 20
    css = resources.files("blocktrain.report").joinpath("report.css").read_text(encoding="utf-8")
    rules = css.replace(".chart { display: block; width: 100%;", ".chart {") + style(blocks)
    below = 25 if 'class="name"' in figure else -10  # the name of an x axis hangs below its chart
    font = "text { font-family: system-ui, sans-serif; font-size: 12px; fill: var(--soft); }"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + below}">'
        f"<style>{rules}{font}</style>{''.join(placed)}</svg>\n"
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
        else:
            drawn += f'<rect class="fill {css}" x="{x}" y="{y - 9}" width="10" height="10" rx="2"/>'
        drawn += f'<text x="{x + 15}" y="{y}">{text}</text>'
        x += wide
    return drawn, y + 24 if items else 10


def main() -> None:
    """Read the run, write the three files."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    run, out = RunRecord.load(Path(sys.argv[1])), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    blocks = len(run.header.blocks)
    drawn = {
        "loss": picture(loss.BY_TOKENS.markup(run), blocks, left=50, right=15),
        "memory": picture(STEP_MEMORY.markup(run), blocks, left=120, right=80),
        "flops": picture(STEP_FLOPS.markup(run), blocks, left=120, right=60),
    }
    for name, svg in drawn.items():
        (out / f"{name}.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
