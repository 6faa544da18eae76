"""Write the table of every experiment's README anew from its result.json.

python experiments/tables.py
"""

from __future__ import annotations

import runner
from run import NAMES, experiment

if __name__ == "__main__":
    for each in NAMES:
        runner.write_table(experiment(each))
