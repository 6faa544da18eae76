"""`blocktrain init`: write a commented configuration to start from."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from blocktrain.cli.command import Command
from blocktrain.errors import ConfigError, StorageError
from blocktrain.outputs import write_output
from blocktrain.parse import output_path

KINDS = ("text", "chat", "labelled")
PLAIN_TEXT = (".txt", ".md", ".rst", ".py")  # endings of sources that are text, whatever the model

HEAD = """# Written by 'blocktrain init'. To train:    blocktrain train {file}
# Every key and its default: 'blocktrain config'. This run with every key: 'blocktrain train {file} --print-config'.

name = {name}
seed = 0
"""
FROM_WEIGHTS = """
[{kind}]
source = {source}   # a file, a folder, or owner/name on the hub
row_tokens = 512     # the longest that a row may be

[model]
path = {model}       # its weights are trained further; its tokenizer is used

[blocks]
count = 3            # more blocks take less memory and more steps

[schedule]
visit = "50 steps"   # how long one block is trained at a time
sweeps = 2           # visits to every block

[optimizer]
state = "host"       # keep a block's moments between its visits; "drop" forgets them
max_grad_norm = 1.0
# lr = 2e-5          # the default for pretrained weights, with 10 steps of warm-up and a cosine

[batch]
rows = 16            # rows of an optimizer step
micro_rows = "auto"  # at a time: as many as there is memory for

[evaluation]
every = "50 steps"

[stop]
patience = 5         # end after so many evaluations without a lower validation loss
"""
FROM_SCRATCH = """
[text]
source = {source}    # a file, a folder, owner/name on the hub; "stdlib" is the source of Python's standard library
tokenizer = "bytes"  # or a folder or hub name with a tokenizer
row_tokens = 128

[model]
architecture = "gpt2"  # any model_type of transformers; its settings:
config = {{ n_layer = 6, n_embd = 128, n_head = 4, n_positions = 128, resid_pdrop = 0, embd_pdrop = 0, attn_pdrop = 0 }}

[blocks]
count = 3            # more blocks take less memory and more steps

[schedule]
visit = "40 steps"   # how long one block is trained at a time
sweeps = 3           # visits to every block

[optimizer]
lr = 2e-3
weight_decay = 0.01
state = "host"       # keep a block's moments between its visits; "drop" forgets them
max_grad_norm = 1.0

[learning_rate]
shape = "cosine"
warmup_steps = 20

[batch]
rows = 16            # rows of an optimizer step

[evaluation]
every = "40 steps"
rows = 96

[checkpoint]
every = "120 steps"
"""


def init(options: argparse.Namespace) -> int:
    """Write the file and say what to do with it."""
    if options.file.suffix != ".toml":
        raise ConfigError(f"'{options.file}' would not be read as a configuration; choose a name that ends in .toml")
    if options.file.exists():
        raise StorageError(f"'{options.file}' exists already; choose another name")
    if options.model is not None and options.data is None:
        raise ConfigError(f"--model '{options.model}' is trained on what? Give --data, a file, a folder or a hub name")
    if options.model is None and options.kind not in (None, "text"):
        raise ConfigError(f"--kind {options.kind} needs --model, a folder or hub name with weights and a tokenizer")
    kind = options.kind or _kind(options)
    text = HEAD.format(file=options.file, name=_toml(options.file.stem)) + (
        FROM_SCRATCH.format(source=_toml(options.data or "stdlib"))
        if options.model is None
        else FROM_WEIGHTS.format(kind=kind, source=_toml(options.data), model=_toml(options.model))
    )
    write_output(options.file, text)
    if options.json:
        print(json.dumps({"written": str(options.file), "kind": kind}))
    else:
        print(f"wrote {options.file}, a run on [{kind}]; train with: blocktrain train {options.file}")
    return 0


def _kind(options: argparse.Namespace) -> str:
    """Conversations where there are weights to fine-tune, unless the data are plainly text."""
    is_text = options.model is None or options.data == "stdlib" or Path(options.data).suffix in PLAIN_TEXT
    return "text" if is_text else "chat"


def _toml(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", type=output_path, nargs="?", default=Path("train.toml"), metavar="FILE", help="(default: %(default)s)"
    )
    parser.add_argument("--model", metavar="PATH", help="a folder or hub name to fine-tune; default: a small new GPT-2")
    parser.add_argument("--data", metavar="SOURCE", help="a file, a folder or owner/name on the hub")
    parser.add_argument("--kind", choices=KINDS, help="of the data (default: chat with --model, else text)")


INIT = Command(
    name="init",
    help="write a commented configuration to start from",
    add_options=_add_options,
    run=init,
)
