"""How long a step takes, by part, from counted FLOPs and bytes over the rates a card achieves.

    layer, forward     products / rate + attention / rate + elementwise bytes / memory rate, or its kernels' launches
    layer, backward    active: twice the products; tail: once; attention 2.5 times; elementwise bytes twice
    checkpointing      the forward pass of active and tail layers again
    update             active parameters / rate of a fused AdamW
    pipeline           p - 1 of m + p - 1 turns are idle (GPipe, 1F1B)
    communication      ring all-reduce of the active gradients; FSDP2's gathers of all weights; a part of it hides

Averaged over the visits of a sweep. Reading a prefix cache hides behind the step, and costs what is longer than it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from blocktrain.plan.hardware import Rates
from blocktrain.plan.layout import Layout, Piece, cut_evenly, piece_of
from blocktrain.plan.memory import parameters_of
from blocktrain.plan.operations import Work, head_operations, layer_operations, loss_operations, work
from blocktrain.plan.spec import ModelSpec

PARTS = ("forward", "backward", "recompute", "update", "bubble", "communication", "offload", "cache")
LOSS_BACKWARD = 2.0  # elementwise bytes of a backward pass over those of the forward pass
WRITE_BACK_BYTES = 20  # of a bf16-exact scalar after its step, see optim/precision.py, `half`


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
    stages = cut_evenly(spec, range(spec.layers + 2), layout.pipeline)
    rank_rows = -(-setting.rows // layout.data)
    micro_steps = -(-rank_rows // layout.micro_rows)
    visits = [
        _visit(spec, layout, setting, stages, block=index, micro_steps=micro_steps) for index in range(layout.blocks)
    ]
    parts = {part: sum(visit[part] for visit in visits) / len(visits) for part in PARTS}
    flops = sum(step_flops(spec, layout, setting.seq, index) for index in range(layout.blocks)) / layout.blocks
    return StepTime(parts=parts, flops=flops * setting.rows)


def step_flops(spec: ModelSpec, layout: Layout, seq: int, block: int) -> float:
    """Counted FLOPs of one row in a visit to `block`, on one card."""
    layer, head, _ = _works(spec, layout.precision.weight, seq)
    piece = piece_of(spec, layout.blocks, block)
    run = piece.active + piece.tail
    prefix = piece.prefix if layout.cache == "off" else 0
    again = run if layout.checkpointing == "layers" else 0
    trained_head = piece.head == "active" or (spec.tied and piece.embedding == "active")
    matrix = (prefix + 2 * run + again + piece.active) * layer.matrix_flops
    matrix += (2 + trained_head) * head.matrix_flops
    attention = (prefix + run + again) * layer.attention_flops + run * layer.attention_backward_flops
    return seq * (matrix + attention)


def _visit(
    spec: ModelSpec, layout: Layout, setting: Setting, stages: Sequence[range], *, block: int, micro_steps: int
) -> dict[str, float]:
    """A step's parts while `block` is active; the slowest stage sets the pace."""
    pieces = [piece_of(spec, layout.blocks, block, stage) for stage in stages]
    turns = [_turn(spec, layout, setting, piece) for piece in pieces]
    slowest = max(turns, key=lambda turn: sum(turn.values()))
    parts = {part: slowest[part] * micro_steps for part in ("forward", "backward", "recompute")}
    turn = sum(slowest.values())
    parts["bubble"] = turn * (layout.pipeline - 1)
    parts["update"] = max(_update(spec, layout, setting.rates, piece) for piece in pieces)
    communication = max(_communication(spec, layout, setting, piece, micro_steps) for piece in pieces)
    parts["communication"] = communication - min(communication * setting.overlap, parts["backward"])
    parts["offload"] = _offload(spec, layout, setting.rates)
    parts["cache"] = _cache(spec, layout, setting, pieces[0], busy=turn * micro_steps, micro_steps=micro_steps)
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
    parts = {
        "forward": (prefix + run) * forward,
        "backward": piece.active * active + piece.tail * tail,
        "recompute": run * forward if layout.checkpointing == "layers" else 0.0,
    }
    if piece.head != "absent":
        trained = piece.head == "active" or (spec.tied and piece.embedding == "active")
        parts["forward"] += _pass(head, tokens, dtype, rates) + _pass(loss, tokens, 4, rates)
        parts["backward"] += _pass(head, tokens, dtype, rates, products=1 + trained, moved=LOSS_BACKWARD)
        parts["backward"] += _pass(loss, tokens, 4, rates, moved=LOSS_BACKWARD)
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
    return active * (1 / rates.update_scalars + back)


def _communication(spec: ModelSpec, layout: Layout, setting: Setting, piece: Piece, micro_steps: int) -> float:
    """Seconds on the slowest link between cards."""
    rates = setting.rates
    many_nodes = layout.cards > setting.cards_per_node
    link = min(rates.peer_link_bytes, rates.network_bytes) if many_nodes else rates.peer_link_bytes
    whole, active = parameters_of(spec, piece)
    replicas = layout.data // layout.shards
    gradients = active * layout.precision.gradient
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
