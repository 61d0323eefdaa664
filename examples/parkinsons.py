"""Regression with 42 patients as clients: how severe is Parkinson's disease, from voice recordings?

    python examples/parkinsons.py FOLDER [--quick] [--out RUNS]

FOLDER holds `parkinsons_updrs.data` of the UCI set "Parkinson's Telemonitoring" (Tsanas et al.,
2010): 5,875 recordings in rows, with 16 measures of the voice and the motor UPDRS, a score of 5 to
40 in these patients. A patient's rows are alike, as the score changes slowly. So the split is by
time: the first 70 % of each patient's days are for training, the last 30 % for the test.
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import nn

import fedkeel as fk

TARGET, CLIENT, TIME = "motor_UPDRS", "subject#", "test_time"
NOT_INPUTS = ("subject#", "motor_UPDRS", "total_UPDRS")


def read(folder: Path) -> dict[str, np.ndarray]:
    """Return the columns of the table."""
    with (folder / "parkinsons_updrs.data").open(newline="", encoding="utf-8") as file:
        names, *rows = csv.reader(file)
    return dict(zip(names, np.array(rows, dtype=np.float64).T, strict=True))


def split(table: dict[str, np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the rows of each patient before and after the day that divides them 70 to 30."""
    train, test = [], []
    for patient in np.unique(table[CLIENT]):
        rows = np.flatnonzero(table[CLIENT] == patient)
        is_early = table[TIME][rows] <= np.quantile(table[TIME][rows], 0.7)
        train.append(rows[is_early])
        test.append(rows[~is_early])
    return train, test


def standardise(x: np.ndarray, train: list[np.ndarray]) -> np.ndarray:
    """Bring each column to mean 0 and deviation 1; patients would send their three sums alone."""
    count = sum(len(rows) for rows in train)
    mean = sum(x[rows].sum(axis=0) for rows in train) / count
    square = sum((x[rows] ** 2).sum(axis=0) for rows in train) / count
    return (x - mean) / np.sqrt(square - mean**2)


class Net(nn.Module):
    """Its output begins at the mean score, so that training need not find it."""

    def __init__(self, inputs: int, mean: float) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
        )
        nn.init.constant_(self.body[-1].bias, mean)

    def forward(self, x):
        return self.body(x)


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Print the table, and return the mean absolute error of each method, by seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true", help="two rounds and one seed")
    parser.add_argument("--out", type=Path, help="folder of the runs, which can be continued")
    given = parser.parse_args(arguments)
    rounds, seeds = (2, 1) if given.quick else (60, 3)

    table = read(given.folder)
    train, test = split(table)
    inputs = np.stack([v for name, v in table.items() if name not in NOT_INPUTS], axis=1)
    x, y = standardise(inputs, train), table[TARGET]
    early, late = np.concatenate(train), np.concatenate(test)
    mean = y[early].mean()

    options = {
        "task": fk.Task(lambda: Net(x.shape[1], mean), loss="huber", metrics=["mae", "r2"]),
        "local": fk.Local(lr=0.05, epochs=3, batch_size=32),
        "rounds": rounds,
        "evaluation": fk.Evaluation(every=10),
    }

    def mae_alone(train: np.ndarray, test: np.ndarray, seed: int) -> float:
        """Return the error on some rows of a model that some other rows have trained."""
        clients = fk.from_clients([(x[train], y[train])], classes=0)
        test_set = fk.dataset(x[test], y[test], classes=0)
        return fk.run("fedavg", clients=clients, test=test_set, seed=seed, **options).last

    patients = list(zip(train, test, strict=True))
    sizes = [len(rows) for rows in test]
    errors = {
        "mean of all training scores": [np.abs(y[late] - mean).mean()],
        "mean of the patient's own": [
            np.average([np.abs(y[t] - y[r].mean()).mean() for r, t in patients], weights=sizes)
        ],
        "each patient alone": [
            np.average([mae_alone(r, t, seed) for r, t in patients], weights=sizes)
            for seed in range(seeds)
        ],
        "pooled data": [mae_alone(early, late, seed) for seed in range(seeds)],
    }
    comparison = fk.compare(
        ["fedavg", "fedprox(mu=0.1)", "scaffold"],
        clients=fk.from_clients([(x[rows], y[rows]) for rows in train], classes=0),
        test=fk.dataset(x[late], y[late], classes=0),
        seeds=seeds,
        out=given.out,
        **options,
    )
    for result in comparison.results:
        errors.setdefault(result.record.method, []).append(result.last)

    print("| predictor | mean absolute error |\n| --- | --- |")
    for name, values in errors.items():
        print(f"| {name} | {np.mean(values):.2f} ± {np.std(values):.2f} |")
    return errors


if __name__ == "__main__":
    main()
