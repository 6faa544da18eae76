"""Run an experiment for as long as one has, then write its table; what was done before is kept.

    python experiments/run.py table2 --budget 10 --data FOLDER
    python experiments/run.py table2 --scale card --device cuda --budget 8.5 --data FOLDER     on a rented GPU
    python experiments/run.py all --scale tiny --device cpu --result OTHER_FOLDER              does everything run?

Scales: "tiny" proves that it runs; "short" is what a shared CPU can do; "card" is one GPU of 24 GB or more.
FOLDER holds `cifar10/` (parquet), `wikitext-2/` (train.txt, valid.txt), `gpt2_tokenizer/`, `banking77/` (train.csv,
test.csv) and `all-MiniLM-L6-v2/` (`sentence-transformers/all-MiniLM-L6-v2` of the Hugging Face hub).
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

import runner

from blocktrain.cli.live import quiet_libraries
from blocktrain.runtime import pick_device, result_path

NAMES = (
    "peers", "finetuning", "resnet20", "table2", "table3", "table4_figure5", "table9_10_11", "table15_16_figure6",
)  # fmt: skip


def experiment(name: str) -> runner.Experiment:
    """The experiment in the folder called `name`."""
    return importlib.import_module(f"{name}.cases").EXPERIMENT


def main(arguments: list[str] | None = None) -> int:
    """0 when all of it is done, 1 when the budget was over first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*NAMES, "all"])
    parser.add_argument("--budget", type=float, default=10.0, metavar="MINUTES", help="default: %(default)s")
    parser.add_argument("--scale", choices=("tiny", "short", "card"), default="short", help="default: %(default)s")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases with this in their name, or in NAME [SCALE]")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="real data, for what trains on them")
    parser.add_argument("--work", type=Path, default=Path("runs/experiments"), metavar="FOLDER", help="for run folders")
    parser.add_argument(
        "--result", type=result_path, default=str(runner.HERE), metavar="FOLDER", help="default: in experiments/NAME"
    )
    options = parser.parse_args(arguments)
    quiet_libraries()
    place = runner.Place(device=pick_device(options.device), data=options.data, work=options.work)
    until = time.monotonic() + 60 * options.budget
    done = True
    for name in NAMES if options.name == "all" else [options.name]:
        found = experiment(name)
        cases = [case for case in found.cases(options.scale) if case.is_called(options.only)]
        ours = options.result == runner.HERE
        result = options.result / (f"{name}/result.json" if ours else f"{name}.json")
        done &= runner.run_cases(cases, place, result, minutes=(until - time.monotonic()) / 60)
        if ours:
            runner.write_table(found)
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
