"""What `datasets` would do with our sources, beside what this package does: contents, splits, speed, disk, processes.

    python benchmarks/data/library.py --data FOLDER        FOLDER has wikitext-2, books, gsm8k, gpt2_tokenizer

Decision 0018 quotes the results, which are in `library.json`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, Features, List, Value, load_dataset
from datasets.data_files import DataFilesDict, get_data_patterns

from blocktrain.data.cache_folder import cached_folder
from blocktrain.data.chat_template import ChatTemplate
from blocktrain.data.conversation import ConversationReader
from blocktrain.data.document import Document
from blocktrain.data.files import find_files
from blocktrain.data.records import DOCUMENT_SUFFIXES, record_of
from blocktrain.data.splits import open_sources, training_and_validation
from blocktrain.data.tokenize import tokenize_documents
from blocktrain.data.tokenizer import load_tokenizer
from blocktrain.runtime import environment, pick_device, result_path

# Name, content, and the options that fit our rules best.
FILES: dict[str, tuple[str, bytes, dict[str, Any]]] = {
    "a line ends in CR LF": ("text", b"one\r\ntwo\n", {"sample_by": "document"}),
    "a text that is a date": ("json", b'{"text": "2020-01-01 00:00:00"}\n', {}),
    "a field is missing": ("json", b'{"text": "x"}\n{"txt": "y"}\n', {}),
    "the third line is not JSON": ("json", b'{"text": "x"}\n\n{"text": \n', {}),
    "words that mean null": ("csv", b"text,label\nNA,0\nnull,01\n", {}),
    "a row is too short": ("csv", b"text,label\nalone\n", {}),
    "a row is too long": ("csv", b"text,label\na,b,c\n", {}),
}
FOLDERS = [
    ["train-00000-of-00001-a1b2c3test.parquet"],
    ["tests/test_order.py"],
    ["books-val.txt", "stories.txt"],
    ["my-test-notes.txt", "stories.txt"],
]


def contents(folder: Path) -> dict[str, str]:
    """What the reader of `datasets` returns for each of `FILES`, or the error it raises."""
    found = {}
    for name, (builder, content, options) in FILES.items():
        path = folder / f"{len(found)}.{builder}"
        path.write_bytes(content)
        try:
            rows = load_dataset(
                builder, data_files=str(path), split="train", cache_dir=str(folder / "cache"), **options
            )
            found[name] = str(list(rows))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}; cause: {error.__cause__}"
    return found


def split_names(folder: Path) -> list[dict[str, Any]]:
    """The splits that `datasets` and this package see in folders of these files."""
    found = []
    for number, names in enumerate(FOLDERS):
        place = folder / str(number)
        for name in names:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(name)
        theirs = DataFilesDict.from_patterns(get_data_patterns(str(place)), base_path=str(place))
        ours = find_files(place, DOCUMENT_SUFFIXES)
        found.append(
            {
                "files": names,
                "datasets": {
                    str(split): [os.path.relpath(path, place) for path in files] for split, files in theirs.items()
                },
                "blocktrain": {split: [file.id for file in files] for split, files in ours.items()},
            }
        )
    return found


def fastest(work: Callable[[Path], object], rounds: int = 5) -> dict[str, float]:
    """The shortest of several runs, each in a folder of its own, and what it leaves there."""
    taken, stored = [], 0
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            work(Path(folder))
            taken.append(time.perf_counter() - start)
            stored = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    return {"seconds": round(min(taken), 2), "megabytes": round(stored / 1e6, 1)}


def training_documents(source: str, text_field: str | None, limit: int | None, cache: Path) -> Iterator[Document]:
    corpora = open_sources(source, None, text_field=text_field, cache=cache)
    return training_and_validation(corpora, share=0.02, limit=limit)[0]


def tokenizing(source: str, tokenizer_name: str, limit: int | None) -> dict[str, dict[str, float]]:
    """Documents to tokens on the disk: as this package does it, and by `from_generator` and `map`."""
    tokenizer = load_tokenizer(tokenizer_name)

    def ours(folder: Path) -> None:
        tokenize_documents(training_documents(source, "text", limit, folder), tokenizer, folder / "train")

    def theirs(folder: Path, processes: int | None) -> None:
        def rows() -> Iterator[dict[str, str]]:
            for document in training_documents(source, "text", limit, folder):
                yield {"id": document.id, "text": document.text}

        def encode(batch: dict[str, list[str]]) -> dict[str, list[np.ndarray]]:
            return {
                "tokens": [np.append(ids, tokenizer.eos).astype(np.uint16) for ids in tokenizer.encode(batch["text"])]
            }

        stored = Dataset.from_generator(rows, cache_dir=str(folder / "text"), fingerprint="text")
        assert isinstance(stored, Dataset)
        stored.map(
            encode,
            batched=True,
            batch_size=100,
            remove_columns=["id", "text"],
            features=Features({"tokens": List(Value("uint16"))}),
            num_proc=processes,
            cache_file_name=str(folder / "tokens.arrow"),
            new_fingerprint="tokens",
        )

    return {
        "blocktrain": fastest(ours),
        "datasets, this process": fastest(lambda folder: theirs(folder, None)),
        "datasets, 2 processes": fastest(lambda folder: theirs(folder, 2)),
    }


def rendering(source: str, tokenizer_name: str) -> dict[str, Any]:
    """Conversations to tokens by a chat template: in a loop, and by `map` in this process and in two."""
    reader, template = ConversationReader(), ChatTemplate(load_tokenizer(tokenizer_name))
    documents = list(training_documents(source, None, None, Path("unused")))

    def encode(row: dict[str, str]) -> dict[str, np.ndarray]:
        rendered = template.render(
            reader.read(record_of(Document(id=row["id"], text=row["text"])), row["id"]), row["id"]
        )
        ((ids, trained),) = template.encode([rendered])
        return {"ids": ids, "trained": trained}

    def mapped(folder: Path, processes: int | None) -> None:
        rows = ({"id": document.id, "text": document.text} for document in documents)
        stored = Dataset.from_generator(lambda: rows, cache_dir=str(folder / "chat"), fingerprint="chat")
        assert isinstance(stored, Dataset)
        options: dict[str, Any] = {"cache_file_name": str(folder / "chat.arrow"), "new_fingerprint": "rendered"}
        stored.map(encode, remove_columns=["id", "text"], num_proc=processes, **options)

    return {
        "conversations": len(documents),
        "a loop": fastest(lambda _: [encode({"id": document.id, "text": document.text}) for document in documents]),
        "datasets, this process": fastest(lambda folder: mapped(folder, None)),
        "datasets, 2 processes": fastest(lambda folder: mapped(folder, 2)),
    }


def reading_rows(rows: int = 100_000, row_tokens: int = 128, batch: int = 8, batches: int = 500) -> dict[str, float]:
    """Microseconds for a batch of random rows from a memory-mapped array, and from an Arrow file of `datasets`."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 257, (rows, row_tokens), np.uint16)
    chosen = [generator.integers(0, rows, batch) for _ in range(batches)]
    with tempfile.TemporaryDirectory() as folder:
        tokens.tofile(f"{folder}/tokens.bin")
        plain = np.memmap(f"{folder}/tokens.bin", np.uint16, "r", shape=tokens.shape)
        features = Features({"tokens": List(Value("uint16"), length=row_tokens)})
        stored = Dataset.from_generator(
            lambda: ({"tokens": row} for row in tokens), features=features, cache_dir=folder, fingerprint="rows"
        )
        assert isinstance(stored, Dataset)
        arrow = stored.with_format("numpy")
        found = {}
        for name, read in {
            "blocktrain": lambda indices: plain[indices].astype(np.int64),
            "datasets": lambda indices: arrow[indices]["tokens"],
        }.items():
            start = time.perf_counter()
            for indices in chosen:
                read(indices)
            found[name] = round((time.perf_counter() - start) / batches * 1e6, 1)
    return found


def _map_in_a_rank(folder: Path, barrier: Any) -> None:
    stored = Dataset.from_dict({"n": list(range(20))})
    barrier.wait(60)
    stored.map(
        lambda row: (_log(folder / "calls"), row)[1],
        cache_file_name=str(folder / "map.arrow"),
        new_fingerprint="same",
    )


def _cache_in_a_rank(folder: Path, barrier: Any) -> None:
    def write(place: Path) -> None:
        for row in range(20):
            _log(folder / "calls")
            (place / str(row)).touch()

    barrier.wait(60)
    cached_folder(folder / "cache", "rows", source=0, key=0, state=0, write=write)


def _log(path: Path) -> None:
    with path.open("a") as file:
        file.write("x")
    time.sleep(0.01)


def two_ranks() -> dict[str, int]:
    """How many of 20 rows are processed when two processes open the same data at once."""
    found = {}
    for name, work in {"blocktrain": _cache_in_a_rank, "datasets": _map_in_a_rank}.items():
        with tempfile.TemporaryDirectory() as folder:
            context = multiprocessing.get_context("fork")
            barrier = context.Barrier(2)
            ranks = [context.Process(target=work, args=(Path(folder), barrier)) for _ in range(2)]
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join()
            found[name] = (Path(folder) / "calls").stat().st_size
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=result_path, default=str(Path(__file__).with_name("library.json")))
    arguments = parser.parse_args()
    datasets.disable_progress_bars()
    gpt2 = str(arguments.data / "gpt2_tokenizer")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        results = {
            "datasets": datasets.__version__,
            "environment": environment(pick_device("cpu")),
            "contents": contents(place),
            "splits": split_names(place / "splits"),
            "tokenizing the standard library as bytes": tokenizing("stdlib", "bytes", None),
            "tokenizing 20 books with GPT-2's tokenizer": tokenizing(str(arguments.data / "books"), gpt2, 20),
            "rendering the conversations of GSM8K": rendering(str(arguments.data / "gsm8k"), gpt2),
            "microseconds for a batch of 8 rows of 128 tokens": reading_rows(),
            "rows processed by two ranks, of 20": two_ranks(),
        }
    text = json.dumps(results, indent=1).replace(folder, "FOLDER").replace(str(arguments.data), "DATA")
    arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
