"""Run folders with plausible numbers, made without training anything."""

import dataclasses
import hashlib
import math
from types import SimpleNamespace

import numpy as np
import pytest

from fedkeel.records.folder import RunFolder
from fedkeel.records.rows import RoundRecord, Scores
from fedkeel.records.run_record import (
    DataRecord,
    EngineChoice,
    Environment,
    Estimate,
    ModelRecord,
    PartitionRecord,
    PartRecord,
    RunRecord,
)

MODEL = 1_000_000
BIB = """@inproceedings{mcmahan2017fedavg,
  title = {Communication-Efficient Learning of Deep Networks from Decentralized Data},
  author = {McMahan, Brendan and others},
  year = {2017},
  url = {https://proceedings.mlr.press/v54/mcmahan17a.html}
}"""


def scores(accuracy, loss=1.0):
    return Scores(1000, {"accuracy": accuracy, "top3": min(1.0, accuracy + 0.1), "loss": loss})


def record(method="fedavg", seed=0, **changes):
    """A run record; `changes` replace its fields."""
    clients, classes = changes.pop("clients", 10), changes.pop("classes", 10)
    rng = np.random.default_rng([clients, seed])
    shares = rng.dirichlet(np.full(classes, 0.15), size=clients)
    sizes = np.maximum(rng.lognormal(5.5, 0.7, clients), 5).astype(int)
    histogram = np.array([rng.multinomial(n, p) for n, p in zip(sizes, shares, strict=True)])
    own = RunRecord(
        name=f"{method}-s{seed}",
        key=hashlib.sha256(f"{method} {seed} {clients}".encode()).hexdigest(),
        method=method,
        describe=f"{method}: local steps of gradient descent\nserver: weighted mean of the updates",
        parts=[PartRecord(method, "mcmahan2017fedavg", ["Reduction"])],
        citations=["mcmahan2017fedavg"],
        bibtex=BIB,
        weights="examples",
        seed=seed,
        rounds=60,
        status="finished",
        model=ModelRecord("cnn_mcmahan", MODEL // 4, MODEL, "fc2"),
        data=DataRecord(
            sources=["cifar10"],
            train=int(histogram.sum()),
            test=10_000,
            classes=classes,
            shape=[3, 32, 32],
            fingerprint="f00d",
        ),
        partition=PartitionRecord(
            kind="dirichlet",
            clients=clients,
            sizes=histogram.sum(axis=1).tolist(),
            histogram=histogram.tolist(),
            settings={"alpha": 0.15, "seed": seed, "attempts": 3 + seed},
        ),
        local="SGD, lr 0.05, 5 epochs, batches of 50",
        participation=f"{max(1, clients // 10)} of {clients} clients a round",
        target=0.85,
        engine=EngineChoice("sequential"),
        environment=Environment(
            fedkeel="0.1.0", torch="2.6.0", date="2026-11-21", processor="Xeon"
        ),
        estimate=Estimate(
            down={"model": MODEL},
            up={"model": MODEL, method: 2_000_000},
            client_state=4_000_000,
            clients=clients,
        ),
    )
    return dataclasses.replace(own, **changes)


def rows(
    seed=0,
    *,
    rounds=60,
    top=0.9,
    pace=8.0,
    extra=0,
    clients=10,
    every=1,
    noise=0.004,
    part="fedgc.cgc",
    diagnostics=(),
    nan_from=None,
    per_client=False,
    sources=(),
    slow=1.0,
    drop=0.0,
):
    """Rows of a run whose accuracy rises to `top`; `extra` bytes go each way beside the model."""
    rng = np.random.default_rng([seed, int(1e6 * top), rounds])
    cohort = max(1, clients // 10)
    top = top + 0.006 * rng.standard_normal()
    made = [RoundRecord(0, test=scores(0.1, 2.303), seconds={"evaluate": 0.2})]
    for r in range(1, rounds + 1):
        gone = nan_from is not None and r >= nan_from
        level = 0.1 if gone else 0.1 + (top - 0.1) * (1 - math.exp(-r / pace))
        level = float(np.clip(level + noise * rng.standard_normal(), 0, 1))
        loss = math.nan if gone else 2.3 * math.exp(-r / pace) + 0.35 + 0.02 * rng.random()
        picked = sorted(int(c) for c in rng.choice(clients, cohort, replace=False))
        lost = [c for c in picked if rng.random() < drop]
        came = [c for c in picked if c not in lost]
        seen = r % every == 0 or r == rounds
        up = {"model": MODEL * len(came)} | ({part: extra * len(came)} if extra else {})
        down = {"model": MODEL * cohort} | ({part: extra * cohort} if extra else {})
        made.append(
            RoundRecord(
                r,
                lr=0.05,
                clients=came,
                dropped=lost,
                examples=2500,
                steps=50,
                train_loss=math.nan if gone else loss * 0.9,
                bytes_down=down,
                bytes_up=up,
                seconds={
                    "train": slow * cohort * (0.11 + 0.01 * rng.random()),
                    "aggregate": 0.02,
                    "evaluate": 0.2 if seen else 0.0,
                },
                test=scores(level, loss) if seen else None,
                sources={s: scores(level - 0.02 * i, loss) for i, s in enumerate(sources)},
                per_client=_clients(rng, clients, level) if per_client and r == rounds else None,
                diagnostics={n: float(10 * math.exp(-r / 20) + rng.random()) for n in diagnostics},
            )
        )
    return made


def _clients(rng, clients, level):
    shares = np.clip(level + 0.12 * rng.standard_normal(clients), 0, 1).round(3).tolist()
    return {
        "examples": [0.0] + [50.0] * (clients - 1),
        "accuracy": [None, *shares[1:]],
        "top3": [None, *shares[1:]],
        "loss": [None] + [1.0] * (clients - 1),
    }


def save(root, made, written):
    """Write a run folder."""
    folder = RunFolder(root / made.name)
    folder.start(made, 'name = "x"\n')
    for row in written:
        folder.append(row)
    return folder


def comparison(root, methods, *, seeds=3, **common):
    """Write runs of several methods: name -> settings of `rows`."""
    made = []
    for method, own in methods.items():
        for seed in range(seeds):
            values = {**common, **own}
            shape = {k: values[k] for k in ("clients",) if k in values}
            ran = record(method, seed, **shape, rounds=values.get("rounds", 60))
            made.append(save(root, ran, rows(seed, **values)))
    return made


@pytest.fixture
def make():
    """The makers above."""
    return SimpleNamespace(
        scores=scores, record=record, rows=rows, save=save, comparison=comparison, MODEL=MODEL
    )
