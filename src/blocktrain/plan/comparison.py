"""The same training by other means: in full, sharded, offloaded to the host, on these cards and on others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from blocktrain.plan.cost import break_even
from blocktrain.plan.fit import Candidate, Fit, Request, fit
from blocktrain.plan.hardware import GIB, THIS_MACHINE, Hardware, achievable
from blocktrain.plan.layout import PRECISIONS

CARD_COUNTS = (1, 2, 4, 8, 16, 32, 64)
ELSEWHERE = ("a100-80", "a800", "h100")


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """One other way, with its cheapest layout; `candidate` is None where nothing fits up to 64 cards."""

    label: str
    card: str
    cards: int
    candidate: Candidate | None
    break_even: float | None  # multiplier up to which the best BCD layout is cheaper


def alternatives(request: Request, hardware: Hardware, best: Candidate | None) -> list[Alternative]:
    """Full training on these cards and others, each with as few cards as it fits on (here at least as many)."""
    found = []
    for label, asked in _asked(request, hardware):
        first = asked.cards if asked.card == request.card else 1
        counts = [count for count in CARD_COUNTS if count > first and count <= request.rows]
        for count in [first, *counts]:
            outcome: Fit = fit(replace(asked, cards=count))
            if outcome.candidates:
                cheapest = outcome.candidates[0]
                found.append(
                    Alternative(
                        label=label, card=asked.card, cards=count, candidate=cheapest,
                        break_even=_break_even(request, best, cheapest),
                    )
                )  # fmt: skip
                break
        else:
            most = counts[-1] if counts else first
            found.append(Alternative(label=label, card=asked.card, cards=most, candidate=None, break_even=None))
    return found


def _asked(request: Request, hardware: Hardware) -> Iterator[tuple[str, Request]]:
    packed = request.precision is not None and PRECISIONS[request.precision].packed
    free = replace(
        request, blocks=None, largest=None, frozen=None, precision=None if packed else request.precision, cache="off",
        budget=None, deadline=None,
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
        room = replace(request.room, card=(card.memory_gib - hardware.assumed.reserve_gib) * GIB)
        yield (
            "full-parameter",
            replace(
                free, methods=("full",), card=name, rates=achievable(card, hardware), room=room,
                usd_per_hour=price.usd_per_hour,
            ),
        )  # fmt: skip


def _break_even(request: Request, best: Candidate | None, other: Candidate) -> float | None:
    """In dollars; in card-hours where neither has a price."""
    if best is None or best.layout.blocks == 1:
        return None
    if best.dollars is not None and other.dollars is not None:
        return break_even(float(best.dollars.amount) / request.multiplier.value, float(other.dollars.amount))
    if best.dollars is None and other.dollars is None:
        spent = best.seconds * best.layout.cards / request.multiplier.value
        return break_even(spent, other.seconds * other.layout.cards)
    return None


@dataclass(frozen=True, kw_only=True)
class Change:
    """The nearest change of a request that fits, in words, and what then is best."""

    words: str
    candidate: Candidate


def nearest_change(request: Request, hardware: Hardware) -> Change | None:
    """Relax one thing after the other, the cheapest to do first; None where nothing helps."""
    for words, asked in _relaxed(request, hardware):
        outcome = fit(asked)
        if outcome.candidates:
            return Change(words=words, candidate=outcome.candidates[0])
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
    yield "with everything about blocks, precision and memory left free", free
    if "bcd" not in request.methods:
        yield "in blocks (--method bcd)", replace(free, methods=("bcd",))
    room = request.room
    for factor in (2, 4):
        more = replace(room, host=room.host * factor, disk=room.disk * factor)
        yield f"with {factor} times the host memory and disk", replace(free, room=more)
    for factor in (2, 4, 8, 16):
        if request.cards * factor <= request.rows and request.card != THIS_MACHINE:
            yield f"on {request.cards * factor} cards", replace(free, cards=request.cards * factor)
    for card in sorted(hardware.cards.values(), key=lambda card: card.memory_gib):
        larger = (card.memory_gib - hardware.assumed.reserve_gib) * GIB
        if larger > room.card and request.card != THIS_MACHINE:
            yield (
                f"on {card.title}",
                replace(free, card=card.name, room=replace(room, card=larger), rates=achievable(card, hardware)),
            )
