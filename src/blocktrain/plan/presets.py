"""Models by name: the eight of the paper, and sizes of GPT-2, Llama, Mistral and Qwen, from their published configs."""

from __future__ import annotations

from pathlib import Path

from blocktrain.errors import ConfigError, nearest
from blocktrain.plan.spec import ModelSpec, read_config

GPT2_VOCABULARY = 50257


def _gpt2(name: str, layers: int, width: int, heads: int) -> ModelSpec:
    return ModelSpec(
        name=name,
        architecture="gpt2",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        inner=4 * width,
        vocabulary=GPT2_VOCABULARY,
        positions=1024,
        tied=True,
    )


def _llama(
    name: str,
    shape: tuple[int, int, int, int, int],  # layers, width, heads, key and value heads, inner
    *,
    vocabulary: int,
    positions: int,
    architecture: str = "llama",
    tied: bool = False,
    head_width: int | None = None,
    experts: tuple[int, int] = (1, 1),  # in all, used by a token
) -> ModelSpec:
    layers, width, heads, kv_heads, inner = shape
    return ModelSpec(
        name=name,
        architecture=architecture,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width or width // heads,
        inner=inner,
        vocabulary=vocabulary,
        positions=positions,
        tied=tied,
        qkv_bias=architecture == "qwen2",
        head_norms="heads" if architecture.startswith("qwen3") else "none",
        experts=experts[0],
        experts_used=experts[1],
    )


# Table 8 of the paper (arXiv 2506.12037v1): L, H, A. Its memory column fits Llama's vocabulary of 32000 and the stated
# feed-forward width of 9200 for the three larger Llama sizes, and 50257 and 5120 (stated: 5050) for L-1.5B.
PAPER = (
    _gpt2("g-1.6b", 30, 2048, 16),
    _gpt2("g-5.4b", 28, 3968, 32),
    _gpt2("g-10b", 56, 3968, 32),
    _gpt2("g-20b", 110, 3968, 32),
    _llama("l-1.5b", (30, 2048, 16, 16, 5120), vocabulary=GPT2_VOCABULARY, positions=1024),
    _llama("l-6b", (32, 4096, 32, 32, 9200), vocabulary=32000, positions=1024),
    _llama("l-11b", (64, 4096, 32, 32, 9200), vocabulary=32000, positions=1024),
    _llama("l-23b", (128, 4096, 32, 32, 9200), vocabulary=32000, positions=1024),
)
OTHERS = (
    _gpt2("gpt2", 12, 768, 12),
    _gpt2("gpt2-medium", 24, 1024, 16),
    _gpt2("gpt2-large", 36, 1280, 20),
    _gpt2("gpt2-xl", 48, 1600, 25),
    _llama("llama-2-7b", (32, 4096, 32, 32, 11008), vocabulary=32000, positions=4096),
    _llama("llama-2-13b", (40, 5120, 40, 40, 13824), vocabulary=32000, positions=4096),
    _llama("llama-2-70b", (80, 8192, 64, 8, 28672), vocabulary=32000, positions=4096),
    _llama("llama-3-8b", (32, 4096, 32, 8, 14336), vocabulary=128256, positions=8192),
    _llama("llama-3-70b", (80, 8192, 64, 8, 28672), vocabulary=128256, positions=8192),
    _llama("llama-3.2-1b", (16, 2048, 32, 8, 8192), vocabulary=128256, positions=131072, tied=True),
    _llama("llama-3.2-3b", (28, 3072, 24, 8, 8192), vocabulary=128256, positions=131072, tied=True),
    _llama("mistral-7b", (32, 4096, 32, 8, 14336), vocabulary=32000, positions=32768, architecture="mistral"),
    _llama(
        "mixtral-8x7b",
        (32, 4096, 32, 8, 14336),
        vocabulary=32000,
        positions=32768,
        architecture="mixtral",
        experts=(8, 2),
    ),
    _llama("qwen2.5-0.5b", (24, 896, 14, 2, 4864), vocabulary=151936, positions=32768, architecture="qwen2", tied=True),
    _llama(
        "qwen2.5-1.5b", (28, 1536, 12, 2, 8960), vocabulary=151936, positions=131072, architecture="qwen2", tied=True
    ),
    _llama("qwen2.5-7b", (28, 3584, 28, 4, 18944), vocabulary=152064, positions=131072, architecture="qwen2"),
    _llama("qwen2.5-14b", (48, 5120, 40, 8, 13824), vocabulary=152064, positions=131072, architecture="qwen2"),
    _llama("qwen2.5-32b", (64, 5120, 40, 8, 27648), vocabulary=152064, positions=131072, architecture="qwen2"),
    _llama("qwen2.5-72b", (80, 8192, 64, 8, 29568), vocabulary=152064, positions=131072, architecture="qwen2"),
    _llama(
        "qwen3-0.6b",
        (28, 1024, 16, 8, 3072),
        vocabulary=151936,
        positions=40960,
        architecture="qwen3",
        tied=True,
        head_width=128,
    ),
    _llama(
        "qwen3-8b", (36, 4096, 32, 8, 12288), vocabulary=151936, positions=40960, architecture="qwen3", head_width=128
    ),
    _llama(
        "qwen3-32b", (64, 5120, 64, 8, 25600), vocabulary=151936, positions=40960, architecture="qwen3", head_width=128
    ),
)
MODEL_PRESETS: dict[str, ModelSpec] = {spec.name: spec for spec in (*PAPER, *OTHERS)}


def find_model(name: str) -> ModelSpec:
    """A preset, or the shape in a `config.json` or a folder with one; raises `ConfigError` with the nearest name."""
    if name.lower() in MODEL_PRESETS:
        return MODEL_PRESETS[name.lower()]
    if name.endswith(".json") or "/" in name or Path(name).is_dir():
        return read_config(Path(name))
    raise ConfigError(f"model '{name}' is neither a preset nor a config.json; {nearest(name.lower(), MODEL_PRESETS)}")
