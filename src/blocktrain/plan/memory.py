"""Peak memory of a step on one card, by part, in closed form.

The parts are those of `memory/tracker.py` and `train/predict_memory.py`:

    frozen        weights as they are stored while they are frozen, and those materialized while their layer runs
    active        weights of the block (a matrix of which it owns some rows: whole)
    master        their fp32 copies                      gradients     as accumulated, and on their way there
    moments       the optimizer's state                  logits        and what is as large as they are
    activations   everything else: saved for the backward pass, or used for a moment

A step passes through a few phases, and the worst of them is its peak:

    loss        all saved activations are alive, and the logits three times over in fp32
    backward    top layer: all saved activations    lower: activations are freed, gradients of the active layers grow;
                in the lowest layer the MLP's gradients come first, when what it saved has been freed
    embedding   all gradients; a tied one's is the head's, which has waited since the loss (modules/tied.py)
    update      gradients and moments, no activations

Between these phases, saved activations and gradients change nearly linearly, so no other one can be much worse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from blocktrain.plan.layout import CardView, Layout, trains_projection, worst_views
from blocktrain.plan.operations import attention_of, head_operations, kept_bytes, layer_operations
from blocktrain.plan.shapes import shapes
from blocktrain.plan.spec import ModelSpec

# In the order in which charts stack them.
MEMORY_PARTS = ("frozen", "active", "master", "gradients", "moments", "activations", "logits")
CHUNK_SCALARS = 2**22  # converted at a time: optim/adamw8bit.py, quantize_weights.py, precision.py


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on the card by part, in the worst phase of a step, and bytes in host memory and on disk."""

    parts: Mapping[str, float]
    phase: str
    host: Mapping[str, float]
    disk: Mapping[str, float]

    @property
    def peak(self) -> float:
        """Bytes on the card."""
        return sum(self.parts.values())

    @property
    def host_bytes(self) -> float:
        """Bytes of host memory for one card."""
        return sum(self.host.values())

    @property
    def disk_bytes(self) -> float:
        """Bytes on disk for the whole run."""
        return sum(self.disk.values())


def plan_memory(spec: ModelSpec, layout: Layout, *, seq: int, in_flight: int = 1, micro_steps: int = 1) -> MemoryPlan:
    """The worst phase over all visits and pipeline stages.

    seq: tokens in a row. in_flight: micro-batches that a pipeline stage has begun and not finished. micro_steps:
    micro-batches of an optimizer step; from the second on, all gradients of the first are alive, and sums are in fp32.
    """
    worst: tuple[float, str, dict[str, float]] = (0.0, "", {})
    for view in worst_views(spec, layout.blocks, layout.pipeline, layout.largest, layout.pieces):
        step = _Step(spec, layout, view, seq=seq, in_flight=in_flight, micro_steps=micro_steps)
        for phase, parts in step.phases():
            total = sum(parts.values())
            if total > worst[0]:
                worst = (total, phase, parts)
    return MemoryPlan(parts=worst[2], phase=worst[1], host=host_parts(spec, layout), disk=disk_parts(spec, layout))


def host_parts(spec: ModelSpec, layout: Layout) -> dict[str, float]:
    """Host memory of one card's process, without the prefix cache.

    `frozen` are weights in the compute dtype, `quantized` are the same weights as they are copied to the card, and
    `low bits` are what bf16 weights leave out of their masters.
    """
    precision, mine = layout.precision, spec.parameters / (layout.pipeline * layout.shards)
    if layout.method == "offload":  # gradients are copied to the host; master and moments stay there
        return {"master": 4 * mine, "moments": 8 * mine, "gradients": precision.weight * mine}
    parts = {"low bits": precision.low_bits * mine} if precision.low_bits else {}
    if layout.materializes and layout.blocks > 1:
        parts["frozen"] = precision.weight * mine
        if precision.quantized and layout.frozen == "host":
            parts["quantized"] = precision.frozen * mine
    if layout.blocks > 1 and layout.state == "host":
        parts["moments"] = layout.moment_bytes * mine
    return parts


def disk_parts(spec: ModelSpec, layout: Layout) -> dict[str, float]:
    """Disk space of a run without the prefix cache: two checkpoints, each with the exact weights and all moments that
    are kept between visits."""
    kept = 1.0 if layout.state == "host" else 1 / layout.blocks
    scalars = layout.precision.weight + layout.precision.low_bits + layout.moment_bytes * kept
    return {"checkpoints": 2.0 * scalars * spec.parameters}


def parameter_counts(spec: ModelSpec, view: CardView) -> tuple[int, int]:
    """(all, active) parameters on a card. The last stage of a pipeline holds a copy of a tied embedding, which the
    first stage owns."""
    whole = (view.prefix + view.active + view.tail) * spec.layer_parameters
    for role, count in ((view.embedding, spec.embedding_parameters), (view.head, spec.head_parameters)):
        whole += count if role != "absent" else 0
    if spec.tied and view.head != "absent" and view.embedding == "absent":
        whole += spec.vocabulary * spec.width
    return whole, view.owned.scalars


class _Step:
    """The last micro-batch of a step and the update, on one card."""

    def __init__(self, spec: ModelSpec, layout: Layout, view: CardView, *, seq: int, in_flight: int, micro_steps: int):
        precision = layout.precision
        self.spec, self.layout, self.view = spec, layout, view
        self.dtype, self.tokens, self.several = precision.weight, layout.micro_rows * seq, micro_steps > 1
        whole, self.active = parameter_counts(spec, view)
        self.kept = _Kept(spec, layout, view, self.tokens)
        self.in_flight = (in_flight - 1) * (self.kept.layers + self.kept.head) + self.kept.cached_row
        self.copies = _Materialized(spec, layout, view)
        self.row = float(spec.width * self.dtype * self.tokens)
        self.tied = spec.tied and view.embedding == "active" and view.head != "absent"
        self.inner = float(spec.inner * spec.experts_used * self.dtype * self.tokens)
        offloaded, shards, materialized = layout.method == "offload", layout.shards, view.owned.materialized
        self.gradient = precision.accumulated if self.several and not offloaded else precision.gradient
        vectors = (view.prefix + view.active + view.tail) * (spec.layer_parameters - spec.matrices_of_layer)
        stored = max(0.0, whole - materialized - vectors)  # scalars in frozen matrices
        frozen = self.dtype * (whole - materialized) - (self.dtype - self.copies.stored_bytes) * stored
        self.base = {
            "frozen": frozen / shards,
            "active": float(self.dtype * materialized) / shards,
            "master": 0.0 if offloaded else float(precision.master * self.active) / shards,
            "moments": 0.0 if offloaded else layout.moment_bytes * self.active / shards,
        }
        if shards > 1:  # FSDP2 gathers two layers, the one that runs and the next
            self.base["active" if layout.blocks == 1 else "frozen"] += 2 * spec.layer_parameters * self.dtype

    def _at(
        self,
        activations: float,
        *,
        gradients: float = 0.0,
        logits: float = 0.0,
        workspace: float = 0.0,
        materialized: float = 0.0,
    ) -> dict[str, float]:
        """All parts in one phase, in bytes. gradients: scalars whose gradient this micro-batch has made. workspace:
        tensors that live in this phase only, which count as activations. materialized: frozen weights that are on
        the card beside the stored ones."""
        alive = max(self.active, gradients) if self.several else gradients
        parts = self.base | {
            "frozen": self.base["frozen"] + materialized,
            "gradients": self.gradient * alive / self.layout.shards,
            "activations": activations + workspace,
            "logits": logits,
        }
        return {part: parts[part] for part in MEMORY_PARTS}

    def phases(self) -> Iterator[tuple[str, dict[str, float]]]:
        """The phases that can be the worst, each with its parts."""
        view, kept, copies = self.view, self.kept, self.copies
        head = self.spec.vocabulary * self.spec.width if self.tied else view.owned.head  # scalars with a gradient then
        if view.head != "absent":
            yield from self._loss(head)
        layer_workspace = 2 * self.row + 2 * self.inner
        # The one gradient that autograd has just made, before it is accumulated or cut to the block's rows. From the
        # second micro-batch on, accumulating takes a copy in fp32.
        arriving = float(self.dtype * view.owned.split)
        if self.several:
            copied = self.dtype * view.owned.largest if self.gradient > self.dtype else 0
            arriving = float(self.dtype * max(view.owned.largest, view.owned.split) + copied)
        of_head = float(self.dtype * head) if self.tied and self.several else 0.0  # beside the sum it will be added to
        top = self.in_flight + kept.layers + kept.recomputed
        yield (
            "backward, top layer",
            self._at(
                top,
                gradients=head,
                workspace=layer_workspace + of_head,
                materialized=copies.tail_running + copies.kept_tail,
            ),
        )
        for phase, below, coming in self._lowest():
            yield (
                phase,
                self._at(
                    self.in_flight + below,
                    gradients=head + view.owned.layers - coming,
                    workspace=layer_workspace + arriving + of_head,
                    materialized=copies.active_running,
                ),
            )
        if view.embedding == "active":
            rows = (1 + self.tied) * self.row  # a gradient for each token, and for each row of the table that occurs
            yield (
                "backward, embedding",
                self._at(
                    self.in_flight, gradients=self.active, workspace=arriving + rows, materialized=copies.after_backward
                ),
            )
        yield (
            "update",
            self._at(0.0, gradients=self.active, workspace=self._updating(), materialized=copies.after_backward),
        )
        if view.prefix and self.layout.cache == "off":
            workspace = 2 * self.row + 3 * self.inner
            yield "prefix", self._at(0.0, workspace=workspace, materialized=copies.layer_running)
        if view.embedding == "frozen" and self.layout.cache == "off":
            yield "embedding", self._at(0.0, workspace=self.row, materialized=copies.embedding_running)

    def _lowest(self) -> Iterator[tuple[str, float, int]]:
        """(phase, bytes of saved activations, scalars whose gradient is still to come) in the first active layer.

        A block may own only parts of that layer. It does not matter which: all of its gradients are then counted
        beside all of its activations, which is an upper bound. The same bound serves a pipeline stage whose frozen
        layers below pass gradients on.
        """
        kept, layer = self.kept, self.spec.layer_parameters
        if not self.view.active:
            return
        if self.view.owned.layers < self.view.active * layer or self.view.embedding == "absent":
            yield "backward, first active layer", kept.lowest_active + kept.recomputed, 0
            return
        yield "backward, first active layer", kept.lowest_active + kept.recomputed, layer
        yield "backward, first active attention", kept.lowest_attention, _attention_weights(self.spec)

    def _loss(self, head: int) -> Iterator[tuple[str, dict[str, float]]]:
        """The logits are alive three times over in fp32. A chunked loss has those of one chunk only, but it sums the
        gradient of a trained head in fp32, beside each chunk's share, and keeps it until the backward pass."""
        spec, kept, dtype = self.spec, self.in_flight + self.kept.layers + self.kept.head, self.dtype
        chunk = self.layout.loss_chunk
        matrix = spec.vocabulary * spec.width if trains_projection(spec, self.view) else 0
        whole_beside_rows = self.view.owned.split and not self.tied  # a tied one's is whole in either
        arriving = dtype * matrix if self.several or whole_beside_rows else 0
        materialized = self.copies.head_running + self.copies.kept_tail
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

    def _updating(self) -> float:
        """Bytes beside all gradients during the update. Masters are stepped one parameter at a time, with the gradient
        in fp32, and are then written back (`half` in optim/precision.py)."""
        biggest = self.view.owned.largest
        chunk = 20.0 * min(biggest, CHUNK_SCALARS) if self.layout.moments == "8bit" else 0.0
        if not self.layout.precision.master or self.layout.method == "offload":
            return chunk
        each, worst = self.gradient, 0.0
        for size, before in self._update_order():
            remaining = self.active - before
            widened = remaining * each + (4 * size if each < 4 else 0)
            after = (remaining - size) * each
            written = after + 2 * size + 7 * min(size, CHUNK_SCALARS)
            worst = max(worst, widened, after + 4 * size + chunk, written)
        return worst - self.active * each

    def _update_order(self) -> Iterator[tuple[int, int]]:
        """(scalars of a parameter, scalars of all parameters updated before it), for those that can be the worst."""
        owned, view, spec = self.view.owned, self.view, self.spec
        if owned.layers < view.active * spec.layer_parameters or owned.split:
            yield owned.largest, 0
            return
        before = 0
        if owned.embedding:
            yield spec.vocabulary * spec.width, 0
            before = owned.embedding
        if view.active:
            inside = before
            for shape in shapes(spec).owned[1].values():
                yield shape.numel(), inside
                inside += shape.numel()
        if owned.head:
            yield spec.vocabulary * spec.width if not spec.tied else spec.width, owned.embedding + owned.layers


class _Materialized:
    """Bytes of frozen matrices on the card: as they are stored, and the copies with which layers run.

    A unit is what is materialized together: the embedding, a layer, the head. Under `frozen = "host"` the copy of the
    last unit that ran and of the one expected next stay until another unit runs.

    stored_bytes: per scalar, of a frozen matrix while its layer does not run.
    layer_running, embedding_running, head_running: beside the stored weights, while that unit runs.
    tail_running, active_running: in the backward pass, while a layer of the tail is recomputed, or an active layer of
        which the block owns only a part.
    kept_tail: what autograd keeps of the materialized weights of the tail, if nothing is checkpointed.
    after_backward: copies that are still on the card when that pass is over.
    """

    def __init__(self, spec: ModelSpec, layout: Layout, view: CardView):
        precision, dtype = layout.precision, layout.precision.weight
        materializes = layout.materializes and layout.method == "bcd" and layout.blocks > 1
        on_host, recomputed = layout.frozen == "host", layout.checkpointing == "layers"
        layer, table = spec.matrices_of_layer, spec.vocabulary * spec.width
        self.stored_bytes = (0.0 if on_host else precision.frozen) if materializes else float(dtype)
        copied = precision.frozen if materializes and on_host else 0.0
        dequantized = float(dtype) if materializes and precision.quantized else 0.0

        def running(size: int, following: int = 0) -> float:
            chunk = 6.0 * min(size, CHUNK_SCALARS) if materializes and precision.name == "nf4" else 0.0
            return dequantized * size + copied * (size + following) + chunk

        embedding = table if view.embedding == "frozen" else 0
        head = embedding if spec.tied else table if view.head == "frozen" else 0
        unowned = min(layer, view.active * spec.layer_parameters - view.owned.layers)
        self.layer_running = running(layer, layer)
        self.embedding_running = running(embedding, layer)
        after_forward = copied * (head or (layer if view.prefix + view.tail else embedding))
        self.head_running = running(head) if head else after_forward
        self.kept_tail = float(dtype * layer * view.tail) if materializes and not recomputed else 0.0
        if recomputed and view.tail:
            self.after_backward = copied * (layer + (layer if view.prefix else embedding))
            self.tail_running = self.layer_running
        else:
            self.after_backward = self.tail_running = after_forward
        partly_active = running(unowned, layer) if unowned and recomputed else 0.0
        self.active_running = max(self.after_backward, partly_active)


@lru_cache(maxsize=1024)
def _attention_weights(spec: ModelSpec) -> int:
    """How many scalars a layer's attention matrices have."""
    return sum(operation.weights for operation in attention_of(layer_operations(spec, 4)))


@lru_cache(maxsize=1024)
def _kept_per_token(spec: ModelSpec, dtype: int) -> tuple[float, float, float, float, float]:
    """Bytes that autograd saves per token: of a trained layer, of its attention alone, of a frozen layer, of a trained
    head, of a frozen head."""
    layer, head = layer_operations(spec, dtype), head_operations(spec, dtype)
    return (
        kept_bytes(layer, dtype, trained=True),
        kept_bytes(attention_of(layer), dtype, trained=True),
        kept_bytes(layer, dtype, trained=False),
        kept_bytes(head, dtype, trained=True),
        kept_bytes(head, dtype, trained=False),
    )


class _Kept:
    """Bytes that autograd keeps after the forward pass of one micro-batch, by where they were saved."""

    def __init__(self, spec: ModelSpec, layout: Layout, view: CardView, tokens: int):
        dtype = layout.precision.weight
        active, attention, tail, trained, frozen = (tokens * kept for kept in _kept_per_token(spec, dtype))
        row = float(spec.width * dtype * tokens)
        per_active, per_tail = (row, row) if layout.checkpointing == "layers" else (active, tail)
        self.layers = view.active * per_active + view.tail * per_tail
        self.lowest_active = per_active if view.active else 0.0
        self.lowest_attention = attention + (row if layout.checkpointing == "layers" else 0.0)
        self.recomputed = 0.0
        if layout.checkpointing == "layers":
            self.recomputed = active if view.active else tail if view.tail else 0.0
        self.head = 0.0
        if view.head != "absent" and trains_projection(spec, view):
            self.head = trained
        elif view.head != "absent":  # a chunked loss makes the gradient of the hidden states at once
            self.head = frozen + (row if layout.loss_chunk is not None else 0.0)
        self.cached_row = row if layout.cache != "off" else 0.0
