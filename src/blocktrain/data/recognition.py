"""Which kind of data a source holds, by the fields of its first row."""

from __future__ import annotations

from pathlib import Path

from blocktrain.data.cache_folder import cache_home
from blocktrain.data.compression import uncompressed_name
from blocktrain.data.conversation import PREFERENCE, SHAPES
from blocktrain.data.corpus import open_corpus
from blocktrain.data.folder_walk import walk_folder
from blocktrain.data.images import IMAGE_COLUMNS
from blocktrain.data.labelled import LabelledConfig
from blocktrain.data.records import DOCUMENT_SUFFIXES, RECORD_SUFFIXES, TEXT_SUFFIXES, record_of
from blocktrain.data.text import TextConfig
from blocktrain.errors import DataError


def recognize(source: str) -> tuple[str, str]:
    """The kind of data in `source`, by its name in `DATA_KINDS`, and by what it was recognized: "question, answer".

    source: as in the tables of all kinds: "stdlib", a file, a folder, or "owner/name" on the Hugging Face hub. At most
    one row is read. Raises `DataError` where there are no data, or none of a known kind.
    """
    path = Path(source).expanduser()
    if source == "stdlib" or (path.is_file() and uncompressed_name(path).suffix in TEXT_SUFFIXES):
        return "text", "plain text"
    if path.is_dir() and not walk_folder(path, RECORD_SUFFIXES) and walk_folder(path, DOCUMENT_SUFFIXES):
        return "text", "files of plain text"
    corpus = open_corpus(source, text_field=None, cache=cache_home(None))
    first = next(iter(corpus.documents("train" if "train" in corpus.splits else corpus.splits[0])), None)
    if first is None:
        raise DataError(f"'{source}' holds no rows to train on")
    record = record_of(first)
    known = {
        "chat": [shape.required for shape in SHAPES] + [PREFERENCE],
        "labelled": [(LabelledConfig.text_field, LabelledConfig.label_field)],
        "images": [(column,) for column in IMAGE_COLUMNS],
        "text": [(TextConfig.text_field,)],
    }
    for kind, shapes in known.items():
        for names in shapes:
            if all(name in record for name in names):
                return kind, ", ".join(names)
    raise DataError(
        f"'{first.id}' of '{source}' is no known kind of data: its fields are {', '.join(record) or 'none'}; name them "
        "with --set chat.fields.prompt=NAME --set chat.fields.completion=NAME for conversations, --set "
        "labelled.text_field=NAME --set labelled.label_field=NAME for classes, or --set text.text_field=NAME for text"
    )
