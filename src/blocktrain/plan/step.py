"""How long a step takes, by part, from counted FLOPs and bytes over the rates a card achieves.

    layer, forward     products / rate + attention / rate + elementwise bytes / memory rate, or its kernels' launches
    layer, backward    active: twice the products; tail: once; attention 2.5 times; elementwise bytes twice
    checkpointing      the forward pass of active and tail layers again
    update             active parameters / rate of a fused AdamW
    pipeline           p - 1 of m + p - 1 turns are idle (GPipe, 1F1B)
    communication      ring all-reduce of the active gradients; FSDP2's gathers of all weights; a part of it hides
    unpacking          packed frozen weights, for each run of their layer, in plain PyTorch
    streaming          frozen weights over the host link, one layer ahead: what is longer than the layer before takes

Averaged over the visits of a sweep. Reading a prefix cache hides behind the step, and costs what is longer than it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from blocktrain.plan.hardware import Rates
from blocktrain.plan.layout import Layout, Piece, trains_projection, visits
from blocktrain.plan.memory import parameters_of
from blocktrain.plan.operations import Work, head_operations, layer_operations, loss_operations, work
from blocktrain.plan.spec import ModelSpec

PARTS = (
    *("forward", "backward", "recompute", "unpacking", "streaming"),
    *("update", "bubble", "communication", "offload", "cache"),
)
LOSS_BACKWARD = 2.0  # elementwise bytes of a backward pass over those of the forward pass
WRITE_BACK_BYTES = 20  # of a bf16-exact scalar after its step, see optim/precision.py, `half`
UPDATE_8BIT_BYTES = 190  # read and written for a scalar in plain PyTorch, by the operations in optim/adamw8bit.py


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all candidate layouts share: the step's batch, the machine's rates and how cards are wired."""

    seq: int
    rows: int  # of one optimizer step, over all cards
    rates: Rates
    cards_per_node: int = 8
    overlap: float = 0.5  # of communication hides behind the backward pass
    cache_epochs: float = 1.0  # passes over a subset in one visit


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds by part, averaged over the visits of a sweep, and the FLOPs behind them."""

    parts: Mapping[str, float]
    flops: float  # counted, of one step on all cards, recomputation included

    @property
    def seconds(self) -> float:
        """Of one step."""
        return sum(self.parts.values())

    @property
    def bound(self) -> str:
        """The part that takes most of it."""
        return max(self.parts, key=lambda part: self.parts[part])


@lru_cache(maxsize=1024)
def _works(spec: ModelSpec, dtype: int, seq: int) -> tuple[Work, Work, Work]:
    """Of a layer, the head and the loss, for one token."""
    return (
        work(layer_operations(spec, dtype), seq),
        work(head_operations(spec, dtype), seq),
        work(loss_operations(spec), seq),
    )


def step_time(spec: ModelSpec, layout: Layout, setting: Setting) -> StepTime:
    """Seconds of one optimizer step over `setting.rows` rows."""
    parts, flops, count = dict.fromkeys(PARTS, 0.0), 0.0, 0
    for stages, times in visits(spec, layout.blocks, layout.pipeline, layout.largest, layout.pieces):
        visit = _visit(spec, layout, setting, stages)
        for part in PARTS:
            parts[part] += times * visit[part]
        flops += times * sum(step_flops(spec, layout, setting.seq, piece) for piece in stages)
        count += times
    return StepTime(
        parts={part: seconds / count for part, seconds in parts.items()}, flops=flops / count * setting.rows
    )


def step_flops(spec: ModelSpec, layout: Layout, seq: int, piece: Piece) -> float:
    """Counted FLOPs of one row on a card that sees `piece` of a visit."""
    layer, head, _ = _works(spec, layout.precision.weight, seq)
    run = piece.active + piece.tail
    prefix = piece.prefix if layout.cache == "off" else 0
    again = run if layout.checkpointing == "layers" else 0
    matrix = (prefix + 2 * run + again + _trained_layers(spec, piece)) * layer.matrix_flops
    if piece.head != "absent":
        matrix += (2 + trains_projection(spec, piece)) * head.matrix_flops
    attention = (prefix + run + again) * layer.attention_flops + run * layer.attention_backward_flops
    return seq * (matrix + attention)


def _trained_layers(spec: ModelSpec, piece: Piece) -> float:
    """Layers' worth of weights with gradients: of a layer that is taken apart, its share."""
    return piece.owned.layers / spec.layer_parameters


def _visit(spec: ModelSpec, layout: Layout, setting: Setting, stages: tuple[Piece, ...]) -> dict[str, float]:
    """A step's parts in a visit; the slowest stage sets the geometry."""
    micro_steps = -(-setting.rows // layout.data // layout.micro_rows)
    turns = [_turn(spec, layout, setting, piece) for piece in stages]
    slowest = max(turns, key=lambda turn: sum(turn.values()))
    parts = {part: seconds * micro_steps for part, seconds in slowest.items()}
    turn = sum(slowest.values())
    parts["bubble"] = turn * (layout.pipeline - 1)
    parts["update"] = max(_update(spec, layout, setting.rates, piece) for piece in stages)
    communication = max(_communication(spec, layout, setting, piece, micro_steps) for piece in stages)
    parts["communication"] = communication - min(communication * setting.overlap, parts["backward"])
    parts["offload"] = _offload(spec, layout, setting.rates)
    parts["cache"] = _cache(spec, layout, setting, stages[0], busy=turn * micro_steps, micro_steps=micro_steps)
    return parts


def _turn(spec: ModelSpec, layout: Layout, setting: Setting, piece: Piece) -> dict[str, float]:
    """Seconds of one micro-batch on one stage."""
    rates, dtype = setting.rates, layout.precision.weight
    layer, head, loss = _works(spec, dtype, setting.seq)
    tokens = layout.micro_rows * setting.seq
    run = piece.active + piece.tail
    prefix = piece.prefix if layout.cache == "off" else 0
    forward = _pass(layer, tokens, dtype, rates)
    tail = _pass(layer, tokens, dtype, rates, products=1, attention=2.5, moved=LOSS_BACKWARD)
    active = _pass(layer, tokens, dtype, rates, products=2, attention=2.5, moved=LOSS_BACKWARD)
    trained = _trained_layers(spec, piece)
    parts = {
        "forward": (prefix + run) * forward,
        "backward": trained * active + (run - trained) * tail,
        "recompute": run * forward if layout.checkpointing == "layers" else 0.0,
    }
    if piece.head != "absent":
        products = 1 + trains_projection(spec, piece)
        parts["forward"] += _pass(head, tokens, dtype, rates) + _pass(loss, tokens, 4, rates)
        parts["backward"] += _pass(head, tokens, dtype, rates, products=products, moved=LOSS_BACKWARD)
        parts["backward"] += _pass(loss, tokens, 4, rates, moved=LOSS_BACKWARD)
    return parts | _waking(spec, layout, rates, piece, forward=forward, backward=tail)


def _waking(
    spec: ModelSpec, layout: Layout, rates: Rates, piece: Piece, *, forward: float, backward: float
) -> dict[str, float]:
    """What resting weights add to a micro-batch. Every such layer is materialized for its forward pass, and one above
    the active ones, where it is computed again, for its backward pass. forward, backward: seconds of such a layer."""
    parts = {"unpacking": 0.0, "streaming": 0.0}
    if not layout.rests or layout.blocks == 1:
        return parts
    precision, layer = layout.precision, spec.matrices_of_layer
    table = spec.vocabulary * spec.width
    below = piece.prefix if layout.cache == "off" else 0
    again = piece.tail if layout.checkpointing == "layers" else 0
    embedding = table if piece.embedding == "frozen" and layout.cache == "off" else 0
    head = table if (piece.embedding if spec.tied else piece.head) == "frozen" else 0
    moved = precision.unpacking / rates.memory_bytes
    parts["unpacking"] = moved * ((below + piece.tail + again) * layer + embedding + head)
    if layout.frozen == "host":
        copied = precision.frozen / rates.host_link_bytes
        ahead = forward + moved * layer
        parts["streaming"] = copied * embedding + max(0.0, copied * head - ahead)  # nothing runs before the first
        parts["streaming"] += (below + piece.tail) * max(0.0, copied * layer - ahead)
        parts["streaming"] += again * max(0.0, copied * layer - ahead - backward)
    return parts


def _pass(
    of: Work,
    tokens: int,
    dtype: int,
    rates: Rates,
    *,
    products: float = 1,
    attention: float = 1,
    moved: float = 1,
) -> float:
    """Seconds of one layer's pass. A product is as slow as its FLOPs or as reading its weights."""
    weights = of.matrix_flops / 2 * dtype
    matrix = max(tokens * of.matrix_flops / rates.matmul_flops[dtype], weights / rates.memory_bytes)
    seconds = (
        products * matrix
        + attention * tokens * of.attention_flops / rates.attention_flops[dtype]
        + moved * tokens * of.moved_elements * dtype / rates.memory_bytes
    )
    return max(seconds, (products + moved) / 2 * of.kernels * rates.kernel_seconds)


def _update(spec: ModelSpec, layout: Layout, rates: Rates, piece: Piece) -> float:
    if layout.method == "offload":
        return 0.0
    active = parameters_of(spec, piece)[1] / layout.shards
    back = WRITE_BACK_BYTES / rates.memory_bytes if layout.precision.master else 0.0
    each = UPDATE_8BIT_BYTES / rates.memory_bytes if layout.moments == "8bit" else 1 / rates.update_scalars
    return active * (each + back)


def _communication(spec: ModelSpec, layout: Layout, setting: Setting, piece: Piece, micro_steps: int) -> float:
    """Seconds on the slowest link between cards."""
    rates = setting.rates
    many_nodes = layout.cards > setting.cards_per_node
    link = min(rates.peer_link_bytes, rates.network_bytes) if many_nodes else rates.peer_link_bytes
    whole, active = parameters_of(spec, piece)
    replicas = layout.data // layout.shards
    gradients = active * (layout.precision.summed if micro_steps > 1 else layout.precision.gradient)
    sent = 2 * (replicas - 1) / replicas * gradients / layout.shards
    if layout.shards > 1:
        share = (layout.shards - 1) / layout.shards
        sent += share * (2 * micro_steps * whole * layout.precision.weight + gradients)
    if layout.pipeline > 1:
        sent += 2 * micro_steps * layout.micro_rows * setting.seq * spec.width * layout.precision.weight
    return sent / link


def _offload(spec: ModelSpec, layout: Layout, rates: Rates) -> float:
    """ZeRO-Offload: gradients to the host, AdamW there, weights back."""
    if layout.method != "offload":
        return 0.0
    mine = spec.parameters / (layout.pipeline * layout.data)  # each data-parallel rank updates its part
    moved = (layout.precision.gradient + layout.precision.weight) * mine / rates.host_link_bytes
    return moved + mine * 28 / rates.host_memory_bytes


def _cache(spec: ModelSpec, layout: Layout, setting: Setting, first: Piece, *, busy: float, micro_steps: int) -> float:
    """Reading stored rows beyond what hides, and a step's share of filling: (M - 1) / M passes a sweep of M visits."""
    if layout.cache == "off" or layout.blocks == 1:
        return 0.0
    rates, dtype = setting.rates, layout.precision.weight
    tokens = layout.micro_rows * setting.seq * micro_steps
    nbytes = tokens * spec.width * dtype
    rate = {
        "device": rates.memory_bytes,
        "host": rates.host_link_bytes,
        "disk": min(rates.disk_bytes, rates.host_link_bytes),
    }
    reading = nbytes / rate[layout.cache] if first.prefix else 0.0
    layer = _works(spec, dtype, setting.seq)[0]
    whole = spec.layers / layout.pipeline * _pass(layer, tokens, dtype, rates)
    filling = whole * (layout.blocks - 1) / layout.blocks**2 / setting.cache_epochs
    return max(0.0, reading - busy) + filling
