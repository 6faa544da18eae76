"""The chain of every architecture of the matrix: covers every parameter, and only hidden states pass its cuts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from blocktrain.chain.boundary import BoundaryError, BoundaryRunner
from blocktrain.chain.discovery import find_chain
from blocktrain.errors import PartitionError

from ..tiny_configurations import tiny
from ..tiny_models import DEEPSEEK

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
LLAMA: dict[str, Any] = {**COMMON, "intermediate_size": 48, "num_key_value_heads": 2}
EXPERTS: dict[str, Any] = {**LLAMA, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
OPT: dict[str, Any] = {**COMMON, "ffn_dim": 48, "max_position_embeddings": 64}

# Architecture -> configuration class and settings, dotted path of the list of layers, modules of embedding and head.
MATRIX: dict[str, tuple[type[Any], dict[str, Any], str, list[str], list[str]]] = {
    "gpt2": (hf.GPT2Config, COMMON, "transformer.h", ["wte", "wpe", "drop"], ["ln_f"]),
    "gpt_neox": (hf.GPTNeoXConfig, LLAMA, "gpt_neox.layers", ["embed_in", "emb_dropout"], ["final_layer_norm"]),
    "opt": (
        hf.OPTConfig,
        OPT | {"word_embed_proj_dim": 32},
        "model.decoder.layers",
        ["embed_tokens", "embed_positions"],
        ["final_layer_norm"],
    ),
    "opt-350m": (
        hf.OPTConfig,
        OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False},
        "model.decoder.layers",
        ["embed_tokens", "embed_positions", "project_in"],
        ["project_out"],
    ),
    "bloom": (
        hf.BloomConfig,
        COMMON,
        "transformer.h",
        ["word_embeddings", "word_embeddings_layernorm"],
        ["ln_f"],
    ),
    "falcon": (hf.FalconConfig, COMMON, "transformer.h", ["word_embeddings"], ["ln_f"]),
    "phi": (hf.PhiConfig, LLAMA, "model.layers", ["embed_tokens", "embed_dropout"], ["final_layernorm"]),
    "llama": (hf.LlamaConfig, LLAMA, "model.layers", ["embed_tokens"], ["norm"]),
    "mistral": (hf.MistralConfig, LLAMA, "model.layers", ["embed_tokens"], ["norm"]),
    "qwen2": (hf.Qwen2Config, LLAMA, "model.layers", ["embed_tokens"], ["norm"]),
    "qwen3": (hf.Qwen3Config, LLAMA | {"head_dim": 8}, "model.layers", ["embed_tokens"], ["norm"]),
    "gemma2": (hf.Gemma2Config, LLAMA | {"head_dim": 8}, "model.layers", ["embed_tokens"], ["norm"]),
    "gemma3": (hf.Gemma3TextConfig, LLAMA | {"head_dim": 8}, "model.layers", ["embed_tokens"], ["norm"]),
    "stablelm": (hf.StableLmConfig, LLAMA, "model.layers", ["embed_tokens"], ["norm"]),
    "olmo2": (hf.Olmo2Config, LLAMA, "model.layers", ["embed_tokens"], ["norm"]),
    "mixtral": (hf.MixtralConfig, LLAMA | {"num_local_experts": 4}, "model.layers", ["embed_tokens"], ["norm"]),
    "qwen2_moe": (hf.Qwen2MoeConfig, EXPERTS | {"num_experts": 4}, "model.layers", ["embed_tokens"], ["norm"]),
    "deepseek_v3": (hf.DeepseekV3Config, EXPERTS | DEEPSEEK, "model.layers", ["embed_tokens"], ["norm"]),
}


def build(name: str, *, tied: bool) -> nn.Module:
    kind, settings, *_ = MATRIX[name]
    return hf.AutoModelForCausalLM.from_config(kind(**settings, tie_word_embeddings=tied)).eval()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", MATRIX)
def test_layers_and_owners(name: str, tied: bool):
    model = build(name, tied=tied)
    chain = find_chain(model)

    _, _, path, embedding, head = MATRIX[name]
    base = path.rpartition(".")[0]
    assert {layer.name: list(layer.modules) for layer in chain.layers} == {
        "embedding": [f"{base}.{module}" for module in embedding],
        **{f"{path}.{index}": [f"{path}.{index}"] for index in range(3)},
        "head": [*(f"{base}.{module}" for module in head), "lm_head"],
    }
    owned = [parameter for mine in chain.owned for parameter in mine.values()]
    assert len(owned) == len({id(parameter) for parameter in owned})
    assert {id(parameter) for parameter in owned} == {id(parameter) for parameter in model.parameters()}
    assert ("lm_head.weight" in chain.owned[-1]) is not tied
    assert (chain.owned[0][f"{base}.{embedding[0]}.weight"] is model.get_parameter("lm_head.weight")) is tied


@pytest.mark.parametrize("name", MATRIX)
def test_only_hidden_states_pass_a_cut(name: str):
    """Fed the hidden states of other tokens, the upper layers give the other tokens' logits."""
    model = build(name, tied=True)
    layers = [layer for layer in find_chain(model).layers if layer.name not in ("embedding", "head")]
    one, other = torch.randint(3, 96, (2, 2, 12))
    for layer in (layers[1], layers[-1]):
        (module,) = layer.modules.values()
        stored: list[Any] = []
        with torch.no_grad():
            with hooked(module, lambda _module, args, stored=stored: stored.append(args[0])):
                wanted = model(input_ids=one, use_cache=False).logits
            with hooked(module, lambda _module, args, stored=stored: (stored[0], *args[1:])):
                given = model(input_ids=other, use_cache=False).logits
        assert torch.equal(given, wanted), layer.name


def hooked(module: nn.Module, hook):
    return module.register_forward_pre_hook(hook)


def test_the_model_is_left_as_it_is():
    model = build("gpt2", tied=True).train()
    model.requires_grad_(False)
    random_state = torch.get_rng_state()
    find_chain(model)
    assert all(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_forward_that_another_library_has_replaced_inside_does_not_matter():
    """TRL replaces that of the model inside of a PEFT model. The replacement of the copy ran the original, whose layers
    nobody observed: "calls the 4 layers in the order []"."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build("gpt2", tied=False)
            self.config = self.inner.config
            original = self.inner.forward
            self.inner.forward = lambda fused=False, **inputs: original(**inputs)

        def forward(self, **inputs):
            return self.inner(**inputs)

    plain = [layer.name for layer in find_chain(build("gpt2", tied=False)).layers]
    assert [layer.name.removeprefix("inner.") for layer in find_chain(Outer()).layers] == plain


def test_a_seven_billion_model_needs_no_memory():
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(hf.LlamaConfig())
    chain = find_chain(model)
    assert sum(parameter.numel() for mine in chain.owned for parameter in mine.values()) == 6_738_415_616
    assert len(chain.layers) == 34


def test_a_bare_decoder_without_head_ends_with_its_norm():
    chain = find_chain(hf.AutoModel.from_config(hf.LlamaConfig(**LLAMA)))
    assert [list(layer.modules) for layer in chain.layers] == [
        ["embed_tokens"],
        *([f"layers.{index}"] for index in range(3)),
        ["norm"],
    ]


def test_experts_in_lists_as_long_as_the_model_are_not_taken_for_its_layers():
    """Three layers with three experts each: four lists of length three, one of them outermost."""
    model = build("gpt2", tied=True)
    for layer in model.get_submodule("transformer.h").children():
        layer.get_submodule("mlp").add_module("experts", nn.ModuleList(nn.Identity() for _ in range(3)))
    assert [layer.name for layer in find_chain(model).layers][1] == "transformer.h.0"


def test_an_encoder_with_decoder_is_one_chain_whose_decoder_reads_the_encoder():
    config = hf.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
    chain = find_chain(hf.T5ForConditionalGeneration(config))
    assert {layer.name: list(layer.modules) for layer in chain.layers} == {
        "embedding": ["encoder.embed_tokens", "encoder.dropout"],
        "encoder.block.0": ["encoder.block.0"],
        "encoder.block.1": [
            "encoder.block.1",
            "encoder.final_layer_norm",
            "decoder.embed_tokens",
            "decoder.dropout",
        ],
        "decoder.block.0": ["decoder.block.0"],
        "decoder.block.1": ["decoder.block.1"],
        "head": ["decoder.final_layer_norm", "lm_head"],
    }
    assert list(chain.owned[0]) == ["encoder.embed_tokens.weight"]
    assert {(2, 3), (2, 4)} <= chain.reads


def test_what_reads_images_stays_as_it_is_and_is_named(caplog: pytest.LogCaptureFixture):
    """AutoModelForCausalLM gives Gemma 3 with its vision tower: its layers were not found."""
    chain = find_chain(hf.AutoModelForCausalLM.from_config(tiny("gemma3")))
    assert [layer.name for layer in chain.layers][:2] == ["embedding", "model.language_model.layers.0"]
    assert "does not use model.vision_tower, model.multi_modal_projector of Gemma3ForConditional" in caplog.text
    towers = ("model.vision_tower.", "model.multi_modal_projector.")
    assert chain.untrained == {name for name, _ in chain.model.named_parameters() if name.startswith(towers)}


def test_a_model_whose_code_asks_for_numbers_runs_itself_and_stays_as_it_is():
    """JetMoE asks how many tokens each expert got, which a copy without memory cannot say."""
    model = hf.AutoModelForCausalLM.from_config(tiny("jetmoe")).train()
    model.model.norm.requires_grad_(False)
    random_state = torch.get_rng_state()
    assert len(find_chain(model).layers) == 5
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["model.norm.weight"]
    assert all(module.training and not module._forward_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_parameter_beside_the_layers_belongs_to_the_embedding():
    """Zaya's container of layers has scales of its own: they were in no layer."""
    chain = find_chain(hf.AutoModelForCausalLM.from_config(tiny("zaya")))
    assert {"model.input_hidden_states_scale", "model.input_hidden_states_bias"} <= chain.owned[0].keys()


class Rewired(hf.LlamaForCausalLM):
    """A decoder whose layers can be called otherwise than as a chain."""

    route: Any = None  # from (layers, embeddings) to hidden states

    def forward(self, input_ids, **_):  # pyright: ignore[reportIncompatibleMethodOverride] - called by name only
        return self.lm_head(self.model.norm(type(self).route(self.model.layers, self.model.embed_tokens(input_ids))))


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x, extra=None):
        return self.linear(x if extra is None else x + extra)


def backwards(layers, x):
    for layer in reversed(layers):
        x = layer(x)
    return x


def scaled_between(layers, x):
    for layer in layers:
        x = layer(x) * 2
    return x


def skipping(layers, x):
    first = layers[0](x)
    return layers[2](layers[1](first), extra=first)


@pytest.mark.parametrize(
    ("route", "message"),
    [
        (backwards, r"in the order \[2, 1, 0\]"),
        (lambda layers, x: layers[0](x), r"in the order \[0\]"),
        (
            lambda layers, x: x.no_such_method(),
            r"over 8 tokens failed \('FakeTensor' object has no attribute 'no_such_method'\)",
        ),
    ],
    ids=["backwards", "one layer only", "fails"],
)
def test_what_is_no_chain_is_refused_and_says_why(monkeypatch: pytest.MonkeyPatch, route, message: str):
    with pytest.raises(PartitionError, match=message):
        find_chain(rewired(monkeypatch, route))


def rewired(monkeypatch: pytest.MonkeyPatch, route) -> nn.Module:
    monkeypatch.setattr(Rewired, "route", staticmethod(route))
    model = Rewired(hf.LlamaConfig(**LLAMA))
    model.model.layers = nn.ModuleList(Mix() for _ in range(3))
    return model


@pytest.mark.parametrize(
    ("route", "reads", "refused_at"),
    [
        (scaled_between, set(), []),
        (skipping, {(1, 3)}, [2, 3]),
        (lambda layers, x: layers[2](layers[1](layers[0](x), extra=x), extra=x), {(0, 2), (0, 3)}, []),
    ],
    ids=["scaled between", "skip connection", "embeddings read again"],
)
def test_what_a_layer_reads_beside_its_hidden_states(monkeypatch: pytest.MonkeyPatch, route, reads, refused_at):
    """What the embedding put out is computed again in a run from a boundary; what another layer did is missing."""
    chain = find_chain(rewired(monkeypatch, route))
    assert chain.reads == reads
    batch, runner = {"input_ids": torch.randint(0, 96, (2, 5))}, BoundaryRunner(chain)
    refused = []
    for boundary in (1, 2, 3, 4):
        try:
            runner.check(batch, boundary)
        except BoundaryError as error:
            assert "'model.layers.2' of Rewired reads what 'model.layers.0' puts out" in str(error)  # noqa: PT017
            refused.append(boundary)
    assert refused == refused_at
    if (0, 3) in reads:
        with pytest.raises(BoundaryError, match=r"'model\.layers\.2' of Rewired reads what 'embedding' puts out"):
            runner.require_own_inputs(3)


def test_a_module_with_parameters_that_never_runs_is_named():
    model = build("llama", tied=False)
    model.add_module("value_head", nn.Linear(32, 1))
    with pytest.raises(PartitionError, match=r"'value_head' of LlamaForCausalLM has parameters but does not run"):
        find_chain(model)
