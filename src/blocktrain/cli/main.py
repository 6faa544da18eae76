"""`blocktrain train | resume | compare | plan | ...`: the commands, exit codes, and errors as one message.

Exit codes: 0 done; 1 training failed (non-finite loss); 2 bad input, with one message and nothing half-written;
128 + signal after Ctrl-C, SIGTERM or SIGHUP, with a checkpoint written.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from blocktrain.cli.command import Command, imported_when_run
from blocktrain.cli.compare import COMPARE
from blocktrain.cli.config import CONFIG
from blocktrain.cli.display import lasting_display, replace_what_cannot_be_encoded
from blocktrain.cli.export import EXPORT
from blocktrain.cli.finetune import FINETUNE
from blocktrain.cli.init import INIT
from blocktrain.cli.plan_options import add_plan_options
from blocktrain.cli.report import REPORT
from blocktrain.cli.resume import RESUME
from blocktrain.cli.train import TRAIN
from blocktrain.errors import BlocktrainError, Interrupted
from blocktrain.parse import printable

DESCRIPTION = "Train every parameter of a model, one block at a time, on GPUs you can afford."

# With segments that grow, a GPU's allocator keeps little that it cannot use: blocks of different sizes come and go.
_ALLOCATOR_SETTINGS = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}

COMMANDS = (
    FINETUNE,
    INIT,
    TRAIN,
    RESUME,
    COMPARE,
    Command(
        name="plan",
        help="show what fits, how long it takes and what it costs, before renting",
        add_options=add_plan_options,
        run=imported_when_run("plan", "plan"),
    ),
    Command(
        name="calibrate",
        help="measure this machine for 'plan --gpu this-machine'",
        add_options=lambda parser: None,
        run=imported_when_run("calibrate", "calibrate"),
    ),
    REPORT,
    EXPORT,
    CONFIG,
    Command(
        name="doctor",
        help="show versions, devices, dtypes and bandwidths of this machine",
        add_options=lambda parser: None,
        run=imported_when_run("doctor", "doctor"),
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    replace_what_cannot_be_encoded()
    if not os.environ.keys() & _ALLOCATOR_SETTINGS:  # before PyTorch starts
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    try:
        options = parser().parse_args(arguments)
    except BlocktrainError as error:
        return _show(error)
    if not options.trains:
        return _run(options)
    with lasting_display() as output:
        code = _run(options)
        output.flush()
        if output.lost is not None and options.json and code == 0:
            print(f"blocktrain: error: the result could not be written: {output.lost.strerror}", file=sys.stderr)
            return 1
        return code


def _run(options: argparse.Namespace) -> int:
    """Run the command; an error becomes a message and an exit code."""
    try:
        return options.command(options)
    except BlocktrainError as error:
        if options.debug:
            raise
        return _show(error)
    except BrokenPipeError:  # the reader of our output has gone, as in `blocktrain ... | head`
        sys.stderr.close()
        return 0
    except OSError as error:  # from a path that no code of ours has met with a message of its own
        if options.debug:
            raise
        place = "" if error.filename is None else f"'{os.fspath(error.filename)}': "
        print(printable(f"blocktrain: error: {place}{error.strerror or error}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if options.debug:
            raise
        print("blocktrain: stopped", file=sys.stderr)
        return 130


def _show(error: BlocktrainError) -> int:
    """Print the message; returns the exit code."""
    sys.stdout.flush()
    label = "" if isinstance(error, Interrupted) else "error: "
    rank = f"[{os.environ['RANK']}]" if "RANK" in os.environ else ""
    print(f"blocktrain{rank}: {label}{printable(str(error))}", file=sys.stderr)
    return error.exit_code


def parser() -> argparse.ArgumentParser:
    """The parser of the command line: the options of every command, and those that all of them have."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    common.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    root = argparse.ArgumentParser(prog="blocktrain", description=DESCRIPTION)
    root.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = root.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = commands.add_parser(command.name, parents=[common], help=command.help, description=command.help)
        sub.set_defaults(command=command.run, trains=command.trains)
        command.add_options(sub)
    return root


class _Version(argparse.Action):
    """Prints the version, whose import is not free, when it is requested."""

    def __call__(self, *_: object) -> None:
        import blocktrain

        print(f"blocktrain {blocktrain.__version__}")
        raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
