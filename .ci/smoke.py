"""What an installed wheel must be able to do away from its checkout: import every name, find its own files, answer."""

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

import blocktrain as bt

place = Path(bt.__file__).resolve()
if "site-packages" not in place.parts:
    sys.exit(f"blocktrain was imported from '{place}', not from the wheel")
for name in bt.__all__:
    getattr(bt, name)
for file in ("py.typed", "plan/hardware.toml", "report/report.css", "report/report.js"):
    if not resources.files("blocktrain").joinpath(file).read_bytes() and file != "py.typed":
        sys.exit(f"'{file}' is empty in the wheel")
plan = ["plan", "--model", "gpt2", "--tokens", "1B", "--gpu", "rtx4090", "--json"]
for command in (["doctor", "--json"], plan):
    said = subprocess.check_output([sys.executable, "-m", "blocktrain", *command], text=True)
    json.loads(said)
print(f"blocktrain {bt.__version__} works from '{place.parent}'")
