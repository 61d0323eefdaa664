"""A node lies to the server, or the server to the nodes, in one message of a run."""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from trial import Ended, arguments, attempt, tally
from values import NUMBERS, damage

from fedkeel import config
from fedkeel.engine.prepared import Prepared
from fedkeel.flower.wire import HEADER
from fedkeel.runner.result import Result
from in_process_grid import InProcessGrid, header_of, make_nodes, run_on_nodes, with_header
from toys import federation, prepared

CLIENTS, ROUNDS, LIAR = 5, 5, 2
LARGEST_MOVE = 10.0
"""Honest rounds that one liar may move the model."""

METHODS = (
    "fedavg", "scaffold", "fedper", "fedcurv", "fedgc", "median", "mime", "fedbuff(buffer=2)",
    "fedasync", "quantise", "fedavg, secure", "scaffold, secure", "fedbn",
)  # fmt: skip


def run_of(name: str) -> Prepared:
    """Return a run of five clients, one on each node."""
    method, _, secure = name.partition(", ")
    flower = config.Flower(
        deadline_seconds=0.2,
        poll_seconds=0.005,
        quorum=0.5,
        secure_aggregation=bool(secure),
        **({"secure_minimum": 3} if secure else {}),
    )
    more = {"buffers": "local"} if method == "fedbn" else {}
    return prepared(
        method,
        clients=federation(CLIENTS),
        per_round=CLIENTS,
        rounds=ROUNDS,
        dtype="float64",
        flower=flower,
        **more,
    )


def number_of(client: int) -> int:
    """The number of the node that plays a client."""
    return 10**9 + 7 * client


@dataclass
class Lies(InProcessGrid):
    """A grid on which one message is changed on its way."""

    to_nodes: bool = False
    at: int = 0
    draw: random.Random | None = None
    seen: int = 0
    said: str = "nothing"
    before: RecordDict | None = None

    def _reply(self, message: Message) -> list[Message]:
        if self.to_nodes and message.metadata.dst_node_id == number_of(LIAR):
            changed = self._lie(message.content)
            if changed is None:
                return []
            message.content = changed
        return super()._reply(message)

    def reply_of_liar(self, kind: str, reply: RecordDict) -> RecordDict | None:
        """What the liar sends."""
        return reply if self.to_nodes else self._lie(reply)

    def _lie(self, content: RecordDict) -> RecordDict | None:
        self.seen += 1
        before, self.before = self.before, content
        if self.draw is None or self.seen - 1 != self.at:
            return content
        changed, self.said = lie(content, before, self.draw)
        return changed


def lie(
    content: RecordDict, before: RecordDict | None, draw: random.Random
) -> tuple[RecordDict | None, str]:
    """Return a message changed in one way, and the way in words."""
    names = [str(name) for name in content]
    arrays = [name for name in names if isinstance(content[name], ArrayRecord)]
    metrics = [name for name in names if isinstance(content[name], MetricRecord)]
    ways = (
        ["record"]
        + ["header"] * 3
        + ["arrays"] * 5 * bool(arrays)
        + ["metrics"] * 3 * bool(metrics)
    )
    ways += ["replay"] * (before is not None)
    way = draw.choice(ways)
    if way == "replay":
        return before, "the message before"
    if way == "header" and HEADER in content:
        values = header_of(content)
        said = damage(values, draw)
        return with_header(content, values), f"header: {said}"
    if way == "arrays":
        name = draw.choice(arrays)
        made, said = other_arrays(content[name], draw)
        return RecordDict({**content, name: made}), f"{name}: {said}"
    if way == "metrics":
        name = draw.choice(metrics)
        values = dict(content[name])
        key = draw.choice([*values, "unknown"])
        number = draw.choice([n for n in NUMBERS if not isinstance(n, int) or abs(n) < 2**63])
        values[key] = draw.choice([number, [number] * 3])
        return RecordDict({**content, name: MetricRecord(values)}), f"{name}: {key} = {number!r}"
    return other_records(content, names, draw)


def other_records(
    content: RecordDict, names: list[str], draw: random.Random
) -> tuple[RecordDict | None, str]:
    """Drop, rename, add or exchange whole records."""
    way, name = draw.randrange(6), draw.choice(names)
    records: dict[str, Any] = dict(content)
    if way == 0:
        return None, "no message"
    if way == 1:
        del records[name]
        return RecordDict(records), f"without {name}"
    if way == 2:
        records["../" + name] = records.pop(name)
        return RecordDict(records), f"{name} renamed"
    if way == 3:
        records[name] = ConfigRecord({"format": draw.choice([0, 3, 10**9]), "values": "{" * 2000})
        return RecordDict(records), f"{name} is text"
    if way == 4:
        records[name] = ArrayRecord({"a": Array(np.zeros(10**6))})
        return RecordDict(records), f"{name} is a million zeros"
    return RecordDict({}), "an empty message"


def other_arrays(record: Any, draw: random.Random) -> tuple[ArrayRecord, str]:
    """Change the numbers or the form of tensors."""
    arrays = {key: array.numpy().copy() for key, array in record.items()}
    chosen = draw.choice(list(arrays)) if arrays else None
    targets = list(arrays) if draw.random() < 0.5 or chosen is None else [chosen]
    way = draw.randrange(12)
    factor = 10.0 ** draw.uniform(0.3, 9) * draw.choice([1, -1])
    special = draw.choice([math.nan, math.inf, -math.inf, 1e308, 1e-320, 0.0])
    said = f"{len(targets)} of {len(arrays)}: "
    made: dict[str, Any] = dict(arrays)
    for key in targets:
        array = arrays[key]
        if way < 4 and array.dtype.kind == "f":
            made[key] = array * factor
        elif way == 4 and array.dtype.kind == "f":
            made[key] = np.full_like(array, special)
        elif way == 5 and array.dtype.kind == "f" and array.size:
            array.reshape(-1)[draw.randrange(array.size)] = special
        elif way == 6:
            made[key] = array.reshape(-1)[:-1]
        elif way == 7:
            made[key] = array.astype(np.float16)
        elif way == 8 and array.dtype.kind in "iu":
            made[key] = array + np.array(2, array.dtype) ** draw.randrange(1, 30)
        elif way == 9 and array.dtype.kind == "f":
            made[key] = array + np.random.default_rng(0).normal(size=array.shape) * abs(factor)
    if way < 4:
        said += f"times {factor:.2g}"
    elif way in (4, 5):
        said += f"{special}"
    else:
        said += f"way {way}"
    packed = {key: Array(np.ascontiguousarray(array)) for key, array in made.items()}
    if way == 10 and chosen is not None:
        whole = packed[chosen]
        cut = draw.randrange(len(whole.data) + 1)
        packed[chosen] = Array(whole.dtype, whole.shape, whole.stype, whole.data[:cut])
        said = f"{chosen} cut to {cut} bytes"
    if way == 11 and chosen is not None:
        packed["../../etc/passwd"] = packed.pop(chosen)
        said = f"{chosen} renamed"
    return ArrayRecord(packed), said


def play(made: Prepared, root: Path, lies: dict[str, Any]) -> tuple[Result, Lies]:
    """Make a run on nodes of which one, or whose server, lies."""
    grid = Lies(make_nodes(made, root, nodes=CLIENTS), **lies)
    grid.edits[number_of(LIAR)] = grid.reply_of_liar
    return run_on_nodes(made, grid, root / "run"), grid


@cache
def honest(name: str) -> tuple[dict[str, torch.Tensor], float, int]:
    """The model of an honest run, how far a round moves it, and the messages of a node."""
    made = run_of(name)
    start = {k: v.clone() for k, v in made.server.params.items()}
    with tempfile.TemporaryDirectory() as folder:
        result, grid = play(made, Path(folder), {})
    moved = math.sqrt(sum(float((result.params[k] - start[k]).square().sum()) for k in start))
    return {k: v.clone() for k, v in result.params.items()}, moved / ROUNDS, grid.seen


def one(number: int, name: str, seed: int) -> Ended:
    """Make one trial."""
    draw = random.Random(f"{seed} {number}")
    params, step, messages = honest(name)
    to_nodes = draw.random() < 0.4
    with tempfile.TemporaryDirectory() as folder:
        lies = {"to_nodes": to_nodes, "at": draw.randrange(max(1, messages)), "draw": draw}
        result, grid = play(run_of(name), Path(folder), lies)
    said = f"{'request' if to_nodes else 'reply'} {grid.at}: {grid.said}"
    apart = sum(float((result.params[k] - params[k]).square().sum()) for k in params)
    far = math.sqrt(apart) / step
    faults = [row.faults for row in result.rows if row.faults]
    detail = f"{said}; {far:.3g} honest rounds away; faults {json.dumps(faults)[:300]}"
    numbers = [
        row.train_loss for row in result.rows[1:] if row.train_loss is not None and not row.faults
    ]  # a mean that was left out is NaN, and said
    if not math.isfinite(far) or not all(map(math.isfinite, numbers)):
        return Ended("NaN or infinity", detail)
    if not to_nodes and far > LARGEST_MOVE:
        return Ended("moved the model", detail, far)
    return Ended("the same", detail, None if to_nodes else far)


def main() -> int:
    """Make all trials."""
    options = arguments(2000)
    torch.set_num_threads(1)

    def trials() -> Iterator[tuple[int, str, Ended]]:
        for number in range(options.first, options.first + options.trials):
            name = METHODS[number % len(METHODS)]
            honest(name)
            yield number, name, attempt(lambda n=number, m=name: one(n, m, options.seed))

    return tally("replies and requests", options, trials()).show()


if __name__ == "__main__":
    sys.exit(main())
