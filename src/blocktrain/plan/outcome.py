"""All results of a plan, and their wording for the terminal, for JSON and for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blocktrain.plan.comparison import Alternative, Relaxation
from blocktrain.plan.cost import MULTIPLIERS
from blocktrain.plan.fit import Candidate, Fit, Request
from blocktrain.plan.hardware import Assumed, Price
from blocktrain.units import Dollars, format_bytes, format_count, format_seconds

DASH = "–"
STREAMING_BINDS = 0.05  # of a step spent waiting for frozen weights: the host link is then the limit


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A request and its results."""

    request: Request
    fit: Fit
    price: Price | None
    alternatives: Sequence[Alternative]
    change: Relaxation | None  # where nothing fits
    assumed: Assumed


def spread(candidate: Candidate) -> str:
    """How a layout uses its cards: `data 4 x pipeline 2`, `8 shards`; a dash on one card."""
    layout = candidate.layout
    parts = [f"{layout.shards} shards"] if layout.shards > 1 else [f"data {layout.data}"] if layout.data > 1 else []
    parts += [f"pipeline {layout.pipeline}"] if layout.pipeline > 1 else []
    return " x ".join(parts) or DASH


def memory_savers(candidate: Candidate) -> str:
    """The less usual means by which a layout saves memory: `streamed, 8-bit moments`; a dash for none."""
    layout = candidate.layout
    parts = ["streamed"] * (layout.frozen == "host")
    parts += ["8-bit moments"] * (layout.moments == "8bit")
    parts += ["moments dropped"] * (layout.state == "drop" and layout.blocks > 1)
    parts += ["chunked loss"] * (layout.loss_chunk is not None)
    return ", ".join(parts) or DASH


def span(seconds: float) -> str:
    """`span(200_000) == '2.3 d'`, `span(9000) == '2.5 h'`; as `format_seconds` below an hour."""
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.1f} d"
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else format_seconds(seconds)


def money(dollars: Dollars | None) -> str:
    """Dollars as text; a dash where there is no price."""
    return DASH if dollars is None else str(dollars)


def alternative_cells(item: Alternative) -> tuple[str, ...]:
    """Cells of a table: memory, step, time and cost of another way, and its break-even B-F multiplier."""
    found = item.candidate
    if found is None:
        return ("does not fit", "", "", "", "")
    even = DASH if item.break_even is None else f"B-F {item.break_even:.2f}"
    step = f"{found.step.seconds:.3g} s"
    return format_bytes(found.memory.peak), step, span(found.seconds), money(found.dollars), even


def binding(outcome: Outcome, candidate: Candidate) -> str:
    """What limits a layout: a budget or deadline that it exceeds, its memory if that is nearly full, or otherwise the
    longest part of a step."""
    if candidate.exceeded:
        return " and ".join(candidate.exceeded)
    if candidate.step.parts["streaming"] > STREAMING_BINDS * candidate.step.seconds:
        return "host link"
    capacity = outcome.request.capacity
    if capacity.taken(candidate.memory.peak) > 0.9 * capacity.card:
        return "memory"
    if candidate.step.bound in ("forward", "backward", "recompute"):
        return "compute"
    return candidate.step.bound


def at_multipliers(candidate: Candidate, own: float) -> list[tuple[str, float, Dollars]]:
    """(name, multiplier, dollars) for training to the same loss: at the same tokens, the paper's three multipliers, and
    the request's own."""
    if candidate.dollars is None:
        return []
    one = float(candidate.dollars.amount) / own
    named = sorted({"same tokens": 1.0, **MULTIPLIERS, "requested": own}.items(), key=lambda item: item[1])
    seen: dict[float, str] = {}
    for name, value in named:
        seen.setdefault(value, name)
    return [
        (name, value, candidate.dollars * (value * one / float(candidate.dollars.amount)))
        for value, name in seen.items()
    ]


RATE_NAMES = {  # of those that can be known in another way than the rest
    "kernel_seconds": "a small kernel",
    "host_memory_bytes": "host memory",
    "disk_bytes": "disk",
    "peer_link_bytes": "link to another card",
    "network_bytes": "network",
}


def _rates(outcome: Outcome) -> str:
    """How the machine's rates are known."""
    rates, assumed = outcome.request.rates, outcome.assumed
    if rates.kind == "measured":
        first = "Rates: measured on this machine by 'blocktrain calibrate'"
    else:
        first = (
            f"Rates: published peaks x assumed efficiencies (matrix products {assumed.matmul_efficiency_fp32:.0%} in "
            f"fp32 and {assumed.matmul_efficiency_bf16:.0%} in bf16, attention {assumed.attention_efficiency:.0%}, "
            f"memory {assumed.memory_efficiency:.0%}, links {assumed.link_efficiency:.0%})"
        )
    others = []
    for name, kind in rates.other_kinds.items():
        value = getattr(rates, name)
        text = f"{value * 1e6:.3g} us" if name == "kernel_seconds" else f"{value / 1e9:.3g} GB/s"
        others.append(f"{RATE_NAMES[name]} {text} ({kind})")
    return f"{first}, except: {', '.join(others)}." if others else f"{first}."


def assumptions(outcome: Outcome) -> list[str]:
    """What the figures rest on, one item each."""
    request, assumed = outcome.request, outcome.assumed
    lines = [_rates(outcome)]
    if outcome.price is None:
        lines.append("Price: none is known for this card, so layouts are ranked by card-hours. Give one with --price.")
    else:
        price = outcome.price
        lines.append(
            f"Price: ${price.usd_per_hour} per card and hour, {price.provider} ({price.origin.kind}: "
            f"{price.origin.source}, {price.origin.date})."
        )
    lines += [
        f"B-F multiplier of training in blocks: {request.multiplier.value:g} ({request.multiplier.source}), the same "
        "for every number of blocks. Measured multipliers grow with the number.",
        f"A step has {request.rows} rows of {request.seq} tokens. The optimizer is AdamW, fused where its moments are "
        f"in fp32. There is no dropout, attention is fused, and {assumed.overlap:.0%} of the communication hides "
        "behind the backward pass.",
        f"Available: {format_bytes(request.capacity.card)} on each card (the allocator takes "
        f"{assumed.fragmentation:.0%} on top of what is used), "
        f"{format_bytes(request.capacity.host)} of host memory per card, "
        f"{format_bytes(request.capacity.disk)} of disk per node.",
    ]
    if request.spec.counted is not None:
        lines.append(
            f"Model: '{request.spec.architecture}' has no closed form. Its parameters and the FLOPs of a forward pass "
            "are counted; activations are those of Llama layers with as many FLOPs. Compare with --verify."
        )
    candidates = outcome.fit.candidates
    if candidates:
        best = candidates[0].layout
        if best.precision.loss == 2:
            lines.append(
                f"Precision {best.precision.name} rebuilds the masters from bf16 weights at each visit, so updates "
                "smaller than bf16 resolves are lost. bf16-exact keeps them, for 2 bytes of host memory per parameter."
            )
        if best.precision.quantized:
            lines.append(f"Frozen weights are rounded to {best.precision.name}; their exact values stay on the host.")
        if best.state == "drop" and best.blocks > 1:
            lines.append(
                "Moments are dropped between visits, because the host has no memory for them. Short visits suffer most."
            )
    cached = next((item for item in candidates if item.layout.cache != "off"), None)
    if cached is not None:
        subset = cached.visit_steps * request.rows * request.seq // request.cache_epochs
        lines.append(
            f"Prefix cache: the blocks of a sweep share a subset of {format_count(subset)} tokens, in ascending order, "
            f"and each row is used {cached.layout.blocks * request.cache_epochs} times in a sweep."
        )
    return lines
