"""A section of the page is a value in a list: a registered one appears, with its texts escaped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from html import escape
from pathlib import Path

import pytest

from blocktrain.report import page as page_module
from blocktrain.report.page import page
from blocktrain.report.run import RunRecord
from blocktrain.report.section import Section
from blocktrain.report.sections import SECTIONS

MakeRun = Callable[..., Path]
EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture
def run(make_run: MakeRun) -> RunRecord:
    return RunRecord.load(make_run(sweeps=1, steps=4, every=4))


def page_with(monkeypatch: pytest.MonkeyPatch, section: Section, *runs: RunRecord) -> str:
    """The page where `section` is registered behind all others."""
    monkeypatch.setattr(page_module, "SECTIONS", [*SECTIONS, section])
    return page(runs)


@pytest.mark.parametrize("form", ["wide", "half", "folded"])
def test_a_registered_section_appears_with_its_texts_escaped(run, monkeypatch, form) -> None:
    section = Section(
        title=f"{EVIL} by {{unit}}",
        note=lambda run: f"{EVIL} of {run.header.model}",
        html=lambda run: f"<p>{run.steps_done} steps</p>",
        form=form,
    )
    assert "<p>12 steps</p>" not in page([run])
    text = page_with(monkeypatch, section, run)
    assert f"{escape(EVIL)} by tokens" in text
    assert f"{escape(EVIL)} of GPT-2" in text
    assert "<p>12 steps</p>" in text
    assert "<img" not in text


def test_a_section_whose_condition_does_not_hold_is_left_out(run, monkeypatch) -> None:
    section = Section(title="Only for images", html=lambda run: "", condition=lambda run: run.header.unit == "images")
    assert "Only for images" not in page_with(monkeypatch, section, run)
    images = replace(run, header=replace(run.header, unit="images"))
    assert "Only for images" in page_with(monkeypatch, section, images)


def test_a_page_that_compares_runs_has_the_section_once_for_each(run, monkeypatch) -> None:
    renamed = replace(run, header=replace(run.header, name=EVIL))
    alone = Section(title="Alone", html=lambda run: "")
    compared = Section(title="Compared", html=lambda run: "", in_comparison=True)
    assert "<strong>Alone" not in page_with(monkeypatch, alone, run, renamed)
    text = page_with(monkeypatch, compared, run, renamed)
    assert f"Compared of {run.header.name}" in text
    assert f"Compared of {escape(EVIL)}" in text
    assert "<img" not in text
