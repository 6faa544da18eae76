"""A table takes the place of the one before it, and of nothing else."""

from pathlib import Path

import pytest
from tabling import placed, put


def test_only_what_is_between_the_markers_changes(tmp_path: Path) -> None:
    def text(table: str) -> str:
        return "before\n" + placed("one.py", table) + "between\n" + placed("two.py", "kept\n") + "after\n"

    document = tmp_path / "README.md"
    document.write_text(text("old\n"))
    put(document, "one.py", "new\n")
    assert document.read_text() == text("new\n")


@pytest.mark.parametrize("text", ["nothing here\n", "<!-- written by one.py -->\nold\nmuch more\n"])
def test_a_document_without_its_markers_is_left_alone(tmp_path: Path, text: str) -> None:
    document = tmp_path / "README.md"
    document.write_text(text)
    with pytest.raises(ValueError, match=r"has no line .*<!-- (written by one\.py|end) -->"):
        put(document, "one.py", "new\n")
    assert document.read_text() == text
