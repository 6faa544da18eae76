"""A model with stored weights computes what it computes with the same values in its parameters."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blocktrain.chain.block import Partition
from blocktrain.chain.partition import partition
from blocktrain.errors import CheckpointError, ConfigError, StoredWeightError
from blocktrain.memory.fake import fake_copy
from blocktrain.memory.flops import StepCounter
from blocktrain.modules.placeholder import backing_tensors, is_placeholder
from blocktrain.modules.wrap import wrap_forward
from blocktrain.optim.block_optimizer import BlockOptimizer
from blocktrain.optim.precision import BF16_EXACT, FP32, INT8, NF4, Precision, upper_half
from blocktrain.optim.quantize_weights import quantize
from blocktrain.optim.weight_store import OnDevice, OnHost, WeightLocation

KINDS: dict[str, tuple[Precision, WeightLocation]] = {
    "int8": (INT8, OnDevice()),
    "nf4": (NF4, OnDevice()),
    "int8 streamed": (INT8, OnHost()),
    "bf16 streamed": (BF16_EXACT, OnHost()),
    "fp32 streamed": (FP32, OnHost()),
}
NAME = "transformer.h.1.mlp.c_fc.weight"


@pytest.fixture(params=KINDS.values(), ids=list(KINDS))
def kind(request: pytest.FixtureRequest) -> tuple[Precision, WeightLocation]:
    return request.param


def optimizer_of(
    model: nn.Module, kind: tuple[Precision, WeightLocation], cls: Any = torch.optim.AdamW, **options: Any
) -> BlockOptimizer:
    precision, frozen = kind
    return BlockOptimizer(partition(model, num_blocks=3), cls, lr=1e-2, precision=precision, frozen=frozen, **options)


def plain_model(gpt2, precision: Precision) -> BlockOptimizer:
    """A model whose weights are never stored, with the values to which stored ones are materialized."""
    model = gpt2()
    for parameter in model.parameters():
        value = upper_half(parameter.data) if precision.has_master else parameter.data
        parameter.data = quantize(value, precision.frozen).dequantize() if value.ndim > 1 else value
    return optimizer_of(model, (BF16_EXACT if precision.has_master else FP32, OnDevice()))


def activate_as(plain: BlockOptimizer, optimizer: BlockOptimizer, index: int) -> None:
    """The active block is not quantized: it has its own values."""
    plain.load_block_weights(index, optimizer.block_weights(index))


class Checkpointed:
    """A wrapper that recomputes a module in the backward pass."""

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(run, *args, use_reentrant=False, **kwargs)


@contextlib.contextmanager
def checkpointed(parts: Partition) -> Iterator[None]:
    undo = [
        wrap_forward(module, Checkpointed()) for layer in parts.chain.layers[1:] for module in layer.modules.values()
    ]
    yield
    for remove in undo:
        remove()


@pytest.mark.parametrize("recompute", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("index", range(3))
def test_loss_and_gradients_equal_those_of_the_same_values_in_place(index: int, recompute: bool, kind, gpt2, batch):
    optimizer, plain = optimizer_of(gpt2(), kind), plain_model(gpt2, kind[0])
    activate_as(plain, optimizer, index)
    found = []
    for each in (optimizer, plain):
        parts = each.partition
        with each.visit(parts[index]), checkpointed(parts) if recompute else contextlib.nullcontext():
            loss = parts.model(**batch(0)).loss
            loss.backward()
            found.append((loss.detach(), each.gradients()))
    assert torch.equal(found[0][0], found[1][0])
    assert len(found[0][1]) == len(found[1][1]) == len(optimizer.partition[index].parameters)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.parametrize("precision", [FP32, BF16_EXACT], ids=lambda precision: precision.name)
def test_a_streamed_run_is_bitwise_the_resident_one(precision: Precision, gpt2, batch):
    runs = []
    for place in (OnDevice(), OnHost()):
        optimizer = optimizer_of(gpt2(), (precision, place))
        losses = []
        for visit in range(5):
            with optimizer.visit(optimizer.partition[visit % 3]):
                for step in range(2):
                    loss = optimizer.partition.model(**batch(2 * visit + step)).loss
                    loss.backward()
                    losses.append(loss.item())
                    optimizer.step()
                    optimizer.zero_grad()
        runs.append((losses, [optimizer.block_weights(index) for index in range(3)]))
    assert runs[0][0] == runs[1][0]
    assert runs[0][0][0] != runs[0][0][-1]
    for mine, theirs in zip(runs[0][1], runs[1][1], strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


READS: dict[str, Callable[[Tensor], Any]] = {
    "sum": torch.sum,
    "product": lambda weight: torch.ones(1, weight.shape[0], dtype=weight.dtype) @ weight,
    "linear": lambda weight: nn.functional.linear(torch.ones(1, weight.shape[1], dtype=weight.dtype), weight),
    "data": lambda weight: weight.data * 2,
    "detached": lambda weight: weight.detach() + 1,
    "transposed": lambda weight: weight.T,
    "item": lambda weight: weight[0, 0].item(),
    "foreach": lambda weight: torch._foreach_norm([weight]),
    "aten": lambda weight: torch.ops.aten.add.Tensor(weight, weight),
    "list": lambda weight: weight.tolist(),
    "numpy": lambda weight: weight.detach().numpy(),
    "pointer": lambda weight: weight.data_ptr(),
    "pickled": lambda weight: torch.save(weight, io.BytesIO()),
    "other dtype": lambda weight: weight.double(),
    "compared": lambda weight: torch.equal(weight, weight),
    "written": lambda weight: weight.data.zero_(),
    "replaced": lambda weight: setattr(weight, "data", torch.zeros(weight.shape)),
    "initialized": nn.init.zeros_,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_stored_weight_that_is_read_outside_of_a_run_raises(read, kind, gpt2):
    """It read as NaN: a fused loss took `lm_head.weight`, reported 0.0 and saved NaN weights without a word."""
    optimizer = optimizer_of(gpt2(), kind)
    parameter = optimizer.partition.model.get_parameter(NAME)
    with pytest.raises(StoredWeightError, match=rf"needs the value of '{NAME}'.*close\(\) the BlockOptimizer"):
        read(parameter)
    with optimizer.visit(optimizer.partition[2]), contextlib.suppress(TypeError, RuntimeError):  # bf16 in numpy
        read(parameter)


def test_what_does_not_need_the_value_of_a_stored_weight_works(kind, gpt2):
    model = gpt2()
    optimizer = optimizer_of(model, kind)
    parameter = model.get_parameter(NAME)
    assert (len(parameter), parameter.numel(), parameter.nbytes) == (32, 4096, 4096 * parameter.element_size())
    assert torch.empty_like(parameter).shape == parameter.detach().shape == parameter.data.shape
    assert type(torch.zeros_like(parameter)) is Tensor
    assert NAME in repr(parameter)
    assert model.to("cpu") is model
    assert is_placeholder(model.get_parameter(NAME))
    optimizer.close()
    assert type(parameter) is nn.Parameter


class FusedLoss(nn.Module):
    """A model whose loss takes the head's weight, in pieces of tokens, in place of the head's output."""

    def __init__(self, own_function: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.layer = nn.Linear(8, 8)
        self.own_function = own_function

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layer(self.embedding(tokens)).tanh()
        apply = _Product.apply if self.own_function else nn.functional.linear
        losses = [
            nn.functional.cross_entropy(apply(part, self.head.weight).float(), labels, reduction="sum")
            for part, labels in zip(hidden.split(2), tokens.split(2), strict=True)
        ]
        return sum(losses, torch.zeros(()))


class _Product(torch.autograd.Function):
    """As fused kernels do, it reads the weight in its backward pass, too."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return grad_outputs[0] @ ctx.saved_tensors[0], None


@pytest.mark.parametrize("own_function", [False, True], ids=["", "own backward"])
def test_a_loss_that_takes_a_stored_weight_inside_the_forward_pass_gets_its_value(own_function: bool, kind):
    layers = {"embedding": ["embedding"], "layer": ["layer"], "head": ["head"]}
    tokens = torch.arange(8)
    stored = BlockOptimizer(
        partition(FusedLoss(own_function), 3, layers=layers), torch.optim.AdamW, precision=kind[0], frozen=kind[1]
    )
    model = stored.partition.model
    head = model.get_parameter("head.weight")
    value = quantize(head.data if not is_placeholder(head) else stored.block_weights(2)["head.weight"], kind[0].frozen)
    plain = FusedLoss(own_function).to(kind[0].compute)
    embedded = quantize(stored.block_weights(0)["embedding.weight"], kind[0].frozen)
    plain.head.weight.data, plain.embedding.weight.data = value.dequantize(), embedded.dequantize()
    with stored.visit(stored.partition[1]):
        assert is_placeholder(head)
        loss = model(tokens)
        loss.backward()
        expected = plain(tokens)
        expected.backward()
        assert torch.equal(loss, expected)
        assert loss.item() > 0
        name = "layer.weight"
        gradient = stored.active_block.gradient(name)
        assert gradient is not None
        assert plain.layer.weight.grad is not None
        assert torch.equal(gradient, plain.layer.weight.grad)
        with pytest.raises(StoredWeightError):
            head.sum()


def test_after_a_forward_pass_that_fails_reads_raise_again(kind, gpt2):
    model = optimizer_of(gpt2(), kind).partition.model
    with pytest.raises(IndexError):
        model(input_ids=torch.full((1, 4), 1000))
    with pytest.raises(StoredWeightError):
        model.get_parameter(NAME).sum()


def test_stored_weights_take_no_memory(kind, gpt2):
    optimizer = optimizer_of(gpt2(), kind)
    parameter = optimizer.partition.model.get_parameter(NAME)
    assert is_placeholder(parameter)
    assert parameter.untyped_storage().nbytes() == parameter.element_size()
    assert (parameter.shape, parameter.dtype) == ((32, 128), kind[0].compute)
    assert not is_placeholder(optimizer.partition.model.get_parameter("transformer.h.1.mlp.c_fc.bias"))
    with optimizer.visit(optimizer.partition[2]):
        assert not parameter.isnan().any()
    assert is_placeholder(parameter)


def test_a_visit_that_fails_stores_its_block(kind, gpt2):
    optimizer = optimizer_of(gpt2(), kind)
    with contextlib.suppress(KeyboardInterrupt), optimizer.visit(optimizer.partition[2]):
        raise KeyboardInterrupt
    assert is_placeholder(optimizer.partition.model.get_parameter(NAME))


def test_a_forward_pass_that_fails_restores_the_parameters(kind, gpt2):
    optimizer = optimizer_of(gpt2(), kind)
    model = optimizer.partition.model
    before = dict(model.named_parameters())
    with pytest.raises(IndexError):
        model(input_ids=torch.full((1, 4), 1000))
    assert dict(model.named_parameters()).keys() == before.keys()
    assert all(p is before[name] for name, p in model.named_parameters())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_evaluation_between_and_inside_visits(mode, kind, gpt2, batch):
    """Weights that were fetched in inference mode may be saved for the step that follows."""
    optimizer, plain = optimizer_of(gpt2(), kind), plain_model(gpt2, kind[0])
    model = optimizer.partition.model
    with mode():
        assert torch.equal(model(**batch(0)).loss, plain.partition.model(**batch(0)).loss)
    with optimizer.visit(optimizer.partition[0]):
        with mode():
            loss = model(**batch(0)).loss
        again = model(**batch(0)).loss
        again.backward()
        assert torch.equal(loss, again)
        assert all(gradient.isfinite().all() for gradient in optimizer.gradients())


def test_the_state_dict_has_the_values_of_stored_weights(kind, gpt2):
    expected = {name: value.clone() for name, value in gpt2().to(kind[0].compute).state_dict().items()}
    optimizer = optimizer_of(gpt2(), kind)
    for block in (None, *optimizer.partition):
        with contextlib.nullcontext() if block is None else optimizer.visit(block):
            found = optimizer.partition.model.state_dict()
            assert found.keys() == expected.keys()
            # Halves are rounded up at a tie, bf16 to even.
            assert all(torch.allclose(found[name], value, rtol=2**-7, atol=0) for name, value in expected.items())
            assert all(torch.equal(found[n], v) for b in range(3) for n, v in optimizer.block_weights(b).items())


def test_loading_weights(kind, gpt2, batch):
    source = optimizer_of(gpt2(), kind)
    with source.visit(source.partition[1]):
        source.partition.model(**batch(0)).loss.backward()
        source.step()
    target = optimizer_of(gpt2(), kind)
    assert not torch.equal(*(each.partition.model(**batch(0)).loss for each in (source, target)))
    target.load_block_weights(1, source.block_weights(1))
    assert torch.equal(*(each.partition.model(**batch(0)).loss for each in (source, target)))
    with pytest.raises(CheckpointError, match=r"have no 'transformer\.h\.0\.ln_1\.weight' of shape \(32,\)"):
        target.load_block_weights(1, {})
    with (
        target.visit(target.partition[1]),
        pytest.raises(ConfigError, match="is active: leave its visit before loading"),
    ):
        target.load_block_weights(1, source.block_weights(1))


def test_a_closed_optimizer_leaves_an_ordinary_model(kind, gpt2, batch):
    model = gpt2()
    optimizer = optimizer_of(model, kind)
    with pytest.raises(ConfigError, match=r"are offloaded by another BlockOptimizer; close\(\) that one first"):
        optimizer_of(model, kind)
    optimizer.close()
    expected = gpt2().to(kind[0].compute).state_dict()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter, expected[name], rtol=2**-7, atol=0)
        assert not is_placeholder(parameter)
    assert not any("forward" in vars(module) for module in model.modules())
    optimizer_of(model, kind)
    assert model(**batch(0)).loss.isfinite()


# -- copies and accounting of memory ----------------------------------------------------------------------------------


def test_a_copy_without_memory_has_the_shapes_and_costs_of_the_model(kind, gpt2, batch):
    optimizer, plain = optimizer_of(gpt2(), kind), plain_model(gpt2, kind[0])
    costs = []
    for each in (optimizer, plain):
        counter = StepCounter(each.partition.model, batch(0))
        costs.append(counter.measure(each.partition[1].parameters))
    assert costs[0] == costs[1]
    replica = fake_copy(optimizer.partition.model).model
    assert {n: p.shape for n, p in replica.named_parameters()} == {
        n: p.shape for n, p in optimizer.partition.model.named_parameters()
    }
    assert all(p.is_contiguous() for p in replica.parameters())


def test_a_copy_has_no_stored_values(kind, gpt2):
    optimizer = optimizer_of(gpt2(), kind)
    replica = copy.deepcopy(optimizer.partition.model)
    for weight in (replica.get_parameter(NAME), replica.state_dict()[NAME]):
        with pytest.raises(StoredWeightError, match=r"this is a copy of a model .*copy model.state_dict\(\)"):
            weight.sum()


def test_bytes_of_the_weights(kind, gpt2):
    optimizer = optimizer_of(gpt2(), kind)
    model = optimizer.partition.model
    for block in optimizer.partition:
        with optimizer.visit(block):
            parts = {id(part): part for p in model.parameters() for part in backing_tensors(p)}
            there = sum(part.nbytes for part in parts.values())
            if isinstance(kind[1], OnHost):
                there -= sum(
                    part.nbytes for p in model.parameters() if is_placeholder(p) for part in backing_tensors(p)
                )
            assert optimizer.weight_bytes(block) == there


# -- streaming --------------------------------------------------------------------------------------------------------


class Fetches:
    """Records which units are copied to the device."""

    def __init__(self, optimizer: BlockOptimizer, monkeypatch: pytest.MonkeyPatch):
        self.store = optimizer._weights._store
        self.seen: list[int] = []
        self.most = 0
        fetch, materialize_unit = self.store._fetch, self.store.materialize_unit

        def recording(unit: int) -> dict[nn.Parameter, tuple[Tensor, ...]]:
            self.seen.append(unit)
            return fetch(unit)

        def counting(unit: int) -> dict[nn.Parameter, Tensor]:
            found = materialize_unit(unit)
            self.most = max(self.most, len(self.store._prefetched))
            return found

        monkeypatch.setattr(self.store, "_fetch", recording)
        monkeypatch.setattr(self.store, "materialize_unit", counting)


@pytest.fixture
def deep(gpt2) -> BlockOptimizer:
    """Six layers, each one a block, on the host."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    return BlockOptimizer(partition(model, num_blocks=6), torch.optim.SGD, lr=0.1, frozen=OnHost())


def test_each_layer_is_fetched_once_a_pass_one_ahead(deep: BlockOptimizer, monkeypatch: pytest.MonkeyPatch):
    fetches = Fetches(deep, monkeypatch)
    model = deep.partition.model
    with torch.no_grad():
        for _ in range(2):
            model(torch.ones(1, 8))
    assert fetches.seen == [0, 1, 2, 3, 4, 5] * 2
    assert fetches.most == 2
    assert fetches.store._prefetched.keys() == {5}


def test_a_backward_pass_that_recomputes_fetches_downward(deep: BlockOptimizer, monkeypatch: pytest.MonkeyPatch):
    """Layer 2 is active. Up: 0 1 3 4 5. Down: 5 is still there, then 4, 3, and 1, which the next pass uses."""
    fetches = Fetches(deep, monkeypatch)
    parts = deep.partition
    with deep.visit(parts[2]), checkpointed(parts):
        for _ in range(2):
            parts.model(torch.ones(1, 8)).sum().backward()
    assert fetches.seen == [0, 1, 3, 4, 5, 4, 3, 1, 0, 3, 4, 5, 4, 3, 1]
    assert fetches.most == 2


def test_gradients_are_right_without_checkpointing_when_the_layer_runs_again(deep: BlockOptimizer):
    """Another forward pass may materialize the weights again between forward and backward."""
    parts = deep.partition
    plain = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    plain.load_state_dict(parts.model.state_dict())
    plain(torch.ones(1, 8)).sum().backward()
    with deep.visit(parts[2]):
        loss = parts.model(torch.ones(1, 8)).sum()
        parts.model(torch.zeros(1, 8))
        loss.backward()
        weight = plain[2].weight
        assert isinstance(weight, nn.Parameter)
        assert weight.grad is not None
        assert torch.equal(deep.gradients()[0], weight.grad)


def test_storing_works_on_fake_tensors(kind):
    """Memory is predicted on fake tensors, so nothing may read a number."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        optimizer = optimizer_of(model, kind)
        for block in optimizer.partition:
            with optimizer.visit(block):
                model(torch.ones(2, 64, dtype=kind[0].compute)).sum().backward()
                optimizer.clip_grad_norm(1.0)
                optimizer.step()
                optimizer.zero_grad()


# -- blocks of rows ---------------------------------------------------------------------------------------------------


def test_rows_of_a_stored_matrix_are_trained_as_those_of_a_resident_one(gpt2, batch):
    """The whole matrix is materialized while a block that owns some of its rows is active."""
    runs = []
    for place in (OnDevice(), OnHost()):
        parts = partition(gpt2(), largest=2000)
        assert any(block.rows for block in parts)
        optimizer = BlockOptimizer(parts, torch.optim.AdamW, lr=1e-2, precision=BF16_EXACT, frozen=place)
        for step, block in enumerate(parts):
            with optimizer.visit(block):
                parts.model(**batch(step)).loss.backward()
                optimizer.step()
        runs.append([(optimizer.block_weights(b.index), optimizer.block_low_bits(b.index)) for b in parts])
    for pairs in zip(*runs, strict=True):
        for mine, theirs in zip(*pairs, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_loading_rows_leaves_the_others(gpt2):
    parts = partition(gpt2(), largest=600)
    optimizer = BlockOptimizer(parts, torch.optim.AdamW, precision=INT8)
    block = next(block for block in parts if block.rows)
    (name,) = block.rows
    before = optimizer.partition.model.state_dict()[name].clone()
    optimizer.load_block_weights(block.index, {name: torch.ones(block.part(name, before).shape)})
    after, rows = optimizer.partition.model.state_dict()[name], block.rows[name]
    assert (after[rows.start : rows.stop] == 1).all()
    assert torch.equal(after[rows.stop :], before[rows.stop :])
