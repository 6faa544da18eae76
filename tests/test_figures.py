"""Every figure that README and docs/results.md quote is the one in a result file, rounded as it is written."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")
DECIMAL = re.compile(r"(?<![\d.])\d+\.\d+(?![\d.])")
GROWN = "three blocks of modules, grown by copies: 0.6 of 1,500 steps in the first visit"
DEEP = "two halves, grown: block 0 for three quarters"
MUON = "Muon, tail newton-schulz, M=4 of modules"
TURNS = "blocks, M=2 of modules, in the backward pass"
FIRST = "block 0 of 3 of modules for four fifths, then 1 and 2, in the backward pass"
TAIL = "the same, M=4 of modules"


@cache
def result(path: str) -> Any:
    return json.loads((ROOT / path).read_text())


def peak(blocks: int, model: str = "llama-2-7b", **keys: Any) -> Mapping[str, Any]:
    """The one row of the memory benchmark with these keys; AdamW, fp32 moments, bf16 on the device unless said."""
    frozen = keys.pop("frozen", "device")
    wanted = {
        "model": model,
        "blocks": blocks,
        "optimizer": "AdamW",
        "moments": "fp32",
        "precision": "bf16-exact",
    } | keys
    (row,) = [
        row
        for row in result("benchmarks/memory/result.json")["rows"]
        if row["memory"]["frozen"] == frozen and all(row[key] == value for key, value in wanted.items())
    ]
    return row


def ablation(name: str, method: str, key: str) -> list[Any]:
    """A value for each seed of a method in an ablation's result; seeds that did not reach it are left out."""
    rows = result(f"experiments/ablations/{name}.json")["rows"]
    return [row[key] for row in rows if row["method"] == method and row[key] is not None]


def mean(name: str, method: str, key: str) -> float:
    return statistics.mean(ablation(name, method, key))


def with_range(name: str, method: str, key: str) -> list[float]:
    values = ablation(name, method, key)
    return [statistics.mean(values), min(values), max(values)]


def share(name: str, method: str, kind: str = "kept") -> float:
    """Memory ("kept") or peak of the worst visit over full training's."""
    return max(ablation(name, method, f"{kind}_bytes")[0]) / ablation(name, method, f"{kind}_bytes_full")[0]


def tokens_of_full_muon(loss: float) -> float:
    """The tokens after which full training with Muon passed this loss, read between its evaluations."""
    (curve,) = ablation("long", "full, Muon", "losses")
    (start, above), (end, below) = next(pair for pair in pairwise(curve) if pair[1][1] <= loss)
    return start + (end - start) * (above - loss) / (above - below)


def peer(name: str) -> list[float]:
    """The mean loss and peak (MiB) of a method's seeds."""
    (case,) = [each for key, each in result("experiments/peers/result.json").items() if key.startswith(f"{name} [")]
    runs = case["figures"]["runs"]
    return [
        statistics.mean(run[key] for run in runs) / unit
        for key, unit in (("validation_loss", 1), ("peak_bytes", 2**20))
    ]


def cells(folder: str, row: str, *columns: str, table: int = 0) -> list[float]:
    """The numbers in these columns of a row of a README's table (tests/experiments ties the table to its result)."""
    text = (ROOT / "experiments" / folder / "README.md").read_text().split("<!-- written by tables.py -->")[1]
    tables = [part.splitlines() for part in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in tables[table])
    (found,) = [each for each in rows if each[0] == row]
    return [float(number) for column in columns for number in NUMBER.findall(found[header.index(column)])]


def first(folder: str, row: str, *columns: str, table: int = 0) -> list[float]:
    """The mean, without its range, in each of these columns."""
    return [cells(folder, row, column, table=table)[0] for column in columns]


def saved(table: str, measured: str, model: str | None = None, **keys: Any) -> list[float]:
    """What is saved, in percent; on RTX 4090s unless card is None."""
    wanted = {"measured": measured, "model": model, "card": "rtx4090"} | keys
    wanted = {key: value for key, value in wanted.items() if value is not None}
    rows = result("experiments/economics/to_loss.json")[table]
    return [100 * row["saved"][0] for row in rows if all(row[key] == value for key, value in wanted.items())]


STEP = result("benchmarks/step/result.json")["average"]
PREFIX = result("benchmarks/prefix/result.json")
WIRE = result("benchmarks/distributed/wire.json")["rows"]
SLOW = {row["method"]: row["over_full_data_parallel"] for row in result("benchmarks/distributed/slow.json")["rows"]}
GSM8K = result("benchmarks/finetuning/gsm8k.json")
PLAN = result("benchmarks/plan/steptime.json")["cases"]
BANKING = ("B-F", "time to full's last loss", "last loss", "accuracy, %", "memory, of full's", "peak, of full's")
BOOKS = result("benchmarks/prefix/books.json")
ON_BOOKS = [100 * BOOKS["flops_saved_share"], 100 * (1 - BOOKS["seconds"]["cached"] / BOOKS["seconds"]["uncached"])]
LOSSES = {name: each["loss"] for name, each in result("benchmarks/memory/loss.json")["results"].items()}
DOLLARS = result("experiments/economics/to_loss.json")
PLAIN, GROWS, _, _ = dict.fromkeys(row["measured"] for row in DOLLARS["rows"])
EVERY = "fine-tuning, every weight"
UNTIL = "ours, suffix, block 0 until the end"

# What a page says, with its figures left out, and those figures.
README = [
    ("takes {:.0f} GiB of memory where full training takes {:.0f}", [peak(132)["peak_gib"], peak(1)["peak_gib"]]),
    ("{:.1f} GiB in full training, {:.1f} GiB in blocks", [peak(1)["peak_gib"], peak(132)["peak_gib"]]),
    ("{:.1f} and {:.1f} GiB with packed", [peak(132, precision=each)["peak_gib"] for each in ("int8", "nf4")]),
    ("the peak is {:.1f} GiB instead of {:.1f}, in 132 blocks", [peak(132)["peak_gib"], peak(1)["peak_gib"]]),
    (
        "; {:.1f} with frozen weights in int8, {:.1f} in nf4",
        [peak(132, precision=each)["peak_gib"] for each in ("int8", "nf4")],
    ),
    ("the host keeps {:.1f} GiB, packed {:.1f}", [peak(132)["host_gib"], peak(132, precision="int8")["host_gib"]]),
    ("{:.4f} in int8 and {:.4f} in nf4, {:.4f} in fp32", [LOSSES[each] for each in ("int8", "nf4", "fp32")]),
    ("{:.2f} of a full step's time, {:.2f} of its FLOPs", [STEP["time_ratio"]["median"], STEP["flops_ratio"]]),
    (
        "reads them: {:.2f} of the time, {:.3f} of the FLOPs",
        [PREFIX["wall_clock"]["cached_step_over_full"]["median"], PREFIX["flops"][0]["reuse_large"]["counted"]],
    ),
    ("filling included, saved {:.1f} % of its FLOPs and {:.1f} % of its time", ON_BOOKS),
    (
        "after {:.1f} times the tokens a loss of {:.3f}, full training {:.3f}",
        [
            mean("large", "blocks, M=3", "tokens") / mean("large", "full", "tokens"),
            mean("large", "blocks, M=3", "loss"),
            mean("large", "full", "loss"),
        ],
    ),
    (
        "passed {:.3f} after {:.2f} of those tokens; memory {:.2f}, peak {:.2f}",
        [
            mean("large", "blocks, M=3", "loss"),
            mean("large", "full", "tokens_of_plain"),
            share("large", "blocks, M=3"),
            share("large", "blocks, M=3", "peak"),
        ],
    ),
    (
        "last loss ({:.3f}) after {:.2f} times its tokens in {:.2f} of its time",
        [mean("wide", "full", "loss"), mean("wide", GROWN, "multiplier"), mean("wide", GROWN, "time")],
    ),
    (
        "memory {:.2f}, peak {:.2f}; but two layers alone end at {:.3f}, blocks at {:.3f}",
        [
            share("wide", GROWN),
            share("wide", GROWN, "peak"),
            mean("wide", "a model of two layers", "loss"),
            mean("wide", GROWN, "loss"),
        ],
    ),
    (
        "ends at loss {:.2f} and {:.1f} % accuracy with memory {:.2f}, peak {:.2f}",
        first("finetuning", "blocks, top half", *BANKING[2:]),
    ),
    ("in blocks at {:.2f} and {:.1f} %;", first("finetuning", "blocks, every weight", *BANKING[2:4])),
    ("full training at {:.2f} and {:.1f} %", first("finetuning", "full", *BANKING[2:4])),
    (
        "{:.1f} % accuracy and loss {:.3f} in {:.2f} of the time with memory {:.2f}",
        first("resnet20", "ours, blocks", "accuracy, %", "loss", "time, of full's", "memory, of full's"),
    ),
    ("full training {:.1f} % and {:.3f}", first("resnet20", "ours, full", "accuracy, %", "loss")),
    (
        "APOLLO {:.3f} ({:.1f} MiB), GaLore {:.3f} ({:.1f}), full {:.3f} ({:.1f}), "
        "LISA {:.3f} ({:.1f}), blocks {:.3f} ({:.1f})",
        [each for name in ("apollo", "galore", "full", "lisa", "bcd") for each in peer(name)],
    ),
    (
        "{:.3f} of data parallel's bytes; over 1 Gbit/s {:.2f} of its step time",
        [WIRE[1]["share_of_full"], SLOW["3 blocks"]],
    ),
]
RESULTS = [
    ("peaks at {:.1f} GiB with bf16", [peak(132)["peak_gib"]]),
    (
        "{:.1f} GiB with frozen weights in int8, {:.1f} GiB in nf4",
        [peak(132, precision=each)["peak_gib"] for each in ("int8", "nf4")],
    ),
    ("and {:.1f} GiB with frozen weights streamed", [peak(132, frozen="host")["peak_gib"]]),
    ("peaks at {:.1f} GiB. Llama-3-8B peaks at {:.1f} GiB", [peak(1)["peak_gib"], peak(284, "llama-3-8b")["peak_gib"]]),
    (
        "peaks at {:.1f} GiB with {:.0f} GiB on the host",
        [peak(330, "llama-3-70b", frozen="host")[each] for each in ("peak_gib", "host_gib")],
    ),
    (
        "int8 is {:.2f} % above that with fp32 weights, and in nf4 {:.2f} % above it",
        [100 * (LOSSES[each] / LOSSES["fp32"] - 1) for each in ("int8", "nf4")],
    ),
    (
        "three blocks takes {:.2f} of a full step's time and {:.2f} of its FLOPs, for",
        [STEP["time_ratio"]["median"], STEP["flops_ratio"]],
    ),
    (
        "three blocks takes {:.2f} of a full step's time and {:.3f} of its FLOPs;",
        [PREFIX["wall_clock"]["cached_step_over_full"]["median"], PREFIX["flops"][0]["reuse_large"]["counted"]],
    ),
    ("in eight blocks it takes {:.3f} of the FLOPs", [PREFIX["flops"][1]["reuse_large"]["counted"]]),
    ("saved {:.1f} % of its FLOPs and {:.1f} % of its time", ON_BOOKS),
    ("of the blocks after {:.1f} times fewer steps", [1 / mean("large", "full", "tokens_of_plain")]),
    ("did so after {:.1f} times fewer steps", [BOOKS["steps"]["uncached"] / BOOKS["steps"]["full"]]),
    (
        "in {:.2f} of its time ({:.2f} to {:.2f}), with {:.2f} of its memory and {:.2f} of its peak",
        [*with_range("wide", GROWN, "time"), share("wide", GROWN), share("wide", GROWN, "peak")],
    ),
    (
        "the memory is {:.2f} of full training's if full",
        [
            share("wide", GROWN)
            / (1 - mean("wide", "full", "moments_full") / 2 / mean("wide", "full", "kept_bytes_full"))
        ],
    ),
    (
        "that grow end {:.1f} % above full training's loss in {:.2f} of its FLOPs",
        [100 * (mean("deep", DEEP, "loss") / mean("deep", "full", "loss") - 1), mean("deep", DEEP, "flops_in_all")],
    ),
    (
        "last loss after {:.2f} of its tokens ({:.2f} to {:.2f}) and {:.2f} of its time ({:.2f} to {:.2f})",
        [*with_range("warm", TAIL, "multiplier"), *with_range("warm", TAIL, "time")],
    ),
    (
        "with {:.2f} of its memory and {:.2f} of its peak (`experiments/ablations/warm.json`;",
        [share("warm", TAIL), share("warm", TAIL, "peak")],
    ),
    (
        "last loss after {:.2f} of AdamW's tokens",
        [tokens_of_full_muon(ablation("long", "full", "loss")[0]) / mean("long", "full", "tokens")],
    ),
    (
        "tail after {:.2f} of their tokens",
        [tokens_of_full_muon(mean("long", MUON, "loss")) / mean("long", MUON, "tokens")],
    ),
    (
        "it ends at {:.3f} after {:.1f} times full training's tokens, where full training ends at {:.3f}",
        [
            mean("warm", FIRST, "loss"),
            mean("warm", FIRST, "tokens") / mean("warm", "full", "tokens"),
            mean("warm", "full", "loss"),
        ],
    ),
    ("loss, in {:.2f} of the time; the other two did not", ablation("warm", FIRST, "time")),
    ("Its memory is {:.2f} of full training's, its peak {:.2f}", [share("warm", FIRST), share("warm", FIRST, "peak")]),
    (
        "in turns end at {:.3f} after {:.1f} times the tokens",
        [mean("warm", TURNS, "loss"), mean("warm", TURNS, "tokens") / mean("warm", "full", "tokens")],
    ),
    (
        "{:.1f} points of accuracy below full training after 5 epochs, and {:.1f} points below it after 74",
        [-first("resnet20", "ours, blocks", "points above full", table=each)[0] for each in (0, 1)],
    ),
    (
        "seeds do: {:.1f} ({:.1f} to {:.1f}) and {:.1f} ({:.1f} to {:.1f}) points",
        [each for table in (0, 1) for each in cells("resnet20", UNTIL, "points above full", table=table)],
    ),
    (
        "a loss of {:.3f} against {:.3f} and of {:.3f} against {:.3f}",
        [first("resnet20", row, "loss", table=table)[0] for table in (0, 1) for row in (UNTIL, "ours, full")],
    ),
    ("| full training | 1 | 1 | {:.2f} | {:.1f} % | 1 | 1 |", first("finetuning", "full", *BANKING[2:4])),
    *(
        (
            f"| {name} | {{:.2f}} | {{:.2f}} | {{:.2f}} | {{:.1f}} % | {{:.2f}} | {{:.2f}} |",
            first("finetuning", row, *BANKING),
        )
        for name, row in (
            ("the top half of the layers alone", "blocks, top half"),
            ("LoRA, rank 16", "lora"),
            ("every weight, in five blocks from the top down", "blocks, every weight"),
        )
    ),
    (
        "fine-tuned on GSM8K in {:.0f} s on one thread; its validation loss falls from {:.2f} to {:.2f}",
        [GSM8K["seconds"], GSM8K["evaluations"][0]["loss"], GSM8K["evaluations"][-1]["loss"]],
    ),
    (
        "from scratch (multiplier {:.2f}) save {:.0f} % for G-10B and {:.0f} % for G-20B",
        [DOLLARS["rows"][0]["multiplier"], *saved("rows", PLAIN, "G-10B"), *saved("rows", PLAIN, "G-20B")],
    ),
    (
        "lose {:.0f} % for G-10B at 64 rows, and at 512 rows they lose {:.0f} % for G-10B and {:.0f} % for G-20B",
        [
            -value
            for model, batch in (("G-10B", 64), ("G-10B", 512), ("G-20B", 512))
            for value in saved("batches", PLAIN, model, batch=batch)
        ],
    ),
    (
        "cheaper at 64 rows for {:d}, and at 512 rows for {:d}",
        [sum(value > 0 for value in saved("batches", PLAIN, card=None, batch=batch)) for batch in (64, 512)],
    ),
    (
        "a model that grows ({:.2f}) saves {:.0f} to {:.0f} %, and fine-tuning every weight ({:.2f}) saves {:.0f} to "
        "{:.0f} %",
        [
            figure
            for name in (GROWS, EVERY)
            for figure in (
                next(row["multiplier"] for row in DOLLARS["rows"] if row["measured"] == name),
                min(saved("batches", name, card=None, batch=512)),
                max(saved("batches", name, card=None, batch=512)),
            )
        ],
    ),
    ("three blocks sends {:.3f} of the bytes", [WIRE[1]["share_of_full"]]),
    (
        "takes {:.2f} of the time of a full data parallel step, and {:.2f} with `sync_every = 8` (`",
        [SLOW["3 blocks"], SLOW["3 blocks, sync_every = 8"]],
    ),
    ("lies within {:.0f} % of the measured one", [100 * max(abs(1 - case["ratio"]) for case in PLAN)]),
]
PAGES = {"README.md": README, "docs/results.md": RESULTS}
# Decimals that are no measurements: sizes of models, versions, the paper's number.
NAMES = re.compile(r"[\d.]+ M parameters|Python [\d.]+|PyTorch [\d.]+ to [\d.]+|arXiv [\d.]+|[Aa]pache-2\.0")


def text_of(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


@pytest.mark.parametrize(("page", "words", "figures"), [(page, *each) for page in PAGES for each in PAGES[page]])
def test_a_figure_is_that_of_its_result(page: str, words: str, figures: Sequence[float]) -> None:
    assert words.format(*figures) in text_of(page)


@pytest.mark.parametrize("page", PAGES)
def test_every_decimal_of_a_page_is_tied_to_a_result(page: str) -> None:
    text = NAMES.sub("", text_of(page))
    for words, figures in PAGES[page]:
        text = text.replace(words.format(*figures), "")
    assert not DECIMAL.findall(text)
