"""Three folders as three hospitals, from the 569 patients of the Wisconsin breast cancer data.

The hospitals differ: the first sees mostly malignant cases, the second mostly benign ones, the
third a few of both. Each folder stays with its hospital; nothing but models leaves it.
"""

import csv
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

HERE = Path(__file__).parent
SHARES = {"north": (0.6, 0.1), "south": (0.2, 0.7), "west": (0.2, 0.2)}  # of each label


def main() -> None:
    found = load_breast_cancer()
    x = (found.data - found.data.mean(axis=0)) / found.data.std(axis=0)
    labels = np.array(["malignant", "benign"])[found.target]
    random = np.random.default_rng(0)
    order = {name: random.permutation(np.flatnonzero(labels == name)) for name in set(labels)}
    taken = dict.fromkeys(order, 0)
    for hospital, shares in SHARES.items():
        rows = []
        for name, share in zip(("malignant", "benign"), shares, strict=True):
            count = round(share * len(order[name]))
            rows += list(order[name][taken[name] : taken[name] + count])
            taken[name] += count
        folder = HERE / hospital
        folder.mkdir(exist_ok=True)
        with (folder / "patients.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*found.feature_names, "diagnosis"])
            writer.writerows([*(f"{v:.6f}" for v in x[i]), labels[i]] for i in sorted(rows))
        print(f"{folder / 'patients.csv'}: {len(rows)} patients")


if __name__ == "__main__":
    main()
