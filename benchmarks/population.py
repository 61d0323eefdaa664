"""Start and memory with many clients: python benchmarks/population.py [--clients 1000000 ...]

Synthetic examples of 784 numbers, FedGH's 2NN or logistic regression. Prints the seconds from the
call that makes the federation to the end of preparation and of the first round, of each further
round, and the memory of this process and all its workers together: proportional set size, so that
what they share counts once, and of it the anonymous part, which the system cannot take back.

With --folder the examples lie in a file of that folder, which is made where it is missing, and
stay there (`numpy.load(..., mmap_mode="r")`). The last round ends with an evaluation of all
examples, by client.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedkeel import Cohort, Evaluation, Local, Task, by_client, dataset
from fedkeel.config import Run
from fedkeel.engine.prepared import Ingredients
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.callbacks import Callback, GlobalModel
from fedkeel.runner.prepare import prepare
from fedkeel.runner.start import start
from fedkeel.task.models import make

_ROWS = 100_000
"""Examples that are written at a time."""


def network(name: str, features: int) -> nn.Module:
    return nn.Linear(features, 10) if name == "logistic" else make("2nn", (features,), 10)


def examples(folder: Path | None, n: int, features: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return x [N, features] and y [N], in a file where a folder is named."""
    random = np.random.default_rng(0)
    y = random.integers(0, 10, n)
    if folder is None:
        return random.standard_normal((n, features), dtype=np.float32), y
    file = folder / f"{n}x{features}.npy"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".part")
        x = np.lib.format.open_memmap(unfinished, "w+", np.float32, (n, features))
        for at in range(0, n, _ROWS):
            x[at : at + _ROWS] = random.standard_normal(
                (min(_ROWS, n - at), features), dtype=np.float32
            )
        x.flush()
        unfinished.rename(file)
    return np.load(file, mmap_mode="r"), y


def children(pid: int) -> list[int]:
    return [
        int(p) for f in Path(f"/proc/{pid}/task").glob("*/children") for p in f.read_text().split()
    ]


def memory(pid: int) -> tuple[int, int]:
    """Bytes of proportional set size, and of its anonymous part."""
    found = {"Pss": 0, "Pss_Anon": 0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in found:
            found[name] = int(value.split()[0]) * 1024
    return found["Pss"], found["Pss_Anon"]


class Meter(Callback):
    """Looks at the clock and at memory after every round."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int, int]] = []
        self.phases: list[tuple[float, float]] = []

    def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
        now = time.perf_counter()
        sizes = [memory(pid) for pid in [os.getpid(), *children(os.getpid())]]
        self.seen.append((now, sum(pss for pss, _ in sizes), sum(anon for _, anon in sizes)))
        self.phases.append((row.seconds.get("sampling", 0.0), row.seconds["server"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--examples", type=int, default=24)
    parser.add_argument("--features", type=int, default=784)
    parser.add_argument("--model", choices=("2nn", "logistic"), default="2nn")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--per-round", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    n = given.clients * given.examples
    x, y = examples(given.folder, n, given.features)
    ids = np.arange(given.clients).repeat(given.examples)
    began, worked = time.perf_counter(), time.process_time()
    clients = by_client(x, y, ids)
    divided = time.perf_counter()
    settings = Run(
        method=given.method,
        rounds=given.rounds,
        local=Local(lr=0.01, epochs=1, batch_size=12),
        cohort=Cohort(clients=given.per_round),
        evaluation=Evaluation(every=given.rounds),
    )
    task = Task(lambda: network(given.model, given.features))
    held = dataset(np.array(x[:1000]), y[:1000])
    prepared = prepare(settings, Ingredients(task, lambda _: clients, held, given.model))
    ready = time.perf_counter()
    meter = Meter()
    start(prepared, callbacks=[meter])
    first, _, _ = meter.seen[0]
    print(
        f"{given.method}, {given.model}, {given.clients} clients x {given.examples}, "
        f"{given.per_round} a round, data {x.nbytes / 1e6:.0f} MB"
        f"{'' if given.folder is None else ' in a file'}"
    )
    print(
        f"divided after {divided - began:.2f} s, prepared after {ready - began:.2f} s, first round "
        f"done after {first - began:.2f} s"
    )
    before = ready
    for i, (now, pss, anonymous) in enumerate(meter.seen, start=1):
        (sampling, server), took, before = meter.phases[i - 1], now - before, now
        print(
            f"round {i}: {took:.2f} s (sampling {sampling:.3f}, server {server:.3f}), "
            f"resident {pss / 1e6:.0f} MB, {anonymous / 1e6:.0f} anonymous"
        )
    print(f"{time.process_time() - worked:.1f} s of processor time in this process")


if __name__ == "__main__":
    main()
