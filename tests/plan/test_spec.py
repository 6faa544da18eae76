"""Parameter counts are those of transformers, to the parameter, for every preset."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from blocktrain.chain.balance import balanced
from blocktrain.errors import ConfigError
from blocktrain.plan.layout import cut_evenly
from blocktrain.plan.presets import MODEL_PRESETS, find_model
from blocktrain.plan.spec import ModelSpec, from_config, has_closed_form, read_config
from blocktrain.train.verify_plan import meta_model


def chain_parameters(spec: ModelSpec) -> list[int]:
    """Parameters of each layer of the chain: embedding, transformer layers, head."""
    return [spec.embedding_parameters, *[spec.layer_parameters] * spec.layers, spec.head_parameters]


@pytest.mark.parametrize(
    "name", ["g-1.6b", "l-1.5b", "gpt2", "llama-3-8b", "qwen2.5-0.5b", "qwen3-0.6b", "mixtral-8x7b"]
)
def test_parameters_are_those_of_the_model(name: str) -> None:
    spec = replace(find_model(name), layers=3)
    model = meta_model(spec)
    assert spec.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert max(spec.vocabulary * spec.width, spec.largest_of_layer) == max(
        parameter.numel() for parameter in model.parameters()
    )


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_a_config_json_gives_the_same_model_as_its_preset(name: str, tmp_path: Path) -> None:
    spec = find_model(name)
    config = AutoConfig.for_model(spec.architecture, **spec.settings(), bos_token_id=None, eos_token_id=None)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    again = read_config(tmp_path)
    assert chain_parameters(again) == chain_parameters(spec)
    assert again.parameters == spec.parameters


@pytest.mark.parametrize("name", ["g-1.6b", "llama-3.2-1b", "llama-3-8b", "qwen2.5-0.5b"])
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8, 16])
def test_blocks_are_cut_as_the_package_cuts_them(name: str, parts: int) -> None:
    spec = find_model(name)
    for chain in (range(spec.layers + 2), range(spec.layers // 2), range(spec.layers // 2, spec.layers + 2)):
        if parts <= len(chain):
            expected = balanced([chain_parameters(spec)[index] for index in chain], parts)
            assert [range(r.start + chain.start, r.stop + chain.start) for r in expected] == list(
                cut_evenly(spec, chain, parts)
            )


GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 300}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}, "no 'num_hidden_layers'"),
        ({"model_type": "bert"}, "'bert' cannot be planned"),
        ({}, "model_type null cannot be planned"),
        ({"model_type": "gpt2", "n_embd": "wide"}, "'n_embd' must be a whole number from 1 to 10,000,000, not 'wide'"),
        ({"model_type": []}, r"model_type \[\] cannot be planned"),
        ({**GPT2, "n_layer": 10**30}, "'n_layer' must be a whole number from 1 to 10,000, not"),
        ({**GPT2, "n_head": None}, "'n_head' must be a whole number from 1 to 10,000,000, not null"),
        ({**GPT2, "n_head": 5}, "64 values, which 5 heads cannot share evenly"),
        ({**GPT2, "tie_word_embeddings": "no"}, "'tie_word_embeddings' must be true or false, not 'no'"),
    ],
)
def test_a_config_that_lacks_something_says_what(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_config(values, "config.json")


def test_a_model_type_that_is_no_text_has_no_closed_form() -> None:
    """`blocktrain plan` ended in "unhashable type: 'list'"."""
    assert not has_closed_form({**GPT2, "model_type": ["gpt2"]})


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'llama-3-8b'"):
        find_model("llama-3-8")


@pytest.mark.parametrize("text", ["[" * 3000, "", "9" * 6000, "\xff"])
def test_a_config_that_is_not_json_is_one_message(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=f"model configuration '{path}' is not JSON"):
        read_config(path)
