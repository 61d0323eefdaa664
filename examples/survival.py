"""Survival with two hospitals as clients: when does breast cancer come back?

    python examples/survival.py FOLDER [--quick] [--out RUNS]

FOLDER holds `rotterdam.csv` and `gbsg.csv`, as in R's package survival: 2,982 patients of the
Rotterdam tumour bank, and 686 of the German Breast Cancer Study Group. Both tell the time until the
cancer comes back or the patient dies, or until nobody looked any more. The tables differ: Rotterdam
has the size of a tumour in three bands, the study has it in mm, so both become bands here.
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import nn

import fedkeel as fk

BANDS = {"<=20": 0, "20-50": 1, ">50": 2}


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def inputs_of(row: dict[str, str], band: int) -> list[float]:
    """Return what is known of a patient at the operation. Counts of receptors are very skewed."""
    nodes, progesterone, oestrogen = (np.log1p(float(row[name])) for name in ("nodes", "pgr", "er"))
    return [
        float(row["age"]) / 10 - 5.5,
        float(row["meno"]),
        float(band >= 1),
        float(band >= 2),
        float(row["grade"]) - 2.5,
        nodes - 1,
        progesterone - 3,
        oestrogen - 3,
        float(row["hormon"]),
    ]


def rotterdam(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs [N, 9], and targets [N, 2]: years, and whether the event came."""
    rows = read(folder / "rotterdam.csv")
    x = [inputs_of(row, BANDS[row["size"]]) for row in rows]
    y = [
        (
            min(float(row["rtime"]), float(row["dtime"])) / 365.25,
            float("1" in (row["recur"], row["death"])),
        )
        for row in rows
    ]
    return np.array(x), np.array(y)


def gbsg(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the same of the German study."""
    rows = read(folder / "gbsg.csv")
    x = [inputs_of(row, (float(row["size"]) > 20) + (float(row["size"]) > 50)) for row in rows]
    y = [(float(row["rfstime"]) / 365.25, float(row["status"])) for row in rows]
    return np.array(x), np.array(y)


Examples = tuple[np.ndarray, np.ndarray]


def split(hospitals: dict[str, Examples], seed: int) -> tuple[dict[str, Examples], ...]:
    """Return 70 % of the patients of each hospital for training, and 30 % for the test."""
    train, test = {}, {}
    for name, (x, y) in hospitals.items():
        order = np.random.default_rng(seed).permutation(len(x))
        cut = len(x) * 3 // 10
        test[name] = x[order[:cut]], y[order[:cut]]
        train[name] = x[order[cut:]], y[order[cut:]]
    return train, test


class Cox(nn.Linear):
    """The logarithm of the relative risk, linear in the inputs: Cox's model has no constant."""

    def __init__(self) -> None:
        super().__init__(9, 1, bias=False)
        nn.init.zeros_(self.weight)


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, list[float]]]:
    """Print the table, and return the concordance by method and hospital, of each seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true", help="two rounds and one seed")
    parser.add_argument("--out", type=Path, help="folder of the runs, which can be continued")
    given = parser.parse_args(arguments)
    rounds, seeds = (2, 1) if given.quick else (60, 5)

    hospitals = {"Rotterdam": rotterdam(given.folder), "Germany": gbsg(given.folder)}
    scores: dict[str, dict[str, list[float]]] = {}
    for seed in range(seeds):
        train, test = split(hospitals, seed)
        comparison = fk.compare(
            ["local", "centralised", "fedavg", "fedprox(mu=0.1)", "scaffold"],
            task=fk.Task(Cox, loss="cox", metrics=["concordance"]),
            clients=fk.from_clients(train, test=test),
            rounds=rounds,
            seed=seed,
            seeds=1,
            local=fk.Local(lr=0.03, epochs=2, batch_size=256),  # the loss compares in a batch
            evaluation=fk.Evaluation(every=rounds),
            out=given.out and given.out / f"split-{seed}",
        )
        for result in comparison.results:  # of `local`, each hospital's own model
            of_method = scores.setdefault(result.record.method, {})
            for hospital, value in zip(
                train, result.rows[-1].per_client["concordance"], strict=True
            ):
                of_method.setdefault(hospital, []).append(value)

    print(f"| concordance | {' | '.join(hospitals)} |\n| --- | --- | --- |")
    for name, of_hospital in scores.items():
        cells = [f"{np.mean(v):.3f} ± {np.std(v):.3f}" for v in of_hospital.values()]
        print(f"| {name} | {' | '.join(cells)} |")
    return scores


if __name__ == "__main__":
    main()
