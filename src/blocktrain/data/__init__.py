"""Data: documents and images from files or the hub, tokenised or decoded once, read back as rows in a seeded order.

files, stdlib, hub -> documents -> [tokenizer] -> packed tokens on disk -> rows of T tokens -> batch
rows of fields -> conversations -> [chat template] -> tokens, some of them learned -> rows -> batch
                         parquet -> [Pillow]    -> pixels on disk        -> images           -> batch
"""

from blocktrain.data.chat import ChatConfig, ChatData, ChatRows, open_chat
from blocktrain.data.corpus import read_documents
from blocktrain.data.document import Document
from blocktrain.data.images import ImageConfig, ImageData, ImageRows, open_images
from blocktrain.data.labelled import LabelledConfig, LabelledData, LabelledRows, open_labelled
from blocktrain.data.shuffle import ShuffledRows, share
from blocktrain.data.text import TextConfig, TextData, open_text
from blocktrain.data.token_rows import Span, TokenRows
from blocktrain.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "ByteTokenizer",
    "ChatConfig",
    "ChatData",
    "ChatRows",
    "Document",
    "ImageConfig",
    "ImageData",
    "ImageRows",
    "LabelledConfig",
    "LabelledData",
    "LabelledRows",
    "ShuffledRows",
    "Span",
    "TextConfig",
    "TextData",
    "TokenRows",
    "Tokenizer",
    "load_tokenizer",
    "open_chat",
    "open_images",
    "open_labelled",
    "open_text",
    "read_documents",
    "share",
]
