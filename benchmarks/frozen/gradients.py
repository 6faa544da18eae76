"""How far are loss and gradient of the active block from the exact ones when frozen layers compute in int8?

    python benchmarks/frozen/gradients.py --model FOLDER --text FILE [--out benchmarks/frozen/gradients.json]

The model in FOLDER (as `save_pretrained` writes it, with its tokenizer) in thirds, on one window of 512 tokens from
the text. One pass exactly, one in int8, over the same weights and tokens; nothing is updated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import AutoModelForCausalLM, AutoTokenizer

import blocktrain as bt
from blocktrain.modules.int8_linear import FrozenCompute, Int8Weight, _int_mm, _quantize_rows
from blocktrain.runtime import environment, result_path

WINDOWS, TOKENS, THIRDS = 1, 512, 3
BUILT = Int8Weight.forward  # 16 bits of what is multiplied with a weight


def in_8_bits(rows: Tensor, codes: Tensor) -> Tensor:
    """(rows, n) times codes (n, m), with one int8 term."""
    coarse, scales, _ = _quantize_rows(rows)
    return _int_mm(coarse, codes).float().mul_(scales)


# The methods of `Int8Weight` in each scheme.
SCHEMES: dict[str, dict[str, Any]] = {
    "inputs in 16 bits, gradients in 8 (as built)": {},
    "inputs in 8 bits, gradients in 8": {
        "forward": lambda weight, rows: in_8_bits(rows, weight.codes.t()).mul_(weight.scales)
    },
    "inputs in 16 bits, gradients in 16": {
        "input_gradient": lambda weight, rows: BUILT(
            Int8Weight(weight.codes.t(), torch.ones(weight.codes.shape[1]), rows.dtype), rows * weight.scales
        )
    },
}


def passes(model: Any, tokens: Tensor, frozen_compute: FrozenCompute) -> Iterator[tuple[float, Tensor]]:
    """For each third: the loss and the gradient of the third when it is active."""
    partition = bt.partition(model, num_blocks=THIRDS)
    optimizer = bt.BlockOptimizer(partition, torch.optim.SGD, lr=0.0, frozen_compute=frozen_compute)
    for block in partition:
        with optimizer.visit(block):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            yield loss.item(), torch.cat([gradient.flatten().double() for gradient in optimizer.gradients()])
    optimizer.close()


def compared(model: Any, tokens: Tensor, exact: Sequence[tuple[float, Tensor]]) -> list[dict[str, float]]:
    """By third: the loss over the exact one, and the gradient's cosine and norm ratio with the exact one."""
    return [
        {
            "loss_ratio": round(loss / exact_loss, 5),
            "cosine": round(cosine_similarity(gradient, exact_gradient, 0).item(), 5),
            "norm_ratio": round((gradient.norm() / exact_gradient.norm()).item(), 5),
        }
        for (loss, gradient), (exact_loss, exact_gradient) in zip(passes(model, tokens, "int8"), exact, strict=True)
    ]


def measure(folder: str, text: Path) -> dict[str, Any]:
    """The result as a JSON-able dictionary."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)(text.read_text()[:50_000], return_tensors="pt").input_ids
    tokens = ids[0, : WINDOWS * TOKENS].view(WINDOWS, TOKENS)
    exact = list(passes(model, tokens, "exact"))
    schemes = {}
    for name, methods in SCHEMES.items():
        with patch.multiple(Int8Weight, **methods) if methods else nullcontext():
            schemes[name] = compared(model, tokens, exact)
    return {
        "exact_losses": [round(loss, 5) for loss, _ in exact],
        "schemes": schemes,
        "environment": environment(torch.device("cpu")),
        "date": datetime.now(UTC).date().isoformat(),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=result_path, default=str(Path(__file__).with_name("gradients.json")))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    result = measure(arguments.model, arguments.text)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("exact_losses", "schemes")}, indent=1))


if __name__ == "__main__":
    main()
