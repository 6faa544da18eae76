"""Pretrained weights are loaded whole.

A missing tensor used to be drawn at random, and a surplus one dropped, with exit code 0 and no word.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

from blocktrain.chain.model_loading import ModelConfig, load_model
from blocktrain.errors import ConfigError

SIZES: dict[str, Any] = {
    "n_embd": 16,
    "n_head": 2,
    "vocab_size": 64,
    "n_positions": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
Change = Callable[[dict[str, Tensor]], None]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A GPT-2 of two layers, as `save_pretrained` writes it."""
    torch.manual_seed(0)
    hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=2, **SIZES)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(folder: Path, change: Change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def edit_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def without_layer_1(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if ".h.1." in name]:
        del tensors[name]


def another_shape(tensors: dict[str, Tensor]) -> None:
    tensors["transformer.h.0.mlp.c_fc.weight"] = torch.zeros(16, 8)


def test_weights_are_those_of_the_folder(saved: Path) -> None:
    model = load_model(ModelConfig(path=str(saved)))
    expected = load_file(saved / "model.safetensors")
    parameters = dict(model.named_parameters())
    assert expected.keys() == parameters.keys()
    assert all(torch.equal(parameters[name], value) for name, value in expected.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_saved_in_16_bits_may_stay_so(saved: Path, dtype: torch.dtype) -> None:
    """All weights were loaded in fp32: twice the memory of a checkpoint in bf16."""
    edit(saved, lambda tensors: tensors.update({name: value.to(dtype) for name, value in tensors.items()}))
    model = load_model(ModelConfig(path=str(saved)), keep_16_bits=True)
    whole = load_model(ModelConfig(path=str(saved)))
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert {parameter.dtype for parameter in whole.parameters()} == {torch.float32}
    for mine, theirs in zip(model.state_dict().values(), whole.state_dict().values(), strict=True):
        assert torch.equal(mine.float(), theirs)


def test_weights_of_which_16_bits_would_lose_some_are_loaded_in_fp32(saved: Path) -> None:
    edit(saved, lambda tensors: tensors.update({"transformer.wte.weight": tensors["transformer.wte.weight"].half()}))
    model = load_model(ModelConfig(path=str(saved)), keep_16_bits=True)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_missing_weights_are_an_error(saved: Path) -> None:
    edit(saved, without_layer_1)
    with pytest.raises(
        ConfigError, match=r"lack 12 tensors of the model \('transformer\.h\.1\.attn\.c_attn\.bias', .*random"
    ):
        load_model(ModelConfig(path=str(saved)))


def test_more_layers_than_were_saved_are_an_error(saved: Path) -> None:
    with pytest.raises(ConfigError, match=r"lack 24 tensors of the model \('transformer\.h\.2\."):
        load_model(ModelConfig(path=str(saved), config={"n_layer": 4}))


def test_fewer_layers_than_were_saved_are_an_error_unless_the_others_are_ignored_by_name(saved: Path) -> None:
    one_layer = {"n_layer": 1}
    with pytest.raises(ConfigError, match=r"1[12] tensors .* lost; .*ignore_weights = \['transformer\.h\.1\.\*'\]"):
        load_model(ModelConfig(path=str(saved), config=one_layer))
    with pytest.raises(ConfigError, match=r"1[12] tensors that the model has no place for"):
        load_model(ModelConfig(path=str(saved), config=one_layer, ignore_weights=("transformer.h.7.*",)))
    model = load_model(ModelConfig(path=str(saved), config=one_layer, ignore_weights=("transformer.h.1.*",)))
    weights = load_file(saved / "model.safetensors")
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())


def test_another_shape_is_an_error(saved: Path) -> None:
    edit(saved, another_shape)
    with pytest.raises(
        ConfigError, match=r"'transformer\.h\.0\.mlp\.c_fc\.weight' is \[16, 8\] there and \[16, 64\] in the"
    ):
        load_model(ModelConfig(path=str(saved)))


def test_a_new_head_is_logged(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_model(ModelConfig(path=str(saved)), vocab_size=64, classes=("a", "b"), pad_token=0)
    assert "classification head is new and begins at random weights: 'score.weight'" in caplog.text


def test_a_classifier_s_own_layers_are_no_head(saved: Path) -> None:
    edit(saved, without_layer_1)
    with pytest.raises(ConfigError, match=r"lack 12 tensors of the model \('transformer\.h\.1\."):
        load_model(ModelConfig(path=str(saved)), vocab_size=64, classes=("a", "b"), pad_token=0)


def test_a_classifier_takes_the_place_of_the_head_of_another_task(tmp_path: Path) -> None:
    """BERT trained on masked tokens has a head for them, and no pooler."""
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    hf.BertForMaskedLM(hf.BertConfig(vocab_size=64, **sizes)).save_pretrained(tmp_path)
    load_model(ModelConfig(path=str(tmp_path)), vocab_size=64, classes=("a", "b"), pad_token=0)
    config = ModelConfig(path=str(tmp_path), config={"num_hidden_layers": 1})
    with pytest.raises(ConfigError, match=r"16 tensors that the model has no place for \('bert\.encoder\.layer\.1\."):
        load_model(config, vocab_size=64, classes=("a", "b"), pad_token=0)


def test_quantized_weights_are_refused(saved: Path) -> None:
    edit_config(saved, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(ConfigError, match=r"are quantized \(fp8\), and quantized weights cannot be trained"):
        load_model(ModelConfig(path=str(saved)))


@pytest.mark.parametrize("weights", ["pretrained", "random"])
def test_an_unknown_key_of_a_saved_configuration_is_an_error(saved: Path, weights: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'model\.config\.n_layers' .*did you mean 'n_layer'"):
        load_model(ModelConfig(path=str(saved), weights=weights, config={"n_layers": 1}))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("content", ["null", "[]", "{", '{"model_type": "no such type"}', '{"model_type": 3}', "{}"])
def test_a_damaged_configuration_is_an_error(saved: Path, content: str) -> None:
    (saved / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"model\.path '.*' cannot be loaded: .+"):
        load_model(ModelConfig(path=str(saved)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_embd": 0}, r"makes no 'gpt2': it cannot have n_embd = 0 \(default 768\)$"),
        ({"n_embd": "x"}, r"makes no 'gpt2': it cannot have n_embd = 'x' \(default 768\)$"),
        ({"activation_function": "zz"}, r"it cannot have activation_function = 'zz' \(default 'gelu_new'\)$"),
        ({"n_layer": -1}, r"model\.config\.n_layer = -1, which cannot be \(the default is 12\)"),
    ],
)
def test_a_setting_that_makes_no_model_is_named(settings: dict[str, object], message: str) -> None:
    """Python's own words were shown, such as "ZeroDivisionError"; a model of -1 layers was trained."""
    with pytest.raises(ConfigError, match=message):
        load_model(ModelConfig(architecture="gpt2", config={**SIZES, **settings}))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "attn_pdrop = true", r"it cannot have attn_pdrop = true \(default 0\.1\)$"),
        ("config.json", "attn_pdrop = NaN", r"config\.json has attn_pdrop = nan, which cannot be"),
        ("config.json", "n_head = -1", r"config\.json has n_head = -1, which cannot be \(the default is 12\)"),
        (
            "config.json",
            f"n_layer = {10**30}",
            r"config\.json has n_layer = 10+; a model may have at most 10,000 layers",
        ),
        ("config.json", 'model_type = "\\ud800"', r"model\.path '.*' cannot be loaded: .+"),
        ("config.json", "n_inner = NaN", r"it cannot have n_inner = nan \(default null\)$"),
        ("config.json", "summary_activation = 0", r"its 'summary_activation' is of a wrong type$"),
        ("generation_config.json", "[1]", r"its generation_config\.json is a list, not an object of settings"),
        ("config.json", "3", r"its config\.json is a number, not an object of settings"),
    ],
)
def test_a_wrong_value_in_a_file_of_the_model_is_named(saved: Path, name: str, content: str, message: str) -> None:
    """Python's own words were shown, such as "'list' object is not a mapping"; nan failed in the first step."""
    if " = " in content:
        key, value = content.split(" = ")
        values = json.loads((saved / name).read_text())
        content = json.dumps({**values, key: json.loads(value)})
    (saved / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_model(ModelConfig(path=str(saved)))


@pytest.mark.parametrize(
    "settings",
    [{"n_layer": "two"}, {"n_embd": -1}, {"n_head": 0}, {"activation_function": "no such"}, {"n_layer": None}],
)
def test_settings_of_another_type_are_an_error(saved: Path, settings: dict[str, object]) -> None:
    for config in (
        ModelConfig(architecture="gpt2", config={**SIZES, **settings}),
        ModelConfig(path=str(saved), config=settings),
    ):
        with pytest.raises(ConfigError):
            load_model(config)


def test_a_model_larger_than_memory_is_refused_before_it_is_built() -> None:
    with pytest.raises(ConfigError, match=r"'gpt2' takes .* TiB in fp32, and .* of memory are free"):
        load_model(ModelConfig(architecture="gpt2", config={"n_embd": 2**20, "n_head": 2, "n_layer": 4}))


def test_a_larger_tokenizer_is_an_error_that_names_the_key_and_with_it_new_embeddings(
    saved: Path, caplog: pytest.LogCaptureFixture
):
    with pytest.raises(ConfigError, match=r"vocabulary \(64\) is smaller .*\(70\); set model.resize_vocabulary = true"):
        load_model(ModelConfig(path=str(saved)), vocab_size=70)
    model: Any = load_model(ModelConfig(path=str(saved), resize_vocabulary=True), vocab_size=70)
    assert "the model had 64 embeddings; it now has 70" in caplog.text
    assert model.config.vocab_size == 70
    assert model.lm_head.weight is model.transformer.wte.weight
    own = hf.GPT2LMHeadModel.from_pretrained(saved).transformer.wte.weight
    assert torch.equal(model.transformer.wte.weight[:64], own)
    assert model(input_ids=torch.tensor([[69]])).logits.shape == (1, 1, 70)


@pytest.mark.parametrize("where", ["path", "architecture"])
def test_the_attention_is_the_one_that_is_named(saved: Path, where: str):
    named: dict[str, Any] = (
        {"path": str(saved)} if where == "path" else {"architecture": "gpt2", "config": {**SIZES, "n_layer": 2}}
    )
    for attention in ("eager", "sdpa"):
        model: Any = load_model(ModelConfig(**named, attention=attention))
        assert model.config._attn_implementation == attention
    for missing in ("flash_attention_2", "no_such_attention"):
        with pytest.raises(ConfigError, match=r"(cannot be loaded|makes no 'gpt2').*(?i:flash|no_such_attention)"):
            load_model(ModelConfig(**named, attention=missing))


def test_a_gguf_file_is_refused_with_the_way_out(tmp_path: Path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match=r"is a gguf file.*gguf_file='model.gguf'"):
        load_model(ModelConfig(path=str(tmp_path / "model.gguf")))
