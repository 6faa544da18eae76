"""A step of a pipeline has the gradients of a step in one process, and nothing is sent that is not used."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor, nn

import blocktrain as bt
from blocktrain.chain.boundary import BoundaryRunner
from blocktrain.errors import ConfigError
from blocktrain.parallel.config import PipelineConfig
from blocktrain.parallel.pipeline import Pipeline
from blocktrain.parallel.ranks import Ranks, open_ranks
from blocktrain.testing import run_distributed

WIDTH, VOCABULARY, ROWS, TOKENS, MICRO, STEPS = 16, 32, 2, 8, 4, 2
HIDDEN_BYTES = ROWS * TOKENS * WIDTH * 4  # of a micro-batch, fp32

# name -> model, number of blocks, stages of the partition, pipeline
CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "gpipe": ("llama", 3, 1, {"schedule": "gpipe"}),
    "1f1b": ("llama", 3, 1, {}),
    "1f1b, stored prefix": ("llama", 2, 1, {"start": "boundary"}),
    "1f1b, a piece of each block": ("gpt2", 2, 2, {}),
    "interleaved": ("llama", 2, 1, {"schedule": "interleaved"}),
    "interleaved, stored prefix": ("gpt2", 2, 1, {"schedule": "interleaved", "start": "boundary"}),
    "1f1b, tied": ("gpt2", 3, 1, {}),
}
CASES_OF_FOUR = {"1f1b": CASES["1f1b"], "1f1b, a piece of each block": ("gpt2", 2, 4, {})}
TIED = {name for name, case in (CASES | CASES_OF_FOUR).items() if case[0] == "gpt2"}

# A tied weight's gradient is summed over two stages after, not within, the micro-batches, so its rounding differs.
TOLERANCE = 1e-6


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "gpt2":  # its embedding is its output layer
        config = hf.GPT2Config(
            n_layer=6, n_embd=WIDTH, n_head=2, vocab_size=VOCABULARY, n_positions=TOKENS, bos_token_id=0, eos_token_id=0
        )
        return hf.GPT2LMHeadModel(config)  # with dropout, which acts in active layers: the tests leave it out
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return hf.LlamaForCausalLM(config)


def micro_batches(seed: int) -> list[dict[str, Tensor]]:
    tokens = torch.randint(VOCABULARY, (MICRO, ROWS, TOKENS), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": rows, "labels": rows} for rows in tokens]


WEIGHTS = [0.1, 0.2, 0.3, 0.4]


def gradients_of(optimizer: bt.BlockOptimizer) -> dict[str, Tensor]:
    """Every gradient of the active block; none may be missing here."""
    found = {name: optimizer.active_block.gradient(name) for name in optimizer.active_block.trained}
    assert all(gradient is not None for gradient in found.values())
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def alone(model: nn.Module, partition: bt.Partition, optimizer: bt.BlockOptimizer, block: bt.Block) -> list[Any]:
    """A visit in one process: for each step the loss, the gradients and their norm."""
    found = []
    with optimizer.visit(block):
        for step in range(STEPS):
            losses = [model(**batch).loss * weight for batch, weight in zip(micro_batches(step), WEIGHTS, strict=True)]
            for loss in losses:
                loss.backward()
            gradients = {name: gradient.clone() for name, gradient in gradients_of(optimizer).items()}
            found.append((sum(loss.item() for loss in losses), gradients, float(optimizer.clip_grad_norm())))
            optimizer.step()
            optimizer.zero_grad()
    return found


def hidden_of(pipeline: Pipeline, block: bt.Block, step: int, ranks: Ranks) -> list[Tensor | None] | None:
    """What this process has stored, as a prefix cache would."""
    level = block.boundary
    if pipeline.config.start == "inputs" or not level:
        return None
    cut = BoundaryRunner(pipeline.partition.chain)
    return [
        cut.states(batch, [level])[level] if number % ranks.size == ranks.rank else None
        for number, batch in enumerate(micro_batches(step))
    ]


def compare(ranks: Ranks, case: tuple[str, int, int, dict[str, Any]]) -> dict[str, Any]:
    kind, blocks, stages, settings = case
    model = build(kind)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    single = copy.deepcopy(model)
    partition = bt.partition(model, num_blocks=blocks, stages=stages)
    known = {layer.name: list(layer.modules) for layer in partition.chain.layers}
    reference = bt.partition(single, num_blocks=blocks, stages=stages, layers=known)
    pipeline = Pipeline(ranks, partition, PipelineConfig(**settings), costs=[1.0] * len(partition.chain.layers))
    optimizer, expected = (
        bt.BlockOptimizer(parts, torch.optim.SGD, lr=0.1, momentum=0.9) for parts in (partition, reference)
    )
    result: dict[str, Any] = {"loss": 0.0, "norm": 0.0, "gradient": 0.0, "weights": 0.0, "trained": [], "sent": []}
    for block in partition:
        share = pipeline.local_block(block)
        steps = alone(single, reference, expected, reference[block.index])
        with optimizer.visit(share), pipeline.visit(optimizer.active_block):
            for step, (loss, gradients, norm) in enumerate(steps):
                sent.clear()
                hidden = hidden_of(pipeline, block, step, ranks)
                mine = pipeline.backward(micro_batches(step), weights=WEIGHTS, hidden=hidden)
                result["loss"] = max(result["loss"], abs(mine - loss) / loss)
                for name, gradient in gradients_of(optimizer).items():
                    away = float((gradient - gradients[name]).abs().max() / gradients[name].abs().max())
                    result["gradient"] = max(result["gradient"], away)
                result["norm"] = max(result["norm"], abs(pipeline.clip_grad_norm() - norm) / norm)
                optimizer.step()
                optimizer.zero_grad()
        result["trained"].append(sorted(share.parameters))
        result["sent"].append(dict(sent))
    for (name, one), other in zip(single.named_parameters(), model.parameters(), strict=True):
        result["weights"] = max(result["weights"], float((one - other).abs().max()))
        assert other.grad is None, name
    result["stages"] = [[(run.start, run.stop) for run in runs] for runs in pipeline.stages]
    return result


sent: Counter[int] = Counter()  # peer -> bytes


def counting() -> None:
    """Count the bytes of every message that is passed to gloo."""
    send = dist.isend

    def isend(tensor: Tensor, dst: int | None = None, *args: Any, **keywords: Any) -> Any:
        sent[keywords["group_dst"] if dst is None else dst] += tensor.nbytes
        return send(tensor, dst, *args, **keywords)

    made = dist.P2POp.__init__

    def init(self: Any, op: Any, tensor: Tensor, peer: int | None = None, *args: Any, **keywords: Any) -> None:
        made(self, op, tensor, peer, *args, **keywords)
        if op is send:
            sent[self.peer] += tensor.nbytes

    dist.P2POp.__init__ = init


def compare_all(names: list[str]) -> dict[str, Any]:
    counting()
    with open_ranks() as ranks:
        return {name: compare(ranks, (CASES if ranks.size == 2 else CASES_OF_FOUR)[name]) for name in names}


@pytest.fixture(scope="module")
def compared() -> dict[str, list[dict[str, Any]]]:
    """Case and number of processes -> what each process found."""
    found = {}
    for size, cases in ((2, CASES), (4, CASES_OF_FOUR)):
        by_rank = run_distributed(compare_all, size, list(cases), timeout_seconds=240, patience_seconds=900)
        found |= {(name, size): [results[name] for results in by_rank] for name in cases}
    return found


ALL = [*((name, 2) for name in CASES), *((name, 4) for name in CASES_OF_FOUR)]


@pytest.mark.parametrize("case", ALL, ids=str)
def test_a_step_is_that_of_one_process(compared: dict[Any, Any], case: tuple[str, int]) -> None:
    """Micro-batches are summed in the same order, so without tied weights everything is bitwise equal."""
    for found in compared[case]:
        exact = case[0] not in TIED
        assert found["loss"] <= (0 if exact else TOLERANCE)
        assert found["gradient"] <= (0 if exact else 20 * TOLERANCE)  # of the largest; later steps, other weights
        assert found["weights"] <= (0 if exact else 20 * TOLERANCE)
        assert found["norm"] < TOLERANCE  # a sum over other parts


@pytest.mark.parametrize("case", ALL, ids=str)
def test_processes_share_what_is_trained(compared: dict[Any, Any], case: tuple[str, int]) -> None:
    """Each parameter has one process that trains it; a tied weight has those that use it."""
    for block in range(len(compared[case][0]["trained"])):
        trained = Counter(name for found in compared[case] for name in found["trained"][block])
        tied = trained.pop("transformer.wte.weight", 1)
        assert tied == (2 if case[0] in TIED and block == 0 else 1)
        assert set(trained.values()) <= {1}


@pytest.mark.parametrize("case", [("gpipe", 2), ("1f1b", 2), ("1f1b", 4)], ids=str)
def test_nothing_is_sent_back_into_a_frozen_prefix(compared: dict[Any, Any], case: tuple[str, int]) -> None:
    """Bytes passed to gloo: hidden states are sent up in every visit, gradients down to the active block only."""
    ranks, size = compared[case], case[1]
    begins = [min(rank for rank, found in enumerate(ranks) if found["trained"][block]) for block in range(3)]
    assert begins[-1] > 0, "the last block leaves a frozen prefix"
    for rank, found in enumerate(ranks):
        for block, first in enumerate(begins):
            expected = {rank + 1: MICRO * HIDDEN_BYTES} if rank < size - 1 else {}
            expected |= {rank - 1: MICRO * HIDDEN_BYTES} if rank > first else {}
            assert found["sent"][block] == expected


def test_the_piece_of_each_block_and_the_layers_that_remain(compared: dict[Any, Any]) -> None:
    """Every process has something to train in each visit, and with a stored prefix no process is idle."""
    for found in compared["1f1b, a piece of each block", 2]:
        assert all(found["trained"])
        assert found["stages"][0] == found["stages"][1]
    for found in compared["1f1b, stored prefix", 2]:
        first, last = found["stages"]
        assert first[0][0] == 0
        assert last[0][0] == 3  # where the second of two blocks begins
        assert len(last) == 2


def refuse() -> dict[str, str]:
    """The error message of each mistake."""
    messages = {}
    with open_ranks() as ranks:
        partition = bt.partition(build("llama"), num_blocks=4)

        def attempt(name: str, batches: list[dict[str, Tensor]], hidden: Any = None, **settings: Any) -> None:
            try:
                pipeline = Pipeline(ranks, partition, PipelineConfig(**settings), costs=[1.0] * 6)
                optimizer = bt.BlockOptimizer(partition, torch.optim.SGD, lr=0.1)
                with optimizer.visit(pipeline.local_block(partition[1])), pipeline.visit(optimizer.active_block):
                    pipeline.backward(batches, weights=[1.0] * len(batches), hidden=hidden)
            except (ConfigError, ValueError) as error:
                messages[name] = f"{type(error).__name__}: {error}"

        long = {name: torch.cat([rows, rows], dim=1) for name, rows in micro_batches(0)[0].items()}
        attempt("ragged", [*micro_batches(0), long])
        attempt("few", micro_batches(0)[:1])
        attempt("nothing stored", micro_batches(0), start="boundary")
        attempt("small blocks", micro_batches(0), schedule="interleaved")
    return messages


def test_mistakes_are_errors_on_every_process() -> None:
    for messages in run_distributed(refuse, 2):
        assert "must have one shape" in messages["ragged"]
        assert "at least 2 micro-batches a step" in messages["few"]
        assert "was not given the stored states of micro-batches" in messages["nothing stored"]
        assert "2 processes cannot share the layers of the model" in messages["small blocks"]


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv", "dualpipev"])
def test_zero_bubble_schedules_are_refused(schedule: Any) -> None:
    """They leave active parameters without gradients, without an error (PyTorch 2.13)."""
    with pytest.raises(ConfigError, match="without an error"):
        PipelineConfig(schedule=schedule)


def test_bad_values() -> None:
    partition = bt.partition(build("llama"), num_blocks=2)
    with pytest.raises(ConfigError, match=r"schedule '1f2b' is unknown; .*1f1b"):
        PipelineConfig(schedule="1f2b")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="start 'middle' is unknown"):
        PipelineConfig(start="middle")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="more than one process"):
        Pipeline(Ranks(), partition, PipelineConfig(), costs=[1.0] * 6)
    with pytest.raises(ConfigError, match="3 costs for 6 layers"):
        Pipeline(Ranks(rank=0, size=2), partition, PipelineConfig(), costs=[1.0] * 3)
