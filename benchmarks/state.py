"""Memory and disk where clients keep state: python benchmarks/state.py [--method scaffold]

Ten thousand clients of 4 examples each, FedGH's 2NN (0.5 million parameters), one local step, 100
clients in each of 100 rounds. Prints the resident memory of all processes together (proportional
set size, so that what they share counts once) and of this process at its peak, the file of client
state, and what a round and a checkpoint take.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from population import children, memory, network

from fedkeel import Cohort, Evaluation, Local, Task, dataset, federation
from fedkeel.base.memory import format_bytes
from fedkeel.config import Engine, Run
from fedkeel.engine.choose.memory import check_disk, estimate_run
from fedkeel.engine.prepared import Ingredients
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.callbacks import Callback, GlobalModel
from fedkeel.runner.prepare import prepare
from fedkeel.runner.start import start


class Meter(Callback):
    """Looks at memory and at the file after every round."""

    def __init__(self, out: Path, every: int) -> None:
        self._out, self._every = out, every
        self._clients: set[int] = set()
        self._began = time.perf_counter()
        self.most = 0
        self.saves: list[float] = []

    def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
        pids = [os.getpid(), *children(os.getpid())]
        used = sum(memory(pid)[0] for pid in pids)
        self.most = max(self.most, used)
        self._clients.update(row.clients)
        if row.seconds["records"] not in self.saves:
            self.saves.append(row.seconds["records"])
        if row.round % self._every and row.round != 1:
            return
        on_disk = sum(file.stat().st_size for file in (self._out / "state").glob("*"))
        train = sum(s for phase, s in row.seconds.items() if phase.startswith("train"))
        phases = f"train {train:.2f}, server {row.seconds['server']:.2f}"
        print(
            f"round {row.round:3}: {time.perf_counter() - self._began:4.0f} s ({phases}), "
            f"{len(self._clients)} clients seen, resident {format_bytes(used)}, "
            f"file {format_bytes(on_disk)}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="scaffold")
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--examples", type=int, default=4)
    parser.add_argument("--per-round", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--state", choices=["auto", "memory", "disk"], default="auto")
    parser.add_argument("--parallel-clients", type=int, help="chosen if not given")
    given = parser.parse_args()
    n = given.clients * given.examples
    x, y = torch.randn(n, 784), torch.randint(0, 10, (n,))
    rows = np.arange(n).reshape(given.clients, given.examples)
    clients = federation(dataset(x, y), list(rows))
    settings = Run(
        method=given.method,
        rounds=given.rounds,
        local=Local(lr=0.01, steps=1, batch_size=given.examples),
        cohort=Cohort(clients=given.per_round),
        evaluation=Evaluation(every=given.rounds),
        engine=Engine(
            kind="vectorized" if given.parallel_clients else "auto",
            state=given.state,
            parallel_clients=given.parallel_clients,
        ),
    )
    held = dataset(x[:1000], y[:1000])
    prepared = prepare(
        settings, Ingredients(Task(lambda: network("2nn", 784)), lambda _: clients, held, "2nn")
    )
    needed = estimate_run(prepared)
    where = f"on disk (at most {format_bytes(needed.disk)})" if needed.disk else "in memory"
    print(
        f"{given.method}: {needed.clients} clients, {given.per_round} a round, state {where}; "
        f"the data are {format_bytes(x.nbytes)}"
    )
    with tempfile.TemporaryDirectory(prefix="fedkeel-") as aside:
        out = Path(aside) / "run"
        check_disk(prepared, out)
        meter = Meter(out, max(1, given.rounds // 10))
        ran = start(prepared, out, callbacks=[meter]).record.engine
    saves = [seconds for seconds in meter.saves if seconds]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"resident after a round at most {format_bytes(meter.most)}, "
        f"this process at its peak {format_bytes(peak)}"
    )
    print(f"{ran.kind}, {ran.workers} workers, {ran.parallel_clients or 1} clients side by side")
    print(f"checkpoints took {np.round(saves, 2).tolist()} s")


if __name__ == "__main__":
    main()
