"""What Ray costs beside worker processes: python benchmarks/ray_overhead.py [--counts 2 4 8]

FedGH's 2NN (0.5 million parameters), 200 clients of 20 examples, 40 in each round, FedAvg, on this
machine. Worker processes and Ray actors take turns, in each repetition anew. Of the rounds after
the first: processor seconds a round by who spent them (this process; the processes that train;
Ray's own: gcs_server, raylet and their agents), and seconds a round. Of the start: seconds from the
call to the end of the first round. Memory is the proportional set size of all processes together.

Processor seconds are those of all processes below this one, from /proc. With more processes than
cores seconds by the clock do not get shorter; what Ray itself spends can be seen all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from population import children, memory, network

from fedkeel import Cohort, Evaluation, Local, Task, dataset, federation
from fedkeel.config import Engine, Run
from fedkeel.engine.prepared import Ingredients
from fedkeel.engine.process.affinity import core_count, processor_name
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.callbacks import Callback, GlobalModel
from fedkeel.runner.prepare import prepare
from fedkeel.runner.start import start

CLIENTS, EXAMPLES, PER_ROUND = 200, 20, 40

TICKS = os.sysconf("SC_CLK_TCK")

RAYS_OWN = ("raylet", "gcs_server", "DashboardAgent", "RuntimeEnvAgent", "dashboard", "monitor")


def below(pid: int) -> list[int]:
    """Return a process and all that it has started, directly or not."""
    found = [pid]
    for one in found:
        with suppress(FileNotFoundError, ProcessLookupError):
            found += children(one)
    return found


def role(pid: int) -> str:
    """Return what a process is for."""
    if pid == os.getpid():
        return "main"
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    words = command.replace("\0", " ")
    if "ray::Actor" in words:
        return "training"
    is_rays = "ray::" in words or any(name in words for name in RAYS_OWN)
    return "ray" if is_rays else "training"


def spent() -> dict[int, float]:
    """Return the processor seconds of this process and of each one below it."""
    seconds = {}
    for pid in below(os.getpid()):
        with suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            seconds[pid] = (int(fields[11]) + int(fields[12])) / TICKS
    return seconds


class Meter(Callback):
    """Looks at all processes after the first round and after the last."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self.seen: list[tuple[float, dict[int, float]]] = []
        self.roles: dict[int, str] = {}
        self.server: list[float] = []
        self.bytes = 0

    def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
        if row.round in (1, self._rounds):
            self.seen.append((time.perf_counter(), spent()))
        if row.round == self._rounds:
            for pid in below(os.getpid()):
                with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                    self.roles[pid] = role(pid)
                    self.bytes += memory(pid)[0]
        self.server.append(row.seconds["server"])


def measure(kind: str, count: int, epochs: int, rounds: int) -> dict[str, float]:
    """Return what a round costs in processes of a kind."""
    n = CLIENTS * EXAMPLES
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 784, generator=generator)
    y = torch.randint(0, 10, (n,), generator=generator)
    clients = federation(dataset(x, y), list(np.arange(n).reshape(CLIENTS, EXAMPLES)))
    workers = None if kind == "sequential" else count
    settings = Run(
        method="fedavg",
        rounds=rounds,
        local=Local(lr=0.01, epochs=epochs, batch_size=10),
        cohort=Cohort(clients=PER_ROUND),
        evaluation=Evaluation(every=rounds),
        engine=Engine(kind=kind, workers=workers),  # type: ignore[arg-type]
    )
    task, held = Task(lambda: network("2nn", 784)), dataset(x[:100], y[:100])
    prepared = prepare(settings, Ingredients(task, lambda _: clients, held, "2nn"))
    meter, began = Meter(rounds), time.perf_counter()
    start(prepared, callbacks=[meter])
    (first, early), (last, late) = meter.seen
    a_round: defaultdict[str, float] = defaultdict(float)
    for pid, who in meter.roles.items():
        a_round[who] += (late.get(pid, 0.0) - early.get(pid, 0.0)) / (rounds - 1)
    return {
        "start": first - began,
        "seconds": (last - first) / (rounds - 1),
        "server": statistics.median(meter.server),
        "main": a_round["main"],
        "training": a_round["training"],
        "ray": a_round["ray"],
        "gigabytes": meter.bytes / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a file to which a line for each run is added")
    given = parser.parse_args()
    contestants = [("sequential", 1)]
    contestants += [(kind, n) for n in given.counts for kind in ("workers", "ray")]
    print(f"{processor_name()}, {core_count()} cores, torch {torch.__version__}")
    columns = ("start", "seconds", "main", "training", "ray", "gigabytes")
    for epochs in given.epochs:
        found: dict[tuple[str, int], list[dict[str, float]]] = {one: [] for one in contestants}
        for _ in range(given.repeats):
            for kind, count in contestants:
                row = measure(kind, count, epochs, given.rounds)
                found[kind, count].append(row)
                if given.out is not None:
                    named = {"kind": kind, "count": count, "epochs": epochs, **row}
                    named = {"processor": processor_name(), "cores": core_count(), **named}
                    with given.out.open("a") as file:
                        file.write(json.dumps(named) + "\n")
        print(f"\n{epochs} local epochs\n\n| engine | {' | '.join(columns)} |")
        print("|---|" + "---:|" * len(columns))
        for (kind, count), rows in found.items():
            medians = [statistics.median(row[name] for row in rows) for name in columns]
            cells = " | ".join(f"{value:.3f}" for value in medians)
            print(f"| {kind}, {count} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
