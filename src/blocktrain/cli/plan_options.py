"""The options of `blocktrain plan`, apart from the command because that takes longer to import."""

from __future__ import annotations

import argparse

from blocktrain.parse import number_between, output_path


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add what to train, on what, and what to leave to the planner."""

    def text(flag: str, default: str | None, words: str, metavar: str = "X") -> None:
        more = "" if default is None else " (default: %(default)s)"
        parser.add_argument(flag, default=default, metavar=metavar, help=words + more)

    def number(flag: str, default: int, words: str) -> None:
        more = " (default: %(default)s)"
        parser.add_argument(
            flag, type=number_between(flag, int, 1, 10**9), default=default, metavar="N", help=words + more
        )

    def choice(flag: str, default: str, others: str, words: str) -> None:
        choices = (default, *others.split())
        parser.add_argument(flag, choices=choices, default=default, help=f"{words} (default: %(default)s)")

    def file(flag: str, words: str) -> None:
        parser.add_argument(flag, type=output_path, metavar="FILE", help=words)

    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME",
        help="a preset, a config.json or folder of Hugging Face, or a hub name",
    )
    parser.add_argument("--tokens", required=True, metavar="10B", help="tokens that full training would see")
    parser.add_argument("--gpu", required=True, metavar="NAME", help="rtx4090, a100-80, ... or this-machine")
    number("--gpus", 1, "cards in each node")
    number("--nodes", 1, "number of nodes")
    number("--seq", 1024, "tokens in a row")
    number("--rows", 64, "rows in an optimizer step, over all cards")
    text("--method", "bcd", "bcd, full or offload; several with commas; or all", "M")
    text("--blocks", "auto", "how many blocks, or auto", "M")
    choice("--pieces", "layers", "modules", "what blocks are made of")
    parser.add_argument(
        "--largest",
        type=number_between("--largest", int, 1, 10**15),
        metavar="N",
        help="instead of --blocks: the most parameters that a block may have",
    )
    text("--precision", "auto", "auto, fp32, bf16-exact, int8, nf4 or bf16", "P")
    choice("--moments", "auto", "fp32 8bit", "precision of AdamW's moments")
    choice("--state", "auto", "host drop", "what happens to the moments between visits")
    choice("--frozen", "auto", "device host", "where the frozen weights are stored")
    choice("--checkpointing", "auto", "none layers", "activation checkpointing")
    text("--loss-chunk", "auto", "for how many tokens logits exist at once; or auto, or off", "N")
    choice("--cache", "auto", "off device host disk", "where the prefix cache is stored")
    number("--cache-epochs", 1, "passes over a cached subset in each visit")
    text(
        "--multiplier",
        "average",
        "the B-F multiplier: the paper's average, worst or tables, a number, or the folder of a comparison",
        "B",
    )
    text("--budget", None, "the most that it may cost, for example 500usd", "USD")
    text("--deadline", None, "the longest that it may take, for example 3d or 12h", "SPAN")
    text("--price", None, "price of a card for an hour, instead of a provider's", "USD")
    text("--provider", None, "whose prices to use: wuwen, autodl, parallel, anygpu, galaxy or hengyuan", "NAME")
    file("--hardware", "further cards, links and prices, in the form of hardware.toml")
    for flag, words in (("--host-memory", "host memory for each card"), ("--disk", "disk space in each node")):
        parser.add_argument(flag, type=number_between(flag, float, 0.001, 10**9), metavar="GIB", help=words)
    file("--out", "write the best layout as a configuration for 'train'")
    file("--html", "write the plan as a page with charts")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="track the memory of the best layout on fake tensors (imports PyTorch)",
    )
