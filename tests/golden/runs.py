"""The runs whose records are kept: plain data, and the texts, conversations and images that they train on.

Each run is a TOML file (`file_of`) with overrides, as on the command line. Everything they read is made here, from
hashes of small numbers, so that neither a version of a library nor another file of the repository can change it.
Folders are relative: a run is started from the folder in which `write_data` has written.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

TEXT = """
[text]
source = "data/text"
row_tokens = 16
cache = "cache"
validation_share = 0.2
"""

CHAT = """
[chat]
source = "data/chat"
row_tokens = 64
cache = "cache"
"""

LABELLED = """
[labelled]
source = "data/labelled"
label_field = "tone"
row_tokens = 24
cache = "cache"
"""

IMAGES = """
[images]
source = "data/images"
cache = "cache"
"""

GPT2 = """
[model]
architecture = "gpt2"
config = { n_layer = 4, n_embd = 16, n_head = 2, n_positions = 64, attn_pdrop = 0.1, resid_pdrop = 0.1 }
"""

LLAMA = """
[model]
architecture = "llama"
[model.config]
num_hidden_layers = 4
hidden_size = 16
intermediate_size = 32
num_attention_heads = 2
num_key_value_heads = 1
max_position_embeddings = 64
"""

BERT = """
[model]
architecture = "bert"
[model.config]
num_hidden_layers = 2
hidden_size = 16
intermediate_size = 32
num_attention_heads = 2
max_position_embeddings = 24
hidden_dropout_prob = 0.1
attention_probs_dropout_prob = 0.1
"""

RESNET = """
[model]
architecture = "resnet8"
"""

COMMON = """
[blocks]
count = 3

[schedule]
visit = "4 steps"
sweeps = 1

[optimizer]
name = "AdamW"
lr = 0.01
weight_decay = 0.1
state = "host"
max_grad_norm = 1.0

[learning_rate]
shape = "cosine"
warmup_steps = 2
visit_warmup_steps = 2

[batch]
rows = 4

[prefix]
store = "off"

[evaluation]
every = "5 steps"
rows = 8
batch_rows = 4

[checkpoint]
every = "5 steps"
keep = 2
keep_best = false  # which one it is would depend on the last digits of a loss
"""

# Every row of a small subset comes twice in a visit, and again in the other visits of its sweep.
REUSED = ("sampling.scope=sweep", "sampling.rate=0.04", "schedule.visit=2 epochs", "schedule.sweeps=2")
STILL = ("model.config.attn_pdrop=0.0", "model.config.resid_pdrop=0.0", "model.config.embd_pdrop=0.0")

SIGNALLED, CRASHED = 6, 12  # the steps at which an interrupted run gets a signal, and then falls over

# How near numbers come on a machine with other kernels, relative. Measured between the pinned kernels and those for
# AVX-512 (PyTorch 2.13): the largest gap of all gradient norms, which differ more than losses, was 8e-5 for runs in
# fp32. Where values are rounded to bf16 or less (as in Muon's orthogonalisation, too), or pass through the batch norm
# of a few images, a last bit can tip a rounding, and it was 3e-2.
FINE, COARSE = 1e-3, 0.15

Command = Literal["train", "interrupted", "compare"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run, or one comparison.

    covers: what it is kept for. tables: of the data and the model. overrides: `a.b=c`.
    command: "train"; "interrupted": trained, stopped by a signal in step `SIGNALLED`, resumed, ended without a
        checkpoint at `CRASHED`, and resumed; "compare": the command of that name with these `methods`.
    tolerance: relative, of numbers from another machine. processes: started together.
    exported: also record the weights that `blocktrain export` writes. diverges: the run ends with a `NonFiniteError`.
    """

    covers: str
    tables: tuple[str, str] = (TEXT, GPT2)
    overrides: tuple[str, ...] = ()
    command: Command = "train"
    methods: tuple[str, ...] = ()
    tolerance: float = FINE
    processes: int = 1
    exported: bool = False
    diverges: bool = False

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of the runs, relative to the recorded one: "." or one for each compared method."""
        return self.methods or (".",)


RUNS: Mapping[str, Run] = {
    "blocks": Run(
        covers="fp32, ascending, moments on the host through a second sweep, dropout, cosine and warm-ups, export",
        overrides=("schedule.visit=3 steps", "schedule.sweeps=2"),
        exported=True,
    ),
    "cache-in-memory": Run(
        covers="a prefix cache on the host, ascending, filled as needed, rows read again",
        overrides=(*REUSED, "prefix.store=host"),
    ),
    "cache-on-disk": Run(
        covers="a prefix cache in a file, descending, filled ahead, micro-batches, moments dropped",
        overrides=(
            *(*REUSED, "prefix.store=file", "prefix.fill=ahead", "prefix.fill_rows=3", "schedule.order=descending"),
            *("batch.micro_rows=2", "optimizer.state=drop", "log_every=2"),
        ),
    ),
    "bf16": Run(
        covers="masters rebuilt from bf16, shuffled, a cache in bf16, subsets of a visit, wsd, decay of everything",
        overrides=(
            *(*REUSED, "precision=bf16", "prefix.store=host", "prefix.dtype=bf16", "schedule.order=shuffled"),
            *("sampling.scope=visit", "learning_rate.shape=wsd", "optimizer.decay=all"),
        ),
        tolerance=COARSE,
    ),
    "bf16-exact": Run(
        covers="exact masters, micro-batches, checkpointed layers with inputs on the host, chunked loss, Llama",
        tables=(TEXT, LLAMA),
        overrides=(
            *("precision=bf16-exact", "batch.micro_rows=2", "memory.checkpointing=layers", "memory.boundaries=host"),
            *("memory.loss_chunk=8", "schedule.sweeps=2", "schedule.visit=2 steps"),
        ),
        exported=True,
        tolerance=COARSE,
    ),
    "int8": Run(
        covers="int8 weights that rest on the host, 8-bit moments on the disk, dropout in frozen layers, epochs",
        overrides=(
            *("precision=int8", "memory.frozen=host", "optimizer.moments=8bit", "optimizer.state=disk"),
            *("blocks.frozen_dropout=true", "schedule.visit=2 steps", "schedule.sweeps=2"),
        ),
        tolerance=COARSE,
    ),
    "nf4": Run(
        covers="nf4 weights, visits to a block and all above it, a cache in int8, Llama, SGD with momentum",
        tables=(TEXT, LLAMA),
        overrides=(
            *(*REUSED, "precision=nf4", "schedule.span=suffix", "prefix.store=host", "prefix.dtype=int8"),
            *("optimizer.name=SGD", "optimizer.options.momentum=0.9", "optimizer.lr=0.1"),
        ),
        tolerance=COARSE,
    ),
    "tail-newton-schulz": Run(
        covers="weights stepped in the backward pass, a tail that is orthogonalised, a given order of blocks",
        overrides=(
            *("optimizer.in_backward=true", "optimizer.max_grad_norm=none", "optimizer.tail=newton-schulz"),
            *("optimizer.tail_share=0.2", "schedule.order=[1, 0, 2]"),
        ),
        tolerance=COARSE,
    ),
    "growing": Run(
        covers="layers that begin as the identity and are copied, a longer first visit, blocks of modules",
        overrides=(
            *("model.zero_residuals=true", "model.grown_layers=copied", 'schedule.first_visits=["6 steps"]'),
            *("blocks.pieces=modules", "schedule.sweeps=2", "schedule.visit=2 steps"),
        ),
    ),
    "rows-of-matrices": Run(
        covers="blocks with rows of a matrix, visits that end on a plateau of the training loss, Adafactor, descending",
        overrides=(
            *("blocks.largest=2500", "optimizer.name=Adafactor", "schedule.order=descending", "optimizer.state=disk"),
            *("schedule.visit=6 steps", "schedule.plateau.patience=1 steps", "schedule.plateau.threshold=0.9"),
            *(
                "schedule.plateau.minimum=2 steps",
                "log_every=2",
                "evaluation.every=20 steps",
                "checkpoint.every=8 steps",
            ),
        ),
    ),
    "resnet": Run(
        covers="augmented images, batch norm, two variants of an image from a cache, SGD, evaluation in epochs",
        tables=(IMAGES, RESNET),
        overrides=(
            *("sampling.scope=sweep", "sampling.rate=0.125", "sampling.variants=2", "schedule.visit=4 epochs"),
            *("prefix.store=host", "optimizer.name=SGD", "optimizer.lr=0.1", "optimizer.options.momentum=0.9"),
            *("evaluation.every=1 epochs", "checkpoint.every=3 epochs"),
        ),
        tolerance=COARSE,
    ),
    "classifier": Run(
        covers="labelled texts, BERT, accuracy, a plateau of the validation loss, a target loss",
        tables=(LABELLED, BERT),
        overrides=(
            *("schedule.plateau.watch=validation", "schedule.plateau.patience=2 steps", "evaluation.every=2 steps"),
            *("schedule.plateau.threshold=0.03", "schedule.sweeps=3", "schedule.visit=8 steps", "stop.target_loss=0.7"),
        ),
    ),
    "chat": Run(
        covers="packed conversations, loss on answers, generated answers that are compared, micro-batches of one row",
        tables=(CHAT, LLAMA),
        overrides=(
            *("evaluation.generate=3", "evaluation.new_tokens=4", "evaluation.answer_marker='#'", "batch.micro_rows=1"),
            *("schedule.sweeps=2", "evaluation.every=12 steps", "optimizer.lr=0.03"),
        ),
    ),
    "skipped": Run(
        covers="steps that are skipped because the loss is not finite",
        diverges=True,
        overrides=("on_nonfinite=skip", "optimizer.lr=1e30", "optimizer.max_grad_norm=1e30"),
    ),
    "interrupted": Run(
        covers="a signal, a resumed run, a crash, another: with Muon, a normalised tail, state on the disk, a cache",
        overrides=(
            *(*REUSED, "optimizer.name=Muon", "optimizer.state=disk", "optimizer.tail=sgd", "prefix.store=file"),
            "stop.duration=20 steps",
        ),
        command="interrupted",
        exported=True,
        tolerance=COARSE,
    ),
    "compared": Run(
        covers="`blocktrain compare`: full training, and a rival that needs no other package",
        overrides=("schedule.visit=8 steps", "batch.micro_rows=2", "log_every=3", 'imports=["rivals"]'),
        command="compare",
        methods=("full", "lisa"),
    ),
    "two-processes": Run(
        covers="data parallel, by rows, a cache in each process, gradients in several buckets and in bf16",
        overrides=(
            *(*STILL, *REUSED, "prefix.store=host", "distributed.bucket_bytes=4096", "distributed.reduce_dtype=bf16"),
            "optimizer.lr=0.001",
        ),
        processes=2,
    ),
    "local-steps": Run(
        covers="two processes that take steps apart and average the block, exact masters",
        overrides=(
            *("distributed.sync_every=2", "evaluation.every=4 steps", "checkpoint.every=4 steps"),
            *("precision=bf16-exact", "schedule.sweeps=2"),
        ),
        processes=2,
        tolerance=COARSE,
    ),
    "pipeline": Run(
        covers="two processes with half the layers each, blocks with a piece in each, a cache, checkpointed layers",
        tables=(TEXT, LLAMA),
        overrides=(
            *(*REUSED, "distributed.layout=pipeline", "blocks.count=2", "blocks.stages=2", "blocks.balance=flops"),
            *("prefix.store=host", "batch.micro_rows=2", "memory.checkpointing=layers", "optimizer.lr=0.001"),
        ),
        processes=2,
    ),
    "shards": Run(
        covers="two processes with a part of every weight each, exact masters",
        tables=(TEXT, LLAMA),
        overrides=("distributed.layout=fsdp", "precision=bf16-exact", "schedule.sweeps=2", "optimizer.lr=0.001"),
        processes=2,
        exported=True,
        tolerance=COARSE,
    ),
}


def file_of(name: str) -> str:
    """The configuration of a run before its overrides, as TOML."""
    return f'name = "{name}"\ndevice = "cpu"\n' + "".join(RUNS[name].tables) + COMMON


def write_data(folder: Path) -> None:
    """Text, conversations, labelled texts and images, into `folder`/data."""
    data = folder / "data"
    for kind in ("text", "chat", "labelled", "images"):
        (data / kind).mkdir(parents=True)
    for number in range(8):
        (data / "text" / f"tale-{number}.txt").write_text(_prose(f"tale {number}", 150), encoding="utf-8")
    for side, count in (("train", 24), ("validation", 6)):
        turns = [{"question": f"{draw(f'{side} {number}', 99)}?", "answer": "#7"} for number in range(2 * count)]
        (data / "chat" / f"{side}.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
        with (data / "labelled" / f"{side}.csv").open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["text", "tone"])
            for number in range(2 * count):
                tone = ("calm", "gay", "sad")[draw(f"{side} tone {number}", 3)]
                rows.writerow([f"{tone[0] * 3} {_prose(f'{side} words {number}', 2)}", tone])
    for side, count in (("train", 96), ("test", 12)):
        _write_images(data / "images" / f"{side}-00000-of-00001.parquet", side, count)


def draw(key: str, below: int) -> int:
    """A whole number below `below` that depends on `key` alone."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) % below


def _prose(key: str, words: int) -> str:
    """Words of an invented language, a full stop after some of them."""
    syllables = ("ba", "do", "ki", "lu", "me", "no", "ra", "si", "tu", "ve")
    vocabulary = ["".join(syllables[draw(f"{word} {at}", 10)] for at in range(1 + word % 3)) for word in range(30)]
    drawn = [vocabulary[min(draw(f"{key} {at}", 30), draw(f"{key} again {at}", 30))] for at in range(words)]
    return " ".join(word + ("." if at % 7 == 6 else "") for at, word in enumerate(drawn)) + "\n"


def _write_images(path: Path, side: str, count: int) -> None:
    """As in CIFAR-10's files: 32 x 32 pixels of noise, with a stripe where its class says, three classes."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    pngs, labels = [], []
    for number in range(count):
        noise = b"".join(hashlib.sha256(f"{side} {number} {at}".encode()).digest() for at in range(96))
        pixels, label = np.frombuffer(noise, np.uint8).reshape(32, 32, 3) // 2, draw(f"{side} class {number}", 3)
        pixels[10 * label : 10 * label + 6] += 100
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        pngs.append({"bytes": file.getvalue()})
        labels.append(label)
    pq.write_table(pa.table({"img": pngs, "label": labels}), path)
