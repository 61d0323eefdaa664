"""Every method on label-skewed digits: python benchmarks/digits.py [--methods "fedavg, fedgc"]

The experiment of `make demo` (20 clients, Dirichlet 0.05, 5 of them in each of 60 rounds). For each
method the local learning rate is chosen on one seed that is not reported, by the mean accuracy of
the last ten rounds; then three other seeds are run. Centralised training is plain SGD on all
training examples, with as many steps and the same choice of learning rate. With --one-class each
client has examples of one class only. Finished runs are kept in --out and used again, so the script
can be stopped and started. Prints Markdown.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.resources import files
from itertools import repeat
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from fedkeel.base.values import only_tensor
from fedkeel.config import Experiment, load
from fedkeel.errors import FedkeelError, TrainingError
from fedkeel.features.progress.display import ProgressDisplay
from fedkeel.method.registry import REGISTRY
from fedkeel.report.summary import summarise
from fedkeel.runner.ingredients import gather
from fedkeel.study.compare import compare

RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
TUNING, SEEDS = 100, 3


ONE_CLASS = ("partition.kind='classes'", "partition.classes_per_client=1")


def experiment(lr: float, seed: int, division: Sequence[str] = ()) -> Experiment:
    preset = files("fedkeel.config").joinpath("presets/digits.toml")
    changes = [f"local.lr={lr}", f"seed={seed}", "engine.kind='sequential'", *division]
    return load(Path(str(preset)), changes)


def played(
    method: str, lr: float, seed: int, count: int, out: Path, division: Sequence[str]
) -> list[tuple[float, float]]:
    """Best and last-ten accuracy for each seed; zeros where training failed."""
    chosen = experiment(lr, seed, division)
    try:
        found = compare(chosen, gather(chosen), [method], count, out / f"lr{lr}", ProgressDisplay())
    except TrainingError:
        return [(0.0, 0.0)] * count
    sums = [summarise(r.rows, None, model_bytes=r.record.model.bytes) for r in found.results]
    good = [(s.best or 0.0, s.last_mean or 0.0) for s in sums]
    return good + [(0.0, 0.0)] * (count - len(good))


def tuned(
    method: str, out: Path, division: Sequence[str]
) -> tuple[str, float, list[tuple[float, float]], str]:
    torch.set_num_threads(1)
    try:
        scores = {lr: played(method, lr, TUNING, 1, out, division)[0][1] for lr in RATES}
        lr = max(scores, key=lambda rate: scores[rate])
        return method, lr, played(method, lr, 0, SEEDS, out, division), ""
    except FedkeelError as error:
        return method, 0.0, [], str(error).splitlines()[0]


def central(lr: float, seed: int) -> tuple[float, float]:
    """Best and last-ten accuracy of SGD on all data, evaluated as often as a federation is."""
    chosen = experiment(lr, seed)
    parts = gather(chosen)
    clients = parts.clients(seed)
    images, labels = only_tensor(clients.data.x, "images"), clients.data.labels
    x, y = images[clients.rows], torch.from_numpy(labels)[clients.rows]
    torch.manual_seed(seed)
    model = parts.task.model()
    rounds, size, epochs = chosen.rounds, chosen.local.batch_size, chosen.local.epochs
    assert isinstance(size, int)
    assert epochs is not None
    steps = round(5 * len(y) / 20 * epochs / size)
    optimiser = torch.optim.SGD(model.parameters(), lr=lr)
    random, scores, order = np.random.default_rng(seed), [], np.arange(0)
    for _ in range(rounds):
        for _ in range(steps):
            if len(order) < size:
                order = random.permutation(len(y))
            rows, order = torch.from_numpy(order[:size]), order[size:]
            optimiser.zero_grad()
            F.cross_entropy(model(x[rows].float()), y[rows]).backward()
            optimiser.step()
        with torch.no_grad():
            hits = model(only_tensor(parts.test.x, "images").float()).argmax(1) == torch.from_numpy(
                parts.test.labels
            )
        scores.append(float(hits.double().mean()))
    return max(scores), statistics.fmean(scores[-10:])


def row(name: str, lr: float, pairs: list[tuple[float, float]], level: float) -> str:
    best, last = ([100 * pair[i] for pair in pairs] for i in (0, 1))
    cells = [f"{statistics.fmean(v):.1f} ± {statistics.stdev(v):.1f}" for v in (best, last)]
    gap = statistics.fmean(last) - 100 * level
    return f"| {name} | {lr:g} | {cells[0]} | {cells[1]} | {gap:+.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--methods", default=", ".join(REGISTRY))
    parser.add_argument("--out", type=Path, default=Path("runs/digits-tuned"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--one-class", action="store_true")
    given = parser.parse_args()
    division = ONE_CLASS if given.one_class else ()
    names = [name.strip() for name in given.methods.split(",")]
    torch.set_num_threads(1)
    scores = {lr: central(lr, TUNING)[1] for lr in RATES}
    lr = max(scores, key=lambda rate: scores[rate])
    pairs = [central(lr, seed) for seed in range(SEEDS)]
    level = statistics.fmean(pair[1] for pair in pairs)
    print("| method | lr | best % | last ten % | to centralised, points |")
    print("| --- | ---: | ---: | ---: | ---: |")
    print(row("centralised", lr, pairs, level), flush=True)
    with ProcessPoolExecutor(given.processes) as pool:
        outs = [given.out / name.replace(".", "-") for name in names]
        for name, chosen, found, failed in pool.map(tuned, names, outs, repeat(division)):
            said = (
                f"| `{name}` | | {failed} | | |"
                if failed
                else row(f"`{name}`", chosen, found, level)
            )
            print(said, flush=True)


if __name__ == "__main__":
    main()
