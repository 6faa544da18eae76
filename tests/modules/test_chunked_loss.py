"""A loss in chunks of tokens equals the model's own, and its logits never exist at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from blocktrain.chain.resnet import resnet
from blocktrain.errors import ConfigError
from blocktrain.memory.flops import StepCounter
from blocktrain.memory.tracker import MemoryTracker
from blocktrain.modules.chunked_loss import DeferredLogits, check_chunked, chunked_loss, whole_logits

B, T, V = 3, 16, 64
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": T,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {},
    "gemma2": {"head_dim": 8},  # a soft cap
    "cohere": {"logit_scale": 0.5},
    "granite": {"logits_scaling": 4.0},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "phi": {},  # the head has a bias
    "qwen2_moe": EXPERTS | {"output_router_logits": True},  # the loss has another part
}


def causal_lm(name: str) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES | MODELS[name])).eval()


def batch() -> dict[str, Any]:
    tokens = torch.randint(1, V, (B, T))
    labels = tokens.clone()
    labels[0, 3:9] = -100  # a whole chunk of 7 among them, but for the shift
    return {"input_ids": tokens, "labels": labels, "use_cache": False}


def step(model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    model.zero_grad()
    output = model(**inputs)
    (output.loss / 3).backward()  # as one of three micro-batches
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("items", [None, 30])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_the_models_own(name: str, items: int | None):
    """Within 1e-6 of the loss, and 1e-5 of the largest gradient of a weight (fp32)."""
    model, inputs = causal_lm(name), batch()
    if items is not None:
        inputs["num_items_in_batch"] = torch.tensor(items)
    expected, without = step(model, inputs)
    for chunk in (7, 16, 1000):
        with chunked_loss(model, chunk):
            found, gradients = step(model, inputs)
        assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
        assert gradients.keys() == without.keys()
        largest = max(float(gradient.abs().max()) for gradient in without.values())
        for key, gradient in gradients.items():
            torch.testing.assert_close(gradient, without[key], rtol=1e-5, atol=1e-5 * largest)
        torch.testing.assert_close(whole_logits(found.logits), expected.logits)


def test_only_parameters_that_require_a_gradient_get_one():
    model, inputs = causal_lm("phi"), batch()
    head = model.get_output_embeddings()
    model.requires_grad_(False)
    for trained in (
        [head.weight],
        [model.model.layers[1].mlp.fc1.weight],
        [head.bias, model.model.layers[1].mlp.fc1.bias],
    ):
        for parameter in trained:
            parameter.requires_grad_(True)
        _, expected = step(model, inputs)
        with chunked_loss(model, 7):
            _, found = step(model, inputs)
        assert found.keys() == expected.keys()
        assert len(found) == len(trained)
        for key in found:
            torch.testing.assert_close(found[key], expected[key])
        model.requires_grad_(False)


def test_without_gradients_only_the_loss_is_computed():
    model, inputs = causal_lm("llama"), batch()
    with torch.no_grad(), chunked_loss(model, 5):
        loss = model(**inputs).loss
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(model(**inputs).loss.item(), rel=1e-6)


def test_bf16_sums_over_chunks_in_fp32():
    """Each chunk's share of the head's gradient is rounded to bf16, their sum once: errors do not add up."""
    model, inputs = causal_lm("llama"), batch()
    exact = step(model, inputs)[1]["lm_head.weight"]
    model.to(torch.bfloat16)

    def error(gradient: Tensor) -> float:
        return float((gradient.float() - exact).norm() / exact.norm())

    own = error(step(model, inputs)[1]["lm_head.weight"])
    with chunked_loss(model, 1):
        chunked = step(model, inputs)[1]["lm_head.weight"]
    assert chunked.dtype == torch.bfloat16
    assert error(chunked) < 1.4 * own


class Largest(TorchDispatchMode):
    """The most rows of any tensor over the vocabulary, except the head's own weight."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.dim() > 1 and tensor.shape[-1] == V:
                self.rows = max(self.rows, tensor.numel() // V)
        return result


@pytest.mark.parametrize(("chunk", "rows"), [(7, 7), (None, B * T)])
def test_logits_never_exist_at_once(chunk: int | None, rows: int):
    model, inputs = causal_lm("llama"), batch()
    model.get_output_embeddings().requires_grad_(False)
    with Largest() as largest:
        if chunk is None:
            step(model, inputs)
        else:
            with chunked_loss(model, chunk):
                step(model, inputs)
    assert max(largest.rows, 16) == max(rows, 16)  # the head's weight, transposed, is (d, V) = (16, 64)


def test_a_step_costs_the_same_flops_and_keeps_no_logits():
    model, inputs = causal_lm("llama"), batch()
    names = [name for name, _ in model.named_parameters() if not name.startswith("lm_head")]
    plain = StepCounter(model, inputs).measure(names)
    with chunked_loss(model, 4):
        chunked = StepCounter(model, inputs).measure(names)
    assert chunked.flops == plain.flops
    gradient, log_probabilities = B * T * 16 * 4, B * T * V * 4
    assert plain.saved_bytes - chunked.saved_bytes >= log_probabilities - gradient


def test_the_gradient_of_a_chunk_is_freed_before_the_next_one_is_made():
    """A trained head of (V, d) takes its weight, the sum and one share of it. Two shares at once were 1 GiB too many
    for Llama-3-8B."""
    head, hidden = nn.Linear(256, 512, bias=False), torch.randn(12, 256, requires_grad=True)
    logits = DeferredLogits(hidden, head, tuple(head.parameters()), 4)
    with MemoryTracker() as tracker:
        tracker.label("frozen", head.parameters())
        logits.cross_entropy(torch.zeros(12, dtype=torch.long))
    assert 3 <= tracker.peak().bytes / head.weight.nbytes < 3.2


class Centred(nn.Module):
    """Does something with its logits that no chunk can do alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, 8), nn.Linear(8, V)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.embed(input_ids))
        return F.cross_entropy((logits - logits.mean(1, keepdim=True)).view(-1, V), labels.view(-1))


def test_what_cannot_be_chunked_is_refused_with_a_reason():
    tokens = torch.zeros(1, 8, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"Centred cannot be computed in chunks: 'mean' needs logits.*loss_chunk"):
        check_chunked(Centred(), {"input_ids": tokens, "labels": tokens})
    with pytest.raises(ConfigError, match="ResNet has no output layer over a vocabulary"), chunked_loss(resnet(8), 4):
        pass
    with pytest.raises(ConfigError, match="0 tokens at a time"), chunked_loss(Centred(), 0):
        pass
    with chunked_loss(causal_lm("llama"), 4):
        check = causal_lm("llama")
    check_chunked(check, batch())
    with chunked_loss(check, 4):
        logits = check(**batch()).logits
        for wrong in (lambda: logits[..., :3], lambda: logits.view(V, -1), lambda: torch.softmax(logits, -1)):
            with pytest.raises(ConfigError, match="never has in one piece"):
                wrong()
        with pytest.raises(ConfigError, match="label_smoothing"):
            F.cross_entropy(logits.view(-1, V), batch()["labels"].view(-1), label_smoothing=0.1)
    assert "forward" not in vars(check.get_output_embeddings())
