"""Every causal language model of transformers, made tiny: its default configuration, with all sizes replaced.

    vocab_size 152064, hidden_size 4096, 36 layers, 32 heads    ->    vocab_size 64, hidden_size 32, 3 layers, 4 heads

No table of architectures: a size is known by its name, which architectures share. A list with one entry for each layer
(kinds of attention, dense or experts) keeps one layer of each kind, and three at least. `SPECIAL` has what is left.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LAYERS = 3
LAYER_COUNTS = (
    r"(num_(hidden_)?|n_?|decoder_|encoder_|num_encoder_|num_decoder_|max_window_|encoder_num_|decoder_num_)?layers?"
    r"(_per_stack)?"
)
# The first pattern that matches a setting's whole name gives its value. Settings that match none stay as they are.
SIZES: dict[str, Any] = {
    r"(.*_)?vocab(_size.*)?": 64,
    LAYER_COUNTS: LAYERS,
    r"(hidden_size(_global)?|d_model|n_embd|dim|embedding_size|word_embed_proj_dim|emb_dim|embedding_dim)": 32,
    r"adapter_(in|out)(_dim|put_size)": 32,
    r"(num_key_value_heads|num_kv_heads|n_head_kv)": 2,
    r"(num_(attention_|q_)?heads?|n_?heads?|(en|de)coder_attention_heads|num_(en|de)coder_attention_heads)": 4,
    r"(.*head_dim|rotary_dim|d_kv|kv_channels|.*d_head|qk_nope_.*|qk_rope_.*|mamba_n(um)?_heads)": 8,
    r"(.*intermediate_size|.*ffn_dim|ffn_hidden_size|n_inner|d_ff|.*_ffn_dim|d_inner)": 48,
    r"(num_.*experts|n_routed_experts|moe_num_experts)": 4,
    r"(.*per_tok(en)?|moe_k|moe_top_?k|top_k_experts)": 2,
    r"(n_group|num_expert_group|topk_group|n_groups)": 1,
    r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_.*_positions|seq_length|max_seq_length)": 64,
    r"(.*sliding_window.*|window_size|attention_window_size|local_window_size|.*chunk_size)": 6,
    r"(.*_rank|.*_dim|.*_size)": 16,
}


def names() -> list[str]:
    """The `model_type` of each causal language model that this transformers has."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny(name: str) -> Any:
    """The configuration of `model_type` `name` with small sizes."""
    cls = CONFIG_MAPPING[name]
    with contextlib.suppress(ValueError):  # the defaults of a few contradict each other
        return cls(**_shrunk(cls().to_dict()))
    return cls(**SPECIAL[name])


def _shrunk(settings: dict[str, Any]) -> dict[str, Any]:
    count = next((settings[key] for key in ("num_hidden_layers", "num_layers", "n_layer") if settings.get(key)), None)
    lists = {key: value for key, value in settings.items() if isinstance(value, list) and len(value) == count}
    kinds = _one_of_each([repr(kind) for kind in zip(*lists.values(), strict=True)])
    small: dict[str, Any] = {}
    for key, value in settings.items():
        if key == "per_layer_config":  # sizes that some layers have in place of the common ones
            small[key] = {}
        elif isinstance(value, dict):
            small[key] = _shrunk(value)
        elif key in lists:
            small[key] = [value[at] for at in kinds]
        elif isinstance(value, int) and not isinstance(value, bool):
            size = next((size for pattern, size in SIZES.items() if re.fullmatch(pattern, key)), value)
            if kinds and re.fullmatch(LAYER_COUNTS, key):
                size = len(kinds)
            small[key] = min(size, value) if value > 0 else value
            if key.endswith("token_id") and value >= 64:
                small[key] = 2
        else:
            small[key] = UNSET.get(key) if value is None else value
    if small.get("kv_lora_rank"):  # keys and values of all heads come from one vector
        small["num_key_value_heads"] = small["num_attention_heads"]
    return small | SPECIAL.get(settings.get("model_type", ""), {})


def _one_of_each(kinds: list[str]) -> list[int]:
    """Where each kind occurs first, filled up to `LAYERS` from the front, in order."""
    first = {kind: at for at, kind in reversed(list(enumerate(kinds)))}
    more = [at for at in range(len(kinds)) if at not in first.values()]
    return sorted([*first.values(), *more[: max(0, LAYERS - len(first))]])


# Settings without a default that a model cannot be built without.
UNSET = {"head_dim": 8, "num_key_value_heads": 2}
MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 8}
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": MAMBA_HEADS,
    "big_bird": {"attention_type": "original_full"},  # short rows have no sparse blocks
    "bigbird_pegasus": {"attention_type": "original_full"},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        "layer_types": ["full_attention"] * 3,
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        "per_layer_config": {
            1: {
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "q_lora_rank": 16,
                "kv_lora_rank": 16,
                "head_dim": 16,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 8,
                "v_head_dim": 8,
            }
        },
    },
    "falcon_h1": {"mamba_n_heads": 6, "mamba_d_ssm": 48},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 1,
        "intermediate_size": 48,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "granitemoehybrid": MAMBA_HEADS | {"layer_types": ["mamba", "attention", "mamba"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "longcat_flash": {"head_dim": 8, "qk_head_dim": 16},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "qwen2_5_vl_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"lru_width": 32},
    "reformer": {"axial_pos_embds": False},
    "t5": {"decoder_start_token_id": 0},
    "whisper": {"num_mel_bins": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "linear_attention"],
    },
    "zamba2": {
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "linear_attention"],
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_headdim": 8,
        "num_key_value_heads": 4,
    },
}
