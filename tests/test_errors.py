"""Errors say which name was meant, which file could not be written, and with which code the program ends."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from blocktrain import errors
from blocktrain.errors import (
    BlocktrainError,
    Interrupted,
    NonFiniteError,
    StorageError,
    first_line,
    nearest,
    storage_errors,
)


def test_a_near_name_is_suggested():
    assert nearest("weight_dcay", ["lr", "weight_decay"]) == "did you mean 'weight_decay'?"


def test_without_a_near_name_all_are_listed_in_order():
    assert nearest("zzz", ["size", "color"]) == "known: color, size"


def test_a_full_disk_says_what_to_do(tmp_path: Path):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with (
        pytest.raises(StorageError, match=r"no room left while writing '/dev/full' .*free some space or choose"),
        storage_errors(full),
        full.open("wb", buffering=0) as file,
    ):
        file.write(b"x")


def test_any_other_failed_write_names_the_file(tmp_path: Path):
    (tmp_path / "file").touch()
    below_a_file = tmp_path / "file" / "sub"
    with (
        pytest.raises(StorageError, match=rf"cannot write '{below_a_file}': {os.strerror(20)}") as caught,
        storage_errors(below_a_file),
    ):
        below_a_file.mkdir()
    assert isinstance(caught.value.__cause__, OSError)


def test_errors_that_are_not_about_storage_pass_through():
    with pytest.raises(ZeroDivisionError), storage_errors("somewhere"):
        _ = 1 / 0


def test_a_name_that_a_library_cannot_encode_is_one_message():
    """An export to a folder whose name is not UTF-8 ended in a traceback of tokenizers."""
    with pytest.raises(StorageError, match="its name is not UTF-8; choose another"), storage_errors("caf\udce9"):
        "caf\udce9".encode()
    with pytest.raises(UnicodeEncodeError), storage_errors("cafe"):
        "caf\udce9".encode()


def test_a_far_fetched_name_is_not_suggested():
    assert nearest("1e400", ["v100", "h100"]) == "known: h100, v100"


def test_a_first_line_that_ends_in_a_colon_goes_on():
    assert first_line(ValueError("wrong field 'a':\n    it is text.")) == "wrong field 'a': it is text"


def test_exit_codes():
    assert Interrupted("stopped", signal_number=signal.SIGTERM).exit_code == 143  # 128 + signal, as shells do
    assert NonFiniteError("the loss is nan").exit_code == 1
    assert BlocktrainError("anything else").exit_code == 2


def test_every_error_of_the_package_is_a_blocktrain_error():
    raised = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(raised) > 5
    assert all(issubclass(error, BlocktrainError) for error in raised)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
def test_a_full_disk_that_a_library_reports_says_what_to_do(number: int, tmp_path: Path):
    """safetensors and tokenizers raise classes of their own, which passed as tracebacks."""
    words = f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})"
    with pytest.raises(StorageError, match=r"no room left while writing .*free some space"), storage_errors(tmp_path):
        raise RuntimeError(words)
