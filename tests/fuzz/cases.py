"""Inputs that may be wrong, made from a seed: keys and values of a configuration, damaged files, data, runs, logs and
models, options and paths of every command.

A case is a function that prepares a folder and returns the arguments of the command. It says whether the command must
refuse (`Refuse.MUST`) or may do either.
"""

from __future__ import annotations

import dataclasses
import json
import os
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
    "9" * 6000: (),
    "[" * 3000: ("text", "any value"),
    '"\u202eevil\u202c ﬁ ½ \U0001f600"': ("text", "any value"),
    '"e\u0301\u0000"'.replace("\u0000", ""): ("text", "any value"),
    "-0.0": (" number", "number or", "any value"),
    '[{ a = 1 }, "x"]': ("list", "any value"),
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
            return train(folder, {"model.path": '"model"', "text.tokenizer": '"bytes"'}, without=("model",))

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
            changes |= {} if kind == "text" else {"model.config.n_positions": "512"}
            return train(folder, changes, without=() if kind == "text" else ("text",))

        yield Case(f"{kind} from a changed {suffix} file", prepare)


PLAN = ["--model", "--tokens", "--seq", "--gpu", "--gpus", "--nodes", "--blocks", "--rows", "--price", "--host-memory"]
PLAN += [
    "--disk",
    "--largest",
    "--loss-chunk",
    "--cache-epochs",
    "--multiplier",
    "--budget",
    "--deadline",
    "--provider",
]
PLAN += ["--method", "--precision", "--moments", "--hardware"]
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


def misspelt_keys(rng: random.Random) -> Iterator[Case]:
    """A known key with one letter changed, removed, doubled or in capitals, or in another table."""
    known = [(table.name, key.name) for table in tables() for key in table.keys]
    others = sorted({name for _, name in known})
    names = {f"{table}.{key}" if table else key for table, key in known}
    while True:
        table, key = rng.choice(known)
        place = rng.randrange(len(key))
        wrong = rng.choice(
            [
                key[:place] + key[place + 1 :],
                key[:place] + key[place] + key[place:],
                key[:place] + rng.choice("xyzäß ") + key[place + 1 :],
                key.upper(),
                rng.choice(others),
                key.replace("_", "-"),
            ]
        )
        path = f"{table}.{wrong}" if table else wrong
        is_free = ".options" in path or ".config" in path or path in names or path.split(".")[0] in ("imports", "data")
        if is_free or not wrong.strip() or any(name.startswith(f"{path}.") for name in names):
            continue
        without = ("text",) if table in ("chat", "labelled", "images") else ()
        yield Case(
            f"--set {path}",
            lambda folder, path=path, without=without: train(folder, {path: "1"}, without),
            Refuse.MUST,
        )


def two_values(rng: random.Random) -> Iterator[Case]:
    """Two keys with odd values at once, one of which may hide what the other does."""
    pairs = [(table.name, key.name) for table in tables() for key in table.keys]
    pairs = [(table, key) for table, key in pairs if table not in ("chat", "labelled", "images")]
    while True:
        chosen = [(f"{table}.{key}" if table else key, rng.choice(list(VALUES))) for table, key in rng.sample(pairs, 2)]
        yield Case(
            str([f"{key} = {value[:30]}" for key, value in chosen]), lambda folder, c=chosen: train(folder, dict(c))
        )


def resumed_with(rng: random.Random, finished: Path) -> Iterator[Case]:
    """A finished run that is resumed with other settings, most of which a resume refuses."""
    pairs = [(table.name, key.name) for table in tables() for key in table.keys]
    while True:
        table, key = rng.choice(pairs)
        path, value = f"{table}.{key}" if table else key, rng.choice([*VALUES, '"2 sweeps"', "2", '"8 steps"'])

        def prepare(folder: Path, path: str = path, value: str = value) -> list[str]:
            shutil.copytree(finished.parent, folder, dirs_exist_ok=True)
            return ["resume", finished.name, "--set", f"{path}={value}"]

        yield Case(f"resume --set {path}={value[:40]}", prepare)


def edited_logs(rng: random.Random, finished: Path) -> Iterator[Case]:
    """The report of a run, or of two, or a plan with their multiplier, some lines of whose logs are edited."""
    lines = [json.loads(line) for line in (finished / "events.jsonl").read_text().splitlines()]
    while True:
        seed, edits, command = (
            rng.randrange(2**31),
            rng.choice([1, 1, 2, 5]),
            rng.choice(["report", "report", "two", "plan"]),
        )

        def prepare(folder: Path, seed: int = seed, edits: int = edits, command: str = command) -> list[str]:
            mine = random.Random(seed)
            mended = list(lines)
            for _ in range(edits):
                place = mine.randrange(len(mended))
                mended[place] = changed_json(mended[place], mine)
                if mine.random() < 0.2:
                    mine.shuffle(mended)
            for name in ("runs/a", "runs/b"):
                shutil.copytree(finished, folder / name)
            (folder / "runs/a/events.jsonl").unlink()
            (folder / "runs/a/events.jsonl").write_text("\n".join(json.dumps(line) for line in mended))
            if command == "plan":
                return ["plan", "--model", "gpt2", "--tokens", "1B", "--gpu", "rtx4090", "--multiplier", "runs"]
            return ["report", *(["runs/a", "runs/b"] if command == "two" else ["runs/a"]), "--out", "page.html"]

        yield Case(f"{command} with {edits} edits of a log", prepare)


GPT2 = {"model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 300}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
RATES = dict.fromkeys(
    ["memory_bytes", "kernel_seconds", "update_scalars", "host_link_bytes", "host_memory_bytes", "disk_bytes"], 1e9
)
MEASURED = {
    "device": "cpu",
    "memory_bytes_total": 16e9,
    "rates": {"matmul_flops": {"4": 1e11}, "attention_flops": {"4": 1e10}, **RATES},
    "date": "2026-11-01",
}
HARDWARE = """[cards.mine]
title = "Mine"
memory_gib = 24
fp32_flops = 35.6e12
bf16_flops = 71.0e12
memory_bytes_per_second = 936e9
host_link = "pcie4"
peer_link = "mylink"
kind = "published"
source = "me"
date = "2021"
[links.mylink]
bytes_per_second = 1e9
kind = "assumed"
source = "me"
date = 2021-01-01
[assumed]
overlap = 0.4
[providers.wuwen.usd_per_hour]
mine = 0.3
"""


def plan_files(rng: random.Random) -> Iterator[Case]:
    """What `plan` reads: a model's configuration, a hardware file, the rates of this machine."""
    while True:
        kind, seed = rng.choice(["model", "hardware", "machine"]), rng.randrange(2**31)

        def prepare(folder: Path, kind: str = kind, seed: int = seed) -> list[str]:
            mine = random.Random(seed)
            model, hardware, machine = json.dumps(mine.choice([GPT2, LLAMA])), HARDWARE, json.dumps(MEASURED)
            if kind == "model":
                model = json.dumps(changed_json(json.loads(model), mine))
            if kind == "machine":
                machine = json.dumps(changed_json(MEASURED, mine))
            if kind == "hardware":
                lines: list[str] = list(hardware.splitlines())
                place = mine.randrange(len(lines))
                key, equals, _ = lines[place].partition(" = ")
                lines[place] = (
                    f"{key} = {mine.choice(list(VALUES))}" if equals else mine.choice(["", "[x]", "[cards.x]"])
                )
                hardware = "\n".join(lines)
            files = {"model": model, "hardware": hardware, "machine": machine}
            data = {name: text.encode() for name, text in files.items()}
            if mine.random() < 0.2:
                data[kind] = damaged(data[kind], mine)
            (folder / "config.json").write_bytes(data["model"])
            (folder / "hardware.toml").write_bytes(data["hardware"])
            (folder / "blocktrain").mkdir()  # of XDG_CONFIG_HOME
            (folder / "blocktrain" / "this-machine.json").write_bytes(data["machine"])
            card = "this-machine" if kind == "machine" else "mine"
            more = ["--html", "plan.html"] if mine.random() < 0.2 else []
            return f"plan --model config.json --tokens 1M --seq 64 --gpu {card} --hardware hardware.toml".split() + more

        yield Case(f"plan with another file of the {kind}", prepare)


PLACES = ["none", "file", "full", "empty", "pipe", "loop", "dangling", "link", ".", "..", "", "file/x", "~nobody/x"]
PLACES += ["long" * 100, "a\nb", "\x1b[31m", "\udcff", "[/bold]", "ä\u202eb", "--", " ", "run", "corpus.txt", "model"]


def odd_paths(rng: random.Random, finished: Path, saved: Path) -> Iterator[Case]:
    """Each option that takes a path, with names and kinds of files that do not suit it."""
    commands = (
        "train {} --out new",
        "train empty.toml --out {}",
        "train empty.toml --out new --set text.source={}",
        "train empty.toml --out new --set text.tokenizer={}",
        "train empty.toml --out new --set model.path={}",
        "train empty.toml --out new --set text.cache={}",
        "train empty.toml --out new --set name={}",
        "train empty.toml --out new --set prefix.folder={}",
        "compare empty.toml --out {}",
        "resume {}",
        "report {}",
        "report run {}",
        "report run --out {}",
        "export {} new",
        "export run {}",
        "export run new --push {}",
        "plan --tokens 1B --gpu rtx4090 --model {}",
        "plan --tokens 1B --gpu rtx4090 --model gpt2 --hardware {}",
        "plan --tokens 1B --gpu rtx4090 --model gpt2 --multiplier {}",
        "plan --tokens 1B --gpu rtx4090 --model gpt2 --out {}",
        "plan --tokens 1B --gpu rtx4090 --model gpt2 --html {}",
    )
    while True:
        command, place = rng.choice(commands), rng.choice(PLACES)

        def prepare(folder: Path, command: str = command, place: str = place) -> list[str]:
            shutil.copytree(finished.parent, folder, dirs_exist_ok=True)
            shutil.copytree(saved, folder / "model")
            (folder / "file").write_text("x = 1\n")
            (folder / "full").mkdir()
            (folder / "full" / "file").write_text("x")
            (folder / "empty").mkdir()
            os.mkfifo(folder / "pipe")
            (folder / "loop").symlink_to("loop")
            (folder / "dangling").symlink_to("nothing")
            (folder / "link").symlink_to("full")
            sets = train(folder)[4:] if command.startswith(("train", "compare")) else []
            return [
                *(word.format(place) for word in command.split()[:1]),
                *sets,
                *(word.format(place) for word in command.split()[1:]),
            ]

        yield Case(f"{command} with {place[:30]!r}", prepare)


TREES = ["a.txt", "b.jsonl", "sub/c.txt", "sub/d.md", "train/e.txt", "validation/f.txt", ".hidden", "g.txt.gz", "h.py"]
NAMES = ["\udcff.txt", "two\nlines.txt", "[/bold].txt", "long" * 60 + ".txt", "ä\u202e.txt", " .txt", "i.bin", "j.zip"]


def odd_folders(rng: random.Random) -> Iterator[Case]:
    """Folders of data with links, pipes, other encodings, odd names and empty files."""
    contents = [
        b"",
        b"\x00" * 400,
        "def f(): pass\n".encode("utf-16"),
        b"caf\xe9\n" * 40,
        b"line\r\n" * 99,
        b"\xef\xbb\xbftext\n" * 50,
    ]
    contents += [b"def g(x):\n    return x\n" * 40, b'{"text": "one line of text"}\n' * 40, b"x" * 5000]
    while True:
        kind, seed = rng.choice(["text", "chat", "labelled", "images"]), rng.randrange(2**31)

        def prepare(folder: Path, kind: str = kind, seed: int = seed) -> list[str]:
            mine = random.Random(seed)
            data = folder / "data"
            for name in mine.sample([*TREES, *NAMES], 4):
                path = data / name
                path.parent.mkdir(parents=True, exist_ok=True)
                match mine.randrange(8):
                    case 0:
                        os.mkfifo(path)
                    case 1:
                        path.symlink_to(mine.choice(["..", ".", "nothing", path.name, "/dev/zero", "a.txt"]))
                    case 2:
                        path.mkdir(exist_ok=True)
                    case _:
                        path.write_bytes(mine.choice(contents))
            changes = {f"{kind}.source": '"data"', f"{kind}.cache": '"cache"'}
            if kind in ("text", "images"):
                changes |= {"text.row_tokens": "16"} if kind == "text" else {}
            if mine.random() < 0.3:
                changes |= {f"{kind}.patterns": mine.choice(['["*.txt"]', "[]", '["**"]', '["["]', '["../*"]', '[""]'])}
            return train(folder, changes, without=() if kind == "text" else ("text",))

        yield Case(f"{kind} from an odd folder", prepare)


def finetuned(rng: random.Random, saved: Path) -> Iterator[Case]:
    """A pretrained model that goes on with conversations or labels; a value of the configuration is odd."""
    keys = {table.name: [f"{table.name}.{key.name}" for key in table.keys] for table in tables()}
    while True:
        kind = rng.choice(["chat", "labelled"])
        path, value = (
            rng.choice(keys[kind] + keys["model"]),
            rng.choice([*VALUES, '"model"', '"rows.jsonl"', '["assistant"]', '"messages"']),
        )

        def prepare(folder: Path, kind: str = kind, path: str = path, value: str = value) -> list[str]:
            shutil.copytree(saved, folder / "model")
            rows = (ROWS[:1] if kind == "chat" else ROWS[4:]) * 40
            (folder / "rows.jsonl").write_text("\n".join(json.dumps({**row, "id": i}) for i, row in enumerate(rows)))
            changes = {f"{kind}.source": '"rows.jsonl"', f"{kind}.cache": '"cache"', "model.path": '"model"'}
            changes |= {f"{kind}.tokenizer": '"bytes"', f"{kind}.row_tokens": "64"}
            return train(folder, {**changes, path: value}, without=("text", "model"))

        yield Case(f"fine-tuning on {kind} with {path} = {value[:40]}", prepare)


def cases(seed: int, *, finished: Path, saved: Path) -> Iterator[Case]:
    """All kinds in turns, without end. finished: a run folder; saved: a folder that `from_pretrained` loads."""
    rng = random.Random(seed)
    kinds = [
        config_values(rng),
        changed_runs(rng, finished),
        changed_data(rng),
        changed_models(rng, saved),
        misspelt_keys(rng),
        two_values(rng),
        plan_options(rng),
        plan_files(rng),
        damaged_toml(rng),
        resumed_with(rng, finished),
        edited_logs(rng, finished),
        odd_paths(rng, finished, saved),
        odd_folders(rng),
        finetuned(rng, saved),
    ]
    while kinds:
        for kind in list(kinds):
            case = next(kind, None)
            if case is None:
                kinds.remove(kind)
            else:
                yield case
