"""Models of four layers, 16 wide, that several folders of tests share.

Their weights are drawn from the seed that `conftest.py` sets before each test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers as hf

from blocktrain.data.tokenizer import ByteTokenizer

LLAMA_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
# What a configuration of DeepSeek-V3 needs beside the sizes of a mixture of experts.
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


def gpt2(layers: int = 4, **settings: Any) -> Any:
    """With dropout, in both of its forms: in modules and inside the attention kernel."""
    settings |= {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=layers, **settings))


def llama() -> Any:
    """Without dropout; the head is untied."""
    return hf.LlamaForCausalLM(hf.LlamaConfig(num_hidden_layers=4, **LLAMA_SIZES))


def pretrained_folder(folder: Path, architecture: str = "llama") -> Path:
    """A folder that `from_pretrained` loads: a Llama, or a BERT without a head, over bytes, with 64 positions."""
    sizes: dict[str, Any] = LLAMA_SIZES | {"vocab_size": 257, "num_hidden_layers": 4, "max_position_embeddings": 64}
    del sizes["num_key_value_heads"]
    made = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, bos_token_id=None, eos_token_id=256)),
        "bert": lambda: hf.BertModel(hf.BertConfig(**sizes, pad_token_id=256)),
    }[architecture]()
    made.save_pretrained(folder)
    ByteTokenizer().save(folder)
    return folder


def checkpoint_activations(model: Any, *, reentrant: bool) -> None:
    """`gradient_checkpointing_enable`, or its new name since about transformers 5.20."""
    keywords = {"use_reentrant": reentrant}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(keywords)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=keywords)
