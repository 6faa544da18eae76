"""The live line shows typed records, and shows every text as it is."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from blocktrain.cli.live import LiveLine
from blocktrain.records.run_records import BlockSummary, Evaluation, Record, RunHeader, Sample, Step

HEADER = RunHeader(
    method="bcd",
    name="[red]mine[/red]",
    model="GPT-2",
    parameters=1_300_000,
    tokens_per_step=64,
    rows_per_step=4,
    steps_planned=10,
    optimizer="AdamW",
    precision="fp32",
    blocks=(
        BlockSummary(index=0, first="embedding", last="h.[0]", layers=2, parameters=500_000),
        BlockSummary(index=1, first="head", last="head", layers=1, parameters=800_000),
    ),
)
STEP = Step(step=4, tokens=256, seconds=1.0, visit=2, sweep=1, block=0, loss=2.5)
EVALUATION = Evaluation(step=4, tokens=256, seconds=1.5, visit=2, block=0, loss=2.25, loss_per_byte=1.5, accuracy=0.5)


def shown(*records: Record, terminal: bool = False) -> str:
    """What a console of 120 columns shows of the records."""
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=terminal, color_system=None)
    with LiveLine(console, torch.device("cpu")) as live:
        for record in records:
            live(record)
    return out.getvalue()


def test_a_pipe_gets_the_run_its_blocks_and_a_line_at_each_evaluation() -> None:
    lines = shown(HEADER, STEP, EVALUATION).splitlines()
    assert lines == [
        "[red]mine[/red]  GPT-2, 1.3M parameters in 2 blocks, AdamW, fp32",
        "  block 0  embedding .. h.[0]  500k parameters",
        "  block 1  head  800k parameters",
        "  step      4  block 0  training loss 2.500  validation 2.2500 (1.5000 per byte)  accuracy 50.00 %  1.5s",
    ]


def test_a_terminal_gets_a_live_line_of_the_step() -> None:
    text = shown(HEADER, STEP, terminal=True)
    assert "step 4/10  loss 2.500  block 0  visit 2  sweep 1" in text


@pytest.mark.parametrize("width", [120, 80, 60, 40])
def test_a_narrow_terminal_keeps_the_bar_and_the_time_left(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns the line was cut off before the time left, and the bar had no room at all."""
    clock = iter(range(0, 1000, 60))
    monkeypatch.setattr("blocktrain.cli.live.time.perf_counter", lambda: float(next(clock)))
    header = replace(HEADER, steps_planned=20_000)
    steps = [replace(STEP, step=index, tokens=64 * index) for index in (12_344, 12_345)]
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    with LiveLine(console, torch.device("cpu")) as live:
        for record in (header, *steps):
            live(record)
    line = next(line for line in out.getvalue().replace("\r", "\n").splitlines() if "step 12345/20000" in line)
    assert "━━━" in line
    assert re.search(r"left \d+d \d+h|left \d+h", line)
    assert ("visit 2" in line, "loss 2.5" in line) == (width == 120, width >= 60)
    assert len(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip()) <= width


def test_a_skipped_step_does_not_count_in_the_smoothed_loss() -> None:
    skipped = Step(step=5, tokens=320, seconds=1.2, visit=2, block=0, loss=float("nan"), skipped=True)
    assert "training loss 2.500" in shown(HEADER, STEP, skipped, EVALUATION)


@pytest.mark.parametrize("records", [(), (Sample(step=0, prompt="a", text="b", expected="b", correct=True),)])
def test_other_records_show_nothing(records: tuple[Record, ...]) -> None:
    assert shown(*records) == ""
