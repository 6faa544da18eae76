"""Peak memory of a step on one card, by part, in closed form.

A step is a few moments, of which one is the worst:

    loss        everything kept is alive, and the logits three times over in fp32
    backward    top layer: everything kept    lower: kept memory falls, gradients of the active layers grow; in the
                lowest one the MLP's gradients come first, when what it kept is gone
    embedding   all gradients; a tied one's is the head's, which has waited since the loss (modules/tied.py)
    update      gradients and moments, no activations

Between these, kept memory and gradients are nearly linear, so no other moment can be much worse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from blocktrain.plan.layout import Layout, Piece, trains_projection, worst_pieces
from blocktrain.plan.operations import attention_of, head_operations, layer_operations, saved_bytes
from blocktrain.plan.shapes import shapes
from blocktrain.plan.spec import ModelSpec

# In the order they are stacked; the report's colours follow it.
PARTS = ("weights", "master", "gradients", "optimizer", "activations", "logits", "workspace")
CHUNK = 2**22  # scalars that are unfolded at a time: optim/adamw8bit.py, packing.py, precision.py


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


def memory(spec: ModelSpec, layout: Layout, *, seq: int, in_flight: int = 1, micro_steps: int = 1) -> Memory:
    """The worst over all visits and stages.

    seq: tokens of a row. in_flight: micro-batches a pipeline stage holds. micro_steps: micro-batches of an optimizer
    step; from the second on the gradients of the first are there all the time, and sums are in fp32.
    """
    worst: tuple[float, str, dict[str, float]] = (0.0, "", {})
    for piece in worst_pieces(spec, layout.blocks, layout.pipeline, layout.largest, layout.pieces):
        step = _Step(spec, layout, piece, seq=seq, in_flight=in_flight, micro_steps=micro_steps)
        for moment, parts in step.moments():
            total = sum(parts.values())
            if total > worst[0]:
                worst = (total, moment, parts)
    return Memory(parts=worst[2], moment=worst[1], host=host_parts(spec, layout), disk=disk_parts(spec, layout))


def host_parts(spec: ModelSpec, layout: Layout) -> dict[str, float]:
    """Host memory of one card's process, the prefix cache aside."""
    precision, mine = layout.precision, spec.parameters / (layout.pipeline * layout.shards)
    if layout.method == "offload":  # gradients come over, master and moments stay
        return {"master": 4 * mine, "optimizer": 8 * mine, "gradients": precision.weight * mine}
    parts = {"remainders": precision.remainder * mine} if precision.remainder else {}
    if layout.rests and layout.blocks > 1:
        parts["frozen weights"] = precision.weight * mine
        if precision.packed and layout.frozen == "host":
            parts["packed weights"] = precision.frozen * mine
    if layout.blocks > 1 and layout.state == "host":
        parts["moments"] = layout.moment_bytes * mine
    return parts


def disk_parts(spec: ModelSpec, layout: Layout) -> dict[str, float]:
    """Two checkpoints, each with full-precision weights and the moments that are kept, the prefix cache aside."""
    kept = 1.0 if layout.state == "host" else 1 / layout.blocks
    scalars = layout.precision.weight + layout.precision.remainder + layout.moment_bytes * kept
    return {"checkpoints": 2.0 * scalars * spec.parameters}


def parameters_of(spec: ModelSpec, piece: Piece) -> tuple[int, int]:
    """(all, active) parameters of a piece. A tied embedding is there on the last stage, too, but owned by the first."""
    whole = (piece.prefix + piece.active + piece.tail) * spec.layer_parameters
    for role, count in ((piece.embedding, spec.embedding_parameters), (piece.head, spec.head_parameters)):
        whole += count if role != "absent" else 0
    if spec.tied and piece.head != "absent" and piece.embedding == "absent":
        whole += spec.vocabulary * spec.width
    return whole, piece.owned.scalars


class _Step:
    """One micro-batch of a step, the last one, and its update, as one card sees it."""

    def __init__(self, spec: ModelSpec, layout: Layout, piece: Piece, *, seq: int, in_flight: int, micro_steps: int):
        precision = layout.precision
        self.spec, self.layout, self.piece = spec, layout, piece
        self.dtype, self.tokens, self.several = precision.weight, layout.micro_rows * seq, micro_steps > 1
        whole, self.active = parameters_of(spec, piece)
        self.kept = _Kept(spec, layout, piece, self.tokens)
        self.waiting = (in_flight - 1) * (self.kept.layers + self.kept.head) + self.kept.cached_row
        self.awake = _Awake(spec, layout, piece)
        self.row = float(spec.width * self.dtype * self.tokens)
        self.tied = spec.tied and piece.embedding == "active" and piece.head != "absent"
        self.inner = float(spec.inner * spec.experts_used * self.dtype * self.tokens)
        shards, offloaded = layout.shards, layout.method == "offload"
        if offloaded:
            self.gradient = self.dtype
        else:
            self.gradient = precision.summed if self.several else precision.gradient
        gathered = 2 * spec.layer_parameters * self.dtype if shards > 1 else 0.0  # this layer's weights and the next's
        at_rest = self.awake.at_rest(whole)
        self.base = {
            "weights": (self.dtype * whole - (self.dtype - self.awake.resting) * at_rest) / shards + gathered,
            "master": 0.0 if offloaded else self._masters() / shards,
            "optimizer": 0.0 if offloaded else layout.moment_bytes * self.active / shards,
        }

    def _masters(self) -> float:
        return float(self.layout.precision.master * self.active)

    def _at(
        self,
        activations: float,
        *,
        gradients: float = 0.0,
        logits: float = 0.0,
        workspace: float = 0.0,
        materialized: float = 0.0,
    ) -> dict[str, float]:
        """gradients: scalars whose gradient this micro-batch has made."""
        there = max(self.active, gradients) if self.several else gradients
        parts = self.base | {
            "gradients": self.gradient * there / self.layout.shards,
            "activations": activations,
            "logits": logits,
            "workspace": workspace,
        }
        parts["weights"] += materialized
        return parts

    def moments(self) -> Iterator[tuple[str, dict[str, float]]]:
        """The moments that can be the worst, with their parts."""
        piece, kept, awake = self.piece, self.kept, self.awake
        head = self._head_scalars()
        if piece.head != "absent":
            yield from self._loss(head)
        layer_workspace = 2 * self.row + 2 * self.inner
        arriving = self._arriving()
        of_head = float(self.dtype * head) if self.tied and self.several else 0.0  # beside the sum it will be added to
        top = self.waiting + kept.layers + kept.recomputed
        yield (
            "backward, top layer",
            self._at(
                top,
                gradients=head,
                workspace=layer_workspace + of_head,
                materialized=awake.tail_running + awake.kept_tail,
            ),
        )
        for moment, below, coming in self._lowest():
            yield (
                moment,
                self._at(
                    self.waiting + below,
                    gradients=head + piece.owned.layers - coming,
                    workspace=layer_workspace + arriving + of_head,
                    materialized=awake.active_running,
                ),
            )
        if piece.embedding == "active":
            rows = (1 + self.tied) * self.row  # a gradient for each token, and for each row of the table that occurs
            yield (
                "backward, embedding",
                self._at(self.waiting, gradients=self.active, workspace=arriving + rows, materialized=awake.idle),
            )
        yield "update", self._at(0.0, gradients=self.active, workspace=self._updating(), materialized=awake.idle)
        if piece.prefix and self.layout.cache == "off":
            workspace = 2 * self.row + 3 * self.inner
            yield "prefix", self._at(0.0, workspace=workspace, materialized=awake.layer_running)
        if piece.embedding == "frozen" and self.layout.cache == "off":
            yield "embedding", self._at(0.0, workspace=self.row, materialized=awake.embedding_running)

    def _lowest(self) -> Iterator[tuple[str, float, int]]:
        """(moment, bytes kept, scalars whose gradient is still to come) of the first active layer. Where a block owns
        parts of it, which ones is not asked: all of its gradients beside all that it keeps. So on a pipeline stage
        whose frozen layers below pass gradients on."""
        kept, layer = self.kept, self.spec.layer_parameters
        if not self.piece.active:
            return
        if self.piece.owned.layers < self.piece.active * layer or self.piece.embedding == "absent":
            yield "backward, first active layer", kept.lowest_active + kept.recomputed, 0
            return
        yield "backward, first active layer", kept.lowest_active + kept.recomputed, layer
        yield "backward, first active attention", kept.lowest_attention, _attention_weights(self.spec)

    def _loss(self, head: int) -> Iterator[tuple[str, dict[str, float]]]:
        """The logits are there three times over in fp32; of a chunked loss, those of one chunk, but a trained head's
        gradient is summed in fp32 beside each chunk's share, and waits for the backward pass."""
        spec, kept, dtype = self.spec, self.waiting + self.kept.layers + self.kept.head, self.dtype
        chunk = self.layout.loss_chunk
        matrix = spec.vocabulary * spec.width if trains_projection(spec, self.piece) else 0
        whole_beside_rows = self.piece.owned.cut and not self.tied  # a tied one's is whole in either
        arriving = dtype * matrix if self.several or whole_beside_rows else 0
        materialized = self.awake.head_running + self.awake.kept_tail
        if chunk is None:
            logits = spec.vocabulary * self.tokens
            yield "loss", self._at(kept, logits=12.0 * logits, workspace=self.row, materialized=materialized)
            yield (
                "head backward",
                self._at(
                    kept,
                    gradients=head,
                    logits=float(dtype * logits),
                    workspace=2 * self.row + arriving,
                    materialized=materialized,
                ),
            )
            return
        logits = spec.vocabulary * min(chunk, self.tokens)
        yield "loss", self._at(kept, logits=12.0 * logits, workspace=self.row + 4.0 * matrix, materialized=materialized)
        yield (
            "loss, gradients of a chunk",
            self._at(
                kept,
                logits=float(dtype * logits),
                workspace=self.row + (4.0 + dtype) * matrix,
                materialized=materialized,
            ),
        )
        yield (
            "head backward",
            self._at(
                kept,
                gradients=head,
                workspace=2 * self.row + (2 * dtype - self.gradient) * matrix,
                materialized=materialized,
            ),
        )

    def _head_scalars(self) -> int:
        """Whose gradient the head's backward pass makes."""
        return self.spec.vocabulary * self.spec.width if self.tied else self.piece.owned.head

    def _arriving(self) -> float:
        """Of the parameter whose gradient is made: what is there before it is added, or cut to the block's rows; the
        second micro-batch's is added to a copy in fp32."""
        owned = self.piece.owned
        if not self.several:
            return float(self.dtype * owned.cut)
        copied = self.dtype * owned.largest if self.gradient > self.dtype else 0
        return float(self.dtype * max(owned.largest, owned.cut) + copied)

    def _updating(self) -> float:
        """Beside all gradients. Masters are stepped one parameter at a time, its gradient in fp32, and then written
        back (`half` in optim/precision.py)."""
        biggest = self.piece.owned.largest
        chunk = 20.0 * min(biggest, CHUNK) if self.layout.moments == "8bit" else 0.0
        if not self.layout.precision.master or self.layout.method == "offload":
            return chunk
        each, remaining, worst = self.gradient, self.active, 0.0
        for size, before in self._update_order():
            remaining = self.active - before
            widened = remaining * each + (4 * size if each < 4 else 0)
            after = (remaining - size) * each
            written = after + 2 * size + 7 * min(size, CHUNK)
            worst = max(worst, widened, after + 4 * size + chunk, written)
        return worst - self.active * each

    def _update_order(self) -> Iterator[tuple[int, int]]:
        """(scalars of a parameter, of all those updated before it), where the worst can be."""
        owned, piece, spec = self.piece.owned, self.piece, self.spec
        if owned.layers < piece.active * spec.layer_parameters or owned.cut:
            yield owned.largest, 0
            return
        before = 0
        if owned.embedding:
            yield spec.vocabulary * spec.width, 0
            before = owned.embedding
        if piece.active:
            inside = before
            for shape in shapes(spec).owned[1].values():
                yield shape.numel(), inside
                inside += shape.numel()
        if owned.head:
            yield spec.vocabulary * spec.width if not spec.tied else spec.width, owned.embedding + owned.layers


class _Awake:
    """Bytes of frozen matrices beside those at rest: of the unit that runs, and of copies on their way from the host.

    The copies of the last unit that ran and of the one thought to follow stay until another unit runs: `waiting`, when
    the forward pass is over, `idle`, when the backward pass is.
    """

    def __init__(self, spec: ModelSpec, layout: Layout, piece: Piece):
        precision, dtype = layout.precision, layout.precision.weight
        self.spec, self.layout, self.piece = spec, layout, piece
        rests = layout.rests and layout.method == "bcd" and layout.blocks > 1
        on_host, recomputed = layout.frozen == "host", layout.checkpointing == "layers"
        layer, table = spec.matrices_of_layer, spec.vocabulary * spec.width
        self.resting = (0.0 if on_host else precision.frozen) if rests else float(dtype)
        copied = precision.frozen if rests and on_host else 0.0
        unpacked = float(dtype) if rests and precision.packed else 0.0

        def running(size: int, following: int = 0) -> float:
            chunk = 6.0 * min(size, CHUNK) if rests and precision.name == "nf4" else 0.0
            return unpacked * size + copied * (size + following) + chunk

        embedding = table if piece.embedding == "frozen" else 0
        head = embedding if spec.tied else table if piece.head == "frozen" else 0
        partly = min(layer, piece.active * spec.layer_parameters - piece.owned.layers)
        self.layer_running = running(layer, layer)
        self.embedding_running = running(embedding, layer)
        self.waiting = copied * (head or (layer if piece.prefix + piece.tail else embedding))
        self.head_running = running(head) if head else self.waiting
        plain = rests and not recomputed
        self.kept_tail = float(dtype * layer * piece.tail) if plain else 0.0  # autograd keeps what stood in
        if recomputed and piece.tail:
            self.idle = copied * (layer + (layer if piece.prefix else embedding))
            self.tail_running = self.layer_running
        else:
            self.idle = self.tail_running = self.waiting
        self.active_running = max(self.idle, running(partly, layer) if partly and recomputed else 0.0)

    def at_rest(self, whole: int) -> float:
        """Scalars of `whole` that rest."""
        spec, piece = self.spec, self.piece
        vectors = (piece.prefix + piece.active + piece.tail) * (spec.layer_parameters - spec.matrices_of_layer)
        return max(0.0, whole - piece.owned.awake - vectors)


@lru_cache(maxsize=1024)
def _attention_weights(spec: ModelSpec) -> int:
    """Scalars of a layer's attention matrices."""
    return sum(operation.weights for operation in attention_of(layer_operations(spec, 4)))


@lru_cache(maxsize=1024)
def _kept_per_token(spec: ModelSpec, dtype: int) -> tuple[float, float, float, float, float]:
    """Of a layer, trained, its attention alone, and not trained, and of the head, trained and not."""
    layer, head = layer_operations(spec, dtype), head_operations(spec, dtype)
    return (
        saved_bytes(layer, dtype, trained=True),
        saved_bytes(attention_of(layer), dtype, trained=True),
        saved_bytes(layer, dtype, trained=False),
        saved_bytes(head, dtype, trained=True),
        saved_bytes(head, dtype, trained=False),
    )


class _Kept:
    """Bytes that the forward pass of one micro-batch keeps, by where."""

    def __init__(self, spec: ModelSpec, layout: Layout, piece: Piece, tokens: int):
        dtype = layout.precision.weight
        active, attention, tail, trained, frozen = (tokens * kept for kept in _kept_per_token(spec, dtype))
        row = float(spec.width * dtype * tokens)
        per_active, per_tail = (row, row) if layout.checkpointing == "layers" else (active, tail)
        self.layers = piece.active * per_active + piece.tail * per_tail
        self.lowest_active = per_active if piece.active else 0.0
        self.lowest_attention = attention + (row if layout.checkpointing == "layers" else 0.0)
        self.recomputed = 0.0
        if layout.checkpointing == "layers":
            self.recomputed = active if piece.active else tail if piece.tail else 0.0
        trained_head = trains_projection(spec, piece)
        self.head = 0.0
        if piece.head != "absent":
            self.head = trained if trained_head else frozen
            if layout.loss_chunk is not None and not trained_head:
                self.head += row  # the gradient of the hidden states, made with the loss
        self.cached_row = row if layout.cache != "off" else 0.0
