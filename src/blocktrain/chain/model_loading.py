"""Loading the model that a configuration names: a Hugging Face architecture with settings of its own, a folder or hub
name, or a CIFAR ResNet. Remote code is never run."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from blocktrain.chain.pretrained import load_pretrained, lossless_dtype
from blocktrain.chain.resnet import resnet
from blocktrain.errors import ConfigError, nearest
from blocktrain.parse import json_kind, parse_json, shown
from blocktrain.runtime import available_memory_bytes, is_hub_silent, library_errors, may_be_on_hub
from blocktrain.units import format_bytes

log = logging.getLogger(__name__)

MOST_LAYERS = 10**4


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model is trained.

    architecture: a `model_type` of transformers ("gpt2", "llama", "qwen3", ...) built with `config`, or "resnet20".
    path: instead of `architecture`, a folder or hub name that `from_pretrained` takes.
    weights: "pretrained" loads the weights at `path`; "random" takes only its configuration.
    ignore_weights: patterns of tensors at `path` that are left out, such as "visual.*"; by default a tensor that the
        model has no place for is an error.
    attention: the attention implementation, as transformers names it ("eager", "sdpa", "flash_attention_2", ...);
        by default transformers chooses.
    resize_vocabulary: give a model at `path` as many embeddings as the tokenizer has tokens, where it has fewer; new
        ones are drawn. Without it a larger tokenizer is an error.
    config: settings of the architecture's configuration class (`n_layer = 6`, ...); an unknown name is an error.
    zero_residuals: each layer begins as the identity, because the last matrix of each residual branch is zero. Until a
        visit has trained some of it, a layer is then left out of training steps, which changes nothing but their cost.
    grown_layers: the weights of such a layer when a visit first reaches it: its initial ones ("drawn"), or those of a
        layer that an earlier visit has reached, if there is one ("copied"); the last matrices are zero in either case.
    """

    architecture: str | None = None
    path: str | None = None
    weights: Literal["pretrained", "random"] = "pretrained"
    ignore_weights: tuple[str, ...] = ()
    attention: str | None = None
    resize_vocabulary: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    zero_residuals: bool = False
    grown_layers: Literal["drawn", "copied"] = "drawn"

    def __post_init__(self) -> None:
        if self.architecture is None and self.path is None:
            raise ConfigError("give either architecture = '...' or path = '...'")
        if self.architecture is not None and self.path is not None:
            raise ConfigError(
                f"architecture = '{self.architecture}' and path = '{self.path}' are both given; leave one out"
            )
        if self.zero_residuals and self.path is not None and self.weights == "pretrained":
            raise ConfigError(
                f"zero_residuals = true would throw away what the weights at '{self.path}' have learned; leave it out, "
                "or set weights = 'random'"
            )
        if self.resize_vocabulary and self.path is None:
            raise ConfigError(
                "resize_vocabulary = true is for a model at a path; an architecture has the tokenizer's vocabulary"
            )
        if _depth_of_resnet(self.architecture) is not None and self.attention is not None:
            raise ConfigError(
                f"attention = '{self.attention}', but '{self.architecture}' has no attention; leave it out"
            )
        if self.grown_layers == "copied" and not self.zero_residuals:
            raise ConfigError(
                "grown_layers = 'copied' needs layers that begin as the identity: set zero_residuals = true"
            )
        if self.zero_residuals and _depth_of_resnet(self.architecture) is not None:
            raise ConfigError(f"zero_residuals = true is for transformers, not for '{self.architecture}'; leave it out")


def load_model(
    config: ModelConfig,
    *,
    vocab_size: int | None = None,
    row_tokens: int | None = None,
    classes: Sequence[str] | None = None,
    pad_token: int | None = None,
    keep_16_bits: bool = False,
) -> nn.Module:
    """The model that `config` names, on the CPU in fp32; random weights come from torch's global generator.

    vocab_size: the tokenizer's vocabulary; an architecture built here gets it by default, and any other model must
        have at least as many.
    row_tokens: the length of a row; the model must have at least as many positions.
    classes: names of the classes; the model then has a classification head, over texts if there is a vocabulary, else
        over images. Without classes it predicts tokens.
    pad_token: the token that fills up texts; a decoder classifies by the last token before it.
    keep_16_bits: leave weights that are saved in bf16 or fp16 in it, which takes half the memory. (Where some of them
        are drawn, a new head or new embeddings, all are in fp32.)

    Raises `ConfigError` for a model that does not exist, cannot be built, or does not fit the data.
    """
    depth = _depth_of_resnet(config.architecture)
    if depth is not None:
        return _resnet(depth, config.config, None if vocab_size is not None or classes is None else len(classes))
    model = _hugging_face(config, vocab_size, classes, keep_16_bits=keep_16_bits and not config.resize_vocabulary)
    vocabulary = getattr(cast(Any, model.config).get_text_config(), "vocab_size", None)
    if vocab_size is not None and vocabulary is not None and vocabulary < vocab_size:
        if not config.resize_vocabulary:
            way_out = f"model.config.vocab_size = {vocab_size}"
            if config.path is not None and config.weights == "pretrained":
                way_out = "model.resize_vocabulary = true"
            raise ConfigError(
                f"the model's vocabulary ({vocabulary}) is smaller than the tokenizer's ({vocab_size}); "
                f"set {way_out} or choose the model's own tokenizer"
            )
        cast(Any, model).resize_token_embeddings(vocab_size)
        log.warning(
            "the model had %d embeddings; it now has %d, one for each token of the tokenizer", vocabulary, vocab_size
        )
    positions = getattr(model.config, "max_position_embeddings", None)
    if row_tokens is not None and isinstance(positions, int) and row_tokens > positions:
        raise ConfigError(
            f"row_tokens = {row_tokens} is longer than the model's {positions} positions; "
            f"set row_tokens = {positions} or less"
        )
    settings: Any = cast(Any, model.config).get_text_config()
    if hasattr(settings, "use_cache"):
        settings.use_cache = False  # keys and values; with a cache, the conversations of a packed row see each other
    if classes is not None and getattr(settings, "pad_token_id", None) is None:
        settings.pad_token_id = pad_token
    return model


def _depth_of_resnet(architecture: str | None) -> int | None:
    match = re.fullmatch(r"resnet-?(\d+)", architecture or "")
    return int(match.group(1)) if match else None


def _resnet(depth: int, settings: dict[str, Any], num_classes: int | None) -> nn.Module:
    if num_classes is None:
        raise ConfigError(f"'resnet{depth}' classifies images; give [images]")
    known = ("num_classes", "shortcut")
    for key in settings:
        if key not in known:
            raise ConfigError(f"unknown key 'model.config.{key}' for 'resnet{depth}'; {nearest(key, known)}")
    outputs = settings.get("num_classes", num_classes)
    if not isinstance(outputs, int) or outputs < num_classes:
        raise ConfigError(f"model.config.num_classes = {outputs!r}, but the images have {num_classes} classes")
    return resnet(depth, outputs, shortcut=settings.get("shortcut"))


def _hugging_face(
    config: ModelConfig, vocab_size: int | None, classes: Sequence[str] | None, *, keep_16_bits: bool
) -> nn.Module:
    import transformers

    cls: Any = transformers.AutoModelForCausalLM  # the class for what the model predicts
    head: dict[str, Any] = {}
    if classes is not None:
        texts = vocab_size is not None
        cls = transformers.AutoModelForSequenceClassification if texts else transformers.AutoModelForImageClassification
        names = dict(enumerate(classes))
        head = {"id2label": names, "label2id": {name: number for number, name in names.items()}}
    if config.architecture is not None:
        settings = _architecture_settings(config.architecture, config.config, vocab_size)
        settings.update(head)
        _set_attention(settings, config.attention)
        return _of_architecture(cls, settings, config.architecture, config.config)
    path, folder = str(config.path), Path(str(config.path)).expanduser()
    if folder.is_dir():
        path = str(folder)
    elif path.endswith(".gguf"):
        raise ConfigError(
            f"model.path '{path}' is a gguf file, whose weights are quantized: make a folder of it with "
            f"AutoModelForCausalLM.from_pretrained('{folder.parent}', gguf_file='{folder.name}').save_pretrained(...), "
            "and the tokenizer in the same way, or take the original checkpoint"
        )
    elif not may_be_on_hub(path):
        raise ConfigError(f"model.path '{path}' is no folder (seen from {Path.cwd()}), and no name on the hub")
    settings = _saved_settings(path, config.config)
    for key, value in head.items():
        setattr(settings, key, value)
    _set_attention(settings, config.attention)
    if config.weights == "random":
        return _of_architecture(cls, settings, path, config.config)
    _require_class(cls, settings, path)
    dtype = lossless_dtype(path) if keep_16_bits and classes is None else torch.float32
    _require_memory(cls, settings, path, dtype)
    has_new_head, ignored = classes is not None, config.ignore_weights
    with library_errors(f"model.path '{path}' cannot be loaded", lambda: _odd_saved_settings(path, config.config)):
        return load_pretrained(cls, path, settings, has_new_head=has_new_head, ignored=ignored, dtype=dtype)


def _set_attention(settings: Any, attention: str | None) -> None:
    if attention is not None:  # an unknown name, or one that this machine lacks, is an error when the model is built
        settings._attn_implementation = attention


def _of_architecture(cls: Any, settings: Any, name: str, given: dict[str, Any]) -> nn.Module:
    """A model with random weights, and with the attention that transformers chooses: sdpa, or the architecture's own
    where that changes the scores (Gemma 2 caps them, BLOOM adds ALiBi). given: the settings that are not defaults."""
    _require_class(cls, settings, name)
    _require_memory(cls, settings, name)
    with library_errors(f"[model.config] makes no '{name}'", lambda: _odd_settings(given, settings.model_type)):
        return cls.from_config(settings).float()


def _require_memory(cls: Any, settings: Any, name: str, dtype: torch.dtype = torch.float32) -> None:
    """Raise `ConfigError` for a model that this machine cannot hold, before the kernel ends the process for it."""
    if torch.get_default_device().type == "meta":
        return
    size = 0
    with suppress(Exception), torch.device("meta"):  # some models cannot be built there
        size = sum(dtype.itemsize * parameter.numel() for parameter in cls.from_config(settings).parameters())
    if size > available_memory_bytes():
        raise ConfigError(
            f"'{name}' takes {format_bytes(size)} in {'fp32' if dtype == torch.float32 else '16 bits'}, and "
            f"{format_bytes(available_memory_bytes())} of memory are free; choose a smaller model or another machine"
        )


def _require_class(cls: Any, settings: Any, name: str) -> None:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

    if type(settings) not in cls._model_mapping:
        what = {"ForCausalLM": "next tokens", "ForSequenceClassification": "classes of texts"}
        kind = next((text for key, text in what.items() if cls.__name__.endswith(key)), "classes of images")
        raise ConfigError(f"transformers has no '{name}' that predicts {kind}; choose another architecture")
    is_encoder = getattr(settings, "is_decoder", None) is False and not settings.is_encoder_decoder
    if is_encoder and cls is transformers.AutoModelForCausalLM and type(settings) in MODEL_FOR_MASKED_LM_MAPPING:
        raise ConfigError(
            f"'{name}' is an encoder, whose tokens see those that they should predict; choose a causal language model, "
            "or set model.config.is_decoder = true"
        )


def _saved_settings(path: str, given: dict[str, Any]) -> Any:
    """The configuration at `path`, with the settings `given` in place of its own."""
    from transformers import AutoConfig

    with library_errors(f"model.path '{path}' cannot be loaded", lambda: _odd_saved_settings(path, given)):
        is_local = Path(path).is_dir() or is_hub_silent(path)
        settings = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=is_local)
        _require_known(given, settings, f"model.path '{path}'")
        _require_possible(settings.to_dict(), type(settings)(), f"model.path '{path}': its config.json has ")
        return AutoConfig.from_pretrained(path, trust_remote_code=False, **given) if given else settings


def _require_known(given: dict[str, Any], settings: Any, what: str) -> set[str]:
    """The names of all settings; raises `ConfigError` for a name in `given` that is none of them."""
    known = {*settings.to_dict(), *settings.attribute_map}
    for key in given:
        if key not in known:
            raise ConfigError(f"unknown key 'model.config.{key}' for {what}; {nearest(key, known)}")
    _require_possible(given, settings, "model.config.")
    return known


def _require_possible(values: dict[str, Any], settings: Any, place: str) -> None:
    """Raise `ConfigError` for nan, for a negative number where that of `settings` is positive, and for more layers than
    any model has: transformers builds a model of -1 layers, and goes on building one of 10^30. (A negative id of a
    token means that there is none.)"""
    layers = {"num_hidden_layers", settings.attribute_map.get("num_hidden_layers")}
    for key, value in values.items():
        default = getattr(settings, key, None)
        if not (isinstance(value, int | float) and isinstance(default, int | float)) or key.endswith("_token_id"):
            continue
        if math.isnan(value) or value < 0 < default:
            raise ConfigError(f"{place}{key} = {value}, which cannot be (the default is {default})")
        if key in layers and value > MOST_LAYERS:
            raise ConfigError(f"{place}{key} = {shown(value)}; a model may have at most {MOST_LAYERS:,} layers")


def _odd_settings(values: dict[str, Any], architecture: str) -> str:
    """Names those of `values` that may be why transformers cannot build a model: they are of another type than the
    architecture's defaults; or else are not positive where the default is, or are another word. "" if there are none.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if architecture not in CONFIG_MAPPING_NAMES:
        return ""
    of_another_type, odd = [], []
    for key, default in AutoConfig.for_model(architecture).to_dict().items():
        value = values.get(key, default)
        is_finite = not isinstance(value, float) or math.isfinite(value)
        if key.endswith(("_version", "_token_id", "dtype")) or (default is None and is_finite):
            continue
        shown_with_default = f"{key} = {shown(value)} (default {shown(default)})"
        kind = int | float if isinstance(default, float) else type(default)
        is_low = isinstance(default, int | float) and isinstance(value, int | float) and value <= 0 < default
        if not is_finite or not isinstance(value, kind) or isinstance(value, bool) != isinstance(default, bool):
            of_another_type.append(shown_with_default)
        elif is_low or (isinstance(value, str) and value != default):
            odd.append(shown_with_default)
    found = of_another_type or odd
    return f"it cannot have {', '.join(found)}" if found else ""


def _odd_saved_settings(path: str, given: dict[str, Any]) -> str:
    """What `_odd_settings` says of the configuration in the folder `path`, where `given` replaces its own settings."""
    values: dict[str, Any] = {}
    for file in sorted(Path(path).glob("*config.json"), reverse=True):  # config.json is the last
        values = parse_json(file.read_bytes(), f"'{file}'", ConfigError)
        if not isinstance(values, dict):
            return f"its {file.name} is {json_kind(values)}, not an object of settings"
    return _odd_settings({**values, **given}, str(values["model_type"])) if "model_type" in values else ""


def _architecture_settings(name: str, given: dict[str, Any], vocab_size: int | None) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if name not in CONFIG_MAPPING_NAMES:
        hint = nearest(name, CONFIG_MAPPING_NAMES)
        if not hint.startswith("did"):  # there are too many to list
            hint = "use a model_type of transformers ('gpt2', 'llama', 'qwen3') or 'resnet20'"
        raise ConfigError(f"model.architecture '{name}' is unknown; {hint}")
    default = AutoConfig.for_model(name)
    known = _require_known(given, default, f"architecture '{name}'")
    settings = dict(given)
    if vocab_size is not None and "vocab_size" in known:
        settings.setdefault("vocab_size", vocab_size)
    # Special tokens of the architecture's default vocabulary may lie outside a small one; training does not use them.
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = getattr(default, key, None)
        if isinstance(token, int) and key not in settings and token >= settings.get("vocab_size", token + 1):
            settings[key] = None
    with library_errors(f"[model.config] makes no '{name}'", lambda: _odd_settings(given, name)):
        return AutoConfig.for_model(name, **settings)
