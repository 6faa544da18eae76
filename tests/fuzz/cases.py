"""Inputs that may be wrong, made from a seed: configuration values, damaged files, data, runs, options of `plan`.

A case is a function that prepares a folder and returns the arguments of the command. It says whether the command must
refuse (`Refuse.MUST`) or may do either.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from blocktrain.train.config_docs import tables

TINY = {
    "name": '"tiny"',
    "device": '"cpu"',
    "text.source": '"corpus.txt"',
    "text.row_tokens": "16",
    "text.cache": '"cache"',
    "text.validation_share": "0.2",
    "model.architecture": '"gpt2"',
    "model.config.n_layer": "2",
    "model.config.n_embd": "8",
    "model.config.n_head": "2",
    "model.config.n_positions": "16",
    "blocks.count": "2",
    "schedule.visit": '"1 steps"',
    "schedule.sweeps": "1",
    "batch.rows": "2",
    "evaluation.rows": "2",
    "evaluation.batch_rows": "2",
}
# A value in TOML, and the kinds of key (as `blocktrain config` names them) that may take it.
VALUES: dict[str, tuple[str, ...]] = {
    '"x"': ("text", "duration", "`", "any value"),
    '""': ("text", "`", "any value"),
    '".."': ("text", "any value"),
    '"~"': ("text", "any value"),
    '"[/bold] [red]"': ("text", "any value"),
    '"\\u001b[31mred\\u001b[0m"': ("text", "any value"),
    '"<script>alert(1)</script>"': ("text", "any value"),
    '"two\\nlines"': ("text", "any value"),
    '"nul\\u0000byte"': ("text", "any value"),
    '"' + "long" * 200 + '"': ("text", "any value"),
    '"1e30 steps"': ("text", "duration", "any value"),
    '"-1 tokens"': ("text", "any value"),
    '"nan epochs"': ("text", "any value"),
    "3": ("number", "duration", "any value"),
    "0": ("number", "duration", "any value"),
    "-1": ("number", "any value"),
    "0.5": (" number", "number or", "any value"),
    "1e300": (" number", "number or", "any value"),
    "nan": ("any value",),
    "-inf": ("any value",),
    "1" + "0" * 25: ("number", "any value"),
    "true": ("true or false", "any value"),
    "[]": ("list", "any value"),
    "[1, 2]": ("list", "any value"),
    '["a", ["b"]]': ("list", "any value"),
    "{ a = 1 }": ("table", "any value"),
    "1979-05-27": ("any value",),
}


class Refuse(Enum):
    """Whether a command must refuse an input, or may do either: some inputs are merely odd."""

    MUST = "must be refused"
    MAY = "may be refused"


@dataclasses.dataclass(frozen=True)
class Case:
    """One input. `prepare(folder)` writes what it needs and returns the command's arguments."""

    name: str
    prepare: Callable[[Path], list[str]]
    refuse: Refuse = Refuse.MAY


def train(folder: Path, changes: dict[str, str] | None = None, without: tuple[str, ...] = ()) -> list[str]:
    """Arguments that train the tiny run on a corpus, with `changes` of its keys."""
    (folder / "corpus.txt").write_text("def f(x):\n    return x + 1\n\n" * 60)
    keys = {key: value for key, value in TINY.items() if not key.startswith(without or ("?",))} | (changes or {})
    (folder / "empty.toml").write_text("")
    sets = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
    return ["train", "empty.toml", "--out", "run", *sets]


def config_values(rng: random.Random) -> Iterator[Case]:
    """Every key of the configuration with every value, in a random order."""
    pairs = [(table.name, key, value) for table in tables() for key in table.keys for value in VALUES]
    rng.shuffle(pairs)
    for table, key, value in pairs:
        path = f"{table}.{key.name}" if table else key.name
        fits = any(kind in f" {key.kind}" for kind in VALUES[value]) or (value == '"x"' and "`" in key.kind)
        wrong_type = not fits and not (key.default == "none" and value == '"none"')
        kind_of_data = table.split(".")[0]
        others = ("text",) if kind_of_data in ("chat", "labelled", "images") else ()
        yield Case(
            f"{path} = {value[:40]}",
            lambda folder, path=path, value=value, others=others: train(folder, {path: value}, others),
            Refuse.MUST if wrong_type else Refuse.MAY,
        )


def damaged(data: bytes, rng: random.Random) -> bytes:
    """`data` with one kind of damage."""
    place = rng.randrange(max(len(data), 1))
    kind = rng.randrange(6)
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]
    if kind == 2:
        return data[:place] + rng.choice([b"\xff\xfe", b"\x00", b"[[[[", b'{"a":', b"NaN", b"-Infinity"]) + data[place:]
    if kind == 3:
        return b""
    if kind == 4:
        return rng.choice([b"null", b"[]", b"{}", b"3", b'"text"', b"[" * 3000, b'{"a":' * 3000])
    return data[:place] + data[place : place + 200] * 3 + data[place + 200 :]


def changed_json(value: Any, rng: random.Random) -> Any:
    """`value` with one of its parts replaced by something else, or removed."""
    replacements: list[Any] = [
        None,
        -1,
        0,
        1e308,
        float("nan"),
        float("inf"),
        10**30,
        "x",
        "",
        "\ud800",
        [],
        {},
        True,
        [[]],
    ]
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: changed_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [*value[:place], changed_json(value[place], rng), *value[place + 1 :]]
    return rng.choice(replacements)


def damaged_toml(rng: random.Random) -> Iterator[Case]:
    """A configuration file with damage."""
    lines = "\n".join(f"{key} = {value}" for key, value in TINY.items()).encode()
    while True:
        data = damaged(lines, rng)

        def prepare(folder: Path, data: bytes = data) -> list[str]:
            arguments = train(folder)
            (folder / "config.toml").write_bytes(data)
            return ["train", "config.toml", "--out", "run", *arguments[-2:]]

        yield Case(f"TOML file {data[:30]!r}", prepare)


def changed_runs(rng: random.Random, finished: Path) -> Iterator[Case]:
    """A finished run with one file changed, then resumed, reported or exported."""
    files = [path.relative_to(finished) for path in sorted(finished.rglob("*")) if path.is_file()]
    while True:
        name = rng.choice(files)
        command = rng.choice(["resume", "report", "export"])
        seed = rng.randrange(2**31)

        def prepare(folder: Path, name: Path = name, command: str = command, seed: int = seed) -> list[str]:
            mine = random.Random(seed)
            shutil.copytree(finished.parent, folder, dirs_exist_ok=True)
            path = folder / finished.name / name
            data = path.read_bytes()
            path.unlink()  # it may be a hard link
            try:
                if path.suffix == ".jsonl":
                    lines = [json.loads(line) for line in data.splitlines()]
                    place = mine.randrange(len(lines))
                    lines[place] = changed_json(lines[place], mine)
                    data = "\n".join(json.dumps(line) for line in lines).encode()
                elif path.suffix == ".json" and mine.random() < 0.7:
                    data = json.dumps(changed_json(json.loads(data), mine)).encode()
                else:
                    data = damaged(data, mine)
            except ValueError:
                data = damaged(data, mine)
            path.write_bytes(data)
            return [command, finished.name, *(["out"] if command == "export" else [])]

        yield Case(f"{command} with another {name}", prepare)


def changed_models(rng: random.Random, saved: Path) -> Iterator[Case]:
    """A folder of pretrained weights with one file changed."""
    files = [path.relative_to(saved) for path in sorted(saved.rglob("*")) if path.is_file()]
    while True:
        name, seed = rng.choice(files), rng.randrange(2**31)

        def prepare(folder: Path, name: Path = name, seed: int = seed) -> list[str]:
            mine = random.Random(seed)
            shutil.copytree(saved, folder / "model")
            path = folder / "model" / name
            data = path.read_bytes()
            if path.suffix == ".json" and mine.random() < 0.8:
                data = json.dumps(changed_json(json.loads(data), mine)).encode()
            else:
                data = damaged(data, mine)
            path.write_bytes(data)
            return train(folder, {"model.path": '"model"'}, without=("model",))

        yield Case(f"model with another {name}", prepare)


ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]},
    {"prompt": "1 + 1?", "completion": "2"},
    {"question": "1 + 1?", "answer": "2"},
    {"instruction": "add", "input": "1 1", "output": "2"},
    {"text": "one text", "label": "a"},
    {"text": "another text", "label": "b"},
]


def changed_data(rng: random.Random) -> Iterator[Case]:
    """Rows of fields with something changed, as each kind of data that reads them."""
    while True:
        kind, seed = rng.choice(["text", "chat", "labelled"]), rng.randrange(2**31)
        suffix = rng.choice([".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt"])

        def prepare(folder: Path, kind: str = kind, seed: int = seed, suffix: str = suffix) -> list[str]:
            mine = random.Random(seed)
            rows: list[Any] = ROWS[:4] * 8 if kind == "chat" else ROWS[4:] * 16
            rows = [changed_json(row, mine) if mine.random() < 0.1 else row for row in rows]
            lines = "\n".join(json.dumps(row) for row in rows)
            data = json.dumps(rows).encode() if suffix == ".json" else lines.encode()
            if mine.random() < 0.4:
                data = damaged(data, mine)
            source = folder / f"rows{suffix}"
            source.write_bytes(data)
            changes = {f"{kind}.source": f'"{source.name}"', f"{kind}.cache": '"cache"'}
            changes |= {"text.row_tokens": "16"} if kind == "text" else {}
            return train(folder, changes, without=() if kind == "text" else ("text",))

        yield Case(f"{kind} from a changed {suffix} file", prepare)


PLAN = ["--model", "--tokens", "--seq", "--gpu", "--gpus", "--blocks", "--rows", "--price", "--host-memory", "--disk"]
ODD = [
    "-1",
    "0",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "²",
    "9" * 25,
    "",
    "x",
    "10B",
    "-5T",
    "[/bold]",
    "\x00",
    "1_0",
    "0x10",
    "½",
]


def plan_options(rng: random.Random) -> Iterator[Case]:
    """Options of `plan` with odd values."""
    good = {"--model": "gpt2", "--tokens": "10B", "--seq": "1024", "--gpu": "rtx4090", "--gpus": "2"}
    while True:
        chosen = {option: rng.choice(ODD) for option in rng.sample(PLAN, rng.choice([1, 1, 2]))}
        arguments = [f"{option}={value}" for option, value in {**good, **chosen}.items()]
        yield Case(f"plan {chosen}", lambda _folder, arguments=arguments: ["plan", *arguments])


def cases(seed: int, *, finished: Path, saved: Path) -> Iterator[Case]:
    """All kinds in turns, without end. finished: a run folder; saved: a folder that `from_pretrained` loads."""
    rng = random.Random(seed)
    kinds = [
        config_values(rng),
        changed_runs(rng, finished),
        changed_data(rng),
        changed_models(rng, saved),
        config_values(rng),
        plan_options(rng),
        damaged_toml(rng),
    ]
    while kinds:
        for kind in list(kinds):
            case = next(kind, None)
            if case is None:
                kinds.remove(kind)
            else:
                yield case
