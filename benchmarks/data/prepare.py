"""Seconds and peak memory of preparing one large text file and many conversations, by blocktrain, `datasets` and TRL.

    python benchmarks/data/prepare.py --data FOLDER [--who blocktrain] [--megabytes 200] [--conversations 100000]

FOLDER has `books`, `gsm8k` and `gpt2_tokenizer`; both inputs are made of these. Each preparation runs in a process of
its own, with an empty cache. Memory is the proportional set size of that process and its children, sampled ten times a
second, less what the process had after its imports. Results are added to `prepare.json` under `--label`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

ROW_TOKENS = 1024


def write_text(path: Path, data: Path, size: int) -> None:
    """`size` bytes of books in one file, repeated where there are too few."""
    books = [table.column("text") for table in map(pq.read_table, sorted((data / "books").glob("*.parquet")))]
    text = "\n\n".join(str(book) for column in books for book in column).encode()
    with path.open("wb") as file:
        while (left := size - file.tell()) > 0:
            file.write(text[:left].decode(errors="ignore").encode() or b"\n")


def write_conversations(path: Path, data: Path, count: int) -> None:
    """`count` conversations of one or two questions of GSM8K with their answers."""
    problems = [json.loads(line) for line in (data / "gsm8k" / "train.jsonl").read_text().splitlines()]
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            messages: list[dict[str, str]] = []
            for problem in draw.choices(problems, k=draw.choice([1, 1, 2])):
                messages.append({"role": "user", "content": problem["question"]})
                messages.append({"role": "assistant", "content": problem["answer"]})
            file.write(json.dumps({"messages": messages}) + "\n")


def with_blocktrain(kind: str, path: Path, tokenizer: Path, cache: Path) -> Iterator[int]:
    """Tokens of the training and validation rows."""
    from blocktrain.data.chat import ChatConfig, open_chat
    from blocktrain.data.text import TextConfig, open_text

    settings: dict[str, Any] = {"source": str(path), "tokenizer": str(tokenizer), "cache": str(cache)}
    yield 0
    if kind == "text":
        data = open_text(TextConfig(row_tokens=ROW_TOKENS, **settings))
    else:
        data = open_chat(ChatConfig(row_tokens=ROW_TOKENS, **settings))
    yield (len(data.train) + len(data.validation)) * ROW_TOKENS


def with_datasets(kind: str, path: Path, tokenizer: Path, cache: Path) -> Iterator[int]:
    """`load_dataset` and `map` with the tokenizer, a line of the text being a row; no rows of equal length are cut."""
    from datasets import load_dataset

    from blocktrain.data.chat_template import DEFAULT

    encode = _pretrained(tokenizer, DEFAULT)
    builder = "text" if kind == "text" else "json"

    def text(rows: Any) -> Any:
        return {"input_ids": encode(rows["text"], verbose=False)["input_ids"]}

    def chat(rows: Any) -> Any:
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        rendered = encode.apply_chat_template(rows["messages"], **options)
        return {"input_ids": rendered["input_ids"], "assistant_masks": rendered["assistant_masks"]}

    yield 0
    rows = load_dataset(builder, data_files=str(path), split="train", cache_dir=str(cache))
    columns = rows.column_names
    rows = rows.map(text if kind == "text" else chat, batched=True, num_proc=os.cpu_count(), remove_columns=columns)
    batches: Any = rows.iter(1000)
    yield sum(len(ids) for batch in batches for ids in batch["input_ids"])


def with_trl(kind: str, path: Path, tokenizer: Path, cache: Path) -> Iterator[int]:
    """What `SFTTrainer` does to the rows before its first step, with packing."""
    from datasets import load_dataset
    from transformers import GPT2Config, GPT2LMHeadModel
    from trl.trainer.sft_config import SFTConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.sft_trainer import SFTTrainer  # pyright: ignore[reportMissingImports]

    from blocktrain.data.chat_template import DEFAULT

    encode = _pretrained(tokenizer, DEFAULT)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, n_positions=ROW_TOKENS))
    config = SFTConfig(
        output_dir=str(cache / "out"),
        max_length=ROW_TOKENS,
        packing=True,
        dataset_num_proc=os.cpu_count(),
        assistant_only_loss=kind == "chat",
        report_to=[],
        use_cpu=True,
        bf16=False,
        padding_free=False,
    )
    yield 0
    builder = "text" if kind == "text" else "json"
    rows = load_dataset(builder, data_files=str(path), split="train", cache_dir=str(cache))
    trainer = SFTTrainer(model=model, args=config, train_dataset=rows, processing_class=encode)
    prepared: Any = trainer.train_dataset
    yield sum(len(ids) for batch in prepared.iter(1000) for ids in batch["input_ids"])


def _pretrained(folder: Path, template: str) -> Any:
    from transformers import GPT2Tokenizer

    tokenizer = GPT2Tokenizer.from_pretrained(str(folder))
    tokenizer.chat_template = template
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


WORKERS = {"blocktrain": with_blocktrain, "datasets": with_datasets, "trl": with_trl}


def measured(who: str, kind: str, path: Path, tokenizer: Path) -> dict[str, float]:
    """Runs one preparation in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, __file__, "--worker", who, kind, str(path), str(tokenizer), scratch]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": scratch, "TOKENIZERS_PARALLELISM": "true"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            process.stdout.readline()
            idle = peak = _memory(process.pid)
            begin = time.perf_counter()
            while process.poll() is None:
                peak = max(peak, _memory(process.pid))
                time.sleep(0.1)
            wall = time.perf_counter() - begin
            answer = json.loads(process.stdout.read() or "{}")
        if process.returncode:
            return {"failed_with": process.returncode, "peak_gb": round((peak - idle) / 1e9, 2)}
        return {
            "wall_seconds": round(wall, 1),
            "processor_seconds": round(answer["processor_seconds"], 1),
            "peak_gb": round((peak - idle) / 1e9, 2),
            "tokens": answer["tokens"],
        }


def _processor_seconds() -> float:
    """The processor time of this process, and of the processes that it started and that have ended."""
    return sum(os.times()[:4])


def _memory(pid: int) -> int:
    """Bytes of the process and all below it; shared pages count once."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
        for thread in Path(f"/proc/{pid}/task").iterdir():
            total += sum(_memory(int(child)) for child in (thread / "children").read_text().split())
    except OSError:  # it ended in the meantime
        pass
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--who", nargs="*", choices=WORKERS, default=["blocktrain"])
    parser.add_argument("--kind", nargs="*", choices=("text", "chat"), default=["text", "chat"])
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--conversations", type=int, default=100_000)
    parser.add_argument("--label", help="instead of the name of the package, such as 'blocktrain before'")
    options = parser.parse_args()
    if options.worker:
        who, kind, *places = options.worker
        steps = WORKERS[who](kind, *map(Path, places))
        next(steps)
        begin = _processor_seconds()
        print("ready", flush=True)
        tokens = next(steps)
        print(json.dumps({"tokens": tokens, "processor_seconds": _processor_seconds() - begin}))
        return
    result = Path(__file__).with_suffix(".json")
    known: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        for kind in options.kind:
            path = Path(scratch) / ("big.txt" if kind == "text" else "chat.jsonl")
            if kind == "text":
                write_text(path, options.data, options.megabytes * 10**6)
                name = f"{options.megabytes} MB of text"
            else:
                write_conversations(path, options.data, options.conversations)
                name = f"{options.conversations} conversations"
            for who in options.who:
                found = measured(who, kind, path, options.data / "gpt2_tokenizer")
                known.setdefault(name, {})[options.label or who] = found
                print(name, options.label or who, found, flush=True)
                result.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
