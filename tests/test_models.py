"""The matrix of models: what of this package works with which architecture, found by running it.

    python -m tests.test_models        writes docs/models.md from the same checks

Tiny random configurations, tied and untied heads. For each of them

    partition     three blocks hold every parameter once
    cache         from stored hidden states a step has the loss and the gradients of the whole step, bit for bit
    reference     a visit to each block, a step each, ends with the weights of Algorithm 1 in plain lines (reference.py)
    export        the saved folder loads as the same function
    packed        conversations packed into one row do not see each other
"""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import blocktrain as bt
from blocktrain import reference
from blocktrain.chain.boundary import BoundaryRunner
from blocktrain.optim.factory import nothing

from .tiny_models import DEEPSEEK

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
CHECKS = ("partition", "cache", "reference", "export", "packed")

TEXT: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
TOKENS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
PLAIN: dict[str, Any] = TEXT | TOKENS
GATED: dict[str, Any] = PLAIN | {"intermediate_size": 48, "num_key_value_heads": 2}
HEADS = GATED | {"head_dim": 8}
EXPERTS = GATED | {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
OPT = PLAIN | {"ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32}
IMAGE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}

# Causal language models, with tied and with untied heads.
DECODERS: dict[str, Callable[..., Any]] = {
    "GPT-2": lambda **tie: hf.GPT2Config(**PLAIN, **tie),
    "GPT-NeoX": lambda **tie: hf.GPTNeoXConfig(**GATED, **tie),
    "OPT": lambda **tie: hf.OPTConfig(**OPT, **tie),
    "OPT, norm behind": lambda **tie: hf.OPTConfig(
        **OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False}, **tie
    ),
    "BLOOM": lambda **tie: hf.BloomConfig(**PLAIN, **tie),
    "Llama": lambda **tie: hf.LlamaConfig(**GATED, **tie),
    "Mistral": lambda **tie: hf.MistralConfig(**GATED, sliding_window=6, **tie),
    "Qwen2": lambda **tie: hf.Qwen2Config(**GATED, **tie),
    "Qwen3": lambda **tie: hf.Qwen3Config(**HEADS, **tie),
    "Gemma 2": lambda **tie: hf.Gemma2Config(**HEADS, sliding_window=6, **tie),
    "Gemma 3": lambda **tie: hf.Gemma3TextConfig(**HEADS, sliding_window=6, **tie),
    "Phi": lambda **tie: hf.PhiConfig(**GATED, **tie),
    "Falcon": lambda **tie: hf.FalconConfig(**PLAIN, **tie),
    "StableLM": lambda **tie: hf.StableLmConfig(**GATED, **tie),
    "OLMo": lambda **tie: hf.OlmoConfig(**GATED, **tie),
    "OLMo 2": lambda **tie: hf.Olmo2Config(**GATED, **tie),
    "Mixtral": lambda **tie: hf.MixtralConfig(**GATED, num_local_experts=4, **tie),
    "Mixtral, router loss": lambda **tie: hf.MixtralConfig(
        **GATED, num_local_experts=4, output_router_logits=True, **tie
    ),
    "Qwen2-MoE": lambda **tie: hf.Qwen2MoeConfig(**EXPERTS, num_experts=4, **tie),
    "DeepSeek-V3": lambda **tie: hf.DeepseekV3Config(**EXPERTS | DEEPSEEK, **tie),
}
BERT = hf.BertConfig(**TEXT, intermediate_size=48, pad_token_id=2)
VIT = hf.ViTConfig(**IMAGE, image_size=8, patch_size=4)
RESNET = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
OTHERS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "BERT": ("classes of texts", lambda: hf.BertForSequenceClassification(BERT)),
    "GPT-2 (classes)": ("classes of texts", lambda: hf.GPT2ForSequenceClassification(hf.GPT2Config(**PLAIN))),
    "Llama (classes)": ("classes of texts", lambda: hf.LlamaForSequenceClassification(hf.LlamaConfig(**GATED))),
    "ViT": ("classes of images", lambda: hf.ViTForImageClassification(VIT)),
    "ResNet-8 (ours)": ("classes of images", lambda: bt.resnet(8)),
    "ResNet (transformers)": ("classes of images", lambda: hf.ResNetForImageClassification(RESNET)),
}


@dataclass(frozen=True)
class Entry:
    """A line of the matrix."""

    name: str
    predicts: str  # "next tokens", "classes of texts", "classes of images"
    build: Callable[[], nn.Module]
    head: str = ""  # "tied", "untied"
    layers: Mapping[str, list[str]] | None = None  # named by hand

    def __str__(self) -> str:
        return f"{self.name} {self.head}".strip()

    def partition(self, model: nn.Module) -> bt.Partition:
        """In three blocks."""
        return bt.partition(model, num_blocks=3, layers=self.layers)

    def batch(self) -> dict[str, torch.Tensor]:
        """Two rows."""
        random = torch.Generator().manual_seed(1)
        if self.predicts == "classes of images":
            return {"pixel_values": torch.randn(2, 3, 8, 8, generator=random), "labels": torch.tensor([0, 1])}
        ids = torch.randint(3, 64, (2, 12), generator=random)
        classes = self.predicts == "classes of texts"
        more = {"attention_mask": torch.ones_like(ids)} if classes else {}
        return {"input_ids": ids, "labels": torch.tensor([0, 1]) if classes else ids, **more}


def decoder(name: str, *, tied: bool) -> Entry:
    def build() -> nn.Module:
        config = DECODERS[name](tie_word_embeddings=tied)
        config.use_cache = False  # as `load_model` sets it
        return hf.AutoModelForCausalLM.from_config(config)

    return Entry(name, "next tokens", build, "tied" if tied else "untied")


ENTRIES = {
    str(entry): entry
    for entry in (
        *(decoder(name, tied=tied) for name, tied in itertools.product(DECODERS, (True, False))),
        *(Entry(name, predicts, build) for name, (predicts, build) in OTHERS.items()),
        Entry(
            "ResNet (transformers), layers named",
            "classes of images",
            OTHERS["ResNet (transformers)"][1],
            layers={
                "embedder": ["resnet.embedder"],
                "stage 0": ["resnet.encoder.stages.0"],
                "stage 1": ["resnet.encoder.stages.1"],
                "head": ["resnet.pooler", "classifier"],
            },
        ),
    )
}

# What does not work. Every other check of every other line passes.
KNOWN: dict[str, set[str]] = {
    **{name: {"packed"} for name in ("OPT", "OPT, norm behind", "BLOOM", "Falcon")},
    "Mixtral, router loss": {"cache"},
    "ResNet (transformers)": {"partition", "cache", "reference"},
}
BLIND = "its masks do not follow from position ids; set chat.layout = 'padded'"


@cache
def outcome(line: str) -> dict[str, str | None]:
    """Check -> None where it passes, else why it does not."""
    torch.manual_seed(0)
    entry = ENTRIES[line]
    model = entry.build().eval()
    return {name: _reason(check, entry, model) for name, check in RUN.items()}


def _reason(check: Callable[[Entry, nn.Module], None], entry: Entry, model: nn.Module) -> str | None:
    try:
        check(entry, copy.deepcopy(model))
    except (AssertionError, bt.BlocktrainError) as error:
        return str(error).splitlines()[0]
    return None


def check_partition(entry: Entry, model: nn.Module) -> None:
    partition = entry.partition(model)
    owned = [id(parameter) for block in partition for parameter in block.parameters.values()]
    assert len(partition) == 3
    assert sorted(owned) == sorted({id(parameter) for parameter in model.parameters()})


def check_cache(entry: Entry, model: nn.Module) -> None:
    partition, batch = entry.partition(model), entry.batch()
    runner, boundary = BoundaryRunner(partition.chain), partition[2].boundary
    runner.check(batch, boundary)
    active = list(partition[2].parameters.values())
    whole = model(**batch).loss
    wanted = torch.autograd.grad(whole, active, allow_unused=True)
    hidden = runner.states(batch, [boundary])[boundary]
    with runner.running(start=boundary, hidden=hidden):
        loss = model(**batch).loss
        given = torch.autograd.grad(loss, active, allow_unused=True)
    assert torch.equal(loss, whole), "the loss differs"
    assert all(_same(*pair) for pair in zip(given, wanted, strict=True)), "a gradient differs"


def check_reference(entry: Entry, model: nn.Module) -> None:
    batch, plain = entry.batch(), copy.deepcopy(model)
    partition = entry.partition(model)
    optimizer = bt.BlockOptimizer(partition, torch.optim.AdamW, lr=1e-2, undecayed=nothing)
    losses = []
    torch.manual_seed(0)
    for block in partition:
        with optimizer.visit(block):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    modules = dict(plain.named_modules())
    submodels = [[modules[path] for layer in block.layers for path in layer.modules] for block in partition]
    torch.manual_seed(0)
    wanted = reference.train(
        plain,
        submodels,
        itertools.repeat(batch),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        sweeps=1,
        steps_per_visit=1,
    )
    assert losses == wanted, "the losses differ"
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), plain.parameters(), strict=True)), (
        "weights differ"
    )


def check_export(entry: Entry, model: nn.Module) -> None:
    if not isinstance(model, hf.PreTrainedModel):
        return
    inputs = {name: value for name, value in entry.batch().items() if name != "labels"}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder).eval()
        assert torch.equal(loaded(**inputs).logits, model(**inputs).logits), "the loaded model is another function"


def check_packed(entry: Entry, model: nn.Module) -> None:
    if entry.predicts != "next tokens":
        return
    ids = entry.batch()["input_ids"].reshape(1, 24)
    positions = torch.cat([torch.arange(12), torch.arange(12)])[None]
    with torch.no_grad():
        together = model(input_ids=ids, position_ids=positions).logits[0]
        alone = model(input_ids=ids.reshape(2, 12)).logits.flatten(0, 1)
    assert torch.allclose(together, alone, rtol=1e-3, atol=1e-3 * float(alone.abs().max())), BLIND


RUN: Mapping[str, Callable[[Entry, nn.Module], None]] = {
    "partition": check_partition,
    "cache": check_cache,
    "reference": check_reference,
    "export": check_export,
    "packed": check_packed,
}


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def applies(entry: Entry, check: str) -> bool:
    """Whether there is anything to check."""
    match check:
        case "packed":
            return entry.predicts == "next tokens"
        case "export":
            return not entry.name.endswith("(ours)")  # it has its own format, see tests/train/test_export.py
        case _:
            return True


def page() -> str:
    """docs/models.md."""
    passing = [line for line in ENTRIES if not any(outcome(line).values())]
    rows = []
    reasons: dict[str, dict[str, None]] = {}  # reason -> where, each once
    for line, entry in ENTRIES.items():
        found = outcome(line)
        marks = ["" if not applies(entry, name) else "no" if found[name] else "yes" for name in CHECKS]
        rows.append(f"| {line} | {entry.predicts} | {' | '.join(marks)} |")
        for name in CHECKS:
            if reason := found[name]:
                reasons.setdefault(reason, {})[f"{entry.name} ({name})"] = None
    said = [f"- {', '.join(places)}: {reason}." for reason, places in reasons.items()]
    return "\n".join(
        [HEAD.format(passing=len(passing), lines=len(ENTRIES)), *rows, "", "## What does not work", "", *said, ""]
    )


HEAD = """\
# Models

{passing} of {lines} lines pass every check that applies to them. Written by `python -m tests.test_models` from the
checks that `pytest tests/test_models.py` runs, on tiny random configurations of `transformers`, in fp32 on a CPU; a
test fails when this page is out of date.

- **partition**: three blocks hold every parameter once; a tied one belongs to the first block that uses it.
- **cache**: a step from stored hidden states has the loss and the gradients of the whole step, bit for bit.
- **reference**: a visit of one step to each block ends with the losses and weights of Algorithm 1 in plain lines
  (`src/blocktrain/reference.py`), bit for bit.
- **export**: the saved folder loads as the same function.
- **packed**: conversations packed into one row do not see each other.

A model that is not listed is found by running it, as these are: there is no table of names. One that is no chain of
layers says why, and `layers={{...}}` names them by hand.

| model | predicts | partition | cache | reference | export | packed |
|---|---|---|---|---|---|---|"""


@pytest.mark.parametrize("line", ENTRIES)
def test_a_model_passes_its_checks(line: str) -> None:
    failed = {check for check, reason in outcome(line).items() if reason is not None}
    assert failed == KNOWN.get(ENTRIES[line].name, set()), outcome(line)


def test_the_page_is_what_the_checks_found() -> None:
    assert PAGE.read_text() == page(), "docs/models.md is out of date: python -m tests.test_models"


if __name__ == "__main__":
    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    PAGE.write_text(page())
