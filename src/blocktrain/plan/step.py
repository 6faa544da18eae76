"""How long a step takes, by part, from counted FLOPs and bytes over the rates a card achieves.

    layer, forward     products / rate + attention / rate + elementwise bytes / memory rate, or its kernels' launches
    layer, backward    active: twice the products; tail: once; attention 2.5 times; elementwise bytes twice
    checkpointing      the forward pass of active and tail layers again
    update             active parameters / rate of a fused AdamW
    pipeline           p - 1 of m + p - 1 turns are idle (GPipe, 1F1B)
    communication      ring all-reduce of the active gradients; FSDP2's all-gathers of all weights; a part is hidden
    dequantize         quantized frozen weights, each time their layer runs, in plain PyTorch
    streaming          frozen weights over the host link, one layer ahead: what a copy takes longer than that layer

All parts are averaged over the visits of a sweep. Reading a prefix cache runs beside the step, and costs only what it
takes longer than the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from blocktrain.plan.hardware import UPDATE_BYTES, Rates
from blocktrain.plan.layout import CardView, Layout, trains_projection, visits
from blocktrain.plan.memory import parameter_counts
from blocktrain.plan.operations import Work, head_operations, layer_operations, loss_operations, work
from blocktrain.plan.spec import ModelSpec

STEP_PARTS = (
    *("forward", "backward", "recompute", "dequantize", "streaming"),
    *("update", "bubble", "communication", "offload", "cache"),
)
LOSS_BACKWARD = 2.0  # elementwise bytes of a backward pass over those of the forward pass
WRITE_BACK_BYTES = 20  # read and written per bf16-exact scalar after its step: `half` in optim/precision.py
UPDATE_8BIT_BYTES = 190  # read and written per scalar, in plain PyTorch, by the operations of optim/adamw8bit.py


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all candidate layouts share: the step's batch, the machine's rates and the nodes.

    rows: of one optimizer step, over all cards. overlap: the share of the communication that hides behind the backward
    pass. cache_epochs: passes over a subset in one visit.
    """

    seq: int
    rows: int
    rates: Rates
    cards_per_node: int = 8
    overlap: float = 0.5
    cache_epochs: float = 1.0


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds by part, averaged over the visits of a sweep, and the FLOPs behind them."""

    parts: Mapping[str, float]
    flops: float  # counted, of one step on all cards, recomputation included

    @property
    def seconds(self) -> float:
        """How long a whole step takes."""
        return sum(self.parts.values())

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda part: self.parts[part])


@lru_cache(maxsize=1024)
def _works(spec: ModelSpec, dtype: int, seq: int) -> tuple[Work, Work, Work]:
    """The work of a layer, of the head and of the loss, for one token."""
    return (
        work(layer_operations(spec, dtype), seq),
        work(head_operations(spec, dtype), seq),
        work(loss_operations(spec), seq),
    )


def step_time(spec: ModelSpec, layout: Layout, setting: Setting) -> StepTime:
    """Seconds of one optimizer step over `setting.rows` rows."""
    parts, flops, count = dict.fromkeys(STEP_PARTS, 0.0), 0.0, 0
    for stages, times in visits(spec, layout.blocks, layout.pipeline, layout.largest, layout.pieces):
        visit = _visit(spec, layout, setting, stages)
        for part in STEP_PARTS:
            parts[part] += times * visit[part]
        flops += times * sum(view_flops(spec, layout, setting.seq, view) for view in stages)
        count += times
    return StepTime(
        parts={part: seconds / count for part, seconds in parts.items()}, flops=flops / count * setting.rows
    )


def view_flops(spec: ModelSpec, layout: Layout, seq: int, view: CardView) -> float:
    """Counted FLOPs of one row on one card in a visit."""
    layer, head, _ = _works(spec, layout.precision.weight, seq)
    run = view.active + view.tail
    prefix = view.prefix if layout.cache == "off" else 0
    again = run if layout.checkpointing == "layers" else 0
    matrix = (prefix + 2 * run + again + view.owned.layers / spec.layer_parameters) * layer.matrix_flops
    if view.head != "absent":
        matrix += (2 + trains_projection(spec, view)) * head.matrix_flops
    attention = (prefix + run + again) * layer.attention_flops + run * layer.attention_backward_flops
    return seq * (matrix + attention)


def _visit(spec: ModelSpec, layout: Layout, setting: Setting, stages: tuple[CardView, ...]) -> dict[str, float]:
    """Seconds of a step's parts in one visit. In a pipeline the slowest stage decides."""
    micro_steps = -(-setting.rows // layout.data // layout.micro_rows)
    turns = [_turn(spec, layout, setting, view) for view in stages]
    slowest = max(turns, key=lambda turn: sum(turn.values()))
    parts = {part: seconds * micro_steps for part, seconds in slowest.items()}
    turn = sum(slowest.values())
    parts["bubble"] = turn * (layout.pipeline - 1)
    parts["update"] = max(_update(spec, layout, setting.rates, view) for view in stages)
    communication = max(_communication(spec, layout, setting, view, micro_steps) for view in stages)
    parts["communication"] = communication - min(communication * setting.overlap, parts["backward"])
    parts["offload"] = 0.0
    if layout.method == "offload":  # ZeRO-Offload: gradients to the host, AdamW there, weights back
        mine = spec.parameters / (layout.pipeline * layout.data)  # each data-parallel rank updates its part
        copied = (layout.precision.gradient + layout.precision.weight) * mine / setting.rates.host_link_bytes
        parts["offload"] = copied + UPDATE_BYTES * mine / setting.rates.host_memory_bytes
    parts["cache"] = _cache(spec, layout, setting, stages[0], busy=turn * micro_steps, micro_steps=micro_steps)
    return parts


def _turn(spec: ModelSpec, layout: Layout, setting: Setting, view: CardView) -> dict[str, float]:
    """Seconds of one micro-batch on one stage."""
    rates, dtype = setting.rates, layout.precision.weight
    layer, head, loss = _works(spec, dtype, setting.seq)
    tokens = layout.micro_rows * setting.seq
    run = view.active + view.tail
    prefix = view.prefix if layout.cache == "off" else 0
    forward = _pass(layer, tokens, dtype, rates)
    tail = _pass(layer, tokens, dtype, rates, products=1, attention=2.5, traffic=LOSS_BACKWARD)
    active = _pass(layer, tokens, dtype, rates, products=2, attention=2.5, traffic=LOSS_BACKWARD)
    trained = view.owned.layers / spec.layer_parameters  # a fraction where blocks are cut inside layers
    parts = {
        "forward": (prefix + run) * forward,
        "backward": trained * active + (run - trained) * tail,
        "recompute": run * forward if layout.checkpointing == "layers" else 0.0,
    }
    if view.head != "absent":
        products = 1 + trains_projection(spec, view)
        parts["forward"] += _pass(head, tokens, dtype, rates) + _pass(loss, tokens, 4, rates)
        parts["backward"] += _pass(head, tokens, dtype, rates, products=products, traffic=LOSS_BACKWARD)
        parts["backward"] += _pass(loss, tokens, 4, rates, traffic=LOSS_BACKWARD)
    return parts | _materializing(spec, layout, rates, view, forward=forward, backward=tail)


def _materializing(
    spec: ModelSpec, layout: Layout, rates: Rates, view: CardView, *, forward: float, backward: float
) -> dict[str, float]:
    """Seconds that materializing frozen weights adds to a micro-batch. A frozen layer is materialized for its forward
    pass; where activations are recomputed, a layer of the tail is materialized once more, for its backward pass.
    forward, backward: seconds of such a layer."""
    parts = {"dequantize": 0.0, "streaming": 0.0}
    if not layout.materializes or layout.blocks == 1:
        return parts
    precision, layer = layout.precision, spec.matrices_of_layer
    table = spec.vocabulary * spec.width
    below = view.prefix if layout.cache == "off" else 0
    again = view.tail if layout.checkpointing == "layers" else 0
    embedding = table if view.embedding == "frozen" and layout.cache == "off" else 0
    head = table if (view.embedding if spec.tied else view.head) == "frozen" else 0
    per_weight = precision.dequantize / rates.memory_bytes
    parts["dequantize"] = per_weight * ((below + view.tail + again) * layer + embedding + head)
    if layout.frozen == "host":
        copied = precision.frozen / rates.host_link_bytes
        ahead = forward + per_weight * layer
        parts["streaming"] = copied * embedding + max(0.0, copied * head - ahead)  # nothing runs before the first
        parts["streaming"] += (below + view.tail) * max(0.0, copied * layer - ahead)
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
    traffic: float = 1,
) -> float:
    """Seconds of one layer's pass. A product takes as long as its FLOPs or as reading its weights."""
    weights = of.matrix_flops / 2 * dtype
    matrix = max(tokens * of.matrix_flops / rates.matmul_flops[dtype], weights / rates.memory_bytes)
    seconds = (
        products * matrix
        + attention * tokens * of.attention_flops / rates.attention_flops[dtype]
        + traffic * tokens * of.traffic_elements * dtype / rates.memory_bytes
    )
    return max(seconds, (products + traffic) / 2 * of.kernels * rates.kernel_seconds)


def _update(spec: ModelSpec, layout: Layout, rates: Rates, view: CardView) -> float:
    if layout.method == "offload":
        return 0.0
    active = parameter_counts(spec, view)[1] / layout.shards
    back = WRITE_BACK_BYTES / rates.memory_bytes if layout.precision.master else 0.0
    each = UPDATE_8BIT_BYTES / rates.memory_bytes if layout.moments == "8bit" else 1 / rates.update_scalars
    return active * (each + back)


def _communication(spec: ModelSpec, layout: Layout, setting: Setting, view: CardView, micro_steps: int) -> float:
    """Seconds on the slowest link between cards."""
    rates = setting.rates
    many_nodes = layout.cards > setting.cards_per_node
    link = min(rates.peer_link_bytes, rates.network_bytes) if many_nodes else rates.peer_link_bytes
    whole, active = parameter_counts(spec, view)
    replicas = layout.data // layout.shards
    gradients = active * (layout.precision.accumulated if micro_steps > 1 else layout.precision.gradient)
    sent = 2 * (replicas - 1) / replicas * gradients / layout.shards
    if layout.shards > 1:
        share = (layout.shards - 1) / layout.shards
        sent += share * (2 * micro_steps * whole * layout.precision.weight + gradients)
    if layout.pipeline > 1:
        sent += 2 * micro_steps * layout.micro_rows * setting.seq * spec.width * layout.precision.weight
    return sent / link


def _cache(
    spec: ModelSpec, layout: Layout, setting: Setting, first: CardView, *, busy: float, micro_steps: int
) -> float:
    """Seconds of reading stored rows beyond the busy time of a step, and a step's share of filling the cache. Filling
    takes (M - 1) / M passes in a sweep of M visits."""
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
