"""Three sites with tables of their own, and nodes with policies that have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedkeel import config
from fedkeel.flower.node.configuration import make_node
from fedkeel.flower.node.node import Node
from fedkeel.flower.protocol import DESCRIBE_DATA
from in_process_grid import InProcessGrid

ALL = 'kinds = ["labels", "missing", "categories", "moments", "quantiles"]'
CONSENT = f"[statistics]\n{ALL}\nminimum = 1\n"
DATA = {
    "source": "nodes",
    "label": "kind",
    "labels": ["no", "yes", "never"],
    "categories": {"sex": ["f", "m", "other"]},
    "missing": "mean",
    "normalize": "standardize",
}
QUICK = {"deadline_seconds": 2.0, "poll_seconds": 0.01}
SIZES = (60, 90, 130)
FIRST = 100


def experiment(**changes: object) -> config.Experiment:
    values = {
        "rounds": 1,
        "local": {"lr": 0.1, "epochs": 1},
        "data": DATA,
        "partition": {"kind": "nodes", "clients": 3},
        "model": {"name": "logistic"},
        "flower": QUICK,
    }
    return config.build(config.Experiment, {**values, **changes}, "test")


def write_tables(folder: Path) -> list[dict[str, list[Any]]]:
    """Write a table for each site, and return what is in them; None for what is missing."""
    tables = []
    for site, size in enumerate(SIZES):
        random = np.random.default_rng(site)
        table: dict[str, list[Any]] = {
            "age": random.integers(20 + 10 * site, 90, size).tolist(),
            "dose": [float(f"{v:.6g}") for v in random.lognormal(site, 1.5, size)],
            "sex": random.choice(["f", "m"], size).tolist(),
            "balance": [float(f"{v:.6g}") for v in random.normal(-300.0, 200.0, size)],
            "kind": random.choice(
                ["no", "yes"], size, p=[0.2 + 0.2 * site, 0.8 - 0.2 * site]
            ).tolist(),
        }
        for row in range(0, size, 4 + site):
            table["dose"][row] = None
        table["sex"][5] = None
        lines = [",".join(table)]
        for row in zip(*table.values(), strict=True):
            lines.append(",".join("" if value is None else str(value) for value in row))
        (folder / f"{site}.csv").write_text("\n".join(lines) + "\n")
        tables.append(table)
    return tables


def grid_of(
    folder: Path, made: config.Experiment, policy: str = CONSENT, **others: str
) -> InProcessGrid:
    """Nodes with the tables of a folder and a policy each."""
    nodes: dict[int, Node] = {}
    for site in range(len(SIZES)):
        file = folder / f"policy-{site}.toml"
        file.write_text(others.get(f"site{site}", policy))
        values = {
            "partition-id": site,
            "num-partitions": 3,
            "data": str(folder / f"{site}.csv"),
            "name": f"site {site}",
            "policy": str(file),
            "state": str(folder / f"state-{site}"),
        }
        nodes[FIRST + site] = make_node(made, values, kind=DESCRIBE_DATA)
    return InProcessGrid(nodes)
