"""The search: every sensible layout, whether it fits, how long it takes and what it costs; the cheapest first.

For each spread over the cards, number of blocks and precision, the search takes the largest micro-batch that fits,
because smaller ones are not faster. It tries a chunked loss and checkpointing where only a few rows fit without them.

Some means cost time or exactness wherever they are used. They are tried only when nothing fits without them: streaming
frozen weights from the host, 8-bit moments or none between visits, masters rebuilt from bf16, blocks smaller than a
layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import product

from blocktrain.chain.partition_config import Pieces
from blocktrain.plan.cost import SAME_TOKENS, BFMultiplier, price_of
from blocktrain.plan.hardware import GIB, Rates
from blocktrain.plan.layout import (
    PRECISION_SPECS,
    CacheTier,
    Checkpointing,
    Layout,
    MomentFormat,
    MomentPlace,
    PrecisionSpec,
    TrainingMethod,
    WeightPlace,
)
from blocktrain.plan.memory import MemoryPlan, host_parts, plan_memory
from blocktrain.plan.shapes import cut_up_to, widest_row
from blocktrain.plan.spec import ModelSpec
from blocktrain.plan.step import Setting, StepTime, step_time
from blocktrain.units import Dollars

BLOCK_COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
FINER = (1, 3)  # blocks of a layer's size, and of a third of it, when nothing larger fits
LOSS_CHUNK = 1024  # tokens of a chunked loss
STAGES = (1, 2, 3, 4, 6, 8, 12, 16, 32)
ENOUGH_ROWS = 4  # in a micro-batch: kernels are then large enough
LARGEST_MICRO_BATCH = 64  # rows
VISIT_STEPS = 100  # of a visit without a cache
FEWEST_VISIT_STEPS = 25  # of a visit with a cache, whose subset must fit into it
# The share of free host memory and disk that a prefix cache may use, as in cache/cost_model.py.
HOST_SHARE, DISK_SHARE = 0.5, 0.9


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Bytes that may be used: of a card, of host memory for one card, of a node's disk. fragmentation: the share of a
    peak that the allocator takes on top of it."""

    card: float
    host: float
    disk: float
    fragmentation: float = 0.0

    def taken(self, peak: float) -> float:
        """Bytes that a peak takes of a card, with what the allocator wastes."""
        return peak * (1 + self.fragmentation)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be planned: train `spec` on `tokens` tokens, in rows of `seq` and steps of `rows`, on `cards` cards.

    Where a choice is None, the search makes it.
    """

    spec: ModelSpec
    card: str
    cards: int
    tokens: int
    seq: int
    rows: int
    rates: Rates
    capacity: Capacity
    usd_per_hour: Decimal | None = None
    methods: tuple[TrainingMethod, ...] = ("bcd",)
    blocks: int | None = None
    pieces: Pieces = "layers"  # of which a number of blocks is made
    largest: int | None = None  # cut blocks by their size instead
    precision: str | None = None
    moments: MomentFormat | None = None
    state: MomentPlace | None = None
    frozen: WeightPlace | None = None
    checkpointing: Checkpointing | None = None
    loss_chunk: int | None = None  # tokens; 0: no chunks
    cache: CacheTier | None = None
    sharded: bool | None = None  # FSDP2 over all data-parallel ranks
    most_stages: int = 32  # of a pipeline
    cards_per_node: int = 8
    overlap: float = 0.5
    cache_epochs: int = 1
    multiplier: BFMultiplier = SAME_TOKENS  # of BCD
    budget: Dollars | None = None
    deadline: float | None = None  # seconds


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout that fits, with its memory, time and cost."""

    layout: Layout
    memory: MemoryPlan
    step: StepTime
    steps: int  # of the whole run, the multiplier included
    visit_steps: int
    seconds: float  # of the whole run
    tokens_per_second: float
    dollars: Dollars | None
    step_dollars: Dollars | None
    exceeded: tuple[str, ...] = ()  # "budget", "deadline"

    @property
    def cost(self) -> float:
        """Dollars, or card-seconds where no price is known."""
        return float(self.dollars.amount) if self.dollars is not None else self.seconds * self.layout.cards

    @property
    def rank(self) -> tuple[float, ...]:
        """The smallest is the best: first within the limits, then cheap, then fast, then exact, then simple."""
        layout = self.layout
        return (len(self.exceeded), self.cost, self.seconds, layout.losses, layout.pipeline + layout.shards)


@dataclass(frozen=True, kw_only=True)
class Overflow:
    """The layout that comes nearest to fitting, and what it lacks."""

    layout: Layout
    memory: MemoryPlan
    what: str  # "device memory", "host memory" or "disk space"
    need: float  # bytes
    there: float  # bytes
    part: str  # the largest part of the need

    @property
    def ratio(self) -> float:
        """The need over what there is; up to 1 it would fit."""
        return self.need / max(self.there, 1.0)  # a disk may be full


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The candidates, best first; where nothing fits, the layout that comes nearest to fitting."""

    candidates: tuple[Candidate, ...] = ()
    overflow: Overflow | None = None


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
    roomy: set[Layout] = set()  # of those without checkpointing and chunks: enough rows fit
    for layout in tried:
        plain = replace(layout, checkpointing="none", loss_chunk=None)
        if layout != plain and plain in roomy:
            continue
        host = sum(host_parts(request.spec, layout).values()) / request.capacity.host
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
    """All layouts but those of `saving_layouts`; `_largest_micro_batch` and `_tiers` complete them."""
    if request.frozen == "host" or request.largest is not None:
        return
    for method in request.methods:
        for precision in _precisions(request, method):
            for data, pipeline, shards in _spreads(request, method, precision):
                choices = product(_blocks(request, method, pipeline), _activation_savings(request))
                for blocks, (checkpointing, chunk) in choices:
                    yield Layout(
                        method=method,
                        blocks=blocks,
                        pieces=request.pieces if method == "bcd" else "layers",
                        precision=precision,
                        moments=request.moments or "fp32",
                        state=request.state or "host",
                        checkpointing=checkpointing,
                        loss_chunk=chunk,
                        data=data,
                        pipeline=pipeline,
                        shards=shards,
                    )


def _spreads(request: Request, method: TrainingMethod, precision: PrecisionSpec) -> Iterator[tuple[int, int, int]]:
    """(data, pipeline, shards): the ways to use all cards that this method and precision allow."""
    divided = method == "bcd" and request.pieces == "modules"
    for pipeline in STAGES:
        data, rest = divmod(request.cards, pipeline)
        if rest or data > request.rows or pipeline > min(request.most_stages, request.spec.layers):
            continue
        if pipeline > 1 and (precision.quantized or divided):
            continue
        for shards in dict.fromkeys((1, data)):
            if shards > 1 and (precision.quantized or method == "offload"):
                continue
            if data == 1 or method == "offload" or request.sharded in (None, shards > 1):
                yield data, pipeline, shards


def saving_layouts(request: Request) -> Iterator[Layout]:
    """Layouts that save memory at any price, for when nothing else fits. Each card holds the whole model or streams it.

    Streaming needs checkpointing: without it autograd keeps the weights that were copied to the card.
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
        for precision in PRECISION_SPECS.values()
        if precision.weight in request.rates.matmul_flops and request.precision in (None, precision.name)
    ]
    places: list[WeightPlace] = ["device", "host"] if request.frozen is None else [request.frozen]
    moments: list[MomentFormat] = ["fp32", "8bit"] if request.moments is None else [request.moments]
    states: list[MomentPlace] = ["host", "drop"] if request.state is None else [request.state]
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
            loss_chunk=LOSS_CHUNK if request.loss_chunk is None else request.loss_chunk or None,
            data=request.cards,
        )


def _precisions(request: Request, method: TrainingMethod) -> list[PrecisionSpec]:
    """Precisions that a search may take: quantized ones where something is frozen, and those that lose updates only if
    the request names them."""
    known = [precision for precision in PRECISION_SPECS.values() if precision.weight in request.rates.matmul_flops]
    if method != "bcd":
        known = [precision for precision in known if not precision.quantized]
    if request.precision is not None:
        return [precision for precision in known if precision.name == request.precision]
    most = 1 if method == "bcd" else 0
    return [precision for precision in known if precision.loss <= most]


def _activation_savings(request: Request) -> list[tuple[Checkpointing, int | None]]:
    """(checkpointing, tokens of a loss chunk), what saves least first."""
    ways: list[tuple[Checkpointing, int | None]] = [("none", None), ("none", LOSS_CHUNK), ("layers", LOSS_CHUNK)]
    if request.loss_chunk is not None:
        ways = [(checkpointing, request.loss_chunk or None) for checkpointing in ("none", "layers")]
    if request.checkpointing is not None:
        ways = [(request.checkpointing, chunk) for _, chunk in ways]
    return list(dict.fromkeys(ways))


def _blocks(request: Request, method: TrainingMethod, pipeline: int) -> list[int]:
    if method != "bcd":
        return [1]
    most = (request.spec.layers + 2) // pipeline
    if request.blocks is not None:
        return [request.blocks] if request.blocks <= most else []
    return [count for count in BLOCK_COUNTS if count <= most]


def _largest_micro_batch(request: Request, layout: Layout) -> tuple[Layout, MemoryPlan]:
    """The largest micro-batch that fits, in powers of two; one row even if it does not fit."""
    rank_rows = max(1, request.rows // layout.data)
    found: tuple[Layout, MemoryPlan] | None = None
    rows = 1
    while True:
        sized = replace(layout, micro_rows=rows)
        micro_steps = -(-rank_rows // rows)
        in_flight = min(layout.pipeline, micro_steps)
        peak = plan_memory(request.spec, sized, seq=request.seq, in_flight=in_flight, micro_steps=micro_steps)
        fits = request.capacity.taken(peak.peak) <= request.capacity.card
        if found is None or fits:
            found = sized, peak
        rows *= 2
        if not fits or rows > min(rank_rows, LARGEST_MICRO_BATCH):
            return found


def _missing(request: Request, layout: Layout, peak: MemoryPlan) -> Overflow | None:
    capacity, nodes = request.capacity, -(-layout.cards // request.cards_per_node)
    for what, need, there, parts in (
        ("device memory", capacity.taken(peak.peak), capacity.card, peak.parts),
        ("host memory", peak.host_bytes, capacity.host, peak.host),
        ("disk space", peak.disk_bytes, capacity.disk * nodes, peak.disk),
    ):
        if need > there:
            largest = max(parts, key=lambda part: parts[part])
            return Overflow(layout=layout, memory=peak, what=what, need=need, there=there, part=largest)
    return None


def _tiers(request: Request, layout: Layout, peak: MemoryPlan) -> list[Layout]:
    """The layout without a prefix cache, and with one wherever a useful subset has room."""
    if layout.blocks == 1:
        return [layout]
    wanted = ("off", "host", "disk") if request.cache is None else (request.cache,)
    return [
        replace(layout, cache=tier)
        for tier in wanted
        if tier == "off" or visit_steps(request, replace(layout, cache=tier), peak) >= FEWEST_VISIT_STEPS
    ]


def visit_steps(request: Request, layout: Layout, peak: MemoryPlan) -> int:
    """How many steps a visit has: with a cache, the requested number of passes over a subset that has room."""
    most = max(1, request.tokens // (request.rows * request.seq * layout.blocks))
    if layout.cache == "off":
        return min(VISIT_STEPS, most)
    nodes = -(-layout.cards // request.cards_per_node)
    space = {
        "device": request.capacity.card - peak.peak,
        "host": HOST_SHARE * (request.capacity.host - peak.host_bytes) * layout.cards,
        "disk": DISK_SHARE * (request.capacity.disk * nodes - peak.disk_bytes),
    }[layout.cache]
    subset = max(0.0, space) / (request.spec.width * layout.precision.weight)
    return min(most, int(subset * request.cache_epochs) // (request.rows * request.seq))


def candidate(request: Request, layout: Layout, peak: MemoryPlan) -> Candidate:
    """A layout that fits, with its time and cost."""
    setting = Setting(
        seq=request.seq,
        rows=request.rows,
        rates=request.rates,
        cards_per_node=request.cards_per_node,
        overlap=request.overlap,
        cache_epochs=float(request.cache_epochs),
    )
    step = step_time(request.spec, layout, setting)
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


def capacity_of(
    memory_gib: float, reserve_gib: float, host_gib: float, disk_gib: float, *, fragmentation: float
) -> Capacity:
    """A machine's capacity in bytes, from figures in GiB."""
    return Capacity(
        card=(memory_gib - reserve_gib) * GIB, host=host_gib * GIB, disk=disk_gib * GIB, fragmentation=fragmentation
    )
