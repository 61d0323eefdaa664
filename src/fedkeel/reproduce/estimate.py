"""Estimates of how long a table takes on this machine, from its runs or a short measurement.

A run in a setting gives its seconds per round. Without one, one client trains a few steps on random
numbers in the shape of the data, so the data need not be on this machine; the steps and evaluations
of the whole run are multiplied by these times. The estimate leaves out diagnostics, and the
server's work with many clients, so it is rough and shown with a "~".
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import torch

from fedkeel import config
from fedkeel.data.augment import named_transform
from fedkeel.data.dataset import Dataset, dataset
from fedkeel.data.federation import federation
from fedkeel.data.read.catalogue import SOURCES
from fedkeel.engine.prepared import Ingredients
from fedkeel.errors import FedkeelError, counted
from fedkeel.records.files import parse_json, write_text
from fedkeel.records.folder import RunFolder
from fedkeel.report.formatting import format_duration
from fedkeel.reproduce.plan import CellKey, TableRun
from fedkeel.reproduce.table import PaperTable
from fedkeel.runner.ingredients import task
from fedkeel.runner.prepare import prepare
from fedkeel.runner.start import start

SPEED_FILE = "speed.json"
"""File beside the runs with the measured speeds."""

_TEST_EXAMPLES = 50
"""Number of generated test examples."""

_MAX_BATCH_ENTRIES = 100_000
"""Largest number of entries in a generated batch; the time of larger ones is extrapolated."""

_SLOW_STEP = 0.1
"""Seconds of a step from which on compiled steps are not tried."""

_MAX_ROWS = 40
"""Largest number of rounds of a run that are read."""


@dataclass(frozen=True)
class Speed:
    """The measured speed of a method on a model, in seconds.

    Args:
        step: for a local step.
        example: for a test example.
        round: for everything else in a round.
    """

    step: float
    example: float
    round: float


@dataclass(frozen=True)
class DataSize:
    """The size of an experiment's data: examples, shape of one input, classes and clients."""

    train: int
    test: int
    shape: tuple[int, ...]
    classes: int
    clients: int


class SpeedStore:
    """Measured speeds, stored in a file in the folder of all tables."""

    def __init__(self, out: Path) -> None:
        self._file = out / SPEED_FILE
        self._speeds: dict[str, Speed] = {}
        with suppress(OSError, ValueError, TypeError, AttributeError):  # all are measured anew
            stored = parse_json(self._file.read_bytes())
            self._speeds = {key: Speed(*map(float, speed)) for key, speed in stored.items()}

    def get(self, experiment: config.Experiment) -> Speed | None:
        """Return the speed of an experiment; None where it was not measured."""
        return self._speeds.get(_speed_key(experiment))

    def measure(self, experiment: config.Experiment) -> None:
        """Measure and store a speed; nothing is stored where the short run fails."""
        try:
            self._speeds[_speed_key(experiment)] = measure_speed(experiment)
        except FedkeelError:
            return
        stored = {key: astuple(speed) for key, speed in self._speeds.items()}
        with suppress(OSError):  # the list shows the times all the same
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._file, json.dumps(stored, indent=1) + "\n")


def _speed_key(experiment: config.Experiment) -> str:
    """Return a digest of everything that decides the speed."""
    local = experiment.local.model_dump(include={"batch_size", "momentum", "weight_decay"})
    is_known = has_known_size(experiment)
    shape = data_size(experiment).shape if is_known else experiment.data.source
    model = experiment.model.model_dump(mode="json")
    method = re.sub(r"\([^)]*\)", "", experiment.method)  # values of parameters cost nothing
    parts = [method, model, local, shape, experiment.data.augment]
    text = json.dumps(parts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def has_known_size(experiment: config.Experiment) -> bool:
    """Return whether the size of the data is known without reading them."""
    return all(name in SOURCES for name in experiment.data.sources)


def data_size(experiment: config.Experiment) -> DataSize:
    """Return the size of known data sets."""
    data, partition = experiment.data, experiment.partition
    sources = [SOURCES[name] for name in data.sources]
    classes = max(source.classes for source in sources)
    clients_by_kind = {"source": len(sources), "source_class": len(sources) * classes}
    return DataSize(
        train=sum(min(source.train, data.limit or source.train) for source in sources),
        test=sum(source.test for source in sources),
        shape=data.shape or sources[0].shape,
        classes=classes,
        clients=partition.clients or clients_by_kind.get(partition.kind, 1),
    )


def measure_speed(experiment: config.Experiment) -> Speed:
    """Train one client for a few steps on generated data.

    Small models are also tried with compiled steps, which ``engine.kind = "auto"`` may use.

    Raises:
        FedkeelError: the short run fails.
        KeyboardInterrupt: an interrupt ended the short run.
    """
    speed = _measure(experiment, "sequential")
    if speed.step > _SLOW_STEP:
        return speed
    compiled = _measure(experiment, "vectorized")
    return min(speed, compiled, key=lambda measured: measured.step)


def _measure(experiment: config.Experiment, kind: str) -> Speed:
    """Return the speed of the second of two rounds, with one client of two batches.

    The seconds are those of a core that does nothing else.
    """
    data, local = data_size(experiment), experiment.local
    per_client = max(data.train // data.clients, 2)
    batch = per_client if local.batch_size == "all" else min(local.batch_size, per_client)
    generated_batch = min(batch, max(_MAX_BATCH_ENTRIES // math.prod(data.shape), 2))
    random = np.random.default_rng(0)
    train = _generated(random, min(per_client, 2 * generated_batch), data)
    values = experiment.model_dump(include=set(config.Run.model_fields), exclude_none=True)
    work = {"steps": 2} if local.steps else {"epochs": 1}
    values.pop("diagnose")  # the speed of a method on a model is that of its plain rounds
    values["local"] = {**values["local"], **work, "batch_size": generated_batch}
    values |= {"rounds": 2, "cohort": {"clients": 1}, "evaluation": {"every": 1}}
    values["engine"] = {"kind": kind, "workers": 1, "dtype": experiment.engine.dtype}
    values["engine"] |= {"parallel_clients": 1} if kind == "vectorized" else {}
    clients = federation(train, [np.arange(len(train))])
    ingredients = Ingredients(
        task(experiment, train),
        lambda seed: clients,
        _generated(random, _TEST_EXAMPLES, data),
        experiment.model.name,
        named_transform(experiment.data.augment),
    )
    prepared = prepare(config.build(config.Run, values, "a short run"), ingredients)
    wall, busy = time.perf_counter(), time.process_time()
    result = start(prepared)
    share = min((time.process_time() - busy) / (time.perf_counter() - wall), 1.0)
    if result.record.status != "finished":
        raise KeyboardInterrupt
    row = result.rows[-1]  # it also evaluates the client's training examples
    training = sum(s for phase, s in row.seconds.items() if phase.startswith("train"))
    testing = row.seconds.get("evaluation", 0.0)
    rest = sum(row.seconds.values()) - training - testing
    step = training / max(row.steps, 1) * batch / generated_batch
    return Speed(share * step, share * testing / (_TEST_EXAMPLES + len(train)), share * rest)


def _generated(random: np.random.Generator, count: int, data: DataSize) -> Dataset:
    x = torch.from_numpy(random.normal(size=(count, *data.shape)).astype(np.float32))
    return dataset(x, np.arange(count) % data.classes, classes=data.classes)


def run_seconds(experiment: config.Experiment, speed: Speed) -> float:
    """Return the seconds of a whole run in one process."""
    data, local = data_size(experiment), experiment.local
    per_client = data.train / data.clients
    batch = per_client if local.batch_size == "all" else local.batch_size
    steps = local.steps or (local.epochs or 1) * math.ceil(per_client / batch)
    training = experiment.cohort.size(data.clients) * steps * speed.step
    testing = data.test * speed.example / experiment.evaluation.every
    return experiment.rounds * (training + testing + speed.round)


@dataclass(frozen=True)
class TimeEstimate:
    """The seconds of a table's runs in one process.

    Args:
        total: seconds of all runs, finished or not.
        left: seconds of the runs that are not finished.
        guessed: number of runs whose time is that of another method in the same setting.
        unknown: number of runs without any estimate; they add nothing to the seconds.
    """

    total: float
    left: float
    guessed: int
    unknown: int


def estimate(runs: Sequence[TableRun], speeds: SpeedStore) -> TimeEstimate:
    """Return the seconds of runs in one process; a run that several cells share counts once."""
    unique = list({run.folder: run for run in runs}.values())
    seconds: dict[CellKey, float] = {}
    for run in unique:
        if (per_round := _seconds_per_round(run.folder)) is not None:
            seconds[run.key] = per_round * run.experiment.rounds
    for run in unique:
        if has_known_size(run.experiment) and (speed := speeds.get(run.experiment)):
            seconds.setdefault(run.key, run_seconds(run.experiment, speed))
    fastest: dict[str, float] = {}  # by column
    for key, of_run in seconds.items():
        fastest[key.column] = min(of_run, fastest.get(key.column, of_run))
    total = left = 0.0
    guessed = unknown = 0
    for run in unique:
        of_run = seconds.get(run.key, fastest.get(run.column.id, -1.0))
        if of_run < 0:
            unknown += 1
            continue
        guessed += run.key not in seconds
        total += of_run
        left += 0.0 if run.is_finished else of_run
    return TimeEstimate(total, left, guessed, unknown)


def what_is_left(runs: Sequence[TableRun], jobs: int) -> str:
    """Return how many runs are left, and how long they take, as text."""
    left = len({run.folder for run in runs if not run.absent and not run.is_finished})
    seconds = seconds_left(runs)
    time = "" if seconds is None else f", about {format_duration(seconds / jobs)}"
    return f"{counted(left, 'run')} left{time}"


def seconds_left(runs: Sequence[TableRun]) -> float | None:
    """Return the seconds that the rest of unfinished runs takes in one process.

    A run without a round of its own takes as long as the mean of those that have some; None where
    none has.
    """
    speeds: list[float] = []
    rounds = 0  # of runs without a speed
    total = 0.0
    for run in {run.folder: run for run in runs if not run.absent and not run.is_finished}.values():
        per_round = _seconds_per_round(run.folder)
        if per_round is None:
            rounds += run.experiment.rounds
        else:
            speeds.append(per_round)
            done = RunFolder(run.folder).rows()[-1].round
            total += per_round * max(run.experiment.rounds - done, 0)
    if rounds and not speeds:
        speeds = [s for run in runs if (s := _seconds_per_round(run.folder)) is not None]
        if not speeds:
            return None
    return total + (rounds * sum(speeds) / len(speeds) if rounds else 0.0)


def experiments_to_measure(
    tables: Sequence[tuple[PaperTable, Sequence[TableRun]]], speeds: SpeedStore
) -> list[config.Experiment]:
    """Return an experiment for each speed that is not measured.

    The first ones are one plain method of each setting; among them those whose data are here.
    """
    by_key: dict[str, tuple[bool, bool, config.Experiment]] = {}
    for table, runs in tables:
        columns: dict[str, list[TableRun]] = {}
        for run in runs:
            if has_known_size(run.experiment) and not run.is_finished:
                columns.setdefault(run.column.id, []).append(run)
        for of_column in columns.values():
            plain = min(
                of_column,
                key=lambda r: (r.experiment.method != "fedavg", r.row.name != table.baseline),
            )
            for run in of_column:
                if speeds.get(run.experiment) is None:
                    entry = (run is not plain, bool(run.absent), run.experiment)
                    key = _speed_key(run.experiment)
                    by_key[key] = min(by_key.get(key, entry), entry, key=lambda e: e[:2])
    return [experiment for *_, experiment in sorted(by_key.values(), key=lambda e: e[:2])]


def measure_speeds(
    experiments: Sequence[config.Experiment], speeds: SpeedStore, seconds: float | None
) -> None:
    """Measure speeds, and begin no further one after so many seconds; None measures all."""
    begin = time.monotonic()
    for experiment in experiments:
        if seconds is not None and time.monotonic() - begin > seconds:
            return
        speeds.measure(experiment)


def _seconds_per_round(folder: Path) -> float | None:
    """Return the mean over the first rounds of a run; None where it has none."""
    run = RunFolder(folder)
    if not run.exists():
        return None
    rows = [row for row in run.rows(_MAX_ROWS) if row.round > 0]
    return sum(sum(row.seconds.values()) for row in rows) / len(rows) if rows else None
