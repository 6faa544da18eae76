"""The page as a whole: self-contained, escaped, small, and there for every state a run can be in."""

import base64
import hashlib
import json
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from blocktrain.errors import DataError, StorageError
from blocktrain.report import RunRecord, write_report
from blocktrain.report.format import flops_text

MakeRun = Callable[..., Path]

VOID = {"meta", "br", "img", "input", "link", "hr"}


class Page(HTMLParser):
    """Collects what a browser would see; fails on elements that do not close in order."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.scripts: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "script":
            self.scripts.append((dict(attrs).get("type") or "", ""))
        if tag not in VOID and not (self.get_starttag_text() or "").endswith("/>"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def report(tmp_path: Path, *folders: Path) -> tuple[str, Page]:
    text = write_report(list(folders), tmp_path / "report.html").read_text(encoding="utf-8")
    return text, Page(text)


def test_one_run_in_sentences(tmp_path: Path, make_run: MakeRun):
    _, page = report(tmp_path, make_run())
    assert "GPT-2, all 1.3M parameters trained in 3 blocks; 9 visits, 900 steps, 3.69M tokens in" in page.text
    # 2 F (1 + 2/3 + 1/3) of 3 F is 0.667; the log counts 0.7 % more; 500,000 parameters at 16 bytes.
    assert "on average a step computes 0.671 of a full step's FLOPs (formula 0.667)" in page.text
    assert "gradients, master and optimizer state take 7.6 MiB instead of 19.8 MiB" in page.text
    for title in ("Loss by training tokens", "Loss by wall time", "Memory of a step", "FLOPs of a step", "In figures"):
        assert title in page.text
    assert "visit 4, sweep 1, block 1: from 1.64M to 2.05M tokens" in page.text
    assert "retired: 100 steps done" in page.text
    assert "blocktrain train" in page.text
    assert "has not finished" not in page.text


def test_page_needs_nothing_from_outside(tmp_path: Path, make_run: MakeRun):
    text, page = report(tmp_path, make_run(sweeps=1, steps=20, every=10))
    assert not {"link", "img", "iframe", "object", "image", "use", "base"} & set(page.tags)
    assert not {"src", "href", "xlink:href", "action"} & {name for name, _ in page.attributes}
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    assert "@import" not in text


def test_policy_allows_our_script_and_no_other(tmp_path: Path, make_run: MakeRun):
    text, page = report(tmp_path, make_run(sweeps=1, steps=20, every=10))
    (ours,) = [content for kind, content in page.scripts if kind == ""]
    allowed = re.findall(r"script-src 'sha256-([^']+)'", text)
    assert allowed == [base64.b64encode(hashlib.sha256(ours.encode()).digest()).decode()]
    assert "default-src 'none'" in text


def test_every_plot_has_its_values(tmp_path: Path, make_run: MakeRun):
    _, page = report(tmp_path, make_run(sweeps=1, steps=40, every=10, unit="images"))
    wanted = [value for name, value in page.attributes if name == "data-values"]
    blocks = [json.loads(content) for kind, content in page.scripts if kind == "application/json"]
    assert len(wanted) == len(set(wanted)) == len(blocks) == 5  # loss twice, accuracy, learning rate, gradient norm
    for tracks in blocks:
        for track in tracks:
            places = [row[0] for row in track["rows"]]
            assert places == sorted(places)
            assert {len(row) for row in track["rows"]} == {3 + len(track["columns"])}


@pytest.mark.parametrize("compared", [False, True])
def test_markup_in_a_run_is_shown_and_not_run(tmp_path: Path, make_run: MakeRun, compared: bool):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'"
    folder = make_run("evil", sweeps=1, steps=10, every=5)
    log, details = folder / "events.jsonl", folder / "run.json"
    inside = json.dumps(evil)[1:-1]
    text = log.read_text()
    for value in ("GPT-2", "evil", "adamw", "bf16", "drop", "embedding", "h.2", "head", "100 steps done", "finished"):
        text = text.replace(f'"{value}"', f'"{inside}"')
    log.write_text(text.replace('"moments":', f'"{inside}":', 2))
    details.write_text(json.dumps({evil: evil, "started": evil}))
    folders = [folder, make_run("plain", sweeps=1, steps=10, every=5)] if compared else [folder]
    text, page = report(tmp_path, *folders)
    assert "img" not in page.tags
    assert "onerror" not in {name for name, _ in page.attributes}
    assert [kind for kind, _ in page.scripts if kind == ""] == [""]
    assert "</script><script>alert(1)" in page.text


def test_markup_in_what_a_cache_says_is_shown_and_not_run(tmp_path: Path, make_run: MakeRun):
    folder = make_run("cached", sweeps=1, steps=10, every=5, saved=1000)
    log, evil = folder / "events.jsonl", "<img src=x onerror=alert(1)>"
    log.write_text(log.read_text().replace("store = 'file'", evil).replace('"file"', f'"{evil}"').replace("bf16", evil))
    _, page = report(tmp_path, folder)
    assert "img" not in page.tags
    assert f"2 visits, {evil} {evil}" in page.text
    assert f"Stored {evil}" in page.text


def test_the_cache_has_a_section(tmp_path: Path, make_run: MakeRun):
    folder = make_run("cached", sweeps=2, steps=50, every=25, saved=2_000_000_000)
    record = RunRecord.load(folder)
    assert record.end is not None
    _, page = report(tmp_path, folder)
    spent, uncached = record.end.flops or 0, record.uncached_flops_until(300)
    assert uncached - spent == 4 * 50 * 2_000_000_000
    share = f"{100 * (1 - spent / uncached):.1f} %"
    assert f"The run cost {flops_text(spent)} instead of {flops_text(uncached)} ({share} saved)." in page.text
    assert "Stored in bf16, relative error 0.002." in page.text
    assert "1 2 file 2.0 MiB 192 67 % 500ms 125ms 200 GFLOP 3.0s" in page.text
    assert "all 4 file 2.0 MiB 384 67 % 1.0s 250ms 400 GFLOP 6.0s" in page.text
    assert "4 visits, file store = 'file'" in page.text
    assert "rejected" not in page.text
    assert "abandoned" not in page.text
    assert "interrupted" not in page.text
    assert "without the prefix cache, formula 0.667)" in page.text
    assert "The pale part is what the prefix cache saved" in page.text
    assert "2 GFLOP saved by the prefix cache, on average over the visits so far" in page.text


def test_a_run_without_a_cache_has_no_word_of_it(tmp_path: Path, make_run: MakeRun):
    text, _ = report(tmp_path, make_run(sweeps=1, steps=20, every=10))
    assert "cache" not in text.split("</style>")[1]


def test_a_cache_that_was_decided_against_says_why(tmp_path: Path, make_run: MakeRun):
    folder = make_run("cached", sweeps=2, steps=4, every=2, saved=1000)
    log = folder / "events.jsonl"
    lines = [line for line in log.read_text().splitlines() if '"kind":"cached"' not in line]
    undecided = "\n".join(lines).replace('"place":"file"', '"place":null')
    log.write_text(undecided.replace("store = 'file'", "cannot pay: used once") + "\n")
    _, page = report(tmp_path, folder)
    assert "No visit was cached to its end." in page.text
    assert "4 visits, not cached cannot pay: used once" in page.text
    assert "found stored" not in page.text
    assert "hit rate" not in page.text


def test_what_went_wrong_with_a_cache_is_told(tmp_path: Path, make_run: MakeRun):
    folder = make_run("cached", sweeps=2, steps=4, every=2, saved=1000)
    log = folder / "events.jsonl"
    lines = log.read_text().replace('"stale":0,"damaged":0', '"stale":1200,"damaged":1').splitlines()
    last = max(index for index, line in enumerate(lines) if '"kind":"cached"' in line)
    log.write_text("\n".join([*lines[:last], *lines[last + 1 :]]) + "\n")
    _, page = report(tmp_path, folder)
    assert "3,600 stale rows rejected. 3 damaged rows rejected." in page.text
    assert "In 1 visit the cache was abandoned half-way, and training continued without it." in page.text


def test_runs_compared_name_whose_cache_it_is(tmp_path: Path, make_run: MakeRun):
    folders = [make_run("with", sweeps=1, steps=20, every=10, saved=1000), make_run("without", sweeps=1, steps=20)]
    _, page = report(tmp_path, *folders)
    assert "Prefix cache of with" in page.text
    assert "Prefix cache of without" not in page.text


def test_comparison_by_flops_counts_what_the_cache_saved(tmp_path: Path, make_run: MakeRun):
    folders = [make_run("with", steps=20, every=10, saved=4_000_000_000), make_run("without", steps=20, every=10)]
    _, page = report(tmp_path, *folders)
    blocks = [json.loads(content) for kind, content in page.scripts if kind == "application/json"]
    cached, uncached = next(tracks for tracks in blocks if tracks[0]["rows"][-1][0] < tracks[1]["rows"][-1][0])
    records = [RunRecord.load(folder) for folder in folders]
    assert [track["columns"][0] for track in (cached, uncached)] == ["with", "without"]
    assert cached["rows"][-1][0] == pytest.approx(records[0].flops_until(180) / records[1].flops_until(180), abs=1e-3)
    assert uncached["rows"][-1][0] == 1
    places = [row[0] for row in cached["rows"]]
    assert places == sorted(places)


def test_a_run_without_an_end_says_so(tmp_path: Path, make_run: MakeRun):
    folder = make_run(sweeps=1, steps=20, every=5, finish=False)
    with (folder / "events.jsonl").open("ab") as log:
        log.write(b'{"kind":"step","step":51,"lo')
    _, page = report(tmp_path, folder)
    assert "This run has not finished: its log stops at step 50 of 60 planned." in page.text
    assert "not retired" in page.text


def test_losses_that_are_not_numbers_are_gaps_and_are_counted(tmp_path: Path, make_run: MakeRun):
    text, page = report(tmp_path, make_run(sweeps=1, steps=50, every=25, bad=(7, 8, 60)))
    assert "The loss of 3 steps was not a finite number" in page.text
    assert "The optimizer skipped 3 steps after computing the gradients." in page.text
    assert not re.search(r'(?:d|cx|cy|x|y|width)="[^"]*(?:nan|inf)', text)


def test_all_losses_not_numbers(tmp_path: Path, make_run: MakeRun):
    text, page = report(tmp_path, make_run(sweeps=1, steps=5, every=50, bad=tuple(range(1, 16))))
    assert "The loss of 15 steps" in page.text
    assert not re.search(r'(?:d|cx|cy|x|y|width)="[^"]*(?:nan|inf)', text)


@pytest.mark.parametrize("method", ["bcd", "full"])
def test_a_single_step(tmp_path: Path, make_run: MakeRun, method: str):
    _, page = report(tmp_path, make_run(method=method, sizes=(1000,), sweeps=1, steps=1, every=1))
    assert "1 step, 4096 tokens in" in page.text
    assert "Loss by training tokens" in page.text


def test_a_run_that_has_only_begun(tmp_path: Path, make_run: MakeRun):
    folder = make_run(sweeps=1, steps=1)
    log = folder / "events.jsonl"
    log.write_bytes(log.read_bytes().split(b"\n")[0] + b"\n")
    (folder / "run.json").unlink()
    _, page = report(tmp_path, folder)
    assert "0 visits, 0 steps, 0 tokens in" in page.text
    assert "run.json is missing" in page.text


def test_images_have_accuracy(tmp_path: Path, make_run: MakeRun):
    folder = make_run(unit="images", sweeps=1, steps=40, every=10)
    end = json.loads((folder / "events.jsonl").read_text().splitlines()[-1])
    _, page = report(tmp_path, folder)
    assert f"validation loss {end['loss']:.3f} nats per image, accuracy {100 * end['accuracy']:.0f} %" in page.text
    assert "Validation accuracy" in page.text
    assert "tokens" not in page.text


def test_comparison_of_full_and_bcd(tmp_path: Path, make_run: MakeRun):
    full, bcd = make_run("full", method="full", steps=300), make_run("bcd", speed=0.5, sweeps=3, steps=100)
    _, page = report(tmp_path, full, bcd)
    assert "full · bcd" in page.text
    assert re.search(r"bcd: B-F multiplier (1\.9|2\.0)\d; it reached full's final validation loss of", page.text)
    for by in ("training tokens", "counted FLOPs", "wall time"):
        assert f"Validation loss by {by}" in page.text
    short = make_run("short", speed=0.5, sweeps=1)
    _, page = report(tmp_path, full, short)
    assert "short: B-F multiplier not reached" in page.text
    _, page = report(tmp_path, full, bcd, bcd, short)
    assert "4 runs compared" in page.text
    assert re.search(r"B-F multipliers against full, .*: bcd (..\d\d); bcd \(2\) \1; short not reached\.", page.text)


def test_tokens_and_images_are_not_compared(tmp_path: Path, make_run: MakeRun):
    folders = [make_run("words", sweeps=1, steps=2), make_run("pictures", sweeps=1, steps=2, unit="images")]
    with pytest.raises(DataError, match=r"counts tokens and .* images"):
        write_report(folders, tmp_path / "report.html")


def test_a_long_run_of_many_blocks_stays_small(tmp_path: Path, make_run: MakeRun):
    text, page = report(tmp_path, make_run(sizes=(10_000,) * 24, sweeps=25, steps=20, every=20, bad=(50, 9_000)))
    assert len(text.encode()) < 500_000
    assert "600 visits, 12,000 steps," in page.text


def test_report_is_replaced_in_one_move(tmp_path: Path, make_run: MakeRun):
    folder, out = make_run(sweeps=1, steps=2), tmp_path / "new" / "report.html"
    write_report([folder], out)
    first = out.read_bytes()
    assert write_report([folder], out) == out
    assert out.read_bytes() == first
    assert os.listdir(out.parent) == ["report.html"]


def test_where_it_cannot_write_it_says_so_and_leaves_nothing(tmp_path: Path, make_run: MakeRun):
    folder = make_run(sweeps=1, steps=2)
    out = tmp_path / "taken"
    (out / "inside").mkdir(parents=True)  # a folder that os.replace cannot overwrite
    with pytest.raises(StorageError, match="cannot write"):
        write_report([folder], out)
    assert not list(tmp_path.glob(".taken*"))


def test_no_folders_no_report(tmp_path: Path):
    with pytest.raises(DataError, match="at least one run"):
        write_report([], tmp_path / "report.html")
