"""Time to accuracy: python benchmarks/realtime.py digits|cifar10 [--rows FILE] [--page FILE]

100 clients with uneven classes (Dirichlet 0.3), of which 20 train at a time. A local step takes a
second on a device of speed 1; speeds are log-normal with sigma 1. Four servers: one that waits for
all 20; one that selects 26 and takes the first 20; FedBuff with a buffer of 10; and FedAsync.

digits: two epochs of batches of 5, one hidden layer of 32 units, with plain local training,
SCAFFOLD and FedProx. cifar10: 10,000 of the images, one epoch of batches of 20, PFLlib's network of
two convolutions, plain local training alone.

For every server and method the learning rate is the one of `Problem.rates` with the shortest time
to the target on seed `TUNED_ON`; the seeds of the page are others. With one rate nothing is tuned.
A run ends at the target, or after `Problem.hours` hours of virtual time. Each finished run is a
line of the file of rows, and is not made again. With --page it writes the page of what is in that
file, and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pfl_cnn import cnn
from sklearn.datasets import load_digits
from torch import nn

import fedkeel as fk
from fedkeel.base.values import only_tensor
from fedkeel.config import Data
from fedkeel.data.dataset import Dataset
from fedkeel.data.read.hugging_face import load_any
from fedkeel.data.read.user_data import dataset

SEEDS, TUNED_ON = (0, 1, 2), 10
SERVERS = ("waits for all", "first 20 of 26", "fedbuff(buffer=10)", "fedasync(alpha=0.6)")

Split = tuple[Dataset, Dataset]
"""A training set and a test set."""


@dataclass(frozen=True)
class Problem:
    """A data set, a network, and how long a run may take.

    Args:
        data: seed -> training and test set.
        model: makes the network.
        local: epochs and batch size.
        methods: the corrections.
        rates: learning rates to choose from.
        target: test accuracy at which a run ends.
        hours: virtual hours after which a run ends.
        every: server steps between evaluations, of FedAsync and of the others.
        says: the problem in words, for the page.
    """

    data: Callable[[int], Split]
    model: Callable[[], nn.Module]
    local: tuple[int, int]
    methods: tuple[str, ...]
    rates: tuple[float, ...]
    target: float
    hours: float
    every: tuple[int, int]
    says: str


def digits(seed: int) -> Split:
    """Digits, a fifth of them as the test set."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(y))
    x, y = (x[order] / 16.0).astype(np.float32), y[order]
    cut = len(y) // 5
    return dataset(x[cut:], y[cut:]), dataset(x[:cut], y[:cut])


def cifar(seed: int) -> Split:
    """10,000 training images and 2,000 test images of CIFAR-10."""
    train, test = load_any(Data(source="cifar10"))
    random = np.random.default_rng(seed)
    return _some(train, 10_000, random), _some(test, 2_000, random)


def _some(data: Dataset, count: int, random: np.random.Generator) -> Dataset:
    rows = random.choice(len(data), count, replace=False)
    return dataset(only_tensor(data.x, "an image")[rows], data.labels[rows])


PROBLEMS = {
    "digits": Problem(
        digits,
        lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
        (2, 5),
        ("fedavg", "scaffold", "fedprox(mu=0.1)"),
        (0.1, 0.3),
        0.88,
        0.3,
        (10, 1),
        "scikit-learn's digits: two epochs of batches of 5, one hidden layer of 32 units.",
    ),
    "cifar10": Problem(
        cifar,
        lambda: cnn((3, 32, 32), 10),
        (1, 20),
        ("fedavg",),
        (0.1,),
        0.4,
        1.0,
        (50, 5),
        "10,000 images of CIFAR-10, drawn by the seed, and 2,000 test images: one epoch of batches "
        "of 20, PFLlib's network of two convolutions.",
    ),
}


def job(problem: str, server: str, method: str, seed: int, lr: float) -> dict[str, Any]:
    return {"problem": problem, "server": server, "method": method, "seed": seed, "lr": lr}


def run(todo: dict[str, Any]) -> dict[str, Any]:
    """Return a job with the virtual hours to the target, None where it is not reached."""
    problem, server, seed = PROBLEMS[todo["problem"]], todo["server"], todo["seed"]
    train, test = problem.data(seed)
    over = server == "first 20 of 26"
    system = fk.System(speed="lognormal", step_seconds=1.0, enough=20 / 26 if over else 1.0)
    policy = server if server.startswith("fed") else ""
    epochs, batch_size = problem.local
    began = time.perf_counter()
    result = fk.run(
        "+".join(filter(None, [todo["method"], policy])),
        task=fk.Task(problem.model),
        clients=fk.dirichlet(train, clients=100, alpha=0.3, seed=seed, min_size=5),
        test=test,
        rounds=20000,
        local=fk.Local(lr=todo["lr"], epochs=epochs, batch_size=batch_size),
        clients_per_round=26 if over else 20,
        seed=seed,
        weights="uniform",
        evaluation=fk.Evaluation(every=problem.every[0 if server.startswith("fedasync") else 1]),
        stop=fk.Stop(target=problem.target, hours=problem.hours),
        system=system,
        engine=fk.Engine(kind="sequential" if policy else "vectorized", workers=1),
        progress=False,
    )
    scored = [(row, row.test["accuracy"]) for row in result.rows if row.test is not None]
    times = [
        row.features["virtual_seconds"] for row, accuracy in scored if accuracy >= problem.target
    ]
    first = times[0] if times else None
    ages = [age for row in result.rows for age in row.features.get("staleness", [])]
    return {
        **todo,
        "hours": None if first is None else first / 3600,
        "best": max(accuracy for _, accuracy in scored),
        "steps": result.rows[-1].round,
        "trainings": sum(len(row.clients) for row in result.rows),
        "staleness": statistics.fmean(ages) if ages else None,
        "seconds": time.perf_counter() - began,
    }


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("problem", "server", "method", "seed", "lr"))


def read(file: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the finished runs of a file."""
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    return {identity(row): row for row in map(json.loads, lines)}


Rows = dict[tuple[Any, ...], dict[str, Any]]


def best_rate(rows: Rows, problem: str, server: str, method: str) -> float:
    """Return the rate with the shortest time on the seed for tuning, else the best accuracy."""
    rates = PROBLEMS[problem].rates
    if len(rates) == 1:
        return rates[0]
    tried = [rows[problem, server, method, TUNED_ON, lr] for lr in rates]
    return float(min(tried, key=lambda row: (row["hours"] or np.inf, -row["best"]))["lr"])


def make(problem: str, file: Path) -> None:
    """Make the runs that are left."""

    def done(todo: dict[str, Any]) -> None:
        if identity(todo) not in read(file):
            row = run(todo)
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
            print(row, flush=True)

    rates = PROBLEMS[problem].rates
    for method in PROBLEMS[problem].methods:
        for lr in rates if len(rates) > 1 else ():
            for server in SERVERS:
                done(job(problem, server, method, TUNED_ON, lr))
        for seed in SEEDS:
            for server in SERVERS:
                lr = best_rate(read(file), problem, server, method)
                done(job(problem, server, method, seed, lr))


def cell(values: list[float], decimals: int = 2) -> str:
    if len(values) < 2:
        return "".join(f"{value:.{decimals}f}" for value in values)
    return f"{statistics.fmean(values):.{decimals}f} ± {statistics.stdev(values):.{decimals}f}"


def table(rows: Rows, name: str) -> Iterator[str]:
    yield "| local training | server | rate | hours to target | reached | steps | trainings | age |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    problem = PROBLEMS[name]
    for method in problem.methods:
        for server in SERVERS:
            tuned = [(name, server, method, TUNED_ON, lr) in rows for lr in problem.rates]
            if len(tuned) > 1 and not all(tuned):
                continue
            lr = best_rate(rows, name, server, method)
            made = [row for s in SEEDS if (row := rows.get((name, server, method, s, lr)))]
            if not made:
                continue
            hours = [row["hours"] for row in made if row["hours"] is not None]
            ages = [row["staleness"] for row in made if row["staleness"] is not None]
            yield (
                f"| `{method}` | {server} | {lr:g} | {cell(hours, 3)} | {len(hours)}/{len(made)} | "
                f"{cell([row['steps'] for row in made], 0)} | "
                f"{cell([row['trainings'] for row in made], 0)} | {cell(ages, 1) or '0'} |"
            )


def section(rows: Rows, name: str) -> str:
    problem = PROBLEMS[name]
    rates = ", ".join(f"{lr:g}" for lr in problem.rates)
    tuned = (
        f"The rate is the fastest of {rates} on another seed, for each line; nothing else was "
        "tuned."
        if len(problem.rates) > 1
        else f"The rate is {rates} everywhere; nothing was tuned."
    )
    return "\n".join(
        [
            f"## {name}",
            "",
            problem.says,
            f"A run ends at a test accuracy of {problem.target:.0%}, or after {problem.hours:g} "
            f"virtual {'hour' if problem.hours == 1 else 'hours'}. {tuned}",
            "",
            *table(rows, name),
            "",
        ]
    )


def page(file: Path) -> str:
    rows = read(file)
    return "\n".join(
        [
            "# Time to accuracy with slow clients",
            "",
            "Written by `python benchmarks/realtime.py NAME --page FILE`, from the rows that it",
            "made. 100 clients (Dirichlet 0.3, at least 5 examples), 20 of which train at a time,",
            "counted equally. A local step takes a virtual second at speed 1, messages take none;",
            "speeds are log-normal with sigma 1. Mean and sample standard deviation of up to",
            f"{len(SEEDS)} seeds, over those that reached the target. *Steps* are those of the",
            "server, *trainings* the clients whose updates it took, *age* the mean staleness of",
            "these. With 3 seeds a difference of less than about two standard deviations says",
            "nothing.",
            "",
            *(section(rows, name) for name in PROBLEMS if any(key[0] == name for key in rows)),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("problem", choices=PROBLEMS)
    default = Path(__file__).parent / "results" / "realtime.jsonl"
    parser.add_argument("--rows", type=Path, default=default)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.page:
        options.page.write_text(page(options.rows), encoding="utf-8")
    else:
        make(options.problem, options.rows)


if __name__ == "__main__":
    main()
