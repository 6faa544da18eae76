"""The search: every sensible layout, whether it fits, what it takes; the cheapest first.

For each way to spread over the cards, block count and precision the largest micro-batch that fits is taken: smaller
ones are not faster. A loss in chunks and checkpointing are tried where they buy a larger one than a few rows.

What costs time or exactness wherever it is used comes last, when nothing else fits: frozen weights streamed from the
host, moments in 8 bits or dropped, masters rebuilt from bf16, blocks smaller than a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import product

from blocktrain.plan.cost import SAME_TOKENS, Multiplier, price_of
from blocktrain.plan.hardware import GIB, Rates
from blocktrain.plan.layout import (
    PRECISIONS,
    Checkpointing,
    Layout,
    Method,
    Moments,
    Pieces,
    Place,
    Precision,
    State,
    Tier,
)
from blocktrain.plan.memory import Memory, host_parts, memory
from blocktrain.plan.shapes import cut_up_to, widest_row
from blocktrain.plan.spec import ModelSpec
from blocktrain.plan.step import Setting, StepTime, step_time
from blocktrain.units import Dollars

BLOCK_COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
FINER = (1, 3)  # blocks of a layer's size, and of a third of it, when nothing larger fits
CHUNK = 1024  # tokens of a loss in chunks
STAGES = (1, 2, 3, 4, 6, 8, 12, 16, 32)
ENOUGH_ROWS = 4  # in a micro-batch: beyond, kernels are large enough
MOST_ROWS = 64
VISIT_STEPS = 100  # of a visit without a cache
FEWEST_VISIT_STEPS = 25  # with one, whose subset must fit
HOST_SHARE, DISK_SHARE = (
    0.5,
    0.9,
)  # of what is free, for a prefix cache; as the cache itself takes (cache/cost_model.py)


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
    pieces: Pieces = "layers"  # of blocks by their number
    largest: int | None = None  # None: blocks by their number
    precision: str | None = None
    moments: Moments | None = None
    state: State | None = None
    frozen: Place | None = None
    checkpointing: Checkpointing | None = None
    loss_chunk: int | None = None  # 0: the whole loss at once
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
        return (len(self.exceeded), cost, self.seconds, self.layout.losses, self.layout.pipeline + self.layout.shards)


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
        return self.need / self.there


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Candidates, best first; or, where nothing fits, the nearest miss."""

    candidates: tuple[Candidate, ...] = ()
    overflow: Overflow | None = field(default=None)


def fit(request: Request) -> Fit:
    """Search all layouts of `request`."""
    usual = _fit(request, layouts(request))
    if usual.candidates or "bcd" not in request.methods:
        return usual
    saving = _fit(request, saving_layouts(request))
    if saving.candidates or usual.overflow is None:
        return saving
    return saving if saving.overflow is not None and saving.overflow.ratio < usual.overflow.ratio else usual


def _fit(request: Request, tried: Iterator[Layout]) -> Fit:
    found: list[Candidate] = []
    nearest: Overflow | None = None
    roomy: set[Layout] = set()  # fit as they are, a few rows at a time
    for layout in tried:
        plain = replace(layout, checkpointing="none", loss_chunk=None)
        if layout != plain and plain in roomy:
            continue
        host = sum(host_parts(request.spec, layout).values()) / request.room.host
        if host > 1 and nearest is not None and nearest.ratio <= host:
            continue
        sized, peak = _largest_micro_batch(request, layout)
        missing = _missing(request, sized, peak)
        if missing is not None:
            nearest = missing if nearest is None or missing.ratio < nearest.ratio else nearest
            continue
        if sized.micro_rows >= ENOUGH_ROWS:
            roomy.add(plain)
        found += [candidate(request, tiered, peak) for tiered in _tiers(request, sized, peak)]
    best: dict[tuple[object, ...], Candidate] = {}
    for item in sorted(found, key=lambda item: item.rank):
        best.setdefault((item.layout.method, item.layout.blocks, item.layout.precision), item)
    return Fit(candidates=tuple(best.values()), overflow=None if found else nearest)


def layouts(request: Request) -> Iterator[Layout]:
    """All but the micro-batch and the cache: see `_largest_micro_batch` and `_tiers`."""
    if request.frozen == "host" or request.largest is not None:
        return
    for method in request.methods:
        for precision in _precisions(request, method):
            for pipeline in (p for p in STAGES if request.cards % p == 0 and p <= request.most_stages):
                data = request.cards // pipeline
                if data > request.rows or pipeline > request.spec.layers:
                    continue
                pieces = request.pieces if method == "bcd" else "layers"
                if pipeline > 1 and (precision.packed or pieces == "modules"):
                    continue
                for shards in _shards(request, method, data):
                    if precision.packed and shards > 1:
                        continue
                    for blocks, (checkpointing, chunk) in product(_blocks(request, method, pipeline), _thrift(request)):
                        yield Layout(
                            method=method,
                            blocks=blocks,
                            pieces=pieces,
                            precision=precision,
                            moments=request.moments or "fp32",
                            state=request.state or "host",
                            checkpointing=checkpointing,
                            loss_chunk=chunk,
                            data=data,
                            pipeline=pipeline,
                            shards=shards,
                        )


def saving_layouts(request: Request) -> Iterator[Layout]:
    """Those that save memory at any price, for when nothing else fits; each card holds the whole model or streams it.

    Checkpointing belongs to streaming: without it autograd keeps what was fetched.
    """
    if request.rows < request.cards or request.sharded:
        return
    cuts: list[tuple[int, int | None]] = [(count, None) for count in _blocks(request, "bcd", 1) if count > 1]
    if request.blocks is None:
        narrowest = widest_row(request.spec)
        sizes = [max(request.spec.layer_parameters // parts, narrowest) for parts in FINER]
        if request.largest is not None:
            sizes, cuts = [request.largest], []
        cuts += [(len(cut_up_to(request.spec, size)), size) for size in sizes]
    precisions = [
        precision
        for precision in PRECISIONS.values()
        if precision.weight in request.rates.matmul_flops and request.precision in (None, precision.name)
    ]
    places: list[Place] = ["device", "host"] if request.frozen is None else [request.frozen]
    moments: list[Moments] = ["fp32", "8bit"] if request.moments is None else [request.moments]
    states: list[State] = ["host", "drop"] if request.state is None else [request.state]
    for (blocks, largest), precision, place, kept, state in product(cuts, precisions, places, moments, states):
        yield Layout(
            blocks=blocks,
            pieces=request.pieces if largest is None else "layers",
            largest=largest,
            precision=precision,
            moments=kept,
            frozen=place,
            state=state,
            checkpointing=request.checkpointing or "layers",
            loss_chunk=CHUNK if request.loss_chunk is None else request.loss_chunk or None,
            data=request.cards,
        )


def _precisions(request: Request, method: Method) -> list[Precision]:
    """Those that lose updates only where they are asked for by name; packed ones where something is frozen."""
    known = [precision for precision in PRECISIONS.values() if precision.weight in request.rates.matmul_flops]
    if method != "bcd":
        known = [precision for precision in known if not precision.packed]
    if request.precision is not None:
        return [precision for precision in known if precision.name == request.precision]
    most = 1 if method == "bcd" else 0
    return [precision for precision in known if precision.loses <= most]


def _thrift(request: Request) -> list[tuple[Checkpointing, int | None]]:
    """(checkpointing, loss in chunks), what saves least first."""
    ways: list[tuple[Checkpointing, int | None]] = [("none", None), ("none", CHUNK), ("layers", CHUNK)]
    if request.loss_chunk is not None:
        ways = [(checkpointing, request.loss_chunk or None) for checkpointing in ("none", "layers")]
    if request.checkpointing is not None:
        ways = [(request.checkpointing, chunk) for _, chunk in ways]
    return list(dict.fromkeys(ways))


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


def _largest_micro_batch(request: Request, layout: Layout) -> tuple[Layout, Memory]:
    """The largest power of two rows at a time that fits, at least one, whether that fits or not."""
    rank_rows = max(1, request.rows // layout.data)
    found: tuple[Layout, Memory] | None = None
    rows = 1
    while True:
        sized = replace(layout, micro_rows=rows)
        micro_steps = -(-rank_rows // rows)
        in_flight = min(layout.pipeline, micro_steps)
        peak = memory(request.spec, sized, seq=request.seq, in_flight=in_flight, micro_steps=micro_steps)
        fits = request.room.holds(peak.peak)
        if found is None or fits:
            found = sized, peak
        rows *= 2
        if not fits or rows > min(rank_rows, MOST_ROWS):
            return found


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
