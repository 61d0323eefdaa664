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
from fedkeel.runner.result import Result

METHODS = ("ifca(clusters=4)", "ifca(clusters=8)", "fedamp", "ditto", "local", "fedavg")
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


def partners(result: Result) -> tuple[int, bool]:
    """Return how many models clients have chosen, and whether all of a cluster have the same."""
    names = result.record.partition.names
    models = [result.client_model(name)["0.weight"].numpy().tobytes() for name in names]
    by_cluster = [set(models[cluster::CLUSTERS]) for cluster in range(CLUSTERS)]
    return len(set(models)), all(len(own) == 1 for own in by_cluster)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    seeds, (x, y) = parser.parse_args().seeds, digits()
    print("| method | accuracy, % | by seed | lowest client | models in use, by seed |")
    print("| --- | ---: | --- | ---: | --- |")
    for method in METHODS:
        scores, lowest, used = [], [], []
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
            scores.append(100 * row.test.values["accuracy"])
            personal = row.personal or row.per_client or {}
            lowest.append(100 * min(s for s in personal["accuracy"] if s is not None))
            count, is_pure = partners(result) if method.startswith("ifca") else (0, False)
            used.append(f"{count}" if is_pure else f"{count}, a cluster divided")
        spread = statistics.stdev(scores) if seeds > 1 else 0.0
        each = ", ".join(f"{s:.1f}" for s in scores)
        found = "; ".join(used) if method.startswith("ifca") else "–"
        mean = f"{statistics.mean(scores):.1f} ± {spread:.1f}"
        print(f"| `{method}` | {mean} | {each} | {min(lowest):.1f} | {found} |", flush=True)


if __name__ == "__main__":
    main()
