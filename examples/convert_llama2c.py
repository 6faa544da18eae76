"""Convert a llama2.c checkpoint (Karpathy's stories260K, stories15M, ...) to a Hugging Face folder with its tokenizer.

    python examples/convert_llama2c.py stories260K.bin tok512.bin stories260K

Both files are plain numbers and bytes: nothing is unpickled.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"


def convert(checkpoint: Path, tokenizer: Path, out: Path) -> None:
    """Write config.json, model.safetensors and tokenizer.json to the folder `out`."""
    model, fast = read_model(checkpoint), read_tokenizer(tokenizer)
    model.save_pretrained(out)
    fast.model_max_length = model.config.max_position_embeddings
    fast.save_pretrained(out)


def read_model(path: Path) -> LlamaForCausalLM:
    """The legacy format: 7 integers, then float32 weights, each kind for all layers together."""
    data = path.read_bytes()
    width, inner, layers, heads, key_heads, vocabulary, positions = struct.unpack("7i", data[:28])
    tied, vocabulary = vocabulary > 0, abs(vocabulary)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=positions,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
    )
    flat, at = np.frombuffer(data, np.float32, offset=28), 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal at
        count = int(np.prod(shape))
        at += count
        return torch.from_numpy(flat[at - count : at].copy()).reshape(shape)

    keys = key_heads * (width // heads)
    weights = {"model.embed_tokens.weight": take(vocabulary, width)}
    stacked = {
        "input_layernorm": take(layers, width),
        "self_attn.q_proj": _half_split(take(layers, width, width), heads),
        "self_attn.k_proj": _half_split(take(layers, keys, width), key_heads),
        "self_attn.v_proj": take(layers, keys, width),
        "self_attn.o_proj": take(layers, width, width),
        "post_attention_layernorm": take(layers, width),
        "mlp.gate_proj": take(layers, inner, width),
        "mlp.down_proj": take(layers, width, inner),
        "mlp.up_proj": take(layers, inner, width),
    }
    for name, rows in stacked.items():
        weights |= {f"model.layers.{layer}.{name}.weight": row for layer, row in enumerate(rows)}
    weights["model.norm.weight"] = take(width)
    take(2, positions, width // heads // 2)  # tables of the rotary embedding, which transformers computes
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] if tied else take(vocabulary, width)
    model = LlamaForCausalLM(config)
    model.load_state_dict(weights)
    return model


def _half_split(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """llama2.c rotates neighbouring pairs of a head's rows, transformers row i with row i + half."""
    layers, outputs, inputs = rows.shape
    pairs = rows.reshape(layers, heads, outputs // heads // 2, 2, inputs)
    return pairs.transpose(2, 3).reshape(layers, outputs, inputs)


def read_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Pieces with scores; two neighbours are merged where the piece they make has the best score of all."""
    data, at, pieces = path.read_bytes(), 4, []
    while at < len(data):
        _score, length = struct.unpack("fi", data[at : at + 8])
        pieces.append(data[at + 8 : at + 8 + length].decode())
        at += 8 + length
    pieces = [piece.replace(" ", "▁") for piece in pieces]  # already in the order of their scores
    pieces[:3] = UNKNOWN, BEGIN, END
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces[259:]  # behind the special pieces and the 256 bytes
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in (UNKNOWN, BEGIN, END)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=UNKNOWN, bos_token=BEGIN, eos_token=END)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    convert(*map(Path, sys.argv[1:]))
