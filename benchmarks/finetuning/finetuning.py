"""Loss and exact match before, during and after a run on conversations, from its log.

    blocktrain train examples/gsm8k.toml --out runs/gsm8k
    python benchmarks/finetuning/finetuning.py runs/gsm8k benchmarks/finetuning/gsm8k.json

Seconds are the run's: from its opening to its last evaluation.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from blocktrain.report.run import RunRecord
from blocktrain.runtime import result_path


def result(run: RunRecord, answer_marker: str) -> dict[str, Any]:
    """What the run's README states; losses are nats per learned token."""
    return {
        "question": "one command: loss and exact match before and after",
        "model": run.header.model,
        "parameters": run.header.parameters,
        "blocks": len(run.header.blocks),
        "seconds": run.seconds,
        "tokens": run.tokens,
        "evaluations": [
            {
                "step": row.step,
                "loss": row.loss,
                "exact_match": row.exact_match,
                "answers": len(answers := [sample for sample in run.samples if sample.step == row.step]),
                "right": sum(sample.correct for sample in answers),
                "with_answer_marker": sum(answer_marker in sample.text for sample in answers),
            }
            for row in run.evaluations
        ],
        "environment": run.details["environment"],
        "date": run.details["started"][:10],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=result_path)
    options = parser.parse_args()
    run = RunRecord.load(options.run)
    found = result(run, run.details["config"]["evaluation"]["answer_marker"])
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
