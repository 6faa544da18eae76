"""The search: every sensible layout, whether it fits, what it takes; the cheapest first.

For each way to spread over the cards, block count, precision and checkpointing, the largest micro-batch that fits is
taken: smaller ones are not faster. Checkpointing is tried where it buys a larger micro-batch than a few rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal

from blocktrain.plan.cost import SAME_TOKENS, Multiplier, price_of
from blocktrain.plan.hardware import GIB, Rates
from blocktrain.plan.layout import PRECISIONS, Checkpointing, Layout, Method, Precision, Tier
from blocktrain.plan.memory import Memory, memory
from blocktrain.plan.spec import ModelSpec
from blocktrain.plan.step import Setting, StepTime, step_time
from blocktrain.units import Dollars

BLOCK_COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
STAGES = (1, 2, 3, 4, 6, 8, 12, 16, 32)
ENOUGH_ROWS = 4  # in a micro-batch: beyond, kernels are large enough
MOST_ROWS = 64
VISIT_STEPS = 100  # of a visit without a cache
FEWEST_VISIT_STEPS = 25  # with one, whose subset must fit
HOST_SHARE, DISK_SHARE = 0.5, 0.9  # of what is free, for a prefix cache; as the cache itself takes (prefix/choice.py)


@dataclass(frozen=True, kw_only=True)
class Room:
    """Bytes one may use: of a card, of host memory for one card, of a node's disk."""

    card: float
    host: float
    disk: float
    fragmentation: float = 0.0

    def holds(self, peak: float) -> bool:
        """Whether a peak fits on a card, with what an allocator wastes."""
        return peak * (1 + self.fragmentation) <= self.card


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked: train `spec` on `tokens` tokens of rows of `seq`, `rows` a step, on `cards` cards."""

    spec: ModelSpec
    card: str
    cards: int
    tokens: int
    seq: int
    rows: int
    rates: Rates
    room: Room
    usd_per_hour: Decimal | None = None
    methods: tuple[Method, ...] = ("bcd",)
    blocks: int | None = None  # None: any
    precision: str | None = None
    checkpointing: Checkpointing | None = None
    cache: Tier | None = None
    sharded: bool | None = None  # FSDP2 over all data-parallel ranks; None: with and without
    most_stages: int = 32  # of a pipeline
    cards_per_node: int = 8
    overlap: float = 0.5
    cache_epochs: int = 1
    multiplier: Multiplier = SAME_TOKENS  # of BCD
    budget: Dollars | None = None
    deadline: float | None = None  # seconds

    @property
    def setting(self) -> Setting:
        """For `step_time`."""
        return Setting(
            seq=self.seq,
            rows=self.rows,
            rates=self.rates,
            cards_per_node=self.cards_per_node,
            overlap=self.overlap,
            cache_epochs=float(self.cache_epochs),
        )


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout with what it takes."""

    layout: Layout
    memory: Memory
    step: StepTime
    steps: int  # with the multiplier
    visit_steps: int
    seconds: float  # of the whole run
    tokens_per_second: float
    dollars: Dollars | None
    step_dollars: Dollars | None
    exceeded: tuple[str, ...] = ()  # "budget", "deadline"

    @property
    def rank(self) -> tuple[float, ...]:
        """Smaller is better: within the limits, then cheap, then fast, then simple."""
        cost = float(self.dollars.amount) if self.dollars is not None else self.seconds * self.layout.cards
        return (len(self.exceeded), cost, self.seconds, self.layout.pipeline + self.layout.shards)


@dataclass(frozen=True, kw_only=True)
class Overflow:
    """The layout that comes nearest to fitting, and what does not."""

    layout: Layout
    memory: Memory
    what: str  # "card", "host memory", "disk"
    need: float  # bytes
    there: float
    part: str  # the largest

    @property
    def ratio(self) -> float:
        """How far from fitting; 1 would."""
        return self.need / max(self.there, 1.0)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Candidates, best first; or, where nothing fits, the nearest miss."""

    candidates: tuple[Candidate, ...] = ()
    overflow: Overflow | None = field(default=None)


def fit(request: Request) -> Fit:
    """Search all layouts of `request`."""
    found: list[Candidate] = []
    nearest: Overflow | None = None
    roomy: set[Layout] = set()  # fit without checkpointing, a few rows at a time
    for layout in layouts(request):
        if layout.checkpointing == "layers" and replace(layout, checkpointing="none") in roomy:
            continue
        sized, peak = _largest_micro_batch(request, layout)
        missing = _missing(request, sized, peak)
        if missing is not None:
            nearest = missing if nearest is None or missing.ratio < nearest.ratio else nearest
            continue
        if sized.micro_rows >= ENOUGH_ROWS:
            roomy.add(layout)
        found += [candidate(request, tiered, peak) for tiered in _tiers(request, sized, peak)]
    best: dict[tuple[object, ...], Candidate] = {}
    for item in sorted(found, key=lambda item: item.rank):
        best.setdefault((item.layout.method, item.layout.blocks, item.layout.precision), item)
    return Fit(candidates=tuple(best.values()), overflow=None if found else nearest)


def layouts(request: Request) -> Iterator[Layout]:
    """All but the micro-batch and the cache: see `_largest_micro_batch` and `_tiers`."""
    for method in request.methods:
        for precision in _precisions(request):
            for pipeline in (p for p in STAGES if request.cards % p == 0 and p <= request.most_stages):
                data = request.cards // pipeline
                if data > request.rows or pipeline > request.spec.layers:
                    continue
                for shards in _shards(request, method, data):
                    for blocks in _blocks(request, method, pipeline):
                        for checkpointing in _checkpointings(request):
                            yield Layout(
                                method=method,
                                blocks=blocks,
                                precision=precision,
                                checkpointing=checkpointing,
                                data=data,
                                pipeline=pipeline,
                                shards=shards,
                            )


def _precisions(request: Request) -> list[Precision]:
    known = [precision for precision in PRECISIONS.values() if precision.weight in request.rates.matmul_flops]
    return [precision for precision in known if request.precision in (None, precision.name)]


def _shards(request: Request, method: Method, data: int) -> list[int]:
    if method == "offload" or data == 1:
        return [1]
    return [count for count in (1, data) if request.sharded in (None, count > 1)]


def _blocks(request: Request, method: Method, pipeline: int) -> list[int]:
    if method != "bcd":
        return [1]
    most = (request.spec.layers + 2) // pipeline
    if request.blocks is not None:
        return [request.blocks] if request.blocks <= most else []
    return [count for count in BLOCK_COUNTS if count <= most]


def _checkpointings(request: Request) -> list[Checkpointing]:
    return ["none", "layers"] if request.checkpointing is None else [request.checkpointing]


def _largest_micro_batch(request: Request, layout: Layout) -> tuple[Layout, Memory]:
    """The largest power of two rows at a time that fits, at least one, whether that fits or not."""
    rank_rows = max(1, request.rows // layout.data)
    rows = 1 << (min(rank_rows, MOST_ROWS).bit_length() - 1)
    while True:
        sized = replace(layout, micro_rows=rows)
        micro_steps = -(-rank_rows // rows)
        peak = memory(request.spec, sized, seq=request.seq, in_flight=min(layout.pipeline, micro_steps))
        if rows == 1 or request.room.holds(peak.peak):
            return sized, peak
        rows //= 2


def _missing(request: Request, layout: Layout, peak: Memory) -> Overflow | None:
    room, nodes = request.room, -(-layout.cards // request.cards_per_node)
    on_card = peak.peak * (1 + room.fragmentation)
    for what, need, there, parts in (
        ("card", on_card, room.card, peak.parts),
        ("host memory", peak.host_bytes, room.host, peak.host),
        ("disk", peak.disk_bytes, room.disk * nodes, peak.disk),
    ):
        if need > there:
            largest = max(parts, key=lambda part: parts[part])
            return Overflow(layout=layout, memory=peak, what=what, need=need, there=there, part=largest)
    return None


def _tiers(request: Request, layout: Layout, peak: Memory) -> list[Layout]:
    """The layout without a prefix cache, and with one wherever a useful subset has room."""
    if layout.blocks == 1:
        return [layout]
    wanted = ("off", "host", "disk") if request.cache is None else (request.cache,)
    return [
        replace(layout, cache=tier)
        for tier in wanted
        if tier == "off" or visit_steps(request, replace(layout, cache=tier), peak) >= FEWEST_VISIT_STEPS
    ]


def visit_steps(request: Request, layout: Layout, peak: Memory) -> int:
    """How long a visit lasts: with a cache, as many passes over the subset as asked for, as far as there is room."""
    most = max(1, request.tokens // (request.rows * request.seq * layout.blocks))
    if layout.cache == "off":
        return min(VISIT_STEPS, most)
    nodes = -(-layout.cards // request.cards_per_node)
    room = {
        "device": request.room.card - peak.peak,
        "host": HOST_SHARE * (request.room.host - peak.host_bytes) * layout.cards,
        "disk": DISK_SHARE * (request.room.disk * nodes - peak.disk_bytes),
    }[layout.cache]
    subset = max(0.0, room) / (request.spec.width * layout.precision.weight)
    return min(most, int(subset * request.cache_epochs) // (request.rows * request.seq))


def candidate(request: Request, layout: Layout, peak: Memory) -> Candidate:
    """Time and cost of a layout that fits."""
    step = step_time(request.spec, layout, request.setting)
    factor = request.multiplier.value if layout.method == "bcd" and layout.blocks > 1 else 1.0
    tokens = request.rows * request.seq
    steps = -(-int(request.tokens * factor) // tokens)
    seconds = steps * step.seconds
    price = request.usd_per_hour
    dollars = None if price is None else price_of(seconds, layout.cards, price)
    exceeded = ["deadline"] * (request.deadline is not None and seconds > request.deadline)
    exceeded += ["budget"] * (request.budget is not None and dollars is not None and dollars > request.budget)
    return Candidate(
        layout=layout,
        memory=peak,
        step=step,
        steps=steps,
        visit_steps=visit_steps(request, layout, peak),
        seconds=seconds,
        tokens_per_second=tokens / step.seconds,
        dollars=dollars,
        step_dollars=None if price is None else price_of(step.seconds, layout.cards, price),
        exceeded=tuple(exceeded),
    )


def room_on(memory_gib: float, reserve_gib: float, host_gib: float, disk_gib: float, *, fragmentation: float) -> Room:
    """In bytes, from what people say of a machine."""
    return Room(
        card=(memory_gib - reserve_gib) * GIB, host=host_gib * GIB, disk=disk_gib * GIB, fragmentation=fragmentation
    )
