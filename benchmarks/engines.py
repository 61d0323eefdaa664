"""How near `auto` comes to the best engine: python benchmarks/engines.py [--quick]

A grid of small and middling runs: networks, cohorts, examples, batches, rounds, methods and kinds
of tasks. Each is made by every engine, by `auto`, and, where the method is FedAvg, by a plain
PyTorch loop, each in a process of its own. What counts is the time from the call of `fk.run` to its
result: the first call in a process is cold, the same call made once more is warm.

Prints a line for each measurement and a table at the end: how much longer `auto` takes than the
best engine and than the plain loop. Rows are added to a file, and what is there is not measured
again, so a call that was interrupted goes on. `--table` only prints the table of the file.

`--by clock` compares seconds by the clock, for a quiet machine. `--by work` compares processor
seconds, for a busy one: of several processes those of the first and a share of those of the others,
because the first one waits while the others work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "engines.jsonl"
CORES = os.cpu_count() or 1

Row = dict[str, Any]

ENGINES: dict[str, dict[str, Any]] = {
    "sequential": {"kind": "sequential"},
    "workers": {"kind": "workers"},
    "vectorized": {"kind": "vectorized", "workers": 1},
    "vectorized, workers": {"kind": "vectorized", "workers": CORES},
    "auto": {},
}
PLAIN = "plain loop"


@dataclass(frozen=True)
class Workload:
    """A run. All clients have as many examples, unless `uneven`.

    Args:
        network: a name in `NETWORKS`.
        cohort: clients of a round.
        examples: examples of each client.
        batch: examples in a local step.
        rounds: rounds of the run.
        method: a method in words.
        epochs: local passes over a client's data.
        clients: clients of the federation; 0 for those of a round.
        uneven: whether every third client has half as many examples, and every third twice as many.
        quick: whether it belongs to the short list.
    """

    network: str
    cohort: int
    examples: int
    batch: int
    rounds: int
    method: str = "fedavg"
    epochs: int = 1
    clients: int = 0
    uneven: bool = False
    quick: bool = False

    @property
    def name(self) -> str:
        """All that decides the time, in short."""
        of = f" of {self.clients}" if self.clients else ""
        more = f" x {self.epochs} epochs" * (self.epochs > 1) + ", uneven" * self.uneven
        return (
            f"{self.network}, {self.cohort}{of} clients of {self.examples} by {self.batch}{more}, "
            f"{self.rounds} rounds, {self.method}"
        )

    def sizes(self) -> list[int]:
        """Return the number of examples of each client."""
        factors = (0.5, 1, 2) if self.uneven else (1,)
        clients = self.clients or self.cohort
        return [max(1, int(self.examples * factors[k % len(factors)])) for k in range(clients)]


GRID = (
    Workload("mlp", 10, 100, 10, 10),
    Workload("tiny", 200, 5, 5, 30, quick=True),
    Workload("tiny", 20, 20, 10, 300),
    Workload("tiny", 5, 40, 20, 1000, quick=True),
    Workload("logistic", 10, 60, 10, 500, clients=200, quick=True),
    Workload("logistic", 100, 60, 10, 40, clients=200),
    Workload("logistic", 500, 4, 4, 20, "fedprox"),
    Workload("mlp", 2, 200, 20, 50, "fedadam"),
    Workload("mlp", 50, 20, 10, 50, quick=True),
    Workload("mlp", 20, 100, 1, 20, "fednova"),
    Workload("mlp", 100, 20, 20, 20, "scaffold", quick=True),
    Workload("mlp", 10, 1000, 50, 20, "feddyn"),
    Workload("mlp", 30, 40, 10, 30, "moon"),
    Workload("mlp", 20, 60, 20, 100, uneven=True),
    Workload("mlp, dropout", 20, 50, 10, 60, quick=True),
    Workload("regression", 50, 20, 20, 100, quick=True),
    Workload("regression", 10, 200, 32, 60, "fedsam", uneven=True),
    Workload("regression", 300, 2, 2, 20, "scaffold"),
    Workload("several labels", 20, 64, 16, 100, "fedprox"),
    Workload("several labels", 60, 16, 8, 20, uneven=True),
    Workload("2nn", 100, 1, 1, 30, clients=50_000, quick=True),
    Workload("2nn", 100, 1, 1, 200, clients=5_000),
    Workload("2nn", 20, 640, 128, 10, quick=True),
    Workload("2nn", 200, 20, 10, 10),
    Workload("2nn", 20, 24, 12, 40, "scaffold", clients=1000),
    Workload("2nn", 10, 100, 10, 60, "fedgc"),
    Workload("2nn", 50, 40, 20, 5, "gcfed"),
    Workload("wide", 10, 20, 10, 20),
    Workload("wide", 4, 200, 50, 100, "fedadam", quick=True),
    Workload("embedding bag", 50, 20, 10, 40, quick=True),
    Workload("embedding bag", 10, 100, 20, 200),
    Workload("lstm", 10, 20, 10, 5),
    Workload("lstm", 10, 40, 10, 60, quick=True),
    Workload("transformer", 10, 20, 10, 10),
    Workload("transformer", 10, 40, 10, 60, "fedprox", quick=True),
    Workload("transformer", 50, 4, 4, 40),
    Workload("small cnn", 20, 30, 10, 20, quick=True),
    Workload("small cnn", 10, 60, 10, 200),
    Workload("small cnn", 100, 10, 10, 20, "feddyn"),
    Workload("tutorial cnn", 10, 50, 25, 30),
    Workload("tutorial cnn", 20, 100, 50, 60, "fedprox"),
    Workload("mcmahan cnn", 5, 40, 20, 6, quick=True),
    Workload("mcmahan cnn", 10, 100, 20, 30),
    Workload("mask cnn", 10, 20, 10, 10),
    Workload("mask cnn", 20, 20, 5, 60, "fednova"),
    Workload("resnet20", 4, 16, 8, 4),
    Workload("resnet20", 4, 16, 8, 60, quick=True),
    Workload("vit", 4, 20, 10, 6),
)

UNSEEN = (
    Workload("tiny", 50, 10, 10, 150, "scaffold"),
    Workload("logistic", 20, 200, 20, 100, "fedavgm"),
    Workload("mlp", 40, 50, 25, 200, uneven=True),
    Workload("mlp", 8, 400, 40, 30, "fedprox"),
    Workload("mlp, dropout", 60, 20, 20, 25),
    Workload("regression", 80, 30, 10, 40, "fednova"),
    Workload("several labels", 30, 30, 30, 150),
    Workload("2nn", 40, 100, 50, 25),
    Workload("2nn", 10, 50, 5, 100, "fedadam"),
    Workload("wide", 8, 60, 20, 30),
    Workload("embedding bag", 100, 8, 8, 100),
    Workload("lstm", 6, 24, 12, 20),
    Workload("transformer", 20, 16, 8, 25, "scaffold"),
    Workload("small cnn", 40, 20, 20, 100),
    Workload("tutorial cnn", 6, 120, 30, 80),
    Workload("mask cnn", 6, 40, 10, 30),
    Workload("mcmahan cnn", 20, 20, 10, 15, "fedprox"),
    Workload("resnet20", 6, 20, 10, 25),
)
"""Workloads that no constant of the rule was chosen on, written down before they were timed."""


# ---- what is trained ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """A network with its task.

    Args:
        make: builds it; takes nothing.
        shape: shape of one input.
        task: kind of the task: labels, quantities, several, text, next or masks.
        classes: labels, quantities or tokens.
    """

    make: Callable[[], Any]
    shape: tuple[int, ...]
    task: str = "labels"
    classes: int = 10


def networks() -> dict[str, Network]:
    """Return the networks by name."""
    import recipes
    from torch import nn

    from fedkeel.task.models import make

    def dense(*widths: int, dropout: float = 0.0) -> nn.Module:
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise(widths):
            layers += [nn.Linear(a, b), nn.ReLU()]
            layers += [nn.Dropout(dropout)] if dropout else []
        return nn.Sequential(*layers[: -2 if dropout else -1])

    def small_cnn() -> nn.Module:
        front = (nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        return nn.Sequential(*front, nn.Linear(8 * 7 * 7, 10))

    def mask_cnn() -> nn.Module:
        inner = nn.Conv2d(16, 16, 3, padding=1)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), inner, nn.ReLU(), nn.Conv2d(16, 3, 1)
        )

    def bag() -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(2000, 32), nn.Linear(32, 4))

    return {
        "tiny": Network(lambda: dense(20, 16, 4), (20,), classes=4),
        "logistic": Network(recipes.logistic, (784,)),
        "mlp": Network(lambda: dense(64, 64, 10), (64,)),
        "mlp, dropout": Network(lambda: dense(64, 128, 64, 10, dropout=0.2), (64,)),
        "regression": Network(lambda: dense(16, 64, 32, 2), (16,), "quantities", 2),
        "several labels": Network(lambda: dense(100, 128, 12), (100,), "several", 12),
        "2nn": Network(recipes.two_nn, (784,)),
        "wide": Network(lambda: dense(784, 2048, 1024, 10), (784,)),
        "embedding bag": Network(bag, (40,), "text", 4),
        "lstm": Network(lambda: make("char_lstm", (20,), 50), (20,), "text", 50),
        "transformer": Network(recipes.next_character, (64,), "next", 65),
        "small cnn": Network(small_cnn, (1, 14, 14)),
        "tutorial cnn": Network(recipes.tutorial_cnn, (3, 32, 32)),
        "mcmahan cnn": Network(recipes.mcmahan_cnn, (1, 28, 28), classes=62),
        "mask cnn": Network(mask_cnn, (1, 24, 24), "masks", 3),
        "resnet20": Network(lambda: make("resnet20", (3, 32, 32), 10), (3, 32, 32)),
        "vit": Network(lambda: make("vit", (3, 32, 32), 10), (3, 32, 32)),
    }


def arrays(network: Network, count: int, seed: int) -> tuple[Any, Any]:
    """Draw inputs and targets; speed does not depend on their meaning."""
    import torch

    source = torch.Generator().manual_seed(seed)
    shape, kinds = (count, *network.shape), network.classes
    if network.task in ("text", "next"):
        vocabulary = {4: 2000}.get(kinds, kinds)
        x = torch.randint(vocabulary, shape, generator=source)
    else:
        x = torch.randn(shape, generator=source)
    if network.task == "quantities":
        return x, torch.randn(count, kinds, generator=source)
    if network.task == "several":
        return x, torch.randint(2, (count, kinds), generator=source).float()
    if network.task == "next":
        return x, torch.randint(kinds, shape, generator=source)
    if network.task == "masks":
        return x, torch.randint(kinds, (count, *network.shape[1:]), generator=source)
    return x, torch.randint(kinds, (count,), generator=source)


LOSSES = {"quantities": "mse", "several": "bce", "next": "token_cross_entropy"}


class Work:
    """A workload with its data in memory."""

    def __init__(self, workload: Workload) -> None:
        import numpy as np

        self.workload, self.network = workload, networks()[workload.network]
        self.offsets = np.concatenate([[0], np.cumsum(workload.sizes())])
        self.train = arrays(self.network, int(self.offsets[-1]), 1)
        self.test = arrays(self.network, 200, 2)
        self.every = max(1, workload.rounds // 4)

    def ours(self, engine: dict[str, Any]) -> Row:
        """Make the run by an engine of fedkeel."""
        import numpy as np
        import torch

        import fedkeel as fk

        workload, task = self.workload, self.network.task
        has_tokens = task in ("text", "next")
        classes = None if task in LOSSES else self.network.classes

        def dataset(examples: tuple[Any, Any]) -> Any:
            return fk.dataset(examples[0], examples[1], tokens=has_tokens, classes=classes)

        torch.manual_seed(0)
        model, train, test = self.network.make(), dataset(self.train), dataset(self.test)
        clients = fk.Federation(
            data=train,
            rows=np.arange(self.offsets[-1]),
            offsets=self.offsets,
            holdout_rows=self.offsets[:-1].copy(),  # one example each, for the scores of clients
            holdout_offsets=np.arange(len(self.offsets)),
        )
        meter = Meter()
        result = fk.run(
            workload.method,
            task=fk.Task(model, loss=LOSSES.get(task, "cross_entropy"), buffers="average"),
            clients=clients,
            test=test,
            rounds=workload.rounds,
            local=fk.Local(lr=0.01, epochs=workload.epochs, batch_size=workload.batch),
            clients_per_round=workload.cohort,
            evaluation=fk.Evaluation(every=self.every),
            engine=fk.Engine(checkpoint_seconds=1e9, **engine),
            progress=False,
        )
        ran = result.record.engine
        together = f" x {ran.parallel_clients}" if ran.kind == "vectorized" else ""
        return {**meter.read(), "ran": f"{ran.kind}{together}, {ran.workers} at work"}

    def plain(self) -> Row:
        """Make the run by a plain loop: FedAvg, one process, one thread."""
        import torch

        workload, sizes = self.workload, self.workload.sizes()
        torch.manual_seed(0)
        model, meter = self.network.make(), Meter()
        torch.set_num_threads(1)
        params = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
        trained = list(model.parameters())
        start = [p.detach().clone() for p in params]
        for number in range(1, workload.rounds + 1):
            cohort = torch.randperm(len(sizes))[: workload.cohort].tolist()
            total = [torch.zeros_like(p) for p in start]
            whole = sum(sizes[k] for k in cohort)
            for k in cohort:
                self._load(params, start)
                self._train_client(model, trained, k)
                with torch.no_grad():
                    for sum_, p in zip(total, params, strict=True):
                        sum_.add_(p, alpha=sizes[k] / whole)
            start = total
            if number % self.every == 0:
                self._load(params, start)
                model.eval()
                with torch.no_grad():
                    float(self._loss(model(self.test[0]), self.test[1]))
                model.train()
        return meter.read()

    def _train_client(self, model: Any, params: list[Any], k: int) -> None:
        import torch

        optimiser = torch.optim.SGD(params, lr=0.01)
        first, end = int(self.offsets[k]), int(self.offsets[k + 1])
        for _ in range(self.workload.epochs):
            order = first + torch.randperm(end - first)
            for rows in torch.split(order, self.workload.batch):
                optimiser.zero_grad()
                self._loss(model(self.train[0][rows]), self.train[1][rows]).backward()
                optimiser.step()

    def _load(self, params: list[Any], values: list[Any]) -> None:
        import torch

        with torch.no_grad():
            for p, value in zip(params, values, strict=True):
                p.copy_(value)

    def _loss(self, scores: Any, y: Any) -> Any:
        from torch.nn import functional as F

        if self.network.task == "next":
            return F.cross_entropy(scores.flatten(0, 1), y.flatten())
        named: dict[str, Any] = {
            "quantities": F.mse_loss,
            "several": F.binary_cross_entropy_with_logits,
        }
        return named.get(self.network.task, F.cross_entropy)(scores, y)


class Meter:
    """Seconds by the clock, and processor seconds of this process and of those that have ended."""

    def __init__(self) -> None:
        self._began = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own, others = (r.ru_utime + r.ru_stime for r in used)
        return time.perf_counter(), own, others

    def read(self) -> Row:
        """Return the seconds since this object was made."""
        spent = [b - a for a, b in zip(self._began, self._now(), strict=True)]
        return dict(zip(("clock", "own", "others"), (round(s, 4) for s in spent), strict=True))


# ---- measuring ----------------------------------------------------------------------------------


def measure(workload: Workload, contestant: str, warm_below: float) -> Row:
    """Make the run in this process, and again where the first one did not take long."""
    sys.path[:0] = [str(HERE), str(HERE / "peers")]
    import fedkeel as fk  # noqa: F401 - before torch: it says how torch's threads are to wait

    work = Work(workload)

    def once() -> Row:
        return work.plain() if contestant == PLAIN else work.ours(ENGINES[contestant])

    found = {"cold": once()}
    if contestant != PLAIN and found["cold"]["clock"] < warm_below:
        found["warm"] = once()
    return found


def in_own_process(workload: Workload, contestant: str, given: argparse.Namespace) -> Row:
    """Measure in a fresh process."""
    command = [sys.executable, __file__, "--one", workload.name, contestant]
    command += ["--warm-below", str(given.warm_below)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=given.limit, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {given.limit:.0f} s"}
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:300]}
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def contestants(workload: Workload) -> list[str]:
    """Return who makes a run."""
    return [*ENGINES, *([PLAIN] if workload.method == "fedavg" else [])]


def seconds(measured: Row | None, by: str) -> float | None:
    """Return the seconds of a measurement, None where it was not made."""
    if measured is None:
        return None
    if by == "clock":
        return float(measured["clock"])
    return float(measured["own"] + measured["others"] / CORES)


def table(rows: Sequence[Row], by: str) -> None:
    """Print seconds of each workload, and how much longer `auto` takes than the best."""
    engines = [name for name in ENGINES if name != "auto"]
    for state in ("cold", "warm"):
        print(f"\n| {state} | " + " | ".join([*engines, PLAIN, "auto", "auto / best", "of loop"]))
        print("|---" + "|---:" * (len(engines) + 4) + "|")
        beside_best, beside_loop = list[float](), list[float]()
        for name in dict.fromkeys(row["workload"] for row in rows):
            of = {
                row["contestant"]: seconds(row.get(state) or row.get("cold"), by)
                for row in rows
                if row["workload"] == name and (state in row or row["contestant"] == PLAIN)
            }
            auto, loop = of.get("auto"), of.get(PLAIN)
            others = [s for e in engines if (s := of.get(e)) is not None]
            cells = ["" if (s := of.get(e)) is None else f"{s:.2f}" for e in (*engines, PLAIN)]
            if auto is None or not others:
                continue
            beside_best.append(auto / min(others))
            cells += [f"{auto:.2f}", f"{beside_best[-1]:.2f}"]
            if loop is not None:
                beside_loop.append(auto / loop)
                cells.append(f"{beside_loop[-1]:.2f}")
            print(f"| {name} | " + " | ".join(cells) + " |")
        for ratios, beside in ((beside_best, "the best engine"), (beside_loop, "the plain loop")):
            if ratios:
                print(
                    f"\n{state}, `auto` beside {beside}, {len(ratios)} workloads: median "
                    f"{statistics.median(ratios):.2f}, worst {max(ratios):.2f}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a part of the grid")
    parser.add_argument("--unseen", action="store_true", help="the other workloads")
    parser.add_argument("--only", default="", help="workloads whose name has this")
    parser.add_argument("--contestants", nargs="*", help="; ".join([*ENGINES, PLAIN]))
    parser.add_argument("--go", default="first", help="name of this measurement in the file")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--limit", type=float, default=180, help="seconds for one measurement")
    parser.add_argument("--seconds", type=float, default=1e9, help="for everything")
    parser.add_argument(
        "--warm-below", type=float, default=8, help="cold seconds of what is made twice"
    )
    parser.add_argument("--by", choices=["clock", "work"], default="clock")
    parser.add_argument("--table", action="store_true", help="of the rows of a go in the file")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    grid = UNSEEN if given.unseen else GRID
    by_name = {workload.name: workload for workload in GRID + UNSEEN}
    if given.one:
        name, contestant = given.one
        print(json.dumps(measure(by_name[name], contestant, given.warm_below)), flush=True)
        return
    rows = list[Row]()
    if given.results.exists():
        rows = [json.loads(line) for line in given.results.read_text().splitlines()]
        rows = [row for row in rows if row["go"] == given.go]
    wanted = [w for w in grid if (w.quick or not given.quick) and given.only in w.name]
    if not given.table:
        rows += measured_now(wanted, rows, given)
    names = {workload.name for workload in wanted}
    table([row for row in rows if row["workload"] in names], given.by)


def measured_now(
    wanted: Sequence[Workload], rows: Sequence[Row], given: argparse.Namespace
) -> list[Row]:
    """Measure what is not among the rows, and add it to the file."""
    deadline, found = time.monotonic() + given.seconds, list[Row]()
    known = {(row["workload"], row["contestant"]) for row in rows}
    for workload in wanted:
        for contestant in contestants(workload):
            is_wanted = not given.contestants or contestant in given.contestants
            if (workload.name, contestant) in known or not is_wanted:
                continue
            if time.monotonic() > deadline:
                return found
            row = {
                "go": given.go,
                "workload": workload.name,
                "contestant": contestant,
                "at": time.strftime("%F %R"),
                **in_own_process(workload, contestant, given),
            }
            found.append(row)
            with given.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            said = row.get("error") or {k: row[k] for k in ("cold", "warm") if k in row}
            print(f"{workload.name:60} {contestant:20} {said}", flush=True)
    return found


if __name__ == "__main__":
    main()
