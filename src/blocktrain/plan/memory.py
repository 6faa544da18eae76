"""Peak memory of a step on one card, by part, in closed form.

A step is a few moments, of which one is the worst:

    loss        everything kept is alive, and the logits three times over in fp32
    backward    top layer: everything kept    lower: kept memory falls, gradients of the active layers grow
    embedding   all gradients; a tied one is made twice, and added into a third
    update      gradients and moments, no activations

Kept memory and gradients are linear in the layer, so the moments between need not be looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from blocktrain.plan.layout import Layout, Piece, pieces
from blocktrain.plan.operations import head_operations, layer_operations, saved_bytes
from blocktrain.plan.spec import ModelSpec

# In the order they are stacked; the report's colours follow it.
PARTS = ("weights", "master", "gradients", "optimizer", "activations", "logits", "workspace")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes by part at the worst moment, and what lies on the host and on disk besides."""

    parts: Mapping[str, float]
    moment: str
    host: Mapping[str, float]
    disk: Mapping[str, float]

    @property
    def peak(self) -> float:
        """On the card."""
        return sum(self.parts.values())

    @property
    def host_bytes(self) -> float:
        """For one card."""
        return sum(self.host.values())

    @property
    def disk_bytes(self) -> float:
        """For the whole run."""
        return sum(self.disk.values())


def memory(spec: ModelSpec, layout: Layout, *, seq: int, in_flight: int = 1) -> Memory:
    """The worst over all visits and stages. seq: tokens of a row; in_flight: micro-batches a pipeline stage holds."""
    worst: tuple[float, str, dict[str, float]] = (0.0, "", {})
    for piece in pieces(spec, layout.blocks, layout.pipeline):
        for moment, parts in _moments(spec, layout, piece, seq=seq, in_flight=in_flight):
            total = sum(parts.values())
            if total > worst[0]:
                worst = (total, moment, parts)
    return Memory(parts=worst[2], moment=worst[1], host=host_parts(spec, layout), disk=disk_parts(spec, layout))


def host_parts(spec: ModelSpec, layout: Layout) -> dict[str, float]:
    """Host memory of one card's process, the prefix cache aside."""
    mine = spec.parameters / (layout.pipeline * layout.shards)
    if layout.method == "offload":  # gradients come over, master and moments stay
        return {"master": 4 * mine, "optimizer": 8 * mine, "gradients": layout.precision.gradient * mine}
    parts = {"remainders": layout.precision.host * mine} if layout.precision.host else {}
    if layout.blocks > 1:
        parts["moments"] = layout.precision.moments * mine
    return parts


def disk_parts(spec: ModelSpec, layout: Layout) -> dict[str, float]:
    """Two checkpoints, each with full-precision weights and moments, the prefix cache aside."""
    scalars = layout.precision.weight + layout.precision.host + layout.precision.moments
    return {"checkpoints": 2.0 * scalars * spec.parameters}


def parameters_of(spec: ModelSpec, piece: Piece) -> tuple[int, int]:
    """(all, active) parameters of a piece. A tied embedding is there on the last stage, too, but owned by the first."""
    whole = (piece.prefix + piece.active + piece.tail) * spec.layer_parameters
    active = piece.active * spec.layer_parameters
    for role, count in ((piece.embedding, spec.embedding_parameters), (piece.head, spec.head_parameters)):
        whole += count if role != "absent" else 0
        active += count if role == "active" else 0
    if spec.tied and piece.head != "absent" and piece.embedding == "absent":
        whole += spec.vocabulary * spec.width
    return whole, active


def _moments(
    spec: ModelSpec, layout: Layout, piece: Piece, *, seq: int, in_flight: int
) -> Iterator[tuple[str, dict[str, float]]]:
    """The moments of a step that can be the worst, with their parts."""
    precision, dtype = layout.precision, layout.precision.weight
    tokens = layout.micro_rows * seq
    whole, active = parameters_of(spec, piece)
    shards = layout.shards
    kept = _Kept(spec, layout, piece, tokens)
    offloaded = layout.method == "offload"
    gathered = (
        2 * spec.layer_parameters * precision.weight if shards > 1 else 0.0
    )  # this layer's weights and the next's
    base = {
        "weights": precision.weight * whole / shards + gathered,
        "master": 0.0 if offloaded else precision.master * active / shards,
        "optimizer": 0.0 if offloaded else precision.moments * active / shards,
    }
    gradient = float(dtype if offloaded else precision.gradient)
    row, inner = spec.width * dtype * tokens, spec.inner * spec.experts_used * dtype * tokens
    layer_workspace = 2 * row + 2 * inner

    def at(activations: float, *, gradients: float = 0.0, logits: float = 0.0, workspace: float = 0.0):
        return base | {
            "gradients": gradient * gradients / shards,
            "activations": activations,
            "logits": logits,
            "workspace": workspace,
        }

    waiting = (in_flight - 1) * (kept.layers + kept.head) + kept.cached_row
    vocabulary = spec.vocabulary * tokens
    tied_early = spec.tied and piece.embedding == "active" and piece.head != "absent"
    head_scalars = spec.vocabulary * spec.width if tied_early else spec.head_parameters if piece.head == "active" else 0
    arriving = dtype * spec.largest_parameter if precision.master and not offloaded else 0.0
    if piece.head != "absent":
        yield "loss", at(waiting + kept.layers + kept.head, logits=12.0 * vocabulary, workspace=row)
        yield (
            "head backward",
            at(
                waiting + kept.layers + kept.head,
                gradients=head_scalars,
                logits=float(dtype * vocabulary),
                workspace=2 * row,
            ),
        )
    top = waiting + kept.layers + kept.recomputed
    yield "backward, top layer", at(top, gradients=head_scalars, workspace=layer_workspace)
    if piece.active:
        own = piece.active * spec.layer_parameters
        below = waiting + kept.lowest_active + kept.recomputed
        yield (
            "backward, first active layer",
            at(below, gradients=head_scalars + own, workspace=layer_workspace + arriving),
        )
    if piece.embedding == "active":
        # The engine adds head's and embedding's gradient into a third tensor; a master's sum is made after that.
        again = dtype * spec.vocabulary * spec.width * (1 if precision.master else 2) if tied_early else 0
        yield "backward, embedding", at(waiting, gradients=active, workspace=float(again) + row)
    yield "update", at(0.0, gradients=active, workspace=float(precision.updating * _largest(spec, piece)))
    if piece.prefix and layout.cache == "off":
        yield "prefix", at(0.0, workspace=2 * row + 3 * inner)


def _largest(spec: ModelSpec, piece: Piece) -> int:
    """Scalars of the largest active parameter."""
    outer = piece.embedding == "active" or (piece.head == "active" and not spec.tied)
    matrix = spec.width * spec.inner * (2 * spec.experts if spec.experts > 1 else 1)
    attention = spec.width * spec.query_width * (3 if spec.family == "gpt2" else 1)
    return max(spec.vocabulary * spec.width if outer else 0, matrix, attention) if piece.active or outer else spec.width


@lru_cache(maxsize=1024)
def _kept_per_token(spec: ModelSpec, dtype: int) -> tuple[float, float, float, float]:
    """Of a layer, trained and not, and of the head, trained and not."""
    layer, head = layer_operations(spec, dtype), head_operations(spec, dtype)
    return (
        saved_bytes(layer, dtype, trained=True),
        saved_bytes(layer, dtype, trained=False),
        saved_bytes(head, dtype, trained=True),
        saved_bytes(head, dtype, trained=False),
    )


class _Kept:
    """Bytes that the forward pass of one micro-batch keeps, by where."""

    def __init__(self, spec: ModelSpec, layout: Layout, piece: Piece, tokens: int):
        dtype = layout.precision.weight
        active, tail, trained, frozen = (tokens * kept for kept in _kept_per_token(spec, dtype))
        row = float(spec.width * dtype * tokens)
        per_active, per_tail = (row, row) if layout.checkpointing == "layers" else (active, tail)
        self.layers = piece.active * per_active + piece.tail * per_tail
        self.lowest_active = per_active if piece.active else 0.0
        self.recomputed = 0.0
        if layout.checkpointing == "layers":
            self.recomputed = active if piece.active else tail if piece.tail else 0.0
        trained_head = piece.head == "active" or (spec.tied and piece.embedding == "active")
        self.head = 0.0
        if piece.head != "absent":
            self.head = trained if trained_head else frozen
        self.cached_row = row if layout.cache != "off" else 0.0
