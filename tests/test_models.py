"""The matrix of models: what of this package works with which architecture, found by running it.

    python -m tests.test_models        writes docs/models.md from the same checks (five minutes on two cores)

Every causal language model of transformers as a tiny random one (see `tiny_configurations.py`), and some others.

    partition       three blocks hold every parameter that training changes, each once
    full            two steps with one block are two steps of AdamW, bit for bit, dropout included
    reference       a visit to each block, a step each, ends with the weights of Algorithm 1 in plain lines
    cache           from stored hidden states a step has the loss and the gradients of the whole step, bit for bit
    checkpointing   gradients under activation checkpointing are equal bit for bit
    resume          a run that is saved and continued ends with the weights of one that is not, bit for bit
    export          the saved folder loads as the same function
    packed          conversations packed into one row do not see each other
"""

from __future__ import annotations

import copy
import itertools
import logging
import tempfile
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import blocktrain as bt
from blocktrain import reference
from blocktrain.chain.boundary import BoundaryRunner
from blocktrain.chain.freezing import activate
from blocktrain.optim.factory import nothing
from blocktrain.optim.state_store import KeepOnHost

from .tiny_configurations import names, tiny

Batch = Mapping[str, torch.Tensor]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
SEVEN = ("partition", "full", "reference", "cache", "checkpointing", "resume", "export")
CHECKS = (*SEVEN, "packed")

TEXT: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
TOKENS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
PLAIN: dict[str, Any] = TEXT | TOKENS
GATED: dict[str, Any] = PLAIN | {"intermediate_size": 48, "num_key_value_heads": 2}
IMAGE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}

BERT = hf.BertConfig(**TEXT, intermediate_size=48, pad_token_id=2)
VIT = hf.ViTConfig(**IMAGE, image_size=8, patch_size=4)
RESNET = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
OTHERS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    **{
        name: ("texts from texts", lambda name=name: hf.AutoModelForSeq2SeqLM.from_config(tiny(name)))
        for name in ("t5", "bart", "mbart", "pegasus", "t5gemma")
    },
    "whisper": ("texts from sounds", lambda: hf.AutoModelForSpeechSeq2Seq.from_config(tiny("whisper"))),
    **{
        name: ("next tokens, also of images", lambda name=name: hf.AutoModelForImageTextToText.from_config(tiny(name)))
        for name in ("llava", "qwen2_5_vl", "mistral3", "llama4", "mllama")
    },
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
    predicts: str  # "next tokens", "texts from texts", "classes of images", ...
    build: Callable[[], nn.Module]
    layers: Mapping[str, list[str]] | None = None  # named by hand

    def partition(self, model: nn.Module) -> bt.Partition:
        """In three blocks."""
        return bt.partition(model, num_blocks=3, layers=self.layers)

    def batch(self) -> dict[str, torch.Tensor]:
        """Two rows."""
        random = torch.Generator().manual_seed(1)
        if self.predicts == "classes of images":
            return {"pixel_values": torch.randn(2, 3, 8, 8, generator=random), "labels": torch.tensor([0, 1])}
        ids = torch.randint(3, 64, (2, 12), generator=random)
        if self.predicts == "texts from sounds":
            return {"input_features": torch.randn(2, 16, 128, generator=random), "labels": ids}
        classes = self.predicts == "classes of texts"
        more = {"attention_mask": torch.ones_like(ids)} if classes else {}
        return {"input_ids": ids, "labels": torch.tensor([0, 1]) if classes else ids, **more}


def causal(name: str) -> nn.Module:
    config = tiny(name)
    text = config.get_text_config(decoder=True)
    config.use_cache = text.use_cache = False  # as `load_model` sets it
    if hasattr(text, "is_decoder"):
        text.is_decoder = True  # BERT and its kind read the tokens ahead by default
    return hf.AutoModelForCausalLM.from_config(config)


def without_cache(build: Callable[[], nn.Module]) -> nn.Module:
    """A model as a run trains it: a cache of keys lays them out in another way, which changes the last bits."""
    model = build()
    config: Any = getattr(model, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return model


ENTRIES = {
    entry.name: entry
    for entry in (
        *(Entry(name, "next tokens", partial(causal, name)) for name in names()),
        *(
            Entry(f"{name}, other task" if name in names() else name, what, partial(without_cache, build))
            for name, (what, build) in OTHERS.items()
        ),
    )
}
SAMPLE = ("gpt2", "qwen3", "gemma4_text", "xglm", "jetmoe", "t5", "BERT", "ViT", "ResNet-8 (ours)")
LARGER_SAMPLE = (
    "mixtral",
    "zamba2",
    "gemma3",
    "gemma3n_text",
    "biogpt",
    "xlnet",
    "nanochat",
    "zaya",
    "whisper",
    "hy_v4",
    "xmod",
)
# What does not work in the samples: layers that read what another one computed cannot be run from stored hidden states.
KNOWN: dict[str, set[str]] = {
    **{name: {"cache"} for name in ("gemma3n_text", "hy_v4", "zaya")},
    # Several layers read the same bias of positions: checkpointing adds their gradients of it in another order.
    "t5": {"cache", "checkpointing"},
}
BLIND = "its masks do not follow from position ids; set chat.layout = 'padded'"


@cache
def outcome(line: str) -> dict[str, str | None]:
    """Check -> None where it passes, else why it does not."""
    torch.manual_seed(0)
    entry = ENTRIES[line]
    try:
        model = entry.build().eval()
    except Exception as error:
        return dict.fromkeys(CHECKS, f"it is not built from a tiny configuration ({' '.join(str(error).split())[:90]})")
    return {name: _reason(check, entry, model) for name, check in RUN.items()}


def _reason(check: Callable[[Entry, nn.Module], None], entry: Entry, model: nn.Module) -> str | None:
    try:
        check(entry, copy.deepcopy(model))
    except (AssertionError, bt.BlocktrainError) as error:
        return str(error).splitlines()[0]
    except Exception as error:
        return f"the model itself raises {type(error).__name__} ({' '.join(str(error).split())[:90]})"
    return None


def check_partition(entry: Entry, model: nn.Module) -> None:
    partition, batch = entry.partition(model), entry.batch()
    owned = {id(parameter) for block in partition for parameter in block.parameters.values()}
    assert len(partition) == 3
    assert len(owned) == sum(len(block.parameters) for block in partition), "two blocks own a parameter"
    model(**batch).loss.backward()
    for name, parameter in model.named_parameters():
        assert id(parameter) in owned or parameter.grad is None, f"'{name}' has a gradient and is in no block"


def check_cache(entry: Entry, model: nn.Module) -> None:
    partition, batch = entry.partition(model), entry.batch()
    runner = BoundaryRunner(partition.chain)
    for block in partition.blocks[1:]:
        activate(partition, block)
        runner.check(batch, block.boundary)
        whole, wanted = _gradients(model, batch, block)
        hidden = runner.states(batch, [block.boundary])[block.boundary]
        with runner.running(start=block.boundary, hidden=hidden):
            loss, given = _gradients(model, batch, block)
        assert torch.equal(loss, whole), "the loss differs"
        assert all(_same(*pair) for pair in zip(given, wanted, strict=True)), "a gradient differs"


def check_full(entry: Entry, model: nn.Module) -> None:
    batch, plain = entry.batch(), copy.deepcopy(model).train()
    partition = bt.partition(model, num_blocks=1, layers=entry.layers)
    optimizer = bt.BlockOptimizer(partition, torch.optim.AdamW, lr=1e-2, undecayed=nothing)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    with optimizer.visit(partition[0]):
        wanted = [_step(plain, batch, adamw, seed) for seed in (0, 1)]
        found = [_step(model, batch, optimizer, seed) for seed in (0, 1)]
    assert found == wanted, "the losses differ"
    _require_equal_weights(model, plain)


def check_checkpointing(entry: Entry, model: nn.Module) -> None:
    batch, partition = entry.batch(), entry.partition(model)
    for block in partition:
        activate(partition, block)
        _, wanted = _gradients(model, batch, block)
        with bt.checkpointing(partition):
            _, given = _gradients(model, batch, block)
        assert all(_same(*pair) for pair in zip(given, wanted, strict=True)), "a gradient differs"


def _gradients(model: nn.Module, batch: Batch, block: bt.Block) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """The loss and the gradients of the parameters of `block`; dropout is drawn from the same seed each time."""
    torch.manual_seed(0)
    loss = model(**batch).loss
    return loss.detach(), torch.autograd.grad(loss, list(block.parameters.values()), allow_unused=True)


def check_resume(entry: Entry, model: nn.Module) -> None:
    batch, other = entry.batch(), copy.deepcopy(model)

    def visits(model: nn.Module, optimizer: bt.BlockOptimizer, steps: range) -> None:
        partition = optimizer.partition
        for step in steps:
            with optimizer.visit(partition[step % 3]):
                _step(model, batch, optimizer, step)

    def make(model: nn.Module) -> bt.BlockOptimizer:
        return bt.BlockOptimizer(entry.partition(model), torch.optim.AdamW, lr=1e-2, state=KeepOnHost())

    through = make(model)
    visits(model, through, range(2))
    saved = copy.deepcopy((model.state_dict(), through.state_dict()))
    visits(model, through, range(2, 4))
    resumed = make(other)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    visits(other, resumed, range(2, 4))
    _require_equal_weights(other, model)


def _step(model: nn.Module, batch: Mapping[str, torch.Tensor], optimizer: Any, seed: int) -> float:
    torch.manual_seed(seed)
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _require_equal_weights(found: nn.Module, wanted: nn.Module) -> None:
    for (name, one), other in zip(found.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(one, other), f"'{name}' differs"


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
    submodels = [
        [
            *(modules[path] for layer in block.layers for path in layer.modules),
            nn.ParameterList(plain.get_parameter(path) for layer in block.layers for path in layer.direct),
        ]
        for block in partition
    ]
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
    inputs = entry.batch()
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
    "full": check_full,
    "reference": check_reference,
    "cache": check_cache,
    "checkpointing": check_checkpointing,
    "resume": check_resume,
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


def row(line: str, found: Mapping[str, str | None]) -> str:
    """The line of the table."""
    entry = ENTRIES[line]
    marks = ["" if not applies(entry, name) else "no" if found[name] else "yes" for name in CHECKS]
    return f"| {line} | {entry.predicts} | {' | '.join(marks)} |"


def page(outcomes: Mapping[str, Mapping[str, str | None]]) -> str:
    """docs/models.md, of the outcome of each line."""
    causals = [line for line, entry in ENTRIES.items() if entry.predicts == "next tokens"]
    built = [line for line in causals if "not built" not in (outcomes[line]["export"] or "")]
    passing = [line for line in built if not any(outcomes[line][check] for check in SEVEN)]
    reasons: dict[str, dict[str, None]] = {}  # reason -> where, each once
    for line in ENTRIES:
        for name, reason in outcomes[line].items():
            if reason and reason != BLIND:
                reasons.setdefault(reason, {})[f"{line} ({name})"] = None
    said = []
    for reason, places in reasons.items():
        models = {place.rpartition(" (")[0] for place in places}
        where = ", ".join(places) if len(places) < len(CHECKS) - 2 or len(models) > 1 else f"{models.pop()} (most)"
        said.append(f"- {where}: {reason}.")
    head = HEAD.format(
        passing=len(passing),
        built=len(built),
        all=len(causals),
        share=len(passing) / len(built),
        version=hf.__version__,
    )
    rows = [row(line, outcomes[line]) for line in ENTRIES]
    return "\n".join([head, *rows, "", "## What does not work", "", *said, ""])


HEAD = """\
# Models

{passing} of the {built} causal language models that transformers {version} builds from a tiny configuration
({share:.1%}; it names {all}) pass all of the first seven checks. Written by `python -m tests.test_models`, on tiny
random models, in fp32 on a CPU. `pytest tests/test_models.py` runs samples.

- **partition**: three blocks hold every parameter that training changes, each once.
- **full**: two steps with one block are two steps of `AdamW`, bit for bit, dropout included.
- **reference**: a visit of one step to each block ends with the losses and weights of Algorithm 1 in plain lines
  (`src/blocktrain/reference.py`), bit for bit.
- **cache**: a step from stored hidden states has the loss and the gradients of the whole step, bit for bit. Where it
  says no, a run does not use a prefix cache, and says why; everything else works.
- **checkpointing**: gradients under activation checkpointing are equal bit for bit.
- **resume**: a run that is saved and continued ends with the weights of one that is not, bit for bit.
- **export**: the saved folder loads as the same function.
- **packed** (none of the seven): conversations packed into one row do not see each other. Where it says no, the masks
  do not follow from position ids; set `chat.layout = 'padded'`.

A model is found by running it: there is no table of names. One that does not run each of its layers once says why, and
`layers={{...}}` names them by hand. Of a model that also reads images or sound, the chain is what reads text; the rest
stays as it is, which is logged.

| model | predicts | partition | full | reference | cache | checkpointing | resume | export | packed |
|---|---|---|---|---|---|---|---|---|---|"""


@pytest.mark.parametrize("line", SAMPLE)
def test_a_model_passes_its_checks(line: str) -> None:
    failed = {check for check in SEVEN if outcome(line)[check] is not None}
    assert failed == KNOWN.get(line, set()), outcome(line)


@pytest.mark.slow
@pytest.mark.parametrize("line", LARGER_SAMPLE)
def test_a_model_of_the_larger_sample_passes_its_checks(line: str) -> None:
    failed = {check for check in SEVEN if outcome(line)[check] is not None}
    assert failed == KNOWN.get(line, set()), outcome(line)


def test_the_page_has_every_model_and_counts_what_its_table_says() -> None:
    text = PAGE.read_text()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    rows = {name: marks for name, *marks in table[1:]}
    causals = [marks[1 : 1 + len(SEVEN)] for marks in rows.values() if marks[0] == "next tokens"]
    unbuilt = [name for name in rows if f"{name} (most): it is not built" in text]
    passing, built = sum(set(marks) == {"yes"} for marks in causals), len(causals) - len(unbuilt)
    head = HEAD.format(passing=passing, built=built, all=len(causals), share=passing / built, version=hf.__version__)
    if f"transformers {hf.__version__} " not in text:
        pytest.skip("the page was written with another transformers, which has other models")
    assert list(rows) == list(ENTRIES), "docs/models.md is out of date: python -m tests.test_models"
    assert text.startswith(head)
    readme = (PAGE.parent.parent / "README.md").read_text()
    assert f"{passing} of the {built} that are tested pass every check" in readme


def _quiet() -> None:
    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    logging.getLogger("blocktrain").setLevel(logging.ERROR)


if __name__ == "__main__":
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=_quiet) as pool:
        PAGE.write_text(page(dict(zip(ENTRIES, pool.map(outcome, ENTRIES), strict=True))))
