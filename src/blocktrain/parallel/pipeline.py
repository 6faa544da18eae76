"""Pipelines: several processes run the layers of a model, and micro-batches pass from one to the next.

    process 0   F0 F1 F2 F3                       frozen prefix: no gradients are sent back to it
    process 1      F0 F1 B0 F2 B1 F3 B2 B3        the active block begins here
    process 2         F0 B0 F1 B1 F2 B2 F3 B3     (1F1B)

`torch.distributed.pipelining` runs the schedule. A stage is the model itself, run from one boundary to another by its
own code. Stages and schedule are built for each visit: they fix at their first step which of them exchange gradients,
so after a switch of block they would hang, or go on sending gradients that are not used.

Each process trains its part of the active block: it has the gradients, masters and moments of the layers that it runs.
Weight gradients are exchanged only for a tied weight that several processes use. At the end of a visit the block's
weights are broadcast once; then each process has the whole model and can run other layers, evaluate, or write it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from blocktrain.chain.block import Block, Partition
from blocktrain.chain.boundary import BoundaryRunner
from blocktrain.chain.freezing import evaluating
from blocktrain.errors import ConfigError
from blocktrain.parallel.config import PipelineConfig
from blocktrain.parallel.protocol import Parallel, TrainedBlock
from blocktrain.parallel.ranks import Ranks
from blocktrain.parallel.replicas import assert_replicas_equal
from blocktrain.parallel.stages import require_micro_batches, stages

Batch = Mapping[str, Tensor]
LossOf = Callable[[Any], Tensor]  # from the model's output to its mean loss (0-d)


class Pipeline(Parallel):
    """A `Parallel` whose ranks are a pipeline over the model of `partition`. Each rank has the whole model.

        pipeline = Pipeline(ranks, partition, PipelineConfig(), costs=costs)
        optimizer = BlockOptimizer(partition, torch.optim.AdamW, lr=1e-4)
        for visit in schedule.visits(partition):
            with optimizer.visit(pipeline.local_block(visit.block)), pipeline.visit(optimizer.active_block):
                loss = pipeline.backward(micro_batches, weights=[1 / len(micro_batches)] * len(micro_batches))
                pipeline.clip_grad_norm(1.0)
                optimizer.step()
                optimizer.zero_grad()

    costs: of each layer's forward pass, in any unit (`layer_costs` counts FLOPs).
    """

    def __init__(
        self,
        ranks: Ranks,
        partition: Partition,
        config: PipelineConfig,
        *,
        costs: Sequence[float],
        loss_of: LossOf = lambda output: output.loss,
    ):
        if ranks.size == 1:
            raise ConfigError("a pipeline needs more than one process: start it with torchrun --nproc-per-node 2")
        if len(costs) != len(partition.chain.layers):
            raise ConfigError(f"there are {len(costs)} costs for {len(partition.chain.layers)} layers")
        self.ranks = ranks
        self.partition = partition
        self.config = config
        self.loss_of = loss_of
        self.runner = BoundaryRunner(partition.chain)
        self._used_in: dict[nn.Parameter, list[int]] = {}  # layer numbers; several for a tied one
        for at, layer in enumerate(partition.chain.layers):
            for _, parameter in layer.named_parameters():
                self._used_in.setdefault(parameter, []).append(at)
        self.stages = [stages(partition, block, ranks.size, config, costs) for block in partition]
        self._local_blocks: list[Block] = []
        for block in partition:
            runs = self.local_stages(block).values()
            layers = [layer for run in runs for layer in partition.chain.layers[run.start : run.stop]]
            names = [name for name in block.parameters if ranks.rank in self.ranks_using(block, name)]
            label = f"process {ranks.rank}'s part of {block.names[0]} .. {block.names[-1]}"
            self._local_blocks.append(partition.restrict(block.index, label, layers=layers, parameters=names))
        self._visit: _PipelineVisit | None = None

    def local_block(self, block: Block) -> Block:
        """The part of `block` that this rank trains, to be visited with a `BlockOptimizer` of the whole partition."""
        return self._local_blocks[block.index]

    @contextmanager
    def visit(self, active: TrainedBlock) -> Iterator[None]:
        """Wraps the steps of a visit to a `local_block`. At its end all ranks have the block's weights; raises
        `PeerError` if these are not equal."""
        self._visit = visit = _PipelineVisit(self, active)
        try:
            yield
            self.sync_weights()
        finally:
            self._visit = None
        assert_replicas_equal(self.ranks, visit.block, visit.block.parameters)

    def backward(
        self, batches: Sequence[Batch], *, weights: Sequence[float], hidden: Sequence[Tensor | None] | None = None
    ) -> float:
        """Forward and backward over a step's micro-batches, which are equal on every rank and all of one shape.

        weights: of each micro-batch's loss in the loss of the step.
        hidden: the stored states at the boundary. Those of micro-batch j are passed on rank j mod P, which stores them.

        Returns the loss of the step. Afterwards this rank's part of the active block has the gradients of the step.
        """
        return self._in_visit().backward(batches, weights, hidden)

    def clip_grad_norm(self, max_norm: float = math.inf) -> float:
        """Scale the active block's gradients on all ranks to a total 2-norm of at most `max_norm`; returns the norm
        before."""
        return self._in_visit().clip_grad_norm(max_norm)

    @torch.no_grad()
    def sync_weights(self) -> None:
        """Broadcast the active block as it is now; between visits every rank has it."""
        if self._visit is None:
            return
        block = self._visit.block
        with self.ranks.peer_errors():
            for name, parameter in block.parameters.items():
                dist.broadcast(parameter.data, src=self.ranks_using(block, name)[0])
            for layer in block.layers:
                stage = next(stage for stage, run in enumerate(self.stages[block.index]) if layer.index in run)
                for module in layer.modules.values():
                    for buffer in module.buffers():
                        dist.broadcast(buffer, src=stage % self.ranks.size)

    def ranks_using(self, block: Block, name: str) -> list[int]:
        """The ranks that run a layer with the parameter `name` of `block`, in a visit to it."""
        layers = self._used_in[block.parameters[name]]
        runs = enumerate(self.stages[block.index])
        return sorted({stage % self.ranks.size for stage, run in runs if any(layer in run for layer in layers)})

    def provides_state(self, index: int, name: str) -> bool:
        """Whether a checkpoint takes the optimizer's state of block `index`'s parameter `name` from this rank."""
        return self.ranks_using(self.partition[index], name)[0] == self.ranks.rank

    def local_stages(self, block: Block) -> dict[int, range]:
        """The stages of this rank in a visit to `block`: number -> layers."""
        return {
            number: run
            for number, run in enumerate(self.stages[block.index])
            if number % self.ranks.size == self.ranks.rank
        }

    def _in_visit(self) -> _PipelineVisit:
        assert self._visit is not None, "steps are taken inside a visit"
        return self._visit


class _PipelineVisit:
    """The stages, the schedule and the steps of one visit. Collective: every rank makes the same calls."""

    def __init__(self, pipeline: Pipeline, active: TrainedBlock):
        self._pipeline = pipeline
        self._ranks = pipeline.ranks
        self._active = active
        self.block = pipeline.partition[active.block.index]
        self._stages = pipeline.stages[active.block.index]
        self._tied_ranks = {
            name: ranks for name in self.block.parameters if len(ranks := pipeline.ranks_using(self.block, name)) > 1
        }
        self._local_stages: list[_Stage] = []
        self._schedule: PipelineScheduleSingle | PipelineScheduleMulti | None = None
        self._built_for: tuple[int, list[torch.Size]] | None = None

    def backward(
        self, batches: Sequence[Batch], weights: Sequence[float], hidden: Sequence[Tensor | None] | None
    ) -> float:
        """See `Pipeline.backward`."""
        shapes = [tensor.shape for tensor in batches[0].values()]
        if any([tensor.shape for tensor in batch.values()] != shapes for batch in batches):
            raise ConfigError("the micro-batches of a pipeline's step must have one shape: pad them to the same length")
        if self._built_for != (len(batches), shapes):
            self._build(batches[0], len(batches))
            self._built_for = (len(batches), shapes)
        for stage in self._local_stages:
            stage.batches, stage.weights = batches, weights
        if self._stages[0].start:
            self._send_to_first_stage(hidden or [None] * len(batches))
        losses: list[Tensor] = []
        numbers = torch.arange(len(batches))
        self._run(numbers, losses)
        self._sum_tied_gradients()
        return math.fsum(loss for (loss,) in self._ranks.all_gather([math.fsum(loss.item() for loss in losses)]))

    def clip_grad_norm(self, max_norm: float) -> float:
        """See `Pipeline.clip_grad_norm`. A tied weight's gradient is counted by the first of the ranks that use it."""
        maybe_gradients = {name: self._active.gradient(name) for name in self._active.trained}
        gradients = {name: gradient for name, gradient in maybe_gradients.items() if gradient is not None}
        counted = [
            gradient
            for name, gradient in gradients.items()
            if self._tied_ranks.get(name, [self._ranks.rank])[0] == self._ranks.rank
        ]
        local_square = math.fsum(float(torch.linalg.vector_norm(g, dtype=torch.float32)) ** 2 for g in counted)
        norm = math.sqrt(math.fsum(square for (square,) in self._ranks.all_gather([local_square])))
        if norm > max_norm:
            for gradient in gradients.values():
                gradient.mul_(max_norm / (norm + 1e-6))
        return norm

    # -- parts ----------------------------------------------------------------------------------------------------

    def _run(self, numbers: Tensor, losses: list[Tensor]) -> None:
        """Run one step of the schedule. An error in a stage is raised as it is; a silent peer becomes a `PeerError`."""
        assert self._schedule is not None, "the schedule is built for the first step"
        inputs = (numbers,) if self._ranks.rank == 0 else ()
        is_last = (len(self._stages) - 1) % self._ranks.size == self._ranks.rank
        outputs: dict[str, Any] = {"target": numbers, "losses": losses} if is_last else {}
        with self._ranks.peer_errors():
            try:
                self._schedule.step(*inputs, number=numbers, return_outputs=False, **outputs)
            except RuntimeError:
                error = next((stage.error for stage in self._local_stages if stage.error is not None), None)
                if error is None:
                    raise
            else:
                return
        raise error

    def _build(self, batch: Batch, count: int) -> None:
        """Build the stages and the schedule. They are given the shapes of what they exchange, instead of running once
        to infer them: a stage is sent gradients if it has the first active layer or comes after it."""
        pipeline, size = self._pipeline, self._ranks.size
        require_micro_batches(pipeline.config, count, len(self._stages), size)
        rows = len(next(iter(batch.values())))
        row = {name: tensor[:1] for name, tensor in batch.items()}
        starts = [run.start for run in self._stages if run.start]
        for start in starts:
            pipeline.runner.require_own_inputs(start)
            pipeline.runner.check(row, start)  # every start on every rank, so that an error is raised on all of them
        with evaluating(pipeline.partition.model):
            states = pipeline.runner.states(row, starts)
        first = pipeline.partition.chain.layers.index(self.block.layers[0])

        def input_of(number: int) -> Tensor:
            """A tensor without data, like the input of stage `number`: its shape, and whether it needs a gradient."""
            if number == len(self._stages):
                return torch.empty(1, device="meta", requires_grad=True)
            start = self._stages[number].start
            if number == 0:
                return torch.empty(1, dtype=torch.long, device="meta")
            shape = (rows, *states[start].shape[1:])
            return torch.empty(shape, dtype=states[start].dtype, device="meta", requires_grad=first < start)

        self._local_stages, built = [], []
        for number, run in pipeline.local_stages(self.block).items():
            end = None if number == len(self._stages) - 1 else run.stop
            stage = _Stage(pipeline.runner, run.start, end, pipeline.loss_of)
            self._local_stages.append(stage)
            built.append(
                PipelineStage(
                    stage,
                    number,
                    len(self._stages),
                    next(iter(batch.values())).device,
                    input_args=input_of(number),
                    output_args=input_of(number + 1),
                )
            )
        options: dict[str, Any] = {"loss_fn": lambda loss, _: loss.sum(), "scale_grads": False}
        match pipeline.config.schedule:
            case "gpipe":
                self._schedule = ScheduleGPipe(built[0], count, **options)
            case "1f1b":
                self._schedule = Schedule1F1B(built[0], count, **options)
            case "interleaved":
                self._schedule = ScheduleInterleaved1F1B(built, count, **options)

    def _send_to_first_stage(self, hidden: Sequence[Tensor | None]) -> None:
        """Send the stored states from the ranks that store them to rank 0, whose first stage runs from them."""
        rank, size = self._ranks.rank, self._ranks.size
        numbers = range(rank, len(hidden), size)  # of the micro-batches that this rank stores
        local = {number: state.contiguous() for number in numbers if (state := hidden[number]) is not None}
        if len(local) < len(numbers):
            raise ConfigError(f"process {rank} was not given the stored states of micro-batches {list(numbers)}")
        if rank:
            _exchange(self._ranks, [dist.P2POp(dist.isend, state, 0) for state in local.values()])
            return
        states = [local[number] if number in local else torch.empty_like(local[0]) for number in range(len(hidden))]
        remote = [number for number in range(len(hidden)) if number not in local]
        _exchange(self._ranks, [dist.P2POp(dist.irecv, states[number], number % size) for number in remote])
        self._local_stages[0].stored = states

    def _sum_tied_gradients(self) -> None:
        """Sum the gradient of each tied weight over the ranks that use it; each adds them in the same order."""
        rank = self._ranks.rank
        for name, ranks in self._tied_ranks.items():
            if rank not in ranks:
                continue
            gradient = self._active.gradient(name)
            local = torch.zeros_like(self._active.trained[name]) if gradient is None else gradient.contiguous()
            gradients = {other: local if other == rank else torch.empty_like(local) for other in ranks}
            others = [other for other in ranks if other != rank]
            sends = [dist.P2POp(dist.isend, local, other) for other in others]
            receives = [dist.P2POp(dist.irecv, gradients[other], other) for other in others]
            _exchange(self._ranks, [*sends, *receives])
            self._active.put_gradient(name, torch.stack(list(gradients.values())).sum(dim=0))


class _Stage(nn.Module):
    """Some of the model's layers as `PipelineStage` wants them: a module of hidden states and a micro-batch's number.

    The model is not a submodule, so that `PipelineStage` does not find its parameters.
    """

    def __init__(self, runner: BoundaryRunner, start: int, end: int | None, loss_of: LossOf):
        super().__init__()
        self.start = start
        self.end = end  # None: up to the loss
        self.batches: Sequence[Batch] = ()
        self.weights: Sequence[float] = ()
        self.stored: Sequence[Tensor] | None = None  # hidden states by micro-batch, for a first stage at a boundary
        self.error: Exception | None = None
        self._runner = runner
        self._loss_of = loss_of

    def forward(self, given: Tensor, number: Tensor) -> Tensor:
        """(rows, T, d) hidden states to hidden states, or to the micro-batch's part of the loss (1,)."""
        index = int(number)
        hidden = given if self.stored is None else self.stored[index]
        try:
            found = self._runner.run(self.batches[index], start=self.start, end=self.end, hidden=hidden)
            return found if self.end is not None else (self._loss_of(found) * self.weights[index]).view(1)
        except Exception as error:
            self.error = error
            raise


def _exchange(ranks: Ranks, operations: list[dist.P2POp]) -> None:
    """Send and receive, and wait until all of it is done."""
    if operations:
        with ranks.peer_errors():
            for work in dist.batch_isend_irecv(operations):
                work.wait()
