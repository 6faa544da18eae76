"""Models from a configuration: a Hugging Face architecture built from its own settings, a folder or hub name, or a
CIFAR ResNet. Remote code is never run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from blocktrain.errors import ConfigError, nearest
from blocktrain.model.resnet import resnet


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model is trained.

    architecture: a `model_type` of transformers ("gpt2", "llama", "qwen3", ...) built with `config`, or "resnet20".
    path: instead, a folder or hub name that `from_pretrained` takes.
    weights: "pretrained" loads the weights found at `path`; "random" only its configuration.
    config: settings of the architecture's configuration class (`n_layer = 6`, ...); unknown names are errors.
    """

    architecture: str | None = None
    path: str | None = None
    weights: Literal["pretrained", "random"] = "pretrained"
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.architecture is None) == (self.path is None):
            raise ConfigError("give either architecture = '...' or path = '...'")


def load_model(
    config: ModelConfig,
    *,
    vocab_size: int | None = None,
    row_tokens: int | None = None,
    num_classes: int | None = None,
) -> nn.Module:
    """The model on the CPU in fp32; random weights come from torch's global generator.

    vocab_size: of the tokenizer; the default of an architecture built here, and checked against the model's.
    row_tokens: sequence length, checked against the model's positions.
    num_classes: of the images; the default of a ResNet's outputs, and checked against them.
    """
    match = re.fullmatch(r"resnet-?(\d+)", config.architecture or "")
    if match:
        return _resnet(int(match.group(1)), config.config, num_classes)
    if num_classes is not None:
        raise ConfigError(f"[images] trains 'resnet8' to 'resnet101', not '{config.architecture or config.path}'")
    model = _hugging_face(config, vocab_size)
    _check_fit(model, vocab_size, row_tokens)
    return model


def _resnet(depth: int, settings: dict[str, Any], num_classes: int | None) -> nn.Module:
    if num_classes is None:
        raise ConfigError(f"'resnet{depth}' classifies images; give [images] instead of [text]")
    known = ("num_classes", "shortcut")
    for key in settings:
        if key not in known:
            raise ConfigError(f"unknown key 'model.config.{key}' for 'resnet{depth}'; {nearest(key, known)}")
    outputs = settings.get("num_classes", num_classes)
    if not isinstance(outputs, int) or outputs < num_classes:
        raise ConfigError(f"model.config.num_classes = {outputs!r}, but the images have {num_classes} classes")
    return resnet(depth, outputs, shortcut=settings.get("shortcut"))


def _hugging_face(config: ModelConfig, vocab_size: int | None) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    if config.architecture is not None:
        settings = _architecture_settings(config.architecture, config.config, vocab_size)
        return AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa").float()
    path = str(config.path)
    if "/" not in path and not Path(path).is_dir():
        raise ConfigError(f"model.path '{path}' is neither a folder nor a hub name of the form 'owner/name'")
    try:
        if config.weights == "random":
            settings = AutoConfig.from_pretrained(path, trust_remote_code=False, **config.config)
            return AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa").float()
        return AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, use_safetensors=True, trust_remote_code=False, **config.config
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path '{path}' cannot be loaded: {str(error).splitlines()[0]}") from error


def _architecture_settings(name: str, given: dict[str, Any], vocab_size: int | None) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if name not in CONFIG_MAPPING_NAMES:
        raise ConfigError(f"model.architecture '{name}' is unknown; {_near_architecture(name, CONFIG_MAPPING_NAMES)}")
    default = AutoConfig.for_model(name)
    known = {*default.to_dict(), *default.attribute_map}
    for key in given:
        if key not in known:
            raise ConfigError(f"unknown key 'model.config.{key}' for architecture '{name}'; {nearest(key, known)}")
    settings = dict(given)
    if vocab_size is not None and "vocab_size" in known:
        settings.setdefault("vocab_size", vocab_size)
    # Special tokens of the architecture's default vocabulary lie outside a small one; they play no part in training.
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = getattr(default, key, None)
        if isinstance(token, int) and key not in settings and token >= settings.get("vocab_size", token + 1):
            settings[key] = None
    return AutoConfig.for_model(name, **settings)


def _near_architecture(name: str, known: Any) -> str:
    hint = nearest(name, known)
    return (
        hint if hint.startswith("did") else "use a model_type of transformers ('gpt2', 'llama', 'qwen3') or 'resnet20'"
    )


def _check_fit(model: nn.Module, vocab_size: int | None, row_tokens: int | None) -> None:
    settings: Any = model.config
    vocabulary = getattr(settings, "vocab_size", None)
    if vocab_size is not None and vocabulary is not None and vocabulary < vocab_size:
        raise ConfigError(
            f"the model's vocabulary ({vocabulary}) is smaller than the tokenizer's ({vocab_size}); "
            f"set model.config.vocab_size = {vocab_size} or choose the model's own tokenizer"
        )
    positions = getattr(settings, "max_position_embeddings", None)
    if row_tokens is not None and isinstance(positions, int) and row_tokens > positions:
        raise ConfigError(
            f"text.row_tokens = {row_tokens} is longer than the model's {positions} positions; "
            f"set text.row_tokens = {positions} or less"
        )
