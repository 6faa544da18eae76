"""Everything a plan found, as plain values for whoever shows it: the terminal, JSON, a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blocktrain.plan.comparison import Alternative, Change
from blocktrain.plan.cost import MULTIPLIERS
from blocktrain.plan.fit import Candidate, Fit, Request
from blocktrain.plan.hardware import Assumed, Price
from blocktrain.units import Dollars, format_bytes, format_count, format_seconds

ABSENT = "–"
STREAMING_BINDS = 0.05  # of a step, waiting for frozen weights: layers are then fetched more slowly than they run


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A request and what came of it."""

    request: Request
    fit: Fit
    price: Price | None
    alternatives: Sequence[Alternative]
    change: Change | None  # where nothing fits
    assumed: Assumed


def spread(candidate: Candidate) -> str:
    """`data 4 x pipeline 2`, `8 shards`; a dash on one card."""
    layout = candidate.layout
    parts = [f"{layout.shards} shards"] if layout.shards > 1 else [f"data {layout.data}"] if layout.data > 1 else []
    parts += [f"pipeline {layout.pipeline}"] if layout.pipeline > 1 else []
    return " x ".join(parts) or ABSENT


def savings(candidate: Candidate) -> str:
    """What of the less usual means a layout takes: `streamed, 8-bit moments`; a dash for none."""
    layout = candidate.layout
    parts = ["streamed"] * (layout.frozen == "host")
    parts += ["8-bit moments"] * (layout.moments == "8bit")
    parts += ["moments dropped"] * (layout.state == "drop" and layout.blocks > 1)
    parts += ["chunked loss"] * (layout.loss_chunk is not None)
    return ", ".join(parts) or ABSENT


def span(seconds: float) -> str:
    """`span(200_000) == '2.3 d'`, `span(9000) == '2.5 h'`; as `format_seconds` below an hour."""
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.1f} d"
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else format_seconds(seconds)


def money(dollars: Dollars | None) -> str:
    """A dash where there is no price."""
    return ABSENT if dollars is None else str(dollars)


def figures(item: Alternative) -> tuple[str, ...]:
    """Memory, step, time, cost of another way, and up to which B-F multiplier the best layout in blocks is cheaper."""
    found = item.candidate
    if found is None:
        return ("does not fit", "", "", "", "")
    even = ABSENT if item.break_even is None else f"B-F {item.break_even:.2f}"
    step = f"{found.step.seconds:.3g} s"
    return format_bytes(found.memory.peak), step, span(found.seconds), money(found.dollars), even


def binding(outcome: Outcome, candidate: Candidate) -> str:
    """What limits a layout: a limit it exceeds, its memory when that is nearly full, else the part of a step that is
    longest."""
    if candidate.exceeded:
        return " and ".join(candidate.exceeded)
    if candidate.step.parts["streaming"] > STREAMING_BINDS * candidate.step.seconds:
        return "host link"
    room = outcome.request.room
    if candidate.memory.peak * (1 + room.fragmentation) > 0.9 * room.card:
        return "memory"
    if candidate.step.bound in ("forward", "backward", "recompute"):
        return "compute"
    return candidate.step.bound


def at_multipliers(candidate: Candidate, own: float) -> list[tuple[str, float, Dollars]]:
    """(name, multiplier, dollars) to the same loss: the same tokens, the paper's three."""
    if candidate.dollars is None:
        return []
    one = float(candidate.dollars.amount) / own
    named = sorted({"same tokens": 1.0, **MULTIPLIERS, "asked for": own}.items(), key=lambda item: item[1])
    seen: dict[float, str] = {}
    for name, value in named:
        seen.setdefault(value, name)
    return [(name, value, Dollars(candidate.dollars.amount) * (value * one / float(candidate.dollars.amount)))
            for value, name in seen.items()]  # fmt: skip


def _given_up(outcome: Outcome) -> list[str]:
    """What the first layout loses against exact training, where it does."""
    if not outcome.fit.candidates:
        return []
    layout, told = outcome.fit.candidates[0].layout, []
    if layout.precision.loses == 2:
        told.append(
            f"Precision {layout.precision.name} rebuilds masters from bf16 at each visit, which loses updates smaller "
            "than bf16 resolves; bf16-exact keeps 2 bytes a parameter more on the host."
        )
    if layout.precision.packed:
        told.append(f"Frozen weights are rounded to {layout.precision.name}; their exact masters stay on the host.")
    if layout.state == "drop" and layout.blocks > 1:
        told.append("Moments are dropped between visits: there is no host memory for them; short visits suffer most.")
    return told


def assumptions(outcome: Outcome) -> list[str]:
    """What the figures rest on, one sentence each."""
    request, assumed, rates = outcome.request, outcome.assumed, outcome.request.rates
    if rates.kind == "measured":
        first = "Rates: measured on this machine by 'blocktrain calibrate'."
    else:
        first = (
            f"Rates: published peaks x assumed efficiencies: products {assumed.matmul_efficiency_fp32:.0%} (fp32), "
            f"{assumed.matmul_efficiency_bf16:.0%} (bf16), attention {assumed.attention_efficiency:.0%}, memory "
            f"{assumed.memory_efficiency:.0%}, links {assumed.link_efficiency:.0%}."
        )
    told = [first]
    if outcome.price is None:
        told.append("Price: none known for this card; give --price. Ranked by card-hours.")
    else:
        price = outcome.price
        told.append(f"Price: ${price.usd_per_hour} a card and hour, {price.provider} ({price.origin.kind}: "
                    f"{price.origin.source}, {price.origin.date}).")  # fmt: skip
    told.append(
        f"B-F multiplier of BCD: {request.multiplier.value:g} ({request.multiplier.source}), taken alike for all block "
        "counts; measured ones grow with the count."
    )
    told.append(
        f"{request.rows} rows of {request.seq} tokens a step; AdamW, fused where its moments are in fp32; no "
        f"dropout; attention in fused kernels. {assumed.overlap:.0%} of communication hides behind the backward pass."
    )
    told.append(
        f"Room: {format_bytes(request.room.card)} of a card, {format_bytes(request.room.host)} of host memory a card, "
        f"{format_bytes(request.room.disk)} of disk a node; the allocator wastes {assumed.fragmentation:.0%}."
    )
    told += _given_up(outcome)
    cached = [item for item in outcome.fit.candidates if item.layout.cache != "off"]
    if cached:
        subset = cached[0].visit_steps * request.rows * request.seq // request.cache_epochs
        told.append(
            f"Prefix cache: a sweep's blocks share a subset of {format_count(subset)} tokens, ascending, each row used "
            f"{cached[0].layout.blocks * request.cache_epochs} times a sweep."
        )
    return told
