"""Pipelines: the layers of a model over several processes, micro-batches going from one to the next.

    process 0   F0 F1 F2 F3                       frozen prefix: nothing comes back to it
    process 1      F0 F1 B0 F2 B1 F3 B2 B3        the active block begins here
    process 2         F0 B0 F1 B1 F2 B2 F3 B3     (1F1B)

`torch.distributed.pipelining` runs the schedule. A stage is the model itself, run from one boundary to another by its
own code. Stages and schedule are built anew for each visit: they fix at their first step which of them exchange
gradients, and after a switch of block they would hang, or go on sending gradients that nobody wants.

Each process trains its share of the active block: it has the gradients, masters and moments of the layers that it runs,
and no gradient travels but those of a tied weight that is used on several. At the end of a visit the block's weights go
to all processes, once; then each of them has the whole model and can be given other layers, evaluate, or write it.
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

from blocktrain.chain.block import Block, Partition
from blocktrain.chain.boundary import BoundaryRunner
from blocktrain.chain.freezing import evaluating
from blocktrain.errors import ConfigError
from blocktrain.parallel.data_parallel import Active
from blocktrain.parallel.ranks import Ranks
from blocktrain.parallel.replicas import assert_replicas_equal
from blocktrain.parallel.stages import PipelineConfig, require_micro_batches, stages

Batch = Mapping[str, Tensor]
LossOf = Callable[[Any], Tensor]  # of the model's output, a mean (0-d)


class Pipeline:
    """The processes of a run as a pipeline over `partition`'s model, which each of them has in full.

        pipeline = Pipeline(ranks, partition, PipelineConfig(), costs=costs)
        optimizer = BlockOptimizer(partition, torch.optim.AdamW, lr=1e-4)
        for visit in schedule.visits(partition):
            with optimizer.visit(pipeline.share(visit.block)), pipeline.visit(optimizer.active_block):
                loss = pipeline.backward(micro_batches, weights=[1 / len(micro_batches)] * len(micro_batches))
                pipeline.clip_grad_norm(1.0)
                optimizer.step()
                optimizer.zero_grad()

    costs: of each layer's forward pass, in any unit (`layer_costs` counts FLOPs).
    """

    settled = True  # `settle` makes it so

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
        self.cut = BoundaryRunner(partition.chain)
        self._used_in: dict[nn.Parameter, list[int]] = {}  # numbers of layers; of a tied one several
        for at, layer in enumerate(partition.chain.layers):
            for _, parameter in layer.named_parameters():
                self._used_in.setdefault(parameter, []).append(at)
        self.stages = [stages(partition, block, ranks.size, config, costs) for block in partition]
        self._shares = [self._share(block) for block in partition]
        self._steps: _Steps | None = None

    def share(self, block: Block) -> Block:
        """What this process trains of `block`: the part to visit with a `BlockOptimizer` of the whole partition."""
        return self._shares[block.index]

    @contextmanager
    def visit(self, active: Active) -> Iterator[None]:
        """Around the steps of a visit to a `share`. At its end all processes have the block's weights; raises
        `PeerError` if they are not the same."""
        self._steps = steps = _Steps(self, active)
        try:
            yield
            self.settle()
        finally:
            self._steps = None
        assert_replicas_equal(self.ranks, steps.block, steps.block.parameters)

    def backward(
        self, batches: Sequence[Batch], *, weights: Sequence[float], hidden: Sequence[Tensor | None] | None = None
    ) -> float:
        """Forward and backward over a step's micro-batches, the same on every process and all of one shape.

        weights: of each micro-batch's loss in the step's.
        hidden: the stored states at the boundary; of micro-batch j given on process j mod P, which has stored them.

        Returns the step's loss. Afterwards this process's share of the active block has the step's gradients.
        """
        return self._in_visit().backward(batches, weights, hidden)

    def clip_grad_norm(self, max_norm: float = math.inf) -> float:
        """Scale the active block's gradients on all processes to a total 2-norm of at most `max_norm`; returns the norm
        before."""
        return self._in_visit().clip_grad_norm(max_norm)

    def stepped(self, step: int) -> None:
        """Each process has moved its share."""

    @torch.no_grad()
    def settle(self) -> None:
        """Give all processes the active block as it is now; between visits they have it."""
        if self._steps is None:
            return
        block = self._steps.block
        with self.ranks.peers():
            for name, parameter in block.parameters.items():
                dist.broadcast(parameter.data, src=self.users(block, name)[0])
            for layer in block.layers:
                runner = next(stage for stage, run in enumerate(self.stages[block.index]) if layer.index in run)
                for module in layer.modules.values():
                    for buffer in module.buffers():
                        dist.broadcast(buffer, src=runner % self.ranks.size)

    def users(self, block: Block, name: str) -> list[int]:
        """The processes that run a layer with `block`'s parameter `name`, in a visit to it."""
        layers = self._used_in[block.parameters[name]]
        runs = enumerate(self.stages[block.index])
        return sorted({stage % self.ranks.size for stage, run in runs if any(layer in run for layer in layers)})

    def holds(self, index: int, name: str) -> bool:
        """Whether this process is the one to ask for what the optimizer has of block `index`'s parameter `name`."""
        return self.users(self.partition[index], name)[0] == self.ranks.rank

    def mine(self, block: Block) -> dict[int, range]:
        """This process's stages in a visit to `block`: number -> layers."""
        return {
            number: run
            for number, run in enumerate(self.stages[block.index])
            if number % self.ranks.size == self.ranks.rank
        }

    def _share(self, block: Block) -> Block:
        layers = [
            layer for run in self.mine(block).values() for layer in self.partition.chain.layers[run.start : run.stop]
        ]
        names = [name for name in block.parameters if self.ranks.rank in self.users(block, name)]
        label = f"process {self.ranks.rank}'s part of {block.names[0]} .. {block.names[-1]}"
        return self.partition.restrict(block.index, label, layers=layers, parameters=names)

    def _in_visit(self) -> _Steps:
        assert self._steps is not None, "steps are taken inside a visit"
        return self._steps


class _Steps:
    """The steps of one visit. All processes make the same calls."""

    def __init__(self, pipeline: Pipeline, active: Active):
        self._pipeline = pipeline
        self._ranks = pipeline.ranks
        self._active = active
        self.block = pipeline.partition[active.block.index]
        self._stages = pipeline.stages[active.block.index]
        self._ties = {
            name: users for name in self.block.parameters if len(users := pipeline.users(self.block, name)) > 1
        }
        self._running: list[_Stage] = []
        self._schedule: Any = None
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
        for stage in self._running:
            stage.batches, stage.weights = batches, weights
        if self._stages[0].start:
            self._bring(hidden or [None] * len(batches))
        losses: list[Tensor] = []
        numbers = torch.arange(len(batches))
        self._run(numbers, losses)
        self._sum_ties()
        return math.fsum(loss for (loss,) in self._ranks.all_gather([math.fsum(loss.item() for loss in losses)]))

    def clip_grad_norm(self, max_norm: float) -> float:
        """See `Pipeline.clip_grad_norm`; of a tied weight the first of its users counts the gradient."""
        found = {name: self._active.gradient(name) for name in self._active.trained}
        held = {name: gradient for name, gradient in found.items() if gradient is not None}
        counted = [
            gradient
            for name, gradient in held.items()
            if self._ties.get(name, [self._ranks.rank])[0] == self._ranks.rank
        ]
        mine = math.fsum(float(torch.linalg.vector_norm(g, dtype=torch.float32)) ** 2 for g in counted)
        norm = math.sqrt(math.fsum(square for (square,) in self._ranks.all_gather([mine])))
        if norm > max_norm:
            for gradient in held.values():
                gradient.mul_(max_norm / (norm + 1e-6))
        return norm

    # -- parts ----------------------------------------------------------------------------------------------------

    def _run(self, numbers: Tensor, losses: list[Tensor]) -> None:
        """Run one step of the schedule. An error of a stage is raised as it is; a silent peer becomes a `PeerError`."""
        args = (numbers,) if self._ranks.rank == 0 else ()
        last = (len(self._stages) - 1) % self._ranks.size == self._ranks.rank
        told = {"target": numbers, "losses": losses} if last else {}
        with self._ranks.peers():
            try:
                self._schedule.step(*args, number=numbers, return_outputs=False, **told)
            except RuntimeError:
                failed = next((stage.failed for stage in self._running if stage.failed is not None), None)
                if failed is None:
                    raise
            else:
                return
        raise failed

    def _build(self, batch: Batch, count: int) -> None:
        """Stages and schedule. What they exchange is told, not found out by running them: a gradient is sent to a stage
        that has the first active layer, or comes after it."""
        pipeline, size = self._pipeline, self._ranks.size
        require_micro_batches(pipeline.config, count, len(self._stages), size)
        rows = len(next(iter(batch.values())))
        row = {name: tensor[:1] for name, tensor in batch.items()}
        starts = [run.start for run in self._stages if run.start]
        for start in starts:
            pipeline.cut.check(row, start)  # every process every start, so that all of them say what is wrong
        with evaluating(pipeline.partition.model):
            states = pipeline.cut.states(row, starts)
        first = self.block.boundary

        def crossing(number: int) -> Tensor:
            """What stage `number` is given: nothing but a shape and whether its gradient is wanted."""
            if number == len(self._stages):
                return torch.empty(1, device="meta", requires_grad=True)
            start = self._stages[number].start
            if number == 0:
                return torch.empty(1, dtype=torch.long, device="meta")
            shape = (rows, *states[start].shape[1:])
            return torch.empty(shape, dtype=states[start].dtype, device="meta", requires_grad=first < start)

        self._running, built = [], []
        for number, run in pipeline.mine(self.block).items():
            end = None if number == len(self._stages) - 1 else run.stop
            stage = _Stage(pipeline.cut, run.start, end, pipeline.loss_of)
            self._running.append(stage)
            built.append(
                PipelineStage(
                    stage,
                    number,
                    len(self._stages),
                    next(iter(batch.values())).device,
                    input_args=crossing(number),
                    output_args=crossing(number + 1),
                )
            )
        made = {"loss_fn": lambda loss, _: loss.sum(), "scale_grads": False}
        match pipeline.config.schedule:
            case "gpipe":
                self._schedule = ScheduleGPipe(built[0], count, **made)
            case "1f1b":
                self._schedule = Schedule1F1B(built[0], count, **made)
            case "interleaved":
                self._schedule = ScheduleInterleaved1F1B(built, count, **made)

    def _bring(self, hidden: Sequence[Tensor | None]) -> None:
        """Stored states from where they lie to process 0, whose first stage takes them."""
        rank, size = self._ranks.rank, self._ranks.size
        held = {number: hidden[number] for number in range(rank, len(hidden), size)}
        kept = {number: state.contiguous() for number, state in held.items() if state is not None}
        if len(kept) < len(held):
            raise ConfigError(f"process {rank} was not given the stored states of micro-batches {sorted(held)}")
        if rank:
            _exchange(self._ranks, [dist.P2POp(dist.isend, state, 0) for state in kept.values()])
            return
        states = [kept[number] if number in kept else torch.empty_like(kept[0]) for number in range(len(hidden))]
        coming = [number for number in range(len(hidden)) if number not in kept]
        _exchange(self._ranks, [dist.P2POp(dist.irecv, states[number], number % size) for number in coming])
        self._running[0].stored = states

    def _sum_ties(self) -> None:
        """Gradients of a tied weight from all processes that use it; each adds them up in the same order."""
        rank = self._ranks.rank
        for name, users in self._ties.items():
            if rank not in users:
                continue
            gradient = self._active.gradient(name)
            mine = torch.zeros_like(self._active.trained[name]) if gradient is None else gradient.contiguous()
            theirs = {user: mine if user == rank else torch.empty_like(mine) for user in users}
            others = [user for user in users if user != rank]
            sends = [dist.P2POp(dist.isend, mine, user) for user in others]
            _exchange(self._ranks, [*sends, *(dist.P2POp(dist.irecv, theirs[user], user) for user in others)])
            self._active.put_gradient(name, torch.stack(list(theirs.values())).sum(dim=0))


class _Stage(nn.Module):
    """Some of the model's layers, as `PipelineStage` wants them: a module of hidden states and a micro-batch's number.

    The model is no part of it, so that nobody looks for parameters here.
    """

    def __init__(self, cut: BoundaryRunner, start: int, end: int | None, loss_of: LossOf):
        super().__init__()
        self.start = start
        self.end = end  # None: to the loss
        self.batches: Sequence[Batch] = ()
        self.weights: Sequence[float] = ()
        self.stored: Sequence[Tensor] | None = (
            None  # each micro-batch's hidden states, for a first stage above a boundary
        )
        self.failed: Exception | None = None
        self._cut = cut
        self._loss_of = loss_of

    def forward(self, given: Tensor, number: Tensor) -> Tensor:
        """(rows, T, d) hidden states to hidden states, or to the micro-batch's part of the loss (1,)."""
        index = int(number)
        hidden = given if self.stored is None else self.stored[index]
        try:
            found = self._cut.run(self.batches[index], start=self.start, end=self.end, hidden=hidden)
            return found if self.end is not None else (self._loss_of(found) * self.weights[index]).view(1)
        except Exception as error:
            self.failed = error
            raise


def _exchange(ranks: Ranks, operations: list[dist.P2POp]) -> None:
    if operations:
        with ranks.peers():
            for work in dist.batch_isend_irecv(operations):
                work.wait()
