"""Applying a function to documents in several processes, with the progress bar of `datasets`.

For functions that spend their time in Python, such as rendering a chat template: the fast tokenizers use all cores by
themselves. The documents and the results are Arrow files in a scratch folder, so memory does not grow with them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from blocktrain.data.document import Document

if TYPE_CHECKING:
    from datasets import Features

DOCUMENTS_PER_PROCESS = 5000  # below this, starting a process costs more than it saves

_BATCH = 500  # documents


def map_documents(
    documents: Iterable[Document],
    function: Callable[[list[Document]], pa.Table],
    *,
    features: Features,
    scratch: Path,
    label: str,
) -> Iterator[pa.Table]:
    """`function` of the documents, some hundred at a time and in order.

    features: the types of the table, which has a row per document.
    scratch: a folder that does not exist yet; the caller removes it.
    label: what the progress bar says.

    Raises whatever `documents` and `function` raise.
    """
    from datasets import Dataset, Features, Value
    from datasets.exceptions import DatasetGenerationError

    def rows() -> Iterator[dict[str, bytes]]:
        for document in documents:  # as bytes, because Arrow takes no lone surrogates, which JSON can spell
            yield {"id": document.id.encode(), "text": document.text.encode(errors="surrogatepass")}

    def apply(batch: dict[str, list[bytes]]) -> pa.Table:
        pairs = zip(batch["id"], batch["text"], strict=True)
        return function([Document(id=id.decode(), text=text.decode(errors="surrogatepass")) for id, text in pairs])

    with _progress_bars_on_a_terminal():
        # The fingerprints name the files in `scratch`; by default they would be hashes of pickled functions.
        binary = Features({"id": Value("large_binary"), "text": Value("large_binary")})
        try:
            stored = Dataset.from_generator(rows, features=binary, cache_dir=str(scratch), fingerprint="documents")
        except DatasetGenerationError as error:
            raise error.__cause__ or error from None
        assert isinstance(stored, Dataset)
        processes = min(os.cpu_count() or 1, len(stored) // DOCUMENTS_PER_PROCESS)
        mapped = stored.map(
            apply,
            batched=True,
            batch_size=_BATCH,
            features=features,
            remove_columns=["id", "text"],
            num_proc=processes if processes > 1 else None,  # 1 would start a process too
            cache_file_name=str(scratch / "mapped.arrow"),
            new_fingerprint="mapped",
            desc=label,
        )
    yield from mapped.with_format("arrow").iter(_BATCH)


@contextmanager
def _progress_bars_on_a_terminal() -> Iterator[None]:
    """Without a terminal a progress bar only fills the log."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    disable = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if disable:
        disable_progress_bars()
    try:
        yield
    finally:
        if disable:
            enable_progress_bars()
