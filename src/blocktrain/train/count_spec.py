"""A plan's model for any causal architecture of transformers: counted on the meta device, from its configuration.

The planner knows closed forms for two families (`plan/spec.py`). Another architecture is built without memory: its
parameters, and how they are divided into layers, are counted exactly. Its layers are then planned as Llama layers of
the same width and heads, whose MLP is as wide as gives the counted FLOPs of a forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig

from blocktrain.chain.model_loading import ModelConfig, load_model
from blocktrain.chain.partition import partition_by_config
from blocktrain.chain.partition_config import PartitionConfig
from blocktrain.errors import BlocktrainError, ConfigError, first_line
from blocktrain.memory.fake import fake_copy
from blocktrain.memory.flops import StepCounter
from blocktrain.plan.spec import Counted, ModelSpec, from_config, has_closed_form
from blocktrain.runtime import library_errors, may_be_on_hub

TOKENS = 16  # of the row whose FLOPs are counted
NOT_SETTINGS = ("model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "auto_map")


def hub_config(name: str) -> dict[str, Any]:
    """The configuration of a model on the hub, downloaded if it is not in the cache; raises `ConfigError`."""
    if not may_be_on_hub(name):
        raise ConfigError(f"model '{name}' is no preset, no config.json, no folder with one, and no name on the hub")
    with library_errors(f"the configuration of model '{name}' cannot be loaded"):
        return AutoConfig.from_pretrained(name, trust_remote_code=False).to_dict()


def spec_of(values: Mapping[str, Any], name: str) -> ModelSpec:
    """The model that a `config.json` describes: its closed form where the planner has one, else counted."""
    return from_config(values, name) if has_closed_form(values) else count_spec(values, name)


def count_spec(values: Mapping[str, Any], name: str) -> ModelSpec:
    """The model that a `config.json` describes, counted; raises `ConfigError` where it cannot be built or cut into
    layers."""
    kind = str(values.get("model_type"))
    settings = {key: value for key, value in values.items() if key not in NOT_SETTINGS and value is not None}
    try:
        with library_errors(f"{name}: model_type '{kind}' cannot be built"), torch.device("meta"):
            known = set(AutoConfig.for_model(kind).to_dict())
            settings = {key: value for key, value in settings.items() if key in known}
            model = fake_copy(load_model(ModelConfig(architecture=kind, config=settings))).model
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
        batch = {"input_ids": ids, "labels": ids}
        chain = partition_by_config(model, PartitionConfig(count=1), batch=batch).chain
        flops = StepCounter(model, batch).forward()
    except BlocktrainError as error:
        raise ConfigError(f"{name}: model_type '{kind}' cannot be planned: {first_line(error)}") from None
    text: Any = model.config.get_text_config()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    width, vocabulary, layers = text.hidden_size, text.vocab_size, len(chain.layers) - 2
    if layers < 1:
        raise ConfigError(f"{name}: model_type '{kind}' cannot be planned: it has no layers between embedding and head")
    heads = getattr(text, "num_attention_heads", None) or 1
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_width = getattr(text, "head_dim", None) or width // heads
    sizes = [sum(parameter.numel() for parameter in owned.values()) for owned in chain.owned]
    inside = [parameter for owned in chain.owned[1:-1] for parameter in owned.values()]
    each = sum(sizes[1:-1]) // layers
    multiplied = (flops / (2 * TOKENS) - vocabulary * width) / layers  # scalars of matrices that a token meets
    attention = 2 * width * head_width * (heads + kv_heads) + 2 * TOKENS * heads * head_width  # matrices, and scores
    return ModelSpec(
        name=name,
        architecture=kind,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads if heads % kv_heads == 0 else heads,
        head_width=head_width,
        inner=max(1, round((multiplied - attention) / (3 * width))),
        vocabulary=vocabulary,
        positions=getattr(text, "max_position_embeddings", None) or 2**31,
        tied=sum(parameter.numel() for parameter in chain.owned[-1].values()) < vocabulary * width,
        counted=Counted(
            embedding=sizes[0] + sum(sizes[1:-1]) - layers * each,
            layer=each,
            head=sizes[-1],
            matrices_of_layer=sum(parameter.numel() for parameter in inside if parameter.dim() > 1) // layers,
            largest_of_layer=max(parameter.numel() for parameter in inside),
            tables=tuple({key: tuple(item.shape) for key, item in owned.items()} for owned in chain.owned),
            settings=settings,
        ),
    )
