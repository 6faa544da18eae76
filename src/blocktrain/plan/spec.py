"""What a plan needs to know about a model: its shape, from which exact parameter counts follow, layer by layer.

Two families cover the decoders people train: GPT-2's (learned positions, biases, LayerNorm, one wide MLP) and Llama's
(rotary positions, RMSNorm, grouped queries, gated MLP), the latter with the additions of Mistral, Qwen 2 and 3 and
mixtures of experts. Counts are those of `transformers`, to the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from blocktrain.errors import ConfigError, nearest
from blocktrain.parse import parse_json, shown

Family = Literal["gpt2", "llama"]
Norms = Literal["none", "heads"]  # RMSNorm over queries and keys (Qwen 3)

# model_type of a config.json -> the family it is counted as.
FAMILIES: dict[str, Family] = {
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "mixtral": "llama",
    "qwen3_moe": "llama",
}
MOST, MOST_LAYERS = 10**7, 10**4  # of anything in a model; the planner's work grows with them
_PLANNED = f"these can be planned: {', '.join(sorted(FAMILIES))}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Counted:
    """What was counted of a model that has no closed form: parameters of its layers (of the transformer layers their
    mean), the shapes of each layer's parameters from the embedding to the head, and the settings that rebuild it."""

    embedding: int
    layer: int
    head: int
    matrices_of_layer: int
    largest_of_layer: int
    tables: tuple[Mapping[str, tuple[int, ...]], ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)  # compared by identity, because it is a key of many small caches
class ModelSpec:
    """The shape of a decoder. `architecture` is its `model_type` in transformers, which `settings` rebuild it with."""

    name: str
    architecture: str
    layers: int
    width: int  # d, of the hidden states
    heads: int
    kv_heads: int
    head_width: int
    inner: int  # of the MLP, or of one expert
    vocabulary: int
    positions: int
    tied: bool  # the output projection is the embedding
    qkv_bias: bool = False
    head_norms: Norms = "none"
    experts: int = 1
    experts_used: int = 1  # for each token
    counted: Counted | None = None  # instead of the closed forms

    def __post_init__(self) -> None:
        if self.architecture not in FAMILIES and self.counted is None:
            raise ConfigError(f"{self.name}: model_type '{self.architecture}' is unknown; {_PLANNED}")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"{self.name}: {self.heads} heads cannot share {self.kv_heads} key and value heads evenly"
            )
        if not 1 <= self.experts_used <= self.experts:
            raise ConfigError(f"{self.name}: a token cannot use {self.experts_used} of {self.experts} experts")

    @cached_property
    def family(self) -> Family:
        """The family whose operations a layer runs, or is taken to run."""
        return FAMILIES.get(self.architecture, "llama") if self.counted is None else "llama"

    @cached_property
    def query_width(self) -> int:
        """Width of all queries together, and of the attention's output."""
        return self.heads * self.head_width

    @cached_property
    def kv_width(self) -> int:
        """Width of all keys together, and of all values together."""
        return self.kv_heads * self.head_width

    @cached_property
    def embedding_parameters(self) -> int:
        """Parameters of the first layer of the chain, a tied output projection included."""
        if self.counted is not None:
            return self.counted.embedding
        positions = self.positions * self.width if self.family == "gpt2" else 0
        return self.vocabulary * self.width + positions

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of one transformer layer."""
        if self.counted is not None:
            return self.counted.layer
        d, q, kv, inner = self.width, self.query_width, self.kv_width, self.inner
        if self.family == "gpt2":
            return 4 * d * d + 2 * d * inner + 4 * d + inner + d + 4 * d  # matrices, their biases, two LayerNorms
        attention = 2 * d * q + 2 * d * kv + (q + 2 * kv if self.qkv_bias else 0)
        norms = 2 * d + (2 * self.head_width if self.head_norms == "heads" else 0)
        router = d * self.experts if self.experts > 1 else 0
        return attention + norms + router + self.experts * 3 * d * inner

    @cached_property
    def head_parameters(self) -> int:
        """Parameters of the final norm, and of the output projection unless it is tied."""
        if self.counted is not None:
            return self.counted.head
        norm = 2 * self.width if self.family == "gpt2" else self.width
        return norm + (0 if self.tied else self.vocabulary * self.width)

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.embedding_parameters + self.layers * self.layer_parameters + self.head_parameters

    @cached_property
    def largest_of_layer(self) -> int:
        """Scalars of the largest single tensor of a transformer layer."""
        if self.counted is not None:
            return self.counted.largest_of_layer
        matrix = self.width * self.inner * (2 * self.experts if self.experts > 1 else 1)
        return max(matrix, self.width * self.query_width * (3 if self.family == "gpt2" else 1))

    @cached_property
    def matrices_of_layer(self) -> int:
        """Scalars in the matrices of a transformer layer; norms and biases are never quantized or offloaded."""
        if self.counted is not None:
            return self.counted.matrices_of_layer
        d, inner = self.width, self.inner
        if self.family == "gpt2":
            return 4 * d * d + 2 * d * inner
        router = d * self.experts if self.experts > 1 else 0
        return 2 * d * (self.query_width + self.kv_width) + router + self.experts * 3 * d * inner

    def settings(self) -> dict[str, Any]:
        """Arguments of the architecture's configuration class in transformers, without dropout."""
        if self.counted is not None:
            return dict(self.counted.settings)
        if self.family == "gpt2":
            return {
                "n_layer": self.layers,
                "n_embd": self.width,
                "n_head": self.heads,
                "n_inner": self.inner,
                "vocab_size": self.vocabulary,
                "n_positions": self.positions,
                "tie_word_embeddings": self.tied,
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
            }
        settings: dict[str, Any] = {
            "num_hidden_layers": self.layers,
            "hidden_size": self.width,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.inner,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": self.tied,
        }
        if self.head_width * self.heads != self.width:
            settings["head_dim"] = self.head_width
        if self.experts > 1:
            del settings["intermediate_size"]
            if self.architecture == "mixtral":
                settings |= {"intermediate_size": self.inner, "num_local_experts": self.experts}
            else:
                settings |= {"moe_intermediate_size": self.inner, "num_experts": self.experts}
            settings["num_experts_per_tok"] = self.experts_used
        return settings


def has_closed_form(values: Mapping[str, Any]) -> bool:
    """Whether `from_config` can read a `config.json`; it takes all layers to be alike."""
    dense_layers = values.get("mlp_only_layers") or values.get("decoder_sparse_step", 1) != 1
    kind = values.get("model_type")
    return isinstance(kind, str) and kind in FAMILIES and not dense_layers


def from_config(values: Mapping[str, Any], name: str) -> ModelSpec:
    """The shape that a Hugging Face `config.json` describes; raises `ConfigError` with the key that is missing."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConfigError(f"{name}: model_type {shown(kind)} cannot be planned; {_PLANNED}")

    def need(key: str, most: int = MOST) -> int:
        value = values.get(key)
        if key not in values:
            hint = nearest(key, values)
            more = f"; {hint}" if hint.startswith("did") else ""
            raise ConfigError(f"{name} has no '{key}', so its size is unknown{more}")
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise ConfigError(f"{name}: '{key}' must be a whole number from 1 to {most:,}, not {shown(value)}")
        return value

    def other(key: str, default: int) -> int:
        return need(key) if values.get(key) is not None else default

    def tied(default: bool) -> bool:
        value = values.get("tie_word_embeddings", default)
        if not isinstance(value, bool):
            raise ConfigError(f"{name}: 'tie_word_embeddings' must be true or false, not {shown(value)}")
        return value

    def head_width() -> int:
        if width % heads:
            raise ConfigError(f"{name}: its hidden states have {width} values, which {heads} heads cannot share evenly")
        return width // heads

    if kind == "gpt2":
        width, heads = need("n_embd"), need("n_head")
        return ModelSpec(
            name=name,
            architecture="gpt2",
            layers=need("n_layer", MOST_LAYERS),
            width=width,
            heads=heads,
            kv_heads=heads,
            head_width=head_width(),
            inner=other("n_inner", 4 * width),
            vocabulary=need("vocab_size"),
            positions=need("n_positions"),
            tied=tied(True),
        )
    width, heads = need("hidden_size"), need("num_attention_heads")
    experts = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts"}.get(kind)
    if kind == "qwen3_moe" and "num_experts" not in values:
        experts = "num_local_experts"  # as transformers 5 writes it
    return ModelSpec(
        name=name,
        architecture=kind,
        layers=need("num_hidden_layers", MOST_LAYERS),
        width=width,
        heads=heads,
        kv_heads=other("num_key_value_heads", heads),
        head_width=need("head_dim") if values.get("head_dim") is not None else head_width(),
        inner=need("moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"),
        vocabulary=need("vocab_size"),
        positions=need("max_position_embeddings"),
        tied=tied(False),
        qkv_bias=kind == "qwen2",
        head_norms="heads" if kind in ("qwen3", "qwen3_moe") else "none",
        experts=need(experts) if experts else 1,
        experts_used=need("num_experts_per_tok") if experts else 1,
    )


def read_config(path: Path) -> ModelSpec:
    """The shape in a `config.json`, or in a folder that contains one; raises `ConfigError`."""
    return from_config(config_values(path), str(path))


def config_values(path: Path) -> dict[str, Any]:
    """The settings in a `config.json`, or in a folder that contains one; raises `ConfigError`."""
    file = path / "config.json" if path.is_dir() else path
    if file.exists() and not file.is_file():
        raise ConfigError(f"model configuration '{file}' is not a file: it is a folder, a pipe or a device")
    try:
        values = parse_json(file.read_bytes(), f"model configuration '{file}'", ConfigError)
    except FileNotFoundError:
        raise ConfigError(f"model configuration '{file}' does not exist") from None
    except OSError as error:
        raise ConfigError(f"model configuration '{file}' cannot be read: {error.strerror}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"model configuration '{file}' is not an object of settings")
    return values
