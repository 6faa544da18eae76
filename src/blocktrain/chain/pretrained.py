"""Loading pretrained weights so that nothing is lost silently: no weight of the model is left at random values, and no
tensor of the checkpoint is dropped, unless the user says so.

`from_pretrained` does both with a warning at most. What is allowed without a word from the user is a new classification
head, which is logged.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from blocktrain.errors import ConfigError
from blocktrain.runtime import library_errors

log = logging.getLogger(__name__)

SHOWN = 4  # names of tensors in a message


def load_pretrained(
    cls: Any,
    path: str,
    settings: Any,
    *,
    has_new_head: bool,
    ignored: Sequence[str],
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """The model of class `cls` (an auto class of transformers) with the weights at `path`, on the CPU.

    settings: the model's configuration.
    has_new_head: the model classifies, so the parameters of its head may be missing at `path`.
    ignored: patterns (`*` and `?`) of tensors at `path` that the model has no place for and that may be left out.
    dtype: of the parameters. A model that would make its buffers (tables of positions) in less than fp32 is loaded in
        fp32 all the same.

    Raises `ConfigError` if weights are missing, damaged, of another shape, or have no place in the model; other errors
    of transformers pass.
    """
    _refuse_quantized(path, settings)
    with _quiet_transformers():
        try:
            model, found = cls.from_pretrained(
                path,
                config=settings,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # they are reported below, with their names
                output_loading_info=True,
            )
        except SafetensorError as error:
            raise ConfigError(f"the weights at model.path '{path}' are damaged, or not all there: {error}") from error
    if dtype != torch.float32 and any(b.is_floating_point() and b.dtype != torch.float32 for b in model.buffers()):
        del model
        return load_pretrained(cls, path, settings, has_new_head=has_new_head, ignored=ignored)
    of_head = _head_parameters(model) if has_new_head else set()
    drawn = {*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}
    _require_shapes([entry for entry in found["mismatched_keys"] if entry[0] not in of_head], path)
    _require_all(sorted(drawn - of_head), path)
    surplus = [
        name for name in sorted(found["unexpected_keys"]) if not any(fnmatchcase(name, pattern) for pattern in ignored)
    ]
    if has_new_head:  # then the head of another task may be dropped, but nothing else
        base = {model.base_model_prefix, *(name for name, _ in model.base_model.named_children())}
        surplus = [name for name in surplus if name.split(".")[0] in base]
    _require_none_dropped(surplus, path)
    if drawn:
        log.warning("the classification head is new and begins at random weights: %s", _some(sorted(drawn)))
    return model


def saved_dtype(path: str) -> torch.dtype:
    """The dtype of most of the weights at `path`, by the headers of their files; fp32 unless it is bf16 or fp16.

    `path` is a folder or hub name whose weights `load_pretrained` has loaded. What its configuration says is not asked:
    some name another dtype than that of their weights.
    """
    ((most, _),) = _saved_scalars(path).most_common(1) or (("F32", 0),)
    return _HALVES.get(most, torch.float32)


def lossless_dtype(path: str) -> torch.dtype:
    """bf16 or fp16 where all the weights at `path` are in it, else fp32. Of a name on the hub whose weights were never
    downloaded it knows nothing, and says fp32."""
    saved = list(_saved_scalars(path))
    return _HALVES.get(saved[0], torch.float32) if len(saved) == 1 else torch.float32


_HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}


def _saved_scalars(path: str) -> Counter[str]:
    """How many scalars the files at `path` have in each dtype, as safetensors calls it."""
    from transformers.utils.hub import cached_file

    with library_errors(f"model.path '{path}' cannot be loaded"):
        folder = Path(str(cached_file(path, "config.json"))).parent
    scalars: Counter[str] = Counter()
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - it is no mapping
                entry = weights.get_slice(name)
                scalars[entry.get_dtype()] += math.prod(entry.get_shape())
    return scalars


def _head_parameters(model: Any) -> set[str]:
    """The parameters outside of the base model, and its pooler, which encoders trained on masked tokens do not have."""
    base = f"{model.base_model_prefix}."
    return {name for name, _ in model.named_parameters() if not name.startswith(base) or ".pooler." in name}


def _require_all(missing: Collection[str], path: str) -> None:
    if missing:
        raise ConfigError(
            f"the weights at model.path '{path}' lack {len(missing)} tensors of the model ({_some(missing)}), "
            "which would begin at random values; complete the folder, or make [model.config] describe the model that "
            "was saved"
        )


def _require_shapes(mismatched: Sequence[tuple[str, Any, Any]], path: str) -> None:
    if mismatched:
        name, saved, expected = mismatched[0]
        raise ConfigError(
            f"the weights at model.path '{path}' have other shapes than the model: '{name}' is {list(saved)} there and "
            f"{list(expected)} in the model ({len(mismatched)} such tensors); make [model.config] describe the model "
            "that was saved"
        )


def _require_none_dropped(surplus: Collection[str], path: str) -> None:
    if surplus:
        raise ConfigError(
            f"the weights at model.path '{path}' have {len(surplus)} tensors that the model has no place for "
            f"({_some(surplus)}), so they would be lost; make [model.config] describe the model that was saved, or set "
            f"model.ignore_weights = {_patterns(surplus)} to train and export without them"
        )


def _refuse_quantized(path: str, settings: Any) -> None:
    quantization = getattr(settings, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        raise ConfigError(
            f"the weights at model.path '{path}' are quantized ({getattr(method, 'value', method)}), and quantized "
            "weights cannot be trained; take the original checkpoint, or dequantize it with transformers and save it "
            "(frozen layers can be quantized while training: precision = 'int8' or 'nf4')"
        )


def _some(names: Collection[str]) -> str:
    shown = list(names)[:SHOWN]
    return ", ".join(f"'{name}'" for name in shown) + (", ..." if len(names) > len(shown) else "")


def _patterns(names: Iterable[str]) -> list[str]:
    """Patterns that match `names`: one for each numbered layer, or first part of a name where there is no number.

    >>> _patterns(["h.2.attn.weight", "h.2.attn.bias", "visual.patch.weight", "scale"])
    ['h.2.*', 'scale', 'visual.*']
    """
    found = set()
    for name in names:
        parts = name.split(".")
        end = next((place for place, part in enumerate(parts) if part.isdigit()), 0) + 1
        found.add(".".join([*parts[:end], "*"] if end < len(parts) else parts))
    return sorted(found)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Inside, transformers logs errors only: what it warns about here is an error of ours, or logged by us."""
    from transformers.utils import logging as hf_logging

    before = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(before)
