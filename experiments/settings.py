"""The paper's training settings (its section 4.2) at each scale, as tables of a configuration.

SGD: learning rate .1, momentum .9, weight decay 1e-5. Adam: 1e-4, weight decay 1e-5. Three blocks. Rates, batch and
length beyond that are not in the paper: batch 128, cosine decay, visits of an epoch, are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runner import Place
from training import Tables, data_folder

OPTIMIZERS: dict[str, Tables] = {
    "SGD": {"name": "SGD", "lr": 0.1, "weight_decay": 1e-5, "decay": "all", "options": {"momentum": 0.9}},
    "Adam": {"name": "Adam", "lr": 1e-4, "weight_decay": 1e-5, "decay": "all", "state": "host"},
}
FULL_GPT2 = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024}


@dataclass(frozen=True, kw_only=True)
class Size:
    """How far a scale goes. gpt2: its shape beside what the paper's table says; steps: of a run; visit: in steps."""

    words: str
    steps: int
    visit: int
    rows: int
    evaluate: int
    gpt2: dict[str, int]
    row_tokens: int
    gpt2_rows: int


SIZES = {
    "tiny": Size(
        words="tiny, only to see that it runs", steps=6, visit=2, rows=8, evaluate=16,
        gpt2={"n_layer": 3, "n_embd": 16, "n_head": 2, "n_positions": 16}, row_tokens=16, gpt2_rows=2,
    ),
    "short": Size(
        words="a short look: 180 steps of 64", steps=180, visit=30, rows=64, evaluate=1000,
        gpt2={"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": 64}, row_tokens=64, gpt2_rows=4,
    ),
    "card": Size(
        words="78,200 steps of 128 images, 20,000 of 64k tokens", steps=78_200, visit=391, rows=128, evaluate=10_000,
        gpt2=FULL_GPT2, row_tokens=1024, gpt2_rows=64,
    ),
}  # fmt: skip
GPT2_STEPS = {"tiny": 6, "short": 180, "card": 20_000}


def _common(scale: str, optimizer: str, *, steps: int, rows: int) -> Tables:
    size = SIZES[scale]
    return {
        "schedule": {"visit": f"{size.visit} steps"},
        "stop": {"duration": f"{steps} steps"},
        "optimizer": OPTIMIZERS[optimizer],
        "learning_rate": {"shape": "cosine", "final": 0.0},
        "batch": {"rows": rows},
        "checkpoint": {"every": f"{size.visit} steps", "keep": 1},
        "log_every": max(steps // 200, 1),
    }


def cifar(place: Place, scale: str, depth: int, optimizer: str, *, blocks: int = 3, sampling: Any = None) -> Tables:
    """ResNet on CIFAR-10."""
    size = SIZES[scale]
    return {
        **_common(scale, optimizer, steps=size.steps, rows=size.rows),
        "name": f"ResNet-{depth}",
        "images": {"source": data_folder(place, "cifar10"), "augment": "crop-flip"},
        "model": {"architecture": f"resnet{depth}"},
        "blocks": {"count": blocks},
        "sampling": sampling or {},
        "evaluation": {"every": f"{size.visit} steps", "rows": size.evaluate, "batch_rows": 250},
    }


def wikitext(place: Place, scale: str, optimizer: str, *, blocks: int = 3, sampling: Any = None) -> Tables:
    """GPT-2 on WikiText-2 with GPT-2's tokenizer; at the small scales with bytes."""
    size = SIZES[scale]
    folder = data_folder(place, "wikitext-2")
    tokenizer = data_folder(place, "gpt2_tokenizer") if scale == "card" else "bytes"
    return {
        **_common(scale, optimizer, steps=GPT2_STEPS[scale], rows=size.gpt2_rows),
        "name": "GPT-2",
        "text": {
            "source": f"{folder}/train.txt",
            "validation": f"{folder}/valid.txt",
            "tokenizer": tokenizer,
            "row_tokens": size.row_tokens,
        },
        "model": {
            "architecture": "gpt2",
            "config": {**size.gpt2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        },
        "blocks": {"count": blocks},
        "sampling": sampling or {},
        "evaluation": {"every": f"{size.visit} steps", "rows": 64, "batch_rows": 16},
    }
