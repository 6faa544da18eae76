"""The same training by other means (in full, sharded, with the optimizer on the host, on other cards), and what to
change where nothing fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from blocktrain.plan.cost import break_even
from blocktrain.plan.fit import Candidate, Request, fit
from blocktrain.plan.hardware import GIB, THIS_MACHINE, Hardware, achievable
from blocktrain.plan.layout import PRECISION_SPECS

CARD_COUNTS = (1, 2, 4, 8, 16, 32, 64)
ELSEWHERE = ("a100-80", "a800", "h100")


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """One other way, with its cheapest layout. `candidate` is None where nothing fits on up to 64 cards."""

    label: str
    card: str
    cards: int
    candidate: Candidate | None
    break_even: float | None  # the B-F multiplier up to which the best layout in blocks is cheaper


def alternatives(request: Request, hardware: Hardware, best: Candidate | None) -> list[Alternative]:
    """Full training on the requested cards and on others, each on the fewest that it fits on: of the requested kind at
    least the requested number."""
    found = []
    for label, other in _requests(request, hardware):
        first = other.cards if other.card == request.card else 1
        counts = [first, *(count for count in CARD_COUNTS if first < count <= request.rows)]
        tried = ((count, fit(replace(other, cards=count)).candidates) for count in counts)
        cards, candidates = next((pair for pair in tried if pair[1]), (counts[-1], ()))
        cheapest = candidates[0] if candidates else None
        even = None  # dollars are not compared with card-seconds
        if best and cheapest and best.layout.blocks > 1 and (best.dollars is None) == (cheapest.dollars is None):
            even = break_even(best.cost / request.multiplier.value, cheapest.cost)
        found.append(Alternative(label=label, card=other.card, cards=cards, candidate=cheapest, break_even=even))
    return found


def _requests(request: Request, hardware: Hardware) -> Iterator[tuple[str, Request]]:
    quantized = request.precision is not None and PRECISION_SPECS[request.precision].quantized
    free = replace(
        request, blocks=None, largest=None, frozen=None, cache="off", budget=None, deadline=None,
        precision=None if quantized else request.precision,
    )  # fmt: skip
    yield "full-parameter", replace(free, methods=("full",), sharded=False)
    if request.cards > 1:
        yield "full, sharded (FSDP)", replace(free, methods=("full",), sharded=True, most_stages=1)
    yield "full, host optimizer", replace(free, methods=("offload",), most_stages=1)
    if request.card == THIS_MACHINE:
        return
    for name in ELSEWHERE:
        price = hardware.price(name)
        if name == request.card or price is None:
            continue
        card = hardware.card(name)
        capacity = replace(request.capacity, card=(card.memory_gib - hardware.assumed.reserve_gib) * GIB)
        yield (
            "full-parameter",
            replace(
                free, methods=("full",), card=name, rates=achievable(card, hardware), capacity=capacity,
                usd_per_hour=price.usd_per_hour,
            ),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """A change of the request with which something fits, in words, and the best layout then."""

    words: str
    candidate: Candidate


def nearest_change(request: Request, hardware: Hardware) -> Relaxation | None:
    """The first relaxation that helps, tried from the cheapest one on; None where none helps."""
    for words, relaxed in _relaxed(request, hardware):
        outcome = fit(relaxed)
        if outcome.candidates:
            return Relaxation(words=words, candidate=outcome.candidates[0])
    return None


def _relaxed(request: Request, hardware: Hardware) -> Iterator[tuple[str, Request]]:
    if request.checkpointing == "none":
        yield "with activation checkpointing", replace(request, checkpointing=None)
    if request.precision is not None:
        yield "in another precision", replace(request, precision=None)
    if request.blocks is not None:
        yield "with more blocks", replace(request, blocks=None)
    free = replace(
        request, checkpointing=None, precision=None, blocks=None, largest=None, moments=None, state=None, frozen=None,
        loss_chunk=None,
    )  # fmt: skip
    yield "if blocks, precision and memory settings are all left to the planner", free
    if "bcd" not in request.methods:
        yield "if it trains in blocks (--method bcd)", replace(free, methods=("bcd",))
    capacity = request.capacity
    for factor in (2, 4):
        more = replace(capacity, host=capacity.host * factor, disk=capacity.disk * factor)
        yield f"with {factor} times the host memory and disk", replace(free, capacity=more)
    for factor in (2, 4, 8, 16):
        if request.cards * factor <= request.rows and request.card != THIS_MACHINE:
            yield f"on {request.cards * factor} cards", replace(free, cards=request.cards * factor)
    for card in sorted(hardware.cards.values(), key=lambda card: card.memory_gib):
        larger = (card.memory_gib - hardware.assumed.reserve_gib) * GIB
        if larger > capacity.card and request.card != THIS_MACHINE:
            yield (
                f"on {card.title}",
                replace(
                    free, card=card.name, capacity=replace(capacity, card=larger), rates=achievable(card, hardware)
                ),
            )
