"""Time to accuracy on digits: python benchmarks/realtime.py [--rows FILE] [--page FILE]

100 clients with uneven classes (Dirichlet 0.3, at least 5 examples), of which 20 train at a time:
two epochs of batches of 5, a network with one hidden layer of 32 units, clients counted equally. A
local step takes a second on a device of speed 1; speeds are log-normal with sigma 1. Four servers:
one that waits for all 20; one that selects 26 and takes the first 20; FedBuff with a buffer of 10;
and FedAsync. Each with plain local training, SCAFFOLD and FedProx.

For every server and method the learning rate is the one of `RATES` with the shortest time to the
target on seed `TUNED_ON`; the seeds of the page are others. A run ends at the target, or after
`HOURS` hours of virtual time. Each finished run is a line of the file of rows, and is not made
again. With --page it writes the page of what is in that file, and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from torch import nn

import fedkeel as fk

SEEDS, TUNED_ON = (0, 1, 2), 10
RATES = (0.1, 0.3)
TARGET, HOURS = 0.88, 0.3
SERVERS = ("waits for all", "first 20 of 26", "fedbuff(buffer=10)", "fedasync(alpha=0.6)")
METHODS = ("fedavg", "scaffold", "fedprox(mu=0.1)")


def data(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Digits, a fifth of them as the test set: x and y to train on, x and y to test on."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(y))
    x, y = (x[order] / 16.0).astype(np.float32), y[order]
    cut = len(y) // 5
    return x[cut:], y[cut:], x[:cut], y[:cut]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def job(server: str, method: str, seed: int, lr: float) -> dict[str, Any]:
    return {"server": server, "method": method, "seed": seed, "lr": lr}


def run(todo: dict[str, Any]) -> dict[str, Any]:
    """Return a job with the virtual hours to the target, None where it is not reached."""
    server, seed = todo["server"], todo["seed"]
    x, y, x_test, y_test = data(seed)
    over = server == "first 20 of 26"
    system = fk.System(speed="lognormal", step_seconds=1.0, enough=20 / 26 if over else 1.0)
    policy = server if server.startswith("fed") else ""
    began = time.perf_counter()
    result = fk.run(
        "+".join(filter(None, [todo["method"], policy])),
        task=fk.Task(model),
        clients=fk.dirichlet(x, y, clients=100, alpha=0.3, seed=seed, min_size=5),
        test=(x_test, y_test),
        rounds=20000,
        local=fk.Local(lr=todo["lr"], epochs=2, batch_size=5),
        clients_per_round=26 if over else 20,
        seed=seed,
        weights="uniform",
        evaluation=fk.Evaluation(every=10 if server.startswith("fedasync") else 1),
        stop=fk.Stop(target=TARGET, hours=HOURS),
        system=system,
        engine=fk.Engine(kind="sequential" if policy else "vectorized", workers=1),
        progress=False,
    )
    scored = [(row, row.test["accuracy"]) for row in result.rows if row.test is not None]
    times = [row.virtual_seconds for row, accuracy in scored if accuracy >= TARGET]
    first = times[0] if times else None
    ages = [age for row in result.rows for age in row.staleness]
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
    return tuple(row[key] for key in ("server", "method", "seed", "lr"))


def read(file: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the finished runs of a file."""
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    return {identity(row): row for row in map(json.loads, lines)}


def best_rate(rows: dict[tuple[Any, ...], dict[str, Any]], server: str, method: str) -> float:
    """Return the rate with the shortest time on the seed for tuning, else the best accuracy."""
    tried = [rows[server, method, TUNED_ON, lr] for lr in RATES]
    return float(min(tried, key=lambda row: (row["hours"] or np.inf, -row["best"]))["lr"])


def make(file: Path) -> None:
    """Make the runs that are left."""

    def done(todo: dict[str, Any]) -> None:
        if identity(todo) not in read(file):
            row = run(todo)
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
            print(row, flush=True)

    for method in METHODS:
        for server in SERVERS:
            for lr in RATES:
                done(job(server, method, TUNED_ON, lr))
            for seed in SEEDS:
                done(job(server, method, seed, best_rate(read(file), server, method)))


def cell(values: list[float], decimals: int = 2) -> str:
    if len(values) < 2:
        return "".join(f"{value:.{decimals}f}" for value in values)
    return f"{statistics.fmean(values):.{decimals}f} ± {statistics.stdev(values):.{decimals}f}"


def table(rows: dict[tuple[Any, ...], dict[str, Any]]) -> Iterator[str]:
    yield "| local training | server | rate | hours to target | reached | steps | trainings | age |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for method in METHODS:
        for server in SERVERS:
            if not all((server, method, TUNED_ON, lr) in rows for lr in RATES):
                continue
            lr = best_rate(rows, server, method)
            made = [row for s in SEEDS if (row := rows.get((server, method, s, lr)))]
            hours = [row["hours"] for row in made if row["hours"] is not None]
            ages = [row["staleness"] for row in made if row["staleness"] is not None]
            yield (
                f"| `{method}` | {server} | {lr:g} | {cell(hours, 3)} | {len(hours)}/{len(made)} | "
                f"{cell([row['steps'] for row in made], 0)} | "
                f"{cell([row['trainings'] for row in made], 0)} | {cell(ages, 1) or '0'} |"
            )


def page(file: Path) -> str:
    rows = read(file)
    return "\n".join(
        [
            "# Time to accuracy with slow clients, on digits",
            "",
            "Written by `python benchmarks/realtime.py --page`, from the rows that it made, and "
            "read below the",
            "table. scikit-learn's digits, 100 clients (Dirichlet 0.3, at least 5 examples), 20 of "
            "which train at",
            "a time: two epochs of batches of 5, one hidden layer of 32 units, clients counted "
            "equally. A local",
            "step takes a virtual second at speed 1, messages take none; speeds are log-normal "
            "with sigma 1. A run",
            f"ends at a test accuracy of {TARGET:.0%}, or after {HOURS:g} virtual hours. The rate "
            f"is the fastest of",
            f"{', '.join(f'{lr:g}' for lr in RATES)} on another seed, for each line; nothing else "
            "was tuned.",
            f"Mean and sample standard deviation of {len(SEEDS)} seeds, over those that reached "
            "the target. *Steps* are",
            "those of the server, *trainings* the clients whose updates it took, *age* the mean "
            "staleness of these.",
            "With 3 seeds a difference of less than about two standard deviations says nothing.",
            "",
            *table(rows),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=Path, default=Path("realtime-digits.jsonl"))
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.page:
        options.page.write_text(page(options.rows), encoding="utf-8")
    else:
        make(options.rows)


if __name__ == "__main__":
    main()
