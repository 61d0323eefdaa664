"""Start and memory with many clients: python benchmarks/population.py [--clients 10000]

Ten thousand clients of 24 examples each, FedGH's 2NN, 20 clients in a round. Prints the seconds
from the call to the end of preparation and to the end of the first round, and the resident memory
above the data's own size, of this process and of all its workers together (proportional set size,
so that what they share counts once).
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedkeel import Cohort, Evaluation, Local, Task, dataset, federation
from fedkeel.config import Run
from fedkeel.engine.prepared import Ingredients
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.callbacks import Callback, GlobalModel
from fedkeel.runner.prepare import prepare
from fedkeel.runner.start import start
from fedkeel.task.models import make


def two_nn() -> nn.Module:
    return make("2nn", (784,), 10)


def children(pid: int) -> list[int]:
    return [
        int(p) for f in Path(f"/proc/{pid}/task").glob("*/children") for p in f.read_text().split()
    ]


def proportional(pid: int) -> int:
    """Bytes of proportional set size."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


class Meter(Callback):
    """Looks at the clock and at memory after every round."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []

    def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
        pids = [os.getpid(), *children(os.getpid())]
        self.seen.append((time.perf_counter(), sum(proportional(pid) for pid in pids)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--examples", type=int, default=24)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--per-round", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    n = given.clients * given.examples
    x, y = torch.randn(n, 784), torch.randint(0, 10, (n,))
    own = x.numel() * x.element_size()
    began = time.perf_counter()
    rows = np.arange(n).reshape(given.clients, given.examples)
    clients = federation(dataset(x, y), list(rows))
    settings = Run(
        method=given.method,
        rounds=given.rounds,
        local=Local(lr=0.01, epochs=1, batch_size=12),
        cohort=Cohort(clients=given.per_round),
        evaluation=Evaluation(every=given.rounds),
    )
    held = dataset(x[:1000], y[:1000])
    prepared = prepare(settings, Ingredients(Task(two_nn), lambda _: clients, held, "2nn"))
    ready = time.perf_counter()
    meter = Meter()
    start(prepared, callbacks=[meter])
    first, _ = meter.seen[0]
    print(
        f"{given.method}, {given.clients} clients x {given.examples}, {given.per_round} a round, "
        f"data {own / 1e6:.0f} MB"
    )
    print(f"prepared after {ready - began:.2f} s, first round done after {first - began:.2f} s")
    for i, (_, bytes_) in enumerate(meter.seen, start=1):
        print(f"round {i}: resident {bytes_ / 1e6:.0f} MB = data + {(bytes_ - own) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
