"""Data: documents and images from files or the hub, tokenized or decoded once, then read as rows in a seeded order.

files, stdlib, hub -> documents -> [tokenizer] -> tokens on disk -> rows of T tokens                   -> batch
rows of fields -> conversations -> [chat template] -> tokens, some of them learned -> rows             -> batch
                         parquet -> [Pillow] -> pixels on disk -> images                               -> batch

Each kind of data is one file that registers itself (`kinds.py`); importing this package imports them all.
"""

from blocktrain.data.chat import ChatConfig, ChatRows, open_chat
from blocktrain.data.corpus import read_documents
from blocktrain.data.document import Document
from blocktrain.data.images import ImageConfig, ImageRows, open_images
from blocktrain.data.kinds import DATA_KINDS, DataConfig, DataKind, TrainingData, kind_of, register
from blocktrain.data.labelled import LabelledConfig, LabelledRows, open_labelled
from blocktrain.data.sampling import ShuffledRows, rank_share
from blocktrain.data.text import TextConfig, open_text
from blocktrain.data.token_rows import DocumentSlice, TokenRows
from blocktrain.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "DATA_KINDS",
    "ByteTokenizer",
    "ChatConfig",
    "ChatRows",
    "DataConfig",
    "DataKind",
    "Document",
    "DocumentSlice",
    "ImageConfig",
    "ImageRows",
    "LabelledConfig",
    "LabelledRows",
    "ShuffledRows",
    "TextConfig",
    "TokenRows",
    "Tokenizer",
    "TrainingData",
    "kind_of",
    "load_tokenizer",
    "open_chat",
    "open_images",
    "open_labelled",
    "open_text",
    "rank_share",
    "read_documents",
    "register",
]
