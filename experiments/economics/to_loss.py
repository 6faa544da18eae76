"""Dollars to full training's loss, on as few cards as hold each method: measured multipliers, planned steps, prices.

    python experiments/economics/to_loss.py [--write [FILE]]

    dollars   step seconds x steps x cards x price;  in blocks, steps x multiplier
    steps     of a billion tokens that full training sees, `ROWS` rows of `SEQ` tokens in each

Step seconds are the planner's (blocktrain/plan/step.py: counted FLOPs and bytes over published rates at assumed
efficiencies, hardware.toml), the cards the fewest whose memory holds the method, prices the paper's (section 4.4.1).
Multipliers are measured, by result files of this repository, on models far smaller than those priced here.

`--write` puts the tables into README.md and to_loss.json. Takes ten seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from blocktrain.plan.comparison import CARD_COUNTS
from blocktrain.plan.cost import break_even, reduction
from blocktrain.plan.fit import Candidate, Request, capacity_of, fit
from blocktrain.plan.hardware import Hardware, achievable, load_hardware
from blocktrain.plan.layout import TrainingMethod
from blocktrain.plan.presets import find_model
from blocktrain.report.multiplier import tokens_to_reach
from blocktrain.runtime import environment

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tabling import add_write, put, spread  # noqa: E402 - found beside this folder

MODELS = ("g-1.6b", "l-1.5b", "g-5.4b", "g-10b", "g-20b")
CARDS = ("rtx4090", "a100-80")
PRECISION = "bf16-exact"
TOKENS, SEQ, ROWS = 10**9, 1024, 64
BATCHES = (64, 128, 256, 512, 1024)  # rows a step


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Multipliers, one a seed. blocks: how many the model was cut into. reached: full training's last loss; where it
    was not, they are those to the last loss of the run in blocks, and grow towards full training's."""

    name: str
    source: str
    blocks: int
    values: Sequence[float]
    reached: bool

    @property
    def mean(self) -> float:
        """Over seeds."""
        return statistics.mean(self.values)


def scratch(name: str, file: str) -> Measured:
    """Plain blocks in a result of the ablation."""
    rows = json.loads((HERE.parent / "ablations" / file).read_text())["rows"]
    full = {row["seed"]: row for row in rows if row["method"] == "full"}
    mine = [row for row in rows if row["method"] == "blocks, M=3"]
    reached = all(row["multiplier"] is not None for row in mine)
    to_own = [row["tokens"] / _tokens(row["loss"], full[row["seed"]]["losses"]) for row in mine]
    values = [row["multiplier"] for row in mine] if reached else to_own
    return Measured(name=name, source=f"ablations/{file}", blocks=3, values=values, reached=reached)


def growing(name: str, method: str, file: str, blocks: int) -> Measured:
    """A model that grows, in a result of the ablation. Its steps cost less than those of blocks of the whole model, so
    that its multiplier counts how many of these would take as long, by the shares of a full step that were timed."""
    result = json.loads((HERE.parent / "ablations" / file).read_text())
    step = statistics.mean(result["steps"]["steps"][f"{method}: block {index}"]["ratio"] for index in range(blocks))
    values = [row["time"] / step for row in result["rows"] if row["method"] == method]
    return Measured(name=name, source=f"ablations/{file}", blocks=blocks, values=values, reached=True)


def tuning(name: str, method: str, blocks: int) -> Measured:
    """A method of the fine-tuning experiment that reached full training's loss."""
    results = json.loads((HERE.parent / "finetuning" / "result.json").read_text())
    found = {record["case"]: record["figures"] for record in results.values() if record["scale"].startswith("1,000")}
    beside = zip(found[method]["runs"], found["full"]["runs"], strict=True)
    values = [
        _tokens(full["curve"][-1][1], [point[:2] for point in mine["curve"]]) / full["tokens"] for mine, full in beside
    ]
    return Measured(name=name, source="finetuning/result.json", blocks=blocks, values=values, reached=True)


def _tokens(loss: float, curve: Sequence[Sequence[float]]) -> float:
    found = tokens_to_reach(loss, [(seen, value) for seen, value in curve])
    if found is None:
        raise ValueError(f"no crossing of {loss:.3f}")
    return found


MEASURED: tuple[Callable[[], Measured], ...] = (
    lambda: scratch("from scratch, 10.8M parameters", "large.json"),
    lambda: growing(
        "from scratch, 10.8M parameters that grow, in steps of the whole model that take as long",
        "three blocks of modules, grown by copies: 0.6 of 1,500 steps in the first visit",
        "wide.json",
        blocks=3,
    ),
    lambda: tuning("fine-tuning, every weight", "blocks, every weight", blocks=5),
    lambda: tuning("fine-tuning, top half", "blocks, top half", blocks=2),
)


def cheapest(
    model: str, card: str, method: TrainingMethod, blocks: int | None, hardware: Hardware, *, batch: int = ROWS
) -> Iterator[Candidate]:
    """The cheapest layout on each number of cards that holds the method, the fewest first, for the same number of
    tokens in steps of `batch` rows."""
    spec, assumed = find_model(model), hardware.assumed
    known, price = hardware.card(card), hardware.price(card)
    for cards in CARD_COUNTS:
        request = Request(
            spec=spec,
            card=card,
            cards=cards,
            tokens=TOKENS,
            seq=SEQ,
            rows=batch,
            rates=achievable(known, hardware),
            capacity=capacity_of(
                known.memory_gib,
                assumed.reserve_gib,
                assumed.host_memory_gib_per_card,
                assumed.disk_gib_per_node,
                fragmentation=assumed.fragmentation,
            ),
            usd_per_hour=None if price is None else price.usd_per_hour,
            methods=(method,),
            blocks=blocks,
            precision=PRECISION,
            moments="fp32",
            state="host",
            frozen="device",
            cache="off",
            cards_per_node=assumed.cards_per_node,
            overlap=assumed.overlap,
        )
        yield from fit(request).candidates[:1]


def rows(measured: Sequence[Measured], hardware: Hardware) -> list[dict[str, Any]]:
    """Each model on each card, for each multiplier."""
    found = []
    for model in MODELS:
        whole = {card: next(cheapest(model, card, "full", None, hardware)) for card in CARDS}
        least = min(_dollars(full) for full in whole.values())
        for card, full in whole.items():
            for item in measured:
                mine = next(cheapest(model, card, "bcd", item.blocks, hardware))
                found.append(_row(model, card, item, full, mine) | {"cheapest_full": least})
    return found


def batches(measured: Sequence[Measured], hardware: Hardware, models: Sequence[str] = MODELS) -> list[dict[str, Any]]:
    """Each model on each card, for each multiplier and batch size. Both methods take the layout, and the number of
    cards, at which they cost least: as few as hold full training leave it bubbles where batches are small."""

    @cache
    def least(model: str, card: str, method: TrainingMethod, blocks: int | None, batch: int) -> Candidate:
        return min(cheapest(model, card, method, blocks, hardware, batch=batch), key=_dollars)

    found = []
    for model, card, batch in product(models, CARDS, BATCHES):
        full = least(model, card, "full", None, batch)
        for item in measured:
            mine = least(model, card, "bcd", item.blocks, batch)
            found.append(_row(model, card, item, full, mine) | {"batch": batch})
    return found


def _dollars(candidate: Candidate) -> float:
    if candidate.dollars is None:
        raise ValueError("no price")
    return float(candidate.dollars.amount)


def _row(model: str, card: str, item: Measured, full: Candidate, mine: Candidate) -> dict[str, Any]:
    whole, same = _dollars(full), _dollars(mine)
    return {
        "measured": item.name,
        "model": model.upper(),
        "card": card,
        "full": {"cards": full.layout.cards, "step_seconds": full.step.seconds, "dollars": whole},
        "blocks": {"cards": mine.layout.cards, "step_seconds": mine.step.seconds, "dollars_same_tokens": same},
        "multiplier": item.mean,
        "dollars": same * item.mean,
        "saved": [reduction(same * value, whole) for value in (item.mean, max(item.values), min(item.values))],
        "break_even": break_even(same, whole),
    }


def tables(found: Sequence[dict[str, Any]], measured: Sequence[Measured]) -> str:
    """As Markdown, one table a multiplier; what costs more than full training is negative."""
    text = []
    for item in measured:
        where = "to full training's last loss" if item.reached else "to the last loss in blocks, not full training's"
        text.append(f"\n### {item.name}: {spread(item.values, 2)}, {where} ({item.source}); M = {item.blocks}\n")
        text.append(
            "| model | card | full: cards, s a step, $ | blocks: cards, s a step, $ | saved, % | cheaper below "
            "| saved against full on the cheaper card, % |\n"
            "|---|---|---|---|---|---|---|"
        )
        for row in (row for row in found if row["measured"] == item.name):
            full, mine = row["full"], row["blocks"]
            low, high = (f"{100 * row['saved'][index]:.0f}" for index in (1, 2))
            varied = f" ({low} to {high})" if low != high else ""
            text.append(
                f"| {row['model']} | {row['card']} "
                f"| {full['cards']}, {full['step_seconds']:.2f}, {full['dollars']:.2f} "
                f"| {mine['cards']}, {mine['step_seconds']:.2f}, {row['dollars']:.2f} "
                f"| {100 * row['saved'][0]:.0f}{varied} | {row['break_even']:.2f} "
                f"| {100 * reduction(row['dollars'], row['cheapest_full']):.0f} |"
            )
    return "\n".join(text).lstrip() + "\n"


def batch_tables(found: Sequence[dict[str, Any]], measured: Sequence[Measured]) -> str:
    """As Markdown, one table a multiplier: what is saved, in percent, by rows a step."""
    text = []
    for item in measured:
        text += [f"\n### {item.name}: {item.mean:.2f} at every batch size; M = {item.blocks}\n"]
        text += [f"| model | card | {' | '.join(map(str, BATCHES))} |", "|---" * (2 + len(BATCHES)) + "|"]
        for model, card in product(MODELS, CARDS):
            mine = [
                row for row in found if (row["measured"], row["model"], row["card"]) == (item.name, model.upper(), card)
            ]
            cells = [f"{100 * row['saved'][0]:.0f} ({row['full']['cards']}, {row['blocks']['cards']})" for row in mine]
            text += [f"| {model.upper()} | {card} | {' | '.join(cells)} |"]
    return "\n".join(text).lstrip() + "\n"


def main() -> None:
    """Print, and with `--write` keep, the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write(parser, HERE / "to_loss.json")
    options = parser.parse_args()
    measured, hardware = [each() for each in MEASURED], load_hardware()
    found, by_batch = rows(measured, hardware), batches(measured, hardware)
    texts = {"to_loss.py": tables(found, measured), "to_loss.py, batches": batch_tables(by_batch, measured)}
    print(*texts.values(), sep="\n")
    if options.write:
        result = {"environment": environment(torch.device("cpu")), "rows": found, "batches": by_batch}
        options.write.write_text(json.dumps(result, indent=1) + "\n")
        for writer, text in texts.items() if options.write.parent == HERE else ():
            put(HERE / "README.md", writer, text)


if __name__ == "__main__":
    main()
