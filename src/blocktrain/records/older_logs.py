"""Names that older logs use, translated into those of today, so that their runs can still be reported and compared."""

from __future__ import annotations

from collections.abc import Mapping

from blocktrain.records.codec import Event

LAYOUTS = {"rows": "data", "layers": "pipeline", "shards": "fsdp"}  # of a run over several processes
MEMORY_PARTS = {"optimizer": "moments"}  # of a step, in the record `cost`


def in_todays_words(event: Event) -> Event:
    """The line `event` as this version would write it; `event` itself is left as it is."""
    match event["kind"]:
        case "run" if "layout" in event:
            return {**event, "layout": LAYOUTS.get(event["layout"], event["layout"])}
        case "cost":
            memory = event["memory"]
            blocks = [_parts(block) for block in memory["blocks"]]
            return {**event, "memory": {**memory, "full": _parts(memory["full"]), "blocks": blocks}}
        case _:
            return event


def _parts(memory: Mapping[str, int]) -> dict[str, int]:
    return {MEMORY_PARTS.get(part, part): size for part, size in memory.items()}
