"""`blocktrain train | resume | compare | plan | ...`: arguments, exit codes, and errors as one message.

Exit codes: 0 done; 1 training failed (non-finite loss); 2 bad input, with one message and nothing half-written;
128 + signal after Ctrl-C or SIGTERM, with a checkpoint written.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from blocktrain.errors import BlocktrainError, Interrupted

Command = Callable[[argparse.Namespace], int]

DESCRIPTION = "Train every parameter of a model, one block at a time, on GPUs you can afford."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    options = parser().parse_args(arguments)
    try:
        return options.command(options)
    except BlocktrainError as error:
        if options.debug:
            raise
        sys.stdout.flush()
        label = "" if isinstance(error, Interrupted) else "error: "
        rank = f"[{os.environ['RANK']}]" if "RANK" in os.environ else ""
        print(f"blocktrain{rank}: {label}{error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if options.debug:
            raise
        print("blocktrain: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as `blocktrain ... | head` does
        sys.stderr.close()
        return 0


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    common.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    root = argparse.ArgumentParser(prog="blocktrain", description=DESCRIPTION)
    root.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = root.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, command: Command, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, parents=[common], help=text, description=text)
        sub.set_defaults(command=command)
        return sub

    train = add("train", _lazy("train", "train"), "train as a configuration says, into a new run folder")
    _configuration(train)
    resume = add("resume", _lazy("train", "resume"), "go on with an interrupted run from its newest checkpoint")
    resume.add_argument("run", type=Path, metavar="DIR", help="the run's folder")
    _overrides(resume, "go on with another device, precision, memory, distributed layout ...; may be repeated")
    compare = add(
        "compare",
        _lazy("train", "compare"),
        "train the same model on the same tokens in full and in blocks, side by side",
    )
    _configuration(compare)
    compare.add_argument(
        "--methods", default="full,bcd", metavar="A,B", help="what to compare, in this order (default: %(default)s)"
    )
    compare.add_argument(
        "--lr-search", default="1", metavar="A,B", help="multiples of each method's learning rate to try (default: 1)"
    )
    compare.add_argument("--seeds", type=int, default=1, metavar="N", help="runs at the best rate (default: 1)")
    compare.add_argument("--card", metavar="NAME", help="price this machine's hours as those of rtx4090, a100-80, ...")
    _plan(add("plan", _lazy("plan", "plan"), "what fits, how long it takes and what it costs, before renting"))
    add("calibrate", _lazy("calibrate", "calibrate"), "measure this machine for 'plan --gpu this-machine'")
    report = add("report", _lazy("show_runs", "report"), "write report.html for one run, or one page for several")
    report.add_argument("runs", type=Path, nargs="+", metavar="DIR", help="run folders")
    report.add_argument("--out", type=Path, metavar="FILE", help="where (default: report.html in the first folder)")
    export = add("export", _lazy("show_runs", "export"), "write the trained model as a Hugging Face folder")
    export.add_argument("run", type=Path, metavar="DIR", help="the run's folder")
    export.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    export.add_argument("--push", metavar="OWNER/NAME", help="then upload it to the Hugging Face hub")
    export.add_argument("--public", action="store_true", help="where --push makes a new repository: for all to see")
    add("config", _lazy("show_runs", "config"), "show every key of the configuration, its default and what it does")
    add("doctor", _lazy("doctor", "doctor"), "show versions, devices, dtypes and bandwidths of this machine")
    return root


def _configuration(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("config", type=Path, metavar="CONFIG", help="a TOML file, see examples/")
    _overrides(sub, "override a key; may be repeated")
    sub.add_argument(
        "--out", type=_folder, metavar="DIR", help="a new folder (default: runs/NAME, or runs/NAME-compare; numbered)"
    )


def _folder(name: str) -> Path:
    if not name:
        raise argparse.ArgumentTypeError("the name of the folder is empty")
    return Path(name)


def _overrides(sub: argparse.ArgumentParser, text: str) -> None:
    sub.add_argument("--set", action="append", default=[], metavar="a.b=c", dest="overrides", help=text)


def _plan(sub: argparse.ArgumentParser) -> None:
    def text(flag: str, default: str | None, words: str, metavar: str = "X") -> None:
        more = "" if default is None else " (default: %(default)s)"
        sub.add_argument(flag, default=default, metavar=metavar, help=words + more)

    def number(flag: str, default: int, words: str) -> None:
        sub.add_argument(flag, type=int, default=default, metavar="N", help=f"{words} (default: %(default)s)")

    sub.add_argument("--model", required=True, metavar="NAME", help="a preset, or a Hugging Face config.json or folder")
    sub.add_argument("--tokens", required=True, metavar="10B", help="that full training would see")
    sub.add_argument("--gpu", required=True, metavar="NAME", help="rtx4090, a100-80, ... or this-machine")
    number("--gpus", 1, "cards in a node")
    number("--nodes", 1, "nodes")
    number("--seq", 1024, "tokens in a row")
    number("--rows", 64, "rows in an optimizer step, over all cards")
    text("--method", "bcd", "bcd, full, offload, several with commas, or all", "M")
    text("--blocks", "auto", "auto, or how many", "M")
    sub.add_argument("--pieces", choices=("layers", "modules"), default="layers", help="what blocks are made of")
    sub.add_argument("--largest", type=int, metavar="N", help="instead of --blocks: the most parameters of a block")
    text("--precision", "auto", "auto, fp32, bf16-exact, int8, nf4 or bf16", "P")
    sub.add_argument("--moments", choices=("auto", "fp32", "8bit"), default="auto", help="of AdamW")
    sub.add_argument("--state", choices=("auto", "host", "drop"), default="auto", help="moments between visits")
    sub.add_argument("--frozen", choices=("auto", "device", "host"), default="auto", help="where frozen weights are")
    sub.add_argument("--checkpointing", choices=("auto", "none", "layers"), default="auto", help="of activations")
    text("--loss-chunk", "auto", "auto, off, or tokens whose logits exist at once", "N")
    sub.add_argument("--cache", choices=("auto", "off", "device", "host", "disk"), default="auto", help="of the prefix")
    number("--cache-epochs", 1, "passes over a cached subset in a visit")
    text("--multiplier", "average", "B-F: average, worst or tables of the paper, a number, a comparison's folder", "B")
    text("--budget", None, "for example 500usd", "USD")
    text("--deadline", None, "for example 3d or 12h", "SPAN")
    text("--price", None, "of one card and hour, instead of a provider's", "USD")
    text("--provider", None, "whose prices: wuwen, autodl, parallel, anygpu, galaxy, hengyuan", "NAME")
    sub.add_argument("--hardware", type=Path, metavar="FILE", help="further cards, links, prices; as hardware.toml")
    sub.add_argument("--host-memory", type=float, metavar="GIB", help="of host memory for one card")
    sub.add_argument("--disk", type=float, metavar="GIB", help="of disk in a node")
    sub.add_argument("--out", type=Path, metavar="FILE", help="write the configuration that 'train' runs")
    sub.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures")
    sub.add_argument("--verify", action="store_true", help="run a memory tracker on the best layout (imports PyTorch)")


class _Version(argparse.Action):
    def __call__(self, *_: object) -> None:
        import blocktrain

        print(f"blocktrain {blocktrain.__version__}")
        raise SystemExit(0)


def _lazy(module: str, function: str) -> Command:
    """The function of a module of this package, imported when it is called."""

    def command(options: argparse.Namespace) -> int:
        return getattr(importlib.import_module(f"blocktrain.cli.{module}"), function)(options)

    return command


if __name__ == "__main__":
    sys.exit(main())
