"""The standard-library corpus of the interpreter that runs the tests."""

from __future__ import annotations

from blocktrain.data.corpus import read_documents
from blocktrain.data.stdlib import stdlib_files


def test_files_are_sorted_disjoint_and_without_what_differs_between_distributions():
    files = stdlib_files()
    train, validation = ([file.id for file in files[split]] for split in ("train", "validation"))
    assert not set(train) & set(validation)
    assert {"argparse.py", "asyncio/tasks.py", "typing.py", "unittest/mock.py"} <= set(train)
    # The hash of a name is equal everywhere, so these are for validation on every machine and on CPython 3.11 to 3.13.
    assert {"json/__init__.py", "logging/__init__.py", "operator.py", "queue.py", "struct.py"} <= set(validation)
    tops = {name.partition("/")[0].removesuffix(".py") for name in train + validation}
    assert not tops & {"test", "idlelib", "site-packages", "distutils", "lib2to3", "tkinter", "encodings", "_pyio"}
    assert not [name for name in train + validation if "/test/" in name or "/tests/" in name]


def test_size_is_as_documented():
    """6.4 MB and 0.45 MB on CPython 3.11; 6.6 MB and 0.47 MB on 3.13."""
    sizes = {
        split: sum(len(document.text.encode()) for document in read_documents("stdlib", split=split))
        for split in ("train", "validation")
    }
    assert 6.2e6 < sizes["train"] < 7.5e6
    assert 0.04 < sizes["validation"] / sum(sizes.values()) < 0.09
