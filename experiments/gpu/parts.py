"""Everything that needs a card, in parts of less than nine minutes each; call it again until it says that all is done.

    python experiments/gpu/parts.py --data FOLDER                  the next nine minutes, on one GPU of 24 to 141 GB
    python experiments/gpu/parts.py --data FOLDER --part table3    of one part only
    python experiments/gpu/parts.py --device cpu --tiny            does every part run?

Results, resumable, in experiments/gpu/results/PART.json: step time and memory of G-1.6B and L-1.5B in full, offloaded
and in blocks (table3, table15_16_figure6), a pretrained encoder (finetuning), every peer on GPT-2 (peers), GPT-2 of
0.12B on WikiText-2 and ResNets (table2, table9_10_11), ResNet-20 in the same time (resnet20). Run folders, which
training goes on from, in runs/experiments.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from run import main as run  # noqa: E402 - found beside this folder

PARTS = (  # the short ones first
    "table3", "table15_16_figure6", "finetuning", "peers", "table2", "table9_10_11", "resnet20",
)  # fmt: skip


def main() -> int:
    """0 when every part is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data", type=Path, metavar="FOLDER")
    parser.add_argument("--budget", type=float, default=8.5, metavar="MINUTES", help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="the smallest of everything, to see that it runs")
    parser.add_argument("--result", type=Path, default=HERE / "results", metavar="FOLDER")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.budget
    common = ["--scale", "tiny" if options.tiny else "card", "--device", options.device]
    common += ["--result", str(options.result)] + ([] if options.data is None else ["--data", str(options.data)])
    for part in PARTS if options.part is None else (options.part,):
        left = (until - time.monotonic()) / 60
        if left <= 0 or run([part, *common, "--budget", f"{left:.2f}"]):
            print("not done yet: call again to go on")
            return 1
    print("all done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
