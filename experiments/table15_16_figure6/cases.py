"""Tables 15 and 16 and Figure 6: step time by share of unfrozen parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from runner import Case, Experiment, Figures, Place, Results, markdown
from stepping import blocks_step, interleaved, random_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

PAPER = {  # milliseconds at shares of 1/3, 1/4, 1/5, on 4090s
    "G-1.6B": (378.49, 331.7375, 305.52), "G-5.4B": (1210.61, 1070.81, 996.47), "G-10B": (2414.32, 2207.405, 2036.528),
    "L-1.5B": (414.81, 331.81, 276.266), "L-6.0B": (941.44, 895.7075, 835.798), "L-11B": (1807.11, 1738.2525, 1574.92),
}  # fmt: skip
BLOCKS = (1, 3, 4, 5)


class Shape(NamedTuple):
    """Of a small model."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    tokens: int


SHAPES = {"tiny": (Shape(6, 16, 2, 64, 16), (1, 1)), "short": (Shape(12, 128, 4, 2048, 128), (1, 5))}  # rows, rounds
WORDS = {
    "tiny": "tiny, only to see that it runs",
    "short": "12 layers, 128 wide, vocabulary 2048, 1 x 128 tokens",
    "card": "whole model, fp32, 1 x 1024 tokens",
}


def step_case(family: str, scale: str) -> Case:
    """Interleaved steps of one family."""

    def run(place: Place) -> Figures:
        if scale == "card":
            model = random_model("g-1.6b" if family == "GPT-2" else "l-1.5b", place.device)
            tokens, rounds = torch.randint(0, 32000, (1, 1024), device=place.device), 3
        else:
            shape, (rows, rounds) = SHAPES[scale]
            torch.manual_seed(0)
            model = _small(family, shape).to(place.device).train()
            tokens = torch.randint(0, shape.vocabulary, (rows, shape.tokens), device=place.device)
        steps = {f"1/{blocks}": blocks_step(model, tokens, blocks) for blocks in BLOCKS}
        return interleaved(steps, "1/1", rounds=rounds)

    return Case(name=family, scale=WORDS[scale], run=run)


def _small(family: str, shape: Shape) -> torch.nn.Module:
    layers, width, heads, vocabulary, seq = shape
    if family == "GPT-2":
        plain = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(
            GPT2Config(n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocabulary, n_positions=seq, **plain)
        )
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            intermediate_size=5 * width // 2,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            vocab_size=vocabulary,
            max_position_embeddings=seq,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def cases(scale: str) -> Sequence[Case]:
    """One a family."""
    return [step_case(family, scale) for family in ("GPT-2", "Llama")]


def table(results: Results) -> str:
    """The paper's ratios to its own time at 1/3 beside ours, which also has full training."""
    rows = []
    for name, (third, fourth, fifth) in PAPER.items():
        rows.append([f"paper, {name}", None, f"{third:.0f} ms", "1", fourth / third, fifth / third, "4090s"])
    for record in results.values():
        steps = record["figures"]["steps"]
        ms, base = {share: steps[share]["ms"] for share in steps}, steps["1/3"]["ms"]
        shares = [None if ms[share] is None else ms[share] / base for share in ("1/4", "1/5")]
        whole = [steps[share]["ratio"] for share in ("1/3", "1/4", "1/5")]
        told = "of full training: " + ", ".join("–" if ratio is None else f"{ratio:.2f}" for ratio in whole)
        rows.append([f"ours, {record['case']}", told, f"{base:.0f} ms", "1", *shares, record["scale"]])
    return markdown(["", "1/3, 1/4, 1/5", "step at 1/3", "1/3", "1/4", "1/5", "scale"], rows)


EXPERIMENT = Experiment(name="table15_16_figure6", cases=cases, table=table)
