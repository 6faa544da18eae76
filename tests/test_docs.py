"""What the pages say is true: their Python runs, their configurations load, their commands exist, their links lead to
files."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import blocktrain as bt
from blocktrain.cli.main import main
from blocktrain.train.config import RunConfig

from .tiny_models import pretrained_folder

ROOT = Path(__file__).resolve().parent.parent
NEEDED = {"integrations.hf": "accelerate", "from trl": "trl"}  # what code names -> the optional package it needs
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def fenced(page: Path, language: str) -> list[str]:
    """The page's code blocks in a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def with_blocks(language: str) -> list[Any]:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if fenced(page, language)]


def tiny_model() -> torch.nn.Module:
    sizes: dict[str, Any] = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 3, "n_head": 2}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def batches(_visit: Any) -> Iterator[dict[str, torch.Tensor]]:
    for _ in range(2):
        tokens = torch.randint(64, (2, 16))
        yield {"input_ids": tokens, "labels": tokens}


def a_loops_names() -> dict[str, Any]:
    model = tiny_model()
    partition = bt.partition(model, num_blocks=3)
    optimizer = bt.BlockOptimizer(partition, torch.optim.AdamW, lr=1e-3)
    return {
        "model": model,
        "partition": partition,
        "optimizer": optimizer,
        "block": partition[1],
        "batch": next(batches(None)),
    }


def for_a_trainer() -> dict[str, Any]:
    """`args` and `rows` of a Hugging Face Trainer, where there is one."""
    if find_spec("accelerate") is None:
        return {}
    args = hf.TrainingArguments("out", max_steps=4, save_strategy="no", report_to="none", use_cpu=True)
    return {"args": args, "rows": [{key: rows[0] for key, rows in batch.items()} for batch in batches(None)]}


@pytest.mark.parametrize("page", with_blocks("python"))
def test_the_python_on_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code blocks run in order. Every page may use a `model` and its `batches(visit)`, a `block` of its `partition`
    and the `optimizer`, and a trainer's `args` and `rows`. Code for a package that is not installed is skipped."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"bt": bt, "torch": torch, "batches": batches, **a_loops_names(), **for_a_trainer()}
    for code in fenced(page, "python"):
        needed = {package for word, package in NEEDED.items() if word in code}
        if any(find_spec(package) is None for package in needed):
            continue
        exec(compile(code, str(page), "exec"), names)


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = dict(base)
    for key, value in over.items():
        both[key] = merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
    return both


@pytest.mark.parametrize("page", with_blocks("toml"))
def test_the_configurations_on_a_page_load(page: Path) -> None:
    """Each is merged into the quickstart's; unknown keys and wrong values are errors."""
    quickstart = tomllib.loads((ROOT / "examples" / "quickstart.toml").read_text())
    for text in fenced(page, "toml"):
        given, base = tomllib.loads(text), dict(quickstart)
        if given.keys() & {"images", "chat", "labelled"}:
            base.pop("text")
        if "path" in given.get("model", {}):
            base["model"] = {}
        RunConfig.from_mapping(merged(base, given))


@pytest.mark.parametrize("page", with_blocks("sh"))
def test_the_commands_on_a_page_exist(page: Path) -> None:
    """Every `blocktrain` subcommand and every option that a page gives it is in that subcommand's help."""
    for line in "\n".join(fenced(page, "sh")).replace("\\\n", " ").splitlines():
        for command in re.findall(r"blocktrain (?:[^&|;#]*)", line):
            exists(page, shlex.split(command)[1:])


def exists(page: Path, words: list[str]) -> None:
    shown = help_of(words[0])
    assert shown is not None, f"{page.name}: there is no 'blocktrain {words[0]}'"
    for option in (word.partition("=")[0] for word in words[1:] if word.startswith("--")):
        assert option in shown, f"{page.name}: 'blocktrain {words[0]}' has no {option}"


@cache
def help_of(command: str) -> str | None:
    """What `blocktrain command --help` prints; None where there is no such command."""
    shown = subprocess.run(
        [sys.executable, "-m", "blocktrain", command, "--help"], capture_output=True, text=True, check=False
    )
    return shown.stdout if shown.returncode == 0 else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_within_a_pages_sentences_exist(page: Path) -> None:
    for command in re.findall(r"`blocktrain ([^`]+)`", page.read_text()):
        exists(page, re.sub(r"[\[\]]", " ", command).split())


# What makes a run of the tour short; a later --set wins.
SHORT = [
    "schedule.visit=2 steps",
    "schedule.sweeps=1",
    "evaluation.rows=8",
    "batch.rows=4",
    "model.config.n_layer=3",
    "model.config.n_embd=32",
    "model.config.n_head=2",
    "learning_rate.warmup_steps=2",
    "text.max_documents=40",
]


@pytest.mark.slow
def test_the_tours_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands run in order, in one folder, as a reader types them; runs are shortened."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    short = [word for key in SHORT for word in ("--set", key)]
    page = ROOT / "docs" / "index.md"
    done = set()
    for line in "".join(fenced(page, "sh")).splitlines():
        tool, command, *words = shlex.split(line)
        if tool == "blocktrain":
            assert main([command, *words, *(short if command in ("train", "compare") else [])]) == 0, line
            done.add(command)
    assert {"doctor", "train", "report", "compare", "export", "plan"} <= done
    assert (tmp_path / "runs" / "both.html").is_file()
    assert (tmp_path / "exported" / "config.json").is_file()


QUICK = ["examples/quickstart.toml", *(word for key in SHORT for word in ("--set", key))]

# A row of README's table of commands -> the arguments that are run, in that order and in one folder. `--push` is tested
# in tests/integrations.
TYPED = {
    "blocktrain finetune MODEL DATA [--out DIR]": [
        *("finetune", "mine", "data.jsonl", "--max-tokens", "2k", "--out", "tuned"),
    ],
    "blocktrain init [FILE] [--model PATH --data SOURCE]": ["init"],
    "blocktrain train CONFIG [--set a.b=c ...] [--out DIR]": ["train", *QUICK, "--out", "run"],
    "blocktrain resume DIR": ["resume", "run", "--set", "precision=bf16-exact"],
    "torchrun --nproc-per-node 8 -m blocktrain train CONFIG": [
        *("--nproc-per-node", "2", "-m", "blocktrain", "train", *QUICK),
    ],
    "blocktrain compare CONFIG [--methods full,bcd,uncached]": [
        *("compare", *QUICK, "--methods", "full,bcd", "--out", "both"),
    ],
    "blocktrain plan --model NAME --tokens 10B --gpu rtx4090 --gpus 8": [
        *("plan", "--model", "llama-2-7b", "--tokens", "10B", "--gpu", "rtx4090", "--gpus", "8"),
    ],
    "blocktrain calibrate": ["calibrate"],
    "blocktrain report DIR...": ["report", "run", "both/full", "--out", "page.html"],
    "blocktrain export DIR OUT [--push OWNER/NAME]": ["export", "run", "exported"],
    "blocktrain config": ["config"],
    "blocktrain doctor": ["doctor"],
}


@pytest.mark.slow
def test_every_command_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = re.findall(r"^\| `([^`]+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert listed == list(TYPED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    pretrained_folder(tmp_path / "mine")
    (tmp_path / "data.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n' * 40)
    for command, words in TYPED.items():
        if command.startswith("torchrun"):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            assert subprocess.run([*torchrun, *words], capture_output=True, check=False).returncode == 0, command
        else:
            assert main(words) == 0, command
    assert (tmp_path / "run" / "report.html").is_file()
    assert (tmp_path / "runs" / "quickstart" / "report.html").is_file()
    assert (tmp_path / "exported" / "config.json").is_file()
    assert (tmp_path / "tuned" / "model" / "config.json").is_file()


def test_the_picture_of_the_readme_is_drawn_from_the_result_file() -> None:
    """`docs/pictures.py` draws the very file, its style sheet aside."""
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    drawn, kept = pictures.step(), (ROOT / "docs" / "pictures" / "step.svg").read_text()
    assert unstyled(drawn) == unstyled(kept)


def unstyled(svg: str) -> str:
    return re.sub(r"<style>.*?</style>", "", svg, flags=re.DOTALL)


def test_the_readme_is_short_and_lists_every_package() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 120
    tree = text.partition("src/blocktrain/")[2]
    packages = [path.parent.name for path in (ROOT / "src" / "blocktrain").glob("*/__init__.py")]
    assert not [name for name in packages if f" {name}/" not in tree]


def test_messages_of_the_troubleshooting_page_are_ours() -> None:
    """Every entry of its first column is in the source of the package, word for word."""
    source = "".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    source = re.sub(r'"\n\s*f?"', "", source)  # a message over several lines
    page = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## What does not go together")[0]
    messages = re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)
    assert len(messages) > 25
    assert not [message for message in messages if message not in source]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_a_page_is_in_the_sites_menu(page: Path) -> None:
    """Nobody finds a page that is in no menu. `mkdocs build --strict` reports it too, but later."""
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    assert f": {page.relative_to(ROOT / 'docs')}\n" in f"{menu}\n"
