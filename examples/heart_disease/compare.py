"""Tables with four hospitals as clients: who has a heart disease?

    python examples/heart_disease/compare.py FOLDER [--quick] [--out RUNS]

FOLDER holds `processed.{cleveland,hungarian,switzerland,va}.data` of the UCI set "Heart Disease"
(Janosi, Steinbrunn, Pfisterer, Detrano, 1988): 920 patients with 13 columns, some of them
categories, many of them with gaps. The hospitals differ much: 36 % of the patients in Hungary are
ill, and 93 % in Switzerland, where the cholesterol was never measured.

It writes a table for each hospital, `RUNS/HOSPITAL.csv`, with which `experiment.toml` beside this
file runs the same as a federation of nodes: see there.
"""

import argparse
import csv
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import nn

import fedkeel as fk

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
COLUMNS = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak"),
    *("slope", "ca", "thal", "num"),
)
CATEGORIES = {
    "cp": ["1", "2", "3", "4"],
    "restecg": ["0", "1", "2"],
    "slope": ["1", "2", "3"],
    "thal": ["3", "6", "7"],
}
METRICS = ["auroc", "sensitivity(at_specificity=0.9)"]


def read(folder: Path, hospital: str) -> list[dict[str, str]]:
    """Return the patients of a hospital; what was not measured is an empty text."""
    rows = []
    with (folder / f"processed.{hospital}.data").open(newline="", encoding="utf-8") as file:
        for values in csv.reader(file):
            row = dict(zip(COLUMNS, (v.strip().replace("?", "") for v in values), strict=True))
            row["disease"] = "ill" if float(row.pop("num")) > 0 else "healthy"
            for name in CATEGORIES.keys() & row.keys():
                row[name] = row[name].removesuffix(".0")
            if float(row["chol"] or 0) == 0:  # so it is written where it was not measured
                row["chol"] = ""
            rows.append(row)
    return rows


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def split(rows: list[dict[str, str]], seed: int) -> tuple[list[dict[str, str]], ...]:
    """Return 70 % of the ill and of the healthy for training, and 30 % for the test."""
    is_test = np.zeros(len(rows), dtype=bool)
    random = np.random.default_rng(seed)
    for label in ("healthy", "ill"):
        which = random.permutation([i for i, row in enumerate(rows) if row["disease"] == label])
        is_test[which[: round(0.3 * len(which))]] = True
    return tuple(
        [row for row, t in zip(rows, is_test, strict=True) if t == part] for part in (0, 1)
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, list[float]]]:
    """Print the tables, and return the AUROC by method and hospital, of each seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true", help="two rounds and one seed")
    parser.add_argument("--out", type=Path, help="folder of tables and runs")
    given = parser.parse_args(arguments)
    rounds, seeds = (2, 1) if given.quick else (30, 5)
    out = given.out or Path(tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)

    patients = {name: read(given.folder, name) for name in HOSPITALS}
    for name, rows in patients.items():
        write(out / f"{name}.csv", rows)
    auroc: dict[str, dict[str, list[float]]] = {}
    sensitivity: dict[str, list[float]] = {}
    for seed in range(seeds):
        parts: tuple[dict[str, Path], ...] = ({}, {})
        for name, rows in patients.items():
            for part, chosen, word in zip(parts, split(rows, seed), ("train", "test"), strict=True):
                part[name] = write(out / f"{name}-{word}-{seed}.csv", chosen)
        clients = fk.from_clients(
            parts[0],
            test=parts[1],
            target="disease",
            categories=CATEGORIES,
            missing="indicator",
            normalize="standardize",
        )
        width = clients.data.shape[0]
        comparison = fk.compare(
            ["local", "centralised", "fedavg", "fedprox(mu=0.1)", "scaffold", "fedgh"],
            task=fk.Task(
                lambda width=width: nn.Sequential(
                    nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 2)
                ),
                metrics=METRICS,
            ),
            clients=clients,
            rounds=rounds,
            seed=seed,
            seeds=1,
            local=fk.Local(lr=0.1, epochs=2, batch_size=16, weight_decay=0.01),
            evaluation=fk.Evaluation(every=rounds),
            out=given.out and out / f"split-{seed}",
        )
        for result in comparison.results:  # of `local`, each hospital's own model
            name, last = result.record.method, result.rows[-1]
            for hospital, value in zip(HOSPITALS, last.per_client["auroc"], strict=True):
                auroc.setdefault(name, {}).setdefault(hospital, []).append(value)
            sensitivity.setdefault(name, []).append(last.test[METRICS[1]])

    print(f"| AUROC | {' | '.join(HOSPITALS)} |\n| --- |{' --- |' * len(HOSPITALS)}")
    for name, of_hospital in auroc.items():
        cells = [f"{np.mean(v):.3f} ± {np.std(v):.3f}" for v in of_hospital.values()]
        print(f"| {name} | {' | '.join(cells)} |")
    print("\n| all patients of the test | sensitivity at a specificity of 90 % |\n| --- | --- |")
    for name, values in sensitivity.items():
        print(f"| {name} | {np.mean(values):.1%} ± {np.std(values):.1%} |")
    return auroc


if __name__ == "__main__":
    main()
