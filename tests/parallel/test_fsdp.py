"""A sharded run equals the run of one process, and its checkpoint continues on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import blocktrain as bt
from blocktrain.errors import ConfigError
from blocktrain.parallel.config import ShardingConfig
from blocktrain.parallel.fsdp import ShardedBoundaryRunner, ShardedPartition
from blocktrain.parallel.ranks import Ranks, open_ranks
from blocktrain.testing import run_distributed
from blocktrain.train.checkpoint import CheckpointHeader, TrainerState, load_checkpoint, save_checkpoint

NORM = 2 * 16  # GPT-2's last, weights and biases: with the tied embedding it is left to the model as a whole
VOCABULARY, TOKENS, ROWS, STEPS = 32, 8, 4, 2
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}

# Sums over rows in another order, and AdamW divides by a gradient's own size. Measured: 2e-7 of the loss.
TOLERANCE = 2e-6


def build(kind: str) -> tuple[bt.Partition, dict[str, list[str]]]:
    """A model in three blocks, and its layers by name."""
    torch.manual_seed(0)
    if kind == "gpt2":
        options = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = hf.GPT2Config(n_layer=4, n_embd=16, n_head=2, n_positions=TOKENS, **SIZES, **options)
        model: nn.Module = hf.GPT2LMHeadModel(config)
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **SIZES))
    partition = bt.partition(model, num_blocks=3)
    return partition, {layer.name: list(layer.modules) for layer in partition.chain.layers}


def optimizer_of(partition: bt.Partition) -> bt.BlockOptimizer:
    return bt.BlockOptimizer(partition, torch.optim.AdamW, lr=1e-3, state=bt.KeepOnHost())


def rows_of(step: int) -> Tensor:
    return torch.randint(VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(step))


def take_steps(ranks: Ranks, optimizer: bt.BlockOptimizer, block: bt.Block, *, first: int, count: int) -> list[float]:
    """A visit, each process with its share of the rows; the losses of its steps."""
    losses = []
    with optimizer.visit(block):
        for step in range(first, first + count):
            mine = rows_of(step)[ranks.rank :: ranks.size]
            loss = optimizer.partition.model(input_ids=mine, labels=mine).loss / ranks.size
            loss.backward()
            optimizer.clip_grad_norm(0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(sum(part for (part,) in ranks.all_gather([loss.item()])))
    return losses


def sweep(ranks: Ranks, optimizer: bt.BlockOptimizer, *, first: int = 0) -> list[float]:
    return [
        loss
        for block in optimizer.partition
        for loss in take_steps(ranks, optimizer, block, first=first + STEPS * block.index, count=STEPS)
    ]


counted = {"gathered": 0, "reduced": 0}


def counting() -> None:
    """Count the bytes of the outputs of all-gathers and of the inputs of reduce-scatters on this rank."""
    gather, reduce = dist.all_gather_single, dist.reduce_scatter_single

    def counted_gather(output: Tensor, *args: Any, **keywords: Any) -> Any:
        counted["gathered"] += output.nbytes
        return gather(output, *args, **keywords)

    def counted_reduce(*args: Any, **keywords: Any) -> Any:
        counted["reduced"] += (keywords["input"] if "input" in keywords else args[1]).nbytes
        return reduce(*args, **keywords)

    dist.all_gather_single, dist.reduce_scatter_single = counted_gather, counted_reduce


def bytes_of_a_step(ranks: Ranks, optimizer: bt.BlockOptimizer, block: bt.Block) -> dict[str, int]:
    counted.update(gathered=0, reduced=0)
    take_steps(ranks, optimizer, block, first=0, count=1)
    return dict(counted)


def bytes_above_a_boundary(ranks: Ranks, optimizer: bt.BlockOptimizer, block: bt.Block) -> list[int]:
    """Bytes gathered to compute the hidden states below `block`, and then in a step that starts from them."""
    chain = optimizer.partition.chain
    cut, level = ShardedBoundaryRunner(chain), block.boundary
    rows = rows_of(0)[ranks.rank :: ranks.size]
    counted.update(gathered=0)
    hidden = cut.states({"input_ids": rows}, [level])[level]
    below = counted["gathered"]
    with cut.running(start=level, hidden=hidden):
        return [below, bytes_of_a_step(ranks, optimizer, block)["gathered"]]


def local_bytes(entries: dict[str, dict[str, Any]]) -> int:
    """Bytes of this rank's shards of the optimizer's moments."""
    values = [value for entry in entries.values() for value in entry.values() if isinstance(value, DTensor)]
    return sum(value.to_local().nbytes for value in values)


def train(kind: str, checkpoints: str) -> dict[str, Any]:
    """A sweep, a checkpoint in the form of one process, a second sweep; then one step to count."""
    counting()
    partition, layers = build(kind)
    before = list(partition.model.parameters())
    with open_ranks() as ranks:
        sharded = ShardedPartition(ranks, partition, ShardingConfig())
        optimizer = optimizer_of(sharded.partition)
        losses = sweep(ranks, optimizer)
        counted.update(gathered=0)
        whole = {name: value for block in sharded.partition for name, value in sharded.gather_weights(block).items()}
        state = sharded.gather_state(optimizer.state_dict())
        tensors = [
            value for block in state["blocks"].values() for entries in block.values() for value in entries.values()
        ]
        saved_by = counted["gathered"]
        on_this_rank = sum(
            value.nbytes for value in [*whole.values(), *tensors] if torch.is_tensor(value) and value.dim()
        )
        if ranks.is_rank0:
            plain = bt.partition(build(kind)[0].model, num_blocks=3, layers=layers)
            writer = optimizer_of(plain)
            for block in plain:
                writer.load_block_weights(block.index, whole)
            writer.load_state_dict(state)
            saved = CheckpointHeader(progress=TrainerState(step=STEPS * 3), log_bytes=0, data="")
            save_checkpoint(Path(checkpoints), saved, partition=plain, trained=writer, keep=1)
        losses += sweep(ranks, optimizer, first=STEPS * 3)
        found: dict[str, Any] = {"losses": losses, "counted": [], "scalars": [], "moments": [], "cut": []}
        found |= {"whole on this rank": on_this_rank, "all-gathered to save": saved_by}
        for block in sharded.partition:
            found["counted"].append(bytes_of_a_step(ranks, optimizer, block))
            found["scalars"].append(block.num_parameters)
            if block.index:
                found["cut"].append(bytes_above_a_boundary(ranks, optimizer, block))
            with optimizer.visit(block):
                found["moments"].append(local_bytes(optimizer.active_block.state()))
        found["all"] = sum(parameter.numel() for parameter in partition.model.parameters())
        found["scalars left whole"] = sum(parameter.numel() for parameter in before)
        found["gradients left"] = sum(parameter.grad is not None for parameter in partition.model.parameters())
    return found


def go_on(kind: str, checkpoint: str) -> list[float]:
    """The second sweep, sharded, from a checkpoint."""
    partition, _ = build(kind)
    with open_ranks() as ranks:
        plain = optimizer_of(partition)
        load_checkpoint(Path(checkpoint), partition, plain)
        sharded = ShardedPartition(ranks, partition, ShardingConfig())
        optimizer = optimizer_of(sharded.partition)
        optimizer.load_state_dict(sharded.shard_state(plain.state_dict()))
        return sweep(ranks, optimizer, first=STEPS * 3)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, list[Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return request.param, folder, run_distributed(train, 2, request.param, str(folder), timeout_seconds=240)


def alone(kind: str) -> bt.BlockOptimizer:
    return optimizer_of(build(kind)[0])


def test_losses_are_those_of_one_process(trained: tuple[str, Path, list[Any]]) -> None:
    optimizer = alone(trained[0])
    expected = [*sweep(Ranks(), optimizer), *sweep(Ranks(), optimizer, first=STEPS * 3)]
    for found in trained[2]:
        assert found["losses"] == pytest.approx(expected, rel=TOLERANCE)
        assert found["gradients left"] == 0
        assert found["scalars left whole"] == 0  # to whoever still refers to the weights as they were


def test_only_the_active_block_is_summed(trained: tuple[str, Path, list[Any]]) -> None:
    """Its whole gradients are reduce-scattered. Weights are gathered for the forward pass, and again for the backward
    pass through the layers above the prefix. Moments are halves."""
    for found in trained[2]:
        for counts, scalars, moments in zip(found["counted"], found["scalars"], found["moments"], strict=True):
            assert counts["reduced"] == 4 * scalars
            assert moments == 2 * 4 * scalars // 2
        gathered = [counts["gathered"] for counts in found["counted"]]
        assert gathered[0] > gathered[-1] >= 4 * found["all"], "the last block's frozen prefix is gathered once"


def test_a_step_above_a_boundary_gathers_nothing_below_it_but_the_embedding(
    trained: tuple[str, Path, list[Any]],
) -> None:
    """A pass up to the boundary gathers nothing above it, except the layers that are sharded with a tied head."""
    partition = build(trained[0])[0]
    layers = [sum(p.numel() for p in layer.values()) for layer in partition.chain.owned]
    for found in trained[2]:
        for block, (below, above), whole in zip(partition.blocks[1:], found["cut"], found["counted"][1:], strict=True):
            level = block.boundary
            assert above <= whole["gathered"] - 4 * sum(layers[1:level])  # a backward pass may gather one ahead, too
            assert below == 4 * sum(layers[:level]) + (0 if trained[0] == "llama" else 4 * NORM)


def test_only_rank_0_holds_whole_tensors_to_save(trained: tuple[str, Path, list[Any]]) -> None:
    """Weights and two moments in fp32. An all-gather would deliver them to every rank."""
    first, second = trained[2]
    assert first["whole on this rank"] == 3 * 4 * first["all"]
    assert second["whole on this rank"] == 0
    assert first["all-gathered to save"] == second["all-gathered to save"] == 0


def test_its_checkpoint_continues_in_one_process_and_sharded(trained: tuple[str, Path, list[Any]]) -> None:
    kind, folder, results = trained
    (checkpoint,) = folder.glob("step-*")
    optimizer = alone(kind)
    load_checkpoint(checkpoint, optimizer.partition, optimizer)
    second = results[0]["losses"][STEPS * 3 :]
    assert sweep(Ranks(), optimizer, first=STEPS * 3) == pytest.approx(second, rel=TOLERANCE)
    assert run_distributed(go_on, 2, kind, str(checkpoint)) == [second, second]


def in_bf16() -> tuple[list[float], str]:
    """The losses of a sweep whose weights and gradients are sent in 16 bits, and the dtype of the shards."""
    with open_ranks() as ranks:
        sharded = ShardedPartition(ranks, build("llama")[0], ShardingConfig(compute_dtype="bf16", reduce_dtype="bf16"))
        losses = sweep(ranks, optimizer_of(sharded.partition))
    return losses, str(next(sharded.partition.model.parameters()).dtype)


def test_shards_are_the_masters_of_a_computation_in_bf16() -> None:
    """bf16 has 8 bits, an error of 4e-3 of a value, and errors of several layers add up."""
    expected = sweep(Ranks(), alone("llama"))
    for losses, dtype in run_distributed(in_bf16, 2):
        assert losses == pytest.approx(expected, rel=1e-2)
        assert losses != pytest.approx(expected, rel=TOLERANCE)
        assert dtype == "torch.float32"


def test_what_cannot_be_sharded_is_an_error() -> None:
    partition, layers = build("llama")
    with pytest.raises(ConfigError, match="more than one process"):
        ShardedPartition(Ranks(), partition, ShardingConfig())
    small = bt.partition(partition.model, largest=400, layers=layers)
    with pytest.raises(ConfigError, match=r"owns rows of 'model\.embed_tokens\.weight'"):
        ShardedPartition(Ranks(rank=0, size=2), small, ShardingConfig())
