"""Every number among the settings, at its extremes: a word, or a run, and never a traceback."""

from __future__ import annotations

import math
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import fedkeel as fk
from fedkeel import config
from fedkeel.base.settings import Settings
from fedkeel.data.read.load import load
from fedkeel.errors import FedkeelError
from fedkeel.runner.ingredients import gather, ingredients
from fedkeel.runner.prepare import prepare

BASE: dict[str, Any] = {
    "rounds": 1,
    "data": {"source": "digits", "limit": 60},
    "partition": {"kind": "iid", "clients": 4},
    "model": {"name": "mlp", "args": {"hidden": [4]}},
    "local": {"lr": 0.1, "steps": 1},
    "engine": {"kind": "sequential"},
}

BESIDE: dict[str, dict[str, Any]] = {
    "partition.alpha": {"kind": "dirichlet", "alpha": 1.0},
    "partition.min_size": {"kind": "dirichlet", "alpha": 1.0},
    "partition.classes_per_client": {"kind": "classes", "clients": 10},
    "partition.sigma": {"sizes": "power"},
    "cohort.candidates": {"sampling": "power_of_choice", "clients": 2},
    "cohort.exploration": {"sampling": "oort", "clients": 2},
    "adversary": {"kind": "sign_flip", "share": 0.3},
    "system": {"step_seconds": 1.0},
    "privacy": {"unit": "client", "epsilon": 1.0, "delta": 1e-5, "clip": 1.0},
    "diagnose": {"kinds": ["fisher", "drift"]},
    "flower": {"secure_aggregation": True},
}
"""What a setting, or those of a table, mean something beside."""

EXTREMES: dict[type, list[object]] = {
    int: [0, 10**18, "1e5"],
    float: [-1.0, 5e-324, 1e308, math.nan],
}


def numbers(kind: type[Settings], before: str = "") -> Iterator[tuple[str, type, bool]]:
    """Yield path, type and whether there are several, of each setting that is a number."""
    for name, field in kind.model_fields.items():
        args = typing.get_args(field.annotation)
        for part in args if type(None) in args or len(args) > 1 else (field.annotation,):
            inner = typing.get_args(part)
            if isinstance(part, type) and issubclass(part, Settings):
                yield from numbers(part, f"{before}{name}.")
            elif part in EXTREMES:
                yield before + name, part, False
            elif typing.get_origin(part) is tuple and inner[0] in EXTREMES:
                yield before + name, inner[0], True


def changed(path: str, value: object) -> dict[str, Any]:
    *tables, name = path.split(".")
    values = {k: dict(v) if isinstance(v, dict) else v for k, v in BASE.items()}
    place = values
    for depth, table in enumerate(tables):
        place = place.setdefault(table, {})
        place.update(BESIDE.get(".".join(tables[: depth + 1]), {}))
    place.update(BESIDE.get(path, {}))
    place[name] = value
    return values


@pytest.mark.filterwarnings("ignore")
def test_every_number_at_its_extremes_is_taken_or_refused_in_words() -> None:
    data = gather(config.build(config.Experiment, BASE, "test"))
    federation = data.clients(0)
    tried = refused = 0
    apart = ("tune", "compare", "track")
    for path, kind, is_list in numbers(config.Experiment):
        if path.startswith(apart):
            continue
        for value in EXTREMES[kind]:
            tried += 1
            try:
                values = changed(path, (value,) * 4 if is_list else value)
                experiment = config.build(config.Experiment, values, "test")
                if path.startswith("data."):
                    gather(experiment)
                    continue
                prepare(experiment, ingredients(experiment, federation.data, data.test))
            except FedkeelError:
                refused += 1
    assert tried > 200
    assert 0.3 < refused / tried < 0.9


def test_rounds_have_an_end() -> None:
    with pytest.raises(FedkeelError, match="rounds"):
        config.build(config.Experiment, {**BASE, "rounds": 10**18}, "test")


def test_what_is_very_large_is_refused_or_done_in_seconds(tmp_path: Path) -> None:
    """Work that grew with the square of the columns; rows that take no room in a file; depth."""
    names = [f"c{k}" for k in range(20_000)]
    with (tmp_path / "wide.csv").open("w") as file:
        file.write(",".join([*names, "label"]) + "\n")
        file.writelines(",".join(["0.5"] * len(names)) + f",{k % 2}\n" for k in range(6))
    start = time.process_time()
    train, _ = load(config.Data(source=str(tmp_path / "wide.csv"), missing="mean"))
    assert train.x.shape[1] == len(names)  # type: ignore[union-attr]
    assert time.process_time() - start < 8.0  # by the square it takes 15

    label = pa.array(np.zeros(20_000_000, dtype=np.int8))
    pq.write_table(pa.table({"a": label, "label": label}), tmp_path / "long.parquet")
    with pytest.raises(FedkeelError, match="much larger than the file"):
        load(config.Data(source=str(tmp_path / "long.parquet")))

    module: nn.Module = nn.Flatten()
    for _ in range(1500):
        module = nn.Sequential(module, nn.ReLU())
    task = fk.Task(nn.Sequential(module, nn.Linear(64, 10)))
    data, _ = load(config.Data(source="digits", limit=20))
    with pytest.raises(FedkeelError, match="modules within modules that are too deep"):
        task.network(data, 0, torch.float32)
