"""Reading the file in which Weights & Biases keeps an offline run: records in LevelDB's log format.

The file has a header of 7 bytes, then blocks of 32,768 bytes. A piece of a record has a checksum
of 4 bytes, a length of 2 and a type of 1: 1 is a whole record; 2, 3 and 4 are its first, middle and
last piece.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK, HEADER, PIECE = 32768, 7, 7


@dataclass
class OfflineRun:
    """What the file of an offline run says."""

    id: str = ""
    group: str = ""
    name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    history: dict[int, dict[str, float]] = field(default_factory=dict)
    artifacts: list[str] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)


def read(path: Path) -> OfflineRun:
    run = OfflineRun()
    for record in _records(path.read_bytes()):
        if record.HasField("run"):
            run.id, run.group = record.run.run_id, record.run.run_group
            run.name = record.run.display_name
            run.settings |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
        elif record.HasField("history"):
            values = {
                i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.history.item
            }
            assert values["_step"] not in run.history, "a round was reported twice"
            run.history[values.pop("_step")] = values
        elif record.HasField("artifact"):
            run.artifacts.append(record.artifact.type)
        elif record.HasField("summary"):
            run.summary |= {
                i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.summary.update
            }
    return run


def _records(data: bytes) -> Iterator[Any]:
    at, whole = HEADER, b""
    while at + PIECE <= len(data):
        if (left := BLOCK - at % BLOCK) < PIECE:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + PIECE])
        whole += data[at + PIECE : at + PIECE + length]
        at += PIECE + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""
