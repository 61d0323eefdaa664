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
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedkeel import config
from fedkeel.data.dataset import Dataset, dataset, federation
from fedkeel.data.read.catalogue import SOURCES
from fedkeel.engine.prepared import Ingredients
from fedkeel.errors import FedkeelError
from fedkeel.records.folder import RunFolder, write_text
from fedkeel.reproduce.plan import Cell
from fedkeel.reproduce.table import Table
from fedkeel.runner.prepare import prepare, task
from fedkeel.runner.start import start

SPEEDS = "speed.json"
"""File beside the runs that keeps what was measured."""

_TEST = 50
"""Generated test examples."""

_NUMBERS = 100_000
"""Numbers in a generated batch, at most; larger batches are taken to cost in proportion."""

_LARGE = 0.1
"""Seconds of a step from which on recorded steps are not tried."""

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
    method = re.sub(r"\([^)]*\)", "", experiment.method)  # which numbers they are costs nothing
    parts = [method, model, local, shape, experiment.data.augment]
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
    """Train one client for a few steps on generated data.

    Small models are tried by recorded steps too, as ``engine.kind = "auto"`` does.

    Raises:
        FedkeelError: it cannot be trained so.
        KeyboardInterrupt: an interrupt came, which a run by itself takes as the wish to stop.
    """
    found = _sample(experiment, "sequential")
    if found.step > _LARGE:
        return found
    other = _sample(experiment, "vectorized")
    return min(found, other, key=lambda one: one.step)


def _sample(experiment: config.Experiment, kind: str) -> Speed:
    """Return the speed of the second round of two, with one client of two batches.

    Seconds are those of a core that does nothing else.
    """
    there, local = size(experiment), experiment.local
    own = max(there.train // there.clients, 2)
    batch = own if local.batch_size == "all" else min(local.batch_size, own)
    taken = min(batch, max(_NUMBERS // math.prod(there.shape), 2))
    random = np.random.default_rng(0)
    train = _generated(random, min(own, 2 * taken), there)
    values = experiment.model_dump(include=set(config.Run.model_fields), exclude_none=True)
    work = {"steps": 2} if local.steps else {"epochs": 1}
    values["local"] = {**values["local"], **work, "batch_size": taken}
    values |= {"rounds": 2, "cohort": {"clients": 1}, "evaluation": {"every": 1}}
    values["engine"] = {"kind": kind, "workers": 1, "dtype": experiment.engine.dtype}
    values["engine"] |= {"parallel_clients": 1} if kind == "vectorized" else {}
    made = federation(train, [np.arange(len(train))])
    ingredients = Ingredients(
        task(experiment, train),
        lambda seed: made,
        _generated(random, _TEST, there),
        experiment.model.name,
        experiment.data.augment == "crop_flip",
    )
    prepared = prepare(config.build(config.Run, values, "a short run"), ingredients)
    wall, busy = time.perf_counter(), time.process_time()
    result = start(prepared)
    free = min((time.process_time() - busy) / (time.perf_counter() - wall), 1.0)
    if result.record.status != "finished":
        raise KeyboardInterrupt
    row = result.rows[-1]  # which has the clients' own examples evaluated as well
    training = sum(s for phase, s in row.seconds.items() if phase.startswith("train"))
    testing = row.seconds.get("evaluation", 0.0)
    rest = sum(row.seconds.values()) - training - testing
    step = training / max(row.steps, 1) * batch / taken
    return Speed(free * step, free * testing / (_TEST + len(train)), free * rest)


def _generated(random: np.random.Generator, n: int, there: Size) -> Dataset:
    x = torch.from_numpy(random.normal(size=(n, *there.shape)).astype(np.float32))
    return dataset(x, np.arange(n) % there.classes, classes=there.classes)


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
        guessed: runs that are counted as long as another method's in the same setting.
        unknown: runs of which nothing is known; they are in neither.
    """

    total: float
    left: float
    guessed: int
    unknown: int


def estimate(cells: Sequence[Cell], speeds: Speeds) -> Estimate:
    """Return how long runs take, in one process; a run that several cells share counts once."""
    once = list({cell.folder: cell for cell in cells}.values())
    told: dict[tuple[str, str], float] = {}
    for cell in once:
        if (took := _seconds_per_round(cell.folder)) is not None:
            told[cell.row.name, cell.column.id] = took * cell.experiment.rounds
    for cell in once:
        if known(cell.experiment) and (speed := speeds.of(cell.experiment)):
            told.setdefault((cell.row.name, cell.column.id), seconds(cell.experiment, speed))
    beside: dict[str, list[float]] = {}
    for (_, column), took in told.items():
        beside.setdefault(column, []).append(took)
    total = left = 0.0
    guessed = unknown = 0
    for cell in once:
        own, others = told.get((cell.row.name, cell.column.id)), beside.get(cell.column.id)
        if own is None and others is None:
            unknown += 1
            continue
        guessed += own is None
        took = own if own is not None else min(others or [0.0])
        total += took
        left += 0.0 if cell.finished else took
    return Estimate(total, left, guessed, unknown)


def unmeasured(
    tables: Sequence[tuple[Table, Sequence[Cell]]], speeds: Speeds
) -> list[config.Experiment]:
    """Return an experiment for each speed that is not known.

    First comes one of each setting, a plain one where there is one; data that are here before
    others.
    """
    found: dict[str, tuple[bool, bool, config.Experiment]] = {}
    for table, cells in tables:
        settings: dict[str, list[Cell]] = {}
        for cell in cells:
            if known(cell.experiment) and not cell.finished:
                settings.setdefault(cell.column.id, []).append(cell)
        for own in settings.values():
            plain = min(own, key=lambda c: _place(c, table))
            for cell in own:
                if speeds.of(cell.experiment) is None:
                    new = (cell is not plain, bool(cell.absent), cell.experiment)
                    key = _key(cell.experiment)
                    found[key] = min(found.get(key, new), new, key=lambda one: one[:2])
    return [one for *_, one in sorted(found.values(), key=lambda one: one[:2])]


def _place(cell: Cell, table: Table) -> tuple[bool, bool]:
    return cell.experiment.method != "fedavg", cell.row.name != table.baseline


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
