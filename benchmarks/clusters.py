"""Methods on planted clusters of clients: python benchmarks/clusters.py [--seeds 3]

The digits of scikit-learn, divided evenly among 20 clients that all take part in each of 40
rounds. Client k belongs to cluster k modulo 4, in which digit y has the label (y + 3 cluster)
modulo 10: the same images have other labels in other clusters, so no single model fits all clients.
30 % of each client's examples are held out, and its personal model is scored on them. Every method
has its default settings, but that IFCA is told a number of clusters. Prints Markdown.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
from sklearn.datasets import load_digits
from torch import nn

import fedkeel as fk

METHODS = ("ifca(clusters=4)", "ifca(clusters=2)", "fedamp", "ditto", "local", "fedavg")
CLIENTS, CLUSTERS, ROUNDS = 20, 4, 40


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images [N, 64] and labels [N]."""
    x, y = load_digits(return_X_y=True)
    return (x / 16.0).astype(np.float32), y


def planted(seed: int) -> fk.Federation:
    """Return the clients of a seed, by names that tell their cluster."""
    x, y = digits()
    rows = np.random.default_rng(seed).permutation(len(y))
    clients = {
        f"{k:02d} of cluster {k % CLUSTERS}": (x[own], (y[own] + 3 * (k % CLUSTERS)) % 10)
        for k, own in enumerate(np.array_split(rows, CLIENTS))
    }
    return fk.from_clients(clients, classes=10, holdout=0.3)


def purity(result: fk.Result) -> float:
    """Return the share of clients whose model is that of most clients of their cluster."""
    names = result.record.partition.names
    models = [result.client_model(name)["0.weight"].numpy().tobytes() for name in names]
    hits = 0
    for cluster in range(CLUSTERS):
        own = [model for k, model in enumerate(models) if k % CLUSTERS == cluster]
        hits += max(own.count(model) for model in own)
    return hits / len(models)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    seeds, (x, y) = parser.parse_args().seeds, digits()
    print("| method | accuracy, % | by seed | lowest client | models of one cluster that agree |")
    print("| --- | ---: | --- | ---: | ---: |")
    for method in METHODS:
        scores, lowest, pure = [], [], []
        for seed in range(seeds):
            result = fk.run(
                method,
                seed=seed,
                task=fk.Task(network),
                clients=planted(seed),
                test=(x[:10], y[:10]),  # every run has one; here nobody is judged by it
                rounds=ROUNDS,
                weights="uniform",
                local=fk.Local(lr=0.1, epochs=2, batch_size=16),
                evaluation=fk.Evaluation(model="personal", every=ROUNDS),
                engine=fk.Engine(kind="sequential"),
                progress=False,
            )
            row = result.rows[-1]
            assert row.test is not None
            scores.append(row.test.values["accuracy"])
            personal = row.personal or row.per_client or {}
            lowest.append(min(s for s in personal["accuracy"] if s is not None))
            pure.append(purity(result) if method.startswith("ifca") else float("nan"))
        spread = statistics.stdev(scores) if seeds > 1 else 0.0
        each = ", ".join(f"{s:.1f}" for s in scores)
        found = f"{100 * statistics.mean(pure):.0f} %" if method.startswith("ifca") else "–"
        mean = f"{statistics.mean(scores):.1f} ± {spread:.1f}"
        print(f"| `{method}` | {mean} | {each} | {min(lowest):.1f} | {found} |", flush=True)


if __name__ == "__main__":
    main()
