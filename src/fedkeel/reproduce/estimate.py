"""How long a table takes on this machine: from its own runs, or from a short measured round.

Where a run of a method in a setting is there, its seconds a round count. Otherwise one client
trains a few steps on numbers drawn at random in the shape of the data, which need not be here, and
the steps and evaluations of the whole run are multiplied. What the server does with many clients
is not seen by that, so it is a rough figure, shown with a "~".
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedkeel import config
from fedkeel.data.dataset import Dataset, dataset, federation
from fedkeel.data.read.catalogue import SOURCES
from fedkeel.errors import FedkeelError
from fedkeel.experiment.execute import start
from fedkeel.experiment.prepare import Ingredients, prepare, task
from fedkeel.records import RoundRecord, RunFolder, write_text
from fedkeel.reproduce.plan import Cell

SPEEDS = "speed.json"
"""File beside the runs that keeps what was measured."""

_TEST = 200
"""Generated test examples."""

_ROWS = 40
"""Rounds of a run that are looked at."""


@dataclass(frozen=True)
class Speed:
    """What was measured of a method on a model, in seconds.

    Args:
        step: for a local step.
        example: for a test example.
        round: for all else of a round.
    """

    step: float
    example: float
    round: float


@dataclass(frozen=True)
class Size:
    """How large the data of an experiment are.

    Args:
        train: training examples.
        test: test examples.
        shape: of one input.
        classes: number of classes.
        clients: number of clients.
    """

    train: int
    test: int
    shape: tuple[int, ...]
    classes: int
    clients: int


class Speeds:
    """Measured speeds, kept in a file beside the runs.

    Args:
        out: folder of all tables.
    """

    def __init__(self, out: Path) -> None:
        self._file = out / SPEEDS
        self._known: dict[str, list[float]] = {}
        if self._file.exists():
            self._known = json.loads(self._file.read_text(encoding="utf-8"))

    def of(self, experiment: config.Experiment) -> Speed | None:
        """Return what is known of an experiment's speed."""
        found = self._known.get(_key(experiment))
        return Speed(*found) if found else None

    def measure(self, experiment: config.Experiment) -> None:
        """Measure it, and keep what was found; nothing is kept where it cannot be run so."""
        try:
            found = sample(experiment)
        except FedkeelError:
            return
        self._known[_key(experiment)] = [found.step, found.example, found.round]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_text(self._file, json.dumps(self._known, indent=1) + "\n")


def _key(experiment: config.Experiment) -> str:
    """Return a digest of what decides the speed."""
    local = experiment.local.model_dump(include={"batch_size", "momentum", "weight_decay"})
    shape = size(experiment).shape if known(experiment) else experiment.data.source
    model = experiment.model.model_dump(mode="json")
    parts = [experiment.method, model, local, shape, experiment.data.augment]
    text = json.dumps(parts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def known(experiment: config.Experiment) -> bool:
    """Return whether the size of the data is known without a look at them."""
    return all(name in SOURCES for name in experiment.data.sources)


def size(experiment: config.Experiment) -> Size:
    """Return how large the data of known sets are."""
    data, partition = experiment.data, experiment.partition
    sources = [SOURCES[name] for name in data.sources]
    train = sum(min(one.train, data.limit or one.train) for one in sources)
    classes = max(one.classes for one in sources)
    by_data = {"source": len(sources), "source_class": len(sources) * classes}
    return Size(
        train=train,
        test=sum(one.test for one in sources),
        shape=data.shape or sources[0].shape,
        classes=classes,
        clients=partition.clients or by_data.get(partition.kind, 1),
    )


def sample(experiment: config.Experiment) -> Speed:
    """Train one client for a few steps on generated data, by the faster of two engines.

    Raises:
        FedkeelError: it cannot be trained so.
        KeyboardInterrupt: an interrupt came, which a run by itself takes as the wish to stop.
    """
    found = []
    for kind in ("sequential", "vectorised"):
        settings, ingredients = _short(experiment, kind)
        result = start(prepare(settings, ingredients))
        if result.record.status != "finished":
            raise KeyboardInterrupt
        rows = result.rows[1:]
        fastest = min(rows, key=lambda row: sum(row.seconds.values()))
        found.append(_speed(fastest))
    return min(found, key=lambda one: one.step)


def _short(experiment: config.Experiment, kind: str) -> tuple[config.Run, Ingredients]:
    """Return a run of three rounds of one client, and its generated data."""
    there, local = size(experiment), experiment.local
    own = max(there.train // there.clients, 1)
    batch = own if local.batch_size == "all" else local.batch_size
    n = max(min(own, 2 * batch), 2)
    random = np.random.default_rng(0)
    train = _generated(random, n, there)
    values = experiment.model_dump(include=set(config.Run.model_fields), exclude_none=True)
    work = {"steps": min(local.steps, 4)} if local.steps else {"epochs": min(local.epochs or 1, 2)}
    values["local"] = {**values["local"], **work}
    values |= {"rounds": 3, "cohort": {"clients": 1}, "evaluation": {"every": 1}}
    values["engine"] = {"kind": kind, "workers": 1, "dtype": experiment.engine.dtype}
    if kind == "vectorised":
        values["engine"]["chunk"] = 1
    made = federation(train, [np.arange(n)])
    ingredients = Ingredients(
        task(experiment, train),
        lambda seed: made,
        _generated(random, _TEST, there),
        experiment.model.name,
        experiment.data.augment == "crop_flip",
    )
    return config.build(config.Run, values, "a short run"), ingredients


def _generated(random: np.random.Generator, n: int, there: Size) -> Dataset:
    x = torch.from_numpy(random.normal(size=(n, *there.shape)).astype(np.float32))
    return dataset(x, np.arange(n) % there.classes, classes=there.classes)


def _speed(row: RoundRecord) -> Speed:
    training = sum(s for phase, s in row.seconds.items() if phase.startswith("train"))
    testing = row.seconds.get("evaluation", 0.0)
    rest = sum(row.seconds.values()) - training - testing
    return Speed(training / max(row.steps, 1), testing / _TEST, rest)


def seconds(experiment: config.Experiment, speed: Speed) -> float:
    """Return the seconds of a whole run in one process."""
    there, local = size(experiment), experiment.local
    own = there.train / there.clients
    batch = own if local.batch_size == "all" else local.batch_size
    steps = local.steps or (local.epochs or 1) * math.ceil(own / batch)
    training = experiment.cohort.size(there.clients) * steps * speed.step
    testing = there.test * speed.example / experiment.evaluation.every
    return experiment.rounds * (training + testing + speed.round)


@dataclass(frozen=True)
class Estimate:
    """Seconds in one process.

    Args:
        total: of all runs, finished or not.
        left: of those that are not finished.
        unknown: runs of which nothing is known; they are in neither.
    """

    total: float
    left: float
    unknown: int


def estimate(cells: Sequence[Cell], speeds: Speeds) -> Estimate:
    """Return how long runs take, in one process; a run that several cells share counts once."""
    measured: dict[tuple[str, str], float] = {}
    total = left = 0.0
    unknown = 0
    for cell in {cell.folder: cell for cell in cells}.values():
        place = (cell.row.name, cell.column.id)
        took = _seconds_per_round(cell.folder)
        if took is not None:
            measured[place] = took
        if place in measured:
            own: float | None = measured[place] * cell.experiment.rounds
        else:
            speed = speeds.of(cell.experiment)
            own = seconds(cell.experiment, speed) if speed and known(cell.experiment) else None
        if own is None:
            unknown += 1
            continue
        total += own
        left += 0.0 if cell.finished else own
    return Estimate(total, left, unknown)


def unmeasured(cells: Sequence[Cell], speeds: Speeds) -> list[config.Experiment]:
    """Return an experiment for each speed that is not known."""
    found = {
        _key(cell.experiment): cell.experiment
        for cell in cells
        if known(cell.experiment) and not cell.finished and speeds.of(cell.experiment) is None
    }
    return list(found.values())


def measure(
    experiments: Sequence[config.Experiment], speeds: Speeds, goes_on: Callable[[], bool]
) -> None:
    """Measure speeds for as long as `goes_on` says so."""
    for experiment in experiments:
        if not goes_on():
            return
        speeds.measure(experiment)


def _seconds_per_round(folder: Path) -> float | None:
    """Return the mean over the first rounds of a run, None where it has none."""
    run = RunFolder(folder)
    if not run.exists():
        return None
    rows = [row for row in run.rows(_ROWS) if row.round > 0]
    return sum(sum(row.seconds.values()) for row in rows) / len(rows) if rows else None
