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
Examples = tuple[np.ndarray, np.ndarray]


def read(folder: Path) -> dict[str, np.ndarray]:
    """Return the columns of the table."""
    with (folder / "parkinsons_updrs.data").open(newline="", encoding="utf-8") as file:
        names, *rows = csv.reader(file)
    return dict(zip(names, np.array(rows, dtype=np.float64).T, strict=True))


def split(table: dict[str, np.ndarray]) -> tuple[dict[str, Examples], dict[str, Examples]]:
    """Return each patient's examples before and after the day that divides them 70 to 30."""
    x = np.stack([column for name, column in table.items() if name not in NOT_INPUTS], axis=1)
    train, test = {}, {}
    for patient in np.unique(table[CLIENT]):
        rows = np.flatnonzero(table[CLIENT] == patient)
        rows = rows[np.argsort(table[TIME][rows], kind="stable")]
        is_early = table[TIME][rows] <= np.quantile(table[TIME][rows], 0.7)
        for part, chosen in ((train, rows[is_early]), (test, rows[~is_early])):
            part[f"{patient:.0f}"] = x[chosen], table[TARGET][chosen]
    return train, test


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


def mean_error(test: dict[str, Examples], prediction: dict[str, float]) -> float:
    """Return the mean absolute error where each patient has one prediction."""
    errors = [np.abs(y - prediction[patient]) for patient, (_, y) in test.items()]
    return np.concatenate(errors).mean()


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Print the table, and return the mean absolute error of each method, by seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true", help="two rounds and one seed")
    parser.add_argument("--out", type=Path, help="folder of the runs, which can be continued")
    given = parser.parse_args(arguments)
    rounds, seeds = (2, 1) if given.quick else (60, 3)

    train, test = split(read(given.folder))
    mean = np.concatenate([y for _, y in train.values()]).mean()
    comparison = fk.compare(
        ["local", "centralised", "fedavg", "fedprox(mu=0.1)", "scaffold"],
        task=fk.Task(lambda: Net(19, mean), loss="huber", metrics=["mae", "r2"]),
        clients=fk.from_clients(train, test=test, normalize="standardize"),
        rounds=rounds,
        seeds=seeds,
        local=fk.Local(lr=0.05, epochs=3, batch_size=32),
        evaluation=fk.Evaluation(every=rounds),
        out=given.out,
    )
    errors = {
        "mean score of all patients": [mean_error(test, dict.fromkeys(test, mean))],
        "mean score of the patient": [
            mean_error(test, {k: y.mean() for k, (_, y) in train.items()})
        ],
        "last score of the patient": [mean_error(test, {k: y[-1] for k, (_, y) in train.items()})],
    }
    for result in comparison.results:  # of `local`, each patient's own model
        of_patient = result.rows[-1].per_client
        error = np.average(of_patient["mae"], weights=of_patient["examples"])
        errors.setdefault(result.record.method, []).append(error)

    print("| prediction | mean absolute error |\n| --- | --- |")
    for name, values in errors.items():
        print(f"| {name} | {np.mean(values):.2f} ± {np.std(values):.2f} |")
    return errors


if __name__ == "__main__":
    main()
